"""The interface between wrappers and sums.

A wrapper knows leaves, axes and a weight. Its factory chooses a reduction, `Weighted` or
`_rows.OfRows`, and its update calls `reduce`, when all that types say about a leaf is decided.
`OverShards`, or `OverTowers` on one device, computes the sum. A compressed sum has a state:
`_compress` receives each `part`.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics, _shares, _waits
from optax_wrappers._core._types import AxisNames


@dataclasses.dataclass(frozen=True)
class OverShards:
  """Over all shards of the axes, or over groups of them of equal size."""

  groups: Sequence[Sequence[int]] | None = None

  # The dtype in which leaves of a dtype are weighted and summed; and `weight * leaf`, which is zero
  # if the weight is, even for a NaN.
  dtype = staticmethod(_numerics.sum_dtype)
  weigh = staticmethod(_numerics.scale)

  def sum(self, leaves, over):
    if self.groups is None or not over:
      return _collectives.psum(leaves, over)
    return _collectives.group_psum(leaves, over[0], self.groups)

  def size(self, over):
    """The number of summands."""
    return lax.axis_size(over) if self.groups is None or not over else len(self.groups[0])


@dataclasses.dataclass(frozen=True)
class ToShares(OverShards):
  """Like `OverShards`, but each shard receives its share of everything but scalars."""

  names: AxisNames = ()

  def sum(self, leaves, over):
    if over == self.names:
      shares = _collectives.sum_scatter(leaves, over)
    else:
      shares = _shares.share_of(super().sum(leaves, over), self.names)
    # Also those without elements: the layout of a state ignores shapes.
    return [_axes.to_varying(x, self.names) if x.ndim else x for x in shares]


@dataclasses.dataclass(frozen=True)
class OverTowers:
  """Over towers that are stacked along an axis of every leaf. Nothing is sent."""

  axis: int
  num_towers: int

  dtype = staticmethod(_numerics.at_least_float32)

  def weigh(self, leaf, weight):
    # One weight per tower, along the axis of the towers.
    return jax.vmap(_numerics.scale, (self.axis, 0), self.axis)(leaf, weight)

  def sum(self, leaves, over):
    return [self._sum(leaf) for leaf in leaves]

  def _sum(self, leaf):
    axis = self.axis % leaf.ndim
    # Of an Explicit mesh.
    if any(jax.typeof(leaf).sharding.spec[axis : axis + 1]):
      return jnp.sum(leaf, axis)
    # A product with ones: on XLA:CPU a sum over a short axis is up to a hundred times slower.
    ones = jnp.ones(self.num_towers, leaf.dtype)
    contracted = (((0,), (axis,)), ((), ()))
    return lax.dot_general(ones, leaf, contracted, precision=lax.Precision.HIGHEST)

  def size(self, over):
    return self.num_towers


class Weighted(NamedTuple):
  """`sum_i w_i g_i`, divided by `sum_i w_i` for a mean."""

  summed: OverShards | OverTowers
  is_mean: bool

  def part(self, leaf, counted, weight, total_of):
    """A shard's part, in float32, of a sum over shards that is the result, for a mean too."""
    leaf = leaf.astype(jnp.float32)
    if weight is None:
      return leaf / (self.summed.size(counted) if self.is_mean else 1)
    return self.summed.weigh(leaf, self._factor(counted, weight, total_of))

  def reduce(self, leaves, over, counted, weight, total_of):
    """The reduced leaves, in their own dtypes.

    `counted` are the axes whose shards contribute, `over` those over which the leaves are not yet
    summed. `weight` is this shard's scalar, or None; `total_of` sums the weights over axes.
    """
    dtypes = [leaf.dtype for leaf in leaves]
    leaves = [leaf.astype(self.summed.dtype(leaf.dtype)) for leaf in leaves]
    # For `inspect.check_step`: this mean is wrong if the loss was a sum over shards before.
    summed = [name for name in counted if name not in over] if self.is_mean else []
    with _waits.mean_of_sum(summed) if summed else contextlib.nullcontext():
      if weight is not None:
        factor = self._factor(counted, weight, total_of)
        leaves = [self.summed.weigh(leaf, factor) for leaf in leaves]
      leaves = self.summed.sum(leaves, over)
      if self.is_mean and weight is None:
        size = self.summed.size(counted)
        leaves = [leaf / size for leaf in leaves]
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes)]

  def _factor(self, counted, weight, total_of):
    # The weight is divided, not the sum, so that no sum of large weights can overflow. `counted`,
    # not `over`: a leaf that autodiff has already summed over an axis stands for all shards of it.
    return _numerics.share(weight, total_of(counted)) if self.is_mean else weight


def total(summed: OverShards, weight: jax.Array, over: AxisNames) -> jax.Array:
  """The sum of a scalar over shards. If its type says that it is equal on them, nothing is sent."""
  (open_names,) = _axes.unreduced_names([weight], over)
  # A weight that is equal on all shards of an axis counts once per shard.
  rest = tuple(name for name in over if name not in open_names)
  (added,) = summed.sum([weight], open_names)
  return added * summed.size(rest) if rest else added
