"""A Flax TrainState for optimizers that take extra args. The only module that needs flax."""

import dataclasses
import functools
from typing import Any

import optax
from flax.training import train_state


class TrainState(train_state.TrainState):
  """`flax.training.train_state.TrainState` that passes extra args on to the optimizer.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from optax_wrappers.train_state import TrainState
    >>> tx = ow.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> state = TrainState.create(
    ...   apply_fn=None, params={"w": jnp.array(0.0)}, tx=tx
    ... )
    >>> # Not state.step.
    >>> version = ow.get_state(state.opt_state, ow.states.DropStaleState).step
    >>> for _ in range(2):
    ...   state = state.apply_gradients(
    ...     grads={"w": jnp.array(-1.0)}, computed_at=version
    ...   )
    >>> stale = ow.get_state(state.opt_state, ow.states.DropStaleState)
    >>> updates_done = stale.step
    >>> print(state.params["w"], updates_done, state.step)
    1.0 1 2
  """

  def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
    """Updates `step`, `params` and `opt_state`.

    Args:
      grads: gradients, same structure as `params`.
      **kwargs: a field of this dataclass is replaced, as in Flax; every other name is an extra arg
        of the optimizer, such as `weight`, `computed_at` or `value`.

    Returns:
      The updated state.
    """
    fields = {field.name for field in dataclasses.fields(self)}
    replaced = {name: value for name, value in kwargs.items() if name in fields}
    extra_args = {name: value for name, value in kwargs.items() if name not in fields}
    update = functools.partial(optax.with_extra_args_support(self.tx).update, **extra_args)
    with_extra_args = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
    stepped = super(TrainState, with_extra_args).apply_gradients(grads=grads, **replaced)
    return stepped.replace(tx=replaced.get("tx", self.tx))
