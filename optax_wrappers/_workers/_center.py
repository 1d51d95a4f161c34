"""The center, either replicated on every worker or divided over the workers.

A center is a set of parameters shared by all workers, with which they synchronize. A rule does not
know which form it has. A center is stored in float32 or wider, whatever the dtype of the
parameters: in bfloat16 its steps would be below half an ulp after a few hundred rounds, and it
would stop.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _collectives, _elementwise, _numerics, _shares, _states
from optax_wrappers._core._states import copy_tree
from optax_wrappers._core._types import AxisNames, Tree


@_states.dataclass
class Center(_states.State):
  """The center in a rule's state. With `shard_center` both fields are divided over the workers.

  Attributes:
    center: the shared parameters, as `WorkerGroup.start` returns them.
    outer_state: of the outer optimizer, or None.
  """

  center: Tree = _states.field("center")
  outer_state: Tree = _states.field("center", default=None)


@dataclasses.dataclass(frozen=True)
class WorkerGroup:
  """The workers of a synchronization: all that a rule sees of them.

  Each stores the center, or a share of it with `shard_center`. Arguments and results are trees of
  the parameters' structure.

  Attributes:
    names: the axes of the workers.
    exchanges: those so far, of all fragments; None in `init`.
    num_fragments: how many exchanges make a round.
    weigh: computes `weight`; None outside of a synchronization.
    is_weighed: whether the caller gave a `participation`.
  """

  names: AxisNames
  _: dataclasses.KW_ONLY
  exchanges: Any = None
  num_fragments: int = 1
  weigh: Callable[[], jax.Array] | None = None
  is_weighed: bool = False

  @property
  def size(self) -> int:
    """The number of workers."""
    return lax.axis_size(self.names)

  @property
  def index(self) -> jax.Array:
    """The number of this worker, from 0; int32 scalar."""
    return lax.axis_index(self.names)

  @property
  def round(self) -> Any:
    """The rounds before this one, equal on all workers; int32 scalar, None in `init`."""
    return None if self.exchanges is None else self.exchanges // self.num_fragments

  @functools.cached_property
  def weight(self) -> Any:
    """This worker's weight in the exchange, a real scalar; None outside an exchange."""
    return None if self.weigh is None else self.weigh()

  # The center.

  def start(self, params: Tree) -> Tree:
    """The center at these parameters, as `init` returns it; it shares no buffer with them."""
    return copied(params)

  def whole(self, center: Tree, params: Tree) -> Tree:
    """The whole center on every worker, from what each stores."""
    del params
    return center

  def share(self, whole: Tree) -> Tree:
    """What this worker stores of a center that it has in full."""
    return whole

  def difference(self, center: Tree, moved: Tree, params: Tree) -> Tree:
    """`center - moved` of this worker, from the whole center.

    The center is rounded to the dtype of `params`, as the workers received it. Bits beyond that
    are not theirs; in every difference they would be added to a momentum again and again.
    """
    return jax.tree.map(lambda c, y, x: as_given(c, x) - y, center, moved, params)

  # What is computed of all workers' trees: whole on every worker, or as it stores the center.

  def sum(self, tree: Tree) -> Tree:
    """The sum, as the center is stored: an all-reduce, or a reduce-scatter."""
    return _collectives.psum(tree, self.names)

  def weighted_sum(self, moved: Tree, weight: jax.Array) -> tuple[Tree, jax.Array]:
    """`sum_i w_i moved_i`, as the center is stored, and `sum_i w_i`, in one exchange.

    A weight of zero also removes a NaN.
    """
    return self.sum((_numerics.scale_tree(moved, weight), weight))

  def sum_of_differences(
    self, center: Tree, moved: Tree, params: Tree, weight: jax.Array
  ) -> tuple[Tree, jax.Array]:
    """`weighted_sum` of each worker's `difference`, from the center as it is stored."""
    return self.weighted_sum(self.difference(center, moved, params), weight)

  def mean(self, tree: Tree) -> Tree:
    """The mean by the workers' weights, whole; 0 if all of these are 0."""
    return mean(WorkerGroup(self.names), tree, self.weight)[0]

  def all_gather(self, tree: Tree) -> Tree:
    """Every leaf of all workers, `[size, ...]`, whole."""
    return _collectives.all_gather(tree, self.names)

  def permute(self, tree: Tree, pairs: Sequence[tuple[int, int]]) -> Tree:
    """The tree of the worker that is this one's source in `pairs` of (source, target), or zeros."""
    return _collectives.permute(tree, self.names, pairs)

  def check_outer(self, outer: Any, center: Tree) -> None:
    """Raises if an optimizer cannot be applied to what a worker stores of the center."""


@dataclasses.dataclass(frozen=True)
class Divided(WorkerGroup):
  """Each worker holds a share of the center. A sum is a reduce-scatter, reading an all-gather.

  Each leaf is divided along one of its dimensions (`_shares.divided_dimension`), so that it keeps
  the sharding of the parameters over a worker's devices.
  """

  wrapper: str

  def whole(self, center, params):
    self._check_shares(center, params)
    return _collectives.gather_shares(center, self.names, params)

  def sum(self, tree):
    return _collectives.sum_scatter(tree, self.names)

  def share(self, whole):
    # Every worker has computed the whole, so dividing it sends nothing.
    return _shares.share_of(whole, self.names)

  def _check_shares(self, center, params):
    num_workers = self.size
    how = "stack_workers(tx.init(params), num_workers)"
    for share, x in zip(jax.tree.leaves(center), jax.tree.leaves(params), strict=True):
      _shares.require_share(self.wrapper, "center_share", share, x.shape, num_workers, how)
      # If a variable is sharded manually over a worker's devices, each device would pad its part
      # with zeros, while the whole variable is padded only at its end.
      cut = _axes.other_manual_axes(x, self.names)
      d = _shares.divided_dimension(x.shape, num_workers)
      if cut and d is not None and x.shape[d] % num_workers:
        what = f"{self.wrapper}: shard_center needs a dimension that is a multiple of {num_workers}"
        device_shape = f"workers, and a device has {list(x.shape)} of a variable over {sorted(cut)}"
        mend = f"Leave those axes to XLA: jax.shard_map(..., axis_names={set(self.names)})."
        raise ValueError(f"{what} {device_shape}. {mend}")

  def check_outer(self, outer, center):
    _elementwise.require(self.wrapper, "shard_center", "outer_state", outer, center)

  def sum_of_differences(self, center, moved, params, weight):
    self._check_shares(center, params)
    # No worker has the whole center to subtract from. Sending it first would cost half as much
    # again.
    sums, total = self.weighted_sum(moved, weight)

    def difference(c, x, y):
      return as_given(c, x) * total.astype(c.dtype) - y

    return jax.tree.map(difference, center, params, sums), total


def mean(workers: WorkerGroup, tree: Tree, weight: jax.Array) -> tuple[Tree, jax.Array]:
  """The weighted mean over the workers, divided like the center, and the sum of the weights."""
  sums, total = workers.weighted_sum(tree, weight)
  return divided(sums, total), total


def divided(sums: Tree, total: jax.Array) -> Tree:
  """Sums divided by their weights; zero if these are zero, and NaN if they have overflowed."""
  # With an infinite sum of weights, the mean would silently be zero. (A constant NaN would be found
  # by jax_debug_nans.)
  total = total + 0 * total
  return jax.tree.map(lambda x: _numerics.divide(x, total), sums)


def as_given(c: jax.Array, x: jax.Array) -> jax.Array:
  """The center as a worker with parameters of the dtype of `x` received it."""
  return _numerics.rounded(c, x.dtype).astype(c.dtype)


def in_center(x: Any) -> Any:
  """A parameter, or an abstract one, in the dtype of the center."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=_numerics.at_least_float32(x.dtype))
  x = jnp.asarray(x)
  # Not of a random key.
  return x.astype(_numerics.at_least_float32(x.dtype)) if _numerics.is_inexact(x) else x


def copied(params: Tree) -> Tree:
  """Parameters in the dtype of the center, sharing no buffer with them."""
  return copy_tree(jax.tree.map(in_center, params))


def join(params: Tree, shares: Tree) -> Tree:
  """The whole center from all workers' shares, stacked on leading axes, outside a step."""

  def whole(p, rows):
    # Of workers: none if it was not divided, or is a variable of another optimizer, masked here.
    num_axes = getattr(rows, "ndim", 0) - len(p.shape)
    if num_axes <= 0:
      return rows
    rows = _axes.undivided(rows, num_axes)
    # -1 is ambiguous for an array without elements.
    num_workers = math.prod(rows.shape[:num_axes])
    return _shares.whole(rows.reshape(num_workers, *rows.shape[num_axes:]), p.shape)

  return jax.tree.map(whole, params, shares)
