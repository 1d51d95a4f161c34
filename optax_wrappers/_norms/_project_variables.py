"""Parameters kept in a set, by a projection after the update."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_wrappers._core import _axes, _checks, _collectives, _numerics, _paths, _weights
from optax_wrappers._core._state import WrapperState, instances, require_state, state
from optax_wrappers._core._types import Momentum, Tree
from optax_wrappers._norms import _chosen, _project_arrays, _rounding, _sets
from optax_wrappers._shards._towers import GatherTowersState


@state
class ProjectVariablesState(WrapperState):
  """State of `project_variables` and `clip_variables` if a bound is a schedule.

  Attributes:
    step: steps taken; int32 scalar, the argument of the schedules.
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
  momentum: Momentum = "keep",
) -> optax.GradientTransformationExtraArgs:
  """Projects the updated parameters onto a set: after every step they are in it, despite rounding.

  With `y = params + inner(updates)`, every variable becomes the nearest point of its set to `y`,
  in the parameters' own dtype. What is in the set already gets the inner update bit for bit.

  Args:
    inner: the optimizer to wrap.
    projection: from `optax_wrappers.projections`, or a function from an array to an array, applied
      to each variable by itself and rounded to nearest. One for all variables, a pytree of them
      (None: no projection) with the parameters' structure or a prefix, or `by_path`,
      `flax_kernels`.
    axis_name: inside shard_map, how the variables are sharded; see `clip_variables`.
    only_touched: project only slices with a non-zero element in the gradient given to this wrapper.
      Put it inside a reduction over shards or towers.
    momentum: "keep" leaves the inner state as it is, as TensorFlow does. "project" takes from the
      momentum (Optax's `trace`, `mu`) of a projected slice its outward component along `y`.

  Returns:
    The wrapped optimizer. update needs params. Its state is the inner state, or a
    `ProjectVariablesState` if a bound is a schedule.

  Raises:
    ValueError: at init, for an axis out of range, projections of another structure, or ones that
      take no variable; in update, for missing params, an unbound axis name, rows that do not fit,
      rows or gradients that differ between shards with equal parameters, or `only_touched` or
      `rows` with a reduction over shards or towers inside.
    TypeError: for what is no projection, for integer variables, and for complex ones in a real set.

  Extra args:
    rows: int32 `[k]`, the rows (indices on axis 0, which must not be summed) to project, or a
      pytree of them with the parameters' structure (None: all rows), the same on all shards of a
      variable; not forwarded. The work is in proportion to k. A row listed twice is projected once;
      an index out of range or negative is ignored. All others reach `inner`.

  **Communication**: with `axis_name` one float64 for each slice per step, else none.

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
  wrapper = "project_variables"

  def specs_of(params):
    return _chosen.for_each_leaf(wrapper, projection, params)

  return project(wrapper, inner, projection, specs_of, axis_name, only_touched, momentum)


def project(wrapper, inner, projection, specs_of, axis_name, only_touched, momentum):
  """`project_variables` for a public function `wrapper`; `specs_of` gives each leaf its set."""
  _checks.choice(wrapper, "momentum", momentum, get_args(Momentum))
  names, layout = _names_and_layout(axis_name)
  inner = _checks.optimizer(wrapper, inner)

  def init_fn(params):
    specs = specs_of(params)
    _summed_axes(wrapper, specs, params)  # raises on bad ones at once
    inner_state = inner.init(params)
    if not _is_scheduled(specs, projection):
      return inner_state
    return ProjectVariablesState(step=jnp.zeros((), jnp.int32), inner_state=inner_state)

  def update_fn(updates, state, params=None, *, rows=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(names, wrapper)
    # `inner` may take updates of another shape, stacked towers, if no slice is looked for in them.
    check = _checks.same_shapes if only_touched else _checks.same_structure
    check(wrapper, updates, params)
    specs, inner_state = specs_of(params), state
    # Asked again in every trace: the state has the form that init gave it.
    is_scheduled = _is_scheduled(specs, projection)
    if is_scheduled:
      require_state(wrapper, state, ProjectVariablesState)
      specs, inner_state = _at(specs, state.step), state.inner_state
    summed = _summed_axes(wrapper, specs, params)
    if only_touched or rows is not None:
      _require_reduced(wrapper, inner_state)
    new_updates, inner_state = inner.update(updates, inner_state, params, **extra_args)
    new_updates = _checks.arrays(new_updates)
    _checks.same_shapes(wrapper, new_updates, params)
    gradients = _gradients(wrapper, updates, params) if only_touched else [None] * len(specs)
    rows = _rows_for_each_leaf(wrapper, rows, params, summed)
    variables, treedef = jax.tree.flatten(params)
    emitted = treedef.flatten_up_to(new_updates)
    over = _sharded_over(wrapper, names, layout, params, summed)
    projected = _variables(variables, emitted, gradients, specs, summed, over)
    if momentum == "project":
      normals = [_normal(projected[i], r) if i in projected else None for i, r in enumerate(rows)]
      inner_state = _project_momentum(wrapper, inner_state, treedef, normals, over)
    _project_rows(projected, rows, emitted)
    if is_scheduled:
      step = optax.safe_increment(state.step)
      inner_state = ProjectVariablesState(step=step, inner_state=inner_state)
    return treedef.unflatten(emitted), inner_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _summed_axes(wrapper, specs, params):
  """The axes of a slice of each leaf of params, none negative; None where it is left alone."""
  named = _paths.named_leaves(params)
  if named and all(spec is None for spec in specs):
    names = ", ".join(name for name, _ in named)
    raise ValueError(f"{wrapper}: none of the variables is projected: {names}.")

  def of(path, leaf, value, spec):
    if spec is None:
      return None
    name = f"params{jax.tree_util.keystr(path)}"
    _checks.inexact(wrapper, leaf, name)
    if jnp.iscomplexobj(value) and not spec.takes_complex:
      raise TypeError(
        f"{wrapper}: {name} is complex, and its set is real. max_norm(limit, axes=()) bounds it."
      )
    return _checks.summed_axes(wrapper, name, spec.axes, jnp.ndim(leaf))

  columns = zip(jax.tree.leaves_with_path(params), named, specs, strict=True)
  return [of(path, leaf, value, spec) for (path, leaf), (_, value), spec in columns]


def _is_scheduled(specs, projection):
  """Whether a bound is a schedule, which needs a counter."""
  if not specs:  # optax.tree.map_params passes a tree without leaves
    is_set = _checks.is_a(_sets.Projection)
    specs = list(filter(is_set, jax.tree.leaves(projection, is_leaf=is_set)))
  return any(map(callable, jax.tree.leaves(specs, is_leaf=callable)))


def _at(specs, step):
  """The projections with schedules replaced by their values."""

  def value(x):
    return jnp.asarray(x(step)) if callable(x) else x

  # Each schedule is evaluated once for all variables. By identity, because a frozen dataclass that
  # holds arrays has no hash.
  distinct = {id(spec): spec for spec in specs}
  now = {key: jax.tree.map(value, spec, is_leaf=callable) for key, spec in distinct.items()}
  return [now[id(spec)] for spec in specs]


def _names_and_layout(axis_name):
  """All mesh axes in `axis_name`; and `axis_name` if it holds PartitionSpecs, else None."""
  specs = list(filter(_is_spec, jax.tree.leaves(axis_name, is_leaf=_is_spec)))
  if not specs:
    return _axes.axis_names(axis_name), None
  names = [name for spec in specs for name in _axes.names_in(spec, range(len(spec)))]
  return tuple(dict.fromkeys(names)), axis_name


def _sharded_over(wrapper, names, layout, params, summed):
  """For each variable the mesh axes that divide the axes of a slice."""
  if layout is None:
    return [names] * len(summed)
  specs = _checks.spread(wrapper, "axis_name", layout, params, _is_spec, "PartitionSpecs")
  pairs = zip(specs, summed, strict=True)
  return [() if axes is None else _axes.names_in(spec, axes) for spec, axes in pairs]


def _is_spec(x):
  return isinstance(x, PartitionSpec)


def _variables(params, updates, gradients, specs, summed, over):
  """By its number each variable that is projected and has an update."""
  found = {}
  columns = zip(params, updates, gradients, specs, summed, over, strict=True)
  for i, (p, u, g, spec, axes, names) in enumerate(columns):
    if spec is not None and u is not None:
      (names,) = _axes.unreduced_names([p], names)
      found[i] = _project_arrays.Variable(p, u, g, spec, axes, names)
  return found


def _project_rows(variables, rows, emitted):
  """Writes the projected updates to `emitted`, of a variable with rows only those rows."""

  def listed(i, v):
    if rows[i] is None:
      return v
    # A row out of range is read as the last one, and dropped when it is written back.
    p, u, g = jax.tree.map(lambda x: x.at[rows[i]].get(mode="clip"), (v.p, v.u, v.g))
    return v._replace(p=p, u=u, g=g)

  projected = _project_arrays.project([listed(i, v) for i, v in variables.items()])
  for i, u in zip(variables, projected, strict=True):
    if rows[i] is not None:
      u = emitted[i].astype(u.dtype).at[rows[i]].set(u, mode="drop")
    emitted[i] = u


def _require_reduced(wrapper, inner_state):
  """Raises where this wrapper sees only one shard's or one tower's part of the gradient."""
  inside = _weights.names_of(inner_state)
  if inside or any(instances(inner_state, (GatherTowersState, optax.MultiStepsState))):
    part = f"one shard of {inside}" if inside else "one tower"
    raise ValueError(
      f"{wrapper}: only_touched and rows need the reduced gradient, and this is that of {part}."
      f" Put {wrapper} inside cross_shard or gather_towers."
    )


def _gradients(wrapper, updates, params):
  """The gradient of each leaf, which shows the slices that are touched."""
  gradients = _checks.same_structure(wrapper, updates, params)
  mend = f"Put {wrapper} inside the reduction, so that all shards project the same slices."
  for (path, p), g in zip(jax.tree.leaves_with_path(params), gradients, strict=True):
    if g is not None:
      what = f"the gradient of params{jax.tree_util.keystr(path)}, for only_touched,"
      _axes.require_like(g, p, wrapper, what, mend)
  return gradients


def _rows_for_each_leaf(wrapper, rows, params, summed):
  """The rows of each leaf; None for all of them."""
  if rows is None:
    return [None] * len(summed)
  if isinstance(rows, list | tuple) and all(isinstance(row, int) for row in rows):
    rows = np.asarray(rows, np.int32)
  if isinstance(rows, jax.Array | np.ndarray):
    column = [None if axes is None else rows for axes in summed]
  else:
    try:
      column = jax.tree.structure(params).flatten_up_to(rows)
    except (ValueError, TypeError) as error:
      raise ValueError(
        f"{wrapper}: rows must be int32 [k], or have the structure of the parameters; got"
        f" {jax.tree.structure(rows)} for {jax.tree.structure(params)}."
      ) from error
  leaves = jax.tree.leaves_with_path(params)
  return [
    None if r is None else _rows_of(wrapper, path, leaf, r, axes)
    for (path, leaf), r, axes in zip(leaves, column, summed, strict=True)
  ]


def _rows_of(wrapper, path, leaf, rows, axes):
  """The rows of one variable, with an index past the last row for a negative one."""
  rows, what = jnp.asarray(rows), f"rows for params{jax.tree_util.keystr(path)}"
  if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
    raise ValueError(f"{wrapper}: {what} must be int32 [k], got {rows.dtype}{list(rows.shape)}.")
  if axes is None or leaf.ndim == 0 or 0 in axes:
    raise ValueError(
      f"{wrapper}: {what} must be of a variable that is projected and whose axis 0 is not summed;"
      f" its summed axes are {axes}."
    )
  spec = jax.typeof(leaf).sharding.spec
  if spec and spec[0] is not None:
    raise ValueError(
      f"{wrapper}: {what} cannot be indices into an axis that an Explicit mesh lays out over"
      f" {spec[0]!r}. Pass only_touched=True instead."
    )
  mend = "Pass the rows of all shards: lax.all_gather(rows, axis_name, tiled=True)."
  _axes.require_like(rows, leaf, wrapper, what, mend)
  # JAX would count a negative index from the end.
  return jnp.where(rows < 0, leaf.shape[0], rows)


def _normal(v, rows):
  """The unit vector along `p + u` of a projected slice, zero for another; and a slice's axes."""
  # These must be exactly the slices that `project_array` projects.
  projected = True if v.g is None else _project_arrays.any_in_slice(v.g != 0, v.axes, v.names)
  if rows is not None:
    listed = jnp.zeros(v.p.shape[0], bool).at[rows].set(True, mode="drop")
    projected &= listed.reshape(-1, *(1,) * (v.p.ndim - 1))
  with jax.enable_x64(True):
    landed = v.spec.land(_rounding.landing(v.p, v.u), v.axes, v.names, v.p.dtype)
    y = _rounding.to_f64(v.p) + _rounding.to_f64(v.u)
    y = jnp.where(landed.changed & projected, y, 0.0)
    norm = jnp.sqrt(_collectives.psum(jnp.sum(y * y, v.axes, keepdims=True), v.names))
    unit = y / jnp.where(norm > 0, norm, 1.0)
    return unit.astype(_numerics.at_least_float32(v.p.dtype)), v.axes


def _project_momentum(wrapper, inner_state, treedef, normals, over):
  """Takes from every stored momentum its outward part: `m <- m - min(0, m . n) n`."""

  def remove(m, normal, names):
    if normal is None:
      return m
    n, axes = normal
    n = n.astype(m.dtype)
    (names,) = _axes.unreduced_names([m], names)
    along = _collectives.psum(jnp.sum(m * n, axes, keepdims=True), names)
    # Updates go along -m, so the part of m that pushes outward is against n.
    return m - jnp.minimum(along, 0) * n

  def visit(node):
    replaced = {
      name: treedef.unflatten(map(remove, jax.tree.leaves(moments), normals, over))
      for name, moments in _momenta(node, treedef).items()
    }
    return node._replace(**replaced) if replaced else node

  nodes = jax.tree.leaves(inner_state, is_leaf=_has_momentum)
  if not any(_momenta(node, treedef) for node in nodes):
    raise ValueError(
      f"{wrapper}: momentum='project' needs an inner optimizer that stores one, as trace or mu."
      " Pass momentum='keep'."
    )
  return jax.tree.map(visit, inner_state, is_leaf=_has_momentum)


def _momenta(node, treedef):
  """The fields of a state that hold a momentum for each parameter."""
  if not _has_momentum(node):
    return {}
  fields = {name: getattr(node, name) for name in ("trace", "mu") if name in node._fields}
  return {name: x for name, x in fields.items() if jax.tree.structure(x) == treedef}


def _has_momentum(node):
  return isinstance(node, tuple) and bool({"trace", "mu"} & set(getattr(node, "_fields", ())))
