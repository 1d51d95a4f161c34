"""The noise of gradients, as it was made, against NumPy, in every context."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_reductions as ref
from helpers import AXIS, CONTEXTS, assert_close, in_context, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

DECAY = 0.8

PARAMS = {"w": np.zeros((4, 3), np.float32), "b": np.zeros(3, np.float32)}


def drawn(rng, steps, *parts):
  """Gradients [steps, parts...] of parts of a batch, unequal noise in every entry."""
  return jax.tree.map(
    lambda p: (0.5 + rng.normal(size=(steps, *parts, *p.shape))).astype(np.float32), PARAMS
  )


def at(index, tree):
  return jax.tree.map(lambda x: x[index], tree)


def rows_of(tree):
  """`[steps, parts, entries]`."""
  leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
  return np.concatenate([x.reshape(*x.shape[:2], -1) for x in leaves], 2)


def measured(rate=0.1, **options):
  options = {"decay": DECAY} | options
  return optax.chain(ow.contrib.measure_noise(AXIS, **options), optax.sgd(rate))


def assert_reads(state, rows, examples=1):
  scale, gain = ref.noise_scale(list(rows), DECAY)
  np.testing.assert_allclose(examples * ow.metrics(state)["noise_scale"], scale * examples, 1e-4)
  np.testing.assert_allclose(ow.metrics(state)["gradient_gain"], gain, 1e-4)


@pytest.mark.parametrize("context", sorted(CONTEXTS))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_measure_noise_every_context_matches_numpy(context, reduction):
  grads = drawn(np.random.default_rng(0), 5, 4)
  tx = measured(reduction=reduction)
  plain = ow.cross_shard(optax.sgd(0.1), AXIS, reduction=reduction)
  state = jax.jit(lambda: ow.stack_workers(tx.init(PARAMS), 4, replicated=True))()
  axes = ow.worker_axes(state, replicated=True)

  def step(state, grad):
    updates, state = tx.update(grad, state)
    return updates, state, plain.update(grad, plain.init(PARAMS))[0]

  is_typed = context in ("shard_map", "explicit")
  own = None if is_typed else 0
  mapped = in_context(context, step, 4, (axes, 0), (own, axes, own))
  for i in range(5):
    updates, state, expected = mapped(state, at(i, grads))
    for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected)):
      np.testing.assert_array_equal(x, y)
  assert_reads(state, rows_of(grads), 32)


def test_measure_noise_adds_four_bytes_to_all_reduce():
  tx = measured()

  def step(state, grad):
    return tx.update(at(0, grad), state)

  mesh = mesh_of(4)
  grads = jax.device_put(
    jax.tree.map(lambda p: np.zeros((4, *p.shape), p.dtype), PARAMS), NamedSharding(mesh, P(AXIS))
  )
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
  program = jax.jit(mapped).lower(tx.init(PARAMS), grads).compile()
  found = ow.inspect.compiled_collectives(program)
  assert {one.kind for one in found} == {"all-reduce"}
  assert sum(one.num_bytes for one in found) == 4 * (12 + 3) + 4


def test_measure_noise_over_vmap_axis_of_towers_matches_numpy():
  grads = drawn(np.random.default_rng(1), 4, 3)
  tx = measured()
  state = tx.init(PARAMS)
  step = jax.jit(jax.vmap(tx.update, in_axes=(0, None), out_axes=None, axis_name=AXIS))
  for i in range(4):
    _, state = step(at(i, grads), state)
  assert_reads(state, rows_of(grads), 8)


def test_measure_noise_in_local_steps_is_per_worker():
  """Pods of shards, the pods being workers of local steps."""
  steps, pods, shards = 3, 2, 4
  grads = drawn(np.random.default_rng(3), steps, pods, shards)
  tx = ow.local_steps(measured(), "pod", communication_period=2)
  params, state = jax.jit(lambda: ow.stack_workers((PARAMS, tx.init(PARAMS)), pods))()
  axes = ow.worker_axes(state)
  assert set(jax.tree.leaves(axes.inner_state)) == {0}

  def step(params, state, grad):
    return tx.update(grad, state, params)[1]

  inner = jax.vmap(step, in_axes=(None, None, 0), out_axes=None, axis_name=AXIS)
  mapped = jax.jit(jax.vmap(inner, in_axes=(0, axes, 0), out_axes=axes, axis_name="pod"))
  for i in range(steps):
    state = mapped(params, state, at(i, grads))
  for p in range(pods):
    own = at(p, jax.tree.map(np.asarray, state.inner_state))
    assert_reads(own, rows_of(at((slice(None), p), grads)))


def test_measure_noise_recovers_known_noise_scale_and_gain():
  # True gradient of length 1, each example's noise of variance 9 in all: a scale of 9 examples.
  steps, shards, examples, size = 4000, 4, 2, 10
  rng = np.random.default_rng(4)
  truth = np.ones(size) / np.sqrt(size)
  noise = rng.normal(size=(steps, shards, size)) * np.sqrt(9 / size / examples)
  grads = (truth + noise).astype(np.float32)
  tx = measured(0.0, decay=0.999)

  def step(state, grad):
    return jax.vmap(lambda g: tx.update(g, state)[1], axis_name=AXIS, out_axes=None)(grad), None

  state, _ = jax.jit(lambda g: jax.lax.scan(step, tx.init(jnp.zeros(size)), g))(grads)
  assert abs(float(examples * ow.metrics(state)["noise_scale"]) / 9 - 1) < 0.05
  per_shard = 9 / examples
  gain = (per_shard + 1) / (per_shard / shards + 1)
  assert abs(float(ow.metrics(state)["gradient_gain"]) / gain - 1) < 0.05


def test_measure_noise_step_with_nan_is_not_measured():
  tx = measured()
  update = jax.jit(jax.vmap(tx.update, in_axes=(0, None), out_axes=None, axis_name=AXIS))
  grads = at(0, drawn(np.random.default_rng(5), 1, 3))
  state = tx.init(PARAMS)
  assert np.isnan(ow.metrics(state)["noise_scale"])
  assert float(ow.metrics(state)["gradient_gain"]) == 1
  _, state = update(grads, state)
  broken = jax.tree.map(np.copy, grads)  # JAX may still read the others
  for x in jax.tree.leaves(broken):
    x[1] = np.nan
  _, after = update(broken, state)
  assert list(map(float, jax.tree.leaves(after))) == list(map(float, jax.tree.leaves(state)))


def test_measure_noise_of_summed_gradient_is_error():
  tx = measured()

  def step(w, x, own):
    grad = jax.grad(lambda w: jnp.sum(w * x[0]))(ow.per_shard(w, AXIS) if own else w)
    return tx.update(grad, tx.init(w), w)[1][0]

  zeros, x = np.zeros(3, np.float32), np.random.default_rng(6).normal(size=(4, 3))
  x = x.astype(np.float32)
  for own in (True, False):
    mapped = jax.jit(
      jax.shard_map(
        lambda w, x, own=own: step(w, x, own),
        mesh=mesh_of(4),
        in_specs=(P(), P(AXIS)),
        out_specs=P(),
      )
    )
    if own:
      np.testing.assert_allclose(
        mapped(zeros, x).trace, 0.2 * ref.noise_estimates(x.astype(np.float64))[1], 1e-5
      )
      continue
    with pytest.raises(
      ValueError, match=r"all_reduce: .*already equal on all shards of \('w',\).*per_shard\(params"
    ):
      mapped(zeros, x)


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (lambda: ow.contrib.measure_noise(AXIS, decay=1.0), ValueError, r"decay must be in \[0, 1\)"),
    (
      lambda: ow.contrib.measure_noise(AXIS, reduction="max"),
      ValueError,
      "reduction must be one of",
    ),
  ],
)
def test_measure_noise_errors_arguments(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_measure_noise_errors_weights_single_shard_and_state():
  g = np.ones((3, 2), np.float32)
  stale = ow.drop_stale(measured(), 1, axis_name=AXIS)
  for tx, extra in ((measured(), {"weight": 1.0}), (stale, {"computed_at": 0})):

    def step(g, tx=tx, extra=extra):
      return tx.update(g, tx.init(g), **extra)

    with pytest.raises(ValueError, match="measure_noise: every shard has one vote"):
      jax.jit(jax.vmap(step, axis_name=AXIS))(g)
  one = ow.contrib.measure_noise(None)
  with pytest.raises(ValueError, match="needs two shards at least to compare; got 1"):
    one.update(g, one.init(g))
  other = ow.contrib.measure_noise(AXIS, reduction="sum").init(g)
  with pytest.raises(ValueError, match=r"the state was made for .*is_mean=False"):
    step = jax.vmap(
      lambda g: measured().update(g, (other, *measured().init(g)[1:])), axis_name=AXIS
    )
    jax.jit(step)(g)
  with pytest.raises(ValueError, match="needed exactly one NoiseState, found 0"):
    ow.get_state(optax.sgd(0.1).init(g), ow.contrib.NoiseState)


W, STEPS, PERIOD = 4, 8, 3

RNG = np.random.default_rng(0)

TARGETS = RNG.normal(size=(STEPS, W, 6)) * np.arange(1, W + 1)[:, None]


def first_of(tx, params):
  """The parameters and states of all workers."""
  return jax.jit(lambda: ow.stack_workers((params, tx.init(params)), W))()


def told(state, params):
  """Each worker's metrics."""
  return jax.jit(ow.map_workers(ow.metrics, AXIS))(state, params)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_measure_noise_cosine_of_pseudo_gradients_and_gradients(context, reduction):
  """As the reduction of local steps it is of pseudo-gradients, as that of a chain of gradients."""
  measure = ow.contrib.measure_noise(AXIS, cosine=True, reduction=reduction)
  options = {"outer": optax.sgd(1.0), "reduction": measure, "communication_period": 1}
  tx = ow.local_steps(optax.sgd(0.1), AXIS, **options)
  first = np.zeros(6, np.float32)
  params, state = first_of(tx, first)
  axes = (0, ow.worker_axes(state))
  step = in_context(context, tx.update, W, (0, axes[1], 0), axes)
  _, state = step(np.float32(TARGETS[0]), state, params)
  found = told(state, params)
  mean = TARGETS[0].mean(0)
  lengths = np.linalg.norm(TARGETS[0], axis=1) * np.linalg.norm(mean)
  assert_close(found["cosine"], TARGETS[0] @ mean / lengths, rtol=1e-5)
  assert {"noise_scale", "gradient_gain", "exchanges", "center_distance"} < found.keys()

  state = jax.jit(lambda: ow.stack_workers(measure.init(first), W, replicated=True))()
  axes = ow.worker_axes(state, replicated=True)
  assert axes.cosine == 0 and axes.trace is None
  step = in_context(context, measure.update, W, (0, axes), (None, axes))
  _, state = step(np.float32(TARGETS[0]), state)
  assert_close(state.cosine, TARGETS[0] @ mean / lengths, rtol=1e-5)


@pytest.mark.parametrize(
  ("dtype", "size"), [(jnp.bfloat16, 1.0), (jnp.float16, 100.0), (jnp.float32, 1e15)]
)
def test_measure_noise_cosine_of_bfloat16_float16_and_large_updates(dtype, size):
  """Each of length one before they are multiplied."""
  rng = np.random.default_rng(6)
  grads = (size * (1 + 0.1 * rng.normal(size=(2, 5000)))).astype(dtype)
  measure = ow.contrib.measure_noise(AXIS, cosine=True)
  update = jax.vmap(lambda g: measure.update(g, measure.init(g)), axis_name=AXIS)
  # What is narrow is rounded and overflows after each operation, as it does without jit.
  options = {"xla_allow_excess_precision": False}
  _, state = jax.jit(update, compiler_options=options)(grads)
  rows = grads.astype(np.float64)
  mean = rows.mean(0)
  expected = rows @ mean / np.linalg.norm(rows, axis=1) / np.linalg.norm(mean)
  assert_close(state.cosine, expected, rtol=1e-3 if dtype is jnp.bfloat16 else 1e-5)
