"""Parameters of earlier steps, stored for gradients that were computed on them."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _checks, _numerics, _states
from optax_wrappers._core._states import (
  copy_tree,
  get_state,
  instances,
  require_same,
  require_state,
)
from optax_wrappers._core._types import Tree
from optax_wrappers._late import _age_weights
from optax_wrappers._late._staleness_aware import StalenessState
from optax_wrappers.contrib._delay_compensation import DelayCompensationState
from optax_wrappers.states import filled_slots, read_slot, write_slot


@_states.dataclass
class ParamsHistoryState(_states.State):
  """State of `params_history`.

  Attributes:
    history: the parameters of the last `max_staleness + 1` steps, each leaf `[max_staleness + 1,
      ...]`; step `t` is in slot `t % (max_staleness + 1)`.
    latest: the parameters after the last update.
    inner_state: state of the wrapped optimizer.
  """

  history: Tree = _states.field(slots=True)
  latest: Tree
  inner_state: Tree


def params_history(
  inner: optax.GradientTransformation, max_staleness: int
) -> optax.GradientTransformationExtraArgs:
  """Keeps the parameters of the last `max_staleness + 1` steps, for `past_params`.

  A `delay_compensation` inside gets the `computed_params` of the step `computed_at`, unless they
  are given.

  Args:
    inner: an optimizer with one `staleness_aware` or `drop_stale`; each update that this accepts is
      a step.
    max_staleness: the largest age to look up, at least 0.

  Returns:
    The wrapped optimizer, with a `ParamsHistoryState`. update needs params.

  Raises:
    TypeError, ValueError: for a `max_staleness` that is no int or below 0; in init, for none or
      several `StalenessState`; in update, for missing params or a state of another length.

  Extra args: `computed_at` and `computed_params`, as `inner` takes them. All others reach it too.

  **Communication**: none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> inner = ow.drop_stale(optax.sgd(1.0), max_staleness=3)
    >>> tx = ow.contrib.params_history(inner, max_staleness=3)
    >>> params = jnp.array([10.0])
    >>> state, grad = tx.init(params), jnp.ones(1)
    >>> for step in range(4):
    ...   updates, state = tx.update(grad, state, params, computed_at=step)
    ...   params = optax.apply_updates(params, updates)
    >>> print(params, ow.contrib.past_params(state, 2))
    [6.] [8.]

  Source: the shadow variables of parameter servers.
  """
  wrapper = "params_history"
  inner = _checks.optimizer(wrapper, inner)
  num_slots = _checks.integer(wrapper, "max_staleness", max_staleness, minimum=0) + 1

  def init_fn(params):
    inner_state = inner.init(params)
    get_state(inner_state, StalenessState)
    return ParamsHistoryState(
      history=filled_slots(params, num_slots), latest=copy_tree(params), inner_state=inner_state
    )

  def update_fn(updates, state, params=None, *, computed_params=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    require_state(wrapper, state, ParamsHistoryState)
    for slots in jax.tree.leaves(state.history)[:1]:  # none if the tree has no leaves
      require_same(wrapper, {"max_staleness": len(slots) - 1}, {"max_staleness": num_slots - 1})
    step = get_state(state.inner_state, StalenessState).step
    # Written before anything is read, so that XLA updates in place.
    history = write_slot(state.history, params, step % num_slots)
    computed_at = extra_args.get("computed_at")
    compensates = any(instances(state.inner_state, DelayCompensationState))
    if computed_params is None and computed_at is not None and compensates:
      version = _age_weights.to_int32(jnp.asarray(computed_at))
      # A gradient older than the history is dropped, whatever it is compared with.
      computed_params = read_slot(history, jnp.clip(version, 0, step) % num_slots)
    if computed_params is not None:
      extra_args["computed_params"] = computed_params
    updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    _checks.same_structure(wrapper, updates, params)
    latest = _numerics.apply_updates(params, updates)
    return updates, ParamsHistoryState(history=history, latest=latest, inner_state=inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def past_params(opt_state: Tree, staleness: ArrayLike) -> Tree:
  """The parameters of some accepted updates ago, from `params_history`.

  Gradients at `past_params(opt_state, d)`, with `computed_at=step - d`, are d updates old; `step`
  is that of the `StalenessState`.

  Args:
    opt_state: any pytree that holds one `ParamsHistoryState`, else a ValueError.
    staleness: accepted updates, an int scalar, traced or not; cut to the steps taken and to
      `max_staleness`. 0 or less: the parameters after the last update, without the changes that a
      wrapper outside makes to it.

  Returns:
    The same structure as the parameters.

  **Cost**: on a CPU, XLA copies the history in a step that reads it before `update`. Read after it.
  """
  found = get_state(opt_state, ParamsHistoryState)
  ago = _checks.scalar("past_params", "staleness", staleness, jnp.integer).astype(jnp.int32)
  step = get_state(found.inner_state, StalenessState).step
  num_slots = len(jax.tree.leaves(found.history)[0])
  # The slots hold the steps before this one, which is `latest`.
  ago = jnp.clip(ago, 0, jnp.minimum(step, num_slots - 1))
  past = read_slot(found.history, (step - ago) % num_slots)
  return _numerics.select(ago > 0, past, found.latest)
