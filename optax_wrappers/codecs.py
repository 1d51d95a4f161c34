"""Codecs: gradient compression.

Pass a codec as `codec=` to `all_reduce`, `cross_shard`, `local_steps` or `diloco`. The code of a
`Codec` is sent as bytes, decoded, and summed in float32. The code of a `LinearCodec` is summed by
an all-reduce without decoding. The wrapper adds residuals, weights, packing and layouts.

    >>> import jax.numpy as jnp, optax_wrappers as ow
    >>> codec = ow.codecs.quantize(bits=8)
    >>> sent = codec.encode(jnp.array([0.5, -1.0, 0.002]))
    >>> sent.dtype, sent.shape, codec.num_bytes(3)
    (dtype('uint8'), (4,), 4)
    >>> print(codec.decode(sent, 3))
    [ 0.5 -1.   0. ]
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from optax_wrappers._core import _bits, _checks, _draws
from optax_wrappers._core._types import Tree

__all__ = [
  "Codec",
  "Compression",
  "LinearCodec",
  "cast",
  "compression",
  "quantize",
  "random_k",
  "signs",
  "top_k",
]

Scale: TypeAlias = Literal["power_of_two", "float32"]
Feedback: TypeAlias = Literal["optional", "needed", "none"]


def _is_large_matrix(shape):
  """Whether a variable has two dimensions at least, and 1,024 entries."""
  # Compressing smaller variables and vectors is not worth the overhead.
  return len(shape) >= 2 and math.prod(shape) >= 1024


class Codec(NamedTuple):
  """A codec whose codes are sent as bytes, decoded, and added in the order of the workers.

  The functions act on the last axis of `[..., n]`, on each row separately.

  Attributes:
    encode: float32 `[..., n]` to uint8 `[..., num_bytes(n)]`.
    decode: that, and n, to float32 `[..., n]`.
    num_bytes: of n entries.
    name: for errors.
    recodes: whether a sum of W shards is encoded once more on its way back. None: for W > 2, which
      sends `2 (W - 1) / W` times the bytes. False: never; every shard sends to every other, `W - 1`
      times the bytes. True: always; the decoded sum is the result, as of a vote.
    feedback: whether what is not sent may be sent later ("optional"), must ("needed"), or cannot
      ("none").
    applies_to: the shapes of variables that it is meant for; others go uncompressed.
  """

  encode: Callable[[jax.Array], jax.Array]
  decode: Callable[[jax.Array, int], jax.Array]
  num_bytes: Callable[[int], int]
  name: str = "a codec"
  recodes: bool | None = None
  feedback: Feedback = "optional"
  applies_to: Callable[[Sequence[int]], bool] = _is_large_matrix


class LinearCodec(NamedTuple):
  """A codec whose codes are summed without decoding, by all-reduces.

  Attributes:
    init: the shapes of the variables to the memory, one value for all shards.
    reduce: `(total, leaves, memory)` to the sums of the float32 leaves as they arrive, this shard's
      parts in them, and the next memory. `total` sums a list of arrays over the shards at once.
    num_bytes: for a variable of a given shape, before the exchange's factor of `2 (W - 1) / W`.
    gain: what a sum is multiplied by without feedback, so that its expectation is right.
    name: that of a `Codec`, as `feedback` and `applies_to` are.
    divisible: whether each device of a worker that is a pod may encode its own part of a variable.
  """

  init: Callable[[list[tuple[int, ...]]], Tree]
  reduce: Callable[[Callable[[list], list], list, Tree], tuple[list, list, Tree]]
  num_bytes: Callable[[Sequence[int]], int]
  gain: float = 1.0
  name: str = "a linear codec"
  feedback: Feedback = "optional"
  applies_to: Callable[[Sequence[int]], bool] = _is_large_matrix
  divisible: bool = False


AnyCodec: TypeAlias = Codec | LinearCodec


class Compression(NamedTuple):
  """The result of `compression`: a codec, and the settings for what it does not send."""

  codec: AnyCodec
  feedback: bool = True
  only: Tree | Callable[[Tree], Tree] = None
  after: int = 0
  decay: ArrayLike = 1.0


def compression(
  codec: AnyCodec,
  *,
  feedback: bool = True,
  only: Tree | Callable[[Tree], Tree] = None,
  after: int = 0,
  decay: ArrayLike = 1.0,
) -> Compression:
  """A codec with non-default settings, for `codec=`.

  Args:
    codec: one of this module, or of your own.
    feedback: whether residuals are kept. Without them what is below the codec's resolution never
      arrives. Under an outer momentum sparse codecs and signs do better with False.
    only: which of the variables that the codec `applies_to` are compressed: bools with the
      structure of the updates or a prefix of it, or a function from parameters or updates to these.
      None: all. All others, and float64 and complex ones, are reduced without the codec.
    after: the number of initial exchanges that are exact.
    decay: the fraction of a residual that is kept, in [0, 1].

  Raises:
    TypeError, ValueError: if `codec` is not a codec, and for arguments out of range.
  """
  where = "compression"
  if not isinstance(codec, Codec | LinearCodec):
    name = getattr(codec, "__name__", "the function")
    mend = f"Call it: {name}(...) returns it." if callable(codec) else "Pass codecs.quantize()."
    raise TypeError(f"codec must be a Codec or a LinearCodec, got {codec!r}. {mend}")
  if not isinstance(feedback, bool | np.bool_):
    raise TypeError(f"{where}: feedback must be a bool, got {feedback!r}.")
  if feedback and codec.feedback == "none":
    raise ValueError(f"{where}: {codec.name} can have no residual; pass feedback=False.")
  after = _checks.integer(where, "after", after, minimum=0)
  decay = _checks.number(where, "decay", decay, lambda b: 0 <= b <= 1, "in [0, 1]")
  if not feedback and not (isinstance(decay, float) and decay == 1):
    raise ValueError(f"{where}: decay is of residuals, and feedback=False keeps none.")
  return Compression(codec, bool(feedback), only, after, decay)


class _Chunks(NamedTuple):
  """`[..., n]` as `[..., number, length]`, with zeros after the n-th."""

  n: int
  length: int
  number: int

  @classmethod
  def of(cls, n, length):
    length = max(1, min(n, length or n))
    return cls(n, length, -(-n // length))

  def cut(self, x):
    x = _bits.padded(x, self.number * self.length)
    return x.reshape(*x.shape[:-1], self.number, self.length)

  def join(self, x):
    return x.reshape(*x.shape[:-2], self.number * self.length)[..., : self.n]

  def times(self, x, scale):
    """Every entry of `[..., n]` times the scale of its chunk."""
    return self.join(self.cut(x) * self.repeated(scale))

  def repeated(self, scale):
    return jnp.broadcast_to(scale[..., None], (*scale.shape, self.length))


# Codecs that send every entry.


def cast(dtype: Literal["bfloat16", "float16"]) -> Codec:
  """A narrower floating dtype, 2 bytes an entry on every backend; the sum is in float32.

  Args:
    dtype: "bfloat16", or "float16", which clips what is finite to 65504.

  Source: PyTorch's fp16_compress_hook, bf16_compress_hook, which add in the narrow dtype.
  """
  _checks.choice("codecs.cast", "dtype", dtype, ("bfloat16", "float16"))
  largest = float(jnp.finfo(dtype).max)

  def encode(x):
    if dtype == "float16":  # infinities and NaNs stay visible
      x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return _bits.as_bytes(x.astype(dtype))

  def decode(codes, n):
    return _bits.from_bytes(codes, dtype).astype(jnp.float32)

  return Codec(encode, decode, lambda n: 2 * n, f"cast({dtype!r})")


def quantize(bits: Literal[8, 4, 2] = 8, chunk: int = 256, scale: Scale | None = None) -> Codec:
  """Whole numbers of a few bits: `round(x / s)`, half to even, with a scale s for each chunk.

  Args:
    bits: 8, 4 or 2 for each entry.
    chunk: entries that share a scale.
    scale: with top = `2**(bits - 1) - 1`, "power_of_two": the smallest s of these with
      `s * top >= max |x|`, one byte; sums are exact while they fit, and the rounding error is a
      third larger. "float32": `max |x| / top`, four bytes. None: the first for 8 bits, the second
      for fewer.

  Source: Dettmers et al., "8-bit optimizers via block-wise quantization" (2021), the code linear.
  """
  wrapper = "codecs.quantize"
  if bits not in (8, 4, 2):
    raise ValueError(f"{wrapper}: bits must be 8, 4 or 2; got {bits!r}.")
  chunk = _checks.integer(wrapper, "chunk", chunk, minimum=1)
  scale = scale or ("power_of_two" if bits == 8 else "float32")
  _checks.choice(wrapper, "scale", scale, get_args(Scale))
  # The largest integer.
  top, is_power = 2 ** (bits - 1) - 1, scale == "power_of_two"

  def encode(x):
    chunks = _Chunks.of(x.shape[-1], chunk)
    rows = chunks.cut(x)
    largest = _largest(rows)
    if is_power:
      codes = _exponents(largest, bits)
    else:
      scales = largest / top
      # Not `largest > 0`, which would turn a NaN into a finite zero.
      codes = _bits.as_bytes(jnp.where(scales == 0, 1.0, scales))
    # Rounded with the scale as it will be decoded.
    steps = jnp.round(rows / chunks.repeated(_read_scale(codes, is_power)))
    whole = chunks.join(jnp.clip(steps, -top, top).astype(jnp.int8))
    whole = lax.bitcast_convert_type(whole, jnp.uint8)
    return jnp.concatenate([_bits.pack(whole & (2**bits - 1), bits), codes], -1)

  def decode(codes, n):
    chunks = _Chunks.of(n, chunk)
    packed, scales = _bits.split(codes, -(-n * bits // 8))
    # Shifted to the top of a byte and back, which extends the sign.
    shift = 8 - bits
    whole = lax.bitcast_convert_type(_bits.unpack(packed, bits, n) << shift, jnp.int8) >> shift
    return chunks.times(whole.astype(jnp.float32), _read_scale(scales, is_power))

  def num_bytes(n):
    return -(-n * bits // 8) + _Chunks.of(n, chunk).number * (1 if is_power else 4)

  return Codec(encode, decode, num_bytes, f"quantize({bits})")


def _largest(rows):
  """The largest magnitude of each row; infinity if it has a NaN."""
  # The maximum of many rows loses a NaN on XLA:CPU (jax 0.10.2), but never an infinity.
  return jnp.max(jnp.where(jnp.isnan(rows), jnp.inf, jnp.abs(rows)), -1)


def _exponents(largest, bits):
  """The exponents, biased by 127, of the scales that are powers of two; 255: infinite."""
  held = lax.bitcast_convert_type(largest, jnp.int32)
  exponent, significand = held >> 23, held & (2**23 - 1) | 2**23
  # Compared as integers: a quotient would be rounded.
  top = 2 ** (bits - 1) - 1
  is_above = significand > top << (25 - bits)
  biased = exponent - (bits - 2) + is_above.astype(jnp.int32)
  # An infinite scale makes every step 0, which decodes to 0 times infinity: a visible NaN.
  return jnp.where(exponent == 255, 255, jnp.clip(biased, 1, 254)).astype(jnp.uint8)


def _read_scale(codes, is_power):
  if not is_power:
    return _bits.from_bytes(codes, jnp.float32)
  return lax.bitcast_convert_type(codes.astype(jnp.int32) << 23, jnp.float32)


# One bit per entry.


def signs(chunk: int | None = None) -> Codec:
  """Signs, times the mean magnitude of a chunk: an eighth of a byte an entry.

  Args:
    chunk: entries that share a scale; None: all that are encoded together.

  Source: EF-signSGD, Karimireddy et al., "Error feedback fixes SignSGD" (2019), algorithm 2.
  """
  if chunk is not None:
    chunk = _checks.integer("codecs.signs", "chunk", chunk, minimum=1)

  def encode(x):
    chunks = _Chunks.of(x.shape[-1], chunk)
    counts = np.full(chunks.number, chunks.length, np.float32)
    # Padding does not count.
    counts[-1:] -= chunks.number * chunks.length - chunks.n
    sums = jnp.sum(jnp.abs(chunks.cut(x)), -1)
    scale = sums / np.broadcast_to(counts, sums.shape)
    return jnp.concatenate([_bits.pack((x >= 0).astype(jnp.uint8), 1), _bits.as_bytes(scale)], -1)

  def decode(codes, n):
    packed, scale = _bits.split(codes, -(-n // 8))
    sign = jnp.where(_bits.unpack(packed, 1, n) == 1, 1.0, -1.0)
    return _Chunks.of(n, chunk).times(sign, _bits.from_bytes(scale, jnp.float32))

  def num_bytes(n):
    return -(-n // 8) + 4 * _Chunks.of(n, chunk).number

  return Codec(encode, decode, num_bytes, f"signs({chunk})", feedback="needed")


# Codecs that send some of the entries.


def top_k(fraction: float, chunk: int = 4096, value: Codec | None = None) -> Codec:
  """The largest entries of every chunk, with their places; the others are zero.

  Args:
    fraction: of the entries of a chunk, in (0, 1], one entry at least.
    chunk: entries among which the largest are sought, at most 65,536. A place takes 8 bits in a
      chunk of 256, 12 in one of 4,096, else 16.
    value: the codec of the entries; None: `cast("bfloat16")`.

  Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (2018).
  """
  wrapper = "codecs.top_k"
  fraction = _fraction(wrapper, fraction)
  chunk = _checks.integer(wrapper, "chunk", chunk, minimum=1)
  if chunk > 65_536:  # an index is a uint16
    raise ValueError(f"{wrapper}: chunk must be at most 65536, got {chunk}.")
  value = cast("bfloat16") if value is None else value
  if not isinstance(value, Codec):
    raise TypeError(f'{wrapper}: value must be a Codec such as cast("bfloat16"), got {value!r}.')

  def shape_of(n):
    chunks = _Chunks.of(n, chunk)
    return chunks, max(1, round(fraction * chunks.length))

  def encode(x):
    chunks, k = shape_of(x.shape[-1])
    rows = chunks.cut(x)
    _, places = lax.top_k(jnp.abs(rows), k)  # in each chunk
    values = value.encode(jnp.take_along_axis(rows, places, -1))
    places, values = (part.reshape(*x.shape[:-1], -1) for part in (places, values))
    return jnp.concatenate([_bits.pack_places(places, chunks.length), values], -1)

  def decode(codes, n):
    chunks, k = shape_of(n)
    places, values = _bits.split(codes, _bits.place_bytes(chunks.number * k, chunks.length))
    outer = codes.shape[:-1]
    places = _bits.unpack_places(places, chunks.number * k, chunks.length)
    values = value.decode(values.reshape(*outer, chunks.number, value.num_bytes(k)), k)
    # In one dimension: every chunk has its part of it.
    num_chunks = math.prod(outer) * chunks.number
    starts = jnp.arange(num_chunks, dtype=jnp.int32)[:, None] * chunks.length
    flat = jnp.zeros(num_chunks * chunks.length, jnp.float32)
    places = (places.reshape(num_chunks, k) + starts).ravel()
    flat = flat.at[places].set(values.ravel(), unique_indices=True, mode="promise_in_bounds")
    return chunks.join(flat.reshape(*outer, chunks.number, chunks.length))

  def num_bytes(n):
    chunks, k = shape_of(n)
    return _bits.place_bytes(chunks.number * k, chunks.length) + chunks.number * value.num_bytes(k)

  name = f"top_k({fraction})"
  return Codec(encode, decode, num_bytes, name, recodes=False, feedback="needed")


def random_k(fraction: float, seed: int = 0) -> LinearCodec:
  """One of every `1 / fraction` adjacent entries, drawn in each step, the same on all shards.

  No places are sent. Without feedback entries are multiplied by `1 / fraction`.

  Args:
    fraction: of the entries, in (0, 1].
    seed: of the draws.

  Source: random-k of Stich, Cordonnier, Jaggi (2018), one from each group of neighbors.
  """
  wrapper = "codecs.random_k"
  fraction = _fraction(wrapper, fraction)
  seed = _checks.integer(wrapper, "seed", seed, minimum=0)
  # Of a group, of which one entry is sent.
  length = round(1 / fraction)

  def reduce(total, leaves, memory):
    places = _draws.draw(seed, memory, [leaf.shape for leaf in leaves], length)
    sent = [_draws.taken(x, p, length) for x, p in zip(leaves, places)]

    def in_place(values):
      rows = zip(values, places, leaves)
      return [_draws.spread(v, p, leaf.shape, length) for v, p, leaf in rows]

    return in_place(total(sent)), in_place(sent), _draws.after(memory)

  return LinearCodec(
    init=lambda shapes: jnp.zeros((), jnp.int32),
    reduce=reduce,
    num_bytes=lambda shape: 4 * _draws.num_groups(shape, length),
    gain=length,
    name=f"random_k({fraction})",
    divisible=True,
  )


def _fraction(wrapper, fraction):
  return _checks.number(wrapper, "fraction", fraction, lambda x: 0 < x <= 1, "in (0, 1]")
