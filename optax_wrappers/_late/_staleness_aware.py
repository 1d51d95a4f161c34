"""Stale gradients: weighted by their age, or dropped."""

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _branches, _checks, _numerics, _states, _weights
from optax_wrappers._core._states import OfParams, require_state
from optax_wrappers._core._types import AxisName, Tree
from optax_wrappers._late import _age_weights
from optax_wrappers.staleness import Policy

Scale: TypeAlias = Literal["gradients", "updates"]


@_states.dataclass
class StalenessState(_states.State):
  """State of `staleness_aware`.

  Attributes:
    step: updates accepted; int32 scalar. The `computed_at` of a gradient is its value when the
      parameters were read.
    dropped: gradients dropped; int32 scalar.
    inner_state: state of the wrapped optimizer.
    accepted: gradients accepted; int32 scalar. In one step up to one for each shard.
    histogram: gradients of age 0, 1, ... 30, and of 31 or more, dropped ones too; int32 `[32]`.
  """

  may_skip = True

  step: jax.Array = _states.field("shared")
  dropped: jax.Array = _states.field("shared")
  inner_state: Tree
  accepted: jax.Array = _states.field("shared")
  histogram: jax.Array = _states.field("shared")

  def metrics(self, of_params: OfParams) -> dict[str, jax.Array]:
    """See `State`."""
    counts = (self.dropped, self.accepted, self.histogram)
    dropped, accepted, of_age = (jnp.asarray(x).astype(jnp.float32) for x in counts)
    age = of_age @ jnp.arange(_age_weights.NUM_BINS, dtype=jnp.float32)
    of_all = jnp.maximum(dropped + accepted, 1)
    return {"drop_rate": dropped / of_all, "staleness_mean": age / of_all}


@_states.dataclass
class DropStaleState(StalenessState):
  """State of `drop_stale`: a `StalenessState`."""


def staleness_aware(
  inner: optax.GradientTransformation,
  weight: Policy | None = None,
  *,
  max_staleness: int | None = None,
  scale: Scale = "gradients",
  normalize: bool = False,
  axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
  """Weights a gradient by its age: the updates accepted since its parameters were read.

  Shard i's gradient `g_i` is `t_i = max(step - computed_at_i, 0)` updates old. Its weight is
  `w_i = weight(t_i)`, or zero if `step - computed_at_i > max_staleness`. If all weights are zero,
  neither parameters nor inner state nor `step` move. Else `inner` gets `w_i g_i`. If F of N shards
  have a weight above zero, a mean inside is `sum_i w_i g_i / F`, and a sum `sum_i w_i g_i`. Without
  a reduction of this library in `inner`, gradients are scaled by N / F, for a plain mean.

  Args:
    inner: the optimizer to wrap.
    weight: from ages to weights, one of `optax_wrappers.staleness` or any such function. None: 1.
    max_staleness: the maximum age. 0 accepts only gradients of the current parameters, a negative
      number not even these, and None all.
    scale: what the weight multiplies. Adam, Lion and Muon ignore a constant factor on "gradients".
      "updates" gives them relative weights, `w_i F / sum_i w_i`, and multiplies the updates by the
      mean, `sum_i w_i / F`.
    normalize: whether weights are divided by their mean over the shards with a weight above zero.
    axis_name: the axis or axes over which `computed_at` differs; None: it is one value.

  Returns:
    The wrapped optimizer, with a `StalenessState`.

  Raises:
    TypeError: for arguments of a wrong type; in update, for integer updates or a `computed_at` that
      is not an integer.
    ValueError: for arguments out of range, and weights below 0 or not finite; in update, for a
      `computed_at` that is missing, or differs between shards without axis_name, an unbound axis,
      or updates already summed over shards of unequal ages.

  Extra args:
    computed_at: int32 scalar, the value of `StalenessState.step` when the gradient's parameters
      were read; not forwarded. A version above `step` counts as age 0. All others reach `inner`.

  **Communication**: with `axis_name` 34 float32 per step, else none; and that of `inner`, whose
  collectives run in every step, dropped or not.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.staleness_aware(optax.sgd(1.0), ow.staleness.inverse())
    >>> state = tx.init(jnp.array(0.0))
    >>> for _ in range(3):  # three workers read the parameters at step 0
    ...   updates, state = tx.update(-jnp.ones(()), state, computed_at=0)
    ...   print(updates, state.step)
    1.0 1
    0.5 2
    0.33333334 3

  Source: Zhang et al. 2016 (arXiv 1511.05950), and the weights' own in `optax_wrappers.staleness`;
  with `max_staleness` alone tf.contrib.opt.DropStaleGradientOptimizer.
  """
  wrapper = "staleness_aware"
  _checks.choice(wrapper, "scale", scale, get_args(Scale))
  if not isinstance(normalize, bool):
    raise TypeError(f"{wrapper}: normalize must be a bool, got {normalize!r}.")
  if normalize and scale == "updates":
    raise ValueError(
      f'{wrapper}: normalize removes the weight that scale="updates" needs. Leave one of them out.'
    )
  if weight is not None:
    _age_weights.check_policy(wrapper, weight)
  return _weighing(
    wrapper, inner, weight, max_staleness, scale, normalize, axis_name, StalenessState
  )


def drop_stale(
  inner: optax.GradientTransformation, max_staleness: int, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
  """Drops a gradient if more than `max_staleness` updates were accepted since it was computed.

  This is `staleness_aware(inner, max_staleness=max_staleness, axis_name=axis_name)`, with its
  errors and extra args, under TensorFlow's name. A gradient is accepted iff `step - computed_at <=
  max_staleness`. A drop leaves the parameters, the inner state and `step` unchanged, whatever the
  gradient holds. Means and sums inside `inner` are those of the fresh shards. If there are none,
  all shards drop the step.

  Args:
    inner: the optimizer to wrap.
    max_staleness: the maximum age. 0: only gradients of the current parameters; negative: none.
    axis_name: the axis or axes over which `computed_at` differs; None: it is one value.

  Returns:
    The wrapped optimizer, with a `DropStaleState`.

  **Communication**: with `axis_name` 34 float32 per step, else none; and that of `inner`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for _ in range(2):  # both workers read the parameters at step 0
    ...   updates, state = tx.update(-jnp.ones(()), state, computed_at=0)
    ...   params = optax.apply_updates(params, updates)
    >>> print(params, state.step, state.dropped, ow.metrics(state)["drop_rate"])
    1.0 1 1 0.5
    >>> print(ow.get_state(state, ow.states.StalenessState).histogram[:4])
    [1 1 0 0]

  Source: tf.contrib.opt.DropStaleGradientOptimizer.
  """
  _checks.integer("drop_stale", "max_staleness", max_staleness)
  return _weighing(
    "drop_stale", inner, None, max_staleness, "gradients", False, axis_name, DropStaleState
  )


def _weighing(wrapper, inner, policy, max_staleness, scale, normalize, axis_name, state_class):
  """`staleness_aware`, under the name of the public function that errors mention."""
  if max_staleness is not None:
    _checks.integer(wrapper, "max_staleness", max_staleness)
    if abs(max_staleness) >= _age_weights.OLDEST:
      limit = "below 2**30 in size"
      raise ValueError(f"{wrapper}: max_staleness must be {limit}, not {max_staleness}.")
  inner, names = _checks.optimizer(wrapper, inner), _axes.axis_names(axis_name)

  def init_fn(params):
    _age_weights.check_weights(wrapper, policy)
    return state_class(
      step=jnp.zeros((), jnp.int32),
      dropped=jnp.zeros((), jnp.int32),
      inner_state=inner.init(params),
      accepted=jnp.zeros((), jnp.int32),
      histogram=jnp.zeros(_age_weights.NUM_BINS, jnp.int32),
    )

  def update_fn(updates, state, params=None, *, computed_at=None, weight=None, **extra_args):
    require_state(wrapper, state, state_class)
    if computed_at is None:
      raise ValueError(
        f"{wrapper}: computed_at is needed: the value of state.step when the gradient's parameters"
        " were read. Call tx.update(updates, state, params, computed_at=step)."
      )
    computed_at = _age_weights.to_int32(
      _checks.scalar(wrapper, "computed_at", computed_at, jnp.integer)
    )
    _axes.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    weight = _weights.given(wrapper, weight, jax.tree.leaves(updates))
    age = state.step - jnp.maximum(computed_at, state.step - _age_weights.OLDEST)
    weighed = _age_weights.weigh(policy, max_staleness, age, names)
    mend = f"Name the axis over which it differs: {wrapper}(..., axis_name=...)."
    _axes.require_like(weighed.ages, state.step, wrapper, "computed_at", mend)

    # Dropped gradients are set to zero before and after the computation, so that no NaN reaches a
    # value or a derivative.
    updates = _age_weights.keep(wrapper, weighed, names, updates)
    if policy is not None:
      is_relative = normalize or scale == "updates"
      factor = weighed.weight / weighed.mean if is_relative else weighed.weight
      updates = _numerics.scale_tree(updates, factor)
    reductions = _weights.inside(state.inner_state) if names else None
    updates, weight = _over_the_kept(wrapper, names, weighed, updates, reductions, weight)

    def step(inner_state):
      call = wrapper, inner, updates, inner_state, params, weight, extra_args
      return _weights.update(*call, names or None, reductions)

    # Every shard calls `inner` in every step, and the old state is selected afterwards. With a
    # branch, some shards could wait in a collective for the others.
    mend = f"Name the axis: {wrapper}(..., axis_name=...)."
    accept = weighed.accept
    updates, inner_state = _branches.update_if(
      accept, step, state.inner_state, wrapper, "computed_at", mend
    )
    if policy is not None and scale == "updates":
      updates = _numerics.scale_tree(updates, weighed.mean)
    counted = {
      "step": accept.astype(jnp.int32),
      "dropped": weighed.num_gradients - weighed.num_kept,
      "accepted": weighed.num_kept,
      "histogram": weighed.ages,
    }
    before = {name: getattr(state, name) for name in counted}
    counts = _numerics.saturating_add(before, counted)
    return updates, state_class(inner_state=inner_state, **counts)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _over_the_kept(wrapper, names, weighed, updates, reductions, weight):
  """The updates and the weight to pass on, such that a mean inside is that of the kept ones."""
  if not names:
    return updates, weight
  reduced_inside = _weights.names_of(reductions)
  _weights.require_decided(wrapper, "computed_at", weighed.accept, names, reduced_inside)
  if set(names) & set(reduced_inside):
    # Reductions of this library divide by the weights. A stale shard has weight zero, even if its
    # weight from outside is infinite or NaN.
    own_weight = jnp.ones((), jnp.float32) if weight is None else weight
    return updates, jnp.where(weighed.kept, own_weight, 0)
  # A mean by hand counts all N shards, so its updates are scaled by N / num_kept.
  dtype = _numerics.weight_dtype(jax.tree.leaves(updates))
  factor = weighed.num_gradients / jnp.maximum(weighed.num_kept, 1).astype(dtype)
  return _numerics.scale_tree(updates, factor), weight
