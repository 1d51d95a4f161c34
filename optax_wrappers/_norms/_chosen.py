"""Which projection each parameter gets: one for all, a tree of them, by path, or by layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from optax_wrappers._core import _checks, _paths
from optax_wrappers._core._types import Tree
from optax_wrappers._norms import _sets


@dataclasses.dataclass(frozen=True)
class ByName:
  """Projections that are chosen by the names of all variables together.

  Attributes:
    choose: from a list of `(name, leaf)` to a list with a projection for each, or None to leave the
      variable alone. A name reads `hidden/kernel`, whatever boxes hold the parameters; the leaf has
      at least a shape and a dtype. `contrib.by_path` and `contrib.flax_kernels` are made of it.
  """

  choose: Callable[[list[tuple[str, Any]]], list[Any]]


def for_each_leaf(wrapper: str, projection: Any, params: Tree) -> list[_sets.Projection | None]:
  """The projection of each leaf of `params`; None for a leaf that is not projected."""
  named = _paths.named_leaves(params)
  if isinstance(projection, ByName):
    specs = projection.choose(named)
  else:
    specs = _checks.spread(wrapper, "projection", projection, params, _is_spec) if named else []
  for (path, _), spec in zip(jax.tree.leaves_with_path(params), specs, strict=True):
    if not _is_spec(spec):
      raise TypeError(
        f"{wrapper}: projection for params{jax.tree_util.keystr(path)} must be a projection,"
        f" a function or None; got {spec!r}."
      )
  return [x if isinstance(x, _sets.Projection | None) else _sets.Function(x) for x in specs]


def _is_spec(x):
  return isinstance(x, _sets.Projection | None) or _checks.is_function(x)
