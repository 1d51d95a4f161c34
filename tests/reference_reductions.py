"""Independent NumPy reference, in float64, for reductions over shards, gossip and noise scale.

Written from the published definitions with explicit loops, to be read rather than to be fast.
"""

import numpy as np


def median(rows):
  """Coordinate-wise median of the rows; NaN sorts last, an even count averages the middle two."""
  rows = np.asarray(rows, np.float64)
  n, d = rows.shape
  result = np.zeros(d)
  for k in range(d):
    column = np.sort(rows[:, k])  # np.sort places NaN last.
    if n % 2 == 1:
      result[k] = column[n // 2]
    else:
      result[k] = (column[n // 2 - 1] + column[n // 2]) / 2
  return result


def trimmed_mean(rows, trim):
  """Coordinate-wise mean without the `trim` smallest and `trim` largest; NaN sorts last."""
  rows = np.asarray(rows, np.float64)
  n, d = rows.shape
  if trim < 0 or n - 2 * trim < 1:
    raise ValueError("trim leaves no rows")
  result = np.zeros(d)
  for k in range(d):
    column = np.sort(rows[:, k])  # np.sort places NaN last.
    result[k] = np.sum(column[trim : n - trim]) / (n - 2 * trim)
  return result


def krum(rows, num_bad, num_chosen):
  """Mean of the `num_chosen` rows of lowest Krum score (Blanchard et al., 2017)."""
  rows = np.asarray(rows, np.float64)
  n, d = rows.shape
  num_near = n - num_bad - 2
  if num_near < 1 or not 1 <= num_chosen <= n:
    raise ValueError("krum needs n - num_bad - 2 >= 1 and 1 <= num_chosen <= n")
  scores = []
  for i in range(n):
    distances = []
    for j in range(n):
      if j == i:
        continue
      with np.errstate(invalid="ignore", over="ignore"):
        distance = np.sum((rows[i] - rows[j]) ** 2)
      distances.append(np.inf if np.isnan(distance) else distance)
    distances.sort()
    scores.append(sum(distances[:num_near]))
  ranked = sorted(range(n), key=lambda i: (scores[i], i))  # Ties: the lower index first.
  total = np.zeros(d)
  for i in ranked[:num_chosen]:
    total = total + rows[i]
  return total / num_chosen


def geometric_median(rows, iterations, eps):
  """Smoothed Weiszfeld iteration from the mean; rows with a nonfinite value have weight 0."""
  rows = np.asarray(rows, np.float64)
  finite = [row for row in rows if np.all(np.isfinite(row))]
  if not finite:
    return np.full(rows.shape[1], np.nan)
  v = sum(finite) / len(finite)
  for _ in range(iterations):
    weighted = np.zeros(rows.shape[1])
    weight_sum = 0.0
    for row in finite:
      weight = 1.0 / max(eps, np.sqrt(np.sum((row - v) ** 2)))
      weighted = weighted + weight * row
      weight_sum = weight_sum + weight
    v = weighted / weight_sum
  return v


def _adasum_pair(a, b):
  """Adasum of two vectors; the coefficient of a zero vector is 1."""
  dot = np.sum(a * b)
  a_sq = np.sum(a * a)
  b_sq = np.sum(b * b)
  a_coef = 1.0 if a_sq == 0 else 1.0 - dot / (2.0 * a_sq)
  b_coef = 1.0 if b_sq == 0 else 1.0 - dot / (2.0 * b_sq)
  return a_coef * a + b_coef * b


def adasum(rows):
  """Adasum over a binary tree, neighbors first; the number of rows is a power of two."""
  level = list(np.asarray(rows, np.float64))
  if len(level) < 1 or len(level) & (len(level) - 1):
    raise ValueError("adasum needs a power of two of rows")
  while len(level) > 1:
    level = [_adasum_pair(level[k], level[k + 1]) for k in range(0, len(level), 2)]
  return level[0]


def mixing_matrix(topology, n, round):
  """The [n, n] matrix W of one exchange: worker i takes the share W[i, j] of worker j."""
  if topology not in ("exponential", "pairs", "ring"):
    raise ValueError(f"unknown topology {topology!r}")
  matrix = np.zeros((n, n))
  if n == 1:
    matrix[0, 0] = 1.0
    return matrix
  num_hops = (n - 1).bit_length()  # ceil(log2 n).
  hop = 2 ** (round % num_hops)
  if topology == "pairs" and 2**num_hops != n:
    raise ValueError("pairs needs a power of two of workers")
  for i in range(n):
    if topology == "exponential":
      sources = [i, (i - hop) % n]
    elif topology == "pairs":
      sources = [i, i ^ hop]
    elif n == 2:
      sources = [0, 1]
    else:
      sources = [i, (i - 1) % n, (i + 1) % n]
    for j in sources:
      matrix[i, j] += 1.0 / len(sources)
  return matrix


def gossip_run(x0, gradient, rate, steps, period, matrices, order):
  """Plain SGD on n workers that exchange every `period` steps; returns the final [n, d].

  `gradient(i, x, step)` gets steps counted from 1, `matrices(round)` rounds counted from 0.
  """
  if order not in ("adapt_first", "combine_first"):
    raise ValueError(f"unknown order {order!r}")
  x = np.array(x0, np.float64)
  n = x.shape[0]
  round = 0
  for step in range(1, steps + 1):
    updates = np.zeros_like(x)
    for i in range(n):
      updates[i] = -rate * np.asarray(gradient(i, x[i].copy(), step), np.float64)
    if step % period != 0:
      x = x + updates
      continue
    matrix = np.asarray(matrices(round), np.float64)
    round += 1
    sent = x + updates if order == "adapt_first" else x
    mixed = np.zeros_like(x)
    for i in range(n):
      for j in range(n):
        mixed[i] += matrix[i, j] * sent[j]
    x = mixed if order == "adapt_first" else mixed + updates
  return x


def consensus_distance(x):
  """Root of the mean over workers of the squared distance to the mean worker."""
  x = np.asarray(x, np.float64)
  n = x.shape[0]
  mean = np.sum(x, axis=0) / n
  total = 0.0
  for i in range(n):
    total += np.sum((x[i] - mean) ** 2)
  return np.sqrt(total / n)


def noise_estimates(rows):
  """One step's (grad_sq, trace) in shards (McCandlish et al., 2018, appendix A; b = 1, B = n)."""
  rows = np.asarray(rows, np.float64)
  n = rows.shape[0]
  if n < 2:
    raise ValueError("the noise estimates need at least two rows")
  small = 0.0
  for row in rows:
    small += np.sum(row**2) / n
  big = np.sum((np.sum(rows, axis=0) / n) ** 2)
  grad_sq = (n * big - small) / (n - 1)
  trace = (small - big) / (1.0 - 1.0 / n)
  return grad_sq, trace


def noise_scale(rows_by_step, decay):
  """(noise scale in shards, gain) after all steps, from debiased averages of the estimates."""
  n = np.asarray(rows_by_step[0]).shape[0]
  grad_sq_sum = 0.0
  trace_sum = 0.0
  for rows in rows_by_step:
    grad_sq, trace = noise_estimates(rows)
    grad_sq_sum = decay * grad_sq_sum + (1.0 - decay) * grad_sq
    trace_sum = decay * trace_sum + (1.0 - decay) * trace
  debias = 1.0 - decay ** len(rows_by_step)
  m = grad_sq_sum / debias
  s = trace_sum / debias
  return s / m, (s + m) / (s / n + m)
