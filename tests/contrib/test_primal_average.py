"""GPA against NumPy written from its equations, and what it has in common with others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from flax import serialization
from helpers import AXIS, CONTEXTS, bits, in_context

import optax_wrappers as ow

INNER = {
  "SGD": (lambda rate: optax.sgd(rate), ref.Sgd),
  "momentum": (lambda rate: optax.sgd(rate, momentum=0.9), lambda rate: ref.Momentum(rate, 0.9)),
  "AdamW": (
    lambda rate: optax.adamw(rate, weight_decay=0.1),
    lambda rate: ref.AdamW(rate, weight_decay=0.1),
  ),
}

STEPS, RATE = 12, 0.2

START = np.array([0.7, -1.3, 2.1, 0.4])

TARGETS = np.random.default_rng(5).normal(size=(STEPS, 3, 4))  # unequal, of three shards


def grad(t, x):
  return np.sin(3 * x) + x - TARGETS[t].mean(0)


def run(tx, dtype="float32"):
  """The params and their means after each step."""
  params = jnp.asarray(START, dtype)
  state, ys, xs = tx.init(params), [], []
  for t in range(STEPS):
    g = jnp.asarray(grad(t, np.asarray(params, np.float64)), dtype)
    updates, state = tx.update(g, state, params)
    params = optax.apply_updates(params, updates)
    ys.append(np.asarray(params))
    xs.append(np.asarray(ow.contrib.averaged_params(state, params)))
  return np.array(ys), np.array(xs)


def expected(inner, mu_y, mu_x):
  ys, xs = ref.gpa(START, grad, STEPS, inner, num_workers=1, mu_y=mu_y, mu_x=mu_x)
  return np.array(ys)[:, 0], np.array(xs)[:, 0]


@pytest.mark.optax_promotes
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("mu_y", "mu_x"), [(0.7, 0.9967), (0.5, 0.6), (0.1, 0.9), (1.0, 0.5)])
def test_primal_average_matches_numpy_of_paper(inner, mu_y, mu_x):
  """Weight decay included, which is of z."""
  make, reference = INNER[inner]
  with jax.enable_x64(True):  # of a small moment Adam makes a large step
    found = run(ow.contrib.primal_average(make(RATE), mu_y, mu_x), "float64")
  np.testing.assert_allclose(found, expected(reference(RATE), mu_y, mu_x), rtol=1e-5, atol=1e-5)


def test_primal_average_defaults_are_those_of_32_steps():
  sgd = INNER["SGD"][0](RATE)
  assert bits(run(ow.contrib.primal_average(sgd))) == bits(
    run(ow.contrib.primal_average(sgd, 0.7, 0.9967))
  )
  assert abs(0.9 ** (1 / 32) - 0.9967) < 5e-5


@pytest.mark.optax_promotes
def test_primal_average_uniform_weights_equal_schedule_free():
  tx = ow.contrib.primal_average(optax.sgd(RATE), 0.9, lambda count: count / (count + 1))
  free = optax.contrib.schedule_free(optax.sgd(RATE), RATE, b1=0.9, weight_lr_power=0.0)
  params = jnp.asarray(START, jnp.float32)
  state = free.init(params)
  for t, (found, mean) in enumerate(zip(*run(tx))):
    g = jnp.asarray(grad(t, np.asarray(params, np.float64)), jnp.float32)
    updates, state = free.update(g, state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(found, params, rtol=1e-4, atol=1e-5)
    x = optax.contrib.schedule_free_eval_params(state, params)
    np.testing.assert_allclose(mean, x, rtol=1e-4, atol=1e-5)


def test_primal_average_equal_mu_is_nesterov_momentum():
  """At a rate of the inner one's part 1 - mu: Sutskever et al. (2013) in Optax's form."""
  mu = 0.8
  params, _ = run(ow.contrib.primal_average(optax.sgd(RATE), mu, mu))
  x = START
  tx = optax.sgd(RATE * (1 - mu), momentum=mu, nesterov=True)
  state = tx.init(x)
  for t, found in enumerate(params):
    updates, state = tx.update(jnp.asarray(grad(t, np.asarray(x, np.float64)), jnp.float32), state)
    x = x + updates
    np.testing.assert_allclose(found, x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("context", CONTEXTS)
def test_primal_average_around_cross_shard_matches_numpy(context):
  """Of three shards with unequal gradients, which are averaged inside."""
  tx = ow.contrib.primal_average(ow.cross_shard(optax.sgd(RATE), AXIS), 0.6, 0.7)

  def whole(targets):
    params = jnp.asarray(START, jnp.float32)
    state = tx.init(params)
    for t in range(STEPS):
      updates, state = tx.update(jnp.sin(3 * params) + params - targets[t], state, params)
      params = optax.apply_updates(params, updates)
    mean = ow.contrib.averaged_params(state, params)
    return jax.tree.map(lambda x: ow.per_shard(x, AXIS), (params, mean))

  targets = jnp.asarray(TARGETS.transpose(1, 0, 2), jnp.float32)
  found = in_context(context, whole, 3, (0,), 0)(targets)
  for rows, one in zip(found, expected(ref.Sgd(RATE), 0.6, 0.7)):
    np.testing.assert_allclose(rows, [one[-1]] * 3, rtol=1e-5, atol=1e-6)


@pytest.mark.optax_promotes
def test_primal_average_checkpoint_resumes_bit_for_bit():
  tx = ow.contrib.primal_average(optax.adam(RATE), 0.6, 0.9)
  params = {"w": jnp.asarray(START, jnp.float32)}
  state, g = tx.init(params), {"w": jnp.ones(4)}
  for _ in range(3):
    updates, state = tx.update(g, state, params)
    params = optax.apply_updates(params, updates)
  restored = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
  assert bits(tx.update(g, restored, params)) == bits(tx.update(g, state, params))
  assert bits(ow.contrib.averaged_params(restored, params)) == bits(
    ow.contrib.averaged_params(state, params)
  )


@pytest.mark.parametrize("policy", ["average", "reset"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_primal_average_in_local_steps_has_mean_per_worker(context, policy):
  """Three workers with one optimum of their mean; stacked, and each by itself."""
  tx = ow.local_steps(
    ow.contrib.primal_average(optax.sgd(0.1), 0.5, 0.5),
    AXIS,
    communication_period=4,
    inner_state=policy,
  )
  params, state = ow.stack_workers((jnp.zeros(1), tx.init(jnp.zeros(1))), 3)

  def steps(params, state, target):
    def step(carry, _):
      params, state = carry
      updates, state = tx.update(params - target, state, params)
      return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (params, state), None, length=80)
    return params, state, ow.contrib.averaged_params(state, params)

  axes = ow.worker_axes(state)
  targets = jnp.array([[1.0], [3.0], [5.0]])
  run = in_context(context, steps, 3, (0, axes, 0), (0, axes, 0))
  params, state, means = run(params, state, targets)
  np.testing.assert_allclose(params, [[3.0]] * 3, atol=0.01)
  assert means.shape == (3, 1)
  np.testing.assert_allclose(means, params, atol=0.01)
  np.testing.assert_allclose(ow.contrib.averaged_params(state, params), means, atol=1e-6)


def test_averaged_params_of_masked_variable_is_unchanged():
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  tx = optax.masked(ow.contrib.primal_average(optax.sgd(0.5), 0.5, 0.5), {"a": True, "b": False})
  updates, state = tx.update({"a": jnp.ones(2), "b": jnp.zeros(2)}, tx.init(params), params)
  mean = ow.contrib.averaged_params(state, optax.apply_updates(params, updates))
  np.testing.assert_allclose(mean["a"], 0.75)
  np.testing.assert_allclose(mean["b"], 1.0)


def test_primal_average_bfloat16_gradients_move_in_float32():
  """Of bfloat16 gradients: 1 - 0.7 * 0.9967 has more digits than bfloat16."""
  tx, params = ow.contrib.primal_average(optax.sgd(1.0)), jnp.zeros(2)
  updates, state = tx.update(jnp.ones(2, jnp.bfloat16), tx.init(params), params)
  np.testing.assert_allclose(updates, 0.7 * 0.9967 - 1, rtol=1e-6)
  np.testing.assert_allclose(ow.contrib.averaged_params(state, updates), -0.0033, rtol=1e-3)


def test_primal_average_inject_hyperparams_takes_mu_x_not_mu_y():
  make = optax.inject_hyperparams(ow.contrib.primal_average, static_args="mu_y")
  tx = make(optax.sgd(RATE), mu_y=0.6, mu_x=0.7)
  np.testing.assert_allclose(
    run(tx), run(ow.contrib.primal_average(optax.sgd(RATE), 0.6, 0.7)), rtol=1e-6, atol=1e-6
  )
  params = ow.stack_workers(jnp.zeros(2), 2)
  state = ow.stack_workers(tx.init(jnp.zeros(2)), 2)
  ow.map_workers(tx.update, AXIS)(params, state, params)
  with pytest.raises(TypeError, match="mu_y must be a Python number"):
    optax.inject_hyperparams(ow.contrib.primal_average)(optax.sgd(0.1), 0.6).init(jnp.zeros(2))


def test_primal_average_none_updates_and_integers_unchanged():
  params = {"a": jnp.ones(2), "count": jnp.int32(3), "frozen": jnp.ones(1)}
  tx = ow.contrib.primal_average(optax.sgd(0.5), 0.5, 0.5)
  grads = {"a": jnp.ones(2), "count": None, "frozen": None}
  updates, state = tx.update(grads, tx.init(params), params)
  assert updates["count"] is None and updates["frozen"] is None
  mean = ow.contrib.averaged_params(state, params | {"a": params["a"] + updates["a"]})
  np.testing.assert_allclose(mean["a"], 0.75)  # halfway from 1 to 0.5
  assert int(mean["count"]) == 3 and float(mean["frozen"][0]) == 1.0


@pytest.mark.parametrize(
  ("numbers", "match"),
  [
    ((0.0,), r"primal_average: mu_y must be in \(0, 1\], got 0"),
    ((1.5,), r"mu_y must be in \(0, 1\]"),
    ((0.7, -0.1), r"primal_average: mu_x must be in \[0, 1\], got -0.1"),
    ((0.7, 1.01), r"mu_x must be in \[0, 1\]"),
  ],
)
def test_primal_average_errors_mu_out_of_range(numbers, match):
  with pytest.raises(ValueError, match=match):
    ow.contrib.primal_average(optax.sgd(0.1), *numbers)


def test_primal_average_errors_update_and_averaged_params():
  tx = ow.contrib.primal_average(optax.sgd(0.1))
  params = jnp.ones(2)
  with pytest.raises(TypeError, match="primal_average: state must be a PrimalAverageState"):
    tx.update(params, optax.sgd(0.1).init(params), params)
  with pytest.raises(ValueError, match="primal_average: params is needed"):
    tx.update(params, tx.init(params))
  # A state keeps its mu_y, in update and in averaged_params alike.
  half = ow.contrib.primal_average(optax.sgd(0.1), 0.5)
  updates = [x.update(params, half.init(params), params)[0] for x in (tx, half)]
  np.testing.assert_array_equal(*updates)
  with pytest.raises(
    ValueError, match="updates is None, and a synchronization alone is not a step"
  ):
    tx.update(None, tx.init(params), params, exchange=True)
  with pytest.raises(ValueError, match="needed exactly one PrimalAverageState, found 0"):
    ow.contrib.averaged_params(optax.sgd(0.1).init(params), params)
