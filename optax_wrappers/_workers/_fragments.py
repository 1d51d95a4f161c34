"""Fragments: sets of variables that are exchanged together, at a step of the round of their own."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_wrappers._core import _checks, _numerics
from optax_wrappers._core._types import Tree


class Fragment(NamedTuple):
  """Variables that are exchanged together: fragment `number`, from 0, of `num_fragments`."""

  number: int
  num_fragments: int
  variables: Sequence[int]  # their numbers, in the order of `jax.tree.leaves`

  def phase(self, length: Any) -> Any:
    """The step of a round of `length` at which they are exchanged, from 1."""
    # A round may be shorter than there are fragments, and none is to be left out.
    phase = (self.number + 1) * length // self.num_fragments
    return max(1, phase) if isinstance(length, int) else jnp.maximum(1, phase)

  def is_turn(self, since: jax.Array, length: Any) -> jax.Array:
    """Whether they are exchanged at this step of a round."""
    return since == self.phase(length)

  def with_updates(self, updates: Sequence[Any]) -> "Fragment":
    """The fragment without the variables that have no update."""
    return self._replace(variables=[i for i in self.variables if updates[i] is not None])

  def take(self, column: list[Any], treedef: Any) -> Tree:
    """These variables' entries as a tree of the parameters' structure, None for all others."""
    entries: list[Any] = [None] * len(column)
    for i in self.variables:
      entries[i] = column[i]
    return treedef.unflatten(entries)

  def write(self, column: list[Any], own: Tree, treedef: Any) -> None:
    """Writes the entries of these variables."""
    entries = treedef.flatten_up_to(own)
    for i in self.variables:
      column[i] = entries[i]


def check(wrapper: str, fragments: Any, period: int | None) -> None:
  """Raises unless `fragments` is a number of fragments, or a tree that numbers them."""
  # Each needs a step of its own in a round of `period` steps, where that is known.
  if isinstance(fragments, int | np.integer) and not isinstance(fragments, bool):
    _checks.integer(wrapper, "fragments", fragments, minimum=1)
    if period is not None and fragments > period:
      what = f"{wrapper}: fragments must be at most communication_period, {period} steps"
      raise ValueError(f"{what}, got {fragments}.")
    return
  numbers = jax.tree.leaves(fragments)
  for number in numbers:
    _checks.integer(wrapper, "fragments", number, minimum=0)
  is_numbered = bool(numbers) and set(numbers) == set(range(max(numbers) + 1))
  if not is_numbered or (period is not None and max(numbers) >= period):
    raise ValueError(
      f"{wrapper}: fragments must be an int, or number the fragments from 0, every number used, at"
      f" most communication_period of them, {period}; got {fragments}."
    )


def plan(wrapper: str, params: Tree, fragments: Any) -> list[Fragment]:
  """The fragments of these parameters."""
  leaves = jax.tree.leaves(params)
  if isinstance(fragments, int | np.integer):
    num_fragments = max(1, min(int(fragments), len(leaves)))  # none is to be empty
    numbers = _by_size(leaves, num_fragments)
  else:
    num_fragments = max(jax.tree.leaves(fragments)) + 1
    numbers = _checks.spread(
      wrapper, "fragments", fragments, params, _checks.is_a(int, np.integer), "ints from 0"
    )
  own = [number if _numerics.is_inexact(x) else None for number, x in zip(numbers, leaves)]
  return [
    Fragment(k, num_fragments, [i for i, number in enumerate(own) if number == k])
    for k in range(num_fragments)
  ]


def others(leaves: Sequence[Any]) -> list[Fragment]:
  """One of whole numbers, random keys and the like, which no fragment has, if there are any."""
  numbers = [i for i, x in enumerate(leaves) if not _numerics.is_inexact(x)]
  return [Fragment(0, 1, numbers)] if numbers else []


def _by_size(leaves, num_fragments):
  """The number of the fragment of each variable: neighbours together, about equal bytes in each."""
  sizes = [
    math.prod(np.shape(x)) * getattr(x, "dtype", np.dtype("float32")).itemsize for x in leaves
  ]
  total = sum(sizes)  # bytes
  if not total:
    return [0] * len(sizes)
  # A variable belongs to the fragment in which the middle of its bytes lies, so that none is cut. A
  # last one without elements has its middle at the end of all.
  middles = np.cumsum([0, *sizes])[:-1] + np.asarray(sizes) / 2
  return [min(num_fragments - 1, int(middle * num_fragments / total)) for middle in middles]
