"""The norm of all updates together, sharded or not."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_wrappers._core import _axes, _checks, _collectives, _numerics, _paths, _states
from optax_wrappers._core._states import require_state
from optax_wrappers._core._types import AxisNames, Tree
from optax_wrappers.states import Shares


@_states.dataclass
class ClipByGlobalNormState(_states.State):
  """State of `clip_by_global_norm`.

  Attributes:
    shares: the layout that `cross_shard(shard_state=True)` outside gives; it has no leaves.
  """

  shares: Shares


def clip_by_global_norm(
  max_norm: Any, *, specs: Tree = None
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
  wrapper = "clip_by_global_norm"
  max_norm = _checks.number(wrapper, "max_norm", max_norm, lambda x: x >= 0, "at least 0")

  def init_fn(params):
    del params
    return ClipByGlobalNormState(shares=Shares())

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    require_state(wrapper, state, ClipByGlobalNormState)
    updates = _checks.inexact(wrapper, updates)
    if state.shares.is_asked:
      return updates, state
    norm = _norm(wrapper, state.shares.own(updates), specs, state.shares.names)

    wide = _numerics.promote(norm.dtype, jnp.float32)
    divisor = jnp.where(norm == 0, 1, norm).astype(wide)

    def clipped(x):
      # Optax's formula, for the same bits, but rounded once in a narrow dtype, in which the norm
      # may be infinite.
      dtype = _numerics.at_least_float32(x.dtype)
      scaled = _numerics.times(max_norm, x.astype(dtype) / divisor.astype(dtype))
      return _numerics.select(norm < max_norm, x, scaled.astype(x.dtype))

    return jax.tree.map(clipped, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def global_norm(tree: Tree, *, specs: Tree = None) -> jax.Array:
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
  return _norm("global_norm", _checks.inexact("global_norm", tree), specs, ())


def _norm(wrapper, tree, specs, shared_over):
  return jnp.sqrt(sum(squares(wrapper, tree, specs, shared_over), jnp.zeros(())))


def squares(
  wrapper: str, tree: Tree, specs: Tree, shared_over: AxisNames = ()
) -> Sequence[jax.Array]:
  """The squared norm of every leaf as a whole, in float32 or wider.

  Args:
    wrapper: the name that errors give.
    tree: what this device has.
    specs: see `clip_by_global_norm`.
    shared_over: axes over which all but scalars are shares as well.
  """
  leaves = _paths.named_leaves(tree)
  over = [
    (*names, *(shared_over if jnp.ndim(leaf) else ()))
    for names, (_, leaf) in zip(_divided_over(wrapper, tree, specs, shared_over), leaves)
  ]
  own = [_numerics.squared_length(leaf, _real(leaf.dtype)) for _, leaf in leaves]
  groups: dict[frozenset, list[int]] = {}  # what is divided over the same axes
  for i, names in enumerate(over):
    if names:
      groups.setdefault(frozenset(names), []).append(i)
  for group in groups.values():
    dtype = _numerics.promote(*(own[i].dtype for i in group))
    total = _collectives.psum(jnp.stack([own[i].astype(dtype) for i in group]), over[group[0]])
    for i, square in zip(group, total):
      own[i] = square
  return own


def _real(dtype):
  """The dtype of the squared norm of an array of this dtype."""
  return _numerics.at_least_float32(jnp.finfo(dtype).dtype)


def _divided_over(wrapper, tree, specs, shared_over):
  """For each leaf, the bound axes that shard it. XLA sums over other axes by itself."""
  leaves = _paths.named_leaves(tree)
  if specs is None:
    for name, leaf in leaves:
      over = _axes.varying(leaf) - set(shared_over)
      if over:
        raise ValueError(
          f"{wrapper}: specs is needed: {name or 'the update'} differs from shard to shard over"
          f" {sorted(map(str, over))}. Pass the parameters' PartitionSpecs; PartitionSpec() clips"
          " each shard's own gradient by its own norm."
        )
    return [()] * len(leaves)
  is_spec = _checks.is_a(PartitionSpec)
  mesh = jax.sharding.get_abstract_mesh()
  found = []
  for spec, (name, leaf) in zip(
    _checks.spread(wrapper, "specs", specs, tree, is_spec, "PartitionSpecs"), leaves, strict=True
  ):
    names = _axes.names_in(spec, range(len(spec)))
    bound = tuple(axis for axis in names if _axes.is_bound(axis))
    lost = [axis for axis in names if axis not in bound and mesh.shape and axis not in mesh.shape]
    if lost or len(spec) > jnp.ndim(leaf):
      why = f"{lost[0]!r} is no axis here" if lost else f"it has {jnp.ndim(leaf)} axes"
      raise ValueError(f"{wrapper}: specs has {spec} for {name or 'the update'}, but {why}.")
    found.append(bound)
  others = {axis for bound in found for axis in bound} - set(shared_over)
  for bound, (name, leaf) in zip(found, leaves):
    differs = sorted(map(str, (others & _axes.varying(leaf)) - set(bound)))
    if bound and differs:
      raise ValueError(
        f"{wrapper}: specs has {bound} for {name or 'the update'}, which differs over {differs}"
        " too, and other updates are sharded over these. Name all of its axes, or none,"
        " PartitionSpec(), if each device has a gradient of its own."
      )
    equal = sorted(map(str, set(_axes.tracked(bound)) - _axes.varying(leaf)))
    if equal:
      raise ValueError(
        f"{wrapper}: specs has {bound} for {name or 'the update'}, which is equal over {equal}, so"
        " that it would be counted once for each device. Leave these out."
      )
  return found
