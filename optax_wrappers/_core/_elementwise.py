"""Whether an optimizer treats every element independently, and so can be given shares."""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from optax_wrappers._core import _numerics, _shares
from optax_wrappers._core._types import Tree


def require(
  wrapper: str, option: str, name: str, tx: Any, params: Tree, num_shares: int = 2, **extra: Any
) -> None:
  """Raises if an optimizer cannot be given shares of its arguments, as `option` would do.

  It must be the same program on whole arrays and on shares, and in it no element may depend on
  another element or on its position. `name` is that of the state, `extra` are the extra args. Trees
  of only integers and random keys are not checked.
  """
  leaves = jax.tree.leaves(params)
  if not any(map(_numerics.is_inexact, leaves)):
    return
  outlines = []
  for n in (1, num_shares):
    given = jax.tree.map(
      lambda x, n=n: jax.ShapeDtypeStruct(_shares.share_shape(x.shape, n), x.dtype), params
    )
    state = jax.eval_shape(tx.init, given)
    sizes = {x.shape for x in jax.tree.leaves(given)}
    for path, leaf in jax.tree.leaves_with_path(state):
      if leaf.shape and leaf.shape not in sizes:
        what = f"{name}{jax.tree_util.keystr(path)} {list(leaf.shape)}"
        why = "which has not the size of a variable"
        raise ValueError(f"{wrapper}: {option} cannot divide {what}, {why}.")
    try:
      program = jax.make_jaxpr(lambda *args: tx.update(*args, **extra))(given, state, given)
    except (TypeError, ValueError) as error:
      if n == 1:
        raise
      raise ValueError(_refused(wrapper, option, name, "shape of its own")) from error
    inputs: list[Any] = program.jaxpr.invars
    if mixing := _mixing(program.jaxpr, [bool(x.aval.shape) for x in inputs]):
      raise ValueError(_refused(wrapper, option, name, mixing))
    outlines.append(([jnp.shape(x) for x in program.consts], _outline(program.jaxpr)))
  if outlines[0] != outlines[1]:
    raise ValueError(_refused(wrapper, option, name, "look at shapes"))


def _refused(wrapper, option, name, what):
  return (
    f"{wrapper}: with {option} the optimizer of {name} must treat every element by itself; this"
    f" one has a {what}. Leave {option} out."
  )


def _outline(jaxpr):
  """The operations of a program and the numbers in it, without shapes."""
  found = []
  for eqn in jaxpr.eqns:
    numbers = [str(x.val) for x in eqn.invars if isinstance(x, jax.extend.core.Literal)]
    found.append((eqn.primitive.name, numbers))
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      found += _outline(inner)
  return found


def _mixing(jaxpr: Any, is_data: list[bool]) -> str:
  """The name of a primitive that makes elements of the data depend on each other; "" if none.

  Args:
    jaxpr: a program.
    is_data: which of its inputs are data, rather than a table of a schedule or a count.
  """
  data = {var for var, flag in zip(jaxpr.invars, is_data, strict=True) if flag}
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name in _OF_PLACES:
      return name
    taken = [not isinstance(x, jax.extend.core.Literal) and x in data for x in eqn.invars]
    inside: list[Any] = list(jax.extend.core.jaxprs_in_params(eqn.params))
    for inner in inside:
      is_same = len(inner.invars) == len(taken)
      flags = taken if is_same else [any(taken) and bool(x.aval.shape) for x in inner.invars]
      if found := _mixing(inner, flags):
        return found
    if not any(taken):
      continue
    shape = next(x.aval.shape for x, flag in zip(eqn.invars, taken) if flag)
    # A scan takes the elements along an axis one by one.
    is_mixing = name.startswith(_MIXING) if not inside else name == "scan"
    if is_mixing or (not inside and any(x.aval.shape != shape for x in eqn.outvars)):
      return name
    data.update(eqn.outvars)
  return ""


# Primitives that distinguish positions. Also random bits: all shares would draw the same.
_OF_PLACES = frozenset({"iota", "random_bits"})
# Prefixes of the names of other primitives that mix elements, but keep the shape.
_MIXING = (
  *("sort", "cum", "fft", "gather", "rev", "scatter", "dynamic_update_slice", "transpose"),
  *(
    "dot_general",
    "conv_general",
    "triangular_solve",
    "cholesky",
    "eig",
    "lu",
    "qr",
    "svd",
    "schur",
  ),
  *("householder", "tridiagonal", "pure_callback", "io_callback", "ffi_call", "custom_call"),
)
