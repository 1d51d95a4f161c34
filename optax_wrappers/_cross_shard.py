"""Reduction of updates across shards, inside the optimizer."""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

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
  """Replaces every update by its mean or sum over the shards: the stateless half of `cross_shard`,
  for a chain.

  With N shards and updates `g_i`: mean `(1/N) sum_i g_i`, sum `sum_i g_i`; with weights `w_i`, mean
  `sum_i w_i g_i / sum_i w_i` and sum `sum_i w_i g_i`. A shard of weight zero adds nothing, not even
  a NaN, and if all weights are zero the updates are zero.

  Args:
    axis_name: the axis or axes of shard_map, pmap or vmap to reduce over. None: a single shard,
      nothing is sent.
    reduction: "mean" or "sum".
    axis_index_groups: equal-sized groups of shard indices that together are a permutation of the
      axis; each group reduces on its own and its parameters go their own way.
    invariant: what an update is that shard_map's types show to be equal on all shards already.
      "summed": the sum over the shards, which is what `jax.grad` returns for a replicated parameter
      under shard_map's default `check_vma=True`; the mean then divides it by N. "reduced": the
      result already. "error": raise.
    sharded: which parameters are themselves divided over the axis (FSDP, ZeRO, experts): bools or
      the parameters' PartitionSpecs, of the updates' structure or a prefix of it, or a function
      from the updates to these. The gradient of such a part arrives summed, because the backward
      pass of an all-gather is a reduce-scatter, and other shards hold other parts. Nothing is sent
      for it over the axes that divide it; the mean divides it by N.
    bucketed: send small leaves of one dtype together, and large ones alone. The numbers are the
      same either way.

  Returns:
    A stateless gradient transformation.

  Raises:
    ValueError: for arguments out of range; in update, for an axis that is not bound, groups that do
      not fit the axis, per-shard weights on updates that are already summed, a negative weight.
    TypeError: in update, for integer updates.

  Extra args:
    weight: real scalar, at least 0, each shard's own; not forwarded. In a chain every link gets it,
      so reduce over several axes at once and not in two links. What a wrapper outside knows of the
      weight of a shard's updates (`drop_stale` of stale ones, `gather_towers` of weighted towers)
      is multiplied in.

  **Communication**: every update leaf once per step, in its own dtype (float16 and float8 as
  float32, so that no sum overflows); with weights one float32 scalar more; with groups a leaf as
  many times as there are groups. Nothing for leaves that are already equal on all shards.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = optax.chain(optax.clip(2.0), ow.all_reduce("batch"), optax.sgd(1.0))
    >>> step = lambda grad: tx.update(grad, tx.init(grad))[0]
    >>> print(jax.vmap(step, axis_name="batch")(jnp.array([0.0, 1.0, 2.0, 3.0])))
    [-1.25 -1.25 -1.25 -1.25]

  Source: the reduction of tf.contrib.tpu.CrossShardOptimizer. TensorFlow puts the 1/N on the loss
    and sums; here the
  division is in the reduction, so that what stands before it in a chain sees the unscaled per-shard
  gradient.
  """
  return _all_reduce(
    "all_reduce", axis_name, reduction, axis_index_groups, invariant, sharded, bucketed
  )


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
  """Reduces the updates across shards, then calls `inner`, once on every shard with the same
  numbers.

  `inner` sees `all_reduce(axis_name, ...)` of the updates; see there for the maths. The state is
  the inner state, unchanged, and the same on all shards (with groups: of a group).

  Args:
    inner: the optimizer to wrap.
    axis_name: as in `all_reduce`.
    reduction: as in `all_reduce`.
    axis_index_groups: as in `all_reduce`.
    invariant: as in `all_reduce`.
    sharded: as in `all_reduce`.
    nonfinite: what a shard with a NaN or an infinity in its updates does. "propagate": spreads it.
      "drop": is left out of the mean or sum, as if its weight were zero, and is counted; if no
      shard of a weight above zero is left, the step is dropped, and parameters and inner state stay
      as they were.
    bucketed: as in `all_reduce`.

  Returns:
    The wrapped optimizer. With `nonfinite="drop"` its state is a `CrossShardState`.

  Raises:
    ValueError, TypeError: as `all_reduce`.

  Extra args:
    weight: real scalar, each shard's own; not forwarded. All others reach `inner`.

  **Communication**: as `all_reduce`: every gradient byte once per step. With `nonfinite="drop"`
  three scalars more.

  Examples:
    Under shard_map's default types `jax.grad` of a replicated parameter is already the sum over the
    shards. The mean is the mean all the same:

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
  reduce = _all_reduce(
    wrapper, axis_name, reduction, axis_index_groups, invariant, sharded, bucketed
  )
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
      f'{wrapper}: nonfinite="drop" decides for the whole axis; it cannot be used with'
      " axis_index_groups."
    )
  if sharded is not False:
    raise ValueError(
      f'{wrapper}: nonfinite="drop" cannot take one shard\'s NaN out of a gradient that is summed'
      " already, as those of"
      " sharded parameters are. Wrap them apart: optax.partition with one cross_shard for each"
      " kind."
    )

  def dropping_init_fn(params):
    return CrossShardState(nonfinite=jnp.zeros((), jnp.int32), inner_state=init_fn(params))

  def dropping_update_fn(updates, state, params=None, *, weight=None, **extra_args):
    _collectives.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    leaves = jax.tree.leaves(updates)
    if invariant == "summed":
      for path, open_names in zip(
        _reduce.paths_of(updates), _collectives.unreduced_names(leaves, names), strict=True
      ):
        _check_own(
          wrapper,
          path,
          names,
          open_names,
          "a sum from which one shard's NaN cannot be taken out any more",
        )
    _reduce.note(
      f'{wrapper}(nonfinite="drop")',
      names,
      _reduce.paths_of(updates),
      is_sum=False,
      is_weighted=True,
    )
    weight = _reduce.given_weight(wrapper, weight, leaves)
    if weight is None:
      weight = jnp.ones((), _numerics.weight_dtype(leaves))
    counted, _ = _reduce.take_weight(wrapper, weight, leaves, _reduce.paths_of(updates), names)
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
      new_updates, inner_state = update_fn(
        updates, state.inner_state, params, weight=weight, **extra_args
      )
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
        f"{wrapper}: sharded parameters are divided over the whole axis; they cannot be used with"
        " axis_index_groups."
      )
  reducer = _Reducer(wrapper, names, reduction, groups, invariant, sharded, bucketed)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    return reducer.reduce(updates, weight), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


class _Leaf(NamedTuple):
  """One update, and over which axes it is to be reduced.

  Attributes:
    path: its name in an error.
    value: the update.
    open_names: the axes to send it over.
    divided: the axes over which its parameter is divided, so that it is summed already.
  """

  path: str
  value: jax.Array
  open_names: tuple[Hashable, ...]
  divided: tuple[Hashable, ...]


class _Reducer(NamedTuple):
  """The arguments of `all_reduce`, checked."""

  wrapper: str
  names: tuple[Hashable, ...]
  reduction: str
  groups: Any
  invariant: str
  sharded: Any
  bucketed: bool

  def reduce(self, updates, weight):
    """The reduced updates; tells the wrappers outside of it, and takes from them what they know of
    the weight."""
    _collectives.require_bound(self.names, self.wrapper)
    updates = _checks.inexact(self.wrapper, updates)
    self._check_size()
    leaves, weight = (
      self._leaves(updates),
      _reduce.given_weight(self.wrapper, weight, jax.tree.leaves(updates)),
    )
    paths = [leaf.path for leaf in leaves]
    is_mean = self.reduction == "mean"
    if self.names:
      what = f"{self.wrapper} over {self.names}"
      _reduce.note(what, self.names, paths, is_sum=not is_mean, is_weighted=weight is not None)
    if weight is not None:
      _reduce.require_untaken(self.wrapper, paths)
    pending, known_total = _reduce.handed_in(self.wrapper, paths, self.names), None
    if is_mean:
      values = [leaf.value for leaf in leaves]
      weight, known_total = _reduce.take_weight(self.wrapper, weight, values, paths, self.names)
    for leaf in leaves:
      self._check(leaf, weight)

    @functools.cache
    def total_of(over):
      return (
        known_total
        if known_total is not None and over == self.names
        else self._sum_of(weight, over)
      )

    reduced = self._by_kind(leaves, weight, total_of)
    passage = _reduce.tell(self.names, paths, reduced, [leaf.divided for leaf in leaves])
    if passage is not None and is_mean and weight is not None:
      passage.by_path.update(dict.fromkeys(paths, _reduce.Handed(total_of(self.names))))
    elif passage is not None and not is_mean:
      passage.by_path.update(dict.fromkeys(paths, pending and pending.of_sum(self.names)))
    return jax.tree.unflatten(jax.tree.structure(updates), reduced)

  def _check_size(self):
    if self.groups is not None and sum(map(len, self.groups)) != _collectives.axis_size(self.names):
      raise ValueError(
        f"{self.wrapper}: axis_index_groups must be a permutation of"
        f" range({_collectives.axis_size(self.names)}), the shards of axis {self.names[0]!r}; got"
        f" {self.groups}."
      )

  def _leaves(self, updates):
    values = jax.tree.leaves(updates)
    divided = _divided_names(self.wrapper, self.sharded, updates, self.names)
    found = []
    for path, value, over, parts in zip(
      _reduce.paths_of(updates),
      values,
      _collectives.unreduced_names(values, self.names),
      divided,
      strict=True,
    ):
      found.append(_Leaf(path, value, tuple(name for name in over if name not in parts), parts))
    return found

  def _check(self, leaf, weight):
    """Raises on an update that is reduced already, where what is asked for cannot be had of it any
    more."""
    unfinished = (*leaf.open_names, *leaf.divided)
    if weight is not None:
      _check_weighable(self.wrapper, leaf, weight, self.names)
    if self.invariant == "reduced" and not unfinished:
      return
    if self.invariant == "error":
      _check_own(self.wrapper, leaf.path, self.names, unfinished, 'and invariant="error" was given')
    elif self.groups is not None and self.invariant == "summed":
      why = "a sum over the whole axis that cannot be split into groups any more"
      _check_own(self.wrapper, leaf.path, self.names, unfinished, why)
    elif weight is not None and _collectives.varying(weight) & {
      n for n in self.names if n not in unfinished
    }:
      why = "summed without the weights, which differ from shard to shard"
      _check_own(self.wrapper, leaf.path, self.names, unfinished, why)

  def _by_kind(self, leaves, weight, total_of):
    """The reduced leaves; those that are still to be reduced over the same axes are reduced
    together."""
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
      kinds.setdefault((leaf.open_names, leaf.divided), []).append(i)
    reduced = [leaf.value for leaf in leaves]
    for (open_names, divided), chosen in kinds.items():
      counted = self.names if self.invariant == "summed" else (*open_names, *divided)
      if counted or not self.names:
        for i, result in zip(
          chosen,
          self._together([reduced[i] for i in chosen], open_names, counted, weight, total_of),
        ):
          reduced[i] = result
    return reduced

  def _together(self, leaves, open_names, counted, weight, total_of):
    """The mean or sum of leaves over `open_names`, in which the shards over `counted` have their
    part."""
    is_mean = self.reduction == "mean"
    dtypes = [leaf.dtype for leaf in leaves]
    leaves = [leaf.astype(_numerics.sum_dtype(leaf.dtype)) for leaf in leaves]
    if weight is not None:
      factor = _numerics.share(weight, total_of(counted)) if is_mean else weight
      leaves = [_numerics.scale(leaf, factor) for leaf in leaves]
    if self.groups is None:
      leaves = _collectives.psum(leaves, open_names, self.bucketed)
    elif open_names:
      leaves = _collectives.group_psum(leaves, self.names[0], self.groups)
    if weight is None and is_mean and counted:
      count = _collectives.axis_size(counted) if self.groups is None else len(self.groups[0])
      leaves = [leaf / count for leaf in leaves]
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes)]

  def _sum_of(self, weight, over):
    """The sum of a scalar over shards; what its type shows to be equal is not sent."""
    (open_names,) = _collectives.unreduced_names([weight], over)
    if self.groups is not None:
      size = len(self.groups[0])
      return (
        _collectives.group_psum(weight, self.names[0], self.groups) if open_names else weight * size
      )
    rest = tuple(name for name in over if name not in open_names)
    return _collectives.psum(weight, open_names) * _collectives.axis_size(rest)


def _check_weighable(wrapper, leaf, weight, names):
  """Raises on an update that was summed before it could be weighed."""
  if leaf.divided:
    raise ValueError(
      f"{wrapper}: updates{leaf.path} is sharded over {leaf.divided}, so its gradient was summed"
      " without the weights (of the extra arg, or of stale shards and towers outside). Weigh the"
      " loss instead: multiply it by weight * num_shards / psum(weight)."
    )
  others = _collectives.varying(weight) - _collectives.varying(leaf.value) - set(names)
  if others:
    raise ValueError(
      f"{wrapper}: weight differs over {sorted(map(str, others))}, over which updates{leaf.path}"
      " has been reduced already. Reduce over all the axes at once:"
      f" axis_name={(*names, *sorted(map(str, others)))!r}."
    )


def _divided_names(wrapper, sharded, updates, names):
  """For each leaf of `updates` those of `names` over which its parameter is divided."""
  leaves = jax.tree.leaves(updates)
  if sharded is False or not leaves:
    return [()] * len(leaves)
  sharded = sharded(updates) if callable(sharded) else sharded

  def of(entry):
    if not isinstance(entry, PartitionSpec):
      return names if entry else ()
    over = {
      name
      for part in entry
      if part is not None
      for name in (part if isinstance(part, tuple) else (part,))
    }
    return tuple(name for name in names if name in over)

  kinds, needed = bool | np.bool_ | PartitionSpec, "Python bools or PartitionSpecs"
  return [
    of(entry) for entry in _checks.spread(wrapper, "sharded", sharded, updates, kinds, needed)
  ]


def _check_own(wrapper, path, names, open_names, problem):
  """Raises if an update is already equal on all shards of some of the axes."""
  equal = tuple(name for name in names if name not in open_names)
  if equal:
    raise ValueError(
      f"{wrapper}: updates{path} is already equal on all shards of {equal}, {problem}. jax.grad"
      " sums the gradient of a replicated parameter over the shards under check_vma=True."
      " Differentiate with respect to per_shard(params,"
      f" {equal[0] if len(equal) == 1 else equal!r}) to keep each shard's own gradient."
    )


def _check_groups(wrapper, names, groups):
  if len(names) != 1:
    raise ValueError(
      f"{wrapper}: axis_index_groups needs exactly one axis name, got axis_name={names!r}."
    )
  if not isinstance(groups, list | tuple) or not all(
    isinstance(group, list | tuple) for group in groups
  ):
    raise ValueError(
      f"{wrapper}: axis_index_groups must be a list of lists of shard indices, got {groups!r}."
    )
  groups = [[_checks.integer(wrapper, "axis_index_groups", i) for i in group] for group in groups]
  if sorted(itertools.chain(*groups)) != list(range(sum(map(len, groups)))) or not groups:
    raise ValueError(
      f"{wrapper}: axis_index_groups must be a permutation of the axis, every shard index from 0"
      f" exactly once; got {groups}."
    )
  if len(set(map(len, groups))) != 1:
    raise ValueError(f"{wrapper}: axis_index_groups must be groups of equal size, got {groups}.")
  return groups
