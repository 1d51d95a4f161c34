"""Workers that take no part in a synchronization."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, bits, in_context
from jax.sharding import AxisType, PartitionSpec
from local_steps_cases import steps_of

import optax_wrappers as ow
from optax_wrappers._workers import _participation

# Participation.


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked", "sharded_vmap"])
@pytest.mark.parametrize("absent", ["pull", "keep"])
@pytest.mark.parametrize("divided", [False, True])
def test_participation_zero_or_nan_worker_counts_in_no_mean(context, absent, divided):
  """The same with participation 0; a worker is repaired if it was finite before the step."""
  tx = ow.local_steps(
    optax.sgd(1.0),
    AXIS,
    communication_period=1,
    outer=optax.sgd(1.0, momentum=0.5),
    absent=absent,
    shard_center=divided,
  )
  start = jnp.zeros(2)
  state = tx.init(start)
  axes = ow.worker_axes(state)
  params, state = ow.stack_workers(start, 3), ow.stack_workers(state, 3)

  def step(grads, state, params, participation):
    updates, state = tx.update(grads, state, params, participation=participation)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, 3, (0, axes, 0, 0), (0, axes))
  grads = np.float32([[-1, -2], [np.nan, 0], [-3, -4]])
  for weights in ([1.0, 1.0, 1.0], [1.0, 0.0, 1.0]):
    found, after = step(jnp.asarray(grads), state, params, jnp.float32(weights))
    np.testing.assert_array_equal(ow.center_params(after, start), [2.0, 3.0])
    np.testing.assert_array_equal(found[::2], [[2.0, 3.0]] * 2)
    np.testing.assert_array_equal(found[1], [2.0, 3.0] if absent == "pull" else [np.nan, 0.0])
  # If no worker participates, the center stands still, and they go to it.
  nobody = (np.ones((3, 2)), np.zeros(3)), (np.full((3, 2), np.nan), np.ones(3))
  for gone, weights in nobody:
    found, after = step(jnp.float32(gone), state, params, jnp.float32(weights))
    np.testing.assert_array_equal(found, np.zeros((3, 2)) if absent == "pull" else -gone)
    assert bits(after.outer_state) == bits(state.outer_state)
    assert bits(ow.center_params(after, start)) == bits(ow.center_params(state, start))


NOBODY = {
  "alone": {},
  "pull": {"pull": 0.5},
  "delay": {"delay": 1},
  "fragments": {"fragments": 2},
  "codec": {"codec": ow.codecs.quantize(8)},
  "radial mean": {"reduction": ow.contrib.radial_mean(AXIS)},
  "sum": {"reduction": "sum"},
  "reset": {"inner_state": "reset"},
  "average": {"inner_state": "average"},
  "shard_center": {"shard_center": True},
}


@pytest.mark.parametrize("options", NOBODY.values(), ids=NOBODY)
def test_participation_of_nobody_takes_workers_to_center(options):
  """From -1 and -3 to a center at 0 that keeps its momentum; with a delay a step later."""
  more = {"outer": optax.sgd(1.0, momentum=0.9), "communication_period": 2} | options
  tx = ow.local_steps(optax.sgd(1.0, momentum=0.5), AXIS, **more)
  start = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
  params, state = ow.stack_workers((start, tx.init(start)), 2)

  @jax.jit
  @functools.partial(ow.map_workers, axis_name=AXIS)
  def step(params, state, slope):
    grads = jax.tree.map(lambda x: jnp.full_like(x, slope), params)
    updates, state = tx.update(grads, state, params, participation=jnp.float32(0))
    return optax.apply_updates(params, updates), state

  before = state
  for slope in ([1.0, 3.0], [-0.5, -1.5], [0.0, 0.0]):  # with the momentum, the second step is 0
    if "delay" not in options and slope == [0.0, 0.0]:
      break
    params, state = step(params, state, jnp.array(slope))
  expected = np.array([-1.0, -3.0]) * (1 - options.get("pull", 1.0))
  for leaf in jax.tree.leaves(params):
    np.testing.assert_allclose(leaf, np.tile(expected[:, None], leaf.shape[1]), atol=1e-6)
  assert bits(state.outer_state) == bits(before.outer_state)


def test_participation_weights_that_overflow_give_nan():
  tx = ow.local_steps(optax.sgd(1.0), AXIS, communication_period=1)
  params, _ = steps_of(tx, [[3e38, 3e38]], [[1e-3, 2e-3]])
  assert np.isnan(params).all()


def test_participation_per_device_of_worker_is_error():
  tx = ow.diloco(ow.cross_shard(optax.sgd(1.0), "chip"), "pod", communication_period=1)
  mesh = jax.make_mesh((2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2)
  state = tx.init(jnp.float32(0.0))

  def step(grads, weights):
    params = ow.per_shard(jnp.float32(0.0), "pod")
    return tx.update(grads[0], state, params, participation=weights[0])[0][None]

  over = PartitionSpec(("pod", "chip"))
  with pytest.raises(
    ValueError,
    match=r"participation, one weight of a worker, differs from shard to shard over.*chip.*Sum",
  ):
    jax.shard_map(step, mesh=mesh, in_specs=over, out_specs=over)(jnp.ones(4), jnp.ones(4))


def test_participation_is_finite_sends_over_axes_in_one_order():
  """Not in that of a set, which differs between the processes of one program."""
  names = ("c", "one", "a", "other", "b")
  mesh = jax.make_mesh((2, 1, 2, 1, 2), names, axis_types=(AxisType.Auto,) * 5)
  spec = PartitionSpec(names)
  step = jax.shard_map(
    lambda x: _participation.is_finite(x, ()), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
  )
  program = str(jax.make_jaxpr(step)(np.zeros(8, np.float32)))
  assert "axes=('a', 'b', 'c', 'one', 'other')" in program
