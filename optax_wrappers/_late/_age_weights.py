"""Where an age becomes a weight.

A gradient's *age* is the number of updates that were accepted since it was computed. A weight of
zero is a drop.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_wrappers._core import _axes, _collectives, _numerics
from optax_wrappers._core._types import AxisNames, Tree
from optax_wrappers.staleness import Policy

OLDEST = 2**30  # older gradients count as of this age, so that no difference of int32 overflows
NUM_BINS = 32  # of the histogram of ages


class Weighed(NamedTuple):
  """The weights of a step's gradients, and how many there are of each age."""

  kept: jax.Array  # bool scalar, whether this shard's weight is above zero
  weight: jax.Array  # float32 scalar, this shard's
  total: jax.Array  # float32 scalar, of all shards
  num_kept: jax.Array  # int32 scalar, the gradients of a weight above zero
  accept: jax.Array  # bool scalar, whether there are any, without which the step is dropped
  num_gradients: int
  ages: jax.Array  # int32 [NUM_BINS], the gradients of each age, in the last bin of all above

  @property
  def mean(self) -> jax.Array:
    """The mean weight of the gradients kept, 1 if there are none."""
    num_kept = self.num_kept.astype(jnp.float32)
    return jnp.where(self.accept, self.total / jnp.maximum(num_kept, 1), 1.0)


def check_policy(wrapper: str, policy: Any) -> None:
  """Raises on what is no function from ages to weights of their shape."""
  if not callable(policy):
    raise TypeError(f"{wrapper}: weight must be a function of ages, got {policy!r}.")
  try:
    found = jax.eval_shape(policy, jax.ShapeDtypeStruct((3,), jnp.int32))
  except Exception as error:
    what = f"{wrapper}: weight must be a function of an int32 array of ages, in jax.numpy"
    mend = "Call what makes a policy: staleness.inverse()."
    raise ValueError(f"{what}, and {policy!r} failed with one. {mend}") from error
  is_real = hasattr(found, "dtype") and not jnp.issubdtype(found.dtype, jnp.complexfloating)
  if not is_real or found.shape != (3,):
    what = f"{wrapper}: weight must return a real weight for each age, float32[3] for int32[3]"
    raise ValueError(f"{what}; got {found}.")


def check_weights(wrapper: str, policy: Policy | None) -> None:
  """Raises on a policy with a weight that is negative or not finite."""
  if policy is None:
    return
  ages = np.arange(2 * NUM_BINS, dtype=np.int32)  # jnp.arange fails here inside shard_map
  with jax.ensure_compile_time_eval():
    weights = policy(jnp.asarray(ages))
  if isinstance(weights, jax.core.Tracer):  # made of traced numbers, whose values are not known
    return
  for age, weight in enumerate(np.asarray(weights, np.float32)):
    if not (np.isfinite(weight) and weight >= 0):
      what = f"{wrapper}: weight must be finite and at least 0 for every age"
      raise ValueError(f"{what}, got {weight} at age {age}.")


def weigh(
  policy: Policy | None, max_staleness: int | None, age: jax.Array, names: AxisNames
) -> Weighed:
  """Weighs this shard's gradient. Sends one float32 for each bin of the histogram, and two more."""
  kept = jnp.ones((), bool) if max_staleness is None else age <= max_staleness
  weight = jnp.ones((), jnp.float32)
  if policy is not None:
    weight = jnp.maximum(policy(jnp.maximum(age, 0)).astype(jnp.float32), 0)
    kept &= weight > 0  # a weight of zero is a drop
  weight = jnp.where(kept, weight, 0)
  arrived = jnp.arange(NUM_BINS, dtype=jnp.int32) == jnp.clip(age, 0, NUM_BINS - 1)
  # Counts of shards are exact in float32 up to 2**24 of them.
  row = [weight[None], kept[None].astype(jnp.float32), arrived.astype(jnp.float32)]
  sums = _collectives.psum(jnp.concatenate(row), names)
  counts = sums[1:].astype(jnp.int32)
  num_kept, num_gradients = counts[0], _axes.axis_size(names)
  return Weighed(kept, weight, sums[0], num_kept, num_kept > 0, num_gradients, counts[1:])


def keep(wrapper: str, weighed: Weighed, names: AxisNames, updates: Tree) -> Tree:
  """The updates, or zeros where this shard's weight is zero."""
  if not names:
    return _numerics.zeros_unless(weighed.accept, updates)
  why = ": jax.grad has summed stale and fresh gradients alike. Use per_shard(params, axis_name)."

  def of(path, u):
    _axes.require_own(u, weighed.kept, wrapper, path, why)
    return jnp.where(weighed.kept, u, jnp.zeros_like(u))

  return jax.tree.map_with_path(of, updates)


def to_int32(version: jax.Array) -> jax.Array:
  """An integer as int32, the nearest one where it is out of range."""
  if version.dtype == jnp.bool_:
    return version.astype(jnp.int32)
  info, last = jnp.iinfo(version.dtype), jnp.iinfo(jnp.int32)
  low, high = max(int(info.min), int(last.min)), min(int(info.max), int(last.max))
  version = jnp.clip(version, jnp.asarray(low, version.dtype), jnp.asarray(high, version.dtype))
  return version.astype(jnp.int32)
