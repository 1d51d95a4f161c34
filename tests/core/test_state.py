"""Lookup, layout and serialization of states."""

import copy
import os
import pickle
import subprocess
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from helpers import AXIS, CONTEXTS, assert_close, bits, in_context, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def everything():
  """All wrappers with a state, nested."""
  tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), None, rho=0.1, communication_period=2)
  return ow.drop_stale(ow.gather_towers(tx, 2), 3)


def shape_tree(tree):
  return jax.tree.map(jnp.shape, tree)


def test_get_state_through_every_nesting():
  tx = optax.chain(optax.clip(1.0), optax.masked(everything(), {"w": True, "b": False}))
  state = tx.init(PARAMS)
  for cls in (ow.DropStaleState, ow.GatherTowersState, ow.ElasticAverageState):
    assert isinstance(ow.get_state(state, cls), cls)


def test_get_state_finds_states_of_one_class_inside_each_other():
  tx = ow.gather_towers(ow.gather_towers(optax.sgd(0.1), 2), 3)
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match="exactly one GatherTowersState, found 2"):
    ow.get_state(state, ow.GatherTowersState)
  inner = ow.get_state(state.inner_state, ow.GatherTowersState)
  assert bits(inner) == bits(state.inner_state)


def test_get_state_errors():
  with pytest.raises(ValueError, match="exactly one DropStaleState, found 0"):
    ow.get_state(optax.adam(0.1).init(PARAMS), ow.DropStaleState)
  with pytest.raises(TypeError, match="state_class must be a class"):
    ow.get_state(everything().init(PARAMS), everything())


def test_layout_of_workers():
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

  specs = ow.worker_specs(state, AXIS)
  assert specs.inner_state.inner_state.center == {"w": P(), "b": P()}
  assert specs.inner_state.inner_state.pulled_center == {"w": P(AXIS), "b": P(AXIS)}
  assert ow.worker_specs(state, ("a", "b")).inner_state.accumulated["w"] == P(("a", "b"))


def test_layout_of_replicated_shards():
  state = everything().init(PARAMS)
  specs = ow.worker_specs(state, AXIS, replicated=True)
  own = [leaf == P(AXIS) for leaf in jax.tree.leaves(specs)]
  assert sum(own) == 3  # the accumulator's two leaves, and the weight of what is in it
  assert specs.inner_state.accumulated == {"w": P(AXIS), "b": P(AXIS)}
  stacked = ow.stack_workers(state, 4, replicated=True)
  assert shape_tree(stacked.inner_state.accumulated) == {"w": (4, 2, 3), "b": (4, 3)}
  assert shape_tree(stacked.inner_state.inner_state) == shape_tree(state.inner_state.inner_state)


def test_specs_make_shardings_that_pass_through_jit():
  mesh = mesh_of(4)
  state = ow.stack_workers(everything().init(PARAMS), 4)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), ow.worker_specs(state, AXIS))
  placed = jax.device_put(state, shardings)
  out = jax.jit(lambda s: s, in_shardings=(shardings,), out_shardings=shardings)(placed)
  assert jax.tree.map(lambda x: x.sharding, out) == shardings


def test_params_are_stacked_too_and_layouts_work_on_abstract_states():
  assert shape_tree(ow.stack_workers(PARAMS, 3)) == {"w": (3, 2, 3), "b": (3, 3)}
  abstract = jax.eval_shape(everything().init, PARAMS)
  assert jax.tree.structure(ow.worker_specs(abstract, AXIS)) == jax.tree.structure(abstract)
  with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
    ow.stack_workers(PARAMS, 0)


def test_states_are_frozen():
  state = everything().init(PARAMS)
  with pytest.raises(AttributeError):
    state.step = 3
  assert int(state.replace(step=jnp.int32(3)).step) == 3
  assert int(state.step) == 0


@pytest.mark.parametrize("save", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_pickle_and_deepcopy(save):
  state = everything().init(PARAMS)
  restored = save(state)
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  assert bits(restored) == bits(state)


def test_flax_serialization_resumes_in_mid_period_bit_for_bit():
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
  assert set(as_dict) == set(ow.DropStaleState.__dataclass_fields__)
  as_dict.pop("step")
  with pytest.raises(ValueError, match="DropStaleState has the fields"):
    flax.serialization.from_state_dict(half[1], as_dict)


def test_map_params_reaches_what_has_the_shape_of_parameters():
  tx = everything()
  state = tx.init(PARAMS)
  doubled = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
  elastic = doubled.inner_state.inner_state
  assert_close(elastic.center, jax.tree.map(lambda p: np.asarray(p) + 1, PARAMS))
  assert int(doubled.step) == 0


# What is shared depends on what stands outside.


def layout(tx, **options):
  return ow.worker_axes(tx.init(PARAMS), **options)


def test_counters_and_centers_inside_a_workers_own_state_are_its_own():
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


def test_inside_a_reduction_an_accumulator_is_one_for_all_shards():
  inside = ow.cross_shard(ow.gather_towers(optax.sgd(0.1), 2), AXIS)
  axes = layout(inside, replicated=True).inner_state
  assert (axes.tower, axes.total_weight, axes.accumulated) == (None, None, {"w": None, "b": None})
  assert isinstance(ow.get_state(inside.init(PARAMS), ow.GatherTowersState), ow.GatherTowersState)
  alone = layout(ow.cross_shard(ow.gather_towers(optax.sgd(0.1), 2), None), replicated=True)
  assert alone.inner_state.accumulated == {"w": 0, "b": 0}
  assert bits(pickle.loads(pickle.dumps(inside.init(PARAMS)))) == bits(inside.init(PARAMS))


def saved(tree):
  return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("save_at", [None, 1, 3])
def test_workers_that_drop_gradients_of_their_own_resume_as_they_were(context, save_at):
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
  np.testing.assert_array_equal(ow.get_state(state, ow.DropStaleState).dropped, [5, 4, 4, 0])


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", ["shard_map", "unchecked", "pmap", "vmap"])
@pytest.mark.parametrize("save_at", [None, 3])
def test_towers_behind_a_conditional_of_each_workers_own_resume_as_they_were(context, save_at):
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


def two_levels(outer, check_vma):
  """A center for each pod inside and one over `outer`: the mapped step, and what it starts from."""
  inner = ow.elastic_average(optax.sgd(0.1), "chip", communication_period=1, moving_rate=0.2)
  tx = ow.elastic_average(inner, outer, communication_period=2, moving_rate=0.1)
  state, both = tx.init(jnp.zeros(())), P(("pod", "chip"))
  axes, specs = ow.worker_axes(state), ow.worker_specs(state, ("pod", "chip"))

  def pick(fun, tree):
    return jax.tree.map(
      lambda a, x: x if a is None else fun(x), axes, tree, is_leaf=lambda a: a is None
    )

  def step(params, state, grad):
    updates, state = tx.update(grad[0], pick(lambda x: x[0], state), params[0])
    return (params[0] + updates)[None], pick(lambda x: x[None], state)

  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(both, specs, both), out_specs=(both, specs), check_vma=check_vma
  )
  return jax.jit(mapped), jnp.zeros(4), ow.stack_workers(state, 4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_levels_of_centers(check_vma):
  """Against NumPy, saved in the middle."""
  step, params, state = two_levels(("pod", "chip"), check_vma)
  pods = ref.Elastic(("chip",), 1, 0.2, 0.0, "simultaneous", ref.Sgd(0.1, 0.0))
  node = ref.Elastic(("pod", "chip"), 2, 0.1, 0.0, "simultaneous", pods)
  grads = np.array([1.0, 2.0, 5.0, 9.0])
  for i in range(6):
    if i == 3:
      params, state = saved((params, state))
    params, state = step(params, state, jnp.asarray(grads, jnp.float32))
  calls = [(grads[:, None], None, None)] * 6
  x, numpy_state = ref.run(node, np.zeros((4, 1)), calls, {"pod": 2, "chip": 2})
  assert_close(params, x[:, 0], rtol=1e-5)
  assert_close(state.center, numpy_state["center"][0, 0], rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_center_for_each_chip_which_no_layout_shows_is_an_error(check_vma):
  step, params, state = two_levels("pod", check_vma)
  with pytest.raises(ValueError, match=r"elastic_average: .*Name all the axes"):
    step(params, state, params)


def test_a_restored_state_of_other_arguments_is_an_error_that_says_so():
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


def test_importing_starts_no_backend():
  """jax.distributed.initialize must still be possible after it."""
  code = (
    "import jax, optax_wrappers; jax.config.update('jax_num_cpu_devices', 3);"
    " assert jax.device_count() == 3"
  )
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  environment["JAX_PLATFORMS"] = "cpu"
  subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=environment)


def test_states_of_anything_print():
  state = everything().init(PARAMS)
  assert "int32" in repr(jax.tree.map(lambda x: x.dtype, state))
  assert "(2, 3)" in repr(jax.tree.map(lambda x: x.shape, state.inner_state.accumulated))
  assert "P" in repr(ow.worker_specs(state, AXIS))


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
    (rounds(), ow.gossip_average(optax.sgd(0.1), AXIS), "must be a GossipState"),
  ],
)
def test_a_state_of_other_arguments_is_an_error_that_names_both(old, new, message):
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
      ow.simulate_workers(ALONE, 2),
      ow.simulate_workers(ALONE, 3),
      {},
      "'num_workers': 3}, and .*: 2",
    ),
    (ow.simulate_workers(ALONE, 2), ALONE, {}, "must be a SimulatedWorkersState"),
    (ow.drop_stale(ALONE, 2), ALONE, {"computed_at": 0}, "must be a DropStaleState"),
    (ow.gather_towers(ALONE, 2), ALONE, {}, "must be a GatherTowersState"),
    (ow.clip_variables(ALONE, lambda _: 1.0), ALONE, {}, "must be a ProjectVariablesState"),
    (
      ow.delay_compensation(decay=0.9),
      ow.delay_compensation(),
      {"computed_params": jnp.ones(2)},
      "mean square': False}, and this is .*True",
    ),
    (
      ow.delay_compensation(),
      ow.delay_compensation(decay=0.9),
      {"computed_params": jnp.ones(2)},
      "mean square': True}, and this is .*False",
    ),
  ],
)
def test_a_state_of_another_wrapper_or_of_other_arguments_names_both(tx, other, extra, message):
  params = jnp.ones(2)
  with pytest.raises((TypeError, ValueError), match=message):
    tx.update(params, other.init(params), params, **extra)
