"""Whether the communication of a round overlaps with computation, counted in a TPU's program.

The program is compiled ahead of time for a TPU topology, which needs the `libtpu` package but no
TPU. The instructions between the start and the end of the all-reduce overlap with it; the matrix
products among them are counted. This is done first for a round as one program (`local_round`), then
for as many steps scheduled by the counter (`update` in a scan), where the synchronization is inside
a separate loop.
"""

import argparse
import functools
import glob
import os
import re
import tempfile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--topology", default="v6e:2x2", help="default: %(default)s")
parser.add_argument("--width", type=int, default=2048, help="of two layers (default: %(default)s)")
parser.add_argument("--period", type=int, default=10, help="steps a round (default: %(default)s)")
parser.add_argument("--delay", type=int, default=5, help="of them hidden (default: %(default)s)")

# A compiler option for asynchronous all-reduces.
OPTIONS = {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"}


def programs(args, devices):
  """The two rounds, lowered for these devices."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  from jax.sharding import NamedSharding, PartitionSpec

  import optax_wrappers as ow

  mesh = jax.sharding.Mesh(np.array(devices), ("workers",))
  schedule = {"communication_period": args.period, "delay": args.delay}
  tx = ow.diloco(optax.sgd(0.1), "workers", **schedule)

  def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"]) ** 2)

  def step(params, state, x, **decided):
    updates, state = tx.update(jax.grad(loss)(params, x), state, params, **decided)
    return optax.apply_updates(params, updates), state

  def by_counter(params, state, batches):
    def one(carry, x):
      return step(*carry, x), None

    return jax.lax.scan(one, (params, state), batches)[0]

  matrix = jax.ShapeDtypeStruct((args.width, args.width), jnp.float32)
  params = {"first": matrix, "second": matrix}
  state = jax.eval_shape(tx.init, params)

  def laid_out(tree, specs):
    tree = jax.eval_shape(lambda x: ow.stack_workers(x, len(devices)), tree)
    return jax.tree.map(lambda x, s: x.update(sharding=NamedSharding(mesh, s)), tree, specs)

  own = PartitionSpec("workers")
  batch = jax.ShapeDtypeStruct((args.period, 2 * args.width, args.width), jnp.float32)
  arguments = [
    laid_out(params, dict.fromkeys(params, own)),
    laid_out(state, ow.specs(state, workers="workers")),
    laid_out(batch, own),
  ]
  rounds = {
    "local_round": ow.local_round(functools.partial(step, exchange=False), tx),
    "update by the counter": by_counter,
  }
  for name, round_ in rounds.items():
    yield name, jax.jit(ow.map_workers(round_, "workers", mesh=mesh)).lower(*arguments)


def tpu_devices(topology):
  """The devices of a topology to compile for; no TPU is used."""
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  from jax.experimental import topologies

  return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


class Program:
  """The text of a scheduled program."""

  def __init__(self, text):
    parts = re.split(r"\n(?=%|ENTRY)", text)
    self.bodies = {re.match(r"(?:ENTRY )?%?([\w.\-]+)", part)[1]: part for part in parts}

  def products(self, name):
    """Matrix products in a computation, those in a loop counted as often as it runs."""
    return sum(map(self._products_of, self.bodies[name].splitlines()[1:]))

  def _products_of(self, line):
    if re.search(r" (dot|convolution)\(", line):
      return 1
    inside = re.findall(r"(?:calls|body)=%?([\w.\-]+)", line)
    turns = self.turns(line)
    return (1 if turns is None else turns) * sum(map(self.products, inside))

  def turns(self, line):
    """The trip count of a loop that counts to a constant; None if unknown, or for anything else."""
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    bounds = re.findall(r" constant\((\d+)\)", self.bodies[condition[1]]) if condition else []
    return int(bounds[0]) if bounds else None

  def branches(self, line):
    """The branch computations of a conditional; none for any other line."""
    many = re.search(r"branch_computations=\{([^}]*)\}", line)
    if many:
      return re.findall(r"[\w.\-]+", many[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)

  def hidden(self, name):
    """For each all-reduce of more than a scalar, the matrix products between its start and its
    end."""
    found, under_way = [], {}
    for line in self.bodies[name].splitlines()[1:]:
      result = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\S+)", line)
      if not result:
        continue
      key = re.sub(r"-(start|update|done)$", "", result[1])
      if re.search(r" async-start\(| all-reduce-start\(", line):
        if "all-reduce" in key:
          under_way[key] = 0
      elif re.search(r" async-done\(| all-reduce-done\(", line):
        found += [under_way.pop(key)] if key in under_way else []
      elif re.search(r" all-reduce\(", line):
        found += [] if "[]" in result[2] else [0]
      else:
        count = self._products_of(line)
        under_way = {key: value + count for key, value in under_way.items()}
        for body in [*re.findall(r"body=%?([\w.\-]+)", line), *self.branches(line)]:
          found += self.hidden(body)
    return found


def main():
  args = parser.parse_args()
  os.environ["JAX_PLATFORMS"] = "cpu"
  import machine

  try:
    devices = tpu_devices(args.topology)
  except Exception as error:
    first_line = str(error).splitlines()[0]
    print(f"not run: no compiler for a TPU here ({first_line}). pip install libtpu")
    return
  rows = []
  for name, lowered in programs(args, devices):
    with tempfile.TemporaryDirectory() as folder:
      lowered.compile(compiler_options=OPTIONS | {"xla_dump_to": folder})
      # The text of the compiled object cannot represent an asynchronous all-reduce of several
      # arrays.
      (path,) = glob.glob(f"{folder}/*.after_optimizations.txt")
      with open(path) as file:
        program = Program(file.read())
    (entry,) = (name for name, body in program.bodies.items() if body.startswith("ENTRY"))
    hidden = program.hidden(entry)
    rows.append([name, str(program.products(entry)), ", ".join(map(str, hidden)) or "none"])
  machine.show(
    f"{args.topology}, {len(devices)} workers, {args.period} steps a round, delay {args.delay}",
    ["a round", "matrix products", "of them between start and end of the all-reduce"],
    rows,
  )


if __name__ == "__main__":
  main()
