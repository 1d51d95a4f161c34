"""Checks of user input. Each error names the argument, what was needed and what was received."""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers._core import _numerics, _paths
from optax_wrappers._core._types import Tree

Function = TypeVar("Function", bound=Callable[..., Any])


def optimizer(
  wrapper: str, inner: Any, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimizer that accepts extra args, and keeps the dtypes of its state.

  With gradients wider or narrower than the parameters, Optax's moments would take their dtype, and
  no branch, scan or second step could take the new state.
  """
  if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
    mend = "Pass the optimizer first." if name == "inner" else ""
    if callable(inner):
      mend = f"Call it: {getattr(inner, '__name__', 'the function')}(...) returns the optimizer."
    what = f"{wrapper}: {name} must be an optax.GradientTransformation"
    raise TypeError(f"{what}, got {inner!r}. {mend}")
  tx = optax.with_extra_args_support(inner)

  def update_fn(updates, state, params=None, **extra_args):
    updates, new_state = tx.update(updates, state, params, **extra_args)
    return updates, _numerics.dtypes_like(new_state, state)

  return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def integer(wrapper: str, name: str, value: Any, minimum: int | None = None) -> int:
  """Returns `value` as an int, at least `minimum` if one is given."""
  # Python treats a bool as an int, but a bool here is almost always a mistake.
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    mend = "It cannot be traced: name it in static_args of inject_hyperparams."
    raise TypeError(f"{wrapper}: {name} must be a Python int, got {value!r}. {mend}")
  if minimum is not None and value < minimum:
    raise ValueError(f"{wrapper}: {name} must be at least {minimum}, got {value}.")
  return int(value)


def number(wrapper: str, name: str, value: Any, holds: Callable[[Any], bool], needed: str) -> Any:
  """Returns a real scalar for which `holds` is true. A traced one has no value yet, and passes."""
  if isinstance(value, jax.Array):
    is_real = value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
  else:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not is_real:
    raise TypeError(f"{wrapper}: {name} must be a real scalar, {needed}; got {value!r}.")
  if isinstance(value, jax.core.Tracer):
    return value
  if not holds(value):
    raise ValueError(f"{wrapper}: {name} must be {needed}, got {value}.")
  return value if isinstance(value, jax.Array) else float(value)


def choice(wrapper: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
  """Returns `value` if it is one of `choices`."""
  if value not in choices:
    named = ", ".join(map(repr, choices))
    raise ValueError(f"{wrapper}: {name} must be one of {named}; got {value!r}.")
  return value


def scalar(wrapper: str, name: str, value: Any, kind: Any) -> jax.Array:
  """Returns an extra arg as a scalar array whose dtype is a subdtype of `kind`."""
  array = jnp.asarray(value)
  if array.shape != ():
    raise ValueError(f"{wrapper}: {name} must be a scalar, got shape {array.shape}.")
  if not (jnp.issubdtype(array.dtype, kind) or array.dtype == jnp.bool_):
    raise TypeError(f"{wrapper}: {name} must be of {kind.__name__} dtype, got {array.dtype}.")
  return array


def weight(wrapper: str, value: Any, num_towers: int | None = None, name: str = "weight") -> Any:
  """Returns a weight, or one per tower: real, at least 0, not NaN; or None."""
  if value is None:
    return None
  if isinstance(value, int | np.integer | np.ndarray) and np.asarray(value).dtype.kind in "iu":
    # JAX has no integer above 2**31 without jax_enable_x64.
    value = np.asarray(value, np.float64)
  if num_towers is None:
    array = scalar(wrapper, name, value, jnp.number)
  else:
    array = jnp.asarray(value)
    if array.shape != (num_towers,):
      shape = list(array.shape)
      raise ValueError(f"{wrapper}: {name} must be of shape [{num_towers}], got {shape}.")
  if jnp.issubdtype(array.dtype, jnp.complexfloating):
    raise TypeError(f"{wrapper}: {name} must be real, got {array.dtype}.")
  # A traced weight has no value to check.
  if not isinstance(value, jax.core.Tracer) and not (np.asarray(value) >= 0).all():
    raise ValueError(f"{wrapper}: {name} must be at least 0, got {array}.")
  return array


def spelled(**now: str) -> Callable[[Function], Function]:
  """Raises for names of arguments in other libraries, and tells ours."""

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
  """Returns `params`, which this wrapper requires, with Python numbers as arrays."""
  if params is None:
    raise ValueError(f"{wrapper}: params is needed: tx.update(updates, state, params).")
  return arrays(params)


def is_function(x: Any) -> bool:
  """Whether this is a function, and not a tree that can be called, such as a module of Equinox."""
  has_leaves = any(leaf is not x for leaf in jax.tree.leaves(x, is_leaf=lambda y: y is None))
  return callable(x) and (isinstance(x, jax.tree_util.Partial) or not has_leaves)


def arrays(tree: Tree) -> Tree:
  """The tree with Python numbers as arrays."""
  return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


def same_structure(wrapper: str, updates: Tree, params: Tree) -> list[Any]:
  """Returns the update of each leaf of `params`, None for a missing one."""
  # Unlike jax.tree.map over two trees, flatten_up_to treats None as a leaf.
  treedef: Any = jax.tree.structure(params)
  try:
    return treedef.flatten_up_to(updates)
  except (ValueError, TypeError) as error:
    structure = jax.tree.structure(updates)
    what = f"{wrapper}: updates must have the structure of the parameters"
    raise ValueError(f"{what}, {treedef}; got {structure}.") from error


def same_shapes(
  wrapper: str, updates: Tree, params: Tree, mend: str = "With reduce_towers, put it outermost."
) -> None:
  """Raises for an update whose shape differs from its parameter's; None, for no update, passes."""
  columns = same_structure(wrapper, updates, params)
  for (path, param), update in zip(jax.tree.leaves_with_path(params), columns, strict=True):
    if update is not None and jnp.shape(update) != jnp.shape(param):
      what = f"{wrapper}: updates{jax.tree_util.keystr(path)} must have the parameter's shape"
      raise ValueError(f"{what} {jnp.shape(param)}, got {jnp.shape(update)}. {mend}")


def inexact(wrapper: str, updates: Tree, name: str = "updates") -> Tree:
  """Returns a tree of real or complex arrays: integers have no mean and no norm."""
  updates = arrays(updates)
  for path, leaf in jax.tree.leaves_with_path(updates):
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      what = f"{wrapper}: {name}{jax.tree_util.keystr(path)} has dtype {leaf.dtype}"
      raise TypeError(f"{what}; it must be floating point or complex. Mask it with optax.masked.")
  return updates


def axes(wrapper: str, value: Any) -> tuple[int, ...] | None:
  """Returns the axes of a slice as a tuple; None means all axes."""
  if value is None:
    return None
  value = value if isinstance(value, Sequence) else (value,)
  return tuple(integer(wrapper, "axes", axis) for axis in value)


def summed_axes(wrapper: str, name: str, value: tuple[int, ...] | None, ndim: int) -> Any:
  """Returns the axes of a slice of one variable as nonnegative numbers."""
  if value is None:
    return tuple(range(ndim))
  for axis in value:
    if not -ndim <= axis < ndim:
      what = f"{axis} is out of range for {name} with {ndim} axes"
      mend = "Leave it out, by mask= or a projection of None."
      raise ValueError(f"{wrapper}: axes must be axes of every variable, but {what}. {mend}")
  summed = tuple(axis % ndim for axis in value)
  if len(set(summed)) != len(summed):
    raise ValueError(f"{wrapper}: axes must not name an axis twice, got {value} for {name}.")
  return summed


def spread(
  wrapper: str, name: str, value: Any, tree: Tree, is_value: Callable[[Any], bool], needed: str = ""
) -> list[Any]:
  """One value for each leaf of `tree`, from a tree of values with its structure or a prefix of it.

  With `needed`, an entry that is not a value raises a TypeError that says so.
  """
  values: list[Any] = []

  def repeat(one, part):
    values.extend([one] * len(jax.tree.leaves(part)))

  # Specs, masks and parameters may all be inside Flax's boxes or not.
  value, tree = (_paths.as_dicts(_paths.unboxed(x)) for x in (value, tree))
  try:
    jax.tree.map(repeat, value, tree, is_leaf=is_value)
  except (ValueError, TypeError) as error:
    what = f"{wrapper}: {name} must have the structure of the parameters or a prefix of it"
    shape = jax.tree.structure(tree)
    raise ValueError(f"{what}; got {value!r} for parameters {shape}.") from error
  for one in values:
    if needed and not is_value(one):
      kind = type(one).__name__
      raise TypeError(f"{wrapper}: {name} must hold {needed}, got {one!r} of type {kind}.")
  return values


def is_a(*kinds: Any) -> Callable[[Any], bool]:
  """A predicate for `spread`."""
  return lambda x: isinstance(x, kinds)
