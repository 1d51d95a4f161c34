"""The check for elementwise optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes


def each(fun):
  return optax.chain(optax.stateless_with_tree_map(lambda g, _: fun(g)), optax.sgd(0.1))


def large(params):
  return jax.tree.map(lambda x: x.size > 10, params)


REFUSED = {
  "adafactor": (optax.adafactor(0.1), "v_row.*has not the size of a variable"),
  "lamb": (optax.lamb(0.1), "a reduce_sum"),
  "norm": (optax.clip_by_global_norm(1.0), "must treat every element by itself.*reduce_sum"),
  "noise": (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "a random_bits"),
  "lbfgs": (optax.lbfgs(0.1), "cannot divide inner_state.*has not the size of a variable"),
  "clip_variables": (ow.clip_variables(optax.sgd(0.1), 1.0), "a reduce"),
  "a place": (each(lambda g: g.at[0].set(0.0)), "a scatter"),
  "the number of a row": (each(lambda g: g * jnp.arange(float(len(g)))[:, None]), "a iota"),
  "a scale by shape": (each(lambda g: g / np.sqrt(len(g))), "a look at shapes"),
  "an array of its own": (each(lambda g: g * np.ones((4, 6), np.float32)), "a mul"),
  "one that shifts": (each(lambda g: jax.lax.pad(g, 0.0, [(1, -1, 0), (0, 0, 0)])), "a pad"),
  "one that looks around": (
    each(lambda g: jax.lax.reduce_window(g, -np.inf, jax.lax.max, (3, 1), (1, 1), "SAME")),
    "a reduce_window",
  ),
  "one that broadcasts": (each(lambda g: g * np.ones((4, 1), np.float32)), "a "),
  "rows in turn": (each(lambda g: jax.lax.map(lambda row: 2 * row, g)), "a scan"),
  "a product": (each(lambda g: (g @ g.T) @ g), "a transpose"),
  "a mask by size": (optax.adamw(0.1, weight_decay=1.0, mask=large), "a look at shapes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_elementwise_optimizer_that_sees_other_elements_is_error(name):
  inner, why = REFUSED[name]
  tx, x = ow.cross_shard(inner, AXIS, shard_state=True), jnp.ones((4, 4, 6))

  def update(x):
    value = {"value": 1.0, "grad": x, "value_fn": jnp.sum} if name == "lbfgs" else {}
    return tx.update(x, tx.init(x), x, **value)[0]

  with pytest.raises(ValueError, match=f"cross_shard: .*{why}"):
    jax.vmap(update, axis_name=AXIS)(x)
