"""What the projection of many variables at once leaves out: the quick test, and small variables
taken together."""

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
from optax_wrappers._norms import _project_arrays


def clip(limit, axes=0, **options):
  return ow.clip_variables(optax.identity(), limit, axes, **options)


@functools.partial(jax.jit, static_argnums=0)
def moved(tx, params):
  updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
  return optax.apply_updates(params, updates)


def variable(p, u, limit, axes=(0,)):
  return _project_arrays.Variable(p, u, None, projections.max_norm(limit, axes), axes, ())


def quick_sizes(p, u, limit):
  sizes = jax.jit(lambda p, u: _project_arrays._quick_sizes(variable(p, u, limit)))(p, u)
  return np.asarray(sizes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("limit", [1e-33, 1e-18, 1e-14, 1.0, 1e17, 1e19, 1e36])
@pytest.mark.parametrize("n", [1, 3, 4096])
def test_quick_sizes_never_pass_slices_outside_bound(dtype, limit, n):
  away = np.concatenate([np.linspace(-2, 2, 200) * 2.0**-k for k in (4, 8, 14, 20, 23)])
  rng = np.random.default_rng(0)
  y = rng.normal(size=(n, away.size))
  y *= limit * (1 + away) / np.sqrt((y * y).sum(0))
  p = (y * rng.uniform(size=y.shape)).astype(dtype)
  u = (y - p.astype(np.float64)).astype(dtype)
  landed = (p + u).astype(np.float64)
  norms = np.sqrt((landed**2).sum(0))
  sizes = quick_sizes(p, u, limit)
  outside = norms > limit
  assert outside.any() and not (sizes[outside] <= 1).any()
  if 1e-15 < limit < 1e18:  # beyond these, squares underflow, and nothing is passed
    assert (sizes[norms < limit * (1 - 2.0**-4)] <= 1).all()


def test_quick_sizes_none_for_float16_or_large_sums():
  tall = jax.ShapeDtypeStruct((2**23, 1), jnp.float32)
  half = jax.ShapeDtypeStruct((4, 1), jnp.float16)
  for x in (tall, half):
    assert (
      jax.eval_shape(lambda p, u: _project_arrays._quick_sizes(variable(p, u, 1.0)), x, x) is None
    )


def test_quick_sizes_underflow_counts_as_outside():
  p = np.full((2**20, 1), 1e-23, np.float32)  # of norm 1e-20
  assert not (quick_sizes(p, np.zeros_like(p), 1e-21) <= 1).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_quick_sizes_nan_inf_or_overflow_is_not_passed(bad):
  p = np.array([[bad, 0.5], [0.0, 0.5]], np.float32)
  np.testing.assert_array_equal(quick_sizes(p, np.zeros_like(p), 1.0) <= 1, [False, True])


def test_min_max_norm_lower_bound_holds_if_below_upper():
  p = np.array([0.03, 0.04], np.float32)
  tx = ow.project_variables(optax.identity(), projections.min_max_norm(0.5, 2.0))
  assert_close(moved(tx, p), np.array([0.3, 0.4], np.float32))


def test_clip_variables_bound_beyond_float32_holds():
  p = np.full(16, 3e38, np.float32)
  assert_close(moved(clip(1e39), p), np.full(16, 2.5e38, np.float32))


def tree_of_many_kinds():
  rng = np.random.default_rng(0)

  def leaf(shape, dtype, size):
    return np.asarray(rng.normal(size=shape) * size, dtype)

  # Sizes: some slices outside the bound of 1, some inside. The large leaf is not stacked.
  matrices = {f"m{i}": leaf((3, 4), jnp.float32, 0.3 * i) for i in range(5)}
  half = {f"h{i}": leaf((3, 4), jnp.bfloat16, 0.3 * i) for i in range(3)}
  vectors = {f"v{i}": leaf((4,), jnp.float32, 0.4 * (i % 5)) for i in range(66)}
  return {
    **matrices,
    **half,
    **vectors,
    "c0": leaf((3, 2), np.complex64, 1.0) * np.complex64(1 + 1j),
    "c1": leaf((3, 2), np.complex64, 0.1) * np.complex64(1 - 1j),
    "scalar": np.float32(3.0),
    "large": leaf((300, 300), jnp.float32, 0.06),
  }


@pytest.mark.parametrize("only_touched", [False, True])
@pytest.mark.parametrize("axes", [None, -1])
def test_projection_of_stacked_variables_equals_one_by_one(axes, only_touched):
  params = tree_of_many_kinds()
  if axes == -1:
    del params["scalar"]
  grads = jax.tree.map(
    lambda p: (0.1 * p * (np.arange(p.size).reshape(p.shape) % 3 - 1)).astype(p.dtype), params
  )
  tx = clip(1.0, axes, only_touched=only_touched)
  update = jax.jit(tx.update)
  together, _ = update(grads, tx.init(params), params)
  for name in params.keys() - {f"v{i}" for i in range(3, 63)}:
    p, g = params[name], grads[name]
    alone, _ = update(g, tx.init(p), p)
    np.testing.assert_array_equal(bits(together[name]), bits(alone), err_msg=name)


def test_project_outside_jit_equals_jit_bit_for_bit():
  many = tree_of_many_kinds()
  params = {"inside": many["m1"], "outside": many["m4"]}
  grads = jax.tree.map(lambda p: 0.1 * p, params)
  grads["outside"][:, 0] = 0
  tx = clip(1.0, only_touched=True)
  expected, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  emitted, _ = tx.update(*jax.device_put((grads, tx.init(params), params)))
  assert bits(emitted) == bits(expected)
  assert bits(emitted["inside"]) == bits(grads["inside"])
  assert bits(emitted["outside"]) != bits(grads["outside"])


@pytest.mark.parametrize(
  "limit", [1.0, optax.linear_schedule(1.0, 2.0, 10)], ids=["number", "schedule"]
)
def test_projection_of_many_small_variables_compiles_to_one_loop(limit):
  def lowered(count):
    params = [np.ones((4, 4), np.float32)] * count
    tx = clip(limit)
    return jax.jit(lambda p: tx.update(p, tx.init(p), p)[0]).lower(params).as_text()

  few, many = lowered(2), lowered(64)
  assert few.count("stablehlo.while") == many.count("stablehlo.while") == 1
  assert few.count("stablehlo.bitcast_convert") == many.count("stablehlo.bitcast_convert") > 0


def test_projection_eager_second_step_compiles_nothing():
  p, tx = jax.device_put(np.full((5, 7), 3.0, np.float32)), clip(1.0)
  state = tx.init(p)
  tx.update(p, state, p)
  with compilations() as compiled:
    tx.update(p, state, p)
    assert compiled == []


@pytest.mark.parametrize(
  ("platform", "num_loops"), [("cpu", 1), ("tpu", 0), ("cuda", 0), ("rocm", 0)]
)
def test_projection_lowering_has_while_loop_on_cpu_only(platform, num_loops):
  p, tx = np.ones((4, 4), np.float32), clip(1.0)
  traced = jax.jit(lambda p: tx.update(p, tx.init(p), p)[0]).trace(p)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count("stablehlo.while") == num_loops


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
  if jax.__version_info__ >= (0, 12):  # before, a loop of one turn keeps XLA from computing u again
    assert "while(" not in compiled.as_text()
  for name, u in jax.jit(emitted)(params).items():
    assert u.sharding.is_equivalent_to(params[name].sharding, 2)


@pytest.mark.parametrize("check_vma", [False, True])
def test_projection_in_shard_map_may_run_on_some_shards_only(check_vma):
  own = np.array([[3.0, 4.0], [0.3, 0.4]], np.float32)  # the second shard is inside
  params = {"own": own.ravel(), "shared": np.array([0.6, 0.0], np.float32)}
  step, specs = functools.partial(moved, clip(1.0)), {"own": P("w"), "shared": P()}
  step = jax.jit(
    jax.shard_map(step, mesh=mesh_of(2), in_specs=(specs,), out_specs=specs, check_vma=check_vma)
  )
  # What is typed as equal on all shards has a test of its own, which is equal too.
  assert step.lower(params).as_text().count("stablehlo.while") == (2 if check_vma else 1)
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
  assert_close(derivative(p), np.stack([outside, weights[1]]))


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
