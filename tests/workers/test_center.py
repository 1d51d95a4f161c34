"""The center of workers, whole and divided."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, assert_close, with_kept
from local_steps_cases import SIZES, WEIGHT, collectives

import optax_wrappers as ow


@pytest.mark.parametrize("make", [ow.elastic_average, ow.diloco])
def test_shard_center_errors_missing_params_and_wrong_share(make):
  tx = make(optax.sgd(0.1), AXIS, communication_period=1, shard_center=True)
  state = tx.init(jnp.zeros((2, 3)))
  with pytest.raises(ValueError, match=r"center_params: params is needed"):
    ow.center_params(state)
  assert ow.center_params(state, jax.ShapeDtypeStruct((2, 3), jnp.float32)).shape == (2, 3)
  axes = ow.worker_axes(state)
  whole = jax.tree.map(
    lambda axis, x: x if axis is None else jnp.stack([x] * 2),
    axes,
    state,
    is_leaf=lambda x: x is None,
  )
  update = jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
  with pytest.raises(
    ValueError,
    match=r"center_share must be 1/2 of each variable, \[1, 3\] for \[2, 3\], got \[2, 3\]",
  ):
    update(jnp.zeros((2, 2, 3)), whole, jnp.zeros((2, 2, 3)))


def test_shard_center_over_two_axes_matches_sum_of_workers():
  """A sum over workers that lie on a 2 x 3 mesh: every part must come back to where it was."""
  tx = ow.elastic_average(
    optax.sgd(0.1), ("i", "j"), communication_period=1, moving_rate=0.1, shard_center=True
  )
  params = np.random.default_rng(0).normal(size=(2, 3, 11)).astype(np.float32)
  state = ow.stack_workers(tx.init(jnp.zeros(11)), 6)
  axes = ow.worker_axes(state)
  stacked = with_kept(state, center=state.center_share.reshape(2, 3, 2))
  update = tx.update
  for name in ("j", "i"):
    update = jax.vmap(update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=name)
  _, after = update(jnp.zeros_like(params), stacked, jnp.asarray(params))
  center = ow.center_params(after, jax.ShapeDtypeStruct((11,), jnp.float32))
  assert_close(center, 0.1 * params.sum((0, 1)))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_shard_center_sends_reduce_scatter_and_all_gather(num_workers):
  """Each half of a variable that does not divide evenly is padded to a multiple of the workers."""
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=2, shard_center=True)
  shares = [4 * -(-n // num_workers) for n in SIZES.values()]
  expected = [("all-reduce", WEIGHT, True)]
  expected += [("all-gather", size, True) for size in shares]
  expected += [("reduce-scatter", size * num_workers, True) for size in shares]
  assert collectives(tx, num_workers) == sorted(expected)


@pytest.mark.parametrize("divided", [False, True])
def test_outer_state_with_hyperparams_or_params_can_be_donated(divided):
  """Injected numbers, and initial parameters, which share no buffer with ours."""
  outers = [optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)]
  if not divided:
    outers += [optax.apply_if_finite(optax.sgd(0.5), 3), optax.contrib.dog(1.0)]
  for outer in outers:
    options = {"outer": outer, "shard_center": divided}
    tx = ow.local_steps(optax.sgd(1.0), AXIS, communication_period=1, **options)
    params = jnp.zeros((2, 3))
    state = ow.stack_workers(tx.init(params[0]), 2)
    update = jax.jit(ow.map_workers(tx.update, AXIS), donate_argnums=1)
    updates, state = update(jnp.ones((2, 3)), state, params)
    assert np.isfinite(updates).all() and (np.asarray(updates) < 0).all()
    if outer is outers[0]:
      np.testing.assert_allclose(updates, -0.5 * np.ones((2, 3)))


# State.


def test_center_of_bfloat16_moves_and_momentum_has_no_rounding():
  """In bfloat16, steps of 1e-4 at 1 would be lost. And D is relative to the center as the worker
  received it: the rounding of the center does not enter the momentum."""
  tx = ow.local_steps(
    optax.sgd(1.0), AXIS, communication_period=1, outer=optax.sgd(0.01, momentum=0.9)
  )
  params = jnp.ones(2, jnp.bfloat16)
  state = tx.init(params[0])
  assert state.center.dtype == state.outer_state[0][0].trace.dtype == jnp.float32
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  state = ow.stack_workers(state, 2)
  for grad in (2.0**-7, 0.0, 0.0):  # one step of bfloat16 at 1
    updates, state = update(jnp.full(2, grad, jnp.bfloat16), state, params)
    params = optax.apply_updates(params, updates)
  step = 2.0**-7 * 0.01
  np.testing.assert_allclose(state.center, 1 - step * (1 + 0.9 + 0.81), rtol=1e-7)
  np.testing.assert_array_equal(params.astype(jnp.float32), [1.0, 1.0])


@pytest.mark.parametrize(
  ("outer", "match"),
  [
    (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "treat every element by itself"),
    (optax.adafactor(0.1), "cannot divide outer_state.*v_row"),
    (optax.lamb(0.1), "treat every element by itself"),
  ],
)
@pytest.mark.optax_promotes
def test_shard_center_errors_outer_optimizer_not_elementwise(outer, match):
  tx = ow.local_steps(optax.sgd(0.1), AXIS, outer=outer, shard_center=True)
  with pytest.raises(ValueError, match=match):
    tx.init({"a": jnp.ones((3, 2))})


def test_shard_center_keeps_zero_size_variables_and_prng_keys():
  params = {"e": jnp.zeros((0, 4)), "w": jnp.arange(3.0), "k": jax.random.key(0)}
  tx = ow.diloco(optax.sgd(0.1), AXIS, communication_period=1, shard_center=True)
  state = ow.stack_workers(tx.init(params), 2)
  center = ow.center_params(state, params)
  assert center["e"].shape == (0, 4)
  assert_close(center["w"], params["w"])
  assert (jax.random.key_data(center["k"]) == jax.random.key_data(params["k"])).all()


@pytest.mark.parametrize("shard_center", [False, True])
@pytest.mark.parametrize("how", ["partition", "masked"])
def test_center_params_of_a_part_of_the_variables(shard_center, how):
  params = {"base": jnp.ones(3), "lora": jnp.arange(4.0)}
  tx = ow.diloco(optax.sgd(0.1), "w", shard_center=shard_center)
  if how == "partition":
    tx = optax.partition({"t": tx, "f": optax.set_to_zero()}, {"base": "f", "lora": "t"})
  else:
    tx = optax.masked(tx, {"base": False, "lora": True})
  state = ow.stack_workers(tx.init(params), 2)
  np.testing.assert_array_equal(ow.center_params(state, params)["lora"], params["lora"])
