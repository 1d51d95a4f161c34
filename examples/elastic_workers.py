"""Elastic averaging: 8 workers, each with different digits, synchronize with a center every 10th
step."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import digits
import jax
import numpy as np
import optax

import optax_wrappers as ow

WORKERS, PERIOD = 8, 10


def main():
  x_train, x_test, y_train, y_test = digits.load()
  tx = ow.elastic_average(
    optax.sgd(0.1, momentum=0.9, nesterov=True),
    "workers",
    communication_period=PERIOD,
    moving_rate=0.1,
  )

  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = digits.init()
  state = ow.stack_workers(tx.init(params), WORKERS)
  params = ow.stack_workers(params, WORKERS)
  train = jax.jit(ow.map_workers(step, "workers"))

  own_rows = np.array_split(np.arange(len(x_train)), WORKERS)
  rng = np.random.default_rng(0)
  for _ in range(200):
    rows = np.stack([rng.choice(own, 32) for own in own_rows])
    params, state = train(params, state, x_train[rows], y_train[rows])

  center = digits.accuracy(ow.center_params(state), x_test, y_test)
  workers = [
    digits.accuracy(jax.tree.map(lambda p, i=i: p[i], params), x_test, y_test)
    for i in range(WORKERS)
  ]
  print(f"test accuracy {center:.3f} of the center, {np.mean(workers):.3f} of a worker on average")
  assert center > 0.95


if __name__ == "__main__":
  main()
