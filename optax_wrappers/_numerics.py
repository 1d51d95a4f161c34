"""Arithmetic that keeps dtypes, keeps NaNs where they belong and counts without overflow."""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def promote(*dtypes: Any) -> Any:
  """The common dtype, also where the user forbids implicit promotion."""
  with jax.numpy_dtype_promotion("standard"):
    return jnp.result_type(*dtypes)


def at_least_float32(dtype: Any) -> Any:
  """The dtype to compute in: itself, or float32 for a narrower float."""
  is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
  return jnp.float32 if is_narrow else dtype


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
  """`factor * x` in the dtype of `x`, computed in at least float32; zero where the factor is, even of a NaN."""
  dtype = at_least_float32(x.dtype)
  product = (x.astype(dtype) * factor.astype(dtype)).astype(x.dtype)
  return jnp.where(factor == 0, jnp.zeros((), x.dtype), product)


def divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
  """`x / divisor` in the dtype of `x`, computed in at least float32; zero where the divisor is."""
  dtype = at_least_float32(x.dtype)
  quotient = (x.astype(dtype) / jnp.where(divisor == 0, 1, divisor).astype(dtype)).astype(x.dtype)
  return jnp.where(divisor == 0, jnp.zeros((), x.dtype), quotient)


def times(factor: Any, x: jax.Array) -> jax.Array:
  """`factor * x` in the dtype of `x`, for a Python number or a scalar array of any float dtype."""
  return x * (factor.astype(x.dtype) if isinstance(factor, jax.Array) else factor)


def select(accept: jax.Array, on_true: Tree, on_false: Tree) -> Tree:
  """Leafwise choice by one scalar predicate."""
  return jax.tree.map(lambda t, f: jnp.where(accept, t, f), on_true, on_false)


def zeros_unless(accept: jax.Array, tree: Tree) -> Tree:
  """The tree if accepted, else zeros."""
  return jax.tree.map(lambda x: jax.lax.select(accept, x, jnp.zeros_like(x)), tree)


def saturating_add(count: jax.Array, more: jax.Array) -> jax.Array:
  """`count + more` for counts that are not negative, stopping at the largest int32."""
  return count + jnp.minimum(more, jnp.iinfo(jnp.int32).max - count)
