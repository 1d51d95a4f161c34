"""Checks of what a user passes.

Each error names the argument, what was needed, what came, and how to mend it.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core import _paths
from optax_wrappers._core._types import Tree

Function = TypeVar("Function", bound=Callable[..., Any])


def optimizer(
  wrapper: str, inner: Any, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer, which takes extra args from here on."""
  if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
    mend = "Pass the optimizer first, such as optax.sgd(0.1)." if name == "inner" else ""
    if callable(inner):
      mend = f"Call it: {getattr(inner, '__name__', 'the function')}(...) returns the optimizer."
    raise TypeError(
      f"{wrapper}: {name} must be an optax.GradientTransformation, got {inner!r}. {mend}"
    )
  return optax.with_extra_args_support(inner)


def integer(wrapper: str, name: str, value: Any, minimum: int | None = None) -> int:
  """Returns `value` as an int, at least `minimum` when one is given."""
  # A bool is an int to Python, and hardly ever meant as one.
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise TypeError(
      f"{wrapper}: {name} must be a Python int, got {value!r} of type {type(value).__name__}. It"
      " decides the shape of the program, so it can be neither traced nor injected (name it in"
      " static_args of inject_hyperparams)."
    )
  if minimum is not None and value < minimum:
    raise ValueError(f"{wrapper}: {name} must be at least {minimum}, got {value}.")
  return int(value)


def number(wrapper: str, name: str, value: Any, holds: Callable[[Any], bool], needed: str) -> Any:
  """Returns a real scalar for which `holds`; a traced scalar has no value yet and passes."""
  if isinstance(value, jax.core.Tracer):
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
      raise TypeError(
        f"{wrapper}: {name} must be a real scalar, got {value.dtype}{list(value.shape)}."
      )
    return value
  if isinstance(value, jax.Array):
    is_real_scalar = value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
  else:
    is_real_scalar = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not is_real_scalar:
    raise TypeError(
      f"{wrapper}: {name} must be a real scalar, {needed}; got {value!r} of type"
      f" {type(value).__name__}."
    )
  if not holds(value):
    raise ValueError(f"{wrapper}: {name} must be {needed}, got {value}.")
  return value if isinstance(value, jax.Array) else float(value)


def choice(wrapper: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
  """Returns `value` if it is one of `choices`."""
  if value not in choices:
    raise ValueError(
      f"{wrapper}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}."
    )
  return value


def scalar(wrapper: str, name: str, value: Any, kind: Any) -> jax.Array:
  """Returns an extra arg as a scalar array whose dtype is a sub-dtype of `kind`."""
  # Python numbers, NumPy and JAX arrays alike.
  array = jnp.asarray(value)
  if array.shape != ():
    raise ValueError(
      f"{wrapper}: {name} must be a scalar, got shape {array.shape}. Each shard passes its own."
    )
  if not (jnp.issubdtype(array.dtype, kind) or array.dtype == jnp.bool_):
    raise TypeError(f"{wrapper}: {name} must be of {kind.__name__} dtype, got {array.dtype}.")
  return array


def weight(
  wrapper: str, value: Any, num_towers: int | None = None, name: str = "weight"
) -> jax.Array:
  """Returns a weight, or one for each of `num_towers`.

  It is real and, as far as its value is known, at least 0 and no NaN.
  """
  if num_towers is None:
    array = scalar(wrapper, name, value, jnp.number)
  else:
    array = jnp.asarray(value)
    if array.shape != (num_towers,):
      raise ValueError(
        f"{wrapper}: {name} must be of shape [{num_towers}], got {list(array.shape)}."
      )
  if jnp.issubdtype(array.dtype, jnp.complexfloating):
    raise TypeError(f"{wrapper}: {name} must be real, got {array.dtype}.")
  # A traced weight has no value to look at.
  known = value if not isinstance(value, jax.core.Tracer) else 0
  if not (np.asarray(known) >= 0).all():
    raise ValueError(f"{wrapper}: {name} must be at least 0, got {array}.")
  return array


def spelled(**now: str) -> Callable[[Function], Function]:
  """Raises on arguments of earlier versions or other libraries, and says how they are spelled."""

  def decorate(fun):
    @functools.wraps(fun)
    def checked(*args, **kwargs):
      for name in kwargs:
        if name in now:
          raise TypeError(f"{fun.__name__}: there is no argument {name!r}: {now[name]}.")
      return fun(*args, **kwargs)

    return checked

  return decorate


def params_given(wrapper: str, params: Tree) -> Tree:
  """Returns `params`, which this wrapper cannot do without, its Python numbers as arrays."""
  if params is None:
    raise ValueError(
      f"{wrapper}: params is needed, got None. Call tx.update(updates, state, params), with the"
      " parameters that optax.apply_updates will then be given."
    )
  return arrays(params)


def arrays(tree: Tree) -> Tree:
  """The tree with Python's numbers as arrays."""
  return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


def same_structure(wrapper: str, updates: Tree, params: Tree, name: str = "parameter") -> list[Any]:
  """Returns the update of each leaf of `params`, None for none.

  Updates of another tree raise.
  """
  # flatten_up_to takes None for a leaf, which jax.tree.map of two trees does not.
  treedef: Any = jax.tree.structure(params)
  try:
    return treedef.flatten_up_to(updates)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{wrapper}: updates must have the structure of the {name}s, {treedef}; got"
      f" {jax.tree.structure(updates)}. Pass the gradient of the same tree that tx.init was given."
    ) from error


def same_shapes(wrapper: str, updates: Tree, params: Tree, name: str = "parameter") -> None:
  """Raises on an update that has not the shape of its parameter. None, for no update, has any."""
  found = same_structure(wrapper, updates, params, name)
  for (path, param), update in zip(jax.tree.leaves_with_path(params), found, strict=True):
    if update is not None and jnp.shape(update) != jnp.shape(param):
      raise ValueError(
        f"{wrapper}: updates{jax.tree_util.keystr(path)} must have the {name}'s shape"
        f" {jnp.shape(param)}, got {jnp.shape(update)}. Stacked updates of several towers go to"
        " reduce_towers first: put it outermost."
      )


def inexact(wrapper: str, updates: Tree, name: str = "updates") -> Tree:
  """Returns a tree of real or complex arrays.

  An integer or boolean leaf has no mean and no norm, and raises.
  """
  updates = arrays(updates)
  for path, leaf in jax.tree.leaves_with_path(updates):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      raise TypeError(
        f"{wrapper}: {name}{jax.tree_util.keystr(path)} has dtype {leaf.dtype}; {name} must be"
        " real or complex floating point. Leave it out of the gradient, or mask it with"
        " optax.masked."
      )
  return updates


def axes(wrapper: str, value: Any) -> tuple[int, ...] | None:
  """Returns the axes of a slice as a tuple; None for all of them."""
  if value is None:
    return None
  return tuple(
    integer(wrapper, "axes", axis) for axis in (value if isinstance(value, Sequence) else (value,))
  )


def summed_axes(wrapper: str, name: str, value: tuple[int, ...] | None, ndim: int) -> Any:
  """Returns the axes of a slice of one variable, none of them negative."""
  if value is None:
    return tuple(range(ndim))
  for axis in value:
    if not -ndim <= axis < ndim:
      raise ValueError(
        f"{wrapper}: axes must be axes of every variable, but {axis} is out of range for {name}"
        f" with {ndim} axes. Leave it out, for example with mask=lambda params:"
        f" jax.tree.map(lambda p: p.ndim > {max(axis, -axis - 1)}, params)."
      )
  summed = tuple(axis % ndim for axis in value)
  if len(set(summed)) != len(summed):
    raise ValueError(
      f"{wrapper}: axes must not name an axis twice, got {value} for {name} with {ndim} axes."
    )
  return summed


def spread(
  wrapper: str,
  name: str,
  value: Any,
  tree: Tree,
  is_value: Callable[[Any], bool],
  needed: str = "",
) -> list[Any]:
  """One value for each leaf of `tree`, from a tree of values with its structure or a prefix of it.

  With `needed`, what is no value raises a TypeError that says so.
  """

  def repeat(one, part):
    return _Repeated(one, len(jax.tree.leaves(part)))

  # Specs and masks come with Flax's boxes round them or without, and parameters likewise.
  value, tree = _paths.unboxed(value), _paths.unboxed(tree)
  try:
    parts = jax.tree.map(repeat, value, tree, is_leaf=is_value)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{wrapper}: {name} must have the structure of the parameters or a prefix of it (one for all"
      f" of them is the shortest); got {value!r} for parameters {jax.tree.structure(tree)}."
    ) from error
  found = [part.value for part in jax.tree.leaves(parts) for _ in range(part.times)]
  for one in found:
    if needed and not is_value(one):
      raise TypeError(
        f"{wrapper}: {name} must hold {needed}, got {one!r} of type {type(one).__name__}."
      )
  return found


@dataclasses.dataclass(frozen=True)
class _Repeated:
  """A value for so many leaves: a leaf to JAX, which a list, as of layers, is not."""

  value: Any
  times: int


def is_a(*kinds: Any) -> Callable[[Any], bool]:
  """A predicate for `spread`."""
  return lambda x: isinstance(x, kinds)
