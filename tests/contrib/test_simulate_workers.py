"""simulate_workers and arrival_order against a server of events in plain NumPy."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_staleness as ref
from helpers import AXIS, assert_close, bits
from staleness_cases import COMPENSATIONS, INNERS, POLICIES

import optax_wrappers as ow

START = np.array([1.0, -2.0, 0.5])

WORKERS, STEPS = 3, 14

DATA = np.random.default_rng(0).normal(size=(WORKERS, STEPS + WORKERS, START.size))

ORDERS = {
  "round robin": np.arange(STEPS) % WORKERS,
  "one is slow": ref.arrival_order([1.0, 1.5, 4.0], STEPS),
  "one alone, then the others": np.array([0] * 6 + [2, 1, 2, 1, 1, 2, 0, 2]),
}

RULES = {
  "bare": {},
  "drop": {"max_staleness": 2},
  "weigh": {"weight": "polynomial"},
  "gate, updates": {"weight": "cosine_gate", "scale": "updates"},
}


def gradient(params, data):
  return 2 * params + 0.5 * data * params**2 - data


def simulated(tx, num_calls=STEPS + WORKERS - 1, workers=WORKERS):
  """The parameters after each call, by a scan; each call's data are those of the reader."""

  def call(held, number):
    params, state = held
    data = jnp.asarray(DATA, jnp.float32)[state.reader, number]
    updates, state = tx.update(gradient(params, data), state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), params

  params = jnp.asarray(START, jnp.float32)
  return jax.lax.scan(call, (params, tx.init(params)), jnp.arange(num_calls))


@pytest.mark.optax_promotes
@pytest.mark.parametrize("compensation", ["none", "adaptive"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("inner", INNERS)
def test_simulate_workers_optimizers_and_rules_match_numpy_server(inner, rule, compensation):
  ours, theirs = INNERS[inner]
  compensate, reference_compensate = COMPENSATIONS[compensation]
  options = {key: value for key, value in RULES[rule].items() if key != "weight"}
  weight, reference_weight = POLICIES.get(RULES[rule].get("weight"), (None, None))
  if rule != "bare":
    ours = ow.staleness_aware(ours, weight, **options)
  if compensate:
    ours = optax.chain(compensate, ours)

  @jax.jit
  def run(order):
    return simulated(ow.contrib.simulate_workers(ours, WORKERS, lambda t: order[t]))

  for order in ORDERS.values():
    server = ref.StalenessAware(
      theirs, reference_weight, compensation=reference_compensate, **options
    )
    expected, server = ref.run_server(
      lambda params, k, n: [gradient(params[0], DATA[k, n])], [START], server, order, WORKERS
    )
    (_, state), params = run(order.astype(np.int32))
    assert_close(params[: WORKERS - 1], np.stack([START] * (WORKERS - 1)))
    assert_close(params[WORKERS - 1 :], np.stack([x for (x,) in expected]), rtol=1e-4, atol=1e-4)
    if rule != "bare":
      found = ow.get_state(state, ow.states.StalenessState)
      assert (int(found.step), int(found.dropped)) == (server.version, server.dropped)
      assert list(found.histogram) == list(server.histogram)


def test_simulate_workers_list_of_arrivals_repeats_as_function_of_call():
  order = ORDERS["one is slow"][:5]
  tx = ow.contrib.simulate_workers(optax.sgd(0.1), WORKERS, order)
  again = ow.contrib.simulate_workers(optax.sgd(0.1), WORKERS, lambda t: jnp.asarray(order)[t % 5])
  (_, state), params = simulated(tx)
  assert bits(simulated(again)[1]) == bits(params)
  assert int(state.call) == STEPS + WORKERS - 1
  assert int(state.reader) == order[(STEPS - 1) % 5]


def test_simulate_workers_round_robin_equals_constant_delay_of_history():
  """Of d + 1 workers, against the parameters of d steps ago, taken from the history."""
  d = WORKERS - 1
  tx = ow.contrib.params_history(ow.drop_stale(optax.sgd(0.1, 0.9), d), d)

  @jax.jit
  def step(params, state, data, stamp):
    grads = gradient(ow.contrib.past_params(state, d), data)
    updates, state = tx.update(grads, state, params, computed_at=stamp)
    return optax.apply_updates(params, updates), state

  params = START.astype(np.float32)
  state, delayed = jax.jit(tx.init)(params), []
  for i in range(STEPS):
    # Each round robin's first gradients were all computed at the start.
    age = min(i, d)
    params, state = step(params, state, DATA[i % WORKERS, i].astype(np.float32), np.int32(i - age))
    delayed.append(np.asarray(params))
  _, found = jax.jit(lambda: simulated(ow.contrib.simulate_workers(optax.sgd(0.1, 0.9), WORKERS)))()
  assert_close(np.asarray(found)[d:], np.stack(delayed), rtol=1e-5, atol=1e-5)


def test_simulate_workers_one_worker_equals_inner_bit_for_bit():
  tx, bare = ow.contrib.simulate_workers(optax.sgd(0.1, 0.9), 1), optax.sgd(0.1, 0.9)
  params = jnp.asarray(START, jnp.float32)
  a, b, state, bare_state = params, params, tx.init(params), bare.init(params)
  for i in range(5):
    grad = gradient(a, DATA[0, i].astype(np.float32))
    updates, state = tx.update(grad, state, a)
    a = optax.apply_updates(a, updates)
    updates, bare_state = bare.update(grad, bare_state, b)
    b = optax.apply_updates(b, updates)
    assert bits(a) == bits(b)


@pytest.mark.optax_promotes
def test_simulate_workers_derivative_through_first_reads_is_correct():
  """Inner runs in them too, and Adam has no derivative at a gradient of zeros."""

  @jax.jit
  def trained(rate):
    tx = ow.contrib.simulate_workers(optax.adam(rate), 3, [2, 1, 0])
    params = jnp.asarray(START, jnp.float32)
    state = tx.init(params)
    for _ in range(5):
      updates, state = tx.update(params, state, params)
      params = optax.apply_updates(params, updates)
    return params.sum()

  up, down = (float(trained(0.1 + more)) for more in (1e-3, -1e-3))
  assert float(jax.jit(jax.grad(trained))(0.1)) == pytest.approx((up - down) / 2e-3, rel=1e-2)


def test_simulate_workers_checkpoint_mid_run_resumes_bit_for_bit():
  inner = ow.staleness_aware(optax.sgd(0.1, 0.9), ow.staleness.inverse(), max_staleness=4)
  tx = ow.contrib.simulate_workers(inner, WORKERS, ORDERS["one is slow"])

  @jax.jit
  def step(params, state, data):
    updates, state = tx.update(gradient(params, data), state, params)
    return optax.apply_updates(params, updates), state

  def run(params, state, numbers):
    for i in numbers:
      params, state = step(params, state, DATA[int(state.reader), i].astype(np.float32))
    return params, state

  params = START.astype(np.float32)
  half = run(params, jax.jit(tx.init)(params), range(5))
  restored = pickle.loads(pickle.dumps(half))
  assert bits(run(*restored, range(5, 12))) == bits(run(*half, range(5, 12)))


def test_simulate_workers_outside_and_inside_cross_shard_agree():
  """Outside cross_shard each shard keeps its own gradients, inside it their mean: one run."""
  grads = DATA[:2, :8].astype(np.float32)

  def run(tx):
    state = tx.init(np.zeros(3, np.float32))
    axes = ow.worker_axes(state, replicated=True)
    state = ow.stack_workers(state, 2, replicated=True)

    def one(params, state, grad):
      updates, state = tx.update(grad + params, state, params)
      return optax.apply_updates(params, updates), state

    step = jax.vmap(one, in_axes=(None, axes, 0), out_axes=(None, axes), axis_name=AXIS)
    step, params = jax.jit(step), np.zeros(3, np.float32)
    for i in range(8):
      params, state = step(params, state, grads[:, i])
    return params, state

  outside, state = run(ow.contrib.simulate_workers(ow.cross_shard(optax.sgd(0.1), AXIS), 3))
  inside, reduced = run(ow.cross_shard(ow.contrib.simulate_workers(optax.sgd(0.1), 3), AXIS))
  assert_close(outside, inside)
  assert state.gradients.shape == (2, 3, 3)
  assert reduced.inner_state.gradients.shape == (3, 3)


def test_simulate_workers_none_gradient_and_bfloat16_dtype_are_kept():
  tx = ow.contrib.simulate_workers(optax.sgd(1.0), 2)
  params = {"a": np.zeros(2, jnp.bfloat16), "b": np.zeros(2, np.float32)}
  state, update = tx.init(params), jax.jit(tx.update)
  for i in range(3):
    grads = {"a": np.full(2, i + 1, jnp.bfloat16), "b": None}
    updates, state = update(grads, state, params)
    assert updates["b"] is None and updates["a"].dtype == jnp.bfloat16
    assert_close(updates["a"], np.full(2, -i))


# Arrivals.


@pytest.mark.parametrize("seconds", [[1.0], [1.0, 1.0, 1.0], [1.0, 2.5, 7.0], [4.0, 1.0, 2.0]])
def test_arrival_order_matches_numpy_events(seconds):
  order = ow.contrib.arrival_order(seconds, 50)
  assert order.dtype == np.int32
  assert list(order) == list(ref.arrival_order(seconds, 50))


def test_arrival_order_ties_do_not_depend_on_unit_of_time():
  """Three times a tenth is more than 0.3 in floats."""
  assert list(ow.contrib.arrival_order([0.1, 0.3], 8)) == list(ow.contrib.arrival_order([1, 3], 8))
  assert list(ow.contrib.arrival_order([1, 3], 8)) == [0, 0, 0, 1, 0, 0, 0, 1]


def test_arrival_order_with_seed_is_reproducible_and_proportional():
  order = ow.contrib.arrival_order([1.0, 2.0, 4.0], 7000, seed=3)
  assert list(order) == list(ow.contrib.arrival_order([1.0, 2.0, 4.0], 7000, seed=3))
  np.testing.assert_allclose(np.bincount(order) / 7000, np.array([4, 2, 1]) / 7, atol=0.02)
  assert list(order[:40]) != list(ow.contrib.arrival_order([1.0, 2.0, 4.0], 40))


# Bad input.


@pytest.mark.parametrize(
  ("make", "error", "match"),
  [
    (
      lambda: ow.contrib.simulate_workers(optax.sgd(1.0), 0),
      ValueError,
      "num_workers must be at least 1",
    ),
    (
      lambda: ow.contrib.simulate_workers(optax.sgd(1.0), 2, [0, 2]),
      ValueError,
      "from 0 to num_workers",
    ),
    (lambda: ow.contrib.simulate_workers(optax.sgd(1.0), 2, [0.5]), TypeError, "arrivals must be"),
    (lambda: ow.contrib.simulate_workers(optax.sgd(1.0), 2, []), TypeError, "arrivals must be"),
    (lambda: ow.contrib.arrival_order([1.0, 0.0], 3), ValueError, "seconds must be"),
    (lambda: ow.contrib.arrival_order([], 3), ValueError, "seconds must be"),
    (lambda: ow.contrib.arrival_order([1.0, np.nan], 3), ValueError, "seconds must be"),
    (lambda: ow.contrib.arrival_order([1.0], 0), ValueError, "num_updates must be at least 1"),
  ],
)
def test_simulate_workers_and_arrival_order_errors_arguments(make, error, match):
  with pytest.raises(error, match=match):
    make()


def test_simulate_workers_two_staleness_states_inside_is_error():
  parts = {"a": ow.staleness_aware(optax.sgd(1.0)), "b": ow.drop_stale(optax.sgd(1.0), 1)}
  tx = ow.contrib.simulate_workers(optax.partition(parts, {"x": "a", "y": "b"}), 2)
  with pytest.raises(ValueError, match="2 wrappers that count their own steps"):
    tx.init({"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)})


def test_simulate_workers_arrivals_function_out_of_range_is_error():
  tx = ow.contrib.simulate_workers(optax.sgd(1.0), 2, lambda t: t % 3)
  with pytest.raises(ValueError, match="arrivals must be from 0 to num_workers - 1 = 1, got 2"):
    jax.jit(tx.init)(np.ones(2, np.float32))


def test_simulate_workers_one_worker_float32_gradient_equals_inner():
  params, grad = jnp.ones((), jnp.float16), jnp.float32(1e5)
  tx, bare = ow.contrib.simulate_workers(optax.sgd(1e-5), 1), optax.sgd(1e-5)
  updates = tx.update(grad, tx.init(params), params)[0]
  assert bits(updates) == bits(bare.update(grad, bare.init(params), params)[0])


def test_simulate_workers_errors_extra_args_params_and_shapes():
  tx, params = ow.contrib.simulate_workers(optax.sgd(1.0), 2), np.zeros(2, np.float32)
  state = tx.init(params)
  for name in ("computed_at", "computed_params", "weight"):
    with pytest.raises(ValueError, match=f"{name} cannot be given"):
      tx.update(params, state, params, **{name: 0})
  compensated = ow.contrib.simulate_workers(
    optax.chain(ow.contrib.delay_compensation(), optax.sgd(1.0)), 2
  )  # fmt: skip
  with pytest.raises(ValueError, match="params is needed"):
    compensated.update(params, compensated.init(params))
  with pytest.raises(ValueError, match="must have the parameter's shape"):
    tx.update(np.zeros((2, 2), np.float32), state, params)
  wrong = ow.contrib.simulate_workers(optax.sgd(1.0), 2, lambda t: jnp.float32(0.5))
  with pytest.raises(TypeError, match="arrivals must be"):
    jax.eval_shape(wrong.update, params, wrong.init(params), params)


def test_simulate_workers_weights_from_outside_is_error():
  tx = ow.drop_stale(
    ow.contrib.simulate_workers(ow.cross_shard(optax.sgd(1.0), AXIS), 2), 1, axis_name=AXIS
  )

  def one(grad):
    return tx.update(grad, tx.init(grad), grad, computed_at=0)[0]

  with pytest.raises(
    ValueError, match="Put simulate_workers outside of a wrapper that weights gradients"
  ):
    jax.jit(jax.vmap(one, axis_name=AXIS))(np.ones((2, 3), np.float32))
