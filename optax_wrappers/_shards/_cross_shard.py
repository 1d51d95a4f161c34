"""Reduction of updates across shards, inside the optimizer."""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_wrappers._core import (
  _axes,
  _branches,
  _checks,
  _collectives,
  _numerics,
  _states,
  _weights,
)
from optax_wrappers._core._states import OfParams, instances, require_same
from optax_wrappers._core._types import AxisName, AxisNames, Invariant, MeanOrSum, Nonfinite, Tree
from optax_wrappers._core._weights import Reduced
from optax_wrappers._shards import _compress, _reduce, _rows, _shard_state
from optax_wrappers._shards._compress import CompressedState
from optax_wrappers._shards._towers import GatherTowersState
from optax_wrappers.codecs import AnyCodec, Compression
from optax_wrappers.reductions import Reduction


@_states.dataclass
class AllReduceState(_states.State):
  """State of `all_reduce`.

  Attributes:
    reduced: over which axes; it has no leaves.
    compressed: with a codec, what was not sent yet; else None.
  """

  reduced: Reduced
  compressed: CompressedState | None = None


@_states.dataclass
class CrossShardState(_states.State):
  """State of `cross_shard`.

  Attributes:
    reduced: over which axes; it has no leaves.
    inner_state: state of the wrapped optimizer.
    compressed: with a codec, what was not sent yet; else None.
    nonfinite: with `nonfinite="drop"`, shards' updates left out so far; int32 scalar; else None.
  """

  reduced: Reduced
  inner_state: Tree = _states.field("reduced")
  compressed: CompressedState | None = None
  nonfinite: jax.Array | None = _states.field("shared", default=None)

  @property
  def may_skip(self):
    return self.nonfinite is not None

  def metrics(self, of_params: OfParams) -> dict[str, Any]:
    """See `State`."""
    return {} if self.nonfinite is None else {"nonfinite_shards": self.nonfinite}


def all_reduce(
  axis_name: AxisName = "batch",
  *,
  reduction: MeanOrSum | Reduction = "mean",
  axis_index_groups: Sequence[Sequence[int]] | None = None,
  invariant: Invariant = "summed",
  sharded: Tree | Callable[[Tree], Tree] = False,
  codec: AnyCodec | Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Replaces every update by its mean or sum over the shards, like `cross_shard`, for a chain.

  With N shards and updates `g_i`: mean `(1/N) sum_i g_i`, sum `sum_i g_i`; with weights `w_i`, mean
  `sum_i w_i g_i / sum_i w_i` and sum `sum_i w_i g_i`. A shard of weight zero adds nothing, not even
  a NaN, and if all weights are zero the updates are zero.

  Args:
    axis_name: the axis or axes of shard_map, pmap or vmap to reduce over. None: a single shard.
    reduction: "mean", "sum", or one of `optax_wrappers.reductions`, such as `median()`, which give
      each shard one vote and refuse groups, weights, a codec and sharded parameters.
    axis_index_groups: equal-sized groups of shard indices, together a permutation of the axis. Each
      group reduces separately, so parameters diverge between groups.
    invariant: how to read an update that is already the same on every shard. "summed": as the sum
      that `jax.grad` returns for a replicated parameter under `check_vma=True`, which a mean
      divides by N. "reduced": as the result. "error": raise.
    sharded: which parameters are sharded over the axis (FSDP, ZeRO, experts): bools or
      PartitionSpecs, of the updates' structure or a prefix of it, or a function from the updates to
      these. Their gradients are already summed and not sent over those axes; the mean divides by N.
    codec: compresses the updates: a codec, or `codecs.compression` of one. With error feedback, the
      default, what it leaves out is sent later. None: no compression.

  Returns:
    A gradient transformation, with an `AllReduceState`, which without a codec has no leaves.

  Raises:
    ValueError: for arguments out of range; in update, for an unbound axis, groups that do not fit
      the axis, a negative weight, and per-shard weights or a codec on updates that are summed.
    TypeError: in update, for integer updates.

  Extra args:
    weight: real scalar, at least 0, one per shard. Every transformation of a chain gets it, so
      reduce over several axes in one. `drop_stale` and `gather_towers` outside pass theirs on.

  **Communication**: once per step every update leaf that is not equal on all shards, in its own
  dtype (float16 and float8 as float32, so that no sum overflows); with weights one float32 scalar
  more; with groups a leaf as many times as there are groups. With a codec the compressed leaves go
  as bytes, by one all-to-all and one all-gather; for two shards (except with a vote) or sparse
  codes by the all-gather alone; for a linear codec by all-reduces. A reduction of `reductions`
  takes an all-to-all and an all-gather of every leaf; one from a Gram matrix sends N x N numbers
  more.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> reduce = ow.all_reduce("batch")
    >>> tx = optax.chain(optax.clip(2.0), reduce, optax.sgd(1.0))
    >>> step = lambda grad: tx.update(grad, tx.init(grad))[0]
    >>> grads = jnp.array([0.0, 1.0, 2.0, 3.0])
    >>> print(jax.vmap(step, axis_name="batch")(grads))
    [-1.25 -1.25 -1.25 -1.25]

  Source: the reduction of tf.contrib.tpu.CrossShardOptimizer, which puts the 1/N on the loss.
  """
  reducer = _Reducer.make(
    "all_reduce", axis_name, reduction, axis_index_groups, invariant, sharded, codec
  )

  def init_fn(params):
    return AllReduceState(reduced=reducer.node, compressed=reducer.start(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    is_empty = not isinstance(state, AllReduceState) and not jax.tree.leaves(state)
    if is_empty and reducer.compression is None:  # nothing is stored, so any state will do
      return reducer.reduce(updates, weight)[0], state
    reducer.check_state(state, AllReduceState, weight)
    updates, compressed, _ = reducer.reduce(updates, weight, state.compressed)
    return updates, state.replace(compressed=compressed)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def cross_shard(
  inner: optax.GradientTransformation,
  axis_name: AxisName = "batch",
  *,
  reduction: MeanOrSum | Reduction = "mean",
  axis_index_groups: Sequence[Sequence[int]] | None = None,
  invariant: Invariant = "summed",
  sharded: Tree | Callable[[Tree], Tree] = False,
  nonfinite: Nonfinite = "propagate",
  codec: AnyCodec | Compression | None = None,
  shard_state: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Reduces the updates across shards, then calls `inner` on every shard with the same values.

  `inner` receives the result of `all_reduce(axis_name, ...)`; see there for the shared arguments
  and errors. The inner state is the same on all shards (of a group).

  Args:
    inner: the optimizer to wrap.
    axis_name: the axis or axes to reduce over, or None; see `all_reduce` for all but `nonfinite`.
    reduction: "mean", "sum", or one of `optax_wrappers.reductions`.
    axis_index_groups: equal-sized groups of shards that reduce separately.
    invariant: how to read an update that is already the same on every shard.
    sharded: which parameters are sharded over the axis.
    nonfinite: how to handle a NaN or an infinity in a shard's updates. "propagate": like any other
      value, so a mean or sum passes it on to all shards (of the group). "drop": the shard gets
      weight zero and is counted; if all weights are zero, the step is dropped.
    codec: compresses the updates.
    shard_state: whether each of N shards stores and computes 1/N of the inner state (ZeRO-1):
      `stack_workers(tx.init(params), N, replicated=True)`. `inner` gets a share of every update and
      parameter except scalars, so it must be elementwise, as Adam is; for a global norm use
      `clip_by_global_norm` of this library. Not with groups, `sharded`, a codec, one of
      `reductions`, or a reduction in `inner`.

  Returns:
    The wrapped optimizer, with a `CrossShardState`.

  Raises:
    ValueError, TypeError: see `all_reduce`. With `shard_state`, in update, a ValueError for an
      `inner` that is not elementwise, and for a state that was not divided.

  Extra args:
    weight: real scalar, one per shard. With a mean, `inner` gets the sum of the shards' weights
      under the same name.
    value: a loss, by which `inner` may decide (`reduce_on_plateau`): it gets the shards' mean.
    Others reach `inner` as they are, and must be equal on all shards if it decides by them.

  **Communication**: that of `all_reduce`, and three scalars more with `nonfinite="drop"`, two with
  `value`. With `shard_state` a reduce-scatter of every update, and an all-gather of the results of
  `inner`.

  Examples:
    Under `check_vma=True` `jax.grad` returns the sum over shards; the result is still the mean:

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> tx = ow.cross_shard(optax.sgd(1.0), "batch")
    >>> def step(w, x):
    ...   grad = jax.grad(lambda w: jnp.mean(w * x))(w)
    ...   return optax.apply_updates(w, tx.update(grad, tx.init(w), w)[0])
    >>> mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Auto,))
    >>> specs = {"in_specs": (P(), P("batch")), "out_specs": P()}
    >>> step = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    >>> print(step(jnp.array(0.0), jnp.arange(4.0)))
    -1.5

  Source: tf.contrib.tpu.CrossShardOptimizer.
  """
  wrapper, drops = "cross_shard", nonfinite == "drop"
  _checks.choice(wrapper, "nonfinite", nonfinite, get_args(Nonfinite))
  inner = _checks.optimizer(wrapper, inner)
  reducer = _Reducer.make(
    wrapper, axis_name, reduction, axis_index_groups, invariant, sharded, codec, drops, shard_state
  )
  is_mean, names = reducer.reduction.is_mean, reducer.names

  def init_fn(params):
    inner_state = inner.init(params)
    _require_one_accumulator(reducer, inner_state)
    if shard_state and _weights.inside(inner_state):
      why = "one inside reduces too. Reduce over all axes at once"
      raise ValueError(f"{wrapper}: shard_state must be of the only reduction, but {why}.")
    return CrossShardState(
      reduced=reducer.node,
      inner_state=inner_state,
      compressed=reducer.start(params),
      nonfinite=jnp.zeros((), jnp.int32) if drops else None,
    )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    def step(updates, weight, state):
      reduced, compressed, total = reducer.reduce(updates, weight, state.compressed)
      own, inner_state = params, state.inner_state
      if shard_state:
        given = updates, inner_state, params, extra_args
        own, inner_state = _shard_state.shares_for(wrapper, names, inner, *given)
      passed = extra_args if reducer.groups else _with_mean_value(extra_args, names, weight)
      call = wrapper, inner, reduced, inner_state, own, total if is_mean else weight
      new_updates, inner_state = _weights.update_reduced(*call, passed, is_mean)
      if shard_state:
        _checks.same_shapes(wrapper, new_updates, reduced, "Extra args of inner must be scalars.")
        new_updates = _collectives.gather_shares(new_updates, names, updates, typed=True)
        inner_state = jax.tree.structure(state.inner_state).unflatten(jax.tree.leaves(inner_state))
      return new_updates, state.replace(inner_state=inner_state, compressed=compressed)

    reducer.check_state(state, CrossShardState, weight)
    if drops != (state.nonfinite is not None):
      made = "drop" if state.nonfinite is not None else "propagate"
      require_same(wrapper, {"nonfinite": made}, {"nonfinite": nonfinite})
    if drops:
      return _without_nonfinite(reducer, step, updates, weight, state)
    return step(updates, weight, state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _with_mean_value(extra_args, names, weight):
  """The extra args, of whose `value`, a loss, all shards get the mean: `inner` decides by it."""
  value = extra_args.get("value")
  is_scalar = isinstance(value, jax.Array) and value.shape == () and _numerics.is_inexact(value)
  if not is_scalar:
    return extra_args
  known = set(_axes.tracked(names))
  open_names = tuple(x for x in names if x not in known or x in _axes.varying(value))
  if not open_names:
    return extra_args
  wide = value.astype(_numerics.at_least_float32(value.dtype))
  weight = jnp.asarray(1.0 if weight is None else weight, wide.dtype)
  total, weights = _collectives.psum((_numerics.scale(wide, weight), weight), open_names)
  return extra_args | {"value": _numerics.divide(total, weights).astype(value.dtype)}


def _require_one_accumulator(reducer, inner_state):
  """Raises if towers are gathered between reductions over different axes."""
  for towers in instances(inner_state, GatherTowersState) if reducer.names else ():
    later = tuple(name for name in _weights.names_of(towers) if name not in reducer.names)
    if later:
      raise ValueError(
        f"{reducer.wrapper}: gather_towers inside contains a reduction over {later}, and no layout"
        " shows over which axes its accumulator differs. Reduce over all axes inside or outside it."
      )


def _without_nonfinite(reducer, step, updates, weight, state):
  """A `step` that leaves out shards with a NaN or an infinity."""
  wrapper, names = reducer.wrapper, reducer.names
  _axes.require_bound(names, wrapper)
  updates = _checks.inexact(wrapper, updates)
  leaves = jax.tree.leaves(updates)
  if reducer.invariant == "summed":
    why = "a sum that contains the NaN of any shard"
    require_each_own(wrapper, updates, names, why)
  weight = _weights.given(wrapper, 1.0 if weight is None else weight, leaves)

  # One bit for all leaves of a shard: a gradient with a NaN in one layer is wrong in all.
  finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves] or [jnp.array(True)]).all()
  # Two counts in one all-reduce: the number of finite shards, which the state reports, and the
  # number of those that also have a weight, which decides.
  counts = jnp.stack([finite, finite & (weight != 0)]).astype(jnp.int32)
  num_finite, num_counted = _collectives.psum(counts, names)
  accept, weight = num_counted > 0, jnp.where(finite, weight, 0)
  _weights.require_decided(wrapper, _DROP, accept, names, _weights.names_of(state.inner_state))
  updates, new = _branches.update_if(
    accept, lambda state: step(updates, weight, state), state, wrapper, _DROP
  )
  num_nonfinite = _axes.axis_size(names) - num_finite
  nonfinite = _numerics.saturating_add(state.nonfinite, num_nonfinite)
  _axes.require_like(nonfinite, state.nonfinite, wrapper, "CrossShardState.nonfinite")
  return updates, new.replace(nonfinite=nonfinite)


class _Leaf(NamedTuple):
  """One update, and the axes over which to reduce it."""

  path: str
  value: jax.Array
  open_names: AxisNames  # over which it must be sent
  divided: AxisNames  # that shard its parameter, over which it is already summed
  unfinished: AxisNames  # both: it is not equal on all shards


# Arguments that cannot be combined, and why.
_DIVIDES = "shard_state"
_RULE, _DROP = "one of optax_wrappers.reductions", 'nonfinite="drop"'
_CONTRADICTIONS = [
  ("axis_index_groups", "codec", "make the groups an axis of the mesh"),
  ("axis_index_groups", "sharded", "sharded parameters are divided over the whole axis"),
  ("axis_index_groups", _RULE, "it looks at all shards"),
  ("sharded", _RULE, "the gradients of sharded parameters are sums, not local"),
  ("codec", _RULE, "it needs each shard's whole gradient"),
  (_DROP, _RULE, "it needs all shards"),
  (_DIVIDES, "axis_index_groups", "it divides over the whole axis"),
  (_DIVIDES, "sharded", "sharded parameters are divided already: use optax.partition"),
  (_DIVIDES, "codec", "a code is of a whole update"),
  (_DIVIDES, _RULE, "it needs each shard's whole gradient"),
  (_DROP, "axis_index_groups", "it decides for the whole axis"),
  (_DROP, "sharded", "the gradients of sharded parameters are sums: wrap them separately"),
]


class _Reducer(NamedTuple):
  """The checked arguments of `all_reduce`; errors name the public function."""

  wrapper: str
  names: AxisNames
  reduction: _reduce.Weighted | _rows.OfRows
  groups: list[list[int]] | None
  invariant: str
  sharded: Any
  compression: _compress.Compressor | None
  node: Reduced
  counts_alike: str  # the rule that gives every shard's own gradient an equal vote, or ""

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
    given = {
      "axis_index_groups": groups is not None,
      "codec": codec is not None,
      "sharded": sharded is not False,
      _RULE: isinstance(reduction, Reduction),
      _DROP: drops,
      _DIVIDES: divides,
    }
    for one, other, why in _CONTRADICTIONS:
      if given[one] and given[other]:
        raise ValueError(f"{wrapper}: {one} cannot be used with {other}: {why}.")
    if groups is not None:
      groups = _check_groups(wrapper, names, groups)
    # Only the object chosen here knows how a sum is computed.
    if given[_RULE]:
      counts_alike = f"reduction={reduction.name}"
      reduction = _rows.OfRows(reduction, _rows.OverShards())
    else:
      counts_alike = ""
      over = _reduce.ToShares(names=names) if divides else _reduce.OverShards(groups)
      reduction = _reduce.Weighted(over, is_mean=reduction == "mean")
    if compression is not None and compression.loses:
      warnings.warn(
        f"{wrapper}: {compression.codec.name} without feedback loses what it does not send, and"
        " need not converge. Leave feedback=False out.",
        stacklevel=4,
      )
    # A single shard sends nothing.
    sends = compression if names else None
    node = Reduced(names, reduction.is_mean, is_divided=divides)
    return cls(wrapper, names, reduction, groups, invariant, sharded, sends, node, counts_alike)

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
    _axes.require_bound(self.names, self.wrapper)
    updates = _checks.inexact(self.wrapper, updates)
    size, groups = _axes.axis_size(self.names), self.groups
    if groups is not None and sum(map(len, groups)) != size:
      raise ValueError(
        f"{self.wrapper}: axis_index_groups must be a permutation of range({size}), got {groups}."
      )
    leaves = self._leaves(updates)
    weight = _weights.given(self.wrapper, weight, [leaf.value for leaf in leaves])
    if self.counts_alike:
      _rows.require_votes(self.wrapper, weight, self.counts_alike)
    weighed_over = None if weight is None else _axes.varying(weight)
    for leaf in leaves:
      self._check(leaf, weighed_over)

    # Sent once for all leaves.
    total_of = functools.cache(lambda over: _reduce.total(self.reduction.summed, weight, over))
    treedef: Any = jax.tree.structure(updates)
    coded: list[Any] = [None] * len(leaves)  # the compressed ones
    if self.compression is not None and size > 1:
      coded, compressed = self._compressed(leaves, updates, weight, total_of, compressed)
    plain = [leaf for leaf, result in zip(leaves, coded) if result is None]
    rest = iter(self._by_kind(plain, weight, total_of))
    results = [next(rest) if result is None else result for result in coded]
    total = None if weight is None or not self.reduction.is_mean else total_of(self.names)
    return treedef.unflatten(results), compressed, total

  def _compressed(self, leaves, updates, weight, total_of, kept):
    """The reduced leaves, None for uncompressed ones, and the state of the compression."""
    flags = self._flags(updates)
    self.compression.check_kept(kept, updates, flags)
    names = self._compressed_names(list(itertools.compress(leaves, flags)), weight)
    if _axes.axis_size(names) == 1:  # nothing is sent
      return [None] * len(leaves), kept
    chosen = [flag and leaf.open_names == names for leaf, flag in zip(leaves, flags)]
    parts: list[Any] = [None] * len(leaves)
    for i in itertools.compress(range(len(leaves)), chosen):
      counted = self._counted(leaves[i].unfinished)
      (parts[i],) = self.reduction.parts([leaves[i].value], counted, weight, total_of)
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
    for leaf in leaves:
      if self.invariant == "summed" and not leaf.unfinished:
        why = "and so was sent in full before it could be compressed"
        require_own(wrapper, leaf.path, self.names, (), why)
    kinds = {leaf.open_names for leaf in leaves if _axes.axis_size(leaf.open_names) > 1}
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

  def _leaves(self, updates):
    names = _axes.unreduced_names(jax.tree.leaves(updates), self.names)
    divided = _divided_names(self.wrapper, self.sharded, updates, self.names)
    leaves = []
    columns = zip(jax.tree.leaves_with_path(updates), names, divided, strict=True)
    for (path, value), over, divided_over in columns:
      open_names = tuple(name for name in over if name not in divided_over)
      path = jax.tree_util.keystr(path)
      leaves.append(_Leaf(path, value, open_names, divided_over, (*open_names, *divided_over)))
    return leaves

  def _check(self, leaf, weighed_over):
    """Raises for an update that is already reduced, if the arguments need local ones.

    `weighed_over` are the axes over which the weight differs; None: no weight.
    """
    if weighed_over is not None:
      _check_weighable(self.wrapper, leaf, weighed_over, self.names)
    if self.invariant == "reduced" and not leaf.unfinished:
      return
    reduced_names = set(self.names) - set(leaf.unfinished)
    if self.counts_alike:
      why = SUMMED
    elif self.invariant == "error":
      why = 'and invariant="error" was given'
    elif self.invariant == "summed" and self.groups is not None:
      why = "a sum over the whole axis that cannot be split into groups"
    elif weighed_over and weighed_over & reduced_names:
      # An equal weight would commute with the sum that autodiff has taken.
      why = f"{self.invariant} without the weights, which differ from shard to shard"
    else:
      return
    require_own(self.wrapper, leaf.path, self.names, leaf.unfinished, why)

  def _by_kind(self, leaves, weight, total_of):
    """The reduced leaves, with one collective for all leaves over the same axes."""
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
      kinds.setdefault((leaf.open_names, leaf.unfinished), []).append(i)
    results = [leaf.value for leaf in leaves]
    for (open_names, unfinished), chosen in kinds.items():
      counted = self._counted(unfinished)
      values = [results[i] for i in chosen]
      if counted or not self.names:
        values = self.reduction.reduce(values, open_names, counted, weight, total_of)
      elif self.node.is_divided:  # invariant="reduced", so there is nothing to send
        values = self.reduction.summed.sum(values, ())
      for i, value in zip(chosen, values):
        results[i] = value
    return results


def _check_weighable(wrapper, leaf, weighed_over, names):
  """Raises for an update that was summed before it could be weighted."""
  if leaf.divided:
    raise ValueError(
      f"{wrapper}: updates{leaf.path} is sharded over {leaf.divided}, so its gradient was summed"
      " without the weights. Weight the loss instead, by weight * num_shards / psum(weight)."
    )
  others = weighed_over - _axes.varying(leaf.value) - set(names)
  if others:
    over = sorted(map(str, others))
    raise ValueError(
      f"{wrapper}: weight differs over {over}, over which updates{leaf.path} has been reduced"
      f" already. Reduce over all the axes at once: axis_name={(*names, *over)!r}."
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

  kinds, needed = _checks.is_a(bool, np.bool_, PartitionSpec), "Python bools or PartitionSpecs"
  return list(map(of, _checks.spread(wrapper, "sharded", sharded, updates, kinds, needed)))


# Why a gradient summed by `jax.grad` has neither votes nor noise of single shards.
SUMMED = "reduced before shards could be distinguished"


def require_each_own(wrapper, updates, names, problem):
  """`require_own` of every update."""
  over = _axes.unreduced_names(jax.tree.leaves(updates), names)
  for (path, _), open_names in zip(jax.tree.leaves_with_path(updates), over, strict=True):
    require_own(wrapper, jax.tree_util.keystr(path), names, open_names, problem)


def require_own(wrapper, path, names, open_names, problem):
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
