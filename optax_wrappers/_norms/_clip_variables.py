"""A bound on the norm of the parameters, by a projection after the update."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from optax_wrappers._core import _checks
from optax_wrappers._core._types import Tree
from optax_wrappers._norms import _sets
from optax_wrappers._norms._project_variables import project


def clip_variables(
  inner: optax.GradientTransformation,
  max_norm: optax.ScalarOrSchedule,
  axes: int | Sequence[int] | None = None,
  *,
  mask: Tree | Callable[[Tree], Tree] | None = None,
  axis_name: Any = None,
  only_touched: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Projects the updated parameters onto a ball: no slice has an L2 norm above `max_norm`.

  With `y = params + inner(updates)`, a slice whose norm `||y||` is above `max_norm` (M) becomes `y
  M / ||y||`, to 2e-6 of M. The bound holds after `optax.apply_updates` has rounded, in the
  parameters' own dtype. A slice inside the ball, by more than that, gets the inner update bit for
  bit. Norms are taken in float32 or wider. NaN and inf pass through. `project_variables` has other
  sets, and allows a different one for each variable.

  Args:
    inner: the optimizer to wrap. Its state is the state, unless max_norm is a schedule.
    max_norm: the bound M, above 0; a number, a scalar array, or a schedule of the step.
    axes: the axes summed inside the norm, negative ones counted from the end. None: the whole
      variable; `()`: each element; `1` or `(1,)`: each row of a matrix.
    mask: bools, a prefix of the parameters' structure, or a function from the parameters to them;
      see `optax.masked`. Only variables with True are clipped. Wrap twice for two bounds.
    axis_name: inside shard_map, the variables' PartitionSpecs, a pytree or a prefix: each norm sums
      over the mesh axes of its axes. Or the mesh axes that shard the summed axes of all variables.
      Then a leaf that is replicated by its type is counted once; without types, mask it out.
    only_touched: clip only slices with a non-zero element in the updates given to this wrapper,
      which must be reduced already: put it inside `cross_shard` and `gather_towers`.

  Returns:
    The wrapped optimizer. update needs params.

  Raises:
    ValueError: for a `max_norm` not above 0; at init, for an axis out of range and a mask that does
      not fit or takes no variable; in update, for missing params, an unbound axis name, and
      `only_touched` with a reduction over shards or towers inside.
    TypeError: for axes or a mask of a wrong type, and for unmasked integer variables.

  **Communication**: with `axis_name` two float32 for each slice per step (three if `max_norm` is a
  schedule), else none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.clip_variables(optax.sgd(3.0), max_norm=2.0, axes=1)
    >>> params = jnp.array([[0.0, 1.0], [2.0, 3.0]])
    >>> updates, _ = tx.update(jnp.full((2, 2), 0.1), tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> print([f"{x:.4f}" for x in params.ravel()])
    ['-0.3000', '0.7000', '1.0656', '1.6925']

  Source: tf.contrib.opt.VariableClippingOptimizer.
  """
  wrapper = "clip_variables"
  if isinstance(max_norm, Mapping):  # TensorFlow's vars_to_clip_dims
    what = f"{wrapper}: max_norm must be a real scalar, above 0; got {max_norm!r}"
    mend = "The dimensions of one group of variables are axes, and which they are is mask"
    raise TypeError(f"{what}. {mend}; of several, project_variables.")
  if not callable(max_norm):
    max_norm = _checks.number(wrapper, "max_norm", max_norm, lambda x: x > 0, "above 0")
  ball = _sets.NormRange(0.0, max_norm, 1.0, _checks.axes(wrapper, axes))

  def specs_of(params):
    num_leaves = len(jax.tree.leaves(params))
    if mask is None or not num_leaves:
      return [ball] * num_leaves
    flags = mask(params) if _checks.is_function(mask) else mask
    is_bool = _checks.is_a(bool, np.bool_)
    flags = _checks.spread(wrapper, "mask", flags, params, is_bool, "Python bools")
    return [ball if flag else None for flag in flags]

  return project(wrapper, inner, ball, specs_of, axis_name, only_touched)
