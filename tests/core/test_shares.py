"""Arrays that are divided over shards, against NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_wrappers._core import _shares

shares = jax.jit(_shares.shares, static_argnums=1)

whole = jax.jit(_shares.whole, static_argnums=1)

SHAPES = [(6,), (4, 6), (6, 4), (3, 8), (5, 7), (1, 12), (2, 3, 4), (1, 1), (), (0, 3)]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("shape", SHAPES)
def test_shares_are_strides_and_whole_restores_array(shape, num_shares):
  x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + 1
  rows = shares(x, num_shares)
  assert rows.shape == (num_shares, *_shares.share_shape(shape, num_shares))
  np.testing.assert_array_equal(whole(rows, shape), x)
  d = _shares.divided_dimension(shape, num_shares)
  for i, row in enumerate(np.asarray(rows)):
    if d is None:
      np.testing.assert_array_equal(row, x)
      continue
    strided = x.take(range(i, shape[d], num_shares), d)
    np.testing.assert_array_equal(row.take(range(strided.shape[d]), d), strided)
    assert not row.take(range(strided.shape[d], row.shape[d]), d).any()  # zeros fill it up


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (3, 24), (24, 3), (5, 8, 12), (4, 4)])
def test_shares_of_part_equal_part_of_shares(shape):
  """Along any dimension that lies over devices, as far as a share can lie over as many."""
  x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
  seen = 0
  for num_shares, parts, over in itertools.product((2, 3, 4), (2, 4), range(len(shape))):
    of_whole = np.asarray(shares(x, num_shares))
    if shape[over] % parts or of_whole.shape[over + 1] % parts:
      continue  # no NamedSharding would lay it out
    if all(n % num_shares for n in shape):
      continue  # filled up with zeros, which `_center.Divided` refuses where parts are cut by hand
    seen += 1
    expected = np.split(of_whole, parts, over + 1)
    for part, own in zip(np.split(x, parts, over), expected, strict=True):
      np.testing.assert_array_equal(shares(part, num_shares), own)
  assert seen


def test_shares_errors_too_short_for_devices_that_shard_it():
  """On an Explicit mesh JAX cannot lay a share of one or three columns over two devices."""
  mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])

  def x(size):
    return jnp.ones((3, size), device=NamedSharding(mesh, P(None, "d")))

  assert _shares.shares(x(4), 2).shape == (2, 3, 2)
  for size in (2, 6):
    with pytest.raises(ValueError, match="dimension 1 is sharded over 2 devices of an Explicit"):
      _shares.shares(x(size), 2)
