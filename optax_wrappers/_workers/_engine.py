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
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core import _axes, _branches, _checks, _numerics
from optax_wrappers._core._states import Workers, instances, require_same, require_state
from optax_wrappers._core._types import AxisName, AxisNames, Tree
from optax_wrappers._workers import _fragments, _participation
from optax_wrappers._workers._center import Divided, WorkerGroup
from optax_wrappers._workers._clock import Clock
from optax_wrappers._workers._exchange_state import ExchangeState
from optax_wrappers._workers._inner_state import (
  Arrived,
  Policy,
  averaged,
  begun,
  check_fields,
  restarted,
)
from optax_wrappers._workers._layout import Holder, holders


class Rule:
  """An algorithm: `init`, `pull`, `send`, `merge` and `idle`, each for one fragment.

  A rule is a frozen dataclass, registered with JAX as a pytree whose leaves are the numbers that
  may be traced. Its state, `kept`, is any pytree of fixed structure. Each worker has its own copy
  of a leaf, except those in a `Center`, which are shared.

  Attributes:
    name: what errors call the wrapper.
  """

  name: ClassVar[str] = "periodic_exchange"

  def init(self, params: Tree, workers: WorkerGroup) -> Any:
    """The initial state."""
    del params, workers
    return ()

  def pull(self, updates: Tree, params: Tree, kept: Any) -> Tree:
    """Changes the updates before the inner step, in every step."""
    del params, kept
    return updates

  def send(self, moved: Tree, params: Tree, kept: Any, workers: WorkerGroup) -> tuple[Any, Any]:
    """The exchange. All collectives of the rule are here, except `workers.whole` in `merge`.

    Args:
      moved: this worker's parameters after its step, in the dtype of the center.
      params: its parameters before the step, in their dtype.
      kept: the state. With `shard_center` a `Center` holds this worker's share.
      workers: the workers that synchronize; all that the rule sees of them. `workers.weight` is
        this worker's weight in the exchange: its `participation`, or 0 if `moved` holds a NaN or an
        infinity.

    Returns:
      The new state, and the input of `merge`.
    """
    raise NotImplementedError

  def merge(
    self, moved: Tree, params: Tree, sent: Any, kept: Any, workers: WorkerGroup
  ) -> tuple[Tree, Any]:
    """The worker's new parameters, and the state. With a delay `workers.weight` is None here."""
    raise NotImplementedError

  def replaces(self, sent: Any) -> Any:
    """Whether `merge` replaces the worker's parameters, whatever they were; a bool scalar.

    If they were not finite, the worker's inner state begins again."""
    del sent
    return False

  def idle(self, params: Tree) -> Any:
    """With a delay, the initial `sent`, before the first exchange: `merge` must not move the
    worker."""
    what = f"{type(self).__name__}: this rule has no delay"
    raise NotImplementedError(f"{what}, because it does not override Rule.idle.")


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of an exchange, for sums that are computed outside `update` (`_messages`).

  Attributes:
    wrapper: the name for errors.
    inner: each worker's optimizer.
    rule: the exchange rule.
    names: the axes of the workers.
    plan: a function from the parameters to the fragments.
    made_for: a function from the fragments to the arguments that a state records.
    policy: the effect of an exchange on the inner state, or None.
  """

  wrapper: str
  inner: optax.GradientTransformationExtraArgs
  rule: Rule
  names: AxisNames
  plan: Callable[[Tree], list[_fragments.Fragment]]
  made_for: Callable[[list[_fragments.Fragment]], Workers]
  policy: Policy


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
  clock: Clock,
  fragments: int | Tree = 1,
  delay: int = 0,
  shard_center: bool = False,
  policy: Policy = None,
  **arguments: Any,
) -> Exchanging:
  """An optimizer whose workers step alone with `inner`, and exchange by `rule` once a round.

  Args:
    wrapper: the name that an error gives.
    inner: each worker's optimizer.
    axis_name: the axis or axes of the workers; None: one worker.
    rule: what is exchanged.
    state_class: `ExchangeState`, or one of its subclasses.
    clock: when.
    fragments: how many, or a tree of the number of each variable's, or of each of its entries.
    delay: steps between what is sent and what arrives.
    shard_center: whether the center is divided over the workers.
    policy: what an exchange does to the inner state; None: nothing.
    **arguments: others that decide what the state holds: a state of other ones is an error.
  """
  inner, names = _checks.optimizer(wrapper, inner), _axes.axis_names(axis_name)
  workers = Divided(names, wrapper) if shard_center else WorkerGroup(names)
  _fragments.check(wrapper, fragments, clock.period, shard_center)

  def made_for(plan):
    forms = {"delay": delay > 0, "shard_center": shard_center}
    schedule = {"period": clock.communication_period, "plan": plan, "delay": delay}
    return Workers(names, tuple((_fragments.forms(plan) | forms | arguments).items()), schedule)

  def plan_of(params):
    return _fragments.plan(wrapper, params, fragments)

  def init_fn(params):
    plan = plan_of(params)
    leaves = jax.tree.leaves(params)
    held = [one.part(one.take(leaves)) for one in [*plan, *_fragments.others(params)]]
    first: dict[str, Any] = {"kept": tuple(_first_kept(rule, part, workers) for part in held)}
    if delay:
      first["countdown"] = jnp.zeros(len(plan), jnp.int32)  # nothing is in flight
      first["in_flight"] = tuple(map(rule.idle, held[: len(plan)]))
    inner_state = inner.init(params)
    check_fields(wrapper, policy, inner_state, params)
    if type(rule).replaces is not Rule.replaces:
      first["restarts"] = _axes.vary_with(jnp.zeros((), bool), params)
    return state_class(
      **clock.start(),
      **first,
      exchanges=jnp.zeros((), jnp.int32),
      workers=made_for(plan),
      inner_state=inner_state,
    )

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
    asked = _asked(wrapper, clock, exchange, arrival, is_step, len(plan), delay)
    counted, turn = clock.advance(state) if is_step else ({}, None)
    participation = _checks.weight(wrapper, participation, name="participation")
    # What is sent before the first step would arrive after it, and take it back.
    has_begun = is_step or state.step > 0
    of_call = participation, has_begun, policy
    group = dataclasses.replace(workers, exchanges=state.exchanges, num_fragments=len(plan))
    worker = _Worker(wrapper, names, rule, group, params, state, *of_call)
    inner_state = state.inner_state
    if is_step:
      updates = _checks.inexact(wrapper, updates)
      _checks.same_shapes(wrapper, updates, params)
      pulled = worker.pulled(plan, updates)
      _check_owners(wrapper, inner_state, names)
      if state.restarts is not None:
        again = restarted(inner, inner_state, params, state.restarts)
        inner_state = _axes.vary_like(again, inner_state)
      updates, stepped = inner.update(pulled, inner_state, params, **extra_args)
      inner_state = _axes.vary_like(stepped, inner_state)  # a constant in it may be new
    worker.take_updates(updates)

    turns, arrivals, countdown = [], [], []
    for fragment in plan:
      # The predicates depend only on counters that are equal on all workers, and on the caller's
      # arguments. No branch may depend on values that differ between workers: `_clock` says why.
      is_turn = fragment.number in asked.exchange if asked else fragment.is_turn(*turn)
      turns.append(jnp.asarray(is_turn, jnp.int32))
      if not delay:
        worker.do_if(is_turn, fragment, worker.exchange)
        arrivals.append(is_turn)
        continue
      left = state.countdown[fragment.number]
      # No later than the next send: the caller may have sent at another time than the counter
      # would.
      is_due = fragment.number in asked.arrival if asked else (left == 1) | (is_turn & (left > 0))
      worker.do_if(is_due, fragment, worker.arrive)
      worker.do_if(is_turn, fragment, worker.send)
      arrivals.append(is_due)
      countdown.append(_next_left(left, is_step, is_due, is_turn, delay))
    counted["exchanges"] = _numerics.saturating_add(state.exchanges, sum(turns))
    inner_state = worker.inner_state_after(arrivals, counted["exchanges"], inner, inner_state)
    if state.restarts is not None:
      counted["restarts"] = worker.restarts if is_step else state.restarts | worker.restarts
    if delay:
      counted |= {"countdown": jnp.stack(countdown), "in_flight": tuple(worker.in_flight)}
    return worker.treedef.unflatten(worker.updates), state.replace(
      **counted, inner_state=inner_state, kept=tuple(worker.kept)
    )

  tx = Exchanging(init_fn, update_fn)
  tx.parts = Parts(wrapper, inner, rule, names, plan_of, made_for, policy)
  return tx


def _first_kept(rule, params, workers):
  """A rule's initial state, in which each worker's own leaves are typed as that."""
  kept = rule.init(params, workers)

  def typed(x, holder):
    return _axes.vary_with(x, params) if holder is Holder.OWN else x

  return jax.tree.map(typed, kept, holders(kept))


def _next_left(left, is_step, is_due, is_turn, delay):
  """The steps until what a fragment has sent arrives, after this call; 0 if nothing is in
  flight."""
  if is_step:  # without `arrival` it stays due
    left = jnp.where(left > 1, left - 1, left)
  return jnp.where(is_turn, delay, jnp.where(is_due, 0, left))


class _Asked(NamedTuple):
  """The caller's decision: numbers of fragments."""

  exchange: frozenset[int]
  arrival: frozenset[int]


def _asked(wrapper, clock, exchange, arrival, is_step, num_fragments, delay):
  """The caller's decision; None: the counter decides."""
  if arrival is not None and not delay:
    raise ValueError(f"{wrapper}: arrival needs a delay above 0. Pass exchange alone.")
  if exchange is None and arrival is None:
    if not is_step:
      call = "update(None, state, params, exchange=True)"
      raise ValueError(f"{wrapper}: updates is None, and exchange must say of what: {call}.")
    return _Asked(frozenset(), frozenset()) if clock.is_callers else None
  given = ("exchange", exchange), ("arrival", arrival)
  return _Asked(*(_numbers(wrapper, name, value, num_fragments) for name, value in given))


def _numbers(wrapper, name, value, num_fragments):
  """The numbers of the fragments that the caller chose."""
  if value is None or isinstance(value, bool | np.bool_):
    return frozenset(range(num_fragments) if value else ())  # True: all of them
  if not isinstance(value, list | tuple | set | frozenset | range):
    mend = "It cannot be traced: name it in static_argnames of jax.jit."
    what = f"{wrapper}: {name} must be a Python bool, or the numbers of fragments"
    raise TypeError(f"{what}; got {value!r}. {mend}")
  for number in value:
    if _checks.integer(wrapper, name, number, minimum=0) >= num_fragments:
      what = f"{wrapper}: {name} must hold numbers of fragments below {num_fragments}"
      raise ValueError(f"{what}, got {number}.")
  return frozenset(map(int, value))


class _Worker:
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
    moves = params, self.treedef.unflatten(self.updates)  # added where they are needed

    def reset(inner_state, arrived, moves):
      fresh = begun(inner, _numerics.apply_updates(*moves))
      fresh = _numerics.select(arrived.goes, fresh, inner_state)
      return _axes.vary_like(fresh, inner_state)

    def average(carried, arrived, field):
      inner_state, restarts = carried
      mean = averaged(inner_state, arrived, self.names, params, field)
      if restarts is not None:  # the mean of the others may have mended it
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
    own = list(column)
    for i in fragment.variables:
      u, x = own[i], self.variables[i]
      if u is None:
        own[i] = jnp.zeros_like(x)
      elif widen:
        # An update of a narrower dtype could not represent the move of an exchange.
        own[i] = u.astype(_numerics.promote(u.dtype, x.dtype))
    return fragment.take(own), fragment.take(self.variables)


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
    given, returned = (jax.tree.map(jnp.shape, tree) for tree in pair)
    if given != returned:
      what = f"{type(rule).__name__}: send and merge must return {name!r}"
      raise ValueError(f"{what} in the shapes in which it was given, {given}; got {returned}.")


# Requirements on workers.


def _check_owned(wrapper, params, names):
  # If types are not tracked, nothing distinguishes a replica from a worker's own copy; under vmap
  # both are right, so no check is needed.
  known = set(_axes.tracked(names))
  for path, leaf in jax.tree.leaves_with_path(params) if known else ():
    equal = sorted(map(str, known - _axes.varying(leaf)))
    if equal:
      what = f"{wrapper}: params{jax.tree_util.keystr(path)} is equal on all workers of {equal}"
      mend = "Pass stack_workers(params, num_workers) with PartitionSpec(axis_name)."
      raise ValueError(f"{what}, but every worker owns its parameters. {mend}")


def _check_owners(wrapper, inner_state, names):
  """Raises if workers inside would share a center that differs between them, undetected."""
  # Workers inside, over axes that this exchange does not name: pods of workers, each with a center.
  inside = instances(inner_state, ExchangeState)
  named = {name for x in inside for name in x.workers.names if name not in names}
  others = tuple(filter(_axes.is_bound, named))  # `stacked_workers` binds its own axis
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
  center = state.center  # assembled from all fragments, so only if it is needed
  leaves = [] if center is None else jax.tree.structure(params).flatten_up_to(center)
  for (path, p), c in zip(jax.tree.leaves_with_path(params), leaves):
    others = sorted(map(str, _axes.varying(p) - _axes.varying(c) - set(names)))
    if others:
      what = f"{wrapper}: state.center{jax.tree_util.keystr(path)} is one for all shards of"
      mend = "Name all the axes in axis_name, or give the center a PartitionSpec over these."
      raise ValueError(f"{what} {others}, but params differ between them. {mend}")
