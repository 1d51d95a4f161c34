"""Messages of which a reduction makes one: a bad pod moves no center."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_reductions as ref
from helpers import bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages_cases import NAMES, PARAMS, Pods, X, gradients, local_steps, params

import optax_wrappers as ow
from optax_wrappers import reductions

# By the axis: of pods in messages, of workers in a collective.
RULES = {
  "median": lambda _: reductions.median(),
  "trimmed_mean": lambda _: reductions.trimmed_mean(1),
  "krum": lambda _: reductions.krum(0),
  "geometric_median": lambda _: reductions.geometric_median(),
  "mean": ow.all_reduce,
  "penalty": functools.partial(ow.contrib.penalty, warmup=2, temperature=20.0),
  "radial_mean": ow.contrib.radial_mean,
  "clip": lambda axis: optax.chain(optax.clip_by_global_norm(20.0), ow.all_reduce(axis)),
}
VOTES = ["median", "trimmed_mean", "krum", "geometric_median"]


def made(name, axis=None, **options):
  return local_steps(axis, reduction=RULES[name](axis or "pods"), **options)


@pytest.mark.parametrize("name", RULES)
def test_absorb_with_reduction_equals_collective_exchange(name):
  tx, col = made(name), made(name, "workers")
  weights = np.ones(3, "f") if name in VOTES else np.array([1.0, 2.0, 4.0], "f")
  pods = Pods(tx)
  x, state = jax.jit(lambda: ow.stack_workers((PARAMS, col.init(PARAMS)), 3))()

  def step(grads, state, x):
    updates, state = col.update(grads, state, x, exchange=False)
    return optax.apply_updates(x, updates), state

  def exchange(state, x, w):
    given = {} if name in VOTES else {"participation": w}
    updates, state = col.update(None, state, x, exchange=True, **given)
    return optax.apply_updates(x, updates), state

  step, exchange = (jax.jit(ow.map_workers(f, "workers")) for f in (step, exchange))
  for r in range(4):
    pods.train(r)
    for s in range(2):
      grads = jax.tree.map(lambda *xs: np.stack(xs), *gradients(10 * r + s))
      x, state = step(grads, state, x)
    x, state = exchange(state, x, weights)
    pods.absorb(pods.say(weights))
    center = ow.center_params(state)
    for i, (_, own) in enumerate(pods.pods):
      for key, expected in center.items():
        np.testing.assert_allclose(own.center[key], expected, rtol=1e-4, atol=1e-5)
      # Each pod has the state that is its own.
      columns = map(jax.tree.leaves, (own.reduction_state, state.reduction_state))
      for mine, of_all in zip(*columns, strict=True):
        np.testing.assert_allclose(mine, np.asarray(of_all)[i], rtol=1e-4)
  assert np.abs(np.asarray(center["w"]) - PARAMS["w"]).max() > 0.1


@pytest.mark.parametrize("codec", [ow.codecs.quantize(8), ow.codecs.top_k(0.1)], ids=["8", "top_k"])
@pytest.mark.parametrize("name", ["median", "trimmed_mean", "geometric_median"])
def test_absorb_reduces_decoded_messages_as_numpy(name, codec):
  options = {"outer": optax.sgd(1.0), "codec": codec}
  pods, plain = Pods(made(name, **options)), local_steps(**options)
  pods.train(0)
  said = pods.say((1.0, 1.0, 1.0))
  state = plain.init(params())
  alone = [X.absorb(plain, state, params(), [one])[1].center for one in said]
  pods.absorb(said)
  names = sorted(PARAMS)
  rows = [np.concatenate([(PARAMS[k] - np.asarray(c[k])).ravel() for k in names]) for c in alone]
  more = {"trimmed_mean": (1,), "geometric_median": (8, 1e-6)}.get(name, ())
  expected = getattr(ref, name)(rows, *more)
  center = pods.pods[0][1].center
  found = np.concatenate([(PARAMS[k] - np.asarray(center[k])).ravel() for k in names])
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
  assert np.abs(found).max() > 0.1


@pytest.mark.parametrize("name", RULES)
def test_absorb_with_reduction_has_equal_bits_in_any_order_and_layout(name):
  pods = Pods(made(name, codec=ow.codecs.quantize(8)))
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  x, _ = pods.pods[1]
  cut = {"w": jax.device_put(x["w"], NamedSharding(mesh, P(None, "d"))), "b": x["b"]}
  pods.pods[1] = cut, jax.jit(pods.tx.init)(cut)
  for r in range(2):
    pods.train(r)
    pods.absorb(pods.say((1.0, 1.0, 1.0)))
    first, *others = (bits(X.snapshot(state)) for _, state in pods.pods)
    assert all(one == first for one in others)
  assert pods.pods[1][1].center["w"].sharding.spec == P(None, "d")


def test_median_survives_pod_that_sends_parameters_times_1000():
  def after(bad, **options):
    pods = Pods(local_steps(outer=optax.sgd(1.0), **options))
    pods.train(0)
    x, state = pods.pods[2]
    pods.pods[2] = jax.tree.map(lambda v: v * bad, x), state
    pods.absorb(pods.say((1.0, 1.0, 1.0)))
    return np.asarray(pods.pods[0][1].center["w"])

  by_median, by_mean = after(1000.0, reduction=reductions.median()), after(1000.0)
  assert np.abs(by_median - PARAMS["w"]).max() < 10 < 1000 < np.abs(by_mean).max()


def test_nan_pod_votes_zero_and_all_nan_moves_nothing():
  pods = Pods(made("median", outer=optax.sgd(1.0)))
  pods.train(0)
  at = [np.asarray(x["w"]) for x, _ in pods.pods]
  x, state = pods.pods[1]
  pods.pods[1] = jax.tree.map(lambda v: v * jnp.nan, x), state
  pods.absorb(pods.say((1.0, 1.0, 1.0)))
  rows = np.stack([PARAMS["w"] - at[0], np.zeros_like(at[0]), PARAMS["w"] - at[2]])
  expected = PARAMS["w"] - np.median(rows, axis=0)
  for x, state in pods.pods:
    np.testing.assert_allclose(state.center["w"], expected, rtol=1e-5)
    assert bits(x) == bits(state.center)
  before = bits(X.snapshot(pods.pods[0][1]))
  pods.train(1)
  pods.pods = [(jax.tree.map(lambda v: v * jnp.nan, x), state) for x, state in pods.pods]
  pods.absorb(pods.say((1.0, 1.0, 1.0)))
  assert bits(X.snapshot(pods.pods[0][1])) == before


@pytest.mark.parametrize("name", ["median", "penalty", "mean"])
def test_message_that_is_not_finite_is_zeros_of_weight_zero(name):
  """From outside: of `message` it would have weight 0."""
  pods, others = Pods(made(name)), Pods(made(name))
  for each in (pods, others):
    each.train(0)
  said = pods.say((1.0, 1.0, 1.0))
  nothing = dataclasses.replace(said[1], parts=tuple(np.zeros_like(x) for x in said[1].parts))
  spoiled = jnp.full_like(said[1].parts[0], jnp.inf), *said[1].parts[1:]
  pods.absorb([said[0], dataclasses.replace(said[1], parts=spoiled), said[2]])
  others.absorb([said[0], dataclasses.replace(nothing, weight=np.float32(0)), said[2]])
  assert bits(pods.pods[0][1].center) == bits(others.pods[0][1].center) != bits(params())


def test_pod_of_weight_zero_keeps_its_state_of_a_reduction():
  pods = Pods(made("penalty"))
  for r, weight in enumerate((1.0, 0.0, 1.0)):
    pods.train(r)
    pods.absorb(pods.say((1.0, weight, 1.0)))
  assert [int(state.reduction_state[0].count) for _, state in pods.pods] == [3, 2, 3]


def test_late_message_counts_by_weight_and_not_with_votes():
  pods = Pods(made("mean", outer=optax.sgd(1.0)))
  pods.train(0)
  at = [np.asarray(x["w"]) for x, _ in pods.pods]
  said = pods.say((1.0, 1.0, 1.0))
  late = [dataclasses.replace(said[0], age=1)]
  pods.absorb(late + said[1:], staleness=lambda age: jnp.where(age > 0, 0.5, 1.0))
  differences = [PARAMS["w"] - x for x in at]
  mean = (0.5 * differences[0] + differences[1] + differences[2]) / 2.5
  np.testing.assert_allclose(pods.pods[0][1].center["w"], PARAMS["w"] - mean, rtol=1e-4, atol=1e-5)

  votes = Pods(made("median"))
  votes.train(0)
  with pytest.raises(ValueError, match=r"late messages count less by a weight.*max_age=0"):
    X.absorb(votes.tx, *reversed(votes.pods[0]), late + votes.say((1.0, 1.0, 1.0))[1:])


def test_restarted_pod_sends_its_own_state_of_a_reduction():
  pods = Pods(made("penalty"))
  for r in range(2):
    pods.train(r)
    pods.absorb(pods.say((1.0, 1.0, 1.0)))
  _, state = pods.pods[0]
  fresh = X.adopt(pods.tx, pods.tx.init(params()), params(), X.snapshot(state))
  pods.pods[2] = fresh
  pods.train(2)
  pods.absorb(pods.say((1.0, 1.0, 1.0)))
  assert [int(state.reduction_state[0].count) for _, state in pods.pods] == [3, 3, 1]
  assert len({str(bits(X.snapshot(state))) for _, state in pods.pods}) == 1


@pytest.mark.parametrize(
  ("reduction", "weights", "error"),
  [
    (reductions.median(), (1.0, 2.0, 1.0), "every pod has one vote because of the reduction"),
    (ow.all_reduce("pods", reduction=reductions.median()), (3.0, 1.0, 1.0), "has one vote"),
    (ow.all_reduce("workers"), (2.0, 1.0, 1.0), "a reduction over the axis 'pods'"),
    (optax.clip(1.0), (1.0, 1.0, 1.0), "what reduction returns must be equal for all messages"),
    (ow.contrib.penalty(None), (1.0, 1.0, 1.0), "must be equal for all messages"),
    (ow.contrib.penalty("workers"), (2.0, 1.0, 1.0), "a reduction over the axis 'pods'"),
    (reductions.krum(1), (1.0, 1.0, 1.0), "krum: num_bad=1 .* need at least 4 shards, got 3"),
  ],
  ids=["weight", "inside", "axis", "no reduction", "None", "penalty", "few"],
)
def test_merge_errors_say_what_a_reduction_needs(reduction, weights, error):
  pods = Pods(local_steps(reduction=reduction))
  pods.train(0)
  before = bits(pods.pods)
  with pytest.raises((ValueError, NameError), match=error):
    said = [
      X.message(pods.tx, state, x, weight, sender=name)[0]
      for (x, state), weight, name in zip(pods.pods, weights, NAMES, strict=True)
    ]
    pods.absorb(said)
  assert bits(pods.pods) == before


def test_codec_with_reduction_over_axis_is_error():
  with pytest.raises(ValueError, match=re.escape("only one of these can be used")):
    made("median", "workers", codec=ow.codecs.quantize(8))


def merged_after_steps(bad=1.0, weights=(1.0, 1.0, 1.0), **options):
  """What `merge` finds, with the parameters of the last pod times `bad`; and the differences."""
  pods = Pods(local_steps(outer=optax.sgd(1.0), **options))
  pods.train(0)
  x, state = pods.pods[2]
  pods.pods[2] = jax.tree.map(lambda v: v * bad, x), state
  names = sorted(PARAMS)
  rows = [
    np.concatenate([(PARAMS[k] - np.asarray(x[k])).ravel() for k in names]) for x, _ in pods.pods
  ]
  said = pods.say(weights)
  x, state = pods.pods[0]
  *moved, found = X.merge(pods.tx, state, x, said[::-1])
  pods.absorb(said)
  assert bits(tuple(moved)) == bits(pods.pods[0])
  return found[::-1], np.asarray(rows, np.float64)


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, [1 / 6, 2 / 6, 3 / 6]),
    ({"reduction": "sum"}, [1.0, 2.0, 3.0]),
    ({"reduction": ow.all_reduce("pods")}, [1 / 6, 2 / 6, 3 / 6]),
  ],
  ids=["mean", "sum", "all_reduce"],
)
def test_merge_says_norm_and_weight_of_each(options, expected):
  found, rows = merged_after_steps(weights=(1.0, 2.0, 3.0), **options)
  np.testing.assert_allclose([x.norm for x in found], np.linalg.norm(rows, axis=1), rtol=1e-5)
  np.testing.assert_allclose([x.weight for x in found], expected, rtol=1e-4)


def test_merge_weight_with_clip_is_of_clipped_message():
  clip = optax.chain(optax.clip_by_global_norm(5.0), ow.all_reduce("pods"))
  found, rows = merged_after_steps(bad=1000.0, reduction=clip)
  expected = np.minimum(1, 5.0 / np.linalg.norm(rows, axis=1)) / 3
  np.testing.assert_allclose([x.weight for x in found], expected, rtol=1e-3)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "geometric_median", "penalty"])
def test_merge_weight_of_message_that_is_cut_is_small(name):
  found, rows = merged_after_steps(bad=1000.0, reduction=RULES[name]("pods"))
  np.testing.assert_allclose([x.norm for x in found], np.linalg.norm(rows, axis=1), rtol=1e-5)
  weights = [x.weight for x in found]
  assert abs(weights[2]) < 1e-3 and max(weights[:2]) > 0.1


@pytest.mark.parametrize("name", ["median", "penalty", "radial_mean", "sum"])
def test_merge_of_message_whose_square_overflows_is_finite(name):
  rule = {"reduction": "sum"} if name == "sum" else {"reduction": RULES[name]("pods")}
  found, rows = merged_after_steps(bad=1e25, **rule)
  expected = np.linalg.norm(rows, axis=1)
  np.testing.assert_allclose([x.norm for x in found], expected, rtol=1e-5)
  assert np.isfinite([x.weight for x in found]).all()


def test_result_that_is_not_finite_moves_nothing():
  spoil = reductions.coordinatewise(lambda rows: jnp.full(rows.shape[1:], jnp.inf))
  pods = Pods(local_steps(reduction=spoil))
  pods.train(0)
  pods.absorb(pods.say((1.0, 1.0, 1.0)))
  assert bits(pods.pods[0][1].center) == bits(params()) == bits(pods.pods[1][0])


def test_merge_of_krum_is_of_chosen_message_and_absent_one_has_none():
  found, _ = merged_after_steps(reduction=reductions.krum(0))
  np.testing.assert_allclose(sorted(x.weight for x in found), [0.0, 0.0, 1.0], atol=1e-4)
  found, _ = merged_after_steps(bad=np.nan)
  np.testing.assert_allclose([x.weight for x in found], [0.5, 0.5, 0.0])
  assert found[2].norm == 0.0
