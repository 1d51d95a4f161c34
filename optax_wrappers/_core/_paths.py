"""Names of parameters, such as `hidden/kernel`, for every form in which a model may hold them.

NNX and Linen may hold a parameter in a box (`nnx.Param`, `nn.Partitioned`), which adds a key to
JAX's path of the bare array. `nnx.Optimizer` gives an optimizer boxes at init and bare arrays in
update.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax

from optax_wrappers._core._types import Tree

Path: TypeAlias = tuple[str, ...]


def box_classes() -> tuple[type, ...]:
  """The classes of Flax's boxes around one parameter, of those modules that are imported."""
  nnx, meta = sys.modules.get("flax.nnx"), sys.modules.get("flax.core.meta")
  return (*([nnx.Variable] if nnx else []), *([meta.AxisMetadata] if meta else []))


def _inside(box):
  return jax.tree.leaves(box, is_leaf=lambda x: x is not box)


def unboxed(tree: Tree) -> Tree:
  """The tree with boxes replaced by their contents."""
  boxes = box_classes()

  def unbox(x):
    # Boxes nest: an nnx.Param may hold an nn.Partitioned.
    held = _inside(x) if isinstance(x, boxes) else []
    return unbox(held[0]) if len(held) == 1 and held[0] is not x else x

  return jax.tree.map(unbox, tree, is_leaf=lambda x: isinstance(x, boxes))


def as_dicts(tree: Tree) -> Tree:
  """An `nnx.State` as nested dicts, by which users name parameters; anything else unchanged."""
  nnx = sys.modules.get("flax.nnx")
  return nnx.to_pure_dict(tree) if nnx and isinstance(tree, nnx.State) else tree


def renamed_axes(tree: Tree, rename: Callable[[tuple, Any], tuple]) -> Tree:
  """The tree with `rename(names, held)` as the axis names of its boxes.

  Flax's boxes name an array's axes by position: one more axis needs one more name.
  """
  boxes = box_classes()

  def visit(x):
    if not isinstance(x, boxes):
      return x
    held = list(map(visit, _inside(x)))
    box: Any = jax.tree.structure(x, is_leaf=lambda y: y is not x).unflatten(held)
    leaf = next(iter(jax.tree.leaves(held)), None)
    is_nnx = hasattr(box, "get_metadata")
    names = box.get_metadata().get("out_sharding") if is_nnx else getattr(box, "names", None)
    if not names or leaf is None:
      return box
    names = rename(tuple(names), leaf)
    # NNX copies a box with new metadata; Linen replaces a field.
    return box.copy(out_sharding=names) if is_nnx else box.replace(names=names)

  return jax.tree.map(visit, tree, is_leaf=lambda x: isinstance(x, boxes))


def with_axis(tree: Tree, name: Any = None) -> Tree:
  """The tree whose leaves have a new first axis, named in every box."""
  return renamed_axes(tree, lambda names, _: (name, *names))


def without_axis(tree: Tree) -> Tree:
  """The inverse of `with_axis`."""
  return renamed_axes(tree, lambda names, _: names[1:])


def leaves_with_keys(tree: Tree) -> list[tuple[tuple[str, ...], Any]]:
  """The path of every leaf and the leaf, in the order of `jax.tree.leaves`."""
  nnx = sys.modules.get("flax.nnx")
  leaves = jax.tree.leaves_with_path(unboxed(tree))
  # Whose keys are numbers.
  if nnx is not None and isinstance(tree, nnx.statelib.FlatState):
    paths = [tuple(map(str, path)) for path in tree.paths]
  else:
    paths = [sum(map(_keys, path), ()) for path, _ in leaves]
  return [(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
  """The name of every leaf and the leaf; two may share a name, as keys may contain a slash."""
  return [("/".join(keys), leaf) for keys, leaf in leaves_with_keys(tree)]


def at(tree: Tree, path: Any) -> Any:
  """The node at JAX's path, or None where a class has no keys."""
  for key in path:
    match key:
      case jax.tree_util.GetAttrKey(name=name):
        tree = getattr(tree, name)
      case jax.tree_util.SequenceKey(idx=place) | jax.tree_util.DictKey(key=place):
        tree = tree[place]
      case _:
        return None
  return tree


class OfParams:
  """Finds the parameter to which a leaf of a state belongs, by the end of its path.

  For example, ("0", "mu", "dense", "kernel") ends with a parameter's ("dense", "kernel"). Of
  several such ends it is the one whose beginning is the root of most parameters: with parameters
  `mu/w` and `w`, Adam's `mu` holds `mu/mu/w` and `mu/w`. Then it is the longest.
  """

  def __init__(self, paths: Iterable[Path], params: Iterable[Path]):
    """From the paths of all leaves of the state, and of the parameters."""
    self._paths, self._params = set(paths), set(params)
    self._found: dict[Path, int] = {}

  def path(self, keys: Path) -> Path | None:
    """The path of the parameter, or None."""
    ends = [i for i in range(len(keys) + 1) if keys[i:] in self._params]
    if len(ends) > 1:
      ends = [max(ends, key=lambda i: (self._number_at(keys[:i]), -i))]
    return keys[ends[0] :] if ends else None

  def _number_at(self, root):
    if root not in self._found:
      self._found[root] = sum(root + path in self._paths for path in self._params)
    return self._found[root]


def _keys(key: Any) -> tuple[str, ...]:
  if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, tuple):
    return tuple(map(str, key.key))  # of a flattened mapping
  return (jax.tree_util.keystr((key,), simple=True),)
