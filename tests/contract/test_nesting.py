"""Wrappers in pairs that touch the same number: stale shards and weights, towers and shards, rows
and reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, assert_close, in_context, mesh_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from nesting_cases import each_context, emitted, jitted, stamps

import optax_wrappers as ow

# A stale shard has weight zero.


@each_context
@pytest.mark.parametrize("between", [(), (optax.clip(2.0),)], ids=["direct", "clip between"])
def test_drop_stale_around_weighted_mean_is_mean_of_fresh(context, between):
  tx = optax.chain(*between, ow.cross_shard(optax.sgd(1.0), AXIS))
  tx = ow.drop_stale(tx, 0, axis_name=AXIS)
  grads, weights = np.array([10.0, 1.0, 3.0, np.nan]), np.array([1.0, 3.0, 1.0, 2.0], np.float32)
  actual = emitted(context, tx, grads, weight=weights, computed_at=stamps(0, 1, 1, 0))
  clipped = np.minimum(grads[1:3], 2.0) if between else grads[1:3]
  assert_close(actual, -(weights[1:3] * clipped).sum() / 4.0)


@each_context
def test_clip_between_drop_stale_and_mean_sees_raw_gradient(context):
  """Not the gradient times N / F."""
  tx = ow.drop_stale(
    optax.chain(optax.clip(1.5), ow.cross_shard(optax.sgd(1.0), AXIS)), 0, axis_name=AXIS
  )
  assert_close(
    emitted(context, tx, [9.0, 1.0, 2.0, 9.0], computed_at=stamps(0, 1, 1, 0)), -(1.0 + 1.5) / 2
  )


@each_context
def test_drop_stale_around_nonfinite_drop_excludes_both(context):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop"), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=stamps(0, 1, 1, 1)), -2.0)
  assert_close(
    emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=stamps(1, 1, 0, 0)), -10.0
  )
  # Those that are left are all NaN: the step is dropped.
  assert_close(emitted(context, tx, [10.0, np.nan, 1.0, 3.0], computed_at=stamps(0, 1, 0, 0)), 0.0)


@each_context
def test_drop_stale_around_sum_is_sum_of_fresh(context):
  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum"), 0, axis_name=AXIS)
  assert_close(emitted(context, tx, [10.0, 1.0, 2.0, 4.0], computed_at=stamps(0, 1, 1, 0)), -3.0)


def by_hand():
  return optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, AXIS)), optax.sgd(1.0))


@each_context
def test_drop_stale_around_pmean_by_hand_is_mean_of_fresh(context):
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
def test_drop_on_part_of_reducing_shards_is_error(make, check_vma):
  tx = make(ow.cross_shard(optax.sgd(1.0), "pod"))
  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def step(grad, stamp):
    extra = (
      {"computed_at": stamp[0]} if isinstance(tx.init(grad[0]), ow.states.DropStaleState) else {}
    )
    return tx.update(grad[0], tx.init(grad[0]), grad[0], **extra)[0]

  both = P(("pod", "chip"))
  mapped = jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P(), check_vma=check_vma)
  with pytest.raises(
    ValueError, match=r"also reduced over \('pod',\)|differs from shard to shard over \['pod'\]"
  ):
    jax.jit(mapped)(np.ones(4, np.float32), np.zeros(4, np.int32))


@pytest.mark.parametrize("check_vma", [True, False])
def test_drop_stale_weight_goes_to_reduction_over_its_axis(check_vma):
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


# A mean of means is the weighted mean of all.


@pytest.mark.parametrize("check_vma", [True, False])
def test_weights_in_nested_means_give_weighted_mean_of_all(check_vma):
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
def test_towers_of_shards_with_weights_are_weighted_mean(context, order):
  if order == "gather outside":
    tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 2)
  else:
    tx = ow.cross_shard(ow.gather_towers(optax.sgd(1.0), 2), AXIS)
  grads, weights = np.array([[1.0, 2.0], [5.0, np.nan]]), np.array([[1.0, 3.0], [4.0, 0.0]])
  assert_close(towers(context, tx, grads, weights), -(1.0 + 6.0 + 20.0) / 8.0)


@each_context
def test_towers_single_with_weight_per_shard_is_weighted_mean(context):
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 1)
  assert_close(towers(context, tx, np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]])), -7.0 / 4.0)


@each_context
def test_reduce_towers_of_shards_with_weights_is_weighted_mean(context):
  tx = ow.reduce_towers(ow.cross_shard(optax.sgd(1.0), AXIS))
  grads, weights = (
    np.array([[1.0, 5.0], [2.0, np.nan]]),
    np.array([[1.0, 4.0], [3.0, 0.0]], np.float32),
  )
  assert_close(emitted(context, tx, grads, weight=weights), -(1.0 + 20.0 + 6.0) / 8.0)


@each_context
def test_sum_over_shards_of_tower_means_counts_every_tower(context):
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
def test_only_touched_inside_cross_shard_clips_rows_of_all(context):
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
def test_only_touched_around_reduction_is_error(inner):
  """One shard, or one tower, does not know which rows are touched."""
  tx = ow.clip_variables(inner(), 1.0, 1, only_touched=True)
  with pytest.raises(ValueError, match=r"only_touched needs the reduced gradient.*inside"):
    looked_up("vmap", tx)


def test_only_touched_inside_drop_stale_clips_rows_of_fresh():
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


def test_only_touched_of_unreduced_gradient_is_error():
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
def test_drop_stale_around_leaves_reduced_apart_is_mean_of_fresh(context, split):
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
def test_towers_between_drop_stale_and_mean_keep_fresh_mean(context, reduction, outer, mean):
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
def test_weights_of_mean_behind_sum_of_towers_is_error(outer, nonfinite):
  """It would count the stale shards as fresh ones."""
  inner = ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite=nonfinite)
  tx = ow.drop_stale(towers_of(inner, outer, "sum"), 0, axis_name=AXIS)
  with pytest.raises(ValueError, match=r"a sum of unequal weights no longer has weights"):
    emitted(
      "vmap", tx, np.ones(2) if outer == "gather" else np.ones((2, 1)), computed_at=stamps(0, 1)
    )


@each_context
@pytest.mark.parametrize("outer", ["gather", "reduce"])
def test_drop_stale_around_sums_of_towers_is_sum_of_fresh(context, outer):
  inner = ow.cross_shard(optax.sgd(1.0), AXIS, reduction="sum")
  tx = ow.drop_stale(towers_of(inner, outer, "sum"), 0, axis_name=AXIS)
  grads = np.array([10.0, 1.0, 3.0, 5.0])
  given = grads if outer == "gather" else np.stack([grads, 2 * grads], 1)
  expected = -4.0 * (3 if outer == "reduce" else 1)
  assert_close(emitted(context, tx, given, computed_at=stamps(0, 1, 1, 0)), expected)


def test_weights_of_mean_of_sums_from_drop_stale_is_error():
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


@pytest.mark.parametrize(
  "reduction",
  [
    {"reduction": ow.reductions.median()},
    {"codec": ow.contrib.majority_vote()},
  ],
)
@pytest.mark.parametrize("hide", [lambda tx: tx, jitted, lambda tx: optax.apply_if_finite(tx, 3)])
def test_drop_stale_around_votes_is_error(reduction, hide):
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


def test_towers_accumulator_between_two_reductions_is_error():
  tx = ow.cross_shard(ow.gather_towers(ow.cross_shard(optax.sgd(1.0), "pod"), 2), "data")
  with pytest.raises(ValueError, match=r"no layout shows over which axes its accumulator differs"):
    tx.init(np.ones(4, np.float32))


@each_context
def test_all_reduce_over_no_axis_leaves_weight_to_mean_behind(context):
  """A single shard: the mean behind it divides by its own weight."""
  chain = optax.chain(ow.all_reduce(None), ow.cross_shard(optax.sgd(1.0), AXIS))
  grads, weights = np.array([[1.0, 2.0], [5.0, 7.0]]), np.array([[1.0, 3.0], [2.0, 1.0]])
  actual = towers(context, ow.gather_towers(chain, 2), grads, weights)
  assert_close(actual, -(grads * weights).sum() / weights.sum())
