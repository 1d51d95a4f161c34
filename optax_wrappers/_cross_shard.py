"""Reduction of updates across shards, inside the optimizer."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_wrappers import _checks, _collectives, _numerics, _reduce
from optax_wrappers._state import WrapperState, reduced, state

Tree = Any
REDUCTIONS = ("mean", "sum")


@state
class CrossShardState(WrapperState):
  """State of `cross_shard` with `nonfinite="drop"`; otherwise its state is the inner state.

  Attributes:
    nonfinite: shards' updates left out so far for a NaN or an infinity; int32 scalar.
    inner_state: state of the wrapped optimizer.
  """

  shared_fields = frozenset({"nonfinite"})
  may_skip = True

  nonfinite: jax.Array
  inner_state: Tree


def all_reduce(
  axis_name: _collectives.AxisName = "batch",
  *,
  reduction: str = "mean",
  axis_index_groups: Sequence[Sequence[int]] | None = None,
  invariant: str = "summed",
  sharded: Tree | Callable[[Tree], Tree] = False,
  bucketed: bool = True,
) -> optax.GradientTransformationExtraArgs:
  """Replaces every update by its mean or sum over the shards: the stateless half of `cross_shard`, for a chain.

  With N shards and updates `g_i`: mean `(1/N) sum_i g_i`, sum `sum_i g_i`; with weights `w_i`, mean
  `sum_i w_i g_i / sum_i w_i` and sum `sum_i w_i g_i`. A shard of weight zero adds nothing, not even a NaN, and if all
  weights are zero the updates are zero.

  Args:
    axis_name: the axis or axes of shard_map, pmap or vmap to reduce over. None: a single shard, nothing is sent.
    reduction: "mean" or "sum".
    axis_index_groups: equal-sized groups of shard indices that together are a permutation of the axis; each group
      reduces on its own and its parameters go their own way.
    invariant: what an update is that shard_map's types show to be equal on all shards already. "summed": the sum over
      the shards, which is what `jax.grad` returns for a replicated parameter under shard_map's default
      `check_vma=True`; the mean then divides it by N. "reduced": the result already. "error": raise.
    sharded: which parameters are themselves divided over the axis (FSDP, ZeRO, experts): bools or the parameters'
      PartitionSpecs, of the updates' structure or a prefix of it, or a function from the updates to these. The gradient
      of such a part arrives summed, because the backward pass of an all-gather is a reduce-scatter, and other shards
      hold other parts. Nothing is sent for it over the axes that divide it; the mean divides it by N.
    bucketed: send small leaves of one dtype together, and large ones alone. The numbers are the same either way.

  Returns:
    A stateless gradient transformation.

  Raises:
    ValueError: for arguments out of range; in update, for an axis that is not bound, groups that do not fit the axis,
      per-shard weights on updates that are already summed, a negative weight.
    TypeError: in update, for integer updates.

  Extra args:
    weight: real scalar, at least 0, each shard's own; not forwarded. In a chain every link gets it, so reduce over
      several axes at once and not in two links. What a wrapper outside knows of the weight of a
      shard's updates (`drop_stale` of stale ones, `gather_towers` of weighted towers) is multiplied in.

  **Communication**: every update leaf once per step, in its own dtype (float16 and float8 as float32, so that no sum
  overflows); with weights one float32 scalar more; with groups a leaf as many times as there are groups. Nothing for
  leaves that are already equal on all shards.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = optax.chain(optax.clip(2.0), ow.all_reduce("batch"), optax.sgd(1.0))
    >>> step = lambda grad: tx.update(grad, tx.init(grad))[0]
    >>> print(jax.vmap(step, axis_name="batch")(jnp.array([0.0, 1.0, 2.0, 3.0])))
    [-1.25 -1.25 -1.25 -1.25]

  Source: the reduction of tf.contrib.tpu.CrossShardOptimizer. TensorFlow puts the 1/N on the loss and sums; here the
  division is in the reduction, so that what stands before it in a chain sees the unscaled per-shard gradient.
  """
  return _all_reduce("all_reduce", axis_name, reduction, axis_index_groups, invariant, sharded, bucketed)


def cross_shard(
  inner: optax.GradientTransformation,
  axis_name: _collectives.AxisName = "batch",
  *,
  reduction: str = "mean",
  axis_index_groups: Sequence[Sequence[int]] | None = None,
  invariant: str = "summed",
  sharded: Tree | Callable[[Tree], Tree] = False,
  nonfinite: str = "propagate",
  bucketed: bool = True,
) -> optax.GradientTransformationExtraArgs:
  """Reduces the updates across shards, then calls `inner`, once on every shard with the same numbers.

  `inner` sees `all_reduce(axis_name, ...)` of the updates; see there for the maths. The state is the inner state,
  unchanged, and the same on all shards (with groups: of a group).

  Args:
    inner: the optimizer to wrap.
    axis_name: as in `all_reduce`.
    reduction: as in `all_reduce`.
    axis_index_groups: as in `all_reduce`.
    invariant: as in `all_reduce`.
    sharded: as in `all_reduce`.
    nonfinite: what a shard with a NaN or an infinity in its updates does. "propagate": spreads it. "drop": is left out
      of the mean or sum, as if its weight were zero, and is counted; if no shard of a weight above zero is left, the
      step is dropped, and parameters and inner state stay as they were.
    bucketed: as in `all_reduce`.

  Returns:
    The wrapped optimizer. With `nonfinite="drop"` its state is a `CrossShardState`.

  Raises:
    ValueError, TypeError: as `all_reduce`.

  Extra args:
    weight: real scalar, each shard's own; not forwarded. All others reach `inner`.

  **Communication**: as `all_reduce`: every gradient byte once per step. With `nonfinite="drop"` three scalars more.

  Examples:
    Under shard_map's default types `jax.grad` of a replicated parameter is already the sum over the shards. The mean is
    the mean all the same:

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import PartitionSpec as P
    >>> tx = ow.cross_shard(optax.sgd(1.0), "batch")
    >>> def step(w, x):
    ...   grad = jax.grad(lambda w: jnp.mean(w * x))(w)
    ...   return optax.apply_updates(w, tx.update(grad, tx.init(w), w)[0])
    >>> mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P())
    >>> print(jax.jit(sharded)(jnp.array(0.0), jnp.array([0.0, 1.0, 2.0, 3.0])))
    -1.5

  Source: tf.contrib.tpu.CrossShardOptimizer.
  """
  wrapper = "cross_shard"
  _checks.choice(wrapper, "nonfinite", nonfinite, ("propagate", "drop"))
  inner = _checks.optimizer(wrapper, inner)
  reduce = _all_reduce(wrapper, axis_name, reduction, axis_index_groups, invariant, sharded, bucketed)
  names = _collectives.axis_names(axis_name)

  def init_fn(params):
    inner_state = inner.init(params)
    return reduced(inner_state) if names else inner_state

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    with _reduce.passage():
      updates, _ = reduce.update(updates, optax.EmptyState(), params, weight=weight)
      return inner.update(updates, state, params, **extra_args)

  if nonfinite == "propagate":
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
  if axis_index_groups is not None:
    raise ValueError(
      f'{wrapper}: nonfinite="drop" decides for the whole axis; it cannot be used with axis_index_groups.'
    )
  if sharded is not False:
    raise ValueError(
      f'{wrapper}: nonfinite="drop" cannot take one shard\'s NaN out of a gradient that is summed already, as those of'
      " sharded parameters are. Wrap them apart: optax.partition with one cross_shard for each kind."
    )

  def dropping_init_fn(params):
    return CrossShardState(nonfinite=jnp.zeros((), jnp.int32), inner_state=init_fn(params))

  def dropping_update_fn(updates, state, params=None, *, weight=None, **extra_args):
    _collectives.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    leaves = jax.tree.leaves(updates)
    if invariant == "summed":
      for path, open_names in zip(_paths_of(updates), _collectives.unreduced_names(leaves, names), strict=True):
        _check_own(wrapper, path, names, open_names, "a sum from which one shard's NaN cannot be taken out any more")
    _reduce.note(f'{wrapper}(nonfinite="drop")', names, _paths_of(updates), is_sum=False, is_weighted=True)
    weight = _given(wrapper, weight, leaves)
    if weight is None:
      weight = jnp.ones((), _numerics.weight_dtype(leaves))
    counted, _ = _reduce.take_weight(wrapper, weight, leaves, _paths_of(updates), names)
    if reduction == "mean":
      weight = counted
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves] or [jnp.array(True)]).all()
    weight = jnp.where(finite, weight, 0)
    counts = jnp.stack([finite, finite & (counted != 0)]).astype(jnp.int32)
    num_finite, num_counted = _collectives.psum(counts, names)
    accept = num_counted > 0
    # inner runs in every step: a branch could leave some shards waiting in a collective.
    outer = _reduce.surrounding()
    before = () if outer is None else outer.names
    with _reduce.passage(handed=None, by_path={}) as passage:
      new_updates, inner_state = update_fn(updates, state.inner_state, params, weight=weight, **extra_args)
    _reduce.require_decided(wrapper, 'nonfinite="drop"', accept, names, before, passage)
    num_nonfinite = _collectives.axis_size(names) - num_finite
    nonfinite = _numerics.saturating_add(state.nonfinite, num_nonfinite)
    _collectives.require_like(nonfinite, state.nonfinite, wrapper, "CrossShardState.nonfinite")
    return _numerics.zeros_unless(accept, new_updates), CrossShardState(
      nonfinite=nonfinite, inner_state=_numerics.select(accept, inner_state, state.inner_state)
    )

  return optax.GradientTransformationExtraArgs(dropping_init_fn, dropping_update_fn)


def _all_reduce(wrapper, axis_name, reduction, groups, invariant, sharded, bucketed):
  """`all_reduce`, its errors under the name of the public function."""
  names = _collectives.axis_names(axis_name)
  _checks.choice(wrapper, "reduction", reduction, REDUCTIONS)
  _checks.choice(wrapper, "invariant", invariant, ("summed", "reduced", "error"))
  if groups is not None:
    groups = _check_groups(wrapper, names, groups)
    if sharded is not False:
      raise ValueError(
        f"{wrapper}: sharded parameters are divided over the whole axis; they cannot be used with axis_index_groups."
      )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    _collectives.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    if groups is not None and sum(map(len, groups)) != _collectives.axis_size(names):
      raise ValueError(
        f"{wrapper}: axis_index_groups must be a permutation of range({_collectives.axis_size(names)}), the shards of"
        f" axis {names[0]!r}; got {groups}."
      )
    leaves, treedef = jax.tree.flatten(updates)
    paths = _paths_of(updates)
    divided = _divided_names(wrapper, sharded, updates, names)
    weight = _given(wrapper, weight, leaves)
    if names:
      is_sum = reduction == "sum"
      _reduce.note(f"{wrapper} over {names}", names, paths, is_sum=is_sum, is_weighted=weight is not None)
    pending, known_total = _reduce.handed_in(wrapper, paths, names), None
    if weight is not None and any(path in getattr(_reduce.surrounding(), "by_path", ()) for path in paths):
      raise ValueError(
        f"{wrapper}: weight was taken already by a reduction before this one in the chain. Reduce over all the axes at"
        " once: axis_name=(..., ...)."
      )
    if reduction == "mean":
      weight, known_total = _reduce.take_weight(wrapper, weight, leaves, paths, names)
    total_of = functools.cache(
      lambda over: known_total if known_total is not None and over == names else sum_of(weight, over)
    )

    open_names = _collectives.unreduced_names(leaves, names)
    open_names = [
      tuple(name for name in mine if name not in parts) for mine, parts in zip(open_names, divided, strict=True)
    ]
    for path, mine, parts in zip(paths, open_names, divided):
      if parts and weight is not None:
        raise ValueError(
          f"{wrapper}: updates{path} is sharded over {parts}, so its gradient was summed without the weights (of the"
          " extra arg, or of stale shards and towers outside). Weigh the loss instead: multiply it by weight *"
          " num_shards / psum(weight)."
        )
      check_invariant(path, (*mine, *parts), weight)
    if weight is not None:
      for path, leaf in zip(paths, leaves):
        others = _collectives.varying(weight) - _collectives.varying(leaf) - set(names)
        if others:
          raise ValueError(
            f"{wrapper}: weight differs over {sorted(map(str, others))}, over which updates{path}"
            " has been reduced already. Reduce over all the axes at once: axis_name="
            f"{(*names, *sorted(map(str, others)))!r}."
          )
    # Leaves that are still to be reduced over the same axes are reduced together.
    kinds: dict[Any, list[int]] = {}
    for i, kind in enumerate(zip(open_names, divided)):
      kinds.setdefault(kind, []).append(i)
    for (mine, parts), chosen in kinds.items():
      counted = names if invariant == "summed" else (*mine, *parts)
      for i, result in zip(chosen, reduce_leaves([leaves[i] for i in chosen], mine, counted, weight, total_of)):
        leaves[i] = result

    passage = _reduce.tell(names, paths, leaves, divided)
    if passage is not None:
      now = None
      if reduction == "mean" and weight is not None:
        now = _reduce.Handed(total_of(names))
      elif pending is not None:  # a sum: of shards of one weight it has that weight
        is_equal = not _collectives.unreduced_names([pending.weight], names)[0]
        now = dataclasses.replace(pending, is_lost=pending.is_lost or not is_equal)
      if now is not None or weight is not None or passage.handed is None or pending is not None:
        passage.by_path.update(dict.fromkeys(paths, now))
    return treedef.unflatten(leaves), state

  def check_invariant(path, open_names, weight):
    if all(name in open_names for name in names) or (invariant == "reduced" and not open_names):
      return
    equal = {name for name in names if name not in open_names}
    if invariant == "error":
      _check_own(wrapper, path, names, open_names, 'and invariant="error" was given')
    elif groups is not None and invariant == "summed":
      why = "a sum over the whole axis that cannot be split into groups any more"
      _check_own(wrapper, path, names, open_names, why)
    elif weight is not None and equal & _collectives.varying(weight):
      why = "summed without the weights, which differ from shard to shard"
      _check_own(wrapper, path, names, open_names, why)

  def sum_of(weight, over):
    """The sum of a scalar over shards; what its type shows to be equal is not sent."""
    (open_names,) = _collectives.unreduced_names([weight], over)
    if groups is not None:
      return _collectives.group_psum(weight, names[0], groups) if open_names else weight * len(groups[0])
    rest = tuple(name for name in over if name not in open_names)
    return _collectives.psum(weight, open_names) * _collectives.axis_size(rest)

  def total(leaves, open_names):
    if groups is not None:
      return _collectives.group_psum(leaves, names[0], groups) if open_names else leaves
    return _collectives.psum(leaves, open_names, bucketed)

  def reduce_leaves(leaves, open_names, counted, weight, total_of):
    if names and not counted:
      return leaves
    dtypes = [leaf.dtype for leaf in leaves]
    leaves = [leaf.astype(_numerics.sum_dtype(leaf.dtype)) for leaf in leaves]
    if weight is not None:
      factor = weight
      if reduction == "mean":
        factor = _numerics.share(weight, total_of(counted))
      leaves = [_numerics.scale(leaf, factor) for leaf in leaves]
    leaves = total(leaves, open_names)
    if weight is None and reduction == "mean" and counted:
      count = len(groups[0]) if groups is not None else _collectives.axis_size(counted)
      leaves = [leaf / count for leaf in leaves]
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes)]

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def _paths_of(updates):
  return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(updates)]


def _given(wrapper, weight, leaves):
  """The extra arg as a weight of these updates, or None."""
  return None if weight is None else _checks.weight(wrapper, weight).astype(_numerics.weight_dtype(leaves))


def _divided_names(wrapper, sharded, updates, names):
  """For each leaf of `updates` those of `names` over which its parameter is divided."""
  leaves = jax.tree.leaves(updates)
  if sharded is False or not leaves:
    return [()] * len(leaves)
  sharded = sharded(updates) if callable(sharded) else sharded

  def of(entry):
    if not isinstance(entry, PartitionSpec):
      return names if entry else ()
    over = {name for part in entry if part is not None for name in (part if isinstance(part, tuple) else (part,))}
    return tuple(name for name in names if name in over)

  kinds, needed = bool | np.bool_ | PartitionSpec, "Python bools or PartitionSpecs"
  return [of(entry) for entry in _checks.spread(wrapper, "sharded", sharded, updates, kinds, needed)]


def _check_own(wrapper, path, names, open_names, problem):
  """Raises if an update is already equal on all shards of some of the axes."""
  equal = tuple(name for name in names if name not in open_names)
  if equal:
    raise ValueError(
      f"{wrapper}: updates{path} is already equal on all shards of {equal}, {problem}. jax.grad"
      " sums the gradient of a replicated parameter over the shards under check_vma=True. Differentiate with respect to"
      f" per_shard(params, {equal[0] if len(equal) == 1 else equal!r}) to keep each shard's own gradient."
    )


def _check_groups(wrapper, names, groups):
  if len(names) != 1:
    raise ValueError(f"{wrapper}: axis_index_groups needs exactly one axis name, got axis_name={names!r}.")
  if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
    raise ValueError(f"{wrapper}: axis_index_groups must be a list of lists of shard indices, got {groups!r}.")
  groups = [[_checks.integer(wrapper, "axis_index_groups", i) for i in group] for group in groups]
  if sorted(itertools.chain(*groups)) != list(range(sum(map(len, groups)))) or not groups:
    raise ValueError(
      f"{wrapper}: axis_index_groups must be a permutation of the axis, every shard index from 0 exactly once; got"
      f" {groups}."
    )
  if len(set(map(len, groups))) != 1:
    raise ValueError(f"{wrapper}: axis_index_groups must be groups of equal size, got {groups}.")
  return groups
