"""Optimizers and runs whose workers change, for several test modules."""

import functools

import jax
import numpy as np
import optax
from helpers import AXIS, start_of_workers

import optax_wrappers as ow

W = 4

# Uneven: dimensions that W divides and that it does not, and one entry.
SHAPES = {"dense": {"kernel": (8, 3), "bias": (5,)}, "scale": ()}

ADAM = functools.partial(optax.adam, 0.05)

OWNED = {
  "elastic": lambda **k: ow.elastic_average(ADAM(), AXIS, communication_period=2, **k),
  "elastic delayed": lambda **k: ow.elastic_average(
    ADAM(), AXIS, communication_period=2, delay=1, **k
  ),
  "local_steps": lambda: ow.local_steps(ADAM(), AXIS, communication_period=2),
  "diloco": lambda **k: ow.diloco(ADAM(), AXIS, communication_period=2, **k),
  "streaming": lambda **k: ow.diloco(
    ADAM(), AXIS, communication_period=4, fragments=2, delay=1, **k
  ),
  "codec": lambda: ow.local_steps(
    ADAM(),
    AXIS,
    communication_period=2,
    outer=optax.sgd(0.7, 0.9),
    codec=ow.codecs.quantize(bits=4),
  ),
}


def tree_of(rng, *leading):
  return jax.tree.map(
    lambda shape: np.float32(rng.normal(size=leading + shape)),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
  )


@functools.cache
def step_of(tx):
  def step(params, state, gradient):
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(ow.map_workers(step, AXIS))


def run(tx, params, state, gradients):
  """The steps of all workers by vmap, for gradients `[steps, workers, ...]`."""
  for i in range(len(jax.tree.leaves(gradients)[0])):
    params, state = step_of(tx)(params, state, jax.tree.map(lambda g, i=i: g[i], gradients))
  return params, state


@functools.cache
def optimizer(name, **options):
  return OWNED[name](**options)


@functools.cache
def trained(tx):
  """Parameters and state of W workers in the middle of a round, all of them different."""
  rng = np.random.default_rng(0)
  _, state = start_of_workers(tx, tree_of(rng), W)
  return run(tx, tree_of(rng, W), state, tree_of(rng, 5, W))
