"""staleness_aware, its policies, delay compensation and history against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, bits, mesh_of
from jax.sharding import PartitionSpec as P
from staleness_cases import POLICIES, check_against_server

import optax_wrappers as ow

# The step, against a server in NumPy.


FULL = {"weight": "polynomial", "max_staleness": 3, "scale": "updates"}


@pytest.mark.parametrize("context", CONTEXTS)
def test_staleness_aware_every_context_matches_numpy_server(context):
  check_against_server(context, 4, "momentum", FULL, "adaptive")


@pytest.mark.parametrize("name", POLICIES)
def test_staleness_aware_without_axis_scales_each_gradient(name):
  """Without an axis, normalizing leaves the gradient, and both scales are one for SGD."""
  ours, theirs = POLICIES[name]
  rng = np.random.default_rng(0)
  txs = {
    "plain": ow.staleness_aware(optax.sgd(1.0), ours),
    "updates": ow.staleness_aware(optax.sgd(1.0), ours, scale="updates"),
    "normalized": ow.staleness_aware(optax.sgd(1.0), ours, normalize=True),
  }
  states = jax.jit(lambda: {key: tx.init(jnp.zeros(3)) for key, tx in txs.items()})()

  @jax.jit
  def step(grad, states, delay):
    found = {
      key: tx.update(grad, states[key], computed_at=states[key].step - delay)
      for key, tx in txs.items()
    }
    return {key: x for key, (x, _) in found.items()}, {key: s for key, (_, s) in found.items()}

  for delay in (0, 2, 1, 5):
    grad = rng.normal(size=3).astype(np.float32)
    weight = float(theirs(delay))
    updates, states = step(grad, states, np.int32(delay))
    for key in txs:
      factor = float(weight > 0) if key == "normalized" else weight
      assert_close(updates[key], -factor * grad, rtol=1e-5)


def test_staleness_aware_pmean_sum_and_user_weights_match_numpy():
  grads = np.array([1.0, 10.0, 100.0, np.nan], np.float32)
  ages, own = np.array([0, 1, 3, 7], np.int32), np.array([1.0, 2.0, 3.0, 4.0], np.float32)
  w = 1 / (1 + ages[:3])

  def updates_of(inner, weigh):
    tx = ow.staleness_aware(inner, ow.staleness.inverse(), max_staleness=4, axis_name=AXIS)
    extra = (lambda v: {"weight": v}) if weigh else (lambda v: {})

    def one(grad, age, v):
      return tx.update(grad, tx.init(grad), computed_at=-age, **extra(v))[0]

    return np.asarray(jax.jit(jax.vmap(one, axis_name=AXIS))(grads, ages, own))

  by_hand = optax.GradientTransformation(
    lambda p: optax.EmptyState(), lambda u, s, p=None: (jax.lax.pmean(u, AXIS), s)
  )
  identity = optax.identity()
  g, v = grads[:3].astype(float), own[:3].astype(float)
  assert_close(updates_of(by_hand, False), np.full(4, (w * g).sum() / 3), rtol=1e-6)
  summed = ow.cross_shard(identity, AXIS, reduction="sum")
  assert_close(updates_of(summed, False), np.full(4, (w * g).sum()), rtol=1e-6)
  assert_close(updates_of(summed, True), np.full(4, (w * v * g).sum()), rtol=1e-6)
  mean = ow.cross_shard(identity, AXIS)
  assert_close(updates_of(mean, True), np.full(4, (w * v * g).sum() / v.sum()), rtol=1e-6)


def test_staleness_aware_towers_weighted_by_own_age_as_fedbuff():
  """FedBuff: sum_i w_i g_i / K, with ages in steps of K gradients."""
  policy = ow.staleness.polynomial(0.5)
  tx = ow.staleness_aware(ow.gather_towers(optax.sgd(1.0), 3), lambda age: policy(age // 3))
  grads, ages = np.array([1.0, 10.0, 100.0]), [0, 4, 11]
  state = tx.init(np.zeros((), np.float32))
  update = jax.jit(lambda grad, state, age: tx.update(grad, state, computed_at=state.step - age))
  for grad, age in zip(grads, ages):
    updates, state = update(np.float32(grad), state, np.int32(age))
  assert_close(updates, -np.mean(grads / np.sqrt([1.0, 2.0, 4.0])), rtol=1e-6)


def test_staleness_aware_adam_constant_age_only_scales_updates_mode():
  def final(**options):
    tx = ow.staleness_aware(optax.adam(0.1, eps=0.0), ow.staleness.inverse(), **options)
    return trained(tx, lambda state: {"computed_at": state.step - 3})

  def bare(rate):
    return trained(optax.adam(rate, eps=0.0), lambda state: {})

  def trained(tx, extra):
    @jax.jit
    def step(params, state):
      updates, state = tx.update(params, state, params, **extra(state))
      return optax.apply_updates(params, updates), state

    params = np.array([1.0, -2.0], np.float32)
    state = jax.jit(tx.init)(params)
    for _ in range(5):
      params, state = step(params, state)
    return params

  with jax.numpy_dtype_promotion("standard"):
    assert_close(final(), bare(0.1), rtol=1e-5)
    assert_close(final(scale="updates"), bare(0.025), rtol=1e-5)


def test_staleness_aware_weight_zero_leaves_state_unchanged():
  gate = ow.staleness.cosine_gate(2)
  tx = ow.staleness_aware(optax.sgd(0.1, 0.9), gate)
  params = np.array([1.0, 2.0], np.float32)
  state, update = tx.init(params), jax.jit(tx.update)
  for stamp in (0, 0, 1):
    _, state = update(params, state, params, computed_at=stamp)
  updates, after = update(np.full(2, np.nan, np.float32), state, params, computed_at=0)
  assert bits(updates) == bits(np.zeros(2, np.float32))
  for name in ("inner_state", "step"):
    assert bits(getattr(after, name)) == bits(getattr(state, name))
  assert int(after.dropped) == int(state.dropped) + 1


@pytest.mark.parametrize("options", [{"normalize": True}, {"scale": "updates"}])
def test_staleness_aware_all_dropped_derivative_is_zero(options):
  tx = ow.staleness_aware(optax.sgd(1.0), ow.staleness.cosine_gate(2), **options)

  def moved(grad):
    return tx.update(grad, tx.init(grad), computed_at=-2)[0].sum()

  zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
  assert bits(jax.jit(jax.grad(moved))(ones)) == bits(zeros)


def test_staleness_histogram_last_bin_has_older_and_bins_saturate():
  tx = ow.drop_stale(optax.sgd(1.0), 2**29)

  @jax.jit
  def update(state, delay):
    return tx.update(jnp.ones(2), state, computed_at=state.step - delay)[1]

  first = tx.init(np.zeros(2, np.float32))
  histogram = np.array(first.histogram)
  histogram[31] = 2**31 - 2
  state = first.replace(histogram=histogram)
  for delay in (30, 31):
    state = update(state, np.int32(delay))
  assert [int(x) for x in ow.get_state(state, ow.states.StalenessState).histogram[29:]] == [
    0,
    1,
    2**31 - 1,
  ]
  state = first
  for delay in (31, 32, 10**6, 2**31 - 1):
    state = update(state, np.int32(delay))
  assert int(ow.get_state(state, ow.states.StalenessState).histogram[31]) == 4


def test_staleness_aware_extra_args_reach_inner_without_computed_at():
  seen = []

  def update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
  tx = ow.staleness_aware(inner, ow.staleness.inverse())
  then = jnp.ones(2)
  tx.update(then, tx.init(then), computed_at=-3, value=1.0, computed_params=then)
  assert seen == [{"value": 1.0, "computed_params": then}]


def test_staleness_aware_sends_only_gradient_counts_and_weight():
  inner = ow.cross_shard(optax.sgd(0.1), AXIS)
  aware = ow.staleness_aware(inner, ow.staleness.inverse(), max_staleness=3, axis_name=AXIS)
  tx = ow.contrib.params_history(
    optax.chain(ow.contrib.delay_compensation(2.0, decay=0.9), aware), 3
  )
  params = np.zeros(1000, np.float32)
  state = tx.init(params)
  specs = ow.specs(state, workers=AXIS, replicated=True)

  def step(params, state, grad, stamp):
    own = jax.tree.map(lambda s, x: x[0] if s else x, specs, state)
    updates, state = tx.update(grad[0], own, params, computed_at=stamp[0])
    stacked = jax.tree.map(lambda s, x: x[None] if s else x, specs, state)
    return optax.apply_updates(params, updates), stacked

  mapped = jax.shard_map(
    step, mesh=mesh_of(4), in_specs=(P(), specs, P(AXIS), P(AXIS)), out_specs=(P(), specs)
  )
  stacked = jax.jit(lambda s: ow.stack_workers(s, 4, replicated=True))(state)
  args = params, stacked, np.ones((4, 1000), np.float32), np.zeros(4, np.int32)
  found = ow.inspect.compiled_collectives(jax.jit(mapped).lower(*args).compile())
  # The 34 numbers travel with the gradient. The shards' weights, which it is divided by, go before.
  assert sorted((c.kind, c.num_bytes) for c in found) == [("all-reduce", 4), ("all-reduce", 4136)]


def test_staleness_aware_in_elastic_average_weighs_per_worker():
  aware = ow.staleness_aware(optax.sgd(1.0), ow.staleness.inverse(), max_staleness=2)
  tx = ow.elastic_average(ow.contrib.params_history(aware, 2), AXIS, communication_period=10**6)
  one = np.zeros(2, np.float32)
  params, state = jax.jit(lambda one: ow.stack_workers((one, tx.init(one)), 3))(one)

  def step(params, state, grad, age):
    updates, state = tx.update(grad, state, params, computed_at=-age)
    return optax.apply_updates(params, updates), state

  grads = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, np.nan]], np.float32)
  args = params, state, grads, np.array([0, 1, 3], np.int32)
  params, state = jax.jit(ow.map_workers(step, AXIS))(*args)
  assert_close(params, np.array([[-1.0, -2.0], [-1.5, -2.0], [0.0, 0.0]]))
  assert [int(x) for x in state.inner_state.inner_state.step] == [1, 1, 0]
  assert_close(jax.jit(jax.vmap(lambda s: ow.contrib.past_params(s, 0)))(state.inner_state), params)


# Bad input.


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"weight": 0.5}, TypeError, "weight must be a function of ages"),
    ({"weight": lambda age: 0.5}, ValueError, r"float32\[3\] for int32\[3\]"),
    ({"weight": lambda age: age.sum()}, ValueError, r"float32\[3\] for int32\[3\]"),
    ({"weight": ow.staleness.inverse}, ValueError, r"Call what makes a policy"),
    ({"weight": lambda age: 1.0 if age < 2 else 0.5}, ValueError, "in jax.numpy"),
    ({"max_staleness": 1.5}, TypeError, "max_staleness must be a Python int"),
    ({"scale": "grads"}, ValueError, "scale must be one of"),
    ({"scale": "updates", "normalize": True}, ValueError, "Leave one of them out"),
    ({"normalize": 1}, TypeError, "normalize must be a bool"),
  ],
)
def test_staleness_aware_errors_arguments_of_constructor(options, error, match):
  with pytest.raises(error, match=match):
    ow.staleness_aware(optax.sgd(0.1), **options)


def test_staleness_aware_summed_gradients_with_ages_per_shard_is_error():
  tx = ow.staleness_aware(
    ow.cross_shard(optax.sgd(0.1), AXIS), ow.staleness.inverse(), axis_name=AXIS
  )

  def step(params, x, stamp):
    grad = jax.grad(lambda p: jnp.sum(p * x[0]))(params)
    return tx.update(grad, tx.init(params), params, computed_at=stamp[0])[0]

  mapped = jax.shard_map(step, mesh=mesh_of(2), in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P())
  with pytest.raises(ValueError, match="per_shard"):
    jax.jit(mapped)(np.zeros(2, np.float32), np.ones((2, 2), np.float32), np.zeros(2, np.int32))
