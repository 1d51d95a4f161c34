"""Conditionals whose branches vary over different axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers._core import _branches


def test_cond_aligns_branches_that_vary_over_different_axes():
  def step(x):
    total = jax.lax.psum(x, AXIS)
    return _branches.cond(total[0] > 0, lambda: (x, total), lambda shapes: (total, x), "test", "it")

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS))
  own, total = jax.jit(mapped)(np.arange(4, dtype=np.float32))
  np.testing.assert_array_equal(own, np.arange(4.0))
  np.testing.assert_array_equal(total, np.full(4, 6.0))


def test_cond_predicate_that_differs_between_shards_is_error():
  def step(x):
    return _branches.cond(x[0] > 1, lambda: jax.lax.psum(x, AXIS), lambda shapes: x, "test", "x[0]")

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS))
  with pytest.raises(ValueError, match=r"test: x\[0\] differs from shard to shard over \['w'\]"):
    jax.jit(mapped)(np.arange(4, dtype=np.float32))


@pytest.mark.parametrize("staged", [jax.jit, jax.checkpoint])
def test_apply_if_derivative_through_staged_vmap_is_error(staged):
  tx = ow.elastic_average(optax.sgd(0.1), AXIS, communication_period=1, moving_rate=0.2)
  state = tx.init(jnp.ones(2))
  axes = ow.worker_axes(state)

  def step(rate):
    update = jax.vmap(lambda p, s: tx.update(rate * p, s, p)[0], in_axes=(0, axes), axis_name=AXIS)
    return update(jnp.ones((2, 2)), ow.stack_workers(state, 2)).sum()

  np.testing.assert_allclose(jax.jit(jax.grad(step))(1.0), -0.32, rtol=1e-5)
  with pytest.raises(ValueError, match=r"Take the derivative first, jit\(grad\(step\)\)"):
    jax.grad(staged(step))(1.0)
