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

  return in_context(context, step, len(grads), (0, 0), None)(np.asarray(grads, np.float32), extra)


def stamps(*fresh):
  return np.where(fresh, 0, -1).astype(np.int32)


# A stale shard has weight zero.


@each_context
@pytest.mark.parametrize("between", [(), (optax.clip(2.0),)], ids=["direct", "clip between"])
def test_a_weighted_mean_of_stale_and_fresh_is_that_of_the_fresh(context, between):
  tx = optax.chain(*between, ow.cross_shard(optax.sgd(1.0), AXIS))
  tx = ow.drop_stale(tx, 0, axis_name=AXIS)
  grads, weights = np.array([10.0, 1.0, 3.0, np.nan]), np.array([1.0, 3.0, 1.0, 2.0], np.float32)
  actual = emitted(context, tx, grads, weight=weights, computed_at=stamps(0, 1, 1, 0))
  clipped = np.minimum(grads[1:3], 2.0) if between else grads[1:3]
  assert_close(actual, -(weights[1:3] * clipped).sum() / 4.0)


@each_context
def test_a_clip_between_staleness_and_mean_sees_the_gradient_itself(context):
  """Not the gradient times N / F."""
  tx = ow.drop_stale(
    optax.chain(optax.clip(1.5), ow.cross_shard(optax.sgd(1.0), AXIS)), 0, axis_name=AXIS
  )
  assert_close(
    emitted(context, tx, [9.0, 1.0, 2.0, 9.0], computed_at=stamps(0, 1, 1, 0)), -(1.0 + 1.5) / 2
  )


@each_context
def test_a_stale_shard_is_no_finite_one(context):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop"), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=stamps(0, 1, 1, 1)), -2.0)
  assert_close(
    emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=stamps(1, 1, 0, 0)), -10.0
  )
  # Those that are left are all NaN: the step is dropped.
  assert_close(emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=stamps(0, 1, 0, 0)), 0.0)


@each_context
def test_a_sum_is_that_of_the_fresh(context):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum"), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, 1.0, 2.0, 4.0], computed_at=stamps(0, 1, 1, 0)), -3.0)


def by_hand():
  return optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, AXIS)), optax.sgd(1.0))


@each_context
def test_a_mean_by_hand_is_that_of_the_fresh(context):
  tx = ow.drop_stale(by_hand(), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, 1.0, 2.0, 4.0], computed_at=stamps(0, 1, 1, 0)), -1.5)


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

  def step(grad, stamp):
    extra = {"computed_at": stamp[0]} if isinstance(tx.init(grad[0]), ow.DropStaleState) else {}
    return tx.update(grad[0], tx.init(grad[0]), grad[0], **extra)[0]

  both = P(("pod", "chip"))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P(), check_vma=check_vma)
  with pytest.raises(
    ValueError, match=r"also reduced over \('pod',\)|differs from shard to shard over \['pod'\]"
  ):
    jax.jit(mapped)(np.ones(4, np.float32), np.zeros(4, np.int32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_staleness_waits_for_the_reduction_that_it_is_said_of(check_vma):
  """A reduction over another axis comes first, and leaves it alone."""
  chain = optax.chain(ow.all_reduce("pod"), ow.all_reduce("chip"), optax.sgd(1.0))
  nested = ow.cross_shard(ow.cross_shard(optax.sgd(1.0), "chip"), "pod")
  tx = ow.drop_stale(chain, 0, axis_name="chip")
  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def step(grad, stamp):
    return tx.update(grad[0], tx.init(grad[0]), grad[0], computed_at=stamp[0])[0]

  both = P(("pod", "chip"))
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(both, P("chip")), out_specs=P(), check_vma=check_vma
  )
  if check_vma:  # types prove that all pods decide alike
    assert_close(jax.jit(mapped)(np.arange(4, dtype=np.float32), stamps(0, 1)), -2.0)
  else:
    with pytest.raises(ValueError, match="also reduced over"):
      jax.jit(mapped)(np.arange(4, dtype=np.float32), stamps(0, 1))

  def run():
    whole = jax.shard_map(
      lambda *args: step(*args),
      mesh=mesh,
      in_specs=(both, both),
      out_specs=P(),
      check_vma=check_vma,
    )
    return jax.jit(whole)(np.array([1.0, 2.0, 4.0, 9.0], np.float32), stamps(0, 1, 1, 1))

  tx = ow.drop_stale(nested, 0, axis_name=("pod", "chip"))
  assert_close(run(), -5.0)
  tx = ow.drop_stale(chain, 0, axis_name=("pod", "chip"))
  with pytest.raises(ValueError, match="one weight to two reductions"):
    run()


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
      np.ones(4, np.float32), np.ones(4, np.float32)
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
  state = tx.init(np.zeros((), np.float32))
  axes = ow.worker_axes(state, replicated=True)
  state = ow.stack_workers(state, num_shards, replicated=True)

  def step(grad, state, weight):
    return tx.update(grad, state, jnp.zeros(()), weight=weight)

  step = in_context(context, step, num_shards, (0, axes, 0), (None, axes))
  for grad, weight in zip(grads.astype(np.float32), weights.astype(np.float32)):
    updates, state = step(grad, state, weight)
    state = jax.tree.map(np.asarray, state)
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
  assert_close(emitted(context, tx, grads, weight=weights), -(1.0 + 20.0 + 6.0) / 8.0)


@each_context
def test_a_sum_over_shards_of_means_of_towers_counts_every_tower(context):
  """A mean of towers hands on their weights added up, and a sum multiplies by its weights."""
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum"), 2)
  grads, weights = np.array([[1.0, 2.0], [5.0, 7.0]]), np.array([[1.0, 3.0], [2.0, 1.0]])
  assert_close(towers(context, tx, grads, weights), -(grads * weights).sum())


# Touched rows are those of all shards.

TABLE = np.full((4, 2), 3.0, np.float32)
BOTH_CLIPPED = np.where(np.arange(4)[:, None] < 2, TABLE / np.linalg.norm(TABLE[0]), TABLE)


def looked_up(context, tx):
  """Shard i looks row i up; the table afterwards on each of two shards."""

  def step(table, tokens):
    table = ow.per_shard(table, AXIS)
    grads = jax.grad(lambda t: 1e-6 * t[tokens].sum())(table)
    updates, _ = tx.update(grads, tx.init(TABLE), jnp.asarray(TABLE))
    return updates

  tokens = np.array([[0], [1]], np.int32)
  return TABLE + np.asarray(in_context(context, step, 2, (None, 0), 0)(TABLE, tokens))


@each_context
def test_replicas_clip_the_same_rows(context):
  clip = ow.clip_variables(optax.sgd(0.1), 1.0, 1, only_touched=True)
  out = looked_up(context, ow.cross_shard(clip, AXIS))
  assert_close(out, np.stack([BOTH_CLIPPED] * 2), rtol=1e-5)


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  "inner",
  [
    lambda: ow.cross_shard(optax.sgd(0.1), AXIS),
    lambda: optax.chain(optax.identity(), ow.all_reduce(AXIS), optax.sgd(0.1)),
    lambda: ow.drop_stale(ow.cross_shard(optax.sgd(0.1), AXIS), 0, axis_name=AXIS),
    lambda: optax.flatten(ow.cross_shard(optax.sgd(0.1), AXIS)),
    lambda: ow.gather_towers(optax.sgd(0.1), 2),
    lambda: optax.MultiSteps(optax.sgd(0.1), 2),
  ],
  ids=["cross_shard", "chain", "drop_stale", "flatten", "towers", "MultiSteps"],
)
def test_touched_rows_round_what_reduces_are_an_error(inner):
  """One shard, or one tower, does not know which rows are touched."""
  tx = ow.clip_variables(inner(), 1.0, 1, only_touched=True)
  with pytest.raises(ValueError, match=r"only_touched needs the reduced gradient.*inside"):
    looked_up("vmap", tx)


def test_touched_rows_inside_drop_stale_are_those_of_the_fresh_shards():
  clip = ow.clip_variables(optax.sgd(0.1), 1.0, 1, only_touched=True)
  tx = ow.drop_stale(ow.cross_shard(clip, AXIS), 0, axis_name=AXIS)

  def step(grad, stamp):
    return tx.update(grad, tx.init(TABLE), jnp.asarray(TABLE), computed_at=stamp)[0]

  grads = np.zeros((2, 4, 2), np.float32)
  grads[0, 0] = grads[1, 1] = 1e-6
  for context in ("shard_map", "unchecked", "vmap"):
    out = TABLE + np.asarray(in_context(context, step, 2, (0, 0), None)(grads, stamps(0, 1)))
    norms = np.linalg.norm(out, axis=1)
    np.testing.assert_allclose(norms, [norms[2], 1.0, norms[2], norms[2]], rtol=1e-5)


def test_gradients_of_ones_own_without_a_reduction_are_an_error_where_types_tell():
  tx = ow.clip_variables(by_hand(), 1.0, 1, only_touched=True)

  def step(grad):
    return tx.update(grad[0], tx.init(TABLE), jnp.asarray(TABLE))[0]

  mapped = jax.shard_map(step, mesh=mesh_of(2), in_specs=P(AXIS), out_specs=P())
  with pytest.raises(
    ValueError, match=r"for only_touched, differs from shard to shard.*inside the reduction"
  ):
    jax.jit(mapped)(np.ones((2, 4, 2), np.float32))


# What stands between: other links, sums, towers, conditionals and a jit of its own.


@each_context
@pytest.mark.parametrize("split", ["partition", "masked"])
def test_leaves_that_are_reduced_apart_have_each_their_weight(context, split):
  reduce = optax.chain(ow.all_reduce(AXIS), optax.sgd(1.0))
  inner = optax.partition({"p": reduce, "q": reduce}, {"x": "p", "y": "q"})
  if split == "masked":
    inner = optax.chain(optax.masked(ow.all_reduce(AXIS), {"x": True, "y": True}), optax.sgd(1.0))
  tx, params = ow.drop_stale(inner, 0, axis_name=AXIS), {"x": np.float32(0), "y": np.float32(0)}

  def step(grad, stamp):
    return tx.update(grad, tx.init(params), params, computed_at=stamp)[0]

  grads = {"x": np.array([10.0, 1.0], np.float32), "y": np.array([20.0, 3.0], np.float32)}
  updates = in_context(context, step, 2, (0, 0), None)(grads, stamps(0, 1))
  assert (float(updates["x"]), float(updates["y"])) == (-1.0, -3.0)


def towers_of(inner, outer, reduction):
  """One tower, or a stack of towers."""
  if outer == "gather":
    return ow.gather_towers(inner, 1, reduction=reduction)
  return ow.reduce_towers(inner, reduction=reduction)


@each_context
@pytest.mark.parametrize(
  ("reduction", "mean"), [("mean", "cross_shard"), ("mean", "by hand"), ("sum", "by hand")]
)
@pytest.mark.parametrize("outer", ["gather", "reduce"])
def test_towers_between_staleness_and_a_mean(context, reduction, outer, mean):
  """One tower, or a stack of two equal ones, whose sum is twice as much: the mean is that of the
  fresh shards."""
  inner = by_hand() if mean == "by hand" else ow.cross_shard(optax.sgd(1.0), AXIS)
  tx = ow.drop_stale(towers_of(inner, outer, reduction), 0, axis_name=AXIS)
  grads = np.array([10.0, 1.0, 3.0, 5.0])
  given = grads if outer == "gather" else np.stack([grads, grads], 1)
  expected = -2.0 * (2 if outer == "reduce" and reduction == "sum" else 1)
  assert_close(emitted(context, tx, given, computed_at=stamps(0, 1, 1, 0)), expected)


@pytest.mark.parametrize("nonfinite", ["propagate", "drop"])
@pytest.mark.parametrize("outer", ["gather", "reduce"])
def test_a_mean_behind_a_sum_of_towers_has_no_weights(outer, nonfinite):
  """It would count the stale shards as fresh ones."""
  inner = ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite=nonfinite)
  tx = ow.drop_stale(towers_of(inner, outer, "sum"), 0, axis_name=AXIS)
  with pytest.raises(ValueError, match=r"a sum of unequal weights no longer has weights"):
    emitted(
      "vmap", tx, np.ones(2) if outer == "gather" else np.ones((2, 1)), computed_at=stamps(0, 1)
    )


@each_context
@pytest.mark.parametrize("outer", ["gather", "reduce"])
def test_a_sum_of_sums_of_towers_is_that_of_the_fresh(context, outer):
  inner = ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum")
  tx = ow.drop_stale(towers_of(inner, outer, "sum"), 0, axis_name=AXIS)
  grads = np.array([10.0, 1.0, 3.0, 5.0])
  given = grads if outer == "gather" else np.stack([grads, 2 * grads], 1)
  expected = -4.0 * (3 if outer == "reduce" else 1)
  assert_close(emitted(context, tx, given, computed_at=stamps(0, 1, 1, 0)), expected)


def test_a_mean_of_sums_has_no_weights():
  """A sum has used its weights up. Who hands on a weight to a mean behind it is told so."""
  tx = ow.cross_shard(ow.cross_shard(optax.sgd(1.0), "pod"), AXIS, reduction="sum")
  stale = ow.drop_stale(tx, 0, axis_name=(AXIS, "pod"))
  grads, weights = np.array([[1, 2], [5, 7]], np.float32), np.array([1, 3], np.float32)

  def of_pods(tx, name, values):
    def step(grad, value):
      return tx.update(grad, tx.init(jnp.zeros(())), jnp.zeros(()), **{name: value})[0]

    pods = jax.vmap(step, axis_name=AXIS)
    return jax.jit(jax.vmap(pods, (0, None), axis_name="pod"))(grads, values)

  assert_close(of_pods(tx, "weight", weights), np.full((2, 2), -(7.0 + 26.0) / 2))
  with pytest.raises(ValueError, match="Take the mean first"):
    of_pods(stale, "computed_at", stamps(1, 0))


def jitted(tx):
  return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


HIDES = {
  "jit": jitted,
  "checkpoint": lambda tx: optax.GradientTransformationExtraArgs(
    tx.init, jax.checkpoint(tx.update)
  ),
  "two jits": lambda tx: jitted(optax.chain(jitted(tx))),
  "named_chain": lambda tx: jitted(optax.named_chain(("one", tx))),
}


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("hide", HIDES)
@each_context
def test_a_weight_arrives_through_a_jit_of_its_own_in_every_call(context, hide, calls_before):
  """JAX does not trace an inner jit again that it has traced before: what is known must be in
  data."""
  hide, sgd = HIDES[hide], optax.sgd(1.0)
  grads, fresh = np.array([10.0, 1.0, 3.0, 5.0]), stamps(0, 1, 1, 0)
  mean = hide(ow.cross_shard(sgd, AXIS))
  total = hide(ow.cross_shard(sgd, AXIS, reduction="sum"))
  finite = hide(ow.cross_shard(sgd, AXIS, nonfinite="drop"))
  for call in range(calls_before + 1):
    if calls_before and not call:  # traced without a weight
      for tx in (mean, total, finite):
        emitted(context, tx, grads)
      continue
    weights = np.array([1.0, 3.0, 0.0, 2.0], np.float32)
    tx = ow.gather_towers(mean, 1)
    expected = -(weights * grads).sum() / weights.sum()
    assert_close(emitted(context, tx, grads, weight=weights), expected)
    for tx, expected in ((mean, -2.0), (total, -4.0), (finite, -3.0)):
      given = np.array([10.0, np.nan, 3.0, 5.0]) if tx is finite else grads
      stale = ow.drop_stale(tx, 0, axis_name=AXIS)
      assert_close(emitted(context, stale, given, computed_at=fresh), expected)


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_weight_that_is_lost_on_the_way_is_an_error_in_every_call(calls_before):
  """A transformation that takes no extra args loses them: Optax says so by its type."""

  def narrow(tx):
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))

  sgd, grads = optax.sgd(1.0), np.array([10.0, 1.0])
  every = [
    narrow(ow.cross_shard(sgd, AXIS)),
    narrow(ow.cross_shard(sgd, AXIS, reduction="sum")),
    narrow(ow.cross_shard(sgd, AXIS, nonfinite="drop")),
    optax.chain(narrow(ow.all_reduce(AXIS)), sgd),
  ]
  for tx in every:
    for _ in range(calls_before):
      emitted("vmap", tx, grads)
    for _ in range(2):
      with pytest.raises(ValueError, match=r"passes on a weight .* takes no extra args"):
        emitted("vmap", ow.drop_stale(tx, 0, axis_name=AXIS), grads, computed_at=stamps(0, 1))
      with pytest.raises(ValueError, match=r"passes on a weight .* takes no extra args"):
        emitted("vmap", ow.gather_towers(tx, 1), grads, weight=np.ones(2, np.float32))


@pytest.mark.parametrize(
  "reduction",
  [
    {"reduction": ow.reductions.median()},
    {"codec": ow.codecs.majority_vote()},
  ],
)
@pytest.mark.parametrize("hide", [lambda tx: tx, jitted, lambda tx: optax.apply_if_finite(tx, 3)])
def test_a_stale_shard_has_no_vote(reduction, hide):
  """One vote a shard: zeros would be a vote as well."""
  tx = hide(ow.cross_shard(optax.sgd(1.0), AXIS, **reduction))
  tx = ow.drop_stale(tx, 0, axis_name=AXIS)
  params = np.zeros(2, np.float32)

  def step(grad, stamp):
    return tx.update(grad, tx.init(params), params, computed_at=stamp)[0]

  grads = np.array([[5, 5], [5, 5], [-1, -1], [-1, -1]], np.float32)
  for _ in range(2):
    with pytest.raises(ValueError, match="every shard has one vote"):
      jax.jit(jax.vmap(step, axis_name=AXIS))(grads, stamps(0, 0, 1, 1))


@pytest.mark.optax_promotes
def test_a_weight_of_several_calls_of_somebody_else_is_an_error():
  """optax.MultiSteps gives what is inside the weight of its last call."""
  behind = optax.MultiSteps(ow.cross_shard(optax.sgd(1.0), AXIS), 2).gradient_transformation()
  ones = np.ones((2, 3))
  with pytest.raises(ValueError, match="takes the weight of its last call"):
    emitted("vmap", ow.reduce_towers(behind), ones, weight=ones.astype(np.float32))
  with pytest.raises(ValueError, match="takes the weight of its last call"):
    emitted("vmap", ow.drop_stale(behind, 0, axis_name=AXIS), np.ones(2), computed_at=stamps(0, 1))


def test_a_weight_is_handed_on():
  """Who takes a weight hands on that of what it hands on."""
  seen = []

  def update(updates, state, params=None, **extra):
    seen.append(extra.get("weight"))
    return updates, state

  spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

  def weights(tx, grads, **extra):
    def step(grad, extra):
      updates, _ = tx.update(grad, tx.init(jnp.zeros(())), jnp.zeros(()), **extra)
      return updates, seen.pop()

    return np.asarray(jax.jit(jax.vmap(step, axis_name=AXIS))(grads, extra)[1]).tolist()

  given = np.array([1.0, 3.0, 0.5], np.float32)
  assert weights(ow.cross_shard(spy, AXIS), np.ones(3), weight=given) == [4.5] * 3
  assert weights(ow.gather_towers(spy, 1), np.ones(3), weight=given) == [1.0, 3.0, 0.5]
  stacked = np.array([[1.0, 2.0], [0.0, 0.0], [4.0, 0.5]], np.float32)
  assert weights(ow.reduce_towers(spy), np.ones((3, 2)), weight=stacked) == [3.0, 0.0, 4.5]
  inner = ow.cross_shard(spy, AXIS)
  stale = ow.drop_stale(inner, 0, axis_name=AXIS)
  assert weights(stale, np.ones(3), computed_at=stamps(1, 0, 1)) == [2.0] * 3
  assert weights(stale, np.ones(3), weight=given, computed_at=stamps(1, 0, 1)) == [1.5] * 3
  seen.clear()
  tx = ow.cross_shard(spy, AXIS)
  jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS))(np.ones(3, np.float32))
  assert seen == [None]


def test_a_line_search_gets_no_weight():
  """Optax's raises on an extra arg that its function does not take."""
  inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
  tx = ow.cross_shard(inner, AXIS)

  def loss(p):
    return (p - 2.0) ** 2

  def step(grad, weight):
    param = jnp.array(0.0)
    search = {"value": loss(param), "grad": jax.grad(loss)(param), "value_fn": loss}
    return tx.update(grad, tx.init(param), param, weight=weight, **search)[0]

  grads, weights = np.array([-4.0, -8.0], np.float32), np.array([3.0, 1.0], np.float32)
  updates = np.asarray(jax.jit(jax.vmap(step, axis_name=AXIS))(grads, weights))
  assert updates[0] == updates[1] > 0


def test_a_saved_state_keeps_what_it_reduces():
  """Through pickle and Flax, which save no structure, and in mid-step."""
  import pickle

  from flax import serialization

  tx = ow.drop_stale(ow.gather_towers(ow.cross_shard(optax.adam(0.1), AXIS), 2), 0, axis_name=AXIS)
  state = tx.init(jnp.zeros(3))
  pickled = pickle.loads(pickle.dumps(state))
  restored = serialization.from_bytes(tx.init(jnp.ones(3)), serialization.to_bytes(state))
  for found in (pickled, restored):
    assert jax.tree.structure(found) == jax.tree.structure(state)


def test_an_accumulator_between_two_reductions_is_an_error():
  tx = ow.cross_shard(ow.gather_towers(ow.cross_shard(optax.sgd(1.0), "pod"), 2), "data")
  with pytest.raises(ValueError, match=r"no layout shows over which axes its accumulator differs"):
    tx.init(np.ones(4, np.float32))


def test_a_weight_of_a_workers_gradient_is_none_of_an_exchange():
  """The reduction in what `local_steps` keeps is of differences, and not of gradients."""
  options = {"outer": optax.sgd(1.0), "reduction": ow.all_reduce(AXIS)}
  rounds = ow.local_steps(optax.sgd(0.1), AXIS, communication_period=1, **options)
  tx = ow.drop_stale(rounds, max_staleness=0)

  @jax.jit
  def updates_of(grads, params):
    def step(grads, state, params):
      return tx.update(grads, state, params, computed_at=0, weight=2.0)[0]

    state = ow.stack_workers(tx.init(jnp.zeros(())), 4)
    return ow.map_workers(step, AXIS)(grads, state, params)

  updates = updates_of(np.arange(4, dtype=np.float32), np.zeros(4, np.float32))
  np.testing.assert_allclose(updates, [-0.15] * 4, rtol=1e-6)


def test_a_weight_that_is_lost_inside_workers_of_their_own_is_named():
  """What stands between a weight and what divides by it is seen inside an exchange too."""
  mean = ow.cross_shard(optax.sgd(1.0), "chip")
  deaf = optax.GradientTransformation(mean.init, lambda u, s, p=None: mean.update(u, s, p))
  params = np.zeros((), np.float32)

  def workers(inner):
    tx = ow.gather_towers(ow.local_steps(inner, "pod", communication_period=9), 2)

    def step(grad):
      state = tx.init(params)
      _, state = tx.update(grad, state, params, weight=3.0)
      return tx.update(grad * 5, state, params, weight=grad)[0]

    of_all = jax.vmap(jax.vmap(step, axis_name="chip"), axis_name="pod")
    return jax.jit(of_all)(np.array([[1.0, 2.0]], np.float32))

  # Of the towers g and 5 g, weighed by 3 and g, on two chips with g = 1 and 2.
  assert_close(workers(mean), np.full((1, 2), -(3 * 1 + 1 * 5 + 3 * 2 + 2 * 10) / (3 + 1 + 3 + 2)))
  with pytest.raises(ValueError, match="a wrapper outside passes on a weight that is lost"):
    workers(deaf)


@each_context
def test_a_reduction_over_no_axis_takes_no_weight_of_a_chain(context):
  """A single shard: the mean behind it divides by its own weight."""
  chain = optax.chain(ow.all_reduce(None), ow.cross_shard(optax.sgd(1.0), AXIS))
  grads, weights = np.array([[1.0, 2.0], [5.0, 7.0]]), np.array([[1.0, 3.0], [2.0, 1.0]])
  actual = towers(context, ow.gather_towers(chain, 2), grads, weights)
  assert_close(actual, -(grads * weights).sum() / weights.sum())
