"""Stacks of layers that are cut into fragments, against NumPy and against layers of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from fragments_cases import LAYERS, W, run
from helpers import AXIS, assert_close, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers.exchange import AlongAxis, blocks, stripes


def test_blocks_and_stripes_number_layers():
  assert blocks(4, 2).tolist() == [0, 0, 1, 1]
  assert stripes(4, 2).tolist() == [0, 1, 0, 1]
  assert blocks(5, 3).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", ["vmap", "shard_map"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("numbers", [stripes(LAYERS, 2), blocks(LAYERS, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_fragments_of_layers_match_maxtext_streaming_diloco(numbers, axis, delay, context):
  """Its fragment 0 is what is no layer, its 1 and 2 have two layers each; rates and rounds its own.

  Its fragment f is exchanged where `step % period == f * period / 3`: its 0 is number 2 here.
  """
  rng = np.random.default_rng(3)
  start = {"rest": rng.normal(size=3), "stack": rng.normal(size=(LAYERS, 2))}
  size = 3 + LAYERS * 2
  columns = 3 + np.arange(LAYERS * 2).reshape(LAYERS, 2)
  parts = [columns[numbers == k].ravel() for k in range(2)] + [np.arange(3)]
  targets = rng.normal(size=(24, W, size))
  options = {"period": 6, "eta": 0.3, "mu": 0.9, "alpha": 0.5 * (delay > 0), "delay": delay}
  flat = np.concatenate([start["rest"], start["stack"].ravel()])
  expected_x, expected_c = ref.streaming_diloco_early(
    flat,
    lambda t, x: x - targets[t],
    24,
    ref.AdamW(1e-2),
    num_workers=W,
    fragments=parts,
    **options,
  )

  def tree_of(rows):
    stack = rows[..., 3:].reshape(*rows.shape[:-1], LAYERS, 2)
    return {"rest": rows[..., :3], "stack": np.moveaxis(stack, -2, -2 + axis) if axis else stack}

  tx = ow.diloco(
    optax.adamw(1e-2),
    AXIS,
    communication_period=6,
    outer_learning_rate=0.3,
    fragments={"rest": 2, "stack": AlongAxis(numbers, axis) if axis else numbers},
    delay=delay,
    pull=1 - options["alpha"],
  )

  def update(target, state, params):
    return tx.update(jax.tree.map(jnp.subtract, params, target), state, params)

  first = jax.tree.map(np.float32, tree_of(flat))
  given = [jax.tree.map(np.float32, tree_of(rows)) for rows in targets]
  found, state = run(tx, first, given, context, update)
  for x, rows in zip(found, expected_x, strict=True):
    assert_close(x, tree_of(rows), rtol=3e-5, atol=1e-6)
  assert_close(ow.center_params(state), tree_of(expected_c[-1]), rtol=3e-5, atol=1e-6)


def test_fragments_of_stack_alike_in_local_round_and_by_caller():
  numbers, rng = np.array([0, 1, 2, 1]), np.random.default_rng(7)
  start, grads = np.float32(rng.normal(size=(4, 2))), np.float32(rng.normal(size=(W, 6, 4, 2)))
  options = {"communication_period": 6, "fragments": numbers, "delay": 1}
  tx = ow.diloco(optax.sgd(0.1), AXIS, pull=0.5, **options)
  by_counter, _ = run(tx, start, np.moveaxis(grads, 1, 0))

  def step(params, state, g):
    updates, state = tx.update(g, state, params, exchange=False)
    return optax.apply_updates(params, updates), state

  train = jax.jit(ow.map_workers(ow.local_round(step, tx), AXIS))
  stacked = jax.jit(lambda start: ow.stack_workers((start, tx.init(start)), W))(start)
  params, state = jax.device_get(train(*stacked, grads))
  # What `update` sends in the last step is sent when the next round begins.
  for i in (0, 1, 3):
    assert_close(params[:, i], by_counter[-1][:, i])
  assert state.center.shape == (4, 2)
  alone = jax.jit(ow.map_workers(lambda s, p: tx.update(None, s, p, exchange=[2]), AXIS))
  _, after = alone(state, params)
  moved = np.abs(np.asarray(after.center) - state.center).max(axis=1) > 0
  assert moved.tolist() == [False, False, True, False]


def test_fragments_center_in_outer_state_is_separate():
  numbers = stripes(LAYERS, 2)
  outer = ow.local_steps(optax.sgd(1.0), None, communication_period=3, outer=optax.sgd(0.5))
  options = {"communication_period": 2, "outer": outer}
  start = np.arange(8, dtype=np.float32).reshape(4, 2)
  grads = np.arange(64, dtype=np.float32).reshape(4, W, 4, 2)
  tx = ow.local_steps(optax.sgd(0.1), AXIS, fragments=numbers, **options)
  _, state = run(tx, start, grads)
  apart = ow.local_steps(optax.sgd(0.1), AXIS, fragments=numbers.tolist(), **options)
  _, wanted = run(apart, list(start), [list(np.moveaxis(g, 1, 0)) for g in grads])
  assert_close(state.center, np.stack(wanted.center))
  metrics = jax.jit(ow.map_workers(ow.metrics, AXIS))
  found = metrics(state, np.stack([start] * W))
  assert_close(found["exchanges_2"], np.full(W, 0.0))
  assert "center_distance_2" not in found  # it is of a part


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Doubling(ow.exchange.Rule):
  """Doubles updates, in float32, and exchanges nothing."""

  def pull(self, updates, params, kept):
    return jax.tree.map(lambda u: 2 * u.astype(jnp.float32), updates)

  def send(self, moved, params, kept, workers):
    return kept, ()

  def merge(self, moved, params, sent, kept, workers):
    return moved, kept


def test_fragments_rule_pull_may_change_dtype_of_updates():
  for fragments in (1, stripes(LAYERS, 2)):
    tx = ow.exchange.periodic_exchange(optax.sgd(1.0), None, Doubling(), fragments=fragments)
    params = jnp.zeros((LAYERS, 2), jnp.bfloat16)
    updates, _ = tx.update(params + 1, tx.init(params), params)
    assert_close(updates.astype(jnp.float32), np.full((LAYERS, 2), -2.0))


def test_fragments_of_nnx_model_are_named_in_dict():
  from flax import nnx

  model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
  fragments = {"kernel": stripes(4, 2), "bias": 1}
  tx = ow.diloco(optax.sgd(0.1), None, communication_period=2, fragments=fragments)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
  moved = model.kernel[...] - ow.center_params(optimizer.opt_state)["kernel"][...]
  # Fragment 0 has been exchanged after one of two steps: it is at the center.
  assert (np.asarray(moved) != 0).all(1).tolist() == [False, True, False, True]


def test_fragments_integers_in_stack_are_in_center():
  numbers = stripes(LAYERS, 2)
  params = {"ids": jnp.arange(LAYERS), "x": jnp.ones((LAYERS, 2))}
  tx = ow.local_steps(
    optax.sgd(0.1), AXIS, communication_period=2, outer=optax.sgd(1.0), fragments=numbers
  )
  state = tx.init(params)
  assert_close(state.center, params)


def test_fragments_center_in_inner_state_has_axis_of_workers():
  """Lookahead in every worker: the stacked center has the axis of workers first."""
  numbers, rng = np.array([0, 1, 0]), np.random.default_rng(8)
  inner = ow.diloco(optax.sgd(0.1), None, communication_period=2, fragments=numbers)
  tx = ow.local_steps(inner, AXIS, communication_period=100)
  start, grads = np.float32(rng.normal(size=(3, 2))), np.float32(rng.normal(size=(4, W, 3, 2)))
  _, state = run(tx, start, grads)
  found = np.asarray(ow.center_params(state))

  @jax.jit
  def step(one, alone, g):
    updates, alone = inner.update(g, alone, one)
    return optax.apply_updates(one, updates), alone

  for i in range(W):
    one, alone = start, inner.init(start)
    for g in grads[:, i]:
      one, alone = step(one, alone, g)
    assert_close(found[i], alone.center)


def test_fragments_state_specs_of_stack_and_other_cut_is_error():
  params = {"stack": jnp.zeros((LAYERS, 8, 2)), "rest": jnp.zeros(3)}
  fragments = {"stack": stripes(LAYERS, 2), "rest": 1}
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=2, fragments=fragments)
  state = jax.eval_shape(lambda: ow.stack_workers(tx.init(params), W))
  assert [x.kept[0].center["stack"].shape for x in (state,)] == [(2, 8, 2)]
  specs = ow.specs(state, workers=AXIS, params={"stack": P(None, "fsdp"), "rest": P()})
  assert specs.kept[1].center["stack"] == specs.center["stack"] == P(None, "fsdp")
  assert jax.eval_shape(tx.init, params).center["stack"].shape == (LAYERS, 8, 2)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  jax.eval_shape(tx.init, shapes)
  other = ow.diloco(
    optax.sgd(0.1),
    AXIS,
    communication_period=2,
    fragments=fragments | {"stack": blocks(LAYERS, 2)},
  )
  stacked = ow.stack_workers((params, params, tx.init(params)), W)
  update = ow.map_workers(lambda g, p, s: other.update(g, s, p), AXIS)
  with pytest.raises(ValueError, match="the state was made for"):
    update(*stacked)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_fragments_of_sharded_stack_send_only_their_part(kind):
  """Two pods of four devices: each sends its part of two layers to the same device of the other."""
  if kind is AxisType.Explicit and jax.__version_info__ < (0, 11, 2):
    pytest.skip("JAX before 0.11.2 gathers these, with a warning that test_map_workers.py asks for")
  mesh = jax.make_mesh((2, 4), ("pod", "fsdp"), axis_types=(kind,) * 2)
  tx = ow.local_steps(optax.sgd(0.1), "pod", communication_period=2, fragments=stripes(4, 2))
  tx = ow.stacked_workers(tx, "pod", 2, mesh=mesh)
  params = np.ones((2, LAYERS, 16, 8), np.float32)
  params = jax.device_put(params, NamedSharding(mesh, P("pod", None, "fsdp")))
  step = jax.jit(lambda g, s, p: tx.update(g, s, p))
  found = ow.inspect.compiled_collectives(step.lower(params, tx.init(params), params).compile())
  across = [x for x in found if x.groups == ((0, 4), (1, 5), (2, 6), (3, 7))]
  assert {x.kind for x in found} == {"all-reduce"} and all(x.conditional for x in found)
  # Two layers of 16 x 8 in float32, a fourth of each, and the weight.
  assert [x.num_bytes for x in across] == [2 * 16 * 8 // 4 * 4 + 4] * 2
  assert max(x.num_bytes for x in found if x not in across) == 1  # whether it is finite


@pytest.mark.parametrize(
  ("fragments", "said"),
  [
    (np.array([0, 1, 1]), r"every entry of stack \[4, 2\] along its axis 0; got \[3\] numbers"),
    (AlongAxis([0, 1], axis=-3), "along its axis -3"),
    (np.zeros((4, 2), int), r"got \[4, 2\] numbers"),
    (np.array([0, 2, 0, 2]), "every number used"),
    (np.array([0, -1, 0, 1]), "fragments must be at least 0, got -1"),
    (np.array([0.0, 1.0, 0.0, 1.0]), "fragments must be a Python int, got 0.0"),
    (np.array([0, 1, 2, 3]), "at most communication_period"),
  ],
)
def test_fragments_errors_numbers_of_stack(fragments, said):
  with pytest.raises((ValueError, TypeError), match=said):
    ow.diloco(optax.sgd(0.1), AXIS, communication_period=3, fragments={"stack": fragments}).init(
      {"stack": jnp.zeros((4, 2))}
    )


def test_fragments_of_stack_with_shard_center_is_error():
  with pytest.raises(ValueError, match="with shard_center fragments must hold whole variables"):
    ow.diloco(optax.sgd(0.1), AXIS, fragments=stripes(4, 2), shard_center=True)


@pytest.mark.parametrize(
  ("shard_center", "num_at_once", "num_fragmented"), [(False, 1, 4), (True, 4 + 1, 4 + 4)]
)
def test_fragments_send_same_bytes_as_one_exchange(shard_center, num_at_once, num_fragmented):
  def sent(fragments):
    tx = ow.elastic_average(
      optax.sgd(0.1), AXIS, communication_period=16, fragments=fragments, shard_center=shard_center
    )
    params = [jnp.zeros(64)] * 4
    state = ow.stack_workers(tx.init(params), 8)
    axes = ow.worker_axes(state)
    mapped = jax.vmap(tx.update, (0, axes, 0), (0, axes), axis_name=AXIS, spmd_axis_name=AXIS)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    specs = (P(AXIS), ow.specs(state, workers=AXIS), P(AXIS))
    layout = jax.tree.map(lambda spec: NamedSharding(mesh_of(8), spec), specs, is_leaf=is_spec)
    params = ow.stack_workers(params, 8)
    step = jax.jit(mapped, in_shardings=layout, out_shardings=layout[:2])
    found = ow.inspect.compiled_collectives(step.lower(params, state, params).compile())
    assert all(c.conditional for c in found)
    return len(found), sum(c.num_bytes for c in found)

  once, parts = sent(1), sent(16)
  assert (once[0], parts[0]) == (num_at_once, num_fragmented)
  assert parts[1] == once[1]


def test_fragments_leave_out_integers_that_center_holds():
  tx = ow.local_steps(optax.sgd(0.1), None, outer=optax.sgd(0.7, momentum=0.9), fragments=2)
  params = {"a": jnp.ones(3), "b": jnp.ones(3), "count": jnp.int32(7)}
  state = tx.init(params)
  assert (len(state.kept), len(state.outer_state)) == (3, 2)
  assert jax.tree.map(int, state.center["count"]) == 7
  assert_close(ow.center_params(state), params)


def test_fragments_numbered_from_round_end_match_maxtext():
  """Its fragment f is exchanged where `step % period == f * period / F`: its fragment 0 is last
  here."""
  period, num_fragments, rng = 6, 2, np.random.default_rng(4)
  theirs = {"rest": 0, "layers": 1}
  start = {name: rng.normal(size=3) for name in theirs}
  grads = {name: rng.normal(size=(13, 2, 3)) for name in theirs}
  ours = {name: (f - 1) % num_fragments for name, f in theirs.items()}
  tx = ow.diloco(
    optax.sgd(0.1), AXIS, communication_period=period, outer_learning_rate=0.3, fragments=ours
  )
  first = jax.tree.map(jnp.float32, start)
  params, state = ow.stack_workers((first, tx.init(first)), 2)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  x = {name: np.repeat(p[None], 2, 0) for name, p in start.items()}
  c, v = dict(start), dict.fromkeys(start, 0.0)
  for t in range(13):
    given = {name: jnp.float32(g[t]) for name, g in grads.items()}
    updates, state = update(given, state, params)
    params = optax.apply_updates(params, updates)
    for name, f in theirs.items():
      x[name] = x[name] - 0.1 * grads[name][t]
      if (t + 1) % period == f * period // num_fragments:
        pseudo = (c[name] - x[name]).mean(0)
        v[name] = 0.9 * v[name] + pseudo
        c[name] = c[name] - 0.3 * (pseudo + 0.9 * v[name])
        x[name] = np.repeat(c[name][None], 2, 0)
      assert_close(params[name], x[name], rtol=1e-4, atol=1e-5)
