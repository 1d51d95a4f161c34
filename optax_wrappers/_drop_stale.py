"""Dropping gradients that were computed on parameters which have since moved on too far."""

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import _axes, _checks, _numerics, _staleness
from optax_wrappers._state import WrapperState, get_state, state
from optax_wrappers._types import AxisName, Tree


@state
class DropStaleState(WrapperState):
  """State of `drop_stale`.

  Attributes:
    step: updates accepted; int32 scalar. A gradient's `computed_at` is the value of this when it
      was computed.
    dropped: gradients dropped; int32 scalar.
    inner_state: state of the wrapped optimizer.
    accepted: gradients accepted; int32 scalar. None without an axis_name, where it equals `step`.
  """

  shared_fields = frozenset({"step", "dropped", "accepted"})
  may_skip = True

  step: jax.Array
  dropped: jax.Array
  inner_state: Tree
  accepted: jax.Array | None = None


def drop_stale(
  inner: optax.GradientTransformation,
  max_staleness: int,
  *,
  axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
  """Drops a gradient if more than `max_staleness` updates were accepted since it was computed.

  A gradient is accepted iff `step - computed_at <= max_staleness`. On a drop the parameters and the
  whole inner state stay as they were, whatever the gradient holds, and `step` does not move: a
  dropped gradient does not age the others.

  With `axis_name` every shard brings its own `computed_at`. Stale shards' updates become zero, and
  a stale shard has weight zero in the reductions of this library inside `inner`, whatever stands
  between: a mean, weighted or not, is that of the fresh ones, a sum is theirs. If none is fresh the
  step is dropped on every shard. Where `inner` holds no such reduction over the axis, the F fresh
  updates of N are scaled by N / F instead, so that a plain mean written by hand is the mean of the
  fresh ones too.

  Args:
    inner: the optimizer to wrap.
    max_staleness: accepted updates that a gradient may have missed. 0: only gradients of the
      current parameters; negative: none at all.
    axis_name: the axis or axes over which `computed_at` differs; None: it is one value.

  Returns:
    The wrapped optimizer, with a `DropStaleState`.

  Raises:
    TypeError: if max_staleness is no int; in update, for integer updates or a `computed_at` that is
      no integer.
    ValueError: in update, if `computed_at` is missing, or differs from shard to shard without an
      axis_name; for an axis that is not bound; for updates that are already summed over stale and
      fresh shards alike; where a weighted reduction inside is hidden by somebody else's
      conditional.

  Extra args:
    computed_at: int32 scalar, the value of `DropStaleState.step` when the gradient was computed;
      not forwarded. One that is larger than `step` is fresh, by the rule. All others reach `inner`.

  **Communication**: with `axis_name` one int32 scalar per step, else none. The collectives of
  `inner` run in every step, dropped or not, so that no shard can wait for another.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for computed_at in (0, 0):  # both workers read the parameters at step 0
    ...   grad = jnp.array(-1.0)
    ...   updates, state = tx.update(grad, state, params, computed_at=computed_at)
    ...   params = optax.apply_updates(params, updates)
    >>> print(params, state.step, state.dropped, ow.drop_rate(state))
    1.0 1 1 0.5

  Source: tf.contrib.opt.DropStaleGradientOptimizer.
  """
  wrapper = "drop_stale"
  max_staleness = _checks.integer(wrapper, "max_staleness", max_staleness)
  if abs(max_staleness) >= 2**30:
    raise ValueError(
      f"{wrapper}: max_staleness must be an int below 2**30 in size, got {max_staleness}."
    )
  names = _axes.axis_names(axis_name)
  inner = _checks.optimizer(wrapper, inner)

  def policy(age):
    return age <= max_staleness

  def init_fn(params):
    return DropStaleState(
      step=jnp.zeros((), jnp.int32),
      dropped=jnp.zeros((), jnp.int32),
      inner_state=inner.init(params),
      accepted=jnp.zeros((), jnp.int32) if names else None,
    )

  def update_fn(updates, state, params=None, *, computed_at=None, **extra_args):
    if computed_at is None:
      raise ValueError(
        f"{wrapper}: computed_at is needed: the value of state.step when the gradient was"
        " computed. Call tx.update(updates, state, params, computed_at=step);"
        " optax_wrappers.train_state.TrainState passes it on."
      )
    computed_at = _checks.scalar(wrapper, "computed_at", computed_at, jnp.integer)
    _axes.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    age = _staleness.age_of(_staleness.to_int32(computed_at), state.step)
    weighed = _staleness.weigh(policy, age, names)
    _axes.require_like(
      weighed.accept,
      state.step,
      wrapper,
      "computed_at",
      "Name the axis over which it differs: drop_stale(..., axis_name=...).",
    )
    updates = _staleness.keep(wrapper, weighed, names, updates)
    new_updates, inner_state = _staleness.update(
      wrapper, inner, weighed, names, updates, state.inner_state, params, extra_args
    )
    num_dropped = weighed.num_gradients - weighed.num_kept
    return new_updates, DropStaleState(
      step=_numerics.saturating_add(state.step, weighed.accept.astype(jnp.int32)),
      dropped=_numerics.saturating_add(state.dropped, num_dropped),
      inner_state=inner_state,
      accepted=_numerics.saturating_add(state.accepted, weighed.num_kept) if names else None,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def drop_rate(opt_state: Tree) -> jax.Array:
  """The fraction of gradients that `drop_stale` dropped so far: `dropped / (dropped + accepted)`.

  Args:
    opt_state: an optimizer state, or any pytree that holds one `DropStaleState`.

  Returns:
    float32 in [0, 1]; 0 before the first call.

  Raises:
    ValueError: if there is no such state, or more than one.

  Source: the "Gradient staleness percentage" of tf.contrib.opt.DropStaleGradientOptimizer, which
  divides by accepted + 1 and so can exceed 1.
  """
  found = get_state(opt_state, DropStaleState)
  dropped = jnp.asarray(found.dropped).astype(jnp.float32)
  accepted = jnp.asarray(found.step if found.accepted is None else found.accepted).astype(
    jnp.float32
  )
  return dropped / jnp.maximum(dropped + accepted, 1)
