"""Delay compensation against the equations of its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

# Delay compensation alone.


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("decay", [None, 0.95])
def test_delay_compensation_dtypes_match_equations_of_paper(dtype, decay):
  rng = np.random.default_rng(1)
  with jax.enable_x64(dtype == "float64"):
    tx = ow.contrib.delay_compensation(0.7, decay=decay, eps=1e-3)
    state, square = tx.init(np.zeros(5, dtype)), np.zeros(5)

    @jax.jit
    def update(g, state, now, then):
      return tx.update(g, state, now, computed_params=then)

    for _ in range(4):
      g, now, then = rng.normal(size=(3, 5)).astype(dtype)
      wide = [x.astype(complex if dtype == "complex64" else float) for x in (g, now)]
      back = then.astype(wide[0].dtype)
      if decay is not None:
        square = decay * square + (1 - decay) * np.abs(wide[0]) ** 2
      strength = 0.7 if decay is None else 0.7 / np.sqrt(square + 1e-3)
      expected = wide[0] + strength * np.abs(wide[0]) ** 2 * (wide[1] - back)
      found, state = update(g, state, now, then)
      assert found.dtype == g.dtype
      rtol = {"bfloat16": 2**-8, "float16": 2**-10, "float64": 1e-12}.get(dtype, 1e-5)
      np.testing.assert_allclose(np.asarray(found).astype(expected.dtype), expected, rtol, 1e-6)


def test_delay_compensation_in_chain_applies_before_staleness_weight():
  aware = ow.staleness_aware(optax.sgd(1.0), ow.staleness.inverse())
  tx = optax.chain(ow.contrib.delay_compensation(0.5), aware)
  now, then, grad = (np.array([x], np.float32) for x in (3.0, 1.0, 2.0))
  updates, _ = jax.jit(tx.update)(grad, tx.init(now), now, computed_at=-1, computed_params=then)
  assert_close(updates, np.array([-0.5 * (2.0 + 0.5 * 4.0 * 2.0)]))


def test_delay_compensation_inf_params_of_dropped_shard_sum_stays_finite():
  summed = ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum")
  aware = ow.staleness_aware(summed, max_staleness=1, axis_name=AXIS)
  tx = optax.chain(ow.contrib.delay_compensation(), aware)

  def one(stamp, then):
    params = jnp.zeros(2)
    extra = {"computed_at": stamp, "computed_params": jnp.full(2, then)}
    return tx.update(jnp.ones(2), tx.init(params), params, **extra)[0]

  args = np.array([0, -2], np.int32), np.array([0.0, np.inf], np.float32)
  updates = jax.jit(jax.vmap(one, axis_name=AXIS))(*args)
  assert_close(updates, np.full((2, 2), -1.0))


def test_delay_compensation_explicit_mesh_keeps_state_sharding():
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
  aware = ow.staleness_aware(optax.sgd(0.1), max_staleness=2)
  tx = ow.contrib.params_history(optax.chain(ow.contrib.delay_compensation(decay=0.9), aware), 2)
  with jax.set_mesh(mesh):
    params = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("x", "y")))
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params, computed_at=0)
  assert_close(updates, np.full((8, 4), -0.1))
  for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after)):
    assert jax.typeof(old) == jax.typeof(new)


def test_delay_compensation_none_gradient_is_skipped():
  tx = ow.contrib.delay_compensation(2.0, decay=0.9)
  ones = np.ones(2, np.float32)
  params, grads = {"a": ones, "b": ones}, {"a": ones, "b": None}
  updates, state = jax.jit(tx.update)(grads, tx.init(params), params, computed_params=params)
  assert updates["b"] is None
  assert_close(state.mean_square, {"a": np.full(2, 0.1), "b": np.zeros(2)}, rtol=1e-5)


@pytest.mark.parametrize(
  ("options", "name"),
  [({"strength": -1.0}, "strength"), ({"decay": 1.0}, "decay"), ({"eps": 0.0}, "eps")],
)
def test_delay_compensation_errors_arguments_out_of_range(options, name):
  with pytest.raises(ValueError, match=f"delay_compensation: {name} must be"):
    ow.contrib.delay_compensation(**options)
