"""Checks of what a user passes: each error names the argument, what was needed, what came, and the fix."""

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def integer(wrapper: str, name: str, value: Any, minimum: int | None = None) -> int:
  """Returns `value` as an int, at least `minimum` when one is given."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise TypeError(
      f"{wrapper}: {name} must be a Python int, got {value!r} of type {type(value).__name__}. It decides the shape"
      " of the program, so it can be neither traced nor injected (name it in static_args of inject_hyperparams)."
    )
  if minimum is not None and value < minimum:
    raise ValueError(f"{wrapper}: {name} must be at least {minimum}, got {value}.")
  return int(value)


def number(wrapper: str, name: str, value: Any, holds: Callable[[Any], bool], needed: str) -> Any:
  """Returns a real scalar for which `holds`; a traced scalar has no value yet and passes."""
  if isinstance(value, jax.core.Tracer):
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
      raise TypeError(f"{wrapper}: {name} must be a real scalar, got {value.dtype}{list(value.shape)}.")
    return value
  if isinstance(value, jax.Array):
    is_real_scalar = value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
  else:
    is_real_scalar = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not is_real_scalar:
    raise TypeError(f"{wrapper}: {name} must be a real scalar, {needed}; got {value!r} of type {type(value).__name__}.")
  if not holds(value):
    raise ValueError(f"{wrapper}: {name} must be {needed}, got {value}.")
  return value if isinstance(value, jax.Array) else float(value)


def choice(wrapper: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
  """Returns `value` if it is one of `choices`."""
  if value not in choices:
    raise ValueError(f"{wrapper}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")
  return value


def scalar(wrapper: str, name: str, value: Any, kind: Any) -> jax.Array:
  """Returns an extra arg as a scalar array whose dtype is a sub-dtype of `kind`."""
  array = jnp.asarray(value)
  if array.shape != ():
    raise ValueError(f"{wrapper}: {name} must be a scalar, got shape {array.shape}. Each shard passes its own.")
  if not (jnp.issubdtype(array.dtype, kind) or array.dtype == jnp.bool_):
    raise TypeError(f"{wrapper}: {name} must be of {kind.__name__} dtype, got {array.dtype}.")
  return array


def params_given(wrapper: str, params: Tree) -> Tree:
  """Returns `params`, which this wrapper cannot do without."""
  if params is None:
    raise ValueError(
      f"{wrapper}: params is needed, got None. Call tx.update(updates, state, params), with the parameters that"
      " optax.apply_updates will then be given."
    )
  return params


def same_shapes(wrapper: str, updates: Tree, params: Tree) -> None:
  """Raises on an update that has not the shape of its parameter (None, for no update, has every shape)."""

  def check(path, param, update):
    if update is not None and jnp.shape(update) != jnp.shape(param):
      raise ValueError(
        f"{wrapper}: updates{jax.tree_util.keystr(path)} must have the parameter's shape {jnp.shape(param)}, got"
        f" {jnp.shape(update)}. Stacked updates of several towers go to reduce_towers first: put it outermost."
      )

  jax.tree.map_with_path(check, params, updates)


def inexact_leaves(wrapper: str, updates: Tree, name: str = "updates") -> None:
  """Raises on an integer or boolean leaf: it has no mean and no norm."""
  for path, leaf in jax.tree.leaves_with_path(updates):
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact):
      raise TypeError(
        f"{wrapper}: {name}{jax.tree_util.keystr(path)} has dtype {dtype}; {name} must be real or complex floating"
        " point. Leave it out of the gradient, or mask it with optax.masked."
      )
