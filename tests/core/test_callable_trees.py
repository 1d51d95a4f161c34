"""Models that are trees and can be called, as Equinox's modules, where a tree or a function is
expected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Net

import optax_wrappers as ow

PARAMS = Net(jnp.full((2, 2), 3.0), jnp.full(2, 3.0))


def inside(net):
  return {"net": net}


ONLY_W = Net(True, False)


def moved(tx, params):
  updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
  return jax.tree.leaves(optax.apply_updates(params, updates))


@pytest.mark.parametrize("where", [lambda net: net, inside], ids=["on top", "inside"])
@pytest.mark.parametrize("form", ["tree", "function", "Partial"])
def test_tree_of_a_callable_class_is_a_tree(where, form):
  def given(tree):
    fun = functools.partial(lambda tree, _: tree, tree)
    return {"tree": tree, "function": fun, "Partial": jax.tree_util.Partial(fun)}[form]

  params, sgd = where(PARAMS), optax.sgd(1.0)
  mask = given(where(ONLY_W))
  w, b = moved(ow.clip_variables(sgd, 1.0, 0, mask=mask), params)
  np.testing.assert_allclose(np.linalg.norm(w, axis=0), 1.0, rtol=1e-5)
  np.testing.assert_array_equal(b, PARAMS.b)
  if form == "tree":
    chosen = where(Net(ow.projections.max_norm(1.0), None))
    w, b = moved(ow.project_variables(sgd, chosen), params)
    np.testing.assert_allclose(np.linalg.norm(w), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(b, PARAMS.b)

  def reduced(**options):
    def update(grads):
      tx = ow.all_reduce("a", **options)
      return tx.update(grads, tx.init(grads))[0]

    grads = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), params)
    return jax.tree.leaves(jax.vmap(update, axis_name="a")(grads))

  w, b = reduced(sharded=given(where(Net(True, False))))
  np.testing.assert_allclose(w[:, 0, 0], [1.5, 4.5])  # each shard's own, over 2
  np.testing.assert_allclose(b[:, 0], [6.0, 6.0])
  every = ow.codecs.top_k(1 / 4)._replace(applies_to=lambda shape: True)
  codec = ow.codecs.compression(every, only=given(where(ONLY_W)))
  w, b = reduced(codec=codec)
  assert (np.asarray(w) != 0).sum() == 2 and (np.asarray(b) == 6).all()
