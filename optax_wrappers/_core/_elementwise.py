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
  if not any(map(_numerics.is_inexact, jax.tree.leaves(params))):
    return

  def refused(what):
    return ValueError(
      f"{wrapper}: with {option} the optimizer of {name} must treat every element by itself; this"
      f" one has a {what}. Leave {option} out."
    )

  outlines = []
  for n in (1, num_shares):
    arguments = jax.tree.map(
      lambda x, n=n: jax.ShapeDtypeStruct(_shares.share_shape(x.shape, n), x.dtype), params
    )
    state = jax.eval_shape(tx.init, arguments)
    sizes = {x.shape for x in jax.tree.leaves(arguments)}
    for path, leaf in jax.tree.leaves_with_path(state):
      if leaf.shape and leaf.shape not in sizes:
        what = f"{name}{jax.tree_util.keystr(path)} {list(leaf.shape)}"
        why = "which has not the size of a variable"
        raise ValueError(f"{wrapper}: {option} cannot divide {what}, {why}.")
    try:
      program = jax.make_jaxpr(lambda *args: tx.update(*args, **extra))(arguments, state, arguments)
    except (TypeError, ValueError) as error:
      if n == 1:
        raise
      raise refused("shape of its own") from error
    inputs: list[Any] = program.jaxpr.invars
    if mixing := _mixing(program.jaxpr, [bool(x.aval.shape) for x in inputs]):
      raise refused(mixing)
    outlines.append(([jnp.shape(x) for x in program.consts], _outline(program.jaxpr)))
  if outlines[0] != outlines[1]:
    raise refused("look at shapes")


def _outline(jaxpr):
  """The operations of a program and the numbers in it, without shapes."""
  operations = []
  for eqn in jaxpr.eqns:
    numbers = [str(x.val) for x in eqn.invars if isinstance(x, jax.extend.core.Literal)]
    operations.append((eqn.primitive.name, numbers))
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      operations += _outline(inner)
  return operations


def _mixing(jaxpr: Any, is_data: list[bool]) -> str:
  """The name of a primitive that makes elements of the data depend on each other; "" if none.

  `is_data` says which inputs are data, rather than a table of a schedule or a count.
  """
  data = {var for var, flag in zip(jaxpr.invars, is_data, strict=True) if flag}
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name in _OF_PLACES:
      return name
    taken = [not isinstance(x, jax.extend.core.Literal) and x in data for x in eqn.invars]
    inside: list[Any] = list(jax.extend.core.jaxprs_in_params(eqn.params))
    for inner in inside:
      if mixed := _mixing(inner, _data_of(inner, taken)):
        return mixed
    if not any(taken):
      continue
    shape = next(x.aval.shape for x, flag in zip(eqn.invars, taken) if flag)
    # A scan, for example, takes the elements along an axis one by one.
    known = _CALLS if inside else _BY_ELEMENT
    if name not in known or (not inside and any(x.aval.shape != shape for x in eqn.outvars)):
      return name
    data.update(eqn.outvars)
  return ""


def _data_of(inner, taken):
  """Which inputs of a program inside an equation are data, if these of the equation are."""
  if len(inner.invars) == len(taken):
    return taken
  return [any(taken) and bool(x.aval.shape) for x in inner.invars]


# Primitives that distinguish positions. Also random bits: all shares would draw the same.
_OF_PLACES = frozenset({"iota", "random_bits"})
# Primitives of which each element of the result depends on the elements at its place alone.
# Another one, which may be new, is refused.
_NAMES = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex conj convert_element_type copy
copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not
optimization_barrier or pcast polygamma population_count pow pvary real reduce_precision
regularized_incomplete_beta rem reshape round rsqrt select_n sharding_constraint shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
zeta
"""
_BY_ELEMENT = frozenset(_NAMES.split())
# Those that only contain others.
_CALLS = frozenset(
  {
    *("checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2", "while"),
  }
)
