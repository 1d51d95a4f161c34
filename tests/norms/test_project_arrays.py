"""The projection of arrays of many kinds, sharded and not; its derivative; whose update it adds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, bits, compilations, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers import projections


def clip(limit, axes=0, **options):
  return ow.clip_variables(optax.identity(), limit, axes, **options)


@functools.partial(jax.jit, static_argnums=0)
def moved(tx, params):
  updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
  return optax.apply_updates(params, updates)


def test_min_max_norm_lower_bound_holds_if_below_upper():
  p = np.array([0.03, 0.04], np.float32)
  tx = ow.project_variables(optax.identity(), projections.min_max_norm(0.5, 2.0))
  assert_close(moved(tx, p), np.array([0.3, 0.4], np.float32))


def test_clip_variables_bound_beyond_float32_holds():
  p = np.full(16, 3e38, np.float32)
  assert_close(moved(clip(1e39), p), np.full(16, 2.5e38, np.float32))


def test_project_outside_jit_equals_jit_bit_for_bit():
  p = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)
  params = {"inside": 0.1 * p[0], "outside": p[1]}
  grads = jax.tree.map(lambda p: 0.1 * p, params)
  grads["outside"][:, 0] = 0
  tx = clip(1.0, only_touched=True)
  expected, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  emitted, _ = tx.update(*jax.device_put((grads, tx.init(params), params)))
  assert bits(emitted) == bits(expected)
  assert bits(emitted["inside"]) == bits(grads["inside"])
  assert bits(emitted["outside"]) != bits(grads["outside"])


def test_projection_eager_second_step_compiles_nothing():
  p, tx = jax.device_put(np.full((5, 7), 3.0, np.float32)), clip(1.0)
  state = tx.init(p)
  tx.update(p, state, p)
  with compilations() as compiled:
    tx.update(p, state, p)
    assert compiled == []


def test_projection_of_sharded_variables_sends_no_collectives():
  mesh = mesh_of(4)
  layouts = {"columns": P(None, "w"), "rows": P("w", None), "copies": P()}
  params = {
    name: jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec))
    for name, spec in layouts.items()
  }
  tx = clip(1.0, ())  # each element by itself: nothing to communicate

  def emitted(params):
    return tx.update(params, tx.init(params), params)[0]

  compiled = jax.jit(emitted).lower(params).compile()
  assert ow.inspect.compiled_collectives(compiled) == []
  for name, u in jax.jit(emitted)(params).items():
    assert u.sharding.is_equivalent_to(params[name].sharding, 2)


@pytest.mark.parametrize("check_vma", [False, True])
def test_projection_in_shard_map_of_own_and_shared_variables(check_vma):
  own = np.array([[3.0, 4.0], [0.3, 0.4]], np.float32)  # the second shard is inside
  params = {"own": own.ravel(), "shared": np.array([0.6, 0.0], np.float32)}
  step, specs = functools.partial(moved, clip(1.0)), {"own": P("w"), "shared": P()}
  step = jax.jit(
    jax.shard_map(step, mesh=mesh_of(2), in_specs=(specs,), out_specs=specs, check_vma=check_vma)
  )
  new = step(params)
  assert_close(np.asarray(new["own"]).reshape(2, 2), np.array([[0.6, 0.8], [0.3, 0.4]]))
  np.testing.assert_array_equal(new["shared"], params["shared"])


def test_projection_derivative_under_jit_matches_formula():
  p, weights = np.random.default_rng(0).normal(size=(2, 2, 5)).astype(np.float32)
  p[0] *= 2 / np.linalg.norm(p[0])
  p[1] *= 0.5 / np.linalg.norm(p[1])
  tx = clip(1.0, 1)

  @jax.jit
  @jax.grad
  def derivative(p):
    return jnp.sum(weights * optax.apply_updates(p, tx.update(jnp.zeros_like(p), tx.init(p), p)[0]))

  n = p[0] / 2
  outside = (weights[0] - n * (n @ weights[0])) / 2  # of p / ||p||
  assert_close(derivative(p), np.stack([outside, weights[1]]), rtol=3e-6)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("spec", [P(), P("d"), P(None, "d")])
def test_clip_variables_bound_holds_where_xla_recomputes_updates(spec):
  """Adam's update ends with a product, which XLA fuses into a sum with the parameters: rounded once
  in one place and twice in another, it was 5e-8 beyond the bound."""
  bound, rng = 0.25, np.random.default_rng(0)  # exact in binary
  mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
  place = NamedSharding(mesh, spec)
  tx = ow.clip_variables(optax.adam(0.1), bound, axes=0)

  @jax.jit
  def step(params, state, x):
    grads = jax.grad(lambda p: ((jnp.tanh(x @ p).sum(1) - x[:, 0]) ** 2).mean())(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, updates

  beyond = num_at_bound = 0
  for _ in range(20):
    params = jax.device_put((0.1 * rng.normal(size=(8, 16))).astype(np.float32), place)
    state, x = jax.jit(tx.init)(params), rng.normal(size=(16, 8)).astype(np.float32)
    for _ in range(6):
      before = np.asarray(params)
      params, state, updates = step(params, state, x)
      for p in (np.asarray(params), before + np.asarray(updates)):
        norms = np.linalg.norm(p.astype(np.float64), axis=0)
        beyond += (norms > bound).sum()
        num_at_bound += (norms > 0.99 * bound).sum()
  assert beyond == 0 and num_at_bound > 1000
