"""clip_variables against the originals' tables and plain NumPy; bounds are measured in float64
after apply_updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, bits, in_context, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def numpy_clip(x, max_norm, axes):
  x = np.asarray(x, np.float64)
  norm = np.sqrt((x**2).sum(axes, keepdims=True))
  return np.where(norm > max_norm, x * max_norm / np.where(norm > 0, norm, 1), x)


def step_once(tx, params, grads):
  updates, _ = tx.update(grads, tx.init(params), params)
  return optax.apply_updates(params, updates)


jitted_step = jax.jit(step_once, static_argnums=0)


# The originals' tables: SGD 3.0, max_norm 2.0, one step.


@pytest.mark.parametrize("context", [*CONTEXTS, "jit", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_variables_upstream_table_dense(context, dtype):
  tx = ow.clip_variables(optax.sgd(3.0), 2.0, 1, mask={"var0": True, "var1": False})
  params = {"var0": np.array([[0, 1], [2, 3]], dtype), "var1": np.array([4, 5], dtype)}
  grads = {"var0": np.full((2, 2), 0.1, dtype), "var1": np.full(2, 0.01, dtype)}
  if context in CONTEXTS:  # two shards with unequal gradients
    shards = jax.tree.map(lambda g: np.stack([0.5 * g, 1.5 * g]).astype(dtype), grads)
    step = functools.partial(step_once, ow.cross_shard(tx, AXIS))
    actual = in_context(context, step, 2, (None, 0), None)(params, shards)
  else:
    step = jitted_step if context == "jit" else step_once
    actual = step(tx, *jax.device_put((params, grads)))
  expected = {
    "var0": np.array([[-0.3, 0.7], [1.06562654, 1.69246568]]),
    "var1": np.array([3.97, 4.97]),
  }
  rtol = {jnp.float32: 1e-6, jnp.float16: 2e-3, jnp.bfloat16: 2e-2}[dtype]
  assert_close(actual, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_variables_upstream_table_sparse_only_touched_rows(dtype):
  """Rows 0 and 2 have a gradient; the second variable is clipped along axis 0, as a whole."""
  one = ow.clip_variables(
    optax.sgd(3.0), 2.0, 1, mask={"var0": True, "var1": False}, only_touched=True
  )
  both = ow.clip_variables(one, 2.0, 0, mask={"var0": False, "var1": True}, only_touched=True)
  params = {
    "var0": np.array([[0, 1], [2, 3], [4, 5]], dtype),
    "var1": np.array([[0, 1], [0, 3], [0, 5]], dtype),
  }
  grads = {name: np.array([[0.1, 0.1], [0, 0], [0.1, 0.1]], dtype) for name in params}
  expected = {
    "var0": np.array([[-0.3, 0.7], [2, 3], [1.23711921, 1.57147576]]),
    "var1": np.array([[-0.3, 0.24912767], [0, 1.06769003], [-0.3, 1.67271438]]),
  }
  rtol = {jnp.float32: 1e-6, jnp.float16: 3e-3, jnp.bfloat16: 2e-2}[dtype]
  assert_close(jitted_step(both, params, grads), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("axes", [None, (), 0, 1, -1, (0, 1), (0, 2), (-3, 1)])
def test_clip_variables_axes_match_numpy(axes):
  rng = np.random.default_rng(0)
  params, grads = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
  numpy_axes = (0, 1, 2) if axes is None else axes
  expected = numpy_clip(params - 0.1 * grads, 0.7, numpy_axes)
  actual = jitted_step(ow.clip_variables(optax.sgd(0.1), 0.7, axes), params, grads)
  assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def random_slices(rng, num_slices, dtype):
  """Slices of 8 with norms log-uniform from 0.2 to 300 times the limit 2.0, and updates of every
  size."""
  norms = 2 * np.exp(rng.uniform(np.log(0.2), np.log(300), (num_slices, 1)))
  params = rng.normal(size=(num_slices, 8))
  params *= norms / np.linalg.norm(params, axis=1, keepdims=True)
  updates = rng.normal(size=(num_slices, 8)) * np.exp(rng.uniform(-8, 4, (num_slices, 1)))
  return params.astype(dtype), updates.astype(dtype)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_variables_bound_holds_and_inside_is_unchanged_bit_for_bit(dtype, jit):
  params, updates = random_slices(np.random.default_rng(1), 200_000, dtype)
  tx = ow.clip_variables(optax.identity(), 2.0, 1)

  def step(params, updates):
    emitted, _ = tx.update(updates, tx.init(params), params)
    return emitted, optax.apply_updates(params, emitted)

  emitted, moved = (jax.jit(step) if jit else step)(*jax.device_put((params, updates)))
  assert emitted.dtype == moved.dtype == dtype
  assert np.linalg.norm(np.asarray(moved, np.float64), axis=1).max() <= 2.0

  landing = np.linalg.norm((params + updates).astype(np.float64), axis=1)
  inside = landing <= 2.0
  assert inside.sum() > 10_000
  assert bits(np.asarray(emitted)[inside]) == bits(updates[inside])
  # No further inside than docs/numerics.md says, and the grid of the sum: half as fine as the
  # dtype's own for what comes from twice outside.
  near = (
    (landing > 2.0) & (landing < 4.0) & (np.linalg.norm(params.astype(np.float64), axis=1) < 4.0)
  )
  assert np.linalg.norm(np.asarray(moved, np.float64)[near], axis=1).min() > 2.0 * (
    1 - 4 * float(jnp.finfo(dtype).eps) - 2.2e-6
  )
  if dtype == jnp.float32:
    near = (landing > 2.0) & (landing < 20.0)
    expected = numpy_clip(params + updates, 2.0, 1)
    assert np.linalg.norm(np.asarray(moved, np.float64)[near], axis=1).min() > 2.0 * (1 - 1e-5)
    np.testing.assert_allclose(np.asarray(moved)[near], expected[near], atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_variables_second_step_with_zero_gradient_is_no_change(dtype):
  params, updates = random_slices(np.random.default_rng(2), 1000, dtype)
  tx = ow.clip_variables(optax.identity(), 2.0, 1)
  once = jitted_step(tx, params, updates)
  assert bits(jitted_step(tx, once, np.zeros_like(once))) == bits(once)


def test_clip_variables_norm_just_inside_bound_is_no_change():
  tx = ow.clip_variables(optax.identity(), 5.000004)
  zeros = np.zeros(2, np.float32)
  updates, _ = jax.jit(tx.update)(zeros, tx.init(None), np.array([3.0, 4.0], np.float32))
  assert bits(updates) == bits(zeros)


def test_clip_variables_single_element_equal_to_bound_is_no_change():
  tx, zeros = ow.clip_variables(optax.identity(), 2.0, ()), np.zeros(3, np.float32)
  params = np.array([2.0, -2.0, np.nextafter(np.float32(2), np.float32(3))])
  updates, _ = jax.jit(tx.update)(zeros, tx.init(None), params)
  np.testing.assert_array_equal(params + updates, [2.0, -2.0, 2.0])
  assert bits(updates[:2]) == bits(zeros[:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_variables_norm_does_not_overflow_or_underflow_dtype(dtype):
  # 65,536 threes have norm 768; their squares sum to 589,824, beyond float16. The limit 4.001 puts
  # every element at 1.00025 / 64, and 1 / 64 is what 3 can reach by one addition in bfloat16.
  clipped = jitted_step(
    ow.clip_variables(optax.identity(), 4.001), np.full(65_536, 3.0, dtype), np.zeros(65_536, dtype)
  )
  rtol = 3e-4 if dtype == jnp.bfloat16 else 2e-3 if dtype == jnp.float16 else 2e-5
  np.testing.assert_allclose(np.asarray(clipped, np.float64), 4.001 / 256, rtol=rtol)

  largest = float(jnp.finfo(dtype).max)
  clipped = jitted_step(
    ow.clip_variables(optax.identity(), largest / 4), np.full(4, largest, dtype), np.ones(4, dtype)
  )
  np.testing.assert_allclose(np.asarray(clipped, np.float64), largest / 8, rtol=0.05)

  small = float(jnp.finfo(dtype).smallest_normal) * 64
  clipped = jitted_step(
    ow.clip_variables(optax.identity(), small), np.full(4, 4 * small, dtype), np.zeros(4, dtype)
  )
  assert np.linalg.norm(np.asarray(clipped, np.float64)) <= small
  np.testing.assert_allclose(np.asarray(clipped, np.float64), small / 2, rtol=0.05)


def test_clip_variables_float16_sum_that_overflows_is_clipped():
  params = np.array([60_000.0, 0.0], np.float16)
  clipped = jitted_step(ow.clip_variables(optax.identity(), 2.0), params, params)
  assert np.isfinite(np.asarray(clipped)).all()
  assert np.linalg.norm(np.asarray(clipped, np.float64)) <= 2.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_clip_variables_nan_and_inf_stay_in_their_slice(bad):
  params = np.array([[1.0, bad], [3.0, 4.0]], np.float32)
  tx = ow.clip_variables(optax.identity(), 1.0, 1)
  clipped = np.asarray(jitted_step(tx, params, np.zeros_like(params)))
  assert bits(clipped[0]) == bits(params[0])
  np.testing.assert_allclose(clipped[1], [0.6, 0.8], rtol=1e-6)


def test_clip_variables_zero_slice_has_value_and_derivative():
  tx, params = ow.clip_variables(optax.identity(), 1.0, 1), np.array([[0.0, 0.0], [3.0, 4.0]])

  def moved(params):
    return step_once(tx, params, jnp.zeros_like(params)).sum()

  value, grad = jax.value_and_grad(moved)(jax.device_put(params))
  assert float(value) == pytest.approx(1.4)
  # d/dx of x / |x| summed over the slice: (|x|^2 - x_i sum(x)) / |x|^3
  assert_close(grad, np.array([[1.0, 1.0], [(25 - 21) / 125, (25 - 28) / 125]]), rtol=1e-5)


def test_clip_variables_derivative_by_traced_max_norm():
  def norm_after(max_norm):
    tx = ow.clip_variables(optax.identity(), max_norm)
    params = jnp.array([3.0, 4.0])
    return step_once(tx, params, jnp.zeros(2)).sum()

  assert float(jax.jit(jax.grad(norm_after))(jnp.float32(2.0))) == pytest.approx(1.4)


def test_clip_variables_complex_bounded_by_absolute_value():
  params, zeros = np.array([3 + 4j, 0.3 + 0.4j], np.complex64), np.zeros(2, np.complex64)
  clipped = jitted_step(ow.clip_variables(optax.identity(), 1.0, ()), params, zeros)
  np.testing.assert_allclose(clipped, [0.6 + 0.8j, 0.3 + 0.4j], rtol=1e-6)
  clipped = jitted_step(ow.clip_variables(optax.identity(), 1.0), params, zeros)
  np.testing.assert_allclose(clipped, params / np.sqrt(25.25), rtol=2e-6)


def test_clip_variables_float64_bound_holds_and_matches_numpy():
  with jax.enable_x64(True):
    rng = np.random.default_rng(3)
    params, tx = rng.normal(size=(1000, 8)) * 10, ow.clip_variables(optax.identity(), 2.0, 1)
    clipped = jitted_step(tx, params, np.zeros_like(params))
    assert clipped.dtype == jnp.float64
    assert np.linalg.norm(clipped, axis=1).max() <= 2.0
    np.testing.assert_allclose(clipped, numpy_clip(params, 2.0, 1), rtol=1e-12)


def test_clip_variables_bfloat16_updates_of_float32_params_hold_bound():
  params, _ = random_slices(np.random.default_rng(4), 1000, np.float32)
  with jax.numpy_dtype_promotion("standard"):
    clipped = jitted_step(
      ow.clip_variables(optax.identity(), 2.0, 1), params, np.zeros((1000, 8), jnp.bfloat16)
    )
  assert clipped.dtype == jnp.float32
  assert np.linalg.norm(np.asarray(clipped, np.float64), axis=1).max() <= 2.0


# Variables sharded along the summed axis.


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("only_touched", [False, True])
def test_clip_variables_sharded_variable_matches_numpy(context, only_touched):
  rng = np.random.default_rng(5)
  params = rng.normal(size=(4, 6, 2)).astype(np.float32)  # [shard, row, columns of the shard]
  grads = rng.normal(size=(4, 6, 2)).astype(np.float32)
  grads[:, 2:] = 0  # rows 2 to 5 have no gradient on any shard,
  grads[1:, 1] = 0  # row 1 on shard 0 alone
  tx = ow.clip_variables(optax.sgd(0.1), 1.0, 1, axis_name=AXIS, only_touched=only_touched)
  step = functools.partial(step_once, tx)
  actual = in_context(context, step, 4, (0, 0), 0)(params, grads)
  whole = params.astype(np.float64) - 0.1 * grads
  expected = numpy_clip(whole, 1.0, (0, 2))
  if only_touched:
    expected[:, 2:] = whole[:, 2:]
  assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_clip_variables_replicated_leaf_beside_sharded_is_counted_once():
  tx = ow.clip_variables(optax.identity(), 1.0, axis_name=AXIS)
  params = {
    "sharded": np.arange(8, dtype=np.float32),
    "replicated": np.array([0.6, 0.7], np.float32),
  }
  specs = {"sharded": P(AXIS), "replicated": P()}
  step = jax.shard_map(
    lambda p: step_once(tx, p, jax.tree.map(jnp.zeros_like, p)),
    mesh=mesh_of(4),
    in_specs=(specs,),
    out_specs=specs,
  )
  expected = {
    "sharded": numpy_clip(np.arange(8.0), 1.0, 0),
    "replicated": params["replicated"],
  }
  assert_close(jax.jit(step)(params), expected, rtol=3e-6)


def test_clip_variables_sharded_under_jit_needs_no_axis_name():
  mesh = mesh_of(4)
  params = np.random.default_rng(6).normal(size=(8, 8)).astype(np.float32)
  tx = ow.clip_variables(optax.identity(), 1.0, 1)
  for spec in (P(AXIS), P(None, AXIS)):
    placed = jax.device_put(params, jax.sharding.NamedSharding(mesh, spec))
    actual = jax.jit(lambda p: step_once(tx, p, jnp.zeros_like(p)))(placed)
    assert_close(actual, numpy_clip(params, 1.0, 1), rtol=3e-6)


# Masks.


@pytest.mark.parametrize(
  "mask",
  [
    {"a": {"w": True, "b": False}, "c": True},
    lambda params: {"a": {"w": True, "b": False}, "c": True},
    lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
  ],
)
def test_clip_variables_mask_as_tree_or_function(mask):
  params = {"a": {"w": np.full((2, 2), 3.0), "b": np.full(2, 3.0)}, "c": np.full((1, 1), 3.0)}
  params = jax.tree.map(np.float32, params)
  zeros = jax.tree.map(np.zeros_like, params)
  actual = jitted_step(ow.clip_variables(optax.identity(), 1.0, mask=mask), params, zeros)
  expected = {"a": {"w": np.full((2, 2), 0.5), "b": np.full(2, 3.0)}, "c": np.full((1, 1), 1.0)}
  assert_close(actual, expected, rtol=2e-6)


def test_clip_variables_prefix_mask_and_none_update():
  three, zero = jnp.full(2, 3.0), jnp.zeros(2)
  params = {"a": {"w": three, "b": three}, "c": three}
  tx = ow.clip_variables(optax.identity(), 1.0, mask={"a": True, "c": False})
  updates = {"a": {"w": zero, "b": None}, "c": zero}
  emitted, _ = tx.update(updates, tx.init(params), params)
  assert emitted["a"]["b"] is None
  assert (np.asarray(emitted["a"]["w"]) < 0).all()
  assert not np.asarray(emitted["c"]).any()


def test_clip_variables_constant_bound_state_is_inner_state():
  params = {"w": np.ones((2, 2), np.float32)}
  inner = optax.sgd(0.1, momentum=0.9)
  assert jax.tree.structure(ow.clip_variables(inner, 1.0).init(params)) == jax.tree.structure(
    inner.init(params)
  )


# Bad input.


def test_clip_variables_dict_of_dimensions_names_what_takes_them():
  with pytest.raises(TypeError, match=r"got {'w': \[0\]}. The dimensions .* are axes"):
    ow.clip_variables(optax.sgd(0.1), {"w": [0]}, 1.0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), jnp.float32(0.0)])
def test_clip_variables_max_norm_not_above_zero_is_error(max_norm):
  with pytest.raises(ValueError, match="max_norm must be above 0"):
    ow.clip_variables(optax.sgd(0.1), max_norm)


def test_clip_variables_errors_max_norm_axes_mask_dtype_and_params():
  params = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
  with pytest.raises(TypeError, match="max_norm must be a real scalar"):
    ow.clip_variables(optax.sgd(0.1), "two")
  with pytest.raises(TypeError, match="axes must be a Python int"):
    ow.clip_variables(optax.sgd(0.1), 1.0, (0, 1.0))
  with pytest.raises(ValueError, match=r"1 is out of range for params\['b'\] with 1 axes.*mask="):
    ow.clip_variables(optax.sgd(0.1), 1.0, 1).init(params)
  with pytest.raises(ValueError, match=r"twice, got \(0, -1\) for params\['b'\]"):
    ow.clip_variables(optax.sgd(0.1), 1.0, (0, -1)).init(params)
  with pytest.raises(ValueError, match="mask must have the structure of the parameters"):
    ow.clip_variables(optax.sgd(0.1), 1.0, mask={"w": True}).init(params)
  with pytest.raises(TypeError, match="mask must hold Python bools, got 1 of type int"):
    ow.clip_variables(optax.sgd(0.1), 1.0, mask={"w": True, "b": 1}).init(params)
  with pytest.raises(TypeError, match=r"params\['n'\] has dtype int32"):
    ow.clip_variables(optax.sgd(0.1), 1.0).init({"n": np.arange(3, dtype=np.int32)})
  tx = ow.clip_variables(optax.sgd(0.1), 1.0, axis_name=AXIS)
  with pytest.raises(ValueError, match="clip_variables: params is needed"):
    tx.update(params, tx.init(params))
  with pytest.raises(ValueError, match="'w' is not bound"):
    tx.update(params, tx.init(params), params)
