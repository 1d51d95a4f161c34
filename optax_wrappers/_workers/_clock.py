"""The schedule of exchanges: a clock that counts the steps of a round.

Every decision depends on counters that are equal on all workers. If it depended on anything that
differs between workers (the loss, the participation, whether the gradient is finite), one worker
would wait in an exchange forever for the others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_wrappers._core import _checks, _numerics


def check_delay(wrapper: str, delay: Any, period: Any) -> int:
  """Returns the steps between what is sent and what arrives, at most a round."""
  delay = _checks.integer(wrapper, "delay", delay, minimum=0)
  if isinstance(period, int) and delay > period:
    what = f"{wrapper}: delay must be at most communication_period, {period} steps"
    raise ValueError(f"{what}; got {delay}.")
  return delay


@dataclasses.dataclass(frozen=True)
class Clock:
  """Counts the steps of rounds, each of a length of its own, in fields of a state.

  Attributes:
    communication_period: the steps of a round, or a function to them from the step, an int32
      scalar, at which the round begins; None: exchanges come where the caller says.
    delay: the steps between what is sent and what arrives; no round is shorter.
    undoes: whether what arrives undoes these steps, so that a round must have one more.
  """

  wrapper: str
  communication_period: int | Callable[[jax.Array], Any] | None
  delay: int
  undoes: bool

  @property
  def period(self) -> int | None:
    """The number of steps in every round; None if rounds differ."""
    return None if callable(self.communication_period) else self.communication_period

  def start(self) -> dict[str, jax.Array]:
    """The initial fields."""
    return {"step": jnp.zeros((), jnp.int32), "since": jnp.zeros((), jnp.int32)}

  def advance(self, state: Any) -> tuple[dict[str, jax.Array], tuple[jax.Array, Any]]:
    """The fields after one more step; of its round, the steps so far, with this one, and all."""
    step = _numerics.saturating_add(state.step, jnp.ones((), jnp.int32))
    # From the step at which the round began.
    length = self._length(state.step - state.since)
    since = jnp.minimum(state.since + 1, length)
    # A round that was longer when the state was saved ends at once.
    return {"step": step, "since": jnp.where(since == length, 0, since)}, (since, length)

  def _length(self, begin):
    if callable(self.communication_period):
      shortest = max(1, self.delay + self.undoes)
      return jnp.maximum(shortest, self.communication_period(begin))
    return jnp.iinfo(jnp.int32).max if self.period is None else self.period

  def __post_init__(self) -> None:
    # Raises for a period that is not a number of steps, as far as that is known before a step.
    if callable(self.communication_period):
      self._check_first()
    elif self.period is not None:
      _checks.integer(self.wrapper, "communication_period", self.period, minimum=1)
      if self.undoes and self.delay == self.period:
        steps = f"communication_period, {self.delay} steps, with pull=1.0"
        what = f"{self.wrapper}: delay must be below {steps}, which would undo all steps"
        raise ValueError(f"{what}. Pass pull=0.5, or a shorter delay.")

  def _check_first(self):
    first = self.communication_period(jnp.zeros((), jnp.int32))
    what = f"{self.wrapper}: communication_period must return"
    if np.shape(first) or not jnp.issubdtype(jnp.result_type(first), jnp.integer):
      mend = "Round it: jnp.round(...).astype(jnp.int32)."
      raise TypeError(f"{what} an integer scalar, got {first!r}. {mend}")
    if not isinstance(first, jax.core.Tracer) and first < 1:
      raise ValueError(f"{what} at least 1; got {first} for step 0.")
