"""Collectives: order, packing and groups."""

import re

import jax
import numpy as np
import pytest
from helpers import AXIS, mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from optax_wrappers._core import _collectives


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_gather_is_in_index_order_and_replicated(check_vma):
  mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def step(x):
    return _collectives.all_gather(x[0], ("a", "b")), lax.axis_index(("a", "b"))[None]

  mapped = jax.shard_map(
    step, mesh=mesh, in_specs=P(("a", "b")), out_specs=(P(), P(("a", "b"))), check_vma=check_vma
  )
  gathered, index = jax.jit(mapped)(np.arange(8, dtype=np.float32) ** 2)
  np.testing.assert_array_equal(gathered, np.arange(8.0) ** 2)
  np.testing.assert_array_equal(index, np.arange(8))


def random_leaves(rng):
  """Leaves [4, ...] of any size around the limit of what is small, any dtype, some empty."""
  leaves = []
  for _ in range(rng.integers(0, 12)):
    shape = tuple(rng.integers(0, 5, rng.integers(0, 4)))
    if rng.random() < 0.2:
      shape = (int(rng.integers(255_000, 270_000)),)
    dtype = rng.choice(["float32", "float16", "int32"])
    leaves.append(rng.integers(-9, 9, (4, *shape)).astype(dtype))
  return leaves


@pytest.mark.parametrize("seed", range(25))
def test_psum_of_random_leaves_sums_each_once(seed):
  """Whole numbers, which every order of summation sums exactly."""
  leaves = random_leaves(np.random.default_rng(seed))
  assert _collectives.SMALL_BYTES == 4 * 262_144
  mapped = jax.jit(jax.vmap(lambda tree: _collectives.psum(tree, (AXIS,)), axis_name=AXIS))
  for leaf, total in zip(leaves, mapped(leaves) if leaves else [], strict=True):
    assert total.shape == leaf.shape
    assert total.dtype == leaf.dtype
    expected = np.broadcast_to(leaf.sum(0), leaf.shape)
    np.testing.assert_array_equal(total, expected)


def test_psum_packs_small_leaves_into_buffer_on_cpu_only():
  tree = {
    "small": [np.ones(shape, "f") for shape in ((4, 10), (4, 3, 3), (4,))],
    "half": np.ones((4, 7), np.float16),
    "large": [np.ones(shape, "f") for shape in ((4, 512, 512), (4, 270_000))],
  }

  def buffers(platform):
    def step(tree):
      return _collectives.psum(jax.tree.map(lambda x: x[0], tree), (AXIS,))

    mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P())
    text = jax.jit(mapped).trace(tree).lower(lowering_platforms=(platform,)).as_text()
    return sorted(
      int(np.prod([int(n) for n in shape.split("x") if n])) for shape in _operands(text)
    )

  assert buffers("cpu") == [7, 10 + 9 + 1, 512 * 512, 270_000]
  for platform in ("tpu", "cuda", "rocm"):
    assert buffers(platform) == [1, 7, 9, 10, 512 * 512, 270_000]
  tree = [np.ones((4, 2), "f")] * 200
  assert buffers("cpu") == [2 * 200]
  tree = [np.ones((4, 2), "f")] * 1000  # which XLA would take long to take out of one buffer
  assert buffers("cpu") == [2 * (1000 - 4 * 204), *[2 * 204] * 4]


def test_psum_packs_leaves_of_workers_in_sharded_vmap():
  """One axis is left to XLA, and it is the workers': as many values sent as buffers."""
  mesh = mesh_of(4)
  leaves = [jax.device_put(np.ones((4, 5), "f"), jax.sharding.NamedSharding(mesh, P(AXIS)))] * 20

  for name in (AXIS, "mesh axis of another name"):
    mapped = jax.vmap(
      lambda tree, name=name: _collectives.psum(tree, (name,)),
      axis_name=name,
      spmd_axis_name=AXIS,
    )
    text = jax.jit(mapped).lower(leaves).compile().as_text()
    sent = re.findall(r"= (\(.*?\)|\S+) all-reduce(?:-start)?\(", text)
    assert len(re.findall(r"f32\[", "".join(sent))) == 1, sent


def _operands(text):
  """The shapes, such as 3x3x, of all operands of the all-reduces in a StableHLO module."""
  found = []
  for signature in re.findall(r"stablehlo\.all_reduce.*?\}\) : \((.*?)\) ->", text, re.S):
    found += re.findall(r"tensor<((?:\d+x)*)[a-z]+\d+>", signature)
  return found


def test_group_psum_matches_numpy():
  x = np.arange(16.0, dtype=np.float32).reshape(8, 2) ** 2
  groups = [[0, 7], [3, 1], [2, 4], [5, 6]]
  summed = jax.vmap(lambda x: _collectives.group_psum(x, AXIS, groups), axis_name=AXIS)
  out = np.asarray(jax.jit(summed)(x))
  for group in groups:
    for member in group:
      np.testing.assert_array_equal(out[member], x[group].sum(0))
