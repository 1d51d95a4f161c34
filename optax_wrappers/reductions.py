"""Robust aggregation and other reductions.

Each is a `reduction=` for shards, towers or workers; `penalty` and `radial_mean` are for workers
only. A `coordinatewise` reduction sees one entry of all shards at a time. A `from_gram` reduction
sees the inner products of the shards' gradients, and weights each gradient as a whole.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _checks, _collectives, _numerics, _states
from optax_wrappers._core._states import require_state
from optax_wrappers._core._types import AxisName

__all__ = [
  "PenaltyState",
  "Reduction",
  "adasum",
  "coordinatewise",
  "from_gram",
  "geometric_median",
  "krum",
  "median",
  "penalty",
  "radial_mean",
  "trimmed_mean",
]

# Above this number of shards, a sorting network takes longer to compile than it saves.
_NETWORK = 64


@dataclasses.dataclass(frozen=True)
class Reduction:
  """A reduction of the gradients of n shards; made by the functions of this module.

  Attributes:
    name: what an error calls it.
    of_entries: of a coordinatewise one, `[n, ...]` to `[...]`; else None.
    of_products: of one from a Gram matrix, `[n, n]` to coefficients `[n]`; else None.
    per_leaf: whether every leaf has a Gram matrix of its own.
  """

  name: str
  of_entries: Callable[[jax.Array], jax.Array] | None = None
  of_products: Callable[[jax.Array], jax.Array] | None = None
  per_leaf: bool = False


def coordinatewise(
  fn: Callable[[jax.Array], jax.Array], *, name: str = "coordinatewise"
) -> Reduction:
  """A reduction that treats each entry of the gradient by itself.

  Args:
    fn: from `[n, ...]`, entries of the n shards in their order, in blocks of any shape, float32 or
      float64, to `[...]`.
    name: what an error calls it.
  """
  _require_function(name, fn)
  return Reduction(name, of_entries=fn)


def from_gram(
  fn: Callable[[jax.Array], jax.Array], *, per_leaf: bool = False, name: str = "from_gram"
) -> Reduction:
  """A reduction `sum_i c_i g_i` whose coefficients follow from lengths and angles.

  Args:
    fn: from the inner products `G_ij = g_i . g_j`, float32 `[n, n]` (float64 with such a leaf), to
      coefficients `[n]`. A NaN in shard i makes row and column i NaN; a coefficient of zero leaves
      a shard out, NaN and all.
    per_leaf: whether every leaf has products and coefficients of its own. False: those of the whole
      gradient.
    name: what an error calls it.

  For example `lambda G: 1 / jnp.sqrt(jnp.diag(G)) / len(G)`: the mean of gradients at unit length.
  """
  _require_function(name, fn)
  return Reduction(name, of_products=fn, per_leaf=per_leaf)


def median() -> Reduction:
  """The median of each entry; of an even number of shards the mean of the two in the middle.

  A NaN is larger than any number. `(n - 1) // 2` of n shards may send anything.

  Source: Yin et al. 2018 (arXiv 1803.01498), definition 1.
  """

  def of_entries(rows):
    rows, half = _sorted(rows), len(rows) // 2
    # Halved before the addition: the sum could overflow.
    return rows[half] if len(rows) % 2 else rows[half - 1] / 2 + rows[half] / 2

  return coordinatewise(of_entries, name="median")


def trimmed_mean(trim: int) -> Reduction:
  """The mean of each entry without the `trim` smallest and the `trim` largest.

  A NaN counts as larger than any number. As many as `trim` shards may send anything.

  Args:
    trim: how many are left out at either end, at least 0 and below half of the shards. 0: the mean.

  Source: Yin et al. 2018 (arXiv 1803.01498), definition 2.
  """
  trim = _checks.integer("trimmed_mean", "trim", trim, minimum=0)

  def of_entries(rows):
    n = len(rows)
    if 2 * trim >= n:
      raise ValueError(f"trimmed_mean: trim must be below half of the {n} shards, got {trim}.")
    rows = _sorted(rows)[trim : n - trim]
    # Divided before the addition: the sum could overflow.
    return functools.reduce(jnp.add, [row / len(rows) for row in rows])

  return coordinatewise(of_entries, name="trimmed_mean")


def krum(num_bad: int, num_chosen: int = 1) -> Reduction:
  """The gradient that is nearest to its neighbors, or the mean of the `num_chosen` nearest.

  The score of shard i is the sum of its `n - num_bad - 2` smallest `||g_i - g_j||^2`, j not i; the
  lowest scores are chosen, and ties go to the first shard. A NaN is infinitely far away. Gradients
  that differ by less than about 1e-3 of their lengths count as equal.

  Args:
    num_bad: how many of n shards may send anything, at least 0; n is `num_bad + 3` or more, and
      `2 num_bad + 3` in the theorem.
    num_chosen: how many are averaged, at least 1; above 1 it is Multi-Krum.

  Source: Blanchard et al. 2017, "Machine learning with adversaries", section 4.
  """
  num_bad = _checks.integer("krum", "num_bad", num_bad, minimum=0)
  num_chosen = _checks.integer("krum", "num_chosen", num_chosen, minimum=1)

  def of_products(products):
    n = len(products)
    if n < num_bad + 3 or num_chosen > n:
      needed = max(num_bad + 3, num_chosen)
      given = f"num_bad={num_bad} and num_chosen={num_chosen}"
      raise ValueError(f"krum: {given} need at least {needed} shards, got {n}.")
    squares = jnp.diag(products)
    # Rounding can make a small distance negative.
    distances = jnp.maximum(squares[:, None] + squares[None] - 2 * products, 0)
    # Not to itself. A NaN sorts behind all numbers, and so do scores that contain one.
    distances = jnp.where(jnp.eye(n, dtype=bool), jnp.inf, distances)
    scores = jnp.sort(distances, axis=1)[:, : n - num_bad - 2].sum(1)
    # Stable: the first of equal scores.
    chosen = jnp.argsort(scores)[:num_chosen]
    return jnp.zeros_like(squares).at[chosen].set(1 / num_chosen)

  return from_gram(of_products, name="krum")


def geometric_median(iterations: int = 8, eps: float = 1e-6) -> Reduction:
  """The point with the smallest sum of distances to all gradients, by Weiszfeld's iteration.

  From the mean `v` of all, repeat `w_i = 1 / max(eps, ||g_i - v||)`, `v = sum w_i g_i / sum w_i`.
  A gradient that is a hundred times farther from the one in the middle, whose nearest half of the
  others is nearest, than these are is left out, as is a shard with a NaN or an infinity.
  `(n - 1) // 2` of n shards may send anything.

  Args:
    iterations: how often, at least 1.
    eps: the smallest distance that differs from zero, above 0, in the gradient's units.

  Source: Pillutla, Kakade, Harchaoui 2019 (arXiv 1912.13445), algorithm 2, on gradients.
  """
  iterations = _checks.integer("geometric_median", "iterations", iterations, minimum=1)
  eps = _checks.number("geometric_median", "eps", eps, lambda e: e > 0, "above 0")

  def of_products(products):
    squares = jnp.diag(products)
    is_sound = jnp.isfinite(squares)  # ||g_i||^2
    products = jnp.where(is_sound[:, None] & is_sound[None], products, 0)
    is_near = _near_others(jax.lax.stop_gradient(products), is_sound)
    products = jnp.where(is_near[:, None] & is_near[None], products, 0)
    squares = jnp.diag(products)
    weights = is_near.astype(products.dtype)
    for _ in range(iterations):
      share = weights / weights.sum()  # v as coefficients of the gradients
      along = jnp.matmul(products, share, precision=jax.lax.Precision.HIGHEST)  # g_i . v
      squared = squares - 2 * along + jnp.vdot(share, along, precision=jax.lax.Precision.HIGHEST)
      distances = jnp.maximum(jnp.sqrt(jnp.maximum(squared, 0)), eps)
      weights = jnp.where(is_near, 1 / distances, 0)
    return weights / weights.sum()

  return from_gram(of_products, name="geometric_median")


def _near_others(products, is_sound):
  """Which gradients are not a hundred times farther than most are from the one in the middle."""
  squares, largest = jnp.diag(products), jnp.finfo(products.dtype).max
  squared = squares[:, None] + squares[None] - 2 * products
  apart = jnp.sqrt(jnp.clip(squared, 0, largest))
  apart = jnp.where(is_sound[:, None] & is_sound[None], apart, jnp.inf)
  # No sums: one very far away would round the others off. Itself, and at least half of the others:
  most = jnp.sort(apart, axis=1)[:, len(products) // 2]
  middle = jnp.argmin(most)
  return is_sound & (apart[middle] <= 100 * most[middle])


def adasum(per_leaf: bool = True) -> Reduction:
  """Between a sum and a mean: the sum of orthogonal gradients, the mean of parallel ones.

  `a, b -> (1 - a.b / (2 ||a||^2)) a + (1 - a.b / (2 ||b||^2)) b`, of neighbors first, then of the
  results of two pairs, and so on. Horovod reduces *updates* in this way, and each shard has its own
  optimizer state: `optax.chain(optax.adam(rate), all_reduce("workers", reduction=adasum()))`.

  Args:
    per_leaf: whether each leaf has angles of its own, as in Horovod. The number of shards must be a
      power of 2.

  Source: Maleki et al. 2020 (arXiv 2006.02924), and Horovod's `hvd.Adasum`.
  """

  def of_products(products):
    n = len(products)
    if n & (n - 1):
      raise ValueError(f"adasum: the number of shards must be a power of 2, got {n}.")
    dot = functools.partial(jnp.einsum, "i,ij,j->", precision=jax.lax.Precision.HIGHEST)

    def pair(a, b):
      product = dot(a, products, b)

      def factor(c):
        square = dot(c, products, c)
        # If a square underflows or overflows, the angle is unknown; a mean is never too long.
        is_known = (square > 0) & jnp.isfinite(product)
        return 1 - jnp.where(is_known, product / jnp.where(is_known, square, 1), 1) / 2

      return factor(a) * a + factor(b) * b

    # Each row: the coefficients of the shards' gradients.
    held = list(jnp.eye(n, dtype=products.dtype))
    while len(held) > 1:
      held = [pair(a, b) for a, b in zip(held[::2], held[1::2], strict=True)]
    return held[0]

  return from_gram(of_products, per_leaf=per_leaf, name="adasum")


@_states.dataclass
class PenaltyState(_states.State):
  """State of `penalty`, of the lengths of this worker's own differences.

  Attributes:
    count: exchanges so far; int32 scalar.
    mean: their exponentially weighted mean; real scalar.
    variance: their exponentially weighted variance; real scalar.
    recent: how many standard deviations the latest were above the mean; [warmup], zeros at first.
  """

  count: jax.Array
  mean: jax.Array
  variance: jax.Array
  recent: jax.Array


def penalty(
  axis_name: AxisName,
  *,
  clip: float = 10.0,
  threshold: float = 3.0,
  warmup: int = 120,
  decay: float = 0.02,
  temperature: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
  """A mean in which workers that moved far count little, and workers that moved too far not at all.

  For `local_steps(reduction=)`, with `outer=optax.sgd(0.7, momentum=0.8, nesterov=True)` EDiT's
  pseudo-gradient penalty. With n_i the length of worker i's difference D_i,

      left out: n_i > mean_i + threshold * max(1, spread_i) * std_i,   or n_i = 0
      D = sum_i w_i D_i,   w_i = softmax(-n_i / temperature)     over those that are not
      D <- D * min(1, clip / (||D|| + 1e-6))

  where mean_i and std_i are the exponentially weighted mean and standard deviation, starting at 0,
  of worker i's lengths in earlier exchanges, and spread_i is the standard deviation of the `warmup`
  latest scores `(n_i - mean_i) / std_i`. If all are left out, the center and the outer state do not
  change, and the workers move to the center.

  The length is of all that is exchanged together: with `fragments` each has its own, as EDiT's
  modules have. It is of whole variables, not of parts of them along other axes of a shard_map.

  Args:
    axis_name: the axis or axes of the workers.
    clip: the largest length of the result, in the parameters' units, above 0.
    threshold: how many standard deviations are too far, above 0.
    warmup: synchronizations in which no worker is rejected, at least 2.
    decay: the weight of the latest length in the mean, in (0, 1).
    temperature: above 0, in the parameters' units. Larger: all count more alike.

  Extra args:
    weight: a factor of w_i, real scalar, at least 0, each worker's own.

  **Communication**: in an exchange the bytes of the parameters, and 8 more.

  Examples:
    Of two workers the second has gone ten times as far:

    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> mean = ow.reductions.penalty("workers")
    >>> merge = lambda d: mean.update(d, mean.init(d))[0]
    >>> differences = jnp.array([1.0, 10.0])
    >>> print(jax.vmap(merge, axis_name="workers")(differences)[0].round(3))
    1.001

  Source: Cheng et al., "EDiT" (arXiv 2412.07210), as its authors' program (ATorch) has it with
  FSDP, in which the detector sees those that it leaves out too.
  """
  function, names = "penalty", _axes.axis_names(axis_name)
  positive = ("clip", clip), ("threshold", threshold), ("temperature", temperature)
  for name, value in positive:
    _checks.number(function, name, value, lambda x: x > 0, "above 0")
  warmup = _checks.integer(function, "warmup", warmup, minimum=2)
  decay = _checks.number(function, "decay", decay, lambda x: 0 < x < 1, "in (0, 1)")

  def above(length, seen):
    """By how many standard deviations, once there is enough data."""
    scores = _numerics.divide(length - seen.mean, jnp.sqrt(seen.variance))
    return jnp.where(seen.count >= warmup, scores, jnp.zeros_like(scores))

  def counted(length, seen):
    step = length - seen.mean
    mean = seen.mean + decay * step
    variance = (1 - decay) * (seen.variance + decay * step * (length - mean))
    count = _numerics.saturating_add(seen.count, jnp.ones((), jnp.int32))
    # A value whose square overflows would make the variance infinite forever.
    known = jnp.isfinite(variance)
    mean, variance = _numerics.select(known, (mean, variance), (seen.mean, seen.variance))
    new = seen.replace(count=count, mean=mean, variance=variance)
    return new.replace(recent=seen.recent.at[seen.count % warmup].set(above(length, new)))

  def init_fn(params):
    number = jnp.zeros((), _numerics.weight_dtype(jax.tree.leaves(params)))
    recent = jnp.zeros((warmup,), number.dtype)
    return PenaltyState(jnp.zeros((), jnp.int32), number, jnp.zeros_like(number), recent)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    _axes.require_bound(names, function)
    require_state(function, state, PenaltyState)
    updates = _axes.to_varying(updates, names)
    length = _length(jax.tree.leaves(updates)).astype(state.mean.dtype)
    spread = jnp.maximum(1, jnp.std(state.recent, ddof=1))
    seen = jax.lax.stop_gradient(length)  # decisions have no derivative
    given = jnp.ones_like(length) if weight is None else jnp.asarray(weight).astype(length.dtype)
    counts = (above(seen, state) <= threshold * spread) & (seen > 0) & (given > 0)
    # Relative to the shortest, whose weight is e^0: otherwise all weights could underflow to zero.
    shortest = -_collectives.pmax(jnp.where(counts, -seen, -jnp.inf), names)
    nearness = jnp.exp((jnp.where(counts, shortest, length) - length) / temperature)
    share = jnp.where(counts, given * nearness, jnp.zeros_like(length))
    summed, total = _collectives.psum((_numerics.scale_tree(updates, share), share), names)
    merged = jax.tree.map(lambda x: _numerics.divide(x, total), summed)
    factor = jnp.minimum(1, clip / (_length(jax.tree.leaves(merged)) + 1e-6))
    return _numerics.scale_tree(merged, factor), counted(seen, state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _length(leaves):
  """The Euclidean length of all of them, whose squares neither overflow nor underflow."""
  flat = [x.astype(_numerics.at_least_float32(x.dtype)).ravel() for x in leaves]
  dtype = _numerics.weight_dtype(flat)
  largest = functools.reduce(
    jnp.maximum, [jnp.max(jnp.abs(x), initial=0).astype(dtype) for x in flat]
  )
  largest = jax.lax.stop_gradient(largest)  # a unit that cancels out of the length
  parts = [_numerics.divide(x, largest) for x in flat]
  square = sum(jnp.real(x * x.conj()).sum().astype(dtype) for x in parts)
  # The derivative of a square root at zero is NaN, even if it is not selected.
  return largest * jnp.sqrt(jnp.where(square == 0, 1, square))


def radial_mean(axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
  """The mean of the lengths times the direction of the mean of the directions, for each variable.

  A mean of differences in many directions is shorter than each of them; this is not. It is a value
  for `local_steps(reduction=)`. To give some variables, such as embeddings, the plain mean:
  `optax.partition({"radial": radial_mean(axis), "plain": all_reduce(axis)}, labels)`.

  Lengths are of whole variables: not of the parts that devices have of one, along other axes of a
  shard_map. Where directions cancel to rounding, and where all lengths are zero, the result is 0.
  Without a weight, a worker with a NaN counts as one of length zero, as in `all_reduce`.

  Args:
    axis_name: the axis or axes of the workers.

  Extra args:
    weight: of lengths and directions alike, real scalar, at least 0, each worker's own.

  **Communication**: in an exchange the bytes of the parameters, and 4 more for each variable.

  Examples:
    Two differences, of length 3 and 1, at right angles:

    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> mean = ow.reductions.radial_mean("workers")
    >>> merge = lambda d: mean.update(d, mean.init(d))[0]
    >>> differences = jnp.array([[3.0, 0.0], [0.0, 1.0]])
    >>> print(jax.vmap(merge, axis_name="workers")(differences)[0].round(3))
    [1.414 1.414]

  Source: the merge of Decoupled DiLoCo (arXiv 2604.21428).
  """
  names = _axes.axis_names(axis_name)

  def length(x):
    return _length([x])

  def direction(x, r):
    return _numerics.divide(x.astype(_numerics.at_least_float32(x.dtype)), r)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    _axes.require_bound(names, "radial_mean")
    updates = _axes.to_varying(updates, names)
    lengths = jax.tree.map(length, updates)
    pairs = lengths, jax.tree.map(direction, updates, lengths)
    total = jnp.float32(_axes.axis_size(names))
    if weight is not None:
      weight = _axes.to_varying(jnp.asarray(weight), names)
      pairs, total = _collectives.psum((_numerics.scale_tree(pairs, weight), weight), names)
    else:
      pairs = _collectives.psum(pairs, names)
    lengths, directions = pairs

    def merged(r, d, x):
      size = length(d)
      # If directions cancel, only rounding is left, which has a direction too.
      size = jnp.where(size > 8 * jnp.finfo(size.dtype).eps * total, size, 0)
      return _numerics.times(_numerics.divide(r, total), direction(d, size)).astype(x.dtype)

    return jax.tree.map(merged, lengths, directions, updates), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _require_function(name, fn):
  if not callable(fn):
    raise TypeError(f"{name}: fn must be a function, got {fn!r}.")


def _sorted(rows: jax.Array) -> list[jax.Array]:
  """The rows with each entry in order, NaNs last."""
  if len(rows) > _NETWORK:
    return list(jnp.sort(rows, axis=0))
  # XLA:CPU takes about 300 times as long to sort along a short axis.
  ordered = list(rows)
  for i, j in _network(len(ordered)):
    a, b = ordered[i], ordered[j]
    in_order = (a <= b) | jnp.isnan(b)
    ordered[i], ordered[j] = jnp.where(in_order, a, b), jnp.where(in_order, b, a)
  return ordered


@functools.cache
def _network(n: int) -> tuple[tuple[int, int], ...]:
  """Batcher's odd-even merge sort: which two to put in order, one after the other."""
  pairs = []
  for p in itertools.takewhile(lambda p: p < n, (2**t for t in itertools.count())):
    for k in (p >> t for t in range(p.bit_length())):
      for start in range(k % p, n - k, 2 * k):
        for i in range(start, start + min(k, n - start - k)):
          if i // (2 * p) == (i + k) // (2 * p):
            pairs.append((i, i + k))
  return tuple(pairs)
