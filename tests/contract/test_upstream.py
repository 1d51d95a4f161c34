"""What stops at Optax or JAX itself, so that its change is noticed; docs/errors.md lists it."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from helpers import AXIS, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes

MOMENTUM = optax.sgd(0.1, momentum=0.9)


# What stops at Optax or JAX itself, so that the day that it changes is noticed; docs/errors.md
# lists them.


def on_per_shard_gradients(tx):
  def step(params, x):
    grads = jax.grad(lambda p: jnp.sum(p * x[0]))(ow.per_shard(params, AXIS))
    return ow.per_shard(tx.update(grads, tx.init(params), params)[0], AXIS)[None]

  mapped = jax.shard_map(step, mesh=mesh_of(2), in_specs=(P(), P(AXIS)), out_specs=P(AXIS))
  return jax.jit(mapped)(jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize(
  "tx",
  [optax.MultiSteps(MOMENTUM, 2), optax.apply_if_finite(MOMENTUM, 2)],
  ids=["MultiSteps", "finite"],
)
@pytest.mark.xfail(
  raises=TypeError, strict=True, reason="Optax 0.2.8: branches that vary over different axes"
)
def test_upstream_optax_branches_on_per_shard_gradients_xfail(tx):
  on_per_shard_gradients(tx)


@pytest.mark.parametrize(
  "tx",
  [optax.MultiSteps(MOMENTUM, 2), optax.apply_if_finite(MOMENTUM, 2)],
  ids=["MultiSteps", "finite"],
)
def test_optax_branches_inside_cross_shard_run(tx):
  if isinstance(tx, optax.MultiSteps):
    tx = tx.gradient_transformation()
  on_per_shard_gradients(ow.cross_shard(tx, AXIS))


@pytest.mark.xfail(
  raises=TypeError, strict=True, reason="Optax 0.2.8: lookahead takes no extra args"
)
def test_upstream_extra_args_through_lookahead_xfail():
  tx = optax.lookahead(ow.drop_stale(optax.sgd(0.1), 1), 2, 0.5)
  params = optax.LookaheadParams.init_synced(jnp.ones(2))
  tx.update(jnp.ones(2), tx.init(params), params, computed_at=0)


@pytest.mark.xfail(raises=AssertionError, strict=True, reason="JAX 0.10.2: no collectives over it")
def test_upstream_named_vmap_inside_shard_map_xfail():
  inside = jax.vmap(lambda x: jax.lax.psum(x, "v"), axis_name="v")
  mapped = jax.shard_map(inside, mesh=mesh_of(2), in_specs=P(AXIS), out_specs=P(AXIS))
  jax.jit(mapped)(jnp.ones(4))


@pytest.mark.xfail(raises=ValueError, strict=True, reason="Optax 0.2.8: promotes its count")
def test_upstream_adam_under_strict_promotion_xfail():
  with jax.numpy_dtype_promotion("strict"):
    tx = optax.adam(0.1)
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
