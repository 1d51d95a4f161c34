"""The Euclidean length of a tree."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from optax_wrappers.contrib._arrays import wide
from optax_wrappers.contrib._gradients import wide_dtype


def length(tree: Any) -> jax.Array:
  """The length of all leaves together, whose squares neither overflow nor underflow."""
  leaves = [wide(x) for x in jax.tree.leaves(tree)]
  with jax.numpy_dtype_promotion("standard"):
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), initial=0) for x in leaves])
    # A unit that cancels out of the length.
    largest = jax.lax.stop_gradient(largest)
    parts = [x / jnp.where(largest == 0, 1, largest) for x in leaves]
    square = sum(jnp.sum(jnp.real(x * x.conj())) for x in parts)
    # The derivative of a square root at zero is NaN, even if it is not selected.
    return largest * jnp.sqrt(jnp.where(square == 0, 1, square))


def squared_length(tree: Any) -> jax.Array:
  """The sum of squares over all leaves, float32 scalar."""
  leaves = [jnp.asarray(x, wide_dtype(x)) for x in jax.tree.leaves(tree)]
  squares = [jnp.sum(jnp.square(jnp.abs(x))).astype(jnp.float32) for x in leaves]
  return sum(squares, jnp.zeros((), jnp.float32))
