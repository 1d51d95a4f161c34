"""The overhead of wrappers, compared with hand-written code, on 8 simulated devices.

Measures milliseconds per step, the time to trace and compile a tree of 1,000 leaves, and in the
compiled programs the collectives, the kernels, and the memory in addition to arguments, in trees.
On an accelerator: JAX_PLATFORMS=cuda python benchmarks/overhead.py
"""

import argparse
import os
import statistics
from typing import NamedTuple

if __name__ == "__main__":
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from projection_cost import clip_by_hand

import optax_wrappers as ow

AXIS = "shards"
TREE_BYTES = 20 * 256 * 256 * 4
parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
parser.add_argument("--only", default="", help="names that contain this")
parser.add_argument("--out", default="overhead.png", help="the picture (default: %(default)s)")


ADAM = optax.adam(1e-3)


def all_reduced():
  def update(updates, state, params):
    return ADAM.update(jax.tree.map(lambda g: lax.pmean(g, AXIS), updates), state, params)

  return optax.GradientTransformation(ADAM.init, update)


def dropping(max_staleness):
  def init(params):
    return jnp.int32(0), jnp.int32(0), ADAM.init(params)

  def update(updates, state, params, *, computed_at):
    step, num_dropped, inner = state
    fresh = step - computed_at <= max_staleness
    updates, new = ADAM.update(updates, inner, params)
    updates = jax.tree.map(lambda u: jnp.where(fresh, u, 0.0), updates)
    new = jax.tree.map(lambda a, b: jnp.where(fresh, a, b), new, inner)
    return updates, (step + fresh, num_dropped + ~fresh, new)

  return optax.GradientTransformationExtraArgs(init, update)


def pulled(period, alpha=0.05):
  def init(params):
    return jnp.int32(0), params, ADAM.init(params)

  def update(updates, state, params):
    step, center, inner = state
    updates, inner = ADAM.update(updates, inner, params)

    def exchange():
      pulls = jax.tree.map(lambda p, u, c: alpha * (p + u - c), params, updates, center)
      return jax.tree.map(jnp.subtract, updates, pulls), jax.tree.map(jnp.add, center, pulls)

    updates, center = lax.cond((step + 1) % period == 0, exchange, lambda: (updates, center))
    return updates, (step + 1, center, inner)

  return optax.GradientTransformation(init, update)


def diloco_by_hand(period):
  def init(params):
    return jnp.int32(0), params, jax.tree.map(jnp.zeros_like, params), ADAM.init(params)

  def update(updates, state, params):
    step, center, trace, inner = state
    updates, inner = ADAM.update(updates, inner, params)

    def exchange():
      away = jax.tree.map(lambda p, u, c: c - (p + u), params, updates, center)
      new_trace = jax.tree.map(lambda d, m: d + 0.9 * m, away, trace)
      new = jax.tree.map(lambda c, d, m: c - 0.7 * (d + 0.9 * m), center, away, new_trace)
      return jax.tree.map(jnp.subtract, new, params), new, new_trace

    updates, center, trace = lax.cond(
      (step + 1) % period == 0, exchange, lambda: (updates, center, trace)
    )
    return updates, (step + 1, center, trace, inner)

  return optax.GradientTransformation(init, update)


def pairs():
  """From the name to (wrapped, hand-written, extra args, whether shards are mapped)."""
  period = 10**6
  return {
    "cross_shard": (ow.cross_shard(ADAM, AXIS), all_reduced(), {}, True),
    "gather_towers(2)": (ow.gather_towers(ADAM, 2), optax.MultiSteps(ADAM, 2), {}, False),
    "drop_stale": (ow.drop_stale(ADAM, 10**6), dropping(10**6), {"computed_at": 0}, False),
    "elastic_average(10**6)": (
      ow.elastic_average(ADAM, None, communication_period=period),
      pulled(period),
      {},
      False,
    ),
    "diloco(10**6)": (
      ow.diloco(ADAM, None, communication_period=period),
      diloco_by_hand(period),
      {},
      False,
    ),
    "elastic_average, exchange=False": (
      ow.elastic_average(ADAM, None, communication_period=period),
      ADAM,
      {"exchange": False},
      False,
    ),
    "local_steps(10**6)": (
      ow.local_steps(ADAM, None, communication_period=period),
      ADAM,
      {},
      False,
    ),
    "diloco, exchange=False": (
      ow.diloco(ADAM, None, communication_period=period),
      ADAM,
      {"exchange": False},
      False,
    ),
    "clip_variables, inside": (
      ow.clip_variables(ADAM, 1e6, axes=0),
      clip_by_hand(ADAM, 1e6),
      {},
      False,
    ),
  }


def make(tx, extra, mapped, params, grads):
  """The lowered step, and its initial state."""
  tx = optax.with_extra_args_support(
    tx if isinstance(tx, optax.GradientTransformation) else tx.gradient_transformation()
  )

  def step(params, state, grads):
    if mapped:
      grads = jax.tree.map(lambda g: g[0], grads)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  if mapped:
    num_devices = jax.device_count()
    mesh = jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,))
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P())
    grads = jax.tree.map(lambda g: jnp.stack([g] * num_devices), grads)
  state = tx.init(params)
  return (
    (lambda: jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads)),
    (params, state),
    grads,
  )


def tree(layers, width):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(width, width)), jnp.float32) for _ in range(layers)]


def calls_of(kinds, mapped):
  """For each way, the step on 20 matrices, tracing and compiling 1,000 leaves, and the program."""
  steps, compilations, programs = {}, {}, {}
  small = tree(1000, 4)
  for kind, (tx, extra) in kinds.items():
    lower, start, placed = make(tx, extra, mapped, tree(20, 256), tree(20, 256))
    programs[kind] = compiled = lower().compile()
    carried = list(jax.tree.map(jnp.copy, start))

    def step(compiled=compiled, carried=carried, placed=placed):
      carried[:] = compiled(*carried, placed)
      jax.block_until_ready(carried)

    def trace_and_compile(tx=tx, extra=extra):
      make(tx, extra, mapped, small, small)[0]().compile()

    steps[kind], compilations[kind] = step, trace_and_compile
  return steps, compilations, programs


class Cost(NamedTuple):
  """The cost of a wrapper, compared with hand-written code or the bare optimizer.

  Attributes:
    ms: per step.
    times: the step's time divided by the other's; minimum, median and maximum.
    compiling: the time to trace and compile 1,000 leaves, divided by the other's.
    collectives: of both programs.
    kernels: of both programs.
    temporaries: memory in addition to arguments for both, in copies of the parameters.
  """

  ms: float
  times: tuple[float, float, float]
  compiling: float
  collectives: tuple[int, int]
  kernels: tuple[int, int]
  temporaries: tuple[float, float]


def measure(rounds, only=""):
  """The cost, by the name of the wrapper and of what it is compared with."""
  found = {}
  for name, (wrapped, hand, extra, mapped) in pairs().items():
    if only not in name:
      continue
    kinds = {"wrapped": (wrapped, extra)}
    if hand is not ADAM:
      kinds["by hand"] = (hand, extra)
    if not mapped:  # Adam alone does not reduce
      kinds["bare"] = (ADAM, {})
    steps, compilations, programs = calls_of(kinds, mapped)
    times = machine.paired(steps, rounds, inner=4)  # a whole number of towers' steps
    compile_times = machine.paired(compilations, 1, warm=False)
    texts = {kind: program.as_text() for kind, program in programs.items()}
    held = {kind: program.memory_analysis() for kind, program in programs.items()}
    for base in list(kinds)[1:]:
      both = "wrapped", base
      found[name, base] = Cost(
        statistics.median(times["wrapped"]),
        machine.ratios(times, base)["wrapped"],
        machine.ratios(compile_times, base)["wrapped"][1],
        tuple(len(ow.inspect.compiled_collectives(texts[kind])) for kind in both),
        tuple(texts[kind].count(" fusion(") for kind in both),
        tuple(held[kind].temp_size_in_bytes / TREE_BYTES for kind in both),
      )
  return found


def main():
  args = parser.parse_args()
  print(machine.describe())
  found = measure(args.rounds, args.only)
  machine.show(
    f"20 matrices of 256 x 256 with Adam, {args.rounds} paired rounds; tracing and compiling 1,000"
    " leaves",
    ["wrapper", "against", "ms", "times that (range)", "compile", "collectives", "kernels", "held"],
    [
      [
        *names,
        f"{cost.ms:.2f}",
        machine.spread(cost.times),
        f"{cost.compiling:.2f}",
        "{}, {}".format(*cost.collectives),
        "{}, {}".format(*cost.kernels),
        "{:.1f}, {:.1f}".format(*cost.temporaries),
      ]
      for names, cost in found.items()
    ],
  )
  drawn = {f"{name}, {base}": cost.times for (name, base), cost in found.items()}
  machine.draw("time of a step, times what it is against", drawn, args.out)


if __name__ == "__main__":
  main()
