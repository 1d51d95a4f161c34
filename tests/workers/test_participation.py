"""Workers that take no part in a synchronization."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, bits, in_context
from jax.sharding import AxisType, PartitionSpec
from local_steps_cases import steps_of

import optax_wrappers as ow

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
  # If no worker participates, nothing changes.
  found, after = step(jnp.ones((3, 2)), state, params, jnp.zeros(3))
  np.testing.assert_array_equal(found, -np.ones((3, 2)))
  assert bits(after.outer_state) == bits(state.outer_state)
  assert bits(ow.center_params(after, start)) == bits(ow.center_params(state, start))


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
