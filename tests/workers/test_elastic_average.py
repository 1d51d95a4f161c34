"""elastic_average and center_params against the originals' tables and a plain NumPy simulator."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from elastic_cases import run, simulate
from helpers import (
  AXIS,
  CONTEXTS,
  assert_close,
  compilations,
  in_context,
  mesh_of,
  random_tree,
  with_kept,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

# The originals' tables: SGD 1.0, every gradient -1.


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_elastic_average_upstream_table_1_worker_period_2(context, order):
  tx = ow.elastic_average(
    optax.sgd(1.0), AXIS, communication_period=2, moving_rate=1.0, order=order
  )
  params = {"v0": jnp.float32(0.0), "v1": jnp.float32(1.0)}
  grads = jax.tree.map(lambda _: -jnp.ones((4, 1)), params)
  table = [(1, 2, 0, 1), (0, 1, 2, 3), (1, 2, 2, 3), (2, 3, 2, 3)]
  for (x, state), (v0, v1, c0, c1) in zip(run(context, tx, params, grads, 1), table, strict=True):
    assert (x["v0"].item(), x["v1"].item()) == (v0, v1)
    assert (float(state.center["v0"]), float(state.center["v1"])) == (c0, c1)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
  ("order", "v0", "center"),
  [("sequential", [0.5, 0.75], 0.75), ("simultaneous", [0.5, 0.5], 1.0)],
)
def test_elastic_average_upstream_table_2_workers_period_1(context, order, v0, center):
  tx = ow.elastic_average(
    optax.sgd(1.0), AXIS, communication_period=1, moving_rate=0.5, order=order
  )
  params = {"v0": jnp.float32(0.0), "v1": jnp.float32(1.0), "part": jnp.ones((2, 4))}
  grads = jax.tree.map(lambda p: -jnp.ones((1, 2, *p.shape)), params)
  ((x, state),) = run(context, tx, params, grads, 2)
  np.testing.assert_array_equal(x["v0"], v0)
  np.testing.assert_array_equal(x["v1"], np.add(v0, 1))
  center_out = ow.center_params(state)
  assert float(center_out["v0"]) == center
  assert float(center_out["v1"]) == center + 1
  np.testing.assert_array_equal(center_out["part"], np.full((2, 4), center + 1))


def flat_leaves(tree, n):
  return np.concatenate([np.reshape(a, (n, -1)) for a in jax.tree.leaves(tree)], -1)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_elastic_average_every_context_matches_numpy(context, order):
  """8 workers with unequal gradients, momentum, a pull by rho, 7 steps of period 3, every step
  compared."""
  rng = np.random.default_rng(1)
  options = {"alpha": 0.11, "rho": 0.3, "period": 3}
  params, start = random_tree(rng), None
  grads = random_tree(rng, 7, 8)
  leaves = jax.tree.leaves(params)
  start = np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64)
  flat = np.concatenate([np.reshape(g, (7, 8, -1)) for g in jax.tree.leaves(grads)], -1).astype(
    np.float64
  )

  tx = ow.elastic_average(
    optax.sgd(0.2, momentum=0.9),
    AXIS,
    communication_period=3,
    moving_rate=0.11,
    rho=0.3,
    order=order,
  )
  expected = simulate(
    start, flat, lr=0.2, momentum=0.9, sequential=order == "sequential", **options
  )
  for (x, state), (e_x, e_c, e_lc) in zip(
    run(context, tx, params, grads, 8), expected, strict=True
  ):
    np.testing.assert_allclose(flat_leaves(x, 8), e_x, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(flat_leaves(state.center, 1)[0], e_c, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(flat_leaves(state.pulled_center, 8), e_lc, rtol=2e-5, atol=2e-6)


def test_elastic_average_sequential_matches_tensorflow_to_2_ulp():
  """TensorFlow's order of float32 operations, one worker after another; a fused multiply-add may
  round once less."""
  rng = np.random.default_rng(5)
  x = np.tile(rng.uniform(1, 2, 50).astype(np.float32), (3, 1))
  grads = rng.normal(size=(8, 3, 50)).astype(np.float32)
  tx = ow.elastic_average(
    optax.sgd(0.125), AXIS, communication_period=2, moving_rate=0.3, order="sequential"
  )
  params, state = jnp.asarray(x), ow.stack_workers(tx.init(jnp.asarray(x[0])), 3)
  axes = ow.worker_axes(state)
  c, alpha = x[0].copy(), np.float32(0.3)
  update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
  for t in range(8):
    updates, state = update(jnp.asarray(grads[t]), state, params)
    params = optax.apply_updates(params, updates)
    x = x - np.float32(0.125) * grads[t]
    if t % 2:
      for i in range(3):
        difference = alpha * (x[i] - c)
        x[i], c = x[i] - difference, c + difference
    np.testing.assert_array_max_ulp(np.asarray(params), x, maxulp=2)
    np.testing.assert_array_max_ulp(np.asarray(state.center), c, maxulp=2)
    assert np.mean(np.asarray(params) == x) > 0.9


@pytest.mark.parametrize("context", ["shard_map", "vmap"])
def test_elastic_average_default_moving_rate_and_rho(context):
  """alpha = 0.9 / period / workers; rho = alpha / learning_rate."""
  rng = np.random.default_rng(2)
  params, grads = (
    {"w": jnp.float32([1.0, -2.0])},
    {"w": jnp.asarray(rng.normal(size=(5, 4, 2)), jnp.float32)},
  )
  tx = ow.elastic_average(optax.sgd(0.5), AXIS, communication_period=2, learning_rate=0.5)
  alpha = 0.9 / 2 / 4
  start, flat = np.array([1.0, -2.0]), np.asarray(grads["w"], np.float64)
  expected = simulate(start, flat, period=2, alpha=alpha, rho=alpha / 0.5, lr=0.5)
  for (x, state), (e_x, e_c, _) in zip(run(context, tx, params, grads, 4), expected, strict=True):
    np.testing.assert_allclose(x["w"], e_x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.center["w"], e_c, rtol=1e-5, atol=1e-6)


def test_elastic_average_without_rho_keeps_no_pulled_center():
  assert ow.elastic_average(optax.sgd(0.1), AXIS).init(jnp.ones(3)).pulled_center is None
  assert (
    ow.elastic_average(optax.sgd(0.1), AXIS, rho=0, learning_rate=0.1)
    .init(jnp.ones(3))
    .pulled_center
    is None
  )
  assert (
    ow.elastic_average(optax.sgd(0.1), AXIS, rho=0.1).init(jnp.ones(3)).pulled_center is not None
  )


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_elastic_average_conserves_sum_of_workers_and_center(order):
  rng = np.random.default_rng(3)
  tx = ow.elastic_average(
    optax.sgd(1.0), AXIS, communication_period=1, moving_rate=0.2, order=order
  )
  grads = {"w": jnp.asarray(rng.normal(size=(6, 8, 5)), jnp.float32)}
  total = np.zeros(5)
  for t, (x, state) in enumerate(run("vmap", tx, {"w": jnp.zeros(5)}, grads, 8)):
    total -= np.asarray(grads["w"][t], np.float64).sum(0)
    np.testing.assert_allclose(
      x["w"].sum(0) + np.asarray(state.center["w"], np.float64), total, atol=1e-5
    )


def test_elastic_average_without_axis_is_one_worker():
  tx = ow.elastic_average(optax.sgd(1.0), None, communication_period=2, moving_rate=0.25)
  params = jnp.float32(0.0)
  state = tx.init(params)
  seen = []
  for _ in range(2):
    updates, state = tx.update(jnp.float32(-1.0), state, params)
    params = optax.apply_updates(params, updates)
    seen.append((float(params), float(state.center)))
  assert seen == [(1.0, 0.0), (1.5, 0.5)]


def test_elastic_average_over_two_axes_matches_numpy():
  rng = np.random.default_rng(4)
  grads = rng.normal(size=(2, 8, 3)).astype(np.float32)
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  for order in ("simultaneous", "sequential"):
    tx = ow.elastic_average(
      optax.sgd(0.3), ("a", "b"), communication_period=2, moving_rate=0.1, order=order
    )

    def two_steps(params, grads, tx=tx):
      state = tx.init(params[0])
      params = ow.per_shard(params[0], ("a", "b"))
      for i in range(2):
        updates, state = tx.update(grads[i, 0], state, params)
        params = optax.apply_updates(params, updates)
      return params[None], state.center

    specs = P(("a", "b"))
    step = jax.shard_map(
      two_steps, mesh=mesh, in_specs=(P(), P(None, *specs)), out_specs=(specs, P())
    )
    x, c = jax.jit(step)(jnp.zeros((1, 3)), grads)
    *_, (e_x, e_c, _) = simulate(
      np.zeros(3),
      grads.astype(np.float64),
      period=2,
      alpha=0.1,
      lr=0.3,
      sequential=order == "sequential",
    )
    np.testing.assert_allclose(x, e_x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(c, e_c, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_elastic_average_none_update_still_moves_center(order):
  """And the center comes to the workers, as for any other."""
  tx = ow.elastic_average(
    optax.sgd(1.0), AXIS, communication_period=1, moving_rate=0.5, rho=0.1, order=order
  )
  params = {"a": jnp.array([2.0, 4.0]), "b": jnp.array([2.0, 4.0])}
  state = tx.init({"a": jnp.float32(0.0), "b": jnp.float32(0.0)})
  axes = ow.worker_axes(state)
  state = ow.stack_workers(state, 2)
  update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
  updates, out = update({"a": jnp.zeros(2), "b": None}, state, params)
  assert updates["b"] is None
  center, pulled = (2.5, [0.0, 1.0]) if order == "sequential" else (3.0, [0.0, 0.0])
  assert float(out.center["b"]) == center
  assert float(out.center["a"]) > 0
  np.testing.assert_array_equal(out.pulled_center["b"], pulled)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_elastic_average_every_float_dtype_has_float32_center(dtype):
  tx = ow.elastic_average(
    optax.sgd(0.5), AXIS, communication_period=1, moving_rate=jnp.float32(0.25), rho=0.5
  )
  grads = jnp.asarray([[[1.0, 2.0], [3.0, 4.0]]], dtype)
  ((x, state),) = run("vmap", tx, jnp.zeros(2, dtype), grads, 2)
  assert state.center.dtype == jnp.float32  # a narrower one would stand still
  assert state.pulled_center.dtype == jnp.float32
  np.testing.assert_allclose(x, -0.375 * np.asarray(grads[0], np.float64), rtol=1e-2)
  np.testing.assert_allclose(np.asarray(state.center, np.float64), [-0.5, -0.75], rtol=1e-2)


def test_elastic_average_state_and_params_can_be_donated():
  tx = ow.elastic_average(optax.sgd(1.0), None, rho=0.1)
  params = jnp.zeros(4)
  state = tx.init(params)

  def step(params, state):
    updates, state = tx.update(jnp.ones(4), state, params)
    return optax.apply_updates(params, updates), state

  params, state = jax.jit(step, donate_argnums=(0, 1))(params, state)
  assert_close(params, -np.ones(4))
  abstract = tx.init(jax.ShapeDtypeStruct((4,), jnp.float32))
  assert abstract.center.shape == (4,)


def test_elastic_average_inject_hyperparams_changes_moving_rate():
  tx = optax.inject_hyperparams(
    ow.elastic_average,
    static_args=("communication_period", "axis_name", "inner", "fragments", "delay"),
  )(inner=optax.sgd(1.0), axis_name=None, communication_period=1, moving_rate=0.5)
  params = jnp.float32(0.0)
  state = tx.init(params)
  state.hyperparams["moving_rate"] = jnp.float32(0.25)
  _, state = jax.jit(tx.update)(jnp.float32(-1.0), state, params)
  assert float(ow.center_params(state)) == 0.25


# Bad input.


@pytest.mark.parametrize(
  ("options", "error", "match"),
  [
    ({"communication_period": 0}, ValueError, "communication_period must be at least 1, got 0"),
    ({"communication_period": 2.0}, TypeError, "communication_period must be a Python int"),
    ({"moving_rate": 0.0}, ValueError, r"moving_rate must be in \(0, 1\], got 0.0"),
    ({"moving_rate": 1.5}, ValueError, r"moving_rate must be in \(0, 1\]"),
    ({"moving_rate": float("nan")}, ValueError, "moving_rate"),
    ({"moving_rate": "fast"}, TypeError, "moving_rate must be a real scalar"),
    ({"rho": -0.1}, ValueError, "rho must be at least 0, got -0.1"),
    ({"learning_rate": 0.0}, ValueError, "learning_rate must be above 0"),
    ({"learning_rate": optax.constant_schedule(0.1)}, TypeError, "for a schedule pass rho"),
    ({"fragments": 0}, ValueError, "fragments must be at least 1, got 0"),
    ({"fragments": 11}, ValueError, "fragments must be at most communication_period, 10 steps"),
    ({"fragments": {"a": 0, "b": 2}}, ValueError, "number the fragments from 0, every number used"),
    ({"fragments": 1.5}, TypeError, "fragments must be a Python int"),
    (
      {"order": "both"},
      ValueError,
      "order must be one of 'simultaneous', 'sequential'; got 'both'",
    ),
  ],
)
def test_elastic_average_errors_arguments(options, error, match):
  with pytest.raises(error, match=match):
    ow.elastic_average(optax.sgd(0.1), AXIS, **options)


def test_elastic_average_errors_update_params_axis_and_dtype():
  tx = ow.elastic_average(optax.sgd(0.1), AXIS)
  params = jnp.ones(2)
  state = tx.init(params)
  with pytest.raises(ValueError, match="elastic_average: params is needed"):
    tx.update(params, state)
  with pytest.raises(ValueError, match="'w' is not bound"):
    tx.update(params, state, params)
  with pytest.raises(TypeError, match="dtype int32"):
    jax.vmap(lambda g: tx.update(g, state, params), axis_name=AXIS)(jnp.ones((2, 2), jnp.int32))


def test_elastic_average_unstable_moving_rate_warns_once():
  grads = jnp.zeros((3, 4, 2))
  tx = ow.elastic_average(optax.sgd(0.1), AXIS, communication_period=1, moving_rate=0.5)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    for context in ("vmap", "pmap"):
      for _ in run(context, tx, jnp.zeros(2), grads, 4):
        pass
  assert len([w for w in caught if "above 2 / (num_workers + 1) = 0.4" in str(w.message)]) == 1

  for options in ({"moving_rate": 0.4}, {"moving_rate": 0.5, "order": "sequential"}):
    stable = ow.elastic_average(optax.sgd(0.1), AXIS, communication_period=1, **options)
    for _ in run("vmap", stable, jnp.zeros(2), grads, 4):
      pass  # a warning would be an error here


# The center sharded over the workers.


@pytest.mark.parametrize(
  ("order", "kinds"),
  [
    ("simultaneous", ["all-gather", "reduce-scatter"]),
    ("sequential", ["all-gather", "all-gather"]),
  ],
)
def test_elastic_average_shard_center_collectives_conditional(order, kinds):
  tx = ow.elastic_average(
    optax.sgd(0.1), AXIS, communication_period=16, order=order, shard_center=True
  )
  params = ow.stack_workers(jnp.zeros(1024), 8)
  state = ow.stack_workers(tx.init(jnp.zeros(1024)), 8)
  specs = ow.specs(state, workers=AXIS)
  assert specs.center_share == P(AXIS)

  def step(params, state, grads):
    own = with_kept(state, center=state.center_share[0])
    updates, own = tx.update(grads[0], own, params[0])
    return updates[None], with_kept(own, center=own.center_share[None])

  mapped = jax.shard_map(
    step, mesh=mesh_of(8), in_specs=(P(AXIS), specs, P(AXIS)), out_specs=(P(AXIS), specs)
  )  # fmt: skip
  compiled = jax.jit(mapped).lower(params, state, params).compile()
  found = ow.inspect.compiled_collectives(compiled)
  assert all(c.conditional for c in found)
  assert sorted(c.kind for c in found) == kinds
  assert state.center_share.nbytes == params[0].nbytes  # over all workers together


# Fragments, each at a step of its own.


@pytest.mark.parametrize(
  "fragments", [2, 4, np.int64(2), {"a": 0, "b": 1}, {"a": np.int64(0), "b": np.int64(1)}]
)
def test_elastic_average_fragments_in_own_phase_match_numpy(fragments):
  """Two variables of equal size at period 4 exchange at steps 2, 6, ... and 4, 8, ...; each like a
  run of its own."""
  rng = np.random.default_rng(0)
  params = {"a": rng.normal(size=5).astype(np.float32), "b": rng.normal(size=5).astype(np.float32)}
  grads = {name: rng.normal(size=(9, 3, 5)).astype(np.float32) for name in params}
  tx = ow.elastic_average(
    optax.sgd(0.1, momentum=0.9),
    AXIS,
    communication_period=4,
    moving_rate=0.2,
    rho=0.3,
    fragments=fragments,
  )
  found = list(run("shard_map", tx, params, grads, 3))
  # What exchanges at 2, 6, ... goes through the same steps as a run with two more steps without a
  # gradient before it.
  late = simulate(params["b"], grads["b"], period=4, alpha=0.2, rho=0.3, lr=0.1, momentum=0.9)
  waits = np.concatenate([np.zeros((2, 3, 5), np.float32), grads["a"]])
  early = list(simulate(params["a"], waits, period=4, alpha=0.2, rho=0.3, lr=0.1, momentum=0.9))[2:]
  for (x, state), b, a in zip(found, late, early, strict=True):
    for name, (worker, center, _) in (("a", a), ("b", b)):
      np.testing.assert_allclose(x[name], worker, rtol=1e-5, atol=1e-6)
      np.testing.assert_allclose(state.center[name], center, rtol=1e-5, atol=1e-6)


# Where dtypes are narrow, numbers are none, and meshes are Explicit.


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_elastic_average_center_of_bfloat16_params_moves(order):
  """Eight workers whose distance is below what an exchange can move in bfloat16: the center comes
  to them."""
  tx = ow.elastic_average(optax.identity(), AXIS, communication_period=1, order=order)
  start = jnp.ones((), jnp.bfloat16)
  state = with_kept(ow.stack_workers(tx.init(start), 8), center=jnp.float32(0.99))
  axes, params = ow.worker_axes(state), ow.stack_workers(start, 8)
  step = jax.jit(jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS))
  for _ in range(60):
    updates, state = step(jnp.zeros_like(params), state, params)
    params = optax.apply_updates(params, updates)
  assert state.center.dtype == jnp.float32
  assert float(state.center) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_elastic_average_bfloat16_updates_conserve_sum(order):
  rng = np.random.default_rng(0)
  tx = ow.elastic_average(
    optax.identity(), AXIS, communication_period=1, moving_rate=0.1, order=order
  )
  params = jnp.asarray(rng.normal(size=(4, 50)), jnp.float32)
  state = ow.stack_workers(tx.init(jnp.zeros(50)), 4)
  axes = ow.worker_axes(state)
  with jax.numpy_dtype_promotion("standard"):
    updates, after = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)(
      jnp.zeros((4, 50), jnp.bfloat16), state, params
    )
    moved = optax.apply_updates(params, updates)
  total = np.asarray(moved, np.float64).sum(0) + np.asarray(after.center, np.float64)
  np.testing.assert_allclose(total, np.asarray(params, np.float64).sum(0), atol=2e-6)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
@pytest.mark.parametrize("shard_center", [False, True])
def test_elastic_average_worker_with_nan_leaves_others_as_alone(context, order, shard_center):
  """Where participation is given: against the simulator without that worker, whose sound variable
  takes no part either."""
  tx = ow.elastic_average(
    optax.sgd(1.0), AXIS, communication_period=2, moving_rate=0.2,
    order=order, shard_center=shard_center,
  )  # fmt: skip
  rng = np.random.default_rng(3)
  grads = {"a": rng.normal(size=(4, 4, 3)), "b": rng.normal(size=(4, 4, 2))}
  grads["a"][1, 2] = np.nan
  given = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
  params = {"a": jnp.zeros((4, 3)), "b": jnp.zeros((4, 2))}
  here = optax.GradientTransformation(
    tx.init, lambda g, state, params: tx.update(g, state, params, participation=1.0)
  )
  *_, (x, state) = run(context, here, jax.tree.map(lambda p: p[0], params), given, 4)
  center = ow.center_params(state, jax.tree.map(lambda p: p[0], params))
  options = {"period": 2, "alpha": 0.2, "lr": 1.0, "sequential": order == "sequential"}
  others = [0, 1, 3]
  *_, (xa, ca, _) = simulate(np.zeros(3), grads["a"][:, others], **options)
  *_, (xb, cb, _) = simulate(np.zeros(2), grads["b"][:, others], **options)
  assert_close({"a": x["a"][others], "b": x["b"][others]}, {"a": xa, "b": xb}, rtol=1e-5, atol=1e-6)
  assert_close(center, {"a": ca, "b": cb}, rtol=1e-5, atol=1e-6)
  assert np.isnan(x["a"][2]).any()


def test_elastic_average_sequential_outside_jit_compiles_once():
  tx = ow.elastic_average(
    optax.sgd(0.1), AXIS, communication_period=1, moving_rate=0.1, order="sequential"
  )
  params = jnp.ones((3, 2))
  state = ow.stack_workers(tx.init(jnp.ones(2)), 3)
  axes = ow.worker_axes(state)
  update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
  _, state = update(params, state, params)
  with compilations() as compiled:
    update(params, state, params)
    assert compiled == []


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("make", ["cross_shard", "elastic_average", "sequential"])
def test_elastic_average_manual_data_axis_and_auto_model_axis(kind, make):
  """The numbers of one device, and the bytes of a reduction by hand."""
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
  rng = np.random.default_rng(0)
  specs, is_explicit = {"a": P(None, "model"), "b": P("model", None)}, kind == AxisType.Explicit
  host = {name: jnp.asarray(rng.normal(size=(4, 8, 8)), jnp.float32) for name in specs}
  tx = {
    "cross_shard": lambda: ow.cross_shard(optax.identity(), "data"),
    "elastic_average": lambda: ow.elastic_average(
      optax.identity(), "data", communication_period=1, moving_rate=0.25
    ),
    "sequential": lambda: ow.elastic_average(
      optax.identity(), "data", communication_period=1, moving_rate=0.25, order="sequential"
    ),
  }[make]()

  def step(stacked):
    mine = jax.tree.map(lambda x: x[0], stacked)
    start = {
      name: jnp.zeros((8, 8), out_sharding=P(*spec) if is_explicit else None)
      for name, spec in specs.items()
    }
    if make == "cross_shard":
      return tx.update(mine, tx.init(start), start)[0]
    return tx.update(jax.tree.map(jnp.zeros_like, mine), tx.init(start), mine)[1].center

  def by_hand(stacked):
    return jax.tree.map(lambda x: jax.lax.pmean(x[0], "data"), stacked)

  def compiled(fun):
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"})
    return jax.jit(mapped).lower(placed).compile()

  with jax.set_mesh(mesh):
    placed = {
      n: jax.device_put(x, NamedSharding(mesh, P("data", *specs[n]))) for n, x in host.items()
    }
    result = compiled(step)(placed)
    if make == "cross_shard":
      assert ow.inspect.compiled_collectives(compiled(step)) == ow.inspect.compiled_collectives(
        compiled(by_hand)
      )
  for name, x in host.items():
    x = np.asarray(x, np.float64)
    if make == "cross_shard":
      np.testing.assert_allclose(result[name], x.mean(0), rtol=1e-5, atol=1e-6)
    else:
      *_, (_, center, _) = simulate(
        np.zeros(64),
        x.reshape(1, 4, 64),
        period=1,
        alpha=0.25,
        lr=-1.0,
        sequential=make == "sequential",
      )
      np.testing.assert_allclose(result[name], center.reshape(8, 8), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_elastic_average_absent_worker_takes_and_gives_nothing(context, order):
  """Against NumPy; a number above 0 is no weight. The pull goes to the center as last pulled."""
  alpha, rho, rate = 0.2, 0.3, 0.1
  tx = ow.elastic_average(
    optax.sgd(rate), AXIS, communication_period=1, moving_rate=alpha, rho=rho, order=order
  )
  rng = np.random.default_rng(5)
  grads = rng.normal(size=(4, 4, 3))
  weights = np.float32([[1, 0, 7, 1], [1, 1, 1, 1], [0, 0, np.nan, 0], [0, 2, 1, 0]])
  state = ow.stack_workers(tx.init(jnp.zeros(3)), 4)
  axes = ow.worker_axes(state)

  def step(params, state, grads, weight):
    updates, state = tx.update(grads, state, params, participation=weight)
    return optax.apply_updates(params, updates), state

  mapped = in_context(context, step, 4, (0, axes, 0, 0), (0, axes))
  params, x, c, pulled = jnp.zeros((4, 3)), np.zeros((4, 3)), np.zeros(3), np.zeros((4, 3))
  for t in range(4):
    params, state = mapped(params, state, jnp.asarray(grads[t], jnp.float32), weights[t])
    x = x - rate * (grads[t] + rho * (x - pulled))
    before = c
    for i in np.flatnonzero(weights[t] > 0):
      read = c if order == "sequential" else before
      d = x[i] - read
      x[i], c, pulled[i] = x[i] - alpha * d, c + alpha * d, read
    np.testing.assert_allclose(params, x, 1e-5, 1e-6)
    np.testing.assert_allclose(state.center, c, 1e-5, 1e-6)
    np.testing.assert_allclose(state.pulled_center, pulled, 1e-5, 1e-6)


def saved(tree):
  return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def two_levels(outer, check_vma):
  """A center for each pod inside and one over `outer`: the mapped step, and what it starts from."""
  inner = ow.elastic_average(optax.sgd(0.1), "chip", communication_period=1, moving_rate=0.2)
  tx = ow.elastic_average(inner, outer, communication_period=2, moving_rate=0.1)
  state, both = tx.init(jnp.zeros(())), P(("pod", "chip"))
  axes, specs = ow.worker_axes(state), ow.specs(state, workers=("pod", "chip"))

  def pick(fun, tree):
    return jax.tree.map(
      lambda a, x: x if a is None else fun(x), axes, tree, is_leaf=lambda a: a is None
    )

  def step(params, state, grad):
    updates, state = tx.update(grad[0], pick(lambda x: x[0], state), params[0])
    return (params[0] + updates)[None], pick(lambda x: x[None], state)

  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(both, specs, both), out_specs=(both, specs), check_vma=check_vma
  )
  return jax.jit(mapped), jnp.zeros(4), ow.stack_workers(state, 4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_elastic_average_nested_pod_centers_match_numpy(check_vma):
  """Against NumPy, saved in the middle."""
  step, params, state = two_levels(("pod", "chip"), check_vma)
  pods = ref.Elastic(("chip",), 1, 0.2, 0.0, "simultaneous", ref.Sgd(0.1, 0.0))
  node = ref.Elastic(("pod", "chip"), 2, 0.1, 0.0, "simultaneous", pods)
  grads = np.array([1.0, 2.0, 5.0, 9.0])
  for i in range(6):
    if i == 3:
      params, state = saved((params, state))
    params, state = step(params, state, jnp.asarray(grads, jnp.float32))
  calls = [(grads[:, None], None, None)] * 6
  x, numpy_state = ref.run(node, np.zeros((4, 1)), calls, {"pod": 2, "chip": 2})
  assert_close(params, x[:, 0], rtol=1e-5)
  assert_close(state.center, numpy_state["center"][0, 0], rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_elastic_average_nested_without_all_axes_named_is_error(check_vma):
  step, params, state = two_levels("pod", check_vma)
  with pytest.raises(ValueError, match=r"elastic_average: .*Name all the axes"):
    step(params, state, params)
