"""staleness_aware, its policies, delay compensation and history against plain NumPy."""

import functools
import math
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_staleness as ref
from helpers import AXIS, CONTEXTS, assert_close, bits, in_context, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

START = [np.array([0.5, -1.0, 2.0]), np.array([[0.25, -0.75]])]
POLICIES = {
  "inverse": (ow.staleness.inverse(), ref.inverse()),
  "inverse of Zhang": (ow.staleness.inverse(0), ref.inverse(0)),
  "polynomial": (ow.staleness.polynomial(0.7), ref.polynomial(0.7)),
  "hinge": (ow.staleness.hinge(3.0, 1), ref.hinge(3.0, 1)),
  "exponential": (ow.staleness.exponential(0.4), ref.exponential(0.4)),
  "cosine_gate": (ow.staleness.cosine_gate(3), ref.cosine_gate(3)),
}
INNERS = {
  "sgd": (optax.sgd(0.1), ref.Sgd(0.1)),
  "momentum": (optax.sgd(0.1, 0.9), ref.Momentum(0.1, 0.9)),
  "adam": (optax.adam(0.05), ref.Adam(0.05)),
}
COMPENSATIONS = {
  "none": (None, None),
  "constant": (ow.delay_compensation(0.3), ref.DelayCompensation(0.3)),
  "adaptive": (ow.delay_compensation(2.0, decay=0.9), ref.DelayCompensation(2.0, 0.9)),
}


def arrays(values):
  return [x.astype(np.float32) for x in values]


# Policies.


@pytest.mark.parametrize("name", POLICIES)
def test_policies_against_numpy(name):
  ours, theirs = POLICIES[name]
  ages = np.arange(-3, 40, dtype=np.int32).reshape(-1, 1)
  found = jax.jit(ours)(ages)
  assert (found.shape, found.dtype) == (ages.shape, jnp.float32)
  assert_close(found, theirs(ages), rtol=2e-6)
  assert float(ours(jnp.int32(0))) == 1.0


def test_a_gate_is_exactly_zero_from_its_cutoff_on():
  weights = np.asarray(jax.jit(ow.staleness.cosine_gate(4))(np.arange(6, dtype=np.int32)))
  assert list(weights > 0) == [True] * 4 + [False] * 2


def test_policies_of_traced_numbers_and_products():
  def rate_of(a):
    return ow.staleness.polynomial(a)(jnp.arange(4)) * ow.staleness.exponential(a)(jnp.arange(4))

  ages = np.arange(4)
  assert_close(jax.jit(rate_of)(np.float32(0.3)), (1.0 + ages) ** -0.3 * np.exp(-0.3 * ages))


@pytest.mark.parametrize(
  "make",
  [
    lambda: ow.staleness.inverse(-1),
    lambda: ow.staleness.polynomial(-0.5),
    lambda: ow.staleness.hinge(1.0, -1),
    lambda: ow.staleness.exponential(-1.0),
    lambda: ow.staleness.cosine_gate(0),
  ],
)
def test_policies_that_would_grow_are_errors(make):
  with pytest.raises(ValueError, match=r"must be (at least|above)"):
    make()


# The step, against a server in NumPy.


def steps_of(num_shards, rng, num_steps=9):
  """Of each step: gradients and earlier parameters of each shard, and how late each is."""
  for i in range(num_steps):
    delays = rng.integers(-1, 5, num_shards)
    if i == 4:
      delays[:] = 9  # all of them are dropped where any is
    grads, then = (
      [rng.normal(size=(num_shards, *x.shape)).astype(np.float32) for x in START] for _ in range(2)
    )
    yield grads, then, delays


def check_against_server(context, num_shards, inner, options, compensation):
  ours, theirs = INNERS[inner]
  compensate, reference_compensate = COMPENSATIONS[compensation]
  weight, reference_weight = POLICIES.get(options.get("weight"), (None, None))
  options = {key: value for key, value in options.items() if key != "weight"}
  server = ref.StalenessAware(
    theirs, reference_weight, compensation=reference_compensate, num_shards=num_shards, **options
  )
  tx = ow.staleness_aware(ow.cross_shard(ours, AXIS), weight, axis_name=AXIS, **options)
  if compensate:
    tx = optax.chain(compensate, tx)
  params, expected = arrays(START), START
  server.init(expected)
  state = jax.jit(tx.init)(params)
  axes = ow.worker_axes(state, replicated=True)
  state = jax.jit(lambda s: ow.stack_workers(s, num_shards, replicated=True))(state)

  def step(params, state, grads, then, stamp):
    extra = {"computed_params": then} if compensate else {}
    updates, state = tx.update(grads, state, params, computed_at=stamp, **extra)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, num_shards, (None, axes, 0, 0, 0), (None, axes))
  rng = np.random.default_rng(3)
  for grads, then, delays in steps_of(num_shards, rng):
    stamps = (server.version - delays).astype(np.int32)
    kept = [server.weight_of(t) > 0 for t in stamps]
    for i in np.flatnonzero(~np.asarray(kept)):  # whatever it holds
      grads[0][i, 1], then[1][i] = np.nan, np.inf
    per_shard = [[g[i].astype(float) for g in grads] for i in range(num_shards)]
    past = [[t[i].astype(float) for t in then] for i in range(num_shards)]
    updates = server.step(per_shard, list(stamps), expected, past)
    expected = [x + u for x, u in zip(expected, updates)]
    params, state = step(params, state, arrays(grads), arrays(then), stamps)
    assert_close(params, expected, rtol=2e-5, atol=2e-5)
    found = ow.get_state(state, ow.StalenessState)
    assert (int(found.step), int(found.dropped)) == (server.version, server.dropped)
    assert int(found.accepted) == server.accepted
    assert list(ow.staleness_histogram(state)) == list(server.histogram)
  assert server.dropped > 0 or "max_staleness" not in options
  if compensation == "adaptive":
    squares = [np.stack(x) for x in zip(*server.mean_squares)]
    assert_close(state[0].mean_square, squares, rtol=1e-5, atol=1e-6)


FULL = {"weight": "polynomial", "max_staleness": 3, "scale": "updates"}


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_context_against_a_server(context):
  check_against_server(context, 4, "momentum", FULL, "adaptive")


@pytest.mark.optax_promotes
@pytest.mark.parametrize("compensation", COMPENSATIONS)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(
  "options",
  [
    {"max_staleness": 2},
    {"weight": "inverse"},
    {"weight": "hinge", "max_staleness": 3, "normalize": True},
    {"weight": "cosine_gate", "scale": "updates"},
  ],
  ids=["drop", "gradients", "normalized", "updates"],
)
def test_optimizers_and_rules_against_a_server(options, inner, compensation):
  check_against_server("vmap", 3, inner, options, compensation)


@pytest.mark.parametrize("name", POLICIES)
def test_one_gradient_after_another(name):
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


def test_means_by_hand_and_sums_and_weights_of_the_users_own():
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


def test_each_tower_of_a_step_by_its_own_age():
  """FedBuff: sum_i w_i g_i / K, with ages in steps of K gradients."""
  policy = ow.staleness.polynomial(0.5)
  tx = ow.staleness_aware(ow.gather_towers(optax.sgd(1.0), 3), lambda age: policy(age // 3))
  grads, ages = np.array([1.0, 10.0, 100.0]), [0, 4, 11]
  state = tx.init(np.zeros((), np.float32))
  update = jax.jit(lambda grad, state, age: tx.update(grad, state, computed_at=state.step - age))
  for grad, age in zip(grads, ages):
    updates, state = update(np.float32(grad), state, np.int32(age))
  assert_close(updates, -np.mean(grads / np.sqrt([1.0, 2.0, 4.0])), rtol=1e-6)


def test_a_constant_age_is_nothing_to_adam_unless_updates_are_scaled():
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


def test_a_weight_of_zero_leaves_the_whole_state_bit_for_bit():
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
def test_a_step_in_which_all_are_dropped_has_a_derivative(options):
  tx = ow.staleness_aware(optax.sgd(1.0), ow.staleness.cosine_gate(2), **options)

  def moved(grad):
    return tx.update(grad, tx.init(grad), computed_at=-2)[0].sum()

  zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
  assert bits(jax.jit(jax.grad(moved))(ones)) == bits(zeros)


def test_a_stamp_from_the_future_has_age_zero():
  tx = ow.staleness_aware(optax.identity(), ow.staleness.inverse(), max_staleness=1)
  state = tx.init(np.zeros(2, np.float32))
  updates, state = jax.jit(tx.update)(np.ones(2, np.float32), state, computed_at=10**6)
  assert_close(updates, np.ones(2))
  assert int(ow.staleness_histogram(state)[0]) == 1


def test_a_weight_that_falls_below_zero_late_is_a_drop():
  tx = ow.staleness_aware(optax.sgd(1.0), lambda age: 1 - age.astype(jnp.float32) / 100)
  state = tx.init(np.zeros(2, np.float32))
  update = jax.jit(lambda state, age: tx.update(jnp.ones(2), state, computed_at=state.step - age))
  for age, expected in ((50, -0.5), (200, 0.0)):
    updates, state = update(state, np.int32(age))
    assert_close(updates, np.full(2, expected))
  assert int(state.dropped) == 1


def test_the_last_bin_has_all_older_ones_and_bins_stop_at_the_largest_int():
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
  assert [int(x) for x in ow.staleness_histogram(state)[29:]] == [0, 1, 2**31 - 1]
  state = first
  for delay in (31, 32, 10**6, 2**31 - 1):
    state = update(state, np.int32(delay))
  assert int(ow.staleness_histogram(state)[31]) == 4


def test_inner_is_told_the_age():
  seen = []

  def update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
  tx = ow.staleness_aware(inner, ow.staleness.inverse())
  then = jnp.ones(2)
  tx.update(then, tx.init(then), computed_at=-3, value=1.0, computed_params=then)
  assert seen == [{"value": 1.0, "computed_params": then}]


def test_one_small_vector_is_sent_beside_the_gradient():
  inner = ow.cross_shard(optax.sgd(0.1), AXIS)
  aware = ow.staleness_aware(inner, ow.staleness.inverse(), max_staleness=3, axis_name=AXIS)
  tx = ow.params_history(optax.chain(ow.delay_compensation(2.0, decay=0.9), aware), 3)
  params = np.zeros(1000, np.float32)
  state = tx.init(params)
  specs = ow.worker_specs(state, AXIS, replicated=True)

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


def test_workers_of_an_elastic_average_weigh_their_own():
  aware = ow.staleness_aware(optax.sgd(1.0), ow.staleness.inverse(), max_staleness=2)
  tx = ow.elastic_average(ow.params_history(aware, 2), AXIS, communication_period=10**6)
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
  assert_close(jax.jit(jax.vmap(lambda s: ow.past_params(s, 0)))(state.inner_state), params)


# Delay compensation alone.


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("decay", [None, 0.95])
def test_delay_compensation_against_the_papers_equations(dtype, decay):
  rng = np.random.default_rng(1)
  with jax.enable_x64(dtype == "float64"):
    tx = ow.delay_compensation(0.7, decay=decay, eps=1e-3)
    state, square = tx.init(np.zeros(5, dtype)), np.zeros(5)

    @jax.jit
    def update(g, state, now, then):
      return tx.update(g, state, now, computed_params=then)

    for _ in range(4):
      g, now, then = rng.normal(size=(3, 5)).astype(dtype)
      wide = [x.astype(complex if dtype == "complex64" else float) for x in (g, now)]
      back = then.astype(wide[0].dtype)
      if decay is not None:
        square = decay * square + (1 - decay) * np.abs(wide[0]) ** 2
      strength = 0.7 if decay is None else 0.7 / np.sqrt(square + 1e-3)
      expected = wide[0] + strength * np.abs(wide[0]) ** 2 * (wide[1] - back)
      found, state = update(g, state, now, then)
      assert found.dtype == g.dtype
      rtol = {"bfloat16": 2**-8, "float16": 2**-10, "float64": 1e-12}.get(dtype, 1e-5)
      np.testing.assert_allclose(np.asarray(found).astype(expected.dtype), expected, rtol, 1e-6)


def test_compensation_comes_before_the_weight():
  aware = ow.staleness_aware(optax.sgd(1.0), ow.staleness.inverse())
  tx = optax.chain(ow.delay_compensation(0.5), aware)
  now, then, grad = (np.array([x], np.float32) for x in (3.0, 1.0, 2.0))
  updates, _ = jax.jit(tx.update)(grad, tx.init(now), now, computed_at=-1, computed_params=then)
  assert_close(updates, np.array([-0.5 * (2.0 + 0.5 * 4.0 * 2.0)]))


def test_whatever_a_dropped_gradient_is_compared_with_a_sum_stays_finite():
  summed = ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum")
  aware = ow.staleness_aware(summed, max_staleness=1, axis_name=AXIS)
  tx = optax.chain(ow.delay_compensation(), aware)

  def one(stamp, then):
    params = jnp.zeros(2)
    extra = {"computed_at": stamp, "computed_params": jnp.full(2, then)}
    return tx.update(jnp.ones(2), tx.init(params), params, **extra)[0]

  args = np.array([0, -2], np.int32), np.array([0.0, np.inf], np.float32)
  updates = jax.jit(jax.vmap(one, axis_name=AXIS))(*args)
  assert_close(updates, np.full((2, 2), -1.0))


def test_compensation_on_an_explicit_mesh_lies_as_the_parameters():
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  aware = ow.staleness_aware(optax.sgd(0.1), max_staleness=2)
  tx = ow.params_history(optax.chain(ow.delay_compensation(decay=0.9), aware), 2)
  with jax.set_mesh(mesh):
    params = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("x", "y")))
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params, computed_at=0)
  assert_close(updates, np.full((8, 4), -0.1))
  for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after)):
    assert jax.typeof(old) == jax.typeof(new)


def test_compensation_skips_what_has_no_gradient():
  tx = ow.delay_compensation(2.0, decay=0.9)
  ones = np.ones(2, np.float32)
  params, grads = {"a": ones, "b": ones}, {"a": ones, "b": None}
  updates, state = jax.jit(tx.update)(grads, tx.init(params), params, computed_params=params)
  assert updates["b"] is None
  assert_close(state.mean_square, {"a": np.full(2, 0.1), "b": np.zeros(2)}, rtol=1e-5)


# History.


def test_any_delay_from_history_against_numpy():
  rng = np.random.default_rng(5)
  tx = ow.params_history(ow.drop_stale(optax.sgd(0.1, 0.9), 3), 3)
  server = ref.StalenessAware(ref.Momentum(0.1, 0.9), max_staleness=3)
  params, expected = arrays(START), START
  state, versions = tx.init(params), ref.Versions(4)
  server.init(expected)
  versions.record(0, expected)

  @jax.jit
  def step(params, state, delay, noise):
    then = ow.past_params(state, delay)
    grads = jax.tree.map(lambda x, n: jnp.sin(x) + n, then, noise)
    step = ow.get_state(state, ow.StalenessState).step
    ago = jnp.clip(delay, 0, jnp.minimum(step, 3))
    updates, state = tx.update(grads, state, params, computed_at=step - ago)
    return optax.apply_updates(params, updates), state

  for delay in [0, 3, *rng.integers(-1, 7, 14)]:
    noise = [rng.normal(size=x.shape) for x in START]
    cut = versions.available(delay)
    grads = [np.sin(x) + n for x, n in zip(versions.past(delay), noise)]
    updates = server.step([grads], [server.version - cut], expected)
    expected = [x + u for x, u in zip(expected, updates)]
    versions.record(server.version, expected)
    params, state = step(params, state, np.int32(delay), arrays(noise))
    assert_close(params, expected, rtol=2e-5, atol=2e-5)
  assert list(ow.staleness_histogram(state)) == list(server.histogram)


def test_history_holds_the_parameters_themselves_where_a_wrapper_outside_changes_the_update():
  tx = ow.clip_variables(ow.params_history(ow.drop_stale(optax.sgd(1.0), 2), 2), 1.0)
  params = np.array([0.6, 0.0], np.float32)
  state, seen = tx.init(params), [params]

  @jax.jit
  def step(params, state):
    now = ow.get_state(state, ow.StalenessState).step
    updates, state = tx.update(-jnp.ones(2), state, params, computed_at=now)
    return optax.apply_updates(params, updates), state

  for _ in range(3):
    params, state = step(params, state)
    seen.append(params)
  assert_close(ow.past_params(state, 1), seen[-2])
  assert_close(ow.past_params(state, 2), seen[-3])


def test_compensation_finds_its_parameters_in_the_history():
  told = optax.chain(ow.delay_compensation(0.4), ow.drop_stale(optax.sgd(0.3), 2))
  looks = ow.params_history(told, 2)
  params = np.array([1.0, -0.5], np.float32)
  a, b, versions = told.init(params), looks.init(params), [params]
  update_told, update_looks = jax.jit(told.update), jax.jit(looks.update)
  for delay in (0, 1, 2, 2, 1):
    stamp = max(int(a[1].step) - delay, 0)
    then = versions[stamp]
    updates, a = update_told(np.cos(then), a, params, computed_at=stamp, computed_params=then)
    again, b = update_looks(np.cos(then), b, params, computed_at=stamp)
    assert_close(again, updates)
    params = params + np.asarray(updates)
    versions.append(params)


def test_what_a_history_compares_with():
  """Parameters that are given come first; a stamp of the future is one of today."""
  inner = optax.chain(ow.delay_compensation(1.0), ow.drop_stale(optax.sgd(1.0), 3))
  tx = ow.params_history(inner, 3)
  zero, start, now, given = (np.array([x], np.float32) for x in (0.0, 1.0, 2.0, -1.0))
  _, state = jax.jit(tx.update)(zero, tx.init(start), start, computed_at=0)
  # Step 1; step 0 had 1.0.
  update = functools.partial(jax.jit(tx.update), now, state, now)
  for extra, then in (
    ({"computed_at": 0}, 1.0),
    ({"computed_at": 0, "computed_params": given}, -1.0),
    ({"computed_at": 2}, 2.0),
    ({"computed_at": -1}, 1.0),
  ):
    assert_close(update(**extra)[0], np.array([-(2.0 + 4.0 * (2.0 - then))]))


def test_compensation_looks_up_each_shards_own_version():
  """Under shard_map's types the ring is one for all shards, and what is read from it is not."""
  aware = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS), 3, axis_name=AXIS)
  tx = ow.params_history(optax.chain(ow.delay_compensation(1.0), aware), 3)
  params = np.array([0.0], np.float32)
  state, versions = tx.init(params), [params]
  axes = ow.worker_axes(state, replicated=True)

  def step(params, state, grad, stamp):
    updates, state = tx.update(grad, state, params, computed_at=stamp)
    return optax.apply_updates(params, updates), state

  step = in_context("shard_map", step, 2, (None, axes, 0, 0), (None, axes))
  for delays in ([0, 0], [1, 0], [2, 1], [0, 3]):
    stamps = np.maximum(len(versions) - 1 - np.array(delays), 0)
    grads = np.array([[1.0], [-0.5]])
    past = np.stack([np.asarray(versions[t]) for t in stamps])
    expected = np.asarray(params) - (grads + grads**2 * (np.asarray(params) - past)).mean(0)
    params, state = step(params, state, grads.astype(np.float32), stamps.astype(np.int32))
    versions.append(params)
    assert_close(params, expected, rtol=1e-5)


def save_by_flax(tree, target):
  return flax.serialization.from_bytes(target, flax.serialization.to_bytes(tree))


@pytest.mark.parametrize(
  "save", [save_by_flax, lambda tree, target: pickle.loads(pickle.dumps(tree))]
)
def test_a_checkpoint_in_mid_run_goes_on_bit_for_bit(save):
  aware = ow.staleness_aware(optax.sgd(0.1, 0.9), ow.staleness.polynomial(), max_staleness=3)
  tx = ow.params_history(optax.chain(ow.delay_compensation(2.0, decay=0.9), aware), 3)

  @jax.jit
  def step(params, state, delay):
    grads = jnp.sin(ow.past_params(state, delay))
    now = ow.get_state(state, ow.StalenessState).step
    updates, state = tx.update(grads, state, params, computed_at=now - delay)
    return optax.apply_updates(params, updates), state

  def run(held, delays):
    for delay in delays:
      held = step(*held, np.int32(delay))
    return held

  params = np.array([1.0, -2.0, 0.5], np.float32)
  first = params, tx.init(params)
  half = run(first, [0, 1, 2, 1, 4])
  restored = jax.tree.map(jnp.asarray, save(half, first))
  assert bits(run(restored, [3, 0, 2, 2])) == bits(run(half, [3, 0, 2, 2]))


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
    ({"history": True}, TypeError, "no argument 'history': put params_history"),
    ({"compensation": None}, TypeError, "no argument 'compensation': put it before this one"),
  ],
)
def test_wrong_arguments_are_errors_at_once(options, error, match):
  with pytest.raises(error, match=match):
    ow.staleness_aware(optax.sgd(0.1), **options)


@pytest.mark.parametrize(
  "weight", [lambda age: 1 - age, lambda age: 0 * age / (age - 3), lambda age: 1 / age]
)
def test_a_weight_that_is_none_is_an_error_in_init(weight):
  tx = ow.staleness_aware(optax.sgd(0.1), weight)
  with pytest.raises(ValueError, match="weight must be finite and at least 0 for every age"):
    jax.jit(tx.init)(np.zeros(2, np.float32))


def test_wrong_arguments_of_update():
  tx = optax.chain(ow.delay_compensation(), ow.staleness_aware(optax.sgd(0.1)))
  params = jnp.ones(2)
  state = tx.init(params)
  with pytest.raises(ValueError, match="computed_at is needed"):
    tx.update(params, state, params, computed_params=params)
  with pytest.raises(TypeError, match="computed_at must be"):
    tx.update(params, state, params, computed_at=1.0, computed_params=params)
  with pytest.raises(ValueError, match=r"computed_params=then.*params_history"):
    tx.update(params, state, params, computed_at=0)
  with pytest.raises(ValueError, match="shape"):
    tx.update(params, state, params, computed_at=0, computed_params=jnp.ones(3))
  with pytest.raises(ValueError, match="params is needed"):
    tx.update(params, state, computed_at=0, computed_params=params)
  with pytest.raises(ValueError, match="max_staleness must be at least 0"):
    ow.params_history(tx, -1)
  with pytest.raises(ValueError, match="exactly one StalenessState, found 0"):
    ow.params_history(optax.sgd(0.1), 2).init(params)
  kept = ow.params_history(ow.drop_stale(optax.sgd(0.1), 2), 2)
  with pytest.raises(ValueError, match="params is needed"):
    kept.update(params, kept.init(params), computed_at=0)
  with pytest.raises(
    ValueError, match=r"made for {'max_staleness': 2}, and this is {'max_staleness': 3}"
  ):
    ow.params_history(ow.drop_stale(optax.sgd(0.1), 3), 3).update(
      params, kept.init(params), params, computed_at=0
    )
  with pytest.raises(TypeError, match="state must be a ParamsHistoryState"):
    kept.update(params, state, params, computed_at=0)
  with pytest.raises(ValueError, match="exactly one ParamsHistoryState, found 0"):
    ow.past_params(state, 1)
  with pytest.raises(TypeError, match="staleness must be"):
    ow.past_params(kept.init(params), 0.5)
  link = ow.delay_compensation()
  with pytest.raises(ValueError, match="computed_params is needed"):
    link.update(params, link.init(params), params)


@pytest.mark.parametrize(
  ("options", "name"),
  [({"strength": -1.0}, "strength"), ({"decay": 1.0}, "decay"), ({"eps": 0.0}, "eps")],
)
def test_delay_compensation_out_of_range(options, name):
  with pytest.raises(ValueError, match=f"delay_compensation: {name} must be"):
    ow.delay_compensation(**options)


def test_gradients_that_are_already_summed_over_unequal_ages_are_an_error():
  tx = ow.staleness_aware(
    ow.cross_shard(optax.sgd(0.1), AXIS), ow.staleness.inverse(), axis_name=AXIS
  )

  def step(params, x, stamp):
    grad = jax.grad(lambda p: jnp.sum(p * x[0]))(params)
    return tx.update(grad, tx.init(params), params, computed_at=stamp[0])[0]

  mapped = jax.shard_map(step, mesh=mesh_of(2), in_specs=(P(), P(AXIS), P(AXIS)), out_specs=P())
  with pytest.raises(ValueError, match="per_shard"):
    jax.jit(mapped)(np.zeros(2, np.float32), np.ones((2, 2), np.float32), np.zeros(2, np.int32))


def test_weights_in_a_loss():
  """The same function weighs rollouts: the page's three lines, in NumPy."""
  rng = np.random.default_rng(2)
  losses, versions, step = rng.normal(size=6), np.array([7, 3, 12, 12, 9, 10]), 12
  age = jnp.asarray(step - versions, jnp.int32)
  w = jnp.where(age <= 8, ow.staleness.polynomial(0.5)(age), 0.0)
  loss = (w * jnp.asarray(losses, jnp.float32)).sum() / jnp.maximum((w > 0).sum(), 1).astype(float)
  kept = [i for i in range(6) if step - versions[i] <= 8]
  expected = sum(losses[i] / math.sqrt(1 + step - versions[i]) for i in kept) / len(kept)
  assert float(loss) == pytest.approx(expected, rel=1e-5)
