"""Optimizer states: how they are declared, found inside other states, and laid out over workers and
shards."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar, TypeVar, dataclass_transform

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_wrappers import _axes, _checks, _collectives
from optax_wrappers._types import Tree

# Optax's states behind a conditional that each worker may take or not.
_OPTAX_MAY_SKIP = (
  optax.ApplyIfFiniteState,
  optax.MultiStepsState,
  optax.ConditionallyTransformState,
  optax.ConditionallyMaskState,
)
Class = TypeVar("Class", bound=type)
State = TypeVar("State")


class WrapperState:
  """What every state of this library is.

  Attributes:
    shared_fields: fields that are one value for all workers; every other field is a worker's own.
      Inside a worker's own state they are its own too.
    lockstep_fields: those of the shared fields that count calls. Workers call together, so that
      these stay equal inside a worker's own state as well, unless what stands between may skip a
      call.
    per_shard_fields: fields that differ between shards even where the parameters are replicated.
    divided_fields: fields of which every worker holds a part: their leaves are flat, and padded to
      equal parts.
    owns_inner: whether every worker has an inner state of its own, for parameters of its own.
    may_skip: whether the inner state may stay as it was in some calls.
  """

  shared_fields: ClassVar[frozenset[str]] = frozenset()
  lockstep_fields: ClassVar[frozenset[str]] = frozenset()
  per_shard_fields: ClassVar[frozenset[str]] = frozenset()
  divided_fields: ClassVar[frozenset[str]] = frozenset()
  owns_inner: ClassVar[bool] = False
  may_skip: ClassVar[bool] = False

  def reduced(self) -> "WrapperState":
    """This state where a reduction stands outside it: what differs between shards elsewhere is
    equal there."""
    return self

  def __repr__(self) -> str:
    fields = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
    parts = (f"{name}={_summary(getattr(self, name))}" for name in fields)
    return f"{type(self).__name__}({', '.join(parts)})"


@dataclasses.dataclass(frozen=True)
class _Verbatim:
  text: str

  def __repr__(self) -> str:
    return self.text


def _summary(tree: Tree) -> str:
  """A short text: values of scalars, types of arrays, and a count where there are many."""
  leaves = jax.tree.leaves(tree)
  if len(leaves) > 8:
    return f"<{len(leaves)} arrays, {sum(getattr(leaf, 'nbytes', 0) for leaf in leaves):,} bytes>"

  def short(leaf):
    is_value = (
      isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.ndim == 0
    )
    if (
      is_value and leaf.is_fully_addressable and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    ):
      return _Verbatim(str(leaf))
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return _Verbatim(f"{leaf.dtype}{list(leaf.shape)}") if is_array else leaf

  return repr(jax.tree.map(short, tree))


@dataclass_transform(frozen_default=True)
def state(cls: Class) -> Class:
  """Makes a class of fields a frozen chex dataclass that flax.serialization can save, where Flax is
  installed."""
  cls = chex.dataclass(cls, frozen=True, repr=False, mappable_dataclass=False)
  try:
    from flax import serialization
  except ImportError:
    return cls
  names = [field.name for field in dataclasses.fields(cls)]

  def to_state_dict(value):
    return {name: serialization.to_state_dict(getattr(value, name)) for name in names}

  def from_state_dict(target, saved):
    if set(saved) != set(names):
      raise ValueError(
        f"{cls.__name__} has the fields {names}; the saved state has {sorted(saved)}."
      )
    for name in names:
      missing = getattr(target, name) is None
      if missing != (saved[name] is None):
        raise ValueError(
          f"{cls.__name__}.{name} is {'not used here' if missing else 'needed'}, but the saved"
          f" state {'has' if missing else 'does not have'} it: it was saved with other arguments"
          " of the wrapper. Restore it with the arguments that it was saved with."
        )
    return cls(
      **{
        name: serialization.from_state_dict(getattr(target, name), saved[name], name=name)
        for name in names
      }
    )

  serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)
  return cls


def copy_tree(params: Tree) -> Tree:
  """A copy that shares no buffer with `params`, so that both can be donated; abstract leaves stay
  abstract."""

  def copy(x):
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.array(x, copy=True)

  return jax.tree.map(copy, params)


def _instances(tree: Tree, cls: type[State]) -> Iterator[State]:
  """Every instance of `cls` in a tree, an outer one before those inside it."""
  for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, cls)):
    if isinstance(node, cls):
      yield node
      fields = [getattr(node, field.name) for field in dataclasses.fields(node)]  # type: ignore[arg-type]
      yield from _instances(fields, cls)


def get_state(opt_state: Tree, state_class: type[State]) -> State:
  """Returns the one state of a class, wherever it is nested.

  Looks inside chains, masks, partitions, other wrappers, a Flax `TrainState`: any pytree.

  Args:
    opt_state: an optimizer state, or any pytree that holds one.
    state_class: for example `ElasticAverageState`.

  Returns:
    The state. Stacked workers' states come back stacked.

  Raises:
    ValueError: if there is none, or more than one.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = optax.chain(optax.clip(1.0), ow.drop_stale(optax.adam(0.1), max_staleness=2))
    >>> int(ow.get_state(tx.init(jnp.zeros(3)), ow.DropStaleState).step)
    0
  """
  if not isinstance(state_class, type):
    raise TypeError(
      f"get_state: state_class must be a class such as ElasticAverageState, got {state_class!r}."
    )
  found = list(_instances(opt_state, state_class))
  if len(found) != 1:
    raise ValueError(
      f"get_state: needed exactly one {state_class.__name__}, found {len(found)}. Pass the"
      " optimizer state that holds it; where several wrappers of a kind are nested, pass the part"
      " that holds the one you mean."
    )
  return found[0]


def reduced(opt_state: Tree) -> Tree:
  """Every state of this library in `opt_state` as it is where a reduction over shards stands
  outside it."""

  def visit(node):
    if not isinstance(node, WrapperState):
      return node
    fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return node.replace(**{name: reduced(value) for name, value in fields.items()}).reduced()

  return jax.tree.map(visit, opt_state, is_leaf=lambda x: isinstance(x, WrapperState))


def _map_layout(
  own: Callable[[Any], Any],
  shared: Callable[[Any], Any],
  opt_state: Tree,
  replicated: bool,
  divided: Callable[[Any], Any] | None = None,
) -> Tree:
  """Applies `own` to the leaves that each worker or shard holds for itself, `shared` to the others.

  `divided`, by default `own`, is for those of which each holds a part.
  """

  def is_wrapper_state(x):
    return isinstance(x, WrapperState)

  def stops(x):
    return isinstance(x, (WrapperState, *_OPTAX_MAY_SKIP))

  def visit(node, is_own, may_differ):
    if isinstance(node, _OPTAX_MAY_SKIP):
      inside = functools.partial(visit, is_own=is_own, may_differ=may_differ or is_own)
      return jax.tree.map(inside, node, is_leaf=lambda x: x is not node and stops(x))
    if not is_wrapper_state(node):
      return (shared if replicated else own)(node)
    inside = functools.partial(
      visit,
      is_own=is_own or (node.owns_inner and not replicated),
      may_differ=may_differ or (is_own and node.may_skip),
    )
    fields = {}
    for field in dataclasses.fields(node):
      value, name = getattr(node, field.name), field.name
      if name in node.lockstep_fields:
        fields[name] = jax.tree.map(own if may_differ else shared, value)
      elif name in node.shared_fields:
        fields[name] = jax.tree.map(own if is_own else shared, value)
      elif name in node.per_shard_fields:
        fields[name] = jax.tree.map(own, value)
      elif name in node.divided_fields:
        fields[name] = jax.tree.map(own if is_own else divided or own, value)
      else:
        fields[name] = jax.tree.map(inside, value, is_leaf=stops)
    return type(node)(**fields)

  return jax.tree.map(
    functools.partial(visit, is_own=False, may_differ=False), opt_state, is_leaf=stops
  )


def stack_workers(opt_state: Tree, num_workers: int, *, replicated: bool = False) -> Tree:
  """Adds a leading worker axis to the leaves that each worker holds for itself.

  Works on parameters too: in a tree without wrapper states every leaf is a worker's own.

  Args:
    opt_state: one worker's optimizer state, as `init` returns it.
    num_workers: the length of the new axis.
    replicated: False for workers, each with parameters of its own. True for shards that hold
      replicas of the same parameters: then only what differs by nature,
      `GatherTowersState.accumulated`, gets the axis.

  Returns:
    The same structure; a worker's own leaves are `[num_workers, ...]`, all workers starting equal.
    Of a field that is divided, such as `ElasticAverageState.center_part`, each worker gets its
    part, `[num_workers, part]`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), "workers")
    >>> state = tx.init(jnp.zeros(3))
    >>> state = ow.stack_workers(state, 4)
    >>> state.center.shape, state.inner_state[0].trace.shape
    ((3,), (4, 3))
  """
  num_workers = _checks.integer("stack_workers", "num_workers", num_workers, minimum=1)

  def stack(x):
    return jnp.repeat(jnp.asarray(x)[None], num_workers, axis=0)

  return _map_layout(
    stack,
    lambda x: x,
    opt_state,
    replicated,
    divided=lambda x: _collectives.shares(jnp.asarray(x), num_workers),
  )


def worker_axes(opt_state: Tree, *, replicated: bool = False) -> Tree:
  """The axis of the worker in every leaf of a stacked state: `in_axes` and `out_axes` for vmap and
  pmap.

  Args:
    opt_state: the state, stacked or not; only its structure is read.
    replicated: as in `stack_workers`.

  Returns:
    The same structure with 0 for a worker's own leaves and None for shared ones.
  """
  return _map_layout(lambda _: 0, lambda _: None, opt_state, replicated)


def worker_specs(
  opt_state: Tree, axis_name: Hashable | tuple[Hashable, ...], *, replicated: bool = False
) -> Tree:
  """The `PartitionSpec` of every leaf of a stacked state: shard_map's specs, and NamedShardings.

  Inside shard_map a worker's own leaf still has its leading axis, of length one: take it off with
  `x[0]` on the way in and put it back with `x[None]` on the way out.

  Args:
    opt_state: the state, stacked or not; only its structure is read.
    axis_name: the mesh axis, or axes, over which the workers lie.
    replicated: as in `stack_workers`.

  Returns:
    The same structure with `PartitionSpec(axis_name)` for a worker's own leaves, `PartitionSpec()`
    for shared ones.
  """
  names = _axes.axis_names(axis_name)
  own = PartitionSpec(names[0] if len(names) == 1 else names)
  return _map_layout(lambda _: own, lambda _: PartitionSpec(), opt_state, replicated)
