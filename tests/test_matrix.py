"""One matrix: every public wrapper in every parallel context on 1, 2 and 8 shards, against plain
NumPy."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, WRAPPERS, assert_close, in_context, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers import projections

STEPS, SIZE, RATE, LIMIT = 4, 5, 0.1, 0.4
START = np.linspace(-0.3, 0.4, SIZE)


def sgd(params, gradients):
  for gradient in gradients:
    params = params - RATE * gradient
  return params


def numpy_mean(grads, tickets):
  return sgd(START, grads.mean(1))


def numpy_towers(grads, tickets):
  return sgd(START, grads.mean(1).reshape(-1, 2, SIZE).mean(1))


def numpy_stacked(grads, tickets):
  return sgd(START, np.stack([grads, 3 * grads]).mean((0, 2)))


def numpy_elastic(grads, tickets):
  x, c = np.tile(START, (grads.shape[1], 1)), START
  for t, g in enumerate(grads):
    x = x - RATE * g
    if t % 2:
      d = x - c
      x, c = x - 0.2 * d, c + 0.2 * d.sum(0)
  return x


def numpy_stale(grads, tickets):
  params, step = START, 0
  for g, delay in zip(grads, tickets):
    fresh = delay <= 1
    if fresh.any():
      params, step = params - RATE * g[fresh].mean(0), step + 1
  return params


def numpy_clip(grads, tickets):
  params = START
  for g in grads.mean(1):
    params = params - RATE * g
    params = params * min(1, LIMIT / np.linalg.norm(params))
  return params


def numpy_box(grads, tickets):
  params = START
  for g in grads.mean(1):
    params = np.clip(params - RATE * g, -0.2, 0.3)
  return params


@dataclasses.dataclass(frozen=True)
class Row:
  """One wrapper: how it is made, and what NumPy says of gradients [step, shard, n] and delays
  [step, shard]."""

  make: Callable
  reference: Callable
  owned: bool = False
  stacked: bool = False
  ticket: bool = False


# A new wrapper is added here, in one line.
# fmt: off
ROWS = {
  "all_reduce": Row(lambda i, a: optax.chain(ow.all_reduce(a), i), numpy_mean),
  "cross_shard": Row(lambda i, a: ow.cross_shard(i, a), numpy_mean),
  "gather_towers": Row(lambda i, a: ow.gather_towers(ow.cross_shard(i, a), 2), numpy_towers),
  "reduce_towers": Row(lambda i, a: ow.reduce_towers(ow.cross_shard(i, a)), numpy_stacked, stacked=True),  # noqa: E501
  "elastic_average": Row(lambda i, a: ow.elastic_average(i, a, communication_period=2, moving_rate=0.2), numpy_elastic, owned=True),  # noqa: E501
  "drop_stale": Row(lambda i, a: ow.drop_stale(ow.cross_shard(i, a), 1, axis_name=a), numpy_stale, ticket=True),  # noqa: E501
  "clip_variables": Row(lambda i, a: ow.clip_variables(ow.cross_shard(i, a), LIMIT), numpy_clip),
  "project_variables": Row(lambda i, a: ow.project_variables(ow.cross_shard(i, a), projections.box(-0.2, 0.3)), numpy_box),  # noqa: E501
}
# fmt: on


def test_the_matrix_is_complete():
  assert set(ROWS) == set(WRAPPERS)


def data(num_shards):
  rng = np.random.default_rng(num_shards)
  return rng.normal(size=(STEPS, num_shards, SIZE)).astype(np.float32), rng.integers(
    0, 4, (STEPS, num_shards)
  )


def one_step(tx, row, params, state, grad, delay):
  grad = jnp.stack([grad, 3 * grad]) if row.stacked else grad
  extra = {"computed_at": ow.get_state(state, ow.DropStaleState).step - delay} if row.ticket else {}
  updates, state = tx.update(grad, state, params, **extra)
  return optax.apply_updates(params, updates), state


@pytest.mark.filterwarnings(
  "ignore:elastic_average. moving_rate"
)  # 0.2 is a fraction high for 8 workers, as 2 / 9
@pytest.mark.parametrize("num_shards", [1, 2, 8])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", ROWS)
def test_every_context(name, context, num_shards):
  row = ROWS[name]
  grads, delays = data(num_shards)
  tx = optax.with_extra_args_support(row.make(optax.sgd(RATE), AXIS))
  start = jnp.asarray(START, jnp.float32)
  state = tx.init(start)
  axes = ow.worker_axes(state, replicated=not row.owned)
  state = ow.stack_workers(state, num_shards, replicated=not row.owned)
  params = ow.stack_workers(start, num_shards) if row.owned else start
  param_axis = 0 if row.owned else None

  def step(params, state, grad, delay):
    params, state = one_step(tx, row, params, state, grad, delay)
    shared = ow.center_params(state) if row.owned else params
    return params, state, ow.is_replicated(shared, AXIS)

  step = in_context(context, step, num_shards, (param_axis, axes, 0, 0), (param_axis, axes, None))
  for grad, delay in zip(grads, delays):
    params, state, together = step(params, state, jnp.asarray(grad), jnp.asarray(delay, jnp.int32))
    assert bool(together)
  assert_close(params, row.reference(grads.astype(np.float64), delays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.owned])
def test_plain_jit_with_automatic_partitioning(name, num_devices, axis_type):
  """Without an axis name, on a batch that lies sharded: the gradient of its mean is the mean.
  Workers need an axis."""
  row = ROWS[name]
  grads, delays = data(8)
  delays[:] = delays[:, :1]  # one ticket for all
  mesh = mesh_of(num_devices, axis_type)
  tx = optax.with_extra_args_support(row.make(optax.sgd(RATE), None))
  params = jax.device_put(jnp.asarray(START, jnp.float32), NamedSharding(mesh, P()))
  state = jax.device_put(tx.init(jnp.asarray(START, jnp.float32)), NamedSharding(mesh, P()))

  @jax.jit
  def step(params, state, batch, delay):
    def loss(params):
      return jnp.mean(jnp.einsum("bn,n->b", batch, params))

    return one_step(tx, row, params, state, jax.grad(loss)(params), delay)

  for grad, delay in zip(grads, delays):
    batch = jax.device_put(jnp.asarray(grad), NamedSharding(mesh, P(AXIS)))
    with jax.set_mesh(mesh):
      params, state = step(params, state, batch, jnp.int32(delay[0]))
  assert_close(params, row.reference(grads.astype(np.float64), delays), rtol=1e-5, atol=1e-6)


@pytest.mark.xfail(
  raises=AssertionError,
  strict=True,
  reason="JAX 0.10.2: no collectives in a vmap over Explicit axes",
)
def test_a_sharded_vmap_over_an_explicit_axis():
  mapped = jax.vmap(lambda x: jax.lax.psum(x, AXIS), axis_name=AXIS, spmd_axis_name=AXIS)
  jax.jit(mapped)(
    jax.device_put(jnp.arange(2.0), NamedSharding(mesh_of(2, AxisType.Explicit), P(AXIS)))
  )


# Meshes of two axes.


def mesh_2d(rows, columns, names):
  return jax.make_mesh((rows, columns), names, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_data_parallel_times_tensor_parallel(check_vma):
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
@pytest.mark.parametrize("exchange", ["simultaneous", "sequential"])
def test_elastic_workers_that_are_themselves_sharded(check_vma, exchange):
  """8 devices as 4 workers of 2: each worker's matrix lies by columns over the second axis, and so
  does the centre."""
  rng = np.random.default_rng(1)
  start = rng.normal(size=(3, 4)).astype(np.float32)
  grads = rng.normal(size=(3, 4, 3, 4)).astype(np.float32)
  tx = ow.elastic_average(
    optax.sgd(0.1), "worker", communication_period=1, moving_rate=0.25, exchange=exchange
  )
  mesh = mesh_2d(4, 2, ("worker", "part"))
  own, shared = P("worker", None, "part"), P(None, "part")
  state_specs = ow.worker_specs(tx.init(start), "worker").replace(center=shared)

  def step(params, state, grad):
    updates, state = tx.update(grad[0], state, params[0])
    return optax.apply_updates(params[0], updates)[None], state

  mapped = jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(own, state_specs, own),
      out_specs=(own, state_specs),
      check_vma=check_vma,
    )
  )
  params, state = ow.stack_workers(jnp.asarray(start), 4), tx.init(start)
  x, c = np.tile(start.astype(np.float64), (4, 1, 1)), start.astype(np.float64)
  for grad in grads:
    params, state = mapped(params, state, grad)
    x = x - 0.1 * grad
    if exchange == "simultaneous":
      d = x - c
      x, c = x - 0.25 * d, c + 0.25 * d.sum(0)
    else:
      for i in range(4):
        d = x[i] - c
        x[i], c = x[i] - 0.25 * d, c + 0.25 * d
  assert_close(params, x, rtol=1e-5, atol=1e-6)
  assert_close(state.center, c, rtol=1e-5, atol=1e-6)


# What is sent, and what is held.


def compiled(tx, params, num_workers, replicated, extra=None):
  mesh = mesh_of(num_workers)
  axes = ow.worker_axes(jax.eval_shape(tx.init, params), replicated=replicated)
  specs = ow.worker_specs(jax.eval_shape(tx.init, params), AXIS, replicated=replicated)
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
    (ow.elastic_average(optax.adam(0.1), AXIS, exchange="sequential"), False, 0, NUM_BYTES),
    (ow.clip_variables(ow.cross_shard(optax.adam(0.1), AXIS), 1.0), True, NUM_BYTES, 0),
  ],
  ids=["cross_shard", "gather_towers", "elastic_average", "sequential", "clip_variables"],
)
def test_every_gradient_byte_is_sent_once_and_exchanges_stay_in_their_conditional(
  tx, replicated, sent_always, sent_sometimes
):
  found = ow.inspect.compiled_collectives(compiled(tx, MODEL, 8, replicated))
  assert sum(c.num_bytes for c in found if not c.conditional) == sent_always
  assert sum(c.num_bytes for c in found if c.conditional) == sent_sometimes


def test_64_workers_on_one_device_take_memory_as_workers_times_parameters():
  """Bytes that XLA needs for a step of 8 and of 64 workers, all in one vmap."""
  tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), AXIS, communication_period=4)
  model = {"kernel": jax.ShapeDtypeStruct((256, 256), jnp.float32)}

  def num_bytes(num_workers):
    state = jax.eval_shape(lambda p: ow.stack_workers(tx.init(p), num_workers), model)
    params = jax.eval_shape(lambda p: ow.stack_workers(p, num_workers), model)
    axes = ow.worker_axes(state)
    step = jax.vmap(tx.update, (0, axes, 0), (0, axes), axis_name=AXIS)
    memory = (
      jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile().memory_analysis()
    )
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

  assert num_bytes(64) < 8.5 * num_bytes(8)
