"""How devices exchange their blocks of equal matrices for whole matrices, and back.

Matrices of one kind (equal shape and sharding) are stacked and distributed over the devices: slot u
of K N goes to device u // K. One all-to-all turns a device's blocks of all matrices into K whole
matrices, and another one sends the results back. There is one exchange per kind, never a flat
buffer: on a TPU that takes four times as long.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers.sharded._layouts import AxisNames, varying


@dataclasses.dataclass(frozen=True)
class Kind:
  """Matrices of equal shape, dtype and sharding."""

  shape: tuple[int, ...]
  dtype: Any
  # Those that shard each dimension of a matrix.
  axes: tuple[AxisNames, ...]
  # Those over whose devices the matrices are distributed.
  over: AxisNames
  # Those that shard the stack, with their sizes.
  in_place: tuple[tuple[Any, int], ...] = ()

  @property
  def key(self) -> str:
    """Its name in a state and in a checkpoint."""
    axes = ("+".join(map(str, names)) or "-" for names in self.axes)
    # Slots of a stack that is itself sharded are in the order of its devices.
    places = (f"{name}{size}" for name, size in self.in_place)
    return "_".join([str(self.dtype), "x".join(map(str, self.shape)), *axes, *places])


class Transfer(NamedTuple):
  """How a device exchanges its blocks of the matrices of one kind, inside a `shard_map`.

  The devices over `cut` hold the parts of one matrix, those over `rest` are replicas.
  """

  axis_sizes: dict[Any, int]
  cut: AxisNames
  rest: AxisNames
  block: tuple[int, ...]
  shape: tuple[int, ...]
  # Of the axes over `cut` and the dimensions of a block, in a whole matrix.
  order: list[int]

  @classmethod
  def of(cls, kind: Kind) -> "Transfer":
    axis_sizes = {name: lax.axis_size(name) for name in kind.over}
    cut = tuple(name for name in kind.over if any(name in names for names in kind.axes))
    rest = tuple(name for name in kind.over if name not in cut)
    block: list[int] = []
    order: list[int] = []
    for d, names in enumerate(kind.axes):
      block.append(kind.shape[d] // math.prod(axis_sizes[name] for name in names))
      order += [*map(cut.index, names), len(cut) + d]
    return cls(axis_sizes, cut, rest, tuple(block), kind.shape, order)

  def sizes(self, names: Sequence[Any]) -> list[int]:
    return [self.axis_sizes[name] for name in names]

  def whole_matrices(self, x: jax.Array) -> jax.Array:
    """This device's matrices in parts, `[slots, num_parts, *block]`, from its `[G, *block]`.

    The digits of a slot are its coordinates on the mesh and a position on a device.
    """
    num_devices = math.prod(self.axis_sizes.values())
    num_slots = -(-len(x) // num_devices)
    missing = num_slots * num_devices - len(x)
    # Copies are harmless in unused slots; zeros might not be.
    if missing:
      x = jnp.concatenate([x] * (1 + -(-missing // len(x))))[: num_slots * num_devices]
    x = x.reshape(*self.axis_sizes.values(), num_slots, *self.block)
    for name in reversed(self.rest):
      d = list(self.axis_sizes).index(name)
      x = lax.dynamic_index_in_dim(x, lax.axis_index(name), d, keepdims=False)
    x = x.reshape(math.prod(self.sizes(self.cut)), num_slots, *self.block)
    return lax.all_to_all(x, self.cut, 0, 1) if self.cut else jnp.moveaxis(x, 0, 1)

  def blocks(self, x: jax.Array) -> jax.Array:
    """The inverse of `whole_matrices`, with the unused slots at the end."""
    x = lax.all_to_all(x, self.cut, 1, 0) if self.cut else jnp.moveaxis(x, 1, 0)
    x = _gathered(x, self.rest)
    names = [*self.rest, *self.cut]
    x = x.reshape(*self.sizes(names), *x.shape[-1 - len(self.block) :])
    x = x.transpose(*map(names.index, self.axis_sizes), *range(len(names), x.ndim))
    return x.reshape(math.prod(x.shape[: 1 + len(names)]), *self.block)

  def join(self, parts: jax.Array) -> jax.Array:
    """A whole matrix from its parts."""
    parts = parts.reshape(*self.sizes(self.cut), *self.block)
    return parts.transpose(self.order).reshape(self.shape)

  def split(self, whole: jax.Array) -> jax.Array:
    """The inverse of `join`."""
    sizes = [*self.sizes(self.cut), *self.block]
    x = whole.reshape([sizes[d] for d in self.order])
    x = x.transpose(np.argsort(self.order))
    return x.reshape(math.prod(self.sizes(self.cut)), *self.block)


def _gathered(x, names):
  """The arrays of all devices, concatenated, and typed as equal on all of them."""
  is_manual = set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)
  # Under vmap JAX gathers over one axis at a time.
  for over in [names] if is_manual else [(name,) for name in reversed(names)]:
    to = "invarying" if varying(x) & set(over) else "varying"
    x = lax.all_gather(x, over, tiled=True, to=to) if over else x
  return x
