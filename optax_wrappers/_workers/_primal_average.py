"""The gradient at a point between an optimizer's parameters and their running mean."""

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _checks, _numerics
from optax_wrappers._core._state import (
  WrapperState,
  copy_tree,
  get_state,
  held,
  require_state,
  state,
)
from optax_wrappers._core._types import Tree


@state
class PrimalAverageState(WrapperState):
  """State of `primal_average`.

  Attributes:
    step: updates so far; int32 scalar.
    z: the parameters that the inner optimizer moves, same structure as params.
    mu_y: how near to their running mean x the params are; float32 scalar.
    inner_state: state of the wrapped optimizer.
  """

  step: jax.Array = held("lockstep")
  z: Tree
  mu_y: jax.Array = held("shared")
  inner_state: Tree


def primal_average(
  inner: optax.GradientTransformation,
  mu_y: optax.ScalarOrSchedule = 0.7,
  mu_x: optax.ScalarOrSchedule = 0.9967,
) -> optax.GradientTransformationExtraArgs:
  """Generalized primal averaging (GPA): DiLoCo of one worker, smoothed to a part of it every step.

  The params that a trainer has are y. With z what `inner` moves, and x the mean to evaluate,

      z <- z + inner(gradient at y)            weight decay in `inner` is of z
      x <- mu_x x + (1 - mu_x) z
      y <- mu_y x + (1 - mu_y) z

  Only z is kept: x follows from y and z, and `averaged_params` returns it. With
  `mu_x=lambda count: count / (count + 1)` it is `optax.contrib.schedule_free` with equal weights
  and `b1=mu_y`; with `mu_x=0` it is `inner`.

  Args:
    inner: the optimizer, or a wrapper of it such as `cross_shard`.
    mu_y: in (0, 1], or a schedule of the count of updates.
    mu_x: in [0, 1], or a schedule. 0.9967, the default, is 0.9 ** (1 / 32), for what DiLoCo does in
      rounds of 32 steps; the paper has 0.9 for 1 step, 0.9869 for 8, 0.9984 for 64.

  Returns:
    The wrapped optimizer, with a `PrimalAverageState`. update needs params.

  Raises:
    TypeError: for params in fewer than 32 bits, in which the mean would stand still.
    ValueError: for numbers out of range; in update, for missing params.

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

  Source: "Smoothing DiLoCo with primal averaging" (arXiv 2512.17131). Its authors' program decays z
  by another order than the printed equations, which these are.
  """
  wrapper = "primal_average"
  inner = _checks.optimizer(wrapper, inner)
  mu_y = _rate(wrapper, "mu_y", mu_y, lambda x: 0 < x <= 1, "in (0, 1]")
  mu_x = _rate(wrapper, "mu_x", mu_x, lambda x: 0 <= x <= 1, "in [0, 1]")

  def init_fn(params):
    _check_wide(wrapper, params)
    count = jnp.zeros((), jnp.int32)
    return PrimalAverageState(
      step=count,
      z=copy_tree(params),
      mu_y=_at(mu_y, count),
      inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    require_state(wrapper, state, PrimalAverageState)
    _check_wide(wrapper, params)
    updates = _checks.inexact(wrapper, updates)
    moves, inner_state = inner.update(updates, state.inner_state, state.z, **extra_args)
    _checks.same_shapes(wrapper, moves, params)
    near = _at(mu_y, state.step)
    keep = near * _at(mu_x, state.step)

    def change(move, y, z):
      # y' - y of the three lines above, without x = y + (1 / mu_y - 1) (y - z).
      if move is None:
        return None
      return _numerics.times(1 - keep / state.mu_y, z - y) + _numerics.times(1 - keep, move)

    updates = jax.tree.map(change, moves, params, state.z, is_leaf=lambda x: x is None)
    return updates, PrimalAverageState(
      step=optax.safe_increment(state.step),
      z=_numerics.apply_updates(state.z, moves),
      mu_y=near,
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def averaged_params(opt_state: Tree, params: Tree) -> Tree:
  """The running mean x of `primal_average`: the parameters to evaluate.

  Args:
    opt_state: any pytree that holds one `PrimalAverageState`, else a ValueError.
    params: the parameters that are trained, after the last update.

  Returns:
    The same structure as the parameters.
  """
  state = get_state(opt_state, PrimalAverageState)

  def mean(y, z):
    if not _numerics.is_inexact(y):
      return y
    return y + _numerics.times(1 / state.mu_y - 1, y - z)

  return jax.tree.map(mean, params, state.z)


def _at(rate, count):
  return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)


def _rate(wrapper, name, value, holds, needed):
  return value if callable(value) else _checks.number(wrapper, name, value, holds, needed)


def _check_wide(wrapper, params):
  for path, x in jax.tree.leaves_with_path(params):
    dtype = _numerics.dtype_of(x)
    if _numerics.at_least_float32(dtype) != dtype:
      what = f"{wrapper}: params{jax.tree_util.keystr(path)} must be of float32 or wider"
      raise TypeError(f"{what}, got {dtype}. Cast to a narrower dtype inside of the loss.")
