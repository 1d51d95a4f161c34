"""The noise of gradients, as it was made, against NumPy, in every context."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_reductions as ref
from helpers import AXIS, CONTEXTS, in_context, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

DECAY = 0.8
PARAMS = {"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}


def drawn(rng, steps, *parts):
  """Gradients [steps, parts...] of parts of a batch, unequal noise in every entry."""
  return jax.tree.map(
    lambda p: jnp.asarray(0.5 + rng.normal(size=(steps, *parts, *p.shape)), jnp.float32), PARAMS
  )


def rows_of(tree):
  """`[steps, parts, entries]`."""
  leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
  return np.concatenate([x.reshape(*x.shape[:2], -1) for x in leaves], 2)


def assert_reads(state, rows, examples=1):
  scale, gain = ref.noise_scale(list(rows), DECAY)
  np.testing.assert_allclose(ow.noise_scale(state, examples), scale * examples, 1e-4)
  np.testing.assert_allclose(ow.gradient_gain(state), gain, 1e-4)


@pytest.mark.parametrize("context", sorted(CONTEXTS))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_across_shards(context, reduction):
  grads = drawn(np.random.default_rng(0), 5, 4)
  tx = ow.cross_shard(optax.sgd(0.1), AXIS, reduction=reduction, noise_decay=DECAY)
  plain = ow.cross_shard(optax.sgd(0.1), AXIS, reduction=reduction)
  state = ow.stack_workers(tx.init(PARAMS), 4, replicated=True)
  axes = ow.worker_axes(state, replicated=True)

  def step(state, grad):
    updates, state = tx.update(grad, state)
    return updates, state, plain.update(grad, plain.init(PARAMS))[0]

  is_typed = context in ("shard_map", "explicit")
  own = None if is_typed else 0
  mapped = in_context(context, step, 4, (axes, 0), (own, axes, own))
  for i in range(5):
    updates, state, expected = mapped(state, jax.tree.map(lambda g, i=i: g[i], grads))
    for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected)):
      np.testing.assert_array_equal(x, y)
  assert_reads(state, rows_of(grads), 32)


def test_it_sends_four_bytes():
  tx = ow.cross_shard(optax.sgd(0.1), AXIS, noise_decay=DECAY)

  def step(state, grad):
    return tx.update(jax.tree.map(lambda g: g[0], grad), state)

  mesh = mesh_of(4)
  grads = jax.device_put(
    jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), PARAMS), NamedSharding(mesh, P(AXIS))
  )
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
  program = jax.jit(mapped).lower(tx.init(PARAMS), grads).compile()
  found = ow.inspect.compiled_collectives(program)
  assert {one.kind for one in found} == {"all-reduce"}
  assert sum(one.num_bytes for one in found) == 4 * (12 + 3) + 4


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("axis", [0, -1])
def test_of_stacked_towers(reduction, axis):
  grads = drawn(np.random.default_rng(1), 4, 3)
  options = {"reduction": reduction, "axis": axis}
  tx = ow.reduce_towers(optax.sgd(0.1), noise_decay=DECAY, **options)
  plain = ow.reduce_towers(optax.sgd(0.1), **options)
  state = tx.init(PARAMS)
  for i in range(4):
    stacked = jax.tree.map(lambda g, i=i: jnp.moveaxis(g[i], 0, axis), grads)
    updates, state = jax.jit(tx.update)(stacked, state, PARAMS)
    expected, _ = jax.jit(plain.update)(stacked, plain.init(PARAMS), PARAMS)
    for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected)):
      np.testing.assert_array_equal(x, y)
  assert_reads(state, rows_of(grads), 8)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_towers_one_after_another(reduction):
  grads = drawn(np.random.default_rng(2), 3, 4)
  tx = ow.gather_towers(optax.sgd(0.1), 4, reduction=reduction, noise_decay=DECAY)
  plain = ow.gather_towers(optax.sgd(0.1), 4, reduction=reduction)
  state, other = tx.init(PARAMS), plain.init(PARAMS)
  for i in range(3):
    for k in range(4):
      grad = jax.tree.map(lambda g, i=i, k=k: g[i, k], grads)
      updates, state = jax.jit(tx.update)(grad, state, PARAMS)
      expected, other = jax.jit(plain.update)(grad, other, PARAMS)
      for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(x, y)
  assert_reads(state, rows_of(grads), 8)
  assert jax.tree.structure(state) == jax.tree.structure(tx.init(PARAMS))


@pytest.mark.parametrize("context", ["shard_map", "unchecked", "vmap"])
@pytest.mark.parametrize("towers", ["gathered", "stacked"])
def test_towers_of_several_shards_have_noise_of_their_own(context, towers):
  steps, shards, parts = 3, 2, 2
  grads = drawn(np.random.default_rng(3), steps, shards, parts)
  reduced = ow.cross_shard(optax.sgd(0.1), AXIS)
  if towers == "gathered":
    tx = ow.gather_towers(reduced, parts, noise_decay=DECAY)
  else:
    tx = ow.reduce_towers(reduced, noise_decay=DECAY)
  state = ow.stack_workers(tx.init(PARAMS), shards, replicated=True)
  axes = ow.worker_axes(state, replicated=True)

  def step(state, grad):
    if towers == "stacked":
      return tx.update(grad, state, PARAMS)[1]
    for k in range(parts):
      _, state = tx.update(jax.tree.map(lambda g, k=k: g[k], grad), state, PARAMS)
    return state

  mapped = in_context(context, step, shards, (axes, 0), axes)
  for i in range(steps):
    state = mapped(state, jax.tree.map(lambda g, i=i: g[i], grads))
  own = [jax.tree.map(lambda g, s=s: g[:, s], grads) for s in range(shards)]
  estimates = [[ref.noise_estimates(rows) for rows in rows_of(one)] for one in own]
  # Each shard's own, and what is read is that of all.
  for s in range(shards):
    average = 0.0
    for grad_sq, _ in estimates[s]:
      average = DECAY * average + (1 - DECAY) * grad_sq
    np.testing.assert_allclose(state[0].grad_sq[s], average, 1e-4)
  both = [(np.array(x) + np.array(y)) / 2 for x, y in zip(*estimates)]
  grad_sq, trace = 0.0, 0.0
  for one in both:
    grad_sq, trace = (DECAY * old + (1 - DECAY) * new for old, new in zip((grad_sq, trace), one))
  np.testing.assert_allclose(ow.noise_scale(state), trace / grad_sq, 1e-4)


def test_inside_a_reduction_it_is_one_for_all():
  for make in (
    lambda: ow.gather_towers(optax.sgd(0.1), 2, noise_decay=DECAY),
    lambda: ow.reduce_towers(optax.sgd(0.1), noise_decay=DECAY),
  ):
    alone = ow.worker_axes(make().init(PARAMS), replicated=True)
    assert jax.tree.leaves(alone[0])  # an axis for each shard
    inside = ow.worker_axes(ow.cross_shard(make(), AXIS).init(PARAMS), replicated=True)
    assert not jax.tree.leaves(inside)


def test_recovers_the_noise_that_was_made():
  # True gradient of length 1, each example's noise of variance 9 in all: a scale of 9 examples.
  steps, shards, examples, size = 4000, 4, 2, 10
  rng = np.random.default_rng(4)
  truth = np.ones(size) / np.sqrt(size)
  noise = rng.normal(size=(steps, shards, size)) * np.sqrt(9 / size / examples)
  grads = jnp.asarray(truth + noise, jnp.float32)
  tx = ow.cross_shard(optax.sgd(0.0), AXIS, noise_decay=0.999)

  def step(state, grad):
    return jax.vmap(lambda g: tx.update(g, state)[1], axis_name=AXIS, out_axes=None)(grad), None

  state, _ = jax.jit(lambda g: jax.lax.scan(step, tx.init(jnp.zeros(size)), g))(grads)
  assert abs(float(ow.noise_scale(state, examples)) / 9 - 1) < 0.05
  per_shard = 9 / examples
  gain = (per_shard + 1) / (per_shard / shards + 1)
  assert abs(float(ow.gradient_gain(state)) / gain - 1) < 0.05


def test_a_step_that_is_not_finite_is_not_measured():
  tx = ow.reduce_towers(optax.sgd(0.1), noise_decay=DECAY)
  grads = drawn(np.random.default_rng(5), 1, 3)
  state = tx.init(PARAMS)
  assert np.isnan(ow.noise_scale(state))
  assert float(ow.gradient_gain(state)) == 1
  _, state = tx.update(jax.tree.map(lambda g: g[0], grads), state, PARAMS)
  broken = jax.tree.map(lambda g: g[0].at[1].set(jnp.nan), grads)
  _, after = tx.update(broken, state, PARAMS)
  assert [float(x) for x in jax.tree.leaves(after[0])] == [
    float(x) for x in jax.tree.leaves(state[0])
  ]


def test_a_replicated_parameter_needs_per_shard():
  tx = ow.cross_shard(optax.sgd(0.1), AXIS, noise_decay=DECAY)

  def step(w, x, own):
    grad = jax.grad(lambda w: jnp.sum(w * x[0]))(ow.per_shard(w, AXIS) if own else w)
    return tx.update(grad, tx.init(w), w)[1].noise

  x = jnp.asarray(np.random.default_rng(6).normal(size=(4, 3)), jnp.float32)
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
        mapped(jnp.zeros(3), x).trace, 0.2 * ref.noise_estimates(np.asarray(x, np.float64))[1], 1e-5
      )
      continue
    with pytest.raises(ValueError, match=r"each shard's could be told from the others.*per_shard"):
      mapped(jnp.zeros(3), x)


@pytest.mark.parametrize(
  "make, message",
  [
    (
      lambda d: ow.cross_shard(optax.sgd(1.0), AXIS, noise_decay=d, nonfinite="drop"),
      "needs all of",
    ),
    (lambda d: ow.cross_shard(optax.sgd(1.0), AXIS, noise_decay=d, sharded=True), "sharded cannot"),
    (
      lambda d: ow.cross_shard(optax.sgd(1.0), AXIS, noise_decay=d, axis_index_groups=[[0, 1]]),
      "axis_index_groups cannot be used with noise_decay",
    ),
    (
      lambda d: ow.cross_shard(optax.sgd(1.0), AXIS, noise_decay=d, codec=ow.codecs.quantize()),
      "codec cannot be used with noise_decay",
    ),
    (
      lambda d: ow.cross_shard(
        optax.sgd(1.0), AXIS, noise_decay=d, reduction=ow.reductions.median()
      ),
      "noise_decay is for means and sums",
    ),
    (
      lambda d: ow.reduce_towers(optax.sgd(1.0), noise_decay=d, reduction=ow.reductions.median()),
      "noise_decay is for means and sums",
    ),
    (lambda d: ow.gather_towers(optax.sgd(1.0), 1, noise_decay=d), "needs two at least; got 1"),
    (lambda _: ow.cross_shard(optax.sgd(1.0), AXIS, noise_decay=1.0), r"must be in \[0, 1\)"),
  ],
)
def test_refuses(make, message):
  with pytest.raises(ValueError, match=message):
    make(0.9)


def test_refuses_weights_and_single_parts():
  g = jnp.ones((3, 2))
  for tx in (
    ow.cross_shard(optax.sgd(1.0), AXIS, noise_decay=0.9),
    ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, noise_decay=0.9), 1, axis_name=AXIS),
  ):
    is_stale = isinstance(tx.init(g[0]), ow.StalenessState)
    extra = {"computed_at": 0} if is_stale else {"weight": 1.0}
    with pytest.raises(ValueError, match="with noise_decay every shard has one vote"):
      jax.vmap(lambda g, tx=tx, extra=extra: tx.update(g, tx.init(g), **extra), axis_name=AXIS)(g)
  for tx in (
    ow.gather_towers(optax.sgd(1.0), 2, noise_decay=0.9),
    ow.reduce_towers(optax.sgd(1.0), noise_decay=0.9),
  ):
    is_stacked = isinstance(tx.init(g[0])[1], tuple)
    with pytest.raises(ValueError, match="every tower has one vote"):
      tx.update(g if is_stacked else g[0], tx.init(g[0]), weight=jnp.ones(3 if is_stacked else ()))
  one = ow.cross_shard(optax.sgd(1.0), None, noise_decay=0.9)
  with pytest.raises(ValueError, match="needs two at least; got 1"):
    one.update(g, one.init(g))
  with pytest.raises(ValueError, match="noise_scale: needed exactly one NoiseState, found 0"):
    ow.noise_scale(optax.sgd(0.1).init(g))
