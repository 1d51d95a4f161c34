"""Dropping gradients that were computed on parameters which have since moved on too far."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var

from optax_wrappers import _checks, _collectives, _numerics, _reduce
from optax_wrappers._state import WrapperState, get_state, state

Tree = Any


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
  axis_name: _collectives.AxisName = None,
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
  names = _collectives.axis_names(axis_name)
  inner = _checks.optimizer(wrapper, inner)

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
    computed_at = _to_int32(_checks.scalar(wrapper, "computed_at", computed_at, jnp.integer))
    _collectives.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    outer = _reduce.surrounding()
    before = () if outer is None else outer.names
    fresh = computed_at >= state.step - max_staleness

    if names:
      num_gradients = _collectives.axis_size(names)
      num_fresh = _collectives.psum(fresh.astype(jnp.int32), names)
      accept = num_fresh > 0
      weight, total = fresh.astype(jnp.float32), num_fresh.astype(jnp.float32)
      if outer is not None and outer.handed is not None:
        weight, total = jnp.where(fresh, outer.handed.weight, 0), None
      changes = {"handed": _reduce.Handed(weight, names, total)}
      updates = _keep_fresh(updates, fresh)
    else:
      accept, num_fresh, num_gradients, changes = fresh, fresh.astype(jnp.int32), 1, {}
      updates = _numerics.zeros_unless(accept, updates)
    _collectives.require_like(
      accept,
      state.step,
      wrapper,
      "computed_at",
      "Name the axis over which it differs: drop_stale(..., axis_name=...).",
    )

    def prepare(updates, **changes):
      """The call of `inner` as a function of its state, and the passage to it, which knows more
      after a call."""
      passages = []

      def call(inner_state):
        with _reduce.passage_apart(outer, **changes) as passage:
          result = inner.update(updates, inner_state, params, **extra_args)
        passages.append(passage)
        return *result, passage.reduced

      return call, passages

    # Every shard calls inner in every step and then chooses: a branch could leave some of them
    # waiting in a collective. It sees zeros for what is dropped, so that no NaN of a stale gradient
    # reaches a value or a derivative.
    call, passages = prepare(updates, **changes)
    is_traced = isinstance(accept, jax.core.Tracer)
    if names or is_traced:
      traced = jax.make_jaxpr(call, return_shape=True)(state.inner_state)
    if (
      names and not passages[-1].is_taken
    ):  # a mean by hand, if any: it counts the stale shards too
      factor = num_gradients / jnp.maximum(num_fresh, 1).astype(
        _numerics.weight_dtype(jax.tree.leaves(updates))
      )
      scaled = jax.tree.map(lambda u: _numerics.scale(u, factor), updates)
      _reduce.require_seen(wrapper, passages[-1].unseen_weighted, "which shards are stale")
      call, passages = prepare(scaled, handed=None)
      traced = jax.make_jaxpr(call, return_shape=True)(state.inner_state)
    if names:
      _reduce.require_decided(wrapper, "computed_at", accept, names, before, passages[-1])
    if is_traced:
      over = _collectives.varying(accept) & _collectives.sending_axes(traced[0].jaxpr)
      _collectives.require_equal(
        accept, wrapper, "computed_at", "Name the axis: drop_stale(..., axis_name=...).", over
      )
      new_updates, inner_state, reduced = _update_if(accept, *traced, state.inner_state)
    else:  # nothing is fused
      new_updates, inner_state, reduced = call(state.inner_state)
      new_updates = _numerics.zeros_unless(accept, new_updates)
      inner_state = _numerics.select(accept, inner_state, state.inner_state)
    if outer is not None:
      passages[-1].reduced = reduced
      outer.merge(passages[-1])
    return new_updates, DropStaleState(
      step=_numerics.saturating_add(state.step, accept.astype(jnp.int32)),
      dropped=_numerics.saturating_add(state.dropped, num_gradients - num_fresh),
      inner_state=inner_state,
      accepted=_numerics.saturating_add(state.accepted, num_fresh) if names else None,
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
    divides by
  accepted + 1 and so can exceed 1.
  """
  found = get_state(opt_state, DropStaleState)
  dropped = jnp.asarray(found.dropped).astype(jnp.float32)
  accepted = jnp.asarray(found.step if found.accepted is None else found.accepted).astype(
    jnp.float32
  )
  return dropped / jnp.maximum(dropped + accepted, 1)


def _to_int32(ticket: jax.Array) -> jax.Array:
  """An integer as int32, the nearest one where it is out of range."""
  if ticket.dtype == jnp.bool_:
    return ticket.astype(jnp.int32)
  info, last = jnp.iinfo(ticket.dtype), jnp.iinfo(jnp.int32)
  low, high = max(int(info.min), int(last.min)), min(int(info.max), int(last.max))
  return jnp.clip(ticket, jnp.asarray(low, ticket.dtype), jnp.asarray(high, ticket.dtype)).astype(
    jnp.int32
  )


def _update_if(accept: jax.Array, closed: Any, result: Any, state: Tree) -> tuple[Tree, Tree, Tree]:
  """The updates, the state and what else a traced call returns if accepted; else zeros, `state`,
  and what else.

  What becomes of the updates in a dropped step is of no matter, so they are computed from the state
  that was chosen. XLA then writes a new state where the old one lay, as it does without the choice,
  rather than hold both.
  """
  jaxpr = closed.jaxpr
  (updates, new_state, more), state_leaves = result, jax.tree.leaves(state)
  num_updates, num_state = len(jax.tree.leaves(updates)), len(jax.tree.leaves(new_state))
  state_vars = jaxpr.outvars[num_updates : num_updates + num_state]
  other_vars = jaxpr.outvars[:num_updates] + jaxpr.outvars[num_updates + num_state :]

  needed, for_state, for_others = _variables(state_vars), [], []
  for eqn in reversed(jaxpr.eqns):
    if needed.isdisjoint(eqn.outvars):
      for_others.append(eqn)
    else:
      for_state.append(eqn)
      needed |= _variables(eqn.invars)
  for_state.reverse()
  for_others.reverse()

  used = _variables(other_vars).union(*(_variables(eqn.invars) for eqn in for_others))
  made = [v for eqn in for_state for v in eqn.outvars if v in used]
  first = jaxpr.replace(eqns=for_state, outvars=[*state_vars, *made])
  results = jax.core.eval_jaxpr(first, closed.consts, *state_leaves)
  new_state = _numerics.select(
    accept, jax.tree.unflatten(jax.tree.structure(new_state), results[:num_state]), state
  )

  values = dict(zip(made, results[num_state:]))
  for var, chosen in zip(state_vars, jax.tree.leaves(new_state)):
    if isinstance(var, Var) and var in values and jax.typeof(chosen) == jax.typeof(values[var]):
      values[var] = chosen
  second = jaxpr.replace(eqns=for_others, outvars=other_vars, invars=[*jaxpr.invars, *values])
  others = jax.core.eval_jaxpr(second, closed.consts, *state_leaves, *values.values())
  updates = jax.tree.unflatten(jax.tree.structure(updates), others[:num_updates])
  more = jax.tree.unflatten(jax.tree.structure(more), others[num_updates:])
  return _numerics.zeros_unless(accept, updates), new_state, more


def _variables(atoms: Sequence[Any]) -> set[Var]:
  return {atom for atom in atoms if isinstance(atom, Var)}


def _keep_fresh(updates: Tree, fresh: jax.Array) -> Tree:
  """This shard's updates, or zeros if they are stale."""

  def keep(path, u):
    _collectives.require_own(
      u,
      fresh,
      "drop_stale",
      path,
      ": jax.grad has summed stale and fresh gradients alike. Differentiate with respect to"
      " per_shard(params, axis_name).",
    )
    return jnp.where(fresh, u, jnp.zeros_like(u))

  return jax.tree.map_with_path(keep, updates)
