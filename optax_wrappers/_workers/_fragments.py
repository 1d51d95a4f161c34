"""Fragments: sets of variables that are exchanged together, at their own step of the round.

A fragment is a set of variables, or of entries of variables along an axis, such as some layers of a
stack that a model scans over.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers._core import _checks, _numerics, _paths
from optax_wrappers._core._types import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class AlongAxis:
  """In `fragments`, the numbers of a variable's entries along an axis.

  Attributes:
    numbers: ints from 0, one for each entry.
    axis: of the variable.
  """

  numbers: Any
  axis: int = 0


def blocks(num_layers: int, num_fragments: int) -> np.ndarray:
  """Fragment numbers for a stack of layers, neighbors together: for 4 and 2, [0, 0, 1, 1]."""
  return np.arange(num_layers) * num_fragments // num_layers


def stripes(num_layers: int, num_fragments: int) -> np.ndarray:
  """Fragment numbers for a stack of layers, in turn: for 4 and 2, [0, 1, 0, 1]."""
  return np.arange(num_layers) % num_fragments


class Cut(NamedTuple):
  """How a variable is split: the fragment of each entry along an axis, a negative number."""

  axis: int
  numbers: tuple[int, ...]

  def progressions(self, number: int) -> list[range]:
    """The entries of a fragment as a few ranges: one for a block, and for a stripe."""
    ranges: list[range] = []
    for i in np.flatnonzero(np.asarray(self.numbers) == number).tolist():
      last = ranges[-1] if ranges else None
      if last and (len(last) == 1 or i == last[-1] + last.step):
        ranges[-1] = range(last[0], i + 1, i - last[-1])
      else:
        ranges.append(range(i, i + 1))
    return ranges

  def part(self, x: Any, number: int) -> Any:
    """The entries of one fragment."""

    def of(x):
      ranges = self.progressions(number)
      parts = [lax.slice_in_dim(x, r.start, r.stop, r.step, self.axis) for r in ranges]
      return jnp.concatenate(parts, self.axis)

    return jax.eval_shape(of, x) if isinstance(x, jax.ShapeDtypeStruct) else of(x)

  def with_part(self, x: jax.Array, part: jax.Array, number: int) -> jax.Array:
    """The variable with new entries of one fragment."""
    num_entries, seen, x = len(self.numbers), 0, x.astype(part.dtype)
    for r in self.progressions(number):
      entries = lax.slice_in_dim(part, seen, seen + len(r), axis=self.axis)
      seen += len(r)
      # Each entry at its position, with unused values in between.
      margins = [(0, 0, 0)] * x.ndim
      margins[self.axis] = r.start, num_entries - r[-1] - 1, r.step - 1
      in_place = lax.pad(entries, jnp.zeros((), x.dtype), margins)
      is_entry = np.isin(np.arange(num_entries), r).reshape(-1, *[1] * (-1 - self.axis))
      x = jnp.where(is_entry, in_place, x)
    return x

  def joined(self, parts: Sequence[Any]) -> Any:
    """The variable, from the parts of the fragments in order; parts of other fragments are None."""
    by_number = {k: parts[k] for k in sorted(set(self.numbers))}
    first = next(iter(by_number.values()))
    if not hasattr(first, "shape"):
      return first  # specs are equal for all

    def of(parts):
      shape = list(first.shape)
      shape[self.axis] = len(self.numbers)
      whole = jnp.zeros(shape, first.dtype)
      for number, part in parts.items():
        whole = self.with_part(whole, part, number)
      return whole

    is_abstract = isinstance(first, jax.ShapeDtypeStruct)
    return jax.eval_shape(of, by_number) if is_abstract else of(by_number)


class Fragment(NamedTuple):
  """A set of variables that are exchanged together: fragment `number`, from 0, of `num_fragments`.

  Attributes:
    treedef: the parameters' structure.
    variables: the indices of its variables, in the order of `jax.tree.leaves`.
    cuts: how those variables are split of which it has a part.
  """

  number: int
  num_fragments: int
  treedef: Any
  variables: Sequence[int]
  cuts: Mapping[int, Cut]

  def phase(self, length: Any) -> Any:
    """The step of a round of `length` at which it is exchanged, from 1."""
    # A round may be shorter than the number of fragments, and no fragment may be left out.
    phase = (self.number + 1) * length // self.num_fragments
    return max(1, phase) if isinstance(length, int) else jnp.maximum(1, phase)

  def take(self, column: Sequence[Any]) -> Tree:
    """These variables, in full, as a tree of the parameters' structure; all others are None."""
    variables = set(self.variables)
    return self.treedef.unflatten(x if i in variables else None for i, x in enumerate(column))

  def write(self, column: list[Any], own: Tree) -> None:
    """Writes these variables into a list of all variables, but leaves None, for no update."""
    entries = self.treedef.flatten_up_to(own)
    for i in self.variables:
      if column[i] is not None:
        column[i] = entries[i]

  def part(self, own: Tree) -> Tree:
    """The part of whole variables that belongs to this fragment."""
    if not self.cuts:
      return own
    entries = self.treedef.flatten_up_to(own)
    for i, cut in self._cut_in(entries):
      entries[i] = cut.part(entries[i], self.number)
    return self.treedef.unflatten(entries)

  def with_part(self, own: Tree, part: Tree) -> Tree:
    """Whole variables in which this fragment's part is replaced."""
    if not self.cuts:
      return part
    entries, wholes = map(self.treedef.flatten_up_to, (part, own))
    for i, cut in self._cut_in(entries):
      entries[i] = cut.with_part(wholes[i], entries[i], self.number)
    return self.treedef.unflatten(entries)

  def _cut_in(self, entries):
    return [(i, cut) for i, cut in self.cuts.items() if entries[i] is not None]


_NUMBERS = AlongAxis, np.ndarray, jax.Array


def check(wrapper: str, fragments: Any, period: int | None, shard_center: bool) -> None:
  """Raises unless `fragments` is a number of fragments, or a tree that numbers them."""
  # Each fragment needs its own step in a round of `period` steps, if that is known.
  if isinstance(fragments, int | np.integer) and not isinstance(fragments, bool):
    _checks.integer(wrapper, "fragments", fragments, minimum=1)
    if period is not None and fragments > period:
      what = f"{wrapper}: fragments must be at most communication_period, {period} steps"
      raise ValueError(f"{what}, got {fragments}.")
    return
  entries = jax.tree.leaves(fragments)
  numbers = list(itertools.chain(*(_numbers(x) for x in entries)))
  for number in numbers:
    _checks.integer(wrapper, "fragments", number, minimum=0)
  is_numbered = bool(numbers) and set(numbers) == set(range(max(numbers) + 1))
  if not is_numbered or (period is not None and max(numbers) >= period):
    raise ValueError(
      f"{wrapper}: fragments must be an int, or number the fragments from 0, every number used, at"
      f" most communication_period of them, {period}; got {fragments}."
    )
  if shard_center and any(isinstance(x, _NUMBERS) for x in entries):
    what = f"{wrapper}: with shard_center fragments must hold whole variables, an int for each"
    raise ValueError(f"{what}; got {fragments}.")


def _numbers(entry):
  """The numbers in a leaf of `fragments`."""
  if not isinstance(entry, _NUMBERS):
    return [entry]
  return np.asarray(entry.numbers if isinstance(entry, AlongAxis) else entry).ravel().tolist()


def plan(wrapper: str, params: Tree, fragments: Any) -> list[Fragment]:
  """The fragments of these parameters."""
  leaves, treedef = jax.tree.flatten(params)
  if isinstance(fragments, int | np.integer):
    # None may be empty.
    num_fragments = max(1, min(int(fragments), len(leaves)))
    entries: list[Any] = _by_size(leaves, num_fragments)
  else:
    num_fragments = max(max(_numbers(x)) for x in jax.tree.leaves(fragments)) + 1
    is_entry = _checks.is_a(int, np.integer, *_NUMBERS)
    requirement = "ints from 0, or arrays of them"
    entries = _checks.spread(wrapper, "fragments", fragments, params, is_entry, requirement)
  inexact = [i for i, x in enumerate(leaves) if _numerics.is_inexact(x)]
  cut_ones = [i for i in inexact if isinstance(entries[i], _NUMBERS)]
  names = _paths.named_leaves(params) if cut_ones else []
  cuts = {i: _cut(wrapper, names[i][0], np.shape(leaves[i]), entries[i]) for i in cut_ones}
  numbers = {i: set(_numbers(entries[i])) for i in inexact}
  return [
    Fragment(
      k,
      num_fragments,
      treedef,
      [i for i in inexact if k in numbers[i]],
      {i: cut for i, cut in cuts.items() if k in cut.numbers},
    )
    for k in range(num_fragments)
  ]


def _cut(wrapper, name, shape, entry):
  entry = entry if isinstance(entry, AlongAxis) else AlongAxis(entry)
  numbers, axis = np.asarray(entry.numbers), entry.axis
  is_axis = -len(shape) <= axis < len(shape)
  if not is_axis or numbers.shape != (shape[axis],):
    what = f"{wrapper}: fragments must number every entry of {name} {list(shape)} along its axis"
    raise ValueError(f"{what} {axis}; got {list(numbers.shape)} numbers.")
  return Cut(axis % len(shape) - len(shape), tuple(numbers.tolist()))


def forms(fragments: Sequence[Fragment]) -> dict[str, Any]:
  """What a state depends on: the number of fragments, and the variables that are split."""
  cuts = tuple(sorted({item for fragment in fragments for item in fragment.cuts.items()}))
  return {"fragments": len(fragments)} | ({"cuts": cuts} if cuts else {})


def joined(parts: Sequence[Tree], cuts: Mapping[int, Cut]) -> Tree:
  """Whole variables, from the parts of all fragments and the variables without a fragment."""
  numbers = itertools.count()

  def whole(*entries):
    present = [x for x in entries if x is not None]
    if not present:
      return None
    cut = cuts.get(next(numbers))
    return present[0] if cut is None else cut.joined(entries)

  return jax.tree.map(whole, *parts, is_leaf=lambda x: x is None)


def others(params: Tree) -> list[Fragment]:
  """A fragment of the integers, random keys and the like, as a list; empty if there are none."""
  leaves, treedef = jax.tree.flatten(params)
  numbers = [i for i, x in enumerate(leaves) if not _numerics.is_inexact(x)]
  return [Fragment(0, 1, treedef, numbers, {})] if numbers else []


def _by_size(leaves, num_fragments):
  """The fragment of each variable: adjacent variables together, with about equal bytes in each."""
  sizes = [
    math.prod(np.shape(x)) * getattr(x, "dtype", np.dtype("float32")).itemsize for x in leaves
  ]
  total = sum(sizes)  # bytes
  if not total:
    return [0] * len(sizes)
  # A variable belongs to the fragment that contains the middle of its bytes, so that none is split.
  # For a last variable without elements, that is the end of all.
  middles = np.cumsum([0, *sizes])[:-1] + np.asarray(sizes) / 2
  return [min(num_fragments - 1, int(middle * num_fragments / total)) for middle in middles]
