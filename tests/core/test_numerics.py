"""Arithmetic that keeps dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers._core import _numerics


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_rounded_to_16_and_8_bits_equals_numpy_conversion(name):
  """As NumPy converts numbers of every size, halfway cases, and numbers that overflow."""
  dtype = jnp.dtype(name)
  rng = np.random.default_rng(2)
  x = (rng.normal(size=100_000) * np.exp2(rng.uniform(-120, 120, 100_000))).astype(np.float32)
  near = np.arange(2**12, dtype=np.float32) / 2**11  # of every dtype's halfway points
  with np.errstate(over="ignore", invalid="ignore"):
    top = float(jnp.finfo(dtype).max) * np.linspace(0.9, 1.1, 1001, dtype=np.float32)
    others = [np.inf, -np.inf, np.nan, -0.0]
    x = np.concatenate([x, near, -near, top, -top, others], dtype=np.float32)
    expected = x.astype(dtype).astype(np.float32)
  found = np.asarray(_numerics.rounded(jnp.asarray(x), dtype))
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[found == 0]))


def test_scale_and_select_of_empty_array_keep_varying_axes():
  """Under check_vma=True `jnp.where` loses the axes over which such an array varies."""
  mesh = mesh_of(2)
  tx = ow.cross_shard(optax.sgd(1.0), AXIS)

  def step(grads, weight):
    grads = jax.tree.map(lambda x: ow._core._numerics.scale(x[0], weight[0]), grads)
    chosen = ow._core._numerics.select(weight[0] > 1, jnp.zeros((0, 3)), jnp.zeros((0, 3)))
    assert set(ow._core._axes.varying(chosen)) == {AXIS}
    updates, _ = tx.update(grads, tx.init(grads), grads, weight=weight[0])
    return updates

  specs = {"in_specs": P(AXIS), "out_specs": P()}
  grads = {"w": jnp.array([[1.0], [3.0]]), "empty": jnp.zeros((2, 0, 3))}
  found = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(grads, jnp.array([1.0, 2.0]))
  assert found["empty"].shape == (0, 3)
  np.testing.assert_allclose(found["w"], [-(1 + 2 * 6) / 3], rtol=1e-6)
