"""Simulates asynchronous local SGD: each worker moves to the center at the end of its own round."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import exchange, states
from optax_wrappers.contrib._arrays import select


@states.dataclass
class AsynchronousKept(exchange.Center):
  """The state of `Asynchronous`: a `Center`, and fields of each worker.

  Attributes:
    start: the parameters at which it began its round, same structure as params.
    exchanges: the number of exchanges since then; int32 scalar.
    age: the number of those that moved the center; int32 scalar.
  """

  start: Any = None
  exchanges: Any = None
  age: Any = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Asynchronous(exchange.Rule):
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
    >>> rule = ow.contrib.Asynchronous(optax.sgd(1.0), durations=(1, 2))
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

  outer: Any
  durations: Sequence[int]
  staleness: Callable[[jax.Array], jax.Array] | None = None

  def __post_init__(self):
    if not hasattr(self.outer, "update"):
      what = "must be an optax.GradientTransformation"
      raise TypeError(f"Asynchronous: outer {what}, got {self.outer!r}.")
    durations = self.durations
    is_list = isinstance(durations, Sequence) and len(durations) > 0
    if not is_list or not all(isinstance(x, int) for x in durations):
      what = "must be a tuple of ints, one for each worker"
      raise TypeError(f"Asynchronous: durations {what}; got {durations!r}.")
    if min(durations) < 1:
      raise ValueError(f"Asynchronous: durations must be at least 1, got {durations}.")
    object.__setattr__(self, "durations", tuple(durations))  # hashable
    if self.staleness is not None:
      _check_staleness(self.staleness)

  def init(self, params, workers):
    center = workers.start(params)
    workers.check_outer(self.outer, center)
    return AsynchronousKept(
      center=center,
      outer_state=self.outer.init(workers.start(params)),  # some store these parameters
      start=workers.start(params),
      exchanges=jnp.zeros((), jnp.int32),
      age=jnp.zeros((), jnp.int32),
    )

  def send(self, moved, params, kept, workers):
    if len(self.durations) != workers.size:
      raise ValueError(
        f"Asynchronous: durations must have one for each of {workers.size} workers, got"
        f" {self.durations}."
      )
    exchanges = optax.safe_increment(kept.exchanges)
    arrives = exchanges >= jnp.asarray(self.durations, jnp.int32)[workers.index]
    difference = workers.difference(kept.start, moved, params)
    if self.staleness is not None:
      factor = jnp.asarray(self.staleness(kept.age))
      difference = jax.tree.map(lambda d: d * factor.astype(d.dtype), difference)
    weight = jnp.where(arrives, workers.weight, 0)
    sums, total = workers.weighted_sum(difference, weight)
    moves = total > 0
    divisor = jnp.where(moves, total, 1)
    mean = jax.tree.map(lambda s: s / divisor.astype(s.dtype), sums)
    updates, outer_state = self.outer.update(mean, kept.outer_state, kept.center)
    new = optax.apply_updates(kept.center, updates), outer_state
    center, outer_state = select(moves, new, (kept.center, kept.outer_state))
    age = jnp.where(moves, optax.safe_increment(kept.age), kept.age)
    return kept.replace(
      center=center,
      outer_state=outer_state,
      exchanges=jnp.where(arrives, 0, exchanges),
      age=jnp.where(arrives, 0, age),
    ), arrives

  def merge(self, moved, params, sent, kept, workers):
    center = workers.whole(kept.center, params)
    ends, start = select(sent, (center, center), (moved, kept.start))
    return ends, kept.replace(start=start)

  def replaces(self, sent):
    return sent


def _check_staleness(staleness):
  what = "Asynchronous: staleness must be a function of an age, such as staleness.inverse()"
  try:
    factor = jax.eval_shape(staleness, jax.ShapeDtypeStruct((), jnp.int32))
  except Exception as error:
    raise TypeError(f"{what}, and {staleness!r} failed with one.") from error
  if getattr(factor, "shape", None) != () or jnp.issubdtype(factor.dtype, jnp.complexfloating):
    raise TypeError(f"{what}, that returns a real scalar; got {factor}.")
