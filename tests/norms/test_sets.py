"""The sets, against Keras, PyTorch and plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from projections_cases import WEIGHTS, projected, step_once

import optax_wrappers as ow
from optax_wrappers import projections


@pytest.mark.parametrize(
  "function",
  [
    optax.projections.projection_non_negative,
    functools.partial(optax.projections.projection_box, lower=-0.2, upper=0.3),
    functools.partial(optax.projections.projection_simplex, scale=2.0),
    functools.partial(optax.projections.projection_l2_ball, scale=1.5),
    functools.partial(optax.projections.projection_linf_ball, scale=0.3),
  ],
)
def test_projection_function_of_optax_matches_optax(function):
  w = WEIGHTS[1:3]
  with jax.numpy_dtype_promotion("standard"):
    expected = jax.jit(function)(w)
  assert_close(projected(function, {"w": w})["w"], expected, rtol=1e-5, atol=2e-6)


def test_l1_ball_sharded_in_shard_map_is_error():
  mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  tx = ow.project_variables(optax.identity(), projections.l1_ball(1.0), axis_name="a")
  mapped = jax.shard_map(
    functools.partial(step_once, tx), mesh=mesh, in_specs=P("a"), out_specs=P("a")
  )
  with pytest.raises(ValueError, match="l1_ball: the summed axes cannot be sharded"):
    jax.jit(mapped)(np.ones(4, np.float32))


@pytest.mark.parametrize(
  "projection",
  [
    projections.linf_ball(1.0),
    projections.l1_ball(1.0),
    projections.box(0, 1),
    projections.non_negative(),
    jnp.abs,
  ],
)
def test_complex_params_in_real_set_is_error_and_max_norm_projects(projection):
  with pytest.raises(TypeError, match=r"params\['z'\] is complex.*max_norm\(limit, axes=\(\)\)"):
    ow.project_variables(optax.identity(), projection).init({"z": np.array([3 + 4j])})
  by_size = projected(projections.max_norm(1.0, axes=()), np.array([3 + 4j], np.complex64))
  np.testing.assert_allclose(by_size, [0.6 + 0.8j], rtol=1e-6)


def test_projection_function_that_changes_shape_is_error():
  with pytest.raises(ValueError, match=r"of the shape that it is given, \(3, 2\); got \(3, 1\)"):
    projected(lambda x: x[:, :1], np.ones((3, 2), np.float32))


def test_l1_ball_slice_divided_on_explicit_mesh_is_error():
  mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    table = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("model")))
    with pytest.raises(ValueError, match="l1_ball: each slice must be whole on one device"):
      jax.jit(lambda p: projected(projections.l1_ball(1.0, 0), p))(table)
    assert_close(
      jax.jit(lambda p: projected(projections.l1_ball(0.5, 1), p))(table), np.full((8, 2), 0.25)
    )
