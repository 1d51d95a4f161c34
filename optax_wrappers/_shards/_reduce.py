"""The seam where a sum is taken.

A wrapper knows leaves, axes and a weight. It chooses a reduction in its factory, `Weighted` or
`_rows.OfRows`, and calls `reduce` in its update. What comes here is to be reduced: all that types
tell of a leaf has been decided before. How a sum is had is the business of `OverShards`, or of
`OverTowers` on one device. An encoded sum keeps a state: `_compress` is given the `parts`.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics, _shares
from optax_wrappers._core._types import AxisNames


@dataclasses.dataclass(frozen=True)
class OverShards:
  """Over all shards of the axes, or over those of each of some groups of equal size."""

  groups: Sequence[Sequence[int]] | None = None

  # The dtype in which leaves of a dtype are weighed and added; and `weight * leaf`, zero where the
  # weight is, even of a NaN.
  dtype = staticmethod(_numerics.sum_dtype)
  weigh = staticmethod(_numerics.scale)

  def sum(self, leaves, over):
    if self.groups is None or not over:
      return _collectives.psum(leaves, over)
    return _collectives.group_psum(leaves, over[0], self.groups)

  def size(self, over):
    """How many are added."""
    return _axes.axis_size(over) if self.groups is None or not over else len(self.groups[0])


@dataclasses.dataclass(frozen=True)
class ToShares(OverShards):
  """As `OverShards`, of which each shard gets its share of all but scalars."""

  names: AxisNames = ()

  def sum(self, leaves, over):
    if over == self.names:
      shares = _collectives.sum_scatter(leaves, over)
    else:
      shares = _shares.share_of(super().sum(leaves, over), self.names)
    # Those without elements differ too: the layout of a state does not look at shapes.
    return [_axes.to_varying(x, self.names) if x.ndim else x for x in shares]


@dataclasses.dataclass(frozen=True)
class OverTowers:
  """Over the towers that are stacked along an axis of every leaf. Nothing is sent."""

  axis: int
  num_towers: int

  dtype = staticmethod(_numerics.at_least_float32)

  def weigh(self, leaf, weight):
    # One weight for each tower, along the axis of the towers.
    return jax.vmap(_numerics.scale, (self.axis, 0), self.axis)(leaf, weight)

  def sum(self, leaves, over):
    return [self._sum(leaf) for leaf in leaves]

  def _sum(self, leaf):
    axis = self.axis % leaf.ndim
    if any(jax.typeof(leaf).sharding.spec[axis : axis + 1]):  # of an Explicit mesh
      return jnp.sum(leaf, axis)
    # A product with ones: XLA:CPU takes up to a hundred times as long to sum over a short axis.
    ones = jnp.ones(self.num_towers, leaf.dtype)
    contracted = (((0,), (axis,)), ((), ()))
    return lax.dot_general(ones, leaf, contracted, precision=lax.Precision.HIGHEST)

  def size(self, over):
    return self.num_towers


Summed: TypeAlias = OverShards | OverTowers


class Weighted(NamedTuple):
  """`sum_i w_i g_i`, divided by `sum_i w_i` for a mean."""

  summed: Summed
  is_mean: bool

  def parts(self, leaves, counted, weight, total_of):
    """A shard's parts in sums that are the results, in float32."""
    leaves = [leaf.astype(jnp.float32) for leaf in leaves]
    if weight is None:
      size = self.summed.size(counted) if self.is_mean else 1
      return [leaf / size for leaf in leaves]
    return self._weighed(leaves, counted, weight, total_of)

  def reduce(self, leaves, over, counted, weight, total_of):
    """The reduced leaves, in their own dtypes.

    `counted` are the axes whose shards have a part in the leaves, `over` those of them over which
    the leaves are not summed yet. `weight` is this shard's scalar, or None where all count alike;
    `total_of` sums the weights over axes.
    """
    dtypes = [leaf.dtype for leaf in leaves]
    leaves = [leaf.astype(self.summed.dtype(leaf.dtype)) for leaf in leaves]
    if weight is not None:
      leaves = self._weighed(leaves, counted, weight, total_of)
    leaves = self.summed.sum(leaves, over)
    if self.is_mean and weight is None:
      leaves = [leaf / self.summed.size(counted) for leaf in leaves]  # g / N
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes)]

  def _weighed(self, leaves, counted, weight, total_of):
    # The weight is divided rather than the sum: then no sum of large weights can overflow.
    # `counted` and not `over`: a leaf that autodiff has summed over an axis already still stands
    # for all shards of it.
    factor = _numerics.share(weight, total_of(counted)) if self.is_mean else weight  # w_i / sum w
    return [self.summed.weigh(leaf, factor) for leaf in leaves]


def total(summed: Summed, weight: jax.Array, over: AxisNames) -> jax.Array:
  """The sum of a scalar over shards. What its type shows to be equal on them is not sent."""
  (open_names,) = _axes.unreduced_names([weight], over)
  # A weight that is equal on all shards of an axis counts once for each of them.
  rest = tuple(name for name in over if name not in open_names)
  (added,) = summed.sum([weight], open_names)
  return added * summed.size(rest) if rest else added
