"""Mesh axes, and what shard_map's types say about a value.

Two words are used throughout the library. An axis is *tracked* where shard_map checks its types,
which it does with `check_vma=True`. Under `check_vma=False`, `pmap` and `vmap` an axis is not
tracked. A value *varies* over a tracked axis if its type says that it may differ from shard to
shard. Otherwise its type promises that all shards hold the same value.
"""

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
      # Asking for the type of the axis index is the one question that raises where an axis is not
      # bound, and needs no collective.
      is_tracked = bool(tracked((name,)))
    except NameError:
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is not bound here. Call update inside jax.shard_map over a"
        f" mesh with an axis {name!r}, or inside jax.pmap or jax.vmap with axis_name={name!r}."
        " Under plain jax.jit, where the gradient is the mean over all devices already, or for a"
        " single shard, pass axis_name=None."
      ) from None
    outer = jax.sharding.get_abstract_mesh().manual_axes
    if not is_tracked and name not in outer and tracked(outer):
      # jax 0.10: every collective over a vmap axis fails an assertion there.
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is a vmap axis inside a shard_map over {outer} with"
        " check_vma=True, where JAX has no collectives over it. Pass check_vma=False to that"
        " shard_map, or one worker to each device."
      )


def names_in(spec: PartitionSpec, dimensions: Iterable[int]) -> AxisNames:
  """The mesh axes that a PartitionSpec has for some dimensions of an array."""
  found = [spec[i] for i in dimensions if i < len(spec) and spec[i] is not None]
  return tuple(name for part in found for name in (part if isinstance(part, tuple) else (part,)))


def axis_size(names: AxisNames) -> int:
  """The number of shards over all of `names`."""
  size = 1
  for name in names:
    size *= lax.axis_size(name)
  return size


def axis_index(names: AxisNames) -> jax.Array:
  """This shard's index over `names`, the last name fastest; int32 scalar."""
  index = jnp.zeros((), jnp.int32)
  for name in names:
    index = index * lax.axis_size(name) + lax.axis_index(name)
  return index


def varying(x: Any) -> frozenset[Hashable]:
  """The tracked axes over which `x`, an array or abstract, may differ from shard to shard."""
  # From jax 0.10 the sets of a type are those of `manual_axis_type`; up to 0.9 there was `vma`.
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

  def is_manual(mesh):
    return mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)

  return is_manual(jax.typeof(x).sharding.mesh) and is_manual(jax.sharding.get_abstract_mesh())


def undivided(x: jax.Array, num_axes: int) -> jax.Array:
  """`x`, whole along its first axes: on an Explicit mesh no divided one can be indexed."""
  laid_out = jax.typeof(x).sharding
  if not any(laid_out.spec[:num_axes]):
    return x
  spec = PartitionSpec(*[None] * num_axes, *laid_out.spec[num_axes:])
  return jax.sharding.reshard(x, NamedSharding(laid_out.mesh, spec))


def is_laid_out_beside(x: jax.Array, names: AxisNames) -> bool:
  """Whether XLA may lay `x` out over mesh axes other than `names`.

  That is read from its type and from the mesh in use.

  Under vmap a single axis that is left to XLA is taken for that of the workers, whatever vmap calls
  it.
  """
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
  (found,) = unreduced_names([x], others)
  return frozenset(found)


def _free_and_manual(x):
  """The mesh axes that are XLA's to use, of which those of size one divide nothing; the manual."""
  meshes = (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh())
  free = {
    name
    for mesh in meshes
    for name, kind in zip(mesh.axis_names, mesh.axis_types)
    if kind != AxisType.Manual and mesh.shape[name] > 1
  }
  return free, {name for mesh in meshes for name in mesh.manual_axes}


def unreduced_names(leaves: Sequence[Any], names: AxisNames) -> list[AxisNames]:
  """For each leaf those of `names` over which it is still to be reduced.

  These are the axes over which it varies, and all axes that are not tracked.
  """
  known = tracked(names)

  def of(x):
    # An "unreduced" value is a sum that JAX has put off. It is still to be sent, as a varying one
    # is.
    open_axes = varying(x) | unreduced(x)
    return tuple(name for name in names if name in open_axes or name not in known)

  return [of(x) for x in leaves]


def to_varying(tree: Tree, names: AxisNames) -> Tree:
  """Marks every leaf as varying over the tracked ones of `names`; the values stay."""
  known = tracked(names)

  def mark(x):
    # lax.pcast raises on an axis that a value varies over already.
    missing = tuple(name for name in known if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(mark, tree) if known else tree


def vary_like(tree: Tree, like: Tree) -> Tree:
  """Marks every leaf as varying wherever the same leaf of `like` does."""
  return jax.tree.map(lambda x, known: to_varying(x, tuple(varying(known))), tree, like)


def require_equal(
  x: jax.Array, wrapper: str, what: str, mend: str = "", axes: frozenset[Hashable] | None = None
) -> None:
  """Raises where the type of `x` lets it differ between shards, of any axis or of `axes`."""
  over = varying(x) if axes is None else varying(x) & axes
  if over:
    mend = mend or (
      "Keep it one value for all shards: worker_specs(opt_state, axis_name) gives its in_specs and"
      " out_specs, worker_axes(opt_state) its in_axes and out_axes."
    )
    raise ValueError(
      f"{wrapper}: {what} differs from shard to shard over {sorted(map(str, over))}. {mend}"
    )


def require_like(x: jax.Array, like: jax.Array, wrapper: str, what: str, mend: str = "") -> None:
  """Raises where a new value may differ between shards for which the state holds one."""
  mend = mend or (
    "The state holds one value for all of them. Inside elastic_average every worker has its own:"
    " worker_specs(opt_state, axis_name), of the whole state, lays it out."
  )
  require_equal(x, wrapper, what, mend, axes=varying(x) - varying(like))


def require_own(update: jax.Array, over: jax.Array, wrapper: str, path: Any, why: str) -> None:
  """Raises where the type of `update` shows it equal on shards between which `over` may differ."""
  equal = varying(over) - varying(update)
  if equal:
    raise ValueError(
      f"{wrapper}: updates{jax.tree_util.keystr(path)} is already equal on all shards of"
      f" {sorted(map(str, equal))}{why}"
    )
