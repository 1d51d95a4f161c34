"""Converts ages to weights.

A gradient's *age* is the number of updates that were accepted since it was computed. A gradient of
weight zero is dropped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics
from optax_wrappers._core._types import AxisNames, Tree
from optax_wrappers.staleness import Policy

# Older gradients get this age, so that no int32 difference overflows.
OLDEST = 2**30
NUM_BINS = 32  # of the histogram of ages


class Weighed(NamedTuple):
  """The weights of a step's gradients, and the number of gradients of each age."""

  # Bool scalar, whether this shard's weight is above zero.
  kept: jax.Array
  weight: jax.Array  # float32 scalar, this shard's weight
  total: jax.Array  # float32 scalar, summed over all shards
  # int32 scalar, the number of gradients with a weight above zero.
  num_kept: jax.Array
  # Bool scalar, whether there are any; otherwise the step is dropped.
  accept: jax.Array
  num_gradients: int
  # int32 [NUM_BINS], gradients by age; the last bin has all older ones.
  ages: jax.Array

  @property
  def mean(self) -> jax.Array:
    """The mean weight of the gradients kept, or 1 if there are none."""
    num_kept = self.num_kept.astype(jnp.float32)
    return jnp.where(self.accept, self.total / jnp.maximum(num_kept, 1), 1.0)


def check_policy(wrapper: str, policy: Any) -> None:
  """Raises for anything but a function from ages to weights of their shape."""
  if not callable(policy):
    raise TypeError(f"{wrapper}: weight must be a function of ages, got {policy!r}.")
  try:
    weights = jax.eval_shape(policy, jax.ShapeDtypeStruct((3,), jnp.int32))
  except Exception as error:
    what = f"{wrapper}: weight must be a function of an int32 array of ages, in jax.numpy"
    mend = "Call what makes a policy: staleness.inverse()."
    raise ValueError(f"{what}, and {policy!r} failed with one. {mend}") from error
  is_real = hasattr(weights, "dtype") and not jnp.issubdtype(weights.dtype, jnp.complexfloating)
  if not is_real or weights.shape != (3,):
    what = f"{wrapper}: weight must return a real weight for each age, float32[3] for int32[3]"
    raise ValueError(f"{what}; got {weights}.")


def check_weights(wrapper: str, policy: Policy | None) -> None:
  """Raises for a policy with a weight that is negative or not finite."""
  if policy is None or jax.sharding.get_abstract_mesh().manual_axes:
    return
  # jnp.arange fails here inside shard_map.
  ages = np.arange(2 * NUM_BINS, dtype=np.int32)
  with jax.ensure_compile_time_eval():
    weights = policy(jnp.asarray(ages))
  # Computed from traced numbers, whose values are unknown.
  if isinstance(weights, jax.core.Tracer):
    return
  for age, weight in enumerate(np.asarray(weights, np.float32)):
    if not (np.isfinite(weight) and weight >= 0):
      what = f"{wrapper}: weight must be finite and at least 0 for every age"
      raise ValueError(f"{what}, got {weight} at age {age}.")


def weigh(
  policy: Policy | None, max_staleness: int | None, age: jax.Array, names: AxisNames
) -> Weighed:
  """Computes this shard's weight. Sends one float32 per bin of the histogram, and two more."""
  kept = jnp.ones((), bool) if max_staleness is None else age <= max_staleness
  weight = jnp.ones((), jnp.float32)
  if policy is not None:
    weight = jnp.maximum(policy(jnp.maximum(age, 0)).astype(jnp.float32), 0)
    kept &= weight > 0  # a weight of zero means dropped
  weight = jnp.where(kept, weight, 0)
  arrived = jnp.arange(NUM_BINS, dtype=jnp.int32) == jnp.clip(age, 0, NUM_BINS - 1)
  # Counts of shards are exact in float32 up to 2**24.
  row = [weight[None], kept[None].astype(jnp.float32), arrived.astype(jnp.float32)]
  sums = _collectives.psum(jnp.concatenate(row), names)
  counts = sums[1:].astype(jnp.int32)
  num_kept, num_gradients = counts[0], lax.axis_size(names)
  return Weighed(kept, weight, sums[0], num_kept, num_kept > 0, num_gradients, counts[1:])


def keep(wrapper: str, weighed: Weighed, names: AxisNames, updates: Tree) -> Tree:
  """The updates, or zeros if this shard's weight is zero."""
  if not names:
    return _numerics.zeros_unless(weighed.accept, updates)
  why = ": jax.grad has summed stale and fresh gradients alike. Use per_shard(params, axis_name)."
  _axes.require_own(updates, _axes.varying(weighed.kept), wrapper, why)
  return _numerics.zeros_unless(weighed.kept, updates)


def to_int32(version: jax.Array) -> jax.Array:
  """An integer as int32, clipped to its range."""
  if version.dtype == jnp.bool_:
    return version.astype(jnp.int32)
  info, last = jnp.iinfo(version.dtype), jnp.iinfo(jnp.int32)
  low, high = max(int(info.min), int(last.min)), min(int(info.max), int(last.max))
  version = jnp.clip(version, jnp.asarray(low, version.dtype), jnp.asarray(high, version.dtype))
  return version.astype(jnp.int32)
