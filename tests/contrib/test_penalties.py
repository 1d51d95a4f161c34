"""Reductions that weight or rotate gradients: penalties, radial means and Adasum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from flax import serialization
from helpers import AXIS, assert_close, in_context
from reductions_cases import assert_near, expected, gradients, over_shards, reduced

import optax_wrappers as ow


@pytest.mark.parametrize(("warmup", "threshold"), [(5, 1.0), (12, 0.3)])
def test_penalty_detector_of_one_worker_matches_reference(warmup, threshold):
  """For one worker, whose lengths have heavy tails; what is not left out is clipped at 2."""
  lengths = np.random.default_rng(warmup).pareto(1.5, 200).astype(np.float32) + 0.1
  tx = ow.contrib.penalty(None, clip=2.0, threshold=threshold, warmup=warmup, decay=0.05)
  detector, expected = ref._Detector(0.05, warmup, threshold), []
  spreads = 0
  for n in map(float, lengths):
    spreads += detector.count >= warmup and np.std(detector.scores[-warmup:], ddof=1) > 1
    expected.append(0 if detector.is_outlier(n) else min(n, 2 * n / (n + 1e-6)))
    detector.update(n)
  state, found = jax.lax.scan(lambda s, n: tx.update(n, s)[::-1], tx.init(lengths[0]), lengths)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert 5 < np.sum(np.array(expected) == 0) < 100 and spreads > 20
  np.testing.assert_allclose([state.mean, state.variance], [detector.mean, detector.m2], rtol=1e-4)
  restored = serialization.from_bytes(state, serialization.to_bytes(state))
  assert_close(restored, state, rtol=0)


def test_penalty_length_that_overflows_keeps_detector_on():
  tx = ow.contrib.penalty(None, warmup=5, clip=1e30)
  state, found = tx.init(jnp.zeros(())), []
  for length in [1.0, 1.1] * 10 + [50.0, 3e20] + [1.0, 1.1] * 10 + [50.0]:
    update, state = tx.update(jnp.float32(length), state)
    found.append(float(update))
  assert found[20] == found[21] == found[-1] == 0 and found[-2] > 1


def test_penalty_derivative_matches_finite_differences():
  """Decisions have no derivative; a worker that has not moved is left out, and its derivative is
  zero."""
  mean = ow.contrib.penalty(AXIS, clip=1.5)

  def loss(d):
    return jnp.sum(jax.vmap(lambda d: mean.update(d, mean.init(d))[0], axis_name=AXIS)(d)[0] ** 3)

  def plain(d):
    lengths = np.linalg.norm(d, axis=1)
    shares = np.where(lengths > 0, np.exp(-lengths), 0)
    merged = shares @ d / shares.sum()
    return np.sum((merged * min(1, 1.5 / (np.linalg.norm(merged) + 1e-6))) ** 3)

  with jax.enable_x64(True):
    d = np.array([[3.0, 0.5], [0.2, 1.0], [0.0, 0.0]])
    found = np.asarray(jax.jit(jax.grad(loss))(d))
  for i, j in np.ndindex(2, 2):
    step = np.zeros_like(d)
    step[i, j] = 1e-6
    slope = (plain(d + step) - plain(d - step)) / 2e-6
    np.testing.assert_allclose(found[i, j], slope, rtol=1e-6)
  np.testing.assert_array_equal(found[2], 0)


def test_penalty_weight_zero_is_not_shortest_length():
  mean = ow.contrib.penalty(AXIS, clip=1e9)
  reduce = jax.vmap(lambda d, w: mean.update(d, mean.init(d), weight=w)[0], axis_name=AXIS)
  found = jax.jit(reduce)(jnp.array([1.0, 1000.0, 1000.0]), jnp.array([0.0, 1.0, 1.0]))
  np.testing.assert_allclose(found, [1000.0] * 3)


@pytest.mark.parametrize("with_weights", [True, False])
def test_penalty_leaves_out_worker_with_nan(with_weights):
  """Lengths 1 and 2, and a NaN, whose zeros would be the shortest. Temperature 2."""
  tx = ow.local_steps(
    optax.sgd(1.0),
    AXIS,
    communication_period=1,
    outer=optax.sgd(1.0),
    reduction=ow.contrib.penalty(AXIS, temperature=2.0),
  )
  params, state = jnp.zeros(3), ow.stack_workers(tx.init(jnp.float32(0.0)), 3)
  extra = {"participation": jnp.float32([3.0, 1.0, 1.0])} if with_weights else {}
  update = ow.map_workers(lambda g, s, p, e: tx.update(g, s, p, **e), AXIS)
  _, state = jax.jit(update)(jnp.float32([1.0, 2.0, np.nan]), state, params, extra)
  shares = np.array([3.0 if with_weights else 1.0, 1.0]) * np.exp(-np.array([1.0, 2.0]) / 2)
  np.testing.assert_allclose(state.center, -shares @ [1.0, 2.0] / shares.sum(), rtol=1e-6)
  np.testing.assert_array_equal(state.reduction_state[0].count, [1, 1, 0])


@pytest.mark.parametrize(
  "options", [{"clip": 0.0}, {"threshold": 0}, {"warmup": 1}, {"decay": 1.0}, {"temperature": -1}]
)
def test_penalty_errors_arguments_out_of_range(options):
  (name,) = options
  with pytest.raises(ValueError, match=f"penalty: {name} must be"):
    ow.contrib.penalty(AXIS, **options)


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
def test_radial_mean_length_is_mean_of_workers_lengths(context):
  """Differences at right angles, in bfloat16; none, and two that cancel, give zero."""
  mean = ow.contrib.radial_mean(AXIS)

  def reduce(x):
    return mean.update(x, mean.init(x))[0]

  x = {
    "right": jnp.array([[6, 0], [0, 2]], jnp.bfloat16),
    "none": jnp.zeros((2, 3)),
    "opposite": jnp.array([[1.0], [-3.0]]),
    "huge": jnp.array([[1e30, 0.0], [0.0, 1e30]]),
    "rounded": jnp.array([[1.0, 2.0, 3.0], [-0.7, -1.4, -2.1]]),
    "complex": jnp.array([[3j, 0], [1j, 0]], jnp.complex64),
  }
  found = in_context(context, reduce, 2, (0,), 0)(x)
  assert found["right"].dtype == jnp.bfloat16
  half = np.sqrt(0.5)
  for name, values in {
    "right": [4 * half] * 2,
    "none": [0.0] * 3,
    "opposite": [0.0],
    "huge": [1e30 * half] * 2,
    "rounded": [0.0] * 3,
    "complex": [2j, 0],
  }.items():
    one = np.asarray(found[name], np.complex64 if name == "complex" else np.float32)
    np.testing.assert_allclose(one, [values] * 2, rtol=4e-3 if name == "right" else 1e-6)


def test_adasum_with_zero_gradient_matches_numpy():
  tree = gradients(np.random.default_rng(10), 4)
  for x in tree.values():
    x[1] = 0
  assert_near(over_shards("vmap", ow.contrib.adasum(), tree, 4), expected("adasum", tree), 1e-3)


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1.0, 1e18, 1e25])
def test_adasum_of_equal_gradients_is_mean_at_any_scale(size):
  grads = np.full((4, 3), size, np.float32)
  np.testing.assert_allclose(reduced(ow.contrib.adasum(), grads), grads, rtol=1e-5)


def test_adasum_gradient_whose_square_overflows_gives_mean():
  grads = np.array([[1e25, 2e25], [1.0, -1.0]], np.float32)
  found = np.asarray(reduced(ow.contrib.adasum(), grads))
  np.testing.assert_allclose(found[0], [5e24, 1e25], rtol=1e-5)
