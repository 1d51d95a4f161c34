"""What passes between a wrapper and a reduction that stands somewhere inside it.

A mean over shards must know what each shard's updates stand for: nothing at all if they are stale,
several towers if they were gathered. The wrapper outside knows it, the reduction inside needs it
for its denominator. `weight` cannot carry it as an extra arg, because `weight` is consumed by the
first wrapper that takes it, and `optax.chain` gives every link the same extra args. So the outer
wrapper opens a `Passage` while it calls `inner.update`; the reduction takes the weight from there,
and leaves there what it made of the updates.

A passage is seen only in the trace in which it was opened. A conditional of somebody else
(`optax.apply_if_finite`, `optax.MultiSteps`) traces its branch apart: what is decided there, or
gathered over several calls, is not what the weight was said of. Wrappers of this library that trace
`inner` apart open a passage anew inside.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from optax_wrappers import _axes, _checks, _numerics
from optax_wrappers._types import AxisNames, Tree


@dataclasses.dataclass(frozen=True)
class Handed:
  """What is known of the weight of this shard's updates.

  Attributes:
    weight: what they stand for, beside those of the other shards; scalar.
    over: the axes over which it was said; None: all.
    total: its sum over `over`, where that is known.
    is_lost: whether the updates were added to those of shards of other weights, so that no mean can
      know any more.
  """

  weight: jax.Array
  over: AxisNames | None = None
  total: jax.Array | None = None
  is_lost: bool = False

  def concerns(self, names: AxisNames | None) -> bool:
    """Whether it is the weight for a reduction over these axes.

    `names=None`: over none of them, for one shard's own.
    """
    return names is None or self.over is None or bool(set(names) & set(self.over))

  def of_sum(self, names: AxisNames) -> "Handed":
    """What is known of the weight of a sum over these axes.

    Of shards of one weight, the sum has that weight too.
    """
    is_equal = not _axes.unreduced_names([self.weight], names)[0]
    return dataclasses.replace(self, is_lost=self.is_lost or not is_equal)


@dataclasses.dataclass
class Passage:
  """What passes between a wrapper and the reductions inside it, while a step is traced.

  Attributes:
    handed: the weight of the updates that `inner` is given; None: each shard counts alike.
    by_path: the same of updates that a reduction inside has made something else of, by their paths.
    is_taken: whether a reduction inside has taken the weight.
    unseen: a reduction inside that could not see the passage, traced apart by somebody else; None
      if there was none.
    unseen_weighted: the same of one that is more than a plain mean.
    is_gathered: whether what is inside gathers the updates of several calls.
    names: the axes over which the updates have been reduced.
    owners: the axes over which workers inside have parameters of their own.
    reduced: what the last reduction made of each update, by its path.
    divided: the axes over which the parameter of each update is divided, by its path.
    trace: the trace in which the passage can be seen.
    outer: the passage that this one goes on from.
    parent: the passage that was open where this one was opened, seen or not.
  """

  handed: Handed | None = None
  by_path: dict[str, Handed | None] = dataclasses.field(default_factory=dict)
  is_taken: bool = False
  unseen: str | None = None
  unseen_weighted: str | None = None
  is_gathered: bool = False
  names: AxisNames = ()
  owners: AxisNames = ()
  reduced: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
  divided: dict[str, AxisNames] = dataclasses.field(default_factory=dict)
  trace: Any = None
  outer: "Passage | None" = None
  parent: "Passage | None" = None

  def merge(self, inner: "Passage") -> None:
    """Takes over what the reductions inside have told."""
    self.is_taken |= inner.is_taken
    self.is_gathered |= inner.is_gathered
    self.reduced.update(inner.reduced)
    self.by_path.update(inner.by_path)

  def hear(
    self, names: AxisNames, paths: list[str], leaves: list[jax.Array], divided: list[AxisNames]
  ) -> None:
    """Notes a reduction over `names`, what it made of the updates, and how these are divided."""
    self.add_names(names)
    self.reduced.update(zip(paths, leaves))
    self.divided.update(zip(paths, divided))

  def misses(self, what: str, is_weighted: bool) -> None:
    """Notes that a reduction that is more than a plain mean does without what is handed in."""
    if is_weighted and self.unseen_weighted is None:
      self.unseen_weighted = what

  def hand_on(self, paths: list[str], handed: Handed | None) -> None:
    """Notes what is known from here on of the weight of these updates."""
    self.by_path.update(dict.fromkeys(paths, handed))

  def add_names(self, names: AxisNames, owners: AxisNames = ()) -> None:
    """Notes axes that the updates have been reduced over, and axes whose workers are inside."""
    self.names += tuple(name for name in names if name not in self.names)
    self.owners += tuple(name for name in owners if name not in self.owners)


_innermost: contextvars.ContextVar[Passage | None] = contextvars.ContextVar("passage", default=None)


def surrounding() -> Passage | None:
  """The passage that is open here, in this trace."""
  found = _innermost.get()
  return found if found is not None and found.trace == get_opaque_trace_state() else None


@contextlib.contextmanager
def passage(**changes: Any) -> Iterator[Passage]:
  """Opens a passage for a call of `inner`: what surrounds it, with these changes.

  The passage outside hears what this one does.
  """
  # What surrounds this call can hear arrays from inside, because both are in one trace.
  outer = surrounding()
  with passage_apart(outer, **changes) as opened:
    yield opened
  if outer is not None:
    outer.merge(opened)


@contextlib.contextmanager
def passage_apart(outer: Passage | None, **changes: Any) -> Iterator[Passage]:
  """`passage` for a call that is traced apart from `outer`.

  The passage outside cannot hear of arrays inside that trace.
  """
  # Two links: `outer` for what can be seen from here, `parent` for what merely lies outside. A
  # reduction that cannot see a passage must still be able to warn it.
  parent = _innermost.get()
  start = Passage(names=parent.names if parent else ())
  if outer is not None:
    start = Passage(
      outer.handed, dict(outer.by_path), names=outer.names, divided=dict(outer.divided), outer=outer
    )
  opened = dataclasses.replace(start, trace=get_opaque_trace_state(), parent=parent, **changes)
  # A context variable and no global: threads that trace at the same time have passages of their
  # own.
  before = _innermost.set(opened)
  try:
    yield opened
  finally:
    _innermost.reset(before)
  if outer is not None:
    outer.is_taken |= opened.is_taken
    outer.add_names(opened.names, opened.owners)
    outer.divided.update(opened.divided)


class Apart:
  """A call of `inner` that is traced apart from what surrounds it, and the passage to it.

  `_branches.update_if` needs it: it runs a traced call, and arrays from inside that trace must come
  out as results of the call.

  Attributes:
    call: from the inner state to the updates, the new state, and what the reductions inside made of
      the updates.
    heard: what the passage heard, in the last trace of `call`.
  """

  heard: Passage

  def __init__(self, update: Callable[[Tree], tuple[Tree, Tree]], is_traced: bool, **changes: Any):
    self._outer = surrounding()

    def call(state):
      with passage_apart(self._outer, **changes) as self.heard:
        updates, state = update(state)
      return updates, state, self.heard.reduced

    # Who asks first what happens inside and who runs it then share one trace.
    self.call = jax.jit(call, inline=True) if is_traced else call

  def listen(self, state: Tree) -> Passage:
    """Traces `call`, to hear what the reductions inside do, and returns the passage."""
    jax.eval_shape(self.call, state)
    return self.heard

  def close(self, reduced: dict[str, jax.Array]) -> None:
    """Tells those outside what the reductions inside made of the updates."""
    if self._outer is not None:
      self.heard.reduced = reduced
      self._outer.merge(self.heard)


def paths_of(updates: Tree) -> list[str]:
  """The path of each update, by which word of it is left."""
  return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(updates)]


def given_weight(
  wrapper: str, weight: Any, leaves: list[jax.Array], num_towers: int | None = None
) -> jax.Array | None:
  """The extra arg `weight`, checked, in the dtype that these updates need; None if not given."""
  if weight is None:
    return None
  return _checks.weight(wrapper, weight, num_towers).astype(_numerics.weight_dtype(leaves))


def handed_in(wrapper: str, paths: list[str], names: AxisNames | None = None) -> Handed | None:
  """What is known here of the weight of these updates, for a reduction over `names`.

  `names=None`: for one shard's own, over no axis.
  """
  found = surrounding()
  if found is None:
    return None
  # Links of a chain that stand before this one may have reduced some of the updates, and have left
  # word of their weight by path. What they left alone has the weight that was handed in.
  every = [found.by_path.get(path, found.handed) for path in paths] or [found.handed]
  # By identity: a weight is an array, and two that are equal by chance are not one.
  if any(other is not every[0] for other in every):
    raise ValueError(
      f"{wrapper}: some of the updates have been reduced before and others have not, so they have"
      " no weight in common. Reduce them apart, with optax.partition or optax.masked."
    )
  return every[0] if every[0] is not None and every[0].concerns(names) else None


def take_weight(
  wrapper: str,
  weight: jax.Array | None,
  leaves: list[jax.Array],
  paths: list[str],
  names: AxisNames | None = None,
) -> tuple[jax.Array | None, jax.Array | None]:
  """The weight of this shard's updates in a mean, and its sum over `names` where that is known.

  Both are None if there is no weight.

  The weight is the extra arg times what was handed in. That is for denominators: a sum takes the
  extra arg alone, and updates whose handed weight is zero are zero.

  Args:
    wrapper: the name that an error gives.
    weight: the extra arg, or None.
    leaves: the updates, whose dtype decides the weight's.
    paths: theirs.
    names: the axes that are reduced over; None: none, it is one shard's own.
  """
  handed = handed_in(wrapper, paths, names)
  if handed is None or (handed.is_lost and names is None):  # towers of sums count alike
    return weight, None
  if handed.is_lost:
    raise ValueError(
      f"{wrapper}: a mean over {names} of what is a sum over shards of unequal weights has no"
      " weights any more. Take the mean first and the sum after it, or reduce over all axes at"
      " once."
    )
  if names is not None:
    mark_taken()
  # Multiplied rather than added up with the extra arg: a stale shard counts nothing whatever its
  # weight, and a shard of two towers counts double.
  value = handed.weight.astype(_numerics.weight_dtype(leaves))
  if weight is not None:
    return _numerics.scale(weight, value), None
  # The total saves a collective where it is the sum over the very axes that are reduced.
  if handed.total is None or names is None or set(names) != set(handed.over or ()):
    return value, None
  return value, handed.total.astype(value.dtype)


def require_untaken(wrapper: str, paths: list[str]) -> None:
  """Raises where a link before this one in a chain has taken the extra arg `weight` already."""
  found = surrounding()
  if found is not None and any(path in found.by_path for path in paths):
    raise ValueError(
      f"{wrapper}: weight was taken already by a reduction before this one in the chain. Reduce"
      " over all the axes at once: axis_name=(..., ...)."
    )


def mark_taken() -> None:
  """Notes that a reduction has made use of the weight."""
  found = surrounding()
  if found is not None:
    found.is_taken = True


def names_reduced_before() -> AxisNames:
  """The axes over which the updates have been reduced where this is called."""
  found = surrounding()
  return () if found is None else found.names


def note(what: str, names: AxisNames, paths: list[str], is_sum: bool, is_weighted: bool) -> None:
  """Leaves word of a reduction over `names` with the passages round it, seen from it or not.

  Args:
    what: how an error names it.
    names: its axes.
    paths: of its updates.
    is_sum: whether it is a sum. A sum makes up for no weight, seen or not, because updates of
      weight zero are zero.
    is_weighted: whether it is a mean with weights of its own, which a factor on the updates cannot
      stand in for.
  """
  seen = list(_along(surrounding(), "outer"))
  uses_weight = bool(seen) and handed_in(what, paths, names) is not None
  # Those that hand a weight in, and are seen: a sum needs none, and a mean takes it.
  for passage in seen:
    if passage.handed is not None and passage.handed.concerns(names):
      passage.is_taken |= is_sum
      passage.misses(what, is_weighted and not is_sum and not uses_weight)
  # A conditional or a jit of somebody else lies between this reduction and the passages that are
  # left. They cannot hand anything in.
  for passage in _along(seen[-1].parent if seen else _innermost.get(), "parent"):
    passage.unseen = passage.unseen or what
    passage.misses(what, is_weighted or is_sum)


def _along(passage: Passage | None, link: str) -> Iterator[Passage]:
  """A passage, the one it is linked to, and so on."""
  while passage is not None:
    yield passage
    passage = getattr(passage, link)


def require_seen(wrapper: str, unseen: str | None, why: str) -> None:
  """Raises where a reduction inside could not see the passage to it."""
  if unseen:
    raise ValueError(
      f"{wrapper}: {unseen} inside is behind a sum of towers, or traced apart in a conditional"
      " (such as optax.apply_if_finite or optax.MultiSteps) or a jax.jit of its own, and does not"
      f" see {why}. Put {wrapper} inside that, directly round the reduction, or leave the jit to"
      " the whole step; gather_towers instead of optax.MultiSteps hides nothing."
    )


def require_decided(
  wrapper: str,
  what: str,
  accept: jax.Array,
  names: AxisNames,
  before: AxisNames,
  inner: Passage,
) -> None:
  """Raises where shards that are reduced over inside could decide otherwise on a dropped step."""
  open_names = _axes.unreduced_names(
    [accept], tuple(n for n in inner.names if n not in (*names, *before))
  )[0]
  if open_names:
    raise ValueError(
      f"{wrapper}: {what} decides over {names} whether a step is dropped, but the updates are also"
      f" reduced over {open_names}, whose shards could decide otherwise. Decide over all of them:"
      f" axis_name={(*names, *open_names)!r}."
    )
