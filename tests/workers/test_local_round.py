"""A round of local steps as one program."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, assert_close, mesh_of
from local_steps_cases import PERIOD, nesterov

import optax_wrappers as ow

# A round as one program.


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 0), (2, 3)], ids=str)
def test_local_round_with_participation_equals_single_steps(fragments, delay):
  """Compared with single steps; with a delay, the last exchange of a round is sent in the next
  call."""
  schedule = {"communication_period": PERIOD, "fragments": fragments, "delay": delay}
  options = {"outer": nesterov(0.7, 0.9), "pull": 0.5, "absent": "keep"}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.9), AXIS, **options, **schedule)

  def step(params, state, target, **extra_args):
    grads = jax.tree.map(lambda p: p - target, params)
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  def counted(params, state, target, weight):
    return step(params, state, target, participation=weight)

  counted = jax.jit(ow.map_workers(counted, AXIS))
  one_round = ow.local_round(functools.partial(step, exchange=False), tx)
  one_round = jax.jit(ow.map_workers(one_round, AXIS))

  start = {"a": jnp.zeros(4), "b": jnp.ones(4)}
  begun = ow.stack_workers((start, tx.init(start)), 3)
  weights = np.float32([[1, 0, 2], [0, 3, 1], [0, 0, 0], [2, 1, 0]])  # [rounds, workers]
  targets = np.float32(np.random.default_rng(3).standard_normal((3, 3 * PERIOD, 4)))
  (params, state), expected = begun, []
  for t in range(3 * PERIOD):
    r, is_next = t // PERIOD, delay > 0 and (t + 1) % PERIOD == 0
    params, state = counted(params, state, targets[:, t], weights[r + is_next])
    expected.append(params)
  params, state = begun
  for r, seen in enumerate(expected[PERIOD - 1 :: PERIOD]):
    part = targets[:, r * PERIOD : (r + 1) * PERIOD]
    params, state = one_round(params, state, part, weights[r])
    assert_close(params, seen, rtol=2e-5, atol=2e-6)


def test_local_round_with_delay_sends_before_scan_of_steps():
  """The all-reduce comes before the scan, and needs none of its results."""
  schedule = {"communication_period": 4, "delay": 2}
  tx = ow.diloco(optax.sgd(0.1), AXIS, **schedule)

  def step(params, state, grad):
    updates, state = tx.update(grad, state, params, exchange=False)
    return params + updates, state

  one_round = ow.map_workers(ow.local_round(step, tx), AXIS, mesh=mesh_of(2))
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  traced = jax.jit(one_round).trace(jnp.zeros(2), state, jnp.zeros((2, 4)))
  text = str(traced.jaxpr)
  assert 0 < text.index("psum") < text.index("scan[")
  assert text.count("scan[") == 2
  # The form depends on the platform for which the round is compiled.
  assert " conditional(" not in traced.lower().compile().as_text()


@pytest.mark.parametrize("policy", ["reset", "average"])
def test_local_round_with_delay_and_inner_state_equals_steps(policy):
  """In the first round nothing is in flight, and inner states do not change."""
  schedule = {"communication_period": PERIOD, "delay": 2}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.9), AXIS, inner_state=policy, **schedule)
  grads = jnp.arange(16.0).reshape(2, 8)

  def step(params, state, grad):
    updates, state = tx.update(grad, state, params, exchange=False)
    return params + updates, state

  def counted(params, state, grads):
    def one(carry, grad):
      updates, state = tx.update(grad, carry[1], carry[0])
      return (carry[0] + updates, state), None

    return jax.lax.scan(one, (params, state), grads)[0]

  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  expected, _ = jax.jit(ow.map_workers(counted, AXIS))(jnp.zeros(2), state, grads)
  params = jnp.zeros(2)
  one_round = jax.jit(ow.map_workers(ow.local_round(step, tx), AXIS))
  for r in range(2):
    params, state = one_round(params, state, grads[:, r * PERIOD : (r + 1) * PERIOD])
  np.testing.assert_allclose(params, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("tx", "message"),
  [
    (optax.sgd(0.1), "tx must hold one wrapper over workers.* it holds none"),
    (
      ow.diloco(ow.local_steps(optax.sgd(0.1), None), None),
      "tx must hold one wrapper over workers.* it holds LocalStepsState, LocalStepsState",
    ),
    (
      ow.diloco(optax.sgd(0.1), None, communication_period=lambda step: step + 4),
      "communication_period of tx must be an int, got <function",
    ),
    (
      ow.diloco(optax.sgd(0.1), None, communication_period=None),
      "communication_period of tx must be an int, got None",
    ),
    (
      optax.chain(optax.clip(1.0), ow.diloco(optax.sgd(0.1), None, communication_period=4)),
      r"leading axis of communication_period, 4 steps; batches\['x'\] has shape \[2, 3\]",
    ),
  ],
)
def test_local_round_errors(tx, message):
  params = jnp.zeros(2)
  one_round = ow.local_round(lambda params, state, batch: (params, state), tx)
  with pytest.raises(ValueError, match=f"local_round: .*{message}"):
    one_round(params, tx.init(params), {"x": jnp.zeros((2, 3))})


def test_state_with_function_as_period_is_pickled_and_goes_on():
  """And after it local_round still knows the schedule, which is that of tx."""
  by_function = ow.diloco(optax.sgd(0.1), None, communication_period=lambda step: 2 + 0 * step)
  state = by_function.init(jnp.zeros(2))
  copy = pickle.loads(pickle.dumps(state))
  assert copy.workers == state.workers and jax.tree.structure(copy) == jax.tree.structure(state)
  jax.jit(by_function.update)(jnp.ones(2), copy, jnp.zeros(2))
  tx = ow.diloco(optax.sgd(0.1), None, communication_period=3)
  state = pickle.loads(pickle.dumps(tx.init(jnp.zeros(2))))

  def step(params, state, grad):
    updates, state = tx.update(grad, state, params, exchange=False)
    return params + updates, state

  _, state = ow.local_round(step, tx)(jnp.zeros(2), state, jnp.ones((3, 2)))
  assert int(state.exchanges) == 1


def test_local_round_of_state_with_another_schedule_follows_tx():
  """A run may go on with longer rounds: the state's own schedule is not asked."""
  short, long = (ow.local_steps(optax.sgd(0.5), None, communication_period=n) for n in (2, 3))

  def step(params, state, grad):
    updates, state = long.update(grad, state, params, exchange=False)
    return params + updates, state

  params, state = jax.jit(ow.local_round(step, long))(
    jnp.zeros(2), short.init(jnp.zeros(2)), jnp.ones((3, 2))
  )
  assert int(state.exchanges) == 1 and int(state.step) == 3
  np.testing.assert_array_equal(params, [-1.5, -1.5])
