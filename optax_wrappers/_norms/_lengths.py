"""L2 norms in the arrays' own precision, whatever the order of the sum and the size of the numbers.

A float32 sum of n numbers may be off by n half ulps. Here every partial sum is a pair of numbers,
the second of which holds what the first rounded off (Knuth's two-sum). Squares of numbers below
1e-19 or above 1e19 do not fit into float32, so the sum is taken of the numbers as they are and
scaled up and down by a power of two, in one reduction (Blue, 1978).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers._core import _axes, _collectives
from optax_wrappers._core._types import AxisNames

# A divisor of bounds and norms, so that those of several of the largest numbers are finite.
UNIT = 16

# The largest number of elements whose sum is near enough without pairs.
FEW = 12

# In arrays of at least LARGE elements, so many of a slice are first added as single numbers.
BLOCK = 32
LARGE = 2**18


class Lengths(NamedTuple):
  """The L2 norms of slices, `root / scale`."""

  root: jax.Array
  # A power of two for each slice.
  scale: jax.Array | float
  # The largest relative error of the sum of squares, in half ulps; None: `root` is exact.
  half_ulps: float | None

  def resized(self, y: jax.Array, norm: jax.Array) -> jax.Array:
    """`y` with these norms, in units of UNIT; zero for a slice of zeros."""
    if self.half_ulps is None:
      return jnp.sign(y) * (norm * UNIT)
    # In this order, because a norm over another may be as small or large as no float32.
    return y * self.scale * (UNIT / jnp.where(self.root == 0, 1, self.root)) * norm


def lengths(y: jax.Array, axes: tuple[int, ...], names: AxisNames, least: float = 0.0) -> Lengths:
  """The norms of the slices of `y`, float32 or wider.

  Their `axes`, which are kept, are sharded over the mesh axes `names`. A norm is not finite where
  an element is not. Norms far below `least` may be found smaller than they are.
  """
  count = math.prod(y.shape[axis] for axis in axes)
  if count <= 1 and not names:
    return Lengths(jnp.abs(y), 1.0, None)
  root, scale = _root_and_scale(y, axes, names, least)
  # The squares are off by 1, and each sum over devices by 1.
  return Lengths(root, scale, half_ulps_of_sum(y, axes) + lax.axis_size(names))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _root_and_scale(y, axes, names, least):
  # 1 and the factors for numbers whose squares are too large or, if that matters, too small.
  maxexp = jnp.finfo(y.dtype).maxexp
  exponent = maxexp * 5 // 8
  scales = [1.0, 2.0**-exponent]
  if least <= 2.0 ** (-exponent // 4):
    scales.append(2.0**exponent)
  totals = pair_sums([jnp.square(y * scale) for scale in scales], axes)
  if names:
    totals = list(_collectives.psum(jnp.stack(totals), names))
  total, scale = totals[0], jnp.ones_like(totals[0])
  limit = 2.0 ** (maxexp * 3 // 4)
  # A pair that overflows is a NaN.
  for there, now, by in zip((~(total <= limit), total < 1 / limit), totals[1:], scales[1:]):
    total, scale = jnp.where(there, now, total), jnp.where(there, by, scale)
  return jnp.sqrt(total), scale


@_root_and_scale.defjvp
def _(axes, names, least, primals, tangents):
  (y,), (dy,) = primals, tangents
  root, scale = _root_and_scale(y, axes, names, least)
  unit = y * scale / jnp.where(root == 0, 1, root)
  tangent = _collectives.psum(jnp.sum(unit * dy * scale, axes, keepdims=True), names)
  return (root, scale), (tangent, jnp.zeros_like(scale))


def pair_sums(terms: list[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
  """The sums of nonnegative arrays of one shape; the axes are kept."""
  shape = terms[0].shape
  if math.prod(shape[axis] for axis in axes) <= FEW:
    return [jnp.sum(term, axes, keepdims=True) for term in terms]
  # XLA would gather what the devices of a sharded axis have reduced to pairs. So the axis becomes
  # parts, one for each of them, whose sums are added in the end.
  parts = _parts(terms[0], axes)
  blocked = _blocked_axis(terms[0], parts)
  across: list[int] = []
  paired: list[int] = []
  for axis in sorted(axes):
    at = axis + len(across)
    if parts[axis] > 1:
      terms = [_split(term, at, parts[axis]) for term in terms]
      across.append(at)
      at += 1
    if axis == blocked:
      terms = [_sums_of_blocks(term, at) for term in terms]
    paired.append(at)
  operands = [x for term in terms for x in (term, jnp.zeros_like(term))]
  zero = np.zeros((), terms[0].dtype)
  pairs = lax.reduce(operands, [zero] * len(operands), _add_pairs, paired)
  across = [axis - sum(p < axis for p in paired) for axis in across]
  kept = [1 if axis in axes else n for axis, n in enumerate(shape)]
  # With the second numbers, or XLA would reduce those in bfloat16.
  sums = [high + low for high, low in zip(pairs[::2], pairs[1::2])]
  return [jnp.sum(x, across).reshape(kept) for x in sums]


def half_ulps_of_sum(x: jax.Array, axes: tuple[int, ...]) -> float:
  """How far `pair_sums` of an array may be off, in half ulps."""
  count = math.prod(x.shape[axis] for axis in axes)
  if count <= FEW:
    return count - 1
  # Of plain sums one for each addition; of pairs 4 eps of one, and one when they become numbers.
  parts = _parts(x, axes)
  plain = sum(n - 1 for n in parts.values())
  plain += 0 if _blocked_axis(x, parts) is None else BLOCK - 1
  return plain + 1 + 4 * count * float(jnp.finfo(x.dtype).eps)


def _parts(x, axes):
  """Into how many parts each axis is cut."""
  devices = _axes.num_free(x)
  return {axis: math.gcd(x.shape[axis], devices) for axis in axes}


def _blocked_axis(x, parts):
  """The axis that is first summed in blocks.

  A GPU would write the terms of pairs to memory, but not those along the last axis.
  """
  sizes = {axis: x.shape[axis] // n for axis, n in parts.items() if axis != x.ndim - 1}
  longest = max(sizes, key=sizes.__getitem__, default=None)
  return longest if x.size >= LARGE and sizes.get(longest, 0) >= 2 * BLOCK else None


def _sums_of_blocks(x, axis):
  n = x.shape[axis]
  # Elsewhere XLA for a TPU would copy the array to split it.
  if n & (n - 1) == 0:
    return jnp.sum(_split(x, axis, n // BLOCK), axis + 1)
  window = [BLOCK if d == axis else 1 for d in range(x.ndim)]
  return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, window, "SAME")


def _split(x, axis, n):
  """The array with an axis as `n` parts in a row."""
  return x.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])


def _add_pairs(left, right):
  """The sums of pairs of numbers, of which the second is below an ulp of the first."""
  added = []
  for high, low, more, lower in zip(left[::2], left[1::2], right[::2], right[1::2]):
    total = high + more
    of_more = total - high
    rest = (high - (total - of_more)) + (more - of_more) + (low + lower)
    result = total + rest
    added += [result, rest - (result - total)]
  return tuple(added)
