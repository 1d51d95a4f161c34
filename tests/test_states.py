"""States that users declare: layouts, checkpoints and what is refused."""

import dataclasses
import pickle
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_wrappers as ow


@ow.states.dataclass
class Counting:
  """State of `counting`: a mean that all workers share, and each worker's own number."""

  calls: jax.Array = ow.states.field("lockstep")
  mean: Any = ow.states.field("shared")
  own: Any
  inner_state: Any


def counting(inner):
  """Counts the calls of an optimizer, and keeps the mean of the updates over the workers."""

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return Counting(calls=jnp.array(0), mean=zeros, own=zeros, inner_state=inner.init(params))

  def update(updates, state, params=None):
    mean = jax.lax.pmean(updates, "workers")
    own, updates = updates, inner.update(updates, state.inner_state, params)
    return updates[0], state.replace(
      calls=state.calls + 1, mean=mean, own=own, inner_state=updates[1]
    )

  return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("has_mesh", [False, True])
def test_declared_state_under_map_workers(has_mesh):
  mesh = jax.make_mesh((4,), ("workers",)) if has_mesh else None
  tx = counting(optax.sgd(1.0))
  state = ow.stack_workers(tx.init(jnp.zeros(2)), 4)
  assert state.calls.shape == () and state.mean.shape == (2,) and state.own.shape == (4, 2)
  grads = jnp.arange(8.0).reshape(4, 2)
  step = jax.jit(ow.map_workers(tx.update, "workers", mesh=mesh))
  updates, state = step(grads, state, jnp.zeros((4, 2)))
  updates, state = step(2 * grads, state, jnp.zeros((4, 2)))
  np.testing.assert_array_equal(updates, -2 * np.arange(8.0).reshape(4, 2))
  assert state.calls == 2
  np.testing.assert_array_equal(state.mean, [6, 8])
  np.testing.assert_array_equal(state.own, 2 * np.arange(8.0).reshape(4, 2))


def test_declared_state_resized():
  tx = ow.elastic_average(counting(optax.sgd(1.0)), "workers")
  state = ow.stack_workers(tx.init(jnp.zeros(2)), 4)
  # Inside a worker's own state, what workers share elsewhere is that worker's; calls are not.
  assert state.inner_state.mean.shape == (4, 2) and state.inner_state.calls.shape == ()
  params = jnp.arange(8.0).reshape(4, 2)
  params, state = ow.resize_workers((params, state), keep=[0, 2])
  assert state.inner_state.own.shape == (2, 2) and state.inner_state.calls.shape == ()


def test_declared_state_saved():
  state = counting(optax.adam(1.0)).init(jnp.ones(3))
  state = state.replace(own=jnp.arange(3.0))
  restored = flax.serialization.from_bytes(
    jax.tree.map(jnp.zeros_like, state), flax.serialization.to_bytes(state)
  )
  for copy in (restored, pickle.loads(pickle.dumps(state))):
    assert isinstance(copy, Counting) and isinstance(copy, ow.states.State)
    jax.tree.map(np.testing.assert_array_equal, copy, state)
  with pytest.raises(dataclasses.FrozenInstanceError):
    state.calls = 1
  assert ow.get_state((optax.EmptyState(), state), Counting) is state


def test_dataclass_keeps_methods_and_bases():
  class Scaled:
    def twice(self):
      return 2 * self.x

  @ow.states.dataclass
  class Value(Scaled):
    """A value."""

    x: Any

    def plus(self, y):
      return self.x + y

  value = Value(x=jnp.array(3))
  assert value.twice() == 6 and value.plus(1) == 4 and isinstance(value, ow.states.State)
  assert Value.__doc__ == "A value." and Value.__module__ == __name__
  assert repr(value) == "Value(x=3)" and list(value) == [3]


@pytest.mark.parametrize("name", ["metrics", "fields", "may_skip", "replace", "to_tuple"])
def test_dataclass_field_named_like_a_method(name):
  body = {"__annotations__": {name: Any}}
  with pytest.raises(ValueError, match=f"Mine has a field named '{name}'"):
    ow.states.dataclass(type("Mine", (), body))


@pytest.mark.parametrize(("base", "name"), [(object, "twice"), (ow.states.ExchangeState, "center")])
def test_dataclass_field_that_hides_a_method(base, name):
  body = {"__annotations__": {name: Any}, "twice": lambda self: 2}
  with pytest.raises(ValueError, match=f"Mine has a field named '{name}'"):
    ow.states.dataclass(type("Mine", (base,), body))


def test_field_of_unknown_word():
  with pytest.raises(ValueError, match=r"whose must be one of .*'shared'.*, got 'mine'"):
    ow.states.field("mine")
