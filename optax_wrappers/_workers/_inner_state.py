"""What happens to a worker's inner state when the worker moves to the center."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _checks, _numerics, _paths, _shares, _states
from optax_wrappers._core._types import AxisNames, InnerState, Tree
from optax_wrappers._shards._cross_shard import CrossShardState
from optax_wrappers._workers import _center, _participation
from optax_wrappers._workers._exchange_state import ExchangeState

# "reset", or the fields to average (None for all), each at every so many exchanges.
Policy: TypeAlias = str | dict[str | None, int] | None


def policy_of(
  wrapper: str, inner_state: InnerState | Mapping[str, int], fragments: Any, delay: int
) -> Policy:
  """The parsed argument `inner_state`."""
  if not isinstance(inner_state, Mapping):
    if inner_state not in get_args(InnerState):
      named = ", ".join(map(repr, get_args(InnerState)))
      what = f'{wrapper}: inner_state must be one of {named}, or fields such as {{"mu": 3}}'
      raise ValueError(f"{what}; got {inner_state!r}.")
    policies: dict[str, Policy] = {"keep": None, "reset": "reset", "average": {None: 1}}
    return policies[inner_state]
  fields: Any = dict(inner_state)
  for name, every in fields.items():
    if not isinstance(name, str):
      raise TypeError(f"{wrapper}: inner_state must have names of fields, got {name!r}.")
    _checks.integer(wrapper, f"inner_state[{name!r}]", every, minimum=1)
  if delay or not isinstance(fragments, int) or fragments != 1:
    what = f"{wrapper}: inner_state by its fields counts exchanges of all variables at once"
    raise ValueError(f"{what}: it needs fragments=1 and delay=0, got {fragments!r} and {delay}.")
  return fields or None


def check_fields(wrapper: str, policy: Policy, inner_state: Tree, params: Tree) -> None:
  """Raises if a policy does not fit the inner state: a missing field, or a z that stays behind."""
  fields = policy if isinstance(policy, dict) else {}
  is_moved = policy == "reset" or None in fields or fields.get("z") == 1
  left = [x for x in jax.tree.leaves(inner_state, is_leaf=_has_z) if _has_z(x)]
  if left and not is_moved:
    raise ValueError(
      f"{wrapper}: {type(left[0]).__name__} inside would keep its z where an exchange moves the"
      ' params: use local_steps with inner_state="average" or "reset", or put what has it outside.'
    )
  if not fields:
    return
  leaves = jax.tree.leaves(inner_state)
  names = zip(leaves, _fields_of(inner_state, params))
  names_of_fields = sorted(set().union(*(held for x, held in names if _numerics.is_inexact(x))))
  for name in fields:
    if name is not None and name not in names_of_fields:
      what = f"{wrapper}: inner_state must name fields of the state of inner"
      raise ValueError(f"{what}, which are {names_of_fields}; got {name!r}.")


def _has_z(x):
  """Whether a state has another sequence of parameters, z, which the gradients move too.

  Such are Optax's `ScheduleFreeState` and `contrib.PrimalAverageState`.
  """
  return isinstance(x, _states.State | tuple) and hasattr(x, "z")


def _own_paths(inner_state, params):
  """The path of each leaf, without those of the parameters at its end."""
  of_params = {path for path, _ in jax.tree.leaves_with_path(params)}
  paths = [path for path, _ in jax.tree.leaves_with_path(inner_state)]
  # The path of a moment ends with its variable's path, whose attributes may have any names.
  return [
    path[: next((i for i in range(len(path)) if path[i:] in of_params), len(path))]
    for path in paths
  ]


def _fields_of(inner_state, params):
  """The names of the fields around each leaf."""
  paths = _own_paths(inner_state, params)
  return [{key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)} for path in paths]


class Arrived(NamedTuple):
  """A record of the exchanges that have arrived in a step.

  Attributes:
    goes: whether one of them moved this worker; bool scalar.
    weight: its weight in the last one; float32 scalar.
  """

  goes: jax.Array
  weight: jax.Array


def averaged(
  inner_state: Tree, arrived: Arrived, names: AxisNames, params: Tree, field: str | None = None
) -> Tree:
  """The inner state with the workers' means in its inexact leaves; of one field, or of all."""
  leaves, treedef = jax.tree.flatten(inner_state)
  held = zip(leaves, _fields_of(inner_state, params))
  is_chosen = [_numerics.is_inexact(x) and field in (None, *fields) for x, fields in held]
  chosen = [x for x, flag in zip(leaves, is_chosen) if flag]
  # The state of a participating worker may hold a NaN even if its parameters do not.
  weight = jnp.where(_participation.is_finite(chosen, names), arrived.weight, 0)
  wide = list(map(_center.in_center, chosen))
  means, total = _center.mean(_center.WorkerGroup(names), wide, weight)
  goes = arrived.goes & (total > 0)
  new = iter(jnp.where(goes, mean.astype(x.dtype), x) for x, mean in zip(chosen, means))
  moved = [next(new) if flag else x for x, flag in zip(leaves, is_chosen)]
  return jax.tree.unflatten(treedef, moved)


def restarted(
  inner: optax.GradientTransformation, inner_state: Tree, params: Tree, flag: jax.Array | None
) -> Tree:
  """The inner state, begun again if `flag`: a NaN in a moment would make each next step one.

  Only of transformations that have moments of the parameters, as Adam, with its count; the others,
  as a schedule, go on. XLA fuses the choice into the step.
  """
  if flag is None:
    return inner_state
  leaves, treedef = jax.tree.flatten(inner_state)
  fresh = jax.tree.leaves(begun(inner, params))
  moments = [i for i in _of_moments(inner_state, params) if fresh[i].shape == leaves[i].shape]
  before = [leaves[i] for i in moments]
  new = _axes.laid_out_like([fresh[i] for i in moments], before)
  for i, x in zip(moments, _numerics.select(flag, new, before)):
    leaves[i] = x
  return _axes.vary_like(jax.tree.unflatten(treedef, leaves), inner_state)


def begun(inner: optax.GradientTransformation, params: Tree) -> Tree:
  """A worker's initial inner state; of what `cross_shard(shard_state=True)` divides, its share."""
  state = inner.init(params)
  if not any(node.reduced.is_divided for node in _states.instances(state, CrossShardState)):
    return state

  def share(x):
    if not isinstance(x, CrossShardState):
      return x
    return x.replace(inner_state=_shares.share_of(x.inner_state, x.reduced.names))

  return jax.tree.map(
    share, state, is_leaf=lambda x: isinstance(x, CrossShardState) and x.reduced.is_divided
  )


def _of_moments(inner_state, params):
  """The numbers of the leaves in the states of transformations that have moments.

  Without what a worker may not begin again alone: counts of calls, in which workers agree, and what
  an exchange inside shares.
  """
  by_root: dict[Any, list[int]] = {}
  with_moments = set()
  leaves, paths = jax.tree.flatten_with_path(inner_state)[0], _own_paths(inner_state, params)
  of_params = jax.tree.leaves(params)
  for i, ((whole, leaf), path) in enumerate(zip(leaves, paths)):
    at, is_shared, is_count = path, False, False
    for depth, key in enumerate(path):
      if isinstance(key, jax.tree_util.GetAttrKey):
        at = path[:depth]
        node = _paths.at(inner_state, at)
        is_shared |= isinstance(node, ExchangeState) and key.name != "inner_state"
        is_count = isinstance(node, _states.State) and not _numerics.is_inexact(leaf)
    if is_shared or is_count:
      continue
    by_root.setdefault(at, []).append(i)
    is_alone = len(of_params) == 1 and jnp.shape(leaf) == jnp.shape(of_params[0])
    if (len(whole) > len(path) or is_alone) and _numerics.is_inexact(leaf):
      with_moments.add(at)
  # In the order of the state: programs of several processes must be the same.
  return [i for at, numbers in by_root.items() if at in with_moments for i in numbers]
