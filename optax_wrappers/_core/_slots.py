"""Trees stored in numbered slots: one array per leaf holds all slots."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_wrappers._core import _paths
from optax_wrappers._core._types import Tree


def filled_slots(tree: Tree, num_slots: int) -> Tree:
  """Slots that all hold a tree, for a field with `slots=True`; abstract leaves stay abstract.

  Args:
    tree: arrays, such as parameters.
    num_slots: how many.

  Returns:
    The same structure, every leaf `[num_slots, ...]`, with one more axis in Flax's boxes.
  """

  def fill(x):
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct((num_slots, *x.shape), x.dtype)
    # Broadcast, not repeated, so that it keeps its sharding.
    x = jnp.asarray(x)
    return jnp.copy(jnp.broadcast_to(x[None], (num_slots, *x.shape)))

  return _paths.with_axis(jax.tree.map(fill, tree))


def write_slot(slots: Tree, tree: Tree, slot: ArrayLike) -> Tree:
  """The slots with a tree in one of them, in their dtypes. A leaf that is None stays.

  Write before you read: XLA:CPU copies all slots in a step that reads first.

  Args:
    slots: from `filled_slots`.
    tree: of the structure of one slot.
    slot: its number, an int scalar, traced or not.
  """

  def put(column, x):
    if x is None:
      return column
    return lax.dynamic_update_index_in_dim(column, x.astype(column.dtype), slot, 0)

  return _paths.with_axis(jax.tree.map(put, _paths.without_axis(slots), tree))


def read_slot(slots: Tree, slot: ArrayLike) -> Tree:
  """The tree in one slot, by its number, an int scalar."""
  tree = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, 0, keepdims=False), slots)
  return _paths.without_axis(tree)
