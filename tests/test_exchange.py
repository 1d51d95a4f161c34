"""The engine of exchanges, with rules that are not in the library, compared with NumPy."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, as_numpy, assert_close, in_context, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers.exchange import Center, Rule, periodic_exchange

W, PERIOD = 3, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSGD(Rule):
  """Every worker moves to the mean; there is no center."""

  def send(self, moved, params, kept, workers):
    return kept, jax.lax.pmean(moved, AXIS)

  def merge(self, moved, params, mean, kept, workers):
    return mean, kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiLoCo(Rule):
  """An outer optimizer moves the center by the mean of (center - worker); all move to the
  center."""

  outer: Any = dataclasses.field(metadata={"static": True})

  def init(self, params, workers):
    center = workers.start(params)
    return Center(center=center, outer_state=self.outer.init(center))

  def send(self, moved, params, kept, workers):
    num_workers = jax.lax.axis_size(AXIS)
    # Both whole, or both this worker's share.
    mean = jax.tree.map(lambda c, total: c - total / num_workers, kept.center, workers.sum(moved))
    updates, outer_state = self.outer.update(mean, kept.outer_state, kept.center)
    center = optax.apply_updates(kept.center, updates)
    return Center(center=center, outer_state=outer_state), workers.whole(center, params)

  def merge(self, moved, params, center, kept, workers):
    return center, kept


def simulate(start, grads, phases, outer=None):
  """Local SGD (`outer` None), or outer Nesterov momentum with (rate, decay), for each variable."""
  x = {name: np.tile(p, (W, 1)) for name, p in start.items()}
  c, m = dict(start), {name: np.zeros_like(p) for name, p in start.items()}
  for t in range(len(grads["a"])):
    for name in x:
      x[name] = x[name] - 0.1 * grads[name][t]
      if (t + 1) % PERIOD == phases[name]:
        d = c[name] - x[name].mean(0)
        if outer is None:
          c[name] = x[name].mean(0)
        else:
          rate, decay = outer
          m[name] = d + decay * m[name]
          c[name] = c[name] - rate * (d + decay * m[name])
        x[name] = np.tile(c[name], (W, 1))
  return x, c, m


def run(tx, context, start, grads):
  """All steps in a context: the parameters and the state after them."""
  state = tx.init(jax.tree.map(jnp.asarray, start))
  axes = ow.worker_axes(state)
  params, state = ow.stack_workers(start, W), ow.stack_workers(state, W)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, W, (0, axes, 0), (0, axes))
  for t in range(len(grads["a"])):
    params, state = step(params, state, jax.tree.map(operator.itemgetter(t), grads))
  return params, state


@pytest.mark.parametrize("context", ["shard_map", "unchecked", "vmap"])
@pytest.mark.parametrize(
  ("fragments", "phases"),
  [(1, {"a": 0, "b": 0}), (2, {"a": 2, "b": 0}), ({"a": 1, "b": 0}, {"a": 0, "b": 2})],
)
@pytest.mark.parametrize("outer", [None, (0.7, 0.9)])
def test_periodic_exchange_custom_rules_match_numpy(context, fragments, phases, outer):
  """Three rounds of unequal gradients. A fragment's outer state counts its own exchanges only."""
  rng = np.random.default_rng(0)
  start = {name: rng.normal(size=5).astype(np.float32) for name in ("a", "b")}
  grads = {name: rng.normal(size=(12, W, 5)).astype(np.float32) for name in start}
  rule = LocalSGD() if outer is None else DiLoCo(optax.sgd(*outer, nesterov=True))
  tx = periodic_exchange(
    optax.sgd(0.1), AXIS, rule, communication_period=PERIOD, fragments=fragments
  )
  params, state = run(tx, context, start, grads)
  x, c, m = simulate(start, grads, phases, outer)
  assert_close(as_numpy(params), x, rtol=1e-5, atol=1e-6)
  # Variables of the first fragment come first.
  order = ["b", "a"] if fragments == {"a": 1, "b": 0} else ["a", "b"]
  momenta = jax.tree.leaves([kept.outer_state for kept in state.kept]) if outer else []
  wanted = [c, [m[name] for name in order]] if outer else [None, []]
  assert_close(as_numpy([state.center, momenta]), wanted, rtol=1e-5, atol=1e-6)
  assert len(state.kept) == (1 if fragments == 1 else 2)


def make(rule, **options):
  return periodic_exchange(optax.sgd(0.1), AXIS, rule, **({"communication_period": 1} | options))


@pytest.mark.parametrize("context", ["shard_map", "vmap"])
def test_periodic_exchange_shard_center_matches_numpy(context):
  """Outer momentum is divided like the center; with three workers no leaf divides evenly. A count
  in a divided field is one for all."""
  rng = np.random.default_rng(1)
  start = {name: rng.normal(size=5).astype(np.float32) for name in ("a", "b")}
  grads = {name: rng.normal(size=(12, W, 5)).astype(np.float32) for name in start}
  rule = DiLoCo(
    optax.chain(optax.trace(0.9, nesterov=True), optax.scale_by_schedule(lambda _: -0.7))
  )
  tx = make(rule, shard_center=True, communication_period=PERIOD)
  params, state = run(tx, context, start, grads)
  assert state.center_share["a"].shape == (W, 2)
  assert state.kept[0].outer_state[1].count.shape == ()
  x, c, _ = simulate(start, grads, {"a": 0, "b": 0}, (0.7, 0.9))
  assert_close(as_numpy(params), x, rtol=1e-5, atol=1e-6)
  center = as_numpy(ow.center_params(state, start))
  assert_close(center, c, rtol=1e-5, atol=1e-6)
  assert int(state.kept[0].outer_state[1].count) == 3


def test_periodic_exchange_none_update_keeps_variable():
  tx = make(DiLoCo(optax.sgd(0.7, momentum=0.9)))
  params = {"a": jnp.zeros(2), "b": jnp.ones(2)}
  state = tx.init(params)
  axes = ow.worker_axes(state)
  params, state = ow.stack_workers(params, W), ow.stack_workers(state, W)
  update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
  grads = np.arange(2.0 * W, dtype=np.float32).reshape(W, 2)
  updates, state = update({"a": jnp.asarray(grads), "b": None}, state, params)
  assert updates["b"] is None
  np.testing.assert_array_equal(state.center["b"], [1.0, 1.0])
  np.testing.assert_allclose(state.center["a"], -0.07 * grads.mean(0), rtol=1e-6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forgetful(DiLoCo):
  """Returns less than it was given."""

  lost: str = dataclasses.field(default="kept", metadata={"static": True})

  def merge(self, moved, params, center, kept, workers):
    if self.lost == "moved":
      return {"a": center["a"]}, kept
    return center, Center(center=kept.center)


@pytest.mark.parametrize("lost", ["kept", "moved"])
def test_rule_that_returns_less_than_given_is_error(lost):
  tx = make(Forgetful(optax.sgd(1.0), lost))
  params = {"a": jnp.zeros(2), "b": jnp.ones(2)}
  state = tx.init(params)
  axes = ow.worker_axes(state)
  params, state = ow.stack_workers(params, W), ow.stack_workers(state, W)
  update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
  with pytest.raises(ValueError, match=f"Forgetful: send and merge must return '{lost}'"):
    update(params, state, params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring(Rule):
  """Each worker moves to the mean of itself and its two neighbors, and stores where it was."""

  def init(self, params, workers):
    return {"before": jax.tree.map(jnp.zeros_like, params)}

  def idle(self, params):
    return params, params

  def send(self, moved, params, kept, workers):
    everyone = range(W)
    left = jax.lax.ppermute(moved, AXIS, [(i, (i + 1) % W) for i in everyone])
    right = jax.lax.ppermute(moved, AXIS, [(i, (i - 1) % W) for i in everyone])
    return kept | {"before": moved}, (left, right)

  def merge(self, moved, params, sent, kept, workers):
    return jax.tree.map(lambda x, left, right: (x + left + right) / 3, moved, *sent), kept


@pytest.mark.parametrize("context", ["shard_map", "unchecked", "vmap"])
def test_rule_with_own_state_is_per_worker_and_matches_numpy(context):
  """Its state is stored as each worker's own."""
  rng = np.random.default_rng(2)
  start = {name: rng.normal(size=5).astype(np.float32) for name in ("a", "b")}
  grads = {name: rng.normal(size=(7, W, 5)).astype(np.float32) for name in start}
  params, state = run(make(Ring(), communication_period=PERIOD), context, start, grads)
  for name in start:
    x = start[name] - 0.1 * np.cumsum(grads[name], 0)
    met = (x[3] + np.roll(x[3], 1, 0) + np.roll(x[3], -1, 0)) / 3
    np.testing.assert_allclose(state.kept[0]["before"][name], x[3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(params[name], met + x[6] - x[3], rtol=1e-5, atol=1e-6)


def test_periodic_exchange_errors_rule_of_other_type():
  with pytest.raises(TypeError, match="rule must be an instance of a subclass of"):
    make(optax.sgd(1.0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedMean(Rule):
  """Workers move to their mean, weighted by their participation."""

  def send(self, moved, params, kept, workers):
    sound = jax.tree.map(lambda x: jnp.where(workers.weight > 0, x, 0), moved)
    sums = jax.lax.psum(jax.tree.map(lambda x: workers.weight * x, sound), AXIS)
    return kept, jax.tree.map(lambda x: x / jax.lax.psum(workers.weight, AXIS), sums)

  def merge(self, moved, params, sent, kept, workers):
    return sent, kept


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
def test_rule_receives_participation_and_zero_for_nan(context):
  """The participation of a worker with a NaN is 0."""
  tx = periodic_exchange(optax.sgd(1.0), AXIS, WeightedMean(), communication_period=1)
  grads, weights = np.float32([1, 2, 5, np.nan]), np.float32([1, 3, 0, 2])
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 4)
  axes = ow.worker_axes(state)

  def step(grads, state, params, weight):
    return tx.update(grads, state, params, participation=weight)[0]

  mapped = in_context(context, step, 4, (0, axes, 0, 0), 0)
  updates = mapped(jnp.asarray(grads), state, jnp.zeros(4), jnp.asarray(weights))
  np.testing.assert_allclose(updates, [-(1 + 3 * 2) / 4] * 4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted(Rule):
  """The mean, and a count of each worker's own."""

  def init(self, params, workers):
    return {"count": jnp.zeros((), jnp.int32)}

  def send(self, moved, params, kept, workers):
    own = workers.round * workers.size + workers.index
    everyone = workers.all_gather(workers.index)
    pairs = [(i, (i + 1) % workers.size) for i in range(workers.size)]
    count = kept["count"] + workers.permute(own, pairs) + everyone[-1]
    return {"count": count}, workers.mean(moved)

  def merge(self, moved, params, sent, kept, workers):
    return sent, kept


@pytest.mark.parametrize("fragments", [1, 2])
def test_rule_counts_of_its_own_begun_inside_shard_map(fragments):
  """The engine types them; the number, index and round of workers match those by hand."""
  tx = periodic_exchange(
    optax.sgd(1.0), AXIS, Counted(), communication_period=2, fragments=fragments
  )

  def run(x):
    x = {"a": x[0], "b": 2 * x[0]}

    def step(carried, _):
      params, state = carried
      updates, state = tx.update(x, state, params)
      return (optax.apply_updates(params, updates), state), None

    (_, state), _ = jax.lax.scan(step, (x, tx.init(x)), length=6)
    return jnp.stack([kept["count"] for kept in state.kept])[None]

  mapped = jax.shard_map(run, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS))
  found = jax.jit(mapped)(jnp.arange(4.0))
  wanted = [sum(r * 4 + (i - 1) % 4 + 3 for r in range(3)) for i in range(4)]
  np.testing.assert_array_equal(found, np.array([wanted] * fragments).T)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Crossbow(Rule):
  """Workers are pulled to a center, which has their pulls and a momentum of its own.

  `d_i = rate (x_i - z); x_i -= d_i; z <- z + sum_i d_i + momentum (z - z_prev)`: CROSSBOW's
  averaging, as it is remembered; the formula was not compared with the paper (VLDB 2019).
  """

  rate: float
  momentum: float

  def init(self, params, workers):
    center = workers.start(params)
    return Center(center=center, outer_state=jax.tree.map(jnp.copy, center))

  def send(self, moved, params, kept, workers):
    center = workers.whole(kept.center, params)
    pulls = jax.tree.map(lambda x, z: self.rate * (x - z), moved, center)
    ends = jax.tree.map(
      lambda z, d, before: z + d + self.momentum * (z - before),
      *(kept.center, workers.sum(pulls), kept.outer_state),
    )
    return Center(center=ends, outer_state=kept.center), pulls

  def merge(self, moved, params, pulls, kept, workers):
    return jax.tree.map(jnp.subtract, moved, pulls), kept


@pytest.mark.parametrize("shard_center", [False, True])
@pytest.mark.parametrize("context", ["shard_map", "unchecked", "vmap"])
def test_crossbow_as_rule_of_a_stranger_matches_numpy(context, shard_center):
  rng = np.random.default_rng(5)
  start = {"a": np.float32(rng.normal(size=6))}
  grads = {"a": np.float32(rng.normal(size=(3 * PERIOD, W, 6)))}
  tx = periodic_exchange(
    optax.sgd(0.1),
    AXIS,
    Crossbow(0.2, 0.9),
    communication_period=PERIOD,
    shard_center=shard_center,
  )
  params, state = run(tx, context, start, grads)
  x, z = np.tile(start["a"], (W, 1)), start["a"]
  before = z
  for t, gradient in enumerate(grads["a"]):
    x = x - 0.1 * gradient
    if (t + 1) % PERIOD == 0:
      pulls = 0.2 * (x - z)
      x, z, before = x - pulls, z + pulls.sum(0) + 0.9 * (z - before), z
  np.testing.assert_allclose(params["a"], x, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(ow.center_params(state, start)["a"], z, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["pull", "send", "replaces"])
def test_rule_field_named_like_a_method_is_error(name):
  with pytest.raises(ValueError, match=f"Mine has a field named '{name}', which is a method"):
    type("Mine", (Rule,), {"__annotations__": {name: float}})
