"""Where an age becomes a weight.

A gradient's *age* is the number of updates that were accepted since it was computed. A policy is a
function from an age (int32 scalar) to the weight of that gradient beside the others: a bool, or a
float32 at least 0. `drop_stale` is the policy `age <= max_staleness`. Whatever else is to be true
of stale gradients is decided here, once for all policies.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import _axes, _branches, _collectives, _numerics, _passage
from optax_wrappers._types import AxisNames, Tree

Policy: TypeAlias = Callable[[jax.Array], jax.Array]

OLDEST = 2**30  # older gradients count as of this age, so that no difference of int32 overflows


class Weighed(NamedTuple):
  """What the ages of a step's gradients come to.

  Attributes:
    weight: this shard's; float32 scalar.
    total: the weights of all shards together; float32 scalar.
    num_kept: the gradients of a weight above zero; int32 scalar.
    num_gradients: all of them.
    accept: whether any gradient is kept, without which the step is dropped; bool scalar.
  """

  weight: jax.Array
  total: jax.Array
  num_kept: jax.Array
  num_gradients: int
  accept: jax.Array


def age_of(computed_at: jax.Array, step: jax.Array) -> jax.Array:
  """The age of a gradient; int32 scalar, negative for one of the future."""
  return step - jnp.maximum(computed_at, step - OLDEST)


def weigh(policy: Policy, age: jax.Array, names: AxisNames) -> Weighed:
  """Weighs this shard's gradient. Sends one int32, and if the policy is real one float32 more."""
  # A policy that says yes or no needs no second sum: the number kept is the total.
  weight = policy(age)
  kept = weight if weight.dtype == jnp.bool_ else weight > 0
  # int32 counts exactly where float32 would stop at 2**24 shards' gradients.
  num_kept = _collectives.psum(kept.astype(jnp.int32), names)
  total = num_kept if weight.dtype == jnp.bool_ else _collectives.psum(weight, names)
  return Weighed(
    weight.astype(jnp.float32),
    total.astype(jnp.float32),
    num_kept,
    _axes.axis_size(names),
    num_kept > 0,
  )


def update(
  wrapper: str,
  inner: optax.GradientTransformationExtraArgs,
  weighed: Weighed,
  names: AxisNames,
  updates: Tree,
  inner_state: Tree,
  params: Tree,
  extra_args: dict[str, Any],
) -> tuple[Tree, Tree]:
  """Calls `inner` with updates of these weights; if none is kept, nothing moves.

  Every shard calls `inner` in every step, and the old state is chosen afterwards if need be. A
  branch could leave some shards waiting in a collective for the others. `inner` sees zeros for what
  is dropped, so that no NaN of a stale gradient reaches a value or a derivative.

  How the weight enters a mean depends on who takes the mean. A reduction of this library takes the
  weight into its denominator. A mean by hand counts all shards alike, N of them, so the updates are
  scaled by N times the weight over the total. The first is tried; if nothing inside has taken the
  weight, the second is done.

  Args:
    wrapper: the name that an error gives.
    inner: the wrapped optimizer.
    weighed: the weights.
    names: the axes over which gradients differ in age.
    updates: this shard's, with `keep` applied.
    inner_state: the state of `inner`.
    params: the parameters, or None.
    extra_args: for `inner`.

  Returns:
    The updates and the inner state.
  """
  # The axes over which the updates have been reduced before need no say in this decision.
  before = _passage.names_reduced_before()
  is_traced = isinstance(weighed.accept, jax.core.Tracer)

  def prepare(updates, **changes):
    def call(inner_state):
      return inner.update(updates, inner_state, params, **extra_args)

    return _passage.Apart(call, is_traced, **changes)

  apart = prepare(updates, **(_handed(weighed, names) if names else {}))
  if names:
    # Whether a reduction inside takes the weight? `update_if` uses the same trace.
    heard = apart.listen(inner_state)
    if not heard.is_taken:
      _passage.require_seen(wrapper, heard.unseen_weighted, "which shards are stale")
      apart = prepare(_scaled_for_mean_by_hand(weighed, updates), handed=None)
      heard = apart.listen(inner_state)
    _passage.require_decided(wrapper, "computed_at", weighed.accept, names, before, heard)
  new_updates, inner_state, reduced = _branches.update_if(
    weighed.accept,
    apart.call,
    inner_state,
    wrapper,
    "computed_at",
    f"Name the axis: {wrapper}(..., axis_name=...).",
  )
  apart.close(reduced)
  return new_updates, inner_state


def keep(wrapper: str, weighed: Weighed, names: AxisNames, updates: Tree) -> Tree:
  """The updates, or zeros where this shard's are of weight zero."""
  if not names:
    return _numerics.zeros_unless(weighed.accept, updates)
  kept = weighed.weight > 0
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


def _handed(weighed, names):
  """The weights for the reductions inside, times what is known from outside."""
  outer = _passage.surrounding()
  if outer is None or outer.handed is None:
    return {"handed": _passage.Handed(weighed.weight, names, weighed.total)}
  # Zero on a stale shard, even if the weight from outside is infinite or NaN there.
  return {"handed": _passage.Handed(_numerics.scale(outer.handed.weight, weighed.weight), names)}


def _scaled_for_mean_by_hand(weighed, updates):
  dtype = _numerics.weight_dtype(jax.tree.leaves(updates))
  total = jnp.where(weighed.total > 0, weighed.total, 1).astype(dtype)
  factor = weighed.num_gradients * weighed.weight.astype(dtype) / total
  return jax.tree.map(lambda u: _numerics.scale(u, factor), updates)
