"""skip_spikes, against the rules of other trainers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, bits, in_context, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

skip_spikes = ow.contrib.skip_spikes


def series(seed, num_steps=120):
  """Losses with spikes, a new level from step 60 on, and one NaN."""
  rng = np.random.default_rng(seed)
  losses = 2 + 0.1 * rng.normal(size=num_steps)
  losses[60:] += 1.5
  losses[rng.choice(num_steps, 12, replace=False)] += rng.uniform(0.2, 4, 12)
  return np.float32(losses)


def decisions(tx, losses):
  """Whether each step was taken, from what it did."""
  params = jnp.zeros(())
  update = jax.jit(lambda state, loss: tx.update(jnp.ones(()), state, params, value=loss))
  state, taken = tx.init(params), []
  for loss in losses:
    updates, state = update(state, loss)
    taken.append(float(updates) != 0)
  return taken, state


def levanter(losses, length, sigma):
  """`SkipStepConfig`: all values in a rolling window, deviations with the divisor n."""
  seen, taken = [], []
  for loss in losses.astype(np.float64):
    last = seen[-length:]
    threshold = np.inf
    if len(last) >= max(2, length // 2):
      threshold = np.mean(last) + sigma * max(np.std(last), 1e-6)
    taken.append(bool(loss <= threshold))
    seen.append(loss)
  return taken


def maxtext(losses, length, sigma):
  """`skip_step_on_spikes`: the same with the divisor n - 1, one step earlier."""
  seen, taken = [], []
  for count, loss in enumerate(losses.astype(np.float64)):
    last = seen[-length:]
    is_warm = count + 1 < max(2, length // 2)
    deviation = np.std(last, ddof=1) if len(last) > 1 else 0.0
    taken.append(is_warm or bool(loss - np.mean(last or [0.0]) <= sigma * deviation))
    seen.append(loss)
  return taken


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("length", "sigma"), [(16, 3.0), (9, 2.0), (128, 6.0)])
def test_skip_spikes_decides_like_levanter_and_maxtext(length, sigma, seed):
  losses = series(seed)
  theirs = {"window": length, "sigma": sigma, "max_skips": None, "remember_spikes": True}
  taken, _ = decisions(skip_spikes(optax.sgd(1.0), **theirs), losses)
  assert taken == levanter(losses, length, sigma)
  earlier = max(2, length // 2) - 1
  taken, _ = decisions(skip_spikes(optax.sgd(1.0), **theirs, min_steps=earlier, ddof=1), losses)
  assert taken == maxtext(losses, length, sigma)
  assert (length == 128) == all(taken)


def by_accepted(losses, length, sigma, min_steps, max_skips):
  """A window of accepted steps; a NaN is never taken, and a finite one after `max_skips`."""
  window, taken, row = [], [], 0
  for loss in losses.astype(np.float64):
    is_spike = False
    if len(window) >= min_steps and row < max_skips:
      last = window[-length:]
      is_spike = loss > np.mean(last) + sigma * np.std(last)
    take = bool(np.isfinite(loss) and not is_spike)
    row = 0 if take else row + 1
    window += [loss] if take else []
    taken.append(take)
  return taken


@pytest.mark.parametrize("seed", range(3))
def test_skip_spikes_remembers_accepted_steps_and_leaves_a_new_level_in_the_end(seed):
  losses = series(seed)
  losses[[5, 40, 41]] = np.nan, np.inf, -np.inf
  tx = skip_spikes(optax.sgd(1.0), window=16, sigma=3.0, min_steps=4, max_skips=5)
  taken, state = decisions(tx, losses)
  assert taken == by_accepted(losses, 16, 3.0, 4, 5)
  assert not any(taken[60:65]) and sum(taken[65:]) > 40
  assert float(ow.metrics(state)["skipped_steps"]) == taken.count(False)


@pytest.mark.optax_promotes
def test_skip_spikes_step_is_as_if_it_had_not_been():
  rng = np.random.default_rng(1)
  grads = [np.float32(rng.normal(size=3)) for _ in range(12)]
  tx = skip_spikes(optax.adam(0.1), window=4, sigma=1e3)
  params, inner = jnp.ones(3), optax.adam(0.1)
  state, expected = tx.init(params), inner.init(params)
  alone = params
  for k, grad in enumerate(grads):
    if k in (5, 8):
      bad = 1e6 * grad if k == 5 else grad * np.nan
      before = bits(state.inner_state)
      updates, state = tx.update(bad, state, params)
      assert not updates.any() and bits(state.inner_state) == before
    updates, state = tx.update(grad, state, params)
    params = optax.apply_updates(params, updates)
    updates, expected = inner.update(grad, expected, alone)
    alone = optax.apply_updates(alone, updates)
  assert bits(params) == bits(alone)
  assert int(state.skipped) == 2


def test_skip_spikes_never_takes_a_gradient_that_is_not_finite():
  tx = skip_spikes(optax.sgd(1.0), max_skips=2)
  state = tx.init(jnp.zeros(2))
  for _ in range(6):
    updates, state = tx.update(jnp.array([1.0, jnp.inf]), state, value=jnp.float32(1.0))
    assert not updates.any()
  assert int(state.in_a_row) == 6 and int(state.num_values) == 0


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("by", ["loss", "norm"])
@pytest.mark.parametrize("bad", [1e4, np.nan])
def test_skip_spikes_one_shard_spikes_and_all_skip(context, by, bad):
  """Around a reduction of local gradients; the numbers are those without the bad step."""
  tx = skip_spikes(ow.cross_shard(optax.sgd(0.1, momentum=0.9), AXIS), AXIS, window=4)
  start = jnp.zeros(2)
  state = tx.init(start)
  axes = ow.worker_axes(state, replicated=True)

  def step(params, state, grad, loss):
    extra = {"value": loss} if by == "loss" else {}
    updates, state = tx.update(grad, state, params, **extra)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, 4, (None, axes, 0, 0), (None, axes))
  rng = np.random.default_rng(2)
  params, momentum, expected = start, np.zeros(2), np.zeros(2)
  for k in range(6):
    grads, losses = np.float32(1 + 0.01 * rng.normal(size=(4, 2))), np.ones(4, np.float32)
    if k == 4:
      grads[2], losses[2] = bad, bad
    else:
      momentum = 0.9 * momentum + grads.mean(0, dtype=np.float64)
      expected = expected - 0.1 * momentum
    params, state = step(params, state, grads, losses)
  assert_close(params, expected, rtol=1e-5)
  assert int(np.ravel(state.skipped)[0]) == 1


def test_skip_spikes_sends_eight_bytes_more():
  tx = skip_spikes(ow.cross_shard(optax.sgd(0.1), AXIS), AXIS)
  params = jnp.zeros(100)
  state = tx.init(params)

  def step(state, grad, loss):
    return tx.update(grad[0], state, params, value=loss[0])[0]

  mapped = jax.shard_map(
    step, mesh=mesh_of(4), in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P(), check_vma=True
  )
  lowered = jax.jit(mapped).lower(state, jnp.zeros((4, 100)), jnp.zeros(4))
  sends = ow.inspect.compiled_collectives(lowered.compile())
  assert sum(c.num_bytes for c in sends) == 408


def test_skip_spikes_of_workers_decide_alone():
  tx = ow.local_steps(skip_spikes(optax.sgd(1.0), window=4), AXIS, communication_period=100)
  params, state = ow.stack_workers((jnp.zeros(()), tx.init(jnp.zeros(()))), 4)
  step = jax.jit(ow.map_workers(lambda g, s, p: tx.update(g, s, p), AXIS))
  for k in range(4):
    grads = jnp.ones(4).at[1].set(100.0 if k == 3 else 1.0)
    updates, state = step(grads, state, params)
  np.testing.assert_array_equal(updates, [-1, 0, -1, -1])
  np.testing.assert_array_equal(state.inner_state.skipped, [0, 1, 0, 0])


def test_skip_spikes_hands_on_the_loss_and_other_extra_args():
  seen = {}

  def update(updates, state, params=None, **extra_args):
    seen.update(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
  tx = skip_spikes(inner)
  tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=jnp.float32(3), other=1)
  assert float(seen["value"]) == 3 and seen["other"] == 1
  seen.clear()
  tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
  assert seen == {}


def test_skip_spikes_errors():
  for arguments, message in (
    ({"window": 1}, "window must be an int of at least 2"),
    ({"window": 4, "min_steps": 5}, "min_steps must be at most window, 4; got 5"),
    ({"max_skips": -1}, "max_skips must be an int of at least 0"),
    ({"sigma": -1.0}, "sigma must be a number of at least 0"),
    ({"ddof": 0.5}, "ddof must be an int"),
  ):
    with pytest.raises(ValueError, match=message):
      skip_spikes(optax.sgd(0.1), **arguments)
  with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
    skip_spikes(0.1)
  tx, params = skip_spikes(optax.sgd(0.1), AXIS), jnp.ones(2)
  with pytest.raises(ValueError, match="is not bound here"):
    tx.update(params, tx.init(params))
  tx = skip_spikes(optax.sgd(0.1))
  with pytest.raises(TypeError, match="state must be a SkipSpikesState"):
    tx.update(params, optax.sgd(0.1).init(params))
  with pytest.raises(ValueError, match=r"value must be a scalar.*\(2,\)"):
    tx.update(params, tx.init(params), value=params)
  # Each shard would decide for itself about an update that is the same on all.
  tx = skip_spikes(ow.cross_shard(optax.sgd(0.1), AXIS))
  state = tx.init(params)
  mapped = jax.shard_map(
    lambda g: tx.update(g[0], state, params)[0], mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P()
  )
  with pytest.raises(ValueError, match=f"differs between shards.*axis_name='{AXIS}'"):
    jax.jit(mapped)(jnp.ones((4, 2)))
