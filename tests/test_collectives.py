"""What the compiled programs send, and how conditionals keep their types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AXIS, mesh_of
from jax.sharding import PartitionSpec as P

from optax_wrappers import _collectives


def test_axis_names():
  assert _collectives.axis_names(None) == ()
  assert _collectives.axis_names("a") == ("a",)
  assert _collectives.axis_names(["a", "b"]) == ("a", "b")


def test_cond_aligns_branches_that_vary_over_different_axes():
  def step(x):
    total = jax.lax.psum(x, AXIS)
    return _collectives.cond(total[0] > 0, lambda: (x, total), lambda shapes: (total, x), "test")

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS))
  own, total = jax.jit(mapped)(jnp.arange(4.0))
  np.testing.assert_array_equal(own, np.arange(4.0))
  np.testing.assert_array_equal(total, np.full(4, 6.0))


def test_cond_refuses_a_predicate_that_differs():
  def step(x):
    return _collectives.cond(x[0] > 1, lambda: jax.lax.psum(x, AXIS), lambda shapes: x, "test")

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS))
  with pytest.raises(ValueError, match=r"test: the state's step counter differs from shard to shard over \['w'\]"):
    jax.jit(mapped)(jnp.arange(4.0))


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_gather_is_in_index_order_and_replicated(check_vma):
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def step(x):
    return _collectives.all_gather(x[0], ("a", "b")), _collectives.axis_index(("a", "b"))[None]

  mapped = jax.shard_map(step, mesh=mesh, in_specs=P(("a", "b")), out_specs=(P(), P(("a", "b"))), check_vma=check_vma)
  gathered, index = jax.jit(mapped)(jnp.arange(8.0) ** 2)
  np.testing.assert_array_equal(gathered, np.arange(8.0) ** 2)
  np.testing.assert_array_equal(index, np.arange(8))


def test_group_psum_against_numpy():
  x = np.arange(16.0, dtype=np.float32).reshape(8, 2) ** 2
  groups = [[0, 7], [3, 1], [2, 4], [5, 6]]
  out = jax.vmap(lambda x: _collectives.group_psum(x, AXIS, groups), axis_name=AXIS)(x)
  for group in groups:
    for member in group:
      np.testing.assert_array_equal(out[member], x[group].sum(0))
