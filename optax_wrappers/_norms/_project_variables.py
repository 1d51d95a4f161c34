"""Parameters kept in a set, by a projection after the update."""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_wrappers._core import _axes, _checks, _collectives, _numerics, _paths, _weights
from optax_wrappers._core._state import WrapperState, instances, require_state, state
from optax_wrappers._core._types import AxisNames, Momentum, Tree
from optax_wrappers._norms import _chosen, _project_arrays, _rounding, _sets
from optax_wrappers._shards._towers import GatherTowersState


@state
class ProjectVariablesState(WrapperState):
  """State of `project_variables` and `clip_variables` where a bound is a schedule.

  Otherwise their state is the inner state.

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
  momentum: Momentum = "keep",
) -> optax.GradientTransformationExtraArgs:
  """Projects the updated parameters: after every step they are in the set, despite rounding.

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
    only_touched: project only slices that have a non-zero element in the gradient that is given to
      this wrapper. Put it inside a reduction over shards or towers.
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
      one, or `only_touched` or `rows` round a reduction over shards or towers.
    TypeError: for what is no projection, for integer variables, and for complex ones in a set of
      real numbers.

  Extra args:
    rows: int32 `[k]`, the rows (indices on axis 0) that this step touched, or a pytree of them with
      the structure of the parameters (None: all rows); not forwarded. Only these rows are
      projected, with work and memory traffic in proportion to k; a row listed twice is projected
      once, an index out of range, negative ones too, is ignored. Axis 0 must not be a summed axis.
      All shards of a variable must pass the same rows: `lax.all_gather(rows, axis_name,
      tiled=True)`. All others reach `inner`.

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
  return project("project_variables", inner, projection, None, axis_name, only_touched, momentum)


def project(
  wrapper: str,
  inner: optax.GradientTransformation,
  projection: Any,
  specs_of: Callable[[Tree], list[_sets.Projection | None]] | None,
  axis_name: Any,
  only_touched: bool,
  momentum: Momentum,
) -> optax.GradientTransformationExtraArgs:
  """`project_variables`, its errors under the name of the public function.

  `specs_of`, if given, says which projection each leaf of the parameters gets.
  """
  _checks.choice(wrapper, "momentum", momentum, get_args(Momentum))
  layout = _Sharding.make(axis_name)
  inner = _checks.optimizer(wrapper, inner)
  chosen = specs_of or (lambda params: _chosen.for_each_leaf(wrapper, projection, params))

  def init_fn(params):
    slices = _slices(wrapper, chosen(params), params)
    inner_state = inner.init(params)
    if not _is_scheduled(slices, projection):
      return inner_state
    return ProjectVariablesState(step=jnp.zeros((), jnp.int32), inner_state=inner_state)

  def update_fn(updates, state, params=None, *, rows=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(layout.names, wrapper)
    # `inner` may take updates of another shape (stacked towers), but then no slice of theirs is
    # touched.
    check = _checks.same_shapes if only_touched else _checks.same_structure
    check(wrapper, updates, params)
    slices = _slices(wrapper, chosen(params), params)
    # Asked again in every trace, because the state has to have the form that init gave it.
    is_scheduled = _is_scheduled(slices, projection)
    inner_state = state
    if is_scheduled:
      require_state(wrapper, state, ProjectVariablesState)
      inner_state = state.inner_state
      slices = _at(slices, state.step)
    if only_touched or rows is not None:
      _require_reduced(wrapper, inner_state)
    new_updates, inner_state = inner.update(updates, inner_state, params, **extra_args)
    new_updates = _checks.arrays(new_updates)
    _checks.same_shapes(wrapper, new_updates, params)
    gradients = _gradients(wrapper, updates, params, only_touched)
    rows = _rows_for_each_leaf(wrapper, rows, params, slices)
    variables, treedef = jax.tree.flatten(params)
    emitted, over = treedef.flatten_up_to(new_updates), layout.over(wrapper, params, slices)
    chosen_now = _variables(variables, emitted, gradients, slices, over)
    if momentum == "project":
      normals = [chosen_now.get(i) and _normal(chosen_now[i], rows[i]) for i in range(len(rows))]
      inner_state = _project_momentum(wrapper, inner_state, treedef, normals, over)
    _project_rows(chosen_now, rows, emitted)
    if is_scheduled:
      step = optax.safe_increment(state.step)
      inner_state = ProjectVariablesState(step=step, inner_state=inner_state)
    return treedef.unflatten(emitted), inner_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Slices(NamedTuple):
  """The slices of one variable, and the set that each is projected onto.

  Attributes:
    spec: the projection.
    axes: the axes of a slice, none of them negative.
  """

  spec: _sets.Projection
  axes: tuple[int, ...]


def _slices(wrapper, specs, params):
  """The slices of each leaf of params; None where it is left alone."""
  named = _paths.named_leaves(params)
  if named and not any(spec is not None for spec in specs):
    raise ValueError(
      f"{wrapper}: none of the variables is projected. They are"
      f" {', '.join(name for name, _ in named)}; projections.chosen shows what a projection takes."
    )

  def of(path, leaf, value, spec):
    name = f"params{jax.tree_util.keystr(path)}"
    _checks.inexact(wrapper, leaf, name)
    if jnp.iscomplexobj(value) and not spec.takes_complex:
      raise TypeError(
        f"{wrapper}: {name} is complex, and {type(spec).__name__} is a set of real numbers. Bound"
        " absolute values with max_norm(limit, axes=()), or leave the variable out."
      )
    return _Slices(spec, _checks.summed_axes(wrapper, name, spec.axes, jnp.ndim(leaf)))

  columns = zip(jax.tree.leaves_with_path(params), named, specs, strict=True)
  return [
    None if spec is None else of(path, leaf, value, spec)
    for (path, leaf), (_, value), spec in columns
  ]


def _is_scheduled(slices, projection):
  """Whether a counter is needed."""
  specs = [one.spec for one in slices if one is not None]
  if not slices:  # a tree without leaves, as `optax.tree.map_params` passes
    specs = jax.tree.leaves(projection, is_leaf=lambda x: isinstance(x, _sets.Projection))
    specs = [spec for spec in specs if isinstance(spec, _sets.Projection)]
  return any(spec.is_scheduled() for spec in specs)


def _at(slices, step):
  """The slices with schedules replaced by their values, each evaluated once for all variables."""
  # By identity: a frozen dataclass that holds arrays has no hash.
  now = {id(one.spec): one.spec.at(step) for one in slices if one is not None}
  return [one and one._replace(spec=now[id(one.spec)]) for one in slices]


class _Sharding(NamedTuple):
  """How shard_map divides the variables.

  Attributes:
    names: all the mesh axes named.
    specs: the PartitionSpecs, of the parameters' structure or a prefix; None: all the axes divide
      the summed axes of every variable.
  """

  names: AxisNames
  specs: Any

  @classmethod
  def make(cls, axis_name):
    entries = jax.tree.leaves(axis_name, is_leaf=_is_spec)
    entries = [entry for entry in entries if _is_spec(entry)]
    if not entries:
      return cls(_axes.axis_names(axis_name), None)
    names = {name: None for spec in entries for name in _axes.names_in(spec, range(len(spec)))}
    return cls(tuple(names), axis_name)

  def over(self, wrapper, params, slices):
    """For each variable the mesh axes that divide the axes of a slice."""
    if self.specs is None:
      return [self.names] * len(slices)
    specs = _checks.spread(wrapper, "axis_name", self.specs, params, _is_spec, "PartitionSpecs")
    pairs = zip(specs, slices, strict=True)
    return [() if one is None else _axes.names_in(spec, one.axes) for spec, one in pairs]


def _is_spec(x):
  return isinstance(x, PartitionSpec)


def _variables(variables, updates, gradients, slices, over):
  """What is projected: by its number, each variable that has slices and an update."""
  found = {}
  for i, (p, u, one) in enumerate(zip(variables, updates, slices, strict=True)):
    if one is None or u is None:
      continue
    (names,) = _axes.unreduced_names([p], over[i])
    found[i] = _project_arrays.Variable(p, u, gradients[i], one.spec, one.axes, names)
  return found


def _project_rows(variables, rows, emitted):
  """Writes the projected updates to `emitted`; of a variable with rows, those of its rows."""

  def listed(i, v):
    if rows[i] is None:
      return v
    # Rows out of range are clipped to the last one here, and dropped when they are written back.
    taken = (None if x is None else x.at[rows[i]].get(mode="clip") for x in (v.p, v.u, v.g))
    return v._replace(**dict(zip("pug", taken)))

  projected = _project_arrays.project([listed(i, v) for i, v in variables.items()])
  for i, u in zip(variables, projected, strict=True):
    if rows[i] is not None:
      u = emitted[i].astype(u.dtype).at[rows[i]].set(u, mode="drop")
    emitted[i] = u


def _require_reduced(wrapper, inner_state):
  """Raises where what this wrapper is given is one shard's or one tower's part of the gradient."""
  inside = _weights.names_of(inner_state)
  gathers = next(instances(inner_state, GatherTowersState), None) is not None
  if inside or gathers or any(instances(inner_state, optax.MultiStepsState)):
    what = f"one shard of {inside}" if inside else "one tower"
    raise ValueError(
      f"{wrapper}: only_touched and rows are of what moves the variables, and this wrapper is given"
      f" the updates of {what}. Put it inside what reduces them:"
      f" cross_shard({wrapper}(inner, ...), axis_name), gather_towers({wrapper}(inner, ...), n)."
    )


def _gradients(wrapper, updates, params, only_touched):
  """The gradient of each leaf, by which slices are touched; None where that is not asked."""
  leaves = jax.tree.leaves_with_path(params)
  if not only_touched:
    return [None] * len(leaves)
  gradients = jax.tree.structure(params).flatten_up_to(updates)
  for (path, p), g in zip(leaves, gradients, strict=True):
    if g is not None:
      _axes.require_like(
        g,
        p,
        wrapper,
        f"the gradient of params{jax.tree_util.keystr(path)}, by which only_touched decides,",
        f"Its shards would project other slices, and come apart. Put {wrapper} inside the"
        f" reduction: cross_shard({wrapper}(inner, ..., only_touched=True), axis_name).",
      )
  return gradients


def _rows_for_each_leaf(wrapper, rows, params, slices):
  """The rows of each leaf; None for all of them."""
  leaves = jax.tree.leaves_with_path(params)
  if rows is None:
    return [None] * len(leaves)
  columns = zip(leaves, _spread_rows(wrapper, rows, params, slices), slices, strict=True)
  return [
    None if own is None else _rows_of(wrapper, path, leaf, own, one)
    for (path, leaf), own, one in columns
  ]


def _spread_rows(wrapper, rows, params, slices):
  """The extra arg `rows` for each leaf, as it was given."""
  if isinstance(rows, list | tuple) and all(isinstance(row, int) for row in rows):
    rows = np.asarray(rows, np.int32)
  if isinstance(rows, jax.Array | np.ndarray):
    return [None if one is None else rows for one in slices]
  try:
    return jax.tree.structure(params).flatten_up_to(rows)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{wrapper}: rows must be int32 [k], or have the structure of the parameters; got"
      f" {jax.tree.structure(rows)} for parameters {jax.tree.structure(params)}."
    ) from error


def _rows_of(wrapper, path, leaf, rows, one):
  """The rows of one variable, one past the last for what is no row."""
  rows, name = jnp.asarray(rows), f"params{jax.tree_util.keystr(path)}"
  _check_rows(wrapper, name, leaf, rows, one)
  mend = (
    "The variable is one for all of them, so they must project the same rows: pass"
    " lax.all_gather(rows, axis_name, tiled=True)."
  )
  _axes.require_like(rows, leaf, wrapper, f"rows for {name}", mend)
  return jnp.where(rows < 0, leaf.shape[0], rows)  # an index from the end would be a row after all


def _check_rows(wrapper, name, leaf, rows, one):
  if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
    raise ValueError(
      f"{wrapper}: rows for {name} must be int32 [k], got {rows.dtype}{list(rows.shape)}."
    )
  if one is None or leaf.ndim == 0 or 0 in one.axes:
    raise ValueError(
      f"{wrapper}: rows for {name} must be of a variable that is projected and whose axis 0 is not"
      f" summed; its summed axes are {one and one.axes}. Leave it out of rows."
    )
  spec = jax.typeof(leaf).sharding.spec
  if spec and spec[0] is not None:
    raise ValueError(
      f"{wrapper}: rows for {name} cannot be indices into an axis that an Explicit mesh lays out"
      f" over {spec[0]!r}. Leave rows out, pass only_touched=True, or make the mesh with"
      " AxisType.Auto."
    )


def _normal(v, rows):
  """The unit vector along `p + u` of every slice that is projected, and the axes of a slice.

  It is zero for the other slices.
  """
  # The momentum must leave exactly the slices that are projected, so both ask the same questions.
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
  """Takes from every stored momentum its outward part: `m <- m - min(0, m . n) n`.

  Updates go along -m, so the part of m that pushes outward is against n.
  """

  def remove(m, normal, names):
    if normal is None:
      return m
    n, axes = normal
    n = n.astype(m.dtype)
    (names,) = _axes.unreduced_names([m], names)
    along = _collectives.psum(jnp.sum(m * n, axes, keepdims=True), names)
    return m - jnp.minimum(along, 0) * n

  def visit(node):
    replaced = {
      name: treedef.unflatten(map(remove, jax.tree.leaves(moments), normals, over))
      for name, moments in _momenta(node, treedef)
    }
    return node._replace(**replaced) if replaced else node

  nodes = jax.tree.leaves(inner_state, is_leaf=_has_momentum)
  if not any(_momenta(node, treedef) for node in nodes):
    raise ValueError(
      f"{wrapper}: momentum='project' needs an inner optimizer that stores one (Optax's trace or"
      " mu, of the parameters' structure); found none. Pass momentum='keep'."
    )
  return jax.tree.map(visit, inner_state, is_leaf=_has_momentum)


def _momenta(node, treedef):
  """The fields of a state that hold a momentum for each parameter, and their values."""
  if not _has_momentum(node):
    return []
  found = [(name, getattr(node, name)) for name in ("trace", "mu") if name in node._fields]
  return [(name, value) for name, value in found if jax.tree.structure(value) == treedef]


def _has_momentum(node):
  return isinstance(node, tuple) and bool({"trace", "mu"} & set(getattr(node, "_fields", ())))
