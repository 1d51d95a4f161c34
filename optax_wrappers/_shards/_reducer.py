"""What `all_reduce` and `cross_shard` share: a reduction, for updates of every kind.

An update may be local, summed by autodiff over some of the axes, or that of a sharded parameter.
"""

import functools
import itertools
import warnings
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from optax_wrappers._core import _axes, _checks, _weights
from optax_wrappers._core._types import AxisNames, Invariant
from optax_wrappers._core._weights import Reduced
from optax_wrappers._shards import _compress, _reduce, _rows
from optax_wrappers.reductions import Reduction


class _Leaf(NamedTuple):
  """One update, and the axes over which to reduce it."""

  path: str
  value: jax.Array
  open_names: AxisNames  # over which it must be sent
  # That shard its parameter, over which it is already summed.
  divided: AxisNames
  unfinished: AxisNames  # both: it is not equal on all shards


# Arguments that cannot be combined, and why.
_DIVIDES = "shard_state"
_RULE, DROP = "one of optax_wrappers.reductions", 'nonfinite="drop"'
_CONTRADICTIONS = [
  ("axis_index_groups", "codec", "make the groups an axis of the mesh"),
  ("axis_index_groups", "sharded", "sharded parameters are divided over the whole axis"),
  ("axis_index_groups", _RULE, "it looks at all shards"),
  ("sharded", _RULE, "the gradients of sharded parameters are sums, not local"),
  ("codec", _RULE, "it needs each shard's whole gradient"),
  (DROP, _RULE, "it needs all shards"),
  (_DIVIDES, "axis_index_groups", "it divides over the whole axis"),
  (_DIVIDES, "sharded", "sharded parameters are divided already: use optax.partition"),
  (_DIVIDES, "codec", "a code is of a whole update"),
  (_DIVIDES, _RULE, "it needs each shard's whole gradient"),
  (DROP, "axis_index_groups", "it decides for the whole axis"),
  (DROP, "sharded", "the gradients of sharded parameters are sums: wrap them separately"),
]


class Reducer(NamedTuple):
  """The checked arguments of `all_reduce`; errors name the public function."""

  wrapper: str
  names: AxisNames
  reduction: _reduce.Weighted | _rows.OfRows
  groups: list[list[int]] | None
  invariant: str
  sharded: Any
  compression: _compress.Compressor | None
  node: Reduced

  @classmethod
  def make(
    cls,
    wrapper,
    axis_name,
    reduction,
    groups,
    invariant,
    sharded,
    codec,
    drops=False,
    divides=False,
  ):
    compression = _compress.Compressor.make(wrapper, codec)
    names = _axes.axis_names(axis_name)
    _checks.choice(wrapper, "invariant", invariant, get_args(Invariant))
    _rows.check(wrapper, reduction)
    uses = {
      "axis_index_groups": groups is not None,
      "codec": codec is not None,
      "sharded": sharded is not False,
      _RULE: isinstance(reduction, Reduction),
      DROP: drops,
      _DIVIDES: divides,
    }
    for name, other, why in _CONTRADICTIONS:
      if uses[name] and uses[other]:
        raise ValueError(f"{wrapper}: {name} cannot be used with {other}: {why}.")
    if groups is not None:
      groups = _check_groups(wrapper, names, groups)
    # Only the object chosen here knows how a sum is computed.
    if uses[_RULE]:
      reduction = _rows.OfRows(reduction, _rows.OverShards())
    else:
      over = _reduce.ToShares(names=names) if divides else _reduce.OverShards(groups)
      reduction = _reduce.Weighted(over, is_mean=reduction == "mean")
    if compression and not compression.feedback and compression.codec.feedback == "needed":
      warnings.warn(
        f"{wrapper}: {compression.codec.name} without feedback loses what it does not send, and"
        " need not converge. Leave feedback=False out.",
        stacklevel=4,
      )
    if not names:  # a single shard sends nothing
      compression = None
    node = Reduced(names, reduction.is_mean, is_divided=divides)
    return cls(wrapper, names, reduction, groups, invariant, sharded, compression, node)

  def check_state(self, state, state_class, weight):
    """Raises for a state of other arguments, and for a weight that was lost."""
    _weights.require_reduced(self.wrapper, state, state_class, self.node, weight)
    if self.compression is None and state.compressed is not None:
      raise ValueError(
        f"{self.wrapper}: the state has the residual of a codec, but codec or axis_name is None."
        " Pass the codec of that run, or a new state from init."
      )

  def start(self, params):
    """The initial state of a codec; None without one."""
    return self.compression and self.compression.start(params, self._flags(params))

  def _flags(self, tree):
    """For each leaf of a tree of the parameters' shapes, whether it is compressed."""
    divided = _divided_names(self.wrapper, self.sharded, tree, self.names)
    flags = self.compression.flags(tree)
    return [flag and set(over) != set(self.names) for flag, over in zip(flags, divided)]

  def reduce(self, updates, weight, compressed=None):
    """The reduced updates, the state of the codec, and the sum of the shards' weights."""
    known = _axes.require_bound(self.names, self.wrapper)
    updates = _checks.inexact(self.wrapper, updates)
    size, groups = lax.axis_size(self.names), self.groups
    if groups is not None and sum(map(len, groups)) != size:
      raise ValueError(
        f"{self.wrapper}: axis_index_groups must be a permutation of range({size}), got {groups}."
      )
    leaves = self._leaves(updates, known)
    weight = _weights.given(self.wrapper, weight, [leaf.value for leaf in leaves])
    if isinstance(self.reduction, _rows.OfRows):
      _rows.require_votes(self.wrapper, weight, f"reduction={self.reduction.rule.name}")
    self._check(leaves, weight)

    # Sent once for all leaves.
    total_of = functools.cache(lambda over: _reduce.total(self.reduction.summed, weight, over))
    results: list[Any] = [None] * len(leaves)
    if self.compression is not None and size > 1:
      results, compressed = self._compressed(leaves, updates, weight, total_of, compressed)
    results = self._by_kind(leaves, results, weight, total_of)
    total = None if weight is None or not self.reduction.is_mean else total_of(self.names)
    return jax.tree.structure(updates).unflatten(results), compressed, total

  def _compressed(self, leaves, updates, weight, total_of, kept):
    """The reduced leaves, None for uncompressed ones, and the state of the compression."""
    flags = self._flags(updates)
    self.compression.check_kept(kept, updates, flags)
    names = self._compressed_names(list(itertools.compress(leaves, flags)), weight)
    if lax.axis_size(names) == 1:  # nothing is sent
      return [None] * len(leaves), kept
    parts = [
      self.reduction.part(leaf.value, self._counted(leaf.unfinished), weight, total_of)
      if flag and leaf.open_names == names
      else None
      for leaf, flag in zip(leaves, flags)
    ]
    is_void = None if weight is None else total_of(self._counted(names)) == 0
    treedef = jax.tree.structure(updates)
    sums, kept = self.compression.sum(parts, treedef, kept, names, is_void)
    typed = [x if x is None else x.astype(leaf.value.dtype) for x, leaf in zip(sums, leaves)]
    return typed, kept

  def _counted(self, unfinished):
    """The axes whose shards contribute to an update, over which the mean is taken."""
    return self.names if self.invariant == "summed" else unfinished

  def _compressed_names(self, leaves, weight):
    """The axes over which to compress these leaves; none if all of them are reduced."""
    codec, wrapper = self.compression.codec, self.wrapper
    why = "and so was sent in full before it could be compressed"
    for leaf in leaves:
      if self.invariant == "summed" and not leaf.unfinished:
        _require_own(wrapper, leaf.path, self.names, (), why)
    kinds = {leaf.open_names for leaf in leaves if lax.axis_size(leaf.open_names) > 1}
    if not kinds:
      return ()
    mend = "Leave some out with codecs.compression(codec, only=...)."
    if len(kinds) > 1:
      raise ValueError(
        f"{wrapper}: compressed updates must be reduced over the same axes, got {sorted(kinds)}."
        f" {mend}"
      )
    if codec.feedback == "none":
      _rows.require_votes(wrapper, weight, codec.name)
    (names,) = kinds
    sent = sum(leaf.open_names == names for leaf in leaves)
    # A linear codec identifies a variable by its index among them.
    if self.compression.is_linear and sent < len(leaves):
      raise ValueError(
        f"{wrapper}: {codec.name} must send all {len(leaves)} variables that it compresses, got"
        f" {sent}. {mend}"
      )
    return names

  def _leaves(self, updates, known):
    names = _axes.unreduced_names(jax.tree.leaves(updates), self.names, known)
    divided = _divided_names(self.wrapper, self.sharded, updates, self.names)
    leaves = []
    columns = zip(jax.tree.leaves_with_path(updates), names, divided, strict=True)
    for (path, value), over, divided_over in columns:
      open_names = tuple(name for name in over if name not in divided_over)
      path = jax.tree_util.keystr(path)
      leaves.append(_Leaf(path, value, open_names, divided_over, (*open_names, *divided_over)))
    return leaves

  def _check(self, leaves, weight):
    """Raises for an update that is already reduced, if the arguments need local ones."""
    weighed_over = _axes.NONE if weight is None else _axes.varying(weight)
    if weight is not None:
      _check_weighable(self.wrapper, leaves, weighed_over, self.names)
    local_over = frozenset(self.names)  # the axes over which the arguments need local ones
    if isinstance(self.reduction, _rows.OfRows):
      why = "reduced before shards could be distinguished"
    elif self.invariant == "error":
      why = 'and invariant="error" was given'
    elif self.invariant == "summed" and self.groups is not None:
      why = "a sum over the whole axis that cannot be split into groups"
    else:
      # An equal weight would commute with the sum that autodiff has taken.
      local_over = weighed_over
      why = f"{self.invariant} without the weights, which differ from shard to shard"
    local_over = local_over.intersection(self.names)
    for leaf in leaves:
      is_reduced = self.invariant == "reduced" and not leaf.unfinished
      if not is_reduced and local_over.difference(leaf.unfinished):
        _require_own(self.wrapper, leaf.path, self.names, leaf.unfinished, why)

  def _by_kind(self, leaves, results, weight, total_of):
    """Fills in the results that are None, with one collective for all leaves over equal axes."""
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
      if results[i] is None:
        kinds.setdefault((leaf.open_names, leaf.unfinished), []).append(i)
    for (open_names, unfinished), chosen in kinds.items():
      counted = self._counted(unfinished)
      values = [leaves[i].value for i in chosen]
      if counted or not self.names:
        values = self.reduction.reduce(values, open_names, counted, weight, total_of)
      elif self.node.is_divided:  # invariant="reduced", so there is nothing to send
        values = self.reduction.summed.sum(values, ())
      for i, value in zip(chosen, values):
        results[i] = value
    return results


def _check_weighable(wrapper, leaves, weighed_over, names):
  """Raises for an update that was summed before it could be weighted."""
  varying = _axes.all_varying([leaf.value for leaf in leaves])
  for leaf, over in zip(leaves, varying):
    if leaf.divided:
      raise ValueError(
        f"{wrapper}: updates{leaf.path} is sharded over {leaf.divided}, so its gradient was summed"
        " without the weights. Weight the loss instead, by weight * num_shards / psum(weight)."
      )
    others = sorted(map(str, weighed_over - over - set(names)))
    if others:
      raise ValueError(
        f"{wrapper}: weight differs over {others}, over which updates{leaf.path} has been reduced"
        f" already. Reduce over all the axes at once: axis_name={(*names, *others)!r}."
      )


def _divided_names(wrapper, sharded, updates, names):
  """For each leaf of `updates`, those of `names` over which its parameter is sharded."""
  leaves = jax.tree.leaves(updates)
  if sharded is False or not leaves:
    return [()] * len(leaves)
  sharded = sharded(updates) if _checks.is_function(sharded) else sharded

  def of(entry):
    if not isinstance(entry, PartitionSpec):
      return names if entry else ()
    over = _axes.names_in(entry, range(len(entry)))
    return tuple(name for name in names if name in over)

  kinds, described = _checks.is_a(bool, np.bool_, PartitionSpec), "Python bools or PartitionSpecs"
  return list(map(of, _checks.spread(wrapper, "sharded", sharded, updates, kinds, described)))


def require_each_own(wrapper, updates, names, problem):
  """Raises if any update is already equal on all shards of some of the axes."""
  over = _axes.unreduced_names(jax.tree.leaves(updates), names)
  for (path, _), open_names in zip(jax.tree.leaves_with_path(updates), over):
    _require_own(wrapper, jax.tree_util.keystr(path), names, open_names, problem)


def _require_own(wrapper, path, names, open_names, problem):
  """Raises if an update is already equal on all shards of some of the axes."""
  equal = tuple(name for name in names if name not in open_names)
  if equal:
    raise ValueError(
      f"{wrapper}: updates{path} is already equal on all shards of {equal}, {problem}. Under"
      " check_vma=True jax.grad sums the gradient of a replicated parameter over the shards."
      f" Differentiate per_shard(params, {equal[0] if len(equal) == 1 else equal!r})."
    )


def _check_groups(wrapper, names, groups):
  name, is_list = f"{wrapper}: axis_index_groups", _checks.is_a(list, tuple)
  if len(names) != 1:
    raise ValueError(f"{name} needs exactly one axis name, got axis_name={names!r}.")
  if not is_list(groups) or not all(map(is_list, groups)):
    raise ValueError(f"{name} must be a list of lists of shard indices, got {groups!r}.")
  groups = [[_checks.integer(wrapper, "axis_index_groups", i) for i in group] for group in groups]
  if sorted(itertools.chain(*groups)) != list(range(sum(map(len, groups)))) or not groups:
    raise ValueError(f"{name} must be a permutation of the axis's shard indices, got {groups}.")
  if len(set(map(len, groups))) != 1:
    raise ValueError(f"{name} must be groups of equal size, got {groups}.")
  return groups
