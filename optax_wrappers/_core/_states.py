"""Optimizer states: how they are declared, and how they are found inside other states."""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, dataclass_transform, get_args

import chex
import jax
import jax.numpy as jnp

from optax_wrappers._core._types import AxisNames, Tree

serialization: Any
try:
  from flax import serialization
except ImportError:  # nothing to register with
  serialization = None

Class = TypeVar("Class", bound=type)
AnyState = TypeVar("AnyState")

OfParams: TypeAlias = dict[tuple[str, ...], Any] | None
Whose: TypeAlias = Literal[
  "shared",
  "lockstep",
  "per_shard",
  "gathered",
  "counted",
  "reduced",
  "summed",
  "divided",
  "center",
  "owned",
]


def field(whose: Whose | None = None, *, slots: bool = False, **options: Any) -> Any:
  """A field of a state; with a word, one of which not every worker has a copy of its own.

  | Word | Whose the field is |
  |---|---|
  | `shared` | one value for all workers; inside a worker's own state, that worker's own |
  | `lockstep` | a count of calls: shared, even inside a worker's own state, because workers call |
  | | together, unless a wrapper in between may skip a call |
  | `per_shard` | each shard's own, though parameters are replicated; shared inside a reduction |
  | `center` | of all workers of an exchange: shared, or divided if the exchange divides it |
  | `owned` | the state of one worker that owns its parameters: `shared` in it is that worker's |
  | `gathered` | `per_shard`, a sum of gradients that the next reduction inside counts |
  | `counted` | `per_shard`, the weights or the number of what is `gathered` |
  | `reduced` | the state of an optimizer of reduced updates, if `state.reduced` names an axis |
  | `summed` | a part of a sum; the sum must be kept if the number of workers changes |
  | `divided` | a share of one value, each leaf divided along one dimension |

  Args:
    whose: None: each worker's own; states inside the field's value say so for their own fields.
    slots: whether its leaves have an axis of slots before a parameter's.
    **options: those of `dataclasses.field`.

  Raises:
    ValueError: for another word.
  """
  if whose is not None and whose not in get_args(Whose):
    raise ValueError(f"states.field: whose must be one of {get_args(Whose)}, got {whose!r}.")
  return dataclasses.field(metadata={"whose": whose, "slots": slots}, **options)


class State:
  """The base class of states: layouts, checkpoints and `metrics` know its fields.

  Attributes:
    may_skip: whether the inner state may stay as it was in some calls.
    slot_names: the mesh axes that the slots of its fields lie over.
  """

  may_skip: ClassVar[bool] = False
  slot_names: ClassVar[AxisNames] = ()

  def fields(self) -> dict[str, Any]:
    """The fields by their names."""
    cls: Any = type(self)
    return {name: getattr(self, name) for name in declared(cls)}

  def metrics(self, of_params: OfParams) -> dict[str, Any]:
    """The scalars of this state alone, for `metrics`; `of_params` are leaves by their keys."""
    return {}

  def __iter__(self) -> Iterator[Any]:
    """The values of the fields, as of a named tuple: trainers iterate over Optax's states."""
    return iter(self.fields().values())

  def __repr__(self) -> str:
    parts = (f"{name}={_summary(value)}" for name, value in self.fields().items())
    return f"{type(self).__name__}({', '.join(parts)})"


_TAKEN = {*dir(State), "replace", "to_tuple", "from_tuple"}


@functools.cache
def declared(cls: Any) -> dict[str, Mapping[str, Any]]:
  """The fields of a class of states, with the marks of `field`."""
  return {field.name: field.metadata for field in dataclasses.fields(cls)}


class OwnersState(State):
  """Base class of the states of workers that own their parameters."""

  inner_state: Any


class _Verbatim(str):
  __repr__ = str.__str__


def _summary(tree: Tree) -> str:
  """A short text: values of scalars, types of arrays, and a count if there are many."""
  leaves = jax.tree.leaves(tree)
  if len(leaves) > 8:
    num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
    return f"<{len(leaves)} arrays, {num_bytes:,} bytes>"

  def short(leaf):
    is_known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    is_value = is_known and leaf.ndim == 0 and leaf.is_fully_addressable
    if is_value and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
      return _Verbatim(leaf)
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return _Verbatim(f"{leaf.dtype}{list(leaf.shape)}") if is_array else leaf

  return repr(jax.tree.map(short, tree))


@dataclass_transform(frozen_default=True)
def static(cls: Class) -> Class:
  """Makes a class a frozen dataclass that is static in a pytree: it has no leaves.

  Args:
    cls: a class with annotated fields, all hashable, such as the layout that a state was made for.
  """
  frozen: Any = jax.tree_util.register_static(dataclasses.dataclass(frozen=True)(cls))
  _register_with_flax(frozen, lambda _: {}, lambda target, _: target)
  return frozen


@dataclass_transform(frozen_default=True, field_specifiers=(field, dataclasses.field))
def dataclass(cls: Class) -> Class:
  """Makes a class of fields a state: a frozen chex dataclass that layouts and checkpoints know.

  Args:
    cls: a class with annotated fields, those of `field` or plain ones; `State` becomes its base.

  Returns:
    The class, a pytree. `flax.serialization`, Orbax and pickle save its instances, and
    `stack_workers`, `specs` and `resize_workers` give each field to whom `field` says.

  Raises:
    ValueError: for a field named like an attribute of `State` or of a chex dataclass.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_wrappers as ow
    >>> @ow.states.dataclass
    ... class Kept:
    ...   best: jax.Array
    ...   round: jax.Array = ow.states.field("shared")
    >>> ow.stack_workers(Kept(best=jnp.zeros(2), round=jnp.array(0)), 4)
    Kept(best=float32[4, 2], round=0)
  """
  if not issubclass(cls, State):
    bases = *(base for base in cls.__bases__ if base is not object), State
    body = {k: x for k, x in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    cls = type(cls)(cls.__name__, bases, body)  # type: ignore[misc]
  for name in cls.__annotations__:
    if name in _TAKEN or isinstance(getattr(cls, name, None), types.FunctionType | property):
      raise ValueError(
        f"states.dataclass: {cls.__name__} has a field named {name!r}, which is an attribute of"
        " every state. Choose another name."
      )
  # Not a mapping: nothing should take a state for a dict of its fields.
  cls = chex.dataclass(cls, frozen=True, repr=False, mappable_dataclass=False)
  names = list(declared(cls))

  def to_state_dict(value):
    return {name: serialization.to_state_dict(getattr(value, name)) for name in names}

  def from_state_dict(target, saved):
    if set(saved) != set(names):
      saved = sorted(saved)
      raise ValueError(f"{cls.__name__} has the fields {names}; the saved state has {saved}.")
    for name in names:
      # None is an empty tree: without this check Flax would restore it from anything.
      missing = getattr(target, name) is None
      if missing != (saved[name] is None):
        here, there = ("not used here", "has") if missing else ("needed", "does not have")
        raise ValueError(
          f"{cls.__name__}.{name} is {here}, but the saved state {there} it. Restore with the"
          " arguments of the wrapper that it was saved with."
        )
    restored = {
      name: serialization.from_state_dict(getattr(target, name), saved[name], name=name)
      for name in names
    }
    return cls(**restored)

  _register_with_flax(cls, to_state_dict, from_state_dict)
  return cls


def _register_with_flax(cls, to_state_dict, from_state_dict):
  if serialization is not None:
    serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)


@static
class Workers:
  """In the state of an exchange between workers: the axes and arguments that it was made for."""

  names: AxisNames
  # Those that determine what the state holds.
  arguments: tuple[tuple[str, Any], ...] = ()
  # When fragments are exchanged, for `local_round`: a state may go on with another schedule.
  schedule: dict[str, Any] | None = dataclasses.field(default=None, compare=False)

  def __reduce__(self) -> Any:
    # Not saved: a period may be a function that pickle does not know.
    return type(self), (self.names, self.arguments)

  def __repr__(self) -> str:
    arguments = "".join(f", {name}={value!r}" for name, value in self.arguments)
    return f"Workers({self.names}{arguments})"


def require_state(wrapper: str, state: Any, state_class: type) -> None:
  """Raises on a state of another wrapper."""
  if not isinstance(state, state_class):
    raise TypeError(f"{wrapper}: state must be a {state_class.__name__}, from init; got {state!r}.")


def require_same(wrapper: str, made_for: Any, arguments: Any) -> None:
  """Raises if a state was made for other arguments."""
  if made_for != arguments:
    raise ValueError(
      f"{wrapper}: the state was made for {made_for!r}, and this is {arguments!r}. Pass the"
      " arguments that it was made for, or start again: new = tx.init(params), where"
      " new.replace(inner_state=old.inner_state) keeps the inner state."
    )


def copy_tree(params: Tree) -> Tree:
  """A copy that shares no buffer with `params`, so both can be donated; abstract values stay."""

  def copy(x):
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.array(x, copy=True)

  return jax.tree.map(copy, params)


def instances(tree: Tree, cls: Any) -> Iterator[Any]:
  """Every instance of one or more classes in a tree, outer ones before those inside them."""
  if isinstance(tree, cls):
    yield tree
  for node in jax.tree.leaves(tree, is_leaf=lambda x: x is not tree and isinstance(x, cls)):
    if node is not tree and isinstance(node, cls):
      yield from instances(node, cls)


def get_state(opt_state: Tree, state_class: type[AnyState]) -> AnyState:
  """Returns the one state of a class, however nested; stacked for stacked workers.

  Args:
    opt_state: an optimizer state, or any pytree that holds one, such as a Flax `TrainState`.
    state_class: for example `ElasticAverageState`.

  Raises:
    ValueError: if there is none, or more than one. A TypeError: if `state_class` is not a class.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = optax.chain(optax.clip(1.0), ow.drop_stale(optax.sgd(0.1), 2))
    >>> int(ow.get_state(tx.init(jnp.zeros(3)), ow.states.DropStaleState).step)
    0
  """
  if not isinstance(state_class, type):
    raise TypeError(f"get_state: state_class must be a class, got {state_class!r}.")
  matches = list(instances(opt_state, state_class))
  if len(matches) != 1:
    what = f"get_state: needed exactly one {state_class.__name__}, found {len(matches)}"
    raise ValueError(f"{what}. Pass the part of the state that holds the one you mean.")
  return matches[0]
