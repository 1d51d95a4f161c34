"""Two of eight shards send wrong gradients: compares reductions.

scikit-learn's digits, 200 steps of SGD, 16 examples per shard. The bad shards multiply their
gradients by -10, send NaNs, or send zeros. Prints the final training loss: the mean over the last
20 steps and the good shards.
"""

import argparse
import functools

import digits
import jax
import jax.numpy as jnp
import optax

import optax_wrappers as ow
from optax_wrappers import reductions

SHARDS, BAD, BATCH, RATE = 8, 2, 16, 0.3
RULES = {
  "mean": "mean",
  "median": reductions.median(),
  "trimmed_mean(2)": reductions.trimmed_mean(BAD),
  "krum(2)": reductions.krum(BAD),
  "krum(2, 4)": reductions.krum(BAD, 4),
  "geometric_median": reductions.geometric_median(),
}
FACTORS = {"sound": 1.0, "times -10": -10.0, "NaN": float("nan"), "zero": 0.0}


def train(rule, factors, steps, seed=0):
  """Returns losses [factors, steps] of the good shards; gradients of the others are multiplied."""
  tx = ow.cross_shard(optax.sgd(RATE), "shards", reduction=rule)
  x, _, y, _ = digits.load()
  x, y = jnp.asarray(x), jnp.asarray(y)
  rows = jax.random.randint(jax.random.key(seed), (steps, SHARDS, BATCH), 0, len(x))
  is_bad = jnp.arange(SHARDS) < BAD

  def shard(params, state, rows, is_bad, factor):
    loss, grads = jax.value_and_grad(digits.cross_entropy)(params, x[rows], y[rows])
    grads = jax.tree.map(lambda g: jnp.where(is_bad, factor, 1.0) * g, grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  shards = jax.vmap(shard, (None, None, 0, 0, None), axis_name="shards", out_axes=(None, None, 0))

  def step(factor, held, rows):
    *held, losses = shards(*held, rows, is_bad, factor)
    return held, losses[BAD:].mean()

  def run(factor):
    params = digits.init()
    return jax.lax.scan(functools.partial(step, factor), [params, tx.init(params)], rows)[1]

  return jax.jit(lambda factors: jax.lax.map(run, factors))(jnp.asarray(factors))


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=200, help="(default: %(default)s)")
  parser.add_argument("--seed", type=int, default=0, help="of the data (default: %(default)s)")
  args = parser.parse_args()
  print(f"{'loss at the end':20}" + "".join(f"{name:>12}" for name in FACTORS))
  ends = {}
  for name, rule in RULES.items():
    losses = train(rule, list(FACTORS.values()), args.steps, args.seed)
    ends[name] = losses[:, -20:].mean(1)
    print(f"{name:20}" + "".join(f"{end:12.3f}" for end in ends[name]))
  sound, scaled, nan, _ = ends.pop("mean")
  assert not scaled < 10 * sound  # the mean fails: it may also be NaN
  assert jnp.isnan(nan)
  # Two shards that send zeros agree with each other, and Krum requires nothing else.
  assert ends.pop("krum(2)")[:3].max() < 1.0
  assert max(found.max() for found in ends.values()) < 1.0


if __name__ == "__main__":
  main()
