"""Steps left out because their loss or their gradient is far above those before."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_wrappers import states
from optax_wrappers.contrib import _arrays, _inner
from optax_wrappers.contrib._length import squared_length


@states.dataclass
class SkipSpikesState(states.State):
  """State of `skip_spikes`.

  Attributes:
    window: the last losses, or gradient norms; float32 `[window]`.
    num_values: how many of them there are; int32 scalar.
    position: where the next one goes; int32 scalar.
    skipped: steps skipped so far; int32 scalar.
    in_a_row: those since the last step that was taken; int32 scalar.
    inner_state: of the wrapped optimizer.
  """

  may_skip = True

  window: jax.Array = states.field("shared")
  num_values: jax.Array = states.field("shared")
  position: jax.Array = states.field("shared")
  skipped: jax.Array = states.field("shared")
  in_a_row: jax.Array = states.field("shared")
  inner_state: Any

  def metrics(self, of_params: Any) -> dict[str, jax.Array]:
    """See `State`."""
    return {"skipped_steps": self.skipped}


def skip_spikes(
  inner: optax.GradientTransformation,
  axis_name: Hashable | Sequence[Hashable] | None = None,
  *,
  sigma: float = 6.0,
  window: int = 128,
  min_steps: int | None = None,
  max_skips: int | None = 10,
  ddof: int = 0,
  remember_spikes: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Skips a step whose loss, or gradient norm, is above `mean + sigma * std` of the last ones.

  A skipped step has zero updates and leaves the inner state as it was. With the extra arg `value`
  the loss decides, else the norm of the gradient. A step in which either is not finite is a spike,
  and never taken.

  Args:
    inner: the optimizer to wrap.
    axis_name: the axis or axes of shards that decide together, bound in update: by the mean of
      their losses, or the root mean square of their gradients' norms. Name axes that divide the
      parameters, too. None: the gradient and the loss are those of the whole batch, or each worker
      decides for itself.
    sigma: standard deviations above the mean that a spike is.
    window: steps that the mean is taken over.
    min_steps: steps before the first that can be skipped for its size, at least 1; None: half a
      window, at least 2.
    max_skips: after so many steps in a row a finite one is taken, whatever its size; None: never.
    ddof: 0, or 1 for the unbiased variance.
    remember_spikes: whether skipped steps, if finite, enter the window too, so that a new level is
      soon no spike.

  Returns:
    The wrapped optimizer, with a `SkipSpikesState`; `metrics` counts `skipped_steps`.

  Raises:
    ValueError: for arguments out of range; in update, if shards would decide differently on equal
      parameters: name their axis.
    TypeError: in update, for a state of another optimizer.

  Extra args:
    value: the loss, a real scalar. `inner` gets it as well, and all others.

  **Communication**: that of `inner` in every step; with `axis_name` one all-reduce of 8 bytes.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.contrib.skip_spikes(optax.sgd(1.0), window=4)
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for gradient in (1.0, 1.5, 100.0, float("nan"), 1.2):
    ...   updates, state = tx.update(jnp.array(gradient), state, params)
    ...   print(updates)
    -1.0
    -1.5
    0.0
    0.0
    -1.2
    >>> print(ow.metrics(state)["skipped_steps"])
    2.0

  Source: the rule of the trainers OLMo-core, Levanter and MaxText, which ask both the loss and the
  norm, with `max_skips=None, remember_spikes=True`. Levanter's `min_steps` is the default, that of
  MaxText one less, with `ddof=1`.
  """
  wrapper = "skip_spikes"
  least = max(2, window // 2) if min_steps is None and isinstance(window, int) else min_steps
  inner = _inner.checked(wrapper, inner)
  _check(wrapper, sigma, window, least, max_skips, ddof)

  def init_fn(params):
    return SkipSpikesState(
      window=jnp.zeros(window, jnp.float32),
      num_values=jnp.zeros((), jnp.int32),
      position=jnp.zeros((), jnp.int32),
      skipped=jnp.zeros((), jnp.int32),
      in_a_row=jnp.zeros((), jnp.int32),
      inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, *, value=None, **extra_args):
    if not isinstance(state, SkipSpikesState):
      raise TypeError(f"{wrapper}: state must be a SkipSpikesState, from init; got {state!r}.")
    size, is_finite = _size(wrapper, updates, value, axis_name)
    is_spike = size > _threshold(state, sigma, ddof)
    may_skip = state.num_values >= least
    if max_skips is not None:
      may_skip &= state.in_a_row < max_skips
    accept = is_finite & ~(is_spike & may_skip)
    enters = is_finite if remember_spikes else accept

    if value is not None:
      extra_args["value"] = value
    new_updates, new_inner = inner.update(updates, state.inner_state, params, **extra_args)
    _require_one_decision(wrapper, accept, new_updates)
    new_updates, inner_state = _inner.taken_if(accept, new_updates, new_inner, state.inner_state)
    entered = (
      state.window.at[state.position].set(size),
      jnp.minimum(state.num_values + 1, window),
      (state.position + 1) % window,
    )
    old = state.window, state.num_values, state.position
    values, num_values, position = _arrays.select(enters, entered, old)
    return new_updates, state.replace(
      window=values,
      num_values=num_values,
      position=position,
      skipped=jnp.where(accept, state.skipped, optax.safe_increment(state.skipped)),
      in_a_row=jnp.where(accept, 0, optax.safe_increment(state.in_a_row)),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check(wrapper, sigma, window, least, max_skips, ddof):
  """Raises for arguments out of range."""
  for name, given, lowest in (
    ("window", window, 2),
    ("min_steps", least, 1),
    ("max_skips", 0 if max_skips is None else max_skips, 0),
    ("ddof", ddof, 0),
  ):
    if not isinstance(given, int) or given < lowest:
      raise ValueError(f"{wrapper}: {name} must be an int of at least {lowest}, got {given!r}.")
  if least > window:
    raise ValueError(f"{wrapper}: min_steps must be at most window, {window}; got {least}.")
  if not (isinstance(sigma, jax.Array) or 0 <= sigma < math.inf):
    raise ValueError(f"{wrapper}: sigma must be a number of at least 0, got {sigma!r}.")


def _size(wrapper, updates, value, axis_name):
  """The loss, or the norm of the gradient, of all shards; and whether both are finite."""
  squared = squared_length(updates)
  loss = squared if value is None else jnp.asarray(value, jnp.float32)
  if loss.ndim:
    raise ValueError(f"{wrapper}: value must be a scalar, the loss; got shape {loss.shape}.")
  pair = jnp.stack([loss, squared])
  if axis_name is not None:
    try:
      pair = lax.pmean(pair, axis_name)
    except NameError as error:
      raise ValueError(f"{wrapper}: axis_name {axis_name!r} is not bound here.") from error
  size = jnp.sqrt(pair[0]) if value is None else pair[0]
  return size, jnp.isfinite(pair).all()


def _threshold(state, sigma, ddof):
  """`mean + sigma * std` of the values in the window."""
  count = state.num_values.astype(jnp.float32)
  is_there = jnp.arange(state.window.size, dtype=jnp.int32) < state.num_values
  mean = jnp.sum(jnp.where(is_there, state.window, 0)) / jnp.maximum(count, 1)
  squares = jnp.where(is_there, jnp.square(state.window - mean), 0)
  std = jnp.sqrt(jnp.sum(squares) / jnp.maximum(count - ddof, 1))
  # Rounding alone is no spike where all values are equal.
  return mean + sigma * jnp.maximum(std, 1e-6 * jnp.abs(mean))


def _require_one_decision(wrapper, accept, updates):
  """Raises if the decision may differ between shards whose updates are equal."""
  own = jax.typeof(accept).manual_axis_type.varying
  for leaf in jax.tree.leaves(updates):
    names = sorted(map(str, own - jax.typeof(leaf).manual_axis_type.varying))
    if names:
      raise ValueError(
        f"{wrapper}: the loss or the gradient differs between shards of {names}, whose updates are"
        f" equal. Pass axis_name={names[0]!r}, so that they decide together."
      )
