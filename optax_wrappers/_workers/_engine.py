"""The engine of exchanges: workers take local steps and periodically synchronize.

The engine knows *when* an exchange happens and *for which variables*: a `Clock` counts the steps of
a round, and a `Fragment` is a set of variables, or of parts of variables, that are exchanged
together, at their own step of the round. A `Rule` knows *what* is exchanged. Its exchange has two
halves, `send` and `merge`, so that what is sent may arrive some steps later. `_center.WorkerGroup`
knows whether each worker holds the whole center or a share. A step of a worker is

    updates <- rule.pull(updates)              in every step
    x <- x + inner(updates)
    for each fragment that is due:
      kept, sent <- rule.send(x, kept)         the exchange itself
      x, kept <- rule.merge(x, sent, kept)     at once, or with a delay some steps later

With a delay, what was sent earlier is merged before more is sent. For a fragment, a rule receives
trees of the parameters' structure, with None for the variables of other fragments, which
`jax.tree.map` skips. Its state is a pytree, one for each fragment.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _axes, _checks, _numerics
from optax_wrappers._core._states import Workers, instances, require_same, require_state
from optax_wrappers._core._types import AxisName, Tree
from optax_wrappers._workers import _fragments
from optax_wrappers._workers._center import Divided, WorkerGroup
from optax_wrappers._workers._clock import Clock, check_delay
from optax_wrappers._workers._exchange_state import ExchangeState
from optax_wrappers._workers._inner_state import Policy, check_fields, restarted
from optax_wrappers._workers._layout import Holder, holders
from optax_wrappers._workers._rule import Rule
from optax_wrappers._workers._worker import Parts, Worker


class Exchanging(optax.GradientTransformationExtraArgs):
  """An optimizer with exchanges, which knows its parts."""

  parts: Parts


def exchanging(
  wrapper: str,
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  rule: Rule,
  state_class: type[ExchangeState],
  *,
  communication_period: int | Callable[[jax.Array], ArrayLike] | None,
  fragments: int | Tree,
  delay: int,
  shard_center: bool,
  undoes: bool = False,
  policy: Policy = None,
  **arguments: Any,
) -> Exchanging:
  """An optimizer whose workers step alone with `inner`, and exchange by `rule` once a round.

  The arguments without a description are those of `local_steps`.

  Args:
    wrapper: the name that an error gives.
    rule: what is exchanged.
    state_class: `ExchangeState`, or one of its subclasses.
    undoes: whether what arrives undoes the steps since it was sent.
    policy: what an exchange does to the inner state; None: nothing.
    **arguments: others that decide what the state holds: a state of other ones is an error.
  """
  delay = check_delay(wrapper, delay, communication_period)
  clock = Clock(wrapper, communication_period, delay, undoes)
  inner, names = _checks.optimizer(wrapper, inner), _axes.axis_names(axis_name)
  workers = Divided(names, wrapper) if shard_center else WorkerGroup(names)
  _fragments.check(wrapper, fragments, clock.period, shard_center)

  def made_for(plan):
    forms = {"delay": delay > 0, "shard_center": shard_center}
    schedule = {"period": communication_period, "plan": plan, "delay": delay}
    return Workers(names, tuple((_fragments.forms(plan) | forms | arguments).items()), schedule)

  def plan_of(params):
    return _fragments.plan(wrapper, params, fragments)

  parts = Parts(wrapper, inner, rule, names, plan_of, made_for, policy)

  def init_fn(params):
    plan, leaves = plan_of(params), jax.tree.leaves(params)
    sets = [x.part(x.take(leaves)) for x in [*plan, *_fragments.others(params)]]
    inner_state = inner.init(params)
    check_fields(wrapper, policy, inner_state, params)
    replaces = type(rule).replaces is not Rule.replaces
    state = state_class(
      **clock.start(),
      kept=tuple(_first_kept(rule, own, workers) for own in sets),
      restarts=_axes.vary_with(jnp.zeros((), bool), params) if replaces else None,
      exchanges=jnp.zeros((), jnp.int32),
      workers=made_for(plan),
      inner_state=inner_state,
    )
    if not delay:
      return state
    in_flight = tuple(map(rule.idle, sets[: len(plan)]))
    return state.replace(countdown=jnp.zeros(len(plan), jnp.int32), in_flight=in_flight)

  def update_fn(
    updates, state, params=None, *, exchange=None, arrival=None, participation=None, **extra_args
  ):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(names, wrapper)
    plan = plan_of(params)
    require_state(wrapper, state, state_class)
    require_same(wrapper, state.workers, made_for(plan))
    _check_owned(wrapper, params, names)
    _check_center(wrapper, params, state, names)
    _axes.require_equal(state.exchanges, wrapper, "the state's exchanges", axes=frozenset(names))
    is_step = updates is not None  # else only an exchange
    new, turn = clock.advance(state) if is_step else ({}, None)
    turns, arrivals = _due(wrapper, clock, plan, turn, state.countdown, exchange, arrival)
    participation = _checks.weight(wrapper, participation, name="participation")
    # What is sent before the first step would arrive after it, and take it back.
    has_begun = is_step or state.step > 0
    group = dataclasses.replace(workers, exchanges=state.exchanges, num_fragments=len(plan))
    worker = Worker(parts, group, params, state, participation, has_begun)
    inner_state = state.inner_state
    if is_step:
      updates = _checks.inexact(wrapper, updates)
      _checks.same_shapes(wrapper, updates, params)
      pulled = worker.pulled(plan, updates)
      _check_owners(wrapper, inner_state, names)
      start = restarted(inner, inner_state, params, state.restarts)
      updates, stepped = inner.update(pulled, start, params, **extra_args)
      # A constant in it may be new.
      inner_state = _axes.vary_like(stepped, inner_state)
    else:
      updates = jax.tree.map(
        lambda x: jnp.zeros_like(x) if _numerics.is_inexact(x) else None, params
      )
    worker.updates = worker.treedef.flatten_up_to(updates)
    for fragment, is_turn, is_due in zip(plan, turns, arrivals):
      if delay:
        worker.exchange_if(is_due, fragment, arrives=True)
        worker.exchange_if(is_turn, fragment, sends=True)
      else:
        worker.exchange_if(is_turn, fragment, sends=True, arrives=True)
    num_turns = sum(jnp.asarray(is_turn, jnp.int32) for is_turn in turns)
    new["exchanges"] = _numerics.saturating_add(state.exchanges, num_turns)
    new["inner_state"] = worker.inner_state_after(arrivals, new["exchanges"], inner_state)
    new["restarts"] = worker.restarts
    if not is_step:
      new["restarts"] = jax.tree.map(jnp.logical_or, state.restarts, worker.restarts)
    if delay:
      new["countdown"] = _next_countdown(state.countdown, is_step, turns, arrivals, delay)
      new["in_flight"] = tuple(worker.in_flight)
    new_state = state.replace(**new, kept=tuple(worker.kept))
    return worker.treedef.unflatten(worker.updates), new_state

  tx = Exchanging(init_fn, update_fn)
  tx.parts = parts
  return tx


def _first_kept(rule, params, workers):
  """A rule's initial state, in which each worker's own leaves are typed as that."""
  first = rule.init(params, workers)

  def typed(x, holder):
    return _axes.vary_with(x, params) if holder is Holder.OWN else x

  return jax.tree.map(typed, first, holders(first))


def _next_countdown(left, is_step, turns, arrivals, delay):
  """The steps until what each fragment has sent arrives; 0 if nothing is in flight."""
  if is_step:  # without `arrival` it stays due
    left = jnp.where(left > 1, left - 1, left)
  return jnp.where(jnp.asarray(turns), delay, jnp.where(jnp.asarray(arrivals), 0, left))


def _due(wrapper, clock, plan, turn, countdown, exchange, arrival):
  """For each fragment, whether it is sent now, and whether what was sent arrives now.

  All of this depends only on counters that are equal on all workers, and on the caller's arguments.
  No branch may depend on values that differ between workers: `_clock` says why.
  """
  if arrival is not None and countdown is None:
    raise ValueError(f"{wrapper}: arrival needs a delay above 0. Pass exchange alone.")
  is_asked = exchange is not None or arrival is not None
  if turn is None and not is_asked:
    call = "update(None, state, params, exchange=True)"
    raise ValueError(f"{wrapper}: updates is None, and exchange must say of what: {call}.")
  is_counted = not is_asked and clock.communication_period is not None
  if is_counted:
    since, length = turn
    turns = [since == fragment.phase(length) for fragment in plan]
  else:
    turns = _chosen(wrapper, "exchange", exchange, len(plan))
  if countdown is None:
    return turns, turns
  if not is_counted:
    return turns, _chosen(wrapper, "arrival", arrival, len(plan))
  left = [countdown[i] for i in range(len(plan))]
  # No later than the next send: the caller may have sent at another time than the counter would.
  return turns, [(n == 1) | (is_turn & (n > 0)) for n, is_turn in zip(left, turns)]


def _chosen(wrapper, name, value, num_fragments):
  """Whether the caller chose each fragment."""
  if value is None or isinstance(value, bool | np.bool_):
    return [bool(value)] * num_fragments
  if not isinstance(value, list | tuple | set | frozenset | range):
    mend = "It cannot be traced: name it in static_argnames of jax.jit."
    what = f"{wrapper}: {name} must be a Python bool, or the numbers of fragments"
    raise TypeError(f"{what}; got {value!r}. {mend}")
  for number in value:
    if _checks.integer(wrapper, name, number, minimum=0) >= num_fragments:
      what = f"{wrapper}: {name} must hold numbers of fragments below {num_fragments}"
      raise ValueError(f"{what}, got {number}.")
  return [i in value for i in range(num_fragments)]


# Requirements on workers.


def _check_owned(wrapper, params, names):
  # If types are not tracked, nothing distinguishes a replica from a worker's own copy; under vmap
  # both are right, so no check is needed.
  known = frozenset(_axes.tracked(names))
  varying = _axes.all_varying(jax.tree.leaves(params) if known else ())
  for (path, _), over in zip(jax.tree.leaves_with_path(params), varying):
    equal = sorted(map(str, known - over))
    if equal:
      what = f"{wrapper}: params{jax.tree_util.keystr(path)} is equal on all workers of {equal}"
      mend = "Pass stack_workers(params, num_workers) with PartitionSpec(axis_name)."
      raise ValueError(f"{what}, but every worker owns its parameters. {mend}")


def _check_owners(wrapper, inner_state, names):
  """Raises if workers inside would share a center that differs between them, undetected."""
  # Workers inside, over axes that this exchange does not name: pods of workers, each with a center.
  inside = instances(inner_state, ExchangeState)
  inner_names = (name for x in inside for name in x.workers.names)
  named = dict.fromkeys(name for name in inner_names if name not in names)
  # `stacked_workers` binds its own axis.
  others = tuple(filter(_axes.is_bound, named))
  known = _axes.tracked(others)
  # Tracked types show a center that differs, and shard_map checks the layout.
  unknown = tuple(name for name in others if name not in known)
  if unknown and set(unknown) <= set(jax.sharding.get_abstract_mesh().manual_axes):
    raise ValueError(
      f"{wrapper}: with axis_name {names} the workers of {unknown}, inside, would have a center"
      f" each, which no layout shows. Name all the axes, {(*names, *unknown)!r}, or use"
      " check_vma=True."
    )


def _check_center(wrapper, params, state, names):
  """Raises if workers of other axes, which each have a center, receive the same one."""
  if not frozenset().union(*_axes.all_varying(jax.tree.leaves(params))) - set(names):
    return
  # Assembled from all fragments, so only if it is needed.
  center = state.center
  leaves = [] if center is None else jax.tree.structure(params).flatten_up_to(center)
  for (path, p), c in zip(jax.tree.leaves_with_path(params), leaves):
    others = sorted(map(str, _axes.varying(p) - _axes.varying(c) - set(names)))
    if others:
      what = f"{wrapper}: state.center{jax.tree_util.keystr(path)} is one for all shards of"
      mend = "Name all the axes in axis_name, or give the center a PartitionSpec over these."
      raise ValueError(f"{what} {others}, but params differ between them. {mend}")
