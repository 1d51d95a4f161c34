"""Checksums of bits, against sums in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from optax_wrappers._core import _checksums


def checksums(words):
  """Of words in their order."""
  words = np.ravel(words).astype(np.uint64)
  found = []
  for odd in (0x85EBCA77, 0xC2B2AE3D):
    place = np.arange(len(words), dtype=np.uint64) * odd % 2**32
    mixed = (words ^ place) * 0x9E3779B1 % 2**32
    mixed = (mixed ^ mixed >> 15) * odd % 2**32
    found.append(int((mixed ^ mixed >> 13).sum()) % 2**32)
  return found


def fingerprint(leaves):
  total = [0, 0]
  for words in leaves:
    mixed = [(one ^ one >> 16) * 0x9E3779B1 for one in total]
    total = [(one + other) % 2**32 for one, other in zip(mixed, checksums(words))]
  return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_checksums_and_fingerprint_match_sums_in_numpy(dtype):
  """The files of pods name a center by its fingerprint, so that it must not change."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(3, 5, 2))).astype(dtype)
  found = np.asarray(jnp.stack([x.real, x.imag]) if dtype == "complex64" else x)
  words = found.view({4: np.uint32, 2: np.uint16, 1: np.uint8}[found.dtype.itemsize])
  assert _checksums.checksums(x).tolist() == checksums(words)
  one = jnp.float32(1.5)
  tree = {"a": x, "b": one, "c": x}
  expected = fingerprint([words, np.asarray(one).view(np.uint32), words])
  assert _checksums.fingerprint(tree).tolist() == expected
  assert _checksums.fingerprint({"a": one, "b": x, "c": x}).tolist() != expected
