"""One worker in one step: its updates and its state, which exchanges change."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from optax_wrappers._core import _axes, _branches, _numerics
from optax_wrappers._workers import _participation
from optax_wrappers._workers._inner_state import (
  Arrived,
  averaged,
  begun,
)


class Worker:
  """One worker in one step.

  Attributes:
    updates: the updates of its parameters, a list with an entry for each variable.
    kept: the state, a list that begins with an entry for each fragment.
    in_flight: with a delay, what each fragment has in flight.
    participation: the extra arg, checked; or None.
    has_begun: whether a step has been taken, or is being taken.
    policy: the effect of exchanges on the inner state, or None.
    arrived: a record of the exchanges of this step, or None.
    restarts: whether one of them has replaced parameters that were not finite.
  """

  def __init__(
    self, wrapper, names, rule, workers, params, state, participation, has_begun, policy
  ):
    self.wrapper, self.names, self.rule, self.workers = wrapper, names, rule, workers
    self.participation, self.has_begun = participation, has_begun
    self.variables, self.treedef = jax.tree.flatten(params)
    self.kept = list(state.kept)
    self.in_flight = list(state.in_flight or [None] * len(self.kept))
    self.policy, self.arrived = policy, policy and Arrived.nothing()
    self.restarts = None if state.restarts is None else jnp.zeros_like(state.restarts)

  def take_updates(self, updates):
    """Stores the updates of the inner step; None: no step is taken, and all updates are zero."""
    if updates is not None:
      self.updates = self.treedef.flatten_up_to(updates)
    else:
      flags = map(_numerics.is_inexact, self.variables)
      self.updates = [jnp.zeros_like(x) if f else None for x, f in zip(self.variables, flags)]

  def pulled(self, plan, updates):
    """The inner optimizer's input for these updates."""
    column = self.treedef.flatten_up_to(updates)
    for fragment in plan:
      own, xs = self._updates_of(fragment, column)
      part = fragment.part(own)
      pulled = self.rule.pull(part, fragment.part(xs), self.kept[fragment.number])
      if pulled is not part:
        fragment.with_updates(column).write(column, fragment.with_part(own, pulled))
    return self.treedef.unflatten(column)

  def weighed(self, of_call, is_finite, moved):
    """The workers, with this one's weight in an exchange."""
    participation, exchanges = of_call

    @functools.cache
    def weigh():
      return _participation.weight(self.wrapper, self.names, participation, is_finite(), moved)

    group = dataclasses.replace(self.workers, exchanges=exchanges)
    return dataclasses.replace(group, weigh=weigh, is_weighed=participation is not None)

  def do_if(self, predicate, fragment, what):
    """Calls `what` (`exchange`, `send` or `arrive`) for a fragment if it is due."""
    if not fragment.variables:
      return
    counter, axes = "the state's step counter", frozenset(self.names)
    _axes.require_equal(predicate, self.wrapper, counter, axes=axes)
    number = fragment.number
    own, xs = self._updates_of(fragment, self.updates, widen=True)

    def of_part(carried, params, rule, of_call):
      # A variable is split only when it is exchanged, not in every step.
      own, *others = carried
      part = fragment.part(own)
      part, *others = what((part, *others), fragment.part(params), rule, of_call)
      return fragment.with_part(own, part), *others

    carried = own, self.kept[number], self.in_flight[number], self.arrived, self.restarts
    # Operands, because a branch that is differentiated cannot close over traced values.
    of_call = self.participation, self.workers.exchanges
    changed = _branches.apply_if(
      predicate, of_part, carried, xs, self.rule, of_call, wrapper=self.wrapper
    )
    # An exchange decided by the caller has passed through no branch that would have aligned types.
    own, self.kept[number], self.in_flight[number], *record = _axes.vary_like(changed, carried)
    self.arrived, self.restarts = record
    fragment.with_updates(self.updates).write(self.updates, own)

  def exchange(self, carried, params, rule, of_call):
    """What is sent arrives at once."""
    updates, kept, in_flight, *record = carried
    moved, is_finite = self.moved(updates, params)
    workers = self.weighed(of_call, is_finite, moved)
    new_kept, sent = rule.send(moved, params, kept, workers)
    ends, new_kept = rule.merge(moved, params, sent, new_kept, workers)
    _check_rule(rule, kept=(kept, new_kept), moved=(moved, ends))
    record = self.recorded(record, rule, sent, is_finite)
    return _updates_to(ends, params, updates), new_kept, in_flight, *record

  def send(self, carried, params, rule, of_call):
    """Stores what is sent until it arrives."""
    updates, kept, in_flight, *record = carried
    moved, is_finite = self.moved(updates, params)
    workers = self.weighed(of_call, is_finite, moved)
    new_kept, sent = rule.send(moved, params, kept, workers)
    _check_rule(rule, kept=(kept, new_kept), sent=(in_flight, sent))
    if self.has_begun is not True:
      new_kept, sent = _numerics.select(self.has_begun, (new_kept, sent), (kept, in_flight))
    return updates, new_kept, sent, *record

  def arrive(self, carried, params, rule, of_call):
    """Applies what was sent."""
    updates, kept, in_flight, *record = carried
    moved, is_finite = self.moved(updates, params)
    workers = dataclasses.replace(self.workers, exchanges=of_call[1])
    ends, new_kept = rule.merge(moved, params, in_flight, kept, workers)
    _check_rule(rule, kept=(kept, new_kept), moved=(moved, ends))
    record = self.recorded(record, rule, in_flight, is_finite)
    return _updates_to(ends, params, updates), new_kept, in_flight, *record

  def moved(self, updates, params):
    """This worker's parameters after its step, and a function to whether all are finite."""
    moved = _moved(updates, params)
    finite = functools.cache(lambda: _participation.is_finite(moved, self.names))
    return moved, finite

  def recorded(self, record, rule, sent, is_finite):
    """The record of the exchanges of this step, with one more."""
    arrived, restarts = record
    if restarts is not None:
      restarts |= ~is_finite() & rule.replaces(sent)
    return self.policy and arrived.after(sent), restarts

  def inner_state_after(self, arrivals, exchanges, inner, inner_state):
    """Applies the policy to the inner state if an exchange has changed the parameters."""
    if not self.policy:
      return inner_state
    has_arrived = functools.reduce(operator.or_, arrivals)
    params = self.treedef.unflatten(self.variables)
    # Added where they are needed.
    moves = params, self.treedef.unflatten(self.updates)

    def reset(inner_state, arrived, moves):
      fresh = begun(inner, _numerics.apply_updates(*moves))
      fresh = _numerics.select(arrived.goes, fresh, inner_state)
      return _axes.vary_like(fresh, inner_state)

    def average(carried, arrived, field):
      inner_state, restarts = carried
      mean = averaged(inner_state, arrived, self.names, params, field)
      # The mean of the others may have mended it.
      if restarts is not None:
        numbers = list(filter(_numerics.is_inexact, jax.tree.leaves(mean)))
        restarts &= ~_participation.is_finite(numbers, self.names)
      return _axes.vary_like((mean, restarts), carried)

    if self.policy == "reset":
      operands = self.arrived, moves
      return _branches.apply_if(has_arrived, reset, inner_state, *operands, wrapper=self.wrapper)
    for field, every in self.policy.items():
      is_turn = has_arrived
      if every > 1 and has_arrived is not False:
        is_turn = has_arrived & (exchanges % every == 0)
        what, axes = "the state's count of exchanges", frozenset(self.names)
        _axes.require_equal(is_turn, self.wrapper, what, axes=axes)
      of_field = functools.partial(average, field=field)
      inner_state, self.restarts = _branches.apply_if(
        is_turn, of_field, (inner_state, self.restarts), self.arrived, wrapper=self.wrapper
      )
    return inner_state

  def _updates_of(self, fragment, column, widen=False):
    """A fragment's updates, with zero for None, and its variables."""
    updates = list(column)
    for i in fragment.variables:
      u, x = updates[i], self.variables[i]
      if u is None:
        updates[i] = jnp.zeros_like(x)
      elif widen:
        # An update of a narrower dtype could not represent the move of an exchange.
        updates[i] = u.astype(_numerics.promote(u.dtype, x.dtype))
    return fragment.take(updates), fragment.take(self.variables)


def _moved(updates, params):
  """The worker's parameters: what `optax.apply_updates` would compute from the updates."""

  def moved(u, x):
    return _numerics.rounded(x.astype(u.dtype) + u, x.dtype)

  return jax.tree.map(moved, updates, params)


def _updates_to(ends, params, updates):
  """The updates that take the parameters to their ends."""

  # The worker has moved from x to y = x + u, which was rounded, and from y to its end e. Needed is
  # the update u' that moves x to e, where `optax.apply_updates` computes x + u'. The obvious u' is
  # u plus the move from y to e, but that ignores the rounding of y, and misses e by an ulp. The
  # difference e - x takes it into account. x is rounded here, because XLA may have left that out.
  # In half precision e is rounded first: a rounded difference could end beside the rounded e.
  def update_to(e, x, u):
    e, x = (_numerics.rounded(y, x.dtype).astype(e.dtype) for y in (e, x))
    return (e - x).astype(u.dtype)

  return jax.tree.map(update_to, ends, params, updates)


def _check_rule(rule, **pairs):
  """Raises unless a rule returns what it was given, in the same shapes."""
  for name, pair in pairs.items():
    expected, returned = (jax.tree.map(jnp.shape, tree) for tree in pair)
    if expected != returned:
      what = f"{type(rule).__name__}: send and merge must return {name!r}"
      raise ValueError(f"{what} in the shapes in which it was given, {expected}; got {returned}.")
