"""Lookup, layout and serialization of states."""

import copy
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, assert_close, bits

import optax_wrappers as ow

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def everything():
  """All wrappers with a state, nested."""
  tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), None, rho=0.1, communication_period=2)
  return ow.drop_stale(ow.gather_towers(tx, 2), 3)


def test_get_state_in_chain_mask_and_nested_wrappers():
  tx = optax.chain(optax.clip(1.0), optax.masked(everything(), {"w": True, "b": False}))
  state = tx.init(PARAMS)
  for cls in (ow.states.DropStaleState, ow.states.GatherTowersState, ow.states.ElasticAverageState):
    assert isinstance(ow.get_state(state, cls), cls)


def test_get_state_two_nested_of_one_class_is_error():
  tx = ow.gather_towers(ow.gather_towers(optax.sgd(0.1), 2), 3)
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match="exactly one GatherTowersState, found 2"):
    ow.get_state(state, ow.states.GatherTowersState)
  inner = ow.get_state(state.inner_state, ow.states.GatherTowersState)
  assert bits(inner) == bits(state.inner_state)


def test_get_state_errors_none_found_or_not_a_class():
  with pytest.raises(ValueError, match="exactly one DropStaleState, found 0"):
    ow.get_state(optax.adam(0.1).init(PARAMS), ow.states.DropStaleState)
  with pytest.raises(TypeError, match="state_class must be a class"):
    ow.get_state(everything().init(PARAMS), everything())


def test_states_are_frozen_and_replace_copies():
  state = everything().init(PARAMS)
  with pytest.raises(AttributeError):
    state.step = 3
  assert int(state.replace(step=jnp.int32(3)).step) == 3
  assert int(state.step) == 0


@pytest.mark.parametrize("save", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_states_pickle_and_deepcopy_bit_for_bit(save):
  state = everything().init(PARAMS)
  restored = save(state)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert bits(restored) == bits(state)


def test_checkpoint_by_flax_mid_period_resumes_bit_for_bit():
  tx, params = everything(), PARAMS
  state = tx.init(params)

  def steps(params, state, start, stop):
    for i in range(start, stop):
      grads = jax.tree.map(lambda p, i=i: jnp.cos(p + i), params)
      updates, state = tx.update(grads, state, params, computed_at=max(0, i // 2 - i % 5))
      params = optax.apply_updates(params, updates)
    return params, state

  half = steps(params, state, 0, 7)
  expected = steps(*half, 7, 15)
  saved = flax.serialization.to_bytes(half)
  restored = flax.serialization.from_bytes((params, tx.init(params)), saved)
  assert jax.tree.structure(restored) == jax.tree.structure(half)
  assert bits(steps(*jax.tree.map(jnp.asarray, restored), 7, 15)) == bits(expected)

  as_dict = flax.serialization.to_state_dict(half[1])
  assert set(as_dict) == set(ow.states.DropStaleState.__dataclass_fields__)
  as_dict.pop("step")
  with pytest.raises(ValueError, match="DropStaleState has the fields"):
    flax.serialization.from_state_dict(half[1], as_dict)


def test_map_params_of_optax_reaches_center_but_not_step():
  tx = everything()
  state = tx.init(PARAMS)
  doubled = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
  elastic = doubled.inner_state.inner_state
  assert_close(elastic.center, jax.tree.map(lambda p: np.asarray(p) + 1, PARAMS))
  assert int(doubled.step) == 0


def test_checkpoint_by_flax_of_other_arguments_is_error():
  with_rho = ow.elastic_average(optax.sgd(0.1), None, rho=0.1).init(PARAMS)
  without = ow.elastic_average(optax.sgd(0.1), None).init(PARAMS)
  for target, source, message in (
    (
      with_rho,
      without,
      "ElasticKept.pulled_center is needed, but the saved state does not have it",
    ),
    (
      without,
      with_rho,
      "ElasticKept.pulled_center is not used here, but the saved state has it",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      flax.serialization.from_bytes(target, flax.serialization.to_bytes(source))


def test_states_repr_of_dtypes_shapes_and_specs():
  state = everything().init(PARAMS)
  assert "int32" in repr(jax.tree.map(lambda x: x.dtype, state))
  assert "(2, 3)" in repr(jax.tree.map(lambda x: x.shape, state.inner_state.accumulated))
  assert "P" in repr(ow.specs(state, workers=AXIS))


NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def rounds(**options):
  return ow.local_steps(optax.sgd(0.1), AXIS, communication_period=4, **options)


def elastic(**options):
  return ow.elastic_average(optax.sgd(0.1), AXIS, communication_period=4, **options)


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    (rounds(outer=NESTEROV), rounds(outer=NESTEROV, delay=1), "delay=False.*this is.*delay=True"),
    (rounds(delay=2), rounds(), "delay=True.*this is.*delay=False"),
    (rounds(fragments=2), rounds(fragments=3), "fragments=2.*this is.*fragments=3"),
    (rounds(fragments=3), rounds(fragments=2), "fragments=3.*this is.*fragments=2"),
    (rounds(), rounds(outer=NESTEROV), "outer=False.*this is.*outer=True"),
    (rounds(outer=NESTEROV), rounds(), "outer=True.*this is.*outer=False"),
    (
      rounds(outer=NESTEROV),
      rounds(outer=NESTEROV, shard_center=True),
      "shard_center=False.*this is.*shard_center=True",
    ),
    (
      rounds(outer=NESTEROV),
      rounds(outer=NESTEROV, codec=ow.codecs.quantize(8)),
      "codec=False.*this is.*codec=True",
    ),
    (elastic(), elastic(rho=0.1), "rho=False.*this is.*rho=True"),
    (elastic(), rounds(outer=NESTEROV), "must be a LocalStepsState.*got ElasticAverageState"),
    (
      rounds(),
      ow.contrib.gossip_average(optax.sgd(0.1), AXIS),
      "reduction=.*this is.*exchanges='_Gossip'",
    ),
  ],
)
def test_state_of_exchange_with_other_arguments_is_error(old, new, message):
  """In memory or pickled, where nothing else compares them: workers would average, and the center
  of the old run would stand still forever."""
  params = {"a": jnp.zeros(3), "b": jnp.zeros(3), "c": jnp.zeros(3)}
  state = pickle.loads(pickle.dumps(old.init(params)))
  workers, state = ow.stack_workers((params, state), 2)

  def step(params, state):
    return new.update(jax.tree.map(jnp.ones_like, params), state, params)

  with pytest.raises((TypeError, ValueError), match=message):
    jax.jit(ow.map_workers(step, AXIS))(workers, state)


ALONE = optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
  ("tx", "other", "extra", "message"),
  [
    (
      ow.contrib.simulate_workers(ALONE, 2),
      ow.contrib.simulate_workers(ALONE, 3),
      {},
      "made for num_workers=3, and this is 2",
    ),
    (ow.contrib.simulate_workers(ALONE, 2), ALONE, {}, "must be a SimulatedWorkersState"),
    (ow.drop_stale(ALONE, 2), ALONE, {"computed_at": 0}, "must be a DropStaleState"),
    (ow.gather_towers(ALONE, 2), ALONE, {}, "must be a GatherTowersState"),
    (
      ow.cross_shard(ALONE, None, nonfinite="drop"),
      ow.cross_shard(ALONE, None),
      {},
      "cross_shard: .*'nonfinite': 'propagate'}, and this is .*'drop'",
    ),
    (
      ow.cross_shard(ALONE, None),
      ow.cross_shard(ALONE, None, nonfinite="drop"),
      {},
      "cross_shard: .*'nonfinite': 'drop'}, and this is .*'propagate'",
    ),
    (ow.clip_variables(ALONE, lambda _: 1.0), ALONE, {}, "must be a ProjectVariablesState"),
    (
      ow.contrib.delay_compensation(decay=0.9),
      ow.contrib.delay_compensation(),
      {"computed_params": jnp.ones(2)},
      "decay is 0.9, but the state was made without one",
    ),
    (
      ow.contrib.delay_compensation(),
      ow.contrib.delay_compensation(decay=0.9),
      {"computed_params": jnp.ones(2)},
      "decay is None, but the state was made with one",
    ),
  ],
)
def test_state_of_other_wrapper_or_arguments_is_error(tx, other, extra, message):
  params = jnp.ones(2)
  with pytest.raises((TypeError, ValueError), match=message):
    tx.update(params, other.init(params), params, **extra)


MOMENTUM = optax.sgd(0.1, momentum=0.9)


# For people.


@pytest.mark.optax_promotes
def test_states_repr_of_nested_wrappers_is_short():
  tx = ow.drop_stale(ow.elastic_average(MOMENTUM, None), 1)
  text = repr(tx.init({"w": jnp.ones((300, 20))}))
  assert text == (
    "DropStaleState(step=0, dropped=0, inner_state=ElasticAverageState(step=0, since=0,"
    " exchanges=0, inner_state=(TraceState(trace={'w': float32[300, 20]}), EmptyState()),"
    " workers=Workers((), fragments=1, delay=False, shard_center=False, rho=False),"
    " kept=(ElasticKept(center={'w':"
    " float32[300, 20]}, outer_state=None, pulled_center=None),), countdown=None, in_flight=None,"
    " restarts=None),"
    " accepted=0, histogram=int32[32])"
  )
  many = ow.drop_stale(optax.adam(0.1), 1).init([jnp.ones(10)] * 50)
  assert repr(many).startswith(
    "DropStaleState(step=0, dropped=0, inner_state=<101 arrays, 4,004 bytes>, accepted=0"
  )
  assert "int32[]" in str(jax.eval_shape(lambda: many))
