"""Workers whose rounds last unequally long, each of whom goes to the center after its own."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _checks, _numerics
from optax_wrappers._core._state import copy_tree, held, state
from optax_wrappers._core._types import STATIC, Tree
from optax_wrappers._workers import _center
from optax_wrappers._workers._engine import Rule
from optax_wrappers.staleness import Policy


@state
class AsynchronousKept(_center.Center):
  """What `Asynchronous` keeps: a `Center`, and what follows.

  Attributes:
    turn: exchanges so far, whose place in all workers' rounds matters; int32 scalar.
    moves: how often the center has moved; int32 scalar.
    start: where this worker began its round, same structure as params.
    begun: `moves` at that time; int32 scalar.
  """

  turn: Any = held("lockstep", default=None)
  moves: Any = held("shared", default=None)
  start: Tree = None
  begun: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asynchronous(Rule):
  """A rule: asynchronous local SGD, simulated, of workers whose rounds last unequally long.

  Worker i arrives in every `durations[i]`-th exchange, with `D_i = s_i - x_i`, s_i where it began.
  With A those who arrive now and age_i the moves of the center since i began,

      c <- c + outer(mean over A of staleness(age_i) D_i);  x_i, s_i <- c for i in A

  and all others go on. Those of one exchange count as one difference. If all durations are 1 this
  is `diloco`. All workers take their steps in step: one that is slow, and not only late, skips some
  by `optax.conditionally_mask(inner, lambda step: step % durations[i] == 0)`, with i its index.

  Attributes:
    outer: the outer optimizer, which descends a difference; `delayed_nesterov` for differences that
      arrive one at a time.
    durations: of each worker's round, in exchanges, ints of at least 1.
    staleness: from an age, int32, to what a difference is multiplied by, as the policies of
      `optax_wrappers.staleness`; None: 1.

  Raises:
    TypeError, ValueError: for durations that are no such ints; in update, for another number of
      workers than durations.
    NotImplementedError: for a `delay`: a duration says when a difference arrives.

  A weight of `participation` is that in the mean over A; with 0, or a NaN, a worker goes to the
  center and is not counted.

  **Communication**: in an exchange all parameters, in float32 or wider, as an all-reduce, and 4
  bytes; of those who do not arrive zeros. It is a simulation.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> rule = ow.exchange.Asynchronous(optax.sgd(1.0), durations=(1, 2))
    >>> tx = ow.exchange.periodic_exchange(
    ...   optax.sgd(1.0), "workers", rule, communication_period=1
    ... )
    >>> params = jnp.zeros(2)  # of two workers
    >>> state = ow.stack_workers(tx.init(params[0]), 2)
    >>> update = ow.map_workers(tx.update, "workers")
    >>> for grads in (jnp.array([-1.0, -4.0]), jnp.array([-1.0, -4.0])):
    ...   updates, state = update(grads, state, params)
    ...   params = params + updates
    ...   print(params)
    [1. 4.]
    [5.5 5.5]

  Source: Liu et al., "Asynchronous local-SGD training for language modeling" (arXiv 2401.09135).
  """

  outer: Any = dataclasses.field(metadata=STATIC)
  durations: Sequence[int] = dataclasses.field(metadata=STATIC)
  staleness: Policy | None = dataclasses.field(default=None, metadata=STATIC)

  def __post_init__(self):
    rule = "Asynchronous"
    _checks.optimizer(rule, self.outer, "outer")
    if not isinstance(self.durations, Sequence) or not self.durations:
      what = f"{rule}: durations must be ints, one of each worker"
      raise TypeError(f"{what}; got {self.durations!r}.")
    ints = tuple(_checks.integer(rule, "durations", x, minimum=1) for x in self.durations)
    object.__setattr__(self, "durations", ints)
    if self.staleness is not None and not callable(self.staleness):
      what = f"{rule}: staleness must be a function of an age"
      raise TypeError(f"{what}, such as staleness.inverse(); got {self.staleness!r}.")

  def init(self, params, workers):
    center = workers.start(params)
    outer_state = copy_tree(self.outer.init(center))
    workers.check_outer(self.outer, center)
    zero = jnp.zeros((), jnp.int32)
    start = _center.copied(params)
    return AsynchronousKept(
      center=center, outer_state=outer_state, turn=zero, moves=zero, start=start, begun=zero
    )

  def send(self, moved, params, kept, workers):
    num_workers = _axes.axis_size(workers.names)
    if len(self.durations) != num_workers:
      what = f"Asynchronous: durations must have one for each of {num_workers} workers"
      raise ValueError(f"{what}, got {self.durations}.")
    duration = jnp.asarray(self.durations, jnp.int32)[_axes.axis_index(workers.names)]
    turn = _numerics.next_in_turn(kept.turn, math.lcm(*self.durations))
    arrives = turn % duration == 0
    weight = jnp.where(arrives, workers.weight, 0)
    own = _center.differences(kept.start, moved, params)
    if self.staleness is not None:
      factor = jnp.asarray(self.staleness(kept.moves - kept.begun), jnp.float32)
      own = _numerics.scale_tree(own, factor)
    sums, total = workers.weighted_sum(own, weight)
    difference, moves = _center.divided(sums, total), total > 0
    updates, outer_state = self.outer.update(difference, kept.outer_state, kept.center)
    new = optax.apply_updates(kept.center, updates), outer_state
    center, outer_state = _numerics.select(moves, new, (kept.center, kept.outer_state))
    kept = kept.replace(
      center=center,
      outer_state=outer_state,
      turn=turn,
      moves=_numerics.saturating_add(kept.moves, moves.astype(jnp.int32)),
    )
    return kept, arrives & moves

  def merge(self, moved, params, sent, kept, workers):
    center = workers.gather(kept.center, params)
    ends, start = _numerics.select(sent, (center, center), (moved, kept.start))
    return ends, kept.replace(start=start, begun=jnp.where(sent, kept.moves, kept.begun))
