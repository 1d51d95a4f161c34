"""Several towers (parts of a batch, or of a model's devices) that share one optimizer step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from optax_wrappers._core import _axes, _branches, _checks, _numerics, _weights
from optax_wrappers._core._state import WrapperState, require_state, state
from optax_wrappers._core._types import MeanOrSum, Tree
from optax_wrappers._shards import _reduce, _rows
from optax_wrappers.reductions import Reduction


@state
class GatherTowersState(WrapperState):
  """State of `gather_towers`.

  Attributes:
    tower: towers gathered in this step so far; int32 scalar.
    total_weight: sum of their weights, each shard's own, 1 for a tower that came without; float32
      scalar (float64 where a parameter is).
    accumulated: sum of their weighted updates, same structure as params, each shard's own; None if
      there is one tower.
    inner_state: state of the wrapped optimizer.
  """

  shared_fields = frozenset({"tower"})
  lockstep_fields = frozenset({"tower"})
  per_shard_fields = frozenset({"total_weight", "accumulated"})

  tower: jax.Array
  total_weight: jax.Array
  accumulated: Tree
  inner_state: Tree


_MEASURED = "measure_noise reduces over shards, of which stacked towers under jax.vmap are some"


@_checks.spelled(noise_decay=_MEASURED)
def gather_towers(
  inner: optax.GradientTransformation,
  num_towers: int,
  *,
  reduction: MeanOrSum = "mean",
  accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Gathers the updates of `num_towers` calls and steps `inner` once, in the last of them.

  The first `num_towers - 1` calls return zero updates and leave the inner state alone. With towers
  `g_k` and weights `w_k` (1 by default), the last call gives `inner` the mean `sum_k w_k g_k /
  sum_k w_k` or the sum `sum_k w_k g_k`. One tower: exactly `inner`. Weights may differ from shard
  to shard: a mean over shards inside `inner` then counts each shard by its `sum_k w_k`, so that the
  mean of the means is the weighted mean of all towers of all shards.

  A None leaf in one tower's updates adds nothing; the mean still divides by all towers, as
  TensorFlow's does.

  Args:
    inner: the optimizer to wrap. Put `cross_shard` inside: `gather_towers(cross_shard(adam), 4)`
      sends once per step.
    num_towers: calls per step, at least 1.
    reduction: "mean" or "sum".
    accumulator_dtype: dtype of the accumulator; None: that of the parameters, or float32 where they
      have less range than that (float16, float8), in which a sum could overflow. The reduced
      updates are cast back.

  Returns:
    The wrapped optimizer, with a `GatherTowersState`.

  Raises:
    ValueError: for arguments out of range; in update, where a tower's updates are already summed
      over shards for each of which the state holds an accumulator of its own.
    TypeError: if num_towers is no int; in update, for integer updates.

  Extra args:
    weight: real scalar, at least 0, this tower's, each shard's own. Pass one in all calls of a step
      or in none. With a mean `inner` gets the sum of the towers' weights, by the same name. All
      others reach `inner`, as given to the last call.

  **Communication**: none of its own; the collectives of `inner` run once per step, inside a
  conditional.

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

  Source: tf.contrib.estimator.TowerOptimizer with replicate_model_fn. TensorFlow scales each
  tower's loss; here the division is in the reduction.
  """
  wrapper = "gather_towers"
  _check_gathering(wrapper, num_towers, reduction)
  inner = _checks.optimizer(wrapper, inner)
  is_mean = reduction == "mean"

  def init_fn(params):
    params = _checks.arrays(params)
    zeros = functools.partial(_accumulator, dtype=accumulator_dtype)
    return GatherTowersState(
      tower=jnp.zeros((), jnp.int32),
      total_weight=jnp.zeros((), _numerics.weight_dtype(jax.tree.leaves(params))),
      accumulated=jax.tree.map(zeros, params) if num_towers > 1 else None,
      inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    require_state(wrapper, state, GatherTowersState)
    updates = _checks.inexact(wrapper, updates)
    weight = _weights.given(wrapper, weight, jax.tree.leaves(updates))

    def step(updates, total_weight):
      total_weight = None if weight is None else total_weight
      call = wrapper, inner, updates, state.inner_state, params, total_weight
      return _weights.update_reduced(*call, extra_args, is_mean)

    if state.accumulated is None and num_towers == 1:
      new_updates, inner_state = step(_one_tower(weight, updates, is_mean), weight)
      return new_updates, state.replace(inner_state=inner_state)

    _check_accumulator(wrapper, state, updates, num_towers)
    total_weight = _total_weight(wrapper, weight, state)

    # Before the branches, where XLA adds a gradient as it makes it.
    add = functools.partial(_accumulate, weight)
    accumulated = jax.tree.map_with_path(add, state.accumulated, updates)

    def last_tower():
      reduced = _of_all_towers(accumulated, updates, total_weight if is_mean else None)
      new_updates, inner_state = step(reduced, total_weight)
      new_state = state.replace(
        tower=jnp.zeros_like(state.tower),
        total_weight=jnp.zeros_like(total_weight),
        accumulated=jax.tree.map(jnp.zeros_like, accumulated),
        inner_state=inner_state,
      )
      return new_updates, new_state

    # Zero updates with the types of the last tower's, which lax.cond asks of its branches.
    def earlier_tower(shapes):
      new_state = state.replace(
        tower=state.tower + 1, total_weight=total_weight, accumulated=accumulated
      )
      return jax.tree.map(_zeros_of, shapes[0]), new_state

    # Not ==: a state that was saved in mid-step may come from more towers.
    is_last = state.tower >= num_towers - 1
    what = "GatherTowersState.tower, the number of towers gathered,"
    return _branches.cond(is_last, last_tower, earlier_tower, wrapper, what)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_gathering(wrapper, num_towers, reduction):
  """Raises on arguments of `gather_towers`."""
  _checks.integer(wrapper, "num_towers", num_towers, minimum=1)
  if isinstance(reduction, Reduction):
    raise ValueError(
      f"{wrapper}: reduction must be 'mean' or 'sum', because towers are added up as they come, and"
      f" {reduction.name} needs all of them at once. reduce_towers has them stacked."
    )
  _checks.choice(wrapper, "reduction", reduction, get_args(MeanOrSum))


def _accumulator(p, dtype):
  """What adds up the gradients of a parameter; None for a PRNG key, which has none."""
  if jnp.issubdtype(p.dtype, jax.dtypes.extended):
    return None
  return jnp.zeros_like(p, dtype=dtype or _numerics.sum_dtype(p.dtype))


def _require_unweighted(wrapper, weight, what):
  """Raises on weights where every tower counts by itself."""
  if weight is not None:
    raise ValueError(
      f"{wrapper}: with {what} every tower has one vote, so that there are no weights (of the extra"
      " arg, or of stale shards outside). Leave one of them out."
    )


def _check_accumulator(wrapper, state, updates, num_towers):
  """Raises where the state's accumulator is not for these updates."""
  if state.accumulated is None and jax.tree.leaves(updates):
    raise ValueError(
      f"{wrapper}: the state has no accumulator, as that of num_towers=1, but num_towers is"
      f" {num_towers}. Start from tx.init(params), with the inner state of the saved one:"
      " new.replace(inner_state=old.inner_state)."
    )
  _checks.same_shapes(wrapper, updates, state.accumulated)


def _total_weight(wrapper, weight, state):
  """The weights of the towers gathered so far, this one among them."""
  total = state.total_weight
  total = total + (1 if weight is None else weight.astype(total.dtype))
  mend = (
    "The state holds one total_weight for all of them. worker_specs(opt_state, axis_name,"
    " replicated=True) lays it out so that each shard has its own."
  )
  _axes.require_like(total, state.total_weight, wrapper, "weight", mend)
  return total


def _of_all_towers(accumulated, updates, divisor):
  """The mean of all towers, or with no divisor their sum, in the dtypes of the updates."""

  def reduce(total, update):
    # The sum is divided once at the end, rather than each tower as it comes: n roundings less, and
    # the total of the weights is not known before.
    reduced = total if divisor is None else _numerics.divide(total, divisor)
    return reduced if update is None else reduced.astype(update.dtype)

  return jax.tree.map(reduce, accumulated, updates)


def _zeros_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
  """Zeros, laid out as the abstract value is over the axes of an Explicit mesh."""
  # The abstract value says how XLA lays the last tower's updates out, and branches must agree.
  zeros = jnp.zeros(shape.shape, shape.dtype)
  if (
    shape.sharding is None
    or jax.typeof(zeros).sharding == shape.sharding
    or not any(shape.sharding.spec)
  ):
    return zeros
  return jax.sharding.reshard(zeros, shape.sharding)


def _one_tower(weight, updates, is_mean):
  """The mean or the weighted sum of one tower, which a weight of zero makes zero."""
  if weight is None:
    return updates
  # The mean of one tower is that tower whatever its weight, but for zero.
  factor = (weight != 0).astype(weight.dtype) if is_mean else weight
  return _numerics.scale_tree(updates, factor)


def _accumulate(
  weight: jax.Array | None, path: Any, total: jax.Array, update: jax.Array | None
) -> jax.Array:
  if update is None:
    return total
  _axes.require_own(
    update,
    total,
    "gather_towers",
    path,
    " (jax.grad sums the gradient of a replicated parameter under check_vma=True), but the state"
    " holds an accumulator for each shard. Differentiate with respect to per_shard(params,"
    " axis_name), or give state.accumulated the replicated spec PartitionSpec().",
  )
  update = update.astype(total.dtype)
  return total + (update if weight is None else _numerics.scale(update, weight))


@_checks.spelled(noise_decay=_MEASURED)
def reduce_towers(
  inner: optax.GradientTransformation,
  *,
  reduction: MeanOrSum | Reduction = "mean",
  axis: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Reduces the stacked updates of all towers, then calls `inner` once.

  With towers `g_k` stacked along `axis` of every leaf: mean `(1/n) sum_k g_k` or sum `sum_k g_k`;
  with weights `w_k`, `sum_k w_k g_k / sum_k w_k` and `sum_k w_k g_k`. The state is the inner state,
  unchanged.

  Args:
    inner: the optimizer to wrap.
    reduction: "mean", "sum", or one of `optax_wrappers.reductions`, for which every tower has one
      vote: without weights.
    axis: the axis of the towers in every update leaf; the parameters have no such axis.

  Returns:
    The wrapped optimizer; its updates have the shape of the parameters.

  Raises:
    ValueError: for an unknown reduction; in update, if the leaves do not have one number of towers
      along `axis`, or do not have the parameters' shape without it.
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
    weight = _given_weight(weight, leaves, num_towers)
    total_weight = None if weight is None else weight.sum()
    over_towers: Any = _reduce.Weighted(_reduce.OverTowers(axis, num_towers), is_mean)
    if isinstance(reduction, Reduction):
      _require_unweighted(wrapper, weight, f"reduction={reduction.name}")
      over_towers = _rows.OfRows(reduction, _rows.OverTowers(axis))
    leaves = over_towers.reduce(leaves, (), (), weight, lambda over: total_weight)
    call = wrapper, inner, treedef.unflatten(leaves), inner_state, params, total_weight
    return _weights.update_reduced(*call, extra_args, is_mean)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _given_weight(weight, leaves, num_towers):
  """The weight of each tower, of which a scalar is one for all."""
  if weight is None or not leaves:
    return None
  if jnp.ndim(weight):
    return _weights.given("reduce_towers", weight, leaves, num_towers)
  return jnp.broadcast_to(_weights.given("reduce_towers", weight, leaves), (num_towers,))


def _check_towers(updates: Tree, params: Tree, axis: int) -> None:
  """Raises unless all leaves have one number of towers, and otherwise the parameters' shapes."""
  num_towers = None
  for path, leaf in jax.tree.leaves_with_path(updates):
    name = f"updates{jax.tree_util.keystr(path)}"
    if not -leaf.ndim <= axis < leaf.ndim:
      raise ValueError(
        f"reduce_towers: {name} needs an axis {axis} of towers, got shape {leaf.shape}."
      )
    num_towers = num_towers or leaf.shape[axis]
    if leaf.shape[axis] != num_towers:
      raise ValueError(
        f"reduce_towers: {name} has {leaf.shape[axis]} towers along axis {axis}, the leaves before"
        f" it {num_towers}; stack the same towers' updates in every leaf."
      )
  if params is None:
    return
  found = _checks.same_structure("reduce_towers", updates, params)
  for (path, param), leaf in zip(jax.tree.leaves_with_path(params), found, strict=True):
    if leaf is None:
      continue
    position = axis % leaf.ndim
    without = leaf.shape[:position] + leaf.shape[position + 1 :]
    if without != jnp.shape(param):
      raise ValueError(
        f"reduce_towers: updates{jax.tree_util.keystr(path)} must be the parameter's shape"
        f" {jnp.shape(param)} with the axis of towers added at {axis}; got {leaf.shape}."
        " tower_value_and_grad returns such gradients."
      )


def tower_value_and_grad(
  fun: Callable[..., Any],
  num_towers: int,
  *,
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  devices: Sequence[jax.Device] | None = None,
) -> Callable[..., tuple[Any, Any]]:
  """`jax.value_and_grad` of each tower's part of the batch.

  The positional arguments that are not differentiated are the batch: every leaf of theirs is split
  evenly along its leading axis, tower k getting the k-th slice. Differentiated and keyword
  arguments go to every tower whole.

  Args:
    fun: returns a real scalar, or `(scalar, aux)` with `has_aux`.
    num_towers: parts to split the batch into, at least 1.
    argnums: as in `jax.value_and_grad`.
    has_aux: as in `jax.value_and_grad`.
    devices: None: the towers are vmapped, in one program. Otherwise one device for each tower: each
      is dispatched to its own, and the results are gathered on the last, as replicate_model_fn
      does. Not inside jit.

  Returns:
    A function of the arguments of `fun` that returns values `[num_towers]` (with `has_aux`, a pair
    of them and aux stacked `[num_towers, ...]`) and gradients stacked `[num_towers, ...]`, which
    `reduce_towers` takes.

  Raises:
    ValueError: for arguments out of range; when called, for a batch that does not divide by the
      towers.
    TypeError: if num_towers is no int; when called inside jit with devices.

  **Communication**: with devices, the parameters to every device and the gradients back to the
  last.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> loss = lambda c, x: jnp.sum(jnp.abs(c * x - x))
    >>> towers = ow.tower_value_and_grad(loss, num_towers=2)
    >>> values, grads = towers(jnp.array(10.0), jnp.array([1.0, 2.0]))
    >>> print(values, grads)
    [ 9. 18.] [1. 2.]

  Source: tf.contrib.estimator.replicate_model_fn.
  """
  _checks.integer("tower_value_and_grad", "num_towers", num_towers, minimum=1)
  differentiated = (argnums,) if isinstance(argnums, int) else tuple(argnums)
  if devices is not None and len(devices) != num_towers:
    raise ValueError(
      f"tower_value_and_grad: devices must be one for each of the {num_towers} towers, got"
      f" {len(devices)}."
    )
  value_and_grad = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux)
  on_device = jax.jit(value_and_grad)

  def towers(*args, **kwargs):
    whole = {i % len(args) for i in differentiated if -len(args) <= i < len(args)}
    # Differentiated arguments go to every tower whole; the others are the batch.
    parts = [arg if i in whole else _split(arg, num_towers, i) for i, arg in enumerate(args)]
    if devices is None:
      in_axes = tuple(None if i in whole else 0 for i in range(len(args)))
      return jax.vmap(lambda *args: value_and_grad(*args, **kwargs), in_axes=in_axes)(*parts)

    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
      raise TypeError(
        "tower_value_and_grad: with devices= each tower is dispatched to its own device, which"
        " cannot be done inside jit, grad or vmap. Call it outside, or leave devices out."
      )
    results = []
    for tower, device in enumerate(devices):
      own = [arg if i in whole else _index(arg, tower) for i, arg in enumerate(parts)]
      # Arguments on different devices are an error, so that all of a tower's go to its own.
      own, own_kwargs = jax.device_put((own, kwargs), device)
      results.append(on_device(*own, **own_kwargs))
    # Dispatch is asynchronous: every device computes by now, and the copies wait for them.
    results = jax.device_put(results, devices[-1])
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)

  return towers


def _index(tree: Tree, k: int) -> Tree:
  return jax.tree.map(lambda x: x[k], tree)


def _split(batch: Tree, num_towers: int, argument: int) -> Tree:
  """Every leaf `[batch, ...]` as `[num_towers, batch / num_towers, ...]`."""

  def split(path, x):
    x = jnp.asarray(x)
    if x.ndim == 0 or x.shape[0] % num_towers:
      size = "no leading axis" if x.ndim == 0 else f"size {x.shape[0]}"
      raise ValueError(
        f"tower_value_and_grad: argument {argument} is part of the batch; the leading axis of its"
        f" leaf {jax.tree_util.keystr(path)!r} must divide by the {num_towers} towers, got {size}."
        " Drop or pad the remainder; pass what is no batch as a keyword argument."
      )
    return x.reshape(num_towers, x.shape[0] // num_towers, *x.shape[1:])

  return jax.tree.map_with_path(split, batch)
