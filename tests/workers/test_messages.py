"""Exchanges without collectives: what one has to say, and the center after what all have said."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from helpers import bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

X = ow.exchange
ROOT = pathlib.Path(__file__).parents[2]
PARAMS = {"w": np.arange(32 * 32, dtype=np.float32).reshape(32, 32) / 100, "b": np.ones(5, "f")}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
NAMES = ["pod-a", "pod-b", "pod-c"]


def params():
  return jax.tree.map(jnp.asarray, PARAMS)


def local_steps(axis_name=None, **options):
  period = None if axis_name is None else 2
  options = {"outer": NESTEROV, "communication_period": period} | options
  return ow.local_steps(optax.sgd(0.1), axis_name, **options)


def gradients(seed, workers=3):
  rng = np.random.default_rng(seed)
  return [
    {name: (i + 1) * rng.normal(size=x.shape).astype("f") for name, x in PARAMS.items()}
    for i in range(workers)
  ]


def step_of(tx):
  """A step of one worker, from gradients, state and parameters to parameters and state."""

  @jax.jit
  def step(grads, state, x):
    updates, state = tx.update(grads, state, x)
    return optax.apply_updates(x, updates), state

  return step


class Pods:
  """Pods that train and exchange messages in one process."""

  def __init__(self, tx, start=None):
    self.tx, start = tx, params() if start is None else start
    self.pods = [(start, tx.init(start)) for _ in NAMES]
    self.step = step_of(tx)

  def train(self, seed, steps=2):
    for s in range(steps):
      for i, grads in enumerate(gradients(10 * seed + s)):
        x, state = self.pods[i]
        self.pods[i] = self.step(grads, state, x)

  def say(self, weights=(1.0, 2.0, 4.0), fragment=0):
    said = []
    for i, name in enumerate(NAMES):
      x, state = self.pods[i]
      one, state = X.message(self.tx, state, x, weights[i], sender=name, fragment=fragment)
      self.pods[i] = x, state
      said.append(one)
    return said

  def absorb(self, said, **options):
    for i in range(3):
      x, state = self.pods[i]
      self.pods[i] = X.absorb(self.tx, state, x, said[i:] + said[:i], **options)


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
def test_absorbing_what_all_say_is_the_collective_exchange(options, atol):
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


def test_the_center_is_that_of_numpy_with_weights_and_one_that_is_not_finite():
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
def test_one_set_in_any_order_has_one_result_by_bits(codec):
  pods = Pods(local_steps(codec=codec))
  for r in range(3):
    pods.train(r)
    pods.absorb(pods.say())
    first, *others = (bits(X.snapshot(state)) for _, state in pods.pods)
    assert all(one == first for one in others)
  assert bits(pods.pods[0][1].center) != bits(params())


def digests():
  """Of the center after four exchanges, plain and with a codec, from a process of its own."""
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("d",), axis_types=auto)
  layout = NamedSharding(mesh, P("d") if os.environ["LAYOUT"] == "divided" else P())
  for codec in (None, ow.codecs.quantize(8)):
    tx = local_steps(codec=codec)
    x = {"w": jax.device_put(PARAMS["w"], layout)}
    state = tx.init(x).replace(step=jnp.int32(1))
    for r in range(4):
      said, center = [], np.asarray(state.center["w"])
      for i, grads in enumerate(gradients(r)):
        own = {"w": jax.device_put(center - grads["w"], layout)}
        one, _ = X.message(tx, state, own, i + 1.0, sender=NAMES[i])
        said.append(one)
      x, state = X.absorb(tx, state, x, said)
    print(hashlib.sha256(bits(state.center)[0]).hexdigest())


def test_other_processors_and_other_layouts_have_the_same_bits():
  code = """if True:
    import sys
    sys.path[:0] = ["tests", "tests/workers"]
    import test_messages
    test_messages.digests()
  """
  flags = "--xla_force_host_platform_device_count=4"
  found = set()
  for layout, isa in [("", ""), ("", " --xla_cpu_max_isa=SSE4_2"), ("divided", "")]:
    env = os.environ | {"XLA_FLAGS": flags + isa, "LAYOUT": layout}
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    found.add(run.stdout)
  assert len(found) == 1 and len(set(found.pop().split())) == 2


def test_a_message_is_traced_once_and_nothing_is_gathered():
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


def test_what_has_no_weight_leaves_residual_and_center_alone():
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


def test_before_the_first_step_nobody_has_anything_to_say():
  tx = local_steps()
  said, _ = X.message(tx, tx.init(params()), params(), 3.0, sender="a")
  assert float(said.weight) == 0.0


@pytest.mark.parametrize(
  "codec", [ow.codecs.quantize(4), ow.codecs.top_k(0.1)], ids=["4 bits", "top_k"]
)
def test_what_is_taken_back_is_said_the_next_time(codec):
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


def test_late_messages_have_an_age_and_its_weight():
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
def test_asynchronous_local_sgd_is_a_message_at_a_time(buffer):
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
    outer=ow.delayed_nesterov(0.8, 0.9, buffer=buffer),
  )
  x = jnp.zeros(6)
  server, workers = (x, tx.init(x)), {i: (x, tx.init(x)) for i in set(arrivals)}
  age, step = dict.fromkeys(arrivals, 0), step_of(tx)
  for k, i in enumerate(arrivals):
    x, state = workers[i]
    for point in points[k]:
      x, state = step(np.asarray(x) - np.float32(point), state, x)
    said, state = X.message(tx, state, x, sender=f"worker {i}")
    said = dataclasses.replace(said, age=age[i])
    server = X.absorb(tx, server[1], server[0], [said])
    workers[i] = X.adopt(tx, state, x, X.snapshot(server[1]))
    age = {j: 0 if j == i else age[j] + 1 for j in age}
    np.testing.assert_allclose(ow.center_params(server[1]), expected[k], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_wide", [True, False])
def test_delayed_nesterov_with_a_buffer_of_one_is_nesterov(is_wide):
  """Under a schedule, which counts updates."""
  with jax.enable_x64(is_wide):
    differences = np.random.default_rng(1).normal(size=(6, 4)).astype("d" if is_wide else "f")
    schedule = optax.linear_schedule(1.0, 0.1, 6)
    pair = ow.delayed_nesterov(schedule, 0.9, buffer=1), optax.sgd(schedule, 0.9, nesterov=True)
    states = [tx.init(differences[0]) for tx in pair]
    updates = [jax.jit(tx.update) for tx in pair]
    for d in differences:
      (ours, states[0]), (theirs, states[1]) = (u(d, s) for u, s in zip(updates, states))
      assert ours.dtype == d.dtype
      np.testing.assert_allclose(ours, theirs, rtol=1e-12 if is_wide else 1e-6)


@pytest.mark.parametrize(
  ("options", "match"),
  [({"momentum": 1.0}, "momentum must be"), ({"buffer": 0}, "buffer must be at least 1, got 0")],
)
def test_delayed_nesterov_of_nothing(options, match):
  with pytest.raises(ValueError, match=f"delayed_nesterov: {match}"):
    ow.delayed_nesterov(0.7, **({"buffer": 2} | options))


def test_a_newcomer_adopts_the_center_and_is_equal_from_then_on():
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


def test_narrow_parameters_and_a_center_in_float32():
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


def test_donated_parameters_share_no_buffer_with_a_message_or_a_center():
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
    ({"reduction": ow.reductions.median()}, "reduction"),
    ({"absent": "keep"}, "absent"),
    ({"inner_state": "average"}, "inner_state"),
    ({"codec": ow.codecs.majority_vote()}, "a codec"),
    ({"codec": ow.codecs.power_sgd(2)}, "a codec"),
    ({"codec": ow.codecs.compression(ow.codecs.quantize(8), after=2)}, "a codec"),
    ({"delay": 1, "communication_period": 4, "pull": 0.5}, "delay=0"),
    ({"shard_center": True, "axis_name": "workers"}, "axis_name=None"),
  ],
  ids=lambda x: "+".join(x) if isinstance(x, dict) else None,
)
def test_what_has_no_messages_says_so(options, error):
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
def test_what_cannot_be_absorbed_is_an_error(kind):
  change, error = refused()[kind]
  pods = Pods(local_steps())
  pods.train(0)
  a, b, _ = pods.say()
  x, state = pods.pods[0]
  with pytest.raises(ValueError, match=error):
    X.absorb(pods.tx, state, x, change(a, b))


def test_kinds_that_are_none_and_traces():
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
  with pytest.raises(ValueError, match="snapshot"):
    X.adopt(pods.tx, state, x, (x, ()))


def test_steps_of_a_period_of_none_do_not_exchange():
  """Neither alone nor over an axis, unless the caller says so."""
  tx = ow.diloco(optax.sgd(0.1), None, communication_period=None)
  x, state, step = params(), tx.init(params()), step_of(tx)
  for i in range(5):
    x, state = step(gradients(i)[0], state, x)
  assert int(state.exchanges) == 0 and bits(state.center) == bits(params())
  _, state = tx.update(None, state, x, exchange=True)
  assert int(state.exchanges) == 1 and bits(state.center) != bits(params())


# Bytes.

PLACE = {"run": "r", "round": 3}


def made(key=None):
  tx = local_steps(codec=ow.codecs.quantize(8))
  pods = Pods(tx)
  pods.train(0)
  said = pods.say()[1]
  x, state = pods.pods[0]
  return said, X.to_bytes(said, **PLACE, key=key), X.template(tx, state, x)


@pytest.mark.parametrize("key", [None, b"secret"])
def test_a_message_comes_back_from_its_bytes(key):
  said, data, template = made(key)
  found = X.from_bytes(data, template, **PLACE, key=key)
  assert found.sender == "pod-b" and bits(found) == bits(said)
  assert [x.dtype for x in found.parts] == [x.dtype for x in said.parts]
  assert 44 < len(data) - sum(map(len, bits(said))) < 120


@pytest.mark.parametrize("key", [None, b"secret"])
def test_no_cut_and_no_flipped_bit_comes_through(key):
  _, data, template = made(key)
  rng = np.random.default_rng(0)
  for at in [*range(60), *rng.integers(0, len(data), 100).tolist(), len(data) - 1]:
    with pytest.raises(ValueError, match="are not a message"):
      X.from_bytes(data[:at], template, **PLACE, key=key)
    flipped = bytearray(data)
    flipped[at] ^= 1 << int(rng.integers(8))
    with pytest.raises(ValueError, match="are not a message"):
      X.from_bytes(bytes(flipped), template, **PLACE, key=key)
  with pytest.raises(ValueError, match="are not a message"):
    X.from_bytes(data + b"x", template, **PLACE, key=key)


def test_bytes_of_another_place_key_or_kind_are_refused(tmp_path):
  said, data, template = made()
  assert X.from_bytes(data, template, **PLACE)
  for other in ({"run": "s"}, {"round": 4}, {"key": b"k"}):
    with pytest.raises(ValueError, match="are not a message"):
      X.from_bytes(data, template, **(PLACE | other))
  with pytest.raises(ValueError, match="are not a message"):
    X.from_bytes(data, dataclasses.replace(template, fragment=1), **PLACE)
  for bad in (np.nan, -1.0, np.inf):
    wrong = X.to_bytes(dataclasses.replace(said, weight=np.float32(bad)), **PLACE)
    with pytest.raises(ValueError, match="weight"):
      X.from_bytes(wrong, template, **PLACE)
  bad_name = X.to_bytes(dataclasses.replace(said, sender="../x"), **PLACE)
  with pytest.raises(ValueError, match="sender"):
    X.from_bytes(bad_name, template, **PLACE)

  class Trace:
    def __reduce__(self):
      return (open, (str(tmp_path / "trace"), "w"))

  with pytest.raises(ValueError, match="are not a message"):
    X.from_bytes(pickle.dumps(Trace()), template, **PLACE)
  assert not (tmp_path / "trace").exists()
