"""Sixteen workers, five kinds of averaging and none: gossip compared with an all-reduce.

scikit-learn's digits, distributed at random or sorted by label, so that each worker sees only one
or two digits. SGD with momentum, with the best of eight learning rates for each kind. The loss is
that of the mean of all workers, over all training images.
"""

import argparse
import functools

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow

WORKERS, BATCH = 16, 8
RATES = 0.4 * 2.0 ** jnp.arange(-4, 4)
WAYS = {
  "cross_shard": lambda sgd: ow.cross_shard(sgd, "workers"),
  "local_steps, every 4th": lambda sgd: ow.local_steps(sgd, "workers", communication_period=4),
  "gossip, exponential": lambda sgd: ow.contrib.gossip_average(sgd, "workers"),
  "gossip, combine first": lambda sgd: ow.contrib.gossip_average(
    sgd, "workers", order="combine_first"
  ),
  "gossip, ring": lambda sgd: ow.contrib.gossip_average(sgd, "workers", topology="ring"),
  "each alone": lambda sgd: ow.local_steps(sgd, "workers", communication_period=10**6),
}
# Bytes that a worker sends per step, relative to the parameters: an all-reduce, one neighbor, two.
SENT = [2 * (WORKERS - 1) / WORKERS, 2 * (WORKERS - 1) / WORKERS / 4, 1, 1, 2, 0]


def train(rate, make, parts, steps):
  """Returns the loss of the workers' mean after the steps, and their distance from it."""
  tx = make(optax.sgd(rate, momentum=0.9))
  x, y = parts

  def step(held, rows):
    params, state = held
    grad = jax.grad(digits.cross_entropy)(params, x_own[rows], y_own[rows])
    updates, state = tx.update(grad, state, params)
    return (optax.apply_updates(params, updates), state), None

  def worker(x, y, rows):
    nonlocal x_own, y_own
    x_own, y_own = x, y
    params = digits.init()
    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), rows)
    return jax.lax.pmean(params, "workers"), ow.contrib.consensus_distance(params, "workers")

  x_own = y_own = None
  rows = jax.random.randint(jax.random.key(1), (WORKERS, steps, BATCH), 0, x.shape[1])
  means, distances = jax.vmap(worker, axis_name="workers")(x, y, rows)
  mean = jax.tree.map(lambda leaf: leaf[0], means)
  return digits.cross_entropy(mean, x.reshape(-1, 64), y.reshape(-1)), distances[0]


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--steps", type=int, default=200, help="(default: %(default)s)")
  args = parser.parse_args()
  x, _, y, _ = digits.load()
  length = len(x) // WORKERS
  orders = {
    "at random": np.random.default_rng(0).permutation(len(x)),
    "sorted by label": np.argsort(y, kind="stable"),
  }
  best = {}
  print(f"{'loss of the mean model':26}{'sent a step':>14}" + "".join(f"{n:>28}" for n in orders))
  for (way, make), sent in zip(WAYS.items(), SENT):
    run = functools.partial(train, make=make, steps=args.steps)
    runs = jax.jit(lambda parts, run=run: jax.lax.map(lambda rate: run(rate, parts=parts), RATES))
    shown = []
    for name, order in orders.items():
      rows = order[: WORKERS * length].reshape(WORKERS, length)
      losses, distances = runs((jnp.asarray(x[rows]), jnp.asarray(y[rows])))
      found = int(jnp.nanargmin(losses))
      best[way, name] = float(losses[found])
      shown.append(f"{losses[found]:.3f} at {RATES[found]:.2f}, apart {distances[found]:.2f}")
    print(f"{way:26}{f'{sent:.2f} x params':>14}" + "".join(f"{text:>28}" for text in shown))
  for name in orders:
    assert best["gossip, exponential", name] < best["gossip, ring", name] * 1.2
    assert best["gossip, exponential", name] < best["each alone", name]


if __name__ == "__main__":
  main()
