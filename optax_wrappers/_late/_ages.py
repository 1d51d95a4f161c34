"""Where an age becomes a weight.

A gradient's *age* is the number of updates that were accepted since it was computed. A weight of
zero is a drop. Whatever else is to be true of stale gradients is decided here, once for all
policies.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core import _axes, _branches, _collectives, _numerics, _weights
from optax_wrappers._core._types import AxisNames, Tree
from optax_wrappers.staleness import Policy

OLDEST = 2**30  # older gradients count as of this age, so that no difference of int32 overflows
NUM_BINS = 32  # of the histogram of ages


class Weighed(NamedTuple):
  """What the ages of a step's gradients come to.

  Attributes:
    kept: whether this shard's is of a weight above zero; bool scalar.
    weight: this shard's; float32 scalar.
    total: the weights of all shards together; float32 scalar.
    num_kept: the gradients of a weight above zero; int32 scalar.
    num_gradients: all of them.
    ages: how many there are of each age, the last bin for that age and all above; int32
      `[NUM_BINS]`.
  """

  kept: jax.Array
  weight: jax.Array
  total: jax.Array
  num_kept: jax.Array
  num_gradients: int
  ages: jax.Array

  @property
  def accept(self) -> jax.Array:
    """Whether any gradient is kept, without which the step is dropped; bool scalar."""
    return self.num_kept > 0

  @property
  def relative(self) -> jax.Array:
    """This shard's weight, where that of all that are kept is one on average; float32 scalar."""
    return self.weight / self.mean

  @property
  def mean(self) -> jax.Array:
    """The mean weight of all that are kept, 1 if there are none; float32 scalar."""
    num_kept = self.num_kept.astype(jnp.float32)
    return jnp.where(self.accept, self.total / jnp.maximum(num_kept, 1), 1.0)


def age_of(computed_at: jax.Array, step: jax.Array) -> jax.Array:
  """The age of a gradient; int32 scalar, negative for one of the future."""
  return step - jnp.maximum(computed_at, step - OLDEST)


def check_policy(wrapper: str, policy: Any) -> Policy:
  """Returns a policy that gives an age of one shape weights of that shape."""
  if not callable(policy):
    raise TypeError(
      f"{wrapper}: weight must be a function of ages, such as staleness.inverse(), got {policy!r}."
      " For the same weight at every age change the learning rate."
    )
  try:
    found = jax.eval_shape(policy, jax.ShapeDtypeStruct((3,), jnp.int32))
  except Exception as error:
    raise ValueError(
      f"{wrapper}: weight must be a function of an int32 array of ages, in jax.numpy, and"
      f" {policy!r} failed with one. Call what makes a policy: staleness.inverse()."
    ) from error
  is_real = hasattr(found, "dtype") and not jnp.issubdtype(found.dtype, jnp.complexfloating)
  if not is_real or found.shape != (3,):
    raise ValueError(
      f"{wrapper}: weight must return a real weight for each age, float32[3] for int32[3]; got"
      f" {found}. Compute with the ages that it is given, as in lambda age: 1 / (1 + age)."
    )
  return policy


def check_weights(wrapper: str, policy: Policy | None) -> None:
  """Raises on a policy with a weight that is negative or not finite, as far as that is known."""
  if policy is None:
    return
  ages = np.arange(2 * NUM_BINS, dtype=np.int32)
  with jax.ensure_compile_time_eval():
    weights = policy(jnp.asarray(ages))
  if isinstance(weights, jax.core.Tracer):  # made of traced numbers
    return
  found = np.asarray(weights, np.float32)
  wrong = ages[~(np.isfinite(found) & (found >= 0))]
  if wrong.size:
    raise ValueError(
      f"{wrapper}: weight must be finite and at least 0 for every age, and is"
      f" {found[wrong[0]]} for an age of {wrong[0]}. Cut it off, as with jnp.maximum(weights, 0) or"
      " 1 / jnp.maximum(age, 1)."
    )


def weigh(
  policy: Policy | None, max_staleness: int | None, age: jax.Array, names: AxisNames
) -> Weighed:
  """Weighs this shard's gradient. Sends one float32 for each bin of the histogram, and two more."""
  kept = jnp.ones((), bool) if max_staleness is None else age <= max_staleness
  weight = jnp.ones((), jnp.float32)
  if policy is not None:
    weight = jnp.maximum(policy(jnp.maximum(age, 0)).astype(jnp.float32), 0)
    kept &= weight > 0
  weight = jnp.where(kept, weight, 0)
  arrived = jnp.arange(NUM_BINS, dtype=jnp.int32) == jnp.clip(age, 0, NUM_BINS - 1)
  # Counts of shards are exact in float32 up to 2**24 of them.
  own = [weight[None], kept[None].astype(jnp.float32), arrived.astype(jnp.float32)]
  sums = _collectives.psum(jnp.concatenate(own), names)
  counts = sums[1:].astype(jnp.int32)
  return Weighed(kept, weight, sums[0], counts[0], _axes.axis_size(names), counts[1:])


def update(
  wrapper: str,
  inner: optax.GradientTransformationExtraArgs,
  weighed: Weighed,
  names: AxisNames,
  updates: Tree,
  inner_state: Tree,
  params: Tree,
  weight: Any,
  extra_args: dict[str, Any],
) -> tuple[Tree, Tree]:
  """Calls `inner` with the updates that are kept; if none is, nothing moves.

  Every shard calls `inner` in every step, and the old state is chosen afterwards if need be. A
  branch could leave some shards waiting in a collective for the others. `inner` sees zeros for what
  is dropped, so that no NaN of a stale gradient reaches a value or a derivative.

  A mean inside must be over those that are kept. A reduction of this library gets a weight of one
  or zero. A mean by hand counts all shards alike, N of them, so for it the updates are scaled by N
  over the number kept.

  Args:
    wrapper: the name that an error gives.
    inner: the wrapped optimizer.
    weighed: the weights.
    names: the axes over which gradients differ in age.
    updates: this shard's, with `keep` applied.
    inner_state: the state of `inner`.
    params: the parameters, or None.
    weight: the extra arg, or None.
    extra_args: the others, for `inner`.

  Returns:
    The updates and the inner state.
  """
  leaves = jax.tree.leaves(updates)
  weight = _weights.given(wrapper, weight, leaves)
  reduced_inside = _weights.names_of(inner_state)
  if set(names) & set(reduced_inside):
    # Zero on a stale shard, even if the weight from outside is infinite or NaN there.
    one = jnp.ones((), _numerics.weight_dtype(leaves)) if weight is None else weight
    weight = jnp.where(weighed.kept, one, 0)
  elif names:
    updates = _scaled_for_mean_by_hand(weighed, updates)
  if names:
    _weights.require_decided(wrapper, "computed_at", weighed.accept, names, reduced_inside)
  return _branches.update_if(
    weighed.accept,
    lambda state: _weights.update(
      wrapper, inner, updates, state, params, weight, extra_args, names or None
    ),
    inner_state,
    wrapper,
    "computed_at",
    f"Name the axis: {wrapper}(..., axis_name=...).",
  )


def keep(wrapper: str, weighed: Weighed, names: AxisNames, updates: Tree) -> Tree:
  """The updates, or zeros where this shard's are of weight zero."""
  if not names:
    return _numerics.zeros_unless(weighed.accept, updates)
  kept = weighed.kept
  why = (
    ": jax.grad has summed stale and fresh gradients alike. Differentiate with respect to"
    " per_shard(params, axis_name)."
  )

  def of(path, u):
    _axes.require_own(u, kept, wrapper, path, why)
    return jnp.where(kept, u, jnp.zeros_like(u))

  return jax.tree.map_with_path(of, updates)


def to_int32(ticket: jax.Array) -> jax.Array:
  """An integer as int32, the nearest one where it is out of range."""
  if ticket.dtype == jnp.bool_:
    return ticket.astype(jnp.int32)
  info, last = jnp.iinfo(ticket.dtype), jnp.iinfo(jnp.int32)
  # Unsigned and 64-bit tickets too: the nearest int32 is as old or as new as they are.
  low, high = max(int(info.min), int(last.min)), min(int(info.max), int(last.max))
  ticket = jnp.clip(ticket, jnp.asarray(low, ticket.dtype), jnp.asarray(high, ticket.dtype))
  return ticket.astype(jnp.int32)


def _scaled_for_mean_by_hand(weighed, updates):
  dtype = _numerics.weight_dtype(jax.tree.leaves(updates))
  num_kept = jnp.maximum(weighed.num_kept, 1).astype(dtype)
  factor = weighed.num_gradients * weighed.kept.astype(dtype) / num_kept
  return _numerics.scale_tree(updates, factor)
