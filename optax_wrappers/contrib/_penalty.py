"""Means of workers' differences that look at their lengths."""

import functools

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _checks, _collectives, _numerics, _states
from optax_wrappers._core._states import require_state
from optax_wrappers._core._types import AxisName


@_states.dataclass
class PenaltyState(_states.State):
  """State of `penalty`, of the lengths of this worker's own differences.

  Attributes:
    count: exchanges so far; int32 scalar.
    mean: their exponentially weighted mean; real scalar.
    variance: their exponentially weighted variance; real scalar.
    recent: how many standard deviations the latest were above the mean; [warmup], zeros at first.
  """

  count: jax.Array
  mean: jax.Array
  variance: jax.Array
  recent: jax.Array


def penalty(
  axis_name: AxisName,
  *,
  clip: float = 10.0,
  threshold: float = 3.0,
  warmup: int = 120,
  decay: float = 0.02,
  temperature: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
  """A mean in which workers that moved far count little, and workers that moved too far not at all.

  For `local_steps(reduction=)`, with `outer=optax.sgd(0.7, momentum=0.8, nesterov=True)` EDiT's
  pseudo-gradient penalty. With n_i the length of worker i's difference D_i,

      left out: n_i > mean_i + threshold * max(1, spread_i) * std_i,   or n_i = 0
      D = sum_i w_i D_i,   w_i = softmax(-n_i / temperature)     over those that are not
      D <- D * min(1, clip / (||D|| + 1e-6))

  where mean_i and std_i are the exponentially weighted mean and standard deviation, starting at 0,
  of worker i's lengths in earlier exchanges, and spread_i is the standard deviation of the `warmup`
  latest scores `(n_i - mean_i) / std_i`. If all are left out, the center and the outer state do not
  change, and the workers move to the center.

  The length is of all that is exchanged together: with `fragments` each has its own, as EDiT's
  modules have. It is of whole variables, not of parts of them along other axes of a shard_map.

  Args:
    axis_name: the axis or axes of the workers.
    clip: the largest length of the result, in the parameters' units, above 0.
    threshold: how many standard deviations are too far, above 0.
    warmup: synchronizations in which no worker is rejected, at least 2.
    decay: the weight of the latest length in the mean, in (0, 1).
    temperature: above 0, in the parameters' units. Larger: all count more alike.

  Extra args:
    weight: a factor of w_i, real scalar, at least 0, each worker's own.

  **Communication**: in an exchange the bytes of the parameters, and 8 more.

  Examples:
    Of two workers the second has gone ten times as far:

    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> mean = ow.contrib.penalty("workers")
    >>> merge = lambda d: mean.update(d, mean.init(d))[0]
    >>> differences = jnp.array([1.0, 10.0])
    >>> print(jax.vmap(merge, axis_name="workers")(differences)[0].round(3))
    1.001

  Source: Cheng et al., "EDiT" (arXiv 2412.07210), as its authors' program (ATorch) has it with
  FSDP, in which the detector sees those that it leaves out too.
  """
  function, names = "penalty", _axes.axis_names(axis_name)
  positive = ("clip", clip), ("threshold", threshold), ("temperature", temperature)
  for name, value in positive:
    _checks.number(function, name, value, lambda x: x > 0, "above 0")
  warmup = _checks.integer(function, "warmup", warmup, minimum=2)
  decay = _checks.number(function, "decay", decay, lambda x: 0 < x < 1, "in (0, 1)")

  def above(length, seen):
    """By how many standard deviations, once there is enough data."""
    scores = _numerics.divide(length - seen.mean, jnp.sqrt(seen.variance))
    return jnp.where(seen.count >= warmup, scores, jnp.zeros_like(scores))

  def counted(length, seen):
    step = length - seen.mean
    mean = seen.mean + decay * step
    variance = (1 - decay) * (seen.variance + decay * step * (length - mean))
    count = _numerics.saturating_add(seen.count, jnp.ones((), jnp.int32))
    # A value whose square overflows would make the variance infinite forever.
    known = jnp.isfinite(variance)
    mean, variance = _numerics.select(known, (mean, variance), (seen.mean, seen.variance))
    new = seen.replace(count=count, mean=mean, variance=variance)
    return new.replace(recent=seen.recent.at[seen.count % warmup].set(above(length, new)))

  def init_fn(params):
    number = jnp.zeros((), _numerics.weight_dtype(jax.tree.leaves(params)))
    recent = jnp.zeros((warmup,), number.dtype)
    return PenaltyState(jnp.zeros((), jnp.int32), number, jnp.zeros_like(number), recent)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    _axes.require_bound(names, function)
    require_state(function, state, PenaltyState)
    updates = _axes.to_varying(updates, names)
    length = _length(jax.tree.leaves(updates)).astype(state.mean.dtype)
    spread = jnp.maximum(1, jnp.std(state.recent, ddof=1))
    seen = jax.lax.stop_gradient(length)  # decisions have no derivative
    given = jnp.ones_like(length) if weight is None else jnp.asarray(weight).astype(length.dtype)
    counts = (above(seen, state) <= threshold * spread) & (seen > 0) & (given > 0)
    # Relative to the shortest, whose weight is e^0: otherwise all weights could underflow to zero.
    shortest = -_collectives.pmax(jnp.where(counts, -seen, -jnp.inf), names)
    nearness = jnp.exp((jnp.where(counts, shortest, length) - length) / temperature)
    share = jnp.where(counts, given * nearness, jnp.zeros_like(length))
    summed, total = _collectives.psum((_numerics.scale_tree(updates, share), share), names)
    merged = jax.tree.map(lambda x: _numerics.divide(x, total), summed)
    factor = jnp.minimum(1, clip / (_length(jax.tree.leaves(merged)) + 1e-6))
    return _numerics.scale_tree(merged, factor), counted(seen, state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _length(leaves):
  """The Euclidean length of all of them, whose squares neither overflow nor underflow."""
  flat = [x.astype(_numerics.at_least_float32(x.dtype)).ravel() for x in leaves]
  dtype = _numerics.weight_dtype(flat)
  largest = functools.reduce(
    jnp.maximum, [jnp.max(jnp.abs(x), initial=0).astype(dtype) for x in flat]
  )
  largest = jax.lax.stop_gradient(largest)  # a unit that cancels out of the length
  parts = [_numerics.divide(x, largest) for x in flat]
  square = sum(jnp.real(x * x.conj()).sum().astype(dtype) for x in parts)
  # The derivative of a square root at zero is NaN, even if it is not selected.
  return largest * jnp.sqrt(jnp.where(square == 0, 1, square))


def radial_mean(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
  """The mean of the lengths times the direction of the mean of the directions, for each variable.

  A mean of differences in many directions is shorter than each of them; this is not. It is a value
  for `local_steps(reduction=)`. To give some variables, such as embeddings, the plain mean:
  `optax.partition({"radial": radial_mean(axis), "plain": all_reduce(axis)}, labels)`.

  Lengths are of whole variables: not of the parts that devices have of one, along other axes of a
  shard_map. Where directions cancel to rounding, and where all lengths are zero, the result is 0.
  Without a weight, a worker with a NaN counts as one of length zero, as in `all_reduce`.

  Args:
    axis_name: the axis or axes of the workers.

  Extra args:
    weight: of lengths and directions alike, real scalar, at least 0, each worker's own.

  **Communication**: in an exchange the bytes of the parameters, and 4 more for each variable.

  Examples:
    Two differences, of length 3 and 1, at right angles:

    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> mean = ow.contrib.radial_mean("workers")
    >>> merge = lambda d: mean.update(d, mean.init(d))[0]
    >>> differences = jnp.array([[3.0, 0.0], [0.0, 1.0]])
    >>> print(jax.vmap(merge, axis_name="workers")(differences)[0].round(3))
    [1.414 1.414]

  Source: the merge of Decoupled DiLoCo (arXiv 2604.21428).
  """
  names = _axes.axis_names(axis_name)

  def length(x):
    return _length([x])

  def direction(x, r):
    return _numerics.divide(x.astype(_numerics.at_least_float32(x.dtype)), r)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    _axes.require_bound(names, "radial_mean")
    updates = _axes.to_varying(updates, names)
    lengths = jax.tree.map(length, updates)
    pairs = lengths, jax.tree.map(direction, updates, lengths)
    total = jnp.float32(_axes.axis_size(names))
    if weight is not None:
      weight = _axes.to_varying(jnp.asarray(weight), names)
      pairs, total = _collectives.psum((_numerics.scale_tree(pairs, weight), weight), names)
    else:
      pairs = _collectives.psum(pairs, names)
    lengths, directions = pairs

    def merged(r, d, x):
      size = length(d)
      # If directions cancel, only rounding is left, which has a direction too.
      size = jnp.where(size > 8 * jnp.finfo(size.dtype).eps * total, size, 0)
      return _numerics.times(_numerics.divide(r, total), direction(d, size)).astype(x.dtype)

    return jax.tree.map(merged, lengths, directions, updates), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)
