"""Stale gradients in plain NumPy: weights, delay compensation, and an asynchronous server.

An independent reference for tests: written from the papers and textbooks, for clarity and not for
speed, without jax and without the library under test. All arithmetic is in float64. Parameters,
gradients and updates are lists of arrays; nothing is changed in place.

The version of the parameters is the number of updates accepted so far. A gradient is computed at a
version, and its age is the number of versions since.
"""

import copy
import heapq

import numpy as np

NUM_BINS = 32


def _arrays(values):
  """A list of float64 copies."""
  return [np.array(v, np.float64) for v in values]


def _zeros(values):
  return [np.zeros(np.shape(v)) for v in values]


# Policies: age, an integer or an array of them -> weight. An age below zero counts as zero.


def inverse(shift=1):
  """1 / max(1, shift + age). Shift 1: 1 / (1 + age), the polynomial of FedAsync with a = 1 (Xie et
  al. 2019, arXiv 1903.03934). Shift 0: 1 / max(1, age) (Zhang et al. 2016, "Staleness-aware
  Async-SGD for Distributed Deep Learning", arXiv 1511.05950)."""
  return lambda age: 1 / np.maximum(1, shift + np.maximum(age, 0))


def polynomial(a=0.5):
  """(1 + age)^-a (Xie et al. 2019, arXiv 1903.03934; a = 1/2 in FedBuff, arXiv 2106.06639)."""
  return lambda age: (1.0 + np.maximum(age, 0)) ** -a


def hinge(a=10.0, b=4):
  """1 if age <= b, else 1 / (a (age - b) + 1) (Xie et al. 2019, arXiv 1903.03934)."""
  return lambda age: 1 / (a * np.maximum(np.maximum(age, 0) - b, 0) + 1.0)


def exponential(rate):
  """exp(-rate age) (the decay of CGAD, arXiv 2605.09126)."""
  return lambda age: np.exp(-rate * np.maximum(age, 0))


def cosine_gate(cutoff):
  """(1 + cos(pi age / cutoff)) / 2 below the cutoff, 0 from there on (a gate as in CGAD, arXiv
  2605.09126)."""

  def weight(age):
    age = np.maximum(age, 0)
    return np.where(age < cutoff, 0.5 * (1 + np.cos(np.pi * age / cutoff)), 0.0)

  return weight


# Optimizers


class _Optimizer:
  """`init(params)`, then `update(grads)` returns what is to be added to the parameters."""

  def copy(self):
    """An optimizer of the same settings and state, independent of this one."""
    return copy.deepcopy(self)


class Sgd(_Optimizer):
  """-lr g."""

  def __init__(self, lr):
    self.lr = lr

  def init(self, params):
    pass

  def update(self, grads):
    return [-self.lr * g for g in grads]


class Momentum(_Optimizer):
  """m <- decay m + g, then -lr m (Polyak 1964); with `nesterov` -lr (g + decay m) (Sutskever et al.
  2013, "On the importance of initialization and momentum in deep learning")."""

  def __init__(self, lr, decay, nesterov=False):
    self.lr, self.decay, self.nesterov = lr, decay, nesterov

  def init(self, params):
    self.m = _zeros(params)

  def update(self, grads):
    self.m = [self.decay * m + g for m, g in zip(self.m, grads, strict=True)]
    if self.nesterov:
      return [-self.lr * (g + self.decay * m) for m, g in zip(self.m, grads, strict=True)]
    return [-self.lr * m for m in self.m]


class Adam(_Optimizer):
  """Kingma and Ba 2015, "Adam", algorithm 1: with bias correction, eps outside the root."""

  def __init__(self, lr, b1=0.9, b2=0.999, eps=1e-8):
    self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps

  def init(self, params):
    self.t = 0
    self.m, self.v = _zeros(params), _zeros(params)

  def update(self, grads):
    self.t += 1
    self.m = [self.b1 * m + (1 - self.b1) * g for m, g in zip(self.m, grads, strict=True)]
    self.v = [self.b2 * v + (1 - self.b2) * g * g for v, g in zip(self.v, grads, strict=True)]
    updates = []
    for m, v in zip(self.m, self.v, strict=True):
      m_hat = m / (1 - self.b1**self.t)
      v_hat = v / (1 - self.b2**self.t)
      updates.append(-self.lr * m_hat / (np.sqrt(v_hat) + self.eps))
    return updates


# The server


class DelayCompensation:
  """DC-ASGD (Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay
  Compensation", arXiv 1609.08326), with w the parameters now and w_bak those the gradient was
  computed at.

  Constant (decay None): g + strength g g (w - w_bak). Adaptive: first s <- decay s + (1 - decay) g
  g, from s = 0, then g + strength / sqrt(s + eps) g g (w - w_bak).

  It holds no state: who calls it keeps the mean squares s."""

  def __init__(self, strength, decay=None, eps=1e-7):
    self.strength, self.decay, self.eps = strength, decay, eps

  def init(self, params):
    """The mean squares before the first gradient."""
    return _zeros(params)

  def compensate(self, grads, params, computed_params, mean_squares):
    """(compensated gradients, mean squares afterwards)."""
    if self.decay is None:
      strengths = [self.strength] * len(grads)
    else:
      m = self.decay
      new = [m * s + (1 - m) * g * g for s, g in zip(mean_squares, grads, strict=True)]
      mean_squares = [
        np.where(np.isfinite(n), n, s) for n, s in zip(new, mean_squares, strict=True)
      ]
      strengths = [self.strength / np.sqrt(s + self.eps) for s in mean_squares]
    compensated = [
      g + strength * g * g * (w - w_bak)
      for strength, g, w, w_bak in zip(strengths, grads, params, computed_params, strict=True)
    ]
    return compensated, mean_squares


class StalenessAware:
  """A server's optimizer that weighs gradients by their age.

  In a step, shard i brings a gradient g_i computed at version c_i. With age_i = max(version - c_i,
  0), w_i = max(weight(age_i), 0), 1 without a weight, and w_i = 0 where version - c_i >
  max_staleness. Of N shards F have w_i > 0; the step is accepted where F > 0, and else nothing
  moves. A gradient of weight 0 is not looked at.

  `compensation` acts on every g_i, before the weight, with mean squares of shard i's own. The
  optimizer gets

    scale "gradients":                 sum_i w_i g_i / F
    scale "gradients" and normalize:   sum_i w_i g_i / sum_i w_i
    scale "updates":                   sum_i w_i g_i / sum_i w_i, its update is times sum_i w_i / F

  Zhang et al. 2016 (arXiv 1511.05950) and FedBuff (Nguyen et al. 2022, arXiv 2106.06639) scale
  gradients and do not normalize; max_staleness alone is TensorFlow's DropStaleGradientOptimizer.

  Attributes: `version`, accepted steps; `accepted` and `dropped`, gradients; `histogram`, gradients
  that arrived, also if dropped, at age 0, 1, ..., 30, and 31 or more; `mean_squares` of each shard,
  None without compensation; `optimizer`, a copy of the one given."""

  def __init__(
    self,
    optimizer,
    weight=None,
    max_staleness=None,
    scale="gradients",
    normalize=False,
    compensation=None,
    num_shards=1,
  ):
    if scale not in ("gradients", "updates"):
      raise ValueError(f"unknown scale {scale!r}")
    if scale == "updates" and normalize:
      raise ValueError('scale="updates" normalizes already')
    self.optimizer = optimizer.copy()
    self.weight = weight
    self.max_staleness = max_staleness
    self.scale = scale
    self.normalize = normalize
    self.compensation = compensation
    self.num_shards = num_shards

  def init(self, params):
    self.optimizer.init(params)
    self.version = 0
    self.accepted = 0
    self.dropped = 0
    self.histogram = np.zeros(NUM_BINS, np.int64)
    self.mean_squares = None
    if self.compensation is not None:
      self.mean_squares = [self.compensation.init(params) for _ in range(self.num_shards)]

  def age(self, computed_at):
    return max(self.version - int(computed_at), 0)

  def weight_of(self, computed_at):
    """The weight of a gradient computed at this version, were it to arrive now."""
    if self.max_staleness is not None and self.version - int(computed_at) > self.max_staleness:
      return 0.0
    if self.weight is None:
      return 1.0
    return max(float(self.weight(self.age(computed_at))), 0.0)

  def step(self, grads_per_shard, computed_at_per_shard, params, computed_params_per_shard=None):
    """What is to be added to `params`, those of this version; zeros if the step is not accepted.

    The arguments "per_shard" are lists, one entry for each shard."""
    if len(grads_per_shard) != self.num_shards or len(computed_at_per_shard) != self.num_shards:
      raise ValueError(f"expected {self.num_shards} shards")
    if self.compensation is not None and computed_params_per_shard is None:
      raise ValueError("compensation needs the parameters that the gradients were computed at")
    weights = [self.weight_of(computed_at) for computed_at in computed_at_per_shard]
    kept = [i for i, w in enumerate(weights) if w > 0]
    for computed_at in computed_at_per_shard:
      self.histogram[min(self.age(computed_at), NUM_BINS - 1)] += 1
    self.accepted += len(kept)
    self.dropped += self.num_shards - len(kept)
    if self.compensation is not None:  # a link before: it sees what is dropped as well
      grads_per_shard = list(grads_per_shard)
      for i, grads in enumerate(grads_per_shard):
        with np.errstate(invalid="ignore"):
          grads_per_shard[i], self.mean_squares[i] = self.compensation.compensate(
            _arrays(grads),
            _arrays(params),
            _arrays(computed_params_per_shard[i]),
            self.mean_squares[i],
          )
    if not kept:
      return _zeros(params)

    total = sum(weights)
    weighted = _zeros(params)
    for i in kept:
      grads = _arrays(grads_per_shard[i])
      weighted = [s + weights[i] * g for s, g in zip(weighted, grads, strict=True)]
    if self.scale == "updates" or self.normalize:
      mean = [s / total for s in weighted]
    else:
      mean = [s / len(kept) for s in weighted]
    updates = self.optimizer.update(mean)
    if self.scale == "updates":
      updates = [total / len(kept) * u for u in updates]
    self.version += 1
    return updates


# Runs


class Versions:
  """The parameters of past versions, for gradients of a chosen delay.

  `length` versions can be had, the newest among them."""

  def __init__(self, length):
    self.length = length
    self.versions = []

  def record(self, version, params):
    """`params` are those of `version`: 0 at first, then the newest again, which is replaced (after
    a step that was not accepted), or the next."""
    if version not in (len(self.versions) - 1, len(self.versions)):
      raise ValueError(f"version {version} does not follow {len(self.versions) - 1}")
    self.versions[version:] = [_arrays(params)]

  def available(self, staleness):
    """`staleness` cut to what exists: at least 0, below `length`, not before version 0."""
    return max(min(int(staleness), self.length - 1, len(self.versions) - 1), 0)

  def past(self, staleness):
    """The parameters of `staleness` versions ago, or of as many as there are."""
    return _arrays(self.versions[len(self.versions) - 1 - self.available(staleness)])


def arrival_order(seconds, num_updates):
  """Which worker's gradient arrives first, second, ...: int32 [num_updates].

  All workers start at time 0, and worker i needs seconds[i] for each gradient. Of those that arrive
  at the same time the lowest index is first."""
  arrivals = [(float(s), i) for i, s in enumerate(seconds)]
  heapq.heapify(arrivals)
  order = []
  for _ in range(num_updates):
    now, i = heapq.heappop(arrivals)
    order.append(i)
    heapq.heappush(arrivals, (now + float(seconds[i]), i))
  return np.array(order, np.int32)


def run_server(grad_fn, params, server, order, num_workers):
  """A parameter server and its asynchronous workers, event by event.

  All workers read version 0, in the order of their indices. Then, for each k in `order`, worker k
  arrives with the gradient at the parameters that it read, the server makes its step, and worker k
  reads again. `grad_fn(params, k, n)` is the gradient of worker k after the n-th of all reads, from
  0: the first `num_workers` reads are those at the start.

  Returns the parameters after each arrival, and the server."""
  params = _arrays(params)
  server.init(params)
  read = [(params, server.version, n) for n in range(num_workers)]  # of each worker
  num_reads = num_workers
  results = []
  for k in order:
    k = int(k)
    computed_params, computed_at, n = read[k]
    grads = grad_fn(_arrays(computed_params), k, n)
    updates = server.step([grads], [computed_at], params, [computed_params])
    params = [w + u for w, u in zip(params, updates, strict=True)]
    results.append(params)
    read[k] = (params, server.version, num_reads)
    num_reads += 1
  return results, server
