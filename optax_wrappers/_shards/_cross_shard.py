"""Reduction of updates across shards, inside the optimizer."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

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
from optax_wrappers._core._types import AxisName, Invariant, MeanOrSum, Nonfinite, Tree
from optax_wrappers._core._weights import Reduced
from optax_wrappers._shards import _shard_state
from optax_wrappers._shards._compress import CompressedState
from optax_wrappers._shards._reducer import DROP, Reducer, require_each_own
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
    invariant: how to read an update that is the same on every shard. "summed": as the sum that
      `jax.grad` returns for a replicated parameter under `check_vma=True`, which a mean divides by
      N. "reduced": as the result. "error": raise.
    sharded: which parameters are sharded over the axis (FSDP, ZeRO, experts): bools or
      PartitionSpecs, of the updates' structure or a prefix of it, or a function from the updates to
      these. Their gradients are already summed and not sent over those axes; the mean divides by N.
    codec: compresses the updates: a codec or `codecs.compression`. With error feedback, the
      default, what it leaves out is sent later. None: no compression.

  Returns:
    A gradient transformation, with an `AllReduceState`, which without a codec has no leaves.

  Raises:
    ValueError: for arguments out of range; in update, for an unbound axis, groups that do not fit
      it, a negative weight, and per-shard weights or a codec on updates that are summed.
    TypeError: in update, for integer updates.

  Extra args:
    weight: real scalar, at least 0, one per shard. Every transformation of a chain gets it, so
      reduce over several axes in one. `drop_stale` and `gather_towers` outside pass theirs on.

  **Communication**: once per step every leaf that is not equal on all shards, in its own dtype
  (float16 and float8 as float32, so that no sum overflows); with weights one float32 scalar more;
  with groups a leaf as many times as there are groups. Compressed leaves go as bytes, by an
  all-to-all and an all-gather; for two shards (except with a vote) or sparse codes by the
  all-gather alone; for a linear codec by all-reduces. A reduction of `reductions` takes an
  all-to-all and an all-gather of every leaf; from a Gram matrix it sends N x N numbers more.

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
  reducer = Reducer.make(
    "all_reduce", axis_name, reduction, axis_index_groups, invariant, sharded, codec
  )

  def init_fn(params):
    return AllReduceState(reduced=reducer.node, compressed=reducer.start(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    is_empty = not isinstance(state, AllReduceState) and not jax.tree.leaves(state)
    # Nothing is stored, so any state will do.
    if is_empty and reducer.compression is None:
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

  `inner` receives the result of `all_reduce`; see there for the shared arguments and errors. The
  inner state is the same on all shards (of a group).

  Args:
    inner: the optimizer to wrap.
    axis_name: the axis or axes to reduce over, or None.
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
      parameter except scalars, so it must be elementwise, as Adam is; for a global norm use this
      library's `clip_by_global_norm`. Not with groups, `sharded`, a codec, one of `reductions`, or
      a reduction in `inner`.

  Returns:
    The wrapped optimizer, with a `CrossShardState`.

  Raises:
    ValueError, TypeError: see `all_reduce`. With `shard_state`, in update, ValueErrors for an
      `inner` that is not elementwise and a state that was not divided.

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
  reducer = Reducer.make(
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
      share, inner_state = params, state.inner_state
      if shard_state:
        arguments = updates, inner_state, params, extra_args
        share, inner_state = _shard_state.shares_for(wrapper, names, inner, *arguments)
      passed = extra_args
      if "value" in extra_args:
        passed = extra_args | {"value": _mean_value(extra_args["value"], reducer, weight)}
      call = wrapper, inner, reduced, inner_state, share, total if is_mean else weight
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


def _mean_value(value, reducer, weight):
  """The extra arg `value`: of a loss, all shards get the mean, because `inner` decides by it."""
  if not (isinstance(value, jax.Array) and value.shape == () and _numerics.is_inexact(value)):
    return value
  (open_names,) = _axes.unreduced_names([value], () if reducer.groups else reducer.names)
  if not open_names:
    return value
  wide = value.astype(_numerics.at_least_float32(value.dtype))
  weight = jnp.asarray(1.0 if weight is None else weight, wide.dtype)
  total, weights = _collectives.psum((_numerics.scale(wide, weight), weight), open_names)
  return _numerics.divide(total, weights).astype(value.dtype)


def _require_one_accumulator(reducer, inner_state):
  """Raises if towers are gathered between reductions over different axes."""
  for towers in instances(inner_state, GatherTowersState) if reducer.names else ():
    reduced_inside = _weights.names_of(_weights.inside(towers))
    later = tuple(name for name in reduced_inside if name not in reducer.names)
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
    require_each_own(wrapper, updates, names, "a sum that contains the NaN of any shard")
  weight = _weights.given(wrapper, 1.0 if weight is None else weight, leaves)

  # One bit for all leaves of a shard: a gradient with a NaN in one layer is wrong in all.
  finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves] or [jnp.array(True)]).all()
  # In one all-reduce the number of finite shards, which the state reports, and the number of those
  # that also have a weight, which decides.
  counts = jnp.stack([finite, finite & (weight != 0)]).astype(jnp.int32)
  num_finite, num_counted = _collectives.psum(counts, names)
  accept, weight = num_counted > 0, jnp.where(finite, weight, 0)
  reduced_inside = _weights.names_of(_weights.inside(state.inner_state))
  _weights.require_decided(wrapper, DROP, accept, names, reduced_inside)
  updates, new = _branches.update_if(
    accept, lambda state: step(updates, weight, state), state, wrapper, DROP
  )
  num_nonfinite = lax.axis_size(names) - num_finite
  nonfinite = _numerics.saturating_add(state.nonfinite, num_nonfinite)
  _axes.require_like(nonfinite, state.nonfinite, wrapper, "CrossShardState.nonfinite")
  return updates, new.replace(nonfinite=nonfinite)
