"""The time saved by codecs between two processes on loopback, at full and at limited bandwidth.

    python benchmarks/compression.py [--rates none 1gbit 200mbit] [--torch-python PYTHON]

A step is a backward pass, `cross_shard` with each codec, and SGD with momentum; codecs are
interleaved in the same processes, round by round. Bytes are read from the counters of the network
interface. The rate is limited with `tc` on the loopback of a separate network namespace, which both
directions share; if the machine does not allow that, the script says so. PyTorch's DDP with its
hooks runs the same network in separate processes. Then each codec encodes and decodes entries on
one device, compared with the time to read them; with `--rates` and no rate, only this, also on an
accelerator (`--entries 134217728`).
"""

import argparse
import functools
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

LAYERS, WIDTH, BATCH = 8, 512, 32
RANK = 4
UNSHAPED = "none"

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--rounds", type=int, default=20, help="paired rounds (default: %(default)s)")
parser.add_argument(
  "--rates", nargs="*", default=[UNSHAPED, "1gbit", "200mbit"], help="of loopback, as tc has them"
)
parser.add_argument("--codecs", nargs="+", metavar="NAME", help="those of the table (default: all)")
parser.add_argument("--layers", type=int, default=LAYERS, help="matrices (default: %(default)s)")
parser.add_argument("--width", type=int, default=WIDTH, help="of each (default: %(default)s)")
parser.add_argument("--entries", type=int, default=2**20, help="to encode (default: %(default)s)")
parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
parser.add_argument("--out", default="compression.png", help="the picture (default: %(default)s)")
parser.add_argument("--json", action="store_true", help="print what an unshaped run measured")
parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
parser.add_argument("--coordinator", help=argparse.SUPPRESS)
parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)


def codecs(names=None):
  from optax_wrappers import codecs as c
  from optax_wrappers import contrib

  found = {
    "float32": None,
    "bfloat16": c.cast("bfloat16"),
    "8 bits": c.quantize(8),
    "float8": contrib.float8(),
    "4 bits": c.quantize(4),
    "signs": c.signs(),
    "top 1/64": c.top_k(1 / 64),
    "random 1/64": c.random_k(1 / 64),
    f"PowerSGD, rank {RANK}": contrib.power_sgd(RANK),
  }
  return {name: found[name] for name in names or found}


def sent_bytes():
  """The bytes sent over loopback so far."""
  for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
    if line.strip().startswith("lo:"):
      return int(line.split(":")[1].split()[8])
  raise RuntimeError("/proc/net/dev has no loopback interface")


def jax_rank(args):
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
  import jax
  import jax.numpy as jnp
  import machine
  import numpy as np
  import optax
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import optax_wrappers as ow

  jax.distributed.initialize(
    args.coordinator, 2, args.rank, coordinator_bind_address=args.coordinator
  )
  mesh = jax.make_mesh((2,), ("shards",), axis_types=(AxisType.Auto,))
  batch = np.random.default_rng(args.rank).normal(size=(1, BATCH, args.width)).astype(np.float32)
  batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("shards")), batch)

  def loss(params, batch):
    for w, b in params:
      batch = jnp.tanh(batch @ w + b)
    return jnp.mean(batch**2)

  def call_of(codec):
    tx = ow.cross_shard(optax.sgd(1e-3, 0.9), "shards", codec=codec)

    def init():
      keys = jax.random.split(jax.random.key(0), args.layers)
      draw = lambda key: jax.random.normal(key, (args.width,) * 2) / args.width**0.5  # noqa: E731
      params = [(draw(key), jnp.zeros(args.width)) for key in keys]
      return params, ow.stack_workers(tx.init(params), 2, replicated=True)

    _, state = jax.eval_shape(init)
    specs = P(), ow.specs(state, workers="shards", replicated=True)
    is_own = jax.tree.map(lambda spec: spec != P(), specs[1])

    def step(params, state, batch):
      state = jax.tree.map(lambda own, x: x[0] if own else x, is_own, state)
      grads = jax.grad(loss)(ow.per_shard(params, "shards"), batch[0])
      updates, state = tx.update(grads, state, params)
      state = jax.tree.map(lambda own, x: x[None] if own else x, is_own, state)
      return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("shards")), out_specs=specs)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    carried = list(jax.jit(init, out_shardings=shardings)())
    compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*carried, batch).compile()

    def call():
      carried[:] = compiled(*carried, batch)
      jax.block_until_ready(carried)

    return call

  calls = {name: call_of(codec) for name, codec in codecs(args.codecs).items()}
  times = machine.paired(calls, args.rounds)
  num_bytes = {}
  for name, call in calls.items():
    before, steps = sent_bytes(), 5
    for _ in range(steps):
      call()
    # Two processes send, and each counts the bytes up to the end of its own last step.
    num_bytes[name] = (sent_bytes() - before) / steps / 2
  if args.rank == 0:
    print(json.dumps({"times": times, "bytes": num_bytes}), flush=True)


def torch_rank(args):
  import torch
  import torch.distributed as dist
  from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

  # PyTorch's own store listens on every interface; a file does not.
  meeting = os.path.join(tempfile.gettempdir(), f"ranks-{args.coordinator.rpartition(':')[2]}")
  os.environ["GLOO_SOCKET_IFNAME"] = "lo"
  torch.set_num_threads(1)
  dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=args.rank, world_size=2)
  times = {}
  for name in ("DDP", "DDP, fp16 hook", f"DDP, PowerSGD hook, rank {RANK}"):
    torch.manual_seed(args.rank)
    layers = (torch.nn.Linear(args.width, args.width) for _ in range(args.layers))
    module = torch.nn.Sequential(*(part for one in layers for part in (one, torch.nn.Tanh())))
    # One bucket: with several, callbacks end in a different order on each rank, and gloo then
    # aborts the PowerSGD hook.
    ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1024)
    if "fp16" in name:
      ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if "PowerSGD" in name:
      state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=2
      )
      ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-3, momentum=0.9)
    batch, times[name] = torch.randn(BATCH, args.width), []
    for i in range(args.rounds + 4):
      start = time.perf_counter()
      optimizer.zero_grad()
      (ddp(batch) ** 2).mean().backward()
      optimizer.step()
      if i >= 4:
        times[name].append(1e3 * (time.perf_counter() - start))
  if args.rank == 0:
    print(json.dumps(times), flush=True)
  dist.destroy_process_group()


def _given(args):
  given = ["--rounds", args.rounds, "--layers", args.layers, "--width", args.width]
  given += ["--codecs", *args.codecs] if args.codecs else []
  return [str(one) for one in given]


def measure(args):
  """Milliseconds of each step, and bytes that a process sends per step."""
  import machine

  options = _given(args)
  found = machine.start(__file__, 2, *options)
  if args.torch_python:
    of_torch = machine.start(__file__, 2, *options, "--torch", interpreter=args.torch_python)
    found["times"].update(of_torch)
  return found


def at_rate(rate, args):
  """`measure` in a network namespace whose loopback has this rate; None if that is not allowed."""
  own = [sys.executable, os.path.abspath(__file__), "--json", *_given(args)]
  own += ["--torch-python", args.torch_python] if args.torch_python else []
  shape = f"tc qdisc add dev lo root tbf rate {rate} burst 512kb latency 200ms"
  shell = f"ip link set lo up && {shape} && exec {shlex.join(own)}"
  run = ["unshare", "--map-root-user", "--net", "sh", "-c", shell]
  try:
    done = subprocess.run(run, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError) as error:
    print(f"{rate}: not measured, {(getattr(error, 'stderr', '') or str(error))[-300:]}")
    return None
  return json.loads(done.stdout.splitlines()[-1])


def coding(rounds, entries):
  """Nanoseconds per entry to encode, to decode, and to read, on one device."""
  import jax
  import jax.numpy as jnp
  import machine

  from optax_wrappers.codecs import Codec

  x = jax.random.normal(jax.random.key(0), (entries,))

  def call_of(function, argument):
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(argument))

  calls = {"read once": call_of(jnp.sum, x)}
  for name, codec in codecs().items():
    if isinstance(codec, Codec):
      decode = functools.partial(codec.decode, n=entries)
      calls[f"{name}, encode"] = call_of(codec.encode, x)
      calls[f"{name}, decode"] = call_of(decode, codec.encode(x))
  return {
    name: 1e6 * statistics.median(times) / entries
    for name, times in machine.paired(calls, rounds).items()
  }


def main():
  args = parser.parse_args()
  if args.rank is not None:
    return torch_rank(args) if args.torch else jax_rank(args)
  if args.json:
    print(json.dumps(measure(args)))
    return None

  import machine

  print(machine.describe())
  pictured = {}
  for rate in args.rates:
    found = measure(args) if rate == UNSHAPED else at_rate(rate, args)
    if found is None:
      continue
    rows = []
    for name, (low, middle, high) in machine.ratios(found["times"], "float32").items():
      pictured[f"{rate}, {name}"] = low, middle, high
      sent = found["bytes"].get(name)
      ms = f"{statistics.median(found['times'][name]):.1f}"
      kb = f"{sent / 1e3:.0f}" if sent else ""
      rows.append([name, kb, ms, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    machine.show(
      f"A step of {args.layers} x {args.width} x {args.width} on 2 processes, loopback at"
      f" {'unlimited' if rate == UNSHAPED else rate}, {args.rounds} rounds",
      ["codec", "kB sent", "ms, median", "relative to float32", "range"],
      rows,
    )
  costs = coding(args.rounds, args.entries)
  read = costs.pop("read once")
  names = dict.fromkeys(name.rpartition(", ")[0] for name in costs)
  rows = []
  for name in names:
    encode, decode = costs[f"{name}, encode"], costs[f"{name}, decode"]
    rows.append([name, f"{encode:.3g}", f"{decode:.3g}", f"{(encode + decode) / read:.1f}"])
  machine.show(
    f"ns an entry on one device; to read it once takes {read:.3g}",
    ["codec", "encode", "decode", "both / reading"],
    rows,
  )
  if pictured:
    machine.draw("time of a step, times float32 at that rate", pictured, args.out)
  return None


if __name__ == "__main__":
  main()
