"""What happens to inner states at a synchronization."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers import AXIS, mesh_of
from local_steps_cases import steps_of

import optax_wrappers as ow


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
@pytest.mark.parametrize("wrapper", [ow.diloco, ow.elastic_average, ow.gossip_average])
def test_inner_state_of_schedule_free_that_keeps_z_is_error(wrapper):
  """Two workers' z, of which y is a part, would go apart without end."""
  inner = optax.chain(optax.contrib.schedule_free(optax.sgd(0.1), 0.1))
  with pytest.raises(ValueError, match=r"schedule_free inside would keep its z.*inner_state="):
    wrapper(inner, AXIS).init(jnp.zeros(2))
  moved = ow.local_steps(inner, AXIS, inner_state={"z": 1})
  moved.init(jnp.zeros(2))
  with pytest.raises(ValueError, match="schedule_free inside would keep its z"):
    ow.local_steps(inner, AXIS, inner_state={"z": 2}).init(jnp.zeros(2))
