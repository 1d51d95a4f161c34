"""What a pod makes of the messages of all pods: their weighted sum, or the result of a reduction.

All pods must compute the same bits. A sum is one of arrays, in the order of the messages, and so is
a coordinatewise reduction. Others sum over the entries of an array, and are computed on the host,
where the layout of the center makes no difference.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from optax_wrappers._core import _numerics
from optax_wrappers._core._types import Tree
from optax_wrappers._shards import _rows
from optax_wrappers._workers import _center, _participation
from optax_wrappers.reductions import Reduction

# The axis of a reduction that is a transformation.
AXIS = "pods"


class Contribution(NamedTuple):
  """What a message has added to the center.

  Attributes:
    norm: of its difference from the center, L2.
    weight: of the difference in the mean or sum; with a `reduction` its coefficient in the result,
      by least squares.
  """

  norm: float
  weight: float


class Arrived(NamedTuple):
  """A message, decoded.

  Attributes:
    difference: of its sender from the center.
    weight: of the sender; 0 if the difference is not finite.
    reduction_state: of the sender.
  """

  difference: Tree
  weight: jax.Array
  reduction_state: Tree

  @classmethod
  def of(cls, difference: Tree, weight: jax.Array, reduction_state: Tree) -> "Arrived":
    weight = jnp.where(_participation.is_finite(difference, ()), weight, 0)
    return cls(difference, weight, reduction_state)


@dataclasses.dataclass(frozen=True)
class Merged(_center.WorkerGroup):
  """Workers of other programs, of whose differences the sum is known."""

  sums: Tree
  total: jax.Array  # of the weights; 0: nothing moves

  def sum_of_differences(self, center, moved, params, weight):
    return self.sums, self.total


def summed(
  arrived: Iterable[Arrived], center: Tree, found: list[Contribution] | None = None
) -> Merged:
  """The weighted sum, of one message at a time; what each adds is appended to `found`."""
  sums = jax.tree.map(jnp.zeros_like, center)
  total = jnp.zeros((), _numerics.weight_dtype(jax.tree.leaves(center)))
  for one in arrived:
    sums = jax.tree.map(jnp.add, sums, _numerics.scale_tree(one.difference, one.weight))
    total = total + one.weight
    if found is not None:
      weight = float(one.weight)
      found.append(Contribution(norm(one.difference) if weight else 0.0, weight))
  # A sum that has overflowed moves nothing.
  return Merged((), sums=sums, total=jnp.where(_participation.is_finite(sums, ()), total, 0))


def reduced(reduction: Any, arrived: list[Arrived], center: Tree) -> tuple[Merged, Tree]:
  """The result, as a sum of weight 0 if it moves nothing, and the states after it, `[n, ...]`."""
  rows = _stacked(arrived)

  def merged(result):
    # Such as a median, which may have rejected all. What has overflowed moves nothing.
    moves = _participation.is_finite(result, ()) & ~_participation.is_zero(result, ())
    return Merged((), sums=result, total=jnp.where(moves, rows.weight.max(), 0))

  if isinstance(reduction, Reduction):
    treedef: Any = jax.tree.structure(center)
    leaves = jax.tree.leaves(rows.difference)
    of_rows = _rows.OfRows(reduction, _rows.OverTowers(0))
    result = treedef.unflatten(of_rows.reduce(leaves, (), None, None, None))
    return merged(result), rows.reduction_state
  center = jax.tree.map(whole, center)
  weight = {} if has_votes(reduction, center, arrived[0].reduction_state) else rows.weight
  results, states = _each(reduction, center)(rows.difference, rows.reduction_state, weight)
  for x in jax.tree.leaves(results):
    if not bool(((x == x[:1]) | (jnp.isnan(x) & jnp.isnan(x[:1]))).all()):
      raise ValueError(
        "absorb: what reduction returns must be equal for all messages. End it with the reduction"
        f" over their axis: optax.chain(..., all_reduce({AXIS!r}))."
      )
  return merged(jax.tree.map(lambda x: x[0], results)), states


def shares(found: list[Contribution], total: jax.Array) -> list[Contribution]:
  """The same for the mean: weights divided by their sum."""
  return [x._replace(weight=x.weight / float(total) if total else 0.0) for x in found]


def coefficients(arrived: list[Arrived], result: Tree) -> list[Contribution]:
  """What each message has added to the result of a reduction."""
  result = _numerics.zeros_unless(_participation.is_finite(result, ()), result)
  rows = jax.tree.map(
    lambda x, y: jnp.concatenate([x, y[None]]), _stacked(arrived).difference, result
  )
  leaves = [_rows.pairs(x) for x in jax.tree.leaves(rows)]
  largest = _largest(leaves)
  scaled = [x / largest.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype) for x in leaves]
  gram = np.sum([np.asarray(_rows.products(_rows.Block(x, 1)), np.float64) for x in scaled], 0)
  # Of unit length: one that is very long must not look like the source of what others share.
  lengths = np.sqrt(np.diag(gram))
  norms, lengths = lengths * largest, np.where(lengths > 0, lengths, 1)
  cosines = gram / lengths / lengths[:, None]
  solved = np.linalg.pinv(cosines[:-1, :-1], rcond=1e-5, hermitian=True) @ cosines[:-1, -1]
  weights = solved * norms[-1] / np.where(norms > 0, norms, 1)[:-1]
  return [Contribution(float(n), float(w)) for n, w in zip(norms, weights)]


def norm(tree: Tree) -> float:
  """The L2 norm of all leaves."""
  leaves = [x[None] for x in jax.tree.leaves(tree)]
  (largest,) = _largest(leaves)
  squares = [jnp.sum(jnp.square(jnp.abs(x) / largest.astype(x.real.dtype))) for x in leaves]
  return float(largest * np.sqrt(sum(float(x) for x in squares)))


def _largest(leaves):
  """The largest entry of each row, 1 if all are 0; divided by it no square overflows."""
  columns = [jnp.abs(x).max(axis=tuple(range(1, x.ndim)), initial=0) for x in leaves]
  largest = np.max([np.asarray(x, np.float64) for x in columns], 0)
  return np.where(largest > 0, largest, 1)


def _stacked(arrived):
  """All messages, `[n, ...]`; zeros for one that does not count, as in a collective."""
  arrived = [
    x._replace(difference=_numerics.zeros_unless(x.weight > 0, x.difference)) for x in arrived
  ]
  return jax.tree.map(lambda *xs: jnp.stack(xs), *arrived)


def has_votes(reduction: Any, center: Tree, state: Tree) -> bool:
  """Whether each message has one vote, because the reduction takes no weights."""
  if reduction is None or isinstance(reduction, Reduction):
    return reduction is not None
  two = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((2, *jnp.shape(x)), _numerics.dtype_of(x)), (center, state)
  )
  weight = jax.ShapeDtypeStruct((2,), _numerics.weight_dtype(jax.tree.leaves(center)))
  each = _each(reduction, center)
  try:
    jax.eval_shape(each, *two, weight)
    return False
  except ValueError:
    pass
  try:
    jax.eval_shape(each, *two, {})
    return True
  except (NameError, ValueError) as error:
    what = f"messages need a reduction over the axis {AXIS!r}"
    raise ValueError(f"local_steps: {what}, such as all_reduce({AXIS!r}): {error}") from error


def _each(reduction, center):
  """The reduction for stacked messages; a weight of `{}` is none."""

  def update(difference, state, weight):
    extra_args = {} if isinstance(weight, dict) else {"weight": weight}
    return reduction.update(difference, state, center, **extra_args)

  return jax.vmap(update, axis_name=AXIS)


def whole(x: Any) -> np.ndarray:
  """An array on the host, also of one that is sharded over processes, all of which must ask."""
  if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
    x = multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x)


def host() -> jax.Device | None:
  """Where whole arrays are, if JAX has the platform here; else None, the default device."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return None
