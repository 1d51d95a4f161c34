"""Workers that are pods: several devices each, over which XLA shards a worker's arrays.

To encode an array, or for any collective except an all-reduce and a permutation, XLA gathers it,
and every device of a pod sends all of it. In a separate `shard_map` over the axes that were left to
XLA, each device sends its part.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_wrappers._core import _axes, _shares
from optax_wrappers._core._types import AxisNames, Tree

Exchange: TypeAlias = Callable[[AxisNames, list, Any, Tree], tuple[list, list, Any, Tree]]
"""From the axes of the workers, this worker's arrays, its shares of each array's state, and shared
scalars, to the sums over the workers, its parts in them, and the new state and scalars. Its result
must not depend on which elements are next to each other."""


def by_device(
  exchange: Exchange, names: AxisNames, arrays: list[jax.Array], shares: Any, memory: Tree
) -> tuple[list[jax.Array], list[jax.Array], Any, Tree]:
  """An exchange in which each device of a worker sends its part of each array.

  On an Explicit mesh the type of an array says how it is sharded; elsewhere this is guessed. If the
  guess is wrong, XLA moves the array inside its pod, and not between pods.
  """
  free = _axes.beside(names)  # of the pod
  if not free:
    return exchange(names, arrays, shares, memory)
  specs = [_spec(x, lax.axis_size(names), free) for x in arrays]
  layout = specs, shares and specs, PartitionSpec()
  # Types are not checked inside, because an array that is replicated shares buffers with parts.
  run = jax.shard_map(
    functools.partial(exchange, names),
    in_specs=layout,
    out_specs=(specs, *layout),
    axis_names=set(free),
    check_vma=False,
  )
  sums, sent, new, memory = run(_as(arrays, specs), shares and _as(shares, specs), memory)
  sums, sent, new = _like(sums, arrays), _like(sent, arrays), shares and _like(new, shares)
  return sums, _axes.to_varying(sent, names), _axes.to_varying(new, names), memory


def at_once(
  exchange: Exchange, names: AxisNames, arrays: list[jax.Array], shares: Any, memory: Tree
) -> tuple[list[jax.Array], list[jax.Array], Any, Tree]:
  """An exchange of whole arrays. On an Explicit mesh they are first gathered inside their pod."""
  whole = [PartitionSpec()] * len(arrays)
  sums, sent, shares, memory = exchange(names, _as(arrays, whole), shares, memory)
  return _like(sums, arrays), _like(sent, arrays), shares, memory


def _spec(x, num_workers, free):
  """How an array is sharded over a worker's devices: a share of a part is a part of a share."""
  may_cut = functools.partial(_shares.may_be_cut, x.shape, num_shares=num_workers)
  return fitted(jax.typeof(x).sharding.spec, x.ndim, free, may_cut)


def fitted(
  spec: PartitionSpec, ndim: int, sizes: Mapping[Any, int], may_cut: Callable[[int, int], bool]
) -> PartitionSpec:
  """A valid spec: each axis where `spec` has it, else along the first dimension that it divides.

  `may_cut(d, n)` tells whether dimension d may be divided into n parts.
  """
  wanted = {name: d for d in range(ndim) for name in _axes.names_in(spec, [d])}
  parts: list[list[Any]] = [[] for _ in range(ndim)]
  for name, size in sizes.items():
    for d in sorted(range(ndim), key=lambda d: d != wanted.get(name)):
      if may_cut(d, size * math.prod(sizes[other] for other in parts[d])):
        parts[d].append(name)
        break
  entries = [tuple(part) if len(part) > 1 else part[0] if part else None for part in parts]
  while entries and entries[-1] is None:
    entries.pop()
  return PartitionSpec(*entries)


def _as(arrays, specs):
  """Arrays sharded by specs; on an Explicit mesh their types must say so."""

  def laid_out(x, spec):
    mesh = jax.typeof(x).sharding.mesh
    is_explicit = AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(x, NamedSharding(mesh, spec)) if is_explicit else x

  return list(map(laid_out, arrays, specs))


def _like(arrays, others):
  """Arrays sharded as the types of others say."""
  return _as(arrays, [jax.typeof(x).sharding.spec for x in others])
