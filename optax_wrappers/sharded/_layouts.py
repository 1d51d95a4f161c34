"""The PartitionSpecs of a tree's leaves, and what shard_map's types say about the leaves."""

from collections.abc import Hashable
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.sharding import PartitionSpec

AxisNames: TypeAlias = tuple[Hashable, ...]


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
  """Every leaf with its name for messages."""
  return [
    (jax.tree_util.keystr(path, simple=True, separator="/") or "the parameter", leaf)
    for path, leaf in jax.tree.leaves_with_path(tree)
  ]


def for_each_leaf(
  function: str, argument: str, values: Any, tree: Any, kind: type, kinds: str
) -> list[Any]:
  """The value for each leaf of `tree`, from a tree of values or a prefix of it."""

  def is_value(x):
    return isinstance(x, kind)

  try:
    spread = jax.tree.broadcast(values, tree, is_leaf=is_value)
  except ValueError as error:
    raise ValueError(
      f"{function}: {argument} must have the structure of the parameters or a prefix of it; got"
      f" {values!r} for parameters {jax.tree.structure(tree)}."
    ) from error
  leaves = jax.tree.leaves(spread, is_leaf=is_value)
  for x in leaves:
    if not is_value(x):
      raise TypeError(
        f"{function}: {argument} must hold {kinds}, got {x!r} of type {type(x).__name__}."
      )
  return leaves


def axes_by_dimension(spec: PartitionSpec) -> list[AxisNames]:
  """The mesh axes that shard each dimension."""
  parts = [() if part is None else part for part in spec]
  return [part if isinstance(part, tuple) else (part,) for part in parts]


def is_bound(name: Hashable) -> bool:
  """Whether an axis of this name is bound here."""
  try:
    lax.axis_size(name)
  except NameError:
    return False
  return True


def varying(x: jax.Array) -> frozenset[Hashable]:
  """The axes over which an array may differ from device to device, according to its type."""
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def named(axes: frozenset[Hashable]) -> list[str]:
  """A set of axes in a fixed order, for messages."""
  return sorted(map(str, axes))
