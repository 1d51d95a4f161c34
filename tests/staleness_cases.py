"""Policies, optimizers and compensations that several test modules try."""

import numpy as np
import optax
import reference_staleness as ref
from helpers import AXIS, assert_close, in_context, start_of_workers

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
  "constant": (ow.contrib.delay_compensation(0.3), ref.DelayCompensation(0.3)),
  "adaptive": (ow.contrib.delay_compensation(2.0, decay=0.9), ref.DelayCompensation(2.0, 0.9)),
}


def arrays(values):
  return [x.astype(np.float32) for x in values]


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
  params, state = start_of_workers(tx, params, num_shards, replicated=True)
  axes = ow.worker_axes(state, replicated=True)

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
    found = ow.get_state(state, ow.states.StalenessState)
    assert (int(found.step), int(found.dropped)) == (server.version, server.dropped)
    assert int(found.accepted) == server.accepted
    assert list(ow.get_state(state, ow.states.StalenessState).histogram) == list(server.histogram)
  assert server.dropped > 0 or "max_staleness" not in options
  if compensation == "adaptive":
    squares = [np.stack(x) for x in zip(*server.mean_squares)]
    assert_close(state[0].mean_square, squares, rtol=1e-5, atol=1e-6)
