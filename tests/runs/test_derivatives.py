"""Derivatives through several steps against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import PARAMS, alone, each_wrapper
from helpers import AXIS
from reductions_cases import RULES

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes


@each_wrapper
@pytest.mark.parametrize("of", ["parameters", "learning rate"])
def test_derivatives_through_steps_match_finite_differences(wrapped, of):
  def loss(params):
    return sum(jnp.sum(jnp.sin(leaf) + leaf**2) for leaf in jax.tree.leaves(params))

  def trained(params, rate):
    tx = alone(wrapped, optax.inject_hyperparams(optax.adam)(rate))

    def step(carry, _):
      params, state = carry
      grads = wrapped.updates(jax.grad(loss)(params), 2)
      updates, state = tx.update(grads, state, params, **wrapped.extra_args)
      return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, length=5)
    return loss(params)

  with jax.enable_x64(True):
    params = {"kernel": np.asarray(PARAMS["kernel"], np.float64)}
    rate = np.asarray(0.05)
    x = params if of == "parameters" else rate
    rng, apart = np.random.default_rng(0), 1e-6
    along = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), x)

    def function(x):
      return trained(x, rate) if of == "parameters" else trained(params, x)

    @jax.jit  # one program, in which the two ends share a loop
    def derivatives(x, along):
      ends = jax.tree.map(lambda x, d: jnp.stack([x - apart * d, x + apart * d]), x, along)
      slope = jax.jvp(function, (x,), (along,))[1]
      return jax.lax.map(function, ends), slope, jax.grad(function)(x)

    ends, slope, gradient = jax.device_get(derivatives(x, along))
    expected = (ends[1] - ends[0]) / (2 * apart)
    assert abs(expected) > 1e-3
    assert slope == pytest.approx(expected, rel=1e-4, abs=1e-5)
    parts = jax.tree.map(lambda g, d: np.sum(g * d), gradient, along)
    assert sum(jax.tree.leaves(parts)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_reductions_derivatives_match_finite_differences():
  rng = np.random.default_rng(8)
  tree = {"w": rng.normal(size=(5, 4)).astype(np.float32)}
  for name in ("median", "trimmed_mean", "geometric_median"):
    tx = ow.all_reduce(AXIS, reduction=RULES[name][0])

    @jax.jit
    def loss(tree, tx=tx):
      reduced = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(tree)
      return jnp.sum(jnp.sin(reduced["w"]))

    jax.test_util.check_grads(loss, (tree,), order=1, modes=["fwd", "rev"], atol=2e-2, rtol=2e-2)
