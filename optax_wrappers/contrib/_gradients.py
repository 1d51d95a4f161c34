"""What algorithms of asynchronous training need of gradients and of states."""

from typing import Any

import jax
import jax.numpy as jnp


def wide_dtype(x: Any) -> Any:
  """The dtype to compute in: an array's own, or float32 for an integer and a narrower float."""
  dtype = jnp.result_type(x)
  is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
  return dtype if is_wide else jnp.float32


def checked(wrapper: str, updates: Any, params: Any) -> Any:
  """The updates as arrays of the parameters' shapes; None, for no update, stays."""

  def check(path, param, update):
    if update is None:
      return None
    name = f"{wrapper}: updates{jax.tree_util.keystr(path)}"
    update = jnp.asarray(update)
    if not jnp.issubdtype(update.dtype, jnp.inexact):
      raise TypeError(
        f"{name} has dtype {update.dtype}; it must be floating point or complex. Mask it with"
        " optax.masked."
      )
    if update.shape != jnp.shape(param):
      raise ValueError(
        f"{name} must have the parameter's shape {jnp.shape(param)}, got {update.shape}. With"
        " reduce_towers, put it outermost."
      )
    return update

  return jax.tree.map_with_path(check, params, updates)


def instances(state: Any, state_class: type) -> list[Any]:
  """The states of a class in another, but none inside another of the class."""
  nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, state_class))
  return [x for x in nodes if isinstance(x, state_class)]
