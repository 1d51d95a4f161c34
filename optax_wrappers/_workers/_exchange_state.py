"""The state of every exchange between workers, and the center in it."""

from typing import Any

import jax

from optax_wrappers._core import _states
from optax_wrappers._core._metrics import length
from optax_wrappers._core._states import OfParams, OwnersState, Workers, instances
from optax_wrappers._core._types import Tree
from optax_wrappers._workers import _fragments
from optax_wrappers._workers._center import Center, join


@_states.dataclass
class ExchangeState(OwnersState):
  """State of `exchange.periodic_exchange`, and base class of the states of other wrappers.

  Attributes:
    step: inner steps taken; int32 scalar.
    since: steps in this round; int32 scalar, 0 when a round begins.
    exchanges: synchronizations of single fragments so far; int32 scalar.
    inner_state: state of this worker's optimizer.
    workers: the axes of the workers, and the arguments that decide the structure; it has no
      leaves.
    kept: the rule's state, a tuple with an entry for each fragment, whose trees have None for the
      variables of others, and a last entry for integers and the like, if there are any.
    countdown: with a delay, the steps until each fragment arrives, int32 `[fragments]`, 0 if
      nothing is in flight; else None.
    in_flight: with a delay, the data of each fragment in flight, a tuple; else None.
    restarts: whether the inner state begins again in this worker's next step, because a center has
      replaced parameters that were not finite; bool scalar; None if nothing replaces them.
  """

  step: jax.Array = _states.field("lockstep")
  since: jax.Array = _states.field("lockstep")
  exchanges: jax.Array = _states.field("lockstep")
  inner_state: Tree = _states.field("owned")
  workers: Workers
  kept: tuple[Any, ...]
  countdown: jax.Array | None = _states.field("lockstep", default=None)
  in_flight: tuple[Any, ...] | None = None
  restarts: jax.Array | None = None

  @property
  def center(self) -> Tree:
    """The center, like params, in float32 or wider; None if there is none or it is divided."""
    return None if self.is_divided else self.joined("center")

  @property
  def center_share(self) -> Tree:
    """With `shard_center`, this worker's share of the center, same structure as params; else None.

    Along the first dimension that is a multiple of W, or the largest one padded with zeros, worker
    i holds the elements i, i + W, i + 2 W, ... of a variable, and of the outer optimizer's state
    for it. Every worker holds variables of one element in full.
    """
    return self.joined("center") if self.is_divided else None

  @property
  def is_divided(self) -> bool:
    """Whether the center is divided over the workers."""
    return dict(self.workers.arguments)["shard_center"]

  def metrics(self, of_params: OfParams) -> dict[str, Any]:
    """See `State`."""
    scalars, center = {"exchanges": self.exchanges}, self.center
    if of_params is not None and center is not None:
      distance = length(center, of_params, is_origin=False)
      # None: an outer state may contain a center of some of the parameters.
      scalars |= {} if distance is None else {"center_distance": distance}
    return scalars

  def of_fragments(self, name: str) -> tuple[Any, ...] | None:
    """The rule's field of this name, for each fragment; None if there is none."""
    num_fragments = dict(self.workers.arguments)["fragments"]
    values = [getattr(fragment_state, name, None) for fragment_state in self.kept[:num_fragments]]
    return None if all(value is None for value in values) else tuple(values)

  def joined(self, name: str) -> Tree:
    """The rule's field of this name for each variable, same structure as params; or None."""
    # A center inside an outer state is a different one.
    nodes = jax.tree.leaves(self.kept, is_leaf=lambda x: isinstance(x, Center))
    parts = [getattr(node, name) for node in nodes if isinstance(node, Center)]
    if len(parts) < 2:
      return parts[0] if parts else None
    return _fragments.joined(parts, dict(dict(self.workers.arguments).get("cuts", ())))


def center_params(opt_state: Tree, params: Tree = None) -> Tree:
  """The center of a wrapper over workers, such as `diloco`, to evaluate and save.

  Args:
    opt_state: an optimizer state, or any pytree that holds one state with a center; stacked for
      stacked workers.
    params: one worker's parameters, or `jax.ShapeDtypeStruct` of their shapes; needed with
      `shard_center`.

  Returns:
    The center, same structure as one worker's params.

  Raises:
    ValueError: if there is none, or more than one; with `shard_center` without params.

  Source: `swapping_saver` of tf.contrib.opt.ElasticAverageOptimizer.
  """
  exchanges = list(instances(opt_state, ExchangeState))
  centered = [state for state in exchanges if any(instances(state.kept, Center))]
  if len(centered) != 1:
    mend = "pass the part of the state that holds the one you mean"
    if not centered:
      mend = "pass the state of elastic_average, diloco, or of local steps with an outer optimizer"
    if exchanges and not centered:
      mend = "after an exchange of local SGD all workers have the mean; of other rules take it"
    raise ValueError(f"center_params: needed exactly one center, found {len(centered)}; {mend}.")
  (state,) = centered
  if state.center_share is None:
    return state.center
  if params is None:
    what = "center_params: params is needed, one worker's parameters or their shapes"
    raise ValueError(f"{what}, for a center that is divided over the workers.")
  return join(params, state.center_share)
