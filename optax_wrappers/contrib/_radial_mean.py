"""A mean of workers' differences whose length is the mean of their lengths."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import all_reduce, per_shard
from optax_wrappers.contrib._arrays import wide
from optax_wrappers.contrib._length import length


def radial_mean(
  axis_name: Hashable | Sequence[Hashable] | None,
) -> optax.GradientTransformationExtraArgs:
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
    >>> mean = ow.contrib.radial_mean("workers")
    >>> merge = lambda d: mean.update(d, mean.init(d))[0]
    >>> differences = jnp.array([[3.0, 0.0], [0.0, 1.0]])
    >>> print(jax.vmap(merge, axis_name="workers")(differences)[0].round(3))
    [1.414 1.414]

  Source: the merge of Decoupled DiLoCo (arXiv 2604.21428).
  """
  mean = all_reduce(axis_name)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    lengths = jax.tree.map(length, updates)
    pairs = per_shard((lengths, jax.tree.map(_direction, updates, lengths)), axis_name)
    (lengths, directions), _ = mean.update(pairs, mean.init(pairs), weight=weight)
    return jax.tree.map(_product, lengths, directions, updates), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def _direction(x, size):
  """`x / size`; zero if the size is."""
  x = wide(x)
  return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size).astype(x.dtype))


def _product(size, direction, like):
  """An array of this length and direction, which need not be of length 1."""
  rest = length(direction)
  # If directions cancel, only rounding is left, which has a direction too.
  rest = jnp.where(rest > 8 * jnp.finfo(rest.dtype).eps, rest, 0)
  return (size.astype(direction.dtype) * _direction(direction, rest)).astype(like.dtype)
