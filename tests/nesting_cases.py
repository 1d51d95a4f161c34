"""What one update of nested wrappers emits, for several test modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import CONTEXTS, in_context

each_context = pytest.mark.parametrize("context", CONTEXTS)


def emitted(context, tx, grads, **extra):
  """What one update emits; gradients and extra args have the shards' axis."""

  def step(grad, extra):
    return tx.update(grad, tx.init(jnp.zeros(())), jnp.zeros(()), **extra)[0]

  return in_context(context, step, len(grads), (0, 0), None)(np.asarray(grads, np.float32), extra)


def stamps(*fresh):
  return np.where(fresh, 0, -1).astype(np.int32)


def jitted(tx):
  return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))
