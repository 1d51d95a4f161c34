"""Gradients that were computed on parameters which have since moved on: weighed, or dropped."""

import dataclasses
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _checks, _numerics
from optax_wrappers._core._state import WrapperState, get_state, require_state, state
from optax_wrappers._core._types import AxisName, AxisNames, Tree
from optax_wrappers._late import _ages
from optax_wrappers.staleness import Policy

Scale: TypeAlias = Literal["gradients", "updates"]


@state
class StalenessState(WrapperState):
  """State of `staleness_aware`.

  Attributes:
    step: updates accepted; int32 scalar. A gradient's `computed_at` is the value of this when its
      parameters were read.
    dropped: gradients dropped; int32 scalar.
    inner_state: state of the wrapped optimizer.
    accepted: gradients accepted; int32 scalar. Over shards it moves by up to their number a step.
    histogram: gradients that arrived at an age of 0, 1, ... 30, and of 31 or more, dropped ones
      too; int32 `[32]`.
  """

  shared_fields = frozenset({"step", "dropped", "accepted", "histogram"})
  may_skip = True

  step: jax.Array
  dropped: jax.Array
  inner_state: Tree
  accepted: jax.Array
  histogram: jax.Array


@state
class DropStaleState(StalenessState):
  """State of `drop_stale`: a `StalenessState`."""


@_checks.spelled(
  compensation="put it before this one, optax.chain(delay_compensation(...), staleness_aware(...))",
  history="put params_history(..., max_staleness) outside",
)
def staleness_aware(
  inner: optax.GradientTransformation,
  weight: Policy | None = None,
  *,
  max_staleness: int | None = None,
  scale: Scale = "gradients",
  normalize: bool = False,
  axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
  """Weighs a gradient by its age: the updates that were accepted since its parameters were read.

  In this order, with `N` shards (1 without `axis_name`):

  1. Shard i's gradient `g_i` is `t_i = max(step - computed_at_i, 0)` updates old and has the weight
     `w_i = weight(t_i)`, or zero where `step - computed_at_i > max_staleness`.
  2. The step is accepted iff a weight is above zero. Else nothing moves: neither parameters nor
     inner state nor `step`, whatever the gradients hold.
  3. `g_i` is multiplied by `w_i`; those of weight zero are zeros, and left out of every mean inside
     `inner`. A mean over the `F` shards of a weight above zero is `sum_i w_i g_i / F`, and a sum
     `sum_i w_i g_i`. Where `inner` holds no reduction of this library, gradients are scaled by
     `N / F` instead of left out, so that a plain mean written by hand comes to the same.
  4. `inner` makes its updates, and counters move.

  The weights are not divided by their sum: where all shards are equally late, that would make the
  rule void. `normalize` does it for those who want it.

  A constant factor on its gradients is nothing to Adam, Lion or Muon. There `scale="updates"` has
  the absolute weight on the update instead: gradients are weighed relative to each other, `w_i F /
  sum_i w_i`, and the updates are multiplied by the mean weight, `sum_i w_i / F`. For SGD without
  momentum the two are one. With momentum and gradients of mixed ages it lets stale gradients into
  the buffer at full weight.

  Args:
    inner: the optimizer to wrap.
    weight: from ages to weights, one of `optax_wrappers.staleness` or any such function. None: 1.
    max_staleness: accepted updates that a gradient may have missed; beyond, its weight is zero. 0:
      only gradients of the current parameters; negative: none at all; None: any.
    scale: "gradients" or "updates", which of them the absolute weight multiplies.
    normalize: whether weights are divided by their mean over the shards that are kept.
    axis_name: the axis or axes over which `computed_at` differs; None: it is one value.

  Returns:
    The wrapped optimizer, with a `StalenessState`.

  Raises:
    TypeError: for arguments of another kind; in update, for integer updates or a `computed_at` that
      is no integer.
    ValueError: for a weight that does not keep the shape of ages; for `scale="updates"` with
      `normalize`; in init, for a weight that is negative; in update, if `computed_at` is missing,
      or differs from shard to shard without an axis_name; for an axis that is not bound; for
      updates that are already summed over shards of unequal ages.

  Extra args:
    computed_at: int32 scalar, the value of `StalenessState.step` when the gradient's parameters
      were read; not forwarded. One that is larger than `step` is of age 0. All others reach
      `inner`.

  **Communication**: with `axis_name` 34 float32 per step, else none. The collectives of `inner` run
  in every step, dropped or not, so that no shard can wait for another.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.staleness_aware(optax.sgd(1.0), ow.staleness.inverse())
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> # Three workers read the parameters at step 0.
    >>> for computed_at in (0, 0, 0):
    ...   grad = jnp.array(-1.0)
    ...   updates, state = tx.update(
    ...     grad, state, params, computed_at=computed_at
    ...   )
    ...   params = optax.apply_updates(params, updates)
    ...   print(updates, state.step)
    1.0 1
    0.5 2
    0.33333334 3

  Source: Zhang et al. 2016 (arXiv 1511.05950), and the weights' own in `optax_wrappers.staleness`;
  with `max_staleness` alone tf.contrib.opt.DropStaleGradientOptimizer.
  """
  wrapper = "staleness_aware"
  _check_arguments(wrapper, max_staleness, scale, normalize)
  return _Rule(
    wrapper,
    _checks.optimizer(wrapper, inner),
    None if weight is None else _ages.check_policy(wrapper, weight),
    max_staleness,
    scale,
    normalize,
    _axes.axis_names(axis_name),
  ).as_transformation()


def drop_stale(
  inner: optax.GradientTransformation,
  max_staleness: int,
  *,
  axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
  """Drops a gradient if more than `max_staleness` updates were accepted since it was computed.

  `staleness_aware(inner, max_staleness=max_staleness, axis_name=axis_name)`, by TensorFlow's name.
  A gradient is accepted iff `step - computed_at <= max_staleness`. On a drop the parameters and the
  whole inner state stay as they were, whatever the gradient holds, and `step` does not move: a
  dropped gradient does not age the others.

  With `axis_name` every shard brings its own `computed_at`. Stale shards' updates become zero, and
  a stale shard has weight zero in the reductions of this library inside `inner`, whatever stands
  between: a mean, weighted or not, is that of the fresh ones, a sum is theirs. If none is fresh the
  step is dropped on every shard. Where `inner` holds no such reduction over the axis, the F fresh
  updates of N are scaled by N / F instead, so that a plain mean written by hand is the mean of the
  fresh ones too.

  Args:
    inner: the optimizer to wrap.
    max_staleness: accepted updates that a gradient may have missed. 0: only gradients of the
      current parameters; negative: none at all.
    axis_name: the axis or axes over which `computed_at` differs; None: it is one value.

  Returns:
    The wrapped optimizer, with a `DropStaleState`.

  Raises:
    TypeError: if max_staleness is no int; in update, for integer updates or a `computed_at` that is
      no integer.
    ValueError: in update, if `computed_at` is missing, or differs from shard to shard without an
      axis_name; for an axis that is not bound; for updates that are already summed over stale and
      fresh shards alike.

  Extra args:
    computed_at: int32 scalar, the value of `DropStaleState.step` when the gradient was computed;
      not forwarded. One that is larger than `step` is fresh, by the rule. All others reach `inner`.

  **Communication**: with `axis_name` 34 float32 per step, else none. The collectives of `inner` run
  in every step, dropped or not, so that no shard can wait for another.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for computed_at in (0, 0):  # both workers read the parameters at step 0
    ...   grad = jnp.array(-1.0)
    ...   updates, state = tx.update(
    ...     grad, state, params, computed_at=computed_at
    ...   )
    ...   params = optax.apply_updates(params, updates)
    >>> print(params, state.step, state.dropped, ow.drop_rate(state))
    1.0 1 1 0.5

  Source: tf.contrib.opt.DropStaleGradientOptimizer.
  """
  wrapper = "drop_stale"
  _check_limit(wrapper, max_staleness)
  return _Rule(
    wrapper,
    _checks.optimizer(wrapper, inner),
    max_staleness=max_staleness,
    names=_axes.axis_names(axis_name),
    state_class=DropStaleState,
  ).as_transformation()


def staleness_histogram(opt_state: Tree) -> jax.Array:
  """How many gradients arrived at each age so far, dropped ones too.

  Args:
    opt_state: an optimizer state, or any pytree that holds one `StalenessState`.

  Returns:
    int32 `[32]`: gradients of age 0, 1, ... 30, and of 31 or more.

  Raises:
    ValueError: if there is no such state, or more than one.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> state = tx.init(jnp.array(0.0))
    >>> for _ in range(3):
    ...   _, state = tx.update(jnp.array(1.0), state, computed_at=0)
    >>> print(ow.staleness_histogram(state)[:4])
    [1 2 0 0]
  """
  # A copy: a step that donates the state leaves it to whoever logs it.
  return jnp.array(get_state(opt_state, StalenessState).histogram)


def drop_rate(opt_state: Tree) -> jax.Array:
  """The fraction of gradients that were dropped so far: `dropped / (dropped + accepted)`.

  Args:
    opt_state: an optimizer state, or any pytree that holds one `StalenessState`.

  Returns:
    float32 in [0, 1]; 0 before the first call.

  Raises:
    ValueError: if there is no such state, or more than one.

  Source: the "Gradient staleness percentage" of tf.contrib.opt.DropStaleGradientOptimizer, which
  divides by accepted + 1 and so can exceed 1.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.drop_stale(optax.sgd(0.1), max_staleness=0)
    >>> state = tx.init(jnp.zeros(2))
    >>> # All read the parameters of step 0: only the first is in time.
    >>> for _ in range(4):
    ...   _, state = tx.update(jnp.ones(2), state, computed_at=0)
    >>> print(ow.drop_rate(state))
    0.75
  """
  found = get_state(opt_state, StalenessState)
  dropped, accepted = (jnp.asarray(x).astype(jnp.float32) for x in (found.dropped, found.accepted))
  return dropped / jnp.maximum(dropped + accepted, 1)


@dataclasses.dataclass(frozen=True)
class _Rule:
  """The arguments of `staleness_aware`, checked; errors name the public function."""

  wrapper: str
  inner: optax.GradientTransformationExtraArgs
  weight: Policy | None = None
  max_staleness: int | None = None
  scale: str = "gradients"
  normalize: bool = False
  names: AxisNames = ()
  state_class: type[StalenessState] = StalenessState

  def as_transformation(self):
    return optax.GradientTransformationExtraArgs(self.init, self.update)

  def init(self, params):
    _ages.check_weights(self.wrapper, self.weight)
    return self.state_class(
      step=jnp.zeros((), jnp.int32),
      dropped=jnp.zeros((), jnp.int32),
      inner_state=self.inner.init(params),
      accepted=jnp.zeros((), jnp.int32),
      histogram=jnp.zeros(_ages.NUM_BINS, jnp.int32),
    )

  def update(self, updates, state, params=None, *, computed_at=None, weight=None, **extra_args):
    require_state(self.wrapper, state, self.state_class)
    computed_at = _check_ticket(self.wrapper, computed_at)
    _axes.require_bound(self.names, self.wrapper)
    updates = _checks.inexact(self.wrapper, updates)
    age = _ages.age_of(computed_at, state.step)
    weighed = _ages.weigh(self.weight, self.max_staleness, age, self.names)
    mend = f"Name the axis over which it differs: {self.wrapper}(..., axis_name=...)."
    _axes.require_like(weighed.ages, state.step, self.wrapper, "computed_at", mend)

    # Zeros before anything is computed with what is dropped, and after: so no NaN reaches a value
    # or a derivative.
    updates = _ages.keep(self.wrapper, weighed, self.names, updates)
    if self.weight is not None:
      is_relative = self.normalize or self.scale == "updates"
      updates = _numerics.scale_tree(updates, weighed.relative if is_relative else weighed.weight)
    updates, inner_state = _ages.update(
      self.wrapper,
      self.inner,
      weighed,
      self.names,
      updates,
      state.inner_state,
      params,
      weight,
      extra_args,
    )
    if self.weight is not None and self.scale == "updates":
      updates = _numerics.scale_tree(updates, weighed.mean)
    return updates, self.state_class(
      step=_numerics.saturating_add(state.step, weighed.accept.astype(jnp.int32)),
      dropped=_numerics.saturating_add(state.dropped, weighed.num_gradients - weighed.num_kept),
      inner_state=inner_state,
      accepted=_numerics.saturating_add(state.accepted, weighed.num_kept),
      histogram=_numerics.saturating_add(state.histogram, weighed.ages),
    )


def _check_arguments(wrapper, max_staleness, scale, normalize):
  _checks.choice(wrapper, "scale", scale, get_args(Scale))
  if not isinstance(normalize, bool):
    raise TypeError(f"{wrapper}: normalize must be a bool, got {normalize!r}.")
  if max_staleness is not None:
    _check_limit(wrapper, max_staleness)
  if normalize and scale == "updates":
    raise ValueError(
      f'{wrapper}: normalize takes the absolute weight away, and scale="updates" puts it on the'
      " updates. Leave one of them out."
    )


def _check_limit(wrapper, max_staleness):
  _checks.integer(wrapper, "max_staleness", max_staleness)
  if abs(max_staleness) >= _ages.OLDEST:
    raise ValueError(
      f"{wrapper}: max_staleness must be an int below 2**30 in size, got {max_staleness}."
    )


def _check_ticket(wrapper, computed_at):
  if computed_at is None:
    raise ValueError(
      f"{wrapper}: computed_at is needed: the value of state.step when the gradient was"
      " computed. Call tx.update(updates, state, params, computed_at=step);"
      " optax_wrappers.train_state.TrainState passes it on."
    )
  return _ages.to_int32(_checks.scalar(wrapper, "computed_at", computed_at, jnp.integer))
