"""How parameters are named: `hidden/kernel`, in whatever form a model's parameters come.

NNX and Linen may hold a parameter in a box (`nnx.Param`, `nn.Partitioned`), of which JAX's own path
has one key more than that of the bare array. `nnx.Optimizer` gives an optimizer boxes at init and
bare arrays in update.
"""

import sys
from typing import Any

import jax

from optax_wrappers._types import Tree


def is_box(x: Any) -> bool:
  """Whether `x` is a box of Flax round one parameter."""
  nnx, meta = sys.modules.get("flax.nnx"), sys.modules.get("flax.core.meta")
  return (nnx is not None and isinstance(x, nnx.Variable)) or (
    meta is not None and isinstance(x, meta.AxisMetadata)
  )


def _inside(box: Any) -> list[tuple[Any, Any]]:
  """What a box holds, with the keys below it."""
  return jax.tree.leaves_with_path(box, is_leaf=lambda x: x is not box)


def unboxed(tree: Tree) -> Tree:
  """The tree with what is in its boxes in their place."""

  def unbox(x):
    # Boxes nest: an nnx.Param may hold an nn.Partitioned.
    held = [value for _, value in _inside(x)] if is_box(x) else []
    return unbox(held[0]) if len(held) == 1 and held[0] is not x else x

  return jax.tree.map(unbox, tree, is_leaf=is_box)


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
  """The name of every leaf and the leaf, in the order of `jax.tree.leaves`."""
  nnx = sys.modules.get("flax.nnx")
  leaves = jax.tree.leaves_with_path(unboxed(tree))
  if nnx is not None and isinstance(tree, nnx.statelib.FlatState):  # whose keys are numbers
    return [
      ("/".join(map(str, path)), leaf) for path, (_, leaf) in zip(tree.paths, leaves, strict=True)
    ]
  return [("/".join(map(_key_name, path)), leaf) for path, leaf in leaves]


def named_by_end(name: str, of_params: dict[str, Any], default: Any = None) -> Any:
  """The entry of the parameter for which a state holds a leaf of this name.

  The last parts of a path name it, as in "0/mu/dense/kernel": the longest that do.
  """
  keys = name.split("/")
  ends = ["/".join(keys[i:]) for i in range(len(keys))] + [""]
  return next((of_params[end] for end in ends if end in of_params), default)


def _key_name(key: Any) -> str:
  if isinstance(key, jax.tree_util.DictKey) and isinstance(
    key.key, tuple
  ):  # of a flattened mapping
    return "/".join(map(str, key.key))
  return jax.tree_util.keystr((key,), simple=True)
