"""Robust aggregation and other reductions.

Each is a `reduction=` for shards, towers or workers. A `coordinatewise` reduction sees one entry of
all shards at a time. A `from_gram` reduction sees the inner products of the shards' gradients, and
weights each gradient as a whole.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from optax_wrappers._core import _checks

__all__ = [
  "Reduction",
  "coordinatewise",
  "from_gram",
  "geometric_median",
  "krum",
  "median",
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
    per_leaf: whether every leaf has products and coefficients of its own, not the whole gradient.
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
      smallest = max(num_bad + 3, num_chosen)
      arguments = f"num_bad={num_bad} and num_chosen={num_chosen}"
      raise ValueError(f"krum: {arguments} need at least {smallest} shards, got {n}.")
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
      # v as coefficients of the gradients.
      share = weights / weights.sum()
      # g_i . v.
      along = jnp.matmul(products, share, precision=jax.lax.Precision.HIGHEST)
      squared = squares - 2 * along + jnp.vdot(share, along, precision=jax.lax.Precision.HIGHEST)
      distances = jnp.maximum(jnp.sqrt(jnp.maximum(squared, 0)), eps)
      weights = jnp.where(is_near, 1 / distances, 0)
    return weights / weights.sum()

  return from_gram(of_products, name="geometric_median")


def _near_others(products, is_sound):
  """Which gradients are not a hundred times farther than most are from the one in the middle."""
  squares, largest = jnp.diag(products), jnp.finfo(products.dtype).max
  apart = jnp.sqrt(jnp.clip(squares[:, None] + squares[None] - 2 * products, 0, largest))
  apart = jnp.where(is_sound[:, None] & is_sound[None], apart, jnp.inf)
  # No sums: one very far away would round the others off. Itself, and at least half of the others:
  most = jnp.sort(apart, axis=1)[:, len(products) // 2]
  middle = jnp.argmin(most)
  return is_sound & (apart[middle] <= 100 * most[middle])


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
  return tuple(
    (i, i + k)
    for p in (2**t for t in range((n - 1).bit_length()))
    for k in (p >> t for t in range(p.bit_length()))
    for start in range(k % p, n - k, 2 * k)
    for i in range(start, min(start + k, n - k))
    if i // (2 * p) == (i + k) // (2 * p)
  )
