"""Runs one worker's function in every parallel context, and the trees and optimizers that the tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXIS = "w"


def _is_none(x):
  return x is None


def specs_of(axes):
  """The PartitionSpecs of a tree of vmap axes: 0 is the worker's axis, None one value for all."""
  return jax.tree.map(lambda a: PartitionSpec() if a is None else PartitionSpec(AXIS), axes, is_leaf=_is_none)


def _per_leaf(fun, axes, tree):
  return jax.tree.map(
    lambda a, part: jax.tree.map(lambda x: x if a is None else fun(x), part), axes, tree, is_leaf=_is_none
  )


def mesh_of(num_workers, axis_type=AxisType.Auto):
  return jax.make_mesh((num_workers,), (AXIS,), axis_types=(axis_type,), devices=jax.devices()[:num_workers])


def _shard_map(fun, in_axes, out_axes, num_workers, axis_type=AxisType.Auto, **options):
  """shard_map with each worker's leading axis taken off inside, as vmap does."""
  mesh = mesh_of(num_workers, axis_type)

  def one_worker(*args):
    return _per_leaf(lambda x: x[None], out_axes, fun(*_per_leaf(lambda x: x[0], in_axes, args)))

  sharded = jax.shard_map(one_worker, mesh=mesh, in_specs=specs_of(in_axes), out_specs=specs_of(out_axes), **options)
  return _placed(jax.jit(sharded), in_axes, mesh)


def _placed(fun, in_axes, mesh):
  def run(*args):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(in_axes))
    args = [
      jax.tree.map(lambda s, part: jax.device_put(part, s), sharding, arg) for sharding, arg in zip(shardings, args)
    ]
    return fun(*args)

  return run


def _sharded_vmap(fun, in_axes, out_axes, num_workers):
  mapped = jax.vmap(fun, in_axes, out_axes, axis_name=AXIS, spmd_axis_name=AXIS)
  return _placed(jax.jit(mapped), in_axes, mesh_of(num_workers))


CONTEXTS = {
  "shard_map": _shard_map,
  "unchecked": lambda *a: _shard_map(*a, check_vma=False),
  "explicit": lambda *a: _shard_map(*a, axis_type=AxisType.Explicit),
  "pmap": lambda f, i, o, n: jax.pmap(f, AXIS, in_axes=i, out_axes=o, devices=jax.devices()[:n]),
  "vmap": lambda f, i, o, n: jax.jit(jax.vmap(f, i, o, axis_name=AXIS)),
  "sharded_vmap": _sharded_vmap,
}


def in_context(context, fun, num_workers, in_axes, out_axes):
  """`fun` of one worker, mapped over workers in a context of `CONTEXTS`; arguments and results have vmap's shapes."""
  return CONTEXTS[context](fun, in_axes, out_axes, num_workers)


def as_numpy(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def assert_close(actual, expected, rtol=1e-6, atol=1e-7):
  """Compares two trees leaf by leaf as float64."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected)):
    np.testing.assert_allclose(
      np.asarray(a, np.float64), np.asarray(e, np.float64), rtol, atol, err_msg=jax.tree_util.keystr(path)
    )


def bits(tree):
  """The bytes of every leaf, for comparisons that no rounding passes."""
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def random_tree(rng, *leading):
  """A small tree of float32 with unequal values, each leaf with the leading axes given."""
  shapes = {"dense": {"kernel": (3, 2), "bias": (2,)}, "scale": ()}
  return jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=leading + shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )
