"""Rounds as one program against their steps one by one."""

import jax
import numpy as np
import optax
import pytest
from helpers import AXIS, in_context
from local_steps_cases import FRAGMENTS, PERIOD, by_caller, joined, nesterov, problem, split

import optax_wrappers as ow


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
@pytest.mark.parametrize(
  ("fragments", "delay"), [(1, 0), (2, 0), (1, 2), (2, 3), (FRAGMENTS, 4), (3, 1)], ids=str
)
def test_local_round_equals_single_steps(context, fragments, delay):
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
  one_round = in_context(context, ow.local_round(step, tx), 3, (0, axes, 0), (0, axes, 0))
  curvature = np.repeat(task.curvature[:, None], PERIOD, axis=1)
  for r in range(3):
    points = np.moveaxis(task.points[r * PERIOD : (r + 1) * PERIOD], 1, 0)
    data = np.float32(curvature), np.float32(points)
    params, state, seen = one_round(params, state, data)
    np.testing.assert_allclose(joined(params), expected[(r + 1) * PERIOD - 1], rtol=2e-5, atol=2e-6)
    assert seen.shape == (3, PERIOD, 6)
  assert int(state.step) == 3 * PERIOD
