"""One matrix: every public wrapper in every parallel context on 1, 2 and 8 shards, against plain
NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from helpers import (
  AXIS,
  CONTEXTS,
  RATE,
  SGD,
  WRAPPERS,
  assert_close,
  in_context,
  mesh_of,
  with_kept,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

STEPS, SIZE = 4, 5

START = np.linspace(-0.5, 0.6, SIZE)  # of a norm above LIMIT


def data(num_shards):
  rng = np.random.default_rng(num_shards)
  grads = rng.normal(size=(STEPS, num_shards, SIZE)).astype(np.float32)
  return grads, rng.integers(0, 4, (STEPS, num_shards))


def one_step(tx, wrapped, params, state, grad, delay):
  extra = dict(wrapped.extra_args)
  if extra:
    extra["computed_at"] = ow.get_state(state, ow.states.StalenessState).step - delay
  updates, state = tx.update(wrapped.updates(grad, 2), state, params, **extra)
  return optax.apply_updates(params, updates), state


def simulate(wrapped, grads, delays):
  """What NumPy says of every shard's parameters after all steps."""
  num_shards = grads.shape[1]
  node, world, state = wrapped.node((AXIS,)), {AXIS: num_shards}, None
  params = np.tile(START, (num_shards, 1))
  for grad, delay in zip(grads.astype(np.float64), delays):
    state = node.init(params) if state is None else state
    stamp = ref.stale_step(node, state) - delay if wrapped.extra_args else None
    grad = np.stack([grad * 2 / 3, grad * 4 / 3], 1) if wrapped.stacked else grad
    params, state = ref.run(node, params, [(grad, None, stamp)], world, state)
  return params


SIZES = [(context, 2) for context in CONTEXTS] + [("vmap", 1), ("vmap", 8), ("shard_map", 8)]


@pytest.mark.parametrize(("context", "num_shards"), SIZES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_in_every_context_match_numpy(name, context, num_shards):
  wrapped = WRAPPERS[name]
  grads, delays = data(num_shards)
  tx = optax.with_extra_args_support(wrapped.make(optax.sgd(RATE), AXIS))
  start = jnp.asarray(START, jnp.float32)
  state = tx.init(start)
  axes = ow.worker_axes(state, replicated=not wrapped.owned)
  state = ow.stack_workers(state, num_shards, replicated=not wrapped.owned)
  params = ow.stack_workers(start, num_shards) if wrapped.owned else start
  param_axis = 0 if wrapped.owned else None

  def step(params, state, grad, delay):
    params, state = one_step(tx, wrapped, params, state, grad, delay)
    # Without a center workers share their step counter.
    shared = params if not wrapped.owned else getattr(state, "center", None)
    shared = state.step if shared is None else shared
    return params, state, ow.is_replicated(shared, AXIS)

  step = in_context(context, step, num_shards, (param_axis, axes, 0, 0), (param_axis, axes, None))
  for grad, delay in zip(grads, delays):
    params, state, together = step(params, state, jnp.asarray(grad), jnp.asarray(delay, jnp.int32))
    assert bool(together)
  expected = simulate(wrapped, grads, delays)
  assert_close(params, expected if wrapped.owned else expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("name", [name for name, row in WRAPPERS.items() if not row.owned])
def test_wrappers_under_plain_jit_on_sharded_batch_match_numpy(name, num_devices, axis_type):
  """Without an axis name, on a sharded batch: the gradient of its mean is the mean.
  Workers need an axis."""
  wrapped = WRAPPERS[name]
  grads, delays = data(8)
  delays[:] = delays[:, :1]  # one stamp for all
  mesh = mesh_of(num_devices, axis_type)
  tx = optax.with_extra_args_support(wrapped.make(optax.sgd(RATE), None))
  params = jax.device_put(jnp.asarray(START, jnp.float32), NamedSharding(mesh, P()))
  state = jax.device_put(tx.init(jnp.asarray(START, jnp.float32)), NamedSharding(mesh, P()))

  @jax.jit
  def step(params, state, batch, delay):
    def loss(params):
      return jnp.mean(jnp.einsum("bn,n->b", batch, params))

    return one_step(tx, wrapped, params, state, jax.grad(loss)(params), delay)

  for grad, delay in zip(grads, delays):
    batch = jax.device_put(jnp.asarray(grad), NamedSharding(mesh, P(AXIS)))
    with jax.set_mesh(mesh):
      params, state = step(params, state, batch, jnp.int32(delay[0]))
  assert_close(params, simulate(wrapped, grads, delays)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.xfail(
  raises=(AssertionError, ValueError),  # of JAX 0.10 and of 0.12
  strict=True,
  reason="JAX 0.10.2 and 0.12: no collectives in a vmap over Explicit axes",
)
def test_upstream_sharded_vmap_over_explicit_axis_xfail():
  mapped = jax.vmap(lambda x: jax.lax.psum(x, AXIS), axis_name=AXIS, spmd_axis_name=AXIS)
  jax.jit(mapped)(
    jax.device_put(jnp.arange(2.0), NamedSharding(mesh_of(2, AxisType.Explicit), P(AXIS)))
  )


# Meshes of two axes.


def mesh_2d(rows, columns, names):
  return jax.make_mesh((rows, columns), names, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_data_times_tensor_parallel_mesh_matches_numpy(check_vma):
  """A matrix sharded by columns over "model", its gradient reduced over "data" alone, and a bound
  on its whole rows."""
  rng = np.random.default_rng(0)
  w = rng.normal(size=(3, 8)).astype(np.float32)
  x = rng.normal(size=(4, 6, 3)).astype(np.float32)
  tx = ow.clip_variables(ow.cross_shard(optax.sgd(0.5), "data"), 0.9, axes=1, axis_name="model")

  def step(w, x):
    grad = jax.grad(lambda w: jnp.mean(jnp.sum(jnp.sin(x[0] @ w), -1)))(w)
    return optax.apply_updates(w, tx.update(grad, tx.init(w), w)[0])

  mapped = jax.shard_map(
    step,
    mesh=mesh_2d(4, 2, ("data", "model")),
    in_specs=(P(None, "model"), P("data")),
    out_specs=P(None, "model"),
    check_vma=check_vma,
  )
  w64, x64 = w.astype(np.float64), x.astype(np.float64)
  grad = np.mean([x_i.T @ np.cos(x_i @ w64) / 6 for x_i in x64], 0)
  moved = w64 - 0.5 * grad
  norm = np.linalg.norm(moved, axis=1, keepdims=True)
  assert_close(jax.jit(mapped)(w, x), moved * np.minimum(1, 0.9 / norm), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", ["simultaneous", "sequential"])
def test_elastic_average_of_sharded_workers_matches_numpy(check_vma, order):
  """8 devices as 4 workers of 2: each worker's matrix lies by columns over the second axis, and so
  does the center."""
  rng = np.random.default_rng(1)
  start = rng.normal(size=(3, 4)).astype(np.float32)
  grads = rng.normal(size=(3, 4, 3, 4)).astype(np.float32)
  tx = ow.elastic_average(
    optax.sgd(0.1), "worker", communication_period=1, moving_rate=0.25, order=order
  )
  mesh = mesh_2d(4, 2, ("worker", "part"))
  own, shared = P("worker", None, "part"), P(None, "part")
  specs = with_kept(ow.specs(tx.init(start), workers="worker"), center=shared)

  def step(params, state, grad):
    updates, state = tx.update(grad[0], state, params[0])
    return optax.apply_updates(params[0], updates)[None], state

  mapped = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(own, specs, own),
      out_specs=(own, specs),
      check_vma=check_vma,
    )
  )
  params, state = ow.stack_workers(jnp.asarray(start), 4), tx.init(start)
  for grad in grads:
    params, state = mapped(params, state, grad)
  node = ref.Elastic(("worker",), 1, 0.25, 0.0, order, SGD)
  calls = [(grad.reshape(4, -1), None, None) for grad in grads]
  x, numpy_state = ref.run(node, start.ravel(), calls, {"worker": 4})
  assert_close(params, x.reshape(4, 3, 4), rtol=1e-5, atol=1e-6)
  assert_close(state.center, numpy_state["center"][0].reshape(3, 4), rtol=1e-5, atol=1e-6)


# What is sent, and what is held.


def compiled(tx, params, num_workers, replicated, extra=None):
  mesh = mesh_of(num_workers)
  axes = ow.worker_axes(jax.eval_shape(tx.init, params), replicated=replicated)
  specs = ow.specs(jax.eval_shape(tx.init, params), workers=AXIS, replicated=replicated)
  own = None if replicated else 0

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params, **(extra or {}))
    return optax.apply_updates(params, updates), state

  def sharded(spec):
    return jax.tree.map(lambda s: NamedSharding(mesh, s), spec)

  mapped = jax.vmap(step, (own, axes, 0), (own, axes), axis_name=AXIS, spmd_axis_name=AXIS)
  by_worker = sharded(P(AXIS))
  placed = sharded(P()) if replicated else by_worker
  stacked = jax.eval_shape(lambda p: ow.stack_workers(p, num_workers), params)
  state = jax.eval_shape(
    lambda p: ow.stack_workers(tx.init(p), num_workers, replicated=replicated), params
  )
  jitted = jax.jit(
    mapped, in_shardings=(placed, sharded(specs), by_worker), out_shardings=(placed, sharded(specs))
  )
  return jitted.lower(params if replicated else stacked, state, stacked).compile()


MODEL = {
  "kernel": jax.ShapeDtypeStruct((64, 32), jnp.float32),
  "bias": jax.ShapeDtypeStruct((32,), jnp.float32),
}

NUM_BYTES = 4 * (64 * 32 + 32)


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("tx", "replicated", "sent_always", "sent_sometimes"),
  [
    (ow.cross_shard(optax.adam(0.1), AXIS), True, NUM_BYTES, 0),
    (ow.gather_towers(ow.cross_shard(optax.adam(0.1), AXIS), 4), True, 0, NUM_BYTES),
    (ow.elastic_average(optax.adam(0.1), AXIS), False, 0, NUM_BYTES),
    (ow.elastic_average(optax.adam(0.1), AXIS, order="sequential"), False, 0, NUM_BYTES),
    (ow.clip_variables(ow.cross_shard(optax.adam(0.1), AXIS), 1.0), True, NUM_BYTES, 0),
  ],
  ids=["cross_shard", "gather_towers", "elastic_average", "sequential", "clip_variables"],
)
def test_bytes_sent_once_and_exchanges_in_conditional_only(
  tx, replicated, sent_always, sent_sometimes
):
  found = ow.inspect.compiled_collectives(compiled(tx, MODEL, 8, replicated))
  assert sum(c.num_bytes for c in found if not c.conditional) == sent_always
  assert sum(c.num_bytes for c in found if c.conditional) == sent_sometimes
