"""One of every so many neighboring entries, drawn at random and identically on all shards."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def num_groups(shape: Sequence[int], length: int) -> int:
  """The number of groups of so many neighbors in an array, each of which has one entry drawn."""
  return -(-math.prod(shape) // length)


def draw(
  seed: int, count: jax.Array, shapes: Sequence[Sequence[int]], length: int
) -> list[jax.Array]:
  """The position of the drawn entry in each group of arrays of these shapes; int32 [groups] each.

  In the last group of an array it may be past the end.
  """
  key = jax.random.fold_in(jax.random.key(seed), count)
  # In int64, the default with 64 bits, other numbers would be drawn.
  randint = functools.partial(jax.random.randint, minval=0, maxval=length, dtype=jnp.int32)
  sizes = [num_groups(shape, length) for shape in shapes]
  return [randint(jax.random.fold_in(key, i), (n,)) for i, n in enumerate(sizes)]


def taken(x: jax.Array, places: jax.Array, length: int) -> jax.Array:
  """The drawn entries of an array, [groups]."""
  more = len(places) * length - x.size
  rows = jnp.pad(x.ravel(), (0, more)).reshape(-1, length)
  return jnp.take_along_axis(rows, places[:, None], -1)[:, 0]


def spread(entries: jax.Array, places: jax.Array, shape: Sequence[int], length: int) -> jax.Array:
  """An array of this shape with the entries at their positions, and zeros elsewhere."""
  is_drawn = jnp.arange(length, dtype=places.dtype)[None] == places[:, None]
  whole = jnp.where(is_drawn, entries[:, None], jnp.zeros((), entries.dtype)).ravel()
  return whole[: math.prod(shape)].reshape(shape)


def after(count: jax.Array) -> jax.Array:
  """The next count, on which only draws depend: it wraps around at 2**31."""
  return (count + 1) & (2**31 - 1)
