"""A batch that is too large for one device, in 8 towers: the same step with less memory."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow

TOWERS = 8


def make_step(tx):
  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(step)


def main():
  x_train, x_test, y_train, y_test = digits.load()
  whole, towers = optax.adam(5e-3), ow.gather_towers(optax.adam(5e-3), TOWERS)
  whole_step, tower_step = make_step(whole), make_step(towers)
  whole_params = tower_params = digits.init()
  whole_state, tower_state = whole.init(whole_params), towers.init(tower_params)

  for x, y in digits.batches(x_train, y_train, size=1024, steps=150):
    whole_params, whole_state = whole_step(whole_params, whole_state, x, y)
    for part_x, part_y in zip(np.split(x, TOWERS), np.split(y, TOWERS)):  # one call per tower
      tower_params, tower_state = tower_step(tower_params, tower_state, part_x, part_y)

  differences = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), whole_params, tower_params)
  difference = max(map(float, jax.tree.leaves(differences)))
  accuracy = digits.accuracy(tower_params, x_test, y_test)
  held = {
    name: step.lower(whole_params, state, x[:size], y[:size])
    .compile()
    .memory_analysis()
    .temp_size_in_bytes
    for name, step, state, size in (
      ("whole", whole_step, whole_state, 1024),
      ("tower", tower_step, tower_state, 1024 // TOWERS),
    )
  }
  print(f"test accuracy {accuracy:.3f}, largest difference from whole batches {difference:.1e}")
  print(
    f"held beside the arguments in a step: {held['whole']:,} bytes whole, {held['tower']:,} in"
    " towers"
  )
  assert accuracy > 0.95
  assert difference < 1e-2
  assert held["tower"] < held["whole"]


if __name__ == "__main__":
  main()
