"""A history of parameters, and what reads past versions from it."""

import functools
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_staleness as ref
from boxes_cases import linen_boxes
from helpers import AXIS, assert_close, bits, in_context
from staleness_cases import START, arrays

import optax_wrappers as ow

# History.


def test_history_random_delays_match_numpy_server():
  rng = np.random.default_rng(5)
  tx = ow.contrib.params_history(ow.drop_stale(optax.sgd(0.1, 0.9), 3), 3)
  server = ref.StalenessAware(ref.Momentum(0.1, 0.9), max_staleness=3)
  params, expected = arrays(START), START
  state, versions = tx.init(params), ref.Versions(4)
  server.init(expected)
  versions.record(0, expected)

  @jax.jit
  def step(params, state, delay, noise):
    then = ow.contrib.past_params(state, delay)
    grads = jax.tree.map(lambda x, n: jnp.sin(x) + n, then, noise)
    step = ow.get_state(state, ow.states.StalenessState).step
    ago = jnp.clip(delay, 0, jnp.minimum(step, 3))
    updates, state = tx.update(grads, state, params, computed_at=step - ago)
    return optax.apply_updates(params, updates), state

  for delay in [0, 3, *rng.integers(-1, 7, 14)]:
    noise = [rng.normal(size=x.shape) for x in START]
    cut = versions.available(delay)
    grads = [np.sin(x) + n for x, n in zip(versions.past(delay), noise)]
    updates = server.step([grads], [server.version - cut], expected)
    expected = [x + u for x, u in zip(expected, updates)]
    versions.record(server.version, expected)
    params, state = step(params, state, np.int32(delay), arrays(noise))
    assert_close(params, expected, rtol=2e-5, atol=2e-5)
  assert list(ow.get_state(state, ow.states.StalenessState).histogram) == list(server.histogram)


def test_history_holds_params_after_outer_wrapper_changes_updates():
  tx = ow.clip_variables(ow.contrib.params_history(ow.drop_stale(optax.sgd(1.0), 2), 2), 1.0)
  params = np.array([0.6, 0.0], np.float32)
  state, seen = tx.init(params), [params]

  @jax.jit
  def step(params, state):
    now = ow.get_state(state, ow.states.StalenessState).step
    updates, state = tx.update(-jnp.ones(2), state, params, computed_at=now)
    return optax.apply_updates(params, updates), state

  for _ in range(3):
    params, state = step(params, state)
    seen.append(params)
  assert_close(ow.contrib.past_params(state, 1), seen[-2])
  assert_close(ow.contrib.past_params(state, 2), seen[-3])


def test_history_gives_delay_compensation_its_computed_params():
  told = optax.chain(ow.contrib.delay_compensation(0.4), ow.drop_stale(optax.sgd(0.3), 2))
  looks = ow.contrib.params_history(told, 2)
  params = np.array([1.0, -0.5], np.float32)
  a, b, versions = told.init(params), looks.init(params), [params]
  update_told, update_looks = jax.jit(told.update), jax.jit(looks.update)
  for delay in (0, 1, 2, 2, 1):
    stamp = max(int(a[1].step) - delay, 0)
    then = versions[stamp]
    updates, a = update_told(np.cos(then), a, params, computed_at=stamp, computed_params=then)
    again, b = update_looks(np.cos(then), b, params, computed_at=stamp)
    assert_close(again, updates)
    params = params + np.asarray(updates)
    versions.append(params)


def test_history_given_computed_params_come_first_and_stamps_are_clipped():
  """Parameters that are given come first; a stamp of the future is one of today."""
  inner = optax.chain(ow.contrib.delay_compensation(1.0), ow.drop_stale(optax.sgd(1.0), 3))
  tx = ow.contrib.params_history(inner, 3)
  zero, start, now, given = (np.array([x], np.float32) for x in (0.0, 1.0, 2.0, -1.0))
  _, state = jax.jit(tx.update)(zero, tx.init(start), start, computed_at=0)
  # Step 1; step 0 had 1.0.
  update = functools.partial(jax.jit(tx.update), now, state, now)
  for extra, then in (
    ({"computed_at": 0}, 1.0),
    ({"computed_at": 0, "computed_params": given}, -1.0),
    ({"computed_at": 2}, 2.0),
    ({"computed_at": -1}, 1.0),
  ):
    assert_close(update(**extra)[0], np.array([-(2.0 + 4.0 * (2.0 - then))]))


def test_history_gives_each_shard_its_own_version():
  """Under shard_map's types the ring is one for all shards, and what is read from it is not."""
  aware = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS), 3, axis_name=AXIS)
  tx = ow.contrib.params_history(optax.chain(ow.contrib.delay_compensation(1.0), aware), 3)
  params = np.array([0.0], np.float32)
  state, versions = tx.init(params), [params]
  axes = ow.worker_axes(state, replicated=True)

  def step(params, state, grad, stamp):
    updates, state = tx.update(grad, state, params, computed_at=stamp)
    return optax.apply_updates(params, updates), state

  step = in_context("shard_map", step, 2, (None, axes, 0, 0), (None, axes))
  for delays in ([0, 0], [1, 0], [2, 1], [0, 3]):
    stamps = np.maximum(len(versions) - 1 - np.array(delays), 0)
    grads = np.array([[1.0], [-0.5]])
    past = np.stack([np.asarray(versions[t]) for t in stamps])
    expected = np.asarray(params) - (grads + grads**2 * (np.asarray(params) - past)).mean(0)
    params, state = step(params, state, grads.astype(np.float32), stamps.astype(np.int32))
    versions.append(params)
    assert_close(params, expected, rtol=1e-5)


def save_by_flax(tree, target):
  return flax.serialization.from_bytes(target, flax.serialization.to_bytes(tree))


@pytest.mark.parametrize(
  "save", [save_by_flax, lambda tree, target: pickle.loads(pickle.dumps(tree))]
)
def test_history_checkpoint_mid_run_resumes_bit_for_bit(save):
  aware = ow.staleness_aware(optax.sgd(0.1, 0.9), ow.staleness.polynomial(), max_staleness=3)
  tx = ow.contrib.params_history(
    optax.chain(ow.contrib.delay_compensation(2.0, decay=0.9), aware), 3
  )

  @jax.jit
  def step(params, state, delay):
    grads = jnp.sin(ow.contrib.past_params(state, delay))
    now = ow.get_state(state, ow.states.StalenessState).step
    updates, state = tx.update(grads, state, params, computed_at=now - delay)
    return optax.apply_updates(params, updates), state

  def run(held, delays):
    for delay in delays:
      held = step(*held, np.int32(delay))
    return held

  params = np.array([1.0, -2.0, 0.5], np.float32)
  first = params, tx.init(params)
  half = run(first, [0, 1, 2, 1, 4])
  restored = jax.tree.map(jnp.asarray, save(half, first))
  assert bits(run(restored, [3, 0, 2, 2])) == bits(run(half, [3, 0, 2, 2]))


def test_history_and_delay_compensation_errors_arguments_of_update():
  tx = optax.chain(ow.contrib.delay_compensation(), ow.staleness_aware(optax.sgd(0.1)))
  params = jnp.ones(2)
  state = tx.init(params)
  with pytest.raises(ValueError, match="computed_at is needed"):
    tx.update(params, state, params, computed_params=params)
  with pytest.raises(TypeError, match="computed_at must be"):
    tx.update(params, state, params, computed_at=1.0, computed_params=params)
  with pytest.raises(ValueError, match=r"computed_params=then.*params_history"):
    tx.update(params, state, params, computed_at=0)
  with pytest.raises(ValueError, match="shape"):
    tx.update(params, state, params, computed_at=0, computed_params=jnp.ones(3))
  with pytest.raises(ValueError, match="params is needed"):
    tx.update(params, state, computed_at=0, computed_params=params)
  with pytest.raises(ValueError, match="max_staleness must be at least 0"):
    ow.contrib.params_history(tx, -1)
  with pytest.raises(ValueError, match="exactly one StalenessState, found 0"):
    ow.contrib.params_history(optax.sgd(0.1), 2).init(params)
  kept = ow.contrib.params_history(ow.drop_stale(optax.sgd(0.1), 2), 2)
  with pytest.raises(ValueError, match="params is needed"):
    kept.update(params, kept.init(params), computed_at=0)
  with pytest.raises(ValueError, match="made for max_staleness=2, and this is 3"):
    ow.contrib.params_history(ow.drop_stale(optax.sgd(0.1), 3), 3).update(
      params, kept.init(params), params, computed_at=0
    )
  with pytest.raises(TypeError, match="state must be a ParamsHistoryState"):
    kept.update(params, state, params, computed_at=0)
  with pytest.raises(ValueError, match="exactly one ParamsHistoryState, found 0"):
    ow.contrib.past_params(state, 1)
  with pytest.raises(TypeError, match="staleness must be"):
    ow.contrib.past_params(kept.init(params), 0.5)
  link = ow.contrib.delay_compensation()
  with pytest.raises(ValueError, match="computed_params is needed"):
    link.update(params, link.init(params), params)


def test_past_params_of_flax_boxes_keep_structure():
  params = linen_boxes()
  tx = ow.contrib.params_history(ow.drop_stale(optax.sgd(0.1), 3), 3)
  state = tx.init(params)
  for step in range(3):
    updates, state = tx.update(params, state, params, computed_at=step)
    before, params = params, optax.apply_updates(params, updates)
  found = ow.contrib.past_params(state, 1)
  assert jax.tree.structure(found) == jax.tree.structure(before)
  assert_close(found, before)
