"""The seam where a sum is taken.

On one side stands what a wrapper knows: these leaves, these axes, this weight. On the other side is
what sends. A wrapper chooses a `Reduction` in its factory, and calls `reduce` in its update. All
that types tell of a leaf has been decided before: what comes here is to be reduced.

A `Reduction` says what becomes of the weighted leaves, and a `Summed` says how a sum is had: over
the shards of an axis, over groups of them, or over towers on one device. An encoded sum keeps a
state, and so stands beside them: `_compress` is given the `parts`. A reduction that is no sum, such
as a median, is one more `Reduction`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics
from optax_wrappers._core._types import AxisNames

Leaves: TypeAlias = list[jax.Array]


class Summed(Protocol):
  """How a sum over shards is had. `over` always names the axes of the shards that have a part."""

  def dtype(self, dtype: Any) -> Any:
    """The dtype in which leaves of a dtype are weighed and added."""

  def weigh(self, leaf: jax.Array, weight: jax.Array) -> jax.Array:
    """`weight * leaf`, and zero where the weight is, even of a NaN."""

  def sum(self, leaves: Leaves, over: AxisNames) -> Leaves:
    """The sum of each leaf. Leaves that are alike may travel together."""

  def size(self, over: AxisNames) -> int:
    """How many are added."""


class Reduction(Protocol):
  """What becomes of the leaves of all shards."""

  def reduce(
    self,
    leaves: Leaves,
    over: AxisNames,
    counted: AxisNames,
    weight: jax.Array | None,
    total_of: Callable[[AxisNames], jax.Array],
  ) -> Leaves:
    """The reduced leaves, in their own dtypes.

    Args:
      leaves: all of them still to be reduced over the same axes.
      over: the axes to reduce over. Empty: the leaves are sums over all of `counted` already.
      counted: the axes whose shards have a part in the leaves; `over`, and those that were summed
        before.
      weight: this shard's, real scalar; None: each shard counts alike.
      total_of: the sum of the weights over axes, sent when it is first asked for.
    """


class Weighted(NamedTuple):
  """`sum_i w_i g_i`, divided by `sum_i w_i` for a mean."""

  summed: Summed
  is_mean: bool

  def weights(self, counted, weight, total_of):
    """What a shard's part in a sum is multiplied by, from its weight."""
    # The weight is divided rather than the sum: then no sum of large weights can overflow.
    # `counted` and not `over`: a leaf that autodiff has summed over an axis already still stands
    # for all shards of it.
    return _numerics.share(weight, total_of(counted)) if self.is_mean else weight

  def parts(self, leaves, counted, weight, total_of):
    """A shard's parts in sums that are the results, in float32."""
    leaves = [leaf.astype(jnp.float32) for leaf in leaves]
    if weight is None:
      size = self.summed.size(counted) if self.is_mean else 1
      return [leaf / size for leaf in leaves]
    factor = self.weights(counted, weight, total_of)
    return [self.summed.weigh(leaf, factor) for leaf in leaves]

  def reduce(self, leaves, over, counted, weight, total_of):
    dtypes = [leaf.dtype for leaf in leaves]
    leaves = [leaf.astype(self.summed.dtype(leaf.dtype)) for leaf in leaves]
    if weight is not None:
      factor = self.weights(counted, weight, total_of)
      leaves = [self.summed.weigh(leaf, factor) for leaf in leaves]
    leaves = self.summed.sum(leaves, over)
    if self.is_mean and weight is None:
      leaves = [leaf / self.summed.size(counted) for leaf in leaves]
    return [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes)]


class _Sent:
  """What sums that are sent have in common."""

  def dtype(self, dtype):
    return _numerics.sum_dtype(dtype)

  def weigh(self, leaf, weight):
    return _numerics.scale(leaf, weight)


@dataclasses.dataclass(frozen=True)
class OverShards(_Sent):
  """Over all shards of the axes."""

  def sum(self, leaves, over):
    return _collectives.psum(leaves, over)

  def size(self, over):
    return _axes.axis_size(over)


@dataclasses.dataclass(frozen=True)
class OverGroups(_Sent):
  """Over the shards of each of some groups of equal size."""

  groups: Sequence[Sequence[int]]

  def sum(self, leaves, over):
    return _collectives.group_psum(leaves, over[0], self.groups) if over else leaves

  def size(self, over):
    return len(self.groups[0]) if over else 1


class OverTowers(NamedTuple):
  """Over the towers that are stacked along an axis of every leaf. Nothing is sent."""

  axis: int
  num_towers: int

  def dtype(self, dtype):
    return _numerics.at_least_float32(dtype)

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


def total(summed: Summed, weight: jax.Array, over: AxisNames) -> jax.Array:
  """The sum of a scalar over shards. What its type shows to be equal on them is not sent."""
  (open_names,) = _axes.unreduced_names([weight], over)
  # A weight that is equal on all shards of an axis counts once for each of them.
  rest = tuple(name for name in over if name not in open_names)
  (added,) = summed.sum([weight], open_names)
  return added * summed.size(rest) if rest else added
