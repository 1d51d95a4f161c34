"""One worker in one step: its updates and its state, which exchanges change."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _branches, _numerics
from optax_wrappers._core._states import Workers
from optax_wrappers._core._types import AxisNames, Tree
from optax_wrappers._workers import _participation
from optax_wrappers._workers._fragments import Fragment
from optax_wrappers._workers._inner_state import Arrived, Policy, averaged, begun
from optax_wrappers._workers._rule import Rule


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of an exchange, also for sums that are computed outside `update` (`_messages`).

  Attributes:
    wrapper: the name for errors.
    names: the axes of the workers.
    plan: from the parameters to the fragments.
    made_for: from the fragments to the arguments that a state records.
    policy: the effect of an exchange on the inner state, or None.
  """

  wrapper: str
  inner: optax.GradientTransformationExtraArgs
  rule: Rule
  names: AxisNames
  plan: Callable[[Tree], list[Fragment]]
  made_for: Callable[[list[Fragment]], Workers]
  policy: Policy


class _Turn(NamedTuple):
  """What an exchange of one fragment changes.

  Attributes:
    updates: of its variables.
    kept: the rule's state.
    in_flight: with a delay, what has been sent.
    arrived: with a policy, a record of the exchanges of this step.
    restarts: whether one of them has replaced parameters that were not finite, if a rule replaces.
  """

  updates: Tree
  kept: Any
  in_flight: Any
  arrived: Arrived | None
  restarts: jax.Array | None


class Worker:
  """One worker in one step; `kept`, `in_flight` and `updates` are lists of what a `_Turn` has.

  Attributes:
    updates: an entry for each variable.
    participation: the extra arg, checked; or None.
    has_begun: whether a step has been taken, or is being taken.
  """

  updates: list[Any]

  def __init__(self, parts, workers, params, state, participation, has_begun):
    self.parts, self.workers = parts, workers
    self.participation, self.has_begun = participation, has_begun
    self.variables, self.treedef = jax.tree.flatten(params)
    self.kept = list(state.kept)
    self.in_flight = list(state.in_flight or [None] * len(self.kept))
    self.arrived = parts.policy and Arrived(jnp.zeros((), bool), jnp.zeros((), jnp.float32))
    self.restarts = jax.tree.map(jnp.zeros_like, state.restarts)

  def pulled(self, plan, updates):
    """The inner optimizer's input for these updates."""
    column = self.treedef.flatten_up_to(updates)
    for fragment in plan:
      own, xs = self._updates_of(fragment, column)
      part = fragment.part(own)
      pulled = self.parts.rule.pull(part, fragment.part(xs), self.kept[fragment.number])
      if pulled is not part:
        fragment.write(column, fragment.with_part(own, pulled))
    return self.treedef.unflatten(column)

  def exchange_if(self, predicate, fragment, *, sends=False, arrives=False):
    """Sends a fragment, or lets arrive what was sent of it, or both at once, if it is due."""
    if not fragment.variables:
      return
    wrapper, number = self.parts.wrapper, fragment.number
    what, axes = "the state's step counter", frozenset(self.parts.names)
    _axes.require_equal(predicate, wrapper, what, axes=axes)
    own, xs = self._updates_of(fragment, self.updates, widen=True)

    def of_part(turn, params, rule, of_call):
      # A variable is split only when it is exchanged, not in every step.
      part = turn._replace(updates=fragment.part(turn.updates))
      part = self._exchanged(part, fragment.part(params), rule, of_call, sends, arrives)
      return part._replace(updates=fragment.with_part(turn.updates, part.updates))

    turn = _Turn(own, self.kept[number], self.in_flight[number], self.arrived, self.restarts)
    # Operands, because a branch that is differentiated cannot close over traced values.
    operands = xs, self.parts.rule, (self.participation, self.workers.exchanges)
    changed = _branches.apply_if(predicate, of_part, turn, *operands, wrapper=wrapper)
    # An exchange decided by the caller has passed through no branch that would have aligned types.
    turn = _axes.vary_like(changed, turn)
    self.kept[number], self.in_flight[number] = turn.kept, turn.in_flight
    self.arrived, self.restarts = turn.arrived, turn.restarts
    fragment.write(self.updates, turn.updates)

  def _exchanged(self, turn, params, rule, of_call, sends, arrives):
    names, (participation, exchanges) = self.parts.names, of_call
    moved = jax.tree.map(_moved, turn.updates, params)
    is_finite = functools.cache(lambda: _participation.is_finite(moved, names))
    workers = dataclasses.replace(self.workers, exchanges=exchanges)
    kept, sent = turn.kept, turn.in_flight

    def weigh():
      return _participation.weight(self.parts.wrapper, names, participation, is_finite(), moved)

    if sends:
      is_weighed = participation is not None
      workers = dataclasses.replace(workers, weigh=weigh, is_weighed=is_weighed)
      kept, sent = rule.send(moved, params, kept, workers)
    if not arrives:
      _check_rule(rule, kept=(turn.kept, kept), sent=(turn.in_flight, sent))
      if self.has_begun is not True:
        before = turn.kept, turn.in_flight
        kept, sent = _numerics.select(self.has_begun, (kept, sent), before)
      return turn._replace(kept=kept, in_flight=sent)
    ends, kept = rule.merge(moved, params, sent, kept, workers)
    _check_rule(rule, kept=(turn.kept, kept), moved=(moved, ends))
    arrived, restarts = turn.arrived, turn.restarts
    if arrived is not None:
      arrived = Arrived(arrived.goes | sent.goes, sent.weight.astype(jnp.float32))
    if restarts is not None:
      restarts |= ~is_finite() & rule.replaces(sent)
    updates = jax.tree.map(_update_to, ends, params, turn.updates)
    return turn._replace(updates=updates, kept=kept, arrived=arrived, restarts=restarts)

  def inner_state_after(self, arrivals, exchanges, inner_state):
    """Applies the policy to the inner state if an exchange has changed the parameters."""
    wrapper, names, policy = self.parts.wrapper, self.parts.names, self.parts.policy
    if not policy:
      return inner_state
    has_arrived = functools.reduce(operator.or_, arrivals)
    params = self.treedef.unflatten(self.variables)

    def reset(inner_state, arrived, moves):
      fresh = begun(self.parts.inner, _numerics.apply_updates(*moves))
      return _axes.vary_like(_numerics.select(arrived.goes, fresh, inner_state), inner_state)

    def average(carried, arrived, field):
      inner_state, restarts = carried
      mean = averaged(inner_state, arrived, names, params, field)
      # The mean of the others may have mended it.
      if restarts is not None:
        restarts &= ~_participation.is_finite(mean, names)
      return _axes.vary_like((mean, restarts), carried)

    if policy == "reset":
      # Added where they are needed.
      moves = params, self.treedef.unflatten(self.updates)
      return _branches.apply_if(
        has_arrived, reset, inner_state, self.arrived, moves, wrapper=wrapper
      )
    for field, every in policy.items():
      is_turn = has_arrived
      if every > 1 and has_arrived is not False:
        is_turn = has_arrived & (exchanges % every == 0)
        what, axes = "the state's count of exchanges", frozenset(names)
        _axes.require_equal(is_turn, wrapper, what, axes=axes)
      of_field = functools.partial(average, field=field)
      carried = inner_state, self.restarts
      inner_state, self.restarts = _branches.apply_if(
        is_turn, of_field, carried, self.arrived, wrapper=wrapper
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


def _moved(u, x):
  """A parameter after its update, as `optax.apply_updates` would compute it."""
  return _numerics.rounded(x.astype(u.dtype) + u, x.dtype)


def _update_to(e, x, u):
  """The update that takes a parameter to its end, in the dtype of the update that it had."""
  # The worker has moved from x to y = x + u, which was rounded, and from y to its end e. Needed is
  # the update u' that moves x to e, where `optax.apply_updates` computes x + u'. The obvious u' is
  # u plus the move from y to e, but that ignores the rounding of y, and misses e by an ulp. The
  # difference e - x takes it into account. x is rounded here, because XLA may have left that out.
  # In half precision e is rounded first: a rounded difference could end beside the rounded e.
  e, x = (_numerics.rounded(y, x.dtype).astype(e.dtype) for y in (e, x))
  return (e - x).astype(u.dtype)


def _check_rule(rule, **pairs):
  """Raises unless a rule returns what it was given, in the same shapes."""
  for name, pair in pairs.items():
    expected, returned = (jax.tree.map(jnp.shape, tree) for tree in pair)
    if expected != returned:
      what = f"{type(rule).__name__}: send and merge must return {name!r}"
      raise ValueError(f"{what} in the shapes in which it was given, {expected}; got {returned}.")
