"""A codec of low rank."""

import math
import numbers

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from optax_wrappers import codecs


def power_sgd(rank: int, min_ratio: float = 2.0, seed: int = 0) -> codecs.LinearCodec:
  """Low-rank approximations of matrices, by one warm-started step of a power iteration.

  With the shards' matrices `M_i`, n x m, and Q, m x r, from the step before:
  `P = orthonormal(sum_i M_i Q)`, `Q <- sum_i M_i^T P`, and the sum is `P Q^T`. Each shard keeps the
  residual of its own part, `M_i - P P^T M_i`.

  A variable of three dimensions is a stack of matrices. One of more, such as a convolution's
  kernel, is a matrix whose columns are its last dimension.

  Args:
    rank: r.
    min_ratio: a variable is compressed if that makes it smaller by this factor, at least 1.
    seed: of Q at first.

  Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (2019), algorithms 1 and 2.
  """
  if not isinstance(rank, numbers.Integral) or rank < 1:
    raise ValueError(f"power_sgd: rank must be at least 1, an int; got {rank!r}.")
  if not min_ratio >= 1:
    raise ValueError(f"power_sgd: min_ratio must be at least 1, got {min_ratio!r}.")

  def init(shapes):
    keys = (jax.random.fold_in(jax.random.key(seed), i) for i in range(len(shapes)))
    stacks = ((count, m, rank) for count, _, m in map(_matrices, shapes))
    return [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, stacks)]

  def reduce(total, leaves, memory):
    stacks = [leaf.reshape(_matrices(leaf.shape)) for leaf in leaves]
    summed = total([_product("bnm,bmr->bnr", x, q) for x, q in zip(stacks, memory, strict=True)])
    ps = [_orthonormal(p) for p in summed]  # P
    # M_i^T P.
    parts = [_product("bnm,bnr->bmr", x, p) for x, p in zip(stacks, ps)]
    qs = total(parts)  # Q, which also starts the next step

    def joined(factors):
      products = [_product("bnr,bmr->bnm", p, q) for p, q in zip(ps, factors)]
      return [x.reshape(leaf.shape) for x, leaf in zip(products, leaves)]

    return joined(qs), joined(parts), qs

  def num_bytes(shape):
    count, n, m = _matrices(shape)
    return 4 * count * rank * (n + m)

  codec = codecs.LinearCodec(init, reduce, num_bytes, name=f"power_sgd({rank})")

  def applies_to(shape):
    if not codec.applies_to(shape):
      return False
    _, n, m = _matrices(shape)
    return (n + m) * rank * min_ratio < n * m

  return codec._replace(applies_to=applies_to)


def _matrices(shape):
  """A variable's shape as a stack of matrices, `(count, n, m)`."""
  return tuple(shape) if len(shape) == 3 else (1, math.prod(shape[:-1]), shape[-1])


def _orthonormal(p):
  sharding = jax.typeof(p).sharding
  # Over an Explicit mesh, where JAX decomposes only whole matrices.
  if any(sharding.spec):
    p = jax.sharding.reshard(p, NamedSharding(sharding.mesh, PartitionSpec()))
  return jnp.linalg.qr(p)[0]


def _product(subscripts, x, y):
  return jnp.einsum(subscripts, x, y, precision=lax.Precision.HIGHEST)
