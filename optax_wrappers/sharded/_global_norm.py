"""The norm of all updates together, sharded or not."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from optax_wrappers import per_shard, states
from optax_wrappers.sharded import _layouts
from optax_wrappers.sharded._layouts import named, varying


@states.dataclass
class ClipByGlobalNormState(states.State):
  """State of `clip_by_global_norm`.

  Attributes:
    shares: the layout that `cross_shard(shard_state=True)` outside gives; it has no leaves.
  """

  shares: states.Shares


def clip_by_global_norm(
  max_norm: Any, *, specs: Any = None
) -> optax.GradientTransformationExtraArgs:
  """Scales updates so that their global norm is at most `max_norm`.

  Like `optax.clip_by_global_norm`, but also right for parameters that are sharded over devices
  inside `jax.shard_map` or `jax.pmap`, and inside `cross_shard(shard_state=True)`. Under plain
  `jax.jit` both are the same. Below the limit the updates do not change, bit for bit.

  Args:
    max_norm: the limit, a real scalar, at least 0.
    specs: how the updates are sharded: PartitionSpecs, a tree of their structure or a prefix of it.
      `PartitionSpec()`: replicated, or a local gradient, clipped by its own norm. None: not sharded
      by hand.

  Returns:
    A gradient transformation with a `ClipByGlobalNormState`, which has no leaves.

  Raises:
    ValueError: for a limit below 0; in update, for an axis that is not there, and without `specs`
      for an update that differs from shard to shard, as far as types tell (`check_vma=True`).
    TypeError: in update, for integer updates.

  **Communication**: a scalar for each leaf, in one all-reduce for each set of bound axes in specs.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> specs = {"kernel": P("data"), "bias": P()}
    >>> tx = ow.clip_by_global_norm(1.0, specs=specs)
    >>> clip = lambda grads: tx.update(grads, tx.init(grads))[0]
    >>> mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    >>> layout = {"in_specs": (specs,), "out_specs": specs}
    >>> clip = jax.shard_map(clip, mesh=mesh, **layout)
    >>> clip({"kernel": jnp.full(4, 4.0), "bias": jnp.array([6.0])})["bias"]
    Array([0.6], dtype=float32)

  Source: Pascanu et al., 2012, "On the difficulty of training recurrent neural networks".
  """
  is_number = isinstance(max_norm, numbers.Real | jax.Array)
  if not is_number or jnp.shape(max_norm):
    raise TypeError(
      f"clip_by_global_norm: max_norm must be a real scalar, at least 0; got {max_norm!r}."
    )
  # A traced limit has no value to check.
  if not isinstance(max_norm, jax.core.Tracer) and not max_norm >= 0:
    raise ValueError(f"clip_by_global_norm: max_norm must be at least 0, got {max_norm}.")

  def init_fn(params):
    del params
    return ClipByGlobalNormState(shares=states.Shares())

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    if not isinstance(state, ClipByGlobalNormState):
      raise TypeError(
        f"clip_by_global_norm: state must be a ClipByGlobalNormState, from init; got {state!r}."
      )
    shares = state.shares
    updates = _inexact("clip_by_global_norm", updates)
    if shares.is_asked:
      return updates, state
    norm = _norm("clip_by_global_norm", shares.own(updates), specs, shares.names)
    divisor = jnp.where(norm == 0, 1, norm)

    def clipped(x):
      # Optax's formula, for the same bits, but rounded once in a narrow dtype, in which the norm
      # may be infinite.
      wide = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
      scaled = jnp.asarray(max_norm, wide.dtype) * (wide / divisor.astype(wide.dtype))
      return lax.select(norm < jnp.asarray(max_norm, norm.dtype), x, scaled.astype(x.dtype))

    return jax.tree.map(clipped, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def global_norm(tree: Any, *, specs: Any = None) -> jax.Array:
  """The norm of all leaves together, also where they are divided over devices.

  Args:
    tree: real or complex arrays; inside `jax.shard_map`, this device's part of them.
    specs: how they are divided, see `clip_by_global_norm`.

  Returns:
    A real scalar, float32 or wider, equal on all devices over whose axes a leaf is divided.

  Raises:
    ValueError, TypeError: see `clip_by_global_norm`.

  **Communication**: that of `clip_by_global_norm`.

  Examples:
    >>> import jax.numpy as jnp, optax_wrappers as ow
    >>> tree = {"kernel": jnp.array([3.0]), "bias": jnp.array([4.0])}
    >>> print(ow.global_norm(tree))
    5.0
  """
  return _norm("global_norm", _inexact("global_norm", tree), specs)


def _inexact(function, tree):
  """The tree as real or complex arrays: integers have no norm."""
  tree = jax.tree.map(jnp.asarray, tree)
  for path, leaf in jax.tree.leaves_with_path(tree):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise TypeError(
        f"{function}: updates{jax.tree_util.keystr(path)} has dtype {leaf.dtype}; it must be"
        " floating point or complex. Mask it with optax.masked."
      )
  return tree


def _norm(function, tree, specs, shared_over=()):
  """The norm, where all but scalars are also shares over the axes `shared_over`."""
  leaves = jax.tree.leaves(tree)
  if specs is None:
    _require_whole(function, tree, shared_over)
    axes = [()] * len(leaves)
  else:
    axes = _axes_by_spec(function, tree, specs)
    _require_parts(function, tree, axes, shared_over)
  over = [
    names + shared_over if leaf.ndim else names for names, leaf in zip(axes, leaves, strict=True)
  ]
  dtype = jnp.float64 if any(jnp.finfo(x.dtype).bits == 64 for x in leaves) else jnp.float32
  squares = [jnp.sum(jnp.square(jnp.abs(x).astype(dtype))) for x in leaves]
  for group in dict.fromkeys(map(frozenset, over)):
    chosen = [i for i, names in enumerate(over) if frozenset(names) == group]
    names = over[chosen[0]]
    if names:
      # The sum counts a value that is equal on all devices once only, unless it is marked.
      parts = per_shard(jnp.stack([squares[i] for i in chosen]), names)
      for i, total in zip(chosen, lax.psum(parts, names)):
        squares[i] = total
  return jnp.sqrt(sum(squares, jnp.zeros((), dtype)))


def _require_whole(function, tree, shared_over):
  """Raises for an update of which, by its type, each shard has another part."""
  for name, leaf in _layouts.named_leaves(tree):
    over = varying(leaf) - set(shared_over)
    if over:
      raise ValueError(
        f"{function}: specs is needed: {name} differs from shard to shard over {named(over)}. Pass"
        " the parameters' PartitionSpecs; PartitionSpec() clips each shard's own gradient by its"
        " own norm."
      )


def _axes_by_spec(function, tree, specs):
  """For each leaf, the bound axes that shard it. XLA sums over other axes by itself."""
  specs = _layouts.for_each_leaf(function, "specs", specs, tree, PartitionSpec, "PartitionSpecs")
  mesh_axes = jax.sharding.get_abstract_mesh().shape
  axes = []
  for spec, (name, leaf) in zip(specs, _layouts.named_leaves(tree), strict=True):
    if len(spec) > leaf.ndim:
      raise ValueError(f"{function}: specs has {spec} for {name}, but it has {leaf.ndim} axes.")
    names = sum(_layouts.axes_by_dimension(spec), ())
    bound = tuple(filter(_layouts.is_bound, names))
    for axis in names:
      if mesh_axes and axis not in mesh_axes and axis not in bound:
        raise ValueError(f"{function}: specs has {spec} for {name}, but {axis!r} is no axis here.")
    axes.append(bound)
  return axes


def _require_parts(function, tree, axes, shared_over):
  """Raises for an update that, by its type, is divided over other axes than its spec says."""
  sharding = set().union(*axes) - set(shared_over)
  for names, (name, leaf) in zip(axes, _layouts.named_leaves(tree), strict=True):
    differs = sharding & varying(leaf) - set(names)
    if names and differs:
      raise ValueError(
        f"{function}: specs has {names} for {name}, which differs over {named(differs)} too, and"
        " other updates are sharded over these. Name all of its axes, or none, PartitionSpec(), if"
        " each device has a gradient of its own."
      )
    equal = varying(per_shard(leaf, names)) - varying(leaf)
    if equal:
      raise ValueError(
        f"{function}: specs has {names} for {name}, which is equal over {named(equal)}, so that it"
        " would be counted once for each device. Leave these out."
      )
