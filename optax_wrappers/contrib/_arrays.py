"""What several algorithms here need of arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def wide(x: jax.Array) -> jax.Array:
  """An array in float32 if its dtype is a narrower float."""
  is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
  return x.astype(jnp.float32) if is_narrow else x


def select(is_first: jax.Array, first: Any, second: Any) -> Any:
  """One of two trees of equal types, by a bool scalar."""
  # The result of jnp.where for an array without elements loses its varying axes.
  return jax.tree.map(lambda x, y: lax.select(is_first, x, y), first, second)


def copied(tree: Any) -> Any:
  """A copy that shares no buffer, so that both can be donated; abstract values stay."""

  def copy(x):
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.array(x, copy=True)

  return jax.tree.map(copy, tree)
