"""Conditionals of others, in which one shard could wait in a collective for another.

`optax.apply_if_finite` calls its inner optimizer in a branch that each shard takes or not by its
own gradient. JAX traces a collective in such a branch without a word, and the first NaN of one
shard leaves the others waiting for ever. Nothing in the types of a branch tells its predicate (jax
0.10.2: jax-ml/jax#40823), so the conditionals that are being traced are looked up in the Python
stack, by the code of the public functions.
"""

import inspect
import sys
from collections.abc import Hashable
from types import FrameType
from typing import Any

import jax
import optax
from jax import lax

# The public functions that trace a branch, and their argument that decides.
_CONDITIONALS = {
  inspect.unwrap(lax.cond).__code__: "pred",
  inspect.unwrap(lax.switch).__code__: "index",
}
_APPLY_IF_FINITE = optax.apply_if_finite(
  optax.identity(), 1
).update.__code__  # one code for all its closures
_MULTI_STEPS = optax.MultiSteps.update.__code__
_SKIPS_BY_GRADIENT = (optax.skip_not_finite, optax.skip_large_updates)


def differing_branch(names: tuple[Hashable, ...], untracked: tuple[Hashable, ...]) -> str | None:
  """Describes a conditional round the caller that shards may take differently, or gives None.

  Args:
    names: the axes over which the caller is going to send. Under vmap both branches run, and nobody
      waits.
    untracked: those of them whose values shard_map does not type. There only Optax's own wrappers
      are known to decide by each shard's own gradient.
  """
  # Under vmap both branches of a conditional run, and nobody waits.
  if not names or not set(names) <= set(jax.sharding.get_abstract_mesh().manual_axes):
    return None
  # A branch is traced while lax.cond is on Python's stack, and whoever called it is below.
  frame: FrameType | None = sys._getframe(1)
  while frame is not None:
    argument = _CONDITIONALS.get(frame.f_code)
    if argument is not None:
      aval = jax.typeof(frame.f_locals[argument])
      differs = set(names) & set(getattr(aval.manual_axis_type, "varying", ()))
      if differs:
        return (
          f"a lax.{frame.f_code.co_name} whose {argument} differs over {sorted(map(str, differs))}"
        )
      is_inside = set(untracked) <= set(aval.sharding.mesh.manual_axes)
      if untracked and is_inside and (who := _decides_by_gradient(frame.f_back)):
        return who
    frame = frame.f_back
  return None


def _decides_by_gradient(frame: FrameType | None) -> str | None:
  """The wrapper of Optax that entered a conditional by its own shard's gradient, if one did."""
  while frame is not None and frame.f_code not in _CONDITIONALS:
    if frame.f_code is _APPLY_IF_FINITE:
      return "optax.apply_if_finite"
    if frame.f_code is _MULTI_STEPS:
      skip: Any = getattr(frame.f_locals["self"], "_should_skip_update_fn", None)
      skip = getattr(skip, "func", skip)  # of a functools.partial
      return (
        f"optax.MultiSteps(should_skip_update_fn={skip.__name__})"
        if skip in _SKIPS_BY_GRADIENT
        else None
      )
    frame = frame.f_back
  return None
