"""The bound after rounding, counted in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits
from projections_cases import jitted_step, norms

import optax_wrappers as ow
from optax_wrappers import projections
from optax_wrappers._norms import _rounding

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


# The bound, exactly, in a million slices of each dtype.


@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_variables_bound_holds_in_million_slices(dtype):
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
  inside = landing <= limit * (1 - 2.2e-6)
  assert bits(np.asarray(emitted)[inside]) == bits(updates[inside])
  if dtype == jnp.float32:
    near = ~inside & (landing < 10 * limit)
    assert after[near].min() >= limit * (1 - 1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_projections_sets_hold_after_apply_updates(dtype):
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


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("projection", [projections.max_norm, projections.l1_ball])
def test_projections_bounds_hold_among_subnormal_numbers(projection, dtype):
  """These are evenly spaced: cut to a number of bits they would be rounded again, to nearest."""
  rng, quantum = np.random.default_rng(4), float(jnp.finfo(dtype).smallest_subnormal)
  params = np.zeros((20_000, 3), dtype)
  updates = (rng.uniform(-8, 8, params.shape) * quantum).astype(dtype)
  tx = ow.project_variables(optax.identity(), projection(4.9 * quantum, 1))
  moved = np.asarray(jitted_step(tx, params, updates), np.float64) / quantum
  size = norms(moved, 1) if projection is projections.max_norm else np.abs(moved).sum(1)
  assert 4 <= size.max() <= 4.9


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_steer_lands_on_nearest_number_where_an_update_leads_there(dtype):
  """Without a side: on the number of the dtype that is nearest to the target."""
  rng = np.random.default_rng(3)
  p = (rng.normal(size=10_000) * np.exp(rng.uniform(-2, 2, 10_000))).astype(dtype)
  target = rng.normal(size=p.shape).astype(np.float32)
  found = jax.jit(lambda p, target: _rounding.steer(p, target, None, p.dtype))(p, target)
  wanted = target.astype(dtype)
  apart = wanted.astype(np.float64) - p.astype(np.float64)
  leads_there = apart.astype(dtype).astype(np.float64) == apart
  assert 0.3 < leads_there.mean() < 0.5
  np.testing.assert_array_equal((p + np.asarray(found))[leads_there], wanted[leads_there])
