"""Runs of elastic averaging, and the same in NumPy, for several test modules."""

import operator

import jax
import numpy as np
import optax
import reference as ref
from helpers import AXIS, as_numpy, in_context, start_of_workers

import optax_wrappers as ow


def run(context, tx, params, grads, num_workers):
  """Steps all workers through `grads` [step, worker, ...]; yields each step's parameters and the
  state."""
  params, state = start_of_workers(tx, params, num_workers)
  axes = ow.worker_axes(state)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, num_workers, (0, axes, 0), (0, axes))
  for i in range(jax.tree.leaves(grads)[0].shape[0]):
    params, state = step(params, state, jax.tree.map(operator.itemgetter(i), grads))
    yield as_numpy(params), state


def simulate(params, grads, *, period, alpha, rho=0.0, lr, momentum=0.0, sequential=False):
  """The NumPy reference on one flat vector: (x [W, n], c, lc [W, n]) after every step."""
  num_workers = grads.shape[1]
  exchange = "sequential" if sequential else "simultaneous"
  node = ref.Elastic((AXIS,), period, alpha, rho, exchange, ref.Sgd(lr, momentum))
  state, params = None, np.tile(params, (num_workers, 1))
  for grad in grads:
    params, state = ref.run(node, params, [(grad, None, None)], {AXIS: num_workers}, state)
    yield params, state["center"][0], state["pulled"]
