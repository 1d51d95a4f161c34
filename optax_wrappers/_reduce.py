"""What passes between a wrapper and a reduction that stands somewhere inside it.

A mean over shards must know what each shard's updates stand for: nothing at all if they are stale, several towers if
they were gathered. The wrapper outside knows it, the reduction inside needs it for its denominator. `weight` cannot
carry it as an extra arg, because `weight` is consumed by the first wrapper that takes it, and `optax.chain` gives every
link the same extra args. So the outer wrapper opens a `Passage` while it calls `inner.update`; the reduction takes the
weight from there, and leaves there what it made of the updates.

A passage is seen only in the trace in which it was opened. A conditional of somebody else (`optax.apply_if_finite`,
`optax.MultiSteps`) traces its branch apart: what is decided there, or gathered over several calls, is not what the
weight was said of. Wrappers of this library that trace `inner` apart open a passage anew inside.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from optax_wrappers import _checks, _collectives, _numerics

Tree = Any


@dataclasses.dataclass
class Passage:
  """What passes between a wrapper and the reductions inside it, while a step is traced.

  Attributes:
    weight: what this shard's updates stand for, beside those of the other shards; None: each for the same.
    over: the axes over which it was said; None: all.
    is_taken: whether a reduction inside has taken the weight.
    is_scaled: whether the updates were multiplied to make up for a weight that nobody took.
    is_hidden: whether it was opened out of sight of one that is scaled.
    is_gathered: whether what is inside gathers the updates of several calls.
    names: the axes over which the updates have been reduced.
    owners: the axes over which workers inside have parameters of their own.
    reduced: what the last reduction made of each update, by its path.
    trace: the trace in which the passage can be seen.
  """

  weight: jax.Array | None = None
  over: _collectives.AxisNames | None = None
  is_taken: bool = False
  is_scaled: bool = False
  is_hidden: bool = False
  is_gathered: bool = False
  names: _collectives.AxisNames = ()
  owners: _collectives.AxisNames = ()
  reduced: dict[Any, jax.Array] = dataclasses.field(default_factory=dict)
  trace: Any = None

  def merge(self, inner: "Passage") -> None:
    """Takes over what the reductions inside have told."""
    self.is_taken |= inner.is_taken
    self.is_gathered |= inner.is_gathered
    self.reduced.update(inner.reduced)

  def concerns(self, names: _collectives.AxisNames) -> bool:
    """Whether the weight is one for a reduction over these axes."""
    return self.weight is not None and (self.over is None or bool(set(names) & set(self.over)))

  def add_names(self, names: _collectives.AxisNames, owners: _collectives.AxisNames = ()) -> None:
    """Notes that the updates have been reduced over these axes too, and that workers of those are inside."""
    self.names += tuple(name for name in names if name not in self.names)
    self.owners += tuple(name for name in owners if name not in self.owners)


_innermost: contextvars.ContextVar[Passage | None] = contextvars.ContextVar("passage", default=None)


def surrounding() -> Passage | None:
  """The passage that is open here, in this trace."""
  found = _innermost.get()
  return found if found is not None and found.trace == get_opaque_trace_state() else None


@contextlib.contextmanager
def passage(**changes: Any) -> Iterator[Passage]:
  """Opens a passage for a call of `inner`: what surrounds it, with these changes. It hears what is told inside."""
  outer = surrounding()
  with passage_apart(outer, **changes) as opened:
    yield opened
  if outer is not None:
    outer.merge(opened)


@contextlib.contextmanager
def passage_apart(outer: Passage | None, **changes: Any) -> Iterator[Passage]:
  """`passage` for a call that is traced apart from `outer`, which cannot hear of the arrays inside."""
  if outer is None:
    start = Passage(is_hidden=_is_hidden())
  else:
    start = Passage(outer.weight, outer.over, is_scaled=outer.is_scaled, is_hidden=outer.is_hidden, names=outer.names)
  opened = dataclasses.replace(start, trace=get_opaque_trace_state(), **changes)
  before = _innermost.set(opened)
  try:
    yield opened
  finally:
    _innermost.reset(before)
  if outer is not None:
    outer.add_names(opened.names, opened.owners)


def take_weight(
  wrapper: str,
  reduction: str,
  weight: Any,
  leaves: list[jax.Array],
  names: _collectives.AxisNames | None = None,
) -> jax.Array | None:
  """The weight of this shard's updates: the extra arg times what was handed in; None if there is neither.

  What is handed in is for denominators. A sum has none and leaves it out: updates of a weight of zero are zero.

  Args:
    wrapper: the name that an error gives.
    reduction: "mean" or "sum".
    weight: the extra arg, or None.
    leaves: the updates. The weight is float32, or float64 where one of them is.
    names: the axes that are reduced over; None: none, it is one shard's own.
  """
  dtype = _numerics.weight_dtype(leaves)
  if weight is not None:
    weight = _checks.weight(wrapper, weight).astype(dtype)
  found = surrounding()
  if found is None or found.weight is None or (names is not None and not found.concerns(names)):
    return weight
  found.is_taken = True
  if reduction == "sum":
    return weight
  handed = found.weight.astype(dtype)
  return handed if weight is None else jnp.where(handed == 0, 0, weight * handed)


def require_decided(
  wrapper: str, what: str, names: _collectives.AxisNames, outer: Passage | None, inner: Passage
) -> None:
  """Raises where shards drop a step together with some, and reduce inside with others who may not drop it."""
  before = () if outer is None else outer.names
  others = tuple(name for name in inner.names if name not in (*names, *before))
  if others:
    raise ValueError(
      f"{wrapper}: {what} decides over {names} whether a step is dropped, but the updates are also reduced over"
      f" {others}, whose shards could decide otherwise. Decide over all of them: axis_name={(*names, *others)!r}."
    )


def _is_hidden() -> bool:
  """Whether updates that arrive here were scaled by a wrapper whose passage cannot be seen."""
  found = _innermost.get()
  return found is not None and (found.is_hidden or (found.is_scaled and surrounding() is None))


def require_in_sight(wrapper: str, what: str) -> None:
  """Raises where updates were scaled for a plain mean, out of sight of the reduction that is to do otherwise."""
  if _is_hidden():
    raise ValueError(
      f"{wrapper}: {what} stands inside a conditional (such as optax.apply_if_finite or optax.MultiSteps) that"
      " hides the"
      " staleness of the shards from it, so its mean would divide by the stale ones too. Put drop_stale inside that"
      f" conditional, directly round {wrapper}; gather_towers instead of optax.MultiSteps does not hide anything."
    )
