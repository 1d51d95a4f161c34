"""A data-parallel Adam step on two processes over gloo: leaf by leaf, one flat buffer, cross_shard,
PyTorch DDP.

    python benchmarks/data_parallel.py [--torch-python PYTHON]

The JAX steps take turns in the same processes, round by round; ratios are of one round each. Adam
alone and the all-reduce of cross_shard alone tell what XLA's compute and jaxlib's gloo take. DDP
runs in processes of its own right after, with the interpreter given, if it has PyTorch; its step
includes a backward pass that yields the same gradients, which is what it hides its communication
behind.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

# Layers, width, and whether they are a network with biases, whose backward pass is in the step.
SIZES = ((100, 64, False), (40, 128, False), (4, 1024, False), (100, 64, True))
BATCH = 32
PROCESSES = 2

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
  "--rounds", type=int, default=100, help="paired rounds a size (default: %(default)s)"
)
parser.add_argument("--out", default="data_parallel.png", help="the picture (default: %(default)s)")
parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
parser.add_argument("--coordinator", help=argparse.SUPPRESS)
parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)


def size_name(layers, width, is_network):
  return f"{layers} x {width}" + (", backward pass" if is_network else "")


def jax_rank(args):
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
  import jax
  import jax.numpy as jnp
  import machine
  import numpy as np
  import optax
  from jax import lax
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import optax_wrappers as ow

  jax.distributed.initialize(
    args.coordinator, PROCESSES, args.rank, coordinator_bind_address=args.coordinator
  )
  mesh = jax.make_mesh((PROCESSES,), ("shards",), axis_types=(AxisType.Auto,))
  adam = optax.adam(1e-3)

  def leafwise(grads):
    return jax.tree.map(lambda g: lax.pmean(g, "shards"), grads)

  def flat(grads):
    buffer, unravel = jax.flatten_util.ravel_pytree(grads)
    return unravel(lax.pmean(buffer, "shards"))

  def by_hand(reduce):
    return optax.GradientTransformation(adam.init, lambda g, s, p: adam.update(reduce(g), s, p))

  steps = {
    "leafwise": by_hand(leafwise),
    "flat": by_hand(flat),
    "cross_shard": ow.cross_shard(adam, "shards"),
    "Adam alone": adam,
    "all-reduce alone": ow.all_reduce("shards"),
  }

  def loss(params, batch):
    for w, b in params:
      batch = jnp.tanh(batch @ w + b)
    return jnp.mean(batch**2)

  def own_gradient(params, given, is_network):
    if not is_network:
      return [g[0] for g in given]
    return jax.grad(loss)(ow.per_shard(params, "shards"), given[0][0])

  result = {}
  for layers, width, is_network in SIZES:
    rng = np.random.default_rng(args.rank)
    shapes = [(1, BATCH, width)] if is_network else [(1, width, width)] * layers
    local = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    by_shard = NamedSharding(mesh, P("shards"))
    given = [jax.make_array_from_process_local_data(by_shard, x) for x in local]
    calls = {}
    for name, tx in steps.items():

      def step(params, state, given, tx=tx, name=name, is_network=is_network):
        grads = own_gradient(params, given, is_network)
        updates, state = tx.update(grads, state, params)
        moved = updates if name == "all-reduce alone" else optax.apply_updates(params, updates)
        return moved, state

      def init(tx=tx, layers=layers, width=width, is_network=is_network):
        params = [jnp.zeros((width, width))] * layers
        if is_network:
          keys = jax.random.split(jax.random.key(0), layers)
          draw = jax.vmap(lambda key: jax.random.normal(key, (width, width)) / width**0.5)
          params = [(w, jnp.zeros(width)) for w in draw(keys)]
        return params, tx.init(params)

      carried = list(jax.jit(init, out_shardings=NamedSharding(mesh, P()))())
      specs = {"in_specs": (P(), P(), P("shards")), "out_specs": P()}
      # Shards come apart in that one.
      mapped = jax.shard_map(step, mesh=mesh, **specs, check_vma=name != "Adam alone")
      compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*carried, given).compile()

      def call(compiled=compiled, carried=carried, given=given):
        carried[:] = compiled(*carried, given)
        jax.block_until_ready(carried)

      calls[name] = call
    result[size_name(layers, width, is_network)] = machine.paired(calls, args.rounds)
  if args.rank == 0:
    print(json.dumps(result), flush=True)


def torch_rank(args):
  import torch
  import torch.distributed as dist

  # PyTorch's own store listens on every interface; a file does not.
  meeting = os.path.join(tempfile.gettempdir(), f"ranks-{args.coordinator.rpartition(':')[2]}")
  os.environ["GLOO_SOCKET_IFNAME"] = "lo"
  torch.set_num_threads(1)
  dist.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=args.rank, world_size=PROCESSES
  )
  result = {}
  for layers, width, is_network in SIZES:
    torch.manual_seed(args.rank)
    model = torch.nn.ParameterList(
      [torch.nn.Parameter(torch.zeros(width, width)) for _ in range(layers)]
    )

    class Model(torch.nn.Module):
      def __init__(self, parameters):
        super().__init__()
        self.weights = parameters

      def forward(self, grads):
        return sum((w * g).sum() for w, g in zip(self.weights, grads))

    def block(width=width):
      return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())

    class Network(torch.nn.Sequential):
      def forward(self, batch):
        return (super().forward(batch[0]) ** 2).mean()

    given = [torch.randn(width, width) for _ in range(layers)]
    if is_network:
      given = [torch.randn(BATCH, width)]
    module = Network(*(block() for _ in range(layers))) if is_network else Model(model)
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)
    times = []
    for i in range(args.rounds + 2):
      start_time = time.perf_counter()
      optimizer.zero_grad()
      ddp(given).backward()
      optimizer.step()
      if i >= 2:
        times.append(1e3 * (time.perf_counter() - start_time))
    result[size_name(layers, width, is_network)] = {"PyTorch DDP": times}
  if args.rank == 0:
    print(json.dumps(result), flush=True)
  dist.destroy_process_group()


def main():
  args = parser.parse_args()
  if args.rank is not None:
    return torch_rank(args) if args.torch else jax_rank(args)

  import machine

  print(machine.describe())
  runs = machine.start(__file__, PROCESSES)
  if args.torch_python:
    for size, times in machine.start(
      __file__, PROCESSES, "--torch", interpreter=args.torch_python
    ).items():
      runs[size].update(times)
  rows, found = [], {}
  for size, times in runs.items():
    times["both alone"] = [
      sum(pair) for pair in zip(times["Adam alone"], times["all-reduce alone"])
    ]
    best = min(("leafwise", "flat"), key=lambda name: statistics.median(times[name]))
    for name, (low, middle, high) in machine.ratios(times, best).items():
      found[f"{size}, {name}"] = (low, middle, high)
      ms = f"{statistics.median(times[name]):.1f}"
      rows.append([size, name, ms, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
  machine.show(
    f"A data-parallel Adam step on {PROCESSES} processes over gloo, {args.rounds} rounds",
    ["layers x width", "step", "ms, median", "times the faster by hand", "range"],
    rows,
  )
  machine.draw("time of a step, times the faster by hand", found, args.out)


if __name__ == "__main__":
  main()
