"""The time saved over gloo by workers that synchronize once per round: milliseconds per step on two
processes, against the communication period.

    python benchmarks/communication_period.py [--out PICTURE] [--torch-python PYTHON]

Steps are timed in runs of 64, so that every period includes its synchronizations; the longest step
of a run is one with a synchronization. All-reduce (cross_shard) and plain SGD, which sends nothing,
are interleaved with them in the same processes. "by the caller" is update(exchange=True or False),
two programs. With a Python that has PyTorch, its PostLocalSGDOptimizer runs right after, and
LocalSGD and DiLoCo of torchft if installed, which agree on participants and on success before and
after every synchronization.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import statistics
import tempfile
import time

PROCESSES, LAYERS, WIDTH, RUN = 2, 40, 128, 64
PERIODS = (1, 4, 16, 64)

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
  "--rounds", type=int, default=7, help="runs of each step (default: %(default)s)"
)
parser.add_argument(
  "--out", default="communication_period.png", help="the picture (default: %(default)s)"
)
parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
parser.add_argument("--coordinator", help=argparse.SUPPRESS)


def rank(args):
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import optax_wrappers as ow

  jax.distributed.initialize(
    args.coordinator, PROCESSES, args.rank, coordinator_bind_address=args.coordinator
  )
  mesh = jax.make_mesh((PROCESSES,), ("workers",), axis_types=(AxisType.Auto,))
  sgd = optax.sgd(1e-3, momentum=0.9)
  # The optimizer, whether its parameters are shared, and the period if the caller decides.
  steps = {"none": (sgd, False, None), "cross_shard": (ow.cross_shard(sgd, "workers"), True, None)}
  ways = {
    "elastic_average": functools.partial(ow.elastic_average, moving_rate=0.3),
    "local_steps": ow.local_steps,
    "diloco": ow.diloco,
  }
  for name, wrap in ways.items():
    for period in PERIODS:
      tx = wrap(sgd, "workers", communication_period=period)
      steps[f"{name}, period {period}"] = (tx, False, None)
      steps[f"{name} by the caller, period {period}"] = (tx, False, period)
  tx = ways["elastic_average"](sgd, "workers", communication_period=16, fragments=16)
  steps["elastic_average, period 16, 16 fragments"] = (tx, False, None)

  rng = np.random.default_rng(args.rank)
  by_worker = NamedSharding(mesh, P("workers"))
  local = [rng.normal(size=(1, WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
  grads = [jax.make_array_from_process_local_data(by_worker, g) for g in local]
  programs, carried = {}, {}
  for name, (tx, shared, period) in steps.items():

    def init(tx=tx, shared=shared):
      params = [jnp.zeros((WIDTH, WIDTH))] * LAYERS
      return ow.stack_workers((params, tx.init(params)), PROCESSES, replicated=shared)

    abstract = jax.eval_shape(init)
    specs = (
      P() if shared else P("workers"),
      ow.specs(abstract[1], workers="workers", replicated=shared),
    )
    axes = (None if shared else 0, ow.worker_axes(abstract[1], replicated=shared))

    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    carried[name] = jax.jit(init, out_shardings=layout)()

    def compiled(tx=tx, axes=axes, layout=layout, start=carried[name], **decided):
      def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **decided)
        return optax.apply_updates(params, updates), state

      mapped = jax.vmap(step, (*axes, 0), axes, axis_name="workers", spmd_axis_name="workers")
      placed = jax.jit(
        mapped, in_shardings=(*layout, by_worker), out_shardings=layout, donate_argnums=(0, 1)
      )
      return placed.lower(*start, grads).compile()

    # The program of each step of a run.
    if period is None:
      programs[name] = [compiled()] * RUN
    else:
      alone, together = compiled(exchange=False), compiled(exchange=True)
      programs[name] = [together if (i + 1) % period == 0 else alone for i in range(RUN)]

  result = {name: [] for name in steps}
  for i in range(args.rounds + 1):
    for name, run in programs.items():
      times = []
      for program in run:
        begin = time.perf_counter()
        carried[name] = jax.block_until_ready(program(*carried[name], grads))
        times.append(1e3 * (time.perf_counter() - begin))
      if i:
        result[name].append((statistics.fmean(times), max(times)))
  if args.rank == 0:
    print(json.dumps(result), flush=True)


def torch_rank(args):
  import torch
  import torch.distributed as dist
  from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
  from torch.distributed.optim import PostLocalSGDOptimizer

  # PyTorch's own store listens on every interface; a file does not.
  meeting = os.path.join(tempfile.gettempdir(), f"ranks-{args.coordinator.rpartition(':')[2]}")
  os.environ["GLOO_SOCKET_IFNAME"] = "lo"
  torch.set_num_threads(1)
  dist.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=args.rank, world_size=PROCESSES
  )

  def timed(optimizer):
    runs = []
    for _ in range(args.rounds + 1):
      times = []
      for _ in range(RUN):
        begin = time.perf_counter()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - begin))
      runs.append((statistics.fmean(times), max(times)))
    return runs[1:]

  def model_and_sgd():
    params = torch.nn.ParameterList(
      [torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(LAYERS)]
    )
    for p in params:
      p.grad = torch.randn(WIDTH, WIDTH)
    return params, torch.optim.SGD(params.parameters(), 1e-3, momentum=0.9)

  result = {}
  for period in PERIODS:
    _, sgd = model_and_sgd()
    averager = PeriodicModelAverager(period, warmup_steps=0)
    result[f"PyTorch PostLocalSGD, period {period}"] = timed(PostLocalSGDOptimizer(sgd, averager))
  if importlib.util.find_spec("torchft"):
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    lighthouse = (
      LighthouseServer("127.0.0.1:0", PROCESSES, join_timeout_ms=1000) if args.rank == 0 else None
    )
    address = [lighthouse and lighthouse.address()]
    dist.broadcast_object_list(address)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own_group = {"rank": 0, "world_size": 1, "store_addr": "127.0.0.1", "store_port": store.port}
    for name, period in itertools.product(("LocalSGD", "DiLoCo"), PERIODS):
      params, sgd = model_and_sgd()
      manager = Manager(
        ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=PROCESSES,
        use_async_quorum=False,
        lighthouse_addr=address[0],
        replica_id=f"{name}-{period}-{args.rank}",
        hostname="127.0.0.1",
        init_sync=False,
        **own_group,
      )
      outer = torch.optim.SGD(params.parameters(), 0.7, momentum=0.9, nesterov=True)
      way = (
        LocalSGD(manager, params, sgd, period)
        if name == "LocalSGD"
        else DiLoCo(manager, [params], sgd, outer, period)
      )
      with way:
        result[f"torchft {name}, period {period}"] = timed(sgd)
      manager.shutdown(wait=False)
      dist.barrier()
  if args.rank == 0:
    print(json.dumps(result), flush=True)
  dist.destroy_process_group()


def measure(rounds, torch_python=None):
  """For each step, the mean and the longest milliseconds of every run."""
  import machine

  options = ["--rounds", str(rounds)]
  runs = machine.start(__file__, PROCESSES, *options)
  if torch_python:
    runs.update(machine.start(__file__, PROCESSES, *options, "--torch", interpreter=torch_python))
  return runs


def main():
  args = parser.parse_args()
  if args.rank is not None:
    return torch_rank(args) if args.torch else rank(args)

  import machine
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  print(machine.describe())
  runs = measure(args.rounds, args.torch_python)
  mean = {name: [step for step, _ in run] for name, run in runs.items()}
  longest = {name: [longest for _, longest in run] for name, run in runs.items()}
  ratios = machine.ratios(mean, "cross_shard")
  machine.show(
    f"SGD on {LAYERS} matrices of {WIDTH} x {WIDTH}, {PROCESSES} processes over gloo,"
    f" {args.rounds} runs of {RUN}",
    ["step", "ms a step", "longest", "times cross_shard", "range"],
    [
      [
        name,
        f"{statistics.median(mean[name]):.2f}",
        f"{statistics.median(longest[name]):.2f}",
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
      ]
      for name, (low, middle, high) in ratios.items()
    ],
  )
  figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
  for way in ("elastic_average", "local_steps", "diloco", "local_steps by the caller"):
    times = [mean[f"{way}, period {period}"] for period in PERIODS]
    panel.plot(PERIODS, list(map(statistics.median, times)), "o-", label=way)
    panel.fill_between(PERIODS, list(map(min, times)), list(map(max, times)), alpha=0.2)
  for name, style in (("cross_shard", "--"), ("none", ":")):
    panel.axhline(statistics.median(mean[name]), linestyle=style, color="gray", label=name)
  panel.set(
    xscale="log", xlabel="communication period", ylabel="milliseconds a step", ylim=(0, None)
  )
  panel.set_xticks(PERIODS, PERIODS)
  panel.legend()
  figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
  main()
