"""The kinds of bytes in codes, along the last axis of `[..., n]`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def as_bytes(x: jax.Array) -> jax.Array:
  """`[..., n]` numbers to `[..., n * itemsize]` bytes."""
  if x.dtype.itemsize != 2:
    return x.view(jnp.uint8)
  # High bytes, then low: XLA:CPU takes four times as long byte by byte. The barrier avoids a bug of
  # ptxas up to CUDA 13.0: if the same kernel rounds to 16 bits, the low byte is that of the number
  # converted to an integer.
  x = lax.optimization_barrier(lax.bitcast_convert_type(x, jnp.uint16))
  return jnp.concatenate([(x >> 8).astype(jnp.uint8), (x & 255).astype(jnp.uint8)], -1)


def from_bytes(codes: jax.Array, dtype: Any) -> jax.Array:
  """The numbers of `as_bytes`."""
  if jnp.dtype(dtype).itemsize != 2:
    return codes.view(dtype)
  high, low = split(codes.astype(jnp.uint16), codes.shape[-1] // 2)
  return lax.bitcast_convert_type(high << 8 | low, dtype)


def pack(values: jax.Array, bits: int) -> jax.Array:
  """`[..., n]` uint8 values of so many bits each, as bytes."""
  a_byte = 8 // bits
  if a_byte == 1:
    return values
  length = -(-values.shape[-1] // a_byte)
  rows = padded(values, length * a_byte).reshape(*values.shape[:-1], a_byte, length)
  parts = [rows[..., k, :] << (bits * k) for k in range(a_byte)]
  return functools.reduce(jnp.bitwise_or, parts)


def unpack(codes: jax.Array, bits: int, n: int) -> jax.Array:
  """The n values of `pack`."""
  a_byte = 8 // bits
  if a_byte == 1:
    return codes
  *outer, length = codes.shape
  shape = *outer, a_byte, length
  shifts = bits * lax.broadcasted_iota(jnp.uint8, shape, len(outer))
  parts = (jnp.broadcast_to(codes[..., None, :], shape) >> shifts) & (2**bits - 1)
  return parts.reshape(*outer, a_byte * length)[..., :n]


def pack_places(places: jax.Array, length: int) -> jax.Array:
  """`[..., n]` places in chunks of this length, as bytes: all low ones, then all high bits."""
  low, high = ((places >> shift).astype(jnp.uint8) for shift in (0, 8))
  bits = _high_bits(length)
  return jnp.concatenate([low, pack(high, bits)], -1) if bits else low


def unpack_places(codes: jax.Array, n: int, length: int) -> jax.Array:
  """The n places of `pack_places`, int32."""
  low, high = split(codes, n)
  bits = _high_bits(length)
  places = low.astype(jnp.int32)
  return places | unpack(high, bits, n).astype(jnp.int32) << 8 if bits else places


def place_bytes(n: int, length: int) -> int:
  """The number of bytes of `pack_places`."""
  return n + -(-n * _high_bits(length) // 8)


def _high_bits(length):
  """The bits of a place in a chunk of this length that its low byte has no room for."""
  return 0 if length <= 2**8 else 4 if length <= 2**12 else 8


def padded(x: jax.Array, n: int) -> jax.Array:
  """`[..., n]` with zeros at the end."""
  missing = n - x.shape[-1]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def split(codes: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
  """The first bytes, and the rest."""
  return codes[..., :length], codes[..., length:]
