"""A data-parallel Adam step on several processes over gloo: leaf by leaf, one flat buffer,
cross_shard, and PyTorch DDP.

    python benchmarks/data_parallel.py [--torch-python PYTHON]

Every step includes a backward pass. The JAX steps are interleaved in the same processes, and ratios
compare steps of one round. Adam alone and the all-reduce of cross_shard alone show the shares of
XLA's computation and of jaxlib's gloo. DDP runs the same networks right after in separate
processes, with the given Python, if it has PyTorch.
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
import time

# Layers and widths of networks; each layer is a matrix and, unless it is the only one, a bias.
NETWORKS = {
  "1 leaf": (1, 1024),
  "8 leaves": (4, 512),
  "100 leaves": (50, 64),
  "200 leaves": (100, 64),
  "1,000 leaves": (500, 16),
}
# Embeddings of 52 MB and 12 blocks: 147 leaves, 78 MB.
VOCABULARY, MODEL, HIDDEN, HEADS, BLOCKS = 51_200, 256, 512, 4, 12
TREES = (*NETWORKS, "transformer")
BATCH, LENGTH = 32, 16

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
  "--rounds", type=int, default=100, help="paired rounds a size (default: %(default)s)"
)
parser.add_argument("--processes", type=int, default=2, help="(default: %(default)s)")
parser.add_argument(
  "--trees", nargs="+", choices=TREES, default=TREES, metavar="TREE", help=", ".join(TREES)
)
parser.add_argument("--out", default="data_parallel.png", help="the picture (default: %(default)s)")
parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
parser.add_argument("--coordinator", help=argparse.SUPPRESS)
parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)


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
    args.coordinator, args.processes, args.rank, coordinator_bind_address=args.coordinator
  )
  mesh = jax.make_mesh((args.processes,), ("shards",), axis_types=(AxisType.Auto,))
  replicated = NamedSharding(mesh, P())
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

  # With NumPy: compiling a program that draws 500 matrices takes minutes.
  rng = np.random.default_rng(0)  # equal in all processes

  def drawn(rows, columns):
    return np.float32(rng.normal(size=(rows, columns)) / rows**0.5)

  def network(layers, width):
    def init():
      matrices = [drawn(width, width) for _ in range(layers)]
      return [(w, np.zeros(width, np.float32)) if layers > 1 else (w,) for w in matrices]

    def loss(params, batch):
      for w, *b in params:
        batch = jnp.tanh(sum(b, batch @ w))
      return jnp.mean(batch**2)

    return init, loss, np.float32(np.random.default_rng(args.rank).normal(size=(BATCH, width)))

  def transformer():
    shapes = {"attend": (MODEL, 3 * MODEL), "out": (MODEL, MODEL)}
    shapes |= {"up": (MODEL, HIDDEN), "down": (HIDDEN, MODEL)}

    def block():
      matrices = {
        name: (drawn(*shape), np.zeros(shape[1], np.float32)) for name, shape in shapes.items()
      }
      flat = np.ones(MODEL, np.float32), np.zeros(MODEL, np.float32)
      return matrices | {"norm": flat, "norm2": flat}

    def init():
      return {"embedding": drawn(VOCABULARY, MODEL)} | {
        f"block {i}": block() for i in range(BLOCKS)
      }

    def dense(x, pair):
      return x @ pair[0] + pair[1]

    def normed(x, pair):
      x = x - x.mean(-1, keepdims=True)
      return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * pair[0] + pair[1]

    def loss(params, tokens):
      x = params["embedding"][tokens]
      for i in range(BLOCKS):
        own = params[f"block {i}"]
        parts = dense(x, own["attend"]).reshape(*x.shape[:2], 3, HEADS, -1)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(parts, 2, 0))
        x = normed(x + dense(attended.reshape(x.shape), own["out"]), own["norm"])
        x = normed(x + dense(jax.nn.relu(dense(x, own["up"])), own["down"]), own["norm2"])
      return jnp.mean(x[..., 0] ** 2)

    tokens = np.random.default_rng(args.rank).integers(0, VOCABULARY, (BATCH // 8, LENGTH))
    return init, loss, tokens.astype(np.int32)

  result = {}
  for tree in args.trees:
    init_params, loss, batch = network(*NETWORKS[tree]) if tree in NETWORKS else transformer()
    by_shard = NamedSharding(mesh, P("shards"))
    given = jax.make_array_from_process_local_data(by_shard, batch[None])
    start, calls = init_params(), {}
    for name, tx in steps.items():

      def step(params, state, given, tx=tx, name=name, loss=loss):
        grads = jax.grad(loss)(ow.per_shard(params, "shards"), given[0])
        updates, state = tx.update(grads, state, params)
        moved = updates if name == "all-reduce alone" else optax.apply_updates(params, updates)
        return moved, state

      params = jax.tree.map(
        functools.partial(jax.make_array_from_process_local_data, replicated), start
      )
      carried = [params, jax.jit(tx.init, out_shardings=replicated)(params)]
      specs = {"in_specs": (P(), P(), P("shards")), "out_specs": P()}
      # Shards diverge in that one.
      mapped = jax.shard_map(step, mesh=mesh, **specs, check_vma=name != "Adam alone")
      compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*carried, given).compile()

      def call(compiled=compiled, carried=carried, given=given):
        carried[:] = compiled(*carried, given)
        jax.block_until_ready(carried)

      calls[name] = call
    result[tree] = machine.paired(calls, args.rounds)
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
    "gloo", init_method=f"file://{meeting}", rank=args.rank, world_size=args.processes
  )

  class Network(torch.nn.Sequential):
    def forward(self, batch):
      return (super().forward(batch) ** 2).mean()

  class Transformer(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.embedding = torch.nn.Embedding(VOCABULARY, MODEL)
      options = {"dropout": 0.0, "batch_first": True}
      block = torch.nn.TransformerEncoderLayer(MODEL, HEADS, HIDDEN, **options)
      self.blocks = torch.nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False)

    def forward(self, tokens):
      return (self.blocks(self.embedding(tokens))[..., 0] ** 2).mean()

  result = {}
  for tree in args.trees:
    torch.manual_seed(args.rank)
    if tree in NETWORKS:
      layers, width = NETWORKS[tree]
      linear = [torch.nn.Linear(width, width, bias=layers > 1) for _ in range(layers)]
      module = Network(*(part for one in linear for part in (one, torch.nn.Tanh())))
      batch = torch.randn(BATCH, width)
    else:
      module, batch = Transformer(), torch.randint(0, VOCABULARY, (BATCH // 8, LENGTH))
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)
    times = []
    for i in range(args.rounds + 2):
      start_time = time.perf_counter()
      optimizer.zero_grad()
      ddp(batch).backward()
      optimizer.step()
      if i >= 2:
        times.append(1e3 * (time.perf_counter() - start_time))
    result[tree] = {"PyTorch DDP": times}
  if args.rank == 0:
    print(json.dumps(result), flush=True)
  dist.destroy_process_group()


def measure(processes, rounds, trees=TREES, torch_python=None):
  """Milliseconds of each step, for each tree."""
  import machine

  options = ["--processes", str(processes), "--rounds", str(rounds), "--trees", *trees]
  runs = machine.start(__file__, processes, *options)
  if torch_python:
    of_torch = machine.start(__file__, processes, *options, "--torch", interpreter=torch_python)
    for tree, times in of_torch.items():
      runs[tree].update(times)
  return runs


def better_by_hand(times):
  return min(("leafwise", "flat"), key=lambda name: statistics.median(times[name]))


def main():
  args = parser.parse_args()
  if args.rank is not None:
    return torch_rank(args) if args.torch else jax_rank(args)

  import machine

  print(machine.describe())
  rows, found = [], {}
  for tree, times in measure(args.processes, args.rounds, args.trees, args.torch_python).items():
    for name, (low, middle, high) in machine.ratios(times, better_by_hand(times)).items():
      found[f"{tree}, {name}"] = (low, middle, high)
      ms = f"{statistics.median(times[name]):.1f}"
      rows.append([tree, name, ms, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
  machine.show(
    f"A data-parallel Adam step on {args.processes} processes over gloo, {args.rounds} rounds",
    ["tree", "step", "ms, median", "times the faster by hand", "range"],
    rows,
  )
  machine.draw("time of a step, times the faster by hand", found, args.out)


if __name__ == "__main__":
  main()
