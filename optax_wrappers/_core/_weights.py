"""How a weight reaches the reduction that divides by it.

One rule: a wrapper that takes the extra arg `weight` passes on the weight of its result. That is 0
for a stale gradient, the sum of their weights for several towers, and the sum over the axis for a
mean over an axis. A sum consumes its weights and passes on none.

A reduction inside an optimizer appears in its state as a `Reduced` node without leaves. It is thus
part of the key of every cached trace, so an inner `jax.jit` is traced again if it changes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax

from optax_wrappers._core import _axes, _checks, _numerics
from optax_wrappers._core._states import OwnersState, instances, require_same, require_state, static
from optax_wrappers._core._types import AxisNames, Tree

Path: TypeAlias = tuple[Any, ...]

# They pass their extra args to the user's loss, which takes no weight.
_LINE_SEARCHES = (optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState)


@static
class Reduced:
  """In the state of a wrapper that reduces updates over shards: what it does."""

  names: AxisNames
  is_mean: bool  # whether it divides by the weights
  # Whether the optimizer inside receives this shard's share of each.
  is_divided: bool = False
  # Whether a wrapper outside passes on a weight in this call. If none arrives, a transformation in
  # between has dropped extra args.
  awaits_weight: bool = False


# The gradients of workers that own their parameters pass only through the inner optimizer. What
# else is reduced in their states is not a gradient.
_SEEN = (Reduced, OwnersState)


def inside(state: Tree, path: Path = ()) -> list[tuple[Path, Reduced]]:
  """The reductions over shards in an optimizer's state, wherever they are, by their paths."""
  reductions: list[tuple[Path, Reduced]] = []
  for keys, node in jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, _SEEN)):
    if isinstance(node, Reduced):
      reductions += [(path + keys, node)] if node.names else []
    elif isinstance(node, OwnersState):
      reductions += inside(node.inner_state, path + keys)
  return reductions


def _marked(state: Tree, mark: Callable[[Reduced], Reduced]) -> Tree:
  """The state with each reduction replaced by `mark(node)`."""

  def inside_of(node):
    return node.replace(inner_state=_marked(node.inner_state, mark))

  return jax.tree.map(
    lambda x: mark(x) if isinstance(x, Reduced) else inside_of(x) if isinstance(x, _SEEN) else x,
    state,
    is_leaf=lambda x: isinstance(x, _SEEN),
  )


def given(
  wrapper: str, weight: Any, leaves: list[jax.Array], num_towers: int | None = None
) -> jax.Array | None:
  """The extra arg `weight`, checked, in the dtype that these updates need; None if not given."""
  if weight is None:
    return None
  return _checks.weight(wrapper, weight, num_towers).astype(_numerics.weight_dtype(leaves))


def require_reduced(wrapper: str, state: Any, state_class: Any, node: Reduced, weight: Any) -> None:
  """Raises for a state of other arguments than those in `node`, and for a weight that was lost."""
  require_state(wrapper, state, state_class)
  awaits = state.reduced.awaits_weight
  require_same(wrapper, state.reduced, dataclasses.replace(node, awaits_weight=awaits))
  if awaits and weight is None:
    raise ValueError(
      f"{wrapper} over {node.names}: a wrapper outside passes on a weight that is lost: a"
      " transformation in between takes no extra args, or is a sum. Let it pass them on, or put it"
      " outside."
    )


def update(
  wrapper: str,
  inner: optax.GradientTransformationExtraArgs,
  updates: Tree,
  inner_state: Tree,
  params: Tree,
  weight: jax.Array | None,
  extra_args: dict[str, Any],
  over: AxisNames | None = None,
  reductions: list[tuple[Path, Reduced]] | None = None,
) -> tuple[Tree, Tree]:
  """`inner.update` with a weight, without which the reductions inside raise in this call.

  `over` are the axes over which the weight may differ; None: all. A weight of None is no weight.
  `reductions` are those that `inside` has found in this state, if it was asked before.
  """
  nodes: list[tuple[Path, Reduced]] = []  # those that divide by it
  if weight is not None:
    nodes = inside(inner_state) if reductions is None else reductions
    if nodes or not any(instances(inner_state, _LINE_SEARCHES)):
      extra_args = extra_args | {"weight": weight}
  if not nodes:
    return inner.update(updates, inner_state, params, **extra_args)
  _require_one(wrapper, inner_state, nodes, over)
  mark = functools.partial(dataclasses.replace, awaits_weight=True)
  return _update_marked(mark, inner, updates, inner_state, params, extra_args)


def update_reduced(
  wrapper: str,
  inner: optax.GradientTransformationExtraArgs,
  updates: Tree,
  inner_state: Tree,
  params: Tree,
  total_weight: jax.Array | None,
  extra_args: dict[str, Any],
  is_mean: bool,
) -> tuple[Tree, Tree]:
  """`inner.update` with the mean or the sum of updates. A weighted sum passes on no weight.

  `total_weight` is the sum of the weights of a mean; for a sum it is anything, or None if there
  were no weights.
  """
  if is_mean or total_weight is None:
    return update(wrapper, inner, updates, inner_state, params, total_weight, extra_args)

  def unweighted(node):
    if node.names and node.is_mean and node.awaits_weight:
      raise ValueError(
        f"{wrapper}: a mean over {node.names} of a sum of unequal weights no longer has weights."
        " Take the mean first and the sum after it, or reduce over all axes at once."
      )
    return dataclasses.replace(node, awaits_weight=False)

  return _update_marked(unweighted, inner, updates, inner_state, params, extra_args)


def _update_marked(mark, inner, updates, inner_state, params, extra_args):
  asked = _marked(inner_state, mark)
  new_updates, new_state = inner.update(updates, asked, params, **extra_args)
  # The state is returned in the structure in which it was given.
  return new_updates, jax.tree.structure(inner_state).unflatten(jax.tree.leaves(new_state))


def _require_one(wrapper, state, nodes, over):
  """Raises if a weight would be used twice, or for the gradients of other calls."""
  for several in instances(state, optax.MultiStepsState):
    if inside(several):
      raise ValueError(
        f"{wrapper}: optax.MultiSteps inside takes the weight of its last call for that of all. Use"
        " gather_towers, or put optax.MultiSteps outside."
      )
  taking = [path for path, node in nodes if over is None or set(node.names) & set(over)]
  for path, other in itertools.pairwise(taking):
    # The transformations of a chain are the entries of a tuple, those of a partition of a dict.
    key = next((a for a, b in zip(path, other) if a != b), None)
    if isinstance(key, jax.tree_util.SequenceKey):
      raise ValueError(
        f"{wrapper}: optax.chain gives one weight to two reductions, but the second needs"
        " another. Reduce over all axes at once, or split the parameters with optax.partition."
      )


def names_of(reductions: list[tuple[Path, Reduced]]) -> AxisNames:
  """The axes of the reductions that `inside` has found."""
  return tuple(dict.fromkeys(name for _, node in reductions for name in node.names))


def require_decided(
  wrapper: str, what: str, accept: jax.Array, names: AxisNames, reduced_inside: AxisNames
) -> None:
  """Raises if shards that are reduced over inside could disagree on dropping a step."""
  others = tuple(name for name in reduced_inside if name not in names)
  (open_names,) = _axes.unreduced_names([accept], others)
  if open_names:
    raise ValueError(
      f"{wrapper}: {what} decides over {names} whether a step is dropped, but the updates are also"
      f" reduced over {open_names}. Pass axis_name={(*names, *open_names)!r}."
    )
