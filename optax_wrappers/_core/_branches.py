"""Choices that a scalar decides while the step runs: which to use when, and what each costs.

| Function | Where the predicate is false | Collectives inside run | Passes over memory |
|---|---|---|---|
| `cond` | the other branch runs | in their branch only | one over what a branch hands through |
| `apply_if` | nothing runs | where it holds only | none over what is carried |
| `update_if` | the old state is kept | in every step | none where XLA fuses the choice: TPU, GPU |

Take `cond` where both sides have work to do, as the earlier and the last tower have. Take
`apply_if` where one side leaves everything as it is, and in most steps does: an exchange, a
projection. Take `update_if` where the predicate may differ between shards that send each other
something inside, so that no branch may be taken: a stale gradient, a gradient with a NaN.

All three have derivatives, forward and in reverse.
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

  Args:
    predicate: bool scalar, equal on all shards between which a branch sends something. If shards
      took different branches, the ones inside a collective would wait for the others for ever. A
      predicate that its type lets differ between them raises here, when the step is traced.
    true_fun: takes no arguments; whatever it uses is closed over.
    false_fun: takes what `true_fun` returns, as abstract values.
    wrapper: the name that an error gives.
    what: what decides, in the words of an error.
  """
  # Outside jit lax.cond would compile both branches anew in every call.
  if not isinstance(predicate, jax.core.Tracer):
    return true_fun() if predicate else false_fun(jax.eval_shape(true_fun))
  true_fun = jax.jit(true_fun, inline=True)  # eval_shape and the branch share one trace
  abstract = jax.eval_shape(true_fun)
  if _axes.varying(predicate):
    both = jax.make_jaxpr(lambda: (true_fun(), false_fun(abstract)))()
    _require_met(predicate, both.jaxpr, wrapper, what)
  true_leaves, treedef = jax.tree.flatten(abstract)
  false_leaves = jax.tree.leaves(jax.eval_shape(lambda: false_fun(abstract)))
  own = _axes.varying(predicate)
  # Branches must agree in type: where one gives a shard's own value, the other's is marked so.
  axes = [
    tuple(_axes.varying(t) | _axes.varying(f) | own)
    for t, f in zip(true_leaves, false_leaves, strict=True)
  ]

  def aligned(tree):
    leaves = treedef.flatten_up_to(tree)
    return treedef.unflatten([_axes.to_varying(x, names) for x, names in zip(leaves, axes)])

  return lax.cond(predicate, lambda: aligned(true_fun()), lambda: aligned(false_fun(abstract)))


def apply_if(
  predicate: jax.Array, fun: Callable[..., Tree], carried: Tree, *operands: Any, wrapper: str
) -> Tree:
  """`fun(carried, *operands)` where `predicate` holds, else `carried`, which stays where it lies.

  On a TPU this is `lax.cond`. Elsewhere it is a loop that runs once or not at all, because
  `lax.cond` would copy there what a branch hands through, which is a pass over all of it in every
  step. A loop has no derivative in reverse, so derivatives are taken of the branch.

  Args:
    predicate: bool scalar; where `fun` has collectives, equal on all shards
      (`_axes.require_equal`).
    fun: keeps shapes and dtypes. Its derivative is taken with respect to what it is given, and not
      what it closes over.
    carried: what `fun` replaces.
    operands: what else it needs.
    wrapper: the name that an error gives.
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
        f"{wrapper}: this derivative goes through a jax.vmap over workers that was staged out"
        " before it (by jit, scan or checkpoint), and JAX does not know the name of its axis any"
        " more. Take the derivative first, jit(grad(step)) for grad(jit(step)), or map over the"
        " workers with jax.shard_map."
      ) from error

  return either(predicate, carried, operands)


def _bound_to(runs, tree):
  """The values of a tree, which XLA may compute with only where it has `runs`.

  Whatever is the same in every turn of a loop it would else compute before the loop, and so in
  every step. That may be the sum over shards that is the whole exchange.
  """

  def bound(leaf):
    # One for each leaf, because all that goes through one barrier depends on all that does, and
    # XLA's passes over a loop take the square of what depends on what.
    return lax.optimization_barrier((_axes.to_varying(runs, tuple(_axes.varying(leaf))), leaf))[1]

  return jax.tree.map(bound, tree)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def apart(fun: Callable[..., jax.Array], *operands: Any) -> jax.Array:
  """`fun(*operands)`, a bool scalar, in a program of its own: a loop of one turn.

  `fun` is a function of a module, so that outside `jit` it is compiled once.

  A scalar that many arrays make and many arrays need is computed anew for each of them where XLA
  fuses it with what needs it: the time to compile 1,000 leaves grows as their square.
  """
  if not operands:
    return jnp.ones((), bool)
  result = jax.eval_shape(fun, *operands)
  start = _axes.to_varying(jnp.ones((), bool), tuple(_axes.varying(result)))

  def body(carried):
    del carried
    return _axes.to_varying(jnp.zeros((), bool), tuple(_axes.varying(start))), fun(*operands)

  return lax.while_loop(lambda carried: carried[0], body, (start, start))[1]


def update_if(
  accept: jax.Array,
  update: Callable[[Tree], tuple[Tree, Tree]],
  state: Tree,
  wrapper: str,
  what: str,
  mend: str = "",
) -> tuple[Tree, Tree]:
  """`update(state)` where `accept` holds; else zero updates, and `state` as it was.

  Args:
    accept: bool scalar, equal on all shards between which `update` sends something, as far as its
      type tells. `update` runs in every step, so that none of them waits for another.
    update: from the state to the updates and the new state.
    state: what it replaces.
    wrapper: the name that an error gives.
    what: what decides, in the words of an error.
    mend: what to do about it, likewise.

  Returns:
    The updates or zeros, and the chosen state.
  """
  if _axes.varying(accept):
    _require_met(accept, jax.make_jaxpr(update)(state).jaxpr, wrapper, what, mend)
  updates, new_state = update(state)
  return _numerics.zeros_unless(accept, updates), _numerics.select(accept, new_state, state)


def _require_met(predicate, jaxpr, wrapper, what, mend=""):
  """Raises where `predicate` may differ between shards that send each other something."""
  over = _axes.varying(predicate) & _waits.sending_names(jaxpr)
  _axes.require_equal(predicate, wrapper, what, mend, axes=over)
