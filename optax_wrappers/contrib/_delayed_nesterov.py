"""An outer optimizer for pseudo-gradients that arrive one at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import states


@states.dataclass
class DelayedNesterovState(states.State):
  """State of `delayed_nesterov`.

  Attributes:
    count: updates since the momentum moved; int32 scalar.
    momentum: same structure as params.
    total: the sum of these updates, same structure as params.
  """

  count: jax.Array
  momentum: Any
  total: Any


def delayed_nesterov(
  learning_rate: optax.ScalarOrSchedule, momentum: float | jax.Array = 0.9, *, buffer: int
) -> optax.GradientTransformationExtraArgs:
  """Nesterov momentum that is updated once every `buffer` updates, with their mean.

  For asynchronous pseudo-gradients, one worker at a time: a momentum updated by each would repeat
  stale ones. With d the k-th update, from k = 1:

      total <- total + d
      k divisible by buffer:  m <- momentum m + total / buffer;  total <- 0
                            update = -learning_rate (momentum m + d / buffer)
      else:                 update = -learning_rate d / buffer

  The learning rate is for a whole buffer. With a buffer of 1 it is
  `optax.sgd(learning_rate, momentum, nesterov=True)`.

  Args:
    learning_rate: a number, or a schedule, which counts updates.
    momentum: in [0, 1).
    buffer: how many updates, at least 1; the number of workers in the paper.

  Returns:
    A gradient transformation, with a chain's state, a `DelayedNesterovState` first.

  Raises:
    TypeError, ValueError: for arguments of a wrong type or out of range.

  **Communication**: none.

  Examples:
    >>> import jax.numpy as jnp, optax_wrappers as ow
    >>> tx = ow.contrib.delayed_nesterov(1.0, 0.5, buffer=2)
    >>> state = tx.init(jnp.zeros(()))
    >>> for difference in (2.0, 4.0):
    ...   update, state = tx.update(jnp.float32(difference), state)
    ...   print(update)
    -1.0
    -3.5

  Source: Liu et al., "Asynchronous local-SGD training for language modeling" (arXiv 2401.09135),
  delayed Nesterov without its activation between, c = 0.
  """
  is_known = not isinstance(momentum, jax.core.Tracer)
  if is_known and not 0 <= momentum < 1:
    raise ValueError(f"delayed_nesterov: momentum must be in [0, 1), got {momentum}.")
  if buffer < 1:
    raise ValueError(f"delayed_nesterov: buffer must be at least 1, got {buffer!r}.")

  def init_fn(params):
    return DelayedNesterovState(
      count=jnp.zeros((), jnp.int32),
      momentum=jax.tree.map(jnp.zeros_like, params),
      total=jax.tree.map(jnp.zeros_like, params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    if not isinstance(state, DelayedNesterovState):
      raise TypeError(f"delayed_nesterov: state must be a DelayedNesterovState, got {state!r}.")
    count = (state.count + 1) % buffer
    is_due, total = count == 0, jax.tree.map(jnp.add, state.total, updates)

    def decayed(m):
      return jnp.asarray(momentum, m.dtype) * m

    def moved(m, s):
      return jnp.where(is_due, decayed(m) + s / buffer, m)

    def after(m, d):
      return jnp.where(is_due, decayed(m), jnp.zeros_like(m)) + d / buffer

    moments = jax.tree.map(moved, state.momentum, total)
    total = jax.tree.map(lambda s: jnp.where(is_due, jnp.zeros_like(s), s), total)
    new = DelayedNesterovState(count=count, momentum=moments, total=total)
    return jax.tree.map(after, moments, updates), new

  scale = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))
