"""Several towers (parts of a batch, or of a model's devices) in one optimizer step."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_wrappers._core import _axes, _branches, _checks, _numerics, _states, _weights
from optax_wrappers._core._states import require_same, require_state
from optax_wrappers._core._types import MeanOrSum, Tree
from optax_wrappers._shards import _reduce, _rows, _unreduced
from optax_wrappers.reductions import Reduction


@_states.dataclass
class GatherTowersState(_states.State):
  """State of `gather_towers`.

  Attributes:
    tower: towers gathered in this step so far; int32 scalar.
    total_weight: sum of their weights (1 by default), each shard's own; float32 or float64 scalar.
    accumulated: sum of their weighted updates, same structure as params, each shard's own; None for
      one tower.
    inner_state: state of the wrapped optimizer.
  """

  tower: jax.Array = _states.field("lockstep")
  total_weight: jax.Array = _states.field("counted")
  accumulated: Tree = _states.field("gathered")
  inner_state: Tree


def gather_towers(
  inner: optax.GradientTransformation,
  num_towers: int,
  *,
  reduction: MeanOrSum = "mean",
  accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Gathers the updates of `num_towers` calls and steps `inner` once, in the last of them.

  Earlier calls return zero updates and leave the inner state alone. With towers `g_k` and weights
  `w_k` (1 by default), the last gives `inner` the mean `sum_k w_k g_k / sum_k w_k` or the sum
  `sum_k w_k g_k`. One tower: exactly `inner`. A mean over shards inside counts each shard by its
  `sum_k w_k`. A tower's None leaf adds nothing; the mean still divides by all towers.

  Args:
    inner: the optimizer to wrap. `gather_towers(cross_shard(adam), 4)` sends once per step.
    num_towers: calls per step, at least 1.
    reduction: "mean" or "sum".
    accumulator_dtype: None: that of the parameters, at least float32. The reduced updates are cast
      back.

  Returns:
    The wrapped optimizer, with a `GatherTowersState`.

  Raises:
    ValueError: for arguments out of range; in update, for `last=False` with one tower, and if
      `jax.grad` has summed the gradient over shards that have an accumulator each, which would make
      the step N times too large. Differentiate `per_shard(params, axis_name)`.
    TypeError: if num_towers is no int; in update, for integer updates and a traced `last`.

  Extra args:
    last: a Python bool, which decides in the place of the counter: whether `inner` steps in this
      call, by all calls since the last step, however many. The program then has no conditional. Two
      accumulators in a chain both hear it.
    weight: the weight of this tower on this shard, a real scalar, at least 0. Pass it in every call
      of a step, or in none. With a mean `inner` gets their sum. All others reach `inner`, as given
      to the last call.

  **Communication**: that of `inner` once per step, inside a conditional; with `last` in that call.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.gather_towers(optax.sgd(1.0), num_towers=2)
    >>> params = jnp.array(10.0)
    >>> state = tx.init(params)
    >>> for gradient in (2.0, 4.0):
    ...   updates, state = tx.update(jnp.array(gradient), state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   print(params)
    10.0
    7.0

  Source: tf.contrib.estimator.TowerOptimizer with replicate_model_fn.
  """
  wrapper = "gather_towers"
  _checks.integer(wrapper, "num_towers", num_towers, minimum=1)
  if isinstance(reduction, Reduction):
    raise ValueError(
      f"{wrapper}: reduction must be 'mean' or 'sum', since towers are added up as they come; got"
      f" {reduction.name}. Use reduce_towers."
    )
  _checks.choice(wrapper, "reduction", reduction, get_args(MeanOrSum))
  inner = _checks.optimizer(wrapper, inner)
  is_mean = reduction == "mean"

  def init_fn(params):
    params = _checks.arrays(params)
    zeros = functools.partial(_accumulator, dtype=accumulator_dtype)
    return GatherTowersState(
      tower=jnp.zeros((), jnp.int32),
      total_weight=jnp.zeros((), _numerics.weight_dtype(jax.tree.leaves(params))),
      accumulated=jax.tree.map(zeros, params) if num_towers > 1 else None,
      inner_state=inner.init(jax.tree.map(_unreduced.plain, params)),
    )

  def update_fn(updates, state, params=None, *, last=None, weight=None, **extra_args):
    require_state(wrapper, state, GatherTowersState)
    _check_last(wrapper, last, num_towers)
    updates = _checks.inexact(wrapper, updates)
    weight = _weights.given(wrapper, weight, jax.tree.leaves(updates))

    def step(updates, total_weight):
      total_weight = None if weight is None else total_weight
      call = wrapper, inner, updates, state.inner_state, params, total_weight
      return _weights.update_reduced(*call, extra_args, is_mean)

    if state.accumulated is None and num_towers == 1:
      updates = _finished(updates, updates, params, None)
      new_updates, inner_state = step(_one_tower(weight, updates, is_mean), weight)
      return new_updates, state.replace(inner_state=inner_state)

    if state.accumulated is None and jax.tree.leaves(updates):
      require_same(wrapper, {"num_towers": 1}, {"num_towers": num_towers})
    _checks.same_shapes(wrapper, updates, state.accumulated)
    total_weight = _heavier(state.total_weight, weight)

    # Not ==: a state that was saved within a step may come from a wrapper of more towers.
    is_last = state.tower >= num_towers - 1 if last is None else bool(last)
    # Before the branches, so that XLA adds each gradient when it is computed, and divides in the
    # same pass over memory: once, at the end, by a total weight that is not known before.
    divisor = jnp.where(is_last, total_weight, 1) if is_mean else None
    add = functools.partial(_accumulate, weight, divisor)
    accumulated = jax.tree.map_with_path(add, state.accumulated, updates)

    def last_tower():
      reduced = _finished(accumulated, updates, params, divisor)
      new_updates, inner_state = step(reduced, total_weight)
      return new_updates, GatherTowersState(
        tower=jnp.zeros_like(state.tower),
        total_weight=jnp.zeros_like(total_weight),
        accumulated=jax.tree.map(_unreduced.zeros_like, accumulated),
        inner_state=inner_state,
      )

    def earlier_tower():
      tower = state.tower + 1
      return state.replace(tower=tower, total_weight=total_weight, accumulated=accumulated)

    what = "GatherTowersState.tower, the number of towers gathered,"
    return _branches.step_if(is_last, last_tower, earlier_tower, wrapper, what)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_last(wrapper, last, num_towers):
  if last is None:
    return
  if not isinstance(last, bool | np.bool_):
    raise TypeError(
      f"{wrapper}: last must be a Python bool, got {last!r}. It cannot be traced: name it in"
      " static_argnames of jax.jit."
    )
  if num_towers == 1 and not last:
    raise ValueError(
      f"{wrapper}: last must be True or left out with num_towers=1, which has no accumulator."
    )


def _accumulator(p, dtype):
  """The accumulator for the gradients of a parameter; None for a PRNG key, which has none."""
  if jnp.issubdtype(p.dtype, jax.dtypes.extended):
    return None
  return _unreduced.zeros_like(p, dtype or _numerics.at_least_float32(p.dtype))


def _one_tower(weight, updates, is_mean):
  if weight is None:
    return updates
  # The mean of one tower is that tower, whatever its weight, except zero.
  factor = (weight != 0).astype(weight.dtype) if is_mean else weight
  return _numerics.scale_tree(updates, factor)


def _heavier(total_weight, weight):
  more = 1 if weight is None else weight.astype(total_weight.dtype)
  mend = "specs(opt_state, workers=axis_name, replicated=True) gives each shard a total_weight."
  _axes.require_like(total_weight + more, total_weight, "gather_towers", "weight", mend)
  return total_weight + more


def _accumulate(weight, divisor, path, total, update):
  if update is not None:
    why = (
      ", summed by jax.grad, but the state holds an accumulator for each shard. Differentiate"
      " per_shard(params, axis_name), or give state.accumulated and state.total_weight the spec"
      " PartitionSpec()."
    )
    _axes.require_own(update, _axes.varying(total), "gather_towers", why, path)
    _unreduced.require_type("gather_towers", path, update, total)
    update = update.astype(total.dtype)
    scale = _unreduced.scale if _unreduced.pending(total) else _numerics.scale
    total = total + (update if weight is None else scale(update, weight))
  # A pending sum can be divided only once it is reduced.
  if divisor is None or _unreduced.pending(total):
    return total
  mend = "state.accumulated is the same on all: give both the spec PartitionSpec()."
  _axes.require_like(divisor, total, "gather_towers", "GatherTowersState.total_weight", mend)
  return _numerics.divide(total, divisor)


def _finished(sums, updates, params, divisor):
  """What `inner` gets: reduced, divided if that is yet to be done, and in the updates' dtypes."""

  def finish(total, update, like):
    if total is None:  # of a PRNG key
      return None
    if _unreduced.pending(total):
      total = _unreduced.reduce(total, like)
      total = total if divisor is None else _numerics.divide(total, divisor)
    return total if update is None else total.astype(update.dtype)

  is_pending = any(map(_unreduced.pending, jax.tree.leaves(sums)))
  likes = params if is_pending and params is not None else sums
  return jax.tree.map(finish, sums, updates, likes, is_leaf=lambda x: x is None)


def reduce_towers(
  inner: optax.GradientTransformation,
  *,
  reduction: MeanOrSum | Reduction = "mean",
  axis: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Reduces the stacked updates of all towers, then calls `inner` once.

  With towers `g_k` stacked along `axis` of every leaf: mean `(1/n) sum_k g_k` or sum `sum_k g_k`;
  with weights `w_k`, `sum_k w_k g_k / sum_k w_k` and `sum_k w_k g_k`.

  Args:
    inner: the optimizer to wrap.
    reduction: "mean", "sum", or one of `optax_wrappers.reductions`, which take no weights.
    axis: the axis of the towers in every update leaf; the parameters have no such axis.

  Returns:
    The wrapped optimizer, with the state of `inner`; its updates have the parameters' shapes.

  Raises:
    ValueError: for an unknown reduction; in update, for leaves that do not fit each other or the
      parameters.
    TypeError: if axis is no int; in update, for integer updates.

  Extra args:
    weight: real `[num_towers]`, or one for all, at least 0. A tower of weight zero adds nothing,
      not even a NaN. With a mean `inner` gets their sum as `weight`. All others reach `inner`.

  **Communication**: none of its own.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.reduce_towers(optax.sgd(1.0))
    >>> params = jnp.array([1.0, 1.0])
    >>> stacked = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    >>> updates, _ = tx.update(stacked, tx.init(params), params)
    >>> print(updates)
    [-2. -4.]

  Source: tf.contrib.estimator.TowerOptimizer, for towers that are computed together.
  """
  wrapper = "reduce_towers"
  _rows.check(wrapper, reduction)
  _checks.integer(wrapper, "axis", axis)
  inner = _checks.optimizer(wrapper, inner)
  is_mean = reduction != "sum"

  def update_fn(updates, inner_state, params=None, *, weight=None, **extra_args):
    updates = _checks.inexact(wrapper, updates)
    _check_towers(updates, params, axis)
    leaves, treedef = jax.tree.flatten(updates)
    num_towers = leaves[0].shape[axis] if leaves else 0
    if weight is not None:
      # A scalar is one weight for all towers.
      weights = _weights.given(wrapper, weight, leaves, num_towers if jnp.ndim(weight) else None)
      weight = jnp.broadcast_to(weights, (num_towers,)) if leaves else None
    total_weight = None if weight is None else weight.sum()
    over_towers: Any = _reduce.Weighted(_reduce.OverTowers(axis, num_towers), is_mean)
    if isinstance(reduction, Reduction):
      _rows.require_votes(wrapper, weight, f"reduction={reduction.name}", voter="tower")
      over_towers = _rows.OfRows(reduction, _rows.OverTowers(axis))
    leaves = over_towers.reduce(leaves, (), (), weight, lambda over: total_weight)
    call = wrapper, inner, treedef.unflatten(leaves), inner_state, params, total_weight
    return _weights.update_reduced(*call, extra_args, is_mean)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _check_towers(updates, params, axis):
  """Raises unless all leaves have one number of towers, and otherwise the parameters' shapes."""
  num_towers = None
  for path, leaf in jax.tree.leaves_with_path(updates):
    name = f"reduce_towers: updates{jax.tree_util.keystr(path)}"
    if not -leaf.ndim <= axis < leaf.ndim:
      raise ValueError(f"{name} needs an axis {axis} of towers, got shape {leaf.shape}.")
    if leaf.shape[axis] == 0:
      raise ValueError(f"{name} needs at least one tower along axis {axis}, got {leaf.shape}.")
    num_towers = num_towers or leaf.shape[axis]
    if leaf.shape[axis] != num_towers:
      raise ValueError(
        f"{name} has {leaf.shape[axis]} towers along axis {axis}, the leaves before it"
        f" {num_towers}; stack the same towers' updates in every leaf."
      )

  def without_towers(x):
    return jax.ShapeDtypeStruct(tuple(np.delete(x.shape, axis)), x.dtype)

  if params is not None:
    tower = jax.tree.map(without_towers, updates)
    mend = f"This is without the axis {axis} of towers."
    _checks.same_shapes("reduce_towers", tower, params, mend)


def tower_value_and_grad(
  fun: Callable[..., Any],
  num_towers: int,
  *,
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  devices: Sequence[jax.Device] | None = None,
) -> Callable[..., tuple[Any, Any]]:
  """`jax.value_and_grad` of each tower's part of the batch.

  Positional arguments that are not differentiated are the batch: their leaves are split evenly
  along the leading axis, slice k for tower k. All other arguments go to every tower whole.

  Args:
    fun: returns a real scalar, or `(scalar, aux)` with `has_aux`.
    num_towers: parts to split the batch into, at least 1.
    argnums: that of `jax.value_and_grad`.
    has_aux: that of `jax.value_and_grad`.
    devices: None: the towers are vmapped, in one program. Otherwise one device for each; the
      results are gathered on the last. Not inside jit, grad or vmap.

  Returns:
    A function with the arguments of `fun` that returns values `[num_towers]` (with `has_aux`, a
    pair of these and aux `[num_towers, ...]`) and gradients `[num_towers, ...]`, for
    `reduce_towers`.

  Raises:
    ValueError, TypeError: for arguments out of range or of another kind; in the call, for a batch
      that the towers do not divide, and inside jit, grad or vmap with devices.

  **Communication**: with devices, the parameters to each of them and the gradients to the last.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> loss = lambda c, x: jnp.sum(jnp.abs(c * x - x))
    >>> towers = ow.tower_value_and_grad(loss, num_towers=2)
    >>> values, grads = towers(jnp.array(10.0), jnp.array([1.0, 2.0]))
    >>> print(values, grads)
    [ 9. 18.] [1. 2.]

  Source: tf.contrib.estimator.replicate_model_fn.
  """
  wrapper = "tower_value_and_grad"
  _checks.integer(wrapper, "num_towers", num_towers, minimum=1)
  differentiated = (argnums,) if isinstance(argnums, int) else tuple(argnums)
  if devices is not None and len(devices) != num_towers:
    what = f"{wrapper}: devices must be one for each of the {num_towers} towers"
    raise ValueError(f"{what}, got {len(devices)}.")
  value_and_grad = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux)
  on_devices = None if devices is None else _on_devices(value_and_grad, devices)

  def towers(*args, **kwargs):
    whole = {i % len(args) for i in differentiated if -len(args) <= i < len(args)}
    # Every tower receives differentiated arguments in full; the others are the batch.
    parts = [arg if i in whole else _split(arg, num_towers, i) for i, arg in enumerate(args)]
    if devices is None:
      in_axes = tuple(None if i in whole else 0 for i in range(len(args)))
      return jax.vmap(lambda *args: value_and_grad(*args, **kwargs), in_axes=in_axes)(*parts)

    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
      what = f"{wrapper}: devices gives each tower its own device, which cannot be done inside jit"
      raise TypeError(f"{what}, grad or vmap. Call it outside.")
    of_tower = (functools.partial(jax.tree.map, operator.itemgetter(i)) for i in range(num_towers))
    args_of_towers = (
      [arg if i in whole else take(arg) for i, arg in enumerate(parts)] for take in of_tower
    )
    return on_devices(args_of_towers, kwargs)

  return towers


_ARRAYS = jax.Array, np.ndarray, np.generic


def _on_devices(value_and_grad, devices):
  """A function of each tower's arguments, and of keywords for all, that runs one on each device."""

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def on_device(treedef, others, args, arrays):
    leaves = [other if x is None else x for x, other in zip(arrays, others)]
    return value_and_grad(*args, **treedef.unflatten(leaves))

  def run(args_of_towers, kwargs):
    # Flags and the like stay Python's, as on one device.
    leaves, treedef = jax.tree.flatten(kwargs)
    arrays = [x if isinstance(x, _ARRAYS) else None for x in leaves]
    others = tuple(None if isinstance(x, _ARRAYS) else x for x in leaves)
    # Arguments on different devices are an error.
    results = [
      on_device(treedef, others, *jax.device_put((args, arrays), device))
      for args, device in zip(args_of_towers, devices)
    ]
    # Dispatch is asynchronous: all devices are computing by now.
    results = jax.device_put(results, devices[-1])
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

  return run


def _split(batch, num_towers, argument):
  """Every leaf `[batch, ...]` as `[num_towers, batch / num_towers, ...]`."""

  def split(path, x):
    x = jnp.asarray(x)
    if x.ndim == 0 or x.shape[0] % num_towers:
      size = "no leading axis" if x.ndim == 0 else f"size {x.shape[0]}"
      what = f"tower_value_and_grad: argument {argument}'s leaf {jax.tree_util.keystr(path)!r} must"
      requirement = f"have a leading axis that is a multiple of the {num_towers} towers, got {size}"
      raise ValueError(f"{what} {requirement}. Pass arguments that are not the batch by keyword.")
    return x.reshape(num_towers, x.shape[0] // num_towers, *x.shape[1:])

  return jax.tree.map_with_path(split, batch)
