"""Checkpoint and resume with Orbax: a stopped run continues bit for bit as if it had not been
stopped."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import tempfile

import digits
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import optax_wrappers as ow

WORKERS = 4


def main():
  x_train, x_test, y_train, y_test = digits.load()
  tx = ow.elastic_average(optax.adam(5e-3), "workers", communication_period=7, moving_rate=0.2)

  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = digits.init()
  state = ow.stack_workers(tx.init(params), WORKERS)
  params = ow.stack_workers(params, WORKERS)
  mapped = jax.jit(ow.map_workers(step, "workers"))

  def train(params, state, batches):
    for x, y in batches:
      params, state = mapped(params, state, x.reshape(WORKERS, -1, 64), y.reshape(WORKERS, -1))
    return params, state

  batches = list(digits.batches(x_train, y_train, size=128, steps=150))
  unbroken = train(params, state, batches)

  with tempfile.TemporaryDirectory() as directory, ocp.StandardCheckpointer() as checkpointer:
    stopped = train(params, state, batches[:60])  # in the middle of a period
    checkpointer.save(f"{directory}/step_60", stopped)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(
      f"{directory}/step_60", jax.tree.map(ocp.utils.to_shape_dtype_struct, stopped)
    )
  resumed = train(*restored, batches[60:])

  same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), unbroken, resumed)
  accuracy = digits.accuracy(ow.center_params(resumed), x_test, y_test)
  print(
    f"test accuracy {accuracy:.3f}; the same bits as an unbroken run: {all(jax.tree.leaves(same))}"
  )
  assert all(jax.tree.leaves(same))
  assert accuracy > 0.93


if __name__ == "__main__":
  main()
