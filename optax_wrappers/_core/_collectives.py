"""The only module that calls collectives."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _shares
from optax_wrappers._core._types import AxisNames, Tree

# Each buffer that is sent has a fixed cost, about that of copying this many bytes. Smaller leaves
# share a buffer with others; benchmarks/data_parallel.py measures both sides of this threshold.
SMALL_BYTES = 1024 * 1024
# XLA's compile time for slicing N leaves out of buffers of L leaves grows as N L, which is kept
# below this bound: one buffer for 450 leaves, and 5 for 1,000.
LEAVES_SQUARED = 204_800


def psum(tree: Tree, names: AxisNames) -> Tree:
  """The sum of every leaf over `names`; a value that is equal on all shards counts once per shard.

  On TPUs and GPUs XLA combines leaves; on a CPU, small leaves of one dtype are combined here.
  """
  if not names:
    return tree
  leaves, treedef = jax.tree.flatten(tree)
  pending = [jax.typeof(leaf).manual_axis_type.unreduced for leaf in leaves]
  unfinished = [tuple(name for name in names if name in axes) for axes in pending]
  # lax.psum accepts axes over which a value varies, or axes over which it is an unreduced sum, but
  # never both at once.
  for axes in dict.fromkeys(unfinished):
    chosen = [i for i, axes_of_leaf in enumerate(unfinished) if axes_of_leaf == axes]
    rest = tuple(name for name in names if name not in axes)
    # lax.psum counts a value once per shard only if it varies.
    sums = _axes.to_varying([leaves[i] for i in chosen], rest)
    send = functools.partial(functools.reduce, lax.psum, list(filter(None, (axes, rest))))
    for i, total in zip(chosen, _buffered_on_a_cpu(send, sums, names)):
      leaves[i] = total
  return jax.tree.unflatten(treedef, leaves)


def _buffered_on_a_cpu(send, leaves, names):
  """`send(leaves)`; on a CPU, `send` of a few buffers that hold the leaves."""
  # A single leaf is one buffer, and a single shard sends nothing.
  if len(leaves) == 1 or lax.axis_size(names) == 1:
    return send(leaves)
  buckets = _buckets(leaves, names)
  if len(buckets) == len(leaves):
    return send(leaves)
  # Decided at lowering: a step compiled here for a TPU gets the TPU's form.
  buffered = functools.partial(_buffered, send, buckets)
  return lax.platform_dependent(leaves, cpu=buffered, default=send)


def _buffered(send, buckets, leaves):
  """`send(leaves)`, with the leaves of each bucket concatenated."""

  def buffer_of(bucket):
    if len(bucket) == 1:
      return leaves[bucket[0]]
    return jnp.concatenate([leaves[i].ravel() for i in bucket])

  arrived = list(leaves)
  for bucket, buffer in zip(buckets, send(list(map(buffer_of, buckets))), strict=True):
    sizes = [leaves[i].size for i in bucket]
    parts = lax.split(buffer, sizes) if len(bucket) > 1 else [buffer]
    for i, part in zip(bucket, parts):
      arrived[i] = part.reshape(leaves[i].shape)
  return arrived


def _buckets(leaves, names):
  """The indices of the leaves in each buffer."""
  by_kind: dict[Any, list[int]] = {}
  # To concatenate a leaf that is sharded over other axes, XLA would first gather it.
  beside = _axes.laid_out_beside(leaves, names)
  for i, (leaf, over) in enumerate(zip(leaves, _axes.all_varying(leaves))):
    may_share = leaf.size * leaf.dtype.itemsize < SMALL_BYTES and not beside[i]
    by_kind.setdefault((leaf.dtype, over) if may_share else i, []).append(i)
  length = max(64, LEAVES_SQUARED // max(1, len(leaves)))
  return [
    alike[start : start + length]
    for alike in by_kind.values()
    for start in range(0, len(alike), length)
  ]


def group_psum(tree: Tree, name: Hashable, groups: Sequence[Sequence[int]]) -> Tree:
  """The sum of every leaf over this shard's group of `groups`, a partition of the axis.

  `lax.psum(axis_index_groups=)` fails under vmap and under check_vma=True. Instead, each shard puts
  its value in its group's row of zeros: the sum is exact, and a NaN stays in its group.
  """
  group_of = {member: row for row, members in enumerate(groups) for member in members}
  rows_of = jnp.asarray([group_of[i] for i in range(len(group_of))], jnp.int32)
  own_row = rows_of[lax.axis_index(name)]

  def in_own_row(x):
    rows = _axes.to_varying(jnp.zeros((len(groups), *x.shape), x.dtype), (name,))
    return rows.at[own_row].set(x)

  rows = psum(jax.tree.map(in_own_row, tree), (name,))
  return jax.tree.map(lambda r: r[own_row], rows)


def all_gather(tree: Tree, names: AxisNames) -> Tree:
  """Every leaf of all shards, stacked on a new leading axis, typed as equal on all shards."""
  known, num_shards = _axes.tracked(names), lax.axis_size(names)

  def gather(x):
    x = jnp.expand_dims(x, 0)
    if _axes.is_partly_manual(x, names):
      # Only an all-reduce and a permutation keep the sharding of a leaf over other axes (jax
      # 0.10.2); an all-gather would gather it over those first.
      rows = _axes.to_varying(jnp.repeat(jnp.zeros_like(x), num_shards, 0), names)
      index = lax.axis_index(names)
      return psum(lax.dynamic_update_slice_in_dim(rows, x, index, 0), names)
    # Tiled: jax 0.10.2 gives the axis that it adds itself a wrong sharding on an Explicit mesh.
    for over in _at_once(names)[::-1]:
      options = {"to": "invarying"} if set(over) & set(known) else {}
      x = lax.all_gather(x, over, tiled=True, **options)
    return x

  return jax.tree.map(gather, _axes.to_varying(tree, names))


def _at_once(names):
  """The axes over which one collective can run: all of them, or one at a time under vmap."""
  return [names] if _axes.are_manual(names) else [(name,) for name in names]


def permute(tree: Tree, names: AxisNames, pairs: Sequence[tuple[int, int]]) -> Tree:
  """Every leaf of this shard's source in `pairs` of (source, target), or zeros if it has none."""
  leaves, treedef = jax.tree.flatten(_axes.to_varying(tree, names))
  send = functools.partial(lax.ppermute, axis_name=names, perm=pairs)
  return jax.tree.unflatten(treedef, _buffered(send, _buckets(leaves, names), leaves))


def all_to_all(x: jax.Array, names: AxisNames) -> jax.Array:
  """Row i of every shard, on shard i, in shard order."""
  return lax.all_to_all(_axes.to_varying(x, names), names, 0, 0)


def send_flat(
  arrays: Sequence[jax.Array], send: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
  """`send` of arrays, concatenated along the last axis and split again."""
  if not arrays:
    return []
  arrived = send(jnp.concatenate(arrays, -1))
  return list(lax.split(arrived, [x.shape[-1] for x in arrays], axis=-1))


def sum_scatter(tree: Tree, names: AxisNames) -> Tree:
  """This shard's share (`_shares`) of the sum of every leaf over all shards."""
  num_shares = lax.axis_size(names)

  def scatter(x):
    d = _shares.divided_dimension(x.shape, num_shares)
    if d is None:
      return psum(x, names)
    # `[..., places, shares, ...]`.
    x = _shares.cut(_axes.to_varying(x, names), num_shares, d)
    if _axes.is_partly_manual(x, names):
      return _ring_scatter(x, names, d + 1)
    # Over one axis after the other, outermost first, so that a shard's share has the number that
    # `lax.axis_index` gives the shard.
    over = _at_once(names)
    x = x.reshape(*x.shape[: d + 1], *map(lax.axis_size, over), *x.shape[d + 2 :])
    for axis in over:
      x = lax.psum_scatter(x, axis, scatter_dimension=d + 1)
    return x

  return jax.tree.map(scatter, tree)


def gather_shares(tree: Tree, names: AxisNames, like: Tree, *, typed: bool = False) -> Tree:
  """Every leaf in full, in the shape of the same leaf of `like`, from the shares of all shards.

  With `typed`, types say that they are equal on all shards. If `names` are manual beside axes that
  are left to XLA, this costs the bytes of an all-reduce.
  """
  num_shares = lax.axis_size(names)

  def gather(share, x):
    d = _shares.divided_dimension(x.shape, num_shares)
    if d is None:
      if not share.size:
        return jnp.zeros(x.shape, share.dtype)
      # For its type.
      return psum(share, names) if num_shares == 1 and typed else share
    share = _axes.to_varying(share, names)
    if _axes.is_partly_manual(share, names) and not typed:
      rows = _ring_gather(share, names, d + 1)
    else:
      rows = jnp.moveaxis(all_gather(share, names), 0, d + 1)
    return _shares.joined(rows, x.shape, d)

  return jax.tree.map(gather, tree, like)


def _ring_scatter(x, names, d):
  """The sum over shards of this shard's row along dimension `d`, by permutations."""
  # The sum of a row passes through all shards, each of which adds its own row, and ends at the
  # shard that owns the row.
  index, num_shares = lax.axis_index(names), lax.axis_size(names)

  def turn(total, k):
    return _next(total, names) + _shares.take(x, (index - 1 - k) % num_shares, d), None

  start = _shares.take(x, (index - 1) % num_shares, d)
  return lax.scan(turn, start, jnp.arange(1, num_shares))[0]


def _ring_gather(row, names, d):
  """All shards' rows along a new dimension `d`: an all-gather by permutations."""
  index, num_shares = lax.axis_index(names), lax.axis_size(names)

  def turn(carried, k):
    row, rows = carried
    row = _next(row, names)
    new = jnp.expand_dims(row, d)
    rows = lax.dynamic_update_slice_in_dim(rows, new, (index - k) % num_shares, d)
    return (row, rows), None

  rows = jnp.repeat(jnp.expand_dims(row, d), num_shares, d)
  return lax.scan(turn, (row, rows), jnp.arange(1, num_shares))[0][1]


def _next(x, names):
  """What the previous shard held."""
  n = lax.axis_size(names)
  return lax.ppermute(x, names, [(i, (i + 1) % n) for i in range(n)])
