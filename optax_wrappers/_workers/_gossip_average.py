"""Gossip: workers average with a neighbor or two, without a center."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _axes, _checks, _collectives, _numerics, _states
from optax_wrappers._core._types import STATIC, AxisName, Tree
from optax_wrappers._workers import _participation
from optax_wrappers._workers._clock import Clock
from optax_wrappers._workers._engine import Rule, exchanging
from optax_wrappers._workers._exchange_state import ExchangeState

Order: TypeAlias = Literal["adapt_first", "combine_first"]
Topology: TypeAlias = Literal["exponential", "pairs", "ring"]


@_states.dataclass
class GossipState(ExchangeState):
  """State of `gossip_average`: an `ExchangeState`. Its `exchanges` determine the next neighbors."""


def gossip_average(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
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
    The wrapped optimizer, with a `GossipState`, which `stack_workers` lays out. update needs
    params.

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
    >>> tx = ow.gossip_average(optax.sgd(0.1), "workers")
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
  wrapper = "gossip_average"
  names = _axes.axis_names(axis_name)
  if len(names) > 1:
    raise ValueError(f"{wrapper}: axis_name must be one axis, got {names}.")
  _checks.choice(wrapper, "order", order, get_args(Order))
  if isinstance(topology, str):
    _checks.choice(wrapper, "topology", topology, get_args(Topology))
    rounds: Any = topology
  else:
    rounds = _mixings_of(wrapper, topology)
  return exchanging(
    wrapper,
    inner,
    axis_name,
    _Gossip(rounds, order),
    GossipState,
    clock=Clock(wrapper, communication_period),
  )


def consensus_distance(params: Tree, axis_name: AxisName) -> jax.Array:
  """How far workers are from their mean: `sqrt(mean_i ||x_i - mean_j x_j||^2)`.

  Args:
    params: this worker's parameters, or any other tree of which each worker has its own.
    axis_name: the axis or axes of the workers, bound here, else a ValueError.

  Returns:
    A float32 scalar, or float64 with such a leaf; equal on all workers.

  **Communication**: every parameter once, as an all-reduce, and a scalar, so do not call it in
  every step.
  """
  names = _axes.axis_names(axis_name)
  _axes.require_bound(names, "consensus_distance")
  leaves = [x for x in jax.tree.leaves(params) if _numerics.is_inexact(x)]
  leaves = [x.astype(_numerics.at_least_float32(x.dtype)) for x in map(jnp.asarray, leaves)]
  num_workers = _axes.axis_size(names)
  totals = _collectives.psum(leaves, names)
  deviations = [x - total / num_workers for x, total in zip(leaves, totals, strict=True)]
  square = _numerics.squared_length(deviations, _numerics.weight_dtype(leaves))
  return jnp.sqrt(_collectives.psum(square, names) / num_workers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Gossip(Rule):
  """`rounds` is a topology's name, or the mixing of each round."""

  rounds: Any = dataclasses.field(metadata=STATIC)
  order: str = dataclasses.field(metadata=STATIC)

  def send(self, moved, params, kept, workers):
    mixings = _mixings(self.rounds, workers.size)
    if self.order == "adapt_first":
      # `moved` is already rounded to the parameters' dtype, so this cast loses nothing.
      mine = jax.tree.map(lambda y, x: y.astype(x.dtype), moved, params)
    else:
      mine = params  # x_j, from before the step
    goes = _participation.goes(workers)
    number, own = workers.round % len(mixings), (mine, goes)
    mixed = mixed_by_round(mixings, number, own, workers, "gossip_average")
    if goes is not None:  # a worker that does not participate keeps its bits
      mixed = jax.tree.map(lambda m, x: jnp.where(goes, m, x.astype(m.dtype)), mixed, mine)
    mixed = jax.tree.map(lambda m, y: m.astype(y.dtype), mixed, moved)
    return kept, mixed

  def merge(self, moved, params, sent, kept, workers):
    if self.order == "adapt_first":
      return sent, kept  # the average becomes the worker's parameters
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


def mixed_by_round(mixings, number, tree, workers, wrapper):
  """This worker's mix in this round; `tree`: its variables, and whether it participates or None."""
  if len(mixings) == 1:
    return _mix(mixings[0], tree, workers)
  _axes.require_equal(number, wrapper, "the state's round", axes=frozenset(workers.names))
  branches = [functools.partial(_mix, mixing, workers=workers) for mixing in mixings]
  if not isinstance(number, jax.core.Tracer):
    return branches[int(number)](tree)  # outside jit, lax.switch would compile all of them
  abstract = jax.eval_shape(branches[0], tree)

  def aligned(branch):
    return lambda tree: _axes.vary_like(branch(tree), abstract)

  return jax.lax.switch(number, [aligned(branch) for branch in branches], tree)


def _mix(mixing, mine, workers):
  """This worker's mix of the workers' trees, in float32 or wider.

  A worker's own variables replace those of a neighbor that does not participate.
  """
  tree, goes = mine
  if not isinstance(mixing, Hops):
    return _row_of(mixing, tree, goes, workers)

  def part(x):
    return _numerics.times(mixing.weight, x.astype(_numerics.at_least_float32(x.dtype)))

  mixed = jax.tree.map(part, tree)  # W_ii x_i
  # In the dtype of the first variable, with which it is sent.
  flag = goes if goes is None else goes.astype(jax.tree.leaves(tree)[0].dtype)
  for source in mixing.sources:
    pairs = [(int(j), i) for i, j in enumerate(source)]
    found, is_here = workers.permute((tree, flag), pairs)  # x_j of a neighbor
    if is_here is not None:
      found = _numerics.select(is_here != 0, found, tree)
    mixed = jax.tree.map(lambda total, x: total + part(x), mixed, found)  # + W_ij x_j
  return mixed


def _row_of(matrix, tree, goes, workers):
  """The same with a matrix, from all workers' variables."""
  row = jnp.asarray(matrix, jnp.float32)[workers.index]  # W_i
  everyone, present = workers.all_gather((tree, goes))

  def mixed(xs, own):
    if present is not None:
      xs = jnp.where(present.reshape(-1, *[1] * own.ndim), xs, own)
    xs = xs.astype(_numerics.at_least_float32(xs.dtype))
    return jnp.tensordot(row.astype(xs.dtype), xs, 1, precision=jax.lax.Precision.HIGHEST)

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


def _mixings(rounds, num_workers):
  if isinstance(rounds, str):
    return _named_mixings(rounds, num_workers)
  for n in map(len, rounds):
    if n != num_workers:
      what = f"gossip_average: topology must hold matrices of the {num_workers} workers"
      raise ValueError(f"{what}, got one of {n} x {n}.")
  return rounds


def _mixings_of(wrapper, matrices):
  """The mixings of the user's matrices, checked."""
  if not isinstance(matrices, list | tuple | np.ndarray | jax.Array) or not len(matrices):
    named = ", ".join(map(repr, get_args(Topology)))
    what = (
      f"{wrapper}: topology must be one of {named}, or a sequence of doubly stochastic matrices"
    )
    raise TypeError(f"{what}; got {matrices!r}.")
  return tuple(_checked_matrix(wrapper, np.asarray(matrix, np.float64)) for matrix in matrices)


def _checked_matrix(wrapper, matrix):
  needs = f"{wrapper}: topology must hold matrices of"
  if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
    mend = "Put a single matrix into a list."
    raise ValueError(
      f"{needs} workers x workers, got one of the shape {list(matrix.shape)}. {mend}"
    )
  sums = np.stack([matrix.sum(0), matrix.sum(1)])
  if not (matrix >= 0).all() or not np.allclose(sums, 1, rtol=0, atol=1e-6):
    what = f"{needs} numbers at least 0 whose columns and rows add up to 1, got sums of"
    raise ValueError(f"{what} {sums[0].tolist()} and {sums[1].tolist()}:\n{matrix}")
  return tuple(map(tuple, matrix.tolist()))  # compared by value as a part of a program
