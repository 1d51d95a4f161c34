"""A loss that is reduced before it is differentiated: under shard_map's types its gradient is that
of all shards, and a mean divides it again. `inspect.check_step` refuses it, and nothing else.

What is right is what `jax.vmap` gives, which has no types.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, mesh_of
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

X = np.array([1.0, 2.0, 3.0, 6.0], np.float32)
T = np.array([1.0, 1.0, 2.0, 4.0], np.float32)


def mean(x):
  return lax.pmean(jnp.mean(x), AXIS)


def normalized(w, x):
  """A batch norm over all shards."""
  h = w * x
  return h - mean(h)


def squares(w, x, t):
  return jnp.sum(normalized(w, x) ** 2 * t)


def in_scan(of_turn):
  def loss(w, x, t):
    return lax.scan(lambda sum, _: (sum + of_turn(w, x, t), None), 0.0 * jnp.sum(x), length=3)[0]

  return loss


@jax.custom_vjp
def scaled(x):
  return x


scaled.defvjp(lambda x: (x, None), lambda _, g: (0.5 * g + jnp.where(g > 0, 1.0, 2.0),))

LOCAL = {
  "local": lambda w, x, t: jnp.sum(w * x * t),
  "batch norm": squares,
  "batch norm in jit": jax.jit(squares),
  "batch norm in remat": jax.checkpoint(squares),
  "batch norm in scan": in_scan(squares),
  "with a reduced part": lambda w, x, t: jnp.sum(w * x * t) + 0.1 * mean((w * x) ** 2),
  "divided by a sum": lambda w, x, t: 4 * jnp.sum(w * x * t) / lax.psum(jnp.sum(t), AXIS),
  "gathered": lambda w, x, t: jnp.sum(lax.all_gather(w * x, AXIS) ** 2) * jnp.sum(t),
  "rule of its own": lambda w, x, t: jnp.sum(scaled(w * x) * t),
}

REDUCED = {
  "psum": lambda w, x, t: lax.psum(jnp.sum(w * x * t), AXIS) / lax.psum(t.sum(), AXIS),
  "pmean": lambda w, x, t: mean(w * x * t),
  "pmean of batch norm": lambda w, x, t: lax.pmean(squares(w, x, t), AXIS),
  "pmean in jit": jax.jit(lambda w, x, t: mean(w * x * t)),
  "pmean in remat": jax.checkpoint(lambda w, x, t: mean(jnp.sin(w * x) * t)),
  "pmean of remat": lambda w, x, t: mean(jax.checkpoint(jnp.sin)(w * x) * t),
  "pmean of scan": lambda w, x, t: lax.pmean(in_scan(squares)(w, x, t), AXIS),
  "log of pmean": lambda w, x, t: jnp.log1p(mean((w * x) ** 2 * t)),
  "pmean of own copies": lambda w, x, t: mean(ow.per_shard(w, AXIS) * x * t),
}

DERIVATIVES = {
  "grad": jax.grad,
  "value_and_grad": lambda loss: lambda *args: jax.value_and_grad(loss)(*args)[1],
  "jit": lambda loss: jax.jit(jax.grad(loss)),
  "scan": lambda loss: (
    lambda *args: lax.scan(
      lambda sum, _: (sum + jax.grad(loss)(*args), None), 0.0 * args[0], length=2
    )[0]
  ),
}


def step_of(loss, derivative="grad", **options):
  tx = ow.cross_shard(optax.sgd(1.0), AXIS, **options)

  def step(x, t):
    w = jnp.float32(1.5)
    return tx.update(DERIVATIVES[derivative](loss)(w, x, t), tx.init(w), w)[0]

  return step


def sharded(step):
  return jax.jit(jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P()))


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", LOCAL)
def test_check_step_allows_local_loss_whose_mean_is_right(name, derivative):
  step = step_of(LOCAL[name], derivative)
  ow.inspect.check_step(sharded(step), X, T)
  found, right = sharded(step)(X, T), jax.vmap(step, axis_name=AXIS)(X[:, None], T[:, None])
  np.testing.assert_allclose(found, right[0], rtol=1e-5)


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", REDUCED)
def test_check_step_refuses_reduced_loss_whose_mean_is_wrong(name, derivative):
  step = step_of(REDUCED[name], derivative)
  with pytest.raises(ValueError, match=r"check_step: the loss .* is reduced over 'w' already, at"):
    ow.inspect.check_step(sharded(step), X, T)
  found, right = sharded(step)(X, T), jax.vmap(step, axis_name=AXIS)(X[:, None], T[:, None])
  np.testing.assert_allclose(4 * found, right[0], rtol=1e-5)
  reduced = step_of(REDUCED[name], derivative, invariant="reduced")
  ow.inspect.check_step(sharded(reduced), X, T)
  np.testing.assert_allclose(sharded(reduced)(X, T), right[0], rtol=1e-5)


def test_map_workers_with_mesh_refuses_reduced_loss_and_names_line():
  tx = ow.gather_towers(ow.cross_shard(optax.sgd(1.0), AXIS), 1)

  def step(w, x):
    grads = jax.grad(lambda w: lax.psum(jnp.sum(w * x), AXIS))(w)
    return tx.update(grads, tx.init(w), w, weight=2.0)[0]

  given = jnp.float32(1.0), jnp.ones((4, 2))
  axes = {"in_axes": (None, 0), "out_axes": None}
  with pytest.raises(ValueError, match=r"map_workers: the loss .*test_reduced_loss\.py:\d+"):
    ow.map_workers(step, AXIS, mesh=mesh_of(4), **axes)(*given)
  assert float(ow.map_workers(step, AXIS, **axes)(*given)) == -8.0


@pytest.mark.parametrize("axes", [("data",), ("data", "model")])
def test_check_step_allows_loss_that_is_summed_over_another_axis(axes):
  """Tensor parallelism over "model": each device has a part of the sum that the loss is."""
  kinds = (AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds, devices=jax.devices()[:4])
  tx = ow.cross_shard(optax.sgd(1.0), axes)

  def step(x):
    w = jnp.float32(1.5)
    grads = jax.grad(lambda w: lax.psum(jnp.sum(w * x), "model"))(w)
    return tx.update(grads, tx.init(w), w)[0]

  step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data", "model"), out_specs=P()))
  x = np.arange(4.0, dtype=np.float32).reshape(2, 2)
  if "model" in axes:
    with pytest.raises(ValueError, match="is reduced over 'model' already"):
      ow.inspect.check_step(step, x)
    return
  ow.inspect.check_step(step, x)
  np.testing.assert_allclose(step(x), -x.sum(1).mean(), rtol=1e-6)
