"""Choices that a scalar decides while the step runs: when to use which, and what each costs.

| Function | Where the predicate is false | Collectives inside run | Passes over memory |
|---|---|---|---|
| `cond` | the other branch runs | only in their branch | one, over what a branch passes through |
| `step_if` | a state is returned, and zeros | only if it is true | none |
| `apply_if` | nothing runs | only if it is true | none over what is carried |
| `update_if` | the old state is kept | in every step | none if XLA fuses the choice (TPU, GPU) |

Use `cond` if both sides have work to do, `step_if` if one side has no updates, `apply_if` if one
side leaves everything unchanged, as an exchange does in most steps, and `update_if` if collectives
inside must run on every shard in every step (it raises if types show that the predicate differs
over an axis of one). All have derivatives, forward and in reverse. `what` names the cause of the
decision in an error.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _numerics, _waits
from optax_wrappers._core._types import Tree


def cond(
  predicate: jax.Array, true_fun: Callable, false_fun: Callable, wrapper: str, what: str
) -> Tree:
  """`lax.cond` of `true_fun()` and `false_fun(shapes)`, which may vary over different axes.

  `shapes` are the abstract results of `true_fun`.
  """
  # Outside jit, lax.cond would compile both branches again in every call.
  if not isinstance(predicate, jax.core.Tracer):
    return true_fun() if predicate else false_fun(jax.eval_shape(true_fun))
  # The abstract results and the branch share one trace.
  true_fun = jax.jit(true_fun, inline=True)
  abstract = _avals(true_fun)
  over = _axes.varying(predicate)
  if over:
    both = jax.make_jaxpr(lambda: (true_fun(), false_fun(abstract)))()
    _require_met(predicate, both.jaxpr, wrapper, what)
  results = abstract, jax.eval_shape(lambda: false_fun(abstract))
  # Branches must agree in type: if one result varies over an axis, so must the other.
  pairs = zip(*(_axes.all_varying(jax.tree.leaves(tree)) for tree in results), strict=True)
  axes = [over.union(*pair) for pair in pairs]
  return lax.cond(
    predicate,
    lambda: _axes.to_varying(true_fun(), axes),
    lambda: _axes.to_varying(false_fun(abstract), axes),
  )


def _avals(fun):
  """The abstract results, with their layout: `jax.eval_shape` drops it if a mesh has Auto axes."""
  jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)()
  return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.out_avals)


def step_if(
  predicate: jax.Array | bool, step: Callable, keep: Callable, wrapper: str, what: str
) -> tuple[Tree, Tree]:
  """`step()`, updates and a new state, if `predicate` holds; else zeros and the state `keep()`."""
  if not isinstance(predicate, jax.core.Tracer):
    return step() if predicate else (_made(jnp.zeros, _avals(step)[0]), keep())
  # In older versions vmap makes an array of lax.empty for each worker.
  unwritten = lax.empty if jax.__version_info__ >= (0, 12) else jnp.zeros

  def kept(shapes):
    return _made(unwritten, shapes[0]), keep()

  # The zeros are chosen outside, where XLA fuses them with what adds the updates: a branch would
  # write them to memory.
  updates, state = cond(predicate, step, kept, wrapper, what)
  return _numerics.zeros_unless(predicate, updates), state


def _made(make, tree):
  """Arrays by `make`, such as `jnp.zeros`, of abstract ones."""

  def array(like):
    # Branches must agree in how arrays are sharded over the axes of an Explicit mesh.
    is_sharded = like.sharding is not None and any(like.sharding.spec)
    return make(like.shape, like.dtype, out_sharding=like.sharding if is_sharded else None)

  return jax.tree.map(array, tree)


def apply_if(
  predicate: jax.Array, fun: Callable[..., Tree], carried: Tree, *operands: Any, wrapper: str
) -> Tree:
  """`fun(carried, *operands)` if `predicate` holds, else `carried` without a copy.

  On a TPU this is `lax.cond`. Elsewhere `lax.cond` would copy what a branch passes through, in
  every step, so it is a loop that runs at most once. A loop has no reverse-mode derivative, so the
  branch is differentiated instead. What `fun` closes over has no derivative. If `fun` has
  collectives, the caller checks the predicate with `_axes.require_equal`.
  """
  if not isinstance(predicate, jax.core.Tracer):
    return fun(carried, *operands) if predicate else carried
  # eval_shape and the loop share one trace.
  fun = jax.jit(fun, inline=True)
  # A loop carries values of fixed types, so what `fun` lets differ between shards must be marked as
  # varying before the loop.
  carried = _axes.vary_like(carried, jax.eval_shape(fun, carried, *operands))
  carried = _axes.to_varying(carried, tuple(_axes.varying(predicate)))

  def aligned(carried, *operands):
    return _axes.vary_like(fun(carried, *operands), carried)

  def branch(predicate, carried, operands):
    return lax.cond(predicate, lambda: aligned(carried, *operands), lambda: carried)

  def loop(predicate, carried, operands):
    def body(pair):
      runs, carried = pair
      carried, values = _bound_to(runs, (carried, operands))
      return ~runs, aligned(carried, *values)

    return lax.while_loop(lambda pair: pair[0], body, (predicate, carried))[1]

  @jax.custom_jvp
  def either(predicate, carried, operands):
    return lax.platform_dependent(predicate, carried, operands, tpu=branch, default=loop)

  @either.defjvp
  def _(primals, tangents):
    try:
      return jax.jvp(functools.partial(branch, primals[0]), primals[1:], tangents[1:])
    except NameError as error:
      raise ValueError(
        f"{wrapper}: a jax.vmap over workers was staged out (by jit, scan or checkpoint) before"
        " this derivative, which needs its axis. Take the derivative first, jit(grad(step)) for"
        " grad(jit(step)), or map with jax.shard_map."
      ) from error

  return either(predicate, carried, operands)


def _bound_to(runs, tree):
  """The values of a tree, which XLA may use in computations only after `runs`.

  Otherwise XLA would move loop-invariant code, such as the all-reduce of a synchronization, out of
  the loop, and so into every step.
  """
  leaves, treedef = jax.tree.flatten(tree)
  marked = _axes.to_varying([runs] * len(leaves), _axes.all_varying(leaves))
  # One barrier per leaf: every output of a barrier depends on all of its inputs, and the time of
  # XLA's loop passes is quadratic in such dependences.
  return treedef.unflatten(lax.optimization_barrier(pair)[1] for pair in zip(marked, leaves))


def update_if(
  accept: jax.Array, update: Callable, state: Tree, wrapper: str, what: str, mend: str = ""
) -> tuple[Tree, Tree]:
  """`update(state)`, updates and a new state, if `accept` holds; else zeros and `state`."""
  if _axes.varying(accept):
    _require_met(accept, jax.make_jaxpr(update)(state).jaxpr, wrapper, what, mend)
  updates, new_state = update(state)
  return _numerics.zeros_unless(accept, updates), _numerics.select(accept, new_state, state)


def _require_met(predicate, jaxpr, wrapper, what, mend=""):
  """Raises if shards that communicate inside may differ in `predicate`, and so wait forever."""
  _axes.require_equal(predicate, wrapper, what, mend, axes=_waits.sending_names(jaxpr))
