"""Wrappers in pairs that touch the same number: stale shards and weights, towers and shards, rows and reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, in_context, mesh_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

each_context = pytest.mark.parametrize("context", CONTEXTS)


def emitted(context, tx, grads, **extra):
  """What one update emits; gradients and extra args have the shards' axis."""

  def step(grad, extra):
    return tx.update(grad, tx.init(jnp.zeros(())), jnp.zeros(()), **extra)[0]

  return in_context(context, step, len(grads), (0, 0), None)(jnp.asarray(grads, jnp.float32), extra)


def tickets(*fresh):
  return jnp.where(jnp.array(fresh), 0, -1).astype(jnp.int32)


# A stale shard has weight zero.


@each_context
@pytest.mark.parametrize("between", [(), (optax.clip(2.0),)], ids=["direct", "clip between"])
def test_a_weighted_mean_of_stale_and_fresh_is_that_of_the_fresh(context, between):
  tx = optax.chain(*between, ow.cross_shard(optax.sgd(1.0), AXIS))
  tx = ow.drop_stale(tx, 0, axis_name=AXIS)
  grads, weights = np.array([10.0, 1.0, 3.0, np.nan]), np.array([1.0, 3.0, 1.0, 2.0], np.float32)
  actual = emitted(context, tx, grads, weight=jnp.array(weights), computed_at=tickets(0, 1, 1, 0))
  clipped = np.minimum(grads[1:3], 2.0) if between else grads[1:3]
  assert_close(actual, -(weights[1:3] * clipped).sum() / 4.0)


@each_context
def test_a_clip_between_staleness_and_mean_sees_the_gradient_itself(context):
  """Not the gradient times N / F."""
  tx = ow.drop_stale(optax.chain(optax.clip(1.5), ow.cross_shard(optax.sgd(1.0), AXIS)), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [9.0, 1.0, 2.0, 9.0], computed_at=tickets(0, 1, 1, 0)), -(1.0 + 1.5) / 2)


@each_context
def test_a_stale_shard_is_no_finite_one(context):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop"), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=tickets(0, 1, 1, 1)), -2.0)
  assert_close(emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=tickets(1, 1, 0, 0)), -10.0)
  # Those that are left are all NaN: the step is dropped.
  assert_close(emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=tickets(0, 1, 0, 0)), 0.0)


@each_context
def test_a_sum_is_that_of_the_fresh(context):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum"), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, 1.0, 2.0, 4.0], computed_at=tickets(0, 1, 1, 0)), -3.0)


def by_hand():
  return optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, AXIS)), optax.sgd(1.0))


@each_context
def test_a_mean_by_hand_is_that_of_the_fresh(context):
  tx = ow.drop_stale(by_hand(), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, 1.0, 2.0, 4.0], computed_at=tickets(0, 1, 1, 0)), -1.5)


@pytest.mark.parametrize(
  ("inner", "extra"),
  [
    (lambda: ow.cross_shard(optax.sgd(1.0), AXIS), {"weight": 2.0}),
    (lambda: ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop"), {}),
    (lambda: ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum"), {}),
  ],
  ids=["weighted", "nonfinite", "sum"],
)
def test_staleness_that_a_conditional_hides_from_a_reduction_is_an_error(inner, extra):
  """Only where a plain mean would be wrong; under vmap, where the conditional itself is not refused."""

  def update(updates, state, params=None, **extra):
    return jax.lax.cond(True, lambda: inner().update(updates, state, params, **extra), lambda: (updates, state))

  tx = ow.drop_stale(optax.GradientTransformationExtraArgs(inner().init, update), 0, axis_name=AXIS)
  with pytest.raises(ValueError, match="hides the staleness of the shards"):
    emitted("vmap", tx, [1.0, 2.0], computed_at=tickets(0, 1), **{k: jnp.full(2, v) for k, v in extra.items()})


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
  "make",
  [
    lambda inner: ow.cross_shard(inner, "chip", nonfinite="drop"),
    lambda inner: ow.drop_stale(ow.cross_shard(inner, "chip"), 0, axis_name="chip"),
  ],
  ids=["nonfinite", "drop_stale"],
)
def test_a_step_that_only_some_of_those_who_reduce_together_may_drop_is_an_error(make, check_vma):
  tx = make(ow.cross_shard(optax.sgd(1.0), "pod"))
  mesh = jax.make_mesh((2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

  def step(grad):
    extra = {"computed_at": jnp.int32(0)} if isinstance(tx.init(grad[0]), ow.DropStaleState) else {}
    return tx.update(grad[0], tx.init(grad[0]), grad[0], **extra)[0]

  both = P(("pod", "chip"))
  with pytest.raises(ValueError, match=r"also reduced over \('pod',\).*axis_name=\('chip', 'pod'\)"):
    jax.jit(jax.shard_map(step, mesh=mesh, in_specs=both, out_specs=P(), check_vma=check_vma))(jnp.ones(4))


@pytest.mark.parametrize("check_vma", [True, False])
def test_staleness_waits_for_the_reduction_that_it_is_said_of(check_vma):
  """A reduction over another axis comes first, and leaves it alone."""
  chain = optax.chain(ow.all_reduce("pod"), ow.all_reduce("chip"), optax.sgd(1.0))
  tx = ow.drop_stale(chain, 0, axis_name="chip")
  mesh = jax.make_mesh((2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

  def step(grad, ticket):
    return tx.update(grad[0], tx.init(grad[0]), grad[0], computed_at=ticket[0])[0]

  both = P(("pod", "chip"))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(both, P("chip")), out_specs=P(), check_vma=check_vma)
  with pytest.raises(ValueError, match="also reduced over"):  # the pods could decide otherwise
    jax.jit(mapped)(jnp.arange(4.0), tickets(0, 1))
  tx = ow.drop_stale(chain, 0, axis_name=("pod", "chip"))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P(), check_vma=check_vma)
  assert_close(jax.jit(mapped)(jnp.array([1.0, 2.0, 4.0, 9.0]), tickets(0, 1, 1, 1)), -5.0)


def test_a_weight_cannot_be_taken_by_two_links_of_a_chain():
  tx = optax.chain(ow.all_reduce("chip"), ow.all_reduce("pod"))
  mesh = jax.make_mesh((2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

  def step(grad, weight):
    return tx.update(grad[0], tx.init(grad[0]), grad[0], weight=weight[0])[0]

  both = P(("pod", "chip"))
  with pytest.raises(ValueError, match=r"has been reduced already.*axis_name=\('pod', 'chip'\)"):
    jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P()))(jnp.ones(4), jnp.ones(4))


# A mean of means is the weighted mean of all.


@pytest.mark.parametrize("check_vma", [True, False])
def test_pods_of_unequal_weight(check_vma):
  tx = ow.cross_shard(ow.cross_shard(optax.sgd(1.0), "pod"), "chip")
  mesh = jax.make_mesh((2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
  grads, weights = np.array([1.0, 2.0, 5.0, 7.0], np.float32), np.array([1.0, 3.0, 0.0, 1.0], np.float32)

  def step(grad, weight):
    return tx.update(grad[0], tx.init(grad[0]), weight=weight[0])[0]

  both = P(("pod", "chip"))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P(), check_vma=check_vma)
  assert_close(jax.jit(mapped)(grads, weights), -(grads * weights).sum() / weights.sum())


def towers(context, tx, grads, weights):
  """All towers, shard by shard, saved and restored after each; the updates of the last."""
  num_shards = grads.shape[1]
  state = tx.init(jnp.zeros(()))
  axes = ow.worker_axes(state, replicated=True)
  state = ow.stack_workers(state, num_shards, replicated=True)

  def step(grad, state, weight):
    return tx.update(grad, state, jnp.zeros(()), weight=weight)

  step = in_context(context, step, num_shards, (0, axes, 0), (None, axes))
  for grad, weight in zip(jnp.asarray(grads, jnp.float32), jnp.asarray(weights, jnp.float32)):
    updates, state = step(grad, state, weight)
    state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
  return updates


@each_context
@pytest.mark.parametrize("order", ["gather outside", "cross outside"])
def test_towers_of_shards_with_a_weight_each(context, order):
  if order == "gather outside":
    tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 2)
  else:
    tx = ow.cross_shard(ow.gather_towers(optax.sgd(1.0), 2), AXIS)
  grads, weights = np.array([[1.0, 2.0], [5.0, np.nan]]), np.array([[1.0, 3.0], [2.0, 0.0]])
  assert_close(towers(context, tx, grads, weights), -(1.0 + 6.0 + 10.0) / 6.0)


@each_context
def test_one_tower_with_a_weight_for_each_shard(context):
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 1)
  assert_close(towers(context, tx, np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]])), -7.0 / 4.0)


@each_context
def test_stacked_towers_of_shards_with_a_weight_each(context):
  tx = ow.reduce_towers(ow.cross_shard(optax.sgd(1.0), AXIS))
  grads, weights = np.array([[1.0, 5.0], [2.0, np.nan]]), np.array([[1.0, 2.0], [3.0, 0.0]], np.float32)
  assert_close(emitted(context, tx, grads, weight=jnp.array(weights)), -(1.0 + 10.0 + 6.0) / 6.0)


@each_context
def test_weights_of_one_are_no_weights(context):
  """Also for a sum over shards of the means of their towers."""
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum"), 2)
  grads = np.array([[1.0, 2.0], [5.0, 7.0]])
  assert_close(towers(context, tx, grads, np.ones((2, 2))), -(3.0 + 4.5))


# Touched rows are those of all shards.

TABLE = np.full((4, 2), 3.0, np.float32)
BOTH_CLIPPED = np.where(np.arange(4)[:, None] < 2, TABLE / np.linalg.norm(TABLE[0]), TABLE)


def looked_up(context, tx, **options):
  """Shard i looks row i up; the table afterwards on each of two shards."""

  def step(table, tokens):
    table = ow.per_shard(table, AXIS)
    grads = jax.grad(lambda t: 1e-6 * t[tokens].sum())(table)
    rows = {"rows": tokens} if options.get("use_rows") else {}
    updates, _ = tx.update(grads, tx.init(TABLE), jnp.asarray(TABLE), **rows)
    return updates

  tokens = jnp.array([[0], [1]], jnp.int32)
  return TABLE + np.asarray(in_context(context, step, 2, (None, 0), 0)(jnp.asarray(TABLE), tokens))


ORDERS = {
  "clip outside": lambda options: ow.clip_variables(ow.cross_shard(optax.sgd(0.1), AXIS), 1.0, 1, **options),
  "clip inside": lambda options: ow.cross_shard(ow.clip_variables(optax.sgd(0.1), 1.0, 1, **options), AXIS),
  "chain between": lambda options: ow.clip_variables(
    optax.chain(optax.identity(), ow.all_reduce(AXIS), optax.sgd(0.1)), 1.0, 1, **options
  ),
}


@pytest.mark.parametrize("use_rows", [False, True], ids=["only_touched", "rows"])
@pytest.mark.parametrize("order", ORDERS)
@each_context
def test_replicas_clip_the_same_rows(context, order, use_rows):
  out = looked_up(context, ORDERS[order]({} if use_rows else {"only_touched": True}), use_rows=use_rows)
  assert_close(out, np.stack([BOTH_CLIPPED] * 2), rtol=1e-5)


def test_touched_rows_through_drop_stale_are_those_of_the_fresh_shards():
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(0.1), AXIS), 0, axis_name=AXIS)
  tx = ow.clip_variables(tx, 1.0, 1, only_touched=True)

  def step(grad, ticket):
    return tx.update(grad, tx.init(TABLE), jnp.asarray(TABLE), computed_at=ticket)[0]

  grads = jnp.zeros((2, 4, 2)).at[0, 0].set(1e-6).at[1, 1].set(1e-6)
  for context in ("shard_map", "unchecked", "vmap"):
    out = TABLE + np.asarray(in_context(context, step, 2, (0, 0), None)(grads, tickets(0, 1)))
    norms = np.linalg.norm(out, axis=1)
    np.testing.assert_allclose(norms, [norms[2], 1.0, norms[2], norms[2]], rtol=1e-5)


def test_rows_or_gradients_of_ones_own_without_a_reduction_are_errors_where_types_tell():
  def traced(tx, **extra):
    def step(grad, tokens):
      rows = {"rows": tokens[0]} if extra.get("use_rows") else {}
      return tx.update(grad[0], tx.init(TABLE), jnp.asarray(TABLE), **rows)[0]

    mapped = jax.shard_map(step, mesh=mesh_of(2), in_specs=P(AXIS), out_specs=P())
    jax.jit(mapped)(jnp.ones((2, 4, 2)), jnp.zeros((2, 1), jnp.int32))

  with pytest.raises(ValueError, match=r"only_touched decides, differs from shard to shard.*cross_shard"):
    traced(ow.clip_variables(by_hand(), 1.0, 1, only_touched=True))
  with pytest.raises(ValueError, match=r"rows for params.*differs from shard to shard.*lax\.all_gather"):
    traced(ow.clip_variables(by_hand(), 1.0, 1), use_rows=True)


def test_only_touched_round_towers_is_an_error():
  tx = ow.clip_variables(ow.gather_towers(optax.sgd(0.1), 2), 1.0, 1, only_touched=True)
  with pytest.raises(ValueError, match=r"the updates of one tower.*Put clip_variables inside: gather_towers"):
    tx.update(jnp.ones((4, 2)), tx.init(TABLE), jnp.asarray(TABLE))
