"""Eager updates of local steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS
from local_steps_cases import steps_of

import optax_wrappers as ow


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_eager_worker_with_nan_starts_round_again(dtype, divided):
  """Three workers; the second comes back. Also with 64 bits and strict promotion."""
  with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("strict"):
    rule = ow.contrib.Eager(optax.sgd(1.0))
    options = {"communication_period": 1, "shard_center": divided}
    tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, **options)
    x = jnp.zeros((3, 3), dtype)
    state = ow.stack_workers(tx.init(x[0]), 3)
    update = jax.jit(ow.map_workers(tx.update, AXIS))
    found = []
    for grads in ([3.0, np.nan, 6.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
      updates, state = update(jnp.tile(jnp.asarray(grads, dtype)[:, None], 3), state, x)
      x = x + updates
      found.append(np.asarray(x)[:, 0])
    assert x.dtype == dtype
  # A third of the worker's own difference at once; then the mean of the participants, minus what
  # has counted before.
  np.testing.assert_allclose(found, [[-1.0, 0, -2], [-4.5, -4.5, -4.5], [-4.5, -4.5, -4.5]])


@pytest.mark.parametrize("resized", [([0, 3],), ([0, 1, 2, 3], 1)])
def test_eager_resize_workers_meet_at_same_params(resized):
  """The counted part of a difference is subtracted in the parts in which it counted."""
  rule = ow.contrib.Eager(optax.sgd(1.0))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  x, state = ow.stack_workers((jnp.zeros(1), tx.init(jnp.zeros(1))), 4)
  updates, state = update(jnp.array([[1.0], [2.0], [4.0], [8.0]]), state, x)
  x, state = ow.resize_workers((x + updates, state), *resized)
  updates, state = update(jnp.zeros_like(x), state, x)
  np.testing.assert_allclose(x + updates, np.full((len(x), 1), -3.75))


def test_eager_and_pairs_errors_participation_delay_and_ranges():
  rule = ow.contrib.Eager(optax.sgd(1.0))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  with pytest.raises(ValueError, match="Eager: there is no participation"):
    steps_of(tx, [[1.0, 0.0]], [[1.0, 1.0]])
  late = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=2, delay=1)
  with pytest.raises(NotImplementedError, match="Eager: this rule has no delay"):
    late.init(jnp.zeros(()))
  for options, what in (
    ({"momentum": 1.0}, "momentum"),
    ({"learning_rate": -1.0}, "learning_rate"),
    ({"consensus": 1.5}, "consensus"),
    ({"num_pairings": 0}, "num_pairings"),
  ):
    with pytest.raises(ValueError, match=f"Pairs: {what} must be"):
      ow.contrib.Pairs(**options)
  with pytest.raises(TypeError, match=r"Eager: outer must be an optax\.GradientTransformation"):
    ow.contrib.Eager(0.7)
