"""The engine of all synchronizations, for your own rules, and synchronization by messages.

Workers in independent programs send each other messages over any transport
(`optax_wrappers.pods` has a directory and a bucket): `message` makes a worker's message, and
`absorb` applies all messages to the center.
"""

from collections.abc import Callable

import jax
import optax
from jax.typing import ArrayLike

from optax_wrappers._core._types import AxisName, Tree
from optax_wrappers._workers._center import Center, WorkerGroup
from optax_wrappers._workers._engine import exchanging
from optax_wrappers._workers._exchange_state import ExchangeState
from optax_wrappers._workers._fragments import AlongAxis, blocks, stripes
from optax_wrappers._workers._merge import Contribution
from optax_wrappers._workers._messages import (
  Message,
  absorb,
  adopt,
  merge,
  message,
  snapshot,
  take_back,
  template,
)
from optax_wrappers._workers._packets import from_bytes, to_bytes
from optax_wrappers._workers._rule import Rule

__all__ = [
  "AlongAxis",
  "Center",
  "Contribution",
  "Message",
  "Rule",
  "WorkerGroup",
  "absorb",
  "adopt",
  "blocks",
  "from_bytes",
  "merge",
  "message",
  "periodic_exchange",
  "snapshot",
  "stripes",
  "take_back",
  "template",
  "to_bytes",
]


def periodic_exchange(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  rule: Rule,
  *,
  communication_period: int | Callable[[jax.Array], ArrayLike] | None = 10,
  fragments: int | Tree = 1,
  delay: int = 0,
  shard_center: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Workers that take local steps with `inner` and synchronize by your rule once per round.

  Args:
    inner: the optimizer of each worker.
    axis_name: the axis or axes of the workers; None: one worker.
    rule: a frozen dataclass, registered with `jax.tree_util.register_dataclass`, that overrides
      methods of `Rule`, at least `send` and `merge`. A rule that does not read `workers.weight`
      synchronizes with all workers.
    communication_period: steps per round, or a function to them. This and the following arguments,
      and the extra args, are those of `local_steps`.
    fragments: sets of variables that are synchronized together.
    delay: steps between sending and arriving; needs `Rule.idle`.
    shard_center: whether each worker stores a share of the rule's `Center`.

  Returns:
    The wrapped optimizer, with an `ExchangeState`.

  Raises:
    TypeError: for a rule of another type.
    ValueError: for arguments out of range; in update, for a rule that does not return its whole
      state, or in another shape.

  **Communication**: what the rule sends, once per round.

  Examples:
    Each worker moves to the mean of its own parameters and those of the next worker:

    >>> import dataclasses, jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True)
    ... class WithTheNext(ow.exchange.Rule):
    ...   def send(self, moved, params, kept, workers):
    ...     pairs = [(i, (i - 1) % 3) for i in range(3)]
    ...     return kept, jax.lax.ppermute(moved, "workers", pairs)
    ...
    ...   def merge(self, moved, params, sent, kept, workers):
    ...     return jax.tree.map(lambda x, y: (x + y) / 2, moved, sent), kept
    >>> tx = ow.exchange.periodic_exchange(
    ...   optax.sgd(1.0), "workers", WithTheNext(), communication_period=1
    ... )
    >>> state = ow.stack_workers(tx.init(jnp.array(0.0)), 3)
    >>> update = ow.map_workers(tx.update, "workers")
    >>> print(update(jnp.array([0.0, -2.0, -6.0]), state, jnp.zeros(3))[0])
    [1. 4. 3.]
  """
  if not isinstance(rule, Rule):
    requirement = "an instance of a subclass of optax_wrappers.exchange.Rule"
    raise TypeError(f"periodic_exchange: rule must be {requirement}, got {rule!r}.")
  return exchanging(
    rule.name,
    inner,
    axis_name,
    rule,
    ExchangeState,
    communication_period=communication_period,
    fragments=fragments,
    delay=delay,
    shard_center=shard_center,
    exchanges=type(rule).__name__,
  )
