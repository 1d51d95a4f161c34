"""Layouts of states: what is shared, divided or a worker's own."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxes_cases import BOXED, linen_boxes, nnx_boxes
from helpers import AXIS, CONTEXTS, bits, in_context, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow


def test_layout_center_is_shared_and_reduction_state_per_worker():
  """The center is one for all; a reduction's state is each worker's own, counters included, because
  those of an absent worker stop; a counter of rounds is one for all, also inside other workers."""
  codec = ow.codecs.compression(ow.codecs.quantize(8), after=1)
  options = {"outer": optax.sgd(0.7, momentum=0.9), "reduction": ow.all_reduce(AXIS, codec=codec)}
  state = ow.local_steps(optax.sgd(0.1), AXIS, **options).init(jnp.zeros((64, 64)))
  (kept,) = ow.worker_axes(state).kept
  assert (kept.center, kept.outer_state[0].trace) == (None, None)
  assert (kept.reduction_state.compressed.residual, kept.reduction_state.compressed.step) == (0, 0)
  nested = ow.elastic_average(ow.contrib.gossip_average(optax.sgd(0.1), AXIS), AXIS).init(
    jnp.zeros(3)
  )
  assert ow.worker_axes(nested).inner_state.exchanges is None


PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def everything():
  """All wrappers with a state, nested."""
  tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), None, rho=0.1, communication_period=2)
  return ow.drop_stale(ow.gather_towers(tx, 2), 3)


def shape_tree(tree):
  return jax.tree.map(jnp.shape, tree)


def test_layout_of_workers_axes_stack_and_specs():
  state = everything().init(PARAMS)
  axes = ow.worker_axes(state)
  assert (axes.step, axes.dropped) == (None, None)
  towers = axes.inner_state
  assert (towers.tower, towers.total_weight) == (None, 0)  # a weight is a worker's own
  assert towers.accumulated == {"w": 0, "b": 0}
  elastic = towers.inner_state
  assert (elastic.step, elastic.center) == (None, {"w": None, "b": None})
  assert elastic.pulled_center == {"w": 0, "b": 0}
  assert elastic.inner_state[0].trace == {"w": 0, "b": 0}

  stacked = ow.stack_workers(state, 5)

  def check(axis, one, many):
    expected = one if axis is None else jax.tree.map(lambda x: np.stack([x] * 5), one)
    assert bits(many) == bits(expected)

  jax.tree.map(check, axes, state, stacked, is_leaf=lambda x: x is None)

  specs = ow.specs(state, workers=AXIS)
  assert specs.inner_state.inner_state.center == {"w": P(), "b": P()}
  assert specs.inner_state.inner_state.pulled_center == {"w": P(AXIS), "b": P(AXIS)}
  assert ow.specs(state, workers=("a", "b")).inner_state.accumulated["w"] == P(("a", "b"))


def test_layout_replicated_shards_own_only_towers_accumulator():
  state = everything().init(PARAMS)
  specs = ow.specs(state, workers=AXIS, replicated=True)
  own = [leaf == P(AXIS) for leaf in jax.tree.leaves(specs)]
  assert sum(own) == 3  # the accumulator's two leaves, and the weight of what is in it
  assert specs.inner_state.accumulated == {"w": P(AXIS), "b": P(AXIS)}
  stacked = ow.stack_workers(state, 4, replicated=True)
  assert shape_tree(stacked.inner_state.accumulated) == {"w": (4, 2, 3), "b": (4, 3)}
  assert shape_tree(stacked.inner_state.inner_state) == shape_tree(state.inner_state.inner_state)


def test_specs_shardings_pass_through_jit():
  mesh = mesh_of(4)
  state = ow.stack_workers(everything().init(PARAMS), 4)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), ow.specs(state, workers=AXIS))
  placed = jax.device_put(state, shardings)
  out = jax.jit(lambda s: s, in_shardings=(shardings,), out_shardings=shardings)(placed)
  assert jax.tree.map(lambda x: x.sharding, out) == shardings


def test_stack_workers_of_params_and_specs_of_abstract_state():
  assert shape_tree(ow.stack_workers(PARAMS, 3)) == {"w": (3, 2, 3), "b": (3, 3)}
  abstract = jax.eval_shape(everything().init, PARAMS)
  assert jax.tree.structure(ow.specs(abstract, workers=AXIS)) == jax.tree.structure(abstract)
  with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
    ow.stack_workers(PARAMS, 0)


# What is shared depends on what stands outside.


def layout(tx, **options):
  return ow.worker_axes(tx.init(PARAMS), **options)


def test_layout_counters_and_centers_in_worker_state_are_own():
  elastic = ow.elastic_average
  stale = layout(elastic(ow.drop_stale(ow.gather_towers(optax.sgd(0.1), 2), 1), AXIS)).inner_state
  assert (stale.step, stale.dropped) == (0, 0)
  # A dropped gradient is no tower, and each worker drops its own.
  assert stale.inner_state.tower == 0
  finite = layout(elastic(ow.cross_shard(optax.sgd(0.1), None, nonfinite="drop"), AXIS)).inner_state
  assert finite.nonfinite == 0
  nested = layout(elastic(elastic(optax.sgd(0.1), AXIS), AXIS))
  assert nested.center == {"w": None, "b": None}
  assert (nested.inner_state.step, nested.inner_state.center) == (None, {"w": 0, "b": 0})
  towers = layout(elastic(ow.gather_towers(optax.sgd(0.1), 2), AXIS)).inner_state
  assert towers.tower is None  # workers call together
  # Outside, and for replicated shards, they are one value.
  assert layout(ow.drop_stale(elastic(optax.sgd(0.1), AXIS), 1)).step is None
  assert (
    layout(elastic(ow.drop_stale(optax.sgd(0.1), 1), AXIS), replicated=True).inner_state.step
    is None
  )


def test_layout_accumulator_inside_reduction_is_shared():
  inside = ow.cross_shard(ow.gather_towers(optax.sgd(0.1), 2), AXIS)
  axes = layout(inside, replicated=True).inner_state
  assert (axes.tower, axes.total_weight, axes.accumulated) == (None, None, {"w": None, "b": None})
  assert isinstance(
    ow.get_state(inside.init(PARAMS), ow.states.GatherTowersState), ow.states.GatherTowersState
  )
  alone = layout(ow.cross_shard(ow.gather_towers(optax.sgd(0.1), 2), None), replicated=True)
  assert alone.inner_state.accumulated == {"w": 0, "b": 0}
  assert bits(pickle.loads(pickle.dumps(inside.init(PARAMS)))) == bits(inside.init(PARAMS))


def saved(tree):
  return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("save_at", [None, 1, 3])
def test_layout_drop_stale_per_worker_resumes_from_checkpoint(context, save_at):
  """Worker 0 is always stale, 1 and 2 keep one stamp forever, 3 is always fresh; each counts for
  itself."""
  tx = ow.elastic_average(ow.drop_stale(optax.sgd(1.0), 0), AXIS, communication_period=1000)
  state, params = ow.stack_workers(tx.init(jnp.zeros(())), 4), jnp.zeros(4)
  axes = ow.worker_axes(state)

  def step(params, state, stamp):
    updates, state = tx.update(-jnp.ones(()), state, params, computed_at=stamp)
    return params + updates, state

  step = in_context(context, step, 4, (0, axes, 0), (0, axes))
  for i in range(5):
    if i == save_at:
      params, state = saved((params, state))
    params, state = step(params, state, jnp.array([-1, 0, 0, i], jnp.int32))
  np.testing.assert_array_equal(params, [0, 1, 1, 5])
  np.testing.assert_array_equal(ow.get_state(state, ow.states.DropStaleState).dropped, [5, 4, 4, 0])


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", ["shard_map", "unchecked", "pmap", "vmap"])
@pytest.mark.parametrize("save_at", [None, 3])
def test_layout_towers_in_apply_if_finite_resume_from_checkpoint(context, save_at):
  """NaNs of two workers are no towers: their counters fall behind."""
  tx = ow.elastic_average(
    optax.apply_if_finite(ow.gather_towers(optax.sgd(1.0), 2), 9), AXIS, communication_period=99
  )
  state, params = ow.stack_workers(tx.init(jnp.zeros(())), 4), jnp.zeros(4)
  axes = ow.worker_axes(state)

  def step(params, state, grad):
    updates, state = tx.update(grad, state, params)
    return params + updates, state

  step = in_context(context, step, 4, (0, axes, 0), (0, axes))
  for i in range(6):
    if i == save_at:
      params, state = saved((params, state))
    grads = np.full(4, -1.0, np.float32)
    if i == 1:
      grads[1:3] = np.nan
    params, state = step(params, state, jnp.asarray(grads))
  np.testing.assert_array_equal(params, [3, 2, 2, 3])


@pytest.mark.parametrize("mesh", [None, True], ids=["vmap", "mesh"])
def test_inject_hyperparams_of_exchange_are_shared_by_workers(mesh):
  """moving_rate as a schedule: 0.5, then 0.25, by hand."""

  def halved(count):
    return 0.5 / (1 + count.astype(jnp.float32))

  tx = optax.inject_hyperparams(
    ow.elastic_average,
    static_args=("inner", "axis_name", "communication_period", "fragments", "delay"),
  )(
    optax.sgd(1.0), AXIS, communication_period=1, moving_rate=halved
  )  # fmt: skip
  state = ow.stack_workers(tx.init(jnp.zeros(())), 2)
  assert state.hyperparams["moving_rate"].shape == ()
  assert ow.worker_axes(state).count is None

  def step(params, state, grad):
    updates, state = tx.update(grad, state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.jit(ow.map_workers(step, AXIS, mesh=mesh and mesh_of(2)))
  params, grads = jnp.zeros(2), jnp.array([-1.0, 0.0])
  x, c = np.zeros(2), 0.0
  for alpha in (0.5, 0.25):
    params, state = mapped(params, state, grads)
    x = x - np.asarray(grads)
    x, c = x - alpha * (x - c), c + alpha * (x - c).sum()
  np.testing.assert_allclose(params, x, rtol=1e-6)
  np.testing.assert_allclose(ow.center_params(state), c, rtol=1e-6)


def test_inject_hyperparams_of_nested_exchange_are_per_worker():
  static = ("inner", "axis_name", "communication_period", "fragments", "delay")
  inside = optax.inject_hyperparams(ow.elastic_average, static_args=static)(
    optax.sgd(1.0), "chip", communication_period=1, moving_rate=0.1
  )
  alone, within = inside.init(jnp.zeros(())), ow.local_steps(inside, "pod").init(jnp.zeros(()))
  assert ow.worker_axes(alone).hyperparams["moving_rate"] is None
  assert ow.worker_axes(within).inner_state.hyperparams["moving_rate"] == 0


def test_inject_hyperparams_of_inner_optimizer_are_per_worker():
  sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
  for tx in (sgd, ow.elastic_average(sgd, AXIS)):
    axes = ow.worker_axes(tx.init(jnp.zeros(2)))
    injected = axes if tx is sgd else axes.inner_state
    assert injected.hyperparams["learning_rate"] == 0
    assert injected.count == 0


def linen_specs(tree, rules):
  import flax.linen as nn

  return nn.logical_to_mesh(nn.get_partition_spec(tree), rules)


def nnx_specs(tree, rules):
  from flax import nnx

  with nnx.logical_axis_rules(rules):
    return nnx.get_partition_spec(tree)


MESH_OF = {"vocab": "tensor", "embed": "fsdp"}


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("boxes", ["linen", "nnx"])
@pytest.mark.parametrize("name", BOXED)
def test_flax_boxes_specs_of_state_match_named_axes(name, boxes, is_stacked):
  """A leaf is as long along each of its named axes as the parameter is along the axis so named."""
  make, specs_of = {"linen": (linen_boxes, linen_specs), "nnx": (nnx_boxes, nnx_specs)}[boxes]
  params, tx = make(), BOXED[name]()

  def init(params):
    trees = params, tx.init(params)
    return ow.stack_workers(trees, 2, axis_name="pod") if is_stacked else trees

  abstract = jax.eval_shape(init, params)
  specs = specs_of(abstract, (*MESH_OF.items(), ("pod", "pod")))
  sizes = {"k": {"tensor": 64, "fsdp": 32}, "b": {"fsdp": 32}}
  seen = 0
  found = dict(ow._core._paths.named_leaves(specs))  # more than leaves: of empty boxes too
  for path, leaf in ow._core._paths.named_leaves(abstract):
    kernel = sizes.get(path.rpartition("/")[2])
    if kernel is None or leaf.ndim < len(kernel):
      continue
    spec = (*found[path], *[None] * (leaf.ndim - len(found[path])))
    assert spec[leaf.ndim - len(kernel):] == tuple(kernel), path  # fmt: skip
    extra = spec[: leaf.ndim - len(kernel)]
    assert set(extra) <= {"pod", None} and ("pod" not in extra or leaf.shape[0] == 2), path
    if is_stacked and path.startswith("0/"):
      assert extra == ("pod",), path
    seen += 1
  assert seen >= 4


@pytest.mark.parametrize("name", [*BOXED, "adafactor"])
def test_state_specs_without_workers_follow_params(name):
  """What is as a parameter is laid out as it is, in whatever state, towers of one mesh too."""
  tx = optax.adafactor(0.1, min_dim_size_to_factor=8) if name == "adafactor" else BOXED[name]()
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
  params = {"k": jnp.zeros((64, 40)), "b": jnp.zeros(16)}
  layout = {"k": P("tensor", "fsdp"), "b": P("fsdp")}
  state = jax.eval_shape(tx.init, params)
  specs = ow.specs(state, layout, mesh=mesh)
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  jax.jit(tx.init, out_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), specs))(params)
  seen = 0
  for (keys, leaf), spec in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(specs)):
    wanted = {p.shape: layout[key] for key, p in params.items()}.get(leaf.shape)
    if wanted is not None:
      assert spec == wanted, keys
      seen += 1
    elif name not in ("adafactor", "staleness", "simulated"):  # with a dimension of their own
      assert not any(spec), keys
  assert seen >= 1


@pytest.mark.optax_promotes
def test_shard_center_count_of_outer_adam_is_shared():
  tx = ow.local_steps(optax.sgd(0.1), AXIS, outer=optax.adam(0.1), shard_center=True)
  state = ow.stack_workers(tx.init(jnp.zeros(6)), 3)
  (adam, _) = state.kept[0].outer_state
  assert (adam.count.shape, adam.mu.shape) == ((), (3, 2))
  (axes, _) = ow.worker_axes(state).kept[0].outer_state
  assert (axes.count, axes.mu) == (None, 0)


# Names of parameters that are also those of fields, and names that are wrong.

NAMESAKES = {"mu": {"w": jnp.zeros(7)}, "w": jnp.arange(1.0, 9.0)}


def test_specs_of_parameters_that_are_named_as_fields_are_their_own():
  """Adam's moment of `w` is at `mu/w`, where there is a parameter too; with shard_center a center's
  at `center/w`."""
  specs = {"mu": {"w": P("a")}, "w": P()}
  adam = jax.eval_shape(optax.adam(0.1).init, NAMESAKES)
  found = ow.specs(adam, specs)[0]
  assert (found.mu, found.nu, found.count) == (specs, specs, P())
  params = {"center": {"w": jnp.zeros(8)}, "w": jnp.zeros(8)}
  state = ow.stack_workers(ow.diloco(optax.sgd(0.1), "w").init(params), 2)
  specs = {"center": {"w": P("a")}, "w": P()}
  assert ow.specs(state, workers="w", params=specs).center == specs


@pytest.mark.parametrize("number", [2, 4])
def test_resize_divides_moments_of_namesakes_by_their_own_shapes(number):
  tx = ow.cross_shard(optax.adam(0.1), "b", shard_state=True)
  state = tx.init(NAMESAKES)
  adam, rest = state.inner_state
  state = state.replace(inner_state=(adam._replace(mu=NAMESAKES), rest))
  state = ow.stack_workers(state, 4, replicated=True)
  found = ow.resize_workers(state, range(number), replicated=True, params=NAMESAKES)
  rows = found.inner_state[0].mu["w"]
  np.testing.assert_array_equal(rows.T.ravel(), NAMESAKES["w"])


def test_specs_of_names_that_the_state_lacks_are_error():
  """Not a state that is replicated in silence. A state without moments takes any."""
  params = {"x": {"y": jnp.zeros((4, 4))}, "z": jnp.zeros(3)}
  wrong = {"X": {"y": P("a")}, "z": P()}
  adam = jax.eval_shape(optax.adam(0.1).init, params)
  with pytest.raises(ValueError, match=r"specs: 0/mu/x/y of the state .* nothing of X/y"):
    ow.specs(adam, wrong)
  state = ow.stack_workers(ow.diloco(optax.adam(0.1), "w").init(params), 2)
  with pytest.raises(ValueError, match=r"specs: .* nothing of X/y"):
    ow.specs(state, workers="w", params=wrong)
  ow.specs(jax.eval_shape(optax.sgd(0.1).init, params), wrong)


def test_specs_of_share_that_was_padded_need_mesh():
  """8 rows of three workers are 3 each, which two devices do not divide."""
  tx = ow.diloco(optax.sgd(0.1), "w", shard_center=True)
  specs = {"k": P("d")}
  state = ow.stack_workers(tx.init({"k": jnp.zeros((8, 4))}), 3)
  with pytest.raises(ValueError, match=r"specs: mesh is needed for kept/0/center/k"):
    ow.specs(state, workers="w", params=specs)
  mesh = jax.make_mesh(
    (3, 2), ("w", "d"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6]
  )
  found = ow.specs(state, workers="w", params=specs, mesh=mesh).center_share["k"]
  assert found == P("w", None, "d")
