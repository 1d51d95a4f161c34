"""Workers of other programs as a group: their sum is that of their messages."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_wrappers._core import _numerics
from optax_wrappers._core._types import STATIC, Tree
from optax_wrappers._workers import _center, _participation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Message:
  """The message of one worker for one fragment in one round.

  Attributes:
    weight: of the worker in the mean; real scalar.
    base: a fingerprint of the center and outer state of its start; uint32 `[2]`.
    parts: the pseudo-gradient, an array for each variable, or its code, uint8 `[bytes]`.
    sender: the name of the worker.
    fragment: the number of the fragment.
    age: the synchronizations since it was made.
  """

  weight: jax.Array
  base: jax.Array
  parts: tuple[jax.Array, ...]
  sender: str = dataclasses.field(metadata=STATIC)
  fragment: int = dataclasses.field(metadata=STATIC)
  age: int = dataclasses.field(default=0, metadata=STATIC)


@dataclasses.dataclass(frozen=True)
class Mail(_center.WorkerGroup):
  """Workers of other programs, whose sum is that of their messages, one at a time."""

  messages: tuple[Message, ...]  # of all workers, in the order of the sum
  decode: Callable[[Message], Tree]  # to its difference
  staleness: Callable[[jax.Array], ArrayLike] | None  # as in `absorb`

  def sum_of_differences(self, center, moved, params, weight):
    sums = jax.tree.map(jnp.zeros_like, center)
    total = jnp.zeros((), _numerics.weight_dtype(jax.tree.leaves(center)))
    for message in self.messages:
      weight = jnp.asarray(message.weight)
      if self.staleness is not None:
        weight = weight * jnp.asarray(self.staleness(jnp.int32(message.age))).astype(weight.dtype)
      difference = self.decode(message)
      weight = jnp.where(_participation.is_finite(difference, ()), weight, 0)
      sums = jax.tree.map(jnp.add, sums, _numerics.scale_tree(difference, weight))
      total = total + weight
    # A sum that has overflowed moves nothing.
    return sums, jnp.where(_participation.is_finite(sums, ()), total, 0)
