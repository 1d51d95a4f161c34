"""The gradient noise scale, from the shards' gradients that are reduced anyway."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_wrappers import all_reduce, states
from optax_wrappers.contrib import _gradients
from optax_wrappers.contrib._length import squared_length


@states.dataclass
class NoiseState(states.State):
  """State of `measure_noise`: running averages from zero, in units of a shard.

  Attributes:
    reduced: that of `all_reduce`; it has no leaves.
    count: steps measured, without a NaN or an infinity; int32 scalar.
    num_parts: shards; int32 scalar.
    grad_sq: average estimate of the squared length of the true gradient; float32 scalar.
    trace: average estimate of the summed variances of the gradient's entries; float32 scalar.
    cosine: with `cosine=True` that of this shard's update and the reduced one in the last step,
      float32 scalar, each shard's own though parameters are replicated; else None.
  """

  reduced: states.AllReduceState
  count: jax.Array = states.field("shared")
  num_parts: jax.Array = states.field("shared")
  grad_sq: jax.Array = states.field("shared")
  trace: jax.Array = states.field("shared")
  cosine: jax.Array | None = states.field("per_shard", default=None)

  def metrics(self, of_params: Any) -> dict[str, jax.Array]:
    """See `State`."""
    values = {"noise_scale": _noise_scale(self), "gradient_gain": _gradient_gain(self)}
    return values if self.cosine is None else values | {"cosine": self.cosine}


def measure_noise(
  axis_name: Any = "batch",
  *,
  reduction: Literal["mean", "sum"] = "mean",
  decay: float | jax.Array = 0.99,
  cosine: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """`all_reduce` that also measures gradient noise, of which `metrics` returns two numbers.

  `noise_scale`, `trace(Sigma) / ||G||^2` with Sigma the covariance of one shard's gradient and G
  the true gradient, is the batch size, in shards, at which a gradient is half signal, half noise:
  NaN before the first step, infinite if the estimate of `||G||^2` is not above 0.
  `gradient_gain` is how many steps on one shard a step on all is worth, from 1, if the gradient has
  no noise, to their number; 1 before the first step.

  All shards have equal weight. Stacked towers are shards of a vmap axis.

  Args:
    axis_name: the axis or axes to reduce over, two shards at least.
    reduction: "mean" or "sum".
    decay: of the running averages, in [0, 1).
    cosine: whether to store each shard's cosine of its update with the reduced one; as `reduction`
      of `local_steps`, the cosine of a worker's pseudo-gradient with the mean.

  Returns:
    A gradient transformation, with a `NoiseState`.

  Raises:
    ValueError: for arguments out of range; in update, for an unbound axis, a single shard, weights,
      or updates that are already summed: differentiate `per_shard(params, axis_name)`.
    TypeError: in update, for integer updates.

  **Communication**: every update once per step, and 4 bytes.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> noise = ow.contrib.measure_noise("batch", decay=0.9)
    >>> tx = optax.chain(noise, optax.sgd(0.1))
    >>> state = tx.init(jnp.zeros(1))
    >>> gradients = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    >>> update = lambda g: tx.update(g, state)[1]
    >>> state = jax.vmap(update, axis_name="batch", out_axes=None)(gradients)
    >>> found = ow.metrics(state)
    >>> print(8 * found["noise_scale"], found["gradient_gain"])  # 8 a shard
    2.2857141 1.1999999

  Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1, and AdaScale, Johnson et al. 2020
  (arXiv 2007.05105).
  """
  if reduction not in ("mean", "sum"):
    raise ValueError(f"measure_noise: reduction must be one of 'mean', 'sum'; got {reduction!r}.")
  if not isinstance(decay, jax.core.Tracer) and not 0 <= decay < 1:
    raise ValueError(f"measure_noise: decay must be in [0, 1), got {decay}.")
  reduce = all_reduce(axis_name, reduction=reduction, invariant="error")
  names = () if axis_name is None else axis_name

  def init_fn(params):
    return NoiseState(
      reduced=reduce.init(params),
      count=jnp.zeros((), jnp.int32),
      num_parts=jnp.ones((), jnp.int32),
      grad_sq=jnp.zeros((), jnp.float32),
      trace=jnp.zeros((), jnp.float32),
      cosine=jnp.zeros((), jnp.float32) if cosine else None,
    )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    if not isinstance(state, NoiseState):
      raise TypeError(f"measure_noise: state must be a NoiseState, from init; got {state!r}.")
    if weight is not None:
      raise ValueError(
        "measure_noise: every shard has one vote because of the noise estimate. Leave out the"
        " weight: the extra arg, or that of stale or dropped shards or of towers outside."
      )
    mean, _ = reduce.update(updates, state.reduced)
    num_parts = lax.axis_size(names)
    if num_parts < 2:
      raise ValueError(f"measure_noise: needs two shards at least to compare; got {num_parts}.")
    # |G_small|^2: of one part.
    small = lax.psum(squared_length(updates), names) / num_parts
    big = squared_length(mean) / (1 if reduction == "mean" else num_parts**2)
    # McCandlish et al. 2018, equations A.1 and A.2, with B_small = 1 and B_big = num_parts.
    grad_sq = (num_parts * big - small) / (num_parts - 1)
    trace = (small - big) / (1 - 1 / num_parts)
    is_sound = jnp.isfinite(grad_sq) & jnp.isfinite(trace)

    # Both start at zero and decay equally, so their quotient is right from the first step.
    def averaged(old, new):
      share = jnp.asarray(decay, jnp.float32)
      return jnp.where(is_sound, share * old + (1 - share) * new, old)

    return mean, state.replace(
      count=jnp.where(is_sound, optax.safe_increment(state.count), state.count),
      num_parts=jnp.full_like(state.num_parts, num_parts),
      grad_sq=averaged(state.grad_sq, grad_sq),
      trace=averaged(state.trace, trace),
      cosine=_cosine(updates, mean) if cosine else state.cosine,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _cosine(a, b):
  """The cosine of the angle between two trees, float32 scalar; 0 if one is zero."""

  def of_length_one(tree):  # the inner product of large ones overflows
    length = jnp.sqrt(squared_length(tree))
    length = jnp.where(length == 0, jnp.inf, length)
    wide = jax.tree.map(lambda x: jnp.asarray(x, _gradients.wide_dtype(x)), tree)
    return jax.tree.map(lambda x: x / length.astype(x.dtype), wide)

  return jnp.real(optax.tree.vdot(of_length_one(a), of_length_one(b))).astype(jnp.float32)


def _noise_scale(noise):
  """`trace(Sigma) / ||G||^2`, in shards: infinite if the estimate of `||G||^2` is not above 0."""
  is_seen = noise.grad_sq > 0
  scale = jnp.where(is_seen, noise.trace / jnp.where(is_seen, noise.grad_sq, 1), jnp.inf)
  return jnp.where(noise.count > 0, scale, jnp.nan)


def _gradient_gain(noise):
  """Johnson et al. 2020, `E[s + m] / E[s / S + m]`: s the variance of a part's gradient, m the
  squared length of the true one, S the number of parts."""
  # The estimates are unbiased, so they may be negative.
  trace, grad_sq = jnp.maximum(noise.trace, 0), jnp.maximum(noise.grad_sq, 0)
  parts = noise.num_parts.astype(jnp.float32)
  divisor = trace / parts + grad_sq
  return jnp.where(divisor > 0, (trace + grad_sq) / jnp.where(divisor > 0, divisor, 1), 1.0)
