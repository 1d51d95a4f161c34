"""Replicated values: per_shard, broadcast_from and is_replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AXIS, CONTEXTS, assert_close, in_context, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow


@pytest.mark.parametrize("context", CONTEXTS)
def test_per_shard_gives_local_gradient_in_every_context(context):
  def own_gradient(w, x):
    return jax.grad(lambda w: w * x)(ow.per_shard(w, AXIS))

  x = np.float32([0, 1, 2, 5])
  assert_close(in_context(context, own_gradient, 4, (None, 0), 0)(np.float32(1), x), x)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("source", [0, 3])
def test_broadcast_from_every_dtype_in_every_context(context, source):
  tree = {
    "f": np.array([1.0, np.nan, 3.0, 4.5], np.float32),
    "b": np.array([True, False, True, False]),
    "i": np.array([7, -1, 5, 2**31 - 1], np.int32),
    "h": np.array([[1.0], [2.0], [3.0], [4.0]], jnp.bfloat16),
    "c": np.array([1j, 2.0, 3.0, 4 - 1j], np.complex64),
  }
  out = in_context(context, lambda t: ow.broadcast_from(t, AXIS, source), 4, (0,), None)(tree)
  for name, leaf in tree.items():
    np.testing.assert_array_equal(
      np.asarray(out[name]).astype(complex), leaf[source].astype(complex)
    )
    assert out[name].dtype == leaf.dtype


def test_broadcast_from_prng_key():
  keys = jax.random.split(jax.random.key(0), 4)
  out = jax.vmap(lambda k: ow.broadcast_from(k, AXIS, 2), axis_name=AXIS)(keys)
  np.testing.assert_array_equal(
    jax.random.key_data(out), np.tile(jax.random.key_data(keys[2]), (4, 1))
  )


# Divergence.


@pytest.mark.parametrize("context", CONTEXTS)
def test_is_replicated_detects_one_bit_in_every_dtype(context):
  tree = {
    "f": np.arange(6, dtype=np.float32).reshape(2, 3),
    "h": np.asarray(jnp.arange(3, dtype=jnp.bfloat16)),
    "i": np.array(7, np.int32),
    "b": np.array([True, False]),
    "c": np.array([1j, 2], np.complex64),
  }
  equal = jax.tree.map(lambda x: np.stack([x] * 4), tree)
  check = in_context(context, lambda t: ow.is_replicated(t, AXIS), 4, (0,), None)
  assert bool(check(equal))
  for name in tree:
    broken = {key: value.copy() for key, value in equal.items()}
    flat = broken[name][2:3].view(np.uint8)
    flat.flat[-1] ^= 1  # the lowest bit of the last byte, on shard 2
    assert not bool(check(broken)), name
  swapped = {**equal, "f": equal["f"].copy()}
  swapped["f"][1, 0, :2] = swapped["f"][1, 0, 1::-1]
  assert not bool(check(swapped))


def test_is_replicated_sends_16_bytes_not_tensors():
  check = jax.shard_map(
    lambda x: ow.is_replicated(x, AXIS), mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P()
  )
  compiled = jax.jit(check).lower([jnp.ones((4, 1000, 10)), jnp.ones((4, 7))]).compile()
  assert [c.num_bytes for c in ow.inspect.compiled_collectives(compiled)] == [16]
  assert bool(ow.is_replicated(jnp.ones(3), None))


def test_broadcast_from_and_per_shard_errors_source_and_axis():
  with pytest.raises(ValueError, match="source must be a shard index below 2, got 2"):
    jax.vmap(lambda x: ow.broadcast_from(x, AXIS, 2), axis_name=AXIS)(jnp.ones(2))
  with pytest.raises(ValueError, match="not bound"):
    ow.broadcast_from(jnp.ones(2), AXIS)
  with pytest.raises(ValueError, match="not bound"):
    ow.per_shard(jnp.ones(2), AXIS)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn"])
def test_is_replicated_dtypes_of_less_than_one_byte(dtype):
  check = jax.jit(jax.vmap(lambda x: ow.is_replicated(x, AXIS), axis_name=AXIS, out_axes=None))
  same = np.ones((2, 3), jnp.dtype(dtype))
  other = np.array([[1, 1, 1], [1, 0, 1]]).astype(jnp.dtype(dtype))
  assert (bool(check(same)), bool(check(other))) == (True, False)
