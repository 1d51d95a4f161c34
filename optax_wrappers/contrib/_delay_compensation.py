"""Delay compensation: stale gradients, corrected to the current parameters."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _checks, _numerics, _states
from optax_wrappers._core._states import require_same, require_state
from optax_wrappers._core._types import Tree


@_states.dataclass
class DelayCompensationState(_states.State):
  """State of `delay_compensation`.

  Attributes:
    mean_square: the running mean of the squared gradients, same structure as params, float32 or
      wider, each shard's own; None without `decay`.
  """

  mean_square: Tree = _states.field("per_shard")


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
  wrapper = "delay_compensation"
  strength = _checks.number(wrapper, "strength", strength, lambda x: x >= 0, "at least 0")
  if decay is not None:
    decay = _checks.number(wrapper, "decay", decay, lambda x: 0 <= x < 1, "in [0, 1)")
  eps = _checks.number(wrapper, "eps", eps, lambda x: x > 0, "above 0")

  def init_fn(params):
    if decay is None:
      return DelayCompensationState(mean_square=None)
    squares = jax.tree.map(lambda x: jnp.zeros_like(x, _squares_dtype(x)), params)
    return DelayCompensationState(mean_square=squares)

  def update_fn(updates, state, params=None, *, computed_params=None, **extra_args):
    require_state(wrapper, state, DelayCompensationState)
    made_for, keeps = state.mean_square is not None, decay is not None
    require_same(wrapper, {"keeps a mean square": made_for}, {"keeps a mean square": keeps})
    params = _checks.params_given(wrapper, params)
    if computed_params is None:
      raise ValueError(
        f"{wrapper}: computed_params is needed, the parameters that the gradient was computed on."
        " Call tx.update(..., computed_params=then), or put params_history(...) outside."
      )
    updates = _checks.inexact(wrapper, updates)
    _checks.same_shapes(wrapper, updates, params)
    _checks.same_shapes(wrapper, computed_params, params)
    now, treedef = jax.tree.flatten(params)
    gradients, then = treedef.flatten_up_to(updates), treedef.flatten_up_to(computed_params)
    squares = [None] * len(now) if decay is None else jax.tree.leaves(state.mean_square)
    moved, new_squares = [], []
    for g, w, w_then, s in zip(gradients, now, then, squares, strict=True):
      if g is not None:
        g, s = _compensated(g, w, jnp.asarray(w_then), s, strength, decay, eps)
      moved.append(g)
      new_squares.append(s)
    mean_square = None if decay is None else treedef.unflatten(new_squares)
    return treedef.unflatten(moved), DelayCompensationState(mean_square=mean_square)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _compensated(g, now, then, mean_square, strength, decay, eps):
  """One compensated gradient, and the mean of its squares."""
  dtype = _numerics.at_least_float32(g.dtype)
  wide, square = g.astype(dtype), jnp.square(jnp.abs(g.astype(dtype)))
  factor = _numerics.times(strength, square)  # lambda g^2
  if decay is not None:
    new = _numerics.times(decay, mean_square) + _numerics.times(1 - decay, square)
    mean_square = jnp.where(jnp.isfinite(new), new, mean_square)  # a NaN must not stay
    factor = factor * jax.lax.rsqrt(mean_square + _numerics.times(eps, jnp.ones_like(mean_square)))
  moved = now.astype(dtype) - then.astype(dtype)  # w - w_then
  return (wide + factor.astype(dtype) * moved).astype(g.dtype), mean_square


def _squares_dtype(x):
  """The dtype of a variable's absolute square."""
  dtype = _numerics.at_least_float32(_numerics.dtype_of(x))
  return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32
