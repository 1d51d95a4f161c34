"""Simulates asynchronous local SGD: each worker moves to the center at the end of its own round."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_wrappers._core import _checks, _numerics, _states
from optax_wrappers._core._types import STATIC, Tree
from optax_wrappers._workers import _center
from optax_wrappers._workers._engine import Rule
from optax_wrappers.staleness import Policy


@_states.dataclass
class AsynchronousKept(_center.Center):
  """The state of `Asynchronous`: a `Center`, and fields of each worker.

  Attributes:
    start: the parameters at which it began its round, same structure as params.
    exchanges: the number of exchanges since then; int32 scalar.
    age: the number of those that moved the center; int32 scalar.
  """

  start: Tree = None
  exchanges: Any = None
  age: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asynchronous(Rule):
  """A rule: simulated asynchronous local SGD with rounds of unequal duration.

  Worker i arrives in every `durations[i]`-th synchronization with `D_i = s_i - x_i`, where s_i is
  its starting point. With A the set of workers that arrive, and age_i the number of times that the
  center has moved since i started,

      c <- c + outer(mean over A of staleness(age_i) D_i);  x_i, s_i <- c for i in A

  and the others continue. The mean over A counts as one pseudo-gradient. If all durations are 1 and
  at least one worker participates, the results are those of `diloco`. Workers run in lockstep: a
  worker that is slow, not only late, skips steps by
  `optax.conditionally_mask(inner, lambda step: step % durations[i] == 0)`, with i its index.

  Attributes:
    outer: the outer optimizer of pseudo-gradients; `delayed_nesterov` if they arrive one at a time.
    durations: of each worker's round, in synchronizations: a tuple of ints of at least 1.
    staleness: from an age, int32, to a factor of the pseudo-gradient, a scalar, such as the
      policies of `optax_wrappers.staleness`; None: 1.

  Raises:
    TypeError, ValueError: for other durations or another staleness; in update, for another number
      of workers than durations.
    NotImplementedError: for a `delay`, because durations decide when a worker arrives.

  `participation` is the weight in the mean over A. A worker that arrives with participation 0, or
  with a NaN of that step, does not count but moves to the center, even if no worker counts.

  **Communication**: in a synchronization all parameters, in float32 or wider, as an all-reduce,
  and 4 bytes. Workers that do not arrive send zeros: it is a simulation.

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
      what = f"{rule}: durations must be a tuple of ints, one for each worker"
      raise TypeError(f"{what}; got {self.durations!r}.")
    ints = tuple(_checks.integer(rule, "durations", x, minimum=1) for x in self.durations)
    object.__setattr__(self, "durations", ints)
    if self.staleness is not None:
      _check_staleness(rule, self.staleness)

  def init(self, params, workers):
    center, outer_state = _center.start_outer(workers, self.outer, params)
    start = _center.copied(params)
    exchanges, age = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return AsynchronousKept(
      center=center, outer_state=outer_state, start=start, exchanges=exchanges, age=age
    )

  def send(self, moved, params, kept, workers):
    if len(self.durations) != workers.size:
      what = f"Asynchronous: durations must have one for each of {workers.size} workers"
      raise ValueError(f"{what}, got {self.durations}.")
    duration = jnp.asarray(self.durations, jnp.int32)[workers.index]
    exchanges = _numerics.saturating_add(kept.exchanges, jnp.int32(1))
    arrives = exchanges >= duration
    weight = jnp.where(arrives, workers.weight, 0)
    own = workers.difference(kept.start, moved, params)
    if self.staleness is not None:
      dtype = _numerics.weight_dtype(jax.tree.leaves(own))
      own = _numerics.scale_tree(own, jnp.asarray(self.staleness(kept.age)).astype(dtype))
    sums, total = workers.weighted_sum(own, weight)
    difference, moves = _center.divided(sums, total), total > 0
    age = _numerics.saturating_add(kept.age, moves.astype(jnp.int32))
    kept = _center.outer_step(self.outer, difference, moves, kept)
    exchanges, age = (jnp.where(arrives, 0, count) for count in (exchanges, age))
    return kept.replace(exchanges=exchanges, age=age), arrives

  def merge(self, moved, params, sent, kept, workers):
    center = workers.whole(kept.center, params)
    ends, start = _numerics.select(sent, (center, center), (moved, kept.start))
    return ends, kept.replace(start=start)

  def replaces(self, sent):
    return sent


def _check_staleness(rule, staleness):
  """Raises for anything but a function from an age to a scalar."""
  what = f"{rule}: staleness must be a function of an age, such as staleness.inverse()"
  try:
    found = jax.eval_shape(staleness, jax.ShapeDtypeStruct((), jnp.int32))
  except Exception as error:
    raise TypeError(f"{what}, and {staleness!r} failed with one.") from error
  if getattr(found, "shape", None) != () or jnp.issubdtype(found.dtype, jnp.complexfloating):
    raise TypeError(f"{what}, that returns a real scalar; got {found}.")
