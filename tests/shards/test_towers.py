"""gather_towers, reduce_towers and tower_value_and_grad, compared with the originals' tables and
NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, bits, in_context, mesh_of, random_tree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

POWER = np.int32(2)


def loss(c, x):
  """The originals' model: sum |c x - y| with y = x."""
  return jnp.sum(jnp.abs(c * x - x))


def gathered_steps(tx, params, tower_grads, **extra_args):
  """One update call per tower; the parameters after each, and the state."""
  state = tx.init(params)
  seen = []
  for k, grads in enumerate(tower_grads):
    extra = {name: values[k] for name, values in extra_args.items()}
    updates, state = tx.update(grads, state, params, **extra)
    params = optax.apply_updates(params, updates)
    seen.append(params)
  return seen, state


# The originals' table: c = 10, SGD 1.0, x = y = [[1], [2]], two towers.


@pytest.mark.parametrize(
  ("reduction", "loss_value", "c"), [("sum", 27.0, 7.0), ("mean", 13.5, 8.5)]
)
def test_towers_upstream_train_step(reduction, loss_value, c):
  params, x = jnp.float32(10.0), jnp.array([[1.0], [2.0]])
  values, grads = ow.tower_value_and_grad(loss, 2)(params, x)
  assert float(values.sum() if reduction == "sum" else values.mean()) == loss_value

  gather = ow.gather_towers(optax.sgd(1.0), 2, reduction=reduction)
  (first, last), _ = gathered_steps(gather, params, list(grads))
  assert (float(first), float(last)) == (10.0, c)

  stacked = ow.reduce_towers(optax.sgd(1.0), reduction=reduction)
  updates, _ = stacked.update(grads, stacked.init(params), params)
  assert float(params + updates) == c


def test_gather_towers_upstream_sum_is_reset_after_step():
  tx = ow.gather_towers(optax.sgd(1.0), 2, reduction="sum")
  params = jnp.float32(10.0)
  state = tx.init(params)
  for batch, value, c in (([[1.0], [2.0]], 27.0, 7.0), ([[1.5], [2.5]], 24.0, 3.0)):
    values, grads = ow.tower_value_and_grad(loss, 2)(params, jnp.array(batch))
    assert float(values.sum()) == value
    for grad in grads:
      updates, state = tx.update(grad, state, params)
      params = optax.apply_updates(params, updates)
    assert float(params) == c


def test_gather_towers_upstream_single_tower_is_not_scaled():
  value, grads = ow.tower_value_and_grad(loss, 1)(jnp.float32(10.0), jnp.array([[1.0], [2.0]]))
  assert value.shape == grads.shape == (1,)
  assert float(value[0]) == 27.0
  for reduction in ("mean", "sum"):
    tx = ow.gather_towers(optax.sgd(1.0), 1, reduction=reduction)
    (params,), state = gathered_steps(tx, jnp.float32(10.0), [grads[0]])
    assert float(params) == 7.0
    assert state.accumulated is None


@pytest.mark.optax_promotes
def test_reduce_towers_upstream_two_optimizers_on_one_loss():
  """SGD 1.0, then Adam 1.0, both with gradients at the weights before either: 10 - 3 - 1."""
  params = jnp.float32(10.0)
  _, grads = ow.tower_value_and_grad(loss, 2)(params, jnp.array([[1.0], [2.0]]))
  total = params
  for inner in (optax.sgd(1.0), optax.adam(1.0)):
    tx = ow.reduce_towers(inner, reduction="sum")
    total = total + tx.update(grads, tx.init(params), params)[0]
  # Optax's bias correction in float32 makes a step of 0.999993.
  np.testing.assert_allclose(total, 6.0, atol=1e-5)


def test_reduce_towers_upstream_two_losses_of_two_variables():
  _, grads = ow.tower_value_and_grad(lambda p, x: loss(p["c"], x) + loss(p["d"], x), 2)(
    {"c": jnp.float32(10.0), "d": jnp.float32(2.0)}, jnp.array([[1.0], [2.0]])
  )
  tx = ow.reduce_towers(optax.sgd(1.0), reduction="sum")
  params = {"c": jnp.float32(10.0), "d": jnp.float32(2.0)}
  updates, _ = tx.update(grads, tx.init(params), params)
  assert_close(optax.apply_updates(params, updates), {"c": np.float64(7.0), "d": np.float64(-1.0)})


@pytest.mark.parametrize(
  ("towers", "expected"),
  [([1.0, 2.0, 3.0, 4.0], 10.0), ([[[1.0, 2.0]], [[3.0, 4.0]]], [[4.0, 6.0]])],
)
def test_reduce_towers_upstream_compute_sum(towers, expected):
  tx = ow.reduce_towers(optax.identity(), reduction="sum")
  np.testing.assert_array_equal(tx.update(jnp.array(towers), tx.init(None))[0], expected)


def test_tower_value_and_grad_upstream_consecutive_slices():
  seen, _ = ow.tower_value_and_grad(lambda p, b: (jnp.sum(p * b["x"]), b["x"]), 2, has_aux=True)(
    jnp.float32(1.0), {"x": jnp.arange(4.0)}
  )
  np.testing.assert_array_equal(seen[1], [[0, 1], [2, 3]])


def test_gather_towers_none_gradient_of_one_tower_is_zero_in_mean():
  """None and 6 in a mean of two towers: 3, not 6."""
  tx = ow.gather_towers(optax.sgd(1.0), 2)
  params = {"a": jnp.float32(0.0), "b": jnp.float32(0.0)}
  for towers in ([None, 6.0], [6.0, None]):
    grads = [
      {"a": jnp.float32(k), "b": None if b is None else jnp.float32(b)}
      for k, b in enumerate(towers)
    ]
    (_, last), _ = gathered_steps(tx, params, grads)
    assert_close(last, {"a": np.float64(-0.5), "b": np.float64(-3.0)})


def numpy_adam(params, grads, lr=0.1, b1=0.9, b2=0.999, eps=1e-8):
  m, v = np.zeros_like(params), np.zeros_like(params)
  for t, g in enumerate(grads, 1):
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    params = params - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
  return params


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gather_towers_on_shards_every_context_matches_numpy(context, reduction, weighted):
  """Two steps of Adam, three towers on each of four shards, each with its own gradient; one weight
  per tower."""
  rng = np.random.default_rng(0)
  grads = rng.normal(size=(4, 6, 5)).astype(np.float32)
  weights = (
    np.array([1.0, 3.0, 0.5, 2.0, 0.0, 4.0], np.float32) if weighted else np.ones(6, np.float32)
  )
  start = rng.normal(size=5).astype(np.float32)
  tx = ow.gather_towers(ow.cross_shard(optax.adam(0.1), AXIS), 3, reduction=reduction)

  state = tx.init(start)
  axes = ow.worker_axes(state, replicated=True)
  state = ow.stack_workers(state, 4, replicated=True)

  def step(params, state, grad, weight):
    updates, state = tx.update(grad, state, params, weight=weight if weighted else None)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, 4, (None, axes, 0, None), (None, axes))
  params = start
  for k in range(6):
    before = params
    params, state = step(params, state, grads[:, k], weights[k])
    if (k + 1) % 3:
      assert bits(params) == bits(before)
      assert int(jax.tree.leaves(state.inner_state)[0]) == k // 3  # Adam's count

  by_step = grads.astype(np.float64).mean(0).reshape(2, 3, 5)
  w = weights.astype(np.float64).reshape(2, 3, 1)
  reduced = (w * by_step).sum(1) / (w.sum(1) if reduction == "mean" else 1)
  assert_close(params, numpy_adam(start.astype(np.float64), reduced), rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(state.accumulated, np.zeros((4, 5)))


def test_gather_towers_summed_gradient_own_accumulator_is_error():
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(0.1), AXIS), 2)
  params = {"w": jnp.ones(3)}
  state = ow.stack_workers(tx.init(params), 4, replicated=True)
  specs = ow.specs(state, workers=AXIS, replicated=True)

  def step(params, state, x):
    grads = jax.grad(lambda p: jnp.sum(p["w"] * x[0]))(params)
    return tx.update(
      grads, state.replace(accumulated=jax.tree.map(lambda a: a[0], state.accumulated)), params
    )[0]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), specs, P(AXIS)), out_specs=P())
  with pytest.raises(ValueError, match=r"updates\['w'\] is already equal on all shards.*per_shard"):
    jax.jit(mapped)(params, state, jnp.ones((4, 3)))


def test_gather_towers_summed_gradient_replicated_accumulator():
  """jax.grad sums in every tower; the mean is still divided once by the shards and once by the
  towers."""
  x = np.arange(24.0).reshape(4, 2, 3).astype(np.float32) ** 2
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 2)

  def step(params, x):
    state = tx.init(params)
    for k in range(2):
      grads = jax.grad(lambda p, k=k: jnp.sum(p * x[0, k]))(params)
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P())
  assert_close(jax.jit(mapped)(jnp.zeros(3), x), -x.mean((0, 1)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gather_towers_replicated_accumulator_needs_a_replicated_total_weight(reduction):
  """Divided by it, a summed gradient would pass for a shard's own and be reduced once more."""
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 2, reduction=reduction)
  params, x = jnp.zeros(3), np.arange(12.0, dtype=np.float32).reshape(4, 3)
  whole = tx.init(params)
  state = ow.stack_workers(whole, 4, replicated=True).replace(accumulated=whole.accumulated)
  specs = ow.specs(state, workers=AXIS, replicated=True).replace(accumulated=P())
  assert specs.total_weight == P(AXIS)

  def step(params, state, x):
    grads = jax.grad(lambda p: jnp.sum(p * x[0]))(params)
    state = state.replace(total_weight=state.total_weight[0])
    return tx.update(grads, state, params, last=True)[0]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), specs, P(AXIS)), out_specs=P())
  if reduction == "sum":
    assert_close(jax.jit(mapped)(params, state, x), -x.mean(0))
  else:
    with pytest.raises(ValueError, match=r"total_weight differs.*accumulated is the same.*both"):
      jax.jit(mapped)(params, state, x)


def test_gather_towers_weights_all_zero_is_no_update():
  tx = ow.gather_towers(optax.sgd(1.0), 2)
  (_, last), _ = gathered_steps(
    tx, jnp.float32(1.0), [jnp.float32(np.nan), jnp.float32(3.0)], weight=jnp.array([0.0, 0.0])
  )
  assert float(last) == 1.0
  one = ow.gather_towers(optax.sgd(1.0), 1)
  (last,), _ = gathered_steps(one, jnp.float32(1.0), [jnp.float32(np.nan)], weight=jnp.array([0]))
  assert float(last) == 1.0


@pytest.mark.parametrize(("reduction", "expected"), [("mean", -3.0), ("sum", -6.0)])
def test_gather_towers_weight_of_one_tower_scales_sum_only(reduction, expected):
  tx = ow.gather_towers(optax.sgd(1.0), 1, reduction=reduction)
  (last,), _ = gathered_steps(tx, jnp.float32(0.0), [jnp.float32(3.0)], weight=jnp.array([2.0]))
  assert float(last) == expected


@pytest.mark.optax_promotes
def test_towers_of_one_tower_equal_inner_bit_for_bit():
  rng = np.random.default_rng(1)
  params, grads = random_tree(rng), random_tree(rng)
  inner = optax.adam(0.1)
  for tx in (ow.gather_towers(inner, 1), ow.reduce_towers(inner)):
    given = (
      grads
      if tx.update.__qualname__.startswith("gather")
      else jax.tree.map(lambda g: g[None], grads)
    )
    expected, _ = inner.update(grads, inner.init(params), params)
    assert bits(tx.update(given, tx.init(params), params)[0]) == bits(expected)


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_gather_towers_accumulates_bfloat16_in_float32(dtype):
  """Of 512 towers of 1.0: a bfloat16 sum would stop at 256."""
  params = jnp.zeros((), jnp.bfloat16)
  tx = ow.gather_towers(optax.identity(), 512, reduction="sum", accumulator_dtype=dtype)
  state = tx.init(params)
  assert state.accumulated.dtype == jnp.float32

  def call(state, _):
    updates, state = tx.update(jnp.ones((), jnp.bfloat16), state, params)
    return state, updates

  state, updates = jax.lax.scan(call, state, None, length=512)
  assert updates.dtype == jnp.bfloat16
  assert float(updates[-1]) == 512.0
  assert not updates[:-1].any()


def test_towers_extra_args_and_weight_reach_inner():
  seen = []

  def update(updates, state, params=None, **extra_args):
    seen.append(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
  tx = ow.gather_towers(inner, 2)
  tx.update(jnp.ones(()), tx.init(jnp.ones(())), weight=1.0, value=2.0)
  tx = ow.reduce_towers(inner)
  tx.update(jnp.ones(2), tx.init(jnp.ones(())), weight=jnp.ones(2), value=2.0)
  assert [extra.pop("weight") is not None for extra in seen] == [True, True]
  assert seen == [{"value": 2.0}] * 2


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reduce_towers_axes_and_weights_match_numpy(axis, reduction, weighted):
  rng = np.random.default_rng(2)
  grads = rng.normal(size=(3, 4, 5)).astype(np.float32)
  stacked = np.moveaxis(grads, 0, axis)
  weights = np.array([2.0, 0.0, 1.0])
  tx = ow.reduce_towers(optax.sgd(1.0), reduction=reduction, axis=axis)
  params = jnp.zeros((4, 5))
  updates, _ = tx.update(
    jnp.asarray(stacked),
    tx.init(params),
    params,
    weight=jnp.asarray(weights, jnp.float32) if weighted else None,
  )
  w = (weights if weighted else np.ones(3))[:, None, None]
  expected = (w * grads.astype(np.float64)).sum(0) / (w.sum() if reduction == "mean" else 1)
  assert_close(updates, -expected)


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("on_devices", [False, True])
def test_tower_value_and_grad_matches_value_and_grad_of_each_slice(has_aux, on_devices):
  rng = np.random.default_rng(3)
  params = random_tree(rng)
  x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)

  def fun(x, params, y, power=POWER):
    out = x @ params["dense"]["kernel"] + params["dense"]["bias"][None]
    value = jnp.mean(jnp.abs(out - y) ** power.astype(out.dtype)) * params["scale"]
    return (value, {"out": out}) if has_aux else value

  devices = np.array(jax.devices()[:4]) if on_devices else None  # such as `mesh.devices`
  towers = ow.tower_value_and_grad(fun, 4, argnums=(1,), has_aux=has_aux, devices=devices)
  value, (grads,) = towers(x, params, y, power=POWER)
  one_tower = jax.jit(jax.value_and_grad(fun, argnums=(1,), has_aux=has_aux))
  found = jax.device_get((value, grads))
  for k in range(4):
    part = slice(2 * k, 2 * k + 2)
    one, (one_grads,) = one_tower(x[part], params, y[part])
    assert_close(jax.tree.map(lambda g, k=k: g[k], found), (one, one_grads), rtol=1e-5)
  if on_devices:
    assert {d for leaf in jax.tree.leaves((value, grads)) for d in leaf.devices()} == {devices[-1]}


def test_reduce_towers_around_cross_shard_is_mean_of_all():
  """Two stacked towers in each of four shards: the gradient arrives summed over the shards, and the
  mean is the mean."""
  x = np.arange(24.0).reshape(8, 3).astype(np.float32) ** 2
  tx = ow.reduce_towers(ow.cross_shard(optax.sgd(1.0), AXIS))

  def step(params, x):
    _, grads = ow.tower_value_and_grad(lambda p, x: jnp.mean(x @ p), 2)(params, x)
    return tx.update(grads, tx.init(params), params)[0]

  for options in ({}, {"check_vma": False}):
    mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P(), **options)
    assert_close(jax.jit(mapped)(jnp.zeros(3), x), -x.mean(0))


# Bad input.


def test_towers_errors_num_towers_reduction_axis_and_devices():
  for call in (ow.gather_towers, lambda inner, n: ow.tower_value_and_grad(loss, n)):
    with pytest.raises(ValueError, match="num_towers must be at least 1, got 0"):
      call(optax.sgd(0.1), 0)
    with pytest.raises(TypeError, match=r"num_towers must be a Python int, got 2.0"):
      call(optax.sgd(0.1), 2.0)
  with pytest.raises(ValueError, match="reduction must be one of"):
    ow.gather_towers(optax.sgd(0.1), 2, reduction="none")
  with pytest.raises(ValueError, match="reduction must be one of"):
    ow.reduce_towers(optax.sgd(0.1), reduction="none")
  with pytest.raises(TypeError, match="axis must be a Python int"):
    ow.reduce_towers(optax.sgd(0.1), axis=None)
  with pytest.raises(ValueError, match="devices must be one for each of the 2 towers, got 3"):
    ow.tower_value_and_grad(loss, 2, devices=jax.devices()[:3])


def test_towers_errors_update_dtype_shape_and_weight():
  gather, params = ow.gather_towers(optax.sgd(0.1), 2), jnp.ones(3)
  with pytest.raises(TypeError, match="dtype int32"):
    gather.update(jnp.ones(3, jnp.int32), gather.init(params), params)
  with pytest.raises(ValueError, match="weight must be a scalar"):
    gather.update(params, gather.init(params), params, weight=jnp.ones(2))

  reduce = ow.reduce_towers(optax.sgd(0.1))
  with pytest.raises(
    ValueError, match=r"updates\['b'\] has 3 towers along axis 0, the leaves before it 2"
  ):
    reduce.update({"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}, optax.EmptyState())
  with pytest.raises(ValueError, match=r"must have the parameter's shape \(3,\).*axis 0 of towers"):
    reduce.update(jnp.ones((2, 4)), reduce.init(params), params)
  for empty in ({"a": jnp.ones((0, 1)), "b": jnp.ones((3, 1))}, {"a": jnp.ones((0, 1))}):
    with pytest.raises(ValueError, match=r"\['a'\] needs at least one tower along axis 0"):
      reduce.update(empty, optax.EmptyState())
  with pytest.raises(ValueError, match="needs an axis 0 of towers"):
    reduce.update(jnp.ones(()), reduce.init(params))
  with pytest.raises(ValueError, match=r"weight must be of shape \[2\]"):
    reduce.update(jnp.ones((2, 3)), reduce.init(params), params, weight=jnp.ones(3))


def test_tower_value_and_grad_errors_batch_and_devices_in_jit():
  towers = ow.tower_value_and_grad(lambda p, b: jnp.sum(p * b["x"]), 2)
  with pytest.raises(
    ValueError,
    match=r"leaf \"\['x'\]\" must have a leading axis that .* the 2 towers, got size 3",
  ):
    towers(jnp.float32(1.0), {"x": jnp.ones(3)})
  for scalar in (1.0, jnp.float32(1.0)):
    with pytest.raises(ValueError, match=r"got no leading axis.*by keyword"):
      towers(jnp.float32(1.0), {"x": scalar})
  with pytest.raises(TypeError, match="own device, which cannot be done inside"):
    jax.jit(ow.tower_value_and_grad(loss, 2, devices=jax.devices()[:2]))(
      jnp.float32(1.0), jnp.ones(2)
    )


def test_gather_towers_errors_counter_or_weight_per_shard():
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(0.1), AXIS), 2)

  def step(tower, weight, grad):
    state = tx.init(jnp.ones(())).replace(tower=tower[0])
    return tx.update(grad[0], state, weight=weight[0])[0]

  def traced(tower_spec, weight_spec):
    specs = (tower_spec, weight_spec, P(AXIS))
    mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=P())
    jax.jit(mapped)(jnp.zeros(4, jnp.int32), jnp.ones(4), jnp.ones(4))

  with pytest.raises(
    ValueError,
    match=r"GatherTowersState.tower, the number of towers gathered, differs .*'w'.*specs",
  ):
    traced(P(AXIS), P())
  with pytest.raises(ValueError, match=r"weight differs from shard to shard.*total_weight"):
    traced(P(), P(AXIS))


# What a restored state may contain.


def test_gather_towers_resumed_mid_step_with_fewer_towers():
  """Saved after three of four towers: the next call is the last one of the step, and then every
  second one."""
  params = jnp.array(0.0)
  state = ow.gather_towers(optax.sgd(1.0), 4).init(params)
  for gradient in (1.0, 2.0, 3.0):
    _, state = ow.gather_towers(optax.sgd(1.0), 4).update(jnp.array(gradient), state, params)
  two = ow.gather_towers(optax.sgd(1.0), 2)
  emitted = []
  for gradient in (6.0, 1.0, 3.0):
    updates, state = two.update(jnp.array(gradient), state, params)
    emitted.append(float(updates))
  assert emitted == [-3.0, 0.0, -2.0]


def test_gather_towers_resumed_with_one_tower_keeps_partial_sum():
  params, two, one = (
    jnp.array(0.0),
    ow.gather_towers(optax.sgd(1.0), 2),
    ow.gather_towers(optax.sgd(1.0), 1),
  )
  _, state = two.update(jnp.array(1.0), two.init(params), params)
  first, state = one.update(jnp.array(5.0), state, params)
  second, state = one.update(jnp.array(7.0), state, params)
  assert (float(first), float(second)) == (-3.0, -7.0)
  with pytest.raises(
    ValueError, match=r"'num_towers': 1.*new\.replace\(inner_state=old\.inner_state\)"
  ):
    two.update(jnp.array(1.0), one.init(params), params)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("weight", [None, 32.0])
def test_towers_mean_of_float16_and_float8_does_not_overflow(dtype, weight):
  value = {"float16": 9000.0, "float8_e4m3fn": 96.0}[dtype]
  extra = {} if weight is None else {"weight": weight}
  gather = ow.gather_towers(optax.identity(), 8)
  state = gather.init(jnp.zeros((), dtype))
  for _ in range(8):
    updates, state = gather.update(jnp.asarray(value, dtype), state, **extra)
  assert (updates.dtype, float(updates)) == (jnp.dtype(dtype), value)
  reduce = ow.reduce_towers(optax.identity())
  extra = {} if weight is None else {"weight": np.full(8, weight, np.float32)}
  updates, _ = reduce.update(jnp.full(8, value, dtype), optax.EmptyState(), **extra)
  assert (updates.dtype, float(updates)) == (jnp.dtype(dtype), value)


def test_gather_towers_float64_weighted_mean_keeps_precision():
  with jax.enable_x64(True):
    grads, weights = np.random.default_rng(0).normal(size=(2, 3)), np.array([0.1, 0.7])
    tx = ow.gather_towers(optax.identity(), 2)
    state = tx.init(jnp.zeros(3, jnp.float64))
    assert state.total_weight.dtype == jnp.float64
    for g, w in zip(grads, weights):
      updates, state = tx.update(jnp.asarray(g), state, weight=w)
    np.testing.assert_allclose(
      updates, (grads * weights[:, None]).sum(0) / weights.sum(), rtol=1e-14
    )


@pytest.mark.parametrize(
  "axis_types",
  [(AxisType.Explicit,) * 2, (AxisType.Auto,) * 2, (AxisType.Auto, AxisType.Explicit)],
  ids=["explicit", "auto", "both"],
)
def test_gather_towers_sharded_params_on_set_mesh_keep_sharding(axis_types):
  mesh = jax.make_mesh((2, 2), ("w", "d"), axis_types=axis_types, devices=jax.devices()[:4])
  tx = ow.gather_towers(optax.sgd(1.0), 2)
  with jax.set_mesh(mesh):
    params = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("d")))
    state, update = tx.init(params), jax.jit(tx.update)
    first, state = update(params, state, params)
    second, state = update(3 * params, state, params)
  assert first.sharding.is_equivalent_to(params.sharding, 2)
  assert not first.any()
  np.testing.assert_array_equal(second, -2 * np.asarray(params))


@pytest.mark.parametrize("context", CONTEXTS)
def test_gather_towers_unwritten_updates_of_earlier_calls_reach_nothing(context, monkeypatch):
  """A TPU or a GPU leaves the memory of `lax.empty` as it is; a CPU clears it."""
  made = []

  def unwritten(shape, dtype, out_sharding=None):
    made.append(shape)
    return jnp.zeros(shape, dtype, out_sharding=out_sharding) + jnp.nan

  monkeypatch.setattr(jax.lax, "empty", unwritten)
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 2)
  state = tx.init(jnp.zeros(3))
  axes = ow.worker_axes(state, replicated=True)
  state = ow.stack_workers(state, 4, replicated=True)
  step = in_context(context, jax.jit(tx.update), 4, (0, axes, None), (None, axes))
  grads = np.arange(12.0, dtype=np.float32).reshape(4, 3)
  first, state = step(grads, state, jnp.zeros(3))
  second, state = step(3 * grads, state, jnp.zeros(3))
  np.testing.assert_array_equal(first, np.zeros(3))
  assert_close(second, -2 * grads.mean(0))
  assert bool(made) == (jax.__version_info__ >= (0, 12))


def test_gather_towers_prng_key_without_gradient_is_none():
  params = {"w": jnp.ones(2), "key": jax.random.key(0)}
  tx = ow.gather_towers(optax.identity(), 2)
  state = tx.init(params)
  for _ in range(2):
    updates, state = tx.update({"w": jnp.ones(2), "key": None}, state, params)
  np.testing.assert_array_equal(updates["w"], [1.0, 1.0])


def test_gather_towers_updates_of_other_shape_is_error():
  tx = ow.gather_towers(optax.sgd(0.1), 2)
  state = tx.init({"w": jnp.zeros((2, 3))})
  with pytest.raises(
    ValueError, match=r"gather_towers: updates\['w'\] must have the parameter's sha"
  ):
    tx.update({"w": jnp.zeros((3, 2))}, state)


def test_tower_value_and_grad_on_devices_keeps_python_keywords():
  """As on one device: flags, names, numbers and None, beside arrays, in trees too."""

  def loss(p, x, *, train=False, mode=None, options=None, shift):
    factor = 2.0 if train and mode == "sum" and options["power"] == 2 else 1.0
    return factor * jnp.mean(x @ p) + options["bias"] + shift

  args, given = (jnp.ones(2), jnp.ones((4, 2))), {"shift": jnp.float32(0.5)}
  for train in (True, False):
    more = {"train": train, "mode": "sum", "options": {"power": 2, "bias": np.float32(1)}}
    found, expected = (
      ow.tower_value_and_grad(loss, 2, devices=devices)(*args, **given, **more)
      for devices in (jax.devices()[:2], None)
    )
    assert bits(found) == bits(expected)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gather_towers_last_by_caller_equals_counter(reduction, weighted):
  """The states too; XLA may fuse the products of two programs in different ways."""
  tx = ow.gather_towers(optax.adam(0.1), 3, reduction=reduction)
  params = random_tree(np.random.default_rng(0))
  update = jax.jit(tx.update, static_argnames="last")
  counted = chosen = params, tx.init(params)
  for t in range(6):
    grads = random_tree(np.random.default_rng(t + 1))
    extra = {"weight": jnp.float32(1 + t % 2)} if weighted else {}
    for is_counted in (True, False):
      p, state = counted if is_counted else chosen
      last = {} if is_counted else {"last": t % 3 == 2}
      updates, state = update(grads, state, p, **extra, **last)
      if is_counted:
        counted = optax.apply_updates(p, updates), state
      else:
        chosen = optax.apply_updates(p, updates), state
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6, 1e-7), counted, chosen)


@pytest.mark.parametrize("num_calls", [1, 2, 5, 7])
def test_gather_towers_last_of_short_or_long_window_is_mean_of_its_calls(num_calls):
  tx, params = ow.gather_towers(optax.sgd(1.0), 4), jnp.zeros(2)
  state = tx.init(params)
  grads = np.float32(np.random.default_rng(3).normal(size=(2 * num_calls, 2)))
  for window in (grads[:num_calls], grads[num_calls:]):
    for k, grad in enumerate(window):
      updates, state = tx.update(jnp.asarray(grad), state, params, last=k == num_calls - 1)
      expected = -window.mean(0) if k == num_calls - 1 else np.zeros(2)
      np.testing.assert_allclose(updates, expected, rtol=1e-6, atol=1e-7)
    assert int(state.tower) == 0
  # The counter goes on from where the caller leaves it.
  for k in range(4):
    updates, state = tx.update(jnp.full(2, 4.0), state, params)
    np.testing.assert_array_equal(updates, np.full(2, -4.0 if k == 3 else 0.0))


@pytest.mark.parametrize("context", CONTEXTS)
def test_gather_towers_last_on_shards_in_every_context(context):
  """Unequal gradients; only the last call sends."""
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 2)
  grads = np.float32(np.random.default_rng(5).normal(size=(3, 4, 3)))

  def steps(grads):
    params = jnp.zeros(3)
    state = tx.init(params)
    for k in range(3):
      updates, state = tx.update(grads[k], state, params, last=k == 2)
    return updates

  run = in_context(context, lambda g: steps(ow.per_shard(g, AXIS)), 4, (0,), None)
  np.testing.assert_allclose(run(np.moveaxis(grads, 0, 1)), -grads.mean((0, 1)), rtol=1e-5)


def test_gather_towers_last_is_heard_by_both_of_a_chain_and_compiles_no_branch():
  tx = optax.chain(ow.gather_towers(optax.identity(), 2), ow.gather_towers(optax.sgd(1.0), 2))
  params = jnp.zeros(2)
  update = jax.jit(tx.update, static_argnames="last")
  _, state = update(jnp.full(2, 2.0), tx.init(params), params, last=False)
  updates, state = update(jnp.full(2, 4.0), state, params, last=True)
  # The second has heard the zeros of the first call, too.
  np.testing.assert_array_equal(updates, [-1.5, -1.5])
  assert [int(x.tower) for x in state] == [0, 0]
  for last in (False, True):
    text = update.lower(params, state, params, last=last).compile().as_text()
    assert " conditional(" not in text


def test_gather_towers_last_errors():
  tx, params = ow.gather_towers(optax.sgd(1.0), 2), jnp.zeros(2)
  state = tx.init(params)
  with pytest.raises(TypeError, match=r"last must be a Python bool.*static_argnames"):
    jax.jit(tx.update)(params, state, params, last=True)
  with pytest.raises(TypeError, match="last must be a Python bool, got 1"):
    tx.update(params, state, params, last=1)
  one = ow.gather_towers(optax.sgd(1.0), 1)
  with pytest.raises(ValueError, match="last must be True or left out with num_towers=1"):
    one.update(params, one.init(params), params, last=False)
  updates, _ = one.update(params + 1, one.init(params), params, last=True)
  np.testing.assert_array_equal(updates, [-1, -1])
