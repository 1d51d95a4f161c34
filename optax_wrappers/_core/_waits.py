"""Finds steps in which one shard may wait forever in a collective for another.

A conditional on a shard's own data with a collective inside compiles without an error; the first
shard that does not enter it leaves the others waiting. The jaxpr of the whole step shows all such
conditionals, and the gradient of a loss that is a sum over shards already, of which no type tells
that a mean must not divide it again.
"""

import os
import re
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from optax_wrappers._core._axes import NONE, names_in
from optax_wrappers._core._types import AxisNames

Names = frozenset[Hashable]

# Among the names are marks of a backward pass: `(SUMMED, axis)`, a sum by autodiff over an axis;
# `(OF_SUM, axis, place)`, the gradient of a loss that is a sum over it.
SUMMED, OF_SUM = "summed", "of a sum"

# Their results are equal on all shards that participate. JAX has variants of each: psum_invariant,
# all_gather_invariant, all_gather_reduced.
_EQUALIZING = re.compile("(psum|pmax|pmin|all_gather)(_|$)")
_SENDING = re.compile(
  "(psum|pmax|pmin|all_gather|ppermute|pbroadcast|all_to_all|reduce_scatter|ragged)(_|$)"
)
_MEAN_OF_SUM = re.compile(r"mean of sums over (\[.*?\])")


def mean_of_sum(names: AxisNames) -> Any:
  """A scope in which a mean divides what autodiff has summed over these axes."""
  return jax.named_scope(f"mean of sums over {_named(names)}")


def _named(names):
  return sorted(map(str, names))


def require_none(caller: str, jaxpr: Jaxpr) -> None:
  """Raises if a conditional or a loop of a step may leave a shard waiting, or for a reduced loss.

  A value may differ between shards if it depends on an argument that a `shard_map` shards over an
  axis, until it is reduced over that axis.
  """
  _Reader(caller).results(jaxpr, [NONE] * len(jaxpr.invars))


def sending_names(jaxpr: Jaxpr) -> Names:
  """The axes over which a program communicates."""
  sent_over = NONE
  for eqn in jaxpr.eqns:
    if _SENDING.match(eqn.primitive.name):
      sent_over |= _names_of(eqn)
    for inner in jaxprs_in_params(eqn.params):
      sent_over |= sending_names(inner)
  return sent_over


class _Reader:
  """Reads a program, and tracks over which axes each value may differ."""

  is_inside_backward = False  # whether the program that is read is called in a backward pass
  has_of_sum = False  # whether there is a mark of a loss that is a sum

  def __init__(self, caller: str):
    self.caller = caller
    self.by_name: dict[str, Callable[[JaxprEqn, list[Names]], list[Names]]] = {
      "shard_map": self.of_shard_map,
      "cond": self.of_cond,
      "while": self.of_while,
      "scan": self.of_scan,
    }

  def results(self, jaxpr: Jaxpr, inputs: list[Names]) -> list[Names]:
    """The axes over which the results may differ, if the arguments may differ over `inputs`."""
    differing: dict[Any, Names] = dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
      # In line, because a step has hundreds of equations.
      differences = [NONE if isinstance(x, Literal) else differing.get(x, NONE) for x in eqn.invars]
      name, inside = eqn.primitive.name, any(True for _ in jaxprs_in_params(eqn.params))
      joint = NONE.union(*differences)
      made = [joint] * len(eqn.outvars)
      if inside:
        made = self.of_call(eqn, differences)
      elif name == "axis_index":
        made = [_names_of(eqn)]
      elif _EQUALIZING.match(name):
        summed = {(SUMMED, axis) for axis in _names_of(eqn) if self.is_backward(eqn)}
        # Equal from here on.
        made = [(joint - _names_of(eqn)) | summed] * len(eqn.outvars)
      elif name == "pvary" and self.is_backward(eqn) and _is_of_sum(eqn):
        marks = _marks_of_sum(eqn, joint)
        made = [joint | marks]
        self.has_of_sum |= bool(marks)
      elif self.has_of_sum:
        self.require_local(eqn, joint)
      differing.update(zip(eqn.outvars, made, strict=True))
    return [NONE if isinstance(x, Literal) else differing.get(x, NONE) for x in jaxpr.outvars]

  def is_backward(self, eqn):
    """Whether an equation is of a backward pass, and not one of the forward pass, run again."""
    scope = str(eqn.source_info.name_stack)
    is_again = "rematted_computation" in scope
    return not is_again and (self.is_inside_backward or "transpose(" in scope)

  def of_call(self, eqn, inputs):
    """Of an equation that calls programs."""
    outside, self.is_inside_backward = self.is_inside_backward, self.is_backward(eqn)
    joint = NONE.union(*inputs)
    made = [joint] * len(eqn.outvars)
    if eqn.primitive.name in self.by_name:
      made = self.by_name[eqn.primitive.name](eqn, inputs)
    else:
      for inner in jaxprs_in_params(eqn.params):
        is_call = (len(inner.invars), len(inner.outvars)) == (len(inputs), len(eqn.outvars))
        inner_results = self.results(inner, inputs if is_call else [joint] * len(inner.invars))
        made = inner_results if is_call else made
    self.is_inside_backward = outside
    return made

  def of_shard_map(self, eqn, inputs):
    (inner,) = jaxprs_in_params(eqn.params)
    edges = [frozenset(names_in(spec, range(len(spec)))) for spec in eqn.params["in_specs"]]
    if not eqn.params["check_vma"]:
      # Without types, a single integer per shard is taken for a counter that all shards share.
      avals = [x.aval for x in inner.invars]
      is_counter = [x.size == 1 and jnp.issubdtype(x.dtype, jnp.integer) for x in avals]
      edges = [NONE if flag else names for flag, names in zip(is_counter, edges, strict=True)]
    self.results(inner, edges)
    return [NONE] * len(eqn.outvars)

  def of_cond(self, eqn, inputs):
    predicate, *operands = inputs
    branches = list(jaxprs_in_params(eqn.params))
    self.require_met(eqn, predicate, branches)
    # They may wait inside too.
    results = [self.results(branch, operands) for branch in branches]
    return [predicate.union(*same) for same in zip(*results)]

  def of_while(self, eqn, inputs):
    test, body = jaxprs_in_params(eqn.params)
    numbers = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_test, of_body, carried = _split(inputs, *numbers)
    carried = _settled(carried, lambda carried: self.results(body, of_body + carried))
    # One bool: whether it continues.
    (predicate,) = self.results(test, of_test + carried)
    self.require_met(eqn, predicate, [test, body])
    return [predicate | x for x in carried]

  def of_scan(self, eqn, inputs):
    (body,) = jaxprs_in_params(eqn.params)
    # An iteration reads a row of the scanned inputs and writes a row of the stacked outputs; the
    # rest is carried.
    num_rows = sum(map(_is_row, eqn.invars, body.invars))
    num_carried = len(eqn.outvars) - sum(map(_is_row, eqn.outvars, body.outvars))
    num_consts = len(inputs) - num_carried - num_rows
    consts, carried, rows = _split(inputs, num_consts, num_carried)

    def turn(carried):
      return self.results(body, consts + carried + rows)

    return turn(_settled(carried, lambda carried: turn(carried)[:num_carried]))

  def require_local(self, eqn, given):
    """Raises for a mean over an axis of the gradient of a loss that is a sum over it."""
    scope = _MEAN_OF_SUM.search(str(eqn.source_info.name_stack))
    for mark in given if scope else ():
      if isinstance(mark, tuple) and mark[0] == OF_SUM and repr(str(mark[1])) in scope[1]:
        raise ValueError(
          f"{self.caller}: the loss that is differentiated is reduced over {mark[1]!r} already, at"
          f" {mark[2]}, and the optimizer's mean would divide its gradient again. Return the local"
          ' loss, or pass invariant="reduced".'
        )

  def require_met(self, eqn, predicate, inside):
    names = predicate and predicate & NONE.union(*map(sending_names, inside))
    if names:
      kind = "loop" if eqn.primitive.name == "while" else "conditional"
      raise ValueError(
        f"{self.caller}: one shard may enter the {kind} at {_place(eqn)} without another, and"
        f" it contains a collective over {_named(names)}: they would wait forever. Put"
        f" the {kind} inside the wrapper, or make all shards decide alike: use lax.pmax."
      )


def _split(values, first, second):
  return values[:first], values[first : first + second], values[first + second :]


def _is_row(whole, row):
  return whole.aval.ndim > row.aval.ndim


def _settled(carried, turn):
  """What a loop carries, iterated until nothing more differs."""
  while (after := [x | y for x, y in zip(carried, turn(carried), strict=True)]) != carried:
    carried = after
  return carried


def _is_of_sum(eqn):
  """Whether it comes from a sum over shards, whose derivative gives a gradient to all of them."""
  return any(frame.function_name in ("psum", "pmean") for frame in _frames(eqn))


def _marks_of_sum(eqn, joint):
  """The marks of a loss that is a sum: its derivative by this value is not one over shards."""
  return {(OF_SUM, axis, _place(eqn)) for axis in _names_of(eqn) if (SUMMED, axis) not in joint}


def _names_of(eqn):
  names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
  names = names if isinstance(names, tuple | list) else (names,)
  return frozenset(name for name in names if not isinstance(name, int))


def _place(eqn):
  """The line of a program from which JAX was called."""
  jax_itself = os.path.dirname(jax.__file__)
  callers = (x for x in _frames(eqn) if not x.file_name.startswith(jax_itself))
  return next((f"{x.file_name}:{x.line_num}" for x in callers), "an unknown place")


def _frames(eqn):
  traceback = eqn.source_info.traceback
  return traceback.frames if traceback else ()
