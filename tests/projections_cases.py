"""A step with a projection, and norms, for several test modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow


def step_once(tx, params, grads=None):
  grads = jax.tree.map(jnp.zeros_like, params) if grads is None else grads
  updates, _ = tx.update(grads, tx.init(params), params)
  return optax.apply_updates(params, updates)


jitted_step = jax.jit(step_once, static_argnums=0)


def projected(projection, params):
  return jitted_step(ow.project_variables(optax.identity(), projection), params)


def norms(x, axes):
  return np.sqrt((np.asarray(x, np.float64) ** 2).sum(axes, keepdims=True))


WEIGHTS = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32) * np.array(
  [[[0.1]], [[1]], [[3]], [[0]]], np.float32
)
