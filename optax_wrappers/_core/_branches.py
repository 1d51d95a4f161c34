"""Choices that a scalar decides while the step runs: which to use when, and what each costs.

| Function | Where the predicate is false | Collectives inside run | Passes over memory |
|---|---|---|---|
| `cond` | the other branch runs | in their branch only | one over what a branch hands through |
| `apply_if` | nothing runs | where it holds only | none over what is carried |
| `update_if` | the old state is kept | in every step | none where XLA fuses the choice: TPU, GPU |

Take `cond` where both sides have work to do, `apply_if` where one side leaves all as it is, as in
most steps an exchange does, and `update_if` where the predicate may differ between shards that send
each other something inside. All three have derivatives, forward and in reverse. `what` names what
decides, in an error.
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
  predicate: jax.Array,
  true_fun: Callable[[], Tree],
  false_fun: Callable[[Any], Tree],
  wrapper: str,
  what: str,
) -> Tree:
  """`lax.cond` whose branches may differ in the axes that they vary over.

  `false_fun` takes what `true_fun` returns, as abstract values.
  """
  # Outside jit lax.cond would compile both branches again in every call.
  if not isinstance(predicate, jax.core.Tracer):
    return true_fun() if predicate else false_fun(jax.eval_shape(true_fun))
  true_fun = jax.jit(true_fun, inline=True)  # eval_shape and the branch share one trace
  abstract = jax.eval_shape(true_fun)
  own = _axes.varying(predicate)
  if own:
    both = jax.make_jaxpr(lambda: (true_fun(), false_fun(abstract)))()
    _require_met(predicate, both.jaxpr, wrapper, what)
  true_leaves, treedef = jax.tree.flatten(abstract)
  false_leaves = jax.tree.leaves(jax.eval_shape(lambda: false_fun(abstract)))
  # Branches must agree in type: where one gives a shard's own value, the other's is marked so.
  pairs = zip(true_leaves, false_leaves, strict=True)
  axes = [_axes.varying(t) | _axes.varying(f) | own for t, f in pairs]

  def aligned(tree):
    return treedef.unflatten(_axes.vary_over(treedef.flatten_up_to(tree), axes))

  return lax.cond(predicate, lambda: aligned(true_fun()), lambda: aligned(false_fun(abstract)))


def apply_if(
  predicate: jax.Array, fun: Callable[..., Tree], carried: Tree, *operands: Any, wrapper: str
) -> Tree:
  """`fun(carried, *operands)` where `predicate` holds, else `carried`, which is not copied.

  On a TPU this is `lax.cond`. Elsewhere it is a loop that runs once or not at all, because
  `lax.cond` would copy there, in every step, what a branch hands through. A loop has no derivative
  in reverse, so derivatives are taken of the branch. What `fun` closes over has none.

  Where `fun` has collectives, the caller asks `_axes.require_equal` of the predicate.
  """
  if not isinstance(predicate, jax.core.Tracer):
    return fun(carried, *operands) if predicate else carried
  fun = jax.jit(fun, inline=True)  # eval_shape and the loop share one trace
  # A loop carries values of one type, so what `fun` lets differ between shards must be marked so
  # before the loop.
  carried = _axes.vary_like(carried, jax.eval_shape(fun, carried, *operands))
  carried = _axes.to_varying(carried, tuple(_axes.varying(predicate)))

  def aligned(carried, *operands):
    return _axes.vary_like(fun(carried, *operands), carried)

  def branch(predicate, carried, operands):
    return lax.cond(predicate, lambda: aligned(carried, *operands), lambda: carried)

  def loop(predicate, carried, operands):
    def body(pair):
      runs, carried = pair
      carried, given = _bound_to(runs, (carried, operands))
      return ~runs, aligned(carried, *given)

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
  """The values of a tree, which XLA may compute with only where it has `runs`.

  Else it would compute what is the same in every turn of a loop, as the sum over shards that is the
  whole exchange, before the loop, and so in every step.
  """
  leaves, treedef = jax.tree.flatten(tree)
  marked = _axes.vary_over([runs] * len(leaves), [_axes.varying(leaf) for leaf in leaves])
  # One barrier for each leaf: all that goes through one depends on all that does, and XLA's passes
  # over a loop take the square of what depends on what.
  return treedef.unflatten(lax.optimization_barrier(pair)[1] for pair in zip(marked, leaves))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def fenced(fun: Callable[..., jax.Array], *operands: Any) -> jax.Array:
  """`fun(*operands)`, a bool scalar, in a program of its own: a loop of one turn.

  XLA fuses a scalar that many arrays make with each of the arrays that need it: the time to compile
  1,000 leaves grows as their square. `fun` is a function of a module, compiled once outside `jit`.
  """
  if not operands:
    return jnp.ones((), bool)
  axes = tuple(_axes.varying(jax.eval_shape(fun, *operands)))
  start = _axes.to_varying(jnp.ones((), bool), axes)

  def body(_):
    return _axes.to_varying(jnp.zeros((), bool), axes), fun(*operands)

  return lax.while_loop(lambda pair: pair[0], body, (start, start))[1]


def update_if(
  accept: jax.Array,
  update: Callable[[Tree], tuple[Tree, Tree]],
  state: Tree,
  wrapper: str,
  what: str,
  mend: str = "",
) -> tuple[Tree, Tree]:
  """`update(state)`, updates and a new state, where `accept` holds; else zeros, and `state`.

  `update` runs in every step, so that no shard waits for another.
  """
  if _axes.varying(accept):
    _require_met(accept, jax.make_jaxpr(update)(state).jaxpr, wrapper, what, mend)
  updates, new_state = update(state)
  return _numerics.zeros_unless(accept, updates), _numerics.select(accept, new_state, state)


def _require_met(predicate, jaxpr, wrapper, what, mend=""):
  """Raises where `predicate` may differ between shards that send each other something.

  Those inside would wait for the others forever.
  """
  over = _axes.varying(predicate) & _waits.sending_names(jaxpr)
  _axes.require_equal(predicate, wrapper, what, mend, axes=over)
