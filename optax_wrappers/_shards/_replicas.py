"""Replicated values: marked as per-shard, made equal, and compared."""

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _checks, _checksums, _collectives
from optax_wrappers._core._types import AxisName, Tree


def per_shard(tree: Tree, axis_name: AxisName) -> Tree:
  """Marks replicated values so that `jax.grad` returns local gradients instead of their sum.

  Under shard_map's default `check_vma=True`, the gradient of a replicated parameter is already
  summed over the shards. Differentiating `per_shard(params, axis_name)` gives the local gradient,
  to clip, weight, drop or accumulate. Under pmap, vmap and `check_vma=False` it does nothing.

  Args:
    tree: any pytree of arrays.
    axis_name: the bound axis or axes, else a ValueError; None does nothing.

  Returns:
    The same values. Nothing is sent.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> def own_gradient(w, x):
    ...   own = ow.per_shard(w, "batch")
    ...   return jax.grad(lambda w: jnp.sum(w * x))(own)[None]
    >>> mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Auto,))
    >>> specs = {"in_specs": (P(), P("batch")), "out_specs": P("batch")}
    >>> step = jax.jit(jax.shard_map(own_gradient, mesh=mesh, **specs))
    >>> print(step(jnp.array(0.0), jnp.arange(4.0)))
    [0. 1. 2. 3.]
  """
  names = _axes.axis_names(axis_name)
  _axes.require_bound(names, "per_shard")
  return _axes.to_varying(tree, names)


def broadcast_from(tree: Tree, axis_name: AxisName, source: int = 0) -> Tree:
  """Gives every shard the values of one shard.

  Args:
    tree: any pytree of arrays of any dtype.
    axis_name: the axis or axes, bound here; None does nothing.
    source: index of the shard to copy from; over several axes the last varies fastest. If there is
      no such shard, a ValueError.

  Returns:
    The source's values, typed as replicated under shard_map.

  **Communication**: an all-reduce of every leaf that is not equal on all shards already.

  Source: `get_init_op` of tf.contrib.opt.ElasticAverageOptimizer.
  """
  names = _axes.axis_names(axis_name)
  _axes.require_bound(names, "broadcast_from")
  source = _checks.integer("broadcast_from", "source", source, minimum=0)
  size = lax.axis_size(names)
  if source >= size:
    raise ValueError(f"broadcast_from: source must be a shard index below {size}, got {source}.")
  # Not a broadcast: an all-reduce in which all but one shard add zeros exists in every context.
  is_source = lax.axis_index(names) == source

  def from_source(x):
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      data = from_source(jax.random.key_data(x))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not _axes.unreduced_names([x], names)[0]:
      return x
    # The sum of booleans is not a boolean.
    if x.dtype == jnp.bool_:
      return from_source(x.astype(jnp.int32)).astype(jnp.bool_)
    return _collectives.psum(jnp.where(is_source, x, jnp.zeros_like(x)), names)

  return jax.tree.map(from_source, tree)


def is_replicated(tree: Tree, axis_name: AxisName) -> jax.Array:
  """Whether all shards hold the same bits: a cheap check in a step.

  Compares two 32-bit checksums of every leaf: a difference is missed with probability 2**-64.

  Args:
    tree: any pytree of arrays.
    axis_name: the axis or axes, bound here, else a ValueError; None: True.

  Returns:
    bool scalar, the same on all shards.

  **Communication**: 8 bytes a leaf and shard.
  """
  names = _axes.axis_names(axis_name)
  _axes.require_bound(names, "is_replicated")
  sums = [_checksums.checksums(leaf) for leaf in jax.tree.leaves(tree)]
  if not names or not sums:
    return jnp.array(True)
  everyones = _collectives.all_gather(jnp.concatenate(sums), names)
  return (everyones == everyones[:1]).all()
