"""Weights by age: gates, bins and counters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close

import optax_wrappers as ow


@pytest.mark.parametrize("dtype", ["uint32", "uint8", "int16"])
def test_computed_at_of_other_integer_dtype_is_clipped_to_int32(dtype):
  """A uint32 beyond the largest int32 is in the future, and so fresh; it is no negative number."""
  tx = ow.drop_stale(optax.sgd(1.0), 0)
  one, update = np.float32(1), jax.jit(tx.update)
  state = tx.init(one).replace(step=np.int32(3))
  assert int(update(one, state, computed_at=np.array(np.iinfo(dtype).max, dtype))[1].step) == 4
  assert int(update(one, state, computed_at=np.array(2, dtype))[1].dropped) == 1


def test_computed_at_in_future_has_age_zero():
  tx = ow.staleness_aware(optax.identity(), ow.staleness.inverse(), max_staleness=1)
  state = tx.init(np.zeros(2, np.float32))
  updates, state = jax.jit(tx.update)(np.ones(2, np.float32), state, computed_at=10**6)
  assert_close(updates, np.ones(2))
  assert int(ow.get_state(state, ow.states.StalenessState).histogram[0]) == 1


def test_staleness_weight_negative_at_late_age_is_drop():
  tx = ow.staleness_aware(optax.sgd(1.0), lambda age: 1 - age.astype(jnp.float32) / 100)
  state = tx.init(np.zeros(2, np.float32))
  update = jax.jit(lambda state, age: tx.update(jnp.ones(2), state, computed_at=state.step - age))
  for age, expected in ((50, -0.5), (200, 0.0)):
    updates, state = update(state, np.int32(age))
    assert_close(updates, np.full(2, expected))
  assert int(state.dropped) == 1


@pytest.mark.parametrize(
  "weight", [lambda age: 1 - age, lambda age: 0 * age / (age - 3), lambda age: 1 / age]
)
def test_staleness_weight_negative_or_not_finite_in_init_is_error(weight):
  tx = ow.staleness_aware(optax.sgd(0.1), weight)
  with pytest.raises(ValueError, match="weight must be finite and at least 0 for every age"):
    jax.jit(tx.init)(np.zeros(2, np.float32))
