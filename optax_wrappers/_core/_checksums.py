"""Checksums that tell whether arrays hold the same bits, however they are sharded."""

import math

import jax
import jax.numpy as jnp

from optax_wrappers._core._types import Tree


def checksums(x: jax.Array) -> jax.Array:
  """Two sums over the words of x, each mixed with its position, so order is free; uint32 [2]."""
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag])
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  elif jax.dtypes.itemsize_bits(x.dtype) < 8:  # of two or four bits, which have no words
    x = x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)
  word = f"uint{8 * min(x.dtype.itemsize, 4)}"
  words = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
  # Counted along each axis. XLA would gather a sharded array to flatten it.
  place = jnp.zeros(words.shape, jnp.uint32)
  for d in range(words.ndim):
    along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, d)
    place = place + along * jnp.uint32(math.prod(words.shape[d + 1 :]) % 2**32)

  def mix(odd):
    # Odd factors, with high bits folded down: every bit of word and position changes the whole sum.
    mixed = (words ^ (place * jnp.uint32(odd))) * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> jnp.uint32(15))) * jnp.uint32(odd)
    return (mixed ^ (mixed >> jnp.uint32(13))).sum(dtype=jnp.uint32)

  # Two sums with different odd numbers: a change that one misses by chance, the other detects.
  return jnp.stack([mix(0x85EBCA77), mix(0xC2B2AE3D)])


@jax.jit  # integer sums do not depend on how they are compiled
def fingerprint(tree: Tree) -> jax.Array:
  """Two sums over all leaves in their order; uint32 [2]."""
  total = jnp.zeros(2, jnp.uint32)
  for leaf in jax.tree.leaves(tree):
    total = (total ^ (total >> jnp.uint32(16))) * jnp.uint32(0x9E3779B1) + checksums(leaf)
  return total
