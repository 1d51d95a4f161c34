"""The only module that calls collectives and reads what shard_map's types say about mesh axes.

Two words are used throughout. An axis is *tracked* where shard_map checks its types
(`check_vma=True`); under `check_vma=False`, `pmap` and `vmap` it is not. A value *varies* over a
tracked axis if its type says that it may differ from shard to shard; otherwise the type promises
that all shards hold the same value.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from optax_wrappers import _branches

Tree: TypeAlias = Any
AxisName: TypeAlias = Hashable | Sequence[Hashable] | None
AxisNames: TypeAlias = tuple[Hashable, ...]

# A leaf below this travels with others; benchmarks/data_parallel.py shows both sides of it.
SMALL_BYTES = 256 * 1024
# With at most so many others: XLA takes four times as long to compile one concatenation of 1,000
# leaves.
LEAVES_A_BUFFER = 64


def axis_names(axis_name: AxisName) -> AxisNames:
  """A name, a sequence of names or None, as a tuple of names."""
  if axis_name is None:
    return ()
  names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
  if len(set(names)) != len(names):
    raise ValueError(f"axis_name must not name an axis twice, got {axis_name!r}.")
  return names


def require_bound(names: AxisNames, wrapper: str) -> None:
  """Raises unless every axis is bound where the update runs, and all its shards can meet in a
  collective there."""
  for name in names:
    try:
      is_tracked = bool(tracked((name,)))
    except NameError:
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is not bound here. Call update inside jax.shard_map over a"
        f" mesh with an axis {name!r}, or inside jax.pmap or jax.vmap with axis_name={name!r}; for"
        " a single shard pass axis_name=None."
      ) from None
    outer = jax.sharding.get_abstract_mesh().manual_axes
    if not is_tracked and name not in outer and tracked(outer):
      # jax 0.10: every collective over a vmap axis fails an assertion there.
      raise ValueError(
        f"{wrapper}: axis_name {name!r} is a vmap axis inside a shard_map over {outer} with"
        " check_vma=True, where JAX has no collectives over it. Pass check_vma=False to that"
        " shard_map, or one worker to each device."
      )
  known = tracked(names)
  branch = _branches.differing_branch(names, tuple(name for name in names if name not in known))
  if branch:
    raise ValueError(
      f"{wrapper}: update is called inside {branch}, which one shard may enter and another may"
      f" not; it sends over {names}, and those inside would wait for ever. Put the conditional"
      f" inside: {wrapper}(optax.apply_if_finite(inner, n), ...). Or let all shards decide alike:"
      " lax.pmax of the predicate, a counter that is one value for all."
    )


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


def _manual_axes(x: Any, kind: str) -> frozenset[Hashable]:
  """The axes in one set ("varying" or "unreduced") of the type of `x`, an array or an abstract
  value."""
  aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
  manual = aval.manual_axis_type  # None, in jax 0.10.0, of abstract values outside shard_map
  return frozenset() if manual is None else frozenset(getattr(manual, kind))


def varying(x: Any) -> frozenset[Hashable]:
  """The tracked axes over which `x` may differ from shard to shard."""
  return _manual_axes(x, "varying")


def tracked(names: AxisNames) -> AxisNames:
  """Those of `names` whose values shard_map types."""
  return tuple(name for name in names if name in varying(lax.axis_index(name)))


def is_on_one_device(x: jax.Array) -> bool:
  """Whether XLA has no axis to lay `x` out over, as far as its type and the mesh in use tell."""

  def is_manual(mesh):
    return mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)

  return is_manual(jax.typeof(x).sharding.mesh) and is_manual(jax.sharding.get_abstract_mesh())


def is_laid_out_beside(x: jax.Array, names: AxisNames) -> bool:
  """Whether XLA may lay `x` out over mesh axes other than `names`, as far as its type and the mesh
  in use tell.

  Under vmap a single axis that is left to XLA is taken for that of the workers, whatever vmap calls
  it.
  """
  meshes = (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh())
  free = {
    name
    for mesh in meshes
    for name, kind in zip(mesh.axis_names, mesh.axis_types)
    if kind != AxisType.Manual and mesh.shape[name] > 1
  }
  is_mapped = not set(names) & {name for mesh in meshes for name in mesh.manual_axes}
  return not free <= set(names) and not (is_mapped and len(free) == 1)


def unreduced_names(leaves: Sequence[Any], names: AxisNames) -> list[AxisNames]:
  """For each leaf those of `names` over which it is still to be reduced: untracked ones, and those
  it varies over."""
  known = tracked(names)

  def of(x):
    open_axes = varying(x) | _manual_axes(x, "unreduced")
    return tuple(name for name in names if name in open_axes or name not in known)

  return [of(x) for x in leaves]


def to_varying(tree: Tree, names: AxisNames) -> Tree:
  """Marks every leaf as varying over the tracked ones of `names`; the values stay."""
  known = tracked(names)

  def mark(x):
    missing = tuple(name for name in known if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(mark, tree) if known else tree


def vary_like(tree: Tree, like: Tree) -> Tree:
  """Marks every leaf as varying wherever the same leaf of `like` does."""
  return jax.tree.map(lambda x, known: to_varying(x, tuple(varying(known))), tree, like)


def psum(tree: Tree, names: AxisNames, bucketed: bool = False) -> Tree:
  """The sum over `names` of every leaf, a value equal on all shards counted once for each of them.

  Args:
    tree: what to sum.
    names: the axes.
    bucketed: send small leaves of one dtype together, in one buffer. Each buffer has a cost of its
      own on the wire, which is more than that of copying a small leaf and less than that of copying
      a large one.
  """
  if not names:
    return tree
  leaves, treedef = jax.tree.flatten(tree)
  unfinished = [
    tuple(name for name in names if name in _manual_axes(leaf, "unreduced")) for leaf in leaves
  ]
  # lax.psum takes axes that a value varies over, or axes over which it is an unfinished sum, never
  # both at once.
  for axes in dict.fromkeys(unfinished):
    chosen = [i for i, mine in enumerate(unfinished) if mine == axes]
    rest = tuple(name for name in names if name not in axes)
    sums = to_varying([leaves[i] for i in chosen], rest)
    buffers, unpack = _pack(sums, names) if bucketed else (sums, lambda buffers: buffers)
    for kind in filter(None, (axes, rest)):
      buffers = lax.psum(buffers, kind)
    sums = unpack(buffers)
    for i, total in zip(chosen, sums):
      leaves[i] = total
  return jax.tree.unflatten(treedef, leaves)


def is_small(leaf: jax.Array) -> bool:
  """Whether a leaf travels with others."""
  return leaf.size * leaf.dtype.itemsize < SMALL_BYTES


def in_buffers(leaf_numbers: list[int]) -> list[list[int]]:
  """The leaves that may share a buffer, in lists of as many as do."""
  return [
    leaf_numbers[i : i + LEAVES_A_BUFFER] for i in range(0, len(leaf_numbers), LEAVES_A_BUFFER)
  ]


def _pack(
  leaves: list[jax.Array], names: AxisNames
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], list[jax.Array]]]:
  """Leaves as buffers, the small ones of one dtype concatenated, and the way back."""
  together: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    # What XLA lays out over axes that are left to it would have to be gathered before it could be
    # concatenated.
    may_share = is_small(leaf) and not is_laid_out_beside(leaf, names)
    together.setdefault((leaf.dtype, varying(leaf)) if may_share else i, []).append(i)
  buckets = [bucket for leaf_numbers in together.values() for bucket in in_buffers(leaf_numbers)]
  buffers = [
    leaves[bucket[0]] if len(bucket) == 1 else jnp.concatenate([leaves[i].ravel() for i in bucket])
    for bucket in buckets
  ]

  def unpack(buffers):
    out: list[Any] = [None] * len(leaves)
    for bucket, buffer in zip(buckets, buffers, strict=True):
      start = 0
      for i in bucket:
        size = leaves[i].size
        part = buffer if len(bucket) == 1 else lax.slice(buffer, (start,), (start + size,))
        out[i] = part.reshape(leaves[i].shape)
        start += size
    return out

  return buffers, unpack


def group_psum(tree: Tree, name: Hashable, groups: Sequence[Sequence[int]]) -> Tree:
  """The sum of every leaf over this shard's group of `groups`, a partition of the axis.

  `lax.psum(axis_index_groups=)` is refused under vmap and under tracking. Each shard puts its value
  in its group's row of zeros, the rows are summed over the whole axis, and each shard takes its own
  row: exact, and a NaN stays in its group.
  """
  group_of = [0] * sum(map(len, groups))
  for row, members in enumerate(groups):
    for member in members:
      group_of[member] = row
  mine = jnp.asarray(group_of, jnp.int32)[lax.axis_index(name)]

  def in_my_row(x):
    rows = to_varying(jnp.zeros((len(groups), *x.shape), x.dtype), (name,))
    return rows.at[mine].set(x)

  rows = psum(jax.tree.map(in_my_row, tree), (name,))
  return jax.tree.map(lambda r: r[mine], rows)


def all_gather(tree: Tree, names: AxisNames) -> Tree:
  """Every leaf of all shards stacked on a new leading axis, typed as equal on all shards."""
  known = tracked(names)

  def gather(x):
    x = jnp.expand_dims(
      x, 0
    )  # tiled: jax 0.10.2 lays out the axis that it adds itself wrongly on an Explicit mesh
    for name in reversed(names):
      options = {"to": "invarying"} if name in known else {}
      x = lax.all_gather(x, name, tiled=True, **options)
    return x

  return jax.tree.map(gather, to_varying(tree, names))


def parts(x: jax.Array, num_parts: int) -> jax.Array:
  """The flattened `x`, zeros added, as `[num_parts, part]`."""
  part = -(-x.size // num_parts)
  return jnp.pad(x.ravel(), (0, num_parts * part - x.size)).reshape(num_parts, part)


def sum_scatter(tree: Tree, names: AxisNames) -> Tree:
  """This shard's part (see `parts`) of the sum of every leaf over all shards."""
  sizes = [axis_size((name,)) for name in names]

  def scatter(x):
    x = parts(x, math.prod(sizes)).reshape(*sizes, -1)
    for name in names:
      x = lax.psum_scatter(x, name)
    return x

  return jax.tree.map(scatter, to_varying(tree, names))


def cond(
  predicate: jax.Array, true_fun: Callable[[], Tree], false_fun: Callable[[Any], Tree], wrapper: str
) -> Tree:
  """`lax.cond` whose branches may differ in the axes that they vary over.

  Args:
    predicate: bool scalar, equal on all shards between which a branch sends something. If shards
      took different branches, the ones inside a collective would wait for the others for ever, so a
      predicate that its type lets differ between them raises here, when the step is traced.
    true_fun: no arguments; whatever it uses is closed over.
    false_fun: takes what `true_fun` returns, as abstract values.
    wrapper: the name that an error gives.
  """
  if not isinstance(
    predicate, jax.core.Tracer
  ):  # outside jit: lax.cond would compile both branches anew in every call
    return true_fun() if predicate else false_fun(jax.eval_shape(true_fun))
  true_fun = jax.jit(true_fun, inline=True)  # eval_shape and the branch share one trace
  abstract = jax.eval_shape(true_fun)
  require_silent(
    predicate, lambda: (true_fun(), false_fun(abstract)), wrapper, "the state's step counter"
  )
  true_leaves, treedef = jax.tree.flatten(abstract)
  false_leaves = jax.tree.leaves(jax.eval_shape(lambda: false_fun(abstract)))
  own = varying(predicate)
  axes = [
    tuple(varying(t) | varying(f) | own) for t, f in zip(true_leaves, false_leaves, strict=True)
  ]

  def aligned(tree):
    return treedef.unflatten(
      [to_varying(x, names) for x, names in zip(treedef.flatten_up_to(tree), axes)]
    )

  return lax.cond(predicate, lambda: aligned(true_fun()), lambda: aligned(false_fun(abstract)))


def apply_if(
  predicate: jax.Array, fun: Callable[..., Tree], carried: Tree, *operands: Any, wrapper: str
) -> Tree:
  """`fun(carried, *operands)` where `predicate` holds, else `carried`, which XLA then leaves where
  it lies.

  A loop that runs once or not at all. `lax.cond` would copy what a branch hands through, a pass
  over all of it in every step; but it has a derivative in reverse, so derivatives are those of the
  branch.

  Args:
    predicate: bool scalar; where `fun` has collectives, equal on all shards (`require_equal`).
    fun: keeps shapes and dtypes; its derivative is taken with respect to what it is given, and not
      what it closes over.
    carried: what it replaces.
    operands: what else it needs.
    wrapper: the name that an error gives.
  """
  if not isinstance(predicate, jax.core.Tracer):
    return fun(carried, *operands) if predicate else carried
  fun = jax.jit(fun, inline=True)  # eval_shape and the loop share one trace
  carried = vary_like(carried, jax.eval_shape(fun, carried, *operands))
  carried = to_varying(carried, tuple(varying(predicate)))

  def aligned(carried, *operands):
    return vary_like(fun(carried, *operands), carried)

  @jax.custom_jvp
  def loop(predicate, carried, operands):
    def body(pair):
      return ~pair[0], aligned(pair[1], *operands)

    return lax.while_loop(lambda pair: pair[0], body, (predicate, carried))[1]

  @loop.defjvp
  def _(primals, tangents):
    predicate = primals[0]

    def branch(carried, operands):
      return lax.cond(predicate, lambda: aligned(carried, *operands), lambda: carried)

    try:
      return jax.jvp(branch, primals[1:], tangents[1:])
    except NameError as error:
      raise ValueError(
        f"{wrapper}: this derivative goes through a jax.vmap over workers that was staged out"
        " before it (by jit, scan or checkpoint), and JAX does not know the name of its axis any"
        " more. Take the derivative first, jit(grad(step)) for grad(jit(step)), or map over the"
        " workers with jax.shard_map."
      ) from error

  return loop(predicate, carried, operands)


def sending_axes(jaxpr: jax.extend.core.Jaxpr) -> frozenset[Hashable]:
  """The axes over which a program sends something."""
  found: set[Hashable] = set()
  for eqn in jaxpr.eqns:
    if eqn.primitive.name not in (
      "axis_index",
      "pvary",
      "pcast",
      "reduce_sum",
      "reduce_max",
      "reduce_min",
    ):
      names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
      names = names if isinstance(names, tuple | list) else (names,)
      found.update(name for name in names if isinstance(name, str | tuple))
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      found |= sending_axes(inner)
  return frozenset(found)


def require_silent(predicate: jax.Array, fun: Callable[[], Tree], wrapper: str, what: str) -> None:
  """Raises where `predicate` may differ between shards that send each other something in `fun`."""
  if varying(predicate):
    over = varying(predicate) & sending_axes(jax.make_jaxpr(fun)().jaxpr)
    require_equal(predicate, wrapper, what, axes=over)


def require_equal(
  x: jax.Array, wrapper: str, what: str, mend: str = "", axes: frozenset[Hashable] | None = None
) -> None:
  """Raises where the type of `x` lets it differ from shard to shard; with `axes`, over one of
  these."""
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
