"""Reduction of updates across shards, inside the optimizer."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import _checks, _collectives, _numerics
from optax_wrappers._state import WrapperState, state

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

  nonfinite: jax.Array
  inner_state: Tree


def all_reduce(
  axis_name: _collectives.AxisName = "batch",
  *,
  reduction: str = "mean",
  axis_index_groups: Sequence[Sequence[int]] | None = None,
  invariant: str = "summed",
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
    bucketed: send small leaves of one dtype together, and large ones alone. The numbers are the same either way.

  Returns:
    A stateless gradient transformation.

  Raises:
    ValueError: for arguments out of range; in update, for an axis that is not bound, groups that do not fit the axis,
      per-shard weights on updates that are already summed.
    TypeError: in update, for integer updates.

  Extra args:
    weight: real scalar, each shard's own; not forwarded.

  **Communication**: every update leaf once per step, in its own dtype; with weights one float32 scalar more; with
  groups a leaf as many times as there are groups. Nothing for leaves that are already equal on all shards.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = optax.chain(optax.clip(2.0), ow.all_reduce("batch"), optax.sgd(1.0))
    >>> step = lambda grad: tx.update(grad, tx.init(grad))[0]
    >>> print(jax.vmap(step, axis_name="batch")(jnp.array([0.0, 1.0, 2.0, 3.0])))
    [-1.25 -1.25 -1.25 -1.25]

  Source: the reduction of tf.contrib.tpu.CrossShardOptimizer. TensorFlow puts the 1/N on the loss and sums; here the
  division is in the reduction, so that what stands before it in a chain sees the unscaled per-shard gradient.
  """
  return _all_reduce("all_reduce", axis_name, reduction, axis_index_groups, invariant, bucketed)


def cross_shard(
  inner: optax.GradientTransformation,
  axis_name: _collectives.AxisName = "batch",
  *,
  reduction: str = "mean",
  axis_index_groups: Sequence[Sequence[int]] | None = None,
  invariant: str = "summed",
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
    nonfinite: what a shard with a NaN or an infinity in its updates does. "propagate": spreads it. "drop": is left out
      of the mean or sum, as if its weight were zero, and is counted; if none is left, the step is dropped, and
      parameters and inner state stay as they were.
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
  _checks.choice("cross_shard", "nonfinite", nonfinite, ("propagate", "drop"))
  inner = optax.with_extra_args_support(inner)
  reduce = _all_reduce("cross_shard", axis_name, reduction, axis_index_groups, invariant, bucketed)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    updates, _ = reduce.update(updates, optax.EmptyState(), params, weight=weight)
    return inner.update(updates, state, params, **extra_args)

  if nonfinite == "propagate":
    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
  names = _collectives.axis_names(axis_name)
  if axis_index_groups is not None:
    raise ValueError(
      'cross_shard: nonfinite="drop" decides for the whole axis; it cannot be used with axis_index_groups.'
    )

  def init_fn(params):
    return CrossShardState(nonfinite=jnp.zeros((), jnp.int32), inner_state=inner.init(params))

  def dropping_update_fn(updates, state, params=None, *, weight=None, **extra_args):
    _collectives.require_bound(names, "cross_shard")
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates)] or [jnp.array(True)]).all()
    num_finite = _collectives.psum(finite.astype(jnp.int32), names)
    accept = num_finite > 0
    one = jnp.ones((), jnp.float32) if weight is None else jnp.asarray(weight)
    # inner runs in every step: a branch could leave some shards waiting in a collective.
    new_updates, inner_state = update_fn(
      updates, state.inner_state, params, weight=jnp.where(finite, one, jnp.zeros_like(one)), **extra_args
    )
    return _numerics.zeros_unless(accept, new_updates), CrossShardState(
      nonfinite=_numerics.saturating_add(state.nonfinite, _collectives.axis_size(names) - num_finite),
      inner_state=_numerics.select(accept, inner_state, state.inner_state),
    )

  return optax.GradientTransformationExtraArgs(init_fn, dropping_update_fn)


def _all_reduce(wrapper, axis_name, reduction, groups, invariant, bucketed):
  """`all_reduce`, its errors under the name of the public function."""
  names = _collectives.axis_names(axis_name)
  _checks.choice(wrapper, "reduction", reduction, REDUCTIONS)
  _checks.choice(wrapper, "invariant", invariant, ("summed", "reduced", "error"))
  if groups is not None:
    groups = _check_groups(wrapper, names, groups)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    _collectives.require_bound(names, wrapper)
    _checks.inexact_leaves(wrapper, updates)
    if groups is not None and sum(map(len, groups)) != _collectives.axis_size(names):
      raise ValueError(
        f"{wrapper}: axis_index_groups must be a permutation of range({_collectives.axis_size(names)}), the shards of"
        f" axis {names[0]!r}; got {groups}."
      )
    if weight is not None:
      weight = _checks.scalar(wrapper, "weight", weight, jnp.number)
      if jnp.issubdtype(weight.dtype, jnp.complexfloating):
        raise TypeError(f"{wrapper}: weight must be real, got {weight.dtype}.")
      weight = weight.astype(jnp.float64 if weight.dtype == jnp.float64 else jnp.float32)

    # Leaves that still vary over the same axes are reduced together.
    leaves, treedef = jax.tree.flatten(updates)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(updates)]
    open_names = _collectives.unreduced_names(leaves, names)
    for path, mine in zip(paths, open_names):
      _check_invariant(path, mine, weight)
    for mine in dict.fromkeys(open_names):
      chosen = [i for i, other in enumerate(open_names) if other == mine]
      for i, reduced in zip(chosen, reduce_leaves([leaves[i] for i in chosen], mine, weight)):
        leaves[i] = reduced
    return treedef.unflatten(leaves), state

  def _check_invariant(path, open_names, weight):
    equal = tuple(name for name in names if name not in open_names)
    if not equal or (invariant == "reduced" and not open_names):
      return
    problem = None
    if invariant == "error":
      problem = 'and invariant="error" was given'
    elif groups is not None and invariant == "summed":
      problem = "a sum over the whole axis that cannot be split into groups any more"
    elif weight is not None and set(equal) & _collectives.varying(weight):
      problem = "summed without the weights, which differ from shard to shard"
    if problem:
      raise ValueError(
        f"{wrapper}: updates{path} is already equal on all shards of {equal}, {problem}. jax.grad sums the gradient of"
        " a replicated parameter over the shards under shard_map's default types. Differentiate with respect to"
        f" per_shard(params, {equal[0] if len(equal) == 1 else equal!r}) to keep each shard's own gradient."
      )

  def reduce_leaves(leaves, open_names, weight):
    if groups is not None:

      def total(tree):
        return _collectives.group_psum(tree, names[0], groups) if open_names else tree
    else:

      def total(tree):
        return _collectives.psum(tree, open_names, bucketed)

    counted = names if invariant == "summed" else open_names
    if weight is None:
      count = len(groups[0]) if groups is not None else _collectives.axis_size(counted)
      leaves = total(leaves)
      if reduction == "sum" or not counted:
        return leaves
      return [leaf / count for leaf in leaves]
    if names and not counted:
      return leaves
    scale = weight
    if reduction == "mean":
      # Normalised before the sum: float16 would overflow at weights that count examples.
      repeats = _collectives.axis_size(tuple(name for name in counted if name not in open_names))
      weights = total(weight) * repeats
      scale = jnp.where(weights == 0, 0, weight / jnp.where(weights == 0, 1, weights))
    return total([_numerics.scale(leaf, scale) for leaf in leaves])

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


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


def per_shard(tree: Tree, axis_name: _collectives.AxisName) -> Tree:
  """Marks replicated values as each shard's own, so that `jax.grad` leaves their gradients unsummed.

  Under shard_map's default `check_vma=True` the gradient of a replicated parameter arrives already summed over the
  shards. Differentiating with respect to `per_shard(params, axis_name)` gives every shard's own gradient, as under pmap
  and vmap: to clip it, weigh it, drop it, or to accumulate it and send it once. Where types are not tracked
  (pmap, vmap, `check_vma=False`) it does nothing.

  Args:
    tree: any pytree of arrays.
    axis_name: the axis or axes; None does nothing.

  Returns:
    The same values.

  Raises:
    ValueError: if an axis is not bound.

  **Communication**: none.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> from jax.sharding import PartitionSpec as P
    >>> def own_gradient(w, x):
    ...   return jax.grad(lambda w: jnp.sum(w * x))(ow.per_shard(w, "batch"))[None]
    >>> mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> sharded = jax.shard_map(own_gradient, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P("batch"))
    >>> print(jax.jit(sharded)(jnp.array(0.0), jnp.array([0.0, 1.0, 2.0, 3.0])))
    [0. 1. 2. 3.]
  """
  names = _collectives.axis_names(axis_name)
  _collectives.require_bound(names, "per_shard")
  return _collectives.to_varying(tree, names)


def broadcast_from(tree: Tree, axis_name: _collectives.AxisName, source: int = 0) -> Tree:
  """Gives every shard the values of one shard.

  Args:
    tree: any pytree of arrays of any dtype.
    axis_name: the axis or axes; None does nothing.
    source: index of the shard to copy from; over several axes the last varies fastest.

  Returns:
    The source's values, typed as replicated under shard_map.

  Raises:
    ValueError: if an axis is not bound, or there is no such shard.

  **Communication**: every leaf once, as an all-reduce in which the other shards add zeros. Nothing for leaves that are
  already equal on all shards.

  Source: `get_init_op` of tf.contrib.opt.ElasticAverageOptimizer, by which all workers start equal.
  """
  names = _collectives.axis_names(axis_name)
  _collectives.require_bound(names, "broadcast_from")
  source = _checks.integer("broadcast_from", "source", source, minimum=0)
  size = _collectives.axis_size(names)
  if source >= size:
    raise ValueError(f"broadcast_from: source must be a shard index below {size}, got {source}.")
  is_source = _collectives.axis_index(names) == source

  def from_source(x):
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.random.wrap_key_data(from_source(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if not _collectives.unreduced_names([x], names)[0]:
      return x
    if x.dtype == jnp.bool_:
      return from_source(x.astype(jnp.int32)).astype(jnp.bool_)
    return _collectives.psum(jnp.where(is_source, x, jnp.zeros_like(x)), names)

  return jax.tree.map(from_source, tree)


def is_replicated(tree: Tree, axis_name: _collectives.AxisName) -> jax.Array:
  """Whether all shards hold the same bits of values that ought to be equal: a cheap check inside a step.

  Compares two 32-bit checksums of every leaf, so a difference is missed with a probability of about 2**-64 a leaf.

  Args:
    tree: any pytree of arrays.
    axis_name: the axis or axes; None: True.

  Returns:
    bool scalar, the same on all shards.

  Raises:
    ValueError: if an axis is not bound.

  **Communication**: 8 bytes a leaf and shard.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> check = jax.vmap(lambda x: ow.is_replicated(x, "batch"), axis_name="batch")
    >>> print(check(jnp.array([1.0, 1.0])), check(jnp.array([1.0, 1.0 + 2**-23])))
    [ True  True] [False False]
  """
  names = _collectives.axis_names(axis_name)
  _collectives.require_bound(names, "is_replicated")
  sums = [_checksums(leaf) for leaf in jax.tree.leaves(tree)]
  if not names or not sums:
    return jnp.array(True)
  everyones = _collectives.all_gather(jnp.concatenate(sums), names)
  return (everyones == everyones[:1]).all()


def _checksums(x: jax.Array) -> jax.Array:
  """Two sums over the words of x, each word mixed with its place, so in any order; uint32 [2]."""
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag])
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  words = jax.lax.bitcast_convert_type(x, jnp.uint32 if x.dtype.itemsize >= 4 else f"uint{8 * x.dtype.itemsize}")
  words = words.astype(jnp.uint32).ravel()
  place = jax.lax.iota(jnp.uint32, words.size)

  def mix(odd):
    # Multiplying by odd numbers and folding high bits down lets every bit of word and place move every bit of the sum.
    mixed = (words ^ (place * jnp.uint32(odd))) * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> jnp.uint32(15))) * jnp.uint32(odd)
    return (mixed ^ (mixed >> jnp.uint32(13))).sum(dtype=jnp.uint32)

  return jnp.stack([mix(0x85EBCA77), mix(0xC2B2AE3D)])
