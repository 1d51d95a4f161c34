"""A codec of floats of 8 bits."""

from typing import Literal

import jax.numpy as jnp

from optax_wrappers._core import _checks, _numerics
from optax_wrappers.codecs import Codec, _as_bytes, _Chunks, _from_bytes, _largest, _scales, _split


def float8(name: Literal["e4m3fn", "e5m2"] = "e4m3fn", chunk: int = 256) -> Codec:
  """Floats of 8 bits, with a float32 scale that takes a chunk's `max |x|` to the largest of them.

  Args:
    name: "e4m3fn" or "e5m2".
    chunk: entries that share a scale.

  Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
  """
  wrapper = "float8"
  _checks.choice(wrapper, "name", name, ("e4m3fn", "e5m2"))
  chunk = _checks.integer(wrapper, "chunk", chunk, minimum=1)
  dtype = jnp.dtype(f"float8_{name}")
  top = float(jnp.finfo(dtype).max)

  def encode(x):
    chunks = _Chunks.of(x.shape[-1], chunk)
    rows = chunks.cut(x)
    scale = _scales(_largest(rows), top)
    # Numbers above the largest are NaN, which rounding of the scale could reach.
    held = jnp.clip(rows / chunks.repeated(scale), -top, top)
    held = _numerics.rounded(held, dtype).astype(dtype)
    return jnp.concatenate([_as_bytes(chunks.join(held)), _as_bytes(scale)], -1)

  def decode(codes, n):
    held, scale = _split(codes, n)
    held = _from_bytes(held, dtype).astype(jnp.float32)
    return _Chunks.of(n, chunk).times(held, _from_bytes(scale, jnp.float32))

  def num_bytes(n):
    return n + 4 * _Chunks.of(n, chunk).number

  return Codec(encode, decode, num_bytes, f"float8({name!r})")
