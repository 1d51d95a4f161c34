"""What every wrapper is tried with, for several test modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import WRAPPERS

PARAMS = {"kernel": jnp.arange(6.0).reshape(3, 2) / 7 + 0.1, "bias": jnp.array([0.3, -0.2])}

MOMENTUM = optax.sgd(0.1, momentum=0.9)

each_wrapper = pytest.mark.parametrize("wrapped", WRAPPERS.values(), ids=WRAPPERS)


def alone(wrapped, inner=MOMENTUM):
  return optax.with_extra_args_support(wrapped.make(inner, None))


def gradient(params, wrapped, i=0):
  return wrapped.updates(jax.tree.map(lambda p: jnp.cos(3 * p + i), params), 2)


def make_step(tx, wrapped):
  def step(params, state, i=0):
    updates, state = tx.update(gradient(params, wrapped, i), state, params, **wrapped.extra_args)
    return optax.apply_updates(params, updates), state

  return step


def regression():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 3)), jnp.float32)
  return x, x @ jnp.array([[0.3], [-0.5], [0.2]])
