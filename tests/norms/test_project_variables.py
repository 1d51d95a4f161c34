"""project_variables and the projections, against Keras's and PyTorch's rules written plainly in
NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from projections_cases import jitted_step, norms, step_once

import optax_wrappers as ow
from optax_wrappers import projections


@pytest.mark.parametrize(
  "wrap",
  [
    lambda i, s: ow.clip_variables(i, s),
    lambda i, s: ow.project_variables(i, projections.max_norm(s)),
  ],
)
def test_project_variables_schedule_of_bounds_counts_steps(wrap):
  tx = wrap(optax.identity(), optax.linear_schedule(4.0, 1.0, 3))
  params = np.array([3.0, 4.0], np.float32)
  state, seen = tx.init(params), []

  @jax.jit
  def step(params, state):
    updates, state = tx.update(jnp.zeros(2), state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(5):
    params, state = step(params, state)
    seen.append(np.linalg.norm(params))
  np.testing.assert_allclose(seen, [4, 3, 2, 1, 1], rtol=1e-6)
  assert int(state.step) == 5
  assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
  assert int(optax.tree.map_params(tx, lambda x: x, state).step) == 5


# Sharded.


def names_in(*parts):
  """The mesh axes of these parts of a PartitionSpec."""
  return tuple(n for part in parts if part for n in ((part,) if isinstance(part, str) else part))


PARTS = [None, "a", "b", ("a", "b"), ("b", "a")]

SPECS = [(x, y) for x in PARTS for y in PARTS if not {*names_in(x)} & {*names_in(y)}]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("axes", [0, 1, (0, 1)])
def test_clip_variables_every_sharding_over_2_by_4_mesh_matches_numpy(axes, spec):
  w = np.random.default_rng(4).normal(size=(8, 8)).astype(np.float32)
  beside = np.array([0.6, 0.9], np.float32)
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  numpy_axes = (axes,) if isinstance(axes, int) else axes
  if numpy_axes == (0, 1):
    # All of a vector fits too: it is replicated, and must not be counted once a shard.
    limit, options = 1.2, {}
  else:
    limit, options = 1.0, {"axes": axes, "mask": {"w": True, "beside": False}}
  expected = w * np.minimum(1, limit / norms(w, numpy_axes))
  plain = ow.clip_variables(optax.identity(), limit, axes)
  axis_name = names_in(*(spec[axis] for axis in numpy_axes)) or None
  tx = ow.clip_variables(optax.identity(), limit, axis_name=axis_name, **options)
  specs = {"w": P(*spec), "beside": P()}
  step = functools.partial(step_once, tx)
  mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=specs))
  found = mapped({"w": w, "beside": beside})
  assert_close(found, {"w": expected, "beside": beside}, rtol=1e-5, atol=1e-6)
  placed = jax.device_put(w, NamedSharding(mesh, P(*spec)))
  assert_close(jitted_step(plain, placed), expected, rtol=1e-5, atol=1e-6)


def test_project_variables_errors_name_leaf_or_argument():
  params = {"a": {"w": np.ones((2, 2), np.float32)}, "b": np.ones(2, np.float32)}

  def init(projection):
    ow.project_variables(optax.sgd(0.1), projection).init(params)

  with pytest.raises(ValueError, match=r"1 is out of range for params\['b'\] with 1 axes"):
    init(projections.max_norm(1.0, 1))
  with pytest.raises(
    TypeError, match=r"projection for params\['b'\] must be a projection, a function or None; got 3"
  ):
    init({"a": None, "b": 3})
  with pytest.raises(ValueError, match="the structure of the parameters or a prefix"):
    init({"a": projections.unit_norm()})


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [0, 1, None])
def test_clip_variables_axis_name_of_partition_specs_equals_one_device(check_vma, axes):
  """Each norm over the mesh axes of the axes that it sums, as on one device."""
  rng = np.random.default_rng(0)
  params = {
    "column": rng.normal(size=(3, 8)),
    "row": rng.normal(size=(8, 3)),
    "both": rng.normal(size=(4, 8)),
  }
  params = jax.tree.map(np.float32, params)
  specs = {"column": P(None, "model"), "row": P("model"), "both": P("data", "model")}
  mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  tx = ow.clip_variables(optax.identity(), 0.7, axes, axis_name=specs)
  mapped = jax.shard_map(
    lambda p: step_once(tx, p), mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=check_vma
  )
  expected = jitted_step(ow.clip_variables(optax.identity(), 0.7, axes), params)
  assert_close(jax.jit(mapped)(params), expected, rtol=1e-6)
  for name, leaf in expected.items():
    moved = np.asarray(leaf) != params[name]
    assert moved.any(), name
  with pytest.raises(ValueError, match="axis_name must have the structure of the parameters"):
    ow.clip_variables(optax.identity(), 0.7, axes, axis_name={"column": P()}).update(
      params, optax.EmptyState(), params
    )


def kernels(limit):
  return ow.contrib.flax_kernels(lambda axes: projections.max_norm(limit, axes))


@pytest.mark.optax_promotes
def test_project_variables_nothing_chosen_is_error_with_names():
  params = {"dense": {"weights": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)}}
  with pytest.raises(
    ValueError, match=r"none of the variables is projected: dense/bias, dense/weights"
  ):
    ow.project_variables(optax.sgd(0.1), kernels(1.0)).init(params)
  with pytest.raises(ValueError, match="clip_variables: none of the variables"):
    ow.clip_variables(optax.sgd(0.1), 1.0, mask=False).init(params)
  ow.project_variables(optax.sgd(0.1), kernels(1.0)).init({})  # of no variables none is needed
