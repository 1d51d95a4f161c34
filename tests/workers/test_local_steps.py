"""local_steps: every published algorithm that it expresses, compared with NumPy written from the
papers."""

import dataclasses
import functools
import operator
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
from local_steps_cases import (
  CONTEXTS,
  FRAGMENTS,
  PERIOD,
  SIZES,
  STEPS,
  TREE,
  WEIGHT,
  call,
  collectives,
  drawn,
  joined,
  nesterov,
  partners,
  problem,
  run,
  split,
)

import optax_wrappers as ow

PARTS = [np.array([2, 3, 4]), np.array([0, 1, 5])]


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
    apart = jax.tree.map(lambda x, c: x - c, moved, workers.whole(kept.center, params))
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
    rule = ow.contrib.SparseAverage(0.4, seed=1)
    options = {"communication_period": period, "delay": delay}
    return ow.exchange.periodic_exchange(inner, AXIS, rule, **options, **more)

  return make


def sparse(period, delay):
  masks = [drawn(ow.contrib.SparseAverage(0.4, seed=1), r) for r in range(STEPS // period)]
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

  outer = ow.contrib.delayed_nesterov(0.9, 0.8, buffer=2)
  rule = ow.contrib.Asynchronous(outer, unequal, ow.staleness.inverse())
  masked = optax.conditionally_mask(inner, is_due)
  return ow.exchange.periodic_exchange(masked, AXIS, rule, communication_period=2, **more)


PAIRS = ow.contrib.Pairs(consensus=0.3, num_pairings=3, seed=2)


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
        {"radial": ow.contrib.radial_mean(AXIS), "plain": ow.all_reduce(AXIS)},
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
      reduction=ow.contrib.penalty(AXIS, **PENALTY, decay=0.3),
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
      ow.contrib.Eager(nesterov(0.4, 0.9)),
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
def test_algorithms_of_table_match_numpy_references(name, num_workers):
  """Three and a half rounds. The inner optimizers alternate, so that each algorithm meets
  several."""
  inner = list(INNER)[(list(ROWS).index(name) + num_workers) % len(INNER)]
  check_row(name, num_workers, "vmap", inner)


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
def test_algorithms_in_every_parallel_context_match_numpy(name, context):
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
def test_algorithms_with_shard_center_match_numpy(name, context):
  """Three workers, so that no variable divides evenly."""
  state = check_row(name, 3, context, "momentum", shard_center=True)
  own = ow.get_state(state, type(state))
  assert own.center is None and own.center_share["b"].shape == (3, 1)
  shares = [x for x in jax.tree.leaves(own.of_fragments("outer_state")) if x.ndim]
  assert all(x.shape[0] == 3 for x in shares)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("period", [1, 3])
def test_lookahead_with_one_worker_equals_optax_lookahead(period):
  """Their fast and slow parameters are our parameters and center; ours keep their structure."""
  start = split(problem(1).start.astype(np.float32))
  tx = ow.local_steps(optax.adam(0.1), None, communication_period=period, outer=optax.sgd(0.5))
  theirs = optax.lookahead(optax.adam(0.1), sync_period=period, slow_step_size=0.5)
  params, pair = start, optax.LookaheadParams(start, start)
  state, their_state = tx.init(start), theirs.init(pair)

  @jax.jit
  def step(params, state, pair, their_state, t):
    grads = jax.tree.map(lambda p: p - t / 3, params)
    updates, state = tx.update(grads, state, params)
    theirs_updates, their_state = theirs.update(grads, their_state, pair)
    params, pair = map(optax.apply_updates, (params, pair), (updates, theirs_updates))
    return params, state, pair, their_state

  for t in range(7):
    params, state, pair, their_state = step(params, state, pair, their_state, np.float32(t))
    assert_close(params, pair.fast, rtol=1e-5)
    assert_close(ow.center_params(state), pair.slow, rtol=1e-5)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("inner_name", INNER)
def test_snoo_with_one_worker_matches_numpy(inner_name):
  task, (inner, ref_inner) = problem(1), INNER[inner_name]
  expected, _ = ref.snoo(
    task.start, task.grad, STEPS, ref_inner, num_workers=1, period=PERIOD, eta=0.7, mu=0.5
  )
  with jax.enable_x64(True):
    tx = ow.local_steps(inner, None, communication_period=PERIOD, outer=nesterov(0.7, 0.5))

    @jax.jit
    def all_steps(params):
      def step(carry, points):
        params, state = carry
        grads = jax.tree.map(
          lambda h, x, b: h * (x - b), split(task.curvature[0]), params, split(points)
        )
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), joined(params)

      return jax.lax.scan(step, (params, tx.init(params)), task.points[:, 0])[1]

    np.testing.assert_allclose(all_steps(split(task.start)), np.stack(expected)[:, 0], rtol=1e-9)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_sparse_loco_top_k_with_decayed_residual_matches_numpy(num_workers, context):
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
  specs, own = ow.specs(state, workers=own_axes), PartitionSpec(own_axes)

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
def test_hierarchical_pods_and_periods_match_numpy(make, own_axes, node, numbers, check_vma):
  task = problem(6)
  xs, centers = node(
    task.start, task.grad, STEPS, ref.Sgd(0.1), num_workers=6, pods=PODS, **numbers
  )
  with jax.enable_x64(True):
    found, state = two_levels(make(), task, 3, own_axes, check_vma)
    np.testing.assert_allclose(found, np.stack(xs), rtol=1e-6, atol=1e-9)
    if centers is not None:
      np.testing.assert_allclose(joined(ow.center_params(state)), centers[-1], rtol=1e-6, atol=1e-9)


SENT = [
  *PROGRAMS,
  "SPARTA",
  "DOWNPOUR",
  "delayed outer",
  "Streaming DiLoCo, torchft",
  "CROSSBOW",
  "Pier",
]


@pytest.mark.optax_promotes
@pytest.mark.parametrize("name", SENT)
def test_algorithms_send_each_parameter_once_per_exchange(name):
  """Between exchanges nothing is sent: all collectives are inside separate loops. Rows that differ
  only in numbers or in the outer optimizer send the same."""
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


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  "name",
  ["Streaming DiLoCo", "FedAdam, Optax", "local SGD", "eager updates", "asynchronous local SGD"],
)
def test_algorithms_checkpoint_mid_round_resumes_bit_for_bit(name):
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


def test_outer_optimizer_partition_by_names_with_fragments():
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
def test_reduction_replaces_mean_of_workers_without_absent_nan(context):
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
  for merge, expected in ((clip, mean), (ow.contrib.radial_mean(AXIS), radial), (plain, total)):
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


def test_edit_reference_leaves_out_some_and_once_all_workers():
  """In the row of EDiT; otherwise it would not discriminate."""
  shares = []
  for num_workers in (1, 2, 3, 4):
    task, numbers = problem(num_workers), EDIT | {"outliers": []}
    ref.edit(task.start, task.grad, STEPS, ref.Adam(0.03), num_workers=num_workers, **numbers)
    shares.append(np.mean(numbers["outliers"], axis=1))
  assert [(one == 1).any() for one in shares] == [True, True, False, False]
  assert all(((one > 0) & (one < 1)).any() for one in shares[2:])


def test_reduction_state_is_per_worker_and_waits_while_absent():
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
def test_local_steps_errors_arguments(options, error, match):
  with pytest.raises(error, match=rf"local_steps: .*{match}"):
    ow.local_steps(optax.sgd(0.1), AXIS, **options)


def test_local_steps_and_local_round_errors_calls():
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


def test_local_steps_inject_hyperparams_changes_pull():
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


def test_post_local_sgd_after_cross_shard_matches_numpy():
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


def test_diloco_inject_hyperparams_changes_outer_rate():
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
def test_robust_reduction_of_workers_refuses_participation(rule):
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
def test_diloco_with_shorter_first_round_matches_torchft(delay, alpha):
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


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("H", "it is communication_period."),
    ("alpha", "it is pull, which is 1 - alpha."),
    ("outer", "or local_steps for another optimizer"),
    ("reduction", "local_steps has it"),
  ],
)
def test_diloco_errors_argument_names_of_other_libraries(name, said):
  with pytest.raises(TypeError, match=f"diloco: there is no argument '{name}': .*{said}"):
    ow.diloco(optax.sgd(0.1), AXIS, **{name: 1})


@pytest.mark.optax_promotes
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_workers_end_at_rounded_center(dtype, wide):
  """Exactly with float32 gradients; with narrow ones but for entries that change their exponent."""
  tx = ow.local_steps(optax.sgd(1.0), AXIS, communication_period=1, outer=optax.sgd(1.001))
  rng = np.random.default_rng(0)
  start = jnp.asarray(rng.normal(size=2000), dtype)
  params, state = ow.stack_workers((start, tx.init(start)), 2)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  grads = jnp.asarray(1e-2 * rng.normal(size=params.shape), jnp.float32 if wide else dtype)
  updates, state = update(grads, state, params)
  params = optax.apply_updates(params, updates)
  center = np.asarray(ow.center_params(state).astype(dtype), np.float32)
  missed = np.asarray(params, np.float32) != center
  assert missed.mean() <= (0.0 if wide else 0.003)
  if wide:  # so that a round without gradients sends nothing
    _, after = update(jnp.zeros_like(grads), state, params)
    assert bits(after.center) == bits(state.center)
