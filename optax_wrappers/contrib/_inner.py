"""The optimizer inside a wrapper: checked, and its step taken or left out."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers.contrib import _arrays


def checked(wrapper: str, inner: Any) -> optax.GradientTransformationExtraArgs:
  """The optimizer, which takes extra args."""
  if not isinstance(inner, optax.GradientTransformation):
    raise TypeError(
      f"{wrapper}: inner must be an optax.GradientTransformation, got {inner!r}. Pass the optimizer"
      f" first. Call it: {getattr(inner, '__name__', 'optax.sgd')}(...)."
    )
  return optax.with_extra_args_support(inner)


def taken_if(accept: jax.Array, updates: Any, new_state: Any, state: Any) -> tuple[Any, Any]:
  """The updates and the new state of a step, or zeros and the state before it."""

  def in_dtype_of(old, new):
    # Optax's moments would take the dtype of the gradients.
    return new.astype(old.dtype) if jnp.issubdtype(new.dtype, jnp.inexact) else new

  zeros = jax.tree.map(jnp.zeros_like, updates)
  new_state = jax.tree.map(in_dtype_of, state, new_state)
  return _arrays.select(accept, updates, zeros), _arrays.select(accept, new_state, state)
