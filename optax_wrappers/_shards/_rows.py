"""Reductions that need the gradients of all shards together.

Each shard receives a part of the entries from all shards, reduces that part, and sends the result
to all: the bytes of an all-reduce, and one more copy of the gradient in memory, not N.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics
from optax_wrappers._core._types import MeanOrSum
from optax_wrappers.reductions import Reduction


class Block(NamedTuple):
  """The same entries of all n gradients in order, `[n, ...]`, and how many shards hold them."""

  rows: jax.Array
  copies: int


@dataclasses.dataclass(frozen=True)
class OfRows:
  """A rule of `reductions`, with the interface of `_reduce.Weighted`."""

  # For wrappers outside: counts as a mean, whose weight no factor on a gradient can replace.
  is_mean: ClassVar[bool] = True
  rule: Reduction
  rows: "OverShards | OverTowers"

  def reduce(self, leaves, over, counted, weight, total_of):
    del counted, weight, total_of
    if not leaves:
      return leaves
    # Complex numbers have no order; norms and angles are those of pairs of reals.
    reals = [pairs(leaf) for leaf in leaves]
    blocks = [
      Block(rows.astype(_numerics.at_least_float32(rows.dtype)), copies)
      for rows, copies in self.rows.scatter(reals, over)
    ]
    if self.rule.of_entries is not None:
      results = [self._of_entries(block.rows) for block in blocks]
    else:
      results = self._of_products(blocks, _numerics.weight_dtype(reals), over)
    results = [x.astype(leaf.dtype) for x, leaf in zip(results, reals, strict=True)]
    return list(map(_joined, self.rows.gather(results, reals, over), leaves))

  def _of_entries(self, rows):
    result = self.rule.of_entries(rows)
    expected, shape = list(rows.shape[1:]), list(jnp.shape(result))
    if shape != expected:
      what = f"{self.rule.name}: fn must return {expected} for {list(rows.shape)}"
      raise ValueError(f"{what}, got {shape}.")
    return result

  def _of_products(self, blocks, dtype, over):
    grams = [products(block).astype(dtype) for block in blocks]
    if not self.rule.per_leaf:  # of the whole gradient
      grams = [sum(grams[1:], grams[0])]
    coefficients = [self._coefficients(gram) for gram in self.rows.total(grams, over)]
    if not self.rule.per_leaf:
      coefficients *= len(blocks)
    return [_combined(c, block.rows) for c, block in zip(coefficients, blocks, strict=True)]

  def _coefficients(self, products):
    coefficients, n = self.rule.of_products(products), len(products)
    shape = list(jnp.shape(coefficients))
    if shape != [n]:
      what = f"{self.rule.name}: fn must return a coefficient for each of the {n} shards"
      raise ValueError(f"{what}, got {shape}.")
    return coefficients


def pairs(leaf: jax.Array) -> jax.Array:
  """A complex leaf as real and imaginary parts, `[..., 2]`."""
  return jnp.stack([leaf.real, leaf.imag], -1) if jnp.iscomplexobj(leaf) else leaf


def _joined(x, leaf):
  """The inverse of `pairs`, for the result of a leaf."""
  return lax.complex(x[..., 0], x[..., 1]) if jnp.iscomplexobj(leaf) else x


def products(block: Block) -> jax.Array:
  """A shard's contribution to the inner products of the rows, `[n, n]`."""
  rows, copies = block
  over = tuple(range(1, rows.ndim))
  sums = lax.dot_general(rows, rows, ((over, over), ((), ())), precision=lax.Precision.HIGHEST)
  return sums / copies


def _combined(coefficients, rows):
  """`sum_i c_i row_i`; a coefficient of zero also removes a NaN."""
  parts = [_numerics.scale(row, c) for row, c in zip(rows, coefficients, strict=True)]
  return sum(parts[1:], parts[0])


def check(wrapper: str, reduction: Any) -> None:
  """Raises on what is no `reduction=`."""
  if not isinstance(reduction, Reduction) and reduction not in get_args(MeanOrSum):
    choices = "one of 'mean', 'sum', or a Reduction of optax_wrappers.reductions, such as median()"
    raise ValueError(f"{wrapper}: reduction must be {choices}; got {reduction!r}.")


def require_votes(wrapper: str, weight: Any, cause: str, voter: str = "shard") -> None:
  """Raises for a weight, because `cause` gives every voter one vote."""
  if weight is not None:
    mend = "the extra arg, or that of stale or dropped shards or of towers outside"
    what = f"{wrapper}: every {voter} has one vote because of {cause}"
    raise ValueError(f"{what}. Leave out the weight: {mend}.")


class OverShards(NamedTuple):
  def scatter(self, leaves, over):
    """A block of each leaf."""
    n = lax.axis_size(over)
    if n == 1:
      return [Block(leaf[None], 1) for leaf in leaves]
    # To split a leaf that is sharded over other axes, XLA would first gather it.
    is_whole = _axes.laid_out_beside(leaves, over)
    parts = {i: _cut(leaf, n) for i, leaf in enumerate(leaves) if not is_whole[i]}
    rows = _sent(parts, lambda x: _collectives.all_to_all(x, over))
    return [
      Block(rows[i], 1) if i in rows else Block(_collectives.all_gather(leaf, over), n)
      for i, leaf in enumerate(leaves)
    ]

  def gather(self, blocks, leaves, over):
    """The leaves on all shards, from the result of each block, `[...]`."""
    if lax.axis_size(over) == 1:
      return blocks
    is_whole = _axes.laid_out_beside(leaves, over)
    parts = {i: block for i, block in enumerate(blocks) if not is_whole[i]}
    rows = _sent(parts, lambda x: _collectives.all_gather(x, over))
    return [
      lax.slice(rows[i].ravel(), (0,), (leaf.size,)).reshape(leaf.shape) if i in rows else block
      for i, (leaf, block) in enumerate(zip(leaves, blocks))
    ]

  def total(self, products, over):
    """The sum over all blocks of a leaf."""
    return _collectives.psum(products, over)


class OverTowers(NamedTuple):
  """Over towers that are stacked along an axis of every leaf. Nothing is sent."""

  axis: int

  def scatter(self, leaves, over):
    return [Block(jnp.moveaxis(leaf, self.axis, 0), 1) for leaf in leaves]

  def gather(self, blocks, leaves, over):
    return blocks

  def total(self, products, over):
    return products


def _sent(parts, send):
  """`send` of numbered arrays, with one buffer for those of each dtype."""
  arrived: dict[int, jax.Array] = {}
  for dtype in dict.fromkeys(x.dtype for x in parts.values()):
    alike = {i: x for i, x in parts.items() if x.dtype == dtype}
    arrived |= zip(alike, _collectives.send_flat(list(alike.values()), send), strict=True)
  return arrived


def _cut(leaf, n):
  """A leaf as n parts of equal length, `[n, length]`, padded with zeros."""
  length = -(-leaf.size // n)
  return jnp.pad(leaf.ravel(), (0, n * length - leaf.size)).reshape(n, length)
