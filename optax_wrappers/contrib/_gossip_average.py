"""Gossip: workers average with a neighbor or two, without a center."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_wrappers import exchange
from optax_wrappers.contrib._arrays import select, wide

Order: TypeAlias = Literal["adapt_first", "combine_first"]
Topology: TypeAlias = Literal["exponential", "pairs", "ring"]


def gossip_average(
  inner: optax.GradientTransformation,
  axis_name: Hashable | None,
  *,
  topology: Topology | Sequence[ArrayLike] = "exponential",
  communication_period: int | Callable[[jax.Array], ArrayLike] = 1,
  order: Order = "adapt_first",
) -> optax.GradientTransformationExtraArgs:
  """Decentralized SGD: workers take local steps and average with a neighbor or two.

  Each of W workers has its own parameters `x_i` and inner state. In round t, with the matrix `W` of
  that round, worker i moves to

      adapt_first:    x_i <- sum_j W_ij (x_j + u_j)      u_i = inner(g_i)
      combine_first:  x_i <- sum_j W_ij x_j + u_i

  There is no center. The columns of `W` sum to 1, so the mean over all workers moves by the mean of
  their updates. Evaluate that mean, `jax.lax.pmean(params, axis_name)`.

  Args:
    inner: the optimizer of each worker.
    axis_name: the axis of the workers, one; None: one worker.
    topology: who averages with whom. "exponential": in round t, half of itself and half of worker
      `i - 2^(t mod ceil(log2 W))`; if W is a power of 2, log2 W rounds without a step in between
      give the exact mean. "pairs": with worker `i xor 2^(t mod log2 W)`, both ways; W must be a
      power of 2. "ring": with both neighbors, a third each. Or a sequence of W x W matrices of
      real numbers at least 0 whose rows and columns sum to 1, used in turn.
    communication_period: steps per round, at least 1, or a function to it from the step at which
      a round begins, an int32 scalar.
    order: "adapt_first": workers average after their steps. "combine_first": before, so that
      communication need not wait for the gradient.

  Returns:
    The wrapped optimizer, with an `ExchangeState`, whose `exchanges` determine the next neighbors.
    update needs params.

  Raises:
    ValueError: for arguments out of range; in update, for an unbound axis, missing params, params
      that are typed as equal, and a `topology` that does not fit the number of workers.

  **Extra args**: `exchange`, see `local_steps`. `participation`: with 0, or with a NaN or an
  infinity in its variables, this worker stays, and its neighbors use their own variables in its
  place; any number above 0 is 1. Without `participation`, a NaN reaches all. The mean of the
  participating workers is kept on a symmetric graph ("ring", "pairs"), not on "exponential". All
  others reach `inner`.

  **Communication**: every parameter once per round, in its own dtype, to one neighbor; "ring"
  twice. A matrix is an all-gather. With `participation` one number more.

  Examples:
    Two rounds make the mean of four workers:

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.contrib.gossip_average(optax.sgd(0.1), "workers")
    >>> params, still = jnp.array([0.0, 2.0, 4.0, 10.0]), jnp.zeros(4)
    >>> state = ow.stack_workers(tx.init(jnp.array(0.0)), 4)
    >>> update = jax.jit(ow.map_workers(tx.update, "workers"))
    >>> for _ in range(2):
    ...   updates, state = update(still, state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   print(params)
    [5. 1. 3. 7.]
    [4. 4. 4. 4.]

  Source: Lian et al. 2017 (arXiv 1705.09056), D-PSGD, is "combine_first"; Assran et al. 2019 (arXiv
  1811.10792), whose one-peer exponential graph needs no push-sum weights, because its matrices are
  doubly stochastic.
  """
  if isinstance(axis_name, tuple | list) and len(axis_name) != 1:
    raise ValueError(f"gossip_average: axis_name must be one axis, got {axis_name!r}.")
  if order not in get_args(Order):
    raise ValueError(f"gossip_average: order must be one of {get_args(Order)}, got {order!r}.")
  rule = _Gossip(_checked_topology(topology), order)
  return exchange.periodic_exchange(
    inner, axis_name, rule, communication_period=communication_period
  )


def consensus_distance(params: Any, axis_name: Hashable | Sequence[Hashable] | None) -> jax.Array:
  """How far workers are from their mean: `sqrt(mean_i ||x_i - mean_j x_j||^2)`.

  Args:
    params: this worker's parameters, or any other tree of which each worker has its own.
    axis_name: the axis or axes of the workers, bound here, else a ValueError.

  Returns:
    A float32 scalar, or float64 with such a leaf; equal on all workers.

  **Communication**: every parameter once, as an all-reduce, and a scalar, so do not call it in
  every step.
  """
  names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
  names = tuple(name for name in names if name is not None)
  leaves = [jnp.asarray(x) for x in jax.tree.leaves(params)]
  leaves = [wide(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
  try:
    means = lax.pmean(leaves, names)
  except NameError as error:
    raise ValueError(f"consensus_distance: axis_name {names} is not bound here.") from error
  squares = [jnp.square(jnp.abs(x - mean)).sum() for x, mean in zip(leaves, means)]
  is_double = any(square.dtype == jnp.float64 for square in squares)
  total = jnp.zeros((), jnp.float64 if is_double else jnp.float32)
  for square in squares:
    total = total + square.astype(total.dtype)
  return jnp.sqrt(lax.pmean(total, names))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Gossip(exchange.Rule):
  """`topology` is the name of a graph, or the matrix of each round."""

  name = "gossip_average"

  topology: Any
  order: Order

  def send(self, moved, params, kept, workers):
    mine = params  # x_j, from before the step
    if self.order == "adapt_first":
      # `moved` is already rounded to the parameters' dtype, so this cast loses nothing.
      mine = jax.tree.map(lambda y, x: y.astype(x.dtype), moved, params)
    takes_part = workers.weight > 0 if workers.is_weighed else None
    mixed = mix(mine, takes_part, _rounds(self.topology, workers.size), workers)
    return kept, jax.tree.map(lambda m, y: m.astype(y.dtype), mixed, moved)

  def merge(self, moved, params, sent, kept, workers):
    if self.order == "adapt_first":
      return sent, kept
    ends = jax.tree.map(lambda x, y, mixed: mixed + (y - x.astype(y.dtype)), params, moved, sent)
    return ends, kept


class Hops(NamedTuple):
  """One round of a named graph: `weight` times the sum of a worker and its neighbors.

  Attributes:
    weight: equal for all.
    sources: permutations. Worker i receives from `source[i]` of each.
  """

  weight: float
  sources: tuple[np.ndarray, ...]


def mix(
  tree: Any, takes_part: jax.Array | None, rounds: Sequence[Any], workers: exchange.WorkerGroup
) -> Any:
  """This worker's mix of all workers' trees in this round, in float32 or wider.

  A worker that does not take part keeps its own, and its neighbors use theirs in its place.
  `rounds` holds `Hops` or matrices; `takes_part` is None if all do.
  """
  branches = [functools.partial(_mix, mixing=mixing, workers=workers) for mixing in rounds]
  place = workers.round % len(rounds)
  if isinstance(place, jax.core.Tracer) and len(rounds) > 1:
    mixed = lax.switch(place, branches, tree, takes_part)
  else:  # outside jit, lax.switch would compile all of them
    mixed = branches[0 if len(rounds) == 1 else int(place)](tree, takes_part)
  if takes_part is None:
    return mixed
  return select(takes_part, mixed, jax.tree.map(wide, tree))


def _mix(tree, takes_part, mixing, workers):
  if not isinstance(mixing, Hops):
    return _row_of(mixing, tree, takes_part, workers)
  # W_ii x_i.
  mixed = jax.tree.map(lambda x: mixing.weight * wide(x), tree)
  # In the dtype of the first variable, with which it is sent.
  flag = None if takes_part is None else takes_part.astype(jax.tree.leaves(tree)[0].dtype)
  for source in mixing.sources:
    pairs = [(int(j), i) for i, j in enumerate(source)]
    neighbor, is_here = workers.permute((tree, flag), pairs)  # x_j
    if is_here is not None:
      neighbor = select(is_here != 0, neighbor, tree)
    mixed = jax.tree.map(lambda sum_, x: sum_ + mixing.weight * wide(x), mixed, neighbor)
  return mixed


def _row_of(matrix, tree, takes_part, workers):
  row = jnp.asarray(matrix, jnp.float32)[workers.index]  # W_i
  everyone, present = workers.all_gather((tree, takes_part))

  def mixed(xs, x):
    if present is not None:
      xs = jnp.where(present.reshape(-1, *[1] * x.ndim), xs, x)
    xs = wide(xs)
    return jnp.tensordot(row.astype(xs.dtype), xs, 1, precision=lax.Precision.HIGHEST)

  return jax.tree.map(mixed, everyone, tree)


@functools.cache
def _named_mixings(topology, num_workers):
  """The rounds in one cycle of a named graph."""
  everyone = np.arange(num_workers)
  if num_workers == 1:
    return (Hops(1.0, ()),)
  if topology == "ring":
    if num_workers == 2:
      return (Hops(1 / 2, (1 - everyone,)),)
    return (Hops(1 / 3, tuple((everyone + k) % num_workers for k in (-1, 1))),)
  num_rounds = (num_workers - 1).bit_length()
  if topology == "exponential":
    return tuple(Hops(1 / 2, ((everyone - 2**t) % num_workers,)) for t in range(num_rounds))
  if num_workers & (num_workers - 1):
    raise ValueError(
      'gossip_average: topology="pairs" needs a number of workers that is a power of 2,'
      f' got {num_workers}. Use "exponential".'
    )
  return tuple(Hops(1 / 2, (everyone ^ 2**t,)) for t in range(num_rounds))


def _rounds(topology, num_workers):
  if isinstance(topology, str):
    return _named_mixings(topology, num_workers)
  for size in map(len, topology):
    if size != num_workers:
      raise ValueError(
        f"gossip_average: topology must hold matrices of the {num_workers} workers, got one of"
        f" {size} x {size}."
      )
  return topology


def _checked_topology(topology):
  if isinstance(topology, str):
    if topology not in get_args(Topology):
      choices = ", ".join(map(repr, get_args(Topology)))
      raise ValueError(f"gossip_average: topology must be one of {choices}; got {topology!r}.")
    return topology
  if not hasattr(topology, "__len__") or not len(topology):
    raise TypeError(
      f"gossip_average: topology must be one of {get_args(Topology)}, or a sequence of doubly"
      f" stochastic matrices; got {topology!r}."
    )
  return tuple(_checked_matrix(np.asarray(matrix, np.float64)) for matrix in topology)


def _checked_matrix(matrix):
  if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
    raise ValueError(
      "gossip_average: topology must hold matrices of workers x workers, got one of the shape"
      f" {list(matrix.shape)}. Put a single matrix into a list."
    )
  sums = np.stack([matrix.sum(0), matrix.sum(1)])
  if not (matrix >= 0).all() or not np.allclose(sums, 1, rtol=0, atol=1e-6):
    raise ValueError(
      "gossip_average: topology must hold matrices of numbers at least 0 whose columns and rows"
      f" add up to 1, got sums of {sums[0].tolist()} and {sums[1].tolist()}:\n{matrix}"
    )
  # Compared by value as a part of a program.
  return tuple(map(tuple, matrix.tolist()))
