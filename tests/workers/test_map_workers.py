"""map_workers against the same step run for each worker by hand, and its layouts."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from helpers import AXIS, assert_close, mesh_of, with_kept
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

W = 4


def make(**options):
  options = {"communication_period": 2, "moving_rate": 0.1, "rho": 0.3} | options
  return ow.elastic_average(optax.sgd(0.1, momentum=0.9), AXIS, **options)


def step_of(tx):
  def step(params, state, batch, scale):
    loss, grads = jax.value_and_grad(lambda p: scale * jnp.sum((p["w"] - batch) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss, jax.lax.pmean(loss, AXIS)

  return step


def simulate(start, batches, steps):
  """The NumPy reference of `make` and `step_of`; and the losses of the last step."""
  node = ref.Elastic((AXIS,), 2, 0.1, 0.3, "simultaneous", ref.Sgd(0.1, 0.9))
  params, state = ref.run(
    node, start, [(lambda x: 4.0 * (x - batches), None, None)] * (steps - 1), {AXIS: W}
  )
  losses = 2.0 * ((params - batches) ** 2).sum(-1)
  last = [(4.0 * (params - batches), None, None)]
  params, state = ref.run(node, params, last, {AXIS: W}, state)
  return params, state["center"][0], losses


@pytest.mark.parametrize("shard_center", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit, None])
def test_everything_gets_its_layout(axis_type, shard_center):
  """Parameters, a state with shared, own and divided fields, a batch, a number for all; a loss of
  each worker, and one of all."""
  rng = np.random.default_rng(0)
  start = rng.normal(size=6).astype(np.float32)
  batches = rng.normal(size=(W, 6)).astype(np.float32)
  tx = make(shard_center=shard_center)
  params, state = {"w": jnp.asarray(start)}, tx.init({"w": jnp.asarray(start)})
  params, state = ow.stack_workers(params, W), ow.stack_workers(state, W)
  mesh = None if axis_type is None else mesh_of(W, axis_type)
  axes = {"in_axes": (0, 0, 0, None), "out_axes": (0, 0, 0, None)}
  step = jax.jit(ow.map_workers(step_of(tx), AXIS, mesh=mesh, **axes))
  for _ in range(5):
    params, state, losses, loss = step(params, state, batches, jnp.float32(2.0))
  x, c, expected = simulate(start, batches, 5)
  assert_close(params["w"], x, rtol=1e-5, atol=1e-6)
  center = ow.center_params(state, {"w": start})
  assert_close(center["w"], c, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
  assert state.step.shape == ()
  if mesh is not None:
    assert params["w"].sharding.is_equivalent_to(NamedSharding(mesh, P(AXIS)), 2)
    assert loss.sharding.is_equivalent_to(NamedSharding(mesh, P()), 0)


def test_the_step_is_traced_once():
  tx, traces = make(), []
  step = step_of(tx)

  def counted(*args):
    traces.append(args)
    return step(*args)

  params = ow.stack_workers({"w": jnp.zeros(3)}, W)
  state = ow.stack_workers(tx.init({"w": jnp.zeros(3)}), W)
  axes = {"in_axes": (0, 0, 0, None), "out_axes": (0, 0, 0, None)}
  mapped = jax.jit(ow.map_workers(counted, AXIS, mesh=mesh_of(W), **axes))
  batch = jax.device_put(jnp.ones((W, 3)), NamedSharding(mesh_of(W), P(AXIS)))
  params, state, *_ = mapped(params, state, batch, 1.0)
  assert len(traces) == 1
  for _ in range(3):  # from here on all arrays lie where they belong
    params, state, *_ = jax.block_until_ready(mapped(params, state, batch, 1.0))
  assert len(traces) <= 2


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_workers_own_arrays_may_be_sharded_over_axes_left_to_xla(axis_type):
  """Four workers of two devices each: a product over the sharded axis, and the bytes of it."""
  mesh = jax.make_mesh((W, 2), (AXIS, "model"), axis_types=(axis_type,) * 2)
  rng = np.random.default_rng(1)
  start = rng.normal(size=(6, 4)).astype(np.float32)
  xs = rng.normal(size=(W, 5, 6)).astype(np.float32)
  tx = ow.elastic_average(optax.sgd(0.1), AXIS, communication_period=1, moving_rate=0.2)

  def step(params, state, x):
    grads = jax.grad(lambda p: jnp.sum((x @ p) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def place(tree, *spec):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))

  params = place(ow.stack_workers(jnp.asarray(start), W), AXIS, None, "model")
  state = ow.stack_workers(tx.init(jnp.asarray(start)), W)
  state = with_kept(state, center=place(state.center, None, "model"))
  state = state.replace(step=place(state.step), since=place(state.since))
  # By JAX itself: tests/test_pods.py.
  is_gathered = axis_type == AxisType.Explicit and jax.__version_info__ < (0, 11, 2)
  told = pytest.warns(UserWarning, match=r"sharded over \['model'\] next to the workers' axis")
  with jax.set_mesh(mesh), told if is_gathered else contextlib.nullcontext():
    mapped = jax.jit(ow.map_workers(step, AXIS, mesh=mesh))
    compiled = mapped.lower(params, state, place(xs, AXIS)).compile()
    params, state = mapped(params, state, place(xs, AXIS))
  grads = np.stack([2 * x.T @ (x @ start) for x in xs])
  moved = start - 0.1 * grads
  expected = moved - 0.2 * (moved - start), start + 0.2 * (moved - start).sum(0)
  np.testing.assert_allclose(params, expected[0], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(state.center, expected[1], rtol=1e-4, atol=1e-4)
  assert params.sharding.shard_shape(params.shape) == (1, 6, 2)
  sent = [c.num_bytes for c in ow.inspect.compiled_collectives(compiled) if c.kind == "all-reduce"]
  assert sent == [6 * 2 * 4]  # each device sends its own half of the differences


def test_errors():
  tx = make()
  params = {"w": jnp.zeros(3)}
  stacked, state = ow.stack_workers(params, W), ow.stack_workers(tx.init(params), W)
  with pytest.raises(ValueError, match=r"axis_name must be one axis.*got \('a', 'b'\)"):
    ow.map_workers(step_of(tx), ("a", "b"))
  with pytest.raises(ValueError, match=r"mesh has the axes \('w',\), and not \['x'\]"):
    ow.map_workers(step_of(tx), "x", mesh=mesh_of(W))
  mapped = ow.map_workers(step_of(tx), AXIS, mesh=mesh_of(W))
  with pytest.raises(ValueError, match=r"leading axis of the 4 workers; got argument 3 \[\]"):
    mapped(stacked, state, jnp.zeros((W, 3)), 1.0)
  with pytest.raises(
    ValueError, match=r"leading axis of the 4 workers; got argument 0\['w'\] \[3\]"
  ):
    mapped(params, state, jnp.zeros((W, 3)), jnp.ones(W))
  with pytest.raises(ValueError, match="in_axes must be 0, None, or have the structure of the arg"):
    ow.map_workers(step_of(tx), AXIS, in_axes=(0, 0))(stacked, state, jnp.zeros((W, 3)), 1.0)
  with pytest.raises(ValueError, match="in_axes must hold 0 and None, got 1"):
    ow.map_workers(step_of(tx), AXIS, in_axes=1)(stacked, state, jnp.zeros((W, 3)), 1.0)
  shared = ow.map_workers(
    step_of(tx), AXIS, in_axes=(0, 0, 0, None), out_axes=(0, 0, None, None), mesh=mesh_of(W)
  )
  with pytest.raises(ValueError, match=r"result\[2\] must be one value for all workers"):
    shared(stacked, state, jnp.zeros((W, 3)), 1.0)
  alone = ow.map_workers(step_of(tx), AXIS, in_axes=(0, 0, 0, None))
  with pytest.raises(
    ValueError, match=r"all of one length; got argument 0\['w'\] \[3\], argument 1"
  ):
    alone(params, state, jnp.zeros((W, 3)), 1.0)
  shared = ow.map_workers(step_of(tx), AXIS, in_axes=(0, 0, 0, None), out_axes=(0, 0, None, None))
  with pytest.raises(ValueError, match="one of the results must be one value for all workers"):
    shared(stacked, state, jnp.zeros((W, 3)), 1.0)
  with pytest.raises(TypeError, match="mapped by position, got scale by name"):
    mapped(stacked, state, jnp.zeros((W, 3)), scale=1.0)


@pytest.mark.parametrize("mesh", [None, True], ids=["vmap", "mesh"])
def test_injected_numbers_of_an_exchange_are_one_for_all_workers(mesh):
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


def test_injected_numbers_of_an_exchange_inside_a_worker_are_that_workers():
  static = ("inner", "axis_name", "communication_period", "fragments", "delay")
  inside = optax.inject_hyperparams(ow.elastic_average, static_args=static)(
    optax.sgd(1.0), "chip", communication_period=1, moving_rate=0.1
  )
  alone, within = inside.init(jnp.zeros(())), ow.local_steps(inside, "pod").init(jnp.zeros(()))
  assert ow.worker_axes(alone).hyperparams["moving_rate"] is None
  assert ow.worker_axes(within).inner_state.hyperparams["moving_rate"] == 0


def test_injected_numbers_of_a_workers_own_optimizer_are_its_own():
  sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
  for tx in (sgd, ow.elastic_average(sgd, AXIS)):
    axes = ow.worker_axes(tx.init(jnp.zeros(2)))
    injected = axes if tx is sgd else axes.inner_state
    assert injected.hyperparams["learning_rate"] == 0
    assert injected.count == 0


def test_a_batch_is_divided_and_stays_where_it_is():
  mesh = jax.make_mesh((2, 4), ("pod", "data"), axis_types=(AxisType.Auto,) * 2)
  x = np.arange(48.0).reshape(16, 3)
  for spec, wanted in [
    (P(("pod", "data")), P("pod", "data")),
    (P(("pod", "data"), None), P("pod", "data", None)),
    (P("data"), P(None, "data")),
    (P(), P()),
  ]:
    batch = {"x": jax.device_put(x, NamedSharding(mesh, spec))}
    found = ow.reshape_batch(batch, 2)["x"]
    np.testing.assert_array_equal(found, x.reshape(2, 8, 3))
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, wanted), 3)
  batch = jax.device_put(x, NamedSharding(mesh, P(("pod", "data"))))
  compiled = jax.jit(lambda x: ow.reshape_batch(x, 2)).lower(batch).compile()
  assert ow.inspect.compiled_collectives(compiled) == []
  assert ow.reshape_batch(x, 1).shape == (1, 16, 3)
  for bad in (jnp.ones(3), jnp.ones(())):
    with pytest.raises(ValueError, match=r"batch\['x'\] must have a first axis that is a multiple"):
      ow.reshape_batch({"x": bad}, 2)


def test_an_unstacked_batch_is_told_to_be_divided():
  with pytest.raises(ValueError, match=r"reshape_batch\(batch, num_workers\) to a batch"):
    ow.map_workers(lambda x, y: x, AXIS)(jnp.ones((2, 2)), jnp.ones(4))


def linen_boxes():
  import flax.linen as nn

  box = nn.LogicallyPartitioned(jnp.ones((64, 32)), ("vocab", "embed"))
  return {"k": box, "b": nn.LogicallyPartitioned(jnp.ones(32), ("embed",))}


def linen_specs(tree, rules):
  import flax.linen as nn

  return nn.logical_to_mesh(nn.get_partition_spec(tree), rules)


def nnx_boxes():
  from flax import nnx

  make = {"k": ((64, 32), ("vocab", "embed")), "b": ((32,), ("embed",))}
  # A box alone, as `nnx.state` of an abstract model has it.
  params = {name: nnx.Param(jnp.ones(shape)) for name, (shape, _) in make.items()}
  return nnx.State({n: p.copy(out_sharding=make[n][1]) for n, p in params.items()})


def nnx_specs(tree, rules):
  from flax import nnx

  with nnx.logical_axis_rules(rules):
    return nnx.get_partition_spec(tree)


BOXED = {
  "staleness": lambda: ow.params_history(ow.drop_stale(optax.adam(0.1), 3), 3),
  "simulated": lambda: ow.simulate_workers(optax.adam(0.1), 2),
  "towers": lambda: ow.gather_towers(optax.adam(0.1), 2),
  "coded": lambda: ow.cross_shard(optax.adam(0.1), "pod", codec=ow.codecs.quantize(8)),
  "diloco": lambda: ow.diloco(optax.adam(0.1), "pod", codec=ow.codecs.quantize(8)),
  "divided": lambda: ow.diloco(optax.adam(0.1), "pod", shard_center=True),
  "in fragments": lambda: ow.diloco(optax.adam(0.1), "pod", fragments=2, delay=1),
  "elastic": lambda: ow.elastic_average(optax.adam(0.1), "pod", rho=0.1),
  "gossip": lambda: ow.gossip_average(optax.adam(0.1), "pod"),
}
MESH_OF = {"vocab": "tensor", "embed": "fsdp"}


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("boxes", ["linen", "nnx"])
@pytest.mark.parametrize("name", BOXED)
def test_layouts_inferred_from_flaxs_boxes(name, boxes, is_stacked):
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


@pytest.mark.parametrize("boxes", ["linen", "nnx"])
@pytest.mark.parametrize("axis_name", ["pod", "replica", None])
def test_a_step_sees_one_workers_boxes_and_returns_those_of_all(boxes, axis_name):
  params = {"linen": linen_boxes, "nnx": nnx_boxes}[boxes]()
  tx = ow.diloco(optax.sgd(0.1), "pod", communication_period=1, codec=ow.codecs.quantize(8))
  stacked = ow.stack_workers((params, tx.init(params)), 2, axis_name=axis_name)
  seen = []

  def step(params, state):
    seen.append(jax.tree.structure(params))
    updates, state = tx.update(params, state, params)
    return optax.apply_updates(params, updates), state

  found = jax.jit(ow.map_workers(step, "pod"))(*stacked)
  assert seen[0] == jax.tree.structure(params)
  assert jax.tree.structure(found) == jax.tree.structure(stacked)
  resized = ow.resize_workers(found, [0], num_new=1, newcomer=(params, tx.init(params)))
  assert jax.tree.structure(resized) == jax.tree.structure(stacked)


@pytest.mark.parametrize("name", [*BOXED, "adafactor"])
def test_specs_of_a_state_without_workers(name):
  """What is as a parameter is laid out as it is, in whatever state, towers of one mesh too."""
  tx = optax.adafactor(0.1, min_dim_size_to_factor=8) if name == "adafactor" else BOXED[name]()
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
  params = {"k": jnp.zeros((64, 40)), "b": jnp.zeros(16)}
  layout = {"k": P("tensor", "fsdp"), "b": P("fsdp")}
  state = jax.eval_shape(tx.init, params)
  specs = ow.state_specs(state, layout, mesh=mesh)
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


def test_a_history_of_boxes_is_read_without_its_name():
  params = linen_boxes()
  tx = ow.params_history(ow.drop_stale(optax.sgd(0.1), 3), 3)
  state = tx.init(params)
  for step in range(3):
    updates, state = tx.update(params, state, params, computed_at=step)
    before, params = params, optax.apply_updates(params, updates)
  found = ow.past_params(state, 1)
  assert jax.tree.structure(found) == jax.tree.structure(before)
  assert_close(found, before)


@pytest.mark.optax_promotes
def test_a_count_of_a_divided_optimizer_is_one_for_all():
  tx = ow.local_steps(optax.sgd(0.1), AXIS, outer=optax.adam(0.1), shard_center=True)
  state = ow.stack_workers(tx.init(jnp.zeros(6)), 3)
  (adam, _) = state.kept[0].outer_state
  assert (adam.count.shape, adam.mu.shape) == ((), (3, 2))
  (axes, _) = ow.worker_axes(state).kept[0].outer_state
  assert (axes.count, axes.mu) == (None, 0)
