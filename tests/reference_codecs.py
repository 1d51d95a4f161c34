"""Gradient codecs and compressed exchanges with error feedback in plain NumPy.

An independent reference for tests: written from the papers, for clarity and not for speed, without
jax and without the library under test. `W` is the number of workers; arrays with a leading axis of
length W hold one row for each worker.

The first part are round trips, `decode(encode(x))`, float32 [..., n] -> float32 [..., n]: they work
on the last axis, and rows are independent. `num_bytes` says how many bytes a row's code takes. The
second part are exchanges: what all workers get, and what each of them still owes afterwards.

Arithmetic is in float32, one operation after the other, so that exact comparisons are possible.
Exceptions are `signs`, whose mean is summed in float64 and rounded once, and `power_sgd`, which is
in float64 altogether.
"""

import math

import ml_dtypes
import numpy as np
import scipy.fft

_FLOAT8 = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


# Round trips


def _by_chunk(x, chunk, round_trip):
  """Applies `round_trip` to each `chunk` consecutive entries; the last chunk may be shorter."""
  x = np.asarray(x, np.float32)
  n = x.shape[-1]
  if n == 0:
    return x.copy()
  with np.errstate(all="ignore"):
    parts = [round_trip(x[..., i : i + chunk]) for i in range(0, n, chunk)]
  result = np.concatenate(parts, axis=-1)
  assert result.dtype == np.float32 and result.shape == x.shape
  return result


def _largest(x):
  """(largest magnitude of each row, whether all of the row is finite), both [..., 1].

  The magnitude is 0 where the row is not finite."""
  finite = np.isfinite(x).all(axis=-1, keepdims=True)
  return np.where(finite, np.abs(x).max(axis=-1, keepdims=True), np.float32(0)), finite


def cast(x, dtype: str):
  """Rounded to nearest in "bfloat16" or "float16"; finite values saturate in "float16"."""
  x = np.asarray(x, np.float32)
  if dtype == "bfloat16":
    narrow = ml_dtypes.bfloat16
  elif dtype == "float16":
    narrow = np.float16
    x = np.where(np.isfinite(x), np.clip(x, np.float32(-65504), np.float32(65504)), x)
  else:
    raise ValueError(f"unknown dtype {dtype!r}")
  with np.errstate(all="ignore"):
    return x.astype(narrow).astype(np.float32)


def _power_of_two(a, top: int):
  """Smallest power of two s with s * top >= a, at least 2**-126; exact, in float64."""
  a = a.astype(np.float64)
  s = np.ldexp(1.0, np.frexp(a / top)[1])  # a / top < s <= 2 a / top
  s = np.where(s / 2 * top >= a, s / 2, s)
  return np.where(a == 0, 2.0**-126, np.maximum(s, 2.0**-126)).astype(np.float32)


def quantize(x, bits: int, chunk: int, scale: str):
  """Integers of `bits` bits, symmetric, with one scale for each chunk (as in block-wise absmax
  quantisation, Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization").

  scale "power_of_two": the smallest that reaches the largest magnitude, so that all products are
  exact. scale "float32": the largest magnitude over the largest integer. Ties go to even. A chunk
  that is not finite becomes NaN."""
  if scale not in ("power_of_two", "float32"):
    raise ValueError(f"unknown scale {scale!r}")
  top = 2 ** (bits - 1) - 1

  def round_trip(x):
    a, finite = _largest(x)
    if scale == "power_of_two":
      s = _power_of_two(a, top)
    else:
      s = a / np.float32(top)
      s = np.where(s == 0, np.float32(1), s)
    q = np.clip(np.rint(x / s), np.float32(-top), np.float32(top))
    q = q + np.float32(0)  # an integer has no negative zero
    return np.where(finite, q * s, np.float32(np.nan))

  return _by_chunk(x, chunk, round_trip)


def float8(x, name: str, chunk: int):
  """8-bit floats (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"), each chunk scaled so
  that its largest magnitude is the format's. A chunk that is not finite becomes NaN."""
  dtype = _FLOAT8[name]
  top = np.float32(ml_dtypes.finfo(dtype).max)

  def round_trip(x):
    a, finite = _largest(x)
    s = a / top
    s = np.where(s == 0, np.float32(1), s)
    y = np.clip(x / s, -top, top).astype(dtype).astype(np.float32)
    return np.where(finite, y * s, np.float32(np.nan))

  return _by_chunk(x, chunk, round_trip)


def signs(x, chunk: int | None = None):
  """Signs times the mean magnitude of the chunk, or of the whole row (Karimireddy et al. 2019,
  "Error Feedback Fixes SignSGD"). The sign of zero is +1."""

  def round_trip(x):
    mean = np.abs(x).mean(axis=-1, keepdims=True, dtype=np.float64).astype(np.float32)
    return np.where(x >= 0, np.float32(1), np.float32(-1)) * mean

  return _by_chunk(x, max(1, np.shape(x)[-1]) if chunk is None else chunk, round_trip)


def vote(x):
  """Signs alone, that of zero +1 (Bernstein et al. 2018, "signSGD with Majority Vote")."""
  return np.where(np.asarray(x, np.float32) >= 0, np.float32(1), np.float32(-1))


def _num_kept(fraction: float, chunk: int) -> int:
  return max(1, round(fraction * chunk))


def top_k(x, fraction: float, chunk: int, value):
  """The entries of largest magnitude of each chunk, after the round trip `value`; zero elsewhere
  (Stich et al. 2018, "Sparsified SGD with Memory").

  NaN ranks first; of equals the lowest index. `value` gets [..., k], in this order."""
  x = np.asarray(x, np.float32)
  n = x.shape[-1]
  chunk = min(chunk, n)

  def round_trip(part):
    x = np.zeros((*part.shape[:-1], chunk), np.float32)
    x[..., : part.shape[-1]] = part
    nan = np.isnan(x)
    magnitude = np.where(nan, np.float32(0), np.abs(x))
    order = np.lexsort((-magnitude, ~nan), axis=-1)  # by the last key, then the first; stable
    kept = order[..., : _num_kept(fraction, chunk)]
    result = np.zeros_like(x)
    values = np.asarray(value(np.take_along_axis(x, kept, axis=-1)), np.float32)
    np.put_along_axis(result, kept, values, axis=-1)
    return result[..., : part.shape[-1]]

  return _by_chunk(x, chunk, round_trip)


def num_bytes(kind: str, n: int, **options) -> int:
  """Bytes of the code of a row of n entries.

  kind: the name of a round trip, with its options: quantize(bits, chunk, scale), float8(chunk),
  signs(chunk=None), top_k(fraction, chunk), the latter with bfloat16 values and, for an index,
  1 byte below 2**8, 1.5 below 2**12, else 2."""
  if kind == "cast":
    return 2 * n
  if kind == "vote":
    return math.ceil(n / 8)
  if n == 0:
    return 0
  chunk = options.get("chunk")
  chunk = n if chunk is None else min(chunk, n)
  num_chunks = math.ceil(n / chunk)
  if kind == "quantize":
    scale_bytes = {"power_of_two": 1, "float32": 4}[options["scale"]]
    return math.ceil(n * options["bits"] / 8) + scale_bytes * num_chunks
  if kind == "float8":
    return n + 4 * num_chunks
  if kind == "signs":
    return math.ceil(n / 8) + 4 * num_chunks
  if kind == "top_k":
    num_kept = num_chunks * _num_kept(options["fraction"], chunk)
    index_bits = next(bits for bits in (8, 12, 16) if chunk <= 2**bits)
    return math.ceil(num_kept * index_bits / 8) + 2 * num_kept
  raise ValueError(f"unknown kind {kind!r}")


# Exchanges


def _sum(rows):
  """Sum in worker order, in the rows' own precision."""
  total = rows[0]
  for row in rows[1:]:
    total = total + row
  return total


def _finite(x):
  """`x` with 0 in place of what is not finite: a residual must not keep a NaN forever."""
  return np.where(np.isfinite(x), x, np.zeros_like(x))


def exchange(
  contributions,
  residuals,
  owner,
  round_trip,
  *,
  second: bool | None = None,
  feedback: bool = True,
  decay: float = 1.0,
  votes: bool = False,
):
  """One compressed sum over workers with error feedback.

  Feedback is that of Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", at the senders, and
  with a second rounding also at the owners of the parts, as in Zheng et al. 2019,
  "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback".

  Args:
    contributions: float32 [W, *shape], already weighted: the result is their sum.
    residuals: float32 [W, *shape], what each worker has not yet sent.
    owner: float32 `shape`, what the owners of all parts have not yet sent.
    round_trip: float32 [n] -> float32 [n].
    second: whether the sums are rounded again, part by part, each by its owner. None: if W > 2.
    feedback: whether residuals are added and updated.
    decay: factor of `residuals` (not of `owner`).
    votes: whether with a second rounding the places that belong to no part are rounded like parts,
      in place of travelling exactly.

  Returns:
    (result, residuals, owner), new ones. `owner` stays as it is where nothing is rounded twice.
  """
  contributions = np.asarray(contributions, np.float32)
  residuals = np.array(residuals, np.float32)
  owner = np.array(owner, np.float32)
  num_workers, *shape = contributions.shape
  assert residuals.shape == contributions.shape and list(owner.shape) == shape
  with np.errstate(all="ignore"):
    wanted = contributions + np.float32(decay) * residuals if feedback else contributions
    if (num_workers > 2) if second is None else second:
      result, owed, owner_owed = _scatter(wanted, owner, round_trip, feedback, votes)
    else:
      result, owed = _gather(wanted, round_trip)
      owner_owed = owner
  assert result.dtype == owed.dtype == owner_owed.dtype == np.float32
  if not feedback:
    return result, residuals, owner
  return result, _finite(owed), _finite(owner_owed)


def _gather(wanted, round_trip):
  """Each worker sends the whole, as one row, to all: one rounding."""
  sent = np.stack([round_trip(u.reshape(-1)).reshape(u.shape) for u in wanted])
  return _sum(sent), wanted - sent


def _scatter(wanted, owner, round_trip, feedback, votes):
  """Worker i owns part i: it adds all workers' parts i, rounds the sum again, sends it to all."""
  num_workers, *shape = wanted.shape
  if not shape:
    result, owed, owner = _scatter(wanted[:, None], owner[None], round_trip, feedback, votes)
    return result[0], owed[:, 0], owner[0]

  whole = [d for d, size in enumerate(shape) if size % num_workers == 0]
  d = whole[0] if whole else shape.index(max(shape))
  result = np.zeros_like(owner)
  owed = np.zeros_like(wanted)
  owner_owed = owner.copy()

  divided = shape[d] // num_workers * num_workers
  for i in range(num_workers):
    part = (slice(None),) * d + (slice(i, divided, num_workers),)
    if result[part].size == 0:
      continue
    sent = []
    for w in range(num_workers):
      u = wanted[w][part]
      sent.append(round_trip(u.reshape(-1)).reshape(u.shape))
      owed[w][part] = u - sent[w]
    total = _sum(sent)
    if feedback:
      total = total + owner[part]
    result[part] = round_trip(total.reshape(-1)).reshape(total.shape)
    owner_owed[part] = total - result[part]

  rest = (slice(None),) * d + (slice(divided, None),)
  if result[rest].size:
    rows = [u[rest].reshape(-1) for u in wanted]
    total = round_trip(_sum([round_trip(row) for row in rows])) if votes else _sum(rows)
    result[rest] = total.reshape(result[rest].shape)

  return result, owed, owner_owed


def power_sgd(contributions, residuals, Q, rank: int):  # noqa: N803
  """One step of PowerSGD with warm start (Vogels et al. 2019, "PowerSGD: Practical Low-Rank
  Gradient Compression for Distributed Optimization", Algorithm 1), in float64.

  Each worker keeps its own residual: its matrix without that matrix' projection, in place of the
  difference from what all of them agreed on.

  Args:
    contributions: [W, *shape]: `shape` is [n, m]; or [L, n, m], L matrices each by itself; or
      longer and taken as one matrix of all but the last dimension by the last.
    residuals: [W, *shape].
    Q: [m, rank], or [L, m, rank].

  Returns:
    (result, residuals, Q), new ones.
  """
  contributions = np.asarray(contributions, np.float64)
  wanted = contributions + np.asarray(residuals, np.float64)
  q = np.asarray(Q, np.float64)
  num_workers, *shape = contributions.shape
  if len(shape) < 2:
    raise ValueError(f"not a matrix: {shape}")
  if len(shape) == 3:
    each = [power_sgd(contributions[:, i], residuals[:, i], q[i], rank) for i in range(shape[0])]
    results, owed, new_q = zip(*each)
    return np.stack(results), np.stack(owed, axis=1), np.stack(new_q)

  matrices = wanted.reshape(num_workers, -1, shape[-1])
  if rank > min(matrices.shape[1:]) or q.shape != (shape[-1], rank):
    raise ValueError(f"rank {rank} and Q of {q.shape} do not fit {matrices.shape[1:]}")
  p = np.linalg.qr(_sum([m @ q for m in matrices]))[0]
  own_q = [m.T @ p for m in matrices]
  new_q = _sum(own_q)
  result = p @ new_q.T
  owed = np.stack([m - p @ own.T for m, own in zip(matrices, own_q)])
  return result.reshape(shape), owed.reshape(contributions.shape), new_q


def random_k(contributions, residuals, indices, feedback: bool = True):
  """The sum at the same, randomly chosen places on all workers, zero elsewhere (Stich et al. 2018,
  "Sparsified SGD with Memory").

  Args:
    contributions: float32 [W, *shape].
    residuals: float32 [W, *shape].
    indices: [k], different indices into the flat array.
    feedback: whether residuals are added and updated. Without, the result is times n / k, which
      makes it unbiased.

  Returns:
    (result, residuals), new ones.
  """
  contributions = np.asarray(contributions, np.float32)
  residuals = np.array(residuals, np.float32)
  num_workers, *shape = contributions.shape
  indices = np.asarray(indices)
  assert len(set(indices.tolist())) == len(indices)
  wanted = (contributions + residuals if feedback else contributions).reshape(num_workers, -1)
  n = wanted.shape[1]
  result = np.zeros(n, np.float32)
  result[indices] = _sum(wanted[:, indices])
  if not feedback:
    return (result * np.float32(n / len(indices))).reshape(shape), residuals
  owed = wanted.copy()
  owed[:, indices] = 0
  return result.reshape(shape), owed.reshape(contributions.shape)


def demo(grads, decay, k, side):
  """DeMo (Peng et al., arXiv:2411.19870, Algorithm 1), before its sign: [steps, W, n, m] to the
  mean of what is sent in each step.

  m <- decay m + g; the k coefficients of each block that are largest leave m; their mean is taken.
  """
  num_workers, n, m = grads.shape[1:]
  b, c = (max(d for d in range(1, side + 1) if size % d == 0) for size in (n, m))
  momentum, found = np.zeros(grads.shape[1:]), []
  for g in grads:
    momentum = decay * momentum + g
    sent = np.zeros_like(momentum)
    for i in range(num_workers):
      for row in range(0, n, b):
        for column in range(0, m, c):
          block = scipy.fft.dctn(momentum[i, row : row + b, column : column + c], norm="ortho")
          smallest = np.argsort(np.abs(block), axis=None)[: b * c - k]
          block.flat[smallest] = 0
          sent[i, row : row + b, column : column + c] = scipy.fft.idctn(block, norm="ortho")
    momentum = momentum - sent
    found.append(sent.mean(0))
  return np.array(found)
