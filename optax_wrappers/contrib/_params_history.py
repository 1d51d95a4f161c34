"""Parameters of earlier steps, stored for gradients that were computed on them."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_wrappers import get_state, states
from optax_wrappers.contrib import _gradients
from optax_wrappers.contrib._arrays import copied, select
from optax_wrappers.contrib._delay_compensation import DelayCompensationState


@states.dataclass
class ParamsHistoryState(states.State):
  """State of `params_history`.

  Attributes:
    history: the parameters of the last `max_staleness + 1` steps, each leaf `[max_staleness + 1,
      ...]`; step `t` is in slot `t % (max_staleness + 1)`.
    latest: the parameters after the last update.
    inner_state: state of the wrapped optimizer.
  """

  history: Any = states.field(slots=True)
  latest: Any
  inner_state: Any


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
  if not isinstance(max_staleness, numbers.Integral) or max_staleness < 0:
    raise ValueError(f"params_history: max_staleness must be at least 0, got {max_staleness!r}.")
  inner, num_slots = optax.with_extra_args_support(inner), max_staleness + 1

  def init_fn(params):
    inner_state = inner.init(params)
    # Raises unless there is one.
    get_state(inner_state, states.StalenessState)
    history = states.filled_slots(params, num_slots)
    return ParamsHistoryState(history=history, latest=copied(params), inner_state=inner_state)

  def update_fn(updates, state, params=None, *, computed_params=None, **extra_args):
    if params is None:
      raise ValueError("params_history: params is needed: tx.update(updates, state, params).")
    if not isinstance(state, ParamsHistoryState):
      raise TypeError(f"params_history: state must be a ParamsHistoryState, got {state!r}.")
    for slots in jax.tree.leaves(state.history):
      if len(slots) != num_slots:
        raise ValueError(
          f"params_history: the state was made for max_staleness={len(slots) - 1}, and this is"
          f" {max_staleness}. Pass that one, or start again with tx.init(params)."
        )
    params = jax.tree.map(jnp.asarray, params)
    step = get_state(state.inner_state, states.StalenessState).step
    # Written before anything is read, so that XLA updates in place.
    history = states.write_slot(state.history, params, step % num_slots)
    computed_at = extra_args.get("computed_at")
    compensates = _gradients.instances(state.inner_state, DelayCompensationState)
    if computed_params is None and computed_at is not None and compensates:
      with jax.numpy_dtype_promotion("standard"):
        # A gradient older than the history is dropped, whatever it is compared with.
        version = jnp.clip(computed_at, 0, step).astype(jnp.int32)
      computed_params = states.read_slot(history, version % num_slots)
    if computed_params is not None:
      extra_args["computed_params"] = computed_params
    updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    latest = jax.tree.map(
      lambda p, u: p if u is None else optax.apply_updates(p, u), params, updates
    )
    return updates, ParamsHistoryState(history=history, latest=latest, inner_state=inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def past_params(opt_state: Any, staleness: ArrayLike) -> Any:
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
  state = get_state(opt_state, ParamsHistoryState)
  ago = jnp.asarray(staleness)
  if ago.shape or not jnp.issubdtype(ago.dtype, jnp.integer):
    raise TypeError(f"past_params: staleness must be an int scalar, got {jax.typeof(ago)}.")
  step = get_state(state.inner_state, states.StalenessState).step
  num_slots = len(jax.tree.leaves(state.history)[0])
  # The slots hold the steps before this one, which is `latest`.
  ago = jnp.clip(ago.astype(jnp.int32), 0, jnp.minimum(step, num_slots - 1))
  past = states.read_slot(state.history, (step - ago) % num_slots)
  return select(ago > 0, past, state.latest)
