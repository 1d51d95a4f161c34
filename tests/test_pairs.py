"""Wrappers in pairs that touch the same number: stale shards and weights, towers and shards, rows
and reductions."""

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
  tx = ow.drop_stale(
    optax.chain(optax.clip(1.5), ow.cross_shard(optax.sgd(1.0), AXIS)), 0, axis_name=AXIS
  )
  assert_close(
    emitted(context, tx, [9.0, 1.0, 2.0, 9.0], computed_at=tickets(0, 1, 1, 0)), -(1.0 + 1.5) / 2
  )


@each_context
def test_a_stale_shard_is_no_finite_one(context):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop"), 0, axis_name=AXIS)
  assert_close(
    emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=tickets(0, 1, 1, 1)), -2.0
  )
  assert_close(
    emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=tickets(1, 1, 0, 0)), -10.0
  )
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
  """Only where a plain mean would be wrong; under vmap, where the conditional itself is not
  refused."""

  def update(updates, state, params=None, **extra):
    return jax.lax.cond(
      True, lambda: inner().update(updates, state, params, **extra), lambda: (updates, state)
    )

  tx = ow.drop_stale(optax.GradientTransformationExtraArgs(inner().init, update), 0, axis_name=AXIS)
  with pytest.raises(ValueError, match="does not see which shards are stale"):
    emitted(
      "vmap",
      tx,
      [1.0, 2.0],
      computed_at=tickets(0, 1),
      **{k: jnp.full(2, v) for k, v in extra.items()},
    )


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
  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def step(grad, ticket):
    extra = {"computed_at": ticket[0]} if isinstance(tx.init(grad[0]), ow.DropStaleState) else {}
    return tx.update(grad[0], tx.init(grad[0]), grad[0], **extra)[0]

  both = P(("pod", "chip"))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P(), check_vma=check_vma)
  with pytest.raises(
    ValueError, match=r"also reduced over \('pod',\)|differs from shard to shard over \['pod'\]"
  ):
    jax.jit(mapped)(jnp.ones(4), jnp.zeros(4, jnp.int32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_staleness_waits_for_the_reduction_that_it_is_said_of(check_vma):
  """A reduction over another axis comes first, and leaves it alone."""
  chain = optax.chain(ow.all_reduce("pod"), ow.all_reduce("chip"), optax.sgd(1.0))
  tx = ow.drop_stale(chain, 0, axis_name="chip")
  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def step(grad, ticket):
    return tx.update(grad[0], tx.init(grad[0]), grad[0], computed_at=ticket[0])[0]

  both = P(("pod", "chip"))
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(both, P("chip")), out_specs=P(), check_vma=check_vma
  )
  if check_vma:  # types prove that all pods decide alike
    assert_close(jax.jit(mapped)(jnp.arange(4.0), tickets(0, 1)), -2.0)
  else:
    with pytest.raises(ValueError, match="also reduced over"):
      jax.jit(mapped)(jnp.arange(4.0), tickets(0, 1))
  tx = ow.drop_stale(chain, 0, axis_name=("pod", "chip"))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P(), check_vma=check_vma)
  assert_close(jax.jit(mapped)(jnp.array([1.0, 2.0, 4.0, 9.0]), tickets(0, 1, 1, 1)), -5.0)


def test_a_weight_cannot_be_taken_by_two_links_of_a_chain():
  tx = optax.chain(ow.all_reduce("chip"), ow.all_reduce("pod"))
  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def step(grad, weight):
    return tx.update(grad[0], tx.init(grad[0]), grad[0], weight=weight[0])[0]

  both = P(("pod", "chip"))
  with pytest.raises(ValueError, match=r"has been reduced already.*axis_name=\('pod', 'chip'\)"):
    jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P()))(
      jnp.ones(4), jnp.ones(4)
    )


# A mean of means is the weighted mean of all.


@pytest.mark.parametrize("check_vma", [True, False])
def test_pods_of_unequal_weight(check_vma):
  tx = ow.cross_shard(ow.cross_shard(optax.sgd(1.0), "pod"), "chip")
  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )
  grads, weights = (
    np.array([1.0, 2.0, 5.0, 7.0], np.float32),
    np.array([1.0, 3.0, 0.0, 1.0], np.float32),
  )

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
  grads, weights = np.array([[1.0, 2.0], [5.0, np.nan]]), np.array([[1.0, 3.0], [4.0, 0.0]])
  assert_close(towers(context, tx, grads, weights), -(1.0 + 6.0 + 20.0) / 8.0)


@each_context
def test_one_tower_with_a_weight_for_each_shard(context):
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 1)
  assert_close(towers(context, tx, np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]])), -7.0 / 4.0)


@each_context
def test_stacked_towers_of_shards_with_a_weight_each(context):
  tx = ow.reduce_towers(ow.cross_shard(optax.sgd(1.0), AXIS))
  grads, weights = (
    np.array([[1.0, 5.0], [2.0, np.nan]]),
    np.array([[1.0, 4.0], [3.0, 0.0]], np.float32),
  )
  assert_close(emitted(context, tx, grads, weight=jnp.array(weights)), -(1.0 + 20.0 + 6.0) / 8.0)


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
  "clip outside": lambda options: ow.clip_variables(
    ow.cross_shard(optax.sgd(0.1), AXIS), 1.0, 1, **options
  ),
  "clip inside": lambda options: ow.cross_shard(
    ow.clip_variables(optax.sgd(0.1), 1.0, 1, **options), AXIS
  ),
  "chain between": lambda options: ow.clip_variables(
    optax.chain(optax.identity(), ow.all_reduce(AXIS), optax.sgd(0.1)), 1.0, 1, **options
  ),
}


@pytest.mark.parametrize("use_rows", [False, True], ids=["only_touched", "rows"])
@pytest.mark.parametrize("order", ORDERS)
@each_context
def test_replicas_clip_the_same_rows(context, order, use_rows):
  out = looked_up(
    context, ORDERS[order]({} if use_rows else {"only_touched": True}), use_rows=use_rows
  )
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

  with pytest.raises(
    ValueError, match=r"only_touched decides, differs from shard to shard.*cross_shard"
  ):
    traced(ow.clip_variables(by_hand(), 1.0, 1, only_touched=True))
  with pytest.raises(
    ValueError, match=r"rows for params.*differs from shard to shard.*lax\.all_gather"
  ):
    traced(ow.clip_variables(by_hand(), 1.0, 1), use_rows=True)


def test_only_touched_round_towers_is_an_error():
  tx = ow.clip_variables(ow.gather_towers(optax.sgd(0.1), 2), 1.0, 1, only_touched=True)
  with pytest.raises(
    ValueError, match=r"the updates of one tower.*Put clip_variables inside: gather_towers"
  ):
    tx.update(jnp.ones((4, 2)), tx.init(TABLE), jnp.asarray(TABLE))


# What stands between: other links, sums, towers, conditionals and a jit of its own.


@each_context
@pytest.mark.parametrize("split", ["partition", "masked"])
def test_leaves_that_are_reduced_apart_have_each_their_weight(context, split):
  reduce = optax.chain(ow.all_reduce(AXIS), optax.sgd(1.0))
  inner = optax.partition({"p": reduce, "q": reduce}, {"x": "p", "y": "q"})
  if split == "masked":
    halves = [optax.masked(ow.all_reduce(AXIS), {"x": x, "y": not x}) for x in (True, False)]
    inner = optax.chain(*halves, optax.sgd(1.0))
  tx, params = ow.drop_stale(inner, 0, axis_name=AXIS), {"x": jnp.zeros(()), "y": jnp.zeros(())}

  def step(grad, ticket):
    return tx.update(grad, tx.init(params), params, computed_at=ticket)[0]

  grads = {"x": jnp.array([10.0, 1.0]), "y": jnp.array([20.0, 3.0])}
  updates = in_context(context, step, 2, (0, 0), None)(grads, tickets(0, 1))
  assert (float(updates["x"]), float(updates["y"])) == (-1.0, -3.0)


@each_context
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("outer", ["gather", "reduce"])
@pytest.mark.parametrize("mean", ["by hand", "cross_shard"])
def test_towers_between_staleness_and_a_mean(context, reduction, outer, mean):
  """One tower, or a stack of two equal ones, whose sum is twice as much: the mean is that of the
  fresh shards."""
  inner = by_hand() if mean == "by hand" else ow.cross_shard(optax.sgd(1.0), AXIS)
  tx = (
    ow.gather_towers(inner, 1, reduction=reduction)
    if outer == "gather"
    else ow.reduce_towers(inner, reduction=reduction)
  )
  tx = ow.drop_stale(tx, 0, axis_name=AXIS)
  grads = np.array([10.0, 1.0, 3.0, 5.0])
  given = grads if outer == "gather" else np.stack([grads, grads], 1)
  expected = -2.0 * (2 if outer == "reduce" and reduction == "sum" else 1)
  assert_close(emitted(context, tx, given, computed_at=tickets(0, 1, 1, 0)), expected)


@pytest.mark.parametrize("outer", ["gather", "reduce"])
def test_a_mean_that_leaves_shards_out_behind_a_sum_of_towers_is_an_error(outer):
  """It would count the stale shards as finite ones."""
  inner = ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop")
  towers = (
    ow.gather_towers(inner, 1, reduction="sum")
    if outer == "gather"
    else ow.reduce_towers(inner, reduction="sum")
  )
  tx = ow.drop_stale(towers, 0, axis_name=AXIS)
  with pytest.raises(
    ValueError, match=r"behind a sum of towers.*does not see which shards are stale"
  ):
    emitted(
      "vmap", tx, np.ones(2) if outer == "gather" else np.ones((2, 1)), computed_at=tickets(0, 1)
    )


def test_a_mean_behind_a_sum_of_unequal_weights_is_an_error():
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )
  chain = optax.chain(
    ow.all_reduce("model", reduction="sum"), ow.cross_shard(optax.sgd(1.0), "data")
  )
  tx = ow.reduce_towers(chain)

  def step(grad, weight):
    return tx.update(grad[0], tx.init(jnp.zeros(())), jnp.zeros(()), weight=weight[0])[0]

  def run(weights, spec, check_vma):
    specs = (P(("data", "model")), spec)
    return jax.jit(
      jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    )(grads, weights)

  grads = jnp.array([[1.0], [2.0], [5.0], [7.0]])
  # Types show that the weights of one sum are equal: it has their weight.
  assert_close(run(jnp.array([[1.0], [3.0]]), P("data"), True), -(1 * 3.0 + 3 * 12.0) / 4)
  for check_vma in (True, False):
    with pytest.raises(ValueError, match="Take the mean first"):
      run(jnp.array([[1.0], [3.0], [1.0], [2.0]]), P(("data", "model")), check_vma)


def jitted(tx):
  return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  "hide", [jitted, lambda tx: optax.MultiSteps(tx, 1)], ids=["jit", "MultiSteps"]
)
@pytest.mark.parametrize("context", ["unchecked", "pmap"])
def test_what_a_reduction_cannot_see_is_an_error(hide, context):

  def hidden():  # anew each time: what a jit has traced before it does not trace again
    return hide(ow.cross_shard(optax.sgd(1.0), AXIS))

  def traced(tx, *args, **extra):
    def step(grads, extra):
      return tx.update(grads, tx.init(grads), grads, **extra)[0]

    in_context(context, step, 2, (0, 0), 0)(*args, extra)

  ones = jnp.ones((2, 4, 2))
  with pytest.raises(ValueError, match=r"does not see the weights of its towers"):
    traced(ow.gather_towers(hidden(), 2), ones, weight=jnp.ones(2))
  with pytest.raises(ValueError, match=r"does not see which slices are touched"):
    traced(ow.clip_variables(hidden(), 1.0, 1, only_touched=True), ones)
  with pytest.raises(ValueError, match=r"does not see which slices are touched"):
    traced(ow.clip_variables(hidden(), 1.0, 1), ones, rows=jnp.zeros((2, 1), jnp.int32))
  nonfinite = hide(ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop"))
  with pytest.raises(ValueError, match=r"does not see which shards are stale"):
    traced(ow.drop_stale(nonfinite, 0, axis_name=AXIS), ones, computed_at=tickets(0, 1))


@each_context
def test_a_plain_mean_in_a_jit_of_its_own_is_that_of_the_fresh(context):
  tx = ow.drop_stale(jitted(ow.cross_shard(optax.sgd(1.0), AXIS)), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, 1.0, 2.0, 4.0], computed_at=tickets(0, 1, 1, 0)), -1.5)


def test_touched_slices_behind_a_flattening_are_an_error():
  tx = ow.clip_variables(
    optax.flatten(ow.cross_shard(optax.sgd(0.1), AXIS)), 1.0, 1, only_touched=True
  )
  for params in ({"t": jnp.ones((4, 2))}, jnp.ones((4, 2))):
    with pytest.raises(ValueError, match="sees updates of another structure"):
      jax.vmap(lambda g, p=params: tx.update(g, tx.init(p), p)[0], axis_name=AXIS)(
        jax.tree.map(lambda p: jnp.stack([p, p]), params)
      )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", ["clip outside", "clip inside"])
def test_rows_of_a_table_that_is_divided_are_each_shards_own(order, check_vma):
  def make():
    if order == "clip outside":
      return ow.clip_variables(ow.cross_shard(optax.sgd(0.1), AXIS, sharded=True), 1.0, 1)
    return ow.cross_shard(ow.clip_variables(optax.sgd(0.1), 1.0, 1), AXIS, sharded=True)

  tx, table = make(), jnp.full((8, 2), 3.0)

  def step(part, rows):
    updates, _ = tx.update(jnp.zeros_like(part), tx.init(part), part, rows=rows)
    return part + updates

  mapped = jax.shard_map(
    step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
  )
  norms = np.linalg.norm(jax.jit(mapped)(table, jnp.array([0, 1, 0, 1], jnp.int32)), axis=1)
  np.testing.assert_allclose(norms < 1.1, [1, 0, 0, 1, 1, 0, 0, 1])


@pytest.mark.parametrize("check_vma", [True, False])
def test_momentum_of_column_and_row_parallel_kernels_is_projected_as_on_one_device(check_vma):
  specs = {"column": P(None, "w"), "row": P("w", None)}
  rng = np.random.default_rng(0)
  params = {name: jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for name in specs}
  inner = optax.sgd(0.1, momentum=0.9)

  def steps(tx, params):
    state = tx.init(params)
    for i in range(2):
      grads = jax.tree.map(lambda p, i=i: -(1.0 + i) * p, params)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params

  options = {"axes": 0, "momentum": "project"}
  expected = steps(ow.clip_variables(inner, 0.5, **options), params)
  tx = ow.clip_variables(inner, 0.5, axis_name=specs, **options)
  mapped = jax.shard_map(
    lambda p: steps(tx, p), mesh=mesh_of(4), in_specs=(specs,), out_specs=specs, check_vma=check_vma
  )
  assert_close(jax.jit(mapped)(params), expected, rtol=1e-5, atol=1e-6)


def test_an_accumulator_between_two_reductions_is_an_error():
  tx = ow.cross_shard(ow.gather_towers(ow.cross_shard(optax.sgd(1.0), "pod"), 2), "data")
  mesh = jax.make_mesh(
    (2, 2), ("pod", "data"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def step(grad):
    return tx.update(grad[0], tx.init(grad[0]), grad[0])[0]

  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=P(("pod", "data")), out_specs=P(), check_vma=False
  )
  with pytest.raises(
    ValueError, match=r"no layout shows over which of them its accumulator differs"
  ):
    jax.jit(mapped)(jnp.ones(4))


@pytest.mark.optax_promotes
def test_weights_of_stacked_towers_that_a_conditional_hides_are_an_error():
  """The mean over shards behind MultiSteps could not count a shard by its towers' weights."""
  behind = optax.MultiSteps(ow.cross_shard(optax.sgd(1.0), AXIS), 2).gradient_transformation()
  tx = ow.reduce_towers(behind)

  def step(grads, weight):
    return tx.update(grads, tx.init(jnp.zeros(2)), jnp.zeros(2), weight=weight)[0]

  with pytest.raises(ValueError, match="does not see the weights of its towers"):
    jax.vmap(step, axis_name=AXIS)(jnp.ones((2, 3, 2)), jnp.ones((2, 3)))
