"""resize_workers against NumPy on the rows, and against runs that never had other workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
  AXIS,
  WRAPPERS,
  as_numpy,
  assert_close,
  bits,
  mesh_of,
  random_tree,
  start_of_workers,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from resize_cases import ADAM, W, optimizer, run, trained, tree_of

import optax_wrappers as ow
from optax_wrappers._workers import _center

pytestmark = pytest.mark.optax_promotes  # Adam does


KEEP = [3, 0]


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_resize_keep_all_is_identity_and_fewer_takes_rows(name):
  wrapped = WRAPPERS[name]
  tx = wrapped.make(ADAM(), AXIS)
  params = random_tree(np.random.default_rng(0))
  replicated = not wrapped.owned
  state = ow.stack_workers(tx.init(params), W, replicated=replicated)
  axes = ow.worker_axes(state, replicated=replicated)
  # Unequal rows, so that a wrong one is seen.
  state = jax.tree.map(
    lambda axis, part: (
      part
      if axis is None
      else jax.tree.map(
        lambda x: x + jnp.arange(W).astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1)), part
      )
    ),
    axes,
    state,
    is_leaf=lambda x: x is None,
  )
  if isinstance(state, ow.states.GatherTowersState):  # what it has gathered is handed on, see below
    nothing = jax.tree.map(jnp.zeros_like, (state.accumulated, state.total_weight))
    state = state.replace(accumulated=nothing[0], total_weight=nothing[1])
  if not jax.tree.leaves(axes):
    with pytest.raises(ValueError, match="state has no leaf with a workers' axis"):
      ow.resize_workers(state, range(W), replicated=replicated)
    return
  resize = functools.partial(ow.resize_workers, replicated=replicated)
  same = resize(state, range(W))
  assert jax.tree.structure(same) == jax.tree.structure(state)
  assert bits(same) == bits(state)
  fewer = resize(state, KEEP)
  expected = jax.tree.map(
    lambda axis, part: part if axis is None else jax.tree.map(lambda x: np.asarray(x)[KEEP], part),
    axes,
    state,
    is_leaf=lambda x: x is None,
  )
  assert bits(fewer) == bits(expected)


def test_resize_names_with_slash_keep_parameters_apart():
  params = {"a/b": jnp.arange(5.0), "a": {"b": jnp.arange(6.0).reshape(3, 2)}}
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=2, shard_center=True)
  stacked = ow.stack_workers(params, 3)
  state = ow.stack_workers(tx.init(params), 3)
  zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), np.float32), stacked)
  _, state = run(tx, stacked, state, zeros)
  _, state = ow.resize_workers((stacked, state), [0, 2], 1, params=params)
  assert_close(ow.center_params(state, params), params)

  specs = {"a/b": PartitionSpec("data"), "a": {"b": PartitionSpec(None, "model")}}
  whole = ow.diloco(optax.sgd(0.1), AXIS, communication_period=2).init(params)
  assert ow.specs(ow.stack_workers(whole, 3), workers=AXIS, params=specs).center == specs


def test_resize_newcomer_mean_index_or_tree_is_start():
  tx = optimizer("diloco")
  params, state = trained(tx)
  held = as_numpy((params, state.inner_state[0].mu))
  by = functools.partial(ow.resize_workers, (params, state), KEEP, 2)

  def parts(newcomer):
    params, state = by(newcomer=newcomer)
    return params, state.inner_state[0].mu

  def with_rows(*rows):
    return jax.tree.map(lambda x, *new: np.concatenate([x[KEEP], *new]), held, *rows)

  mean = jax.tree.map(lambda x: x[KEEP].mean(0, keepdims=True), held)
  assert_close(parts("mean"), with_rows(mean, mean))
  one = jax.tree.map(lambda x: x[1:2], held)  # who may have left
  assert_close(parts(1), with_rows(one, one))
  center = ow.center_params(state)
  start = jax.tree.map(
    lambda x: np.asarray(x)[None], (center, jax.tree.map(jnp.zeros_like, center))
  )
  assert_close(parts((center, tx.init(center))), with_rows(start, start))
  for newcomer in ("mean", 1, (center, tx.init(center))):
    _, resized = by(newcomer=newcomer)
    assert bits((resized.center, resized.outer_state, resized.step)) == bits(
      (state.center, state.outer_state, state.step)
    )


def test_resize_newcomer_mean_takes_integers_of_first_kept():
  tree = {"count": jnp.array([5, 6, 7]), "is_on": jnp.array([True, False, True])}
  resized = ow.resize_workers(tree, [1, 2], 1)
  assert resized["count"].tolist() == [6, 7, 6]
  assert resized["is_on"].tolist() == [False, True, False]
  narrow = ow.resize_workers(jnp.array([1, 2, 4], jnp.bfloat16), [0, 2], 1)
  assert (narrow.dtype, narrow.tolist()) == (jnp.bfloat16, [1, 4, 2.5])


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("newcomer", ["mean", 1])
def test_resize_prng_keys_are_unique_and_not_reused(is_raw, newcomer):
  keys = jax.random.split(jax.random.key(0), 3)
  tree = {"rng_key": jax.random.key_data(keys) if is_raw else keys}

  def data(tree):
    return np.asarray(tree["rng_key"] if is_raw else jax.random.key_data(tree["rng_key"])).tolist()

  seen = data(tree)
  for _ in range(3):  # the same again: no worker gets a key that was used before
    tree = ow.resize_workers(tree, [0, 1, 2], 2, newcomer)
    rows = data(tree)
    owner = 0 if newcomer == "mean" else newcomer
    fresh = [rows[owner], *rows[3:]]
    assert all(row not in seen for row in fresh)
    assert len({tuple(row) for row in rows}) == 5
    assert [row for i, row in enumerate(rows[:3]) if i != owner] == [
      row for i, row in enumerate(seen[-3:]) if i != owner
    ]
    tree = {"rng_key": tree["rng_key"][:3]}
    seen = [*seen, *fresh, *data(tree)]
  # A pair of numbers is no key unless it is called one.
  pair = ow.resize_workers({"pair": jnp.ones((3, 2), jnp.uint32)}, [0, 1, 2], 1)
  assert pair["pair"].tolist() == [[1, 1]] * 4


def test_resize_prng_key_of_newcomer_is_split():
  keys = jax.random.split(jax.random.key(0), 3)
  found = ow.resize_workers({"key": keys}, [0, 2], 2, {"key": jax.random.key(9)})["key"]
  rows = jax.random.key_data(found).tolist()
  assert rows[:2] == jax.random.key_data(keys[jnp.array([0, 2])]).tolist()
  assert len({tuple(row) for row in rows}) == 4
  # No worker has to stay.
  found = ow.resize_workers({"key": keys}, [], 2, {"key": jax.random.key(9)})["key"]
  assert len({tuple(row) for row in jax.random.key_data(found).tolist()}) == 2


CODECS = {
  "quantize": ow.codecs.quantize(bits=4),
  "top_k": ow.codecs.top_k(0.1),
  "power_sgd": ow.contrib.power_sgd(rank=1),
}


@functools.cache
def shards_of(codec):
  """The optimizer of shards, and its compiled step."""
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, codec=CODECS[codec])

  def step(gradient, state):
    axes = ow.worker_axes(state, replicated=True)
    return jax.vmap(tx.update, (0, axes), (0, axes), axis_name=AXIS)(gradient, state)

  return tx, jax.jit(step)


def owed(state, like):
  """What has not been sent yet, the sum over shards, in units of the result."""
  kept = state.compressed
  own = jax.tree.map(lambda e: np.asarray(e, np.float64).sum(0), kept.residual)
  if kept.owner_residual is None:
    return own
  shapes = jax.tree.map(
    lambda x, e: None if e is None else x, like, own, is_leaf=lambda x: x is None
  )
  return jax.tree.map(np.add, own, _center.join(shapes, kept.owner_residual))


@pytest.mark.parametrize(
  "codec, keep, num_new",
  [
    ("quantize", [0, 2, 3], 0),
    ("quantize", [1, 2], 0),
    ("quantize", [0, 1, 2, 3], 3),
    ("quantize", [], 3),
    ("top_k", [2], 4),
    ("power_sgd", [1, 0], 1),
  ],
)
def test_resize_keeps_codec_residual_of_lost_shard(codec, keep, num_new):
  # 37 rows: of 2, 3, 4, 5 and 7 shards some places are left over, other ones each time.
  like = {"kernel": np.zeros((37, 33), np.float32), "bias": np.zeros(5, np.float32)}
  tx, step = shards_of(codec)
  rng = np.random.default_rng(4)

  def steps(state, gradients):
    sent = 0.0
    for gradient in gradients:
      updates, state = step(gradient, state)
      sent = np.asarray(updates["kernel"], np.float64)[0] + sent
    return sent, state

  def gradients(num_steps, num_shards):
    return [
      jax.tree.map(lambda x: np.float32(rng.normal(size=(num_shards, *x.shape))), like)
      for _ in range(num_steps)
    ]

  _, state = start_of_workers(tx, like, W, replicated=True)
  _, state = steps(state, gradients(3, W))
  before = owed(state, like)["kernel"]
  assert np.abs(before).max() > 0.01
  assert bits(ow.resize_workers(state, range(W), replicated=True)) == bits(state)
  size = len(keep) + num_new
  resize = jax.jit(lambda x: ow.resize_workers(x, keep, num_new, newcomer=0, replicated=True))
  state = resize(state)
  np.testing.assert_allclose(owed(state, like)["kernel"], before, atol=1e-5)
  more = gradients(3, size)
  sent, state = steps(state, more)
  # All that is given now and was owed then has arrived, or is still owed.
  given = sum(np.asarray(g["kernel"], np.float64).mean(0) for g in more)
  np.testing.assert_allclose(-sent + owed(state, like)["kernel"], given + before, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_resize_on_mesh_host_and_jit_equal(kind):
  tx = optimizer("diloco", shard_center=True)
  params, state = trained(tx)
  like = tree_of(np.random.default_rng(0))
  expected = ow.resize_workers((params, state), KEEP, 1, params=like)
  on_host = jax.tree.map(np.asarray, (params, state))
  assert bits(ow.resize_workers(on_host, KEEP, 1, params=like)) == bits(expected)
  mesh = mesh_of(W, kind)
  specs = ow.specs((params, state), workers=AXIS)
  placed = jax.tree.map(
    lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), on_host, specs
  )
  assert_close(as_numpy(ow.resize_workers(placed, KEEP, 1, params=like)), as_numpy(expected))
  resize = jax.jit(lambda tree: ow.resize_workers(tree, KEEP, 1, params=like))
  assert_close(resize((params, state)), expected)


def test_resize_nested_shard_center_takes_rows_of_pods():
  # Each pod has a divided center of its own, which is a worker's own state seen from outside.
  tx = ow.diloco(ow.elastic_average(optax.sgd(0.1), "chip", shard_center=True), "pod")
  state = ow.stack_workers(ow.stack_workers(tx.init(jnp.zeros(6)), 2), 3)
  fewer = ow.resize_workers(state, [0, 2])
  assert fewer.inner_state.center_share.shape == (2, *state.inner_state.center_share.shape[1:])


@pytest.mark.parametrize(
  "arguments, message",
  [
    (([0, 4],), r"keep must name workers of range\(4\)"),
    (([0, 0],), "keep must name workers"),
    (([],), "leaves no workers"),
    (([], 1), 'newcomer="mean" is the mean of the remaining workers'),
    (([0], 1, 4), "newcomer must be below 4, got 4"),
    (([0], -1), "num_new must be at least 0"),
    (([0], 1, jnp.zeros((W, 2))), r"not stacked: it must be \[2\], got \[4, 2\]"),
  ],
)
def test_resize_errors_keep_num_new_and_newcomer(arguments, message):
  with pytest.raises(ValueError, match=f"resize_workers: .*{message}"):
    ow.resize_workers(jnp.zeros((W, 2)), *arguments)


def test_resize_errors_unstacked_state_types_and_params():
  with pytest.raises(ValueError, match=r"state must be stacked.* a \[4\] and b \[\]"):
    ow.resize_workers({"a": jnp.zeros(4), "b": jnp.zeros(())}, [0])
  for wrong, message in [("center", "newcomer must be"), (True, "newcomer must be")]:
    with pytest.raises(TypeError, match=message):
      ow.resize_workers({"a": jnp.zeros(4)}, [0], 1, wrong)
  with pytest.raises(TypeError, match="keep must be a sequence"):
    ow.resize_workers(jnp.zeros(4), 2)
  tx = optimizer("diloco", shard_center=True)
  params, state = trained(tx)
  with pytest.raises(ValueError, match=r"params is needed.*kept/0/center"):
    ow.resize_workers(state, KEEP)
  with pytest.raises(ValueError, match="must be shares of a variable of params"):
    ow.resize_workers(state, KEEP, params=jax.tree.map(lambda x: x[..., None], params))


# What a leaving shard holds for all, and where a newcomer's counts come from.


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 2.0, 4.0]])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("keep", [[0, 1], [2], [0, 1, 2, 3]])
def test_resize_within_accumulation_loses_no_gradient(keep, reduction, weights):
  """Two of three calls on four shards, the last, of zeros, on others: their mean or sum counts."""
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(-1.0), AXIS, reduction=reduction), 3)
  params = jnp.zeros(2)
  state = ow.stack_workers(tx.init(params), 4, replicated=True)
  axes = ow.worker_axes(state, replicated=True)

  def call(grads, state, weight):
    given = {} if weights is None else {"weight": weight}
    return tx.update(grads, state, params, **given)

  call = ow.map_workers(call, AXIS, in_axes=(0, axes, 0), out_axes=(None, axes))
  grads = np.random.default_rng(0).normal(size=(2, 4, 2)).astype("f")
  w = np.float32(weights or [1.0] * 4)
  for g in grads:
    _, state = call(g, state, w)
  new = 1 if len(keep) == 4 else 0
  state = ow.resize_workers(state, keep, new, replicated=True)
  size = len(keep) + new
  last = 0.0 if weights else 1.0  # a call of weight 0, or an unweighted one of zeros
  found, _ = call(np.zeros((size, 2), "f"), state, np.full(size, last, "f"))
  summed = (w[:, None] * grads).sum((0, 1))
  counts = w.sum() * 2 if weights else 4 * 3
  # A newcomer's share of a sum is none; a mean counts it with the mean of the others. Without
  # weights a shard's part of the sum is the mean of its three calls.
  expected = summed / (counts if reduction == "mean" else 1 if weights else 3)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("injected", [False, True])
def test_newcomer_takes_part_in_schedule_of_others(injected):
  """With constant gradients Adam steps by the learning rate, whatever it remembers of them."""
  rate = lambda n: 0.1 * (1 - n / 100)  # noqa: E731
  inner = optax.inject_hyperparams(optax.adam)(rate) if injected else optax.adam(rate)
  tx = ow.diloco(inner, AXIS, communication_period=2)
  params, state = ow.stack_workers((jnp.zeros(2), tx.init(jnp.zeros(2))), 3)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  for _ in range(10):
    updates, state = update(jnp.ones((3, 2)), state, params)
    params = optax.apply_updates(params, updates)
  center = ow.center_params(state)
  newcomer = center, tx.init(center)
  params, state = ow.resize_workers((params, state), [0, 1], num_new=1, newcomer=newcomer)
  updates, _ = update(jnp.ones((3, 2)), state, params)
  np.testing.assert_allclose(updates, np.full((3, 2), -0.09), rtol=1e-4)


def test_resize_of_nnx_state_as_dict_is_error_that_names_opt_state():
  nnx = pytest.importorskip("flax.nnx")
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  nnx.update(model, ow.stack_workers(nnx.state(model, nnx.Param), 2))
  params, tx = nnx.state(model, nnx.Param), ow.diloco(optax.sgd(0.1), AXIS, communication_period=2)
  opt = nnx.Optimizer(model, ow.stacked_workers(tx, AXIS, 2), wrt=nnx.Param)
  with pytest.raises(ValueError, match=r"Of an nnx.Optimizer pass optimizer.opt_state"):
    ow.resize_workers((params, nnx.state(opt)), keep=[0])
  resized, _ = ow.resize_workers((params, opt.opt_state), keep=[0])
  assert jax.tree.leaves(resized)[0].shape[0] == 1
