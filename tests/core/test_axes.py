"""Names and sizes of axes."""

import jax
import numpy as np
from helpers import AXIS
from jax.sharding import PartitionSpec as P

from optax_wrappers._core import _axes


def test_axis_names_of_none_string_or_list_as_tuple():
  assert _axes.axis_names(None) == ()
  assert _axes.axis_names("a") == ("a",)
  assert _axes.axis_names(["a", "b"]) == ("a", "b")


def test_axis_of_size_one_counts_as_one_device():
  """Beside it leaves are packed, and slices summed, as on one device."""
  mesh = jax.make_mesh(
    (4, 1, 2), (AXIS, "one", "two"), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  seen = []

  def step(x):
    seen.append((_axes.num_free(x), *_axes.laid_out_beside([x], (AXIS,))))
    return x

  for axes in ({AXIS, "two"}, {AXIS}):
    jax.eval_shape(
      jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), axis_names=axes),
      np.arange(4, dtype=np.float32),
    )
  assert seen == [(1, False), (2, True)]


def test_axis_alone_in_sharded_vmap_is_that_of_workers():
  seen = []

  def step(x):
    seen.extend(_axes.laid_out_beside([x], (AXIS,)))
    return x

  for shape in ((4,), (2, 2)):
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, ("pod", "data")[: len(shape)], axis_types=kinds)
    with jax.set_mesh(mesh):
      jax.eval_shape(jax.vmap(step, axis_name=AXIS, spmd_axis_name="pod"), np.ones((4, 2)))
  assert seen == [False, True]
