"""Which update takes a parameter where it should be, when adding it rounds.

All arithmetic is on float64 values that lie on the grid of the parameter's dtype, and the rounding
is on their bits: XLA may drop a conversion to a narrower dtype and back, or fuse a product into a
sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers import _numerics

SLACK = 2.0**-50  # a few ulps of float64: what a product and a quotient are off by


def to_f64(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float64)


def landing(p: jax.Array, u: jax.Array) -> jax.Array:
  """Where `optax.apply_updates` puts `p + u`, in float64: rounded to the dtype of the sum, then to
  that of `p`."""
  if p.dtype == u.dtype == jnp.float32:  # XLA adds these as they are, without excess precision
    return to_f64(p + u)
  total = to_f64(p) + to_f64(u)
  return to_grid(to_grid(total, _numerics.promote(p.dtype, u.dtype)), p.dtype)


def to_grid(x: jax.Array, dtype: Any, toward_zero: jax.Array | bool | None = None) -> jax.Array:
  """Rounds float64 to the grid of `dtype`.

  Args:
    x: float64.
    dtype: whose numbers to round to.
    toward_zero: True to round toward zero, False away from it, for each element or all; None: to
      nearest even.
  """
  info = jnp.finfo(dtype)
  extra = 52 - info.nmant  # mantissa bits that the narrower dtype has no room for
  if not extra:
    return x
  ulp = jnp.uint64(1 << extra)
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  if toward_zero is None:
    is_odd = (bits >> jnp.uint64(extra)) & jnp.uint64(1)
    bits = bits + (ulp // jnp.uint64(2) - jnp.uint64(1) + is_odd)
  elif toward_zero is not True:
    bits = bits + jnp.where(toward_zero, jnp.uint64(0), ulp - jnp.uint64(1))
  rounded = lax.bitcast_convert_type(bits & ~(ulp - jnp.uint64(1)), jnp.float64)
  if info.nexp == 8:  # subnormals of float32 and bfloat16: XLA flushes them
    return rounded
  quantum = float(info.smallest_subnormal)
  steps = x * (1 / quantum)
  if toward_zero is None:
    steps = jnp.round(steps)
  else:
    steps = jnp.where(jnp.equal(toward_zero, x > 0), jnp.floor(steps), jnp.ceil(steps))
  return jnp.where(jnp.abs(x) < float(info.smallest_normal), steps * quantum, rounded)


def steer(
  p: jax.Array, target: jax.Array, toward_zero: jax.Array | bool | None, dtype: Any
) -> jax.Array:
  """The update of `dtype` that takes `p` onto `target` or, where there is none, to one side of it.

  `target - p` is rounded to that side, so the exact sum is on that side of `target`, and so is the
  rounded sum, because rounding is monotone and `target` is on the grid. On its way to zero the sum
  stops there at the latest: `-p` is on the grid of the updates, and `target - p` was not rounded
  past it.

  Args:
    p: the parameter.
    target: where it should be; float64, on the grid of p.
    toward_zero: the side, for each element or all: True nearer to zero, False farther from it;
      None: either.
    dtype: of the update.
  """
  if dtype != jnp.float32 and dtype != jnp.float64:
    step = target - to_f64(p)
    if toward_zero is not None:  # as a direction up or down, and then relative to the step
      toward_zero = jnp.equal(toward_zero, (target > 0) == (step > 0))
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(to_grid(step, dtype, toward_zero), -limit, limit).astype(dtype)
  # In the dtype itself, which is faster: the difference is off by half an ulp one way or the other,
  # and one ulp back is enough. It is rounded already where the sum is taken, so XLA has nothing to
  # fuse.
  p, target = p.astype(dtype), target.astype(dtype)
  step = target - p
  if toward_zero is None:
    return step
  excess = jnp.abs(p + step) - jnp.abs(target)
  # The bits of floats count up away from zero; the side lies against the sign of `target`, or along
  # it.
  integer = jnp.int32 if dtype == jnp.float32 else jnp.int64
  bits, against = (lax.bitcast_convert_type(x, integer) for x in (step, target))
  if toward_zero is not True:
    excess = jnp.where(toward_zero, excess, -excess)
    against = jnp.where(toward_zero, against, ~against)
  differ = (bits ^ against) >> jnp.asarray(
    jnp.iinfo(integer).bits - 1, integer
  )  # -1 where the signs differ, else 0
  back = lax.bitcast_convert_type(bits - (differ | jnp.asarray(1, integer)), dtype)
  return jnp.where(excess > 0, back, step)
