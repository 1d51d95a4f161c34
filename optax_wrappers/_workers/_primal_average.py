"""For gradients at a point between an optimizer's parameters and their running mean."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core import _checks, _numerics, _states
from optax_wrappers._core._states import copy_tree, get_state, require_same, require_state, static
from optax_wrappers._core._types import Tree


@static
class Between:
  """The position of the params, mu_y: 0 at z, 1 at the mean."""

  mu_y: float


@_states.dataclass
class PrimalAverageState(_states.State):
  """State of `primal_average`.

  Attributes:
    step: updates so far; int32 scalar.
    z: the parameters that the inner optimizer moves, same structure as params.
    between: what it was made for.
    inner_state: state of the wrapped optimizer.
  """

  step: jax.Array = _states.field("lockstep")
  z: Tree
  between: Between
  inner_state: Tree


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
    ValueError: for numbers out of range; in update, for missing params, an exchange alone, or a
      state of another mu_y.

  Extra args: all reach `inner`.

  **Communication**: none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.primal_average(optax.sgd(1.0), mu_y=0.5, mu_x=0.75)
    >>> params = jnp.array(0.0)
    >>> updates, state = tx.update(jnp.array(-8.0), tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params, ow.averaged_params(state, params))
    5.0 2.0

  Source: "Smoothing DiLoCo with primal averaging" (arXiv 2512.17131). Its authors' program applies
  the weight decay of z in a different order from the printed equations, which this function
  follows.
  """
  wrapper = "primal_average"
  inner = _checks.optimizer(wrapper, inner)
  mu_y = _checks.number(wrapper, "mu_y", mu_y, lambda x: 0 < x <= 1, "in (0, 1]")
  if not isinstance(mu_y, float):
    mend = 'optax.inject_hyperparams takes static_args="mu_y"'
    raise TypeError(f"{wrapper}: mu_y must be a Python number, got {mu_y!r}; {mend}.")
  if not callable(mu_x):
    mu_x = _checks.number(wrapper, "mu_x", mu_x, lambda x: 0 <= x <= 1, "in [0, 1]")
  between = Between(mu_y)

  def init_fn(params):
    _check_wide(wrapper, params)
    return PrimalAverageState(
      step=jnp.zeros((), jnp.int32),
      z=copy_tree(params),
      between=between,
      inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    require_state(wrapper, state, PrimalAverageState)
    require_same(wrapper, state.between, between)
    _check_wide(wrapper, params)
    if updates is None:
      mend = "Put it inside the wrapper that synchronizes."
      raise ValueError(
        f"{wrapper}: updates is None, and a synchronization alone is not a step. {mend}"
      )
    updates = _checks.inexact(wrapper, updates)
    moves, inner_state = inner.update(updates, state.inner_state, state.z, **extra_args)
    moves = _checks.arrays(moves)
    _checks.same_shapes(wrapper, moves, params)
    # With fewer bits, z and y would diverge.
    moves = jax.tree.map(
      lambda u, z: u if u is None else u.astype(z.dtype), moves, state.z, is_leaf=_is_none
    )
    keep = mu_x(state.step) if callable(mu_x) else mu_x

    def change(move, y, z):
      # y' - y from the three lines above, without x = y + (1 / mu_y - 1) (y - z).
      if move is None:
        return None
      return _numerics.times(1 - mu_y * keep, move) - _numerics.times(1 - keep, y - z)

    updates = jax.tree.map(change, moves, params, state.z, is_leaf=_is_none)
    return updates, state.replace(
      step=optax.safe_increment(state.step),
      z=_numerics.apply_updates(state.z, moves),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def averaged_params(opt_state: Tree, params: Tree) -> Tree:
  """The running mean x of `primal_average`: the parameters to evaluate.

  Args:
    opt_state: any pytree that holds one `PrimalAverageState`, else a ValueError.
    params: the parameters that are trained, after the last update.

  Returns:
    The same structure as the parameters; parameters that `optax.masked` leaves out are unchanged.
  """
  state = get_state(opt_state, PrimalAverageState)
  treedef: Any = jax.tree.structure(params)
  ahead = 1 / state.between.mu_y - 1

  def mean(y, z):
    # Variables that optax.masked leaves out have no z.
    is_moved = isinstance(z, jax.Array | np.ndarray) and _numerics.is_inexact(z)
    return y + ahead * (y - z) if is_moved else y

  return treedef.unflatten(map(mean, jax.tree.leaves(params), treedef.flatten_up_to(state.z)))


def _is_none(x):
  return x is None


def _check_wide(wrapper, params):
  for path, x in jax.tree.leaves_with_path(params):
    dtype = _numerics.dtype_of(x)
    if _numerics.at_least_float32(dtype) != dtype:
      what = f"{wrapper}: params{jax.tree_util.keystr(path)} must be of float32 or wider"
      raise TypeError(f"{what}, got {dtype}. Cast to a narrower dtype inside of the loss.")
