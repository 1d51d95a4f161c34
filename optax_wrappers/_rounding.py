"""Which update takes a parameter where it should be, when adding it rounds.

All arithmetic is on float64 values that lie on the grid of the parameter's dtype, and the rounding is on their bits:
XLA may drop a conversion to a narrower dtype and back, or fuse a product into a sum.
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
  """Where `optax.apply_updates` puts `p + u`, in float64: rounded to the dtype of the sum, then to that of `p`."""
  if p.dtype == u.dtype == jnp.float32:  # XLA adds these as they are, without excess precision
    return to_f64(p + u)
  total = to_f64(p) + to_f64(u)
  return to_grid(to_grid(total, _numerics.promote(p.dtype, u.dtype)), p.dtype)


def to_grid(x: jax.Array, dtype: Any, inward: jax.Array | None = None) -> jax.Array:
  """Rounds float64 to the grid of `dtype`.

  Args:
    x: float64.
    dtype: whose numbers to round to.
    inward: the direction, of the shape of x: 1 up, -1 down; None: to nearest even.
  """
  info = jnp.finfo(dtype)
  extra = 52 - info.nmant  # mantissa bits that the narrower dtype has no room for
  if not extra:
    return x
  ulp = jnp.uint64(1 << extra)
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  if inward is None:
    is_odd = (bits >> jnp.uint64(extra)) & jnp.uint64(1)
    bits = bits + (ulp // jnp.uint64(2) - jnp.uint64(1) + is_odd)
  else:
    bits = bits + jnp.where(inward * x > 0, ulp - jnp.uint64(1), jnp.uint64(0))
  rounded = lax.bitcast_convert_type(bits & ~(ulp - jnp.uint64(1)), jnp.float64)
  if info.nexp == 8:  # subnormals of float32 and bfloat16: XLA flushes them
    return rounded
  quantum = float(info.smallest_subnormal)
  steps = x * (1 / quantum)
  if inward is None:
    steps = jnp.round(steps)
  else:
    steps = jnp.where(inward > 0, jnp.ceil(steps), jnp.floor(steps))
  return jnp.where(jnp.abs(x) < float(info.smallest_normal), steps * quantum, rounded)


def steer(p: jax.Array, target: jax.Array, inward: jax.Array | None, zero_is_inside: bool, dtype: Any) -> jax.Array:
  """The update of `dtype` that takes `p` onto `target` or, where there is none, to the inner side of it.

  `target - p` is rounded inward, so the exact sum is on the inner side of `target`, and so is the rounded sum, because
  rounding is monotone and `target` is on the grid.

  Args:
    p: the parameter.
    target: where it should be; float64, on the grid of p.
    inward: the direction of the inner side, 1 up or -1 down; None: none, get as near as possible.
    zero_is_inside: whether zero is a place to go where a sum would land beyond `-target`.
    dtype: of the update.
  """
  if dtype == jnp.float32 or dtype == jnp.float64:
    # In the dtype itself, which is faster: the difference is off by half an ulp one way or the other, and one ulp back
    # is enough. It is rounded already where the sum is taken, so XLA has nothing to fuse.
    p, target = p.astype(dtype), target.astype(dtype)
    step = target - p
    if inward is not None:
      side = inward.astype(dtype)
      step = jnp.where(side * (p + step - target) < 0, _next(step, side), step)
  else:
    p = to_f64(p)
    limit = float(jnp.finfo(dtype).max)
    step = jnp.clip(to_grid(target - p, dtype, inward), -limit, limit)
  if zero_is_inside:
    slack = SLACK if dtype == jnp.float64 else 0.0
    reach = jnp.abs(target) * (1 + slack)
    step = jnp.where((jnp.abs(p + step) <= reach) & (target != 0), step, -p)
  return to_f64(step)


def _next(x: jax.Array, direction: jax.Array) -> jax.Array:
  """The neighbour of x, which is not zero, in a direction of 1 or -1."""
  integer = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
  bits = lax.bitcast_convert_type(x, integer)
  return lax.bitcast_convert_type(bits + jnp.where(direction * x > 0, 1, -1).astype(integer), x.dtype)
