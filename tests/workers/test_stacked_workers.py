"""Workers as a transformation of stacked parameters, under plain jit, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from boxes_cases import BOXED, linen_boxes, nnx_boxes
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

W, STEPS, PERIOD = 2, 7, 3

OUTER = {"communication_period": PERIOD, "outer_learning_rate": 0.3, "outer_momentum": 0.9}


def pull_of(rng):
  """Gradients of (x - a)^2 with another `a` in every step on every worker."""
  targets = rng.normal(size=(STEPS, W, 8, 4)).astype(np.float32)
  return targets, lambda t, x: 2 * (x - targets[t].reshape(W, -1))


def train(tx, params, targets, **extra_args):
  state = tx.init(params)

  @jax.jit
  def step(params, state, target):
    grads = jax.grad(lambda p: jax.vmap(lambda x, a: ((x - a) ** 2).sum())(p, target).sum())(params)
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  found = []
  for target in targets:
    params, state = step(params, state, target)
    found.append((np.asarray(params), np.asarray(ow.center_params(state, jnp.ones((8, 4))))))
  return found, state


@pytest.mark.parametrize("shard_center", [False, True])
@pytest.mark.parametrize("axis_type", [None, AxisType.Auto, AxisType.Explicit])
def test_stacked_workers_diloco_in_plain_step_matches_numpy(axis_type, shard_center):
  """On one device, and over pods of four devices that divide every parameter."""
  rng = np.random.default_rng(0)
  targets, grad = pull_of(rng)
  start = rng.normal(size=(8, 4)).astype(np.float32)
  options = {"num_workers": W, "period": PERIOD, "eta": 0.3, "mu": 0.9}
  expected = ref.diloco(start.ravel(), grad, STEPS, ref.Momentum(0.05, 0.5), **options)
  mesh, params = None, jnp.stack([start] * W)
  if axis_type is not None:
    mesh = jax.make_mesh((W, 4), ("pod", "fsdp"), axis_types=(axis_type,) * 2)
    place = NamedSharding(mesh, P("pod", "fsdp"))
    params, *targets = (jax.device_put(x, place) for x in (params, *targets))
  tx = ow.diloco(optax.sgd(0.05, momentum=0.5), "pod", shard_center=shard_center, **OUTER)
  tx = optax.chain(optax.identity(), ow.stacked_workers(tx, "pod", W, mesh=mesh))
  if axis_type is AxisType.Explicit and jax.__version_info__ < (0, 11, 2):
    pytest.skip("JAX before 0.11.2 gathers these, with a warning that test_map_workers.py asks for")
  found, state = train(tx, params, targets)
  for (x, center), (expected_x, expected_center) in zip(found, zip(*expected), strict=True):
    assert_close(x.reshape(W, -1), expected_x, rtol=2e-6)
    assert_close(center.ravel(), expected_center, rtol=2e-6)
  (trace,) = jax.tree.leaves(state[1].inner_state)
  assert trace.shape == (W, 8, 4)
  if axis_type is not None:
    assert trace.sharding.spec[:2] == ("pod", "fsdp")


@pytest.mark.parametrize("boxes", ["linen", "nnx"])
@pytest.mark.parametrize("name", sorted(BOXED.keys() - {"staleness", "simulated", "towers"}))
def test_stacked_workers_flax_boxes_state_equals_stack_workers(name, boxes):
  """The names of the axes too, from which trainers infer where a state lies."""
  one, tx = {"linen": linen_boxes, "nnx": nnx_boxes}[boxes](), BOXED[name]()
  params = ow.stack_workers(one, 2, axis_name="pod")
  found = jax.eval_shape(ow.stacked_workers(tx, "pod", 2).init, params)
  expected = jax.eval_shape(lambda: ow.stack_workers(tx.init(one), 2, axis_name="pod"))
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)


def test_stacked_workers_errors_of_another_number():
  tx = ow.stacked_workers(ow.diloco(optax.sgd(0.1), "pod"), "pod", 3)
  params = jnp.ones((3, 2))
  fewer = params[:2]
  state = ow.resize_workers(tx.init(params), [0, 1])
  with pytest.raises(ValueError, match=r"updates must have a first axis of the 3 workers; it is"):
    tx.update(fewer, state, fewer)
  tx = ow.stacked_workers(ow.diloco(optax.sgd(0.1), "pod"), "pod", 2)
  assert tx.update(fewer, state, fewer)[0].shape == (2, 2)


def test_stacked_workers_init_starts_from_own_params():
  copy = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))
  tx = ow.stacked_workers(ow.elastic_average(copy, "pod"), "pod", 3)
  params = jnp.array([1.0, 2.0, 4.0])
  state = tx.init(params)
  assert_close(state.inner_state, params)
  assert float(state.center) == 1.0


def test_stacked_workers_extra_args_are_per_worker_if_stacked():
  """A weight of each worker, a number for all, a function, and an exchange that the caller asks."""
  seen = {}

  def init(params):
    return jnp.zeros_like(params)

  def update(updates, state, params=None, *, loss, each, value_fn):
    seen.update(loss=jnp.shape(loss), each=jnp.shape(each), value=value_fn())
    return -each * updates, state + loss

  inner = optax.GradientTransformationExtraArgs(init, update)
  tx = ow.local_steps(inner, "pod", communication_period=5)
  tx = ow.stacked_workers(tx, "pod", 2)
  params = jnp.zeros((2, 3))
  extra_args = {"loss": jnp.asarray(2.5), "each": jnp.array([1.0, 10.0]), "value_fn": lambda: 7}

  @jax.jit
  def step(params, state, extra):
    grads = jnp.ones((2, 3))
    updates, state = tx.update(grads, state, params, **extra, value_fn=extra_args["value_fn"])
    params = optax.apply_updates(params, updates)
    weight = jnp.array([3.0, 1.0])
    updates, state = tx.update(None, state, params, exchange=True, participation=weight)
    return params, optax.apply_updates(params, updates), state

  arrays = {k: x for k, x in extra_args.items() if k != "value_fn"}
  before, after, state = step(params, tx.init(params), arrays)
  assert seen == {"loss": (), "each": (), "value": 7}
  assert_close(before, np.array([[-1.0] * 3, [-10.0] * 3]))
  assert_close(after, np.full((2, 3), -13 / 4))
  assert_close(state.inner_state, np.full((2, 3), 2.5))


def test_stacked_workers_explicit_mesh_scalar_weight_is_shared():
  """On an Explicit mesh its type names axes that the workers' shard_map does not have."""
  if jax.__version_info__ < (0, 11, 2):
    pytest.skip("JAX before 0.11.2 gathers these, with a warning that test_map_workers.py asks for")
  mesh = jax.make_mesh((W, 4), ("pod", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
  tx = ow.local_steps(optax.sgd(0.1), "pod", communication_period=1)
  tx = ow.stacked_workers(tx, "pod", W, mesh=mesh)
  params = jax.device_put(jnp.ones((W, 8)), NamedSharding(mesh, P("pod", "fsdp")))
  step = jax.jit(lambda p, s: tx.update(p, s, p, participation=(p**2).sum())[0])
  assert_close(step(params, tx.init(params)), np.full((W, 8), -0.1))


def test_stacked_workers_exchange_of_fragments_and_outside():
  inner = ow.local_steps(optax.sgd(0.1), "pod", communication_period=100, fragments=2)
  inner = ow.stacked_workers(inner, "pod", W)
  params = {"a": jnp.array([1.0, 3.0]), "b": jnp.array([0.0, 4.0])}
  grads = jax.tree.map(jnp.zeros_like, params)
  updates, _ = inner.update(grads, inner.init(params), params, exchange=range(2))
  assert_close(optax.apply_updates(params, updates), {"a": np.full(2, 2.0), "b": np.full(2, 2.0)})
  # Lookahead round all of them.
  outside = ow.local_steps(inner, None, communication_period=2, outer=optax.sgd(0.5))
  state = outside.init(params)
  for _ in range(2):
    updates, state = outside.update({"a": jnp.ones(2), "b": jnp.ones(2)}, state, params)
    params = optax.apply_updates(params, updates)
  assert_close(params, {"a": np.array([0.9, 2.9]), "b": np.array([-0.1, 3.9])})


@pytest.mark.parametrize("boxes", [linen_boxes, nnx_boxes])
def test_stacked_workers_flax_boxes_errors_axis_name(boxes):
  tx = ow.stacked_workers(ow.diloco(optax.sgd(0.1), "pod"), "pod", 2)
  for name in (None, "replica"):
    with pytest.raises(ValueError, match="boxes must name their first axis 'pod', got"):
      tx.init(ow.stack_workers(boxes(), 2, axis_name=name))


def test_stacked_workers_errors_first_axis_and_arguments():
  tx = ow.stacked_workers(ow.diloco(optax.sgd(0.1), "pod"), "pod", 3)
  for params in ({"k": jnp.zeros((2, 4))}, {"k": jnp.zeros(())}):
    with pytest.raises(ValueError, match="a first axis of the 3 workers; k is"):
      tx.init(params)
  with pytest.raises(ValueError, match="num_workers must be"):
    ow.stacked_workers(ow.diloco(optax.sgd(0.1), "pod"), "pod", 0)
  with pytest.raises(TypeError, match="tx must be"):
    ow.stacked_workers(lambda x: x, "pod", 3)
