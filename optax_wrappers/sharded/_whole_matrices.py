"""Optimizers of whole matrices, for parameters that are sharded over devices.

Matrices of one kind (equal shape and sharding) are stacked and distributed over the devices: slot u
of K N goes to device u // K. One all-to-all turns a device's blocks of all matrices into K whole
matrices; the device calls the optimizer on these and sends the results back by another all-to-all.
There is one exchange per kind, never a flat buffer: on a TPU that takes four times as long.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from optax_wrappers._core import _axes, _checks, _collectives, _numerics, _paths, _states, _waits
from optax_wrappers._core._states import require_same, require_state, static
from optax_wrappers._core._types import AxisName, AxisNames, Tree

_WRAPPER = "whole_matrices"


@dataclasses.dataclass(frozen=True)
class Kind:
  """Matrices of equal shape, dtype and sharding."""

  shape: tuple[int, ...]  # of one matrix
  dtype: Any
  cut: tuple[AxisNames, ...]  # for each dimension, the axes that shard it
  over: AxisNames  # the axes over whose devices they are distributed
  in_place: tuple[tuple[Any, int], ...] = ()  # those that shard the stack, with their sizes

  @property
  def key(self) -> str:
    """Its name in a state and in a checkpoint."""
    cut = ("+".join(map(str, names)) or "-" for names in self.cut)
    # Slots of a stack that is itself sharded are in the order of its devices.
    places = (f"{name}{size}" for name, size in self.in_place)
    return "_".join([str(self.dtype), "x".join(map(str, self.shape)), *cut, *places])


@static
class Dealt:
  """In the state of `whole_matrices`: how the matrices are sharded and distributed."""

  names: AxisNames
  # For every leaf:
  specs: tuple[PartitionSpec, ...]  # over `names` only
  blocks: tuple[tuple[int, ...], ...]  # the shape of a device's part
  kinds: tuple[Kind, ...]

  def __repr__(self) -> str:
    return f"Dealt({self.names})"


@_states.dataclass
class WholeMatricesState(_states.State):
  """State of `whole_matrices`.

  Attributes:
    dealt: how the matrices are sharded and distributed; it has no leaves.
    inner_state: for each kind of matrices the states of the wrapped optimizer, stacked,
      `[num_slots, ...]`: slot u is that of matrix u, in the order of the leaves. `num_slots` is a
      multiple of the number of devices; slots that are left over hold copies.
  """

  dealt: Dealt
  inner_state: dict[str, Tree] = _states.field(slots=True)

  @property
  def slot_names(self):
    return self.dealt.names


def whole_matrices(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  specs: Tree = None,
  mesh: Mesh | AbstractMesh | None = None,
  stacked: Tree = 0,
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
  inner = _checks.optimizer(_WRAPPER, inner)
  names = _axes.axis_names(axis_name)
  if not names:
    raise ValueError(f"{_WRAPPER}: axis_name must name an axis, got {axis_name!r}.")

  def run(body, in_specs, out_specs, *args):
    """`body(*args)`, in a `shard_map` if the axes are not bound."""
    if _axes.is_bound(names[0]):
      return body(*args)
    # Inside another shard_map only the current mesh is allowed.
    is_inside = jax.sharding.get_abstract_mesh().manual_axes
    mapped = jax.shard_map(
      body,
      mesh=None if is_inside else mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=set(names),
      check_vma=False,  # an optimizer may start a loop from constants
    )
    # Outside jit, jax 0.10 does not run a shard_map over some of the axes.
    return jax.jit(mapped)(*args)

  def init_fn(params):
    params = _checks.arrays(params)
    dealt = _plan(params, names, specs, mesh, stacked)

    def start(leaves):
      started = {}
      for kind, x in _by_kind(dealt, leaves).items():
        way = _Way.of(kind)
        started[kind.key] = lax.map(lambda one, way=way: inner.init(way.joined(one)), way.deal(x))
      return started

    leaves = jax.tree.leaves(params)
    inner_state = run(start, (list(dealt.specs),), PartitionSpec(names), leaves)
    return WholeMatricesState(dealt=dealt, inner_state=inner_state)

  def update_fn(updates, state, params=None, **extra_args):
    require_state(_WRAPPER, state, WholeMatricesState)
    dealt = state.dealt
    require_same(_WRAPPER, dealt.names, names)
    given = {"updates": updates} | ({} if params is None else {"params": params})
    columns = [_leaves(dealt, name, tree, _sizes(names, mesh)) for name, tree in given.items()]
    leaves, treedef = columns[0], jax.tree.structure(updates)

    # An array in a closure cannot be sharded over Explicit axes.
    extra, extra_def = jax.tree.flatten(extra_args)
    passed = {i: x for i, x in enumerate(extra) if isinstance(x, jax.Array)}

    def step(inner_state, passed, *columns):
      extra_args = extra_def.unflatten([passed.get(i, x) for i, x in enumerate(extra)])
      new_leaves, new_state = list(columns[0]), {}
      by_kind = [_by_kind(dealt, leaves) for leaves in columns]
      for kind in by_kind[0]:
        way = _Way.of(kind)

        def one(states, args, way=way):
          slot, *parts = args
          own = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), states)
          update, *param = map(way.joined, parts)
          result, own = inner.update(update, own, *param, **extra_args)
          # In place: the states are the largest arrays here.
          put = functools.partial(lax.dynamic_update_index_in_dim, index=slot, axis=0)
          return jax.tree.map(put, states, own), way.parts(result)

        own = [way.deal(leaves[kind]) for leaves in by_kind]
        _check_slots(kind, inner_state, len(own[0]))
        # A value computed in an unchecked shard_map loses the varying axes of an outer one. A slice
        # of everything gets that type in advance.
        states = jax.tree.map(lambda x: lax.slice_in_dim(x, 0, None), inner_state[kind.key])
        states = _axes.to_varying(states, names)
        slots = jnp.arange(len(own[0]))
        one = jax.jit(one, inline=True)  # the check and the loop share one trace
        _check_alone(
          jax.make_jaxpr(one)(states, jax.tree.map(lambda x: x[0], (slots, *own))), names
        )
        new_state[kind.key], results = lax.scan(one, states, (slots, *own))
        blocks, start = way.give_back(results), 0
        for i in [i for i, other in enumerate(dealt.kinds) if other == kind]:
          like = columns[0][i]
          end = start + math.prod(like.shape[: like.ndim - len(kind.shape)])
          new_leaves[i], start = blocks[start:end].reshape(like.shape), end
      return new_leaves, new_state

    cut, over = list(dealt.specs), PartitionSpec(names)
    in_specs = over, PartitionSpec(), *[cut] * len(columns)
    new, inner_state = run(step, in_specs, (cut, over), state.inner_state, passed, *columns)
    new = _axes.vary_like(new, leaves)
    inner_state = _axes.vary_like(inner_state, state.inner_state)
    return treedef.unflatten(new), state.replace(inner_state=inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _sizes(names, mesh):
  """The sizes of the axes, which are all bound here, or all in the current mesh."""
  bound = [name for name in names if _axes.is_bound(name)]
  if bound:
    if len(bound) < len(names):
      raise ValueError(
        f"{_WRAPPER}: of axis_name={names!r} only {bound} are axes of the shard_map around it. Map"
        " over all of them, or leave all of them to XLA."
      )
    return {name: lax.axis_size(name) for name in names}
  mesh = mesh or jax.sharding.get_abstract_mesh()
  missing = [name for name in names if name not in mesh.shape]
  if missing:
    raise ValueError(
      f"{_WRAPPER}: axis_name {missing[0]!r} is neither bound here nor an axis of the mesh,"
      f" {dict(mesh.shape)}. Pass mesh=, or use jax.set_mesh."
    )
  return {name: mesh.shape[name] for name in names}


def _specs(params, names, specs):
  """The PartitionSpec of every leaf, as given or from its type."""
  if specs is not None:
    is_spec = _checks.is_a(PartitionSpec)
    return _checks.spread(_WRAPPER, "specs", specs, params, is_spec, "PartitionSpecs")
  found = []
  for name, leaf in _paths.named_leaves(params):
    sharding = jax.typeof(leaf).sharding
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types))
    if any(kinds.get(axis) != AxisType.Explicit for axis in names):
      raise ValueError(
        f"{_WRAPPER}: specs is needed: the type of {name or 'the parameter'} does not say how it is"
        f" divided over {names}, as on an Explicit mesh. Pass the parameters' PartitionSpecs."
      )
    found.append(sharding.spec)
  return found


def _plan(params, names, specs, mesh, stacked):
  """How the matrices of these parameters are distributed."""
  sizes = _sizes(names, mesh)
  is_int = _checks.is_a(int)
  counts = _checks.spread(_WRAPPER, "stacked", stacked, params, is_int, "Python ints")
  columns = _paths.named_leaves(params), _specs(params, names, specs), counts
  plans = [
    _planned(name or "the parameter", leaf, spec, num_stacked, sizes)
    for (name, leaf), spec, num_stacked in zip(*columns, strict=True)
  ]
  return Dealt(names, *map(tuple, zip(*plans)) if plans else ((), (), ()))


def _planned(name, leaf, spec, num_stacked, sizes):
  """The spec over these axes only, the shape of a device's part, and the kind of a parameter."""
  names, shape = tuple(sizes), jnp.shape(leaf)
  unnamed = (axis for axis in _axes.names_in(spec, range(len(spec))) if axis not in names)
  bound = list(filter(_axes.is_bound, unnamed))
  if not 0 <= num_stacked <= len(shape) or len(spec) > len(shape):
    what = f"stacked={num_stacked} and {spec} must fit {name}, which has {len(shape)} axes"
    raise ValueError(f"{_WRAPPER}: {what}.")
  cut = [_axes.names_in(spec, [d]) for d in range(len(shape))]
  others = bound or [other for part in cut[num_stacked:] for other in part if other not in names]
  if others:
    raise ValueError(
      f"{_WRAPPER}: {name} is divided over {others[0]!r} by {spec}, which is not in"
      f" axis_name={names!r}. Name it too: axis_name={(others[0], *names)!r}."
    )
  cut = [tuple(axis for axis in part if axis in names) for part in cut]
  parts = [math.prod(sizes[axis] for axis in part) for part in cut]
  whole, block = shape, shape
  if _axes.is_bound(names[0]):
    whole = tuple(n * k for n, k in zip(shape, parts))
  elif any(n % k for n, k in zip(shape, parts)):
    raise ValueError(f"{_WRAPPER}: {spec} does not divide {name} {list(shape)} over {sizes}.")
  else:
    block = tuple(n // k for n, k in zip(shape, parts))
  in_place = tuple((axis, sizes[axis]) for part in cut[:num_stacked] for axis in part)
  over = tuple(axis for axis in names if axis not in dict(in_place))
  dtype = _numerics.dtype_of(leaf)
  kind = Kind(whole[num_stacked:], dtype, tuple(cut[num_stacked:]), over, in_place)
  return PartitionSpec(*[part or None for part in cut]), block, kind


def _leaves(dealt, what, tree, sizes):
  """The leaves of updates or parameters, which must match those given to `init`."""
  tree = _checks.arrays(tree)
  leaves = _paths.named_leaves(tree)
  if len(leaves) != len(dealt.kinds):
    made = f"{_WRAPPER}: the state was made for {len(dealt.kinds)} parameters"
    raise ValueError(f"{made}, got {len(leaves)} in {what}.")
  is_bound = _axes.is_bound(dealt.names[0])
  for (name, leaf), spec, block in zip(leaves, dealt.specs, dealt.blocks):
    cut = [_axes.names_in(spec, [d]) for d in range(len(block))]
    parts = [1 if is_bound else math.prod(sizes[axis] for axis in part) for part in cut]
    needed = [n * k for n, k in zip(block, parts)]
    if list(leaf.shape) != needed:
      made = f"{_WRAPPER}: {what} of {name or 'the parameter'} must be {needed}"
      raise ValueError(f"{made}, as init was given it; got {list(leaf.shape)}.")
    over = _axes.varying(leaf) & set(dealt.names) - set(sum(cut, ()))
    if over:
      raise ValueError(
        f"{_WRAPPER}: {what} of {name or 'the parameter'} differs from device to device over"
        f" {sorted(map(str, over))}, and its spec is {spec}. Reduce it first, or correct specs."
      )
    equal = set(_axes.tracked(tuple(filter(_axes.is_bound, sum(cut, ()))))) - _axes.varying(leaf)
    if equal:
      raise ValueError(
        f"{_WRAPPER}: {what} of {name or 'the parameter'} is equal on all devices of"
        f" {sorted(map(str, equal))}, and {spec} says that each has another part. Correct specs."
      )
  return [leaf for _, leaf in leaves]


def _check_alone(traced, names):
  """Raises if `inner` communicates with devices that have other matrices."""
  over = _waits.sending_names(traced.jaxpr) & set(names)
  if over:
    raise ValueError(
      f"{_WRAPPER}: inner reduces or sends over {sorted(map(str, over))}, where each device has"
      " another matrix. Put what does so outside: cross_shard(whole_matrices(...), ...)."
    )


def _check_slots(kind, inner_state, needed):
  """Raises for a state that is sharded over, or was made for, another number of devices."""
  for leaf in jax.tree.leaves(inner_state[kind.key]):
    if leaf.shape[:1] != (needed,):
      raise ValueError(
        f"{_WRAPPER}: a device must have {needed} slots of inner_state[{kind.key!r}], got"
        f" {list(leaf.shape)}. Lay it out by specs, over as many devices as it was made for."
      )


def _block(kind, sizes):
  """The shape of a device's part of one matrix."""
  parts = (math.prod(sizes[name] for name in cut) for cut in kind.cut)
  return tuple(n // num_parts for n, num_parts in zip(kind.shape, parts))


def _by_kind(dealt, leaves):
  """A device's blocks of the matrices of each kind, `[num_matrices, *block]`."""
  groups: dict[Kind, list[jax.Array]] = {}
  for kind, leaf in zip(dealt.kinds, leaves, strict=True):
    num_stacked = leaf.ndim - len(kind.shape)
    stack = math.prod(leaf.shape[:num_stacked]), *leaf.shape[num_stacked:]
    groups.setdefault(kind, []).append(leaf.reshape(stack))
  return {kind: jnp.concatenate(blocks) for kind, blocks in groups.items()}


class _Way(NamedTuple):
  """How a device exchanges its blocks of the matrices of one kind, inside a `shard_map`.

  The devices over `cut` hold the parts of one matrix, those over `rest` are replicas.
  """

  over: dict[Any, int]  # the sizes of all axes
  cut: AxisNames
  rest: AxisNames
  block: tuple[int, ...]
  shape: tuple[int, ...]
  order: list[int]  # of the axes over `cut` and the dimensions of a block, in a whole matrix

  @classmethod
  def of(cls, kind: Kind) -> "_Way":
    over = {name: lax.axis_size(name) for name in kind.over}
    cut = tuple(name for name in over if any(name in part for part in kind.cut))
    rest = tuple(name for name in over if name not in cut)
    order: list[int] = []
    for d, part in enumerate(kind.cut):
      order += [*map(cut.index, part), len(cut) + d]
    return cls(over, cut, rest, _block(kind, over), kind.shape, order)

  def sizes(self, names: Sequence[Any]) -> list[int]:
    return [self.over[name] for name in names]

  def deal(self, x: jax.Array) -> jax.Array:
    """The parts of this device's matrices, `[num_own, num_parts, *block]`, from its `[G, *block]`.

    The digits of a slot are its coordinates on the mesh and a position on a device.
    """
    num_devices = math.prod(self.over.values())
    num_own = -(-len(x) // num_devices)
    missing = num_own * num_devices - len(x)
    if missing:  # copies are harmless in unused slots; zeros might not be
      x = jnp.concatenate([x] * (1 + -(-missing // len(x))))[: num_own * num_devices]
    x = x.reshape(*self.over.values(), num_own, *self.block)
    for name in reversed(self.rest):
      d = list(self.over).index(name)
      x = lax.dynamic_index_in_dim(x, lax.axis_index(name), d, keepdims=False)
    x = x.reshape(math.prod(self.sizes(self.cut)), num_own, *self.block)
    return _collectives.all_to_all(x, self.cut, 0, 1) if self.cut else jnp.moveaxis(x, 0, 1)

  def give_back(self, x: jax.Array) -> jax.Array:
    """The inverse of `deal`, with the unused slots at the end."""
    x = _collectives.all_to_all(x, self.cut, 1, 0) if self.cut else jnp.moveaxis(x, 1, 0)
    if self.rest:
      x = _collectives.all_gather(x, self.rest)
    now = [*self.rest, *self.cut]
    x = x.reshape(*self.sizes(now), *x.shape[-1 - len(self.block) :])
    x = x.transpose(*map(now.index, self.over), *range(len(now), x.ndim))
    return x.reshape(math.prod(x.shape[: 1 + len(now)]), *self.block)

  def joined(self, parts: jax.Array) -> jax.Array:
    """A whole matrix from its parts."""
    parts = parts.reshape(*self.sizes(self.cut), *self.block)
    return parts.transpose(self.order).reshape(self.shape)

  def parts(self, whole: jax.Array) -> jax.Array:
    """The inverse of `joined`."""
    split = [*self.sizes(self.cut), *self.block]
    x = whole.reshape([split[d] for d in self.order])
    x = x.transpose(np.argsort(self.order))
    return x.reshape(math.prod(self.sizes(self.cut)), *self.block)
