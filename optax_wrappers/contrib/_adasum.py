"""Adasum: between a sum and a mean."""

import functools

import jax
import jax.numpy as jnp

from optax_wrappers.reductions import Reduction, from_gram


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
