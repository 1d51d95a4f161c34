"""The Flax TrainState that passes extra args."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits

import optax_wrappers as ow
from optax_wrappers.train_state import TrainState


class WithStats(TrainState):
  batch_stats: jax.Array


def make(tx, cls=TrainState, **fields):
  return cls.create(apply_fn=None, params={"w": jnp.array([1.0, 2.0])}, tx=tx, **fields)


def test_train_state_passes_extra_args_and_replaces_fields():
  state = make(ow.drop_stale(optax.sgd(1.0), 0), WithStats, batch_stats=jnp.zeros(()))
  grads = {"w": jnp.ones(2)}
  state = state.apply_gradients(grads=grads, computed_at=0, batch_stats=jnp.ones(()))
  state = state.apply_gradients(grads=grads, computed_at=0)
  np.testing.assert_array_equal(state.params["w"], [0.0, 1.0])
  assert (int(state.step), float(state.batch_stats), float(ow.metrics(state)["drop_rate"])) == (
    2,
    1.0,
    0.5,
  )
  assert isinstance(state, WithStats)


def test_train_state_under_jit_compiles_once():
  # Flax starts with a Python int.
  state = make(ow.drop_stale(optax.sgd(1.0), 0)).replace(step=jnp.int32(0))
  step = jax.jit(lambda state, stamp: state.apply_gradients(grads=state.params, computed_at=stamp))
  for _ in range(3):
    state = step(state, state.opt_state.step)
  assert step._cache_size() == 1


def test_train_state_without_extra_args_equals_flax():
  from flax.training import train_state

  inner = optax.sgd(0.1, momentum=0.9)
  ours, theirs = make(inner), make(inner, train_state.TrainState)
  for _ in range(3):
    ours, theirs = (
      s.apply_gradients(grads=jax.tree.map(jnp.sin, s.params)) for s in (ours, theirs)
    )
  assert bits(ours) == bits(theirs)


def test_train_state_without_computed_at_is_error():
  with pytest.raises(ValueError, match="computed_at is needed"):
    make(ow.drop_stale(optax.sgd(1.0), 0)).apply_gradients(grads={"w": jnp.ones(2)})


def test_train_state_trains_linen_model_with_weighted_towers():
  model = nn.Dense(1)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 3)), jnp.float32)
  y = x @ jnp.array([[1.0], [-2.0], [0.5]])
  tx = ow.gather_towers(optax.sgd(0.2), 2)
  state = TrainState.create(
    apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx
  )

  @jax.jit
  def step(state, x, y, weight):
    def loss(params):
      return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params), weight=weight)

  for _ in range(100):
    state = step(state, x[:16], y[:16], 1.0)
    state = step(state, x[16:], y[16:], 3.0)
  np.testing.assert_allclose(np.ravel(state.params["kernel"]), [1.0, -2.0, 0.5], atol=1e-3)
