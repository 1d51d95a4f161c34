"""local_steps: every published algorithm that it is, against plain NumPy written from the
papers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from helpers import AXIS, in_context

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
