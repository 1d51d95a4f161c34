"""reduced: one reduction for several micro-batches under plain jit, on Explicit mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

K, STEPS = 4, 2
# 0.10.0 has no product of an unreduced array and a scalar.
weighs = pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="needs JAX 0.10.2")


def mesh_of(*sizes, axis_type=AxisType.Explicit):
  names = ("data", "model")[: len(sizes)]
  devices = jax.devices()[: int(np.prod(sizes))]
  return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes), devices=devices)


def loss(params, x, y):
  """A linear model; its bias is broadcast first, as JAX asks where it is marked."""
  bias = jnp.broadcast_to(params["bias"], y.shape, out_sharding=P("data"))
  return jnp.mean((x @ params["kernel"] + bias - y) ** 2)


def data(has_nan=False):
  rng = np.random.default_rng(0)
  x, y = (np.float32(rng.normal(size=(STEPS, K, 8, n))) for n in (8, 4))
  if has_nan:
    x[:, 1] = np.nan
  return (
    {"kernel": 0.1 * np.float32(rng.normal(size=(8, 4))), "bias": np.zeros(4, np.float32)},
    x,
    y,
  )


def sgd_in_numpy(params, x, y, weights, rate):
  """SGD on the weighted mean of the micro-batches' gradients, in float64."""
  kernel, bias = (params[name].astype(np.float64) for name in ("kernel", "bias"))
  for xs, ys in zip(x.astype(np.float64), y.astype(np.float64)):
    kernel_grad, bias_grad = 0, 0
    for x_k, y_k, weight in zip(xs, ys, weights):
      if weight:
        error = 2 * (x_k @ kernel + bias - y_k) / y_k.size * weight / sum(weights)
        kernel_grad, bias_grad = kernel_grad + x_k.T @ error, bias_grad + error.sum(0)
    kernel, bias = kernel - rate * kernel_grad, bias - rate * bias_grad
  return {"kernel": kernel, "bias": bias}


def trainer(tx, mark, by):
  """A step over K micro-batches: by the counter, or the last one by the caller."""

  def micro(carry, batch, **last):
    params, state = carry
    x, y, weight = batch
    grads = jax.grad(loss)(mark(params), x, y)
    updates, state = tx.update(grads, state, params, weight=weight, **last)
    return optax.apply_updates(params, updates), state

  def step(carry, batches):
    if by == "counter":
      return lax.scan(lambda carry, batch: (micro(carry, batch), None), carry, batches)[0]
    first, final = (jax.tree.map(lambda x, k=k: x[k], batches) for k in (slice(-1), -1))
    carry, _ = lax.scan(lambda carry, batch: (micro(carry, batch, last=False), None), carry, first)
    return micro(carry, final, last=True)

  return jax.jit(step)


def trained(tx, mark, by, spec, weights=None, has_nan=False, mesh=None):
  """The parameters after all steps, the state, and the all-reduces of a step."""
  start, x, y = data(has_nan)
  with jax.set_mesh(mesh or mesh_of(4)):
    params = jax.device_put(start, spec)
    state = tx.init(mark(params))
    step = trainer(tx, mark, by)
    weights = None if weights is None else jnp.asarray(weights, jnp.float32)
    steps = [(*jax.device_put(pair, P(None, "data")), weights) for pair in zip(x, y)]
    compiled = step.lower((params, state), steps[0]).compile()
    for one in steps:
      params, state = step((params, state), one)
  sends = ow.inspect.compiled_collectives(compiled)
  return params, state, [c for c in sends if c.kind in ("all-reduce", "reduce-scatter")]


def all_marked(params):
  return ow.reduced(params, "data")


def only_kernel(params):
  return params | {"kernel": ow.reduced(params["kernel"], "data")}


@pytest.mark.parametrize("by", ["counter", "caller"])
@pytest.mark.parametrize("spec", [P(), P("data")], ids=["replicated", "sharded"])
def test_reduced_gives_one_reduction_a_step_and_the_numbers_of_one_device(by, spec):
  tx = ow.gather_towers(optax.sgd(0.1), K)
  params, state, sends = trained(tx, all_marked, by, spec)
  start, x, y = data()
  assert_close(params, sgd_in_numpy(start, x, y, [1] * K, 0.1), rtol=1e-5)
  assert jax.typeof(state.accumulated["kernel"]).sharding.spec.unreduced == {"data"}
  assert params["kernel"].sharding.is_equivalent_to(
    NamedSharding(params["kernel"].sharding.mesh, spec), 2
  )
  # 36 numbers once; by the counter only in the conditional.
  assert [(c.num_bytes, c.times) for c in sends] == [(144, None if by == "counter" else 1)]


def test_without_reduced_each_micro_batch_is_reduced():
  tx = ow.gather_towers(optax.sgd(0.1), K)
  params, _, sends = trained(tx, lambda params: params, "counter", P())
  start, x, y = data()
  assert_close(params, sgd_in_numpy(start, x, y, [1] * K, 0.1), rtol=1e-5)
  assert sum(c.num_bytes * c.times for c in sends) == K * 144


def test_reduced_of_some_leaves():
  tx = ow.gather_towers(optax.sgd(0.1), K)
  params, _, sends = trained(tx, only_kernel, "caller", P())
  start, x, y = data()
  assert_close(params, sgd_in_numpy(start, x, y, [1] * K, 0.1), rtol=1e-5)
  assert sum(c.num_bytes * c.times for c in sends) == 128 + K * 16


@weighs
@pytest.mark.parametrize("by", ["counter", "caller"])
def test_reduced_with_weights_leaves_out_a_nan_micro_batch(by):
  weights = [3.0, 0.0, 1.0, 4.0]
  tx = ow.gather_towers(optax.sgd(0.1), K)
  params, _, sends = trained(tx, all_marked, by, P(), weights, has_nan=True)
  start, x, y = data(has_nan=True)
  assert_close(params, sgd_in_numpy(start, x, y, weights, 0.1), rtol=1e-5)
  assert len(sends) == 1


@pytest.mark.optax_promotes
def test_reduced_in_sum_with_adam_over_a_second_axis_equals_one_device():
  """The kernel is divided over "model", too; the sum of K gradients under Adam."""
  tx = ow.gather_towers(optax.adam(0.1), K, reduction="sum")
  mesh = mesh_of(2, 2)
  spec = {"kernel": P(None, "model"), "bias": P("model")}

  def model(params, x, y):
    bias = jnp.broadcast_to(params["bias"], y.shape, out_sharding=P("data", "model"))
    out = jnp.matmul(x, params["kernel"], out_sharding=P("data", "model"))
    return jnp.mean((out + bias - y) ** 2)

  start, x, y = data()
  with jax.set_mesh(mesh):
    params = jax.device_put(start, spec)
    state = tx.init(ow.reduced(params, "data"))
    update = jax.jit(tx.update)
    for x_k, y_k in zip(x[0], y[0]):
      x_k, y_k = jax.device_put((x_k, y_k), (P("data"), P("data", "model")))
      grads = jax.jit(jax.grad(model))(ow.reduced(params, "data"), x_k, y_k)
      updates, state = update(grads, state, params)
  kernel, bias = (start[name].astype(np.float64) for name in ("kernel", "bias"))
  total = sum(
    a.T @ (2 * (a @ kernel + bias - b) / b.size) for a, b in zip(np.float64(x[0]), np.float64(y[0]))
  )
  # Adam's first step is -rate * g / (|g| + eps).
  assert_close(updates["kernel"], -0.1 * total / (np.abs(total) + 1e-8), rtol=1e-5)
  assert jax.typeof(updates["kernel"]).sharding.spec == P(None, "model")


def test_reduced_outside_jit_and_with_one_tower():
  with jax.set_mesh(mesh_of(4)):
    x = jax.device_put(jnp.arange(8.0).reshape(4, 2), P("data"))
    w = jnp.zeros((2, 1))
    for num_towers in (1, 2):
      tx = ow.gather_towers(optax.sgd(1.0), num_towers)
      state = tx.init(ow.reduced(w, "data"))
      grad = jax.grad(lambda w: jnp.mean(x @ w))(ow.reduced(w, "data"))
      for _ in range(num_towers):
        updates, state = tx.update(grad, state, w)
      np.testing.assert_array_equal(updates, [[-3.0], [-4.0]])
      # The next step begins from zero.
      for _ in range(num_towers):
        updates, state = tx.update(grad, state, w)
      np.testing.assert_array_equal(updates, [[-3.0], [-4.0]])


def test_reduced_updates_have_the_layout_of_their_parameters():
  tx = ow.gather_towers(optax.sgd(1.0), 1)
  with jax.set_mesh(mesh_of(4)):
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), P("data"))
    w = jax.device_put(jnp.zeros((4, 1)), P("data"))
    grad = jax.grad(lambda w: jnp.mean(x @ w))(ow.reduced(w, "data"))
    updates, _ = tx.update(grad, tx.init(w), w)
  assert jax.typeof(updates).sharding.spec == P("data", None)
  np.testing.assert_array_equal(updates, [[-14.0], [-15.0], [-16.0], [-17.0]])


def test_reduced_leaves_other_leaves_and_marks_are_gone_from_the_inner_state():
  tree = {"w": jnp.ones((4, 2)), "n": jnp.arange(3), "key": jax.random.key(0)}
  with jax.set_mesh(mesh_of(4)):
    tree = jax.tree.map(lambda x: jax.device_put(x, P()), tree)
    marked = ow.reduced(tree, "data")
    assert jax.typeof(marked["w"]).sharding.spec.reduced == {"data"}
    assert marked["n"] is tree["n"]
    assert marked["key"] is tree["key"]
    assert ow.reduced(tree, None) is tree
    state = ow.gather_towers(optax.adam(0.1), 2).init({"w": marked["w"]})
    assert not jax.typeof(state.inner_state[0].mu["w"]).sharding.spec.reduced
    bfloat16 = ow.reduced(tree["w"].astype(jnp.bfloat16), "data")
    assert ow.gather_towers(optax.sgd(0.1), 2).init(bfloat16).accumulated.dtype == jnp.float32


def test_reduced_errors():
  w = jnp.ones((4, 2))
  with pytest.raises(
    ValueError, match=r"tree\['w'\] needs a mesh with an Explicit axis 'data'.*none"
  ):
    ow.reduced({"w": w}, "data")
  with jax.set_mesh(mesh_of(4)):
    with pytest.raises(ValueError, match=r"Explicit axis 'rows', got none"):
      ow.reduced(w, "rows")

    def inside(w):
      return ow.reduced(w, "data")

    mapped = jax.shard_map(inside, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"Manual.*per_shard\(params, 'data'\)"):
      jax.jit(mapped)(w)
  with (
    jax.set_mesh(mesh_of(4, axis_type=AxisType.Auto)),
    pytest.raises(ValueError, match=r"got an Auto one.*AxisType\.Explicit"),
  ):
    ow.reduced(w, "data")


def test_gather_towers_lost_or_unexpected_mark_is_an_error():
  tx = ow.gather_towers(optax.sgd(0.1), 2)
  with jax.set_mesh(mesh_of(4)):
    params = {"w": jax.device_put(jnp.ones((2, 1)), P())}
    x = jax.device_put(jnp.arange(8.0).reshape(4, 2), P("data"))

    def gradient(params):
      return jax.grad(lambda p: jnp.mean(x @ p["w"]))(params)

    marked = ow.reduced(params, "data")
    lost = (
      r"updates\['w'\] is float32\[2,1\], but the state accumulates float32\[2,1\]\{U:data\}."
      r" Differentiate reduced\(params, 'data'\)"
    )
    with pytest.raises(ValueError, match=lost):
      tx.update(gradient(params), tx.init(marked), params)
    unexpected = (
      r"updates\['w'\] is float32\[2,1\]\{U:data\}, but the state accumulates float32\[2,1\]."
      r" Make the state by tx\.init\(reduced\(params, 'data'\)\)"
    )
    with pytest.raises(ValueError, match=unexpected):
      tx.update(gradient(marked), tx.init(params), params)
