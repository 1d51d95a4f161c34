"""What happens to inner states at a synchronization."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers import AXIS, bits, in_context, mesh_of
from local_steps_cases import steps_of

import optax_wrappers as ow
from optax_wrappers._workers import _inner_state


def test_inner_state_reset_if_only_one_fragment_is_finite():
  tx = ow.local_steps(
    optax.sgd(1.0, momentum=0.5), None, communication_period=2, fragments=2, inner_state="reset"
  )
  params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
  grads = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}  # "b" does not move
  _, state = tx.update(grads, tx.init(params), params, exchange=True)
  np.testing.assert_array_equal(state.inner_state[0].trace["a"], [0.0, 0.0])


@pytest.mark.parametrize("policy", ["reset", "average"])
def test_inner_state_of_absent_worker_follows_absent_option(policy):
  """Workers continue alone with absent="keep", and all do if no worker participates."""
  momentum = optax.sgd(0.1, momentum=0.5)
  grads, weights = jnp.float32([1.0, 2.0, 6.0]), jnp.float32([1.0, 3.0, 0.0])
  for absent, expected in (
    ("pull", [0.0] * 3 if policy == "reset" else [1.75] * 3),
    ("keep", [0.0, 0.0, 6.0] if policy == "reset" else [1.75, 1.75, 6.0]),
  ):
    tx = ow.local_steps(momentum, AXIS, communication_period=1, inner_state=policy, absent=absent)
    state = ow.stack_workers(tx.init(jnp.float32(0.0)), 3)
    update = ow.map_workers(lambda g, s, p, w: tx.update(g, s, p, participation=w), AXIS)  # noqa: B023
    for given, wanted in ((weights, expected), (jnp.zeros(3), grads)):
      _, after = jax.jit(update)(grads, state, jnp.zeros(3), given)
      np.testing.assert_allclose(after.inner_state[0].trace, wanted, rtol=1e-6)


@pytest.mark.parametrize("absent", ["pull", "keep"])
def test_inner_state_with_delay_uses_participation_at_sending(absent):
  """Participation at sending counts, not at arrival."""
  tx = ow.local_steps(
    optax.sgd(0.1, momentum=0.5),
    AXIS,
    communication_period=2,
    delay=1,
    inner_state="reset",
    absent=absent,
  )
  weights = [[1, 1], [1, 0], [0, 1]]  # sent in the second step, arrived in the third
  _, state = steps_of(tx, weights, np.ones((3, 2)))
  expected = [0.0, 0.0] if absent == "pull" else [0.0, 1.75]
  np.testing.assert_allclose(state.inner_state[0].trace, expected)


def test_inner_state_reset_at_exchange_of_each_fragment():
  options = {"communication_period": 2, "fragments": {"a": 0, "b": 1}, "inner_state": "reset"}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.5), None, **options)
  params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
  state, grads = tx.init(params), {"a": jnp.ones(1), "b": jnp.ones(1)}
  for _ in range(2):  # one fragment is due, and then the other
    _, state = tx.update(grads, state, params)
    for trace in jax.tree.leaves(state.inner_state):
      np.testing.assert_array_equal(trace, [0.0])


@pytest.mark.parametrize("policy", ["reset", "average"])
def test_inner_state_is_settled_by_finite_workers_only(policy):
  options = {"communication_period": 1, "inner_state": policy}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.5), AXIS, **options)
  # No worker is left: nothing changes.
  _, state = steps_of(tx, [[1, 1]], [[np.nan, np.inf]])
  np.testing.assert_array_equal(state.inner_state[0].trace, [np.nan, np.inf])
  # A worker that was lost before, although its momentum is finite.
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  _, state = update(jnp.float32([1.0, 100.0]), state, jnp.float32([0.0, np.nan]))
  np.testing.assert_array_equal(state.inner_state[0].trace, [0.0 if policy == "reset" else 1.0] * 2)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("overflown", [[0], [0, 1]])
def test_inner_state_average_leaves_out_infinite_moments(overflown):
  """With Adam: an infinite second moment makes zero updates, so that the variables stay finite."""
  options = {"communication_period": 1, "inner_state": "average"}
  tx = ow.local_steps(optax.adam(0.1, b2=0.5), AXIS, **options)
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  adam = state.inner_state[0]
  nu = adam.nu.at[jnp.array(overflown)].set(jnp.inf)
  state = state.replace(inner_state=(adam._replace(nu=nu), *state.inner_state[1:]))
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  _, after = update(jnp.float32([3.0, 4.0]), state, jnp.zeros(2))
  expected = [8.0, 8.0] if len(overflown) == 1 else [np.inf, np.inf]
  np.testing.assert_array_equal(after.inner_state[0].nu, expected)


@pytest.mark.optax_promotes
def test_inner_state_fields_are_averaged_by_count_of_exchanges():
  """The caller decides, and nothing is sent in between; a checkpoint does not restart the count."""
  tx = ow.local_steps(
    optax.chain(optax.clip(10.0), optax.adam(0.1)),
    AXIS,
    communication_period=None,
    inner_state={"mu": 2, "nu": 3},
  )
  params, state = jnp.zeros(2), ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  sharded = ow.map_workers(
    lambda g, s, p: tx.update(g, s, p, exchange=False), AXIS, mesh=mesh_of(2)
  )
  text = jax.jit(sharded).lower(params, state, params).compile()
  assert not ow.inspect.compiled_collectives(text)
  update = jax.jit(ow.map_workers(lambda g, s, p: tx.update(g, s, p, exchange=True), AXIS))
  for count in range(1, 7):
    _, state = update(jnp.float32([1.0, 3.0]), state, params)
    state = serialization.from_bytes(state, serialization.to_bytes(state))
    adam = state.inner_state[1][0]
    assert (adam.mu[0] == adam.mu[1]) == (count % 2 == 0), count
    assert (adam.nu[0] == adam.nu[1]) == (count % 3 == 0), count


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"inner_state": {None: 3}}, TypeError, "must have names of fields, got None"),
    ({"inner_state": {"m": 3}}, ValueError, r"which are \['mu', 'nu'\]; got 'm'"),
    ({"inner_state": {"mu": 0}}, ValueError, r"inner_state\['mu'\] must be at least 1, got 0"),
    ({"inner_state": {"mu": 2}, "fragments": 2}, ValueError, "fragments=1 and delay=0, got 2"),
    ({"inner_state": {"mu": 2}, "delay": 1, "pull": 0.5}, ValueError, "delay=0, got 1 and 1"),
  ],
)
def test_inner_state_fields_errors_names_counts_and_delay(options, error, match):
  with pytest.raises(error, match=match):
    ow.local_steps(optax.adam(0.1), AXIS, **options).init({"a": jnp.zeros(2), "b": jnp.zeros(2)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Encoder:
  """Parameters with names of moments."""

  mu: Any
  w: Any


@pytest.mark.optax_promotes
def test_inner_state_field_is_not_variable_of_same_name():
  params = Encoder(jnp.zeros(2), jnp.zeros(2))
  tx = ow.local_steps(optax.adam(0.1), AXIS, communication_period=1, inner_state={"mu": 1})
  params, state = ow.stack_workers((params, tx.init(params)), 2)
  grads = jnp.array([[1.0, 1.0], [3.0, 3.0]])
  _, state = ow.map_workers(tx.update, AXIS)(Encoder(grads, grads), state, params)
  adam = state.inner_state[0]
  for mu, nu in ((adam.mu.mu, adam.nu.mu), (adam.mu.w, adam.nu.w)):
    np.testing.assert_allclose(mu, 0.1 * 2 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_allclose(nu, 1e-3 * grads**2, rtol=1e-6)
  with pytest.raises(ValueError, match=r"which are \['trace'\]; got 'mu'"):
    tx = ow.local_steps(optax.sgd(0.1, momentum=0.9), AXIS, inner_state={"mu": 1})
    tx.init(Encoder(jnp.zeros(2), jnp.zeros(2)))


def test_inner_state_of_no_fields_allows_messages():
  tx = ow.local_steps(
    optax.adam(0.1), None, communication_period=None, outer=optax.sgd(1.0), inner_state={}
  )
  x = jnp.zeros(2)
  ow.exchange.message(tx, tx.init(x), x, sender="a")


@pytest.mark.optax_promotes
@pytest.mark.parametrize("wrapper", [ow.diloco, ow.elastic_average, ow.contrib.gossip_average])
def test_inner_state_of_schedule_free_that_keeps_z_is_error(wrapper):
  """Two workers' z, of which y is a part, would go apart without end."""
  inner = optax.chain(optax.contrib.schedule_free(optax.sgd(0.1), 0.1))
  with pytest.raises(ValueError, match=r"ScheduleFreeState inside would keep its z.*inner_state="):
    wrapper(inner, AXIS).init(jnp.zeros(2))
  moved = ow.local_steps(inner, AXIS, inner_state={"z": 1})
  moved.init(jnp.zeros(2))
  with pytest.raises(ValueError, match="ScheduleFreeState inside would keep its z"):
    ow.local_steps(inner, AXIS, inner_state={"z": 2}).init(jnp.zeros(2))


# A NaN in an inner state.


REPAIRED = {
  "diloco": {},
  "delay": {"delay": 1, "communication_period": 3},
  "fragments": {"fragments": {"a": 0, "b": 1}},
  "codec": {"codec": ow.codecs.quantize(8)},
  "shard_center": {"shard_center": True},
  "average": {"inner_state": "average"},
}


def slowing(count):
  return 0.1 * (1 - count / 100)


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("options", "context"),
  [(name, "vmap") for name in REPAIRED] + [("diloco", "shard_map"), ("diloco", "unchecked")],
)
def test_nan_restarts_moments_of_its_worker_and_no_schedule(options, context):
  """Adam steps by the learning rate where the gradients are 1, whatever it remembers of them."""
  options = {"communication_period": 2} | REPAIRED[options]
  period, last = options["communication_period"], 2 * options["communication_period"] + 1
  lost = period - 1 + options.get("delay", 0)  # a NaN in the parameters before would stay
  is_averaged = options.get("inner_state") == "average"
  tx = ow.local_steps(optax.adam(slowing), AXIS, outer=optax.sgd(1.0), **options)
  start = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
  params, state = ow.stack_workers((start, tx.init(start)), 2)
  sound, axes = (params, state), ow.worker_axes(state)

  def step(params, state, slope):
    grads = {"a": jnp.ones_like(params["a"]), "b": params["b"] * 0 + slope}
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, 2, (0, axes, 0), (0, axes))
  for t in range(last):
    params, state = step(params, state, jnp.array([jnp.nan if t == lost else 1.0, 1.0]))
    sound = step(*sound, jnp.ones(2))
    # The worker's own moments begin again, and those of the other go on.
    if not is_averaged:
      assert bits(jax.tree.map(lambda x: x[1], state.inner_state)) == bits(
        jax.tree.map(lambda x: x[1], sound[1].inner_state)
      )
  # The other has done alone what was lost.
  for x, expected in zip(jax.tree.leaves(params), jax.tree.leaves(sound[0]), strict=True):
    np.testing.assert_allclose(x, expected, atol=2e-3)
  counts = optax.tree.get_all_with_path(state.inner_state, "count")
  adam, schedule = (count for _, count in counts)
  assert schedule.tolist() == [last, last]
  assert adam.tolist() == [last if is_averaged else last - lost - 1, last]


OUTER = optax.sgd(0.5)


@pytest.mark.parametrize(
  "rule",
  [ow.contrib.Pairs(), ow.contrib.Asynchronous(OUTER, (1, 1)), ow.contrib.Eager(OUTER)],
  ids=lambda rule: type(rule).__name__,
)
def test_nan_in_momentum_ends_with_round_under_every_rule_that_moves_worker(rule):
  inner = optax.sgd(0.1, momentum=0.9)
  tx = ow.exchange.periodic_exchange(inner, AXIS, rule, communication_period=2)
  params, state = ow.stack_workers((jnp.zeros(3), tx.init(jnp.zeros(3))), 2)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  for t in range(4):
    grads = np.ones((2, 3), "f")
    grads[0, 1] = np.nan if t == 1 else 1.0
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    assert np.isfinite(params).all()
  # Of the momentum, each worker has its own: ones of two steps, and of four.
  np.testing.assert_allclose(state.inner_state[0].trace[:, 0], [1.9, 3.439], rtol=1e-6)


@pytest.mark.optax_promotes
def test_nan_restarts_no_learning_rate_that_was_set_nor_count_of_calls():
  """Worker 0 loses its second step; of injected rates, of accumulation, of a pod inside."""
  make = {"learning_rate": 0.1, "momentum": 0.9}
  inner = ow.gather_towers(optax.inject_hyperparams(optax.sgd)(**make), 1)
  tx = ow.diloco(inner, AXIS, communication_period=2)
  params, state = ow.stack_workers((jnp.zeros(2), tx.init(jnp.zeros(2))), 2)
  rates = state.inner_state.inner_state.hyperparams
  rates["learning_rate"] = jnp.full(2, 0.2)
  axes = ow.worker_axes(state)
  update = jax.jit(ow.map_workers(tx.update, AXIS, in_axes=(0, axes, 0), out_axes=(0, axes)))
  for t in range(3):
    grads = np.ones((2, 2), "f")
    grads[0, 0] = np.nan if t == 1 else 1.0
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  injected = state.inner_state.inner_state
  np.testing.assert_allclose(injected.hyperparams["learning_rate"], [0.2, 0.2])
  assert (injected.count.tolist(), int(state.inner_state.tower)) == ([3, 3], 0)
  np.testing.assert_allclose(injected.inner_state[0].trace, [[1.0] * 2, [2.71] * 2])


def trained_on_two_devices_each(shard_state, inner_state, nan_at=None):
  """Two workers of two devices take four steps of Adam, and synchronize after two."""
  inner = ow.cross_shard(optax.adam(0.1), "b", shard_state=shard_state)
  tx = ow.diloco(inner, AXIS, communication_period=2, inner_state=inner_state)
  start = {"k": jnp.ones((4, 3)), "s": jnp.ones(())}
  one = tx.init(start)
  inside = ow.worker_axes(one.inner_state, replicated=True)
  one = one.replace(inner_state=ow.stack_workers(one.inner_state, 2, replicated=True))
  axes = jax.tree.map(lambda _: None, one).replace(inner_state=inside)
  params, state = ow.stack_workers((start, one), 2)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  over_devices = jax.vmap(step, (None, axes, 0), (None, axes), axis_name="b")
  over_workers = ow.worker_axes(state)
  step = jax.vmap(over_devices, (0, over_workers, 0), (0, over_workers), axis_name=AXIS)
  step = jax.jit(step)
  rng = np.random.default_rng(0)
  for t in range(4):
    grads = jax.tree.map(lambda x: rng.normal(size=(2, 2, *x.shape)).astype("f"), start)
    if t == nan_at:
      grads["k"][0, 1, 2, 1] = np.nan  # on one of its devices
    params, state = step(params, state, grads)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
  counts = optax.tree.get_all_with_path(state.inner_state, "count")
  return params, counts[0][1].tolist()


@pytest.mark.optax_promotes
def test_nan_restarts_moments_that_are_shares_of_a_worker_of_two_devices():
  """cross_shard(shard_state=True) inside, over the devices of each worker."""
  params, counts = trained_on_two_devices_each(True, "keep", nan_at=1)
  whole, _ = trained_on_two_devices_each(False, "keep", nan_at=1)
  assert counts == [2, 4]
  chex.assert_trees_all_close(params, whole, rtol=1e-6)


@pytest.mark.optax_promotes
def test_reset_of_moments_that_are_shares_of_a_worker_of_two_devices():
  params, counts = trained_on_two_devices_each(True, "reset")
  whole, _ = trained_on_two_devices_each(False, "reset")
  kept, _ = trained_on_two_devices_each(True, "keep")
  assert counts == [0, 0]
  chex.assert_trees_all_close(params, whole, rtol=1e-6)
  assert not np.allclose(params["k"], kept["k"])


def test_inner_state_restarts_moments_in_order_of_state():
  """Not in that of a set, which differs between the processes of one program."""
  chain = optax.chain(*(optax.trace(0.1 * i) for i in range(6)))
  params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
  places = _inner_state._of_moments(chain.init(params), params)
  assert places == list(range(12))
