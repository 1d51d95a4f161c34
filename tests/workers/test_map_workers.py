"""map_workers against the same step run for each worker by hand, and its layouts."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from boxes_cases import linen_boxes, nnx_boxes
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
def test_map_workers_results_and_layouts_match_numpy(axis_type, shard_center):
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


def test_map_workers_traces_step_at_most_twice():
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
def test_map_workers_sharded_over_model_axis_sends_own_part(axis_type):
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
  # By JAX itself: test_sharded_workers.py.
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


def test_map_workers_errors_axes_mesh_and_leading_axis():
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


def test_reshape_batch_keeps_sharding_and_sends_nothing():
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


def test_map_workers_errors_unstacked_batch():
  with pytest.raises(ValueError, match=r"reshape_batch\(batch, num_workers\) to a batch"):
    ow.map_workers(lambda x, y: x, AXIS)(jnp.ones((2, 2)), jnp.ones(4))


@pytest.mark.parametrize("boxes", ["linen", "nnx"])
@pytest.mark.parametrize("axis_name", ["pod", "replica", None])
def test_map_workers_flax_boxes_inside_step_are_of_one_worker(boxes, axis_name):
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


@pytest.mark.optax_promotes
@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize("outside", ["MultiSteps", "apply_if_finite"])
def test_exchange_inside_optax_conditional_is_error_that_says_where_to_put_it(outside, with_mesh):
  inner = ow.diloco(optax.sgd(0.1), AXIS, communication_period=1)
  tx = optax.MultiSteps(inner, 2) if outside == "MultiSteps" else optax.apply_if_finite(inner, 2)
  params, state = ow.stack_workers((jnp.zeros(2), tx.init(jnp.zeros(2))), 2)
  step = ow.map_workers(
    lambda g, s, p: tx.update(g, s, p), AXIS, mesh=mesh_of(2) if with_mesh else None
  )
  with pytest.raises(
    ValueError, match=r"put optax.MultiSteps and optax.apply_if_finite inside|wait"
  ):
    step(jnp.ones((2, 2)), state, params)
