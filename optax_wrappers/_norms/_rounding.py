"""Finds the update that moves a parameter to its target when the addition rounds.

Values are float64 on the grid of the parameter's dtype. They are rounded by their bits, because XLA
may remove a conversion to a narrower dtype and back, or fuse a product into a sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _numerics


def to_f64(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float64)


def rounded_sum(p: jax.Array, u: jax.Array) -> jax.Array:
  """The result of `optax.apply_updates`, `p + u`, in float64."""
  # XLA adds these without excess precision.
  if p.dtype == u.dtype == jnp.float32:
    return to_f64(p + u)
  total = to_f64(p) + to_f64(u)
  # Rounded twice: to the dtype of the sum, and then to that of p.
  return nearest(nearest(total, _numerics.promote(p.dtype, u.dtype)), p.dtype)


def nearest(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float64 to the nearest number of `dtype`, ties to even."""
  extra = _extra_bits(dtype)
  if not extra:
    return x
  # Half an ulp, minus one bit if the last kept bit is even, carries into the kept bits exactly if
  # the next number is nearest.
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  is_odd = (bits >> jnp.uint64(extra)) & jnp.uint64(1)
  half = jnp.uint64((1 << extra) // 2)
  rounded = _cut(bits + (half - jnp.uint64(1) + is_odd), extra)
  return _with_subnormals(x, rounded, dtype, jnp.round)


def toward(x: jax.Array, dtype: Any, toward_zero: jax.Array | bool) -> jax.Array:
  """Rounds float64 to a number of `dtype`, toward zero or away from it."""
  extra = _extra_bits(dtype)
  if not extra:
    return x
  # Truncating the extra bits rounds toward zero. A full ulp minus one bit, added before, carries
  # into the kept bits unless all extra bits are zero, and so rounds away from zero.
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  if toward_zero is not True:
    bits = bits + jnp.where(toward_zero, jnp.uint64(0), jnp.uint64((1 << extra) - 1))

  def to_side(steps):
    is_down = jnp.equal(toward_zero, x > 0)
    return jnp.where(is_down, jnp.floor(steps), jnp.ceil(steps))

  return _with_subnormals(x, _cut(bits, extra), dtype, to_side)


def _extra_bits(dtype):
  """The number of mantissa bits of float64 that a dtype does not have."""
  return 52 - jnp.finfo(dtype).nmant


def _cut(bits, extra):
  """The float64 of these bits without the last `extra` ones."""
  return lax.bitcast_convert_type(bits & ~jnp.uint64((1 << extra) - 1), jnp.float64)


def _with_subnormals(x, rounded, dtype, round_steps):
  """`rounded`, except for the subnormal numbers of `dtype`, which are evenly spaced."""
  info = jnp.finfo(dtype)
  # XLA flushes subnormals of float32 and bfloat16 to zero.
  if info.nexp == 8:
    return rounded
  quantum = float(info.smallest_subnormal)
  steps = round_steps(x * (1 / quantum))
  return jnp.where(jnp.abs(x) < float(info.smallest_normal), steps * quantum, rounded)


def _clipped(step, dtype):
  limit = float(jnp.finfo(dtype).max)
  return jnp.clip(step, -limit, limit).astype(dtype)


def steer(
  p: jax.Array, target: jax.Array, toward_zero: jax.Array | bool | None, dtype: Any
) -> jax.Array:
  """The update of `dtype` that moves `p` to `target` (float64), which is first rounded to p's grid.

  If there is none, it moves `p` to the side of the target that is nearer to zero or farther from
  it, or with None as near as possible. `target - p` is rounded to that side. The exact sum `p + u`
  is then on that side, and so is the rounded sum, because rounding is monotone. A sum on its way to
  zero stops at zero at the latest, because `-p` is representable in the updates' dtype.
  """
  is_narrow = dtype not in (jnp.float32, jnp.float64)
  if toward_zero is None:
    target = nearest(target, p.dtype)
    if is_narrow:
      return _clipped(nearest(target - to_f64(p), dtype), dtype)
    return target.astype(dtype) - p.astype(dtype)
  target = toward(target, p.dtype, toward_zero)
  if is_narrow:
    step = target - to_f64(p)
    # The side as up or down, and then relative to the direction of the step.
    return _clipped(toward(step, dtype, jnp.equal(toward_zero, (target > 0) == (step > 0))), dtype)
  # In the dtype itself, which takes two thirds of the time of float64: the difference is off by
  # half an ulp, so going back one ulp is enough. It is rounded before the addition, so XLA fuses
  # nothing.
  p, target = p.astype(dtype), target.astype(dtype)
  step = target - p
  excess = jnp.abs(p + step) - jnp.abs(target)
  # The bits of floats increase away from zero. Going back decreases them if the step points to the
  # side (against the sign of `target` for nearer to zero), and else increases them.
  integer = jnp.int32 if dtype == jnp.float32 else jnp.int64
  bits, against = (lax.bitcast_convert_type(x, integer) for x in (step, target))
  if toward_zero is not True:
    excess = jnp.where(toward_zero, excess, -excess)
    against = jnp.where(toward_zero, against, ~against)
  # -1 if the signs differ, else 0.
  differ = (bits ^ against) >> jnp.asarray(jnp.iinfo(integer).bits - 1, integer)
  back = lax.bitcast_convert_type(bits - (differ | jnp.asarray(1, integer)), dtype)
  return jnp.where(excess > 0, back, step)
