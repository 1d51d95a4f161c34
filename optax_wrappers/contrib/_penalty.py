"""A mean of workers' differences that looks at their lengths."""

import numbers
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_wrappers import all_reduce, per_shard, states
from optax_wrappers.contrib._arrays import wide
from optax_wrappers.contrib._length import length


@states.dataclass
class PenaltyState(states.State):
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
  axis_name: Hashable | Sequence[Hashable] | None,
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
  for name, value in (("clip", clip), ("threshold", threshold), ("temperature", temperature)):
    if not isinstance(value, jax.core.Tracer) and not value > 0:
      raise ValueError(f"penalty: {name} must be above 0, got {value!r}.")
  if not isinstance(warmup, numbers.Integral) or warmup < 2:
    raise ValueError(f"penalty: warmup must be at least 2, an int; got {warmup!r}.")
  if not isinstance(decay, jax.core.Tracer) and not 0 < decay < 1:
    raise ValueError(f"penalty: decay must be in (0, 1), got {decay!r}.")
  total = all_reduce(axis_name, reduction="sum")

  def score(size, state):
    """How many standard deviations above the mean, once there is enough data."""
    std = jnp.sqrt(state.variance)
    is_known = (state.count >= warmup) & (std > 0)
    return jnp.where(is_known, (size - state.mean) / jnp.where(is_known, std, 1), 0)

  def counted(size, state):
    step = size - state.mean
    new_mean = state.mean + decay * step
    variance = (1 - decay) * (state.variance + decay * step * (size - new_mean))
    # A value whose square overflows would make the variance infinite forever.
    is_known = jnp.isfinite(variance)
    new = state.replace(
      count=optax.safe_increment(state.count),
      mean=jnp.where(is_known, new_mean, state.mean),
      variance=jnp.where(is_known, variance, state.variance),
    )
    return new.replace(recent=state.recent.at[state.count % warmup].set(score(size, new)))

  def init_fn(params):
    dtype = jax.eval_shape(length, params).dtype
    return PenaltyState(
      count=jnp.zeros((), jnp.int32),
      mean=jnp.zeros((), dtype),
      variance=jnp.zeros((), dtype),
      recent=jnp.zeros((warmup,), dtype),
    )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    updates = per_shard(updates, axis_name)
    size = length(updates).astype(state.mean.dtype)
    weight = jnp.asarray(1 if weight is None else weight, size.dtype)
    seen = lax.stop_gradient(size)  # decisions have no derivative
    spread = jnp.maximum(1, jnp.std(state.recent, ddof=1))
    counts = (score(seen, state) <= threshold * spread) & (seen > 0) & (weight > 0)
    # Relative to the shortest, whose weight is e^0: otherwise all weights could underflow to zero.
    shortest = jnp.where(counts, seen, jnp.inf)
    shortest = lax.pmin(shortest, () if axis_name is None else axis_name)
    nearness = jnp.exp((jnp.where(counts, shortest, size) - size) / temperature)
    share = jnp.where(counts, weight * nearness, 0)
    # Together, in one exchange; a share of zero also removes a NaN.
    parts = jax.tree.map(lambda x: jnp.where(share == 0, 0, _times(share, x)), updates), share
    (sums, shares), _ = total.update(parts, total.init(parts))
    per_share = jnp.where(shares == 0, 0, 1 / jnp.where(shares == 0, 1, shares))
    merged = jax.tree.map(lambda x: _times(per_share, x), sums)
    factor = jnp.minimum(1, clip / (length(merged) + 1e-6))

    return jax.tree.map(lambda x: _times(factor, x), merged), counted(seen, state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _times(factor, x):
  return (factor.astype(wide(x).dtype) * wide(x)).astype(x.dtype)
