"""project_variables and the projections, against Keras's and PyTorch's rules written plainly in
NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers import projections

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def step_once(tx, params, grads=None):
  grads = jax.tree.map(jnp.zeros_like, params) if grads is None else grads
  updates, _ = tx.update(grads, tx.init(params), params)
  return optax.apply_updates(params, updates)


jitted_step = jax.jit(step_once, static_argnums=0)


def projected(projection, params):
  return jitted_step(ow.project_variables(optax.identity(), projection), params)


def norms(x, axes):
  return np.sqrt((np.asarray(x, np.float64) ** 2).sum(axes, keepdims=True))


# The rules of Keras and PyTorch. Keras divides by norm + 1e-7, which also shrinks what is inside;
# ours by the norm.


def keras_max_norm(w, limit, axes):
  return w * np.clip(norms(w, axes), 0, limit) / (1e-7 + norms(w, axes))


def keras_unit_norm(w, axes):
  return w / (1e-7 + norms(w, axes))


def keras_min_max_norm(w, lower, upper, rate, axes):
  norm = norms(w, axes)
  return w * (rate * np.clip(norm, lower, upper) + (1 - rate) * norm) / (1e-7 + norm)


def torch_renorm(w, limit, dim):
  """Sub-tensors along dim; torch.renorm divides by norm + 1e-7 only where the norm is above the
  limit."""
  axes = tuple(axis for axis in range(w.ndim) if axis != dim)
  norm = norms(w, axes)
  return np.where(norm > limit, w * limit / (norm + 1e-7), w)


WEIGHTS = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32) * np.array(
  [[[0.1]], [[1]], [[3]], [[0]]], np.float32
)


@pytest.mark.parametrize("axes", [0, 1, (0, 1), None, -1])
@pytest.mark.parametrize(
  ("projection", "rule"),
  [
    (lambda axes: projections.max_norm(1.5, axes), lambda w, axes: keras_max_norm(w, 1.5, axes)),
    (projections.unit_norm, keras_unit_norm),
    (
      lambda axes: projections.min_max_norm(0.5, 1.5, axes=axes),
      lambda w, axes: keras_min_max_norm(w, 0.5, 1.5, 1, axes),
    ),
    (
      lambda axes: projections.min_max_norm(0.5, 1.5, 0.3, axes),
      lambda w, axes: keras_min_max_norm(w, 0.5, 1.5, 0.3, axes),
    ),
  ],
  ids=["MaxNorm", "UnitNorm", "MinMaxNorm", "MinMaxNorm-rate"],
)
def test_keras_norms(projection, rule, axes):
  expected = rule(WEIGHTS.astype(np.float64), axes if axes is not None else (0, 1, 2))
  assert_close(projected(projection(axes), WEIGHTS), expected, rtol=2e-6, atol=2e-7)


def test_keras_non_neg_and_boxes():
  w = WEIGHTS
  np.testing.assert_array_equal(projected(projections.non_negative(), w), np.maximum(w, 0))
  np.testing.assert_array_equal(projected(projections.box(-0.25, 0.5), w), np.clip(w, -0.25, 0.5))
  np.testing.assert_array_equal(projected(projections.linf_ball(0.25), w), np.clip(w, -0.25, 0.25))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_torch_renorm(dim):
  axes = tuple(axis for axis in range(3) if axis != dim)
  actual = projected(projections.max_norm(1.5, axes), WEIGHTS)
  assert_close(actual, torch_renorm(WEIGHTS.astype(np.float64), 1.5, dim), 2e-6)


def numpy_l1_ball(row, radius):
  """Duchi et al. 2008, figure 1."""
  if np.abs(row).sum() <= radius:
    return row
  u = np.sort(np.abs(row))[::-1]
  above = u - (np.cumsum(u) - radius) / np.arange(1, len(u) + 1) > 0
  rho = np.nonzero(above)[0][-1]
  theta = (u[: rho + 1].sum() - radius) / (rho + 1)
  return np.sign(row) * np.maximum(np.abs(row) - theta, 0)


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (0, 1, 2)])
def test_l1_ball(axes):
  rest = [axis for axis in range(3) if axis not in axes]
  order = (*rest, *axes)
  rows = WEIGHTS.astype(np.float64).transpose(order)
  flat = rows.reshape(-1, int(np.prod([WEIGHTS.shape[axis] for axis in axes])))
  expected = (
    np.stack([numpy_l1_ball(row, 1.5) for row in flat])
    .reshape(rows.shape)
    .transpose(np.argsort(order))
  )
  actual = projected(projections.l1_ball(1.5, axes), WEIGHTS)
  assert_close(actual, expected, rtol=1e-5, atol=1e-6)
  assert np.abs(np.asarray(actual, np.float64)).sum(axes).max() <= 1.5


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
def test_any_function_of_optax_projections(function):
  w = WEIGHTS[1:3]
  with jax.numpy_dtype_promotion("standard"):
    expected = jax.jit(function)(w)
  assert_close(projected(function, {"w": w})["w"], expected, rtol=1e-5, atol=2e-6)


# The bound, exactly, in a million slices of each dtype.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_million_slices(dtype):
  rng = np.random.default_rng(1)
  num_slices, limit = 1_000_000, 2.0
  start = limit * np.exp(rng.uniform(np.log(0.2), np.log(300), (num_slices, 1)))
  params = rng.normal(size=(num_slices, 8))
  params = (params * start / np.linalg.norm(params, axis=1, keepdims=True)).astype(dtype)
  updates = rng.normal(size=(num_slices, 8)) * np.exp(rng.uniform(-8, 4, (num_slices, 1)))
  updates = updates.astype(dtype)
  tx = ow.clip_variables(optax.identity(), limit, 1)

  @jax.jit
  def step(params, updates):
    emitted, _ = tx.update(updates, tx.init(params), params)
    return emitted, optax.apply_updates(params, emitted)

  emitted, moved = step(params, updates)
  after = np.linalg.norm(np.asarray(moved, np.float64), axis=1)
  assert (after > limit).sum() == 0
  landing = np.linalg.norm((params + updates).astype(np.float64), axis=1)
  inside = landing <= limit
  assert bits(np.asarray(emitted)[inside]) == bits(updates[inside])
  if dtype == jnp.float32:
    near = ~inside & (landing < 10 * limit)
    assert after[near].min() >= limit * (1 - 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_sets_hold_after_apply_updates_too(dtype):
  rng = np.random.default_rng(2)
  params = rng.normal(size=(20_000, 8)) * np.exp(rng.uniform(-3, 4, (20_000, 1)))
  updates = rng.normal(size=(20_000, 8)) * np.exp(rng.uniform(-6, 3, (20_000, 1)))
  params, updates = params.astype(dtype), updates.astype(dtype)

  def after(projection):
    tx = ow.project_variables(optax.identity(), projection)
    return np.asarray(jitted_step(tx, params, updates), np.float64)

  moved = after(projections.box(-0.7, 0.3))
  assert moved.min() >= -0.7
  assert moved.max() <= 0.3
  assert after(projections.non_negative()).min() >= 0
  assert np.abs(after(projections.linf_ball(0.1))).max() <= 0.1
  assert np.abs(after(projections.l1_ball(1.3, 1))).sum(1).max() <= 1.3
  between = norms(after(projections.min_max_norm(0.5, 1.3, axes=1)), 1)
  assert between.max() <= 1.3
  if dtype == jnp.float32:
    assert between.min() >= 0.5
    np.testing.assert_allclose(norms(after(projections.unit_norm(1)), 1), 1, rtol=1e-4)


# Which variables.

PARAMS = {
  "dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
  "conv": {"kernel": np.ones((3, 3, 2, 4), np.float32), "bias": np.ones(4, np.float32)},
  "table": {"embedding": np.ones((5, 3), np.float32)},
}


def test_a_pytree_of_projections():
  tree = {
    "dense": {"kernel": projections.max_norm(1.0, 0), "bias": None},
    "conv": projections.box(0, 0.5),
    "table": None,
  }
  actual = projected(tree, PARAMS)
  np.testing.assert_allclose(actual["dense"]["kernel"], np.full((3, 2), 3**-0.5), rtol=1e-6)
  for path in (("dense", "bias"), ("table", "embedding")):
    np.testing.assert_array_equal(actual[path[0]][path[1]], 1)
  np.testing.assert_array_equal(actual["conv"]["kernel"], 0.5)


def test_by_path():
  def choose(path, leaf):
    return projections.linf_ball(0.25) if path == "conv/bias" or leaf.ndim == 2 else None

  actual = projected(projections.by_path(choose), PARAMS)
  changed = [
    path for path, leaf in jax.tree.leaves_with_path(actual) if (np.asarray(leaf) != 1).any()
  ]
  assert [jax.tree_util.keystr(p, simple=True, separator="/") for p in changed] == [
    "conv/bias",
    "dense/kernel",
    "table/embedding",
  ]


def test_flax_kernels_reads_a_real_models_parameters_and_says_what_it_chose():
  import flax.linen as nn

  class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
      x = nn.Embed(7, 4, name="embed")(tokens)
      x = nn.Conv(6, (3,), name="conv")(x)
      x = nn.LayerNorm(name="norm")(x)
      return nn.Dense(2, name="dense")(x)

  params = jax.jit(Model().init)(jax.random.key(0), np.zeros((1, 5), np.int32))["params"]
  spec = projections.flax_kernels(lambda axes: projections.unit_norm(axes))
  chosen = projections.chosen(spec, params)
  assert {path: projection.axes for path, projection in chosen.items()} == {
    "conv/kernel": (0, 1),
    "dense/kernel": (0,),
    "embed/embedding": (1,),
  }
  actual = projected(spec, params)
  np.testing.assert_allclose(norms(actual["dense"]["kernel"], 0), 1, rtol=1e-6)
  np.testing.assert_allclose(norms(actual["conv"]["kernel"], (0, 1)), 1, rtol=1e-6)
  np.testing.assert_allclose(norms(actual["embed"]["embedding"], 1), 1, rtol=1e-6)
  np.testing.assert_array_equal(actual["norm"]["scale"], params["norm"]["scale"])


@pytest.mark.parametrize(
  "wrap",
  [
    lambda i, s: ow.clip_variables(i, s),
    lambda i, s: ow.project_variables(i, projections.max_norm(s)),
  ],
)
def test_a_schedule_of_bounds(wrap):
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


@pytest.mark.parametrize("axes", [0, 1, (0, 1)])
def test_every_sharding_of_a_variable_over_a_2_by_4_mesh(axes):
  w = np.random.default_rng(4).normal(size=(8, 8)).astype(np.float32)
  beside = np.array([0.6, 0.9], np.float32)
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  names_of = [None, "a", "b", ("a", "b"), ("b", "a")]
  numpy_axes = (axes,) if isinstance(axes, int) else axes
  if numpy_axes == (0, 1):
    # All of a vector fits too: it is replicated, and must not be counted once a shard.
    limit, options = 1.2, {}
  else:
    limit, options = 1.0, {"axes": axes, "mask": {"w": True, "beside": False}}
  expected = w * np.minimum(1, limit / norms(w, numpy_axes))
  plain = ow.clip_variables(optax.identity(), limit, axes)
  for rows in names_of:
    for columns in names_of:
      used = [
        n for part in (rows, columns) if part for n in ((part,) if isinstance(part, str) else part)
      ]
      if len(used) != len(set(used)):
        continue
      spec = P(rows, columns)
      over = [part for axis, part in enumerate((rows, columns)) if axis in numpy_axes and part]
      axis_name = (
        tuple(n for part in over for n in ((part,) if isinstance(part, str) else part)) or None
      )
      tx = ow.clip_variables(optax.identity(), limit, axis_name=axis_name, **options)
      specs = {"w": spec, "beside": P()}
      mapped = jax.jit(
        jax.shard_map(
          functools.partial(step_once, tx), mesh=mesh, in_specs=(specs,), out_specs=specs
        )
      )
      assert_close(
        mapped({"w": w, "beside": beside}), {"w": expected, "beside": beside}, rtol=1e-5, atol=1e-6
      )
      placed = jax.device_put(w, NamedSharding(mesh, spec))
      assert_close(jitted_step(plain, placed), expected, rtol=1e-5, atol=1e-6)


# Bad input.


def test_errors():
  for call, match in (
    (lambda: projections.max_norm(0.0), "max_norm: limit must be above 0"),
    (lambda: projections.min_max_norm(-1.0, 1.0), "lower must be at least 0"),
    (lambda: projections.min_max_norm(2.0, 1.0), "lower must not be above upper, got 2.0 and 1.0"),
    (lambda: projections.min_max_norm(0.0, 1.0, 0.0), r"rate must be in \(0, 1\]"),
    (lambda: projections.box(1.0, 0.0), "lower must not be above upper"),
    (lambda: projections.linf_ball(-1.0), "radius must be above 0"),
    (lambda: projections.l1_ball(0.0), "radius must be above 0"),
  ):
    with pytest.raises(ValueError, match=match):
      call()
  with pytest.raises(TypeError, match="axes must be a Python int"):
    projections.unit_norm("rows")


def test_errors_that_name_the_leaf():
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
  tx = ow.project_variables(optax.sgd(0.1), {"a": projections.max_norm(1.0, 0), "b": None})
  for wrap in (ow.clip_variables, ow.project_variables):
    with pytest.raises(TypeError, match="no argument 'momentum': the inner state stays"):
      wrap(optax.sgd(0.1), 1.0, momentum="project")
  with pytest.raises(TypeError, match="no extra arg 'rows': pass only_touched=True"):
    tx.update(params, tx.init(params), params, rows=np.arange(2))


def test_an_l1_ball_cannot_be_sharded_inside_shard_map():
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
def test_complex_variables_have_no_box(projection):
  with pytest.raises(TypeError, match=r"params\['z'\] is complex.*max_norm\(limit, axes=\(\)\)"):
    ow.project_variables(optax.identity(), projection).init({"z": np.array([3 + 4j])})
  by_size = projected(projections.max_norm(1.0, axes=()), np.array([3 + 4j], np.complex64))
  np.testing.assert_allclose(by_size, [0.6 + 0.8j], rtol=1e-6)


def test_a_function_must_keep_the_shape():
  with pytest.raises(ValueError, match=r"of the shape that it is given, \(3, 2\); got \(3, 1\)"):
    projected(lambda x: x[:, :1], np.ones((3, 2), np.float32))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", [0, 1, None])
def test_column_and_row_parallel_kernels_by_their_specs(check_vma, axes):
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


def test_what_an_explicit_mesh_lays_out_and_cannot_be_projected_is_an_error():
  mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    table = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("model")))
    with pytest.raises(ValueError, match="l1_ball: each slice must be whole on one device"):
      jax.jit(lambda p: projected(projections.l1_ball(1.0, 0), p))(table)
    assert_close(
      jax.jit(lambda p: projected(projections.l1_ball(0.5, 1), p))(table), np.full((8, 2), 0.25)
    )
