"""Each codec by itself, against NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_codecs as ref

from optax_wrappers import codecs, contrib

# A codec, what NumPy makes of an array, and what NumPy says of its bytes.
CODECS = {
  "bfloat16": (codecs.cast("bfloat16"), lambda x: ref.cast(x, "bfloat16"), ("cast", {})),
  "float16": (codecs.cast("float16"), lambda x: ref.cast(x, "float16"), ("cast", {})),
  **{
    f"{bits} bits, {chunk}, {scale}": (
      codecs.quantize(bits, chunk, scale),
      lambda x, options=(bits, chunk, scale): ref.quantize(x, *options),
      ("quantize", {"bits": bits, "chunk": chunk, "scale": scale}),
    )
    for bits, chunk in ((8, 256), (4, 7), (2, 64))
    for scale in ("power_of_two", "float32")
  },
  **{
    name: (
      contrib.float8(name, 32),
      lambda x, name=name: ref.float8(x, name, 32),
      ("float8", {"chunk": 32}),
    )
    for name in ("e4m3fn", "e5m2")
  },
  "signs": (codecs.signs(), ref.signs, ("signs", {})),
  "signs, 16": (codecs.signs(16), lambda x: ref.signs(x, 16), ("signs", {"chunk": 16})),
  "vote": (contrib.majority_vote(), ref.vote, ("vote", {})),
  "top": (
    codecs.top_k(0.1, 64),
    lambda x: ref.top_k(x, 0.1, 64, lambda v: ref.cast(v, "bfloat16")),
    ("top_k", {"fraction": 0.1, "chunk": 64}),
  ),
}


# What is rounded once, or by a power of two, has the same bits as in NumPy.
EXACT = {"bfloat16", "float16", "vote", "top", *(name for name in CODECS if "power_of" in name)}


def round_trips(codec, arrays):
  """Of all arrays in one program."""

  def there_and_back(x):
    code = codec.encode(x)
    assert code.dtype == jnp.uint8
    assert code.shape == (*x.shape[:-1], codec.num_bytes(x.shape[-1]))
    return codec.decode(code, x.shape[-1])

  found = jax.jit(lambda arrays: [there_and_back(x) for x in arrays])(arrays)
  return [np.asarray(x) for x in found]


def round_trip(codec, x):
  return round_trips(codec, [x])[0]


@pytest.mark.parametrize("name", CODECS)
def test_codecs_round_trip_and_num_bytes_match_numpy(name):
  codec, numpy, (kind, options) = CODECS[name]
  rng = np.random.default_rng(0)

  def rows(n):
    """Of every size, of ties, and of zeros."""
    x = rng.normal(size=(5, n)).astype(np.float32) * np.float32([[1e-20], [1], [1e20], [0], [1]])
    x[4] = rng.integers(-3, 4, n)
    return x

  given = [rows(n) for n in (1, 9, 300)]
  for x, found in zip(given, round_trips(codec, given), strict=True):
    n, expected = x.shape[1], numpy(x)
    with np.errstate(over="ignore"):
      bound = 0 if name in EXACT else 2e-6 * np.abs(x).max(-1, keepdims=True)
    assert (np.abs(found - expected) <= bound).all()
    assert codec.num_bytes(n) == ref.num_bytes(kind, n, **options)


def test_float8_and_cast_jaxpr_has_rounding_and_barrier():
  """XLA removes conversions there and back, and ptxas up to CUDA 13.0 misreads a low byte."""
  for name in ("e4m3fn", "e5m2"):
    assert " round[" in str(jax.make_jaxpr(contrib.float8(name).encode)(jnp.ones(8)))
  for name in ("bfloat16", "float16"):
    text = str(jax.make_jaxpr(codecs.cast(name).encode)(jnp.ones(8)))
    assert re.search(r"u16\[8\] = optimization_barrier", text)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "vote"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_codecs_nan_and_inf_stay_nonfinite_in_own_row(name, value):
  codec, _, _ = CODECS[name]
  # Of many chunks too, of which XLA:CPU takes maxima that lose a NaN.
  given = [np.random.default_rng(1).normal(size=(2, n)).astype("f") for n in (300, 20_000)]
  for x in given:
    x[0, 40] = value
  for arrived in round_trips(codec, given):
    assert not np.isfinite(arrived[0, 40])
    assert np.isfinite(arrived[1]).all()


def test_quantize_power_of_two_scale_is_smallest_that_reaches():
  codec = codecs.quantize(8, 1)
  encode, decode = jax.jit(codec.encode), jax.jit(lambda code: codec.decode(code, 1))
  for largest in np.float32([127, 127.00001, 128, 63.5, 63.500004, 1, 3e38, 1e-35]):
    code = np.asarray(encode(np.array([largest])))
    scale = 2.0 ** (int(code[1]) - 127)
    assert scale * 127 >= largest > scale / 2 * 127
    assert abs(float(np.asarray(decode(code))[0]) - largest) <= scale / 2


def test_top_k_ties_send_first_entry_and_nan_before_all():
  codec = codecs.top_k(0.25, 4)
  x = np.float32([[1, -1, 1, 1], [0, 5, np.nan, 9]])
  np.testing.assert_array_equal(round_trip(codec, x), [[1, 0, 0, 0], [0, 0, np.nan, 0]])


def test_top_k_with_quantized_values_matches_numpy():
  value = codecs.quantize(8, 16)
  codec = codecs.top_k(0.25, 64, value)
  x = np.random.default_rng(2).normal(size=(3, 100)).astype(np.float32)
  expected = ref.top_k(x, 0.25, 64, lambda v: ref.quantize(v, 8, 16, "power_of_two"))
  np.testing.assert_array_equal(round_trip(codec, x), expected)
  assert codec.num_bytes(100) == 2 * (16 + 17)


@pytest.mark.parametrize("length", [255, 256, 257, 4095, 4096, 4097, 65_536])
def test_top_k_index_bits_by_chunk_length_match_numpy(length):
  """Of 3 chunks, with an odd number of entries in all, and the first and last place among them."""
  codec = codecs.top_k(5 / length, length)
  x = np.random.default_rng(length).normal(size=(2, 3 * length)).astype(np.float32)
  x[:, ::length], x[:, length - 1 :: length] = 7, -8
  expected = ref.top_k(x, 5 / length, length, lambda v: ref.cast(v, "bfloat16"))
  np.testing.assert_array_equal(round_trip(codec, x), expected)
  options = {"fraction": 5 / length, "chunk": length}
  assert codec.num_bytes(3 * length) == ref.num_bytes("top_k", 3 * length, **options)


def test_top_k_sparse_loco_num_bytes_is_116_of_4096_entries():
  """SparseLoCo (arXiv 2508.15706): 64 of 4,096, with places of 12 bits and values of 2. Here the 64
  share a scale of 4 bytes."""
  codec = codecs.top_k(64 / 4096, 4096, codecs.quantize(bits=2, chunk=64))
  assert codec.num_bytes(4096) == 64 * 12 // 8 + 64 * 2 // 8 + 4


def test_random_k_draws_every_entry_equally_often():
  """One of each ten neighbors, others in the next step; the sum of ten thousand is even."""
  codec = codecs.random_k(0.1, seed=3)
  x = jnp.ones((5, 8))

  def step(memory, _):
    (result,), (own,), memory = codec.reduce(lambda xs: xs, [x], memory)
    return memory, (result, own)

  memory, (results, owns) = jax.lax.scan(step, codec.init([x.shape]), length=10_000)
  np.testing.assert_array_equal(results, owns)
  assert int(memory) == 10_000
  assert set(np.asarray(results).sum((1, 2))) == {4.0}
  assert (np.asarray(results).reshape(-1, 4, 10).sum(-1) == 1).all()
  np.testing.assert_allclose(results.mean(0), 0.1, atol=0.015)  # five standard deviations
  assert (np.asarray(results[0]) != np.asarray(results[1])).any()


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (lambda: codecs.quantize(bits=3), ValueError, "bits must be 8, 4 or 2"),
    (lambda: codecs.quantize(chunk=0), ValueError, "chunk must be at least 1"),
    (lambda: codecs.quantize(scale="two"), ValueError, "scale must be one of"),
    (lambda: codecs.cast("float8"), ValueError, "dtype must be one of"),
    (lambda: contrib.float8("e3m4"), ValueError, "name must be one of"),
    (lambda: codecs.top_k(0.0), ValueError, r"fraction must be in \(0, 1\]"),
    (lambda: codecs.top_k(0.1, chunk=70_000), ValueError, "chunk must be at most 65536"),
    (lambda: codecs.top_k(0.1, value=contrib.power_sgd(1)), TypeError, "value must be a Codec"),
    (lambda: codecs.random_k(2.0), ValueError, "fraction must be"),
    (lambda: contrib.power_sgd(0), ValueError, "rank must be at least 1"),
    (lambda: contrib.power_sgd(1, min_ratio=0.5), ValueError, "min_ratio must be at least 1"),
    (lambda: codecs.signs(0), ValueError, "chunk must be at least 1"),
  ],
)
def test_codecs_errors_arguments_out_of_range(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_codecs_applies_to_depends_on_shape():
  large = codecs.quantize().applies_to
  assert [large(shape) for shape in ((1024,), (32, 32), (31, 33), (4, 16, 16), ())] == [
    False,
    True,
    False,
    True,
    False,
  ]
  low = contrib.power_sgd(4).applies_to
  # (n + m) r 2 < n m; a stack of small matrices is not one large matrix.
  assert [low(shape) for shape in ((32, 32), (64, 64), (64, 8, 8), (4, 64, 64))] == [
    True,
    True,
    False,
    True,
  ]
  assert contrib.majority_vote().applies_to((3,))
