"""For gradients at a point between an optimizer's parameters and their running mean."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow
from optax_wrappers import states
from optax_wrappers.contrib import _inner
from optax_wrappers.contrib._arrays import copied


@states.dataclass
class PrimalAverageState(states.State):
  """State of `primal_average`.

  Attributes:
    step: updates so far; int32 scalar.
    mu_y: the position of the parameters, 0 at z, 1 at the mean; real scalar.
    z: the parameters that the inner optimizer moves, same structure as params.
    inner_state: state of the wrapped optimizer.
  """

  step: jax.Array = states.field("lockstep")
  mu_y: jax.Array = states.field("shared")
  z: Any
  inner_state: Any


def primal_average(
  inner: optax.GradientTransformation,
  mu_y: float = 0.7,
  mu_x: optax.ScalarOrSchedule = 0.9967,
) -> optax.GradientTransformationExtraArgs:
  """Generalized primal averaging (GPA): DiLoCo with one worker, smoothed over every step.

  The trained params are y. With z the iterate of `inner`, and x the mean to evaluate,

      z <- z + inner(gradient at y)            weight decay in `inner` is of z
      x <- mu_x x + (1 - mu_x) z
      y <- mu_y x + (1 - mu_y) z

  Only z is stored: x follows from y and z, and `averaged_params` returns it. With
  `mu_x=lambda count: count / (count + 1)` it is `optax.contrib.schedule_free` with equal weights
  and `b1=mu_y`; with `mu_x=0` it is `inner`.

  It must be the outermost transformation of updates: one outside that moves y but not z, such as a
  projection, would move x too. Wrappers over workers may be inside, or around it with
  `inner_state="average"` or `"reset"`.

  Args:
    inner: the optimizer, or a wrapper of it such as `cross_shard`.
    mu_y: in (0, 1], not a schedule; `optax.inject_hyperparams` needs it in `static_args`.
    mu_x: in [0, 1], or a schedule of the count of updates. 0.9967, the default, is 0.9 ** (1 / 32),
      like DiLoCo with rounds of 32 steps; the paper has 0.9 for 1 step, 0.9869 for 8, 0.9984 for
      64.

  Returns:
    The wrapped optimizer, with a `PrimalAverageState`. update needs params.

  Raises:
    TypeError: for params of fewer than 32 bits, in which the mean would not move; for a mu_y that
      is not a Python number.
    ValueError: for numbers out of range; in update, for missing params, and an exchange alone.

  Extra args: all reach `inner`.

  **Communication**: none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.contrib.primal_average(optax.sgd(1.0), mu_y=0.5, mu_x=0.75)
    >>> params = jnp.array(0.0)
    >>> updates, state = tx.update(jnp.array(-8.0), tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params, ow.contrib.averaged_params(state, params))
    5.0 2.0

  Source: "Smoothing DiLoCo with primal averaging" (arXiv 2512.17131). Its authors' program applies
  the weight decay of z in a different order from the printed equations, which this function
  follows.
  """
  inner = _inner.checked("primal_average", inner)
  _check_numbers(mu_y, mu_x)

  def init_fn(params):
    _check_wide(params)
    is_double = any(jnp.result_type(x) == jnp.float64 for x in jax.tree.leaves(params))
    return PrimalAverageState(
      step=jnp.zeros((), jnp.int32),
      mu_y=jnp.asarray(mu_y, jnp.float64 if is_double else jnp.float32),
      z=copied(params),
      inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    if not isinstance(state, PrimalAverageState):
      raise TypeError(f"primal_average: state must be a PrimalAverageState, got {state!r}.")
    if params is None:
      raise ValueError("primal_average: params is needed: tx.update(updates, state, params).")
    if updates is None:
      raise ValueError(
        "primal_average: updates is None, and a synchronization alone is not a step. Put it inside"
        " the wrapper that synchronizes."
      )
    _check_wide(params)
    params = jax.tree.map(jnp.asarray, params)
    moves, inner_state = inner.update(updates, state.inner_state, state.z, **extra_args)
    keep = jnp.asarray(mu_x(state.step) if callable(mu_x) else mu_x, state.mu_y.dtype)

    def change(move, y, z):
      # y' - y from the three lines above, without x = y + (1 / mu_y - 1) (y - z).
      if move is None:
        return None
      ahead, back = (1 - state.mu_y * keep).astype(y.dtype), (1 - keep).astype(y.dtype)
      return ahead * move.astype(y.dtype) - back * (y - z)

    def moved(move, z):
      return z if move is None else optax.apply_updates(z, move.astype(z.dtype))

    new = state.replace(
      step=optax.safe_increment(state.step),
      z=jax.tree.map(moved, moves, state.z, is_leaf=_is_none),
      inner_state=inner_state,
    )
    return jax.tree.map(change, moves, params, state.z, is_leaf=_is_none), new

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def averaged_params(opt_state: Any, params: Any) -> Any:
  """The running mean x of `primal_average`: the parameters to evaluate.

  Args:
    opt_state: any pytree that holds one `PrimalAverageState`, else a ValueError.
    params: the parameters that are trained, after the last update.

  Returns:
    The same structure as the parameters; parameters that `optax.masked` leaves out are unchanged.
  """
  state = ow.get_state(opt_state, PrimalAverageState)
  treedef: Any = jax.tree.structure(params)
  ahead = 1 / state.mu_y - 1

  def mean(y, z):
    # Variables that optax.masked leaves out have no z.
    if not isinstance(z, jax.Array | np.ndarray) or not jnp.issubdtype(z.dtype, jnp.inexact):
      return y
    # Stacked workers have a number each.
    factor = jnp.expand_dims(ahead, range(ahead.ndim, z.ndim)).astype(z.dtype)
    return y + factor * (y - z)

  return treedef.unflatten(map(mean, jax.tree.leaves(params), treedef.flatten_up_to(state.z)))


def _is_none(x):
  return x is None


def _check_numbers(mu_y, mu_x):
  if isinstance(mu_y, jax.Array):
    mend = 'optax.inject_hyperparams takes static_args="mu_y"'
    raise TypeError(f"primal_average: mu_y must be a Python number, got {mu_y!r}; {mend}.")
  if not 0 < mu_y <= 1:
    raise ValueError(f"primal_average: mu_y must be in (0, 1], got {mu_y}.")
  is_known = not callable(mu_x) and not isinstance(mu_x, jax.core.Tracer)
  if is_known and not 0 <= mu_x <= 1:
    raise ValueError(f"primal_average: mu_x must be in [0, 1], got {mu_x}.")


def _check_wide(params):
  for path, x in jax.tree.leaves_with_path(params):
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
      raise TypeError(
        f"primal_average: params{jax.tree_util.keystr(path)} must be of float32 or wider, got"
        f" {dtype}. Cast to a narrower dtype inside of the loss."
      )
