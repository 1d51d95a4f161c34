"""Checks of arguments."""

import jax
import numpy as np
import optax
import pytest
from helpers import assert_close

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes


# Options that are a tree of the parameters or a prefix of it. A list, as of layers, is a tree.

TWO = {"layers": [0, 1], "b": 1}

FLAGS = {"layers": [True, False], "b": False}

SPREAD = {
  "fragments": lambda like: ow.diloco(
    optax.sgd(0.1), "w", communication_period=2, fragments=like(TWO)
  ),
  "compress": lambda like: ow.cross_shard(
    optax.sgd(0.1), "w", codec=ow.codecs.compression(ow.codecs.top_k(0.5, 4), only=like(FLAGS))
  ),
  "sharded": lambda like: ow.cross_shard(optax.sgd(0.1), "w", sharded=like(FLAGS)),
  "mask": lambda like: ow.clip_variables(optax.sgd(0.1), 0.5, axes=0, mask=like(FLAGS)),
  "prefix": lambda like: ow.clip_variables(
    optax.sgd(0.1), 0.5, axes=0, mask={"layers": True, "b": False}
  ),
}


@pytest.mark.parametrize("name", SPREAD)
def test_spread_list_of_layers_is_tree_in_every_option(name):
  """The numbers of the same parameters in a dictionary."""
  layers = [np.linspace(k, k + 1, 12, dtype=np.float32).reshape(4, 3) for k in range(2)]
  params = {"layers": layers, "b": np.ones(3, np.float32)}

  def as_dict(tree):
    return tree | {"layers": dict(enumerate(tree["layers"]))}

  def run(like):
    tx = optax.with_extra_args_support(SPREAD[name](like))
    start = like(params)
    rows = np.arange(1, 3, dtype=np.float32)
    grads = jax.tree.map(lambda x: np.sin(np.multiply.outer(rows, 5 * x)), start)
    update = ow.map_workers(lambda g, x, s: tx.update(g, s, x)[0], "w")

    @jax.jit
    def updates(start, grads):
      return update(grads, *ow.stack_workers((start, tx.init(start)), 2))

    return jax.tree.leaves(updates(start, grads))

  assert_close(run(lambda tree: tree), run(as_dict), rtol=0, atol=0)
