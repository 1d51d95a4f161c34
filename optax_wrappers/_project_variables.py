"""Parameters kept in a set, by a projection after the update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_wrappers import (
  _axes,
  _checks,
  _collectives,
  _numerics,
  _passage,
  _paths,
  _project_arrays,
  _rounding,
  projections,
)
from optax_wrappers._state import WrapperState, state
from optax_wrappers._types import AxisName, Tree


@state
class ProjectVariablesState(WrapperState):
  """State of `project_variables` and `clip_variables` where a bound is a schedule; otherwise theirs
  is the inner state.

  Attributes:
    step: steps taken; int32 scalar, what the schedules are called with.
    inner_state: state of the wrapped optimizer.
  """

  shared_fields = frozenset({"step"})
  lockstep_fields = frozenset({"step"})

  step: jax.Array
  inner_state: Tree


def project_variables(
  inner: optax.GradientTransformation,
  projection: Any,
  *,
  axis_name: Any = None,
  only_touched: bool = False,
  momentum: str = "keep",
) -> optax.GradientTransformationExtraArgs:
  """Projects the updated parameters: after every step they are in the set, however the addition
  rounds.

  With `y = params + inner(updates)`, every variable becomes the nearest point of its set to `y`.
  The emitted update is chosen so that what `optax.apply_updates` makes of it is in the set, in the
  parameters' own dtype; what is in the set already gets the inner update bit for bit.

  Args:
    inner: the optimizer to wrap.
    projection: from `optax_wrappers.projections`: one for all variables; or a pytree of them (None:
      leave it alone) with the structure of the parameters or a prefix of it; or `by_path`,
      `flax_kernels`. In each place also a function from an array to an array, such as those of
      `optax.projections`, applied to each variable by itself and rounded to nearest.
    axis_name: inside shard_map, how the variables are sharded; see `clip_variables`.
    only_touched: project only slices that have a non-zero element in the gradient: in the updates
      given to this wrapper or, where a reduction of this library stands inside it, in what that
      makes of them over all shards.
    momentum: what happens to the inner state where a slice is projected. "keep": nothing, which is
      TensorFlow's way. "project": the stored momentum (Optax's `trace` and `mu`) loses the
      component that pushes outward along `y`.

  Returns:
    The wrapped optimizer. Its state is the inner state, or a `ProjectVariablesState` if a bound is
    a schedule.

  Raises:
    ValueError: at init, for an axis out of range for a variable, projections of another structure,
      or ones that take no variable at all; in update, for missing params, an axis name that is not
      bound, rows that do not fit, rows or gradients that differ between shards whose parameters are
      one, or `only_touched` round `gather_towers`.
    TypeError: for what is no projection, for integer variables, and for complex ones in a set of
      real numbers.

  Extra args:
    rows: int32 `[k]`, the rows (indices on axis 0) that this step touched, or a pytree of them with
      the structure of the parameters (None: all rows); not forwarded. Only these rows are
      projected, with work and memory traffic in proportion to k; a row listed twice is projected
      once, an index out of range, negative ones too, is ignored. Axis 0 must not be a summed axis.
      Each shard may pass its own rows if a reduction of this library stands inside this wrapper or
      round it: they are gathered from all shards. All others reach `inner`.

  **Communication**: with `axis_name` one float64 for each slice per step; with a reduction and
  `rows` the rows of all shards; else none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from optax_wrappers import projections
    >>> sets = {"w": projections.max_norm(1.0), "b": projections.non_negative()}
    >>> tx = ow.project_variables(optax.sgd(1.0), sets)
    >>> params = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([-1.0, 2.0])}
    >>> grads = {"w": jnp.zeros(2), "b": jnp.zeros(2)}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params["w"], params["b"])
    [0.5999999  0.79999995] [0. 2.]

  Source: tf.contrib.opt.VariableClippingOptimizer, and the constraints of Keras.
  """
  return project("project_variables", inner, projection, None, axis_name, only_touched, momentum)


def project(
  wrapper: str,
  inner: optax.GradientTransformation,
  projection: Any,
  specs_of: Callable[[Tree], list[projections.Projection | None]] | None,
  axis_name: AxisName,
  only_touched: bool,
  momentum: str,
) -> optax.GradientTransformationExtraArgs:
  """`project_variables`, its errors under the name of the public function.

  `specs_of`, if given, says which projection each leaf of the parameters gets.
  """
  _checks.choice(wrapper, "momentum", momentum, ("keep", "project"))
  names, sharded_axes = _sharding(axis_name)
  inner = _checks.optimizer(wrapper, inner)
  chosen = specs_of or (lambda params: projections.for_each_leaf(wrapper, projection, params))

  def specs_and_axes(params):
    """For each leaf of params its projection and the axes of a slice; None where it is left
    alone."""
    specs, axes = chosen(params), []
    named = _paths.named_leaves(params)
    if named and not any(spec is not None for spec in specs):
      raise ValueError(
        f"{wrapper}: none of the variables is projected. They are"
        f" {', '.join(name for name, _ in named)}; projections.chosen shows what a projection"
        " takes."
      )
    for (path, leaf), (_, value), spec in zip(
      jax.tree.leaves_with_path(params), named, specs, strict=True
    ):
      if spec is not None:
        name = f"params{jax.tree_util.keystr(path)}"
        _checks.inexact(wrapper, leaf, name)
        if jnp.iscomplexobj(value) and not spec.takes_complex:
          raise TypeError(
            f"{wrapper}: {name} is complex, and {type(spec).__name__} is a set of real numbers."
            " Bound absolute values with max_norm(limit, axes=()), or leave the variable out."
          )
        axes.append(projections.summed_axes(wrapper, name, spec.axes, jnp.ndim(leaf)))
      else:
        axes.append(None)
    return specs, axes

  def init_fn(params):
    specs, _ = specs_and_axes(params)
    inner_state = inner.init(params)
    if not _is_scheduled(specs, projection):
      return inner_state
    return ProjectVariablesState(step=jnp.zeros((), jnp.int32), inner_state=inner_state)

  def update_fn(updates, state, params=None, *, rows=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(names, wrapper)
    _checks.same_structure(wrapper, updates, params)
    if only_touched:
      _checks.same_shapes(wrapper, updates, params)
    specs, axes = specs_and_axes(params)
    scheduled = _is_scheduled(specs, projection)
    inner_state = state.inner_state if scheduled else state
    if scheduled:
      now = {
        id(spec): spec.at(state.step) for spec in specs if spec is not None
      }  # each once, for all its variables
      specs = [spec and now[id(spec)] for spec in specs]
    treedef = jax.tree.structure(params)
    with _passage.passage() as passage:
      new_updates, inner_state = inner.update(updates, inner_state, params, **extra_args)

    leaves = treedef.flatten_up_to(params)
    if only_touched or rows is not None:
      _passage.require_seen(wrapper, passage.unseen, "which slices are touched")
    given = _gradients(wrapper, updates, params, passage) if only_touched else [None] * len(leaves)
    rows = _rows_for_each_leaf(wrapper, rows, params, axes, passage)
    new_updates = _checks.arrays(new_updates)
    _checks.same_shapes(wrapper, new_updates, params)
    emitted, parts = treedef.flatten_up_to(new_updates), {}
    normals = [None] * len(
      leaves
    )  # the unit vector along y of every projected slice, for the momentum
    over_axes = sharded_axes(wrapper, params, axes)
    for i, (p, g, u, spec, summed, mine) in enumerate(
      zip(leaves, given, emitted, specs, axes, rows)
    ):
      if spec is None or u is None:
        continue
      (over,) = _axes.unreduced_names([p], over_axes[i])
      if momentum == "project":
        normals[i] = _normal(p, u, g, mine, spec, summed, over)
      arrays = (
        (p, u, g)
        if mine is None
        else (None if x is None else x.at[mine].get(mode="clip") for x in (p, u, g))
      )
      parts[i] = _project_arrays.Variable(*arrays, spec, summed, over)
    for i, projected in zip(parts, _project_arrays.project(list(parts.values()))):
      if rows[i] is None:
        emitted[i] = projected
      else:
        emitted[i] = emitted[i].astype(projected.dtype).at[rows[i]].set(projected, mode="drop")
    if momentum == "project":
      inner_state = _project_momentum(wrapper, inner_state, treedef, normals, over_axes)
    if scheduled:
      inner_state = ProjectVariablesState(
        step=optax.safe_increment(state.step), inner_state=inner_state
      )
    return treedef.unflatten(emitted), inner_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_scheduled(specs, projection):
  """Whether a counter is needed; for a tree without leaves, as `optax.tree.map_params` passes, of
  the projection."""
  if not specs:
    specs = jax.tree.leaves(projection, is_leaf=lambda x: isinstance(x, projections.Projection))
    specs = [spec for spec in specs if isinstance(spec, projections.Projection)]
  return any(spec is not None and spec.is_scheduled() for spec in specs)


def _sharding(axis_name):
  """All the axes that `axis_name` names, and a function from the parameters to those of each leaf's
  summed axes."""

  def is_spec(x):
    return isinstance(x, PartitionSpec)

  entries = [x for x in jax.tree.leaves(axis_name, is_leaf=is_spec) if is_spec(x)]
  if not entries:
    names = _axes.axis_names(axis_name)
    return names, lambda wrapper, params, axes: [names] * len(axes)

  def names_of(spec, summed):
    found = [spec[axis] for axis in summed if axis < len(spec) and spec[axis] is not None]
    return tuple(
      name for entry in found for name in (entry if isinstance(entry, tuple) else (entry,))
    )

  def each(wrapper, params, axes):
    specs = _checks.spread(wrapper, "axis_name", axis_name, params, PartitionSpec, "PartitionSpecs")
    return [
      () if summed is None else names_of(spec, summed)
      for spec, summed in zip(specs, axes, strict=True)
    ]

  names = {name: None for spec in entries for name in names_of(spec, range(len(spec)))}
  return tuple(names), each


def _gradients(wrapper, updates, params, passage):
  """The gradient of each leaf, by which slices are touched: what a reduction inside made of the
  updates, if one did."""
  if passage.is_gathered:
    raise ValueError(
      f"{wrapper}: only_touched sees the updates of one tower, but those of all towers move the"
      f" variables. Put {wrapper} inside: gather_towers({wrapper}(inner, ..., only_touched=True),"
      " num_towers)."
    )
  found = []
  leaves = jax.tree.leaves_with_path(params)
  for (path, p), u in zip(leaves, jax.tree.structure(params).flatten_up_to(updates), strict=True):
    g = passage.reduced.get(jax.tree_util.keystr(path), u)
    if (
      u is not None
      and passage.reduced
      and (jnp.shape(g) != jnp.shape(p) or ("" in passage.reduced and path))
    ):
      raise ValueError(
        f"{wrapper}: the reduction inside sees updates of another structure (as inside"
        " optax.flatten), which do not tell what is touched of"
        f" params{jax.tree_util.keystr(path)}. Put {wrapper} inside the reduction."
      )
    found.append(g)
    if g is not None:
      _axes.require_like(
        g,
        p,
        wrapper,
        f"the gradient of params{jax.tree_util.keystr(path)}, by which only_touched decides,",
        f"Its shards would project other slices, and come apart. Put {wrapper} inside the"
        f" reduction: cross_shard({wrapper}(inner, ..., only_touched=True), axis_name).",
      )
  return found


def _rows_for_each_leaf(wrapper, rows, params, axes, passage):
  """The rows of each leaf, or None for all of them; those of all shards between which the leaf is
  one."""
  leaves = jax.tree.leaves_with_path(params)
  if rows is None:
    return [None] * len(leaves)
  if isinstance(rows, list | tuple) and all(isinstance(row, int) for row in rows):
    rows = np.asarray(rows, np.int32)
  if isinstance(rows, jax.Array | np.ndarray):
    found = [rows if summed is not None else None for summed in axes]
  else:
    try:
      found = jax.tree.structure(params).flatten_up_to(rows)
    except (ValueError, TypeError) as error:
      raise ValueError(
        f"{wrapper}: rows must be int32 [k], or have the structure of the parameters; got"
        f" {jax.tree.structure(rows)} for parameters {jax.tree.structure(params)}."
      ) from error
  gathered = []
  for (path, leaf), mine, summed in zip(leaves, found, axes, strict=True):
    if mine is None:
      gathered.append(None)
      continue
    mine = jnp.asarray(mine)
    name = f"params{jax.tree_util.keystr(path)}"
    if mine.ndim != 1 or not jnp.issubdtype(mine.dtype, jnp.integer):
      raise ValueError(
        f"{wrapper}: rows for {name} must be int32 [k], got {mine.dtype}{list(mine.shape)}."
      )
    if summed is None or leaf.ndim == 0 or 0 in summed:
      raise ValueError(
        f"{wrapper}: rows for {name} must be of a variable that is projected and whose axis 0 is"
        f" not summed; its summed axes are {summed}. Leave it out of rows."
      )
    spec = jax.typeof(leaf).sharding.spec
    if spec and spec[0] is not None:
      raise ValueError(
        f"{wrapper}: rows for {name} cannot be indices into an axis that an Explicit mesh lays out"
        f" over {spec[0]!r}. Leave rows out, pass only_touched=True, or make the mesh with"
        " AxisType.Auto."
      )
    (own,) = _axes.unreduced_names([mine], passage.names)
    parts = {*_axes.varying(leaf), *passage.divided.get(jax.tree_util.keystr(path), ())}
    own = tuple(axis for axis in own if axis not in parts)
    mine = _collectives.all_gather(mine, own).reshape(-1) if own else mine
    _axes.require_like(
      mine,
      leaf,
      wrapper,
      f"rows for {name}",
      "The variable is one for all of them, so they must project the same rows: pass"
      " lax.all_gather(rows, axis_name, tiled=True).",
    )
    gathered.append(
      jnp.where(mine < 0, leaf.shape[0], mine)
    )  # an index from the end would be a row after all
  return gathered


def _normal(p, u, g, rows, spec, axes, names):
  """The unit vector along `p + u` of every slice that is projected, zeros for the others; and the
  axes of a slice."""
  projected = True if g is None else _project_arrays.any_in_slice(g != 0, axes, names)
  if rows is not None:
    listed = jnp.zeros(p.shape[0], bool).at[rows].set(True, mode="drop")
    projected &= listed.reshape(-1, *(1,) * (p.ndim - 1))
  with jax.enable_x64(True):
    landed = spec.land(_rounding.landing(p, u), axes, names, p.dtype)
    y = jnp.where(landed.changed & projected, _rounding.to_f64(p) + _rounding.to_f64(u), 0.0)
    norm = jnp.sqrt(_collectives.psum(jnp.sum(y * y, axes, keepdims=True), names))
    return (y / jnp.where(norm > 0, norm, 1.0)).astype(_numerics.at_least_float32(p.dtype)), axes


def _project_momentum(wrapper, inner_state, treedef, normals, over_axes):
  """Takes from every stored momentum m, along -m of which updates go, its outward part: `m <- m -
  min(0, m . n) n`."""
  found = False

  def remove(m, normal, names):
    if normal is None:
      return m
    n, axes = normal
    n = n.astype(m.dtype)
    (over,) = _axes.unreduced_names([m], names)
    along = _collectives.psum(jnp.sum(m * n, axes, keepdims=True), over)
    return m - jnp.minimum(along, 0) * n

  def visit(node):
    nonlocal found
    if not _has_momentum(node):
      return node
    replaced = {}
    for name in {"trace", "mu"} & set(node._fields):
      moments = getattr(node, name)
      if jax.tree.structure(moments) == treedef:
        found = True
        replaced[name] = treedef.unflatten(
          map(remove, jax.tree.leaves(moments), normals, over_axes)
        )
    return node._replace(**replaced)

  inner_state = jax.tree.map(visit, inner_state, is_leaf=_has_momentum)
  if not found:
    raise ValueError(
      f"{wrapper}: momentum='project' needs an inner optimizer that stores one (Optax's trace or"
      " mu, of the parameters' structure); found none. Pass momentum='keep'."
    )
  return inner_state


def _has_momentum(node):
  return isinstance(node, tuple) and bool({"trace", "mu"} & set(getattr(node, "_fields", ())))
