"""Compressed exchanges against NumPy: residuals, weights, contexts, bytes, and their pairs."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_codecs as ref
from compress_cases import (
  CODECS,
  LARGE,
  MANY,
  PARAMS,
  SHAPES,
  TOP,
  UNTYPED,
  Run,
  changed,
  first_state,
  gradients,
  zeros,
)
from flax import serialization
from helpers import AXIS, CONTEXTS, assert_close, bits, in_context, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers import codecs, inspect

# Arithmetic without a rounding, of shards whose number is a power of two.
EXACT = {"bfloat16", "8 bits", "2 bits", "top"}


class Reference:
  """The same in NumPy, for the leaves that are compressed."""

  def __init__(self, round_trip, num_shards, shapes=SHAPES, **options):
    self.round_trip, self.options = round_trip, options
    large = {name: shapes[name] for name in LARGE if name in shapes}
    self.residual = zeros({name: (num_shards, *shape) for name, shape in large.items()})
    self.owner = zeros(large)

  def __call__(self, contributions):
    results = {}
    for name in self.owner:
      results[name], self.residual[name], self.owner[name] = ref.exchange(
        contributions[name],
        self.residual[name],
        self.owner[name],
        self.round_trip,
        **self.options,
      )
    return results


def scaled(grads, weights):
  """What each shard sends: its gradient times its weight, in float32."""
  factors = np.asarray(weights, np.float32)
  return {name: g * factors.reshape(-1, *[1] * (g.ndim - 1)) for name, g in grads.items()}


@jax.jit
def put_together(rows):
  return {name: ow._core._shares.whole(rows[name], SHAPES[name]) for name in LARGE if name in rows}


def owner_residual(run):
  """The residuals of all parts, put together."""
  return jax.tree.map(np.asarray, put_together(run.compressed.owner_residual))


def assert_agrees(run, expected, updates, reference, is_exact):
  tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-2}
  compared = [(updates, expected)]
  if reference.options.get("feedback", True):
    compared.append((run.compressed.residual, reference.residual))
    if run.compressed.owner_residual is not None:
      compared.append((owner_residual(run), reference.owner))
  for name in expected:
    for actual, wanted in compared:
      np.testing.assert_allclose(actual[name], wanted[name], **tolerance, err_msg=name)


@pytest.mark.parametrize("context", ["vmap", "shard_map"])
@pytest.mark.parametrize("name", ["8 bits", "top"])
def test_codec_over_8_shards_matches_numpy_exactly(name, context):
  codec, round_trip = CODECS[name]
  run = Run(ow.all_reduce(AXIS, codec=codec), 8, context)
  reference = Reference(round_trip, 8, second=codec.recodes)
  for k in range(2):
    grads = gradients(8, seed=k)
    updates = run(grads)
    expected = reference(scaled(grads, [1 / 8] * 8))
    assert_agrees(run, expected, updates, reference, is_exact=True)


@pytest.mark.parametrize("num_shards", [2, 3, 4])
@pytest.mark.parametrize("name", CODECS)
def test_codec_updates_and_residuals_match_numpy(name, num_shards):
  codec, round_trip = CODECS[name]
  run = Run(ow.all_reduce(AXIS, codec=codec), num_shards)
  reference = Reference(round_trip, num_shards, second=None if codec.recodes is None else False)
  for k in range(4):
    grads = gradients(num_shards, seed=k)
    updates = run(grads)
    expected = reference(scaled(grads, [1 / num_shards] * num_shards))
    assert_agrees(run, expected, updates, reference, name in EXACT and num_shards != 3)
    np.testing.assert_allclose(updates["bias"], grads["bias"].mean(0), rtol=1e-5)


@pytest.mark.parametrize("name", ["4 bits", "signs", "top", "low rank"])
def test_codec_updates_are_equal_on_all_shards_of_pmap(name):
  codec = CODECS[name][0] if name in CODECS else MANY[name]
  run = Run(ow.all_reduce(AXIS, codec=codec), 4, "pmap")
  for k in range(2):
    for x in jax.tree.leaves(run(gradients(4, seed=k))):
      assert (np.asarray(x) == np.asarray(x)[0]).all()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["8 bits", "low rank"])
def test_codec_over_pods_with_sharded_params_matches_vmap(name, kind):
  codec = CODECS[name][0] if name in CODECS else MANY[name]
  shapes = {"w": (64, 32), "b": (32,)}
  tx = ow.all_reduce("pod", codec=codec)
  mesh = jax.make_mesh((2, 4), ("pod", "data"), axis_types=(getattr(AxisType, kind),) * 2)
  state, grads = first_state(tx, zeros(shapes), 2, replicated=False), gradients(2, shapes=shapes)
  expected = jax.jit(ow.map_workers(tx.update, "pod"))(grads, state)
  specs = {"w": P("data"), "b": P()}
  places = [ow.specs(tree, workers="pod", params=specs) for tree in (grads, state)]
  with jax.set_mesh(mesh), warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # what an Explicit mesh gathers
    given = jax.tree.map(
      lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), [grads, state], places
    )
    found = jax.jit(ow.map_workers(tx.update, "pod", mesh=mesh))(*given)
  assert_close(found, expected, rtol=1e-5, atol=1e-5)


@functools.cache
def three_steps_under_vmap():
  """The updates and what is kept after each, of 8 bits over four shards."""
  run = Run(ow.all_reduce(AXIS, codec=codecs.quantize(8)), 4)
  return [(run(gradients(4, seed=k)), run.compressed) for k in range(3)]


@pytest.mark.parametrize("context", [name for name in CONTEXTS if name != "vmap"])
def test_codec_every_context_equals_vmap_bit_for_bit(context):
  """And all shards: a replica that is an ulp off would go its own way."""
  run = Run(ow.all_reduce(AXIS, codec=codecs.quantize(8)), 4, context)
  for k, (expected, kept) in enumerate(three_steps_under_vmap()):
    updates = run(gradients(4, seed=k))
    if context in UNTYPED:
      for x in jax.tree.leaves(updates):
        assert (np.asarray(x) == np.asarray(x)[0]).all()
      updates = jax.tree.map(lambda x: np.asarray(x)[0], updates)
    for name in ("odd", "stack"):  # the bias is summed by XLA, each context in its own order
      assert bits(updates[name]) == bits(expected[name])
    for a, b in zip(*map(jax.tree.leaves, (run.compressed, kept)), strict=True):
      assert (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_codec_weights_match_numpy_and_all_zero_keeps_state(reduction):
  codec, round_trip = CODECS["2 bits"]
  run = Run(ow.all_reduce(AXIS, codec=codec, reduction=reduction), 4, extra_axes={"weight": 0})
  reference = Reference(round_trip, 4)
  # Powers of two, so that no rounding can tip a tie.
  for k, weights in enumerate(([1.0, 2.0, 0.5, 0.5], [0.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.25])):
    grads = gradients(4, seed=k)
    if weights[0] == 0:  # what a shard of weight zero has may be anything
      for name in SHAPES:
        grads = changed(grads, name, 0, np.nan)
    updates = run(grads, weight=np.array(weights, np.float32))
    clean = jax.tree.map(np.nan_to_num, grads)
    total = sum(weights) if reduction == "mean" else 1.0
    expected = reference(scaled(clean, np.array(weights) / total))
    assert_agrees(run, expected, updates, reference, is_exact=True)
  before = run.state
  updates = run(gradients(4), weight=np.zeros(4, np.float32))
  assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(updates))
  assert bits(run.state) == bits(before)


def test_feedback_false_matches_numpy_and_keeps_no_state():
  run = Run(ow.all_reduce(AXIS, codec=codecs.compression(codecs.quantize(4), feedback=False)), 3)
  reference = Reference(CODECS["4 bits"][1], 3, feedback=False)
  for k in range(2):
    grads = gradients(3, seed=k)
    updates = run(grads)
    assert_agrees(run, reference(scaled(grads, [1 / 3] * 3)), updates, reference, False)
  assert not jax.tree.leaves(run.state)


def test_residual_with_decay_matches_numpy():
  run = Run(ow.all_reduce(AXIS, codec=codecs.compression(TOP, decay=0.5)), 2)
  reference = Reference(CODECS["top"][1], 2, decay=0.5)
  for k in range(3):
    grads = gradients(2, seed=k)
    updates = run(grads)
    expected = reference(scaled(grads, [0.5, 0.5]))
    assert_agrees(run, expected, updates, reference, is_exact=True)


@pytest.mark.parametrize("feedback", [True, False])
def test_random_k_same_entries_on_all_shards_match_numpy(feedback):
  run = Run(
    ow.all_reduce(AXIS, codec=codecs.compression(codecs.random_k(0.1), feedback=feedback)), 3
  )
  residuals = {name: np.zeros((3, *SHAPES[name]), np.float32) for name in LARGE}
  for k in range(3):
    grads = gradients(3, seed=k)
    updates, wanted = run(grads), scaled(grads, [1 / 3] * 3)
    for name in LARGE:
      chosen = np.flatnonzero(np.asarray(updates[name]))
      groups = -(-int(np.prod(SHAPES[name])) // 10)  # the last may be shorter, and send nothing
      assert groups - 1 <= len(chosen) <= groups
      expected, residuals[name] = ref.random_k(wanted[name], residuals[name], chosen, feedback)
      if not feedback:  # of neighbors that are ten each but the last
        expected = expected * np.float32(10 * len(chosen) / np.prod(SHAPES[name]))
      np.testing.assert_allclose(updates[name], expected, rtol=1e-5, atol=1e-5)
      if feedback:
        np.testing.assert_allclose(
          run.compressed.residual[name], residuals[name], rtol=1e-5, atol=1e-5
        )


# What error feedback promises.


@pytest.mark.parametrize(("feedback", "arrives"), [(True, 1.0), (False, 0.0)])
def test_entries_below_resolution_arrive_only_with_feedback(feedback, arrives):
  """Beside entries of one, a thousandth is below half a step of a 127th. Shards differ: equal ones
  would all send it in the same step, which a second rounding would let pass."""
  codec = codecs.compression(codecs.quantize(8), feedback=feedback)
  run = Run(ow.all_reduce(AXIS, codec=codec), 4, params=zeros({"w": (32, 32)}))
  grads = {"w": np.empty((4, 32, 32), np.float32)}
  grads["w"][:] = np.array([0.5, 0.9, 1.1, 1.5])[:, None, None] * 1e-3
  grads["w"][:, :, 0] = 1

  @jax.jit
  def many(state):
    axes = ow.worker_axes(state, replicated=True)
    update = jax.vmap(run.tx.update, (0, axes), (None, axes), axis_name=AXIS)

    def step(carried, _):
      state, total = carried
      updates, state = update(grads, state)
      return (state, total + updates["w"]), None

    return jax.lax.scan(step, (state, jnp.zeros((32, 32))), length=1000)[0][1]

  total = np.asarray(many(run.state))
  np.testing.assert_allclose(total[:, 0], 1000, rtol=1e-2)
  np.testing.assert_allclose(total[:, 1:], 1000 * 1e-3 * arrives, atol=0.02)


# What travels.


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("name", [*CODECS, "low rank", "random"])
def test_codec_compiled_collectives_send_num_bytes(name, num_shards):
  """Read from the compiled program: bytes, all leaves together."""
  codec = CODECS[name][0] if name in CODECS else MANY[name]
  tx = ow.all_reduce(AXIS, codec=codec)
  mesh = mesh_of(num_shards)
  state = jax.eval_shape(lambda: first_state(tx, PARAMS, num_shards))
  specs = ow.specs(state, workers=AXIS, replicated=True)
  axes = ow.worker_axes(state, replicated=True)

  def local(tree, back):
    return jax.tree.map(
      lambda a, part: jax.tree.map(lambda x: x if a is None else back(x), part),
      axes,
      tree,
      is_leaf=lambda x: x is None,
    )

  def step(grads, state):
    grads = jax.tree.map(lambda g: g[0], grads)
    updates, state = tx.update(grads, local(state, lambda x: x[0]))
    return updates, local(state, lambda x: x[None])

  step = jax.shard_map(step, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=(P(), specs))
  lowered = jax.jit(step).lower(gradients(num_shards), state)
  found = inspect.compiled_collectives(lowered.compile())
  compressed = [name for name in LARGE if codec.applies_to(SHAPES[name])]
  exact = sum(4 * int(np.prod(SHAPES[name])) for name in SHAPES if name not in compressed)
  sizes = {name: int(np.prod(SHAPES[name])) for name in compressed}
  if name in ("low rank", "random"):
    assert {one.kind for one in found} == {"all-reduce"}
    coded = sum(codec.num_bytes(SHAPES[name]) for name in compressed)
    assert sum(one.num_bytes for one in found) == coded + exact
    return
  by_kind = {one.kind: one.num_bytes for one in found}
  assert len(by_kind) == len(found)
  if num_shards == 2 or codec.recodes is False:
    coded = sum(map(codec.num_bytes, sizes.values()))
    assert by_kind == {"all-gather": coded, "all-reduce": exact}
    return
  # 35 columns are 8 for each of four shards, and three that are left over.
  parts = {name: n // num_shards for name, n in sizes.items()} | {"odd": 33 * 8}
  coded = sum(map(codec.num_bytes, parts.values()))
  assert by_kind == {
    "all-to-all": num_shards * coded,
    "all-gather": coded,
    "all-reduce": exact + 4 * 33 * 3,
  }


@pytest.mark.parametrize("axis", [AXIS, None])
def test_codec_on_single_shard_equals_inner_bit_for_bit(axis):
  tx = ow.cross_shard(optax.sgd(0.1), axis, codec=codecs.quantize(2))
  grads = jax.tree.map(lambda g: g[0], gradients(1))

  def alone(tx):
    return jax.jit(lambda g: tx.update(g, tx.init(PARAMS), PARAMS)[0])(grads)

  expected = alone(optax.sgd(0.1))
  if axis is None:
    updates = alone(tx)
  else:
    updates = Run(tx, 1)(gradients(1))
  assert bits(updates) == bits(expected)


# Together with what else there is.


def test_compression_after_makes_first_exchanges_exact():
  codec = codecs.quantize(2)
  later = codecs.compression(codec, after=2)
  run, plain = (Run(ow.all_reduce(AXIS, codec=one), 3, "shard_map") for one in (later, codec))
  for k in range(2):
    grads = gradients(3, seed=k)
    updates = run(grads)
    for name in SHAPES:
      np.testing.assert_allclose(updates[name], grads[name].mean(0), rtol=1e-4, atol=1e-4)
  grads = gradients(3, seed=9)
  assert_close(run(grads), plain(grads))
  assert int(run.compressed.step) == 3


def test_codec_sharded_param_is_exact_without_residual():
  """The gradient of what is divided over the axis arrives summed, and nothing is kept for it."""
  shapes = {"whole": (40, 36), "part": (64, 32)}
  divided = {"whole": False, "part": True}
  tx = ow.all_reduce(AXIS, codec=codecs.quantize(8), sharded=divided)
  state = first_state(tx, zeros(shapes), 4)
  assert state.compressed.residual["part"] is None
  axes, grads = ow.worker_axes(state, replicated=True), gradients(4, shapes=shapes)
  out = {"whole": None, "part": 0}, axes
  update = jax.vmap(tx.update, (0, axes), out, axis_name=AXIS)
  updates, state = jax.jit(update)(grads, state)
  np.testing.assert_allclose(updates["part"], grads["part"] / 4)
  before = np.zeros((4, 40, 36), np.float32)
  expected, *_ = ref.exchange(grads["whole"] / 4, before, before[0], CODECS["8 bits"][1])
  np.testing.assert_array_equal(updates["whole"], expected)


def test_compression_only_leaves_out_masked_variable():
  mask = {"odd": True, "stack": False, "bias": True}
  for compress in (mask, lambda params: mask):
    codec = codecs.compression(codecs.signs(), only=compress)
    run = Run(ow.all_reduce(AXIS, codec=codec), 2)
    grads = gradients(2)
    updates = run(grads)
    np.testing.assert_allclose(updates["stack"], grads["stack"].mean(0), rtol=1e-6)
    assert run.compressed.residual["stack"] is None
    assert len(np.unique(np.abs(np.asarray(updates["odd"])))) <= 4


def test_codec_nonfinite_drop_matches_numpy():
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, codec=codecs.quantize(4), nonfinite="drop")
  run, reference = Run(tx, 4), Reference(CODECS["4 bits"][1], 4)
  for k in range(3):
    grads = gradients(4, seed=k)
    bad = changed(grads, "bias", k, np.nan)
    weights = np.where(np.arange(4) == k, 0, 1 / 3)
    updates = run(bad)
    expected = jax.tree.map(np.negative, reference(scaled(grads, weights)))
    assert_agrees(run, expected, updates, reference, is_exact=False)
  before = run.compressed
  updates = run(jax.tree.map(lambda g: g * np.float32(np.nan), grads))
  assert bits(run.compressed) == bits(before)
  assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(updates))


def test_codec_nan_or_inf_arrives_and_does_not_stay_in_residual():
  run = Run(ow.all_reduce(AXIS, codec=codecs.quantize(8)), 4)
  grads = gradients(4)
  for value in (np.inf, np.nan):
    updates = run(changed(grads, "odd", (2, 5, 5), value))
    assert np.isnan(np.asarray(updates["odd"])[5, 5])
  assert np.isfinite(np.asarray(updates["stack"])).all()
  for _ in range(2):
    updates = run(grads)
  assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((updates, run.state)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_residual_is_float32_for_bfloat16_and_float16_gradients(dtype):
  params = {"w": np.zeros((40, 36), dtype)}
  codec, round_trip = CODECS["2 bits"]
  run = Run(ow.all_reduce(AXIS, codec=codec, reduction="sum"), 4, params=params)
  owed, owner = np.zeros((4, 40, 36), np.float32), np.zeros((40, 36), np.float32)
  for k in range(3):
    grads = gradients(4, seed=k, shapes={"w": (40, 36)})["w"].astype(dtype)
    result, owed, owner = ref.exchange(grads.astype(np.float32), owed, owner, round_trip)
    updates = run({"w": grads})
    assert updates["w"].dtype == dtype
    np.testing.assert_array_equal(updates["w"], result.astype(dtype))
    assert run.compressed.residual["w"].dtype == jnp.float32
    np.testing.assert_array_equal(run.compressed.residual["w"], owed)


def test_codec_complex_and_none_leaves_are_exact():
  """A complex array, one that is None, and beside them one that is compressed."""
  params = {"c": np.zeros((40, 40), np.complex64), "n": None, "w": np.zeros((40, 40), np.float32)}
  run = Run(ow.all_reduce(AXIS, codec=codecs.signs()), 2, params=params)
  rng = np.random.default_rng(0)
  c = (rng.normal(size=(2, 40, 40)) + 1j * rng.normal(size=(2, 40, 40))).astype(np.complex64)
  updates = run({"c": c, "n": None, "w": np.ones((2, 40, 40), np.float32)})
  np.testing.assert_allclose(updates["c"], c.mean(0), rtol=1e-6)
  assert run.compressed.residual["c"] is None


def test_codec_inside_towers_or_drop_stale_matches_numpy():
  """Three towers on one shard; in the third step another shard is stale."""
  codec = codecs.quantize(4)
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS, codec=codec), 2)
  run, reference = Run(tx, 3), Reference(CODECS["4 bits"][1], 3)
  for k in range(2):
    first, second = (gradients(3, seed=seed) for seed in (k, k + 10))
    before = run.compressed
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(run(first)))
    assert bits(run.compressed) == bits(before)
    updates = run(second)
    means = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    expected = jax.tree.map(np.negative, reference(scaled(means, [1 / 3] * 3)))
    assert_agrees(run, expected, updates, reference, is_exact=False)

  tx = ow.drop_stale(ow.cross_shard(optax.sgd(1.0), AXIS, codec=codec), 1, axis_name=AXIS)
  run = Run(tx, 3, extra_axes={"computed_at": 0})
  reference = Reference(CODECS["4 bits"][1], 3)
  for k, fresh in enumerate(([1, 1, 1], [1, 1, 1], [1, 0, 1])):
    grads = gradients(3, seed=k)
    updates = run(grads, computed_at=np.where(np.array(fresh) == 1, k, k - 2).astype(np.int32))
    expected = reference(scaled(grads, np.array(fresh) / sum(fresh)))
    expected = jax.tree.map(np.negative, expected)
    assert_agrees(run, expected, updates, reference, is_exact=False)


def test_codecs_in_chain_and_partition_have_own_state():
  """One codec for matrices and another for a stack, each link with a state of its own."""
  labels = {"odd": "low", "stack": "bits", "bias": "bits"}
  links = {
    "low": ow.all_reduce(AXIS, codec=ow.contrib.power_sgd(1)),
    "bits": ow.all_reduce(AXIS, codec=codecs.quantize(8)),
  }
  tx = optax.chain(optax.clip(5.0), optax.partition(links, labels), optax.sgd(1.0))
  run = Run(tx, 4)
  grads = gradients(4)
  updates = run(grads)
  clipped = jax.tree.map(lambda g: np.clip(g, -5, 5), grads)
  reference = Reference(CODECS["8 bits"][1], 4)
  expected = reference(scaled(clipped, [0.25] * 4))
  np.testing.assert_allclose(updates["stack"], -expected["stack"], atol=1e-6)
  assert np.linalg.matrix_rank(updates["odd"]) == 1


def test_codec_over_two_mesh_axes_equals_vmap_bit_for_bit():
  """One exchange over all shards of both, in the order of `lax.axis_index`."""
  tx = ow.all_reduce(("a", "b"), codec=codecs.quantize(8))
  state = first_state(tx, PARAMS, 4)
  expected, kept = three_steps_under_vmap()[0]
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  specs = ow.specs(state, workers=("a", "b"), replicated=True)

  def step(grads, state):
    updates, state = tx.update(*jax.tree.map(lambda x: x[0], (grads, state)))
    return updates, jax.tree.map(lambda x: x[None], state)

  sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(("a", "b")), specs), out_specs=(P(), specs))
  updates, state = jax.jit(sharded)(gradients(4, seed=0), state)
  assert all(bits(updates[name]) == bits(expected[name]) for name in ("odd", "stack"))
  assert bits(state) == bits(kept)


@pytest.mark.parametrize("both", [True, False])
def test_codec_sum_over_one_axis_matches_numpy_and_mixed_is_error(both):
  """It is compressed over the others; two kinds of them in one reduction are an error."""
  tx = ow.all_reduce(("a", "b"), codec=codecs.quantize(8))
  shapes = {"v": (40, 36), "w": (40, 36)}
  state, grads = first_state(tx, zeros(shapes), 2), gradients(4, shapes=shapes)
  specs = ow.specs(state, workers="a", replicated=True)
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

  def step(grads, state):
    grads, state = jax.tree.map(lambda x: x[0], (grads, state))
    summed = ("v", "w") if both else ("v",)
    grads |= {name: jax.lax.psum(grads[name], "b") for name in summed}
    return tx.update(grads, state)[0]

  in_specs = P(("a", "b")), specs
  sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=P()))
  if not both:
    with pytest.raises(ValueError, match="must be reduced over the same axes"):
      sharded(grads, state)
    return
  updates, before = sharded(grads, state), np.zeros((2, 40, 36), np.float32)
  for name, update in updates.items():
    summed = grads[name].reshape(2, 2, 40, 36).sum(1)
    expected, *_ = ref.exchange(summed / 4, before, before[0], CODECS["8 bits"][1])
    np.testing.assert_array_equal(update, expected)


def test_codec_checkpoint_resumes_bit_for_bit():
  for codec in (codecs.quantize(4), ow.contrib.power_sgd(2)):
    tx = ow.cross_shard(optax.sgd(0.1, 0.9), AXIS, codec=codecs.compression(codec, after=1))
    run = Run(tx, 4)
    fresh, grads = run.state, [gradients(4, seed=k) for k in range(5)]
    for one in grads[:3]:
      run(one)
    saved = serialization.to_bytes(run.state)
    expected = [run(one) for one in grads[3:]]
    last, run.state = run.state, serialization.from_bytes(fresh, saved)
    assert bits([run(one) for one in grads[3:]]) == bits(expected)
    assert bits(run.state) == bits(last)


def test_custom_codec_conserves_sum_and_wrong_shape_is_error():
  """Two functions; feedback, packing and layouts are there."""
  codec = codecs.Codec(
    encode=lambda x: jnp.clip(jnp.round(x) + 100, 0, 200).astype(jnp.uint8),
    decode=lambda code, n: code.astype(jnp.float32) - 100,
    num_bytes=lambda n: n,
  )
  run = Run(ow.all_reduce(AXIS, codec=codec), 4)
  total, wanted = 0.0, 0.0
  for k in range(5):
    grads = jax.tree.map(lambda g: g / 1000, gradients(4, seed=k))
    total = total + np.asarray(run(grads)["odd"])
    wanted = wanted + grads["odd"].mean(0)
  kept = np.asarray(run.compressed.residual["odd"]).sum(0) + owner_residual(run)["odd"]
  np.testing.assert_allclose(total + kept, wanted, atol=1e-5)
  wrong = codec._replace(num_bytes=lambda n: n + 1)
  with pytest.raises(ValueError, match=r"encode must return uint8\[.*as num_bytes has it"):
    Run(ow.all_reduce(AXIS, codec=wrong), 4)(gradients(4))
  wrong = codec._replace(decode=lambda code, n: codec.decode(code, n)[..., 1:])
  with pytest.raises(ValueError, match=r"decode must return float32\[.*n="):
    Run(ow.all_reduce(AXIS, codec=wrong), 4)(gradients(4))


def test_codec_derivative_equals_that_of_exact_mean():
  tx = ow.all_reduce(AXIS, codec=codecs.quantize(4))
  grads = gradients(3, shapes={"w": (40, 40)})
  state = first_state(tx, zeros({"w": (40, 40)}), 3)
  axes = ow.worker_axes(state, replicated=True)

  factors = np.arange(1600, dtype=np.float32).reshape(40, 40)

  def loss(grads):
    update = jax.vmap(tx.update, (0, axes), (None, axes), axis_name=AXIS)
    return (update(grads, state)[0]["w"] * factors).sum()

  expected = np.broadcast_to(factors / 3, (3, 40, 40))
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(grads)["w"], expected, rtol=1e-5)


# Workers, who exchange differences.


def workers(tx, num_workers, context="vmap", extra_axes=None, shapes=SHAPES):
  """A step of all workers, their parameters at first, and their states."""

  @jax.jit
  def start():
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    return ow.stack_workers((params, tx.init(params)), num_workers)

  params, state = start()
  axes = ow.worker_axes(state)

  def step(params, state, grads, extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  mapped = in_context(context, step, num_workers, (0, axes, 0, extra_axes or {}), (0, axes))
  return mapped, params, state


def flat(round_trip, x):
  return round_trip(x.reshape(-1)).reshape(x.shape)


def test_diloco_codec_with_absent_and_nan_worker_matches_numpy():
  """Of workers of unequal participation, one of which has a NaN in the third round."""
  codec, round_trip = CODECS["2 bits"]
  tx = ow.diloco(
    optax.sgd(0.5),
    AXIS,
    communication_period=2,
    outer_learning_rate=0.5,
    outer_momentum=0.5,
    codec=codec,
  )
  step, params, state = workers(tx, 4, extra_axes={"participation": 0})
  reference = Reference(round_trip, 4)
  c = {name: np.ones(shape) for name, shape in SHAPES.items()}
  m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
  weights = ([1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 2.0, 1.0])
  for k, participation in enumerate(weights):
    x = {name: np.repeat(value[None], 4, 0) for name, value in c.items()}
    for i in range(2):
      grads = gradients(4, seed=2 * k + i)
      if (k, i) == (2, 1):
        grads = changed(grads, "bias", 1, np.nan)
      present = {"participation": np.array(participation, np.float32)}
      params, state = step(params, state, grads, present)
      x = {name: x[name] - 0.5 * grads[name].astype(np.float64) for name in x}
    if k == 2:
      participation = [1.0, 0.0, 1.0, 1.0]  # who is not finite is absent
    w = np.array(participation) / sum(participation)
    d = {name: np.asarray(c[name] - x[name], np.float32) for name in c}
    sent = scaled({name: np.nan_to_num(value) for name, value in d.items()}, w)
    mean = reference(sent) | {"bias": sent["bias"].sum(0)}
    for name in c:
      m[name] = mean[name] + 0.5 * m[name]
      c[name] = c[name] - 0.5 * (mean[name] + 0.5 * m[name])
      np.testing.assert_allclose(state.center[name], c[name], rtol=1e-4, atol=1e-2, err_msg=name)
      np.testing.assert_allclose(np.asarray(params[name])[3], c[name], rtol=1e-4, atol=1e-2)
  before = state
  for _ in range(2):
    params, state = step(params, state, grads, {"participation": np.zeros(4, np.float32)})
  assert bits(state.compressed) == bits(before.compressed)
  assert bits(state.center) == bits(before.center)


@pytest.mark.parametrize(
  ("context", "name"), [("shard_map", "low rank"), ("sharded_vmap", "8 bits")]
)
def test_diloco_codec_fragments_with_delay_match_vmap(context, name):
  """In fragments that are sent one step before they arrive, each with a state of its own."""
  tx = ow.diloco(
    optax.sgd(0.1), AXIS, communication_period=3, fragments=2, delay=1, codec=MANY[name]
  )
  found = []
  for one in (context, "vmap"):
    step, params, state = workers(tx, 3, one)
    for k in range(7):
      params, state = step(params, state, gradients(3, seed=k), {})
    found.append((params, state.center, state.compressed))
  assert len(state.compressed) == 2
  assert_close(*found, rtol=1e-4, atol=1e-3)


# Errors.


def summed_by_autodiff(invariant):
  tx = ow.all_reduce(AXIS, codec=codecs.quantize(8), invariant=invariant)
  params = {"w": np.ones((40, 40), np.float32)}
  state = jax.jit(tx.init)(params)

  def step(params, x):
    grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    return tx.update(grads, state, params)[0]

  sharded = jax.shard_map(step, mesh=mesh_of(2), in_specs=(P(), P(AXIS)), out_specs=P())
  return jax.jit(sharded)(params, np.ones((4, 40), np.float32))


def test_codec_of_summed_gradient_is_error_unless_reduced():
  with pytest.raises(ValueError, match=r"sent in full before it could be compressed.*per_shard"):
    summed_by_autodiff("summed")
  assert np.isfinite(np.asarray(summed_by_autodiff("reduced")["w"])).all()


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (
      lambda: ow.all_reduce(codec=codecs.quantize),
      TypeError,
      r"codec must be .* Call it: quantize\(...\)",
    ),
    (lambda: ow.all_reduce(codec="int8"), TypeError, "codec must be a Codec"),
    (lambda: codecs.compression("int8"), TypeError, "codec must be a Codec"),
    (lambda: codecs.compression(TOP, feedback=1), TypeError, "feedback must be a bool"),
    (lambda: codecs.compression(TOP, after=-1), ValueError, "after must be"),
    (lambda: codecs.compression(TOP, feedback=False, decay=0.5), ValueError, "keeps none"),
    (
      lambda: codecs.compression(ow.contrib.majority_vote()),
      ValueError,
      "majority_vote.* pass feedback=False",
    ),
    (
      lambda: ow.all_reduce(codec=codecs.signs(), axis_index_groups=[[0, 1], [2, 3]]),
      ValueError,
      "axis_index_groups cannot be used with codec",
    ),
    (
      lambda: codecs.compression(codecs.signs(), decay=2.0),
      ValueError,
      "compression: decay must be",
    ),
    (
      lambda: ow.local_steps(optax.sgd(1.0), AXIS, codec=codecs.quantize(8)),
      ValueError,
      "codec needs an outer optimizer",
    ),
    (
      lambda: ow.diloco(optax.sgd(1.0), AXIS, codec=codecs.quantize(8), shard_center=True),
      ValueError,
      "only one of these can be used",
    ),
  ],
)
def test_codec_errors_arguments_of_wrappers_and_compression(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_codec_state_not_stacked_is_error():
  tx = ow.all_reduce(AXIS, codec=codecs.quantize(8))
  state = jax.jit(tx.init)(PARAMS)
  update = jax.vmap(tx.update, (0, None), axis_name=AXIS)
  with pytest.raises(ValueError, match=r"owner_residual must be 1/4.*Divide it: stack_workers"):
    jax.eval_shape(update, gradients(4), state)


def test_codec_updates_of_other_structure_is_error():
  tx = ow.all_reduce(AXIS, codec=codecs.quantize(8))
  with pytest.raises(ValueError, match="parameters of another structure than the updates have"):
    Run(tx, 2)(gradients(2) | {"odd": None})


WITHOUT_FEEDBACK = codecs.compression(codecs.quantize(8), feedback=False)


@pytest.mark.parametrize(
  ("first", "then"),
  [
    ({"codec": codecs.quantize(8)}, {"codec": WITHOUT_FEEDBACK}),
    ({"codec": WITHOUT_FEEDBACK}, {"codec": codecs.quantize(8)}),
    ({"codec": codecs.quantize(8)}, {"codec": TOP}),
    ({"codec": TOP}, {"codec": codecs.quantize(8)}),
    ({"codec": codecs.quantize(8)}, {"codec": ow.contrib.power_sgd(2)}),
    ({"codec": ow.contrib.power_sgd(2)}, {"codec": ow.contrib.power_sgd(4)}),
    ({"codec": codecs.random_k(0.1)}, {"codec": ow.contrib.power_sgd(2)}),
    ({"codec": TOP}, {"codec": codecs.compression(TOP, only=False)}),
    ({"codec": TOP}, {"codec": codecs.compression(TOP, after=5)}),
    ({"codec": TOP}, {}),
  ],
)
def test_codec_state_of_other_codec_or_options_is_error(first, then):
  tx, other = (ow.all_reduce(AXIS, **options) for options in (first, then))
  state = jax.eval_shape(lambda: first_state(tx, PARAMS, 2))
  update = jax.vmap(other.update, (0, ow.worker_axes(state, replicated=True)), axis_name=AXIS)
  with pytest.raises(
    ValueError, match=r"the state (was made for another codec|has the residual of a codec)"
  ):
    jax.eval_shape(update, gradients(2), state)


def test_custom_linear_codec_wrong_reduce_is_error():
  right = codecs.random_k(0.1)
  for reduce in (
    lambda total, leaves, memory: (leaves, leaves),
    lambda total, leaves, memory: (leaves[1:], leaves, memory),
    lambda total, leaves, memory: ([x.ravel() for x in leaves], leaves, memory),
  ):
    with pytest.raises(ValueError, match="reduce must return the sums and this shard's parts"):
      Run(ow.all_reduce(AXIS, codec=right._replace(reduce=reduce)), 2)(gradients(2))


def test_codec_warns_signs_without_feedback_and_top_k_in_diloco():
  with pytest.warns(UserWarning, match=r"signs.* loses what it does not send"):
    ow.all_reduce(codec=codecs.compression(codecs.signs(), feedback=False))
  with pytest.warns(UserWarning, match="under an outer momentum of 0.9 does worse"):
    ow.diloco(optax.sgd(1.0), AXIS, codec=codecs.top_k(0.1))


def test_codec_state_of_run_without_codec_is_error():
  plain = ow.cross_shard(optax.sgd(0.1), AXIS).init(np.zeros((32, 32), np.float32))
  coded = ow.cross_shard(optax.sgd(0.1), AXIS, codec=codecs.quantize(8))
  with pytest.raises(
    TypeError, match=r"cross_shard: state\.compressed must be a CompressedState, got None"
  ):
    jax.vmap(lambda g: coded.update(g, plain)[0], axis_name=AXIS)(np.ones((2, 32, 32), np.float32))


@pytest.mark.parametrize("invariant", ["summed", "reduced"])
def test_sharded_mean_over_two_axes_same_with_and_without_codec(invariant):
  """Sharded over one axis and reduced over the other, as in HSDP: 2 x 4 shards, of which each four
  have summed their gradient already. Whole numbers, which the codec sends exactly."""
  grads = (np.arange(2 * 4 * 32 * 32).reshape(2, 4, 32, 32) % 7 * 8).astype(np.float32)
  options = {"sharded": P("fsdp"), "invariant": invariant}

  def updates(codec):
    tx = ow.all_reduce(("data", "fsdp"), codec=codec, **options)
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="fsdp")
    return jax.jit(jax.vmap(step, axis_name="data"))(grads)

  expected = np.broadcast_to(grads.sum(0) / 8, grads.shape)
  for codec in (None, codecs.quantize(8)):
    np.testing.assert_allclose(updates(codec), expected, rtol=1e-6)


def test_codec_warning_names_file_of_caller():
  with pytest.warns(UserWarning, match="under an outer momentum") as found:
    ow.diloco(optax.sgd(0.1), AXIS, codec=codecs.top_k(0.1))
  assert found[0].filename == __file__
