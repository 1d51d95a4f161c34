"""Asynchronous rounds of local steps against a simulation in NumPy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, mesh_of
from jax.sharding import PartitionSpec
from local_steps_cases import steps_of

import optax_wrappers as ow


def test_asynchronous_absent_or_nan_worker_returns_to_center():
  """The second worker, in the second exchange; the third of three continues all the while."""
  rule = ow.contrib.Asynchronous(optax.sgd(1.0), (1, 2, 3))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  grads = [[-1.0, -4.0, -8.0]] * 2
  params, _ = steps_of(tx, [[1.0, 1.0, 1.0]] * 2, grads, 3)
  np.testing.assert_allclose(params, [5.5, 5.5, 16.0])  # 1, and the mean of 1 and 8 from there
  for lost, weight in ((np.nan, 1.0), (-4.0, 0.0)):
    given, told = [grads[0], [-1.0, lost, -8.0]], [[1.0, 1.0, 1.0], [1.0, weight, 1.0]]
    params, _ = steps_of(tx, told, given, 3)
    np.testing.assert_allclose(params, [2.0, 2.0, 16.0])
  params, _ = steps_of(tx, [[1.0, 1.0, 1.0], [1.0, 3.0, 1.0]], grads, 3)
  np.testing.assert_allclose(params, [7.25, 7.25, 16.0])
  params, _ = steps_of(tx, [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], grads, 3)
  np.testing.assert_allclose(params, [1.0, 1.0, 16.0])  # no worker participates


def test_asynchronous_lost_worker_restarts_if_none_arrives():
  rule = ow.contrib.Asynchronous(optax.sgd(1.0), (1, 3))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  for lost, weight in ((np.nan, 1.0), (-1.0, 0.0)):
    params, _ = steps_of(tx, [[1.0, 1.0], [weight, 1.0]], [[-1.0, -1.0], [lost, -1.0]])
    np.testing.assert_allclose(params, [1.0, 2.0])
    grads = [[-1.0, -1.0], [lost, -1.0], [0.0, -3.0]]
    params, _ = steps_of(tx, [[1.0, 1.0], [weight, 1.0], [1.0, 1.0]], grads)
    np.testing.assert_allclose(params, [3.5, 3.5])  # 1, and the mean of 0 and 5


def test_asynchronous_resize_new_worker_is_not_late():
  rule = ow.contrib.Asynchronous(optax.sgd(1.0), (1, 1), ow.staleness.inverse())
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  x, state = ow.stack_workers((jnp.zeros(()), tx.init(jnp.zeros(()))), 2)
  update = ow.map_workers(tx.update, AXIS)
  for _ in range(3):
    updates, state = update(jnp.zeros(2), state, x)
  center = ow.center_params(state)
  x, state = ow.resize_workers((x, state), [0], 1, (center, tx.init(center)))
  updates, state = update(-jnp.ones(2), state, x)
  np.testing.assert_allclose(x + updates, [1.0, 1.0])


@pytest.mark.parametrize("check", [True, False])
def test_asynchronous_init_in_shard_map_and_donated_state(check):
  rule = ow.contrib.Asynchronous(optax.sgd(1.0), (1, 2))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)

  def body(x):
    def step(_, held):
      updates, state = tx.update(-jnp.ones(()), held[1], held[0])
      return held[0] + updates, state

    return jax.lax.fori_loop(0, 2, step, (x[0], tx.init(x[0])))[0][None]

  spec = PartitionSpec(AXIS)
  options = {"mesh": mesh_of(2), "in_specs": spec, "out_specs": spec, "check_vma": check}
  np.testing.assert_allclose(jax.jit(jax.shard_map(body, **options))(jnp.zeros(2)), [2.5, 2.5])
  x, state = ow.stack_workers((jnp.zeros(3), tx.init(jnp.zeros(3))), 2)
  donated = jax.jit(ow.map_workers(tx.update, AXIS), donate_argnums=1)
  donated(jnp.ones((2, 3)), state, x)
  alone = dataclasses.replace(rule, durations=(1,))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), None, alone, communication_period=1)
  jax.jit(tx.update, donate_argnums=1)(jnp.ones(3), tx.init(jnp.zeros(3)), jnp.zeros(3))


@pytest.mark.parametrize(
  ("arguments", "error"),
  [
    ((0.7, (1,)), r"TypeError: Asynchronous: outer must be an optax\.GradientTransformation"),
    (
      (optax.sgd(1.0), 2),
      "TypeError: Asynchronous: durations must be a tuple of ints, one for each",
    ),
    (
      (optax.sgd(1.0), ()),
      "TypeError: Asynchronous: durations must be a tuple of ints, one for each",
    ),
    ((optax.sgd(1.0), (1, 0)), "ValueError: Asynchronous: durations must be at least 1"),
    (
      (optax.sgd(1.0), (1,), 0.5),
      "TypeError: Asynchronous: staleness must be a function of an age",
    ),
  ],
)
def test_asynchronous_errors_arguments_of_constructor(arguments, error):
  with pytest.raises((TypeError, ValueError)) as caught:
    ow.contrib.Asynchronous(*arguments)
  assert re.match(error, f"{caught.type.__name__}: {caught.value}")


def test_asynchronous_errors_number_of_durations_and_delay():
  rule = ow.contrib.Asynchronous(optax.sgd(1.0), (1, 2, 3))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  with pytest.raises(ValueError, match=r"durations must have one for each of 2 workers, got \(1,"):
    steps_of(tx, [[1.0, 1.0]], [[1.0, 1.0]])
  late = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=2, delay=1)
  with pytest.raises(NotImplementedError, match="Asynchronous: this rule has no delay"):
    late.init(jnp.zeros(()))
