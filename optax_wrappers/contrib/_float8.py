"""A codec of floats of 8 bits."""

import numbers
from typing import Literal

import jax.numpy as jnp
from jax import lax

from optax_wrappers import codecs


def float8(name: Literal["e4m3fn", "e5m2"] = "e4m3fn", chunk: int = 256) -> codecs.Codec:
  """Floats of 8 bits, with a float32 scale that takes a chunk's `max |x|` to the largest of them.

  Args:
    name: "e4m3fn" or "e5m2".
    chunk: entries that share a scale.

  Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
  """
  if name not in ("e4m3fn", "e5m2"):
    raise ValueError(f"float8: name must be one of 'e4m3fn', 'e5m2'; got {name!r}.")
  if not isinstance(chunk, numbers.Integral) or chunk < 1:
    raise ValueError(f"float8: chunk must be at least 1, an int; got {chunk!r}.")
  dtype = jnp.dtype(f"float8_{name}")
  info = jnp.finfo(dtype)
  top, normal, step = map(float, (info.max, info.smallest_normal, info.smallest_subnormal))

  def length_for(n):
    return max(1, min(n, chunk))

  def encode(x):
    *outer, n = x.shape
    length = length_for(n)
    rows = jnp.pad(x, [(0, 0)] * len(outer) + [(0, -n % length)])
    rows = rows.reshape(*outer, -(-n // length), length)
    # The maximum of many rows loses a NaN on XLA:CPU (jax 0.10.2), but never an infinity.
    scale = jnp.max(jnp.where(jnp.isnan(rows), jnp.inf, jnp.abs(rows)), -1) / top
    # Not `scale > 0`, which would turn a NaN into a finite zero.
    scale = jnp.where(scale == 0, 1.0, scale)
    # Numbers above the largest are NaN, which rounding of the scale could reach.
    rows = jnp.clip(rows / scale[..., None], -top, top)
    # XLA may remove a conversion there and back, so rounding comes before it. `reduce_precision`
    # flushes subnormal numbers to zero; they are a fixed step apart.
    coarse, fine = jnp.round(rows / step) * step, lax.reduce_precision(rows, 8, info.nmant)
    rows = jnp.where(jnp.abs(rows) < normal, coarse, fine).astype(dtype)
    codes = rows.view(jnp.uint8).reshape(*outer, -1)[..., :n]
    return jnp.concatenate([codes, scale.view(jnp.uint8)], -1)

  def decode(code, n):
    scale = jnp.repeat(code[..., n:].view(jnp.float32), length_for(n), axis=-1)[..., :n]
    return code[..., :n].view(dtype).astype(jnp.float32) * scale

  def num_bytes(n):
    return n + 4 * -(-n // length_for(n))

  return codecs.Codec(encode, decode, num_bytes, f"float8({name!r})")
