"""When workers synchronize, and counters at their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import AXIS, bits
from messages_cases import gradients, params, step_of

import optax_wrappers as ow


def test_step_counter_at_int32_limit_keeps_phase_of_exchanges():
  tx = ow.elastic_average(optax.sgd(1.0), None, communication_period=3, moving_rate=0.25)
  last = 2**31 - 1  # 1 mod 3
  state = tx.init(jnp.float32(0.0)).replace(step=jnp.int32(last - 1))
  params = jnp.float32(0.0)
  for i in range(6):
    before = float(state.center)
    updates, state = tx.update(jnp.float32(-1.0), state, params)
    params = optax.apply_updates(params, updates)
    assert int(state.step) >= 0
    assert (float(state.center) != before) == ((last + i) % 3 == 0)


def test_checkpoint_of_longer_round_ends_round_at_once():
  tx = ow.local_steps(optax.sgd(1.0), None, communication_period=4, outer=optax.sgd(1.0))
  state = tx.init(jnp.zeros(())).replace(step=jnp.int32(7), since=jnp.int32(7))
  _, state = tx.update(jnp.float32(-1.0), state, jnp.zeros(()))
  assert (float(state.center), int(state.since)) == (1.0, 0)


def test_period_function_below_one_or_delay_is_lengthened():
  rounds = ow.local_steps(
    optax.sgd(1.0), None, communication_period=lambda step: 1 - jnp.sign(step), outer=optax.sgd(0.5)
  )
  state, since = rounds.init(jnp.float32(0.0)), []
  for _ in range(3):
    _, state = rounds.update(jnp.float32(1.0), state, jnp.float32(0.0))
    since.append(int(state.since))
  assert since == [0, 0, 0]
  assert float(state.center) == -0.875  # half of the way to -1, three times
  # With a pull of 1, a round of 3 steps would keep none of them: it gets one more.
  for pull, expected in ((0.5, [1, 2, 0, 1, 2, 0]), (1.0, [1, 2, 3, 0, 1, 2])):
    options = {"communication_period": lambda step: 1, "delay": 3, "pull": pull}
    rounds = ow.local_steps(optax.sgd(1.0), None, **options)
    state, since = rounds.init(jnp.float32(0.0)), []
    for _ in range(6):
      _, state = rounds.update(jnp.float32(1.0), state, jnp.float32(0.0))
      since.append(int(state.since))
    assert since == expected


def test_step_counter_saturates_and_rounds_go_on():
  tx = ow.local_steps(optax.sgd(1.0), None, communication_period=3)
  last = jnp.iinfo(jnp.int32).max
  state = tx.init(jnp.float32(0.0)).replace(step=jnp.int32(last - 1))
  since = []
  for _ in range(5):
    _, state = tx.update(jnp.float32(1.0), state, jnp.float32(0.0))
    since.append(int(state.since))
  assert int(state.step) == last and since == [1, 2, 0, 1, 2]


def test_period_function_equal_to_delay_with_pull_one_is_longer():
  """With a pull of 1, an exchange that arrives a whole round later would undo all of its steps."""
  options = {"outer": optax.sgd(1.0), "delay": 2}

  def trained(period):
    tx = ow.local_steps(optax.sgd(0.5), AXIS, communication_period=period, **options)
    params, state = ow.stack_workers((jnp.zeros(()), tx.init(jnp.zeros(()))), 2)
    update = jax.jit(ow.map_workers(tx.update, AXIS))
    for _ in range(9):
      updates, state = update(jnp.array([1.0, -3.0]), state, params)
      params = optax.apply_updates(params, updates)
    return np.asarray(params), float(ow.center_params(state))

  (params, center), expected = trained(lambda step: 2), trained(3)
  np.testing.assert_array_equal(params, expected[0])
  # Each round of 3 steps moves the mean by 0.5 per step, except for the 2 that its arrival undoes.
  assert center == expected[1] > 0.5


def test_period_none_exchanges_only_by_argument():
  """Neither alone nor over an axis, unless the caller says so."""
  tx = ow.diloco(optax.sgd(0.1), None, communication_period=None)
  x, state, step = params(), tx.init(params()), step_of(tx)
  for i in range(5):
    x, state = step(gradients(i)[0], state, x)
  assert int(state.exchanges) == 0 and bits(state.center) == bits(params())
  _, state = tx.update(None, state, x, exchange=True)
  assert int(state.exchanges) == 1 and bits(state.center) != bits(params())
