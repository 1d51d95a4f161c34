"""Arrays divided over shards: each shard has a share, an array with the same number of dimensions.

Along one dimension of length n, shard i of N has the elements i, i + N, i + 2 N, ... If n is a
multiple of N times the number of devices that shard the array, each device computes its part of
every share by itself; contiguous blocks would have to be sent. Nothing is sent here; `_collectives`
does that.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers._core import _axes
from optax_wrappers._core._types import AxisNames, Tree


def divided_dimension(shape: Sequence[int], num_shares: int) -> int | None:
  """The dimension along which an array is divided; None if every share is the whole array.

  None for a single share, scalars and arrays without elements. Otherwise the first dimension that
  is a multiple of `num_shares`, else the largest, which is padded with zeros.
  """
  if not shape or 0 in shape or num_shares == 1:
    return None
  return next((d for d, n in enumerate(shape) if n % num_shares == 0), int(np.argmax(shape)))


def share_shape(shape: Sequence[int], num_shares: int) -> tuple[int, ...]:
  """The shape of a share."""
  d = divided_dimension(shape, num_shares)
  return tuple(-(-n // num_shares) if k == d else n for k, n in enumerate(shape))


def may_be_cut(shape: Sequence[int], d: int, num_parts: int, num_shares: int) -> bool:
  """Whether dimension `d` can be divided so that a share of a part is that part of a share."""
  even = num_parts * num_shares if d == divided_dimension(shape, num_shares) else num_parts
  return shape[d] > 0 and shape[d] % even == 0


def require_share(
  wrapper: str, name: str, share: jax.Array, shape: Sequence[int], num_shares: int, how: str
) -> None:
  """Raises for an array that was never divided and would be mistaken for a share."""
  expected = share_shape(shape, num_shares)
  if share.shape != expected:
    raise ValueError(
      f"{wrapper}: {name} must be 1/{num_shares} of each variable, {list(expected)} for"
      f" {list(shape)}, got {list(share.shape)}. Divide it: {how}."
    )


def shares(x: jax.Array, num_shares: int) -> jax.Array:
  """All shares of an array, on a new leading axis."""
  d = divided_dimension(x.shape, num_shares)
  if d is None:
    return jnp.repeat(jnp.expand_dims(x, 0), num_shares, 0)
  return jnp.moveaxis(cut(x, num_shares, d), d + 1, 0)


def whole(rows: jax.Array, shape: Sequence[int]) -> jax.Array:
  """The array of a shape from all its shares, stacked on a leading axis."""
  d = divided_dimension(shape, len(rows))
  return rows[0] if d is None else joined(jnp.moveaxis(rows, 0, d + 1), shape, d)


def share_of(tree: Tree, names: AxisNames) -> Tree:
  """This shard's share of every leaf, of which all shards hold the whole."""
  index, num_shares = lax.axis_index(names), lax.axis_size(names)

  def own(x):
    d = divided_dimension(x.shape, num_shares)
    return x if d is None else take(cut(x, num_shares, d), index, d + 1)

  return jax.tree.map(own, tree)


def cut(x: jax.Array, num_shares: int, d: int) -> jax.Array:
  """Splits dimension `d`, padded with zeros, into positions in a share and shares."""
  n = -(-x.shape[d] // num_shares)
  num_places = _axes.num_places(x, d)
  if n % num_places:
    what = (
      f"a variable {list(x.shape)} cannot be divided into {num_shares} shares: its dimension {d}"
    )
    mend = "Shard another of its dimensions, or none, or make the mesh with AxisType.Auto"
    raise ValueError(f"{what} is sharded over {num_places} devices of an Explicit mesh. {mend}.")
  if n * num_shares > x.shape[d]:
    x = jnp.pad(x, [(0, n * num_shares - x.shape[d] if k == d else 0) for k in range(x.ndim)])
  return x.reshape(*x.shape[:d], n, num_shares, *x.shape[d + 1 :])


def joined(x: jax.Array, shape: Sequence[int], d: int) -> jax.Array:
  """The inverse of `cut`."""
  x = x.reshape(*x.shape[:d], x.shape[d] * x.shape[d + 1], *x.shape[d + 2 :])
  return x if x.shape[d] == shape[d] else lax.slice_in_dim(x, 0, shape[d], axis=d)


def take(x: jax.Array, index: jax.Array, d: int) -> jax.Array:
  """One position along a dimension, which is removed."""
  return lax.dynamic_index_in_dim(x, index, d, keepdims=False)
