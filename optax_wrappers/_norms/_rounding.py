"""Which update takes a parameter where it should be, when adding it rounds.

All arithmetic is on float64 values that lie on the grid of the parameter's dtype, and the rounding
is on their bits: XLA may drop a conversion to a narrower dtype and back, or fuse a product into a
sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _numerics

SLACK = 2.0**-50  # a few ulps of float64: what a product and a quotient are off by


def to_f64(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float64)


def landing(p: jax.Array, u: jax.Array) -> jax.Array:
  """Where `optax.apply_updates` puts `p + u`, in float64.

  It rounds twice: to the dtype of the sum, and then to that of `p`.
  """
  if p.dtype == u.dtype == jnp.float32:  # XLA adds these as they are, without excess precision
    return to_f64(p + u)
  total = to_f64(p) + to_f64(u)
  return nearest(nearest(total, _numerics.promote(p.dtype, u.dtype)), p.dtype)


def nearest(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float64 to the nearest number of `dtype`, to even where two are."""
  extra = _extra_bits(dtype)
  if not extra:
    return x
  # Adding half an ulp, less one bit where the last bit kept is even, carries into the bits kept
  # exactly if the nearest number is the next one. Then the extra bits are cut off.
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  is_odd = (bits >> jnp.uint64(extra)) & jnp.uint64(1)
  half = jnp.uint64((1 << extra) // 2)
  rounded = _cut(bits + (half - jnp.uint64(1) + is_odd), extra)
  return _with_subnormals(x, rounded, dtype, jnp.round)


def toward(x: jax.Array, dtype: Any, toward_zero: jax.Array | bool) -> jax.Array:
  """Rounds float64 to a number of `dtype` on one side.

  Args:
    x: float64.
    dtype: whose numbers to round to.
    toward_zero: for each element, or all: True to round toward zero, False away from it.
  """
  extra = _extra_bits(dtype)
  if not extra:
    return x
  # Cutting the extra bits off rounds toward zero. Added before, a full ulp less one bit carries
  # into the bits kept unless the extra bits are all zero, and so rounds away from it.
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  if toward_zero is not True:
    bits = bits + jnp.where(toward_zero, jnp.uint64(0), jnp.uint64((1 << extra) - 1))

  def to_side(steps):
    is_down = jnp.equal(toward_zero, x > 0)
    return jnp.where(is_down, jnp.floor(steps), jnp.ceil(steps))

  return _with_subnormals(x, _cut(bits, extra), dtype, to_side)


def _extra_bits(dtype):
  """Mantissa bits of float64 that a dtype has no room for."""
  return 52 - jnp.finfo(dtype).nmant


def _cut(bits, extra):
  """The float64 of these bits without the last `extra` ones."""
  return lax.bitcast_convert_type(bits & ~jnp.uint64((1 << extra) - 1), jnp.float64)


def _with_subnormals(x, rounded, dtype, round_steps):
  """`rounded`, except where `dtype` has subnormal numbers: these are evenly spaced, in quanta."""
  info = jnp.finfo(dtype)
  if info.nexp == 8:  # those of float32 and bfloat16 XLA flushes to zero
    return rounded
  quantum = float(info.smallest_subnormal)
  steps = round_steps(x * (1 / quantum))
  return jnp.where(jnp.abs(x) < float(info.smallest_normal), steps * quantum, rounded)


def steer_nearest(p: jax.Array, target: jax.Array, dtype: Any) -> jax.Array:
  """The update of `dtype` that takes `p` onto `target`, or as near as one can; see `steer`."""
  if dtype in (jnp.float32, jnp.float64):
    return target.astype(dtype) - p.astype(dtype)
  return _clipped(nearest(target - to_f64(p), dtype), dtype)


def _clipped(step, dtype):
  limit = float(jnp.finfo(dtype).max)
  return jnp.clip(step, -limit, limit).astype(dtype)


def steer(p: jax.Array, target: jax.Array, toward_zero: jax.Array | bool, dtype: Any) -> jax.Array:
  """The update of `dtype` that takes `p` onto `target` or, if none does, to one side of it.

  `target - p` is rounded to that side. So the exact sum `p + u` is on that side of `target`, and so
  is the rounded sum, because rounding is monotone and `target` is a number of its dtype. A sum on
  its way to zero stops there at the latest, because `-p` is a number of the updates' dtype, and
  `target - p` was not rounded past it.

  Args:
    p: the parameter.
    target: where it should be; float64, a number of the dtype of p.
    toward_zero: the side, for each element or all: True nearer to zero, False farther from it.
    dtype: of the update.
  """
  if dtype not in (jnp.float32, jnp.float64):
    step = target - to_f64(p)
    # The side as a direction up or down, and then relative to the step.
    return _clipped(toward(step, dtype, jnp.equal(toward_zero, (target > 0) == (step > 0))), dtype)
  # In the dtype itself, which takes two thirds of the time that float64 does: the difference is off
  # by half an ulp one way or the other, and one ulp back is enough. It is rounded already where the
  # sum is taken, so XLA has nothing to fuse.
  p, target = p.astype(dtype), target.astype(dtype)
  step = target - p
  excess = jnp.abs(p + step) - jnp.abs(target)
  # The bits of floats count up away from zero. The way back is down in them where the step points
  # as the side does, against the sign of `target` for nearer to zero, and up where it does not.
  integer = jnp.int32 if dtype == jnp.float32 else jnp.int64
  bits, against = (lax.bitcast_convert_type(x, integer) for x in (step, target))
  if toward_zero is not True:
    excess = jnp.where(toward_zero, excess, -excess)
    against = jnp.where(toward_zero, against, ~against)
  # -1 where the signs differ, else 0.
  differ = (bits ^ against) >> jnp.asarray(jnp.iinfo(integer).bits - 1, integer)
  back = lax.bitcast_convert_type(bits - (differ | jnp.asarray(1, integer)), dtype)
  return jnp.where(excess > 0, back, step)
