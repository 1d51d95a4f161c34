"""Parameters kept in a set, by a projection after the update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers import _checks, _collectives, _numerics, _project_arrays, _rounding, projections
from optax_wrappers._state import WrapperState, state

Tree = Any


@state
class ProjectVariablesState(WrapperState):
  """State of `project_variables` and `clip_variables` where a bound is a schedule; otherwise theirs is the inner state.

  Attributes:
    step: steps taken; int32 scalar, what the schedules are called with.
    inner_state: state of the wrapped optimizer.
  """

  shared_fields = frozenset({"step"})

  step: jax.Array
  inner_state: Tree


def project_variables(
  inner: optax.GradientTransformation,
  projection: Any,
  *,
  axis_name: _collectives.AxisName = None,
  only_touched: bool = False,
  momentum: str = "keep",
) -> optax.GradientTransformationExtraArgs:
  """Projects the updated parameters: after every step they are in the set, however the addition rounds.

  With `y = params + inner(updates)`, every variable becomes the nearest point of its set to `y`. The emitted update is
  chosen so that what `optax.apply_updates` makes of it is in the set, in the parameters' own dtype; what is in the set
  already gets the inner update bit for bit.

  Args:
    inner: the optimizer to wrap.
    projection: from `optax_wrappers.projections`: one for all variables; or a pytree of them (None: leave it alone)
      with the structure of the parameters or a prefix of it; or `by_path`, `flax_kernels`. In each place also
      a function from an array to an array, such as those of `optax.projections`, applied to each variable by itself and
      rounded to nearest.
    axis_name: inside shard_map, the mesh axes that shard the summed axes; see `clip_variables`.
    only_touched: project only slices that have a non-zero element in the updates given to this wrapper.
    momentum: what happens to the inner state where a slice is projected. "keep": nothing, which is TensorFlow's way.
      "project": the stored momentum (Optax's `trace` and `mu`) loses the component that pushes outward along `y`.

  Returns:
    The wrapped optimizer. Its state is the inner state, or a `ProjectVariablesState` if a bound is a schedule.

  Raises:
    ValueError: at init, for an axis out of range for a variable, or projections of another structure; in update, for
      missing params, an axis name that is not bound, or rows that do not fit.
    TypeError: for what is no projection, and for integer variables.

  Extra args:
    rows: int32 `[k]`, the rows (indices on axis 0) that this step touched, or a pytree of them with the structure of
      the parameters (None: all rows); not forwarded. Only these rows are projected, with work and memory traffic in
      proportion to k; a row listed twice is projected once, an index out of range is ignored. Axis 0 must not be a
      summed axis. All others reach `inner`.

  **Communication**: with `axis_name` one float64 for each slice per step, else none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from optax_wrappers import projections
    >>> tx = ow.project_variables(optax.sgd(1.0), {"w": projections.max_norm(1.0), "b": projections.non_negative()})
    >>> params = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([-1.0, 2.0])}
    >>> updates, _ = tx.update({"w": jnp.zeros(2), "b": jnp.zeros(2)}, tx.init(params), params)
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
  axis_name: _collectives.AxisName,
  only_touched: bool,
  momentum: str,
) -> optax.GradientTransformationExtraArgs:
  """`project_variables`, its errors under the name of the public function.

  `specs_of`, if given, says which projection each leaf of the parameters gets.
  """
  _checks.choice(wrapper, "momentum", momentum, ("keep", "project"))
  names = _collectives.axis_names(axis_name)
  inner = optax.with_extra_args_support(inner)
  chosen = specs_of or (lambda params: projections.for_each_leaf(wrapper, projection, params))

  def specs_and_axes(params):
    """For each leaf of params its projection and the axes of a slice; None where it is left alone."""
    specs, axes = chosen(params), []
    for (path, leaf), spec in zip(jax.tree.leaves_with_path(params), specs, strict=True):
      if spec is not None:
        name = f"params{jax.tree_util.keystr(path)}"
        _checks.inexact_leaves(wrapper, leaf, name)
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
    _checks.params_given(wrapper, params)
    _collectives.require_bound(names, wrapper)
    if only_touched:
      _checks.same_shapes(wrapper, updates, params)
    specs, axes = specs_and_axes(params)
    scheduled = _is_scheduled(specs, projection)
    inner_state = state.inner_state if scheduled else state
    if scheduled:
      now = {id(spec): spec.at(state.step) for spec in specs if spec is not None}  # each once, for all its variables
      specs = [spec and now[id(spec)] for spec in specs]
    treedef = jax.tree.structure(params)
    new_updates, inner_state = inner.update(updates, inner_state, params, **extra_args)

    leaves = treedef.flatten_up_to(params)
    given = treedef.flatten_up_to(updates) if only_touched else [None] * len(leaves)
    rows = _rows_for_each_leaf(wrapper, rows, params, axes)
    emitted, parts = treedef.flatten_up_to(new_updates), {}
    normals = [None] * len(leaves)  # the unit vector along y of every projected slice, for the momentum
    for i, (p, g, u, spec, summed, mine) in enumerate(zip(leaves, given, emitted, specs, axes, rows)):
      if spec is None or u is None:
        continue
      (over,) = _collectives.unreduced_names([p], names)
      if momentum == "project":
        normals[i] = _normal(p, u, g, mine, spec, summed, over)
      arrays = (p, u, g) if mine is None else (None if x is None else x.at[mine].get(mode="clip") for x in (p, u, g))
      parts[i] = _project_arrays.Variable(*arrays, spec, summed, over)
    for i, projected in zip(parts, _project_arrays.project(list(parts.values()))):
      if rows[i] is None:
        emitted[i] = projected
      else:
        emitted[i] = emitted[i].astype(projected.dtype).at[rows[i]].set(projected, mode="drop")
    if momentum == "project":
      inner_state = _project_momentum(wrapper, inner_state, treedef, normals, names)
    if scheduled:
      inner_state = ProjectVariablesState(step=optax.safe_increment(state.step), inner_state=inner_state)
    return treedef.unflatten(emitted), inner_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_scheduled(specs, projection):
  """Whether a counter is needed; for a tree without leaves, as `optax.tree.map_params` passes, of the projection."""
  if not specs:
    specs = jax.tree.leaves(projection, is_leaf=lambda x: isinstance(x, projections.Projection))
    specs = [spec for spec in specs if isinstance(spec, projections.Projection)]
  return any(spec is not None and spec.is_scheduled() for spec in specs)


def _rows_for_each_leaf(wrapper, rows, params, axes):
  """The rows of each leaf, or None for all of them."""
  leaves = jax.tree.leaves_with_path(params)
  if rows is None:
    return [None] * len(leaves)
  if isinstance(rows, jax.Array | np.ndarray):
    found = [rows if summed is not None else None for summed in axes]
  else:
    found = jax.tree.structure(params).flatten_up_to(rows)
  for (path, leaf), mine, summed in zip(leaves, found, axes):
    if mine is None:
      continue
    name = f"params{jax.tree_util.keystr(path)}"
    if mine.ndim != 1 or not jnp.issubdtype(mine.dtype, jnp.integer):
      raise ValueError(f"{wrapper}: rows for {name} must be int32 [k], got {mine.dtype}{list(mine.shape)}.")
    if summed is None or leaf.ndim == 0 or 0 in summed:
      raise ValueError(
        f"{wrapper}: rows for {name} must be of a variable that is projected and whose axis 0 is not summed; its summed"
        f" axes are {summed}. Leave it out of rows."
      )
  return found


def _normal(p, u, g, rows, spec, axes, names):
  """The unit vector along `p + u` of every slice that is projected, zeros for the others; and the axes of a slice."""
  projected = True if g is None else _project_arrays.any_in_slice(g != 0, axes, names)
  if rows is not None:
    listed = jnp.zeros(p.shape[0], bool).at[rows].set(True, mode="drop")
    projected &= listed.reshape(-1, *(1,) * (p.ndim - 1))
  with jax.enable_x64(True):
    landed = spec.land(_rounding.landing(p, u), axes, names, p.dtype)
    y = jnp.where(landed.changed & projected, _rounding.to_f64(p) + _rounding.to_f64(u), 0.0)
    norm = jnp.sqrt(_collectives.psum(jnp.sum(y * y, axes, keepdims=True), names))
    return (y / jnp.where(norm > 0, norm, 1.0)).astype(_numerics.at_least_float32(p.dtype)), axes


def _project_momentum(wrapper, inner_state, treedef, normals, names):
  """Takes from every stored momentum m, along -m of which updates go, its outward part: `m <- m - min(0, m . n) n`."""
  found = False

  def remove(m, normal):
    if normal is None:
      return m
    n, axes = normal
    n = n.astype(m.dtype)
    (over,) = _collectives.unreduced_names([m], names)
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
        replaced[name] = treedef.unflatten(map(remove, jax.tree.leaves(moments), normals))
    return node._replace(**replaced)

  inner_state = jax.tree.map(visit, inner_state, is_leaf=_has_momentum)
  if not found:
    raise ValueError(
      f"{wrapper}: momentum='project' needs an inner optimizer that stores one (Optax's trace or mu, of the parameters'"
      " structure); found none. Pass momentum='keep'."
    )
  return inner_state


def _has_momentum(node):
  return isinstance(node, tuple) and bool({"trace", "mu"} & set(getattr(node, "_fields", ())))
