"""The time of a step with each wrapper on the accelerators of this machine, one worker on each.

    JAX_PLATFORMS=cuda python benchmarks/step_time.py [--training-step] [--only WRAPPER ...]

The optimizers, the trees and the hand-written code are those of `accelerators.py`, which reads
their cost from the compiled programs. Here they run: a row and its base in turn, round by round,
from the same start. A step ends when its results are ready. The table also has the kilobytes that
kernels move, relative to the base. On one device nothing is sent, so a synchronization is only its
arithmetic.
"""

import argparse
import concurrent.futures
import time
import warnings

import accelerators
import jax
import jax.numpy as jnp
import machine
import numpy as np
from accelerators import LIMIT, PERIOD

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
  "--tree", nargs="+", choices=accelerators.TREES, default=["transformer"], metavar="TREE"
)
parser.add_argument("--training-step", action="store_true", help="a whole step of the transformer")
parser.add_argument("--only", nargs="+", metavar="WRAPPER", help="rows with these prefixes")
parser.add_argument("--rounds", type=int, default=10, help="of 10 steps (default: %(default)s)")
parser.set_defaults(fsdp=False, unchecked=False)  # which accelerators.py has as options
parser.add_argument("--threads", type=int, default=8, help="to compile (default: %(default)s)")


def starting(step, place, is_outside):
  """A function that makes parameters, state, and gradients or tokens.

  Args:
    is_outside: whether about half of the columns are outside the bound of `clip_variables`; they
      are far inside otherwise.
  """

  def one_worker():
    keys = dict(zip(place.params, jax.random.split(jax.random.key(0), len(place.params))))
    drawn = {k: jax.random.normal(keys[k], x.shape, x.dtype) for k, x in place.params.items()}
    share = 1.0 if is_outside else 0.1
    params = {k: x * share * LIMIT / x.shape[0] ** 0.5 for k, x in drawn.items()}
    given = jax.tree.map(lambda x: x[::-1], drawn)
    if place.batch is not None:
      given = jax.random.randint(jax.random.key(1), place.batch.shape, 0, 50304)
    return params, step.init(params), given

  def stacked():
    return jax.tree.map(
      lambda x, own: jnp.broadcast_to(x, (place.num_workers, *x.shape)) if own else x,
      one_worker(),
      step.own,
    )

  return jax.jit(stacked, out_shardings=jax.tree.map(lambda x: x.sharding, step.args))


def times_of(calls, rounds):
  """Milliseconds of each call's steps, as (round, step); a first round is not counted."""
  found = {name: [] for name in calls}
  for _ in range(rounds + 1):
    for name, (compiled, start) in calls.items():
      *carried, given = jax.block_until_ready(start())
      found[name].append([])
      for _ in range(PERIOD):
        begin = time.perf_counter()
        carried = jax.block_until_ready(compiled(*carried, given))
        found[name][-1].append(1e3 * (time.perf_counter() - begin))
  return {name: np.array(times[1:]) for name, times in found.items()}


def with_synchronization(name, row):
  """Which of the steps have a synchronization, or are the last call of the towers."""
  steps = np.arange(PERIOD)
  if row.num_calls > 1:
    return steps % row.num_calls == row.num_calls - 1
  by_counter = row.between is not None and not name.startswith("clip_variables")
  return (steps == PERIOD - 1) & by_counter


def ratio(mine, base):
  """Minimum, median and maximum of the rounds; "" without steps."""
  if not mine.shape[1]:
    return ""
  medians = {"mine": np.median(mine, 1), "base": np.median(base, 1)}
  return machine.spread(machine.ratios(medians, "base")["mine"])


def measure(args, place):
  """Yields of each row: name, ratios between and with a synchronization, estimates, base in ms."""
  rows = {n: row for n, row in accelerators.chosen_rows(args) if "shard_state" not in n}
  bases = {n: accelerators.bare if args.training_step else row.base for n, row in rows.items()}
  makes = {n: row.make for n, row in rows.items()} | {base: base for base in bases.values()}
  steps = {key: make(place) for key, make in makes.items()}
  # All programs reuse the kernels that autotuning chose for the first.
  first, *others = steps
  compiled = {first: steps[first].lower().compile()}
  with concurrent.futures.ThreadPoolExecutor(args.threads) as threads:
    lowered = [steps[key].lower() for key in others]
    compiled |= zip(others, threads.map(lambda one: one.compile(), lowered))
  costs = {key: accelerators.cost_of(one, "gpu") for key, one in compiled.items()}
  for name, row in rows.items():
    base, found = bases[name], []
    for is_outside in (False, True) if name.startswith("clip_variables") else (False,):
      calls = {
        key: (compiled[key], starting(steps[key], place, is_outside)) for key in (name, base)
      }
      found.append(times_of(calls, args.rounds))
    due = with_synchronization(name, row)
    # Hand-written code has its branch in the same steps, and the bare optimizer has none.
    due_of_base = np.ones(PERIOD, bool) if args.training_step else due
    between = ratio(found[0][name][:, ~due], found[0][base][:, ~due])
    last = ratio(found[0][name][:, due], found[0][base][:, due_of_base])
    if len(found) > 1:
      last = ratio(found[1][name], found[1][base])
    estimates = (
      f"{getattr(costs[name], what) / getattr(costs[base], what):.2f}"
      for what in ("between", "exchange")
    )
    yield name, between, last, *estimates, f"{np.median(found[0][base][:, ~due]):.2f}"


def main():
  args = parser.parse_args()
  warnings.filterwarnings("ignore")
  print(machine.describe())
  for tree in ["transformer"] if args.training_step else args.tree:
    place = accelerators.place_of(args, jax.devices(), tree, "float32", args.training_step)
    base = "bare Adam" if args.training_step else "hand-written code"
    print(f"\n{tree}, relative to {base} (range)\n")
    titles = "between synchronizations", "with one", "kB, between", "kB, with one", "base, ms"
    accelerators.print_titles("wrapper", *titles)
    for cells in measure(args, place):
      print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
  main()
