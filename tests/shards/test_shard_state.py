"""`cross_shard(shard_state=True)`: the inner state divided over the shards, against Optax on one
device; what is sent and held, and what is refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, in_context, mesh_of
from jax.sharding import AxisType, PartitionSpec

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes

ADAM = optax.adamw(0.1)

SHAPES = {"even": (4, 6), "odd": (7,), "largest": (3, 5), "one": (1,), "scalar": (), "none": (0, 3)}


def parameters():
  rng = np.random.default_rng(0)
  return {k: np.float32(rng.normal(size=s)) for k, s in SHAPES.items()}


def gradients(num_shards, step, shapes=SHAPES):
  rng = np.random.default_rng(step + 1)
  return {k: rng.normal(size=(num_shards, *s)).astype(np.float32) for k, s in shapes.items()}


def mean_of(grads, weight):
  """In NumPy; a shard of weight zero adds nothing, and with no shard left the sum is zero."""
  weight = np.asarray(weight, np.float64)
  some = weight > 0

  def mean(x):
    if not some.any():
      return np.zeros(x.shape[1:], np.float32)
    return np.einsum("i,i...->...", weight[some] / weight.sum(), x[some]).astype(np.float32)

  return jax.tree.map(mean, grads)


@functools.cache
def compiled(tx):
  """Of an optimizer on one device: `init` and a step."""

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(tx.init), jax.jit(step)


def on_one_device(tx, params, grads_of_steps):
  """What Optax makes of means; a step without one is dropped whole."""
  init, step = compiled(tx)
  state = init(params)
  for grads in grads_of_steps:
    if grads is not None:
      params, state = step(params, state, grads)
  return params


def divided(tx, params, num_shards):
  """The state of all shards, on the host."""
  stack = functools.partial(ow.stack_workers, num_workers=num_shards, replicated=True)
  return jax.device_get(jax.jit(lambda params: stack(tx.init(params)))(params))


class Shards:
  """A data-parallel step whose inner state is divided."""

  def __init__(self, tx, num_shards, context="shard_map", weighted=False):
    self.tx, self.num_shards = tx, num_shards
    self.state = divided(tx, parameters(), num_shards)
    axes = ow.worker_axes(self.state, replicated=True)

    def step(params, state, grads, weight):
      extra = {"weight": weight} if weighted else {}
      updates, state = tx.update(grads, state, params, **extra)
      return optax.apply_updates(params, updates), state

    self.step = in_context(context, step, num_shards, (None, axes, 0, 0), (None, axes))

  def train(self, params, state, grads_of_steps, weights=None):
    for i, grads in enumerate(grads_of_steps):
      weight = np.ones(self.num_shards) if weights is None else weights[i]
      params, state = self.step(params, state, grads, np.asarray(weight, np.float32))
    return params, state


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_shards", [2, 4])
def test_shard_state_every_context_matches_one_device(num_shards, context):
  shards = Shards(ow.cross_shard(ADAM, AXIS, shard_state=True), num_shards, context)
  grads = [gradients(num_shards, i) for i in range(2)]
  found, _ = shards.train(parameters(), shards.state, grads)
  means = [mean_of(g, np.ones(num_shards)) for g in grads]
  assert_close(found, on_one_device(ADAM, parameters(), means), 1e-5, 1e-6)


INNER = {
  "momentum": optax.sgd(0.1, momentum=0.9),
  "lion": optax.lion(0.01),
  "schedule": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 3)),
  "schedule_free": optax.contrib.schedule_free_adamw(0.1),
  "masked": optax.masked(optax.adam(0.1), {k: k != "odd" for k in SHAPES}),
}


@pytest.mark.parametrize("inner", INNER)
def test_shard_state_elementwise_optimizers_match_one_device(inner):
  tx = optax.chain(INNER[inner])
  shards = Shards(ow.cross_shard(tx, AXIS, shard_state=True), 4)
  grads = [gradients(4, i) for i in range(3)]
  found, _ = shards.train(parameters(), shards.state, grads)
  means = [mean_of(g, np.ones(4)) for g in grads]
  assert_close(found, on_one_device(tx, parameters(), means), 1e-5, 1e-6)


@pytest.mark.parametrize("context", ["shard_map", "unchecked"])
def test_shard_state_weights_nan_and_clip_match_one_device(context):
  """A shard of weight zero, one with a NaN, and a step without any shard left, clipped inside."""
  clip = 0.7
  inner = optax.chain(ow.clip_by_global_norm(clip), ADAM)
  tx = ow.cross_shard(inner, AXIS, shard_state=True, nonfinite="drop")
  shards = Shards(tx, 4, context, weighted=True)
  grads, weights, means = [], [[0, 1, 2, 3], [1, 1, 2, 0], [1, 0, 0, 0], [1, 2, 3, 4]], []
  for i, weight in enumerate(weights):
    grads.append(gradients(4, i))
    grads[i]["odd"][0, 2] = np.nan if i in (1, 2) else 0.5
    used = np.array(weight) * (np.array([0, 1, 1, 1]) if i in (1, 2) else 1)
    means.append(mean_of(grads[i], used) if used.any() else None)
  found, state = shards.train(parameters(), shards.state, grads, weights)
  alone = optax.chain(optax.clip_by_global_norm(clip), ADAM)
  norms = [
    np.linalg.norm(np.concatenate([*map(np.ravel, mean.values())])) for mean in means if mean
  ]
  assert min(norms) > clip
  assert_close(found, on_one_device(alone, parameters(), means), 1e-5, 1e-6)
  assert int(state.nonfinite) == 2


@pytest.mark.parametrize("way", ["outside", "inside"])
@pytest.mark.parametrize("context", ["shard_map", "vmap"])
def test_shard_state_towers_outside_or_inside_match_one_device(way, context):
  """One exchange a step and an accumulator as long as the parameters, or a share of it."""
  if way == "outside":
    tx = ow.gather_towers(ow.cross_shard(ADAM, AXIS, shard_state=True), 2)
  else:
    tx = ow.cross_shard(ow.gather_towers(ADAM, 2), AXIS, shard_state=True)
  shards = Shards(tx, 4, context)
  grads = [gradients(4, i) for i in range(4)]
  found, _ = shards.train(parameters(), shards.state, grads)
  means = [mean_of(g, np.ones(4)) for g in grads]
  pairs = [jax.tree.map(lambda a, b: (a + b) / 2, *means[i : i + 2]) for i in (0, 2)]
  assert_close(found, on_one_device(ADAM, parameters(), pairs), 1e-5, 1e-6)


def test_shard_state_gradient_summed_by_autodiff_matches_numpy():
  mesh, params = mesh_of(4), np.arange(6, dtype=np.float32)
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, shard_state=True)

  def step(params, x):
    grads = jax.grad(lambda p: jnp.mean(p * x[0]))(params)
    return tx.update(grads, tx.init(params), params)[0]

  spec = PartitionSpec(AXIS)
  run = jax.shard_map(step, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=PartitionSpec())
  x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
  np.testing.assert_allclose(jax.jit(run)(params, x), -x.mean(0) / 6, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
def test_shard_state_collectives_and_bytes_of_state_per_device(sizes):
  names = ("i", "j")[: len(sizes)]
  count = int(np.prod(sizes))
  mesh = jax.make_mesh(
    sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count]
  )
  params = {"kernel": np.zeros((16, 8), np.float32), "bias": np.zeros(8, np.float32)}
  tx = ow.cross_shard(optax.sgd(0.1, momentum=0.9), names, shard_state=True)
  state = divided(tx, params, count)
  axes = ow.worker_axes(state, replicated=True)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  in_axes = None, axes, 0
  step = jax.jit(ow.map_workers(step, names, in_axes=in_axes, out_axes=(None, axes), mesh=mesh))
  grads = jax.tree.map(lambda x: np.zeros((count, *x.shape), np.float32), params)
  compiled = step.lower(params, state, grads).compile()
  sent = sorted((one.kind, one.num_bytes) for one in ow.inspect.compiled_collectives(compiled))
  parts = sorted(4 * x.size // count for x in params.values())
  scattered = [("reduce-scatter", count * part) for part in parts]
  assert sent == [("all-gather", part) for part in parts] + scattered
  _, state = step(params, state, grads)
  assert ow.inspect.device_bytes(state) == sum(parts)


def test_shard_state_resize_from_8_to_4_matches_one_device():
  tx = ow.cross_shard(ADAM, AXIS, shard_state=True)
  eight, four = Shards(tx, 8), Shards(tx, 4)
  first, then = [gradients(8, i) for i in range(2)], [gradients(4, i) for i in range(2, 4)]
  params, state = eight.train(parameters(), eight.state, first)
  params, state = jax.device_get((params, state))
  state = ow.resize_workers(state, range(4), replicated=True, params=params)
  found, _ = four.train(params, jax.device_get(state), then)
  means = [mean_of(g, np.ones(len(g["odd"]))) for g in first + then]
  assert_close(found, on_one_device(ADAM, parameters(), means), 1e-5, 1e-6)


def each(fun):
  return optax.chain(optax.stateless_with_tree_map(lambda g, _: fun(g)), optax.sgd(0.1))


def test_shard_state_reduction_inside_is_error():
  inner = ow.cross_shard(optax.sgd(0.1), "other")
  with pytest.raises(ValueError, match="must be of the only reduction"):
    ow.cross_shard(inner, AXIS, shard_state=True).init(jnp.ones(3))


def test_shard_state_errors_extra_arg_or_params_of_other_shape():
  """An extra arg, and parameters, that have not the shape of a share."""

  def scaled(updates, state, params=None, *, factor=1.0):
    return jax.tree.map(lambda g: g * factor, updates), state

  inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), scaled)
  tx, x = ow.cross_shard(inner, AXIS, shard_state=True), jnp.ones((4, 4, 6))

  def update(x, params, **extra):
    return tx.update(x, tx.init(x), params, **extra)[0]

  with pytest.raises(ValueError, match="this one has a mul"):
    jax.vmap(lambda x: update(x, None, factor=jnp.ones((4, 6))), axis_name=AXIS)(x)
  with pytest.raises(ValueError, match=r"must have the parameter's shape \(8, 6\), got \(4, 6\)"):
    jax.vmap(lambda x: update(x, jnp.ones((8, 6))), axis_name=AXIS)(x)


def test_shard_state_clip_ignores_padding_of_shares():
  """Where a link before the clip makes something of zeros: here NaN, and one."""
  params = {"odd": np.arange(1, 8, dtype=np.float32), "even": np.ones((4, 2), np.float32)}
  for first in (optax.scale_by_adam(eps=0.0), each(lambda g: g + 1.0)):
    inner = optax.chain(first, ow.clip_by_global_norm(0.5))
    tx = ow.cross_shard(inner, AXIS, shard_state=True)
    state = divided(tx, params, 4)
    axes = ow.worker_axes(state, replicated=True)

    def update(grads, state, tx=tx):
      return tx.update(grads, state, params)[0]

    grads = jax.tree.map(lambda x: np.stack([x] * 4), params)
    found = jax.jit(jax.vmap(update, in_axes=(0, axes), axis_name=AXIS))(grads, state)
    found = jax.tree.map(lambda x: np.asarray(x)[3], found)
    alone = optax.chain(first, optax.clip_by_global_norm(0.5))
    expected = jax.jit(lambda x, alone=alone: alone.update(x, alone.init(x))[0])(params)
    assert_close(found, expected)


@pytest.mark.parametrize("as_tree", [False, True])
def test_shard_state_clip_of_real_and_imaginary_parts(as_tree):
  """Where a transformation outside of the clip has split a leaf, also with a padded share."""
  params = np.arange(1, 8, dtype="f") + 1j * np.arange(7, dtype="f")
  params = {"c": params.astype("c8")} if as_tree else params.astype("c8")

  def chain(clip):
    steps = each(lambda g: g + 1.0), clip(0.5), optax.trace(0.9)
    return optax.contrib.split_real_and_imaginary(optax.chain(*steps))

  tx = ow.cross_shard(chain(ow.clip_by_global_norm), AXIS, shard_state=True)
  state = divided(tx, params, 4)
  axes = ow.worker_axes(state, replicated=True)
  grads = jax.tree.map(lambda x: np.stack([x] * 4), params)
  update = jax.vmap(lambda g, s: tx.update(g, s, params)[0], in_axes=(0, axes), axis_name=AXIS)
  found = jax.tree.map(lambda x: np.asarray(x)[3], jax.jit(update)(grads, state))
  alone = chain(optax.clip_by_global_norm)
  expected = alone.update(params, alone.init(params), params)[0]
  chex.assert_trees_all_close(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("other", "options"),
  [
    ("axis_index_groups", {"axis_index_groups": [[0, 1], [2, 3]]}),
    ("sharded", {"sharded": True}),
    ("codec", {"codec": ow.codecs.quantize(8)}),
    ("one of optax_wrappers.reductions", {"reduction": ow.reductions.median()}),
  ],
)
def test_shard_state_errors_options_not_combinable(other, options):
  with pytest.raises(ValueError, match=f"cross_shard: shard_state cannot be used with {other}"):
    ow.cross_shard(ADAM, AXIS, shard_state=True, **options)


def test_shard_state_errors_not_stacked_or_of_other_arguments():
  tx, grads = ow.cross_shard(ADAM, AXIS, shard_state=True), gradients(4, 0)
  state = tx.init(parameters())

  def update(tx, state):
    return jax.vmap(lambda g: tx.update(g, state, parameters())[0], axis_name=AXIS)(grads)

  with pytest.raises(
    ValueError, match=r"\[4, 6\] must be a share\. Divide it: stack_workers\(.*, 4, "
  ):
    update(tx, state)
  with pytest.raises(ValueError, match=r"the state was made for .*is_divided=True"):
    update(ow.cross_shard(ADAM, AXIS), state)


def test_shard_state_without_axis_matches_inner():
  tx = ow.cross_shard(ADAM, None, shard_state=True)
  params, grads = parameters(), gradients(1, 0)
  own = jax.tree.map(lambda x: x[0], grads)
  found, expected = (
    jax.jit(lambda own, params, tx=tx: tx.update(own, tx.init(params), params)[0])(own, params)
    for tx in (tx, ADAM)
  )
  assert_close(found, expected)
