"""Delay compensation: stale gradients, corrected to the current parameters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_wrappers import states
from optax_wrappers.contrib import _gradients


@states.dataclass
class DelayCompensationState(states.State):
  """State of `delay_compensation`.

  Attributes:
    mean_square: the running mean of the squared gradients, same structure as params, float32 or
      wider, each shard's own; None without `decay`.
  """

  mean_square: Any = states.field("per_shard")


def delay_compensation(
  strength: ArrayLike = 0.04, *, decay: ArrayLike | None = None, eps: ArrayLike = 1e-7
) -> optax.GradientTransformationExtraArgs:
  """Corrects a stale gradient, to first order, to the current parameters (DC-ASGD).

  A gradient `g` at `w_then` becomes `g + lambda g^2 (w - w_then)` at the parameters `w`,
  elementwise: the square approximates the diagonal of the Hessian. Without `decay`, `lambda` is
  `strength`. With it, first `s <- decay s + (1 - decay) g^2`, and `lambda = strength / sqrt(s +
  eps)`; an element that is not finite does not change `s`.

  Put it before a weight: `optax.chain(delay_compensation(), staleness_aware(...))`.

  Args:
    strength: `lambda` or its numerator, at least 0; 2.0 in the paper's adaptive form.
    decay: of the mean square, in [0, 1); 0.95 in the paper. None: `lambda` is constant.
    eps: added to the mean square, above 0.

  Returns:
    A gradient transformation, with a `DelayCompensationState`. update needs params.

  Raises:
    TypeError, ValueError: for arguments that are no real scalars or out of range; in update, for
      integer updates, and params or `computed_params` that are missing or do not fit.

  Extra args:
    computed_params: the parameters that the gradient was computed on, same structure as params;
      `params_history` outside looks them up.

  **Communication**: none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = optax.chain(ow.contrib.delay_compensation(0.5), optax.sgd(1.0))
    >>> then, now = jnp.array(1.0), jnp.array(2.0)
    >>> gradient = jnp.array(2.0)  # moved: 2 + 0.5 * 4 * 1
    >>> tx.update(gradient, tx.init(now), now, computed_params=then)[0].item()
    -4.0

  Source: Zheng et al. 2017 (arXiv 1609.08326), DC-ASGD with constant and adaptive `lambda`;
  tf.contrib.opt.DelayCompensatedGradientDescentOptimizer had the constant one.
  """
  for name, value, is_valid, bounds in (
    ("strength", strength, lambda x: x >= 0, "at least 0"),
    ("decay", 0 if decay is None else decay, lambda x: 0 <= x < 1, "in [0, 1)"),
    ("eps", eps, lambda x: x > 0, "above 0"),
  ):
    if not isinstance(value, jax.core.Tracer) and not is_valid(value):
      raise ValueError(f"delay_compensation: {name} must be {bounds}, got {value}.")

  def init_fn(params):
    if decay is None:
      return DelayCompensationState(mean_square=None)
    dtypes = jax.tree.map(lambda x: jnp.finfo(_gradients.wide_dtype(x)).dtype, params)
    return DelayCompensationState(mean_square=jax.tree.map(jnp.zeros_like, params, dtypes))

  def update_fn(updates, state, params=None, *, computed_params=None, **extra_args):
    del extra_args
    if (state.mean_square is None) != (decay is None):
      raise ValueError(
        f"delay_compensation: decay is {decay}, but the state was made"
        f" {'without' if state.mean_square is None else 'with'} one. Start again: tx.init(params)."
      )
    if params is None or computed_params is None:
      raise ValueError(
        f"delay_compensation: {'params' if params is None else 'computed_params'} is needed. Call"
        " tx.update(updates, state, params, computed_params=then), with the parameters that the"
        " gradient was computed on, or put params_history(...) outside."
      )
    updates = _gradients.checked("delay_compensation", updates, params)
    if decay is None:
      mean_square, roots = None, jax.tree.map(lambda _: 1.0, params)
    else:
      average = functools.partial(_averaged, decay)
      mean_square = jax.tree.map(average, params, updates, state.mean_square)
      roots = jax.tree.map(lambda s: lax.rsqrt(s + jnp.asarray(eps, s.dtype)), mean_square)
    compensate = functools.partial(_compensated, strength)
    updates = jax.tree.map(compensate, params, updates, computed_params, roots)
    return updates, DelayCompensationState(mean_square=mean_square)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _square(g):
  """The squares of absolute values, in float32 or wider."""
  return jnp.square(jnp.abs(g.astype(_gradients.wide_dtype(g))))


def _averaged(decay, _, g, mean_square):
  """The mean of the squares of a variable's gradients."""
  if g is None:
    return mean_square
  dtype = mean_square.dtype
  square = _square(g).astype(dtype)
  new = jnp.asarray(decay, dtype) * mean_square + jnp.asarray(1 - decay, dtype) * square
  # A NaN must not stay.
  return jnp.where(jnp.isfinite(new), new, mean_square)


def _compensated(strength, now, g, then, root):
  """One compensated gradient; `lambda` is `strength * root`."""
  if g is None:
    return None
  if jnp.shape(then) != jnp.shape(now):
    raise ValueError(
      f"delay_compensation: computed_params must have the parameter's shape {jnp.shape(now)}, got"
      f" {jnp.shape(then)}."
    )
  dtype, square = _gradients.wide_dtype(g), _square(g)
  factor = jnp.asarray(strength, square.dtype) * square * jnp.asarray(root, square.dtype)
  # w - w_then.
  moved = jnp.asarray(now, dtype) - jnp.asarray(then, dtype)
  return (g.astype(dtype) + factor.astype(dtype) * moved).astype(g.dtype)
