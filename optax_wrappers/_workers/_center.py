"""Whether a center is whole on every worker, or divided over them.

A center is what workers exchange with: parameters that belong to all of them. Both forms have one
face, so that the rule of an exchange does not know which it has. A center is kept in float32 or
wider, whatever the parameters are. In bfloat16 it would stand still where its steps are below half
an ulp, which after a few hundred rounds they are.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _collectives, _elementwise, _numerics, _shares
from optax_wrappers._core._state import WrapperState, copy_tree, held, state
from optax_wrappers._core._types import AxisNames, Tree


@state
class Center(WrapperState):
  """The center in a rule's state. With `shard_center` both fields are divided over the workers.

  Attributes:
    center: the shared parameters, as `WorkerGroup.start` returns them.
    outer_state: of the outer optimizer, or None.
  """

  center: Tree = held("center")
  outer_state: Tree = held("center", default=None)


@dataclasses.dataclass(frozen=True)
class WorkerGroup:
  """The workers of a synchronization. Each stores the center, or a share with `shard_center`.

  Arguments and results are trees of the parameters' structure.

  Attributes:
    names: the axes of the workers.
    weigh: computes `weight`; None outside of a synchronization.
    is_weighed: whether the caller gave a `participation`.
  """

  names: AxisNames
  weigh: Callable[[], jax.Array] | None = dataclasses.field(default=None, kw_only=True)
  is_weighed: bool = dataclasses.field(default=False, kw_only=True)

  @property
  def weight(self) -> Any:
    """This worker's weight in the exchange, a real scalar; None outside of one."""
    return None if self.weigh is None else self.weigh()

  def start(self, params: Tree) -> Tree:
    """The center at these parameters, as `init` returns it; it shares no buffer with them."""
    return copied(params)

  def gather(self, kept: Tree, params: Tree) -> Tree:
    """The whole center on every worker, from what each keeps of it."""
    del params
    return kept

  def sum(self, tree: Tree) -> Tree:
    """What a worker keeps of the sum over all workers: an all-reduce, or a reduce-scatter."""
    return _collectives.psum(tree, self.names)

  def share(self, whole: Tree) -> Tree:
    """What a worker keeps of a center that it has whole."""
    return whole

  def weighted_sum(self, moved: Tree, weight: jax.Array) -> tuple[Tree, jax.Array]:
    """What a worker keeps of `sum_i w_i moved_i`, and the whole `sum_i w_i`, in one exchange.

    Where a weight is zero a NaN is too.
    """
    return self.sum((_numerics.scale_tree(moved, weight), weight))

  def differences(
    self, kept: Tree, moved: Tree, params: Tree, weight: jax.Array
  ) -> tuple[Tree, jax.Array]:
    """`weighted_sum` of `center - moved_i`.

    The center counts as it was given to the workers, rounded to the dtype of their `params`. What
    is kept beyond that is none of their doing; as a part of every difference it would be fed to a
    momentum again and again.
    """
    return self.weighted_sum(differences(kept, moved, params), weight)

  def check_outer(self, outer: Any, kept: Tree) -> None:
    """Raises where an optimizer cannot be applied to what a worker keeps of the center."""


@dataclasses.dataclass(frozen=True)
class Divided(WorkerGroup):
  """Each worker keeps a share of the center. A sum is a reduce-scatter, reading an all-gather.

  Each leaf is divided along one of its dimensions (`_shares.divided_dimension`), so that it
  stays laid out over a worker's devices as the parameters are.
  """

  wrapper: str

  def gather(self, kept, params):
    self._check_shares(kept, params)
    return _collectives.gather_shares(kept, self.names, params)

  def sum(self, tree):
    return _collectives.sum_scatter(tree, self.names)

  def share(self, whole):
    # Every worker has computed the whole, so that nothing is sent to divide it.
    return _shares.share_of(whole, self.names)

  def _check_shares(self, kept, params):
    num_workers = _axes.axis_size(self.names)
    how = "stack_workers(tx.init(params), num_workers)"
    for share, x in zip(jax.tree.leaves(kept), jax.tree.leaves(params), strict=True):
      _shares.require_share(self.wrapper, "center_share", share, x.shape, num_workers, how)
      # Of a variable that is cut by hand over a worker's devices, each would add zeros to its part,
      # where the whole one has them at its end.
      cut = _axes.other_manual_axes(x, self.names)
      d = _shares.divided_dimension(x.shape, num_workers)
      if cut and d is not None and x.shape[d] % num_workers:
        what = f"{self.wrapper}: shard_center needs a dimension that is a multiple of {num_workers}"
        given = f"workers, and a device has {list(x.shape)} of a variable over {sorted(cut)}"
        mend = f"Leave those axes to XLA: jax.shard_map(..., axis_names={set(self.names)})."
        raise ValueError(f"{what} {given}. {mend}")

  def check_outer(self, outer, kept):
    _elementwise.require(self.wrapper, "shard_center", "outer_state", outer, kept)

  def weighted_sum(self, moved, weight):
    sums = self.sum(_numerics.scale_tree(moved, weight))
    return sums, _collectives.psum(weight, self.names)

  def differences(self, kept, moved, params, weight):
    self._check_shares(kept, params)
    # No worker has the whole center to subtract from. To send it first would be half as much again.
    sums, total = self.weighted_sum(moved, weight)
    given = jax.tree.map(as_given, kept, params)
    return jax.tree.map(lambda c, y: c * total.astype(c.dtype) - y, given, sums), total


def start_outer(workers: WorkerGroup, outer: Any, params: Tree) -> tuple[Tree, Tree]:
  """The center at these parameters, and the state of the optimizer that moves it."""
  center = workers.start(params)
  outer_state = copy_tree(outer.init(center))  # some keep the parameters that they start at
  workers.check_outer(outer, center)
  return center, outer_state


def outer_step(outer: Any, difference: Tree, moves: jax.Array, kept: Any) -> Any:
  """A `Center` after `c <- c + outer(D)`; unchanged if no worker participated."""
  # The mean difference is to the outer optimizer what a gradient is to any other.
  updates, outer_state = outer.update(difference, kept.outer_state, kept.center)
  new = optax.apply_updates(kept.center, updates), outer_state
  # If all are absent nothing moves, the outer counters neither.
  center, outer_state = _numerics.select(moves, new, (kept.center, kept.outer_state))
  return kept.replace(center=center, outer_state=outer_state)


def mean(workers: WorkerGroup, tree: Tree, weight: jax.Array) -> tuple[Tree, jax.Array]:
  """The weighted mean over the workers, as the center is laid out, and the sum of the weights."""
  sums, total = workers.weighted_sum(tree, weight)
  return divided(sums, total), total


def divided(sums: Tree, total: jax.Array) -> Tree:
  """Sums over their weights; zero where these are, and NaN where they have overflowed."""
  # An infinite sum of weights would make the mean a silent zero.
  total = jnp.where(jnp.isinf(total), jnp.nan, total)
  return jax.tree.map(lambda x: _numerics.divide(x, total), sums)


def as_given(c: jax.Array, x: jax.Array) -> jax.Array:
  """The center as a worker with parameters of the dtype of `x` was given it."""
  return c.astype(x.dtype).astype(c.dtype)


def differences(center: Tree, moved: Tree, params: Tree) -> Tree:
  """`center - moved` of one worker, the center as it was given."""
  return jax.tree.map(lambda c, y, x: as_given(c, x) - y, center, moved, params)


def in_center(x: Any) -> Any:
  """A parameter, or an abstract one, as the center holds it."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=_numerics.at_least_float32(x.dtype))
  x = x if hasattr(x, "dtype") else jnp.asarray(x)
  is_real = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(_numerics.at_least_float32(x.dtype)) if is_real else x


def copied(params: Tree) -> Tree:
  """Parameters as the center holds them, which share no buffer with them."""
  return copy_tree(jax.tree.map(in_center, params))


def join(params: Tree, shares: Tree) -> Tree:
  """The whole center from all workers' shares, stacked on leading axes, outside a step."""

  def whole(p, rows):
    num_axes = rows.ndim - len(p.shape)  # of workers; none where it was not divided
    if not num_axes:
      return rows
    rows = _axes.undivided(rows, num_axes)
    num_workers = math.prod(rows.shape[:num_axes])  # -1 is not known of an array without elements
    return _shares.whole(rows.reshape(num_workers, *rows.shape[num_axes:]), p.shape)

  return jax.tree.map(whole, params, shares)
