"""Exchanges without collectives: what one has to say, and the center after what all have said."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from helpers import bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages_cases import PARAMS, Pods, X, gradients, local_steps, params, step_of

import optax_wrappers as ow


def assert_close(a, b, rtol=1e-5, atol=1e-6):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
  ("options", "atol"),
  [
    ({}, 1e-5),
    ({"reduction": "sum", "outer": optax.sgd(0.1)}, 1e-5),
    ({"pull": 0.5}, 1e-5),
    ({"fragments": 2}, 1e-5),
    ({"fragments": {"w": np.arange(32) % 2, "b": 1}}, 1e-5),
    ({"inner_state": "reset"}, 1e-5),
    # A code of what is scaled is another rounding: half a step of 8 bits.
    ({"codec": ow.codecs.quantize(8)}, 0.05),
  ],
  ids=["plain", "sum", "pull", "fragments", "cut", "reset", "8 bits"],
)
def test_absorb_all_messages_equals_collective_exchange(options, atol):
  tx, col = local_steps(**options), local_steps("workers", **options)
  pods, weights = Pods(tx), np.array([1.0, 2.0, 4.0], "f")
  x, state = jax.jit(lambda: ow.stack_workers((PARAMS, col.init(PARAMS)), 3))()

  def step(grads, state, x):
    updates, state = col.update(grads, state, x, exchange=False)
    return optax.apply_updates(x, updates), state

  def exchange(state, x, w):
    updates, state = col.update(None, state, x, exchange=True, participation=w)
    return optax.apply_updates(x, updates), state

  step, exchange = (jax.jit(ow.map_workers(f, "workers")) for f in (step, exchange))
  count = len(state.kept)
  for r in range(3):
    pods.train(r)
    for s in range(2):
      grads = jax.tree.map(lambda *xs: np.stack(xs), *gradients(10 * r + s))
      x, state = step(grads, state, x)
    x, state = exchange(state, x, weights)
    for k in range(count):
      pods.absorb(pods.say(fragment=k))
    center = ow.center_params(state)
    for i, (own, own_state) in enumerate(pods.pods):
      assert_close(own_state.center, center, atol=atol)
      assert_close(own, jax.tree.map(lambda a, i=i: np.asarray(a)[i], x), atol=atol)
      assert int(own_state.exchanges) == int(state.exchanges)
  moved = np.abs(np.asarray(pods.pods[0][1].center["w"]) - PARAMS["w"]).max()
  assert moved > 0.1


def test_absorb_weights_and_nan_message_match_numpy():
  pods = Pods(local_steps(outer=optax.sgd(0.5)))
  pods.train(0)
  bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), pods.pods[1][0])
  pods.pods[1] = bad, pods.pods[1][1]
  at = [x for x, _ in pods.pods]
  said = pods.say(weights=(1.0, 2.0, 3.0))
  assert [float(one.weight) for one in said] == [1.0, 0.0, 3.0]
  pods.absorb(said)
  for name, start in PARAMS.items():
    mean = (1 * (start - np.asarray(at[0][name])) + 3 * (start - np.asarray(at[2][name]))) / 4
    for x, state in pods.pods:  # the bad one goes to the center too
      np.testing.assert_allclose(x[name], start - 0.5 * mean, rtol=1e-5, atol=1e-6)
      assert bits(x[name]) == bits(state.center[name])


@pytest.mark.parametrize(
  "codec", [None, ow.codecs.quantize(8), ow.codecs.top_k(0.1)], ids=["plain", "8 bits", "top_k"]
)
def test_absorb_in_any_order_has_equal_bits(codec):
  pods = Pods(local_steps(codec=codec))
  for r in range(3):
    pods.train(r)
    pods.absorb(pods.say())
    first, *others = (bits(X.snapshot(state)) for _, state in pods.pods)
    assert all(one == first for one in others)
  assert bits(pods.pods[0][1].center) != bits(params())


def test_message_is_traced_once_and_gathers_nothing():
  tx, count = local_steps(), []

  @functools.partial(jax.jit, static_argnames="sender")
  def say(state, x, weight, sender):
    count.append(1)
    return X.message(tx, state, x, weight, sender=sender)

  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((8,), ("d",), axis_types=auto)
  x = {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, P("d")))}
  state = jax.jit(lambda x: tx.init(x).replace(step=jnp.int32(1)))(x)
  for i in range(3):
    said, state = say(state, x, 1.0 + i, "pod-a")
  assert len(count) == 1
  assert said.parts[0].sharding.spec == P("d")
  compiled = say.lower(state, x, 1.0, "pod-a").compile()
  kinds = {c.kind for c in ow.inspect.compiled_collectives(compiled)}
  assert kinds == {"all-reduce"}  # is it finite, and the fingerprint


def test_absorb_weights_all_zero_keeps_residual_and_center():
  pods = Pods(local_steps(codec=ow.codecs.quantize(4)))
  pods.train(0)
  pods.absorb(pods.say())
  pods.train(1)
  before = [state for _, state in pods.pods]
  pods.absorb(pods.say(weights=(0.0, 0.0, 0.0)))
  for (_, state), old in zip(pods.pods, before, strict=True):
    assert bits(state.kept) == bits(old.kept)
    assert int(state.exchanges) == int(old.exchanges) + 1
  assert any(np.abs(np.asarray(state.compressed[0].residual["w"])).max() > 0 for state in before)


def test_message_before_first_step_has_weight_zero():
  tx = local_steps()
  said, _ = X.message(tx, tx.init(params()), params(), 3.0, sender="a")
  assert float(said.weight) == 0.0


@pytest.mark.parametrize(
  "codec", [ow.codecs.quantize(4), ow.codecs.top_k(0.1)], ids=["4 bits", "top_k"]
)
def test_take_back_keeps_whole_difference_in_residual(codec):
  """The residual is then all of what the message was made of."""
  tx = local_steps(codec=codec)
  pods = Pods(tx)
  pods.train(0)
  x, _ = pods.pods[0]
  said = pods.say()
  state = X.take_back(tx, pods.pods[0][1], x, said[0])
  difference = PARAMS["w"] - np.asarray(x["w"])
  np.testing.assert_allclose(state.compressed[0].residual["w"], difference, rtol=1e-5, atol=1e-6)
  plain = local_steps()
  alone = plain.init(params())
  one, alone = X.message(plain, alone, x, sender="a")
  assert bits(X.take_back(plain, alone, x, one)) == bits(alone)


def test_absorb_late_message_is_weighted_by_age():
  pods = Pods(local_steps(outer=optax.sgd(1.0)))
  pods.train(0)
  first = pods.say(weights=(1.0, 1.0, 1.0))
  starts = [np.asarray(x["w"]) for x, _ in pods.pods]
  pods.absorb(first[:2])
  center = np.asarray(pods.pods[0][1].center["w"])
  pods.train(1)
  at = [np.asarray(x["w"]) for x, _ in pods.pods]
  second = pods.say(weights=(1.0, 1.0, 1.0))
  late = dataclasses.replace(first[2], age=1)
  pods.absorb([*second[:2], late], staleness=ow.staleness.inverse())
  differences = [center - at[0], center - at[1], 0.5 * (PARAMS["w"] - starts[2])]
  expected = center - sum(differences) / 2.5
  np.testing.assert_allclose(pods.pods[0][1].center["w"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("buffer", [1, 3])
def test_absorb_single_messages_match_asynchronous_local_sgd(buffer):
  """Three workers of unequal speed and a server, which has delayed Nesterov outside."""
  arrivals, period = [0, 1, 0, 2, 0, 1, 0, 0, 2, 1, 0, 0], 2
  points = np.random.default_rng(0).normal(size=(len(arrivals), period, 6))
  numbers = {"period": period, "eta": 0.8, "beta": 0.9, "buffer": buffer}
  expected = ref.asynchronous(
    np.zeros(6),
    lambda k, s, x: x - points[k, s],
    ref.Momentum(0.1, 0.9),
    arrivals=arrivals,
    **numbers,
  )
  tx = ow.local_steps(
    optax.sgd(0.1, momentum=0.9),
    None,
    communication_period=None,
    outer=ow.contrib.delayed_nesterov(0.8, 0.9, buffer=buffer),
  )
  x = jnp.zeros(6)
  server, workers = (x, tx.init(x)), {i: (x, tx.init(x)) for i in set(arrivals)}
  age, step = dict.fromkeys(arrivals, 0), step_of(tx)
  for k, i in enumerate(arrivals):
    x, state = workers[i]
    for point in points[k]:
      x, state = step(np.asarray(x) - np.float32(point), state, x)
    said, state = X.message(tx, state, x, sender=f"worker-{i}")
    said = dataclasses.replace(said, age=age[i])
    server = X.absorb(tx, server[1], server[0], [said])
    workers[i] = X.adopt(tx, state, x, X.snapshot(server[1]))
    age = {j: 0 if j == i else age[j] + 1 for j in age}
    np.testing.assert_allclose(ow.center_params(server[1]), expected[k], rtol=1e-4, atol=1e-6)


def test_adopt_center_makes_new_worker_equal():
  tx = local_steps(codec=ow.codecs.quantize(8), inner_state="reset")
  pods = Pods(tx)
  pods.train(0)
  pods.absorb(pods.say())
  fresh = params()
  held = jax.tree.map(np.asarray, X.snapshot(pods.pods[0][1]))
  pods.pods[2] = X.adopt(tx, tx.init(fresh), fresh, held)
  assert bits(pods.pods[2][0]) == bits(held[0])
  pods.train(1)
  pods.absorb(pods.say())
  first, *others = (bits(X.snapshot(state)) for _, state in pods.pods)
  assert all(one == first for one in others)


def test_absorb_bfloat16_params_keeps_center_in_float32():
  start = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
  tx = local_steps(outer=optax.sgd(0.5))
  state = tx.init(start).replace(step=jnp.int32(1))
  moved = jax.tree.map(lambda x: x - jnp.asarray(1.0, x.dtype), start)
  said, state = X.message(tx, state, moved, sender="a")
  x, state = X.absorb(tx, state, moved, [said])
  assert x["w"].dtype == jnp.bfloat16 and state.center["w"].dtype == jnp.float32
  given = np.asarray(start["w"].astype("f")) - np.asarray(moved["w"].astype("f"))
  np.testing.assert_allclose(
    state.center["w"], np.asarray(start["w"].astype("f")) - 0.5 * given, rtol=1e-6
  )


def test_donation_params_message_and_center_share_no_buffer():
  tx = local_steps()
  step = jax.jit(lambda g, s, p: tx.update(g, s, p), donate_argnums=(1, 2))
  x, state = params(), tx.init(params())
  _, state = step(gradients(0)[0], state, x)
  x = params()
  said, state = X.message(tx, state, x, sender="a")
  x, state = X.absorb(tx, state, x, [said])
  pointers = [y.unsafe_buffer_pointer() for y in jax.tree.leaves((x, state, said))]
  assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize(
  ("options", "error"),
  [
    ({"axis_name": "workers"}, "axis_name=None"),
    ({"outer": None}, "an outer optimizer"),
    ({"absent": "keep"}, "absent"),
    ({"inner_state": "average"}, "inner_state"),
    ({"codec": ow.contrib.majority_vote()}, "a codec"),
    ({"codec": ow.contrib.power_sgd(2)}, "a codec"),
    ({"codec": ow.codecs.compression(ow.codecs.quantize(8), after=2)}, "a codec"),
    ({"delay": 1, "communication_period": 4, "pull": 0.5}, "delay=0"),
    ({"shard_center": True, "axis_name": "workers"}, "axis_name=None"),
  ],
  ids=lambda x: "+".join(x) if isinstance(x, dict) else None,
)
def test_message_errors_unsupported_options(options, error):
  options = dict(options)
  tx = local_steps(options.pop("axis_name", None), **options)
  with pytest.raises(ValueError, match=f"messages need .*{error}"):
    X.message(tx, tx.init(params()), params(), sender="a")


def refused():
  """A name, what is done to three messages, and what the error says."""

  def other(one, **changes):
    return dataclasses.replace(one, **changes)

  def wider(one):
    return other(one, parts=tuple(jnp.concatenate([x, x]) for x in one.parts))

  return {
    "twice": (lambda a, b: [a, a], "two messages"),
    "of another center": (lambda a, b: [a, other(b, base=b.base + 1)], "another center"),
    "of another fragment": (lambda a, b: [a, other(b, fragment=1)], "one fragment"),
    "of another shape": (lambda a, b: [a, wider(b)], "another model or codec"),
    "negative": (lambda a, b: [a, other(b, weight=jnp.float32(-1))], "finite and at least 0"),
    "infinite": (lambda a, b: [a, other(b, weight=jnp.float32(np.inf))], "finite and at least 0"),
    "none": (lambda a, b: [], "one fragment"),
  }


@pytest.mark.parametrize("kind", refused())
def test_absorb_errors_mismatched_or_invalid_messages(kind):
  change, error = refused()[kind]
  pods = Pods(local_steps())
  pods.train(0)
  a, b, _ = pods.say()
  x, state = pods.pods[0]
  with pytest.raises(ValueError, match=error):
    X.absorb(pods.tx, state, x, change(a, b))


def test_messages_errors_types_tracing_and_arguments():
  pods = Pods(local_steps())
  pods.train(0)
  said = pods.say()
  x, state = pods.pods[0]
  with pytest.raises(TypeError, match="not traced"):
    jax.jit(lambda s, x: X.absorb(pods.tx, s, x, said))(state, x)
  with pytest.raises(TypeError, match="what local_steps or diloco returned"):
    X.message(optax.chain(pods.tx), state, x, sender="a")
  with pytest.raises(TypeError, match="what message returned"):
    X.absorb(pods.tx, state, x, [x])
  with pytest.raises(TypeError, match="sender"):
    X.message(pods.tx, state, x, sender=3)
  with pytest.raises(ValueError, match="fragment must be below 1"):
    X.message(pods.tx, state, x, sender="a", fragment=1)
  with pytest.raises(ValueError, match="weight must be at least 0"):
    X.message(pods.tx, state, x, -1.0, sender="a")
  with pytest.raises(TypeError, match="weight must be a real scalar, got None"):
    X.message(pods.tx, state, x, None, sender="a")
  with pytest.raises(ValueError, match="snapshot"):
    X.adopt(pods.tx, state, x, (x, ()))


@pytest.mark.parametrize("name", ["node 1", "", "../a", "a~1"])
def test_message_of_sender_that_no_pod_would_read_is_error(name):
  tx = local_steps()
  params = jnp.zeros(2)
  with pytest.raises(ValueError, match="message: sender must be a letter or digit"):
    X.message(tx, tx.init(params), params, sender=name)


def test_absorb_makes_no_nan_under_debug_nans():
  tx = local_steps()
  params = jnp.zeros(2)
  said, state = X.message(tx, tx.init(params).replace(step=jnp.int32(1)), params, sender="a")
  with jax.debug_nans(True):
    X.absorb(tx, state, params, [said])


@pytest.mark.optax_promotes
@pytest.mark.parametrize("codec", [None, ow.codecs.quantize(8)])
def test_messages_keep_layout_of_parameters_on_explicit_mesh(codec):
  """After join from another's center, and after a synchronization; JAX refuses to mix layouts."""
  rows = NamedSharding(jax.make_mesh((4,), ("d",), devices=jax.devices()[:4]), P("d"))
  tx = ow.diloco(optax.adam(0.1), None, communication_period=None, codec=codec)
  whole = np.ones((64, 64), "f")
  params = {"w": jax.device_put(whole, rows), "b": jax.device_put(np.ones(4, "f"), rows)}
  other = tx.init({"w": jnp.asarray(whole) * 2, "b": jnp.ones(4)})
  params, state = X.adopt(tx, tx.init(params), params, X.snapshot(other))
  for _ in range(2):
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = jax.jit(tx.update)(grads, state, params)
    params = optax.apply_updates(params, updates)
    said, state = X.message(tx, state, params, sender="a")
    params, state = X.absorb(tx, state, params, [said])
    held = params, state.center, state.kept[0].outer_state[0].trace
    assert all(x.sharding.is_equivalent_to(rows, x.ndim) for x in jax.tree.leaves(held))
  assert float(np.asarray(params["w"])[0, 0]) < 2
