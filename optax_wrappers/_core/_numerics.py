"""Arithmetic that keeps dtypes, keeps NaNs from spreading and counts without overflow."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core._types import Tree


def promote(*dtypes: Any) -> Any:
  """The common dtype, also under strict dtype promotion."""
  with jax.numpy_dtype_promotion("standard"):
    return jnp.result_type(*dtypes)


def dtype_of(x: Any) -> Any:
  """The dtype of an array, an abstract one or a Python number."""
  return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def is_inexact(x: Any) -> bool:
  """Whether an array, an abstract one or a Python number has a real or complex floating dtype."""
  return jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact)


@functools.cache
def at_least_float32(dtype: Any) -> Any:
  """The dtype to compute in: its own, or float32 for a narrower float."""
  # Complex dtypes are at least as wide as two float32, so none of them is narrow.
  is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
  return jnp.float32 if is_narrow else dtype


@functools.cache
def sum_dtype(dtype: Any) -> Any:
  """The dtype to send and sum in: float32 for floats of smaller range, whose sum could overflow."""
  if not jnp.issubdtype(dtype, jnp.floating):
    return dtype
  return jnp.float32 if jnp.finfo(dtype).nexp < jnp.finfo(jnp.float32).nexp else dtype


def weight_dtype(leaves: Iterable[Any]) -> Any:
  """The dtype of weights for these leaves: float32, or float64 if one of them is as wide."""
  is_double = any(x.dtype in (np.float64, np.complex128) for x in leaves)
  return jnp.float64 if is_double else jnp.float32


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """`x` rounded to the numbers of `dtype`, ties to even, in `at_least_float32(dtype)`.

  It does not convert to the narrower dtype and back: XLA may remove that inside `jit`, and does on
  GPUs. The derivative is that of a conversion.
  """
  wide = at_least_float32(dtype)
  return x.astype(wide) if wide == dtype else _rounded(x.astype(wide), dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x, dtype):
  info = jnp.finfo(dtype)
  if info.nexp == 8:
    return jax.lax.reduce_precision(x, 8, info.nmant)
  # With fewer exponent bits, reduce_precision flushes subnormal numbers to zero. The spacing of
  # numbers is a power of two, built from the exponent bits, and constant for subnormals.
  exponent = jax.lax.bitcast_convert_type(x, jnp.int32) >> 23 & 255
  exponent = jnp.maximum(exponent, 127 + info.minexp) - info.nmant

  def power(exponent):
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)

  nearest = jnp.round(x * power(254 - exponent)) * power(exponent)
  # infinity, or NaN if there is none.
  overflow = np.float32(np.float32(np.inf).astype(dtype))
  return jnp.where(jnp.abs(nearest) > float(info.max), nearest * overflow, nearest)


@_rounded.defjvp
def _(dtype, primals, tangents):
  return _rounded(primals[0], dtype), tangents[0]


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
  """`factor * x` in the dtype of `x`, computed in at least float32; zero where the factor is."""
  dtype = at_least_float32(x.dtype)
  # `0 * NaN` is NaN, and a shard of weight zero must not spread one; hence the choice at the end.
  product = (x.astype(dtype) * factor.astype(dtype)).astype(x.dtype)
  return select(factor == 0, jnp.zeros_like(product), product)


def scale_tree(tree: Tree, factor: jax.Array) -> Tree:
  """`scale` of every leaf by one factor."""
  return jax.tree.map(lambda x: scale(x, factor), tree)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """`x / divisor` in the dtype of `x`, computed in at least float32; zero where the divisor is."""
  dtype = at_least_float32(x.dtype)
  # The divisor is made safe before the division: choosing afterwards gives a NaN derivative.
  quotient = (x.astype(dtype) / jnp.where(divisor == 0, 1, divisor).astype(dtype)).astype(x.dtype)
  return select(divisor == 0, jnp.zeros_like(quotient), quotient)


def share(weight: jax.Array, total: jax.Array) -> jax.Array:
  """`weight / total`; zero if the total is zero, NaN if it has overflowed."""
  # With an infinite total every share, and the mean, would silently be zero. A NaN is visible.
  quotient = weight / jnp.where(total == 0, 1, total) + 0 * total
  return jnp.where(total == 0, 0, quotient)


def times(factor: Any, x: jax.Array) -> jax.Array:
  """`factor * x` in the dtype of `x`, for a Python number or a scalar array of any float dtype."""
  # Under strict promotion, a float32 scalar array times a bfloat16 array is an error.
  return x * (factor.astype(x.dtype) if isinstance(factor, jax.Array) else factor)


def select(accept: jax.Array, on_true: Tree, on_false: Tree) -> Tree:
  """Leafwise choice by one scalar."""
  # The result of `jnp.where` for an array without elements loses its varying axes.
  return jax.tree.map(
    lambda t, f: (jnp.where if jnp.size(f) else jax.lax.select)(accept, t, f), on_true, on_false
  )


def zeros_unless(accept: jax.Array, tree: Tree) -> Tree:
  """The tree if accepted, else zeros."""
  # lax.select takes a scalar predicate without broadcasting it.
  return jax.tree.map(lambda x: jax.lax.select(accept, x, jnp.zeros_like(x)), tree)


def dtypes_like(tree: Tree, like: Tree) -> Tree:
  """The tree with its numbers in the dtypes of another of its structure, if it has that."""
  leaves, treedef = jax.tree.flatten(tree)
  others = jax.tree.leaves(like)
  dtypes = [getattr(y, "dtype", None) for y in others]
  if len(leaves) != len(others) or dtypes == [getattr(x, "dtype", None) for x in leaves]:
    return tree
  pairs = zip(leaves, map(dtype_of, others))
  return jax.tree.unflatten(treedef, [x.astype(d) if is_inexact(x) else x for x, d in pairs])


def apply_updates(params: Tree, updates: Tree) -> Tree:
  """`optax.apply_updates`, but a variable without an update stays."""
  return jax.tree.map(lambda x, u: x if u is None else optax.apply_updates(x, u), params, updates)


def saturating_add(counts: Tree, more: Tree) -> Tree:
  """`counts + more` for nonnegative counts, saturating at the largest int32."""
  # int32 silently wraps around to negative numbers.
  limit = jnp.iinfo(jnp.int32).max
  return jax.tree.map(lambda count, add: count + jnp.minimum(add, limit - count), counts, more)
