"""The engine of exchanges: workers that step alone and every so often exchange with each other.

The engine knows *when* an exchange comes and *over which variables*. A `Rule` knows *what* is
exchanged. It is cut where the communication ends: every collective is in `send`, and none is in
`merge`. Where a centre lies is a choice of its own, `_centre.Centre`. A step of a worker is

    updates <- rule.pull(updates)         in every step
    x <- x + inner(updates)
    for each fragment whose turn it is:
      kept, sent <- rule.send(x, kept)    the exchange itself
      x, kept <- rule.merge(x, sent, kept)

A *fragment* is a set of variables that are exchanged together. Each has a phase of its own in the
period, so that no single step pays for all of them. What a rule keeps of each variable lies in the
state as whole trees of the parameters' structure.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers import _axes, _branches, _centre, _checks, _numerics, _passage
from optax_wrappers._types import AxisNames

Leaves: TypeAlias = list[Any]
Kept: TypeAlias = dict[str, Any]
"""By the name of a state's field: a list with an entry for each variable, or None. For a field that
the rule lists in `fragment_fields`: anything, one for each fragment."""


class Rule:
  """What an algorithm does to a fragment. Leaves come as lists, one entry for each variable.

  A rule is a frozen dataclass, registered with JAX as a pytree whose leaves are the numbers that
  may be traced. What it keeps for each variable under the name "center" is laid out by `centre`.

  Attributes:
    fragment_fields: names in `Kept` that hold one value for each fragment and not for each
      variable, such as the state of an outer optimizer.
  """

  fragment_fields: frozenset[str] = frozenset()

  def keep(self, params: Leaves, centre: _centre.Centre) -> Kept:
    """What the state holds at first. Without parameters: the names, each with an empty value."""
    raise NotImplementedError

  def at(self, step: jax.Array, names: AxisNames) -> "Rule":
    """The rule of one step: what depends on the step or the number of workers has its value."""
    del step, names
    return self

  def pull(self, updates: Leaves, params: Leaves, kept: Kept) -> Leaves:
    """What becomes of the updates before the inner step, of all variables and in every step.

    `kept` has no `fragment_fields` here.
    """
    del params, kept
    return updates

  def send(
    self, moved: Leaves, params: Leaves, kept: Kept, centre: _centre.Centre
  ) -> tuple[Kept, Any]:
    """The exchange. All collectives of the rule are in here.

    Args:
      moved: where this worker is after its step, in the dtype of the centre.
      params: where it was before, in the parameters' dtype.
      kept: what the state holds. With `_centre.Divided` its "center" is this worker's share.
      centre: reads, sums and divides what is kept as "center". `centre.sum(moved)` has the shape of
        what is kept, share or whole, and `centre.gather` that of the parameters.

    Returns:
      What the state holds from now on, every name in `kept`, and what `merge` needs. The rule's own
      numbers may be traced in here.
    """
    raise NotImplementedError

  def merge(self, moved: Leaves, sent: Any, kept: Kept) -> tuple[Leaves, Kept]:
    """Where this worker goes, and what the state holds then. Nothing is sent here."""
    raise NotImplementedError


class Fragment(NamedTuple):
  """Variables that are exchanged together.

  Attributes:
    number: of the fragment.
    phase: the step of the period at which they are, counted from 0 for a multiple of the period.
    variables: their numbers, in the order of `jax.tree.leaves`.
  """

  number: int
  phase: int
  variables: Sequence[int]

  def with_updates(self, updates: Leaves) -> "Fragment":
    """The fragment without the variables that have no update. These take no part."""
    return self._replace(variables=[i for i in self.variables if updates[i] is not None])

  def take(self, column: Leaves) -> Leaves:
    """The entries of these variables."""
    return [column[i] for i in self.variables]

  def write(self, column: Leaves, own: Leaves) -> None:
    """Writes the entries of these variables."""
    for i, leaf in zip(self.variables, own, strict=True):
      column[i] = leaf

  def of(self, kept: Kept, rule: Rule) -> Kept:
    """What is kept of these variables, out of what is kept of all."""
    return self.of_trees(kept, rule) | {
      name: kept[name][self.number] for name in rule.fragment_fields
    }

  def of_trees(self, kept: Kept, rule: Rule) -> Kept:
    """The same without what is kept for each fragment."""
    names = [name for name in kept if name not in rule.fragment_fields]
    return {name: kept[name] and self.take(kept[name]) for name in names}

  def put(self, kept: Kept, own: Kept, rule: Rule) -> None:
    """Writes what is kept of these variables."""
    for name, column in own.items():
      if name in rule.fragment_fields:
        kept[name][self.number] = column
      elif column is not None:
        self.write(kept[name], column)


def periodic_exchange(
  wrapper: str,
  inner: optax.GradientTransformationExtraArgs,
  names: AxisNames,
  rule: Rule,
  centre: _centre.Centre,
  state_class: Any,
  *,
  communication_period: int,
  fragments: Any,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer whose workers step alone with `inner`, and exchange by `rule` once a period.

  Args:
    wrapper: the name that an error gives.
    inner: each worker's optimizer.
    names: the axes over which the workers lie.
    rule: what is exchanged.
    centre: where the centre lies.
    state_class: the state, a `WrapperState` with the fields `step`, `inner_state` and those that
      the rule keeps; its "center" is in the field that `centre` names. `owns_inner` is True, `step`
      is a lockstep field and shared; of what the rule keeps, what is one value for all workers is
      shared, and what has the shape of a share is divided.
    communication_period: inner steps between two exchanges of a variable.
    fragments: how many, or a tree of numbers; as `elastic_average` describes it.
  """
  period = _checks.integer(wrapper, "communication_period", communication_period, minimum=1)
  _check_fragments(wrapper, fragments, period)
  fields = _Fields(rule, centre)
  # A state may have room for both forms of a centre, of which one at most is used.
  declared = {field.name for field in dataclasses.fields(state_class)}
  forms = dict.fromkeys(declared & {_centre.Whole.field, _centre.Divided.field})

  def init_fn(params):
    kept = fields.start(params, _plan(wrapper, params, fragments, period))
    return state_class(
      **(forms | kept),
      step=jnp.zeros((), jnp.int32),
      inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    _checks.same_shapes(wrapper, updates, params)
    _check_owned(wrapper, params, names)
    _check_center(wrapper, params, getattr(state, "center", None), names)
    # From here on in lists, an entry for each variable: fragments are sets of their numbers.
    variables, treedef = jax.tree.flatten(params)
    kept, now = fields.read(state, treedef), rule.at(state.step, names)

    updates = treedef.flatten_up_to(updates)
    everything = Fragment(0, 0, range(len(variables))).with_updates(updates)
    own, xs = everything.take(updates), everything.take(variables)
    everything.write(updates, now.pull(own, xs, everything.of_trees(kept, rule)))
    updates, inner_state = _inner_step(
      wrapper, inner, names, treedef.unflatten(updates), state.inner_state, params, extra_args
    )

    updates = treedef.flatten_up_to(updates)
    step = _next_step(state.step, period)
    for fragment in _plan(wrapper, params, fragments, period):
      # The predicate is made of the counter alone, which is one for all workers. Were it to depend
      # on anything that a worker knows for itself, one worker would wait for ever for the others.
      is_turn = step % period == fragment.phase
      _axes.require_equal(is_turn, wrapper, "the state's step counter", axes=frozenset(names))
      _exchange_if(is_turn, fragment, now, centre, updates, variables, kept, wrapper)
    return treedef.unflatten(updates), state.replace(
      step=step, inner_state=inner_state, **fields.write(kept, treedef)
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Fields(NamedTuple):
  """What a rule keeps, as the fields of a state."""

  rule: Rule
  centre: _centre.Centre

  def _field(self, name):
    return self.centre.field if name == "center" else name

  def start(self, params, plan):
    """The fields at first."""
    leaves, treedef = jax.tree.flatten(params)
    kept = self.rule.keep([], self.centre)
    for name, column in kept.items():
      length = len(plan) if name in self.rule.fragment_fields else len(leaves)
      kept[name] = None if column is None else [None] * length
    for fragment in plan:
      fragment.put(kept, self.rule.keep(fragment.take(leaves), self.centre), self.rule)
    return self.write(kept, treedef)

  def write(self, kept, treedef):
    """The fields that hold what is kept."""
    fields = {}
    for name, column in kept.items():
      if column is not None:
        is_tree = name not in self.rule.fragment_fields
        column = treedef.unflatten(column) if is_tree else tuple(column)
      fields[self._field(name)] = column
    return fields

  def read(self, state, treedef):
    """What is kept, from the fields of a state."""
    kept = {}
    # The names do not depend on the parameters, so an empty list of them will do.
    for name in self.rule.keep([], self.centre):
      column = getattr(state, self._field(name))
      if column is not None:
        is_tree = name not in self.rule.fragment_fields
        column = treedef.flatten_up_to(column) if is_tree else list(column)
      kept[name] = column
    return kept


def _exchange_if(is_turn, fragment, rule, centre, updates, variables, kept, wrapper):
  """Exchanges one fragment where it is its turn: writes its updates, and what is kept of it."""
  taking_part = fragment.with_updates(updates)
  if not taking_part.variables:
    return
  # What is kept for a whole fragment holds all its variables. There those without an update take
  # part with an update of zero, and elsewhere they take none.
  fragment = fragment if rule.fragment_fields else taking_part
  xs = fragment.take(variables)
  # An update in a narrower dtype could not say where an exchange takes the parameters.
  own = [
    jnp.zeros_like(x) if u is None else u.astype(_numerics.promote(u.dtype, x.dtype))
    for u, x in zip(fragment.take(updates), xs)
  ]
  carried = own, fragment.of(kept, rule)
  own, own_kept = _branches.apply_if(is_turn, _exchange(centre), carried, xs, rule, wrapper=wrapper)
  ways = dict(zip(fragment.variables, own))
  taking_part.write(updates, [ways[i] for i in taking_part.variables])
  fragment.put(kept, own_kept, rule)


def _exchange(centre):
  """The exchange of one fragment, as a function of its updates and what is kept of it."""

  def exchange(carried, params, rule):
    updates, kept = carried
    # Where the worker is: what `optax.apply_updates` would make of the updates.
    moved = [
      (x.astype(u.dtype) + u).astype(x.dtype).astype(_centre.dtype_of(x.dtype))
      for u, x in zip(updates, params)
    ]
    new_kept, sent = rule.send(moved, params, kept, centre)
    ends, new_kept = rule.merge(moved, sent, new_kept)
    _check_rule(rule, kept | {"x": moved}, new_kept | {"x": ends})
    # The worker has gone from x to y = x + u, which was rounded, and from y to its end e. Wanted is
    # the update u' that takes x to e, and `optax.apply_updates` will compute x + u'. The obvious u'
    # is u plus the way from y to e, but it does not know how y was rounded, and lands an ulp beside
    # e. The difference e - x does know.
    ways = [
      (e - x.astype(e.dtype)).astype(u.dtype) for e, x, u in zip(ends, params, updates, strict=True)
    ]
    return ways, new_kept

  return exchange


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
  """A step of a worker's own optimizer. Those outside hear that what is inside has owners."""
  with _passage.passage() as passage:
    updates, new_state = inner.update(updates, state, params, **extra_args)
  _check_owners(wrapper, passage.owners, names)
  if (outer := _passage.surrounding()) is not None:
    outer.add_names((), names)
  return updates, _axes.vary_like(new_state, state)  # a constant may be new in it


def _next_step(step, period):
  """`step + 1`. The last int32 falls back by whole rounds, so that rounds stay in phase."""
  # A counter that wrapped round to a negative number would be out of phase with the period, and
  # one that stopped would exchange in every step or in none.
  last = jnp.iinfo(jnp.int32).max
  return jnp.where(step == last, (last + 1) % period, step) + jnp.where(step == last, 0, 1)


# Fragments.


def _check_fragments(wrapper, fragments, period):
  if isinstance(fragments, int | np.integer) and not isinstance(fragments, bool):
    _checks.integer(wrapper, "fragments", fragments, minimum=1)
    if fragments > period:
      raise ValueError(
        f"{wrapper}: fragments must be at most communication_period, {period} steps, because each"
        f" exchanges at a step of its own; got {fragments}."
      )
    return
  numbers = jax.tree.leaves(fragments)
  for number in numbers:
    _checks.integer(wrapper, "fragments", number, minimum=0)
  if not numbers or set(numbers) != set(range(max(numbers) + 1)) or max(numbers) >= period:
    raise ValueError(
      f"{wrapper}: fragments must be an int, or number the fragments from 0, every number used, and"
      f" at most as many as communication_period has steps, {period}; got {fragments}."
    )


def _plan(wrapper, params, fragments, period):
  """The fragments of these parameters."""
  leaves = jax.tree.leaves(params)
  if isinstance(fragments, int | np.integer):
    num_fragments = min(fragments, len(leaves))
    numbers = _by_size(leaves, num_fragments)
  else:
    numbers = _checks.spread(
      wrapper, "fragments", fragments, params, _checks.is_a(int, np.integer), "ints from 0"
    )
    num_fragments = max(jax.tree.leaves(fragments)) + 1
  return [
    Fragment(
      number=k,
      phase=(k + 1) * period // num_fragments % period,
      variables=[i for i, number in enumerate(numbers) if number == k],
    )
    for k in range(num_fragments)
  ]


def _by_size(leaves, num_fragments):
  """The number of the fragment of each variable: neighbours together, about equal bytes in each."""
  sizes = [
    math.prod(np.shape(x)) * getattr(x, "dtype", np.dtype("float32")).itemsize for x in leaves
  ]
  total = sum(sizes)
  # A variable belongs to the fragment in which the middle of its bytes lies, so that a large one
  # is never cut and no variable is in two.
  middles = np.cumsum([0, *sizes])[:-1] + np.asarray(sizes) / 2
  return [int(middle * num_fragments / total) if total else 0 for middle in middles]


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


def _check_owners(wrapper, owners, names):
  """Raises where workers inside would share a centre that differs between them unseen."""
  # Workers inside, of axes that this exchange does not name: pods of workers with a centre each.
  others = tuple(name for name in owners if name not in names)
  known = _axes.tracked(others)
  # Where types are tracked they show a centre that differs, and shard_map checks the layout.
  unknown = tuple(name for name in others if name not in known)
  if unknown and set(unknown) <= set(jax.sharding.get_abstract_mesh().manual_axes):
    raise ValueError(
      f"{wrapper}: the workers of {unknown} inside differ, and axis_name {names} leaves them a"
      " centre each, which no layout of the state shows. Name all the axes,"
      f" axis_name={(*names, *unknown)!r}, or use check_vma=True with a PartitionSpec over them for"
      " the centre."
    )


def _check_center(wrapper, params, center, names):
  """Raises where workers of other axes, who have a centre each, are given one."""
  if center is None:
    return
  leaves = jax.tree.structure(params).flatten_up_to(center)
  for (path, p), c in zip(jax.tree.leaves_with_path(params), leaves, strict=True):
    others = _axes.varying(p) - _axes.varying(c) - set(names)
    if others:
      raise ValueError(
        f"{wrapper}: state.center{jax.tree_util.keystr(path)} is one value for all shards of"
        f" {sorted(map(str, others))}, but params differ between them, and axis_name {names} leaves"
        " them a centre each. Name all the axes in axis_name, or give the centre a PartitionSpec"
        " over the others."
      )
