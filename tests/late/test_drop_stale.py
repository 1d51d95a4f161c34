"""drop_stale and drop_rate against the originals' table and a plain NumPy simulator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, bits, in_context, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

START = {"v0": np.float32(0.0), "v1": np.float32(1.0)}


def numpy_stale_sgd(params, grads, stamps, max_staleness, lr, momentum):
  """One gradient after another; returns parameters, momentum, accepted, dropped."""
  trace, step, dropped = np.zeros_like(params), 0, 0
  for g, stamp in zip(grads, stamps):
    if step - stamp <= max_staleness:
      trace = momentum * trace + g
      params = params - lr * trace
      step += 1
    else:
      dropped += 1
  return params, trace, step, dropped


# The originals' table: everyone computes at step 0, then all apply one after another; SGD 1.0,
# gradients -1.


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
  ("workers", "max_staleness", "step", "v0", "dropped"),
  [
    (1, 0, 1, 1, 0),
    (1, -1, 0, 0, 1),
    (2, 0, 1, 1, 1),
    (2, 1, 2, 2, 0),
    (3, 0, 1, 1, 2),
    (3, 1, 2, 2, 1),
  ],
)
def test_drop_stale_upstream_table_of_workers_and_max_staleness(
  context, workers, max_staleness, step, v0, dropped
):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS), max_staleness)

  def apply_all(params, grads):
    state = tx.init(params)
    for _ in range(workers):
      updates, state = tx.update(grads, state, params, computed_at=0)
      params = optax.apply_updates(params, updates)
    return params, state

  # Each gradient is itself the mean of two shards' unequal halves.
  grads = jax.tree.map(lambda _: np.array([-0.5, -1.5], np.float32), START)
  params, state = in_context(context, apply_all, 2, (None, 0), None)(START, grads)
  assert (float(params["v0"]), float(params["v1"])) == (v0, v0 + 1)
  assert (int(state.step), int(state.dropped)) == (step, dropped)
  assert float(ow.metrics(state)["drop_rate"]) == pytest.approx(dropped / workers)


def test_drop_stale_dropped_gradient_does_not_advance_step():
  tx = ow.drop_stale(optax.sgd(1.0), 1)
  state, update, accepted = tx.init(START), jax.jit(tx.update), []
  for _ in range(5):
    before = int(state.step)
    _, state = update(START, state, START, computed_at=0)
    accepted.append(int(state.step) > before)
  assert accepted == [True, True, False, False, False]


@pytest.mark.parametrize("jit", [False, True])
def test_drop_stale_momentum_and_nan_in_dropped_match_numpy(jit):
  """200 gradients with stamps up to 6 old, momentum; the dropped ones hold NaN."""
  rng = np.random.default_rng(0)
  tx = ow.drop_stale(optax.sgd(0.1, momentum=0.9), 2)
  update = jax.jit(tx.update) if jit else tx.update
  params, state = np.zeros(3, np.float32), tx.init(np.zeros(3, np.float32))
  grads, stamps = rng.normal(size=(200, 3)), []
  for g in grads:
    stamps.append(max(0, int(state.step) - int(rng.integers(0, 7))))
    if int(state.step) - stamps[-1] > 2:
      g = np.full(3, np.nan)
    grad = jax.device_put(g.astype(np.float32))
    updates, state = update(grad, state, params, computed_at=stamps[-1])
    params = params + np.asarray(updates)
  expected, trace, step, dropped = numpy_stale_sgd(np.zeros(3), grads, stamps, 2, 0.1, 0.9)
  assert (int(state.step), int(state.dropped)) == (step, dropped)
  assert 50 < dropped < 150
  assert_close(params, expected, rtol=1e-4, atol=1e-5)
  assert_close(state.inner_state[0].trace, trace, rtol=1e-4, atol=1e-5)
  assert float(ow.metrics(state)["drop_rate"]) == pytest.approx(dropped / 200)


@pytest.mark.optax_promotes
def test_drop_stale_drop_leaves_inner_state_unchanged():
  tx = ow.drop_stale(optax.adam(0.1), 0)
  params = np.array([1.0, 2.0], np.float32)
  state, update = tx.init(params), jax.jit(tx.update)
  _, state = update(np.array([1.0, -1.0], np.float32), state, params, computed_at=0)
  for grad in ([np.nan, np.inf], [5.0, 5.0]):
    updates, after = update(np.array(grad, np.float32), state, params, computed_at=0)
    assert bits(updates) == bits(np.zeros(2, np.float32))
    assert bits(after.inner_state) == bits(state.inner_state)
    state = after
  assert int(state.dropped) == 2


@pytest.mark.optax_promotes
def test_drop_stale_nan_of_dropped_gradient_keeps_derivative_finite():
  tx = ow.drop_stale(optax.adam(0.1), 0)

  def after(scale):
    params = jnp.array([1.0, 2.0])
    state = tx.init(params)
    _, state = tx.update(params * scale, state, params, computed_at=0)
    updates, state = tx.update(jnp.array([np.nan, 1.0]), state, params, computed_at=0)
    params = optax.apply_updates(params, updates)
    updates, state = tx.update(params * scale, state, params, computed_at=1)
    return updates.sum()

  assert np.isfinite(jax.jit(jax.grad(after))(2.0))


@pytest.mark.optax_promotes
@pytest.mark.parametrize("of", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_drop_stale_first_step_dropped_derivative_as_without_drops(of):
  """At its start Adam has none: the square root of a second moment of zero."""

  def trained(rate, stamps):
    tx, params = ow.drop_stale(optax.adam(rate), 0), jnp.array([1.0, 2.0])
    state = tx.init(params)
    for stamp in stamps:
      updates, state = tx.update(params, state, params, computed_at=stamp)
      params = optax.apply_updates(params, updates)
    return params.sum()

  expected = jax.grad(trained)(0.1, (0, 1))
  assert_close(of(lambda rate: jax.grad(trained)(rate, (-1, 0, 0, 1)))(0.1), expected)


@pytest.mark.parametrize("context", CONTEXTS)
def test_drop_stale_staleness_per_shard_matches_numpy(context):
  """8 shards, stamps drawn for each: the mean of the fresh, momentum frozen when none is, NaN in
  the stale."""
  rng = np.random.default_rng(1)
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(0.1, momentum=0.9), AXIS), 1, axis_name=AXIS)

  def step(params, state, grad, stamp):
    updates, state = tx.update(grad, state, params, computed_at=stamp)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, 8, (None, None, 0, 0), None)
  params, state = np.zeros(3, np.float32), tx.init(np.zeros(3, np.float32))
  expected, trace, accepted_steps, dropped = np.zeros(3), np.zeros(3), 0, 0
  for t in range(12):
    delays = np.full(8, 5) if t in (6, 7) else rng.integers(0, 4, 8)
    stamps = accepted_steps - delays
    fresh = delays <= 1
    grads = rng.normal(size=(8, 3)).astype(np.float32)
    grads[~fresh] = np.nan
    params, state = step(params, state, grads, stamps.astype(np.int32))
    dropped += (~fresh).sum()
    if fresh.any():
      trace = 0.9 * trace + grads[fresh].astype(np.float64).mean(0)
      expected = expected - 0.1 * trace
      accepted_steps += 1
    assert_close(params, expected, rtol=1e-5, atol=1e-6)
    assert (int(state.step), int(state.dropped)) == (accepted_steps, dropped)
  assert accepted_steps == 10
  assert float(ow.metrics(state)["drop_rate"]) == pytest.approx(dropped / 96)


def test_drop_stale_over_two_mesh_axes_means_fresh_shards():
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), ("a", "b")), 0, axis_name=("a", "b"))

  def step(grad, stamp):
    updates, state = tx.update(grad[0, 0], tx.init(jnp.zeros(())), computed_at=stamp[0, 0])
    return updates, state.dropped

  mapped = jax.shard_map(step, mesh=mesh, in_specs=P("a", "b"), out_specs=P())
  grads = np.arange(8, dtype=np.float32).reshape(2, 4)
  stamps = np.where(grads % 3 == 0, 0, -1).astype(np.int32)  # fresh: 0, 3, 6
  updates, dropped = jax.jit(mapped)(grads, stamps)
  assert (float(updates), int(dropped)) == (-3.0, 5)


def test_drop_stale_one_stamp_for_all_shards_takes_summed_gradients():
  """With axis_name and one computed_at, all shards are fresh or all stale, so autodiff's sum can be
  used."""
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS), 0, axis_name=AXIS)

  def step(w, x):
    state, grad = tx.init(w), jax.grad(lambda w: jnp.sum(w * x))(w)
    first, state = tx.update(grad, state, w, computed_at=0)
    second, state = tx.update(grad, state, w, computed_at=0)
    return first, second, state.dropped

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P())
  x = np.array([0.0, 1.0, 2.0, 5.0], np.float32)
  first, second, dropped = jax.jit(mapped)(np.float32(0.0), x)
  assert (float(first), float(second), int(dropped)) == (-2.0, 0.0, 4)


def test_drop_rate_is_zero_at_init_and_is_found_in_chain():
  tx = optax.chain(optax.clip(1.0), ow.drop_stale(optax.sgd(0.1), 1))
  ones = np.ones(2, np.float32)
  state = tx.init(ones)
  assert float(ow.metrics(state)["drop_rate"]) == 0.0
  _, state = jax.jit(tx.update)(ones, state, computed_at=-7)
  assert float(ow.metrics(state)["drop_rate"]) == 1.0


def test_drop_stale_counters_saturate_at_int32_limits():
  tx = ow.drop_stale(optax.sgd(1.0), 0)
  one, last, update = np.float32(1), np.int32(2**31 - 1), jax.jit(tx.update)
  first = tx.init(one)
  state = first.replace(step=last, dropped=last)
  _, state = update(one, state, computed_at=2**31 - 1)
  _, state = update(one, state, computed_at=0)
  assert (int(state.step), int(state.dropped)) == (2**31 - 1, 2**31 - 1)
  # The oldest stamp there is must not look like a future one.
  _, state = update(one, first.replace(step=np.int32(5)), computed_at=-(2**31))
  assert int(state.dropped) == 1


def test_drop_stale_extra_args_reach_inner_without_computed_at():
  seen = []

  def update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  tx = ow.drop_stale(optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update), 0)
  tx.update(jnp.ones(()), tx.init(jnp.ones(())), computed_at=0, value=1.0)
  assert seen == [{"value": 1.0}]


# Bad input.


def test_drop_stale_errors_max_staleness_computed_at_and_axis():
  with pytest.raises(TypeError, match=r"max_staleness must be a Python int, got 1.5"):
    ow.drop_stale(optax.sgd(0.1), 1.5)
  with pytest.raises(ValueError, match="below 2\\*\\*30"):
    ow.drop_stale(optax.sgd(0.1), 2**40)
  tx = ow.drop_stale(optax.sgd(0.1), 1)
  params = np.ones(2, np.float32)
  state = tx.init(params)
  with pytest.raises(ValueError, match=r"computed_at is needed.*computed_at=step"):
    tx.update(params, state, params)
  with pytest.raises(TypeError, match="computed_at must be of integer dtype, got float32"):
    tx.update(params, state, params, computed_at=0.0)
  with pytest.raises(ValueError, match="computed_at must be a scalar"):
    tx.update(params, state, params, computed_at=np.zeros(2, np.int32))
  with pytest.raises(TypeError, match="dtype int32"):
    tx.update(np.ones(2, np.int32), state, params, computed_at=0)
  with pytest.raises(ValueError, match="'w' is not bound"):
    ow.drop_stale(optax.sgd(0.1), 1, axis_name=AXIS).update(params, state, params, computed_at=0)


def traced_error(tx, per_shard_gradient, match):
  def step(w, x, stamp):
    grad = x[0] if per_shard_gradient else jax.grad(lambda w: jnp.sum(w * x))(w)
    return tx.update(grad, tx.init(w), w, computed_at=stamp[0])[0]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P())
  with pytest.raises(ValueError, match=match):
    jax.jit(mapped)(np.float32(0.0), np.ones(4, np.float32), np.zeros(4, np.int32))


def test_drop_stale_stamps_per_shard_without_axis_name_is_error():
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS), 1)
  traced_error(tx, True, r"computed_at differs from shard to shard over \['w'\].*axis_name=")


def test_drop_stale_summed_gradients_with_stamps_per_shard_is_error():
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS), 1, axis_name=AXIS)
  traced_error(tx, False, r"summed stale and fresh gradients alike.*per_shard")


def test_drop_stale_step_and_stamp_per_worker_with_cross_shard_is_error():
  """Each has a counter of its own, so no check of the state finds it; one would drop alone."""
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(0.1), AXIS), 1)

  def step(params, steps, grad, stamp):
    state = tx.init(params).replace(step=steps[0])
    return tx.update(grad[0], state, params, computed_at=stamp[0])[0]

  own = P(AXIS)
  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), own, own, own), out_specs=P())
  with pytest.raises(ValueError, match=r"computed_at differs .*drop_stale\(..., axis_name=...\)"):
    jax.jit(mapped)(
      np.zeros(2, np.float32),
      np.zeros(4, np.int32),
      np.ones((4, 2), np.float32),
      np.arange(4, dtype=np.int32),
    )
