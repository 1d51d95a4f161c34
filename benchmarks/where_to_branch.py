"""Where to choose between a step with a synchronization and one without, and what each choice
costs.

In update, by the state's counter; by the caller, with two programs; or around the whole step,
including the addition of the updates, in lax.cond or in two loops that run at most once. Steps
without a synchronization are compared with bare Adam, which is timed twice: the ratio of the two is
noise.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import machine
import optax
from jax import lax
from overhead import ADAM, tree

import optax_wrappers as ow

PERIOD = 10**6
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=25, help="(default: %(default)s)")
parser.add_argument("--widths", type=int, nargs="+", default=[256, 512], help="of 20 matrices")
parser.add_argument("--out", default="where_to_branch.png", help="(default: %(default)s)")


def ways(tx):
  """From the name to a step; its arguments are parameters, state and gradients."""
  tx = optax.with_extra_args_support(tx)

  def whole(params, state, grads, **decided):
    updates, state = tx.update(grads, state, params, **decided)
    return optax.apply_updates(params, updates), state

  def is_turn(state):
    return (state.step + 1) % PERIOD == 0

  def in_cond(params, state, grads):
    steps = [lambda e=e: whole(params, state, grads, exchange=e) for e in (True, False)]
    return lax.cond(is_turn(state), *steps)

  def in_loops(params, state, grads):
    carried, turn = (params, state), is_turn(state)
    for runs, exchange in ((turn, True), (~turn, False)):

      def body(pair, exchange=exchange):
        return ~pair[0], whole(*pair[1], grads, exchange=exchange)

      _, carried = lax.while_loop(lambda pair: pair[0], body, (runs, carried))
    return carried

  return {
    "in update, by the counter": whole,
    "by the caller": lambda *args: whole(*args, exchange=False),
    "around the step, lax.cond": in_cond,
    "around the step, two loops": in_loops,
  }


def measure(width, rounds):
  """Milliseconds of each step, and its memory in addition to arguments, in trees."""

  def bare(params, state, grads):
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  steps = {"bare": (bare, ADAM), "bare, once more": (bare, ADAM)}
  for name in ("elastic_average", "diloco"):
    tx = getattr(ow, name)(ADAM, None, communication_period=PERIOD)
    steps |= {f"{name}, {way}": (step, tx) for way, step in ways(tx).items()}
  calls, held, params = {}, {}, tree(20, width)
  for name, (step, tx) in steps.items():
    carried = list(jax.tree.map(jnp.copy, (params, tx.init(params))))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carried, params).compile()
    held[name] = compiled.memory_analysis().temp_size_in_bytes / (20 * 4 * width**2)

    def call(compiled=compiled, carried=carried):
      carried[:] = compiled(*carried, params)
      jax.block_until_ready(carried)

    calls[name] = call
  return machine.paired(calls, rounds, inner=2), held


def main():
  args = parser.parse_args()
  print(machine.describe())
  rows, found = [], {}
  for width in args.widths:
    times, held = measure(width, args.rounds)
    for name, ratio in machine.ratios(times, "bare").items():
      found[f"{width}, {name}"] = ratio
      ms = f"{statistics.median(times[name]):.2f}"
      rows.append(
        [f"20 x {width} x {width}, {name}", ms, machine.spread(ratio), f"{held[name]:.1f}"]
      )
  machine.show(
    f"A step of Adam without an exchange, {args.rounds} paired rounds",
    ["where the choice stands", "ms", "times bare (range)", "trees held"],
    rows,
  )
  machine.draw("time of a step, times the bare one", found, args.out)


if __name__ == "__main__":
  main()
