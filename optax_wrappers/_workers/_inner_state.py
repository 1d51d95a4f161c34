"""What becomes of a worker's inner state when the worker goes to the center."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class InnerStatePolicy:
  """`name` is "reset" or "average"."""

  name: str

  def start(self) -> Arrived:
    """Nothing has arrived."""
    return Arrived(jnp.zeros((), bool), jnp.zeros((), jnp.float32))

  def after(self, before: Arrived, sent: Any) -> Arrived:
    """What was sent has arrived too."""
    return Arrived(before.goes | sent.goes, sent.weight.astype(jnp.float32))

  def apply(
    self, inner_state: Tree, ends: Tree, arrived: Arrived, inner: Any, names: AxisNames
  ) -> Tree:
    """The inner state of a worker that has gone to `ends`."""
    if self.name == "reset":
      return _numerics.select(arrived.goes, inner.init(ends), inner_state)
    leaves = jax.tree.leaves(inner_state)
    treedef: Any = jax.tree.structure(inner_state)
    own = [x for x in leaves if _numerics.is_inexact(x)]
    weight = jnp.where(_participation.is_finite(own, names), arrived.weight, 0)
    wide = [x.astype(_numerics.at_least_float32(x.dtype)) for x in own]
    means, total = _center.mean(_center.Whole(names), wide, weight)
    goes = arrived.goes & (total > 0)
    averaged = iter(jnp.where(goes, mean.astype(x.dtype), x) for x, mean in zip(own, means))
    return treedef.unflatten([next(averaged) if _numerics.is_inexact(x) else x for x in leaves])
