"""Mesh axes, and what shard_map's types say about a value.

An axis is *tracked* if shard_map checks its types (`check_vma=True`); under `pmap` and `vmap` no
axis is. A value *varies* over a tracked axis if its type says that it may differ between shards.
Otherwise all shards hold the same value.
"""

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_wrappers._core._types import AxisName, AxisNames, Tree

NONE: frozenset[Hashable] = frozenset()


def axis_names(axis_name: AxisName) -> AxisNames:
  """Returns a name, a sequence of names or None as a tuple of names."""
  if axis_name is None:
    return ()
  names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
  if len(set(names)) != len(names):
    raise ValueError(f"axis_name must not name an axis twice, got {axis_name!r}.")
  return names


def require_bound(names: AxisNames, wrapper: str) -> AxisNames:
  """The tracked ones of `names`; raises unless each is bound and JAX has collectives over it."""
  known: list[Hashable] = []
  for name in names:
    try:
      # The only query that raises if an axis is not bound and needs no collective.
      known += tracked((name,))
    except NameError:
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is not bound here. Call update inside jax.shard_map,"
        " jax.pmap or jax.vmap with that axis, or pass axis_name=None under plain jax.jit."
      ) from None
    outer = jax.sharding.get_abstract_mesh().manual_axes
    if name not in known and name not in outer and tracked(outer):
      # In jax 0.10 every collective over such a vmap axis fails an assertion.
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is a vmap axis inside a shard_map over {outer} with"
        " check_vma=True, where JAX has no collectives over it. Pass check_vma=False to it."
      )
  return tuple(known)


def names_in(spec: PartitionSpec, dimensions: Iterable[int]) -> AxisNames:
  """The mesh axes that a PartitionSpec assigns to some dimensions of an array."""
  # An entry is a name, a tuple of names, or None, a tree without leaves.
  return tuple(jax.tree.leaves([spec[d] for d in dimensions if d < len(spec)]))


def is_bound(name: Hashable) -> bool:
  """Whether an axis of this name is bound here."""
  try:
    lax.axis_size(name)
  except NameError:
    return False
  return True


def varying(x: Any) -> frozenset[Hashable]:
  """The tracked axes over which `x`, an array or abstract, may differ from shard to shard."""
  aval = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
  # None in jax 0.10.0 for abstract values outside shard_map.
  manual = aval.manual_axis_type
  return NONE if manual is None else frozenset(manual.varying)


def all_varying(leaves: Sequence[Any]) -> list[frozenset[Hashable]]:
  """`varying` of each leaf."""
  avals = (x if hasattr(x, "manual_axis_type") else jax.typeof(x) for x in leaves)
  kinds = (aval.manual_axis_type for aval in avals)
  return [NONE if manual is None else frozenset(manual.varying) for manual in kinds]


def tracked(names: Iterable[Hashable]) -> AxisNames:
  """Those of `names` whose values shard_map types."""
  # A shard's index differs between shards by definition. If its type does not say so, no type does
  # (check_vma=False, pmap, vmap).
  kinds = ((name, jax.typeof(lax.axis_index(name)).manual_axis_type) for name in names)
  return tuple(name for name, manual in kinds if name in manual.varying)


def undivided(x: jax.Array, num_axes: int) -> jax.Array:
  """`x`, replicated along its first axes: on an Explicit mesh a sharded axis cannot be indexed."""
  laid_out = jax.typeof(x).sharding
  if not any(laid_out.spec[:num_axes]):
    return x
  spec = PartitionSpec(*[None] * num_axes, *laid_out.spec[num_axes:])
  return jax.sharding.reshard(x, NamedSharding(laid_out.mesh, spec))


def num_places(x: jax.Array, d: int) -> int:
  """Over how many devices an Explicit mesh shards a dimension."""
  laid_out = jax.typeof(x).sharding
  return math.prod(laid_out.mesh.shape[name] for name in names_in(laid_out.spec, [d]))


def laid_out_like(tree: Tree, like: Tree) -> Tree:
  """The arrays in the layouts of others of their shapes, which matters on an Explicit mesh only."""
  leaves = jax.tree.leaves(tree)
  treedef: Any = jax.tree.structure(tree)
  for i, y in enumerate(treedef.flatten_up_to(like)):
    wanted = jax.typeof(y).sharding
    if jax.typeof(leaves[i]).sharding != wanted:
      leaves[i] = jax.sharding.reshard(leaves[i], NamedSharding(wanted.mesh, wanted.spec))
  return treedef.unflatten(leaves)


def _free(mesh):
  """The sizes, if above one, of the axes over which XLA may shard a value of this mesh."""
  return {
    name: each.shape[name]
    for each in (mesh, jax.sharding.get_abstract_mesh())
    for name, kind in zip(each.axis_names, each.axis_types)
    if kind != AxisType.Manual and each.shape[name] > 1
  }


def _is_any_manual(mesh, names):
  manual = (*mesh.manual_axes, *jax.sharding.get_abstract_mesh().manual_axes)
  return not set(names).isdisjoint(manual)


def num_free(x: jax.Array) -> int:
  """The number of devices over which XLA may shard `x`; 1 if it has no axis for that."""
  return math.prod(_free(jax.typeof(x).sharding.mesh).values())


def laid_out_beside(leaves: Sequence[jax.Array], names: AxisNames) -> list[bool]:
  """For each leaf, whether XLA may shard it over mesh axes other than `names`."""

  @functools.cache
  def has_others(mesh):
    free = _free(mesh)
    # The types under `jit(vmap(step, spmd_axis_name="pod"))` do not distinguish that axis from a
    # free one. If the workers' names are not mesh axes, the only free axis is assumed to be theirs.
    is_theirs = len(free) == 1 and not _is_any_manual(mesh, names)
    return not free.keys() <= set(names) and not is_theirs

  return [has_others(jax.typeof(x).sharding.mesh) for x in leaves]


def is_partly_manual(x: jax.Array, names: AxisNames) -> bool:
  """Whether `names` are manual axes of a mesh with other axes, over which XLA may shard `x`."""
  mesh = jax.typeof(x).sharding.mesh
  return bool(_free(mesh)) and _is_any_manual(mesh, names)


def are_manual(names: AxisNames) -> bool:
  """Whether all of `names` are axes of a `shard_map` or `pmap`, and none of a `vmap`."""
  return set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def beside(names: AxisNames) -> dict[Hashable, int]:
  """The axes left to XLA in a `shard_map` over `names`, as by `_free`; elsewhere none."""
  return _free(jax.sharding.get_abstract_mesh()) if names and are_manual(names) else {}


def other_manual_axes(x: jax.Array, names: AxisNames) -> frozenset[Hashable]:
  """The manual axes besides `names` over which `x` may be sharded, according to types."""
  mesh = jax.sharding.get_abstract_mesh()
  others = tuple(name for name in mesh.manual_axes if name not in names and mesh.shape[name] > 1)
  return frozenset(unreduced_names([x], others)[0])


def unreduced_names(
  leaves: Sequence[Any], names: AxisNames, known: AxisNames | None = None
) -> list[AxisNames]:
  """For each leaf, those of `names` over which it varies, and all that are not tracked.

  `known` are the tracked ones, if they were asked before.
  """
  known = tracked(names) if known is None else known
  if not known:
    return [names] * len(leaves)
  untracked = frozenset(names).difference(known)
  kinds = [jax.typeof(x).manual_axis_type for x in leaves]
  # JAX has deferred the sum of an "unreduced" value. Like a varying one, it must still be sent.
  open_axes = [untracked.union(kind.varying, kind.unreduced) for kind in kinds]
  return [tuple(name for name in names if name in axes) for axes in open_axes]


def to_varying(tree: Tree, over: AxisNames | list[frozenset[Hashable]]) -> Tree:
  """Marks leaves as varying over the tracked ones of these axes, a list if each has its own."""
  if not over:
    return tree
  leaves, treedef = jax.tree.flatten(tree)
  axes = over if isinstance(over, list) else [frozenset(over)] * len(leaves)
  kinds = [jax.typeof(x).manual_axis_type for x in leaves]
  # lax.pcast raises for an axis over which the value already varies.
  missing = [wanted - kind.varying for wanted, kind in zip(axes, kinds, strict=True)]
  if not any(missing):
    return tree
  # In an unchecked shard_map inside a checked one, types name axes that are not tracked here.
  known = tracked(NONE.union(*missing))
  new = [tuple(name for name in known if name in wanted) for wanted in missing]
  marked = [lax.pcast(x, add, to="varying") if add else x for x, add in zip(leaves, new)]
  return jax.tree.unflatten(treedef, marked)


def vary_with(tree: Tree, like: Tree) -> Tree:
  """Marks every leaf as varying over every axis over which any leaf of `like` varies."""
  return to_varying(tree, tuple(NONE.union(*all_varying(jax.tree.leaves(like)))))


def vary_like(tree: Tree, like: Tree) -> Tree:
  """Marks every leaf as varying over the axes over which the same leaf of `like` varies."""
  treedef: Any = jax.tree.structure(tree)
  return to_varying(tree, all_varying(treedef.flatten_up_to(like)))


def require_equal(
  x: jax.Array, wrapper: str, what: str, mend: str = "", *, axes: frozenset[Hashable]
) -> None:
  """Raises if the type of `x` allows it to differ between shards of `axes`."""
  over = varying(x) & axes
  if over:
    mend = mend or "Lay the state out by specs(opt_state, workers=axis_name), or worker_axes."
    raise ValueError(
      f"{wrapper}: {what} differs from shard to shard over {sorted(map(str, over))}. {mend}"
    )


def require_like(x: jax.Array, like: jax.Array, wrapper: str, what: str, mend: str = "") -> None:
  """Raises if a new value may differ between shards where the state holds one value for all."""
  more = varying(x) - varying(like)
  if more:
    mend = mend or "The state holds one value: lay it out by specs(opt_state, workers=axis_name)."
    require_equal(x, wrapper, what, mend, axes=more)


def require_own(
  updates: Tree, over: frozenset[Hashable], wrapper: str, why: str, path: Any = ()
) -> None:
  """Raises if, by its type, an update is equal on all shards of some of these axes."""
  for keys, update in jax.tree.leaves_with_path(updates):
    equal = sorted(map(str, over.difference(jax.typeof(update).manual_axis_type.varying)))
    if equal:
      where = jax.tree_util.keystr((*path, *keys))
      raise ValueError(f"{wrapper}: updates{where} is already equal on all shards of {equal}{why}")
