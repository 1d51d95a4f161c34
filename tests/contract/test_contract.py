"""The contract with Optax and other libraries: every public wrapper times every promise."""

import copy
import dataclasses
import functools
import inspect
import itertools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_cases import MOMENTUM, PARAMS, alone, each_wrapper, gradient, make_step, regression
from helpers import AXIS, WRAPPERS, assert_close, bits, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes


def each_wrapper_that(holds):
  """The wrappers for which a promise is made; the test's name or docstring says which promise."""
  names = [name for name, wrapped in WRAPPERS.items() if holds(wrapped)]
  return pytest.mark.parametrize("wrapped", [WRAPPERS[name] for name in names], ids=names)


needs_no_extra_args = each_wrapper_that(lambda wrapped: not wrapped.extra_args)


def compiled(tx):
  """Its init and its update each as one program, not one for each of their operations."""
  return optax.GradientTransformationExtraArgs(jax.jit(tx.init), jax.jit(tx.update))


def types(tree):
  return jax.tree.map(lambda x: (jax.typeof(x), getattr(jax.typeof(x), "weak_type", None)), tree)


def test_wrappers_table_has_every_public_wrapper():
  """Every public function that wraps or makes an optimizer is in the table of helpers.py, except
  params_history, which needs one of them inside, and whole_matrices, which needs a mesh."""
  wrappers = {"all_reduce"}
  for room in (ow, ow.contrib):
    functions = {name: getattr(room, name) for name in room.__all__}
    wrappers |= {
      name
      for name, function in functions.items()
      if inspect.isfunction(function) and "inner" in inspect.signature(function).parameters
    }
  assert wrappers == set(WRAPPERS) | {"params_history", "whole_matrices"}


# State in equals state out.


@each_wrapper
def test_update_keeps_types_of_state_and_updates(wrapped):
  tx = alone(wrapped)
  state = tx.init(PARAMS)
  update = functools.partial(tx.update, **wrapped.extra_args)
  args = gradient(PARAMS, wrapped), state, PARAMS
  for updates, after in (update(*args), jax.eval_shape(update, *args)):  # outside jit and inside
    assert types(after) == types(state)
    assert types(updates) == types(PARAMS)


@each_wrapper
def test_scan_cond_and_fori_loop_carry_state(wrapped):
  step = jax.jit(make_step(alone(wrapped), wrapped))

  @jax.jit
  def in_all_three(carry, num_loops, condition):
    def body(carry, _):
      carry = jax.lax.fori_loop(0, num_loops, lambda _, carry: step(*carry), carry)
      return jax.lax.cond(condition, lambda carry: step(*carry), lambda carry: carry, carry), None

    return jax.lax.scan(body, carry, None, length=2)[0]

  start = expected = PARAMS, alone(wrapped).init(PARAMS)
  for _ in range(4):
    expected = step(*expected)
  assert_close(in_all_three(start, 1, True), expected, rtol=1e-5, atol=1e-6)


@each_wrapper
def test_update_with_donation_compiles_once(wrapped):
  tx = alone(wrapped)
  step = jax.jit(make_step(tx, wrapped), donate_argnums=(0, 1))
  params = jax.tree.map(jnp.copy, PARAMS)
  state = tx.init(params)
  for _ in range(3):
    params, state = step(params, state)
  assert step._cache_size() == 1


@each_wrapper
def test_init_of_abstract_params_has_same_structure(wrapped):
  tx = alone(wrapped)
  concrete = tx.init(PARAMS)
  for abstract in (
    jax.eval_shape(tx.init, PARAMS),
    tx.init(jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)),
  ):
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
      lambda x: (x.shape, x.dtype), concrete
    )


@each_wrapper
@pytest.mark.parametrize("axes", [(AXIS,), (AXIS, "data")], ids=["some", "all"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_init_inside_shard_map_is_that_outside(wrapped, axes, axis_type):
  """Over all axes of a mesh or over some: there a worker's moments begin again."""
  names = (AXIS, "data")
  mesh = jax.make_mesh((2, 2), names, axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
  tx = alone(wrapped)

  def init(params):
    return jax.tree.map(lambda x: x[None], tx.init(params))

  inside = jax.shard_map(
    init, mesh=mesh, in_specs=P(), out_specs=P(AXIS), axis_names=set(axes), check_vma=False
  )
  with jax.set_mesh(mesh):
    found = jax.tree.map(lambda x: x[1], jax.device_get(jax.jit(inside)(PARAMS)))
  chex.assert_trees_all_equal(found, jax.device_get(tx.init(PARAMS)))


@each_wrapper
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shardings_of_params_and_state_are_kept(wrapped, axis_type):
  mesh = mesh_of(2, axis_type)
  tx = alone(wrapped)
  placed = jax.tree.map(
    lambda leaf: jax.device_put(
      leaf, NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), AXIS) if leaf.ndim >= 2 else P())
    ),
    ({"kernel": PARAMS["kernel"]}, tx.init({"kernel": PARAMS["kernel"]})),
  )
  params, state = placed
  step = jax.jit(make_step(tx, wrapped))
  expected = make_step(tx, wrapped)(
    {"kernel": PARAMS["kernel"]}, tx.init({"kernel": PARAMS["kernel"]})
  )
  with jax.set_mesh(mesh):
    after = step(params, state)
  for before_leaf, leaf in zip(jax.tree.leaves((params, state)), jax.tree.leaves(after)):
    assert leaf.sharding.is_equivalent_to(before_leaf.sharding, leaf.ndim)
  assert_close(after, expected, rtol=1e-5, atol=1e-6)


# Optax's own combinators.


@each_wrapper
def test_chain_masked_and_partition_equal_wrapper_alone(wrapped):
  """Masked or partitioned to one leaf, a wrapper equals itself on that leaf alone."""
  grads = gradient(PARAMS, wrapped)
  only = {"kernel": PARAMS["kernel"]}
  tx = alone(wrapped)
  expected, _ = tx.update({"kernel": grads["kernel"]}, tx.init(only), only, **wrapped.extra_args)

  masked = optax.masked(tx, {"kernel": True, "bias": False})
  split = optax.partition({"a": tx, "b": optax.set_to_zero()}, {"kernel": "a", "bias": "b"})
  chained = optax.chain(optax.identity(), masked, optax.scale(2.0))
  for outer, scale in ((masked, 1), (split, 1), (chained, 2)):
    state = outer.init(PARAMS)
    updates, after = outer.update(grads, state, PARAMS, **wrapped.extra_args)
    assert_close(updates["kernel"], scale * np.asarray(expected["kernel"]))
    assert types(after) == types(state)


@each_wrapper
def test_inject_hyperparams_learning_rate_is_found_and_set(wrapped):
  tx = alone(wrapped, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
  state = tx.init(PARAMS)
  assert float(optax.tree.get(state, "learning_rate")) == pytest.approx(0.1)
  state = optax.tree.set(state, learning_rate=jnp.float32(0.0))
  params = PARAMS
  for _ in range(2):
    updates, state = tx.update(gradient(params, wrapped), state, params, **wrapped.extra_args)
    params = optax.apply_updates(params, updates)
  if wrapped not in (
    WRAPPERS["clip_variables"],
    WRAPPERS["project_variables"],
  ):  # with rate 0 only a clip changes anything
    assert bits(params) == bits(PARAMS)


def inner_steps(wrapped, num_calls):
  """The steps of the inner optimizer in so many calls, each with the stamp of the first."""
  if wrapped is WRAPPERS["gather_towers"]:
    return num_calls // 2  # of two towers
  if wrapped is WRAPPERS["simulate_workers"]:
    return num_calls - 1  # in the first, the first of two workers reads
  return min(num_calls, 3) if wrapped.extra_args else num_calls  # then the stamps are too old


@each_wrapper
def test_schedule_inside_wrapper_counts_inner_steps(wrapped):
  """A schedule that is the same number in every step equals the number."""
  pair = [alone(wrapped, optax.sgd(rate)) for rate in (lambda count: 0.1 + 0 * count, 0.1)]

  @jax.jit
  def step(held, i):
    return [make_step(tx, wrapped)(*one, i) for tx, one in zip(pair, held)]

  held = [(PARAMS, tx.init(PARAMS)) for tx in pair]
  for i in range(4):
    held = step(held, i)
  (found, state), (expected, _) = held
  assert_close(found, expected)

  def is_schedule(x):
    return isinstance(x, optax.ScaleByScheduleState)

  counts = [int(x.count) for x in jax.tree.leaves(state, is_leaf=is_schedule) if is_schedule(x)]
  assert counts == [inner_steps(wrapped, 4)]


@each_wrapper
def test_multi_steps_inside_wrapper_steps_every_second_time(wrapped):
  inside = alone(wrapped, optax.MultiSteps(MOMENTUM, 2).gradient_transformation())
  params, state = PARAMS, inside.init(PARAMS)
  step = jax.jit(make_step(inside, wrapped))
  for i in range(4):
    params, state = step(params, state, i)
  assert int(optax.tree.get(state, "gradient_step")) == inner_steps(wrapped, 4) // 2
  assert bits(params) != bits(PARAMS)


@each_wrapper_that(lambda wrapped: not wrapped.stacked and not wrapped.extra_args)
def test_multi_steps_around_wrapper_equals_steps_of_mean(wrapped):
  """Two micro-steps make a step of the mean. MultiSteps would average over the shape of stacked
  towers, and has one stamp for two micro-steps; see the test below."""
  tx = compiled(alone(wrapped))
  round_it = compiled(optax.MultiSteps(tx, 2).gradient_transformation())
  params, state = PARAMS, round_it.init(PARAMS)
  expected, expected_state = PARAMS, tx.init(PARAMS)
  for i in range(0, 8, 2):
    pair = [gradient(PARAMS, wrapped, i + k) for k in range(2)]
    for grads in pair:
      updates, state = round_it.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *pair)
    updates, expected_state = tx.update(mean, expected_state, expected)
    expected = optax.apply_updates(expected, updates)
  assert_close(params, expected, rtol=1e-5, atol=1e-6)


def test_multi_steps_around_drop_stale_takes_last_stamp():
  tx = optax.MultiSteps(ow.drop_stale(optax.sgd(1.0), 0), 2)
  params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
  for stamp in (0, 0, 0, 0):
    updates, state = tx.update(jnp.ones(()), state, params, computed_at=jnp.int32(stamp))
    params = optax.apply_updates(params, updates)
  assert (float(params), int(ow.get_state(state, ow.states.DropStaleState).dropped)) == (-1.0, 1)


@each_wrapper
def test_apply_if_finite_inside_wrapper_changes_nothing(wrapped):
  inside = alone(wrapped, optax.apply_if_finite(MOMENTUM, 3))
  steps = [(make_step(tx, wrapped), tx.init(PARAMS)) for tx in (inside, alone(wrapped))]
  found, expected = jax.jit(lambda: [step(PARAMS, state)[0] for step, state in steps])()
  assert_close(found, expected)


@each_wrapper_that(lambda wrapped: not wrapped.stacked)
def test_apply_if_finite_around_wrapper_skips_nan_step(wrapped):
  """Its branches are updates and zeros of one shape, and towers are stacked: put it inside."""
  around = optax.apply_if_finite(alone(wrapped), 3)
  state = around.init(PARAMS)
  bad = jax.tree.map(lambda g: g * jnp.nan, gradient(PARAMS, wrapped))
  updates, after = jax.jit(around.update)(bad, state, PARAMS, **wrapped.extra_args)
  assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
  assert bits(after.inner_state) == bits(state.inner_state)


@needs_no_extra_args
def test_lookahead_around_wrapper_is_half_of_two_steps(wrapped):
  inner = compiled(alone(wrapped))
  tx = optax.lookahead(inner, sync_period=2, slow_step_size=0.5)
  params = optax.LookaheadParams.init_synced(PARAMS)
  state = tx.init(params)
  expected, inner_state = PARAMS, inner.init(PARAMS)
  for i in range(3):
    updates, state = tx.update(gradient(params.fast, wrapped, i), state, params)
    params = optax.apply_updates(params, updates)
    updates, inner_state = inner.update(gradient(expected, wrapped, i), inner_state, expected)
    expected = optax.apply_updates(expected, updates)
    if i == 1:
      expected = jax.tree.map(lambda x, start: (x + start) / 2, expected, PARAMS)
  assert_close(params.fast, expected, rtol=1e-5)


@each_wrapper_that(lambda wrapped: wrapped.extra_args)
def test_lookahead_around_wrapper_with_extra_args_is_error(wrapped):
  tx = optax.lookahead(alone(wrapped), sync_period=2, slow_step_size=0.5)
  params = optax.LookaheadParams.init_synced(PARAMS)
  with pytest.raises(TypeError, match="unexpected keyword argument 'computed_at'"):
    tx.update(gradient(params.fast, wrapped), tx.init(params), params, **wrapped.extra_args)


@each_wrapper
def test_freeze_and_map_params_around_wrapper(wrapped):
  frozen = optax.chain(alone(wrapped), optax.freeze({"kernel": False, "bias": True}))
  updates, _ = frozen.update(
    gradient(PARAMS, wrapped), frozen.init(PARAMS), PARAMS, **wrapped.extra_args
  )
  assert not updates["bias"].any()

  tx = alone(wrapped)
  state = tx.init(PARAMS)
  marked = optax.tree.map_params(
    tx, lambda leaf: "param", state, transform_non_params=lambda leaf: "other"
  )
  for path, mark in jax.tree.leaves_with_path(marked):
    is_param = any(getattr(key, "key", None) in PARAMS for key in path)
    assert mark == ("param" if is_param else "other"), path


# Extra args.


@each_wrapper
def test_extra_args_unknown_pass_and_needed_reach_inner(wrapped):
  inner = optax.chain(optax.identity(), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
  tx = optax.chain(optax.clip(9.0), alone(wrapped, inner))
  state = tx.init(PARAMS)
  update = jax.jit(functools.partial(tx.update, unknown="anything"))
  for _ in range(6):
    _, state = update(
      gradient(PARAMS, wrapped), state, PARAMS, **wrapped.extra_args, value=jnp.float32(1.0)
    )
  assert float(optax.tree.get(state, "scale")) < 1.0


@each_wrapper
def test_line_search_inside_gets_value_and_value_fn(wrapped):
  def value_fn(params):
    return sum(jnp.sum((leaf - 1.0) ** 2) for leaf in jax.tree.leaves(params))

  inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
  tx = alone(wrapped, inner)
  params, state = PARAMS, tx.init(PARAMS)

  value_and_grad, losses = jax.jit(jax.value_and_grad(value_fn)), []
  for _ in range(5):
    value, grads = value_and_grad(params)
    losses.append(float(value))
    given = {"value": value, "grad": grads, "value_fn": value_fn, **wrapped.extra_args}
    updates, state = tx.update(wrapped.updates(grads, 2), state, params, **given)
    params = optax.apply_updates(params, updates)
  assert losses[-1] < losses[0]


# Nesting.


# (outer, inner) that make no sense, and the error. docs/contract.md explains each.
SENSELESS = {
  ("drop_stale", "drop_stale"): "computed_at is needed",
  ("drop_stale", "staleness_aware"): "computed_at is needed",
  ("staleness_aware", "drop_stale"): "computed_at is needed",
  ("staleness_aware", "staleness_aware"): "computed_at is needed",
  ("simulate_workers", "reduce_towers"): "put it outermost",
  ("gather_towers", "reduce_towers"): "put it outermost",
  ("elastic_average", "reduce_towers"): "put it outermost",
  ("local_steps", "reduce_towers"): "put it outermost",
  ("diloco", "reduce_towers"): "put it outermost",
  ("gossip_average", "reduce_towers"): "put it outermost",
  ("elastic_average", "primal_average"): "PrimalAverageState inside would keep its z",
  ("local_steps", "primal_average"): "PrimalAverageState inside would keep its z",
  ("diloco", "primal_average"): "PrimalAverageState inside would keep its z",
  ("gossip_average", "primal_average"): "PrimalAverageState inside would keep its z",
  (
    "reduce_towers",
    "reduce_towers",
  ): "stack the same towers' updates in every leaf|axis 0 of towers",
}

PAIRS = [(outer, inner) for outer in WRAPPERS for inner in WRAPPERS]


def nest(outer, inner):
  """The two wrappers, the one whose updates have the given form, and the extra args of both."""
  out, ins = WRAPPERS[outer], WRAPPERS[inner]
  tx = optax.with_extra_args_support(out.make(ins.make(MOMENTUM, None), None))
  # A simulation computes the ages of its gradients by itself.
  extra_args = {} if outer == "simulate_workers" else {**out.extra_args, **ins.extra_args}
  return tx, ins if ins.stacked else out, extra_args


@pytest.mark.parametrize(("outer", "inner"), SENSELESS)
def test_nesting_of_senseless_pair_is_error(outer, inner):
  tx, given, extra = nest(outer, inner)
  with pytest.raises(ValueError, match=SENSELESS[outer, inner]):
    tx.update(gradient(PARAMS, given), tx.init(PARAMS), PARAMS, **extra)


# Wrappers that reduce, gather, own their parameters, drop, and project.
KINDS = ("cross_shard", "gather_towers", "diloco", "drop_stale", "clip_variables")


@pytest.mark.parametrize(
  ("outer", "inner"), [pair for pair in itertools.product(KINDS, KINDS) if pair not in SENSELESS]
)
def test_nesting_of_two_kinds_keeps_state_and_moves_params(outer, inner):
  """Both orders run inside jit, with state in equal to state out. tests/fuzz nests all of
  them and checks the results."""
  tx, given, extra = nest(outer, inner)
  params, state = PARAMS, tx.init(PARAMS)
  update = jax.jit(tx.update)
  for i in range(4):
    updates, after = update(gradient(params, given, i), state, params, **extra)
    assert types(after) == types(state)
    params, state = optax.apply_updates(params, updates), after
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
  assert bits(params) != bits(PARAMS)


@pytest.mark.parametrize(("outer", "inner"), [pair for pair in PAIRS if pair not in SENSELESS])
def test_nesting_of_two_neutral_wrappers_equals_bare_optimizer(outer, inner):
  _, given, extra = nest(outer, inner)
  bare = WRAPPERS[inner].neutral(MOMENTUM)
  neutral = optax.with_extra_args_support(WRAPPERS[outer].neutral(bare))
  grads = jax.tree.map(jnp.cos, PARAMS)
  expected, _ = MOMENTUM.update(grads, MOMENTUM.init(PARAMS), PARAMS)
  actual, _ = neutral.update(given.updates(grads), neutral.init(PARAMS), PARAMS, **extra)
  assert bits(actual) == bits(expected)


def test_nesting_of_clip_variables_twice_with_other_masks():
  tx = ow.clip_variables(MOMENTUM, 0.5, mask={"kernel": True, "bias": False})
  tx = ow.clip_variables(tx, 0.1, mask={"kernel": False, "bias": True})
  params, _ = make_step(tx, WRAPPERS["clip_variables"])(PARAMS, tx.init(PARAMS))
  assert np.linalg.norm(np.asarray(params["kernel"], np.float64)) == pytest.approx(0.5, rel=3e-6)
  assert np.linalg.norm(np.asarray(params["bias"], np.float64)) == pytest.approx(0.1, rel=3e-6)


# Trees and dtypes.


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Layer:
  w: jax.Array
  b: jax.Array


def equinox_mlp():
  import equinox as eqx

  return eqx.filter(eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0)), eqx.is_inexact_array)


TREES = {
  "nested": lambda: {"a": [jnp.ones(2), (jnp.ones((2, 1)), {"b": jnp.ones(())})]},
  "named tuple": lambda: optax.LookaheadParams(fast=jnp.ones(2), slow=jnp.ones((1, 2))),
  "dataclass": lambda: Layer(w=jnp.ones((2, 2)), b=jnp.ones(2)),
  "equinox": equinox_mlp,
  "none leaves": lambda: {"a": jnp.ones(2), "b": None},
  "masked node": lambda: {"a": jnp.ones(2), "b": optax.MaskedNode()},
  "empty": dict,
  "scalar": lambda: jnp.ones(()),
  "zero size": lambda: {"a": jnp.ones((0, 3)), "b": jnp.ones(2)},
}


@each_wrapper
@pytest.mark.parametrize("tree", TREES)
def test_trees_of_every_kind_keep_structure(wrapped, tree):
  params = TREES[tree]()
  tx = compiled(alone(wrapped))
  state = tx.init(params)
  grads = wrapped.updates(jax.tree.map(lambda p: 0.5 * jnp.ones_like(p), params), 2)
  for _ in range(2):
    updates, state = tx.update(grads, state, params, **wrapped.extra_args)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    params = optax.apply_updates(params, updates)
  if jax.tree.leaves(params):
    assert bits(params) != bits(TREES[tree]())


DTYPES = ["float32", "bfloat16", "float16", "complex64", "float8_e4m3fn", "float8_e5m2", "float64"]


@each_wrapper
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_under_strict_promotion_are_kept(wrapped, dtype):
  with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("strict"):
    params = {"w": jnp.asarray([0.5, -1.5], dtype)}
    tx = compiled(alone(wrapped, optax.sgd(0.5)))
    if not wrapped.narrow and params["w"].dtype.itemsize < 4:
      with pytest.raises(TypeError, match=rf"'w'\] must be of float32 or wider, got {dtype}"):
        tx.init(params)
      return
    state = tx.init(params)
    grads = wrapped.updates({"w": jnp.asarray([1.0, 0.5], dtype)}, 2)
    for _ in range(2):
      updates, after = tx.update(grads, state, params, **wrapped.extra_args)
      assert updates["w"].dtype == params["w"].dtype
      assert types(after) == types(state)
      params, state = optax.apply_updates(params, updates), after
    assert params["w"].dtype == jnp.dtype(dtype)
    assert np.isfinite(np.asarray(params["w"]).astype(np.complex128)).all()
    assert (np.asarray(params["w"]).astype(np.complex128) != np.array([0.5, -1.5])).all()


# all_reduce wraps nothing: what is beside it in a chain is Optax's own.
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "all_reduce"])
@pytest.mark.parametrize(
  ("of_params", "of_grads"), [("bfloat16", "float32"), ("float32", "float16")]
)
def test_dtypes_of_state_are_kept_with_gradients_of_another(name, of_params, of_grads):
  """Also with moments, which Optax gives the dtype of the gradients."""
  wrapped = WRAPPERS[name]
  if not wrapped.narrow and of_params == "bfloat16":
    return  # refused, see above
  params = {"w": jnp.asarray([0.5, -1.5], of_params)}
  tx = compiled(alone(wrapped, optax.chain(optax.scale_by_adam(), optax.scale(-0.1))))
  state = tx.init(params)
  grads = wrapped.updates({"w": jnp.asarray([1.0, 0.5], of_grads)}, 2)
  for _ in range(2):
    updates, after = tx.update(grads, state, params, **wrapped.extra_args)
    assert types(after) == types(state)
    params, state = optax.apply_updates(params, updates), after
  assert params["w"].dtype == jnp.dtype(of_params)
  found = np.asarray(params["w"], np.float64)
  assert np.isfinite(found).all() and (found != [0.5, -1.5]).all()


@each_wrapper
def test_dtype_int32_leaf_is_error_that_names_leaf(wrapped):
  params = {"w": jnp.ones(2), "n": jnp.ones(2, jnp.int32)}
  tx = alone(wrapped, optax.identity())
  updates = jax.tree.map(lambda p: jnp.stack([p, p]) if wrapped.stacked else p, params)
  with pytest.raises(TypeError, match=r"\['n'\] has dtype int32"):
    tx.update(updates, tx.init(params), params, **wrapped.extra_args)


# Wrong gradients, optimizers, and trees.


@each_wrapper
def test_python_float_leaves_equal_array_leaves(wrapped):
  tx = alone(wrapped, optax.sgd(0.5))
  params = {"a": 1.0, "b": jnp.ones(2)}
  grads = wrapped.updates({"a": jnp.float32(2.0), "b": jnp.ones(2)}, 2)
  expected, _ = tx.update(grads, tx.init(params), params, **wrapped.extra_args)
  if not wrapped.stacked:
    grads = {"a": 2.0, "b": jnp.ones(2)}
  updates, _ = tx.update(grads, tx.init(params), params, **wrapped.extra_args)
  assert_close(updates, expected)


# all_reduce wraps nothing.
@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "all_reduce"])
def test_inner_not_an_optimizer_is_error_with_hint(name):
  more = {
    "gather_towers": (2,),
    "elastic_average": (AXIS,),
    "local_steps": (AXIS,),
    "diloco": (AXIS,),
    "gossip_average": (AXIS,),
    "drop_stale": (1,),
    "simulate_workers": (2,),
    "clip_variables": (1.0,),
  }
  more["project_variables"] = (ow.projections.max_norm(1.0),)
  wrap, named = getattr(ow if name in ow.__all__ else ow.contrib, name), name
  with pytest.raises(
    TypeError,
    match=rf"{named}: inner must be an optax\.GradientTransformation.*Call it: sgd\(\.\.\.\)",
  ):
    wrap(optax.sgd, *more.get(name, ()))
  for inner in (None, "batch", 0.1):
    with pytest.raises(TypeError, match=f"{named}: inner must be .*Pass the optimizer first"):
      wrap(inner, *more.get(name, ()))


@pytest.mark.parametrize(
  "name", ["gather_towers", "reduce_towers", "elastic_average", "clip_variables"]
)
def test_updates_of_other_tree_are_error_that_names_wrapper(name):
  wrapped = WRAPPERS[name]
  tx = alone(wrapped)
  with pytest.raises(ValueError, match=f"{name}: updates must have the structure of the"):
    tx.update({"other": jnp.ones((2, 2))}, tx.init(PARAMS), PARAMS)


# Derivatives.


# Saving.


@each_wrapper
def test_pickle_and_deepcopy_keep_state(wrapped):
  tx = alone(wrapped)
  _, state = make_step(tx, wrapped)(PARAMS, tx.init(PARAMS))
  for restored in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    chex.assert_trees_all_close(restored, state)
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(jax.tree.map(lambda x: x + 1, state), state)


@each_wrapper
def test_checkpoint_by_flax_resumes_bit_for_bit(wrapped):
  import flax.serialization

  step = make_step(alone(wrapped), wrapped)
  half = step(PARAMS, alone(wrapped).init(PARAMS))
  restored = flax.serialization.from_bytes(
    (PARAMS, alone(wrapped).init(PARAMS)), flax.serialization.to_bytes(half)
  )
  assert jax.tree.structure(restored) == jax.tree.structure(half)
  assert bits(step(*jax.tree.map(jnp.asarray, restored))) == bits(step(*half))


# Flax NNX and Equinox, trained.


@each_wrapper
def test_nnx_model_trains_and_state_lookups_take_optimizer(wrapped):
  from flax import nnx

  x, y = regression()
  model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, alone(wrapped, optax.sgd(0.2)), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer, stamp):
    def loss(model):
      return jnp.mean((model(x) - y) ** 2)

    extra = dict.fromkeys(wrapped.extra_args, stamp)
    optimizer.update(model, wrapped.updates(nnx.grad(loss)(model), 2), **extra)
    return loss(model)

  for i in range(80):
    loss = step(model, optimizer, jnp.int32(i))
  assert float(loss) < 1e-3
  for cls, lookup in (
    (ow.states.DropStaleState, ow.metrics),
    (ow.states.ElasticAverageState, ow.center_params),
  ):
    try:
      ow.get_state(optimizer.opt_state, cls)
    except ValueError:
      continue
    for holder in (optimizer, optimizer.opt_state):
      assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lookup(holder)))


@each_wrapper
def test_linen_model_trains_by_own_train_state(wrapped):
  from optax_wrappers.train_state import TrainState

  train_linen(wrapped, TrainState)


@needs_no_extra_args
def test_linen_model_trains_by_flax_train_state(wrapped):
  from flax.training import train_state

  train_linen(wrapped, train_state.TrainState)


def train_linen(wrapped, cls):
  import flax.linen as nn

  x, y = regression()
  model = nn.Dense(1)
  params = model.init(jax.random.key(0), x)["params"]
  state = cls.create(apply_fn=model.apply, params=params, tx=alone(wrapped, optax.sgd(0.2)))

  @jax.jit
  def step(state, stamp):
    grads = jax.grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - y) ** 2))(state.params)
    return state.apply_gradients(
      grads=wrapped.updates(grads, 2), **dict.fromkeys(wrapped.extra_args, stamp)
    )

  for i in range(80):
    state = step(state, jnp.int32(i))
  assert float(jnp.mean((model.apply({"params": state.params}, x) - y) ** 2)) < 1e-3


@each_wrapper
def test_equinox_model_trains(wrapped):
  import equinox as eqx

  x, y = regression()
  model = eqx.nn.Linear(3, 1, key=jax.random.key(0))
  tx = alone(wrapped, optax.sgd(0.2))
  state = tx.init(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(model, state, stamp):
    def loss(model):
      return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    value, grads = eqx.filter_value_and_grad(loss)(model)
    extra = dict.fromkeys(wrapped.extra_args, stamp)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state_out = tx.update(wrapped.updates(grads, 2), state, params, **extra)
    return eqx.apply_updates(model, updates), state_out, value

  for i in range(80):
    model, state, value = step(model, state, jnp.int32(i))
  assert float(value) < 1e-3


@each_wrapper
def test_state_iterates_over_fields_like_named_tuple(wrapped):
  """Trainers iterate over the parts of a chain: `for part in opt_state`."""
  tx = alone(wrapped, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
  state = tx.init(PARAMS)
  parts = list(state)
  if isinstance(state, ow.states.State):
    names = [field.name for field in dataclasses.fields(state)]
    assert [id(part) for part in parts] == [id(getattr(state, name)) for name in names]
