"""Runs of two workers whose layers are fragments, for several test modules."""

import jax
import optax
from helpers import in_context, start_of_workers

import optax_wrappers as ow

W, LAYERS = 2, 4


def run(tx, start, grads, context="vmap", fun=None):
  """All steps; the parameters after each, and the last state."""
  params, state = start_of_workers(tx, start, W)

  def step(g, state, params):
    updates, state = (fun or tx.update)(g, state, params)
    return optax.apply_updates(params, updates), state

  axes = ow.worker_axes(state)
  step = in_context(context, step, W, (0, axes, 0), (0, axes))
  found = []
  for g in grads:
    params, state = step(g, state, params)
    found.append(jax.device_get(params))
  return found, state
