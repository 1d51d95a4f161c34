"""What a thousand compressed steps have sent and kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compress_cases import MANY, first_state, zeros
from helpers import AXIS

import optax_wrappers as ow


@pytest.mark.parametrize("name", MANY)
def test_feedback_sent_plus_residual_is_total_over_1000_steps(name):
  """Over 1,000 steps of changing weights, and what is kept does not grow."""
  tx = ow.all_reduce(AXIS, codec=MANY[name])
  state = first_state(tx, zeros({"w": (36, 32)}), 4)
  axes = ow.worker_axes(state, replicated=True)
  update = jax.vmap(
    lambda g, s, w: tx.update(g, s, weight=w), (0, axes, 0), (None, axes), axis_name=AXIS
  )

  def step(carried, given):
    (state, arrived), (grads, weights) = carried, given
    updates, state = update({"w": grads}, state, weights)
    return (state, arrived + updates["w"]), jnp.linalg.norm(state.compressed.residual["w"])

  @jax.jit
  def run(grads, weights):
    (last, arrived), norms = jax.lax.scan(step, (state, jnp.zeros((36, 32))), (grads, weights))
    kept = last.compressed.residual["w"].sum(0)
    if last.compressed.owner_residual is not None:
      rows = last.compressed.owner_residual["w"]
      kept = kept + ow._core._shares.whole(rows, (36, 32))
    return kept, arrived, norms

  rng = np.random.default_rng(0)
  grads = rng.normal(size=(1000, 4, 36, 32)) * np.array([1, 2, 4, 8])[:, None, None]
  weights = rng.integers(0, 4, (1000, 4))
  weights[:, 0] = 1
  wanted = np.einsum("tw,twij->ij", weights / weights.sum(1, keepdims=True), grads)
  kept, arrived, norms = map(np.asarray, run(np.float32(grads), np.float32(weights)))
  # Of sums that are about a hundred times the size of a step, in float32.
  np.testing.assert_allclose(arrived + kept, wanted, atol=0.02)
  assert np.abs(arrived).max() > 50
  assert norms[500:].max() < 1.5 * norms[100:500].max()
