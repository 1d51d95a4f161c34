"""Norms in float32: at the bound, for numbers of every size, in any order; expected in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, bits, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers._norms import _lengths


@functools.partial(jax.jit, static_argnums=0)
def clipped(tx, params, updates):
  emitted, _ = tx.update(updates, tx.init(params), params)
  return emitted, optax.apply_updates(params, emitted)


def clip(limit, axes=0, **options):
  return ow.clip_variables(optax.identity(), limit, axes, **options)


def norms(x, axis=0):
  return np.sqrt((np.asarray(x, np.float64) ** 2).sum(axis))


def largest_error(n):
  """How far below its bound a slice of n may land or count as outside, as docs/numerics.md has
  it."""
  half_ulps = n if n <= 12 else 33 + n * 2.0**-21  # 2 for small arrays and for rows
  return (half_ulps + 19) * 2.0**-24


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("limit", [1e-27, 1e-18, 1e-14, 1.0, 1e17, 1e19, 1e36])
@pytest.mark.parametrize("n", [1, 3, 12, 13, 4096])
def test_lengths_around_bound_are_told_apart_for_every_size_of_numbers(dtype, limit, n):
  away = np.concatenate([np.linspace(-2, 2, 200) * 2.0**-k for k in (4, 8, 14, 18, 20, 23)])
  rng = np.random.default_rng(0)
  y = rng.normal(size=(n, away.size))
  y *= limit * (1 + away) / norms(y)
  p = (y * rng.uniform(size=y.shape)).astype(dtype)
  u = (y - p.astype(np.float64)).astype(dtype)
  landed = norms(p + u)
  emitted, moved = clipped(clip(limit), p, u)
  assert norms(moved).max() <= limit
  inside = landed <= limit * (1 - largest_error(n))
  assert inside.sum() > 100
  assert bits(np.asarray(emitted)[:, inside]) == bits(u[:, inside])
  outside = landed > limit
  assert outside.sum() > 100
  if dtype == jnp.float32:
    # One step of `p + u` each, which are below the limit.
    steps = 2.0**-23 * np.sqrt(n)
    assert norms(moved)[outside].min() >= limit * (1 - largest_error(n) - steps)


@pytest.mark.parametrize("n", [1, 2, 12, 13, 16, 63, 64, 96, 1000, 65_536, 1_000_000])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [10_000, 400_000])
def test_lengths_target_is_as_near_as_the_page_says(n, axis, size):
  """From zero every number can be reached, so the result is the target."""
  rng = np.random.default_rng(n)
  rows = max(1, size // n)
  updates = (rng.normal(size=(n, rows)) * 10.0 ** rng.uniform(1, 6, size=rows)).astype(np.float32)
  updates = np.where(norms(updates) > 3, updates, np.float32(5))
  exact = updates.astype(np.float64) * (3.0 / norms(updates))
  if axis == 1:
    exact, updates = exact.T, np.ascontiguousarray(updates.T)
  _, moved = clipped(clip(3.0, axis), np.zeros_like(updates), updates)
  moved = np.asarray(moved)
  np.testing.assert_allclose(moved, exact, rtol=2e-6 if n <= 16 else largest_error(n), atol=0)
  # What has landed is inside.
  emitted, _ = clipped(clip(3.0, axis), moved, np.zeros_like(moved))
  assert not np.asarray(emitted).any()
  assert norms(moved, axis).max() <= 3.0


def test_lengths_of_million_entries_in_any_order():
  n, rng = 1_000_000, np.random.default_rng(0)
  slices = {
    "normal": rng.normal(size=n),
    "constant": np.full(n, 0.1),
    "one large": np.where(np.arange(n) == 7, 1e4, 1e-3 * rng.normal(size=n)),
    "decreasing": 1 / np.arange(1, n + 1),
    "increasing": np.arange(1, n + 1) / n,
    "reversed": rng.normal(size=n)[::-1],
  }
  updates = np.stack(list(slices.values()), 1).astype(np.float32)
  # A hair outside and a hair inside the bound, which each has to itself.
  for away, is_inside in ((1e-7, False), (-3e-6, True)):
    for order in (np.arange(n), rng.permutation(n)):
      now = updates[order]
      for column in now.T:
        bound = float(norms(column)) / (1 + away)
        emitted, moved = clipped(clip(bound, None), np.zeros_like(column), column)
        assert norms(moved) <= bound
        assert (bits(emitted) == bits(column)) == is_inside


def test_pair_sums_one_after_the_other_lose_nothing():
  """The worst order: one number, and then many below half of its ulp. XLA adds in a better one."""
  x = np.full(20_000, 2.0**-26, np.float32)
  x[0] = 1
  plain, pair = np.float32(0), (np.float32(0), np.float32(0))
  for value in x:
    plain = plain + value
    pair = _lengths._add_pairs(pair, (value, np.float32(0)))
  exact = math.fsum(x.tolist())
  assert abs(plain / exact - 1) > 2e-4
  assert abs(float(pair[0]) + float(pair[1]) - exact) < 2.0**-40


# Squares of these do not fit into float32.


@pytest.mark.parametrize("layout", ["one device", "shard_map", "jit"])
@pytest.mark.parametrize("limit", [1e-24, 1.0, 1e20])
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e25, 2e38])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_clip_variables_of_numbers_whose_squares_over_or_underflow(dtype, size, limit, layout):
  updates = (size * np.random.default_rng(0).uniform(-1, 1, size=(64, 4))).astype(dtype)
  params = np.zeros_like(updates)
  tx = clip(limit, axis_name=AXIS if layout == "shard_map" else None)
  if layout == "one device":
    _, moved = clipped(tx, params, updates)
  elif layout == "jit":
    placed = NamedSharding(mesh_of(4), P(AXIS))
    _, moved = clipped(tx, *jax.device_put((params, updates), placed))
  else:
    step = jax.shard_map(
      functools.partial(clipped, tx), mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS)
    )
    _, moved = jax.jit(step)(params, updates)
  wide = updates.astype(np.float64)
  exact = wide * np.minimum(1, limit / norms(wide))
  rtol = 5e-6 if dtype == jnp.float32 else 2.0**-7
  np.testing.assert_allclose(np.asarray(moved, np.float64), exact, rtol=rtol, atol=1e-38)
  assert norms(moved).max() <= limit


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_clip_variables_of_narrow_params_with_float32_updates_of_every_size(dtype):
  updates = (1e30 * np.random.default_rng(0).uniform(-1, 1, size=(64, 4))).astype(np.float32)
  params = np.zeros_like(updates, dtype)
  with jax.numpy_dtype_promotion("standard"):
    _, moved = clipped(clip(2.0), params, updates)
  exact = updates * (2.0 / norms(updates))
  assert moved.dtype == dtype
  np.testing.assert_allclose(np.asarray(moved, np.float64), exact, atol=2.0**-8)
  assert norms(moved).max() <= 2.0


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_unit_norm_of_numbers_whose_squares_over_or_underflow(size):
  updates = (size * np.random.default_rng(0).normal(size=(16, 4))).astype(np.float32)
  tx = ow.project_variables(optax.identity(), ow.projections.unit_norm(0))
  _, moved = clipped(tx, np.zeros_like(updates), updates)
  exact = updates / norms(updates)
  np.testing.assert_allclose(moved, exact, rtol=1e-6)


# What is communicated and computed.


def programs(tx, params, spec):
  """The StableHLO for each platform and the compiled program of a step."""
  placed = jax.device_put(params, NamedSharding(mesh_of(4), spec))
  traced = jax.jit(lambda p: tx.update(p, tx.init(p), p)[0]).trace(placed)
  texts = [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu", "cuda")]
  return texts, traced.lower().compile()


@pytest.mark.parametrize("limit", [1.0, optax.linear_schedule(1.0, 2.0, 10)])
@pytest.mark.parametrize("shape", [(4, 6), (64, 4096), (96, 4096)])
def test_projection_is_one_form_without_branches_or_float64(shape, limit):
  texts, _ = programs(clip(limit), np.ones(shape, np.float32), P())
  for text in texts:
    assert not [word for word in ("while", "stablehlo.case", "stablehlo.if", "f64") if word in text]
    # All that follows uses the update as the caller gets it, not as XLA may compute it again.
    assert text.count("optimization_barrier") == 1
  # Other platforms have more calls of functions of JAX's, but no other arithmetic.
  counts = [text.count("stablehlo.reduce") for text in texts]
  assert counts[0] >= 1 and len(set(counts)) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(64, 8), (256, 1024), (384, 1024)])
def test_projection_of_sharded_slices_under_jit_sends_two_float32_a_slice(shape, axis_type):
  mesh = jax.make_mesh((4,), ("w",), axis_types=(axis_type,), devices=jax.devices()[:4])
  tx = clip(1.0)
  with jax.set_mesh(mesh):
    params = jax.device_put(jnp.ones(shape), NamedSharding(mesh, P("w")))
    compiled = jax.jit(lambda p: tx.update(p, tx.init(p), p)[0]).lower(params).compile()
  sent = ow.inspect.compiled_collectives(compiled)
  assert {one.kind for one in sent} == {"all-reduce"}
  assert sum(one.num_bytes for one in sent) == 2 * shape[1] * 4


def test_projection_of_sharded_slices_in_shard_map_sends_one_all_reduce():
  tx = clip(1.0, axis_name=AXIS)
  step = jax.shard_map(
    lambda p: tx.update(p, tx.init(p), p)[0], mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS)
  )
  compiled = jax.jit(step).lower(jax.ShapeDtypeStruct((64, 8), jnp.float32)).compile()
  (sent,) = ow.inspect.compiled_collectives(compiled)
  assert (sent.kind, sent.num_bytes) == ("all-reduce", 2 * 8 * 4)
