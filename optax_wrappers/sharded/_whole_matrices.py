"""Optimizers of whole matrices, for parameters that are sharded over devices."""

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from optax_wrappers import inspect, per_shard, states
from optax_wrappers.sharded import _layouts
from optax_wrappers.sharded._layouts import AxisNames, named, varying
from optax_wrappers.sharded._transfers import Kind, Transfer


@dataclasses.dataclass(frozen=True)
class Part:
  """What a device has of one parameter: a block of the matrices of a kind."""

  # For each dimension, those of the axes of `whole_matrices` that shard it.
  axes: tuple[AxisNames, ...]
  block: tuple[int, ...]
  kind: Kind

  @property
  def spec(self) -> PartitionSpec:
    return PartitionSpec(*[names or None for names in self.axes])


@states.static
class Dealt:
  """In the state of `whole_matrices`: how every leaf is sharded and distributed."""

  names: AxisNames
  parts: tuple[Part, ...]

  def __repr__(self) -> str:
    return f"Dealt({self.names})"


@states.dataclass
class WholeMatricesState(states.State):
  """State of `whole_matrices`.

  Attributes:
    dealt: how the matrices are sharded and distributed; it has no leaves.
    inner_state: for each kind of matrices the states of the wrapped optimizer, stacked,
      `[num_slots, ...]`: slot u is that of matrix u, in the order of the leaves. `num_slots` is a
      multiple of the number of devices; slots that are left over hold copies.
  """

  dealt: Dealt
  inner_state: dict[str, Any] = states.field(slots=True)

  @property
  def slot_names(self):
    return self.dealt.names


def whole_matrices(
  inner: optax.GradientTransformation,
  axis_name: Hashable | Sequence[Hashable],
  *,
  specs: Any = None,
  mesh: Mesh | AbstractMesh | None = None,
  stacked: Any = 0,
) -> optax.GradientTransformationExtraArgs:
  """Calls `inner` on whole matrices while parameters stay sharded: Muon and Shampoo with FSDP.

  These optimizers are wrong on a block of a matrix. Each device receives some whole matrices, calls
  `inner` on one at a time, and sends the results back, so the work is divided too. If the axes are
  not bound (plain `jax.jit`, on Auto and Explicit axes), the update runs in its own
  `jax.shard_map`.

  Args:
    inner: a transformation of one matrix; it sees one leaf without a name. Transformations of
      several leaves go outside, and other parameters to another optimizer, by `optax.partition`.
    axis_name: all axes that shard a matrix, and axes of replicas that should share the work.
    specs: the PartitionSpecs of the parameters, a tree of their structure or a prefix of it. None:
      from their types, on an Explicit mesh.
    mesh: the mesh, for plain `jax.jit`; None: that of `jax.set_mesh`.
    stacked: how many leading axes of a parameter stack matrices, such as layers or experts: an int
      or a tree of ints, or a prefix of it.

  Returns:
    A gradient transformation with a `WholeMatricesState`, each leaf of which is sharded along its
    first axis over `axis_name`, by `tx.init` and in `specs`. Of G matrices of equal
    shape, dtype and layout, each of N devices holds the states of ceil(G / N).

  Raises:
    ValueError: in init and update, with the name of the parameter, if its layout is unknown, an
      axis is missing, or a spec does not fit; for a state of another layout.

  Extra args:
    All reach `inner`, the same for every matrix.

  **Communication**: for all matrices of equal shape, dtype and layout, two all-to-alls, in which a
  device sends its blocks, and a third if `inner` reads the parameters. Over axes that do not shard
  a matrix, results are gathered. Nothing for stacked axes that are sharded.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    >>> orthogonalize = optax.stateless_with_tree_map(
    ...   lambda g, _: jnp.linalg.qr(g)[0]
    ... )
    >>> tx = ow.whole_matrices(
    ...   orthogonalize, "data", specs=P("data"), mesh=mesh
    ... )
    >>> grads = {"kernel": jnp.eye(8), "head": jnp.eye(8, 4)}
    >>> state = jax.jit(tx.init)(grads)
    >>> updates, state = jax.jit(tx.update)(grads, state)
    >>> bool(jnp.allclose(jnp.abs(updates["kernel"]), jnp.eye(8)))
    True

  Source: the distributed Muon of Liu et al., 2025, "Muon is Scalable for LLM Training", with an
    all-to-all in the place of its gather.
  """
  names = _names_of(axis_name)
  if not isinstance(inner, optax.GradientTransformation):
    raise TypeError(
      f"whole_matrices: inner must be an optax.GradientTransformation, got {inner!r}."
    )
  inner = optax.with_extra_args_support(inner)

  def run(body, in_specs, out_specs, *args):
    """`body(*args)`, in a `shard_map` if the axes are not bound."""
    if _layouts.is_bound(names[0]):
      return body(*args)
    # Inside another shard_map only the current mesh is allowed.
    is_inside = jax.sharding.get_abstract_mesh().manual_axes
    mapped = jax.shard_map(
      body,
      mesh=None if is_inside else mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=set(names),
      # An optimizer may start a loop from constants.
      check_vma=False,
    )
    # Outside jit, jax 0.10 does not run a shard_map over some of the axes.
    return jax.jit(mapped)(*args)

  def init_fn(params):
    params = jax.tree.map(jnp.asarray, params)
    dealt = _dealt(params, names, specs, mesh, stacked)

    def start(leaves):
      blocks = _by_kind(dealt, leaves)
      return {kind.key: _first_states(inner, kind, x) for kind, x in blocks.items()}

    specs_of_leaves = [part.spec for part in dealt.parts]
    inner_state = run(start, (specs_of_leaves,), PartitionSpec(names), jax.tree.leaves(params))
    return WholeMatricesState(dealt=dealt, inner_state=inner_state)

  def update_fn(updates, state, params=None, **extra_args):
    if not isinstance(state, WholeMatricesState):
      raise TypeError(
        f"whole_matrices: state must be a WholeMatricesState, from init; got {state!r}."
      )
    dealt, sizes = state.dealt, _sizes(names, mesh)
    if dealt.names != names:
      raise ValueError(
        f"whole_matrices: the state was made for {dealt.names!r}, and this is {names!r}. Pass the"
        " axis_name that it was made for, or start again: tx.init(params)."
      )
    columns = [_checked(dealt, "updates", updates, sizes)]
    if params is not None:
      columns.append(_checked(dealt, "params", params, sizes))

    # An array in a closure cannot be sharded over Explicit axes.
    extra, extra_def = jax.tree.flatten(extra_args)
    arrays = {i: x for i, x in enumerate(extra) if isinstance(x, jax.Array)}

    def step(inner_state, arrays, *columns):
      extra_args = extra_def.unflatten([arrays.get(i, x) for i, x in enumerate(extra)])
      by_kind = [_by_kind(dealt, leaves) for leaves in columns]
      update = functools.partial(inner.update, **extra_args)
      new_blocks, new_state = {}, {}
      for kind in by_kind[0]:
        new_blocks[kind], new_state[kind.key] = _next_states(
          update, kind, names, inner_state[kind.key], [blocks[kind] for blocks in by_kind]
        )
      return _by_leaf(dealt, new_blocks, columns[0]), new_state

    specs_of_leaves, of_state = [part.spec for part in dealt.parts], PartitionSpec(names)
    in_specs = of_state, PartitionSpec(), *[specs_of_leaves] * len(columns)
    out_specs = specs_of_leaves, of_state
    new, inner_state = run(step, in_specs, out_specs, state.inner_state, arrays, *columns)
    new = _typed_like(new, columns[0])
    inner_state = _typed_like(inner_state, state.inner_state)
    return jax.tree.structure(updates).unflatten(new), state.replace(inner_state=inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _names_of(axis_name):
  names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
  if not names or None in names or len(set(names)) < len(names):
    raise ValueError(
      f"whole_matrices: axis_name must name an axis, got {axis_name!r}. Name each axis once."
    )
  return names


def _first_states(inner, kind, blocks):
  """The stacked states of this device's matrices of a kind."""
  transfer = Transfer.of(kind)
  return lax.map(lambda parts: inner.init(transfer.join(parts)), transfer.whole_matrices(blocks))


def _next_states(update_fn, kind, names, slots, columns):
  """This device's blocks of the results of a kind, and the new stacked states."""
  transfer = Transfer.of(kind)

  # The check and the loop share one trace.
  @functools.partial(jax.jit, inline=True)
  def step(slots, args):
    slot, *parts = args
    update, *param = map(transfer.join, parts)
    update, state = update_fn(update, states.read_slot(slots, slot), *param)
    # In place: the states are the largest arrays here.
    return states.write_slot(slots, state, slot), transfer.split(update)

  columns = [transfer.whole_matrices(blocks) for blocks in columns]
  num_slots = len(columns[0])
  for leaf in jax.tree.leaves(slots):
    if leaf.shape[:1] != (num_slots,):
      raise ValueError(
        f"whole_matrices: a device must have {num_slots} slots of inner_state[{kind.key!r}], got"
        f" {list(leaf.shape)}. Lay it out by specs, over as many devices as it was made for."
      )
  # A value computed in an unchecked shard_map loses the varying axes of an outer one. A slice of
  # everything gets that type in advance.
  slots = per_shard(jax.tree.map(lambda x: lax.slice_in_dim(x, 0, None), slots), names)
  args = jnp.arange(num_slots), *columns
  _require_alone(step, names, slots, jax.tree.map(lambda x: x[0], args))
  slots, results = lax.scan(step, slots, args)
  return transfer.blocks(results), slots


def _require_alone(step, names, *args):
  """Raises if `inner` communicates with devices that have other matrices."""
  # Errors of `inner` itself.
  jax.eval_shape(step, *args)
  for name in names:

    def some_devices(*args, name=name):
      return lax.cond(lax.axis_index(name) == 0, step, step, *args)

    # What does not communicate may be in a conditional that only some of the devices enter.
    try:
      inspect.check_step(some_devices, *args)
    except ValueError as error:
      raise ValueError(
        f"whole_matrices: inner reduces or sends over {[name]}, where each device has another"
        " matrix. Put what does so outside: cross_shard(whole_matrices(...), ...)."
      ) from error


def _sizes(names, mesh):
  """The sizes of the axes, which are all bound here, or all in the current mesh."""
  bound = [name for name in names if _layouts.is_bound(name)]
  if bound and len(bound) < len(names):
    raise ValueError(
      f"whole_matrices: of axis_name={names!r} only {bound} are axes of the shard_map around it."
      " Map over all of them, or leave all of them to XLA."
    )
  if bound:
    return {name: lax.axis_size(name) for name in names}
  mesh = mesh or jax.sharding.get_abstract_mesh()
  for name in names:
    if name not in mesh.shape:
      raise ValueError(
        f"whole_matrices: axis_name {name!r} is neither bound here nor an axis of the mesh,"
        f" {dict(mesh.shape)}. Pass mesh=, or use jax.set_mesh."
      )
  return {name: mesh.shape[name] for name in names}


def _specs_by_type(params, names):
  """The PartitionSpec of every leaf, from its type."""
  specs = []
  for name, leaf in _layouts.named_leaves(params):
    sharding = jax.typeof(leaf).sharding
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    if any(kinds.get(axis) != AxisType.Explicit for axis in names):
      raise ValueError(
        f"whole_matrices: specs is needed: the type of {name} does not say how it is divided over"
        f" {names}, as on an Explicit mesh. Pass the parameters' PartitionSpecs."
      )
    specs.append(sharding.spec)
  return specs


def _dealt(params, names, specs, mesh, stacked):
  """How the matrices of these parameters are distributed."""
  sizes = _sizes(names, mesh)
  call = "whole_matrices"
  if specs is None:
    specs = _specs_by_type(params, names)
  else:
    specs = _layouts.for_each_leaf(call, "specs", specs, params, PartitionSpec, "PartitionSpecs")
  counts = _layouts.for_each_leaf(call, "stacked", stacked, params, int, "Python ints")
  columns = zip(_layouts.named_leaves(params), specs, counts, strict=True)
  parts = [_part(*leaf, spec, num_stacked, sizes) for leaf, spec, num_stacked in columns]
  return Dealt(names, tuple(parts))


def _part(name, leaf, spec, num_stacked, sizes):
  """What a device has of a parameter."""
  if not 0 <= num_stacked <= leaf.ndim or len(spec) > leaf.ndim:
    raise ValueError(
      f"whole_matrices: stacked={num_stacked} and {spec} must fit {name}, which has"
      f" {leaf.ndim} axes."
    )
  all_axes = _layouts.axes_by_dimension(spec) + [()] * (leaf.ndim - len(spec))
  for d, axis in [(d, axis) for d, part in enumerate(all_axes) for axis in part]:
    # XLA may divide a stack by itself.
    if axis not in sizes and (d >= num_stacked or _layouts.is_bound(axis)):
      raise ValueError(
        f"whole_matrices: {name} is divided over {axis!r} by {spec}, which is not in"
        f" axis_name={tuple(sizes)!r}. Name it too: axis_name={(axis, *sizes)!r}."
      )
  axes = [tuple(axis for axis in part if axis in sizes) for part in all_axes]
  numbers = [math.prod(sizes[axis] for axis in part) for part in axes]
  whole = block = leaf.shape
  if _layouts.is_bound(next(iter(sizes))):
    whole = tuple(n * k for n, k in zip(block, numbers))
  elif any(n % k for n, k in zip(whole, numbers)):
    raise ValueError(f"whole_matrices: {spec} does not divide {name} {list(whole)} over {sizes}.")
  else:
    block = tuple(n // k for n, k in zip(whole, numbers))
  in_place = tuple((axis, sizes[axis]) for part in axes[:num_stacked] for axis in part)
  over = tuple(axis for axis in sizes if axis not in dict(in_place))
  kind = Kind(whole[num_stacked:], leaf.dtype, tuple(axes[num_stacked:]), over, in_place)
  return Part(tuple(axes), block, kind)


def _checked(dealt, what, tree, sizes):
  """The leaves of updates or parameters, which must match those given to `init`."""
  leaves = _layouts.named_leaves(jax.tree.map(jnp.asarray, tree))
  if len(leaves) != len(dealt.parts):
    raise ValueError(
      f"whole_matrices: the state was made for {len(dealt.parts)} parameters, got {len(leaves)} in"
      f" {what}."
    )
  is_bound = _layouts.is_bound(dealt.names[0])
  for (name, leaf), part in zip(leaves, dealt.parts):
    axes = sum(part.axes, ())
    shape = list(part.block)
    if not is_bound:
      shape = [n * math.prod(sizes[axis] for axis in names) for n, names in zip(shape, part.axes)]
    if list(leaf.shape) != shape:
      raise ValueError(
        f"whole_matrices: {what} of {name} must be {shape}, as init was given it; got"
        f" {list(leaf.shape)}."
      )
    differs = varying(leaf) & set(dealt.names) - set(axes)
    if differs:
      raise ValueError(
        f"whole_matrices: {what} of {name} differs from device to device over {named(differs)},"
        f" and its spec is {part.spec}. Reduce it first, or correct specs."
      )
    equal = varying(per_shard(leaf, axes if is_bound else ())) - varying(leaf)
    if equal:
      raise ValueError(
        f"whole_matrices: {what} of {name} is equal on all devices of {named(equal)}, and"
        f" {part.spec} says that each has another part. Correct specs."
      )
  return [leaf for _, leaf in leaves]


def _by_kind(dealt, leaves):
  """A device's blocks of the matrices of each kind, `[num_matrices, *block]`."""
  stacks: dict[Kind, list[jax.Array]] = {}
  for part, leaf in zip(dealt.parts, leaves, strict=True):
    num_stacked = leaf.ndim - len(part.kind.shape)
    stack = math.prod(leaf.shape[:num_stacked]), *leaf.shape[num_stacked:]
    stacks.setdefault(part.kind, []).append(leaf.reshape(stack))
  return {kind: jnp.concatenate(stack) for kind, stack in stacks.items()}


def _by_leaf(dealt, blocks, like):
  """The inverse of `_by_kind`."""
  leaves, starts = [], dict.fromkeys(blocks, 0)
  for part, leaf in zip(dealt.parts, like, strict=True):
    start = starts[part.kind]
    end = start + math.prod(leaf.shape[: leaf.ndim - len(part.kind.shape)])
    leaves.append(blocks[part.kind][start:end].reshape(leaf.shape))
    starts[part.kind] = end
  return leaves


def _typed_like(tree, like):
  """The tree, typed as varying over the axes over which the leaves of `like` vary."""

  def typed(x, like):
    missing = tuple(varying(like) - varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(typed, tree, like)
