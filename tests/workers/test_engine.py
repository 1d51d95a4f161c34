"""The engine of synchronizations: who decides, what is sent, and what a period costs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, assert_close, bits, compilations, in_context, mesh_of
from jax.sharding import PartitionSpec as P
from local_steps_cases import PERIOD, STEPS, by_caller, call, collectives, nesterov, problem

import optax_wrappers as ow


def test_replicated_params_or_counter_per_worker_is_error():
  tx = ow.elastic_average(optax.sgd(0.1), AXIS)
  state = ow.stack_workers(tx.init(jnp.ones(2)), 4)

  def step(params, state, grads):
    return tx.update(grads, state, params)[0]

  specs = ow.specs(state, workers=AXIS)
  replicated = jax.shard_map(
    step, mesh=mesh_of(4), in_specs=(P(), specs, P(AXIS)), out_specs=P(AXIS)
  )
  with pytest.raises(ValueError, match=r"every worker owns its parameters.*stack_workers"):
    jax.jit(replicated)(jnp.ones((1, 2)), state, jnp.ones((4, 2)))

  all_stacked = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (4, *jnp.shape(x))), tx.init(jnp.ones(2))
  )

  def own_counter(params, state, grads):
    state = jax.tree.map(lambda x: x[0], state)
    return tx.update(grads[0], state, params[0])[0][None]

  mapped = jax.shard_map(own_counter, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS))
  with pytest.raises(
    ValueError, match=r"exchanges differs from shard to shard over \['w'\].*specs"
  ):
    jax.jit(mapped)(jnp.ones((4, 2)), all_stacked, jnp.ones((4, 2)))


# Scheduling synchronization.

ROUNDS = {"communication_period": PERIOD, "outer": nesterov(0.7, 0.9)}


def decided_at(t, fragments, delay):
  """The counter's decision in step t, from 1."""
  phases = [(k + 1) * PERIOD // fragments for k in range(fragments)]
  sent = tuple(k for k, phase in enumerate(phases) if (t - phase) % PERIOD == 0 and t >= phase)
  if not delay:
    return {"exchange": sent if fragments > 1 else bool(sent)}
  come = tuple(
    k for k, phase in enumerate(phases) if (t - delay - phase) % PERIOD == 0 and t - delay >= phase
  )
  return {"exchange": sent, "arrival": come}


@pytest.mark.parametrize(
  ("fragments", "delay"), [(1, 0), (2, 0), (1, 2), (2, 3)], ids=lambda x: str(x)
)
def test_exchange_argument_equals_schedule_of_counter(fragments, delay):
  """Equal up to the rounding of two programs; the counter advances, and decides the other steps."""
  options = ROUNDS | {"fragments": fragments, "delay": delay}
  tx, task = ow.local_steps(optax.sgd(0.1), AXIS, **options), problem(3)
  expected, state = by_caller(tx, task, [{}] * STEPS)
  asked = [decided_at(t + 1, fragments, delay) for t in range(9)] + [{}] * (STEPS - 9)
  found, after = by_caller(tx, task, asked)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert_close(after, state, rtol=1e-5, atol=1e-6)


def test_exchange_argument_with_delay_arrives_before_next_send():
  tx = ow.local_steps(optax.sgd(1.0), None, communication_period=4, delay=3, outer=optax.sgd(1.0))
  params, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
  for asked in ({}, {}, {"exchange": True}, {}):
    updates, state = tx.update(jnp.float32(1.0), state, params, **asked)
    params = params + updates
  # Sent in the third step at -3, arrived in the fourth, which sends; the fourth step itself is
  # lost.
  assert (float(params), float(state.center), int(state.countdown[0])) == (-3.0, -3.0, 3)


def test_exchange_argument_mid_round_keeps_schedule_of_counter():
  """At the end of an epoch: the counter continues as if nothing had happened."""
  tx, task = ow.local_steps(optax.sgd(0.1), AXIS, communication_period=PERIOD), problem(3)
  asked = [{"exchange": True} if t == 5 else {} for t in range(STEPS)]
  found, _ = by_caller(tx, task, asked)
  expected = []
  x = np.tile(task.start, (3, 1))
  for t in range(STEPS):
    x = x - 0.1 * task.grad(t, x)
    if (t + 1) % PERIOD == 0 or t == 5:
      x = np.tile(x.mean(0), (3, 1))
    expected.append(x)
  np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_exchange_alone_without_updates_is_no_step(context):
  tx = ow.local_steps(optax.adam(0.1), AXIS, **ROUNDS)
  params, state = jnp.arange(3.0), tx.init(jnp.float32(1.0))
  axes, state = ow.worker_axes(state), ow.stack_workers(state, 3)
  state = state.replace(step=jnp.int32(5), since=jnp.int32(1))

  def alone(params, state):
    return tx.update(None, state, params, exchange=True)

  updates, after = in_context(context, alone, 3, (0, axes), (0, axes))(params, state)
  # The center is 1, and so is the mean: nothing pulls.
  np.testing.assert_allclose(params + updates, np.ones(3), rtol=1e-6)
  assert (int(after.step), int(after.since)) == (5, 1)
  assert bits(after.inner_state) == bits(state.inner_state)
  # Before any step it is the same.
  first = in_context(context, alone, 3, (0, axes), (0, axes))(
    params, state.replace(step=jnp.int32(0))
  )
  assert bits(first[0]) == bits(updates)
  assert bits(first[1].replace(step=after.step)) == bits(after)


def test_exchange_before_first_step_is_mean_of_parameters():
  """Of workers that do not start alike."""
  tx = ow.local_steps(optax.sgd(1.0), AXIS, communication_period=2)
  params, state = jnp.array([0.0, 10.0]), ow.stack_workers(tx.init(jnp.zeros(())), 2)

  def alone(params, state):
    return tx.update(None, state, params, exchange=True)[0]

  assert (params + ow.map_workers(alone, AXIS)(params, state)).tolist() == [5.0, 5.0]


@pytest.mark.optax_promotes
def test_exchange_false_compiles_to_cost_of_inner_step():
  """With exchange=False XLA compiles the same work and memory, except the counters, and a choice
  for each entry of a moment, which begins again after a NaN."""
  params = {"a": jnp.ones((64, 64)), "b": jnp.ones(500)}
  adam = optax.adam(0.1)

  def compiled(tx, **decided):
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params, **decided)
      return optax.apply_updates(params, updates), state

    arguments = ow.stack_workers((params, tx.init(params), params), 2)
    mapped = ow.map_workers(step, AXIS, mesh=mesh_of(2))
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*arguments).compile()

  bare = compiled(adam)
  for options in (ROUNDS, ROUNDS | {"fragments": 2, "delay": 2}, {"inner_state": "average"}):
    step = compiled(ow.local_steps(adam, AXIS, **options), exchange=False)
    text = step.as_text()
    assert not re.search(r" (while|conditional|all-reduce)\(", text), options
    choices = 2 * sum(x.size for x in params.values())
    for cost, more in (("flops", choices), ("bytes accessed", 0)):
      most = 1.01 * bare.cost_analysis()[cost] + more
      assert step.cost_analysis()[cost] <= most, (options, cost)
    used, needed = step.memory_analysis(), bare.memory_analysis()
    assert used.temp_size_in_bytes <= needed.temp_size_in_bytes + 1024, options
  assert " while(" in compiled(ow.local_steps(adam, AXIS)).as_text()


@pytest.mark.parametrize(
  "tx",
  [
    ow.local_steps(optax.sgd(0.1), AXIS, communication_period=4, delay=2),
    ow.local_steps(optax.sgd(0.1), AXIS, communication_period=4, delay=2, fragments=2),
    ow.local_steps(
      optax.sgd(0.1, momentum=0.9),
      AXIS,
      communication_period=4,
      delay=1,
      inner_state="average",
    ),
    ow.diloco(optax.sgd(0.1), AXIS, communication_period=4, delay=1, fragments=2),
    ow.elastic_average(optax.sgd(0.1), AXIS, communication_period=4, delay=1),
  ],
)
def test_delay_collectives_are_all_conditional(tx):
  """What is sent does not depend on the worker's step, so XLA could always send it before the
  loop."""
  assert all(conditional for _, _, conditional in collectives(tx, 2))


@pytest.mark.parametrize(
  "options", [{}, {"delay": 1, "pull": 0.5}, {"codec": ow.codecs.quantize(4)}]
)
def test_bfloat16_exchange_has_no_conversion_there_and_back(options):
  """XLA removes these on a GPU; the center's rounding would then enter the momentum."""
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=2, **options)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jnp.ones((2, 3), jnp.bfloat16)
  state = ow.stack_workers(tx.init(params[0]), 2)
  text = str(jax.make_jaxpr(ow.map_workers(step, AXIS))(params, state, params))
  convert = r"= convert_element_type\[[^\]]*\] (\w+)"
  narrow = {name for name, _ in re.findall(rf"(\w+):bf16\[[^\]]*\] {convert}", text)}
  back = set(re.findall(rf":f32\[[^\]]*\] {convert}", text))
  assert narrow and not narrow & back


@pytest.mark.parametrize("outer", [None, optax.sgd(0.7, momentum=0.9, nesterov=True)])
def test_bfloat16_step_and_exchange_in_one_program_round_alike(outer):
  """In bfloat16, where XLA computes a sum in float32 and may not round it in between."""
  tx = ow.local_steps(optax.sgd(0.37), AXIS, communication_period=None, outer=outer)
  rng = np.random.default_rng(0)
  params = jnp.asarray(np.repeat(rng.normal(size=(1, 5000)), 3, 0), jnp.bfloat16)
  state = ow.stack_workers(tx.init(params[0]), 3)
  grads = jnp.asarray(0.05 * rng.normal(size=params.shape), jnp.bfloat16)

  def step(params, state, grads):
    for exchange in (False, True):
      updates, state = tx.update(None if exchange else grads, state, params, exchange=exchange)
      params = optax.apply_updates(params, updates)
    return params, state

  together = jax.jit(ow.map_workers(step, AXIS))(params, state, grads)[0]
  apart = ow.map_workers(step, AXIS)(params, state, grads)[0]
  assert (np.asarray(together != apart)).sum() <= 15  # of 15,000: sums may be fused differently


def test_derivative_of_exchange_in_16_bits_matches_float32():
  tx = ow.diloco(optax.sgd(1.0), AXIS, communication_period=1)

  def end(scale, dtype):
    def worker(number):
      params = jnp.ones(3, dtype)
      state = tx.init(params)
      for _ in range(2):
        grads = (scale * jnp.arange(1.0, 4.0) * (number + 1)).astype(dtype)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
      return params.astype(jnp.float32).sum()

    return jax.vmap(worker, axis_name=AXIS)(jnp.arange(2.0)).mean()

  slope = jax.jit(jax.grad(end), static_argnums=1)
  wide, *narrow = (slope(0.1, d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
  assert wide < -20
  np.testing.assert_allclose(narrow, [wide, wide], rtol=0.01)


def test_exchange_moves_workers_to_center_bit_for_bit():
  """Not `x + (c - x)`, which rounds to another number: here for a worker that starts at 0."""
  rng = np.random.default_rng(0)
  tx = ow.diloco(optax.sgd(1.0), AXIS, communication_period=1)
  params = jnp.zeros((4, 1000))
  state = ow.stack_workers(tx.init(params[0]), 4)
  grads = jnp.asarray(rng.normal(size=(4, 1000)), jnp.float32)
  updates, state = jax.jit(ow.map_workers(tx.update, AXIS))(grads, state, params)
  assert bits(params + updates) == bits(jnp.tile(state.center, (4, 1)))


def test_exchange_leaves_integers_and_none_updates_unchanged():
  """Integers and variables without an update stay, and the others continue."""
  params = {"a": jnp.ones(2), "count": jnp.int32(3), "frozen": jnp.ones(1)}
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=1)
  state = ow.stack_workers(tx.init(params), 2)
  params = ow.stack_workers(params, 2)
  grads = {"a": jnp.float32([[1, 1], [3, 3]]), "count": None, "frozen": None}
  updates, state = jax.jit(ow.map_workers(tx.update, AXIS))(grads, state, params)
  assert updates["count"] is None and updates["frozen"] is None
  np.testing.assert_allclose(params["a"] + updates["a"], np.full((2, 2), 1 - 1.33 * 0.2), rtol=1e-6)
  assert int(state.center["count"]) == 3 and float(state.center["frozen"][0]) == 1.0


@pytest.mark.parametrize(
  ("extra", "error", "match"),
  [
    ({"exchange": "yes"}, TypeError, "exchange must be a Python bool, or the numbers"),
    ({"exchange": 1.0}, TypeError, "exchange must be a Python bool"),
    ({"exchange": [0, 1]}, ValueError, "exchange must hold numbers of fragments below 1, got 1"),
    ({"exchange": True, "arrival": True}, ValueError, "arrival needs a delay"),
    ({"participation": -1.0}, ValueError, "participation must be at least 0"),
    ({"participation": 1j}, TypeError, "participation must be real"),
    ({"participation": [1.0, 2.0]}, ValueError, "participation must be a scalar"),
  ],
  ids=str,
)
def test_exchange_arrival_and_participation_errors_extra_args(extra, error, match):
  with pytest.raises(error, match=rf"local_steps: {match}"):
    call(ow.local_steps(optax.sgd(0.1), AXIS), **extra)


@pytest.mark.parametrize("options", [{}, {"inner_state": "average"}])
def test_steps_outside_jit_compile_nothing_after_two_rounds(options):
  tx = ow.diloco(optax.sgd(0.1), None, communication_period=2, **options)
  params = jnp.ones(3)
  state = tx.init(params)
  for _ in range(4):
    _, state = tx.update(params, state, params)
  with compilations() as compiled:
    for _ in range(4):
      _, state = tx.update(params, state, params)
    assert compiled == []


@pytest.mark.parametrize("make", [ow.local_steps, ow.diloco, ow.elastic_average])
def test_zero_size_last_variable_keeps_shape(make):
  params = [jnp.ones(2), jnp.zeros((0, 3))]
  tx = make(optax.sgd(1.0), None, communication_period=1)
  updates, _ = tx.update(params, tx.init(params), params)
  assert [u.shape for u in updates] == [(2,), (0, 3)]
