"""Trees stored in numbered slots: one array per leaf holds all slots.

A slot is written before one is read: XLA:CPU copies all slots in a step that reads first.
"""

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _paths
from optax_wrappers._core._types import Tree


def filled(tree: Tree, num_slots: int) -> Tree:
  """Slots that all hold `tree`: every leaf `[num_slots, ...]`. Abstract leaves stay abstract."""

  def fill(x):
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct((num_slots, *x.shape), x.dtype)
    # Broadcast, not repeated, so that it keeps its sharding.
    x = jnp.asarray(x)
    return jnp.copy(jnp.broadcast_to(x[None], (num_slots, *x.shape)))

  return _paths.with_axis(jax.tree.map(fill, tree))


def write(slots: Tree, tree: Tree, slot: jax.Array) -> Tree:
  """The slots with `tree` in one of them."""

  def put(kept, x):
    return lax.dynamic_update_index_in_dim(kept, x.astype(kept.dtype), slot, 0)

  return _paths.with_axis(jax.tree.map(put, _paths.without_axis(slots), tree))


def read(slots: Tree, slot: jax.Array) -> Tree:
  """The content of one slot."""
  held = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), slots)
  return _paths.without_axis(held)
