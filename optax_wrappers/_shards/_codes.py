"""The codes of a codec, which may be a user's, and the parts of a leaf that shards own."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers import codecs
from optax_wrappers._core import _shares

# From this number of shards on, codes are decoded in a loop, one shard at a time.
MANY = 8


class Parts(NamedTuple):
  """How a leaf is divided into one part per shard."""

  shape: tuple[int, ...]
  num_shards: int
  d: int  # the dimension that `_shares` divides
  places: int  # of a part, along this dimension
  length: int  # the number of entries of a part

  @classmethod
  def of(cls, shape, num_shards):
    d = _shares.divided_dimension(shape, num_shards)
    if d is None:  # a single entry
      return cls(shape, num_shards, 0, 0, 0)
    places = shape[d] // num_shards
    return cls(shape, num_shards, d, places, places * int(np.prod(shape)) // shape[d])

  @property
  def _cut(self):
    return self.places * self.num_shards

  def rows(self, leaf):
    """The parts, `[num_shards, length]`."""
    cut = _shares.cut(lax.slice_in_dim(leaf, 0, self._cut, axis=self.d), self.num_shards, self.d)
    return jnp.moveaxis(cut, self.d + 1, 0).reshape(self.num_shards, self.length)

  def rest(self, leaf):
    return lax.slice_in_dim(leaf, self._cut, None, axis=self.d)

  def whole(self, rows, rest):
    """The leaf, from its parts and the remaining positions."""
    shape = self._with(self._cut)
    x = rows.reshape(self.num_shards, *self._with(self.places))
    x = _shares.joined(jnp.moveaxis(x, 0, self.d + 1), shape, self.d)
    return jnp.concatenate([x, rest], self.d) if rest.size else x

  def own(self, f):
    """The residual of a part, from a share, which has one more position if some remain."""
    return lax.slice_in_dim(f, 0, self.places, axis=self.d).reshape(self.length)

  def held(self, rest, f):
    """The share that holds the residual of a part."""
    rest = rest.reshape(self._with(self.places))
    more = f.shape[self.d] - self.places
    return jnp.pad(rest, [(0, more if k == self.d else 0) for k in range(f.ndim)]) if more else rest

  def _with(self, places):
    return tuple(places if k == self.d else n for k, n in enumerate(self.shape))


def encoded(codec: codecs.Codec, x: jax.Array) -> jax.Array:
  """The code of `[..., n]`, checked: a codec may be the user's own."""
  code, shape = codec.encode(x), [*x.shape[:-1], codec.num_bytes(x.shape[-1])]
  if code.dtype != jnp.uint8 or list(code.shape) != shape:
    what = f"{codec.name}: encode must return uint8{shape}, as num_bytes has it"
    of_input = f"for float32{list(x.shape)}"
    raise ValueError(f"{what}, {of_input}; got {code.dtype}{list(code.shape)}.")
  return code


def decoded(codec: codecs.Codec, code: jax.Array, n: int) -> jax.Array:
  """Decoded codes of `[..., n]`, checked."""
  x, shape = codec.decode(code, n), [*code.shape[:-1], n]
  if x.dtype != jnp.float32 or list(x.shape) != shape:
    what = f"{codec.name}: decode must return float32{shape}, with n={n}"
    raise ValueError(f"{what}; got {x.dtype}{list(x.shape)}.")
  return x


def added(codec, codes, n):
  """The sum of the decoded rows, in float32 and in order."""
  # Not jnp.sum: on XLA:CPU it is many times slower over a short axis, and its order is not fixed.
  if len(codes) < MANY:
    rows = decoded(codec, codes, n)
    return functools.reduce(jnp.add, (rows[i] for i in range(len(codes))))

  def add(total, code):
    return total + decoded(codec, code, n), None

  return lax.scan(add, decoded(codec, codes[0], n), codes[1:])[0]
