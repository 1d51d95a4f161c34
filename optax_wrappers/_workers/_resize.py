"""Changes the number of workers: removes and adds rows of states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core import _axes, _checks, _numerics, _paths, _shares
from optax_wrappers._core._types import Tree
from optax_wrappers._shards._compress import CompressedState
from optax_wrappers._workers._layout import Holder, holders

_WRAPPER = "resize_workers"


def resize_workers(
  state: Tree,
  keep: Sequence[int],
  num_new: int = 0,
  newcomer: Any = "mean",
  *,
  replicated: bool = False,
  params: Tree = None,
) -> Tree:
  """Removes workers from a stacked state and adds new ones.

  Works on any stacked tree: parameters, an optimizer state, a tuple of both, a `TrainState`. The
  step compiles again for the new shapes. Shared leaves, such as a center, do not change. What a
  worker that leaves holds for all, the residual of a codec or gradients that `gather_towers` has
  accumulated in this step, goes to those that stay, in equal parts.

  Args:
    state: the stacked state of W workers, as `stack_workers` lays it out.
    keep: which workers stay, indices below W, in their new order.
    num_new: how many workers join, after those that stay.
    newcomer: the start of new workers. "mean": the mean over those that stay, or the value of the
      first for leaves that are not floating point. An index below W: that worker. Or one worker's
      tree of the structure of `state`, not stacked, such as `(center, tx.init(center))`; its shared
      leaves, residuals and counts of schedules are not used: a schedule goes on as the others'.
    replicated: see `stack_workers`.
    params: one worker's parameters, arrays or `jax.ShapeDtypeStruct`; needed for leaves that are
      divided over the workers, such as a center with `shard_center`.

  Returns:
    The state of `len(keep) + num_new` workers, divided again over them. Random keys of new workers
    are split from the key that they would have copied, whose owner continues with another part:
    typed keys, and uint32 pairs in a field with "key" or "rng" in its name.

  Raises:
    ValueError, TypeError: for indices that are not workers, or named twice; if no worker is left;
      for a leaf that is not stacked, and for an invalid newcomer.

  **Communication**: whatever JAX needs to read sharded rows.

  Examples:
    The second of three workers is lost, and another one joins at the center:

    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), "workers")
    >>> opt_state = ow.stack_workers(tx.init(jnp.array(5.0)), 3)
    >>> center, params = ow.center_params(opt_state), jnp.array([1.0, 2.0, 3.0])
    >>> both, start = (params, opt_state), (center, tx.init(center))
    >>> params, opt_state = ow.resize_workers(both, [0, 2], 1, start)
    >>> print(params, opt_state.inner_state[0].trace.shape)
    [1. 3. 5.] (3,)
  """
  of_whom = holders(state, replicated=replicated)
  num_workers = _num_workers(state, of_whom)
  staying = _checked_keep(keep, num_workers)
  num_new = _checks.integer(_WRAPPER, "num_new", num_new, minimum=0)
  if not staying and not num_new:
    raise ValueError(f"{_WRAPPER}: keep is empty and num_new is 0, which leaves no workers.")
  first, rows = _checked_newcomer(newcomer, state, staying, num_workers, num_new)
  if staying == list(range(num_workers)) and not num_new:
    return state

  paths = [keys for keys, _ in _paths.leaves_with_keys(state)]
  shapes = None if params is None else dict(_paths.leaves_with_keys(params))
  members = _Members(staying, num_new, first, shapes, _paths.OfParams(paths, shapes or ()))

  def resized(node, whose, keys, row):
    is_compressed = isinstance(node, CompressedState)
    if is_compressed and Holder.DIVIDED in jax.tree.leaves(whose.owner_residual):
      return _without_owners(members, node, whose, keys, row)
    return jax.tree.map(members.leaf, node, whose, keys, row)

  treedef: Any = jax.tree.structure(state)
  columns = map(treedef.unflatten, (paths, _used(rows, state, staying)))
  return jax.tree.map(resized, state, of_whom, *columns, is_leaf=_checks.is_a(CompressedState))


def _used(rows, state, staying):
  """One worker's leaves, None for counts that are not of its own moments, such as a schedule's.

  New workers then get those of a worker that stays.
  """
  leaves = jax.tree.leaves_with_path(state)

  def is_shared(path, leaf):
    fields = [d for d, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)]
    if not fields or not jnp.issubdtype(_numerics.dtype_of(leaf), jnp.integer):
      return False
    root = path[: fields[-1]]
    inside = (other[: len(root)] == root and _numerics.is_inexact(x) for other, x in leaves)
    return not any(inside) or isinstance(_paths.at(state, root), _INJECTED)

  pairs = zip(rows, leaves, strict=True)
  return [None if staying and is_shared(*leaf) else row for row, leaf in pairs]


_INJECTED = optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState


class _Members(NamedTuple):
  """The remaining workers, in order, and then the new ones."""

  keep: list[int]
  num_new: int
  # The worker that new ones start from; None: the mean, or a tree.
  first: int | None
  # One worker's parameters by their paths.
  shapes: dict[tuple[str, ...], Any] | None
  whose: _paths.OfParams  # the parameter of each leaf

  @property
  def size(self) -> int:
    return len(self.keep) + self.num_new

  def leaf(self, leaf: Any, holder: Holder, keys: tuple[str, ...], row: Any) -> Any:
    """One leaf of the resized state."""
    if holder is Holder.SHARED:
      return leaf
    leaf = _axes.undivided(jnp.asarray(leaf), 1)
    if holder is Holder.DIVIDED:
      return self._divided(leaf, keys)
    # The rows of the remaining workers.
    staying = leaf[jnp.asarray(self.keep, jnp.int32)]
    if holder in (Holder.PART, Holder.VOTE):
      return self._handed_on(leaf, staying, holder is Holder.VOTE)
    if not self.num_new:
      return staying
    is_key = _is_key(keys, leaf)
    if row is not None:
      new, owner = _checked_row(leaf, "/".join(keys), row), None
    elif self.first is not None:
      new, owner = leaf[self.first], self.first  # a copy of one worker
    elif is_key or not _numerics.is_inexact(leaf):
      new, owner = staying[0], self.keep[0]  # for dtypes without a mean
    else:
      dtype = _numerics.at_least_float32(leaf.dtype)
      new, owner = staying.astype(dtype).mean(0).astype(leaf.dtype), None
    if is_key:
      return self._with_own_keys(staying, new, owner)
    return jnp.concatenate([staying, jnp.broadcast_to(new[None], (self.num_new, *new.shape))])

  def _handed_on(self, parts, rows, is_mean):
    """Parts of a sum that stays the same: workers that leave pass theirs to those that remain.

    Or of a mean, with which new workers join.
    """
    # New workers have none of a sum, or all of it if no worker remains.
    heirs = len(self.keep) or self.num_new
    lost = jnp.asarray([i for i in range(len(parts)) if i not in self.keep], jnp.int32)
    more = parts[lost].sum(0) / heirs
    rows = rows + more[None] if self.keep else jnp.repeat(more[None], heirs, 0)
    if is_mean:
      rows = rows * jnp.asarray(heirs / len(parts), rows.dtype)
      new = rows.mean(0)
    else:
      new = jnp.zeros_like(more)
    return jnp.concatenate([rows, jnp.broadcast_to(new, (self.size - heirs, *more.shape))])

  def _divided(self, rows, keys):
    """Joins the shares of an array and divides it again."""
    name = "/".join(keys)
    if self.shapes is None:
      raise ValueError(f"{_WRAPPER}: params is needed for {name}, divided over the workers.")
    like = self.shapes.get(self.whose.path(keys))
    shape = rows.shape[1:] if like is None else jnp.shape(like)
    if _shares.share_shape(shape, len(rows)) != rows.shape[1:]:
      what = f"{_WRAPPER}: {name} must be shares of a variable of params"
      raise ValueError(f"{what}, got {list(rows.shape)} where that is {list(shape)}.")
    return _shares.shares(_shares.whole(rows, shape), self.size)

  def _with_own_keys(self, rows, key, owner):
    """New workers receive parts of a key, one of which its owner keeps if it remains."""
    is_raw = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    parts = jax.random.split(jax.random.wrap_key_data(key) if is_raw else key, self.num_new + 1)
    parts = jax.random.key_data(parts) if is_raw else parts
    if owner in self.keep:
      rows = rows.at[self.keep.index(owner)].set(parts[0])
    return jnp.concatenate([rows, parts[1:]])


def _is_key(keys, leaf):
  """Whether a leaf is a random key per worker, in either of JAX's forms."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return True
  field = keys[-1].lower() if keys else ""
  return leaf.dtype == jnp.uint32 and leaf.shape[1:] == (2,) and ("key" in field or "rng" in field)


def _checked_row(leaf, name, row):
  if jnp.shape(row) != leaf.shape[1:]:
    what = f"{_WRAPPER}: newcomer must be one worker's tree, not stacked: {name or 'it'} must be"
    raise ValueError(f"{what} {list(leaf.shape[1:])}, got {list(jnp.shape(row))}.")
  row = jnp.asarray(row)
  # A random key has no astype.
  return row if row.dtype == leaf.dtype else row.astype(leaf.dtype)


def _without_owners(members, node, whose, keys, row):
  """A resized `CompressedState`: residuals of the owners of sums are added to the others."""

  def with_owners(residual, shares, holder):
    if holder is Holder.SHARED:  # one element, which has no owner
      return residual
    residual, shares = (_axes.undivided(jnp.asarray(x), 1) for x in (residual, shares))
    # With other owners the parts would differ. If worker 0 leaves, another worker gets it.
    return residual.at[0].add(_shares.whole(shares, residual.shape[1:]))

  residual = jax.tree.map(with_owners, node.residual, node.owner_residual, whose.owner_residual)
  node = node.replace(residual=residual)
  fields = {
    field: jax.tree.map(members.leaf, *(getattr(x, field) for x in (node, whose, keys, row)))
    for field in ("residual", "memory", "step")
  }

  def zeros(x, holder):
    shape = _shares.share_shape(x.shape[1:], members.size)
    leading = () if holder is Holder.SHARED else (members.size,)
    return jnp.zeros((*leading, *shape), x.dtype)

  owners = jax.tree.map(zeros, fields["residual"], whose.owner_residual)
  return CompressedState(**fields, owner_residual=owners)


def _num_workers(state, of_whom):
  """The number of workers for which a state is stacked."""
  columns = _paths.named_leaves(state), jax.tree.leaves(of_whom)
  lengths = [
    (name, jnp.shape(leaf))
    for (name, leaf), holder in zip(*columns, strict=True)
    if holder is not Holder.SHARED
  ]
  if not lengths:
    raise ValueError(f"{_WRAPPER}: state has no leaf with a workers' axis (see stack_workers).")
  name, shape = lengths[0]
  for other, length in lengths:
    if not length or length[:1] != shape[:1]:
      what = f"{_WRAPPER}: state must be stacked (stack_workers), its leaves with one"
      names = f"{name or 'state'} {list(shape)} and {other or 'state'} {list(length)}"
      is_dict = "opt_state" in f"{name}/{other}".split("/")
      mend = " Of an nnx.Optimizer pass optimizer.opt_state." if is_dict else ""
      raise ValueError(f"{what} leading axis; got {names}.{mend}")
  return shape[0]


def _checked_keep(keep, num_workers):
  if not isinstance(keep, list | tuple | range | np.ndarray):
    raise TypeError(f"{_WRAPPER}: keep must be a sequence of workers' indices, got {keep!r}.")
  keep = [_checks.integer(_WRAPPER, "keep", i, minimum=0) for i in keep]
  if any(i >= num_workers for i in keep) or len(set(keep)) != len(keep):
    what = f"{_WRAPPER}: keep must name workers of range({num_workers}) once"
    raise ValueError(f"{what}, got {keep}.")
  return keep


def _checked_newcomer(newcomer, state, keep, num_workers, num_new):
  """The worker that new ones start from, or None; and the leaves of a tree, or Nones."""
  structure: Any = jax.tree.structure(state)
  nothing = [None] * structure.num_leaves
  if isinstance(newcomer, str) and newcomer == "mean":
    if num_new and not keep:
      raise ValueError(
        f'{_WRAPPER}: newcomer="mean" is the mean of the remaining workers, but none remains.'
      )
    return None, nothing
  if isinstance(newcomer, int | np.integer) and not isinstance(newcomer, bool):
    first = _checks.integer(_WRAPPER, "newcomer", newcomer, minimum=0)
    if first >= num_workers:
      raise ValueError(f"{_WRAPPER}: newcomer must be below {num_workers}, got {first}.")
    return first, nothing
  # One worker's boxes do not name the workers' axis.
  if jax.tree.structure(_paths.unboxed(newcomer)) != jax.tree.structure(_paths.unboxed(state)):
    what = f"{_WRAPPER}: newcomer must be \"mean\", a worker's index, or one worker's tree of the"
    raise TypeError(f"{what} structure of state, {structure}; got {jax.tree.structure(newcomer)}.")
  return None, jax.tree.leaves(newcomer)
