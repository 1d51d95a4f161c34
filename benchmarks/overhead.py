"""What the wrappers cost where there is nothing to gain, against the same by hand, on 8 simulated devices.

Milliseconds of a step, time to trace and compile a tree of 1,000 leaves, and the collectives of the compiled programs.
"""

import argparse
import os
import statistics
import time

if __name__ == "__main__":
  os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
  os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import machine
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

AXIS = "shards"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
parser.add_argument("--out", default="overhead.png", help="the picture (default: %(default)s)")


def by_hand(inner):
  def update(updates, state, params=None):
    return inner.update(jax.tree.map(lambda g: lax.pmean(g, AXIS), updates), state, params)

  return optax.GradientTransformation(inner.init, update)


def pairs():
  """Name to (wrapped, by hand, extra args, whether shards are mapped)."""
  adam = optax.adam(1e-3)
  return {
    "cross_shard": (ow.cross_shard(adam, AXIS), by_hand(adam), {}, True),
    "gather_towers(2)": (ow.gather_towers(adam, 2), optax.MultiSteps(adam, 2), {}, False),
    "drop_stale": (ow.drop_stale(adam, 10**6), adam, {"computed_at": 0}, False),
    "elastic_average(10**6)": (ow.elastic_average(adam, None, communication_period=10**6), adam, {}, False),
    "clip_variables, inside": (ow.clip_variables(adam, 1e6, axes=0), adam, {}, False),
  }


def make(tx, extra, mapped, params, grads):
  """The lowered step, and the state to start it with."""
  tx = optax.with_extra_args_support(
    tx if isinstance(tx, optax.GradientTransformation) else tx.gradient_transformation()
  )

  def step(params, state, grads):
    if mapped:
      grads = jax.tree.map(lambda g: g[0], grads)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  if mapped:
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P())
    grads = jax.tree.map(lambda g: jnp.stack([g] * 8), grads)
  state = tx.init(params)
  return (lambda: jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads)), (params, state), grads


def tree(layers, width):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(width, width)), jnp.float32) for _ in range(layers)]


def main():
  args = parser.parse_args()
  print(machine.describe())
  rows, found = [], {}
  for name, (wrapped, hand, extra, mapped) in pairs().items():
    params, grads = tree(20, 256), tree(20, 256)
    calls, counts = {}, {}
    for kind, tx, more in (("wrapped", wrapped, extra), ("by hand", hand, {})):
      lower, start, placed = make(tx, more, mapped, params, grads)
      compiled = lower().compile()
      counts[kind] = len(ow.compiled_collectives(compiled))
      carried = list(jax.tree.map(jnp.copy, start))

      def call(compiled=compiled, carried=carried, placed=placed):
        carried[:] = compiled(*carried, placed)
        jax.block_until_ready(carried)

      calls[kind] = call
    times = machine.paired(calls, args.rounds, inner=5)
    low, middle, high = found[name] = machine.ratios(times, "by hand")["wrapped"]

    small, compile_times = tree(1000, 4), {}
    for kind, tx, more in (("by hand", hand, {}), ("wrapped", wrapped, extra)):
      begin = time.perf_counter()
      make(tx, more, mapped, small, small)[0]().compile()
      compile_times[kind] = time.perf_counter() - begin
    rows.append(
      [
        name,
        f"{statistics.median(times['wrapped']):.2f}",
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        f"{compile_times['wrapped'] / compile_times['by hand']:.2f}",
        f"{counts['wrapped']}, {counts['by hand']}",
      ]
    )
  machine.show(
    f"20 matrices of 256 x 256 with Adam, {args.rounds} paired rounds; compile time of 1,000 leaves",
    ["wrapper", "ms", "times by hand (range)", "compile time, times", "collectives, by hand"],
    rows,
  )
  machine.draw("time of a step, times the same by hand", found, args.out)


if __name__ == "__main__":
  main()
