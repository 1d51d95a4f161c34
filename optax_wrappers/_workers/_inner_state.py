"""What becomes of a worker's inner state when the worker goes to the center."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_wrappers._core import _numerics
from optax_wrappers._core._types import AxisNames, Tree
from optax_wrappers._workers import _center, _participation


class Arrived(NamedTuple):
  """Of the exchanges that have arrived in a step.

  Attributes:
    goes: whether one of them has moved this worker; bool scalar.
    weight: what it counted in the last one; float32 scalar.
  """

  goes: jax.Array
  weight: jax.Array

  @classmethod
  def nothing(cls) -> "Arrived":
    return cls(jnp.zeros((), bool), jnp.zeros((), jnp.float32))

  def after(self, sent: Any) -> "Arrived":
    """When what was sent has arrived too."""
    return Arrived(self.goes | sent.goes, sent.weight.astype(jnp.float32))


def averaged(inner_state: Tree, arrived: Arrived, names: AxisNames) -> Tree:
  """The mean of the workers' inner states, of real and complex leaves."""
  leaves = jax.tree.leaves(inner_state)
  treedef: Any = jax.tree.structure(inner_state)
  own = [x for x in leaves if _numerics.is_inexact(x)]
  # The state of a worker that took part may hold a NaN, though its parameters do not.
  weight = jnp.where(_participation.is_finite(own, names), arrived.weight, 0)
  wide = [x.astype(_numerics.at_least_float32(x.dtype)) for x in own]
  means, total = _center.mean(_center.WorkerGroup(names), wide, weight)
  goes = arrived.goes & (total > 0)
  new = iter(jnp.where(goes, mean.astype(x.dtype), x) for x, mean in zip(own, means))
  return treedef.unflatten([next(new) if _numerics.is_inexact(x) else x for x in leaves])
