"""Finds the update that moves a parameter to its target when the addition rounds.

Values are float32, or float64 with float64 updates, on the grid of the parameter's dtype. They are
rounded by their bits, because XLA may remove a conversion to a narrower dtype and back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers._core import _numerics


def rounded_sum(p: jax.Array, u: jax.Array) -> jax.Array:
  """The result of `optax.apply_updates`, `p + u`; `u` has the dtype of the sum.

  It is finite where float16 would overflow.
  """
  wide = _numerics.at_least_float32(u.dtype)
  # Rounded twice: to the dtype of the sum, and then to that of p.
  return nearest(nearest(p.astype(wide) + u.astype(wide), u.dtype), p.dtype)


def nearest(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds to the nearest number of `dtype`, ties to even; beyond its largest, not at all."""
  info = jnp.finfo(dtype)
  if x.dtype == dtype:
    return x
  if info.nexp == 8:
    return lax.reduce_precision(x, 8, info.nmant)
  rounded = _numerics.rounded(x, dtype).astype(x.dtype)
  return jnp.where(jnp.abs(x) > float(info.max), x, rounded)


def toward(x: jax.Array, dtype: Any, toward_zero: jax.Array | bool) -> jax.Array:
  """Rounds to a number of `dtype`, toward zero or away from it."""
  if x.dtype == dtype:
    return x
  info, extra = jnp.finfo(dtype), _extra_bits(x.dtype, dtype)
  integer = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint64
  # Truncating the extra bits rounds toward zero. A full ulp minus one bit, added before, carries
  # into the kept bits unless all extra bits are zero, and so rounds away from zero.
  bits = lax.bitcast_convert_type(x, integer)
  if toward_zero is not True:
    bits = bits + jnp.where(toward_zero, integer(0), integer((1 << extra) - 1))
  rounded = lax.bitcast_convert_type(bits >> integer(extra) << integer(extra), x.dtype)
  # XLA flushes subnormals of float32 and bfloat16 to zero.
  if info.nexp == 8:
    return rounded
  # The subnormal numbers of float16 and float8 are evenly spaced.
  quantum = float(info.smallest_subnormal)
  steps = x * (1 / quantum)
  is_down = jnp.equal(toward_zero, x > 0)
  steps = jnp.where(is_down, jnp.floor(steps), jnp.ceil(steps))
  return jnp.where(jnp.abs(x) < float(info.smallest_normal), steps * quantum, rounded)


def bound(x: Any, dtype: Any, *, up: bool) -> jax.Array | np.generic:
  """A Python number or an array as `dtype`, rounded up or down if it is wider."""
  # NumPy's for a number, which then is a constant.
  lib, wide = (jnp, x) if isinstance(x, jax.Array) else (np, np.float64(x))
  with np.errstate(over="ignore"):
    near = wide.astype(dtype)
  if jnp.finfo(wide.dtype).bits <= jnp.finfo(dtype).bits:
    return near
  back = near.astype(wide.dtype)
  beyond, side = (back < wide, np.inf) if up else (back > wide, -np.inf)
  return lib.where(beyond, lib.nextafter(near, near.dtype.type(side)), near)


def steer(
  p: jax.Array, target: jax.Array, toward_zero: jax.Array | bool | None, dtype: Any
) -> jax.Array:
  """The update of `dtype` that moves `p` to `target`, which is first rounded to p's grid.

  If there is none, it moves `p` to the side of the target that is nearer to zero or farther from
  it, or with None as near as possible. A sum on its way to zero stops at zero at the latest,
  because `-p` is representable in the updates' dtype.
  """
  wide, largest = target.dtype, float(jnp.finfo(dtype).max)
  if toward_zero is None:
    step = nearest(target, p.dtype) - p.astype(wide)
    return jnp.clip(nearest(step, dtype), -largest, largest).astype(dtype)
  target = toward(target, p.dtype, toward_zero)
  step = target - p.astype(wide)
  # The side as up or down, and then relative to the direction of the step.
  step = toward(step, dtype, jnp.equal(toward_zero, (target > 0) == (step > 0)))
  step = jnp.clip(step, -largest, largest)
  # The difference has been rounded, by half an ulp at most, so going back one ulp is enough.
  excess = jnp.abs(rounded_sum(p, step.astype(dtype))) - jnp.abs(target)
  # The bits of floats increase away from zero. Going back decreases them if the step points to the
  # side (against the sign of `target` for nearer to zero), and else increases them.
  integer = jnp.int32 if wide == jnp.float32 else jnp.int64
  bits, against = (lax.bitcast_convert_type(x, integer) for x in (step, target))
  if toward_zero is not True:
    excess = jnp.where(toward_zero, excess, -excess)
    against = jnp.where(toward_zero, against, ~against)
  # -1 if the signs differ, else 0.
  differ = (bits ^ against) >> integer(jnp.iinfo(integer).bits - 1)
  ulp = integer(1 << _extra_bits(wide, dtype))
  back = lax.bitcast_convert_type(bits - (differ | integer(1)) * ulp, wide)
  return jnp.where(excess > 0, back, step).astype(dtype)


def _extra_bits(wide, dtype):
  """The number of mantissa bits that `wide` has and `dtype` has not."""
  return jnp.finfo(wide).nmant - jnp.finfo(dtype).nmant
