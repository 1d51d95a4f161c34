"""The schedule of exchanges: a clock that counts the steps of a round.

Every decision depends on counters that are equal on all workers. If it depended on anything that
differs between workers (the loss, the participation, whether the gradient is finite), one worker
would wait in an exchange forever for the others.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Turn(NamedTuple):
  """The position in a round after a step.

  Attributes:
    since: steps of the round so far, including this one, from 1 to `length`.
    length: steps of the round.
  """

  since: jax.Array
  length: Any


@dataclasses.dataclass(frozen=True)
class Clock:
  """Counts the steps of rounds, each of a length of its own, in fields of a state.

  Attributes:
    communication_period: the steps of a round, or a function to them from the step, an int32
      scalar, at which the round begins; None: exchanges come where the caller says.
    shortest: no round is shorter.
  """

  wrapper: str
  communication_period: int | Callable[[jax.Array], Any] | None
  shortest: int = 1

  @property
  def is_callers(self) -> bool:
    """Whether only the caller decides about exchanges."""
    return self.communication_period is None

  @property
  def period(self) -> int | None:
    """The number of steps in every round; None if rounds differ."""
    return None if callable(self.communication_period) else self.communication_period

  def start(self) -> dict[str, jax.Array]:
    """The initial fields."""
    return {"step": jnp.zeros((), jnp.int32), "since": jnp.zeros((), jnp.int32)}

  def advance(self, state: Any) -> tuple[dict[str, jax.Array], Turn]:
    """The fields after one more step, and the position of that step in the round."""
    step = _numerics.saturating_add(state.step, jnp.ones((), jnp.int32))
    # From the step at which the round began.
    length = self._length(state.step - state.since)
    since = jnp.minimum(state.since + 1, length)
    # A round that was longer when the state was saved ends at once.
    return {"step": step, "since": jnp.where(since == length, 0, since)}, Turn(since, length)

  def _length(self, begin):
    if self.period is not None:
      return self.period
    if self.is_callers:
      return jnp.iinfo(jnp.int32).max
    return jnp.maximum(self.shortest, self.communication_period(begin))

  def __post_init__(self) -> None:
    # Raises for a period that is not a number of steps, as far as that is known before a step.
    if self.period is not None:
      _checks.integer(self.wrapper, "communication_period", self.period, minimum=1)
      return
    if self.is_callers:
      return
    first = self.communication_period(jnp.zeros((), jnp.int32))  # type: ignore[misc,operator]
    what = f"{self.wrapper}: communication_period must return"
    if np.shape(first) or not jnp.issubdtype(jnp.result_type(first), jnp.integer):
      mend = "Round it: jnp.round(...).astype(jnp.int32)."
      raise TypeError(f"{what} an integer scalar, got {first!r}. {mend}")
    if not isinstance(first, jax.core.Tracer) and first < 1:
      raise ValueError(f"{what} at least 1; got {first} for step 0.")
