"""local_steps: every published algorithm that it expresses, compared with NumPy written from the
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
from flax import serialization
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
  """Returns the updates of the previous call, zeros at first."""

  def update(updates, state, params=None):
    return state, updates

  return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def fedopt(b1, b2, eps, v0, is_yogi=False):
  """Adam or Yogi without bias correction, as in Reddi et al."""

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Crossbow(ow.exchange.Rule):
  """Synchronous model averaging (Koliousis et al., 2019): the center has its own momentum."""

  rate: float
  decay: float

  def init(self, params, workers):
    center = workers.start(params)
    return ow.exchange.Center(center=center, outer_state=jax.tree.map(jnp.zeros_like, center))

  def idle(self, params):
    return jax.tree.map(jnp.zeros_like, params)

  def send(self, moved, params, kept, workers):
    apart = jax.tree.map(lambda x, c: x - c, moved, workers.gather(kept.center, params))
    totals = jax.lax.psum(apart, workers.names)
    momentum = jax.tree.map(lambda m, d: self.decay * m + self.rate * d, kept.outer_state, totals)
    center = jax.tree.map(lambda c, m: c + m, kept.center, momentum)
    return ow.exchange.Center(center=center, outer_state=momentum), apart

  def merge(self, moved, params, sent, kept, workers):
    return jax.tree.map(lambda x, d: x - self.rate * d, moved, sent), kept


ADAM = optax.adam(0.03), ref.Adam(0.03)
INNER = {
  "sgd": (optax.sgd(0.1), ref.Sgd(0.1)),
  "momentum": (optax.sgd(0.05, momentum=0.9), ref.Momentum(0.05, 0.9)),
  "adam": ADAM,
}


@dataclasses.dataclass(frozen=True)
class Row:
  """One algorithm.

  Attributes:
    tx: from an inner optimizer, the number of workers and options, to the wrapped optimizer.
    node: the reference.
    numbers: arguments of the reference, or a function of the number of workers.
    participation: from the step to each worker's participation, or None.
    center_is_early: whether the reference's center moves later than ours, when what was sent has
      arrived.
  """

  tx: Callable[..., Any]
  node: Callable[..., Any]
  numbers: Any
  participation: Callable[[int, int], Any] | None = None
  center_is_early: bool = False


def steps(outer=None, **options):
  """A row's optimizer; `outer` may be a function of the number of workers."""

  def make(inner, num_workers, **more):
    given = {"communication_period": PERIOD} | options | more
    chosen = outer(num_workers) if callable(outer) else outer
    return ow.local_steps(inner, AXIS, outer=chosen, **given)

  return make


def sparse_average(period, delay):
  def make(inner, num_workers, **more):
    rule = ow.exchange.SparseAverage(0.4, seed=1)
    options = {"communication_period": period, "delay": delay}
    return ow.exchange.periodic_exchange(inner, AXIS, rule, **options, **more)

  return make


def sparse(period, delay):
  masks = [drawn(ow.exchange.SparseAverage(0.4, seed=1), r) for r in range(STEPS // period)]
  return {"period": period, "delay": delay, "masks": masks}


def durations(num_workers):
  """Durations of the workers' rounds: 2, 3, 1, 2, ... With one or two workers, sometimes none
  arrives."""
  return tuple((2, 3, 1)[i % 3] for i in range(num_workers))


def asynchronous(inner, num_workers, **more):
  """Slow workers, some of them late, whose differences then count less."""
  unequal = durations(num_workers)

  def is_due(step):
    return step % jnp.asarray(unequal)[jax.lax.axis_index(AXIS)] == 0

  outer = ow.delayed_nesterov(0.9, 0.8, buffer=2)
  rule = ow.exchange.Asynchronous(outer, unequal, ow.staleness.inverse())
  masked = optax.conditionally_mask(inner, is_due)
  return ow.exchange.periodic_exchange(masked, AXIS, rule, communication_period=2, **more)


PAIRS = ow.exchange.Pairs(consensus=0.3, num_pairings=3, seed=2)


def partners(num_workers, count):
  """The partner of each worker in this exchange; a worker without one is its own partner.

  Worker i is 2^i away from its center, so the result tells its partner.
  """
  rule = ow.exchange.Pairs(0.0, 1.0, 0.0, num_pairings=3, seed=2)
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  own = jnp.asarray(2.0 ** np.arange(num_workers)[:, None], jnp.float32)
  x = jnp.zeros_like(own)
  state = ow.stack_workers(tx.init(x[0]), num_workers)
  kept = tuple(one.replace(round=jnp.int32(count)) for one in state.kept)
  updates, _ = ow.map_workers(tx.update, AXIS)(-own, state.replace(kept=kept), x)
  found = np.log2(np.asarray(2 * updates - own)).astype(int)[:, 0]
  assert (found[found] == np.arange(num_workers)).all()
  assert (found == np.arange(num_workers)).sum() == num_workers % 2
  return found


def drawn(rule, count):
  """The entries that a rule averages in this exchange: those that are equal on two workers
  afterwards."""
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  x = ow.stack_workers({name: jnp.zeros(size) for name, size in SIZES.items()}, 2)
  x = jax.tree.map(lambda one: one.at[1].set(1.0), x)
  state = ow.stack_workers(tx.init({name: jnp.zeros(size) for name, size in SIZES.items()}), 2)
  kept = tuple(one.replace(round=jnp.int32(count)) for one in state.kept)
  update = ow.map_workers(tx.update, AXIS)
  updates, _ = update(jax.tree.map(jnp.zeros_like, x), state.replace(kept=kept), x)
  return np.asarray(joined(updates)[0] == 0.5)


def sampled(t, num_workers):
  """Some workers in each round, with unequal weights; none in the second."""
  weights = np.array([(i + t // PERIOD) % 3 * (i + 1.0) for i in range(num_workers)])
  return 0.0 * weights if t // PERIOD == 1 else weights


def tokens(t, num_workers):
  """Tokens times tokens per step, of workers of unequal speed."""
  return np.array([(100.0 * (i + 1)) ** 2 / (1 + (i + t) % 3) for i in range(num_workers)])


def sizes(num_workers):
  return lambda r: sampled(r * PERIOD, num_workers)


def period_of(step):
  return 2 + step % 3


def qsr(schedule, num_steps, alpha, base, warmup=0, warmup_period=1):
  """As on the page."""

  def period(step):
    left = num_steps - step
    steps = jnp.minimum((alpha / schedule(step)) ** 2, left)
    steps = jnp.maximum(steps.astype(jnp.int32), base)
    steps = jnp.where(step < warmup, warmup_period, steps)
    return jnp.minimum(steps, left)  # numbers below 1 count as 1

  return period


QSR = {"alpha": 0.25, "h_base": 2, "warmup": 2, "h_warmup": 1}
PIER = [0.99, 0.9, 0.5, 0.5]  # of each round
QSR_RATES = np.linspace(0.15, 0.05, STEPS)
STREAMING = {"period": PERIOD, "eta": 0.7, "mu": 0.9, "alpha": 0.5, "delay": 3, "fragments": PARTS}
NESTEROV = {"period": PERIOD, "eta": 0.7, "mu": 0.9}
PENALTY = {"clip": 0.5, "threshold": 0.4, "warmup": 3}
EDIT = {"period": 1, "eta": 0.7, "mu": 0.8, "alpha": 0.3} | PENALTY
STREAMED = steps(outer=nesterov(0.7, 0.9), fragments=FRAGMENTS, delay=3, pull=0.5)
SLOW_RATES = [0.1, 0.05, 0.02, 0.01]  # of each round

ROWS = {
  "local SGD": Row(steps(), ref.local_sgd, {"period": PERIOD}),
  "post-local SGD, parameters": Row(
    steps(communication_period=lambda step: jnp.where(step < 3, 1, PERIOD)),
    ref.post_local_sgd_parameters,
    {"period": PERIOD, "warmup": 3},
  ),
  "a schedule of periods": Row(
    steps(communication_period=period_of), ref.local_sgd_schedule, {"period_of": period_of}
  ),
  "QSR": Row(
    steps(communication_period=qsr(lambda s: jnp.asarray(QSR_RATES)[s], STEPS, *QSR.values())),
    ref.qsr,
    QSR | {"rates": QSR_RATES},
  ),
  "Pier": Row(
    steps(
      outer=optax.inject_hyperparams(optax.sgd)(
        0.7, momentum=lambda r: jnp.asarray(PIER)[r], nesterov=True
      )
    ),
    ref.pier,
    {"period": PERIOD, "eta": 0.7, "mu_of": PIER},
  ),
  "DiLoCo": Row(
    lambda inner, num_workers, **more: ow.diloco(inner, AXIS, communication_period=PERIOD, **more),
    ref.diloco,
    NESTEROV,
  ),
  "Streaming DiLoCo": Row(
    STREAMED,
    ref.streaming_diloco,
    STREAMING,
    center_is_early=True,
  ),
  "Streaming DiLoCo, the center moving at once": Row(
    STREAMED,
    ref.streaming_diloco_early,
    STREAMING,
  ),
  "Streaming DiLoCo, torchft": Row(
    steps(outer=nesterov(0.7, 0.9), fragments=FRAGMENTS, pull=0.75),
    ref.torchft_diloco,
    {"period": PERIOD, "eta": 0.7, "mu": 0.9, "alpha": 0.25, "fragments": PARTS},
  ),
  "a delay of a whole round": Row(
    steps(outer=nesterov(0.4, 0.9), delay=PERIOD, pull=0.5),
    ref.streaming_diloco_early,
    STREAMING | {"eta": 0.4, "delay": PERIOD, "fragments": [np.arange(6)]},
  ),
  "delayed outer": Row(
    steps(outer=optax.chain(delay_by_one(), nesterov(0.4, 0.9))),
    ref.delayed_outer,
    {"period": PERIOD, "eta": 0.4, "mu": 0.9},
  ),
  "MuLoCo": Row(
    steps(outer=nesterov(0.8, 0.9)), ref.muloco, {"period": PERIOD, "eta": 0.8, "mu": 0.9}
  ),
  "SlowMo": Row(
    steps(outer=optax.sgd(1.0, momentum=0.5)),
    ref.slowmo,
    {"period": PERIOD, "beta": 0.5, "a": 1.0, "gamma": lambda r: 0.1},
  ),
  "SlowMo, under a schedule": Row(
    steps(
      outer=optax.chain(
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
  "Decoupled DiLoCo": Row(
    steps(
      outer=nesterov(0.7, 0.9),
      fragments=FRAGMENTS,
      reduction=optax.partition(
        {"radial": ow.reductions.radial_mean(AXIS), "plain": ow.all_reduce(AXIS)},
        {"a": "radial", "b": "radial", "c": "plain"},
      ),
    ),
    ref.decoupled_diloco,
    lambda w: (
      NESTEROV
      | {
        "weights": lambda t: tokens(t, w),
        "fragments": PARTS,
        "tensors": {"a": [0, 1], "b": [2, 3, 4], "c": [5]},
        "plain": ["c"],
      }
    ),
    lambda t, w: tokens(t, w),
  ),
  "EDiT": Row(
    steps(
      communication_period=1,
      outer=nesterov(0.7, 0.8),
      reduction=ow.reductions.penalty(AXIS, **PENALTY, decay=0.3),
    ),
    ref.edit,
    lambda w: EDIT | {"outliers": []},
  ),
  "FedAvg": Row(
    steps(outer=optax.sgd(1.0), inner_state="reset"),
    ref.fedavg,
    lambda w: {"period": PERIOD, "sizes": sizes(w)},
    sampled,
  ),
  "FedAvgM": Row(
    steps(outer=optax.sgd(1.0, momentum=0.9), inner_state="reset"),
    ref.fedavg,
    lambda w: {"period": PERIOD, "sizes": sizes(w), "momentum": 0.9},
    sampled,
  ),
  "FedAdam, Optax": Row(
    steps(outer=optax.adam(0.03, b2=0.99, eps=1e-3), inner_state="reset"),
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
      outer=optax.chain(fedopt(0.9, 0.99, 1e-3, 1e-6), optax.scale(-0.03)),
      inner_state="reset",
    ),
    ref.fedopt,
    lambda w: {"period": PERIOD, "sizes": sizes(w), "eta": 0.03, "v0": 1e-6},
    sampled,
  ),
  "FedYogi, Optax": Row(
    steps(outer=optax.yogi(0.03, b2=0.99, eps=1e-3), inner_state="reset"),
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
      outer=optax.chain(fedopt(0.9, 0.99, 1e-3, 1e-6, True), optax.scale(-0.03)),
      inner_state="reset",
    ),
    ref.fedopt,
    lambda w: {"period": PERIOD, "sizes": sizes(w), "eta": 0.03, "v0": 1e-6, "which": "yogi"},
    sampled,
  ),
  "DOWNPOUR": Row(steps(outer=optax.sgd(1.0), reduction="sum"), ref.downpour, {"period": PERIOD}),
  "partial participation": Row(
    steps(outer=nesterov(0.7, 0.9)),
    ref.diloco_participation,
    lambda w: NESTEROV | {"weights": lambda t: sampled(t, w), "absent": "pull"},
    sampled,
  ),
  "partial participation, the absent alone": Row(
    steps(outer=nesterov(0.7, 0.9), absent="keep"),
    ref.diloco_participation,
    lambda w: NESTEROV | {"weights": lambda t: sampled(t, w), "absent": "keep"},
    sampled,
  ),
  "inner states averaged": Row(
    steps(outer=nesterov(0.7, 0.9), inner_state="average"),
    ref.diloco_inner_state,
    NESTEROV | {"policy": "average"},
  ),
  "inner states reset": Row(
    steps(outer=nesterov(0.7, 0.9), inner_state="reset"),
    ref.diloco_inner_state,
    NESTEROV | {"policy": "reset"},
  ),
  "DES-LOC": Row(  # only of Adam
    lambda inner, num_workers, **more: ow.local_steps(
      ADAM[0], AXIS, communication_period=2, inner_state={"mu": 2, "nu": 3}, **more
    ),
    lambda start, grad, steps, inner, **numbers: ref.des_loc(
      start, grad, steps, ADAM[1], **numbers
    ),
    {"k_x": 2, "k_u": 4, "k_v": 6},
  ),
  "eager updates": Row(
    lambda inner, num_workers, **more: ow.exchange.periodic_exchange(
      inner,
      AXIS,
      ow.exchange.Eager(nesterov(0.4, 0.9)),
      communication_period=PERIOD,
      **more,
    ),
    ref.eager,
    {"period": PERIOD, "eta": 0.4, "mu": 0.9},
  ),
  "asynchronous local SGD": Row(
    asynchronous,
    ref.asynchronous_by_time,
    lambda w: {
      "period": 2,
      "durations": durations(w),
      "eta": 0.9,
      "beta": 0.8,
      "buffer": 2,
      "weight": lambda age: 1 / (1 + age),
    },
  ),
  "NoLoCo": Row(
    lambda inner, num_workers, **more: ow.exchange.periodic_exchange(
      inner, AXIS, PAIRS, communication_period=PERIOD, **more
    ),
    ref.noloco,
    lambda w: {
      "period": PERIOD,
      "alpha": 0.5,
      "beta": 0.7,
      "gamma": 0.3,
      "partners": lambda r: partners(w, r),
    },
  ),
  "LOSCAR-SGD": Row(sparse_average(3, 2), ref.sparse_average, lambda w: sparse(3, 2)),
  "SPARTA": Row(sparse_average(1, 0), ref.sparse_average, lambda w: sparse(1, 0)),
  "EASGD, the authors' phase": Row(
    lambda inner, num_workers, **more: ow.elastic_average(
      inner, AXIS, communication_period=PERIOD, moving_rate=0.1, delay=1, **more
    ),
    ref.easgd_authors_phase,
    {"period": PERIOD, "alpha": 0.1},
  ),
  "CROSSBOW": Row(
    lambda inner, num_workers, **more: ow.exchange.periodic_exchange(
      inner, AXIS, Crossbow(0.1, 0.9), communication_period=PERIOD, **more
    ),
    ref.crossbow,
    {"period": PERIOD, "alpha": 0.1, "mu": 0.9},
  ),
  "CROSSBOW, the authors' phase": Row(
    lambda inner, num_workers, **more: ow.exchange.periodic_exchange(
      inner, AXIS, Crossbow(0.1, 0.9), communication_period=PERIOD, delay=1, **more
    ),
    ref.crossbow_authors_phase,
    {"period": PERIOD, "alpha": 0.1, "mu": 0.9},
  ),
}


@dataclasses.dataclass(frozen=True)
class Problem:
  """Workers that each descend to their own point, which moves."""

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
  """Parameters from the last axis of a vector."""
  ends = np.cumsum(list(SIZES.values()))[:-1]
  return dict(zip(SIZES, jnp.split(jnp.asarray(vector), ends, axis=-1)))


def joined(tree):
  return jnp.concatenate([tree[name] for name in SIZES], axis=-1)


def run(tx, task, context, weights=None):
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
    if centers is not None and not row.center_is_early:
      shape = jax.tree.map(lambda n: jax.ShapeDtypeStruct((n,), jnp.float64), SIZES)
      center = joined(ow.center_params(state, shape))
      np.testing.assert_allclose(center, centers[-1], rtol=1e-6, atol=1e-9)
  return state


@pytest.mark.optax_promotes
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ROWS)
def test_every_algorithm_is_a_list_of_arguments(name, num_workers):
  """Three and a half rounds. The inner optimizers alternate, so that each algorithm meets
  several."""
  inner = list(INNER)[(list(ROWS).index(name) + num_workers) % len(INNER)]
  check_row(name, num_workers, "vmap", inner)


CONTEXTS = ["shard_map", "unchecked", "explicit", "pmap", "sharded_vmap"]
PROGRAMS = [
  "local SGD",
  "a schedule of periods",
  "DiLoCo",
  "Streaming DiLoCo",
  "a delay of a whole round",
  "SlowMo, under a schedule",
  "partial participation, the absent alone",
  "inner states averaged",
  "inner states reset",
  "DES-LOC",
  "Decoupled DiLoCo",
  "EDiT",
  "LOSCAR-SGD",
  "eager updates",
  "asynchronous local SGD",
  "NoLoCo",
  "EASGD, the authors' phase",
  "CROSSBOW, the authors' phase",
]


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_every_parallel_context(name, context):
  """Contexts depend on the engine only, so of rows that differ only in numbers one is tested."""
  check_row(name, 3, context, list(INNER)[list(ROWS).index(name) % len(INNER)])


WITH_CENTRE = [
  "DiLoCo",
  "Streaming DiLoCo",
  "SlowMo, under a schedule",
  "FedAdam, Optax",
  "DOWNPOUR",
  "asynchronous local SGD",
]


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("name", "context"),
  [
    *((name, "shard_map") for name in WITH_CENTRE),
    ("DiLoCo", "vmap"),
    ("DiLoCo", "unchecked"),
  ],
)
def test_a_divided_center_gives_the_same_numbers(name, context):
  """Three workers, so that no variable divides evenly."""
  state = check_row(name, 3, context, "momentum", shard_center=True)
  own = ow.get_state(state, type(state))
  assert own.center is None and own.center_share["b"].shape == (3, 1)
  shares = [x for x in jax.tree.leaves(own.of_fragments("outer_state")) if x.ndim]
  assert all(x.shape[0] == 3 for x in shares)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("period", [1, 3])
def test_lookahead_with_one_worker_is_optax_lookahead(period):
  """Their fast and slow parameters are our parameters and center; ours keep their structure."""
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


@pytest.mark.optax_promotes
@pytest.mark.parametrize("inner_name", INNER)
def test_snoo_is_an_outer_step_with_one_worker(inner_name):
  task, (inner, ref_inner) = problem(1), INNER[inner_name]
  expected, _ = ref.snoo(
    task.start, task.grad, STEPS, ref_inner, num_workers=1, period=PERIOD, eta=0.7, mu=0.5
  )
  with jax.enable_x64(True):
    tx = ow.local_steps(inner, None, communication_period=PERIOD, outer=nesterov(0.7, 0.5))
    params = split(task.start)
    state = tx.init(params)
    for t in range(STEPS):
      grads = split(task.grad(t, np.asarray(joined(params))[None])[0])
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      np.testing.assert_allclose(joined(params), expected[t][0], rtol=1e-9)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_sparse_loco_is_top_k_with_a_decayed_residual(num_workers, context):
  """On a matrix, 4 of each 64 entries in 2 bits, and an uncompressed vector. One worker sends
  nothing, and so has no residual."""
  rng = np.random.default_rng(num_workers)
  n = 5 + 32 * 40
  start, points = rng.normal(size=n), rng.normal(size=(3 * PERIOD, num_workers, n))
  expected, centers = ref.sparse_loco(
    start,
    lambda t, x: x - points[t],
    len(points),
    ref.Momentum(0.05, 0.9),
    num_workers=num_workers,
    period=PERIOD,
    eta=1.0,
    beta=0.95,
    chunk=64,
    k=4,
    num_values=4,
    exact=np.arange(5),
  )
  top = ow.codecs.top_k(4 / 64, chunk=64, value=ow.codecs.quantize(bits=2, chunk=4))
  tx = ow.local_steps(
    optax.sgd(0.05, momentum=0.9),
    AXIS,
    communication_period=PERIOD,
    outer=optax.sgd(1.0),
    codec=ow.codecs.compression(top, decay=0.95),
  )

  def tree(x):
    x = jnp.asarray(x, jnp.float32)
    return {"b": x[..., :5], "w": x[..., 5:].reshape(*x.shape[:-1], 32, 40)}

  state = tx.init(tree(start))
  axes = ow.worker_axes(state)

  def all_steps(params, state, points):
    def step(carry, point):
      params, state = carry
      grads = jax.tree.map(jnp.subtract, params, point)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), params

    (_, state), xs = jax.lax.scan(step, (params, state), points)
    return xs, state

  mapped = in_context(context, all_steps, num_workers, (0, axes, 0), (0, axes))
  own = tree(np.moveaxis(points, 1, 0))
  xs, state = mapped(
    ow.stack_workers(tree(start), num_workers), ow.stack_workers(state, num_workers), own
  )
  found = np.concatenate([xs["b"], np.asarray(xs["w"]).reshape(*xs["b"].shape[:2], -1)], -1)
  np.testing.assert_allclose(found, np.moveaxis(np.stack(expected), 1, 0), rtol=1e-4, atol=2e-5)
  np.testing.assert_allclose(state.center["w"].ravel(), centers[-1][5:], atol=2e-5)


# Workers of two levels.


def two_levels(tx, task, pods, own_axes, check_vma=True):
  """All steps over a mesh of pods and chips; a worker spans `own_axes`."""
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
      # In a pod that shares its parameters, each device has its own gradient.
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


# Scheduling synchronization.

ROUNDS = {"communication_period": PERIOD, "outer": nesterov(0.7, 0.9)}


def by_caller(tx, task, asked, num_workers=3):
  """Steps for which the caller decides: the workers after each, and the final state."""
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
  """The counter's decision in step t, from 1."""
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
  """Equal up to the rounding of two programs; the counter advances, and decides the other steps."""
  options = ROUNDS | {"fragments": fragments, "delay": delay}
  tx, task = ow.local_steps(optax.sgd(0.1), AXIS, **options), problem(3)
  expected, state = by_caller(tx, task, [{}] * STEPS)
  asked = [decided_at(t + 1, fragments, delay) for t in range(9)] + [{}] * (STEPS - 9)
  found, after = by_caller(tx, task, asked)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  assert_close(after, state, rtol=1e-5, atol=1e-6)


def test_what_the_caller_has_sent_arrives_before_the_counter_sends_again():
  tx = ow.local_steps(optax.sgd(1.0), None, communication_period=4, delay=3, outer=optax.sgd(1.0))
  params, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
  for asked in ({}, {}, {"exchange": True}, {}):
    updates, state = tx.update(jnp.float32(1.0), state, params, **asked)
    params = params + updates
  # Sent in the third step at -3, arrived in the fourth, which sends; the fourth step itself is
  # lost.
  assert (float(params), float(state.center), int(state.countdown[0])) == (-3.0, -3.0, 3)


def test_one_of_several_fragments_at_once_is_enough_to_settle_the_inner_state():
  tx = ow.local_steps(
    optax.sgd(1.0, momentum=0.5), None, communication_period=2, fragments=2, inner_state="reset"
  )
  params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
  grads = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}  # "b" does not move
  _, state = tx.update(grads, tx.init(params), params, exchange=True)
  np.testing.assert_array_equal(state.inner_state[0].trace["a"], [0.0, 0.0])


def test_an_exchange_between_is_one_more():
  """At the end of an epoch: the counter continues as if nothing had happened."""
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
  # The center is 1, and so is the mean: nothing pulls.
  np.testing.assert_allclose(params + updates, np.ones(3), rtol=1e-6)
  assert (int(after.step), int(after.since)) == (5, 1)
  assert bits(after.inner_state) == bits(state.inner_state)
  # Before any step there is nothing to synchronize, and outer counters do not change.
  _, after = in_context(context, alone, 3, (0, axes), (0, axes))(
    params, state.replace(step=jnp.int32(0))
  )
  assert bits(after.outer_state) == bits(state.outer_state)
  assert float(after.center) == 1.0


@pytest.mark.optax_promotes
def test_between_exchanges_the_step_is_the_inner_optimizers_and_nothing_else():
  """With exchange=False XLA compiles the same work and memory, except the counters."""
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


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (2, 0), (2, 3)], ids=str)
def test_a_round_as_one_program_weights_what_it_sends(fragments, delay):
  """Compared with single steps; with a delay, the last exchange of a round is sent in the next
  call."""
  schedule = {"communication_period": PERIOD, "fragments": fragments, "delay": delay}
  options = {"outer": nesterov(0.7, 0.9), "pull": 0.5, "absent": "keep"}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.9), AXIS, **options, **schedule)

  def step(params, state, target, **extra_args):
    grads = jax.tree.map(lambda p: p - target, params)
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  def counted(params, state, target, weight):
    return step(params, state, target, participation=weight)

  counted = jax.jit(ow.map_workers(counted, AXIS))
  one_round = ow.local_round(functools.partial(step, exchange=False), tx, **schedule)
  one_round = jax.jit(ow.map_workers(one_round, AXIS))

  start = {"a": jnp.zeros(4), "b": jnp.ones(4)}
  begun = ow.stack_workers((start, tx.init(start)), 3)
  weights = np.float32([[1, 0, 2], [0, 3, 1], [0, 0, 0], [2, 1, 0]])  # [rounds, workers]
  targets = np.float32(np.random.default_rng(3).standard_normal((3, 3 * PERIOD, 4)))
  (params, state), expected = begun, []
  for t in range(3 * PERIOD):
    r, is_next = t // PERIOD, delay > 0 and (t + 1) % PERIOD == 0
    params, state = counted(params, state, targets[:, t], weights[r + is_next])
    expected.append(params)
  params, state = begun
  for r, seen in enumerate(expected[PERIOD - 1 :: PERIOD]):
    part = targets[:, r * PERIOD : (r + 1) * PERIOD]
    params, state = one_round(params, state, part, weights[r])
    assert_close(params, seen, rtol=2e-5, atol=2e-6)


def test_what_a_round_sends_does_not_wait_for_its_steps():
  """The all-reduce comes before the scan, and needs none of its results."""
  schedule = {"communication_period": 4, "delay": 2}
  tx = ow.diloco(optax.sgd(0.1), AXIS, **schedule)

  def step(params, state, grad):
    updates, state = tx.update(grad, state, params, exchange=False)
    return params + updates, state

  one_round = ow.map_workers(ow.local_round(step, tx, **schedule), AXIS, mesh=mesh_of(2))
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  traced = jax.jit(one_round).trace(jnp.zeros(2), state, jnp.zeros((2, 4)))
  text = str(traced.jaxpr)
  assert 0 < text.index("psum") < text.index("scan[")
  assert text.count("scan[") == 2
  # The form depends on the platform for which the round is compiled.
  assert " conditional(" not in traced.lower().compile().as_text()


@pytest.mark.parametrize("policy", ["reset", "average"])
def test_a_round_with_a_delay_settles_inner_states_as_its_steps_do(policy):
  """In the first round nothing is in flight, and inner states do not change."""
  schedule = {"communication_period": PERIOD, "delay": 2}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.9), AXIS, inner_state=policy, **schedule)
  grads = jnp.arange(16.0).reshape(2, 8)

  def step(params, state, grad):
    updates, state = tx.update(grad, state, params, exchange=False)
    return params + updates, state

  def counted(params, state, grads):
    def one(carry, grad):
      updates, state = tx.update(grad, carry[1], carry[0])
      return (carry[0] + updates, state), None

    return jax.lax.scan(one, (params, state), grads)[0]

  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  expected, _ = jax.jit(ow.map_workers(counted, AXIS))(jnp.zeros(2), state, grads)
  params = jnp.zeros(2)
  one_round = jax.jit(ow.map_workers(ow.local_round(step, tx, **schedule), AXIS))
  for r in range(2):
    params, state = one_round(params, state, grads[:, r * PERIOD : (r + 1) * PERIOD])
  np.testing.assert_allclose(params, expected, rtol=1e-5)


# What it sends.


def collectives(tx, num_workers, **extra):
  """Collectives of a compiled step on a mesh: kind, bytes, and whether it is in a conditional."""
  params = split(np.zeros(6, np.float32))
  mesh = mesh_of(num_workers)
  stacked = ow.stack_workers((params, tx.init(params), params), num_workers)

  def step(grads, state, params, extra):
    return tx.update(grads, state, params, **extra)

  mapped = ow.map_workers(step, AXIS, mesh=mesh)
  text = jax.jit(mapped).lower(*stacked, extra).compile()
  found = ow.inspect.compiled_collectives(text)
  return sorted((one.kind, one.num_bytes, one.conditional) for one in found)


TREE, WEIGHT = 24, 4  # bytes


@pytest.mark.optax_promotes
@pytest.mark.parametrize("name", [*PROGRAMS, "SPARTA"])
def test_an_exchange_sends_every_parameter_once_and_nothing_else(name):
  """Between exchanges nothing is sent: all collectives are inside separate loops. Rows that differ
  only in numbers send the same."""
  tx = ROWS[name].tx(optax.sgd(0.1, momentum=0.9), 2)
  weight = 0 if "EASGD" in name or "CROSSBOW" in name else WEIGHT
  fragments = 2 if "Streaming" in name else 1
  sizes = [12, 12] if fragments == 2 else [TREE]
  if name == "Decoupled DiLoCo":  # and one length of each fragment
    sizes = [16, 16]
  expected = [("all-reduce", size + weight, True) for size in sizes]
  if "averaged" in name:
    expected.append(("all-reduce", TREE + WEIGHT, True))  # the momentum
  if name == "NoLoCo":  # both trees, and whether a worker participates
    expected = [("collective-permute", 2 * TREE + WEIGHT, True)]
  if name in ("LOSCAR-SGD", "SPARTA"):  # one of 2 and of 1, and two of 3
    expected = [("all-reduce", 16 + WEIGHT, True)]
  if name == "EDiT":
    expected = [("all-reduce", 4, True), ("all-reduce", TREE + 2 * WEIGHT, True)]
  if name == "DES-LOC":
    expected += [("all-reduce", TREE + WEIGHT, True)] * 2  # each moment
  assert collectives(tx, 2) == sorted(expected)


@pytest.mark.parametrize(
  "tx",
  [
    ow.local_steps(optax.sgd(0.1), AXIS, communication_period=4, delay=2),
    ow.local_steps(optax.sgd(0.1), AXIS, communication_period=4, delay=2, fragments=2),
    ow.local_steps(
      optax.sgd(0.1, momentum=0.9),
      AXIS,
      communication_period=4,
      delay=1,
      inner_state="average",
    ),
    ow.diloco(optax.sgd(0.1), AXIS, communication_period=4, delay=1, fragments=2),
    ow.elastic_average(optax.sgd(0.1), AXIS, communication_period=4, delay=1),
  ],
)
def test_with_a_delay_nothing_is_sent_between_exchanges_either(tx):
  """What is sent does not depend on the worker's step, so XLA could always send it before the
  loop."""
  assert all(conditional for _, _, conditional in collectives(tx, 2))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_divided_center_sends_the_two_halves(num_workers):
  """Each half of a variable that does not divide evenly is padded to a multiple of the workers."""
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=2, shard_center=True)
  shares = [4 * -(-n // num_workers) for n in SIZES.values()]
  expected = [("all-reduce", WEIGHT, True)]
  expected += [("all-gather", size, True) for size in shares]
  expected += [("reduce-scatter", size * num_workers, True) for size in shares]
  assert collectives(tx, num_workers) == sorted(expected)


# Participation.


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked", "sharded_vmap"])
@pytest.mark.parametrize("absent", ["pull", "keep"])
@pytest.mark.parametrize("divided", [False, True])
def test_a_worker_with_a_nan_changes_nobody_elses_numbers(context, absent, divided):
  """The same with participation 0; a worker is repaired if it was finite before the step."""
  tx = ow.local_steps(
    optax.sgd(1.0),
    AXIS,
    communication_period=1,
    outer=optax.sgd(1.0, momentum=0.5),
    absent=absent,
    shard_center=divided,
  )
  start = jnp.zeros(2)
  state = tx.init(start)
  axes = ow.worker_axes(state)
  params, state = ow.stack_workers(start, 3), ow.stack_workers(state, 3)

  def step(grads, state, params, participation):
    updates, state = tx.update(grads, state, params, participation=participation)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, 3, (0, axes, 0, 0), (0, axes))
  grads = np.float32([[-1, -2], [np.nan, 0], [-3, -4]])
  for weights in ([1.0, 1.0, 1.0], [1.0, 0.0, 1.0]):
    found, after = step(jnp.asarray(grads), state, params, jnp.float32(weights))
    np.testing.assert_array_equal(ow.center_params(after, start), [2.0, 3.0])
    np.testing.assert_array_equal(found[::2], [[2.0, 3.0]] * 2)
    np.testing.assert_array_equal(found[1], [2.0, 3.0] if absent == "pull" else [np.nan, 0.0])
  # If no worker participates, nothing changes.
  found, after = step(jnp.ones((3, 2)), state, params, jnp.zeros(3))
  np.testing.assert_array_equal(found, -np.ones((3, 2)))
  assert bits(after.outer_state) == bits(state.outer_state)
  assert bits(ow.center_params(after, start)) == bits(ow.center_params(state, start))


@pytest.mark.parametrize("policy", ["reset", "average"])
def test_inner_states_of_the_absent(policy):
  """Workers continue alone with absent="keep", and all do if no worker participates."""
  momentum = optax.sgd(0.1, momentum=0.5)
  grads, weights = jnp.float32([1.0, 2.0, 6.0]), jnp.float32([1.0, 3.0, 0.0])
  for absent, expected in (
    ("pull", [0.0] * 3 if policy == "reset" else [1.75] * 3),
    ("keep", [0.0, 0.0, 6.0] if policy == "reset" else [1.75, 1.75, 6.0]),
  ):
    tx = ow.local_steps(momentum, AXIS, communication_period=1, inner_state=policy, absent=absent)
    state = ow.stack_workers(tx.init(jnp.float32(0.0)), 3)
    update = ow.map_workers(lambda g, s, p, w: tx.update(g, s, p, participation=w), AXIS)  # noqa: B023
    for given, wanted in ((weights, expected), (jnp.zeros(3), grads)):
      _, after = jax.jit(update)(grads, state, jnp.zeros(3), given)
      np.testing.assert_allclose(after.inner_state[0].trace, wanted, rtol=1e-6)


def steps_of(tx, participation, grads, num_workers=2):
  """The state after some steps from 0, with these weights and gradients."""
  params, state = jnp.zeros(num_workers), ow.stack_workers(tx.init(jnp.float32(0.0)), num_workers)
  update = jax.jit(ow.map_workers(lambda g, s, p, w: tx.update(g, s, p, participation=w), AXIS))
  for weights, grad in zip(participation, grads):
    updates, state = update(jnp.float32(grad), state, params, jnp.float32(weights))
    params = params + updates
  return params, state


@pytest.mark.parametrize("absent", ["pull", "keep"])
def test_the_inner_state_belongs_to_the_exchange_that_arrives(absent):
  """Participation at sending counts, not at arrival."""
  tx = ow.local_steps(
    optax.sgd(0.1, momentum=0.5),
    AXIS,
    communication_period=2,
    delay=1,
    inner_state="reset",
    absent=absent,
  )
  weights = [[1, 1], [1, 0], [0, 1]]  # sent in the second step, arrived in the third
  _, state = steps_of(tx, weights, np.ones((3, 2)))
  expected = [0.0, 0.0] if absent == "pull" else [0.0, 1.75]
  np.testing.assert_allclose(state.inner_state[0].trace, expected)


def test_the_inner_state_is_reset_at_the_arrival_of_each_fragment():
  options = {"communication_period": 2, "fragments": {"a": 0, "b": 1}, "inner_state": "reset"}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.5), None, **options)
  params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
  state, grads = tx.init(params), {"a": jnp.ones(1), "b": jnp.ones(1)}
  for _ in range(2):  # one fragment is due, and then the other
    _, state = tx.update(grads, state, params)
    for trace in jax.tree.leaves(state.inner_state):
      np.testing.assert_array_equal(trace, [0.0])


@pytest.mark.parametrize("policy", ["reset", "average"])
def test_what_is_not_finite_settles_no_inner_state(policy):
  options = {"communication_period": 1, "inner_state": policy}
  tx = ow.local_steps(optax.sgd(0.1, momentum=0.5), AXIS, **options)
  # No worker is left: nothing changes.
  _, state = steps_of(tx, [[1, 1]], [[np.nan, np.inf]])
  np.testing.assert_array_equal(state.inner_state[0].trace, [np.nan, np.inf])
  # A worker that was lost before, although its momentum is finite.
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  _, state = update(jnp.float32([1.0, 100.0]), state, jnp.float32([0.0, np.nan]))
  np.testing.assert_array_equal(state.inner_state[0].trace, [0.0 if policy == "reset" else 1.0] * 2)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("overflown", [[0], [0, 1]])
def test_an_inner_state_that_is_not_finite_is_in_no_average(overflown):
  """With Adam: an infinite second moment makes zero updates, so that the variables stay finite."""
  options = {"communication_period": 1, "inner_state": "average"}
  tx = ow.local_steps(optax.adam(0.1, b2=0.5), AXIS, **options)
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  adam = state.inner_state[0]
  nu = adam.nu.at[jnp.array(overflown)].set(jnp.inf)
  state = state.replace(inner_state=(adam._replace(nu=nu), *state.inner_state[1:]))
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  _, after = update(jnp.float32([3.0, 4.0]), state, jnp.zeros(2))
  expected = [8.0, 8.0] if len(overflown) == 1 else [np.inf, np.inf]
  np.testing.assert_array_equal(after.inner_state[0].nu, expected)


@pytest.mark.optax_promotes
def test_a_field_is_averaged_at_its_own_exchanges_whoever_decides_them():
  """The caller decides, and nothing is sent in between; a checkpoint does not restart the count."""
  tx = ow.local_steps(
    optax.chain(optax.clip(10.0), optax.adam(0.1)),
    AXIS,
    communication_period=None,
    inner_state={"mu": 2, "nu": 3},
  )
  params, state = jnp.zeros(2), ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  sharded = ow.map_workers(
    lambda g, s, p: tx.update(g, s, p, exchange=False), AXIS, mesh=mesh_of(2)
  )
  text = jax.jit(sharded).lower(params, state, params).compile()
  assert not ow.inspect.compiled_collectives(text)
  update = jax.jit(ow.map_workers(lambda g, s, p: tx.update(g, s, p, exchange=True), AXIS))
  for count in range(1, 7):
    _, state = update(jnp.float32([1.0, 3.0]), state, params)
    state = serialization.from_bytes(state, serialization.to_bytes(state))
    adam = state.inner_state[1][0]
    assert (adam.mu[0] == adam.mu[1]) == (count % 2 == 0), count
    assert (adam.nu[0] == adam.nu[1]) == (count % 3 == 0), count


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"inner_state": {None: 3}}, TypeError, "must have names of fields, got None"),
    ({"inner_state": {"m": 3}}, ValueError, r"which are \['mu', 'nu'\]; got 'm'"),
    ({"inner_state": {"mu": 0}}, ValueError, r"inner_state\['mu'\] must be at least 1, got 0"),
    ({"inner_state": {"mu": 2}, "fragments": 2}, ValueError, "fragments=1 and delay=0, got 2"),
    ({"inner_state": {"mu": 2}, "delay": 1, "pull": 0.5}, ValueError, "delay=0, got 1 and 1"),
  ],
)
def test_fields_that_cannot_be_averaged(options, error, match):
  with pytest.raises(error, match=match):
    ow.local_steps(optax.adam(0.1), AXIS, **options).init({"a": jnp.zeros(2), "b": jnp.zeros(2)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Encoder:
  """Parameters with names of moments."""

  mu: Any
  w: Any


@pytest.mark.optax_promotes
def test_a_field_is_the_optimizers_and_not_a_variable_of_its_name():
  params = Encoder(jnp.zeros(2), jnp.zeros(2))
  tx = ow.local_steps(optax.adam(0.1), AXIS, communication_period=1, inner_state={"mu": 1})
  params, state = ow.stack_workers((params, tx.init(params)), 2)
  grads = jnp.array([[1.0, 1.0], [3.0, 3.0]])
  _, state = ow.map_workers(tx.update, AXIS)(Encoder(grads, grads), state, params)
  adam = state.inner_state[0]
  for mu, nu in ((adam.mu.mu, adam.nu.mu), (adam.mu.w, adam.nu.w)):
    np.testing.assert_allclose(mu, 0.1 * 2 * np.ones((2, 2)), rtol=1e-6)
    np.testing.assert_allclose(nu, 1e-3 * grads**2, rtol=1e-6)
  with pytest.raises(ValueError, match=r"which are \['trace'\]; got 'mu'"):
    tx = ow.local_steps(optax.sgd(0.1, momentum=0.9), AXIS, inner_state={"mu": 1})
    tx.init(Encoder(jnp.zeros(2), jnp.zeros(2)))


def test_no_fields_are_none():
  tx = ow.local_steps(
    optax.adam(0.1), None, communication_period=None, outer=optax.sgd(1.0), inner_state={}
  )
  x = jnp.zeros(2)
  ow.exchange.message(tx, tx.init(x), x, sender="a")


def test_weights_that_overflow_are_seen():
  tx = ow.local_steps(optax.sgd(1.0), AXIS, communication_period=1)
  params, _ = steps_of(tx, [[3e38, 3e38]], [[1e-3, 2e-3]])
  assert np.isnan(params).all()


def test_a_weight_for_each_device_of_a_worker_is_an_error():
  tx = ow.diloco(ow.cross_shard(optax.sgd(1.0), "chip"), "pod", communication_period=1)
  mesh = jax.make_mesh((2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2)
  state = tx.init(jnp.float32(0.0))

  def step(grads, weights):
    params = ow.per_shard(jnp.float32(0.0), "pod")
    return tx.update(grads[0], state, params, participation=weights[0])[0][None]

  over = PartitionSpec(("pod", "chip"))
  with pytest.raises(
    ValueError,
    match=r"participation, one weight of a worker, differs from shard to shard over.*chip.*Sum",
  ):
    jax.shard_map(step, mesh=mesh, in_specs=over, out_specs=over)(jnp.ones(4), jnp.ones(4))


@pytest.mark.parametrize("divided", [False, True])
def test_an_outer_optimizer_may_hold_what_it_likes(divided):
  """Injected numbers, and initial parameters, which share no buffer with ours."""
  outers = [optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)]
  if not divided:
    outers += [optax.apply_if_finite(optax.sgd(0.5), 3), optax.contrib.dog(1.0)]
  for outer in outers:
    options = {"outer": outer, "shard_center": divided}
    tx = ow.local_steps(optax.sgd(1.0), AXIS, communication_period=1, **options)
    params = jnp.zeros((2, 3))
    state = ow.stack_workers(tx.init(params[0]), 2)
    update = jax.jit(ow.map_workers(tx.update, AXIS), donate_argnums=1)
    updates, state = update(jnp.ones((2, 3)), state, params)
    assert np.isfinite(updates).all() and (np.asarray(updates) < 0).all()
    if outer is outers[0]:
      np.testing.assert_allclose(updates, -0.5 * np.ones((2, 3)))


# State.


def test_a_center_of_bfloat16_parameters_moves_and_its_residual_is_nobodys_doing():
  """In bfloat16, steps of 1e-4 at 1 would be lost. And D is relative to the center as the worker
  received it: the rounding of the center does not enter the momentum."""
  tx = ow.local_steps(
    optax.sgd(1.0), AXIS, communication_period=1, outer=optax.sgd(0.01, momentum=0.9)
  )
  params = jnp.ones(2, jnp.bfloat16)
  state = tx.init(params[0])
  assert state.center.dtype == state.outer_state[0][0].trace.dtype == jnp.float32
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  state = ow.stack_workers(state, 2)
  for grad in (2.0**-7, 0.0, 0.0):  # one step of bfloat16 at 1
    updates, state = update(jnp.full(2, grad, jnp.bfloat16), state, params)
    params = optax.apply_updates(params, updates)
  step = 2.0**-7 * 0.01
  np.testing.assert_allclose(state.center, 1 - step * (1 + 0.9 + 0.81), rtol=1e-7)
  np.testing.assert_array_equal(params.astype(jnp.float32), [1.0, 1.0])


@pytest.mark.parametrize(
  "options", [{}, {"delay": 1, "pull": 0.5}, {"codec": ow.codecs.quantize(4)}]
)
def test_no_rounding_is_a_conversion_there_and_back(options):
  """XLA removes these on a GPU; the center's rounding would then enter the momentum."""
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=2, **options)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jnp.ones((2, 3), jnp.bfloat16)
  state = ow.stack_workers(tx.init(params[0]), 2)
  text = str(jax.make_jaxpr(ow.map_workers(step, AXIS))(params, state, params))
  convert = r"= convert_element_type\[[^\]]*\] (\w+)"
  narrow = {name for name, _ in re.findall(rf"(\w+):bf16\[[^\]]*\] {convert}", text)}
  back = set(re.findall(rf":f32\[[^\]]*\] {convert}", text))
  assert narrow and not narrow & back


@pytest.mark.parametrize("outer", [None, optax.sgd(0.7, momentum=0.9, nesterov=True)])
def test_a_step_and_an_exchange_in_one_program_round_as_apart(outer):
  """In bfloat16, where XLA computes a sum in float32 and may not round it in between."""
  tx = ow.local_steps(optax.sgd(0.37), AXIS, communication_period=None, outer=outer)
  rng = np.random.default_rng(0)
  params = jnp.asarray(np.repeat(rng.normal(size=(1, 5000)), 3, 0), jnp.bfloat16)
  state = ow.stack_workers(tx.init(params[0]), 3)
  grads = jnp.asarray(0.05 * rng.normal(size=params.shape), jnp.bfloat16)

  def step(params, state, grads):
    for exchange in (False, True):
      updates, state = tx.update(None if exchange else grads, state, params, exchange=exchange)
      params = optax.apply_updates(params, updates)
    return params, state

  together = jax.jit(ow.map_workers(step, AXIS))(params, state, grads)[0]
  apart = ow.map_workers(step, AXIS)(params, state, grads)[0]
  assert (np.asarray(together != apart)).sum() <= 15  # of 15,000: sums may be fused differently


def test_a_narrow_synchronization_has_the_derivative_of_a_wide_one():
  tx = ow.diloco(optax.sgd(1.0), AXIS, communication_period=1)

  def end(scale, dtype):
    def worker(number):
      params = jnp.ones(3, dtype)
      state = tx.init(params)
      for _ in range(2):
        grads = (scale * jnp.arange(1.0, 4.0) * (number + 1)).astype(dtype)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
      return params.astype(jnp.float32).sum()

    return jax.vmap(worker, axis_name=AXIS)(jnp.arange(2.0)).mean()

  slope = jax.jit(jax.grad(end), static_argnums=1)
  wide, *narrow = (slope(0.1, d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
  assert wide < -20
  np.testing.assert_allclose(narrow, [wide, wide], rtol=0.01)


def test_workers_are_exactly_at_the_center_after_an_exchange():
  """Not `x + (c - x)`, which rounds to another number: here for a worker that starts at 0."""
  rng = np.random.default_rng(0)
  tx = ow.diloco(optax.sgd(1.0), AXIS, communication_period=1)
  params = jnp.zeros((4, 1000))
  state = ow.stack_workers(tx.init(params[0]), 4)
  grads = jnp.asarray(rng.normal(size=(4, 1000)), jnp.float32)
  updates, state = jax.jit(ow.map_workers(tx.update, AXIS))(grads, state, params)
  assert bits(params + updates) == bits(jnp.tile(state.center, (4, 1)))


def test_variables_that_take_no_part():
  """Integers and variables without an update stay, and the others continue."""
  params = {"a": jnp.ones(2), "count": jnp.int32(3), "frozen": jnp.ones(1)}
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=1)
  state = ow.stack_workers(tx.init(params), 2)
  params = ow.stack_workers(params, 2)
  grads = {"a": jnp.float32([[1, 1], [3, 3]]), "count": None, "frozen": None}
  updates, state = jax.jit(ow.map_workers(tx.update, AXIS))(grads, state, params)
  assert updates["count"] is None and updates["frozen"] is None
  np.testing.assert_allclose(params["a"] + updates["a"], np.full((2, 2), 1 - 1.33 * 0.2), rtol=1e-6)
  assert int(state.center["count"]) == 3 and float(state.center["frozen"][0]) == 1.0


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  "name",
  ["Streaming DiLoCo", "FedAdam, Optax", "local SGD", "eager updates", "asynchronous local SGD"],
)
def test_saved_in_the_middle_of_a_round_and_restored_it_goes_on_bit_for_bit(name):
  tx, task = ROWS[name].tx(optax.adam(0.1), 3), problem(3)
  state = tx.init(split(task.start))
  params, state = ow.stack_workers(split(task.start), 3), ow.stack_workers(state, 3)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  resumed = None
  for t in range(STEPS):
    if t == 7:
      saved = serialization.to_bytes((params, state))
      resumed = serialization.from_bytes(jax.tree.map(jnp.zeros_like, (params, state)), saved)
    grads = split(task.grad(t, np.asarray(joined(params))))
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    if resumed:
      updates, own = update(grads, resumed[1], resumed[0])
      resumed = optax.apply_updates(resumed[0], updates), own
  assert bits(resumed) == bits((params, state))


def test_an_outer_optimizer_may_tell_variables_apart_by_their_names():
  """The outer optimizer receives the parameters' structure, also for a fragment."""
  outer = optax.partition(
    {"fast": optax.sgd(1.0), "still": optax.set_to_zero()},
    lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: "still" if "b" in jax.tree_util.keystr(path) else "fast", params
    ),
  )
  for fragments in (1, {"a": 0, "b": 1}):
    tx = ow.local_steps(
      optax.sgd(1.0), None, communication_period=2, outer=outer, fragments=fragments
    )
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    state = tx.init(params)
    for _ in range(2):
      updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
      params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(state.center["b"], [0.0, 0.0])
    # As a separate fragment, "a" is exchanged after the first of the two steps.
    np.testing.assert_array_equal(state.center["a"], [-2.0 if fragments == 1 else -1.0] * 2)


# Instead of the mean.


@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_a_merge_takes_the_place_of_the_mean(context):
  """A clip of each worker's own difference, and a radial mean. A NaN of an absent worker reaches
  neither."""
  grads = np.float32([[3, 4], [0.3, 0.4], [0, 2], [np.nan, 0]])
  weights = np.float32([1, 2, 1, 0])
  norms = np.linalg.norm(grads, axis=1, keepdims=True)
  clipped = grads[:3] / np.maximum(norms[:3], 1)
  mean = np.average(clipped, axis=0, weights=weights[:3])
  direction = np.average(grads[:3] / norms[:3], axis=0, weights=weights[:3])
  radial = (
    np.average(norms[:3], axis=0, weights=weights[:3]) * direction / np.linalg.norm(direction)
  )
  clip = optax.chain(optax.clip_by_global_norm(1.0), ow.all_reduce(AXIS))
  plain = optax.stateless(lambda updates, _: jax.lax.psum(updates, AXIS))  # takes no weights
  total = grads[:3].sum(0)
  for merge, expected in ((clip, mean), (ow.reductions.radial_mean(AXIS), radial), (plain, total)):
    tx = ow.local_steps(
      optax.sgd(1.0), AXIS, communication_period=1, outer=optax.sgd(1.0), reduction=merge
    )
    state = tx.init(jnp.zeros(2))
    axes = ow.worker_axes(state)

    def step(grads, state, params, weight):
      return tx.update(grads, state, params, participation=weight)  # noqa: B023

    updates, after = in_context(context, step, 4, (0, axes, 0, 0), (0, axes))(
      jnp.asarray(grads), ow.stack_workers(state, 4), jnp.zeros((4, 2)), jnp.asarray(weights)
    )
    np.testing.assert_allclose(updates, np.tile(-expected, (4, 1)), rtol=1e-5)
    np.testing.assert_allclose(after.center, -expected, rtol=1e-5)


def test_the_penalty_has_left_out_some_and_once_all():
  """In the row of EDiT; otherwise it would not discriminate."""
  shares = []
  for num_workers in (1, 2, 3, 4):
    task, numbers = problem(num_workers), EDIT | {"outliers": []}
    ref.edit(task.start, task.grad, STEPS, ref.Adam(0.03), num_workers=num_workers, **numbers)
    shares.append(np.mean(numbers["outliers"], axis=1))
  assert [(one == 1).any() for one in shares] == [True, True, False, False]
  assert all(((one > 0) & (one < 1)).any() for one in shares[2:])


@pytest.mark.parametrize(("warmup", "threshold"), [(5, 1.0), (12, 0.3)])
def test_the_penalty_leaves_out_what_its_detector_does(warmup, threshold):
  """For one worker, whose lengths have heavy tails; what is not left out is clipped at 2."""
  lengths = np.random.default_rng(warmup).pareto(1.5, 200).astype(np.float32) + 0.1
  tx = ow.reductions.penalty(None, clip=2.0, threshold=threshold, warmup=warmup, decay=0.05)
  detector, expected = ref._Detector(0.05, warmup, threshold), []
  spreads = 0
  for n in map(float, lengths):
    spreads += detector.count >= warmup and np.std(detector.scores[-warmup:], ddof=1) > 1
    expected.append(0 if detector.is_outlier(n) else min(n, 2 * n / (n + 1e-6)))
    detector.update(n)
  state, found = jax.lax.scan(lambda s, n: tx.update(n, s)[::-1], tx.init(lengths[0]), lengths)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert 5 < np.sum(np.array(expected) == 0) < 100 and spreads > 20
  np.testing.assert_allclose([state.mean, state.variance], [detector.mean, detector.m2], rtol=1e-4)
  restored = serialization.from_bytes(state, serialization.to_bytes(state))
  assert_close(restored, state, rtol=0)


def test_a_length_that_overflows_does_not_switch_a_detector_off():
  tx = ow.reductions.penalty(None, warmup=5, clip=1e30)
  state, found = tx.init(jnp.zeros(())), []
  for length in [1.0, 1.1] * 10 + [50.0, 3e20] + [1.0, 1.1] * 10 + [50.0]:
    update, state = tx.update(jnp.float32(length), state)
    found.append(float(update))
  assert found[20] == found[21] == found[-1] == 0 and found[-2] > 1


def test_a_penalty_has_the_derivative_of_its_weights():
  """Decisions have no derivative; a worker that has not moved is left out, and its derivative is
  zero."""
  mean = ow.reductions.penalty(AXIS, clip=1.5)

  def loss(d):
    return jnp.sum(jax.vmap(lambda d: mean.update(d, mean.init(d))[0], axis_name=AXIS)(d)[0] ** 3)

  def plain(d):
    lengths = np.linalg.norm(d, axis=1)
    shares = np.where(lengths > 0, np.exp(-lengths), 0)
    merged = shares @ d / shares.sum()
    return np.sum((merged * min(1, 1.5 / (np.linalg.norm(merged) + 1e-6))) ** 3)

  with jax.enable_x64(True):
    d = np.array([[3.0, 0.5], [0.2, 1.0], [0.0, 0.0]])
    found = np.asarray(jax.jit(jax.grad(loss))(d))
  for i, j in np.ndindex(2, 2):
    step = np.zeros_like(d)
    step[i, j] = 1e-6
    slope = (plain(d + step) - plain(d - step)) / 2e-6
    np.testing.assert_allclose(found[i, j], slope, rtol=1e-6)
  np.testing.assert_array_equal(found[2], 0)


def test_who_has_no_weight_is_not_the_shortest_of_a_penalty():
  mean = ow.reductions.penalty(AXIS, clip=1e9)
  reduce = jax.vmap(lambda d, w: mean.update(d, mean.init(d), weight=w)[0], axis_name=AXIS)
  found = jax.jit(reduce)(jnp.array([1.0, 1000.0, 1000.0]), jnp.array([0.0, 1.0, 1.0]))
  np.testing.assert_allclose(found, [1000.0] * 3)


@pytest.mark.parametrize("with_weights", [True, False])
def test_who_is_absent_or_lost_is_not_in_the_penalty(with_weights):
  """Lengths 1 and 2, and a NaN, whose zeros would be the shortest. Temperature 2."""
  tx = ow.local_steps(
    optax.sgd(1.0),
    AXIS,
    communication_period=1,
    outer=optax.sgd(1.0),
    reduction=ow.reductions.penalty(AXIS, temperature=2.0),
  )
  params, state = jnp.zeros(3), ow.stack_workers(tx.init(jnp.float32(0.0)), 3)
  extra = {"participation": jnp.float32([3.0, 1.0, 1.0])} if with_weights else {}
  update = ow.map_workers(lambda g, s, p, e: tx.update(g, s, p, **e), AXIS)
  _, state = jax.jit(update)(jnp.float32([1.0, 2.0, np.nan]), state, params, extra)
  shares = np.array([3.0 if with_weights else 1.0, 1.0]) * np.exp(-np.array([1.0, 2.0]) / 2)
  np.testing.assert_allclose(state.center, -shares @ [1.0, 2.0] / shares.sum(), rtol=1e-6)
  np.testing.assert_array_equal(state.reduction_state[0].count, [1, 1, 0])


@pytest.mark.parametrize(
  "options", [{"clip": 0.0}, {"threshold": 0}, {"warmup": 1}, {"decay": 1.0}, {"temperature": -1}]
)
def test_a_penalty_that_cannot_be(options):
  (name,) = options
  with pytest.raises(ValueError, match=f"penalty: {name} must be"):
    ow.reductions.penalty(AXIS, **options)


@pytest.mark.parametrize("delay", [0, 1])
def test_who_is_absent_or_lost_is_in_no_sparse_average_and_stays(delay):
  """All entries of four workers: the third is absent, and the fourth has a NaN."""
  rule = ow.exchange.SparseAverage(1.0)
  options = {"communication_period": 2, "delay": delay}
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, **options)
  grads = [[-1.0, -3.0, 5.0, np.nan]] * 2 + [[0.0] * 4]
  weights = [[1.0, 3.0, 0.0, 1.0]] * 3
  params, state = steps_of(tx, weights, grads, num_workers=4)
  np.testing.assert_allclose(params, [5.0, 5.0, -10.0, np.nan])  # (1 * 2 + 3 * 6) / 4
  assert np.asarray(state.kept[0].round).tolist() in (1, [1] * 4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sparse_average_is_whole_where_a_center_would_be_divided(dtype):
  """All entries, also with 64 bits and strict promotion."""
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    tx = ow.exchange.periodic_exchange(
      optax.sgd(1.0),
      AXIS,
      ow.exchange.SparseAverage(1.0),
      communication_period=1,
      shard_center=True,
    )
    x = np.arange(16, dtype=dtype).reshape(4, 4)
    state = ow.stack_workers(tx.init(x[0]), 4)
    updates, _ = jax.jit(ow.map_workers(tx.update, AXIS))(np.zeros_like(x), state, x)
    assert updates.dtype == dtype
    np.testing.assert_allclose(x + updates, [[6, 7, 8, 9]] * 4)


def test_the_entries_of_a_sparse_average_are_drawn_anew_and_alike():
  """One of every two neighbors; in 40 exchanges each of them about 20 times."""
  rule = ow.exchange.SparseAverage(0.5, seed=3)
  found = np.stack([drawn(rule, count) for count in range(40)])
  a, b, rest = found[:, :2], found[:, 2:4], found[:, 4:]
  assert (a.sum(1) == 1).all() and (b.sum(1) == 1).all()
  assert (found.sum(0) >= 8).all() and (rest.sum(0) <= 32).all()
  others = [drawn(ow.exchange.SparseAverage(0.5, seed=4), count) for count in range(4)]
  assert (np.stack(others) != found[:4]).any()


@pytest.mark.parametrize(("options", "what"), [((0.0,), "fraction"), ((0.5, -1), "seed")])
def test_a_sparse_average_of_nothing(options, what):
  with pytest.raises(ValueError, match=f"SparseAverage: {what} must be"):
    ow.exchange.SparseAverage(*options)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_who_has_a_nan_starts_its_eager_round_again(dtype, divided):
  """Three workers; the second comes back. Also with 64 bits and strict promotion."""
  with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("strict"):
    rule = ow.exchange.Eager(optax.sgd(1.0))
    options = {"communication_period": 1, "shard_center": divided}
    tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, **options)
    x = jnp.zeros((3, 3), dtype)
    state = ow.stack_workers(tx.init(x[0]), 3)
    update = jax.jit(ow.map_workers(tx.update, AXIS))
    found = []
    for grads in ([3.0, np.nan, 6.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
      updates, state = update(jnp.tile(jnp.asarray(grads, dtype)[:, None], 3), state, x)
      x = x + updates
      found.append(np.asarray(x)[:, 0])
    assert x.dtype == dtype
  # A third of the worker's own difference at once; then the mean of the participants, minus what
  # has counted before.
  np.testing.assert_allclose(found, [[-1.0, 0, -2], [-4.5, -4.5, -4.5], [-4.5, -4.5, -4.5]])


@pytest.mark.parametrize("resized", [([0, 3],), ([0, 1, 2, 3], 1)])
def test_eager_workers_meet_again_when_there_are_others(resized):
  """The counted part of a difference is subtracted in the parts in which it counted."""
  rule = ow.exchange.Eager(optax.sgd(1.0))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  x, state = ow.stack_workers((jnp.zeros(1), tx.init(jnp.zeros(1))), 4)
  updates, state = update(jnp.array([[1.0], [2.0], [4.0], [8.0]]), state, x)
  x, state = ow.resize_workers((x + updates, state), *resized)
  updates, state = update(jnp.zeros_like(x), state, x)
  np.testing.assert_allclose(x + updates, np.full((len(x), 1), -3.75))


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", ["vmap", *CONTEXTS])
def test_asynchronous_rounds_of_equal_duration_are_diloco_bit_for_bit(context):
  """Rates and momentum are powers of two, whose products every compiler rounds equally."""
  task, options = problem(4), {"communication_period": PERIOD}
  outer = optax.sgd(0.5, momentum=0.5, nesterov=True)
  rule = ow.exchange.Asynchronous(outer, (1,) * 4, ow.staleness.polynomial())
  inner = optax.adam(0.03)
  found, state = run(ow.exchange.periodic_exchange(inner, AXIS, rule, **options), task, context)
  rates = {"outer_learning_rate": 0.5, "outer_momentum": 0.5}
  expected, same = run(ow.diloco(inner, AXIS, **options, **rates), task, context)
  assert bits(found) == bits(expected)
  assert bits(ow.center_params(state)) == bits(ow.center_params(same))


def test_who_is_lost_or_absent_when_its_round_ends_goes_to_the_center():
  """The second worker, in the second exchange; the third of three continues all the while."""
  rule = ow.exchange.Asynchronous(optax.sgd(1.0), (1, 2, 3))
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


def test_an_asynchronous_worker_that_is_lost_begins_anew_though_nobody_is_heard():
  rule = ow.exchange.Asynchronous(optax.sgd(1.0), (1, 3))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  for lost, weight in ((np.nan, 1.0), (-1.0, 0.0)):
    params, _ = steps_of(tx, [[1.0, 1.0], [weight, 1.0]], [[-1.0, -1.0], [lost, -1.0]])
    np.testing.assert_allclose(params, [1.0, 2.0])
    grads = [[-1.0, -1.0], [lost, -1.0], [0.0, -3.0]]
    params, _ = steps_of(tx, [[1.0, 1.0], [weight, 1.0], [1.0, 1.0]], grads)
    np.testing.assert_allclose(params, [3.5, 3.5])  # 1, and the mean of 0 and 5


def test_an_asynchronous_worker_that_joins_is_not_late():
  rule = ow.exchange.Asynchronous(optax.sgd(1.0), (1, 1), ow.staleness.inverse())
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
def test_asynchronous_workers_may_begin_in_a_program_and_be_donated(check):
  rule = ow.exchange.Asynchronous(optax.sgd(1.0), (1, 2))
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
def test_arguments_of_asynchronous_workers(arguments, error):
  with pytest.raises((TypeError, ValueError)) as caught:
    ow.exchange.Asynchronous(*arguments)
  assert re.match(error, f"{caught.type.__name__}: {caught.value}")


def test_durations_are_of_these_workers():
  rule = ow.exchange.Asynchronous(optax.sgd(1.0), (1, 2, 3))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  with pytest.raises(ValueError, match=r"durations must have one for each of 2 workers, got \(1,"):
    steps_of(tx, [[1.0, 1.0]], [[1.0, 1.0]])
  late = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=2, delay=1)
  with pytest.raises(NotImplementedError, match="Asynchronous: this rule has no delay"):
    late.init(jnp.zeros(()))


def test_pairs_are_drawn_again_and_repeat():
  found = [partners(8, count).tolist() for count in range(6)]
  assert len({tuple(one) for one in found[:3]}) == 3
  assert found[3:] == found[:3]


def test_who_is_lost_or_absent_leaves_its_partner_alone():
  """Two workers; the absent one returns to its center, and participates in the next round."""
  rule = ow.exchange.Pairs(0.0, 1.0, 0.5)
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  for lost, weights in ((np.nan, [1.0, 1.0]), (-6.0, [1.0, 0.0])):
    grads, given = [[-2.0, lost], [-2.0, -4.0]], [weights, [2.0, 3.0]]
    params, _ = steps_of(tx, given[:1], grads[:1])
    np.testing.assert_allclose(params, [2.0, 0.0])
    params, _ = steps_of(tx, given, grads)
    np.testing.assert_allclose(params, [4.5, 3.5])  # (2 + 4) / 2 on, and halfway to the mean


def test_an_eager_round_has_no_participation():
  rule = ow.exchange.Eager(optax.sgd(1.0))
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  with pytest.raises(ValueError, match="Eager: there is no participation"):
    steps_of(tx, [[1.0, 0.0]], [[1.0, 1.0]])
  late = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=2, delay=1)
  with pytest.raises(NotImplementedError, match="Eager: this rule has no delay"):
    late.init(jnp.zeros(()))
  for options, what in (
    ({"momentum": 1.0}, "momentum"),
    ({"learning_rate": -1.0}, "learning_rate"),
    ({"consensus": 1.5}, "consensus"),
    ({"num_pairings": 0}, "num_pairings"),
  ):
    with pytest.raises(ValueError, match=f"Pairs: {what} must be"):
      ow.exchange.Pairs(**options)
  with pytest.raises(TypeError, match=r"Eager: outer must be an optax\.GradientTransformation"):
    ow.exchange.Eager(0.7)


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
def test_a_radial_mean_has_the_length_that_the_workers_have(context):
  """Differences at right angles, in bfloat16; none, and two that cancel, give zero."""
  mean = ow.reductions.radial_mean(AXIS)

  def reduce(x):
    return mean.update(x, mean.init(x))[0]

  x = {
    "right": jnp.array([[6, 0], [0, 2]], jnp.bfloat16),
    "none": jnp.zeros((2, 3)),
    "opposite": jnp.array([[1.0], [-3.0]]),
    "huge": jnp.array([[1e30, 0.0], [0.0, 1e30]]),
    "rounded": jnp.array([[1.0, 2.0, 3.0], [-0.7, -1.4, -2.1]]),
    "complex": jnp.array([[3j, 0], [1j, 0]], jnp.complex64),
  }
  found = in_context(context, reduce, 2, (0,), 0)(x)
  assert found["right"].dtype == jnp.bfloat16
  half = np.sqrt(0.5)
  for name, expected in {
    "right": [4 * half] * 2,
    "none": [0.0] * 3,
    "opposite": [0.0],
    "huge": [1e30 * half] * 2,
    "rounded": [0.0] * 3,
    "complex": [2j, 0],
  }.items():
    one = np.asarray(found[name], np.complex64 if name == "complex" else np.float32)
    np.testing.assert_allclose(one, [expected] * 2, rtol=4e-3 if name == "right" else 1e-6)


def test_the_state_of_a_merge_is_a_workers_own_and_waits_while_it_is_absent():
  """Error feedback: half is sent, and the rest is added to the next exchange."""

  def cut():
    def update(updates, state, params=None):
      half = jax.tree.map(lambda u, s: (u + s) / 2, updates, state)
      return half, half

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)

  tx = ow.local_steps(
    optax.sgd(1.0),
    AXIS,
    communication_period=1,
    outer=optax.sgd(1.0),
    reduction=optax.chain(cut(), ow.all_reduce(AXIS, reduction="sum")),
  )
  params, state = jnp.zeros(2), ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  update = jax.jit(ow.map_workers(lambda g, s, p, w: tx.update(g, s, p, participation=w), AXIS))
  for weights, residual, center in (
    ([1.0, 1.0], [0.5, 1.0], -1.5),
    ([1.0, 0.0], [0.75, 1.0], -2.25),
    ([1.0, 1.0], [0.875, 1.5], -4.625),
  ):
    updates, state = update(jnp.float32([1.0, 2.0]), state, params, jnp.float32(weights))
    params = params + updates
    np.testing.assert_allclose(state.reduction_state[0][0], residual, atol=1e-6)
    assert float(state.center) == center


# Bad input.


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"communication_period": 0}, ValueError, "communication_period must be at least 1, got 0"),
    ({"communication_period": 2.5}, TypeError, "communication_period must be a Python int"),
    ({"communication_period": lambda step: 0}, ValueError, "must return at least 1; got 0"),
    ({"communication_period": lambda step: 2.5}, TypeError, "must return an integer scalar"),
    ({"communication_period": lambda step: jnp.ones(2, int)}, TypeError, "an integer scalar"),
    ({"delay": 11}, ValueError, "delay must be at most communication_period, 10 steps"),
    ({"delay": 10}, ValueError, "delay must be below communication_period, 10 steps, with pull=1"),
    ({"delay": -1}, ValueError, "delay must be at least 0"),
    ({"warmup_steps": 1}, TypeError, "no argument 'warmup_steps': train with cross_shard"),
    ({"merge": None}, TypeError, "no argument 'merge': pass reduction="),
    ({"pull": 1.5}, ValueError, r"pull must be in \[0, 1\], got 1.5"),
    ({"fragments": 0}, ValueError, "fragments must be at least 1"),
    ({"fragments": 11}, ValueError, "fragments must be at most communication_period"),
    ({"fragments": {"a": 0, "b": 2}}, ValueError, "number the fragments from 0, every number used"),
    ({"inner_state": "fresh"}, ValueError, "inner_state must be one of 'keep', 'reset', 'average'"),
    ({"absent": "drop"}, ValueError, "absent must be one of 'pull', 'keep'"),
    ({"reduction": "median"}, ValueError, "reduction must be one of 'mean', 'sum'"),
    ({"reduction": "sum"}, ValueError, "needs an outer optimizer"),
    ({"shard_center": True}, ValueError, "shard_center needs an outer optimizer"),
    ({"reduction": optax.identity()}, ValueError, "needs an outer optimizer"),
    ({"reduction": ow.reductions.median()}, ValueError, "needs an outer optimizer"),
    ({"outer": optax.sgd}, TypeError, r"outer must be an optax.GradientTransformation.*Call it"),
    (
      {"outer": optax.sgd(1.0), "reduction": optax.identity(), "shard_center": True},
      ValueError,
      "only one of these can be used",
    ),
  ],
)
def test_bad_arguments(options, error, match):
  with pytest.raises(error, match=rf"local_steps: .*{match}"):
    ow.local_steps(optax.sgd(0.1), AXIS, **options)


@pytest.mark.parametrize(
  ("outer", "match"),
  [
    (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "treat every element by itself"),
    (optax.adafactor(0.1), "cannot divide outer_state.*v_row"),
    (optax.lamb(0.1), "treat every element by itself"),
  ],
)
@pytest.mark.optax_promotes
def test_an_outer_optimizer_that_cannot_be_divided(outer, match):
  tx = ow.local_steps(optax.sgd(0.1), AXIS, outer=outer, shard_center=True)
  with pytest.raises(ValueError, match=match):
    tx.init({"a": jnp.ones((3, 2))})


def call(tx, params=None, **extra):
  params = jnp.zeros(2) if params is None else params
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  return ow.map_workers(lambda g, s, p: tx.update(g, s, p, **extra), AXIS)(params, state, params)


@pytest.mark.parametrize(
  ("extra", "error", "match"),
  [
    ({"exchange": "yes"}, TypeError, "exchange must be a Python bool, or the numbers"),
    ({"exchange": 1.0}, TypeError, "exchange must be a Python bool"),
    ({"exchange": [0, 1]}, ValueError, "exchange must hold numbers of fragments below 1, got 1"),
    ({"exchange": True, "arrival": True}, ValueError, "arrival needs a delay"),
    ({"participation": -1.0}, ValueError, "participation must be at least 0"),
    ({"participation": 1j}, TypeError, "participation must be real"),
    ({"participation": [1.0, 2.0]}, ValueError, "participation must be a scalar"),
  ],
  ids=str,
)
def test_bad_extra_args(extra, error, match):
  with pytest.raises(error, match=rf"local_steps: {match}"):
    call(ow.local_steps(optax.sgd(0.1), AXIS), **extra)


def test_more_bad_calls():
  tx = ow.local_steps(optax.sgd(0.1), AXIS, outer=optax.sgd(1.0), reduction=optax.identity())
  with pytest.raises(TypeError, match=r"exchange must be a Python bool.*cannot be traced"):
    jax.jit(lambda e: call(tx, exchange=e))(True)
  with pytest.raises(ValueError, match=r"updates is None.*exchange must say"):
    state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
    ow.map_workers(lambda s, p: tx.update(None, s, p), AXIS)(state, jnp.zeros(2))
  with pytest.raises(ValueError, match=r"what reduction returns differs.*all_reduce"):
    state = tx.init(jnp.float32(0.0))
    axes, stacked = ow.worker_axes(state), ow.stack_workers(state, 2)
    in_context("shard_map", tx.update, 2, (0, axes, 0), (0, axes))(
      jnp.zeros(2), stacked, jnp.zeros(2)
    )
  with pytest.raises(ValueError, match="fragments must have the structure of the parameters"):
    ow.local_steps(optax.sgd(0.1), AXIS, fragments={"a": 0, "b": 1}).init({"a": jnp.ones(2)})
  with pytest.raises(ValueError, match=r"params is equal on all workers of \['w'\]"):
    jax.shard_map(
      lambda p: tx.update(p, tx.init(p), p)[0],
      mesh=mesh_of(2),
      in_specs=PartitionSpec(),
      out_specs=PartitionSpec(),
    )(jnp.float32(0.0))
  with pytest.raises(ValueError, match="after an exchange of local SGD all workers"):
    ow.center_params(ow.local_steps(optax.sgd(0.1), None).init(jnp.zeros(2)))
  with pytest.raises(TypeError, match=r"delay must be a Python int.*static_args of inject_hyper"):
    optax.inject_hyperparams(ow.local_steps, static_args="communication_period")(
      optax.sgd(0.1), None, communication_period=2
    ).init(jnp.zeros(2))
  step, batches = lambda p, s, b: (p, s), jnp.zeros((2, 3))
  with pytest.raises(ValueError, match=r"leading axis of communication_period, 4 steps; batches"):
    ow.local_round(step, tx, communication_period=4)(jnp.zeros(2), None, batches)
  with pytest.raises(ValueError, match="delay must be at most communication_period, 4"):
    ow.local_round(step, tx, communication_period=4, delay=5)


def test_a_period_below_one_or_below_the_delay_counts_as_that():
  rounds = ow.local_steps(
    optax.sgd(1.0), None, communication_period=lambda step: 1 - jnp.sign(step), outer=optax.sgd(0.5)
  )
  state, since = rounds.init(jnp.float32(0.0)), []
  for _ in range(3):
    _, state = rounds.update(jnp.float32(1.0), state, jnp.float32(0.0))
    since.append(int(state.since))
  assert since == [0, 0, 0]
  assert float(state.center) == -0.875  # half of the way to -1, three times
  # With a pull of 1, a round of 3 steps would keep none of them: it gets one more.
  for pull, expected in ((0.5, [1, 2, 0, 1, 2, 0]), (1.0, [1, 2, 3, 0, 1, 2])):
    options = {"communication_period": lambda step: 1, "delay": 3, "pull": pull}
    rounds = ow.local_steps(optax.sgd(1.0), None, **options)
    state, since = rounds.init(jnp.float32(0.0)), []
    for _ in range(6):
      _, state = rounds.update(jnp.float32(1.0), state, jnp.float32(0.0))
      since.append(int(state.since))
    assert since == expected


def test_the_step_counter_stops_and_rounds_go_on():
  tx = ow.local_steps(optax.sgd(1.0), None, communication_period=3)
  last = jnp.iinfo(jnp.int32).max
  state = tx.init(jnp.float32(0.0)).replace(step=jnp.int32(last - 1))
  since = []
  for _ in range(5):
    _, state = tx.update(jnp.float32(1.0), state, jnp.float32(0.0))
    since.append(int(state.since))
  assert int(state.step) == last and since == [1, 2, 0, 1, 2]


def test_numbers_may_be_injected():
  static = ("communication_period", "fragments", "delay")
  tx = optax.inject_hyperparams(ow.local_steps, static_args=static)(
    optax.sgd(1.0), AXIS, communication_period=1, outer=optax.sgd(0.5), pull=1.0
  )
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  assert set(state.hyperparams) == {"pull"}
  state.hyperparams["pull"] = jnp.float32(0.5)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  updates, state = update(jnp.float32([-1, -3]), state, jnp.zeros(2))
  np.testing.assert_allclose(ow.center_params(state), 1.0)
  np.testing.assert_allclose(updates, [1.0, 2.0])


def test_gradients_first_as_two_programs():
  """Post-local SGD as in PyTorch: local steps continue from data-parallel training."""
  warmup, num_steps, start = 3, 11, np.float32([1.0, -2.0])
  targets = np.arange(8, dtype=np.float32).reshape(4, 2)

  def gradient(t, x):
    return x - targets * (1 + t % 2)

  inner = optax.sgd(0.1, momentum=0.9)
  first, then = (
    ow.cross_shard(inner, AXIS),
    ow.local_steps(inner, AXIS, communication_period=PERIOD),
  )
  expected, _ = ref.post_local_sgd_gradients(
    start, gradient, num_steps, ref.Momentum(0.1, 0.9), num_workers=4, period=PERIOD, warmup=warmup
  )
  params, state = ow.stack_workers((jnp.asarray(start), first.init(jnp.asarray(start))), 4)
  for t in range(num_steps):
    if t == warmup:
      own = ow.stack_workers(then.init(params[0]), 4)
      state = own.replace(inner_state=state.inner_state)
    update = (first if t < warmup else then).update
    updates, state = ow.map_workers(update, AXIS)(gradient(t, params), state, params)
    params = params + updates
    assert_close(params, expected[t])


def test_numbers_of_diloco_may_be_injected():
  static = ("communication_period", "fragments", "delay")
  tx = optax.inject_hyperparams(ow.diloco, static_args=static)(
    optax.sgd(1.0), AXIS, communication_period=1, outer_learning_rate=0.5, outer_momentum=0.0
  )
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  assert set(state.hyperparams) == {"outer_learning_rate", "outer_momentum", "pull"}
  state.hyperparams["outer_learning_rate"] = jnp.float32(0.25)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  updates, state = update(jnp.float32([-1, -3]), state, jnp.zeros(2))
  np.testing.assert_allclose(ow.center_params(state), 0.5)
  np.testing.assert_allclose(updates, [0.5, 0.5])


@pytest.mark.parametrize("rule", ["median", "geometric_median", "krum"])
def test_a_robust_reduction_of_workers(rule):
  """It receives a weight only if there is a participation."""
  merge = getattr(ow.reductions, rule)(*([1] if rule == "krum" else []))
  tx = ow.local_steps(
    optax.sgd(1.0), AXIS, communication_period=1, outer=optax.sgd(1.0), reduction=merge
  )
  grads = jnp.array([1.0, 2.0, 1.5, 1.7, -900.0])
  params, state = ow.stack_workers((jnp.array(0.0), tx.init(jnp.array(0.0))), 5)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  updates, state = update(grads, state, params)
  assert (np.asarray(updates) == updates[0]).all()
  assert -2.0 <= updates[0] <= -1.0 and (rule != "median" or updates[0] == -1.5)
  mapped = ow.map_workers(lambda g, s, x, p: tx.update(g, s, x, participation=p), AXIS)
  with pytest.raises(ValueError, match="every shard has one vote"):
    mapped(grads, state, params, jnp.ones(5))


@pytest.mark.parametrize("options", [{}, {"inner_state": "average"}])
def test_nothing_is_compiled_anew_outside_jit(options):
  count = [0]

  def listen(name, duration, **kwargs):
    count[0] += name == "/jax/core/compile/backend_compile_duration"

  tx = ow.diloco(optax.sgd(0.1), None, communication_period=2, **options)
  params = jnp.ones(3)
  state = tx.init(params)
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    for step in range(8):
      if step == 4:
        count[0] = 0
      _, state = tx.update(params, state, params)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert count[0] == 0


def test_zero_size_variables_and_random_keys_beside_a_divided_center():
  params = {"e": jnp.zeros((0, 4)), "w": jnp.arange(3.0), "k": jax.random.key(0)}
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=1, shard_center=True)
  state = ow.stack_workers(tx.init(params), 2)
  center = ow.center_params(state, params)
  assert center["e"].shape == (0, 4)
  assert_close(center["w"], params["w"])
  assert (jax.random.key_data(center["k"]) == jax.random.key_data(params["k"])).all()


# Rounds of other libraries, written from their sources.


def rounds_of_torchft(start, grads, rate, period, delay, alpha, outer_rate, momentum):
  """torchft's DiLoCo with one fragment: sent `delay` steps before the end of a round, applied at
  its end.

  A worker keeps `alpha` of its own steps.
  """
  x, c, v, ends = np.repeat(start[None], grads.shape[1], 0), start, np.zeros_like(start), []
  for t, g in enumerate(grads):
    x = x - rate * g
    since = t % period + 1
    if since == period - delay:
      pseudo = (c - x).mean(0)
    if since == period:
      v = momentum * v + pseudo
      c = c - outer_rate * (pseudo + momentum * v)
      x = (1 - alpha) * c + alpha * x
    ends.append(x)
  return np.stack(ends)


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (2, 0.0), (2, 0.5), (3, 0.25)])
def test_torchfts_phase_is_a_shorter_first_round(delay, alpha):
  """The row of the table in docs/from-frameworks.md."""
  period, rng = 6, np.random.default_rng(3)
  start, grads = rng.normal(size=4), rng.normal(size=(19, 3, 4))
  wanted = rounds_of_torchft(start, grads, 0.1, period, delay, alpha, 0.7, 0.9)
  tx = ow.diloco(
    optax.sgd(0.1),
    AXIS,
    communication_period=lambda step: jnp.where(step == 0, period - delay, period),
    delay=delay,
    pull=1 - alpha,
  )
  params, state = ow.stack_workers((jnp.float32(start), tx.init(jnp.float32(start))), 3)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  for g, end in zip(jnp.float32(grads), wanted):
    updates, state = update(g, state, params)
    params = optax.apply_updates(params, updates)
    assert_close(params, end, rtol=1e-4, atol=1e-5)


def test_maxtexts_fragments_are_numbered_from_the_end_of_a_round():
  """Its fragment f is exchanged where `step % period == f * period / F`: its fragment 0 is last
  here."""
  period, num_fragments, rng = 6, 2, np.random.default_rng(4)
  theirs = {"rest": 0, "layers": 1}
  start = {name: rng.normal(size=3) for name in theirs}
  grads = {name: rng.normal(size=(13, 2, 3)) for name in theirs}
  ours = {name: (f - 1) % num_fragments for name, f in theirs.items()}
  tx = ow.diloco(
    optax.sgd(0.1), AXIS, communication_period=period, outer_learning_rate=0.3, fragments=ours
  )
  first = jax.tree.map(jnp.float32, start)
  params, state = ow.stack_workers((first, tx.init(first)), 2)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  x = {name: np.repeat(p[None], 2, 0) for name, p in start.items()}
  c, v = dict(start), dict.fromkeys(start, 0.0)
  for t in range(13):
    given = {name: jnp.float32(g[t]) for name, g in grads.items()}
    updates, state = update(given, state, params)
    params = optax.apply_updates(params, updates)
    for name, f in theirs.items():
      x[name] = x[name] - 0.1 * grads[name][t]
      if (t + 1) % period == f * period // num_fragments:
        pseudo = (c[name] - x[name]).mean(0)
        v[name] = 0.9 * v[name] + pseudo
        c[name] = c[name] - 0.3 * (pseudo + 0.9 * v[name])
        x[name] = np.repeat(c[name][None], 2, 0)
      assert_close(params[name], x[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("H", "it is communication_period."),
    ("alpha", "it is pull, which is 1 - alpha."),
    ("outer", "or local_steps for another optimizer"),
    ("merge", "it is reduction of local_steps"),
    ("reduction", "local_steps has it"),
  ],
)
def test_names_of_other_libraries_are_told_apart(name, said):
  with pytest.raises(TypeError, match=f"diloco: there is no argument '{name}': .*{said}"):
    ow.diloco(optax.sgd(0.1), AXIS, **{name: 1})


@pytest.mark.parametrize("make", [ow.local_steps, ow.diloco, ow.elastic_average])
def test_the_last_variable_may_be_without_elements(make):
  params = [jnp.ones(2), jnp.zeros((0, 3))]
  tx = make(optax.sgd(1.0), None, communication_period=1)
  updates, _ = tx.update(params, tx.init(params), params)
  assert [u.shape for u in updates] == [(2,), (0, 3)]


def test_no_round_of_a_schedule_undoes_its_steps():
  """With a pull of 1, an exchange that arrives a whole round later would undo all of its steps."""
  options = {"outer": optax.sgd(1.0), "delay": 2}

  def trained(period):
    tx = ow.local_steps(optax.sgd(0.5), AXIS, communication_period=period, **options)
    params, state = ow.stack_workers((jnp.zeros(()), tx.init(jnp.zeros(()))), 2)
    update = jax.jit(ow.map_workers(tx.update, AXIS))
    for _ in range(9):
      updates, state = update(jnp.array([1.0, -3.0]), state, params)
      params = optax.apply_updates(params, updates)
    return np.asarray(params), float(ow.center_params(state))

  (params, center), expected = trained(lambda step: 2), trained(3)
  np.testing.assert_array_equal(params, expected[0])
  # Each round of 3 steps moves the mean by 0.5 per step, except for the 2 that its arrival undoes.
  assert center == expected[1] > 0.5
