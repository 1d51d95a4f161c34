"""Eager updates: a worker's own pseudo-gradient counts at once, the others' a round later."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import exchange, states
from optax_wrappers.contrib._arrays import select


@states.dataclass
class EagerKept(states.State):
  """The state of `Eager`.

  Attributes:
    center: the parameters at which this worker begins the round.
    outer_state: the state of this worker's outer optimizer.
    counted: this worker's difference in the last round, divided by W.
    mean: the mean of all workers' differences in the last round.
  """

  center: Any
  outer_state: Any
  counted: Any
  mean: Any = states.field("shared")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Eager(exchange.Rule):
  """A rule: eager updates, in which an outer step waits for no other worker.

  At the end of round r, with D_i(r) = c_i - x_i for each of W workers and their mean D(r),

      c_i <- c_i + outer(mean D(r - 1) + (D_i(r) - D_i(r - 1)) / W);  x_i <- c_i

  so the mean of a round may arrive during the whole next round. Every worker has its own center and
  outer state: evaluate the mean of the workers. A worker with a NaN in
  the step of a synchronization goes to its center, and the mean is of the others.

  Attributes:
    outer: the outer optimizer of pseudo-gradients; `optax.sgd(0.4, momentum=0.9, nesterov=True)` at
      rounds of 30 steps in the paper.

  Raises:
    ValueError: for a `participation`, because the divisor W must be known in advance.
    NotImplementedError: for a `delay`: it already has a whole round.

  **Communication**: in a synchronization all parameters, in float32 or wider, as an all-reduce, and
  4 bytes. The algorithm allows it to overlap with the next round; inside a compiled step, XLA waits
  for it.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> rule = ow.contrib.Eager(optax.sgd(1.0))
    >>> tx = ow.exchange.periodic_exchange(
    ...   optax.sgd(1.0), "workers", rule, communication_period=1
    ... )
    >>> params = jnp.zeros(2)  # of two workers
    >>> state = ow.stack_workers(tx.init(params[0]), 2)
    >>> update = ow.map_workers(tx.update, "workers")
    >>> for grads in (jnp.array([2.0, 4.0]), jnp.zeros(2)):
    ...   updates, state = update(grads, state, params)
    ...   params = params + updates
    ...   print(params)
    [-1. -2.]
    [-3. -3.]

  Source: Kale et al., "Eager updates for overlapped communication and computation in DiLoCo" (arXiv
  2502.12996).
  """

  outer: Any

  def __post_init__(self):
    if not hasattr(self.outer, "update"):
      what = "must be an optax.GradientTransformation"
      raise TypeError(f"Eager: outer {what}, got {self.outer!r}.")

  def init(self, params, workers):
    center = workers.start(params)
    zeros = jax.tree.map(jnp.zeros_like, center)
    return EagerKept(
      center=center,
      outer_state=self.outer.init(workers.start(params)),  # some store these parameters
      counted=zeros,
      mean=jax.tree.map(jnp.copy, zeros),
    )

  def send(self, moved, params, kept, workers):
    if workers.is_weighed:
      raise ValueError("Eager: there is no participation, every worker takes part.")
    difference = workers.difference(kept.center, moved, params)
    zeros = jax.tree.map(jnp.zeros_like, difference)
    difference = select(workers.weight > 0, difference, zeros)
    # As parts, because their number changes with resize_workers.
    parts = jax.tree.map(lambda d: d / workers.size, difference)
    eager = jax.tree.map(lambda m, n, before: m + (n - before), kept.mean, parts, kept.counted)
    updates, outer_state = self.outer.update(eager, kept.outer_state, kept.center)
    center = optax.apply_updates(kept.center, updates)
    mean = workers.mean(difference)
    return EagerKept(center=center, outer_state=outer_state, counted=parts, mean=mean), ()

  def merge(self, moved, params, sent, kept, workers):
    return kept.center, kept

  def replaces(self, sent):
    return True
