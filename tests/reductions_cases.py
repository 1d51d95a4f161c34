"""Reductions and their references for several test modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference_reductions as ref
from helpers import AXIS, in_context

import optax_wrappers as ow
from optax_wrappers import reductions

# Each of ours, NumPy's, and whether NumPy's is of each leaf or of all entries as one gradient; an
# entry is both.
RULES = {
  "median": (reductions.median(), ref.median),
  "trimmed_mean": (reductions.trimmed_mean(1), lambda g: ref.trimmed_mean(g, 1)),
  "krum": (reductions.krum(1), lambda g: ref.krum(g, 1, 1)),
  "multi_krum": (reductions.krum(1, 2), lambda g: ref.krum(g, 1, 2)),
  "geometric_median": (
    reductions.geometric_median(),
    lambda g: ref.geometric_median(g, 8, 1e-6),
  ),
  "adasum": (ow.contrib.adasum(), ref.adasum),
  "adasum of all": (ow.contrib.adasum(per_leaf=False), ref.adasum),
}

SHAPES = {"kernel": (5, 3), "bias": (2,), "scale": (), "empty": (0, 2)}


def gradients(rng, n, dtype=jnp.float32):
  return {name: rng.normal(size=(n, *shape)).astype(dtype) for name, shape in SHAPES.items()}


def expected(name, tree):
  leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), tree))
  rows = [x.reshape(len(x), -1) for x in leaves]
  if name == "adasum":
    results = [RULES[name][1](x) for x in rows]
  else:
    ends = np.cumsum([x.shape[1] for x in rows])
    results = np.split(RULES[name][1](np.concatenate(rows, 1)), ends[:-1])
  shaped = [r.reshape(x.shape[1:]) for r, x in zip(results, leaves)]
  return jax.tree.unflatten(treedef, shaped)


def over_shards(context, rule, tree, n):
  tx = ow.cross_shard(optax.sgd(-1.0), AXIS, reduction=rule)
  is_typed = context in ("shard_map", "explicit")
  update = in_context(
    context, lambda g: tx.update(g, tx.init(g))[0], n, (0,), None if is_typed else 0
  )
  found = jax.tree.map(np.asarray, update(tree))
  if is_typed:
    return found
  for x in jax.tree.leaves(found):  # all shards have the same bits
    np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
  return jax.tree.map(lambda x: x[0], found)


def assert_near(found, wanted, tolerance=1e-5):
  for name in wanted:
    np.testing.assert_allclose(
      np.asarray(found[name], np.float64), wanted[name], tolerance, tolerance, err_msg=name
    )


def reduced(rule, grads):
  """What each shard gets."""
  tx = ow.all_reduce(AXIS, reduction=rule)
  return jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS))(grads)
