"""Mesh axes, and what shard_map's types say about a value.

An axis is *tracked* where shard_map checks its types, with `check_vma=True`; under `pmap` and
`vmap` none is. A value *varies* over a tracked axis if its type says that it may differ from shard
to shard. Otherwise all shards hold the same value.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_wrappers._core._types import AxisName, AxisNames, Tree


def axis_names(axis_name: AxisName) -> AxisNames:
  """A name, a sequence of names or None, as a tuple of names."""
  if axis_name is None:
    return ()
  names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
  if len(set(names)) != len(names):
    raise ValueError(f"axis_name must not name an axis twice, got {axis_name!r}.")
  return names


def require_bound(names: AxisNames, wrapper: str) -> None:
  """Raises unless every axis is bound here, and JAX has collectives over it."""
  for name in names:
    try:
      # The one question that raises where an axis is not bound, and needs no collective.
      is_tracked = bool(tracked((name,)))
    except NameError:
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is not bound here. Call update inside jax.shard_map,"
        " jax.pmap or jax.vmap with that axis, or pass axis_name=None under plain jax.jit."
      ) from None
    outer = jax.sharding.get_abstract_mesh().manual_axes
    if not is_tracked and name not in outer and tracked(outer):
      # jax 0.10: every collective over a vmap axis fails an assertion there.
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is a vmap axis inside a shard_map over {outer} with"
        " check_vma=True, where JAX has no collectives over it. Pass check_vma=False to it."
      )


def names_in(spec: PartitionSpec, dimensions: Iterable[int]) -> AxisNames:
  """The mesh axes that a PartitionSpec has for some dimensions of an array."""
  found = [spec[d] for d in dimensions if d < len(spec) and spec[d] is not None]
  return tuple(name for part in found for name in (part if isinstance(part, tuple) else (part,)))


def axis_size(names: AxisNames) -> int:
  """The number of shards over all of `names`."""
  return math.prod(map(lax.axis_size, names))


def axis_index(names: AxisNames) -> jax.Array:
  """This shard's index over `names`, the last name fastest; int32 scalar."""
  index = jnp.zeros((), jnp.int32)
  for name in names:
    index = index * lax.axis_size(name) + lax.axis_index(name)
  return index


def varying(x: Any) -> frozenset[Hashable]:
  """The tracked axes over which `x`, an array or abstract, may differ from shard to shard."""
  aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
  manual = aval.manual_axis_type  # None, in jax 0.10.0, of abstract values outside shard_map
  return frozenset() if manual is None else frozenset(manual.varying)


def unreduced(x: Any) -> frozenset[Hashable]:
  """The tracked axes over which `x` is a sum that is still to be taken."""
  aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
  manual = aval.manual_axis_type
  return frozenset() if manual is None else frozenset(manual.unreduced)


def tracked(names: AxisNames) -> AxisNames:
  """Those of `names` whose values shard_map types."""
  # A shard's own index differs from shard to shard by definition. If its type does not say so, no
  # type does: check_vma=False, pmap, vmap.
  return tuple(name for name in names if name in varying(lax.axis_index(name)))


def is_on_one_device(x: jax.Array) -> bool:
  """Whether XLA has no axis to lay `x` out over, as far as its type and the mesh in use tell."""
  meshes = jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()
  return all(mesh.size <= 1 or set(mesh.axis_types) <= {AxisType.Manual} for mesh in meshes)


def undivided(x: jax.Array, num_axes: int) -> jax.Array:
  """`x`, whole along its first axes: on an Explicit mesh no divided one can be indexed."""
  laid_out = jax.typeof(x).sharding
  if not any(laid_out.spec[:num_axes]):
    return x
  spec = PartitionSpec(*[None] * num_axes, *laid_out.spec[num_axes:])
  return jax.sharding.reshard(x, NamedSharding(laid_out.mesh, spec))


def is_laid_out_beside(x: jax.Array, names: AxisNames) -> bool:
  """Whether XLA may lay `x` out over mesh axes other than `names`."""
  free, manual = _free_and_manual(x)
  # `jit(vmap(step, spmd_axis_name="pod"))` puts no axis into the types that could be told from a
  # free one. If the workers' names are no mesh axes, the one free axis is taken to be theirs.
  is_mapped = not set(names) & manual
  return not free <= set(names) and not (is_mapped and len(free) == 1)


def is_partly_manual(x: jax.Array, names: AxisNames) -> bool:
  """Whether `names` are manual axes of a mesh that has others, over which XLA may lay `x` out."""
  free, manual = _free_and_manual(x)
  return bool(free) and bool(set(names) & manual)


def beside(names: AxisNames) -> dict[Hashable, int]:
  """The sizes of the axes that are left to XLA in a `shard_map` over `names`; none elsewhere."""
  mesh = jax.sharding.get_abstract_mesh()
  if not names or not set(names) <= set(mesh.manual_axes):
    return {}
  kinds = zip(mesh.axis_names, mesh.axis_types)
  return {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual}


def other_manual_axes(x: jax.Array, names: AxisNames) -> frozenset[Hashable]:
  """The manual axes beside `names` over which `x` may be cut, as far as types tell."""
  mesh = jax.sharding.get_abstract_mesh()
  others = tuple(name for name in mesh.manual_axes if name not in names and mesh.shape[name] > 1)
  return frozenset(unreduced_names([x], others)[0])


def _free_and_manual(x):
  """The mesh axes of a size above one that are XLA's to use, and the manual ones."""
  meshes = (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh())
  free = {
    name
    for mesh in meshes
    for name, kind in zip(mesh.axis_names, mesh.axis_types)
    if kind != AxisType.Manual and mesh.shape[name] > 1
  }
  return free, {name for mesh in meshes for name in mesh.manual_axes}


def unreduced_names(leaves: Sequence[Any], names: AxisNames) -> list[AxisNames]:
  """For each leaf those of `names` over which it varies, and all that are not tracked."""
  untracked = frozenset(names).difference(tracked(names))
  # An "unreduced" value is a sum that JAX has put off: still to be sent, as a varying one is.
  open_axes = [untracked | varying(x) | unreduced(x) for x in leaves]
  return [tuple(name for name in names if name in axes) for axes in open_axes]


def to_varying(tree: Tree, names: AxisNames) -> Tree:
  """Marks every leaf as varying over the tracked ones of `names`; the values stay."""
  known = tracked(names)
  return jax.tree.map(lambda x: _marked(x, known), tree) if known else tree


def vary_over(leaves: list[Any], axes: list[frozenset[Hashable]]) -> list[Any]:
  """Marks each leaf as varying over the tracked ones of its axes."""
  # In a shard_map without checks inside one with them, types name axes that are not tracked there.
  known = tracked(tuple(frozenset().union(*axes)))
  own = [[name for name in known if name in over] for over in axes]
  return [_marked(x, names) if names else x for x, names in zip(leaves, own, strict=True)]


def vary_like(tree: Tree, like: Tree) -> Tree:
  """Marks every leaf as varying wherever the same leaf of `like` does."""
  treedef: Any = jax.tree.structure(tree)
  axes = [varying(x) for x in treedef.flatten_up_to(like)]
  return treedef.unflatten(vary_over(jax.tree.leaves(tree), axes))


def _marked(x, names):
  # lax.pcast raises on an axis that a value varies over already.
  already = varying(x)
  missing = tuple(name for name in names if name not in already)
  return lax.pcast(x, missing, to="varying") if missing else x


def require_equal(
  x: jax.Array, wrapper: str, what: str, mend: str = "", axes: frozenset[Hashable] | None = None
) -> None:
  """Raises where the type of `x` lets it differ between shards, of any axis or of `axes`."""
  over = varying(x) if axes is None else varying(x) & axes
  if over:
    mend = mend or "Lay the state out by worker_specs(opt_state, axis_name), or worker_axes."
    raise ValueError(
      f"{wrapper}: {what} differs from shard to shard over {sorted(map(str, over))}. {mend}"
    )


def require_like(x: jax.Array, like: jax.Array, wrapper: str, what: str, mend: str = "") -> None:
  """Raises where a new value may differ between shards for which the state holds one."""
  mend = mend or "The state holds one value: lay it out by worker_specs(opt_state, axis_name)."
  require_equal(x, wrapper, what, mend, axes=varying(x) - varying(like))


def require_own(update: jax.Array, over: jax.Array, wrapper: str, path: Any, why: str) -> None:
  """Raises where the type of `update` shows it equal on shards between which `over` may differ."""
  equal = varying(over) - varying(update)
  if equal:
    raise ValueError(
      f"{wrapper}: updates{jax.tree_util.keystr(path)} is already equal on all shards of"
      f" {sorted(map(str, equal))}{why}"
    )
