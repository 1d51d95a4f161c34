"""all_reduce, cross_shard, per_shard and broadcast_from, compared with NumPy, with unequal
shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, in_context, mesh_of, random_tree
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

GROUPS = [[0, 2], [1, 3]]


def run_once(context, tx, grads, num_shards, **extra_args):
  """One update of parameters 1.0 with each shard's own gradient; the parameters on every shard."""

  def step(grad, extra):
    params = jnp.ones(())
    return optax.apply_updates(params, tx.update(grad, tx.init(params), params, **extra)[0])

  axes = dict.fromkeys(extra_args, 0)
  return in_context(context, step, num_shards, (0, axes), 0)(np.float32(grads), extra_args)


# The originals' table: 4 replicas, w = 1, SGD 0.1, gradients 1, 2, 3, 4.
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
  ("reduction", "groups", "expected"),
  [
    ("mean", None, [0.75, 0.75, 0.75, 0.75]),
    ("sum", None, [0.0, 0.0, 0.0, 0.0]),
    ("mean", GROUPS, [0.8, 0.7, 0.8, 0.7]),
    ("sum", GROUPS, [0.6, 0.4, 0.6, 0.4]),
  ],
)
def test_cross_shard_upstream_table_of_groups(context, reduction, groups, expected):
  tx = ow.cross_shard(optax.sgd(0.1), AXIS, reduction=reduction, axis_index_groups=groups)
  assert_close(run_once(context, tx, [1, 2, 3, 4], 4), np.array(expected))


@pytest.mark.parametrize("context", CONTEXTS)
def test_cross_shard_upstream_table_clip_before_mean(context):
  # TensorFlow clips g / N at 0.6 and sums; here the clip of g at 4 * 0.6 comes before a mean. Both
  # give -0.95.
  tx = optax.chain(optax.clip_by_global_norm(2.4), ow.cross_shard(optax.sgd(1.0), AXIS))
  assert_close(run_once(context, tx, [1, 2, 3, 4], 4), np.full(4, 1 - (0.25 + 0.5 + 0.6 + 0.6)))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_shards", [1, 2, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_shard_replicated_params_every_context_matches_numpy(context, num_shards, reduction):
  """jax.grad is already a sum under shard_map's default types, and is not elsewhere; the step is
  the same."""
  rng = np.random.default_rng(0)
  params = random_tree(rng)
  x = rng.normal(size=(num_shards, 5, 3)).astype(np.float32)
  y = rng.normal(size=(num_shards, 5, 2)).astype(np.float32)
  tx = ow.cross_shard(optax.sgd(0.1, momentum=0.9), AXIS, reduction=reduction)

  def loss(params, x, y):
    out = (x @ params["dense"]["kernel"] + params["dense"]["bias"][None]) * params["scale"]
    return jnp.mean((out - y) ** 2)

  def two_steps(params, x, y):
    state = tx.init(params)
    for _ in range(2):
      updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  params_out, _ = in_context(context, two_steps, num_shards, (None, 0, 0), None)(params, x, y)

  # The same in NumPy: the gradient of the mean over shards of their losses, SGD with momentum.
  expected = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  trace = jax.tree.map(np.zeros_like, expected)
  for _ in range(2):
    grads = [
      numpy_gradient(expected, x[i].astype(np.float64), y[i].astype(np.float64))
      for i in range(num_shards)
    ]
    total = jax.tree.map(lambda *g: sum(g) if reduction == "sum" else sum(g) / len(g), *grads)
    trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, total)
    expected = jax.tree.map(lambda p, t: p - 0.1 * t, expected, trace)
  assert_close(params_out, expected, rtol=2e-5, atol=1e-6)


def numpy_gradient(params, x, y):
  hidden = x @ params["dense"]["kernel"] + params["dense"]["bias"]
  d_out = 2 * (hidden * params["scale"] - y) / y.size
  d_hidden = d_out * params["scale"]
  return {
    "dense": {"kernel": x.T @ d_hidden, "bias": d_hidden.sum(0)},
    "scale": (d_out * hidden).sum(),
  }


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("groups", [None, GROUPS])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_shard_weights_and_groups_match_numpy(context, groups, reduction):
  grads, weights = np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 1.0, 0.0, 4.0])
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, reduction=reduction, axis_index_groups=groups)
  actual = run_once(context, tx, grads, 4, weight=weights.astype(np.float32))
  expected = np.zeros(4)
  for group in groups or [[0, 1, 2, 3]]:
    total = (weights[group] * grads[group]).sum()
    expected[group] = 1 - (total / weights[group].sum() if reduction == "mean" else total)
  assert_close(actual, expected)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_shard_weights_all_zero_is_no_update_even_of_nan(context, reduction):
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, reduction=reduction)
  actual = run_once(context, tx, [np.nan, 1, np.inf, 2], 4, weight=np.zeros(4, np.int32))
  assert_close(actual, np.ones(4))


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 3.5), ("sum", 3.0 * 14)])
def test_all_reduce_equal_weights_of_summed_gradient_scale_sum(reduction, expected):
  """Autodiff's sum can be weighted if the weights are equal: the mean does not change, the sum is
  multiplied."""
  tx = ow.all_reduce(AXIS, reduction=reduction)

  def step(w, x):
    return tx.update(jax.grad(lambda w: jnp.sum(w * x))(w), tx.init(None), weight=3.0)[0]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P())
  assert_close(jax.jit(mapped)(jnp.float32(1.0), jnp.arange(4.0) ** 2), np.float64(expected))


def test_cross_shard_weight_zero_leaves_out_nan():
  tx = ow.cross_shard(optax.sgd(1.0), AXIS)
  actual = run_once(
    "shard_map", tx, [np.nan, 1, 2, 6], 4, weight=np.array([0.0, 1.0, 1.0, 2.0], np.float32)
  )
  assert_close(actual, np.full(4, 1 - 15 / 4))


def test_cross_shard_nan_stays_in_its_group():
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, axis_index_groups=GROUPS)
  actual = run_once("shard_map", tx, [np.nan, 1, 2, 5], 4)
  assert_close(actual, np.array([np.nan, -2, np.nan, -2]))


@pytest.mark.parametrize(
  ("invariant", "reduction", "expected"),
  [
    ("summed", "mean", 0.5),
    ("summed", "sum", 2.0),
    ("reduced", "mean", 2.0),
    ("reduced", "sum", 2.0),
  ],
)
def test_all_reduce_invariant_summed_is_divided_reduced_is_kept(invariant, reduction, expected):
  tx = ow.all_reduce(AXIS, reduction=reduction, invariant=invariant)
  step = jax.shard_map(
    lambda g: tx.update(g, tx.init(g))[0], mesh=mesh_of(4), in_specs=P(), out_specs=P()
  )
  assert float(jax.jit(step)(jnp.float32(2.0))) == expected


def test_all_reduce_invariant_error_names_leaf_and_per_shard():
  tx = ow.all_reduce(AXIS, invariant="error")
  step = jax.shard_map(
    lambda g: tx.update(g, tx.init(g))[0], mesh=mesh_of(4), in_specs=P(), out_specs=P()
  )
  with pytest.raises(ValueError, match=r"updates\['a'\].*per_shard"):
    jax.jit(step)({"a": jnp.float32(2.0)})


def test_all_reduce_tree_of_summed_and_per_shard_leaves():
  tx = ow.all_reduce(AXIS)

  def step(shared, own):
    return tx.update({"shared": shared, "own": own[0]}, tx.init(None))[0]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P())
  actual = jax.jit(mapped)(jnp.float32(6.0), jnp.arange(4.0))
  assert_close(actual, {"shared": np.float64(1.5), "own": np.float64(1.5)})


def mesh_2d():
  return jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("names", ["d", "m", ("d", "m")])
def test_all_reduce_over_one_or_two_mesh_axes_matches_numpy(check_vma, names):
  grads = np.arange(8.0, dtype=np.float32).reshape(2, 4) ** 2
  tx = ow.all_reduce(names)
  step = jax.shard_map(
      lambda g: tx.update(g, tx.init(None))[0],
      mesh=mesh_2d(), in_specs=P("d", "m"), out_specs=P("d", "m"),
      check_vma=check_vma,
  )  # fmt: skip
  axes = {"d": 0, "m": 1, ("d", "m"): (0, 1)}[names]
  if (
    check_vma
  ):  # the result is equal over the axes reduced, which only per_shard makes an output of this spec
    step = jax.shard_map(
        lambda g: ow.per_shard(tx.update(g, tx.init(None))[0], ("d", "m")),
        mesh=mesh_2d(), in_specs=P("d", "m"), out_specs=P("d", "m"),
    )  # fmt: skip
  assert_close(jax.jit(step)(grads), np.broadcast_to(grads.mean(axes, keepdims=True), (2, 4)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_reduce_over_two_axes_one_summed_by_autodiff(reduction):
  x = np.arange(8.0, dtype=np.float32).reshape(2, 4) ** 2
  tx = ow.all_reduce(("d", "m"), reduction=reduction)

  def step(w, x):
    grad = jax.grad(lambda w: jnp.sum(w * x))(ow.per_shard(w, "d"))  # summed over "m" alone
    return tx.update(grad, tx.init(None))[0]

  mapped = jax.shard_map(step, mesh=mesh_2d(), in_specs=(P(), P("d", "m")), out_specs=P())
  expected = x.mean() if reduction == "mean" else x.sum()
  assert_close(jax.jit(mapped)(jnp.float32(1.0), x), np.float64(expected))


def test_all_reduce_vmap_in_shard_map_needs_check_vma_false():
  x = np.arange(8.0, dtype=np.float32).reshape(4, 2) ** 2
  tx = ow.all_reduce((AXIS, "v"))
  one = jax.vmap(lambda g: tx.update(g, tx.init(None))[0], axis_name="v")

  def mapped(**options):
    sharded = jax.shard_map(
      lambda g: one(g[0])[None], mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS), **options
    )
    return jax.jit(sharded)(x)

  assert_close(mapped(check_vma=False), np.full((4, 2), x.mean()))
  with pytest.raises(ValueError, match="'v' is a vmap axis inside a shard_map"):
    mapped()


def test_all_reduce_unreduced_gradient_is_summed_once():
  """With a parameter typed "reduced", jax.grad leaves the gradient "unreduced"."""
  x = jnp.arange(4.0) ** 2
  mesh = mesh_of(4, jax.sharding.AxisType.Explicit)
  tx = ow.all_reduce(AXIS)

  def step(w, x):
    grad = jax.grad(lambda w: jnp.sum(w * x))(jax.lax.pcast(w, AXIS, to="reduced"))
    return tx.update(grad, tx.init(None))[0]

  mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
  x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(AXIS)))
  assert_close(jax.jit(mapped)(jnp.float32(1.0), x), np.float64(3.5))


def test_cross_shard_without_axis_is_one_shard():
  for name in (None, ()):
    tx = ow.cross_shard(optax.sgd(1.0), name)
    updates, _ = tx.update(jnp.float32(3.0), tx.init(jnp.float32(0.0)))
    assert float(updates) == -3.0
    updates, _ = tx.update(jnp.float32(3.0), tx.init(jnp.float32(0.0)), weight=2)
    assert float(updates) == -3.0


def test_cross_shard_none_leaves_and_extra_args_pass_to_inner():
  seen = {}

  def update(updates, state, params=None, **extra_args):
    seen.update(extra_args)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda p: (), update)
  tx = ow.cross_shard(inner, AXIS)
  updates = jax.vmap(
    lambda g: tx.update({"a": g, "b": None}, tx.init(None), value=g, weight=g)[0],
    axis_name=AXIS,
  )(jnp.array([1.0, 3.0]))
  assert_close(updates, {"a": np.array([2.5, 2.5]), "b": None})
  assert set(seen) == {"value", "weight"}


def test_cross_shard_state_has_leaves_of_inner_state():
  params = {"w": jnp.zeros(3)}
  state, inner_state = ow.cross_shard(optax.adam(0.1)).init(params), optax.adam(0.1).init(params)
  assert jax.tree.structure(state.inner_state) == jax.tree.structure(inner_state)
  assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(inner_state))


def test_cross_shard_state_of_other_arguments_is_error():
  params = jnp.zeros(3)
  states = [
    (optax.sgd(0.1).init(params), r"state must be a CrossShardState, from init; got"),
    (
      ow.cross_shard(optax.sgd(0.1), "other").init(params),
      r"made for .*'other'.* and this is .*'w'",
    ),
    (
      ow.cross_shard(optax.sgd(0.1), AXIS, reduction="sum").init(params),
      r"made for .*is_mean=False.* and this is .*is_mean=True",
    ),
  ]
  tx = ow.cross_shard(optax.sgd(0.1), AXIS)
  for state, message in states:
    with pytest.raises((TypeError, ValueError), match=message):
      jax.vmap(lambda g, state=state: tx.update(g, state)[0], axis_name=AXIS)(jnp.ones((2, 3)))


# A NaN or an infinity on one shard.


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nonfinite_drop_every_context_matches_numpy(context, reduction):
  """Momentum over five steps, with NaN or inf on some shards, on all of them in the fourth step,
  also with weights."""
  rng = np.random.default_rng(0)
  grads = rng.normal(size=(5, 4, 3)).astype(np.float32)
  weights = np.array([1.0, 2.0, 3.0, 0.5], np.float32)
  for t, shard, bad in ((0, 1, np.nan), (1, 0, np.inf), (1, 3, -np.inf)):
    grads[t, shard, shard % 3] = bad
  grads[3] = np.nan
  tx = ow.cross_shard(optax.sgd(0.1, momentum=0.9), AXIS, reduction=reduction, nonfinite="drop")

  def step(params, state, grad, weight):
    updates, state = tx.update({"w": grad}, state, params, weight=weight)
    return optax.apply_updates(params, updates), state

  step = in_context(context, step, 4, (None, None, 0, 0), None)
  params = {"w": jnp.zeros(3)}
  state = tx.init(params)
  expected, trace, dropped = np.zeros(3), np.zeros(3), 0
  for t in range(5):
    params, state = step(params, state, grads[t], weights)
    good = np.isfinite(grads[t]).all(-1)
    dropped += (~good).sum()
    if good.any():
      total = (weights[good, None].astype(np.float64) * grads[t][good]).sum(0)
      trace = 0.9 * trace + (total / weights[good].sum() if reduction == "mean" else total)
      expected = expected - 0.1 * trace
    assert_close(params["w"], expected, rtol=1e-5, atol=1e-6)
    assert int(state.nonfinite) == dropped
  assert dropped == 7


def test_nonfinite_default_propagates_nan():
  assert np.isnan(
    run_once("shard_map", ow.cross_shard(optax.sgd(1.0), AXIS), [np.nan, 1, 2, 3], 4)
  ).all()


def test_nonfinite_errors_summed_leaf_groups_and_unknown_value():
  tx = ow.cross_shard(optax.sgd(0.1), AXIS, nonfinite="drop")

  def step(own, summed):
    return tx.update({"own": own[0], "summed": summed}, tx.init({"own": own[0], "summed": summed}))[
      0
    ]["summed"]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(AXIS), P()), out_specs=P())
  with pytest.raises(ValueError, match=r"updates\['summed'\] is already equal"):
    jax.jit(mapped)(jnp.ones(4), jnp.float32(1.0))
  with pytest.raises(ValueError, match="nonfinite must be one of"):
    ow.cross_shard(optax.sgd(0.1), AXIS, nonfinite="ignore")
  with pytest.raises(ValueError, match="cannot be used with axis_index_groups"):
    ow.cross_shard(optax.sgd(0.1), AXIS, nonfinite="drop", axis_index_groups=GROUPS)


# Bad input.


@pytest.mark.parametrize(
  "make", [ow.all_reduce, lambda *a, **k: ow.cross_shard(optax.sgd(0.1), *a, **k)]
)
def test_cross_shard_errors_reduction_invariant_groups_and_axes(make):
  with pytest.raises(
    ValueError, match=r"reduction must be one of 'mean', 'sum', or .*; got 'none'"
  ):
    make(AXIS, reduction="none")
  with pytest.raises(ValueError, match="invariant must be one of"):
    make(AXIS, invariant="shared")
  with pytest.raises(ValueError, match="list of lists"):
    make(AXIS, axis_index_groups=[0, 1])
  with pytest.raises(ValueError, match="equal size"):
    make(AXIS, axis_index_groups=[[0, 1], [2]])
  with pytest.raises(ValueError, match="permutation"):
    make(AXIS, axis_index_groups=[[0, 1], [1, 2]])
  with pytest.raises(ValueError, match="permutation"):
    make(AXIS, axis_index_groups=[])
  with pytest.raises(ValueError, match="exactly one axis name"):
    make(("a", "b"), axis_index_groups=[[0, 1]])
  with pytest.raises(ValueError, match="twice"):
    make(("a", "a"))


def test_cross_shard_errors_update_axis_weight_and_dtype():
  tx = ow.cross_shard(optax.sgd(0.1), AXIS)
  with pytest.raises(ValueError, match=r"'w' is not bound.*shard_map.*pmap.*vmap"):
    tx.update(jnp.ones(()), tx.init(jnp.ones(())))
  with pytest.raises(ValueError, match=r"permutation of range\(2\)"):
    run_once(
      "vmap", ow.cross_shard(optax.sgd(0.1), AXIS, axis_index_groups=[[0], [1], [2]]), [1, 2], 2
    )
  with pytest.raises(ValueError, match="weight must be a scalar"):
    run_once("vmap", tx, [1, 2], 2, weight=np.ones((2, 3), np.float32))
  with pytest.raises(TypeError, match="weight must be real"):
    run_once("vmap", tx, [1, 2], 2, weight=np.array([1j, 1]))
  with pytest.raises(TypeError, match=r"updates\['n'\] has dtype int32"):
    jax.vmap(lambda g: tx.update({"n": g}, tx.init(None)), axis_name=AXIS)(jnp.arange(2))


def test_all_reduce_weights_over_axis_already_reduced_is_error():
  """invariant="reduced" over two axes, and weights that differ over the axis already reduced."""
  tx = ow.all_reduce(("d", "m"), invariant="reduced")

  def step(x):
    return tx.update(jax.lax.pmean(x, "m"), tx.init(None), weight=x[0, 0])[0]

  mapped = jax.shard_map(step, mesh=mesh_2d(), in_specs=P("d", "m"), out_specs=P())
  with pytest.raises(
    ValueError, match=r"equal on all shards of \('m',\), reduced without the weig"
  ):
    jax.jit(mapped)(jnp.ones((2, 4)))


@pytest.mark.parametrize(
  ("options", "weighted", "match"),
  [
    ({}, True, "summed without the weights"),
    ({"axis_index_groups": [[0, 1], [2, 3]]}, False, "split into groups"),
  ],
)
def test_cross_shard_summed_gradient_weighted_or_grouped_is_error(options, weighted, match):
  tx = ow.cross_shard(optax.sgd(0.1), AXIS, **options)

  def step(w, x):
    grad = jax.grad(lambda w: jnp.sum(w * x))(w)
    return tx.update(grad, tx.init(w), w, weight=x[0] if weighted else None)[0]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P())
  with pytest.raises(ValueError, match=match):
    jax.jit(mapped)(jnp.float32(1.0), jnp.arange(4.0))


# Parameters that are sharded over the reduced axis: their gradient arrives summed.


def fsdp(sharded, check_vma, reduction="mean", nested=False, **extra):
  """One step of a model with a matrix gathered in the forward pass and a replicated bias, compared
  with one device."""
  rng = np.random.default_rng(0)
  params = {"w": rng.normal(size=(8, 3)), "b": rng.normal(size=3)}
  params = jax.tree.map(np.float32, params)
  x = np.float32(rng.normal(size=(32, 8)))
  names = ("pod", "data") if nested else "data"
  tx = ow.cross_shard(optax.sgd(0.1), names, sharded=sharded, reduction=reduction)

  def loss(params, x):
    return jnp.mean(jnp.sin(x @ params["w"] + params["b"][None]))

  def step(params, x):
    def gathered(params):
      return loss({**params, "w": jax.lax.all_gather(params["w"], "data", tiled=True)}, x)

    updates, _ = tx.update(jax.grad(gathered)(params), tx.init(params), params, **extra)
    return optax.apply_updates(params, updates)

  mesh = jax.make_mesh((2, 4), ("pod", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  specs, batch = {"w": P("data"), "b": P()}, P(names)
  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(specs, batch), out_specs=specs, check_vma=check_vma
  )
  rate = 0.1 * (1 if reduction == "mean" else 4)
  gradient = jax.device_get(jax.jit(jax.grad(loss))(params, x))
  expected = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
  return jax.jit(mapped)(params, x), expected


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
  "sharded",
  [
    {"w": True, "b": False},
    {"w": P("data"), "b": P()},
    lambda u: jax.tree.map(lambda x: x.ndim == 2, u),
  ],
  ids=["bools", "specs", "function"],
)
def test_cross_shard_sharded_params_match_one_device(sharded, reduction, check_vma):
  actual, expected = fsdp(sharded, check_vma, reduction)
  assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_sharded_over_one_of_two_axes_matches_one_device(check_vma):
  actual, expected = fsdp({"w": P("data"), "b": P()}, check_vma, nested=True)
  assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_all_reduce_sharded_params_send_nothing():
  grads = {"w": jnp.ones((4, 5)), "b": jnp.ones((4, 3))}
  tx = ow.all_reduce("w", sharded={"w": True, "b": False})
  mapped = jax.shard_map(
    lambda g: tx.update(g, tx.init(None))[0],
    mesh=mesh_of(4),
    in_specs=P(AXIS),
    out_specs={"w": P(AXIS), "b": P()},
  )
  (sent,) = ow.inspect.compiled_collectives(jax.jit(mapped).lower(grads).compile())
  assert sent.num_bytes == 3 * 4


def test_cross_shard_sharded_errors_weight_groups_and_nonfinite():
  with pytest.raises(
    ValueError, match=r"updates\['w'\] is sharded over \('data',\).*Weight the loss"
  ):
    fsdp({"w": True, "b": False}, True, weight=2.0)
  with pytest.raises(ValueError, match="sharded parameters are divided over the whole axis"):
    ow.cross_shard(optax.sgd(0.1), AXIS, sharded=True, axis_index_groups=GROUPS)
  with pytest.raises(ValueError, match='nonfinite="drop" cannot be used with sharded'):
    ow.cross_shard(optax.sgd(0.1), AXIS, sharded=True, nonfinite="drop")
  with pytest.raises(TypeError, match="sharded must hold Python bools or PartitionSpecs, got 1"):
    run_once("vmap", ow.cross_shard(optax.sgd(0.1), AXIS, sharded=1), [1, 2], 2)


# Weights.


@pytest.mark.optax_promotes
def test_cross_shard_weights_all_zero_inner_sees_zeros():
  """Momentum and decay still move the parameters; inner is promised zero updates."""
  tx = ow.cross_shard(optax.sgd(1.0, momentum=0.5), AXIS)
  step = jax.vmap(
    lambda g, w, s: tx.update(g, s, g, weight=w),
    in_axes=(0, 0, None),
    out_axes=None,
    axis_name=AXIS,
  )
  _, state = step(jnp.ones(2), jnp.ones(2), tx.init(jnp.ones(())))
  updates, _ = step(jnp.array([5.0, np.nan]), jnp.zeros(2), state)
  assert float(updates) == -0.5


@pytest.mark.parametrize("context", CONTEXTS)
def test_nonfinite_drop_skips_step_if_finite_shard_has_weight_zero(context):
  tx = ow.cross_shard(optax.sgd(1.0, momentum=0.9), AXIS, nonfinite="drop")

  def steps(grads, weights):
    params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
    for i in range(2):
      updates, state = tx.update(grads[i], state, params, weight=weights[i])
      params = optax.apply_updates(params, updates)
    return params, state.nonfinite

  grads, weights = np.float32([[1, 1], [1, np.nan]]), np.float32([[1, 0], [1, 1]])
  params, nonfinite = in_context(context, steps, 2, (0, 0), None)(grads, weights)
  assert (float(params), int(nonfinite)) == (-1.0, 1)


def test_cross_shard_weight_negative_is_error_overflow_is_nan():
  tx = ow.cross_shard(optax.sgd(1.0), None)
  for weight in (-1.0, np.nan, jnp.float32(-0.5)):
    with pytest.raises(ValueError, match="weight must be at least 0"):
      tx.update(jnp.ones(()), tx.init(jnp.ones(())), weight=weight)
  # Weights whose sum overflows float32 are visible, and do not become a step of zero.
  assert np.isnan(
    run_once(
      "vmap", ow.cross_shard(optax.sgd(1.0), AXIS), [1, 2], 2, weight=np.full(2, 3e38, np.float32)
    )
  ).all()


def test_nonfinite_drop_of_summed_gradient_is_error():
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, nonfinite="drop")

  def step(w, x):
    return tx.update(jax.grad(lambda w: jnp.sum(w * x))(w), tx.init(w), w)[0]

  mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P())
  with pytest.raises(ValueError, match=r"a sum that contains the NaN of any shard.*per_shard"):
    jax.jit(mapped)(jnp.float32(0.0), jnp.ones(4))


@pytest.mark.parametrize("context", ["shard_map", "vmap"])
def test_nonfinite_drop_derivative_leaves_out_nan_shard(context):
  """Two steps with momentum 0.9 move by -0.5 (m + 2 m + 0.9 m), m the mean of the three finite."""
  tx = ow.cross_shard(optax.sgd(0.5, momentum=0.9), AXIS, nonfinite="drop")

  def two_steps(grad):
    state = tx.init(jnp.zeros(2))
    first, state = tx.update(grad, state)
    return first + tx.update(2 * grad, state)[0]

  grads = np.float32([[1, 2], [3, 4], [np.nan, 1], [5, 6]])
  mesh = mesh_of(4) if context == "shard_map" else None
  mapped = ow.map_workers(two_steps, AXIS, out_axes=None, mesh=mesh)

  def total(grads):
    return jnp.sum(mapped(grads) * jnp.array([1.0, 10.0]))

  each = -0.5 * 3.9 / 3
  expected = np.tile([each, 10 * each], (4, 1))
  expected[2] = 0.0
  np.testing.assert_allclose(jax.jit(jax.grad(total))(grads), expected, rtol=1e-6)
  _, tangent = jax.jit(lambda x, t: jax.jvp(total, (x,), (t,)))(grads, np.ones_like(grads))
  np.testing.assert_allclose(tangent, expected.sum(), rtol=1e-6)


def test_all_reduce_state_of_other_axes_or_reduction_is_error():
  state = ow.all_reduce("other").init(jnp.zeros(()))
  for tx in (ow.all_reduce(AXIS), ow.all_reduce("other", reduction="sum")):
    with pytest.raises(ValueError, match=r"the state was made for .*'other'.* and this is"):
      jax.vmap(lambda g, tx=tx: tx.update(g, state)[0], axis_name=AXIS)(jnp.ones(2))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("option", ["plain", "weight", "drop", "reduced before"])
def test_cross_shard_decides_by_mean_of_losses(context, option):
  """A plateau is one for all shards; the loss of a shard that does not count does not either."""
  seen = optax.GradientTransformationExtraArgs(
    lambda _: (), lambda g, s, p=None, *, value, **_: (g * 0 + value, s)
  )
  tx = ow.cross_shard(seen, AXIS, nonfinite="drop" if option == "drop" else "propagate")

  def step(grad, loss, weight):
    if option == "reduced before":
      loss = jax.lax.pmean(loss, AXIS)
    given = {"weight": weight} if option == "weight" else {}
    return tx.update(grad, tx.init(grad), grad, value=loss, **given)[0]

  grads = np.float32([1, np.nan if option == "drop" else 1, 1])
  losses, weights = np.float32([3, 5, 10]), np.float32([1, 0, 3])
  found = in_context(context, step, 3, (0, 0, 0), 0)(grads, losses, weights)
  expected = {"weight": 33 / 4, "drop": 13 / 2}.get(option, 6.0)
  np.testing.assert_allclose(found, [expected] * 3, rtol=1e-6)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
def test_shard_state_on_one_shard_equals_inner(context):
  tx = ow.cross_shard(optax.adam(0.1), AXIS, shard_state=True)
  params = {"w": jnp.ones((4, 3)), "b": jnp.ones(())}
  state = ow.stack_workers(tx.init(params), 1, replicated=True)
  axes = ow.worker_axes(state, replicated=True)

  def step(grads, state):
    return tx.update(grads, state, params)

  grads = jax.tree.map(lambda x: np.ones((1, *x.shape), "f"), params)
  updates, _ = in_context(context, step, 1, (0, axes), (None, axes))(grads, state)
  for x in jax.tree.leaves(updates):
    np.testing.assert_allclose(x, -0.1, rtol=1e-4)


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
def test_reduced_loss_with_invariant_reduced_is_right_and_local_loss_is_without(context):
  """A loss over all tokens, which every shard has summed: what the page says to pass for it."""
  x, tokens = np.float32([1, 2, 3, 6]), np.float32([1, 1, 2, 4])
  right = (x * tokens).sum() / tokens.sum()

  def step(x, tokens):
    total = jax.lax.psum(tokens, AXIS)

    def reduced(w):
      return jax.lax.psum(w * x * tokens, AXIS) / total

    def local(w):
      return w * x * tokens / total * jax.lax.axis_size(AXIS)

    found = []
    for loss, how in ((reduced, "reduced"), (local, "summed")):
      tx, w = ow.cross_shard(optax.sgd(1.0), AXIS, invariant=how), jnp.zeros(())
      found.append(tx.update(jax.grad(loss)(w), tx.init(w), w)[0])
    return jnp.stack(found)

  found = in_context(context, step, 4, (0, 0), 0)(x, tokens)
  np.testing.assert_allclose(found, np.full((4, 2), -right), rtol=1e-6)


def test_subset_of_variables_trains_and_the_rest_stays():
  """What `var_list` was: a mask would add the gradient of the rest, uphill."""
  labels = {"w": "train", "b": "fixed"}
  chosen = optax.partition({"train": optax.sgd(0.1), "fixed": optax.set_to_zero()}, labels)
  tx, params = ow.cross_shard(chosen, AXIS), {"w": jnp.zeros(()), "b": jnp.zeros(())}
  grads = {"w": np.float32([1, 3]), "b": np.float32([1, 3])}
  found = jax.vmap(lambda g: tx.update(g, tx.init(params), params)[0], axis_name=AXIS)(grads)
  np.testing.assert_allclose(found["w"], [-0.2, -0.2], rtol=1e-6)
  np.testing.assert_array_equal(found["b"], [0, 0])


def test_init_outside_jit_lays_moments_out_as_parameters():
  mesh = mesh_of(4)
  params = jax.device_put(np.ones((8, 4), "f"), jax.NamedSharding(mesh, P(AXIS)))
  for tx in (
    optax.adam(0.1),
    ow.gather_towers(optax.adam(0.1), 2),
    ow.clip_variables(optax.adam(0.1), 1.0),
  ):
    state = tx.init(params)
    held = [x for x in jax.tree.leaves(state) if x.ndim]
    assert held and all(x.sharding.spec == P(AXIS) for x in held)
