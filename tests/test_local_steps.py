"""local_steps: every published algorithm that it is, against plain NumPy written from the
papers."""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from helpers import AXIS, assert_close, bits, in_context, mesh_of
from jax.sharding import AxisType, PartitionSpec

import optax_wrappers as ow

PERIOD, STEPS = 4, 14
SIZES = {"a": 2, "b": 3, "c": 1}  # variables, and the parts of the reference's vector
FRAGMENTS = {"a": 1, "b": 0, "c": 1}
PARTS = [np.array([2, 3, 4]), np.array([0, 1, 5])]


def nesterov(rate, decay):
  return optax.sgd(rate, momentum=decay, nesterov=True)


def delay_by_one():
  """Passes on the updates of the call before, zeros at first."""

  def update(updates, state, params=None):
    return state, updates

  return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def fedopt(b1, b2, eps, v0, is_yogi=False):
  """Adam or Yogi without bias correction, as Reddi et al. have them."""

  def init(params):
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(
      lambda p: jnp.full_like(p, v0), params
    )

  def second(v, d):
    return v - (1 - b2) * (d**2 * jnp.sign(v - d**2) if is_yogi else v - d**2)

  def update(updates, state, params=None):
    m = jax.tree.map(lambda m, d: b1 * m + (1 - b1) * d, state[0], updates)
    v = jax.tree.map(second, state[1], updates)
    return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v), (m, v)

  return optax.GradientTransformation(init, update)


INNER = {
  "sgd": (optax.sgd(0.1), ref.Sgd(0.1)),
  "momentum": (optax.sgd(0.05, momentum=0.9), ref.Momentum(0.05, 0.9)),
  "adam": (optax.adam(0.03), ref.Adam(0.03)),
}


@dataclasses.dataclass(frozen=True)
class Row:
  """One algorithm.

  Attributes:
    tx: from an inner optimizer, the number of workers and options to the wrapped optimizer.
    node: the reference.
    numbers: what the reference is told, or a function of the number of workers.
    participation: from the step to each worker's, or None.
    centre_is_early: whether the reference's centre moves later than ours, when what was sent has
      arrived.
  """

  tx: Callable[..., Any]
  node: Callable[..., Any]
  numbers: Any
  participation: Callable[[int, int], Any] | None = None
  centre_is_early: bool = False


def steps(**options):
  def make(inner, num_workers, **more):
    given = {
      k: v(num_workers) if k == "outer" and callable(v) and not isinstance(v, tuple) else v
      for k, v in options.items()
    }
    return ow.local_steps(inner, AXIS, **({"communication_period": PERIOD} | given | more))

  return make


def sampled(t, num_workers):
  """Some workers in each round, with unequal weights; nobody in the second."""
  weights = np.array([(i + t // PERIOD) % 3 * (i + 1.0) for i in range(num_workers)])
  return 0.0 * weights if t // PERIOD == 1 else weights


def sizes(num_workers):
  return lambda r: sampled(r * PERIOD, num_workers)


def period_of(step):
  return 2 + step % 3


STREAMING = {"period": PERIOD, "eta": 0.7, "mu": 0.9, "alpha": 0.5, "delay": 3, "fragments": PARTS}
NESTEROV = {"period": PERIOD, "eta": 0.7, "mu": 0.9}
SLOW_RATES = [0.1, 0.05, 0.02, 0.01]  # of each round

ROWS = {
  "local SGD": Row(steps(), ref.local_sgd, {"period": PERIOD}),
  "post-local SGD, gradients": Row(
    steps(warmup_steps=3), ref.post_local_sgd_gradients, {"period": PERIOD, "warmup": 3}
  ),
  "post-local SGD, parameters": Row(
    steps(communication_period=lambda step: jnp.where(step < 3, 1, PERIOD)),
    ref.post_local_sgd_parameters,
    {"period": PERIOD, "warmup": 3},
  ),
  "a schedule of periods": Row(
    steps(communication_period=period_of), ref.local_sgd_schedule, {"period_of": period_of}
  ),
  "DiLoCo": Row(
    lambda inner, num_workers, **more: ow.diloco(inner, AXIS, communication_period=PERIOD, **more),
    ref.diloco,
    NESTEROV,
  ),
  "Streaming DiLoCo": Row(
    steps(outer=lambda _: nesterov(0.7, 0.9), fragments=FRAGMENTS, delay=3, pull=0.5),
    ref.streaming_diloco,
    STREAMING,
    centre_is_early=True,
  ),
  "Streaming DiLoCo, the centre moving at once": Row(
    steps(outer=lambda _: nesterov(0.7, 0.9), fragments=FRAGMENTS, delay=3, pull=0.5),
    ref.streaming_diloco_early,
    STREAMING,
  ),
  "Streaming DiLoCo, torchft": Row(
    steps(outer=lambda _: nesterov(0.7, 0.9), fragments=FRAGMENTS, pull=0.75),
    ref.torchft_diloco,
    {"period": PERIOD, "eta": 0.7, "mu": 0.9, "alpha": 0.25, "fragments": PARTS},
  ),
  "a delay of a whole round": Row(
    steps(outer=lambda _: nesterov(0.4, 0.9), delay=PERIOD, pull=0.5),
    ref.streaming_diloco_early,
    STREAMING | {"eta": 0.4, "delay": PERIOD, "fragments": [np.arange(6)]},
  ),
  "delayed outer": Row(
    steps(outer=lambda _: optax.chain(delay_by_one(), nesterov(0.4, 0.9))),
    ref.delayed_outer,
    {"period": PERIOD, "eta": 0.4, "mu": 0.9},
  ),
  "MuLoCo": Row(
    steps(outer=lambda _: nesterov(0.8, 0.9)), ref.muloco, {"period": PERIOD, "eta": 0.8, "mu": 0.9}
  ),
  "SlowMo": Row(
    steps(outer=lambda _: optax.sgd(1.0, momentum=0.5)),
    ref.slowmo,
    {"period": PERIOD, "beta": 0.5, "a": 1.0, "gamma": lambda r: 0.1},
  ),
  "SlowMo, under a schedule": Row(
    steps(
      outer=lambda _: optax.chain(
        optax.scale_by_schedule(lambda r: 1 / jnp.asarray(SLOW_RATES)[r]),
        optax.trace(0.5),
        optax.scale_by_schedule(lambda r: -0.9 * jnp.asarray(SLOW_RATES)[r]),
      )
    ),
    ref.slowmo,
    {"period": PERIOD, "beta": 0.5, "a": 0.9, "gamma": lambda r: SLOW_RATES[r]},
  ),
  "BMUF, classical": Row(
    steps(outer=lambda w: optax.sgd(1.0, momentum=1 - 1 / w)),
    ref.bmuf,
    lambda w: {"period": PERIOD, "eta": 1 - 1 / w, "nesterov": False},
  ),
  "BMUF, Nesterov": Row(
    steps(outer=lambda w: nesterov(1.0, 1 - 1 / w)),
    ref.bmuf,
    lambda w: {"period": PERIOD, "eta": 1 - 1 / w, "nesterov": True},
  ),
  "FedAvg": Row(
    steps(outer=lambda _: optax.sgd(1.0), inner_state="reset"),
    ref.fedavg,
    lambda w: {"period": PERIOD, "sizes": sizes(w)},
    sampled,
  ),
  "FedAvgM": Row(
    steps(outer=lambda _: optax.sgd(1.0, momentum=0.9), inner_state="reset"),
    ref.fedavg,
    lambda w: {"period": PERIOD, "sizes": sizes(w), "momentum": 0.9},
    sampled,
  ),
  "FedAdam, Optax": Row(
    steps(outer=lambda _: optax.adam(0.03, b2=0.99, eps=1e-3), inner_state="reset"),
    ref.fedopt,
    lambda w: {
      "period": PERIOD,
      "sizes": sizes(w),
      "eta": 0.03,
      "v0": 0.0,
      "bias_correction": True,
    },
    sampled,
  ),
  "FedAdam, the paper": Row(
    steps(
      outer=lambda _: optax.chain(fedopt(0.9, 0.99, 1e-3, 1e-6), optax.scale(-0.03)),
      inner_state="reset",
    ),
    ref.fedopt,
    lambda w: {"period": PERIOD, "sizes": sizes(w), "eta": 0.03, "v0": 1e-6},
    sampled,
  ),
  "FedYogi, Optax": Row(
    steps(outer=lambda _: optax.yogi(0.03, b2=0.99, eps=1e-3), inner_state="reset"),
    ref.fedopt,
    lambda w: {
      "period": PERIOD,
      "sizes": sizes(w),
      "eta": 0.03,
      "which": "yogi",
      "v0": 1e-6,
      "m0": 1e-6,
      "bias_correction": True,
    },
    sampled,
  ),
  "FedYogi, the paper": Row(
    steps(
      outer=lambda _: optax.chain(fedopt(0.9, 0.99, 1e-3, 1e-6, True), optax.scale(-0.03)),
      inner_state="reset",
    ),
    ref.fedopt,
    lambda w: {"period": PERIOD, "sizes": sizes(w), "eta": 0.03, "v0": 1e-6, "which": "yogi"},
    sampled,
  ),
  "DOWNPOUR": Row(
    steps(outer=lambda _: optax.sgd(1.0), reduction="sum"), ref.downpour, {"period": PERIOD}
  ),
  "partial participation": Row(
    steps(outer=lambda _: nesterov(0.7, 0.9)),
    ref.diloco_participation,
    lambda w: NESTEROV | {"weights": lambda t: sampled(t, w), "absent": "pull"},
    sampled,
  ),
  "partial participation, the absent alone": Row(
    steps(outer=lambda _: nesterov(0.7, 0.9), absent="keep"),
    ref.diloco_participation,
    lambda w: NESTEROV | {"weights": lambda t: sampled(t, w), "absent": "keep"},
    sampled,
  ),
  "inner states averaged": Row(
    steps(outer=lambda _: nesterov(0.7, 0.9), inner_state="average"),
    ref.diloco_inner_state,
    NESTEROV | {"policy": "average"},
  ),
  "inner states reset": Row(
    steps(outer=lambda _: nesterov(0.7, 0.9), inner_state="reset"),
    ref.diloco_inner_state,
    NESTEROV | {"policy": "reset"},
  ),
  "EASGD, the authors' phase": Row(
    lambda inner, num_workers, **more: ow.elastic_average(
      inner, AXIS, communication_period=PERIOD, moving_rate=0.1, delay=1, **more
    ),
    ref.easgd_authors_phase,
    {"period": PERIOD, "alpha": 0.1},
  ),
  "CROSSBOW": Row(
    lambda inner, num_workers, **more: ow.elastic_average(
      inner,
      AXIS,
      communication_period=PERIOD,
      moving_rate=0.1,
      outer=optax.sgd(0.1, momentum=0.9),
      **more,
    ),
    ref.crossbow,
    {"period": PERIOD, "alpha": 0.1, "mu": 0.9},
  ),
}


@dataclasses.dataclass(frozen=True)
class Problem:
  """Workers that each descend to a point of their own, which moves."""

  num_workers: int
  start: Any
  curvature: Any
  points: Any

  def grad(self, t, x):
    return self.curvature * (x - self.points[t])


def problem(num_workers, num_steps=STEPS):
  rng = np.random.default_rng(num_workers)
  n = sum(SIZES.values())
  return Problem(
    num_workers,
    rng.normal(size=n),
    rng.uniform(0.5, 2, size=(num_workers, n)),
    rng.normal(size=(num_steps, num_workers, n)),
  )


def split(vector):
  """A vector, its last axis, as parameters."""
  ends = np.cumsum(list(SIZES.values()))[:-1]
  return dict(zip(SIZES, jnp.split(jnp.asarray(vector), ends, axis=-1)))


def joined(tree):
  return jnp.concatenate([tree[name] for name in SIZES], axis=-1)


def run(tx, task, context, weights=None, step_args=None):
  """The workers after each step `[steps, W, n]`, and the state at the end; all in one program."""
  num_steps = len(task.points)
  state = tx.init(split(task.start))
  axes = ow.worker_axes(state)
  params = ow.stack_workers(split(task.start), task.num_workers)
  state = ow.stack_workers(state, task.num_workers)
  points = np.moveaxis(task.points, 1, 0)
  if weights is None:
    shares = np.zeros((task.num_workers, num_steps, 0))
  else:
    shares = np.moveaxis(np.stack([weights(t, task.num_workers) for t in range(num_steps)]), 1, 0)[
      ..., None
    ]

  def all_steps(params, state, curvature, points, shares):
    def step(carry, data):
      params, state = carry
      point, share = data
      grads = jax.tree.map(lambda h, x, b: h * (x - b), split(curvature), params, split(point))
      extra = {"participation": share[0]} if share.size else {}
      updates, state = tx.update(grads, state, params, **extra)
      params = optax.apply_updates(params, updates)
      return (params, state), joined(params)

    (params, state), xs = jax.lax.scan(step, (params, state), (points, shares))
    return xs, state

  mapped = in_context(context, all_steps, task.num_workers, (0, axes, 0, 0, 0), (0, axes))
  xs, state = mapped(params, state, task.curvature, points, shares)
  return np.moveaxis(np.asarray(xs), 0, 1), state


def check_row(name, num_workers, context, inner_name, **options):
  row = ROWS[name]
  task = problem(num_workers)
  inner, ref_inner = INNER[inner_name]
  numbers = row.numbers(num_workers) if callable(row.numbers) else row.numbers
  xs, centers = row.node(
    task.start, task.grad, STEPS, ref_inner, num_workers=num_workers, **numbers
  )
  with jax.enable_x64(True):
    tx = row.tx(inner, num_workers, **options)
    found, state = run(tx, task, context, row.participation)
    np.testing.assert_allclose(found, np.stack(xs), rtol=1e-6, atol=1e-9)
    if centers is not None and not row.centre_is_early:
      shape = jax.tree.map(lambda n: jax.ShapeDtypeStruct((n,), jnp.float64), SIZES)
      center = joined(ow.center_params(state, shape))
      np.testing.assert_allclose(center, centers[-1], rtol=1e-6, atol=1e-9)
  return state


@pytest.mark.optax_promotes
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ROWS)
def test_every_algorithm_is_a_list_of_arguments(name, num_workers):
  """Three rounds and a half. The inner optimizers take turns, so that each algorithm meets
  several."""
  inner = list(INNER)[(list(ROWS).index(name) + num_workers) % len(INNER)]
  check_row(name, num_workers, "vmap", inner)


CONTEXTS = ["shard_map", "unchecked", "explicit", "pmap", "sharded_vmap"]


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", ROWS)
def test_in_every_parallel_context(name, context):
  check_row(name, 3, context, list(INNER)[list(ROWS).index(name) % len(INNER)])


WITH_CENTRE = [
  "DiLoCo",
  "Streaming DiLoCo",
  "SlowMo, under a schedule",
  "FedAdam, Optax",
  "DOWNPOUR",
]


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("name", "context"),
  [
    *((name, "shard_map") for name in [*WITH_CENTRE, "CROSSBOW"]),
    ("DiLoCo", "vmap"),
    ("DiLoCo", "unchecked"),
  ],
)
def test_a_divided_centre_gives_the_same_numbers(name, context):
  """Three workers, so that no variable divides evenly."""
  state = check_row(name, 3, context, "momentum", shard_center=True)
  own = ow.get_state(state, type(state))
  assert own.center is None and own.center_share["b"].shape == (3, 1)
  shares = [x for x in jax.tree.leaves(own.outer_state) if x.ndim]
  assert all(x.shape[0] == 3 for x in shares)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("period", [1, 3])
def test_lookahead_with_one_worker_is_optax_lookahead(period):
  """Their fast and slow parameters are our parameters and centre; ours keep their structure."""
  start = split(problem(1).start.astype(np.float32))
  tx = ow.local_steps(optax.adam(0.1), None, communication_period=period, outer=optax.sgd(0.5))
  theirs = optax.lookahead(optax.adam(0.1), sync_period=period, slow_step_size=0.5)
  params, pair = start, optax.LookaheadParams(start, start)
  state, their_state = tx.init(start), theirs.init(pair)
  for t in range(7):
    grads = jax.tree.map(lambda p, t=t: p - t / 3, params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    updates, their_state = theirs.update(grads, their_state, pair)
    pair = optax.apply_updates(pair, updates)
    assert_close(params, pair.fast, rtol=1e-5)
    assert_close(ow.center_params(state), pair.slow, rtol=1e-5)


# Workers of two levels.


def two_levels(tx, task, pods, own_axes, check_vma=True):
  """All steps over a mesh of pods and chips; a worker lies over `own_axes`."""
  chips = task.num_workers // pods
  mesh = jax.make_mesh((pods, chips), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2)
  names = ("pod", "chip")
  num_owners = task.num_workers if "chip" in own_axes else pods
  state = tx.init(split(task.start))
  axes = ow.worker_axes(state)
  specs, own = ow.worker_specs(state, own_axes), PartitionSpec(own_axes)

  def add(tree):
    return jax.tree.map(lambda a, x: x if a is None else x[None], axes, tree, is_leaf=_is_none)

  def one(params, state, curvature, points):
    params = jax.tree.map(operator.itemgetter(0), params)
    state = jax.tree.map(lambda a, x: x if a is None else x[0], axes, state, is_leaf=_is_none)

    def step(carry, point):
      params, state = carry
      # In a pod that shares its parameters, each device has a gradient of its own.
      at = ow.per_shard(params, names)
      grads = jax.tree.map(lambda h, x, b: h * (x - b), split(curvature[0]), at, split(point))
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), ow.per_shard(joined(params), names)

    (_, state), xs = jax.lax.scan(step, (params, state), points[0])
    return xs[None], add(state)

  mapped = jax.shard_map(
    one,
    mesh=mesh,
    in_specs=(own, specs, PartitionSpec(names), PartitionSpec(names)),
    out_specs=(PartitionSpec(names), specs),
    check_vma=check_vma,
  )
  xs, state = jax.jit(mapped)(
    ow.stack_workers(split(task.start), num_owners),
    ow.stack_workers(state, num_owners),
    task.curvature,
    np.moveaxis(task.points, 1, 0),
  )
  return np.moveaxis(np.asarray(xs), 0, 1), state


def _is_none(x):
  return x is None


PODS = [[0, 1], [2, 3], [4, 5]]
INSIDE = functools.partial(ow.local_steps, optax.sgd(0.1), "chip", communication_period=2)
ALL = ("pod", "chip")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
  ("make", "own_axes", "node", "numbers"),
  [
    (
      lambda: ow.diloco(ow.cross_shard(optax.sgd(0.1), "chip"), "pod", communication_period=PERIOD),
      "pod",
      ref.hierarchical_pods,
      NESTEROV,
    ),
    (
      lambda: ow.local_steps(INSIDE(), ALL, communication_period=6),
      ALL,
      ref.hierarchical_periods,
      {"period_pod": 2, "period_all": 6},
    ),
    (
      lambda: ow.diloco(INSIDE(), ALL, communication_period=6),
      ALL,
      ref.hierarchical_diloco,
      {"period_pod": 2, "period_all": 6, "eta": 0.7, "mu": 0.9},
    ),
  ],
  ids=["data-parallel pods", "two periods", "two periods, DiLoCo"],
)
def test_hierarchies(make, own_axes, node, numbers, check_vma):
  task = problem(6)
  xs, centers = node(
    task.start, task.grad, STEPS, ref.Sgd(0.1), num_workers=6, pods=PODS, **numbers
  )
  with jax.enable_x64(True):
    found, state = two_levels(make(), task, 3, own_axes, check_vma)
    np.testing.assert_allclose(found, np.stack(xs), rtol=1e-6, atol=1e-9)
    if centers is not None:
      np.testing.assert_allclose(joined(ow.center_params(state)), centers[-1], rtol=1e-6, atol=1e-9)


# Who decides when.

ROUNDS = {"communication_period": PERIOD, "outer": nesterov(0.7, 0.9)}


def by_caller(tx, task, asked, num_workers=3):
  """Steps in each of which the caller decides: the workers after each, and the state."""
  params, state = split(task.start), tx.init(split(task.start))
  params, state = ow.stack_workers(params, num_workers), ow.stack_workers(state, num_workers)
  found = []

  @functools.cache
  def compiled(decided):
    return jax.jit(ow.map_workers(functools.partial(tx.update, **dict(decided)), AXIS))

  for t, decided in enumerate(asked):
    grads = split(task.grad(t, np.asarray(joined(params))))
    updates, state = compiled(tuple(decided.items()))(grads, state, params)
    params = optax.apply_updates(params, updates)
    found.append(np.asarray(joined(params)))
  return np.stack(found), state


def decided_at(t, fragments, delay):
  """What the counter would decide in step t, from 1."""
  phases = [(k + 1) * PERIOD // fragments for k in range(fragments)]
  sent = tuple(k for k, phase in enumerate(phases) if (t - phase) % PERIOD == 0 and t >= phase)
  if not delay:
    return {"exchange": sent if fragments > 1 else bool(sent)}
  come = tuple(
    k for k, phase in enumerate(phases) if (t - delay - phase) % PERIOD == 0 and t - delay >= phase
  )
  return {"exchange": sent, "arrival": come}


@pytest.mark.parametrize(
  ("fragments", "delay"), [(1, 0), (2, 0), (1, 2), (2, 3)], ids=lambda x: str(x)
)
def test_the_caller_and_the_counter_decide_alike(fragments, delay):
  """To the rounding of two programs, and the counter keeps up: it decides the rest."""
  options = ROUNDS | {"fragments": fragments, "delay": delay}
  tx, task = ow.local_steps(optax.sgd(0.1), AXIS, **options), problem(3)
  expected, state = by_caller(tx, task, [{}] * STEPS)
  asked = [decided_at(t + 1, fragments, delay) for t in range(9)] + [{}] * (STEPS - 9)
  found, after = by_caller(tx, task, asked)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert_close(after, state, rtol=1e-5, atol=1e-6)


def test_an_exchange_between_is_one_more():
  """At the end of an epoch: the counter goes on as if nothing had been."""
  tx, task = ow.local_steps(optax.sgd(0.1), AXIS, communication_period=PERIOD), problem(3)
  asked = [{"exchange": True} if t == 5 else {} for t in range(STEPS)]
  found, _ = by_caller(tx, task, asked)
  expected = []
  x = np.tile(task.start, (3, 1))
  for t in range(STEPS):
    x = x - 0.1 * task.grad(t, x)
    if (t + 1) % PERIOD == 0 or t == 5:
      x = np.tile(x.mean(0), (3, 1))
    expected.append(x)
  np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_an_exchange_alone_is_no_step(context):
  tx = ow.local_steps(optax.adam(0.1), AXIS, **ROUNDS)
  params, state = jnp.arange(3.0), tx.init(jnp.float32(1.0))
  axes, state = ow.worker_axes(state), ow.stack_workers(state, 3)
  state = state.replace(step=jnp.int32(5), since=jnp.int32(1))

  def alone(params, state):
    return tx.update(None, state, params, exchange=True)

  updates, after = in_context(context, alone, 3, (0, axes), (0, axes))(params, state)
  # The centre is 1 and so is the mean; nothing pulls.
  np.testing.assert_allclose(params + updates, np.ones(3), rtol=1e-6)
  assert (int(after.step), int(after.since)) == (5, 1)
  assert bits(after.inner_state) == bits(state.inner_state)
  # Before any step there is nothing to say, and outer counters stay.
  _, after = in_context(context, alone, 3, (0, axes), (0, axes))(
    params, state.replace(step=jnp.int32(0))
  )
  assert bits(after.outer_state) == bits(state.outer_state)
  assert float(after.center) == 1.0


@pytest.mark.optax_promotes
def test_between_exchanges_the_step_is_the_inner_optimizers_and_nothing_else():
  """With exchange=False XLA is left with the same work and memory, but for the counters."""
  params = {"a": jnp.ones((64, 64)), "b": jnp.ones(500)}
  adam = optax.adam(0.1)

  def compiled(tx, **decided):
    tx = optax.with_extra_args_support(tx)

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params, **decided)
      return optax.apply_updates(params, updates), state

    arguments = ow.stack_workers((params, tx.init(params), params), 2)
    mapped = ow.map_workers(step, AXIS, mesh=mesh_of(2))
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*arguments).compile()

  bare = compiled(adam)
  for options in (ROUNDS, ROUNDS | {"fragments": 2, "delay": 2}, {"inner_state": "average"}):
    step = compiled(ow.local_steps(adam, AXIS, **options), exchange=False)
    text = step.as_text()
    assert not re.search(r" (while|conditional|all-reduce)\(", text), options
    for cost in ("flops", "bytes accessed"):
      assert step.cost_analysis()[cost] <= 1.01 * bare.cost_analysis()[cost], (options, cost)
    used, needed = step.memory_analysis(), bare.memory_analysis()
    assert used.temp_size_in_bytes <= needed.temp_size_in_bytes + 1024, options
  assert " while(" in compiled(ow.local_steps(adam, AXIS)).as_text()


# A round as one program.


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
@pytest.mark.parametrize(
  ("fragments", "delay"), [(1, 0), (2, 0), (1, 2), (2, 3), (FRAGMENTS, 4), (3, 1)], ids=str
)
def test_a_round_as_one_program_has_the_numbers_of_its_steps(context, fragments, delay):
  schedule = {"communication_period": PERIOD, "fragments": fragments, "delay": delay}
  tx = ow.local_steps(
    optax.sgd(0.1, momentum=0.9), AXIS, outer=nesterov(0.7, 0.9), pull=0.5, **schedule
  )
  task = problem(3, 3 * PERIOD)
  expected, _ = by_caller(tx, task, [{}] * (3 * PERIOD))

  def step(params, state, data):
    curvature, point = map(split, data)
    grads = jax.tree.map(lambda h, x, b: h * (x - b), curvature, params, point)
    updates, state = tx.update(grads, state, params, exchange=False)
    return optax.apply_updates(params, updates), state, joined(params)

  start = split(task.start.astype(np.float32))
  state = tx.init(start)
  axes = ow.worker_axes(state)
  params, state = ow.stack_workers(start, 3), ow.stack_workers(state, 3)
  one_round = in_context(
    context, ow.local_round(step, tx, **schedule), 3, (0, axes, 0), (0, axes, 0)
  )
  curvature = np.repeat(task.curvature[:, None], PERIOD, axis=1)
  for r in range(3):
    points = np.moveaxis(task.points[r * PERIOD : (r + 1) * PERIOD], 1, 0)
    data = np.float32(curvature), np.float32(points)
    params, state, seen = one_round(params, state, data)
    np.testing.assert_allclose(joined(params), expected[(r + 1) * PERIOD - 1], rtol=2e-5, atol=2e-6)
    assert seen.shape == (3, PERIOD, 6)
  assert int(state.step) == 3 * PERIOD
