"""The engine of exchanges: workers that step alone and every so often exchange with each other.

The engine knows *when* an exchange comes and *over which variables*: a `Clock` counts the steps of
a round, and a `Fragment` is a set of variables that are exchanged together, at a step of the round
of their own. A `Rule` knows *what* is exchanged. Its exchange has two halves, `send` and `merge`,
so that what is sent may arrive some steps later. Whether each worker holds the whole center or a
share of it is for `_center.WorkerGroup`. A step of a worker is

    updates <- rule.pull(updates)              in every step
    x <- x + inner(updates)
    for each fragment whose turn it is:
      kept, sent <- rule.send(x, kept)         the exchange itself
      x, kept <- rule.merge(x, sent, kept)     at once, or some steps later with a delay

With a delay, what was sent earlier is merged before more is sent. What a rule keeps of each
variable lies in the state as trees of the parameters' structure. What it is given of a fragment are
such trees too, with None for the variables of other fragments, which `jax.tree.map` passes over.
"""

import dataclasses
import functools
import operator
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core import _axes, _branches, _checks, _numerics
from optax_wrappers._core._state import Workers, WrapperState, instances, require_made_for
from optax_wrappers._core._types import AxisName, Tree
from optax_wrappers._workers import _center, _fragments, _participation
from optax_wrappers._workers._center import WorkerGroup
from optax_wrappers._workers._clock import Clock

Kept: TypeAlias = dict[str, Any]
"""By the name of a state's field: a tree of the parameters' structure, or None. For a field that
the rule lists in `fragment_fields`: anything, one for each fragment."""


class Rule:
  """What an algorithm does: `init`, `pull`, `send`, `merge` and `idle`.

  `pull` is of all variables and of every step, the others are of a fragment.

  A rule is a frozen dataclass, registered with JAX as a pytree whose leaves are the numbers that
  may be traced. What it keeps for each variable under the name "center" is laid out by `workers`.

  Attributes:
    fields: names in `Kept` that hold a value for each variable.
  """

  fields: ClassVar[frozenset[str]] = frozenset()

  @property
  def fragment_fields(self) -> frozenset[str]:
    """Names in `Kept` that hold one value for each fragment, as the state of an outer optimizer."""
    return frozenset()

  def init(self, params: Tree, workers: WorkerGroup) -> Kept:
    """What the state holds of a fragment at first, None for a field that is not used."""
    del params, workers
    return {}

  def pull(self, updates: Tree, params: Tree, kept: Kept) -> Tree:
    """What becomes of the updates before the inner step, of all variables and in every step.

    `kept` has no `fragment_fields` here.
    """
    del params, kept
    return updates

  def send(self, moved: Tree, params: Tree, kept: Kept, workers: WorkerGroup) -> tuple[Kept, Any]:
    """The exchange. The rule's collectives are in here, but for `workers.gather` in `merge`.

    Args:
      moved: where this worker is after its step, in the dtype of the center.
      params: where it was before, in the parameters' dtype.
      kept: what the state holds. With `shard_center` its "center" is this worker's share.
      workers: those that exchange. They read, sum and divide what is kept as "center":
        `workers.sum(moved)` has the shape of what is kept, share or whole, and `workers.gather`
        that of the parameters. `workers.weight` is this worker's weight in the exchange: its
        `participation`, or 0 if `moved` holds a NaN or an infinity. `workers.is_weighed` says
        whether a `participation` was given.

    Returns:
      What the state holds from now on, every name in `kept`, and what `merge` needs.
    """
    raise NotImplementedError

  def merge(
    self, moved: Tree, params: Tree, sent: Any, kept: Kept, workers: WorkerGroup
  ) -> tuple[Tree, Kept]:
    """Where this worker goes, and what the state holds then."""
    raise NotImplementedError

  def idle(self, params: Tree) -> Any:
    """With a delay, the `sent` of before the first exchange: `merge` leaves the worker there."""
    raise NotImplementedError

  def __init_subclass__(cls, **kwargs: Any) -> None:
    super().__init_subclass__(**kwargs)
    for name, now in _RENAMED.items():
      if name in cls.__dict__:
        raise TypeError(f"{cls.__name__}: a rule has no {name!r} any more: {now}.")


# Names of earlier versions, and what says the same now.
_RENAMED = {
  "keep": "it is init",
  "nothing_sent": "it is idle",
  "at": "what depends on the number of workers is asked for in pull, send and merge",
  "extra_args": "workers.weight in send is the participation",
}


def exchanging(
  wrapper: str,
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  rule: Rule,
  state_class: Any,
  *,
  clock: Clock,
  fragments: Any,
  delay: int,
  shard_center: bool,
  policy: Any = None,
  **arguments: Any,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer whose workers step alone with `inner`, and exchange by `rule` once a round.

  Args:
    wrapper: the name that an error gives.
    inner: each worker's optimizer.
    axis_name: the axis or axes over which the workers lie; None: one worker.
    rule: what is exchanged.
    state_class: the state, a `CenterState` with the fields `inner_state`, those of the clock and
      those that the rule keeps, or `kept` for these. With a delay it has `countdown`, which is
      shared, and `in_flight`, which is a worker's own.
    clock: when.
    fragments: how many, or a tree of numbers; as `local_steps` describes it.
    delay: steps between what is sent and what arrives.
    shard_center: whether the center is divided over the workers.
    policy: an `InnerStatePolicy`; None: an exchange does nothing to the inner state.
    **arguments: others that decide what the state holds: a state of other ones is an error.
  """
  inner, names = _checks.optimizer(wrapper, inner), _axes.axis_names(axis_name)
  workers = _center.laid_out(wrapper, names, shard_center)
  _fragments.check(wrapper, fragments, clock.period)
  declared = {field.name for field in dataclasses.fields(state_class)}
  fields = _Fields(rule, workers, bool(delay), declared)
  # A state may have room for both forms of a center, of which one at most is used.
  forms = dict.fromkeys(declared & {_center.Whole.field, _center.Divided.field})

  def made_for(plan):
    forms = {"fragments": len(plan), "delay": delay > 0, "shard_center": shard_center}
    return Workers(names, (*forms.items(), *arguments.items()))

  def init_fn(params):
    plan = _fragments.plan(wrapper, params, fragments)
    first = forms | clock.start() | fields.start(params, plan)
    if delay:
      first["countdown"] = jnp.zeros(len(plan), jnp.int32)
    return state_class(**first, workers=made_for(plan), inner_state=inner.init(params))

  def update_fn(
    updates, state, params=None, *, exchange=None, arrival=None, participation=None, **extra_args
  ):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(names, wrapper)
    plan = _fragments.plan(wrapper, params, fragments)
    require_made_for(wrapper, state, state_class, "workers", made_for(plan))
    _check_owned(wrapper, params, names)
    _check_center(wrapper, params, getattr(state, "center", None), names)
    is_step = updates is not None
    asked = _asked(wrapper, exchange, arrival, is_step, len(plan), delay)
    counted, turn = clock.advance(state) if is_step else ({}, None)
    who = _participation.given(wrapper, participation), is_step or state.step > 0
    worker = _Worker(wrapper, names, rule, workers, params, fields.read(state, params), who, policy)
    inner_state = state.inner_state
    if not is_step:
      worker.take_updates(None)
    else:
      pulled = worker.pulled(_of_params(wrapper, updates, params))
      updates, inner_state = _inner_step(
        wrapper, inner, names, pulled, inner_state, params, extra_args
      )
      worker.take_updates(updates)

    arrivals, countdown = [], []
    for fragment in plan:
      # The predicates are made of counters that are one value for all workers, and of what the
      # caller says. No branch may depend on what a worker knows for itself: `_clock` says why.
      is_turn = fragment.number in asked.exchange if asked else fragment.is_turn(*turn)
      if not delay:
        worker.exchange_if(is_turn, fragment, _exchange)
        arrivals.append(is_turn)
        continue
      left = state.countdown[fragment.number]
      # At latest at the next send: the caller may have sent at another time than the counter would.
      is_due = fragment.number in asked.arrival if asked else (left == 1) | (is_turn & (left > 0))
      worker.exchange_if(is_due, fragment, _arrive)
      worker.exchange_if(is_turn, fragment, _send)
      arrivals.append(is_due)
      countdown.append(_next_left(left, is_step, is_due, is_turn, delay))
    if policy:
      has_arrived = functools.reduce(operator.or_, arrivals)
      inner_state = worker.inner_state_if(has_arrived, inner, inner_state)
    if delay:
      counted["countdown"] = jnp.stack(countdown)
    return worker.tree(worker.updates), state.replace(
      **counted, inner_state=inner_state, **fields.write(worker.kept, params)
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _next_left(left, is_step, is_due, is_turn, delay):
  """The steps until what a fragment has sent arrives, after this call; 0: nothing is on its way."""
  if is_step:  # what nobody lets arrive stays due
    left = jnp.where(left > 1, left - 1, left)
  return jnp.where(is_turn, delay, jnp.where(is_due, 0, left))


class _Asked(NamedTuple):
  """What the caller has decided: numbers of fragments."""

  exchange: frozenset[int]
  arrival: frozenset[int]


def _asked(wrapper, exchange, arrival, is_step, num_fragments, delay):
  """What the caller has decided; None: the counter decides."""
  if arrival is not None and not delay:
    raise ValueError(
      f"{wrapper}: arrival needs a delay above 0; without one what is sent arrives in the same"
      " step. Leave it out, and pass exchange alone."
    )
  if exchange is None and arrival is None:
    if not is_step:
      raise ValueError(
        f"{wrapper}: updates is None, which is an exchange without a step, and exchange must say of"
        " what: update(None, state, params, exchange=True)."
      )
    return None
  given = ("exchange", exchange), ("arrival", arrival)
  return _Asked(*(_numbers(wrapper, name, value, num_fragments) for name, value in given))


def _numbers(wrapper, name, value, num_fragments):
  """The numbers of the fragments that a caller names."""
  everything = range(num_fragments)
  if value is None or isinstance(value, bool | np.bool_):
    return frozenset(everything if value else ())
  if isinstance(value, list | tuple | set | frozenset | range):
    for number in value:
      _checks.integer(wrapper, name, number, minimum=0)
      if number >= num_fragments:
        raise ValueError(
          f"{wrapper}: {name} must hold numbers of fragments below {num_fragments}, got {number}."
        )
    return frozenset(map(int, value))
  raise TypeError(
    f"{wrapper}: {name} must be a Python bool, or the numbers of the fragments to exchange, the"
    f" same on all workers; got {value!r} of type {type(value).__name__}. It decides the shape of"
    " the program, and so cannot be traced: name it in static_argnames of jax.jit, or bind it with"
    " functools.partial."
  )


class _Fields:
  """What a rule keeps, as the fields of a state; in a step as lists, an entry for each variable."""

  def __init__(self, rule, workers, has_delay, declared):
    self.rule, self.workers, self.has_delay, self.declared = rule, workers, has_delay, declared
    self.of_fragments = rule.fragment_fields | ({"in_flight"} if has_delay else set())
    self.names = sorted(rule.fields | self.of_fragments)

  def _field(self, name):
    return self.workers.field if name == "center" else name

  def start(self, params, plan):
    """The fields at first."""
    leaves, treedef = jax.tree.flatten(params)
    kept: dict[str, Any] = dict.fromkeys(self.names)
    # Whole numbers and the like take no part, and lie in the trees as they are.
    others = _fragments.others(leaves)
    for fragment in (*plan, others):
      held = fragment.take(leaves, treedef)
      own = self.rule.init(held, self.workers)
      if self.has_delay:
        own["in_flight"] = self.rule.idle(held)
      for name, value in own.items():
        if value is None:
          continue
        if name not in self.of_fragments:
          kept[name] = kept[name] or [None] * len(leaves)
          fragment.write(kept[name], value, treedef)
        elif fragment is not others:
          kept[name] = [*(kept[name] or []), value]
    return self.write(kept, params)

  def write(self, kept, params):
    """The fields that hold what is kept."""
    treedef = jax.tree.structure(params)
    fields = {}
    for name, column in kept.items():
      if column is not None:
        is_tree = name not in self.of_fragments
        column = treedef.unflatten(column) if is_tree else tuple(column)
      fields[self._field(name)] = column
    # What a state class has no field for lies together in one.
    own = {name: fields.pop(name) for name in list(fields) if name not in self.declared}
    return fields | ({"kept": own} if own else {})

  def read(self, state, params):
    """What is kept, from the fields of a state."""
    treedef: Any = jax.tree.structure(params)
    kept = {}
    for name in self.names:
      field = self._field(name)
      column = getattr(state, field) if field in self.declared else state.kept[field]
      if column is not None:
        is_tree = name not in self.of_fragments
        column = treedef.flatten_up_to(column) if is_tree else list(column)
      kept[name] = column
    return kept


class _Worker:
  """One worker in one step. Lists have an entry for each variable.

  Attributes:
    updates: what it will be told to add to its parameters, a list.
    kept: what is kept, in lists with an entry for each variable or each fragment.
    who: its participation, and whether a step has been taken.
    policy: what exchanges do to the inner state, or None.
    arrived: what it is to know of the exchanges of this step, or None.
  """

  def __init__(self, wrapper, names, rule, workers, params, kept, who, policy):
    self.wrapper, self.names, self.rule, self.workers = wrapper, names, rule, workers
    self.who = who
    self.variables, self.treedef = jax.tree.flatten(params)
    self.kept = kept
    self.policy, self.arrived = policy, policy and policy.start()

  def after(self, arrived, sent):
    """What the policy is to know when this has arrived as well."""
    return self.policy and self.policy.after(arrived, sent)

  def tree(self, column):
    """A list as a tree of the parameters' structure."""
    return self.treedef.unflatten(column)

  def take_updates(self, updates):
    """Takes the updates of the inner step; None: no step is taken, all of them are zero."""
    if updates is None:
      self.updates = [
        jnp.zeros_like(x) if _numerics.is_inexact(x) else None for x in self.variables
      ]
    else:
      self.updates = self.treedef.flatten_up_to(updates)

  def pulled(self, updates):
    """What the inner optimizer is given for these updates."""
    column = self.treedef.flatten_up_to(updates)
    everything = _fragments.everything(column)
    kept = self._trees_of(everything)
    xs = everything.take(self.variables, self.treedef)
    own = self.rule.pull(everything.take(column, self.treedef), xs, kept)
    everything.write(column, own, self.treedef)
    return self.tree(column)

  def weighed(self, who, moved):
    """The workers, of whom this one's weight in an exchange is known."""

    @functools.cache
    def weigh():
      return _participation.weight(self.wrapper, self.names, *who, moved)

    return dataclasses.replace(self.workers, weigh=weigh, is_weighed=who[0] is not None)

  def exchange_if(self, is_turn, fragment, what):
    """Does to a fragment, if it is its turn, one of `_exchange`, `_send` and `_arrive`."""
    taking_part = fragment.with_updates(self.updates)
    if taking_part.variables:
      # What is kept for a whole fragment holds all its variables. There those without an update
      # take part with an update of zero, and elsewhere they take none.
      is_kept_whole = any(map(self._is_of_fragments, self.kept))
      self._apply_if(is_turn, fragment if is_kept_whole else taking_part, what)

  def inner_state_if(self, has_arrived, inner, inner_state):
    """What the policy makes of the inner state, if an exchange has changed the parameters."""

    def apply(inner_state, ends, arrived):
      return _axes.vary_like(
        self.policy.apply(inner_state, ends, arrived, inner, self.names), inner_state
      )

    ends = _numerics.apply_updates(self.tree(self.variables), self.tree(self.updates))
    return _branches.apply_if(
      has_arrived, apply, inner_state, ends, self.arrived, wrapper=self.wrapper
    )

  def _apply_if(self, predicate, fragment, what):
    """Writes what `what` makes of a fragment's updates, and of what is kept of it."""
    self._require_equal(predicate)
    own = list(self.updates)
    for i in fragment.variables:
      u, x = own[i], self.variables[i]
      # An update in a narrower dtype could not say where an exchange takes the parameters.
      own[i] = jnp.zeros_like(x) if u is None else u.astype(_numerics.promote(u.dtype, x.dtype))
    xs = fragment.take(self.variables, self.treedef)
    carried = fragment.take(own, self.treedef), self._kept_of(fragment), self.arrived
    changed = _branches.apply_if(
      predicate, what(self), carried, xs, self.rule, self.who, wrapper=self.wrapper
    )
    # What the caller decides has gone through no branch that would have aligned the types.
    own, kept, self.arrived = _axes.vary_like(changed, carried)
    fragment.with_updates(self.updates).write(self.updates, own, self.treedef)
    for name, value in kept.items():
      if self.kept[name] is None:
        continue
      if self._is_of_fragments(name):
        self.kept[name][fragment.number] = value
      else:
        fragment.write(self.kept[name], value, self.treedef)

  def _kept_of(self, fragment):
    """What is kept of a fragment."""
    column_of = {n: column for n, column in self.kept.items() if self._is_of_fragments(n)}
    return self._trees_of(fragment) | {
      name: column and column[fragment.number] for name, column in column_of.items()
    }

  def _trees_of(self, fragment):
    """The part of it that is kept for each variable."""
    return {
      name: None if column is None else fragment.take(column, self.treedef)
      for name, column in self.kept.items()
      if not self._is_of_fragments(name)
    }

  def _is_of_fragments(self, name):
    return name not in self.rule.fields

  def _require_equal(self, predicate):
    _axes.require_equal(
      predicate, self.wrapper, "the state's step counter", axes=frozenset(self.names)
    )


# What may be done to a fragment: from a worker to a function for `_branches.apply_if`.


def _exchange(worker):
  """What is sent arrives at once."""

  def exchange(carried, params, rule, who):
    updates, kept, arrived = carried
    moved = _moved(updates, params)
    workers = worker.weighed(who, moved)
    new_kept, sent = rule.send(moved, params, kept, workers)
    ends, new_kept = rule.merge(moved, params, sent, new_kept, workers)
    _check_rule(rule, kept | {"x": moved}, new_kept | {"x": ends})
    return _ways(ends, params, updates), new_kept, worker.after(arrived, sent)

  return exchange


def _send(worker):
  """What is sent is kept until it arrives."""

  def send(carried, params, rule, who):
    updates, kept, arrived = carried
    moved = _moved(updates, params)
    new_kept, sent = rule.send(moved, params, kept, worker.weighed(who, moved))
    new_kept |= {"in_flight": sent}
    _check_rule(rule, kept, new_kept)
    return updates, new_kept, arrived

  return send


def _arrive(worker):
  """What was sent has arrived."""

  def arrive(carried, params, rule, who):
    updates, kept, arrived = carried
    moved = _moved(updates, params)
    ends, new_kept = rule.merge(moved, params, kept["in_flight"], kept, worker.workers)
    _check_rule(rule, kept | {"x": moved}, new_kept | {"x": ends})
    return _ways(ends, params, updates), new_kept, worker.after(arrived, kept["in_flight"])

  return arrive


def _moved(updates, params):
  """Where the worker is: what `optax.apply_updates` would make of the updates."""
  return jax.tree.map(
    lambda u, x: (x.astype(u.dtype) + u).astype(x.dtype).astype(_center.dtype_of(x.dtype)),
    updates,
    params,
  )


def _ways(ends, params, updates):
  """The updates that take the parameters to their ends."""
  # The worker has gone from x to y = x + u, which was rounded, and from y to its end e. Wanted is
  # the update u' that takes x to e, and `optax.apply_updates` will compute x + u'. The obvious u'
  # is u plus the way from y to e, but it does not know how y was rounded, and lands an ulp beside
  # e. The difference e - x does know.
  return jax.tree.map(
    lambda e, x, u: (e - x.astype(e.dtype)).astype(u.dtype), ends, params, updates
  )


def _check_rule(rule, before, after):
  """Raises unless a rule returns all that is kept, and where workers end, as it was given them."""
  for name in before | after:
    given, returned = (jax.tree.map(jnp.shape, kept.get(name)) for kept in (before, after))
    if given != returned:
      raise ValueError(
        f"{type(rule).__name__}: send and merge must return {name!r} in the shapes in which it was"
        f" given, {given}; got {returned}."
      )


def _inner_step(wrapper, inner, names, updates, state, params, extra_args):
  """A step of a worker's own optimizer."""
  _check_owners(wrapper, state, names)
  updates, new_state = inner.update(updates, state, params, **extra_args)
  return updates, _axes.vary_like(new_state, state)  # a constant may be new in it


def _of_params(wrapper, updates, params):
  """Updates that fit the parameters, as arrays."""
  updates = _checks.inexact(wrapper, updates)
  _checks.same_shapes(wrapper, updates, params)
  return updates


# What must hold of workers.


def _check_owned(wrapper, params, names):
  # Where types are not tracked nothing tells a replica from a worker's own, and vmap is right.
  known = set(_axes.tracked(names))
  for path, leaf in jax.tree.leaves_with_path(params):
    equal = known - _axes.varying(leaf)
    if equal:
      raise ValueError(
        f"{wrapper}: params{jax.tree_util.keystr(path)} is equal on all workers of"
        f" {sorted(map(str, equal))}, but every worker owns its parameters. Pass them stacked with"
        " a spec that names the axis (stack_workers(params, num_workers),"
        " PartitionSpec(axis_name)), or start from per_shard(params, axis_name)."
      )


def _check_owners(wrapper, inner_state, names):
  """Raises where workers inside would share a center that differs between them unseen."""
  # Workers inside, of axes that this exchange does not name: pods of workers with a center each.
  inside = [x for x in instances(inner_state, WrapperState) if x.owns_inner]
  others = tuple({name for x in inside for name in x.workers.names if name not in names})
  known = _axes.tracked(others)
  # Where types are tracked they show a center that differs, and shard_map checks the layout.
  unknown = tuple(name for name in others if name not in known)
  if unknown and set(unknown) <= set(jax.sharding.get_abstract_mesh().manual_axes):
    raise ValueError(
      f"{wrapper}: the workers of {unknown} inside differ, and axis_name {names} leaves them a"
      " center each, which no layout of the state shows. Name all the axes,"
      f" axis_name={(*names, *unknown)!r}, or use check_vma=True with a PartitionSpec over them for"
      " the center."
    )


def _check_center(wrapper, params, center, names):
  """Raises where workers of other axes, who have a center each, are given one."""
  if center is None:
    return
  leaves = jax.tree.structure(params).flatten_up_to(center)
  for (path, p), c in zip(jax.tree.leaves_with_path(params), leaves, strict=True):
    others = _axes.varying(p) - _axes.varying(c) - set(names)
    if others:
      raise ValueError(
        f"{wrapper}: state.center{jax.tree_util.keystr(path)} is one value for all shards of"
        f" {sorted(map(str, others))}, but params differ between them, and axis_name {names} leaves"
        " them a center each. Name all the axes in axis_name, or give the center a PartitionSpec"
        " over the others."
      )
