"""Reduction of updates across shards, inside the optimizer."""

import functools
import itertools
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
  _paths,
  _weights,
)
from optax_wrappers._core._state import WrapperState, instances, state
from optax_wrappers._core._types import AxisName, AxisNames, Invariant, MeanOrSum, Nonfinite, Tree
from optax_wrappers._core._weights import Reduced
from optax_wrappers._shards import _compress, _reduce, _rows
from optax_wrappers._shards._compress import CompressedState
from optax_wrappers._shards._towers import GatherTowersState
from optax_wrappers.codecs import RENAMED, AnyCodec, Compression
from optax_wrappers.reductions import Reduction


@state
class AllReduceState(WrapperState):
  """State of `all_reduce`.

  Attributes:
    reduced: over which axes; it has no leaves.
    compressed: with a codec, what was not sent yet; else None.
  """

  reduced: Reduced
  compressed: CompressedState | None = None


@state
class CrossShardState(WrapperState):
  """State of `cross_shard`.

  Attributes:
    reduced: over which axes; it has no leaves.
    inner_state: state of the wrapped optimizer.
    compressed: with a codec, what was not sent yet; else None.
    nonfinite: with `nonfinite="drop"`, shards' updates left out so far for a NaN or an infinity;
      int32 scalar; else None.
  """

  shared_fields = frozenset({"nonfinite"})

  reduced: Reduced
  inner_state: Tree
  compressed: CompressedState | None = None
  nonfinite: jax.Array | None = None

  @property
  def reduced_fields(self):
    return frozenset({"inner_state"} if self.reduced.names else ())

  @property
  def may_skip(self):
    return self.nonfinite is not None


@_checks.spelled(**RENAMED)
def all_reduce(
  axis_name: AxisName = "batch",
  *,
  reduction: MeanOrSum | Reduction = "mean",
  axis_index_groups: Sequence[Sequence[int]] | None = None,
  invariant: Invariant = "summed",
  sharded: Tree | Callable[[Tree], Tree] = False,
  codec: AnyCodec | Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Replaces every update by its mean or sum over the shards.

  This is one half of `cross_shard`, for a chain.

  With N shards and updates `g_i`: mean `(1/N) sum_i g_i`, sum `sum_i g_i`; with weights `w_i`, mean
  `sum_i w_i g_i / sum_i w_i` and sum `sum_i w_i g_i`. A shard of weight zero adds nothing, not even
  a NaN, and if all weights are zero the updates are zero.

  Args:
    axis_name: the axis or axes of shard_map, pmap or vmap to reduce over. None: a single shard,
      nothing is sent.
    reduction: "mean", "sum", or one of `optax_wrappers.reductions`, such as `median()`, for which
      every shard has one vote: without groups, weights, a codec or sharded parameters.
    axis_index_groups: equal-sized groups of shard indices that together are a permutation of the
      axis; each group reduces on its own and its parameters go their own way.
    invariant: how to read an update that is already the same on every shard, as shard_map's types
      tell. "summed": it is the sum over the shards, which `jax.grad` returns for a replicated
      parameter under shard_map's default `check_vma=True`; the mean then divides it by N.
      "reduced": it is the result already. "error": raise.
    sharded: which parameters are themselves divided over the axis (FSDP, ZeRO, experts): bools or
      the parameters' PartitionSpecs, of the updates' structure or a prefix of it, or a function
      from the updates to these. The gradient of such a part arrives summed, because the backward
      pass of an all-gather is a reduce-scatter, and other shards hold other parts. Nothing is sent
      for it over the axes that divide it; the mean divides it by N.
    codec: how updates are written in fewer bytes (`optax_wrappers.codecs`), a codec or
      `codecs.compression` of one. What shard i sends is
      the code of `u_i = g_i / N + e_i` (with weights `w_i g_i / sum_i w_i + e_i`), whose residual
      `e_i <- u_i - decode(encode(u_i))` it keeps for the next step. Where the sums of more than two
      shards are encoded on their way back, the rounding of each part is kept by one of them as
      well. None: nothing is compressed.

  Returns:
    A gradient transformation, with an `AllReduceState`, which `stack_workers(...,
    replicated=True)`, `worker_specs` and `worker_axes` lay out. Without a codec it has no leaves.

  Raises:
    ValueError: for arguments out of range; in update, for an axis that is not bound, groups that do
      not fit the axis, per-shard weights on updates that are already summed, a negative weight;
      with a codec, for updates that are already summed, and so were sent in full.
    TypeError: in update, for integer updates.

  Extra args:
    weight: real scalar, at least 0, each shard's own. In a chain every link gets it, so reduce over
      several axes at once and not in two links. Wrappers outside pass by it what they know of the
      weight of a shard's updates: `drop_stale` of stale ones, `gather_towers` of towers.

  **Communication**: every update leaf once per step, in its own dtype (float16 and float8 as
  float32, so that no sum overflows); with weights one float32 scalar more; with groups a leaf as
  many times as there are groups. Nothing for leaves that are already equal on all shards. With a
  codec, for all compressed leaves together: one all-to-all and one all-gather of bytes, or for two
  shards and sparse codes the latter alone, or the all-reduces of a linear codec. With one of
  `reductions` the halves of an all-reduce: an all-to-all and an all-gather of all leaves of a
  dtype, in that dtype; and for one from a Gram matrix an all-reduce of N x N numbers. A leaf that
  XLA may lay out over other axes comes from all shards whole.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = optax.chain(
    ...   optax.clip(2.0), ow.all_reduce("batch"), optax.sgd(1.0)
    ... )
    >>> step = lambda grad: tx.update(grad, tx.init(grad))[0]
    >>> print(
    ...   jax.vmap(step, axis_name="batch")(jnp.array([0.0, 1.0, 2.0, 3.0]))
    ... )
    [-1.25 -1.25 -1.25 -1.25]

  Source: the reduction of tf.contrib.tpu.CrossShardOptimizer. TensorFlow puts the 1/N on the loss
  and sums; here the division is in the reduction, so that what stands before it in a chain sees the
  unscaled per-shard gradient.
  """
  reducer = _Reducer.make(
    "all_reduce",
    axis_name,
    reduction,
    axis_index_groups,
    invariant,
    sharded,
    codec,
  )
  return reducer.as_transformation()


@_checks.spelled(**RENAMED, noise_decay="it is optax.chain(measure_noise(axis_name), inner)")
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
) -> optax.GradientTransformationExtraArgs:
  """Reduces the updates across shards, then calls `inner` on every shard with the same numbers.

  `inner` sees `all_reduce(axis_name, ...)` of the updates; see there for the maths. The inner state
  is the same on all shards (with groups: of a group).

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
    codec: as in `all_reduce`.

  Returns:
    The wrapped optimizer, with a `CrossShardState`.

  Raises:
    ValueError, TypeError: as `all_reduce`.

  Extra args:
    weight: real scalar, each shard's own. With a mean `inner` gets the sum of the shards' weights,
      by the same name. All others reach `inner`.

  **Communication**: as `all_reduce`: every gradient byte once per step. With `nonfinite="drop"`
  three scalars more.

  Examples:
    Under `check_vma=True`, shard_map's default, `jax.grad` of a replicated parameter is already the
    sum over the shards. The mean is the mean all the same:

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import PartitionSpec as P
    >>> tx = ow.cross_shard(optax.sgd(1.0), "batch")
    >>> def step(w, x):
    ...   grad = jax.grad(lambda w: jnp.mean(w * x))(w)
    ...   return optax.apply_updates(w, tx.update(grad, tx.init(w), w)[0])
    >>> mesh = jax.make_mesh(
    ...   (4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,)
    ... )
    >>> sharded = jax.shard_map(
    ...   step, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P()
    ... )
    >>> print(jax.jit(sharded)(jnp.array(0.0), jnp.array([0.0, 1.0, 2.0, 3.0])))
    -1.5

  Source: tf.contrib.tpu.CrossShardOptimizer.
  """
  wrapper = "cross_shard"
  _checks.choice(wrapper, "nonfinite", nonfinite, get_args(Nonfinite))
  inner = _checks.optimizer(wrapper, inner)
  reducer = _Reducer.make(
    wrapper,
    axis_name,
    reduction,
    axis_index_groups,
    invariant,
    sharded,
    codec,
  )
  drops = nonfinite == "drop"
  if drops:
    _check_drops(reducer)

  def init_fn(params):
    inner_state = inner.init(params)
    _require_one_accumulator(reducer, inner_state)
    return CrossShardState(
      reduced=reducer.node,
      inner_state=inner_state,
      compressed=reducer.start(params),
      nonfinite=jnp.zeros((), jnp.int32) if drops else None,
    )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    reducer.check_state(state, CrossShardState, weight)
    if drops:
      return _without_nonfinite(reducer, reduced, updates, state, params, weight, extra_args)
    return reduced(updates, state, params, weight, extra_args)

  def reduced(updates, state, params, weight, extra_args):
    updates, compressed, total = reducer.reduce(updates, weight, state.compressed)
    is_mean = reducer.reduction.is_mean
    call = wrapper, inner, updates, state.inner_state, params, total if is_mean else weight
    updates, inner_state = _weights.update_reduced(*call, extra_args, is_mean)
    return updates, state.replace(inner_state=inner_state, compressed=compressed)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _require_one_accumulator(reducer, inner_state):
  """Raises where towers are gathered between a reduction over some axes and one over others."""
  for towers in instances(inner_state, GatherTowersState) if reducer.names else ():
    later = tuple(name for name in _weights.names_of(towers) if name not in reducer.names)
    if later:
      raise ValueError(
        f"{reducer.wrapper}: gather_towers inside it stands round a reduction over {later}, and no"
        " layout shows over which axes its accumulator differs. Reduce over all of them inside,"
        " gather_towers(cross_shard(inner, axes), n), or outside."
      )


def _check_drops(reducer):
  """Raises on arguments beside which no shard can be left out."""
  wrapper = reducer.wrapper
  if reducer.counts_alike:
    raise ValueError(
      f'{wrapper}: nonfinite="drop" leaves shards out of a mean or a sum, and'
      f" {reducer.counts_alike} needs all of them."
    )
  if isinstance(reducer.reduction.summed, _reduce.OverGroups):
    raise ValueError(
      f'{wrapper}: nonfinite="drop" decides for the whole axis; it cannot be used with'
      " axis_index_groups."
    )
  if reducer.sharded is not False:
    raise ValueError(
      f'{wrapper}: nonfinite="drop" cannot take one shard\'s NaN out of a gradient that is summed'
      " already, as those of sharded parameters are. Wrap them apart: optax.partition with one"
      " cross_shard for each kind."
    )


def _without_nonfinite(reducer, reduced, updates, state, params, weight, extra_args):
  """A step that leaves shards with a NaN or an infinity out of what `reduced` reduces."""
  wrapper, names, what = reducer.wrapper, reducer.names, 'nonfinite="drop"'
  _axes.require_bound(names, wrapper)
  updates = _checks.inexact(wrapper, updates)
  leaves, paths = jax.tree.leaves(updates), _paths.texts(updates)
  if reducer.invariant == "summed":
    why = "a sum from which one shard's NaN cannot be taken out any more"
    for path, open_names in zip(paths, _axes.unreduced_names(leaves, names), strict=True):
      require_own(wrapper, path, names, open_names, why)
  weight = _weights.given(wrapper, 1.0 if weight is None else weight, leaves)

  # One bit for all leaves of a shard: a gradient with a NaN in one layer is wrong in all of them.
  finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves] or [jnp.array(True)]).all()
  # Two counts in one all-reduce: the shards that are finite, which the state reports, and those
  # that also have a weight, which decide.
  counts = jnp.stack([finite, finite & (weight != 0)]).astype(jnp.int32)
  num_finite, num_counted = _collectives.psum(counts, names)
  accept = num_counted > 0
  weight = jnp.where(finite, weight, 0)
  _weights.require_decided(wrapper, what, accept, names, _weights.names_of(state.inner_state))
  updates, new = _branches.update_if(
    accept,
    lambda state: reduced(updates, state, params, weight, extra_args),
    state,
    wrapper,
    what,
  )
  num_nonfinite = _axes.axis_size(names) - num_finite
  nonfinite = _numerics.saturating_add(state.nonfinite, num_nonfinite)
  _axes.require_like(nonfinite, state.nonfinite, wrapper, "CrossShardState.nonfinite")
  return updates, new.replace(nonfinite=nonfinite)


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
  open_names: AxisNames
  divided: AxisNames

  @property
  def unfinished(self) -> AxisNames:
    """The axes over which it is not equal on all shards."""
    return (*self.open_names, *self.divided)


# What is asked for and `invariant=`: why an update that is equal on all shards cannot give it.
# Under "summed" it is the sum over the shards, as `jax.grad` leaves it. Under "reduced" it is the
# result.
_REFUSED = {
  ("plain", "error"): 'and invariant="error" was given',
  ("groups", "summed"): "a sum over the whole axis that cannot be split into groups any more",
  ("unequal weights", "summed"): "summed without the weights, which differ from shard to shard",
  ("unequal weights", "reduced"): "reduced without the weights, which differ from shard to shard",
}


class _Reducer(NamedTuple):
  """The arguments of `all_reduce`, checked; errors name the public function."""

  wrapper: str
  names: AxisNames
  reduction: _reduce.Weighted | _rows.OfRows
  invariant: str
  sharded: Any
  compression: _compress.Compression | None

  @classmethod
  def make(
    cls,
    wrapper,
    axis_name,
    reduction,
    groups,
    invariant,
    sharded,
    codec=None,
  ):
    compression = _compress.Compression.make(wrapper, codec)
    names = _axes.axis_names(axis_name)
    _checks.choice(wrapper, "invariant", invariant, get_args(Invariant))
    _rows.check(wrapper, reduction)
    # The seam: what is chosen here is all that knows how a sum is had.
    summed: _reduce.Summed = _reduce.OverShards()
    if groups is not None:
      if compression is not None:
        raise ValueError(
          f"{wrapper}: axis_index_groups cannot be used with a codec. Make the groups an axis of"
          " the mesh, and reduce over the other one."
        )
      summed = _reduce.OverGroups(_check_groups(wrapper, names, groups))
      if sharded is not False:
        raise ValueError(
          f"{wrapper}: sharded parameters are divided over the whole axis; they cannot be used with"
          " axis_index_groups."
        )
    if isinstance(reduction, Reduction):
      reduction = _rows.OfRows(reduction, _rows.OverShards())
    else:
      reduction = _reduce.Weighted(summed, is_mean=reduction == "mean")
    made = cls(wrapper, names, reduction, invariant, sharded, compression)
    made._require_alone(groups)
    if compression is not None:
      compression.warn_of_loss()
    # A single shard has nobody to send anything to.
    return made if names else made._replace(compression=None)

  def _require_alone(self, groups):
    """Raises on arguments beside which no shard's own gradient is there to be counted."""
    others = {
      "axis_index_groups": groups is not None,
      "sharded": self.sharded is not False,
      "codec": self.compression is not None,
    }
    for name, is_given in others.items():
      if self.counts_alike and is_given:
        raise ValueError(
          f"{self.wrapper}: {name} cannot be used with {self.counts_alike}, which needs each"
          " shard's whole gradient. Leave one of them out."
        )

  def as_transformation(self):
    """The reduction alone, as a link of a chain."""

    def init_fn(params):
      return AllReduceState(reduced=self.node, compressed=self.start(params))

    def update_fn(updates, state, params=None, *, weight=None, **extra_args):
      del params, extra_args
      if self.compression is None and not jax.tree.leaves(state):
        # Nothing is kept, so that any empty state will do.
        if isinstance(state, AllReduceState):
          _weights.require_arrived(self.wrapper, state.reduced, weight)
        return self.reduce(updates, weight)[0], state
      self.check_state(state, AllReduceState, weight)
      updates, compressed, _ = self.reduce(updates, weight, state.compressed)
      return updates, state.replace(compressed=compressed)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

  @property
  def node(self):
    """What stands in the state."""
    return Reduced(self.names, self.reduction.is_mean)

  def check_state(self, state, state_class, weight):
    """Raises on a state of other arguments, and on a weight that was lost."""
    _weights.require_reduced(self.wrapper, state, state_class, self.node, weight)
    if self.compression is None and state.compressed is not None:
      raise ValueError(
        f"{self.wrapper}: the state has what a codec has not sent yet, and there is no codec, or"
        " no axis. Pass the codec of the run that it is from, or take a state from init."
      )

  def start(self, params):
    """What a codec keeps at first; None without one."""
    if self.compression is None:
      return None
    return self.compression.start(params, self._flags(params))

  def _flags(self, tree):
    """Which leaves of a tree of the parameters' shapes are compressed."""
    divided = _divided_names(self.wrapper, self.sharded, tree, self.names)
    flags = self.compression.flags(tree)
    return [flag and set(over) != set(self.names) for flag, over in zip(flags, divided)]

  def reduce(self, updates, weight, compressed=None):
    """The reduced updates, what the codec keeps, and the shards' weights added up."""
    _axes.require_bound(self.names, self.wrapper)
    updates = _checks.inexact(self.wrapper, updates)
    self._check_size()
    leaves = self._leaves(updates)
    values = [leaf.value for leaf in leaves]
    weight = _weights.given(self.wrapper, weight, values)
    if weight is not None and self.counts_alike:
      raise ValueError(
        f"{self.wrapper}: with {self.counts_alike} every shard has one vote, so that there are no"
        " weights (of the extra arg, or of stale shards, dropped ones and towers outside). Leave"
        " one of them out."
      )
    for leaf in leaves:
      self._check(leaf, weight)

    @functools.cache
    def total_of(over):  # sent once for all leaves
      return _reduce.total(self.reduction.summed, weight, over)

    treedef: Any = jax.tree.structure(updates)
    coded, compressed = self._compressed(leaves, updates, weight, total_of, compressed)
    plain = [leaf for leaf, result in zip(leaves, coded) if result is None]
    rest = iter(self._by_kind(plain, weight, total_of))
    results = [next(rest) if result is None else result for result in coded]
    total = None if weight is None or not self.reduction.is_mean else total_of(self.names)
    return treedef.unflatten(results), compressed, total

  def _compressed(self, leaves, updates, weight, total_of, kept):
    """The reduced leaves, None for those that go uncompressed, and what the compression keeps."""
    nothing: list[Any] = [None] * len(leaves)
    if self.compression is None or _axes.axis_size(self.names) == 1:
      return nothing, kept
    flags = self._flags(updates)
    self.compression.check_kept(kept, updates, flags)
    names = self._compressed_names(list(itertools.compress(leaves, flags)), weight)
    if _axes.axis_size(names) == 1:
      return nothing, kept
    counted = self.names if self.invariant == "summed" else names
    chosen = [flag and leaf.open_names == names for leaf, flag in zip(leaves, flags)]
    values = [leaf.value for leaf in itertools.compress(leaves, chosen)]
    own = iter(self.reduction.parts(values, counted, weight, total_of))
    parts = [next(own) if flag else None for flag in chosen]
    is_void = None if weight is None else total_of(counted) == 0
    treedef = jax.tree.structure(updates)
    sums, kept = self.compression.sum(parts, treedef, kept, names, is_void)
    typed = [x if x is None else x.astype(leaf.value.dtype) for x, leaf in zip(sums, leaves)]
    return typed, kept

  def _compressed_names(self, leaves, weight):
    """The axes over which these are to be compressed; none where all of them are reduced."""
    for leaf in leaves:
      if self.invariant == "summed" and not leaf.unfinished:
        why = "and so was sent in full before it could be compressed"
        require_own(self.wrapper, leaf.path, self.names, (), why)
    kinds = {leaf.open_names for leaf in leaves if _axes.axis_size(leaf.open_names) > 1}
    if not kinds:
      return ()
    codec, wrapper = self.compression.codec, self.wrapper
    if len(kinds) > 1:
      raise ValueError(
        f"{wrapper}: compressed updates must be reduced over the same axes, and are over"
        f" {sorted(kinds)}. Except some with codecs.compression(codec, only=...), or reduce them"
        " apart with optax.partition."
      )
    if weight is not None and codec.feedback == "none":
      raise ValueError(
        f"{wrapper}: with {codec.name} every shard has one vote, so that there are no weights (of"
        " the extra arg, or of stale shards, dropped ones and towers outside). Take another codec,"
        " or leave the weights out."
      )
    (names,) = kinds
    sent = sum(leaf.open_names == names for leaf in leaves)
    if self.compression.is_linear and sent < len(leaves):
      raise ValueError(
        f"{wrapper}: {codec.name} keeps something for every variable that it compresses, of which"
        f" {len(leaves)} were known in init and {sent} are sent now. Except those that need not be"
        " sent with codecs.compression(codec, only=...)."
      )
    return names

  @property
  def counts_alike(self):
    """The argument for which every shard's own gradient is needed, and counts alike, or ""."""
    if isinstance(self.reduction, _rows.OfRows):
      return f"reduction={self.reduction.rule.name}"
    return ""

  def _check_size(self):
    summed = getattr(self.reduction, "summed", None)
    if not isinstance(summed, _reduce.OverGroups):
      return
    size = _axes.axis_size(self.names)
    if sum(map(len, summed.groups)) != size:
      raise ValueError(
        f"{self.wrapper}: axis_index_groups must be a permutation of range({size}), the shards of"
        f" axis {self.names[0]!r}; got {summed.groups}."
      )

  def _leaves(self, updates):
    values = jax.tree.leaves(updates)
    columns = (
      _paths.texts(updates),
      values,
      _axes.unreduced_names(values, self.names),
      _divided_names(self.wrapper, self.sharded, updates, self.names),
    )
    return [
      _Leaf(path, value, tuple(name for name in over if name not in divided), divided)
      for path, value, over, divided in zip(*columns, strict=True)
    ]

  def _check(self, leaf, weight):
    """Raises on an update that is reduced already, where it cannot give what is asked for."""
    if weight is not None:
      _check_weighable(self.wrapper, leaf, weight, self.names)
    if self.invariant == "reduced" and not leaf.unfinished:
      return
    if self.counts_alike:
      why = "reduced before each shard's could be told from the others"
      require_own(self.wrapper, leaf.path, self.names, leaf.open_names, why)
      return
    asked = ["plain"]
    if isinstance(self.reduction.summed, _reduce.OverGroups):
      asked.append("groups")
    # An equal weight commutes with the sum that autodiff has taken; an unequal one does not.
    reduced_names = {name for name in self.names if name not in leaf.unfinished}
    if weight is not None and _axes.varying(weight) & reduced_names:
      asked.append("unequal weights")
    for what in asked:
      if (what, self.invariant) in _REFUSED:
        why = _REFUSED[what, self.invariant]
        require_own(self.wrapper, leaf.path, self.names, leaf.unfinished, why)

  def _by_kind(self, leaves, weight, total_of):
    """The reduced leaves. Those that are to be reduced over the same axes are reduced together."""
    # Leaves that go over the same axes travel in one collective, which buffers are made for.
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
      kinds.setdefault((leaf.open_names, leaf.unfinished), []).append(i)
    results = [leaf.value for leaf in leaves]
    for (open_names, unfinished), chosen in kinds.items():
      counted = self.names if self.invariant == "summed" else unfinished
      if self.names and not counted:
        continue  # invariant="reduced", and nothing is left to send
      values = [results[i] for i in chosen]
      values = self.reduction.reduce(values, open_names, counted, weight, total_of)
      for i, value in zip(chosen, values):
        results[i] = value
    return results


def _check_weighable(wrapper, leaf, weight, names):
  """Raises on an update that was summed before it could be weighed."""
  if leaf.divided:
    raise ValueError(
      f"{wrapper}: updates{leaf.path} is sharded over {leaf.divided}, so its gradient was summed"
      " without the weights (of the extra arg, or of stale shards and towers outside). Weigh the"
      " loss instead: multiply it by weight * num_shards / psum(weight)."
    )
  others = _axes.varying(weight) - _axes.varying(leaf.value) - set(names)
  if others:
    over = sorted(map(str, others))
    raise ValueError(
      f"{wrapper}: weight differs over {over}, over which updates{leaf.path} has been reduced"
      f" already. Reduce over all the axes at once: axis_name={(*names, *over)!r}."
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
    over = _axes.names_in(entry, range(len(entry)))
    return tuple(name for name in names if name in over)

  kinds, needed = _checks.is_a(bool, np.bool_, PartitionSpec), "Python bools or PartitionSpecs"
  return [
    of(entry) for entry in _checks.spread(wrapper, "sharded", sharded, updates, kinds, needed)
  ]


def require_own(wrapper, path, names, open_names, problem):
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
