"""How parameters are named: `hidden/kernel`, in whatever form a model's parameters come.

NNX and Linen may hold a parameter in a box (`nnx.Param`, `nn.Partitioned`), of which JAX's own path
has one key more than that of the bare array. `nnx.Optimizer` gives an optimizer boxes at init and
bare arrays in update.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax

from optax_wrappers._core._types import Tree


def texts(tree: Tree) -> list[str]:
  """The path of each leaf, as errors show it."""
  return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


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


def renamed_axes(tree: Tree, rename: Callable[[tuple, Any], tuple]) -> Tree:
  """The tree with other names of axes in its boxes.

  Flax's boxes name an array's axes by position, so that an array with one axis more needs one name
  more.

  Args:
    tree: with boxes or without.
    rename: from the names in a box, and what the box holds, to its new names.
  """

  def visit(x):
    if not is_box(x):
      return x
    treedef = jax.tree.structure(x, is_leaf=lambda y: y is not x)
    held = [visit(value) for _, value in _inside(x)]
    box: Any = jax.tree.unflatten(treedef, held)
    leaf = next(iter(jax.tree.leaves(held)), None)
    key, names = _names_in(box)
    if not names or leaf is None:
      return box
    # NNX copies a box with other metadata, Linen replaces a field.
    change = box.copy if key == "out_sharding" else box.replace
    return change(**{key: rename(tuple(names), leaf)})

  return jax.tree.map(visit, tree, is_leaf=is_box)


def _names_in(box):
  """Under which name a box holds those of axes, and these."""
  if hasattr(box, "get_metadata"):
    return "out_sharding", box.get_metadata().get("out_sharding")
  return "names", getattr(box, "names", None)


def with_axis(tree: Tree, name: Any = None) -> Tree:
  """The tree whose leaves have a new first axis, with a name for it in every box."""
  return renamed_axes(tree, lambda names, _: (name, *names))


def without_axis(tree: Tree) -> Tree:
  """The inverse of `with_axis`."""
  return renamed_axes(tree, lambda names, _: names[1:])


def leaves_with_keys(tree: Tree) -> list[tuple[tuple[str, ...], Any]]:
  """The keys on the way to every leaf and the leaf, in the order of `jax.tree.leaves`."""
  nnx = sys.modules.get("flax.nnx")
  leaves = jax.tree.leaves_with_path(unboxed(tree))
  if nnx is not None and isinstance(tree, nnx.statelib.FlatState):  # whose keys are numbers
    paths = [tuple(map(str, path)) for path in tree.paths]
  else:
    paths = [sum(map(_keys, path), ()) for path, _ in leaves]
  return [(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
  """The name of every leaf and the leaf, in the order of `jax.tree.leaves`.

  Keys may have a slash in them, so that two leaves may have one name: for messages and patterns.
  """
  return [("/".join(keys), leaf) for keys, leaf in leaves_with_keys(tree)]


def by_end(
  keys: tuple[str, ...], of_params: dict[tuple[str, ...], Any], default: Any = None
) -> Any:
  """The entry of the parameter for which a state holds a leaf on the way of these keys.

  The last of them name it, as in ("0", "mu", "dense", "kernel"): as many as do.
  """
  ends = [keys[i:] for i in range(len(keys) + 1)]
  return next((of_params[end] for end in ends if end in of_params), default)


def _keys(key: Any) -> tuple[str, ...]:
  if isinstance(key, jax.tree_util.DictKey) and isinstance(
    key.key, tuple
  ):  # of a flattened mapping
    return tuple(map(str, key.key))
  return (jax.tree_util.keystr((key,), simple=True),)
