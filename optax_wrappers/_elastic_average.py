"""Elastic averaging SGD: workers that explore on their own, held together by a centre."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_wrappers import _axes, _branches, _checks, _collectives, _numerics, _passage
from optax_wrappers._state import WrapperState, copy_tree, get_state, state
from optax_wrappers._types import AxisName, Tree

# The paper's beta, workers x moving_rate x period: TensorFlow's default spreads it over all three.
BETA = 0.9


@state
class ElasticAverageState(WrapperState):
  """State of `elastic_average`.

  Attributes:
    step: inner steps taken; int32 scalar. The exchange follows every `communication_period`-th.
    center: the centre, same structure as params, in float32 or wider; one for all workers.
    pulled_center: the centre as this worker last pulled it, same structure as params; None unless
      rho needs it.
    inner_state: state of this worker's optimizer.
    center_part: with `shard_center`, what this worker holds of the centre, same structure as
      params: of each leaf, as one flat row, the piece of its number; else None. `center` is None
      then.
  """

  shared_fields = frozenset({"step", "center"})
  lockstep_fields = frozenset({"step"})
  owns_inner = True
  divided_fields = frozenset({"center_part"})

  step: jax.Array
  center: Tree
  pulled_center: Tree
  inner_state: Tree
  center_part: Tree = None


def elastic_average(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  communication_period: int = 10,
  moving_rate: Any = None,
  rho: Any = None,
  learning_rate: Any = None,
  exchange: str = "simultaneous",
  shard_center: bool = False,
  staggered: bool = False,
  nonfinite: str = "propagate",
) -> optax.GradientTransformationExtraArgs:
  """Elastic averaging: every worker steps alone, and every so often it and a shared centre pull at
  each other.

  Each of W workers owns its parameters `x_i` and its inner state; the centre `c` is in the state,
  one for all. A step of worker i is (symbols of the paper: alpha is `moving_rate`, tau is
  `communication_period`)

      g_i <- g_i + rho (x_i - lc_i)     lc_i: the centre as worker i last pulled it
      x_i <- x_i + inner(g_i)
      and after the tau-th step of each round:
        d_i = x_i - c;   x_i <- x_i - alpha d_i;   c <- c + alpha sum_i d_i

  An exchange conserves `sum_i x_i + c`. Evaluate and save the centre: `center_params(state)`. It is
  kept in float32 or wider, whatever the parameters are: a centre in bfloat16 would stand still
  where its steps are below half an ulp.

  Args:
    inner: the optimizer of each worker.
    axis_name: the axis or axes over which the workers lie; None: one worker.
    communication_period: inner steps between two exchanges, at least 1.
    moving_rate: the fraction of its distance to the centre that a worker gives up in an exchange,
      in (0, 1]; default `0.9 / communication_period / num_workers`.
    rho: strength of the pull towards the last-pulled centre in every gradient, at least 0. It goes
      through `inner`. Default `moving_rate / learning_rate` if a learning rate is given, else 0.
    learning_rate: that of `inner`, a number above 0; read for the default of `rho` only.
    exchange: "simultaneous": all workers read one centre. "sequential": worker 0, then 1, ..., each
      reads the centre that the one before left, which is the round robin that TensorFlow's tests
      step through.
    shard_center: whether each of W workers holds a W-th of the centre and not a copy. The same
      numbers, up to the order in which a sum is taken; between exchanges the rest of the centre
      takes no memory. `stack_workers` deals it out.
    staggered: whether each step exchanges the next part of the variables, so that no single step
      pays for all of them. Every variable still exchanges once a period, by the same equations, at
      a phase of its own.
    nonfinite: what an exchange does with a worker's variable that holds a NaN or an infinity.
      "propagate": the centre takes it, and then all workers do. "drop": it takes no part in the
      exchange, and stays as it is. Updates that are added cannot heal it;
      `elastic_average(optax.apply_if_finite(inner, n), ...)` keeps it from happening.

  Returns:
    The wrapped optimizer, with an `ElasticAverageState`. `init` takes one worker's parameters;
    `stack_workers` gives every worker its own state. update needs params.

  Raises:
    ValueError: for arguments out of range; in update, for an axis that is not bound, missing
      params, params that are typed as equal on all workers, or inside a conditional that workers
      may take differently (`optax.apply_if_finite(elastic_average(...))`: put it inside).
    TypeError: for arguments of a wrong type, such as a schedule for learning_rate.

  Warns:
    UserWarning: once, if `moving_rate > 2 / (num_workers + 1)`: the simultaneous exchange then
      moves the centre past the workers and diverges.

  Extra args: all reach `inner`.

  **Communication**: nothing between exchanges. An exchange sends every parameter once, as an
  all-reduce of the differences ("simultaneous") or an all-gather of the workers ("sequential"), in
  a loop that runs in those steps only. With `staggered` each part goes in a loop of its own. With
  `shard_center` the all-reduce is its two halves: an all-gather of the centre, then a
  reduce-scatter; "sequential" has the first of them in addition.

  Examples:
    Two workers, one of which alone has a gradient:

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> sgd = optax.sgd(1.0)
    >>> tx = ow.elastic_average(sgd, "workers", communication_period=1, moving_rate=0.25)
    >>> params = ow.stack_workers(jnp.array(0.0), 2)
    >>> state = ow.stack_workers(tx.init(jnp.array(0.0)), 2)
    >>> axes = ow.worker_axes(state)
    >>> layout = {"in_axes": (0, axes, 0), "out_axes": (0, axes)}
    >>> update = jax.vmap(tx.update, **layout, axis_name="workers")
    >>> updates, state = update(jnp.array([-1.0, 0.0]), state, params)
    >>> print(optax.apply_updates(params, updates), ow.center_params(state))
    [0.75 0.  ] 0.25

  Source: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD" (2015), section 3,
    with the phase of
  tf.contrib.opt.ElasticAverageOptimizer: the exchange comes after the inner step, from the moved
    parameters.
  """
  names = _axes.axis_names(axis_name)
  wrapper = "elastic_average"
  period = _checks.integer(wrapper, "communication_period", communication_period, minimum=1)
  _checks.choice(wrapper, "exchange", exchange, ("simultaneous", "sequential"))
  if moving_rate is not None:
    moving_rate = _checks.number(
      wrapper, "moving_rate", moving_rate, lambda x: 0 < x <= 1, "in (0, 1]"
    )
  if rho is not None:
    rho = _checks.number(wrapper, "rho", rho, lambda x: x >= 0, "at least 0")
  if learning_rate is not None:
    learning_rate = _checks.number(
      wrapper,
      "learning_rate",
      learning_rate,
      lambda x: x > 0,
      "above 0 (for a schedule pass rho instead)",
    )
  if rho is None and learning_rate is None:
    rho = 0.0
  pulls = (
    isinstance(rho, jax.Array) or rho != 0
  )  # an array's value may be injected later, so it keeps the copy
  _checks.choice(wrapper, "nonfinite", nonfinite, ("propagate", "drop"))
  inner = _checks.optimizer(wrapper, inner)
  warned = False

  distance = _distance if nonfinite == "propagate" else _distance_if_finite

  def rates():
    nonlocal warned
    num_workers = _axes.axis_size(names)
    alpha = BETA / period / num_workers if moving_rate is None else moving_rate
    is_known = not isinstance(alpha, jax.core.Tracer)
    if (
      exchange == "simultaneous"
      and is_known
      and float(alpha) > 2 / (num_workers + 1)
      and not warned
    ):
      warned = True
      warnings.warn(
        f"elastic_average: moving_rate {alpha} is above 2 / (num_workers + 1) ="
        f" {2 / (num_workers + 1):.3g} for"
        f" {num_workers} workers; the exchange is unstable. Lower it, or use"
        ' exchange="sequential".',
        stacklevel=3,
      )
    return alpha, alpha / learning_rate if rho is None else rho

  def init_fn(params):
    center = jax.tree.map(_in_center, params)
    return ElasticAverageState(
      step=jnp.zeros((), jnp.int32),
      center=None if shard_center else copy_tree(center),
      pulled_center=copy_tree(center) if pulls else None,
      inner_state=inner.init(params),
      center_part=_flat(center) if shard_center else None,
    )

  def update_fn(updates, state, params=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(names, wrapper)
    updates = _checks.inexact(wrapper, updates)
    _checks.same_shapes(wrapper, updates, params)
    _check_owned(params, names)
    _check_center(params, state.center, names)
    alpha, pull = rates()

    if pulls:
      updates = _map(
        lambda u, x, lc: u + _numerics.times(pull, x.astype(lc.dtype) - lc).astype(u.dtype),
        updates,
        params,
        state.pulled_center,
      )
    with _passage.passage() as passage:
      updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    _check_owners(passage.owners, names)
    if (outer := _passage.surrounding()) is not None:
      outer.add_names((), names)
    inner_state = _axes.vary_like(inner_state, state.inner_state)  # a constant may be new in it
    # An update in a narrower dtype could not say where an exchange takes the parameters.
    updates = _map(lambda u, x: u.astype(_numerics.promote(u.dtype, x.dtype)), updates, params)
    step = _next_step(state.step, period)

    def exchange_now(carried, params, alpha):
      updates, kept, *pulled = carried
      # Where each worker is, in the dtype of the centre.
      moved = _map(
        lambda u, x: (x.astype(u.dtype) + u).astype(x.dtype).astype(_center_dtype(x.dtype)),
        updates,
        params,
      )
      whole = _gather_center(kept, moved, names) if shard_center else kept
      # `read` is the centre as this worker reads it, and its distance d is taken from there.
      if exchange == "simultaneous":
        read = _map(lambda x, c: c, moved, whole)
        d = _map(distance, moved, read)
        total = (
          _collectives.sum_scatter(d, names)
          if shard_center
          else _collectives.psum(d, names, bucketed=True)
        )
        center = _map(lambda t, c: c + _numerics.times(alpha, t), total, kept)
      else:
        read, center = _round_robin(moved, whole, alpha, names, distance)
        d = _map(distance, moved, read)
        if shard_center:
          index, num_workers = _axes.axis_index(names), _axes.axis_size(names)
          center = _map(lambda c: _collectives.parts(c, num_workers)[index], center)
      # The way from x to where the worker ends, rather than u - alpha d: added to x, it rounds as
      # two steps would.
      way = _map(
        lambda y, d, x, u: (y - _numerics.times(alpha, d) - x.astype(y.dtype)).astype(u.dtype),
        moved,
        d,
        params,
        updates,
      )
      return way, _fill(center, kept), *(_fill(read, old) for old in pulled)

    treedef = jax.tree.structure(params)
    kept = state.center_part if shard_center else state.center
    trees = (updates, kept, state.pulled_center) if pulls else (updates, kept)
    carried = [treedef.flatten_up_to(tree) for tree in trees]
    variables = jax.tree.leaves(params)
    for phase, group in _turns(variables, period if staggered else 1, period):
      mine = tuple([column[i] for i in group] for column in carried)
      now = step % period == phase
      _axes.require_equal(now, wrapper, "the state's step counter", axes=frozenset(names))
      mine = _branches.apply_if(
        now, exchange_now, mine, [variables[i] for i in group], alpha, wrapper=wrapper
      )
      for column, exchanged in zip(carried, mine):
        for i, leaf in zip(group, exchanged):
          column[i] = leaf
    updates, kept, *pulled = (treedef.unflatten(column) for column in carried)
    return updates, ElasticAverageState(
      step=step,
      center=None if shard_center else kept,
      pulled_center=pulled[0] if pulls else None,
      inner_state=inner_state,
      center_part=kept if shard_center else None,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def center_params(opt_state: Tree, params: Tree = None) -> Tree:
  """The centre of `elastic_average`, wherever its state is nested: the parameters to evaluate and
  to save.

  Args:
    opt_state: an optimizer state, or any pytree that holds one `ElasticAverageState`; stacked, if
      workers are.
    params: one worker's parameters, or arrays or `jax.ShapeDtypeStruct` of their shapes; needed
      with `shard_center`, whose parts do not know them.

  Returns:
    The centre, same structure as one worker's params.

  Raises:
    ValueError: if there is none, or more than one; with `shard_center` without params.

  Source: `swapping_saver` of tf.contrib.opt.ElasticAverageOptimizer.
  """
  found = get_state(opt_state, ElasticAverageState)
  if found.center_part is None:
    return found.center
  if params is None:
    raise ValueError(
      "center_params: params is needed, one worker's parameters or their shapes, to put a centre"
      " together that is sharded over the workers: center_params(state, params)."
    )

  def join(p, parts):
    laid_out = jax.typeof(parts).sharding
    if any(laid_out.spec):  # over the axes of an Explicit mesh, which a reshape may not merge
      parts = jax.sharding.reshard(parts, NamedSharding(laid_out.mesh, PartitionSpec()))
    return parts.ravel()[: p.size].reshape(p.shape)

  return jax.tree.map(join, params, found.center_part)


def _is_none(x):
  return x is None


def _map(fun, updates, *rest):
  """`fun` over the leaves, None where `updates` has None: what has no update takes no part."""
  return jax.tree.map(
    lambda u, *r: None if u is None else fun(u, *r), updates, *rest, is_leaf=_is_none
  )


def _flat(params):
  """Copies of the leaves, each as one flat row."""

  def flatten(x):
    spec = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else ()
    if any(spec[1:]):
      raise ValueError(
        f"elastic_average: shard_center flattens the variables, and one is laid out as {spec} over"
        " an Explicit mesh, which cannot be flattened. Make the mesh with AxisType.Auto, or leave"
        " shard_center out."
      )
    if isinstance(x, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct((x.size,), x.dtype)
    return jnp.array(x, copy=True).ravel()

  return jax.tree.map(flatten, params)


def _gather_center(parts, params, names):
  """The whole centre, from every worker's part of it."""
  num_workers = _axes.axis_size(names)

  def gather(x, part):
    size = -(-x.size // num_workers)
    if part.shape != (size,):
      raise ValueError(
        f"elastic_average: center_part must be 1/{num_workers} of each variable, [{size}] for"
        f" {list(x.shape)}, got {list(part.shape)}. Deal the centre out:"
        " stack_workers(tx.init(params), num_workers)."
      )
    return _collectives.all_gather(part, names).ravel()[: x.size].reshape(x.shape)

  return _map(gather, params, parts)


def _turns(variables, num_turns, period):
  """Pairs of a step of the period and the numbers of the variables that exchange at it, parts of
  about equal bytes."""
  sizes = [x.size * x.dtype.itemsize for x in variables]
  num_turns, total, before = min(num_turns, len(sizes)), sum(sizes), 0
  groups: dict[int, list[int]] = {}
  for i, size in enumerate(sizes):
    turn = int((before + size / 2) * num_turns / total) if total else 0
    groups.setdefault((turn + 1) * period // num_turns % period, []).append(i)
    before += size
  return groups.items()


def _fill(tree, kept):
  """`tree` with the leaves of `kept` where it has None."""
  return jax.tree.map(lambda x, k: k if x is None else x, tree, kept, is_leaf=_is_none)


def _next_step(step, period):
  """`step + 1`, except that the last int32 falls back by whole rounds: never negative, and the
  rounds stay in phase."""
  last = jnp.iinfo(jnp.int32).max
  return jnp.where(step == last, (last + 1) % period, step) + jnp.where(step == last, 0, 1)


def _check_owned(params, names):
  known = set(_axes.tracked(names))
  for path, leaf in jax.tree.leaves_with_path(params):
    equal = known - _axes.varying(leaf)
    if equal:
      raise ValueError(
        f"elastic_average: params{jax.tree_util.keystr(path)} is equal on all workers of"
        f" {sorted(map(str, equal))}, but every worker owns its parameters. Pass them stacked with"
        " a spec that names the axis (stack_workers(params, num_workers),"
        " PartitionSpec(axis_name)), or start from per_shard(params, axis_name)."
      )


def _center_dtype(dtype):
  """In which a centre is kept: a narrower one stands still where it moves by less than half an
  ulp."""
  return _numerics.at_least_float32(dtype)


def _check_owners(owners, names):
  """Raises where workers inside, of axes whose values are not typed, would share a centre that
  differs between them."""
  others = tuple(name for name in owners if name not in names)
  known = _axes.tracked(others)
  unknown = tuple(name for name in others if name not in known)
  if unknown and set(unknown) <= set(jax.sharding.get_abstract_mesh().manual_axes):
    raise ValueError(
      f"elastic_average: the workers of {unknown} inside differ, and axis_name {names} leaves them"
      " a centre each, which no layout of the state shows. Name all the axes,"
      f" axis_name={(*names, *unknown)!r}, or use check_vma=True with a PartitionSpec over them"
      " for the centre."
    )


def _check_center(params, center, names):
  """Raises where workers of other axes, who have a centre each, are given one."""
  if center is None:
    return
  leaves = jax.tree.structure(params).flatten_up_to(center)
  for (path, p), c in zip(jax.tree.leaves_with_path(params), leaves, strict=True):
    others = _axes.varying(p) - _axes.varying(c) - set(names)
    if others:
      raise ValueError(
        f"elastic_average: state.center{jax.tree_util.keystr(path)} is one value for all shards of"
        f" {sorted(map(str, others))}, but params differ between them, and axis_name {names}"
        " leaves them a centre each. Name all the axes in axis_name, or give the centre a"
        " PartitionSpec over the others."
      )


def _in_center(x):
  """A parameter as the centre holds it."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=_center_dtype(x.dtype))
  x = x if hasattr(x, "dtype") else jnp.asarray(x)
  return x.astype(_center_dtype(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _distance(x, c):
  return x - c


def _distance_if_finite(x, c):
  """`x - c`, or zero where this worker's variable holds a NaN or an infinity."""
  return jnp.where(jnp.isfinite(x).all(), x - c, jnp.zeros_like(c))


def _visit(carried, moved, distance):
  """One worker exchanges: the centre that it leaves, and the one that it read."""
  center, alpha = carried
  left = _map(lambda x, c: c + _numerics.times(alpha, distance(x, c)), moved, center)
  return (left, alpha), center


# Functions of the module, so that a scan outside jit compiles once and not in every exchange.
_VISITS = {
  distance: functools.partial(_visit, distance=distance)
  for distance in (_distance, _distance_if_finite)
}


def _round_robin(moved, center, alpha, names, distance):
  """The centre as each worker reads it, and as the last one leaves it, when workers exchange one
  after another."""
  index = _axes.axis_index(names)
  start = _map(lambda x, c: c, moved, center), jnp.asarray(alpha)
  everyone = _collectives.all_gather(moved, names)
  (center, _), read = jax.lax.scan(_VISITS[distance], start, everyone)
  return jax.tree.map(lambda c: c[index], read), center
