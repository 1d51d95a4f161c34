"""Parameters kept in a set, by a projection after the update."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from optax_wrappers._core import _axes, _checks, _paths, _states, _weights
from optax_wrappers._core._states import instances, require_state
from optax_wrappers._core._types import Tree
from optax_wrappers._norms import _chosen, _project_arrays, _sets
from optax_wrappers._shards._towers import GatherTowersState

_is_spec = _checks.is_a(PartitionSpec)


@_states.dataclass
class ProjectVariablesState(_states.State):
  """State of `project_variables` and `clip_variables` if a bound is a schedule.

  Attributes:
    step: steps taken; int32 scalar, the argument of the schedules.
    inner_state: state of the wrapped optimizer.
  """

  step: jax.Array = _states.field("lockstep")
  inner_state: Tree


def project_variables(
  inner: optax.GradientTransformation,
  projection: Any,
  *,
  axis_name: Any = None,
  only_touched: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Projects the updated parameters onto a set: after every step they are in it, despite rounding.

  With `y = params + inner(updates)`, every variable becomes the nearest point of its set to `y`,
  in the parameters' own dtype. What is in the set already, for a norm by more than 2e-6 of it, gets
  the inner update bit for bit.

  Args:
    inner: the optimizer to wrap.
    projection: from `optax_wrappers.projections`, or a function from an array to an array, applied
      to each variable by itself and rounded to nearest. One for all variables, a pytree of them
      (None: no projection) with the parameters' structure or a prefix, or `by_path`,
      `flax_kernels`.
    axis_name: inside shard_map, how the variables are sharded; see `clip_variables`.
    only_touched: project only slices with a non-zero element in the gradient given to this wrapper.
      Put it inside a reduction over shards or towers.

  Returns:
    The wrapped optimizer. update needs params. Its state is the inner state, or a
    `ProjectVariablesState` if a bound is a schedule.

  Raises:
    ValueError: at init, for projections that do not fit or take no variable; in update, for missing
      params, an unbound axis name, and, with `only_touched`, a reduction over shards or towers
      inside, or gradients that differ between shards with equal parameters.
    TypeError: for what is no projection, for integer variables, and for complex ones in a real set.

  **Communication**: with `axis_name` two or three float32 for each slice per step, else none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from optax_wrappers import projections
    >>> sets = {"w": projections.max_norm(1.0), "b": projections.non_negative()}
    >>> tx = ow.project_variables(optax.sgd(1.0), sets)
    >>> params = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([-1.0, 2.0])}
    >>> zeros = {"w": jnp.zeros(2), "b": jnp.zeros(2)}
    >>> updates, _ = tx.update(zeros, tx.init(params), params)
    >>> print(optax.apply_updates(params, updates)["b"])
    [0. 2.]

  Source: tf.contrib.opt.VariableClippingOptimizer, and the constraints of Keras.
  """
  wrapper = "project_variables"
  specs_of = functools.partial(_chosen.for_each_leaf, wrapper, projection)
  return project(wrapper, inner, projection, specs_of, axis_name, only_touched)


def project(wrapper, inner, projection, specs_of, axis_name, only_touched):
  """`project_variables` for a public function `wrapper`; `specs_of` returns each leaf's set."""
  names, layout = _names_and_layout(axis_name)
  inner = _checks.optimizer(wrapper, inner)

  def init_fn(params):
    specs = specs_of(params)
    _summed_axes(wrapper, specs, params)  # raises early for wrong ones
    inner_state = inner.init(params)
    if not _is_scheduled(specs, projection):
      return inner_state
    return ProjectVariablesState(step=jnp.zeros((), jnp.int32), inner_state=inner_state)

  def update_fn(updates, state, params=None, **extra_args):
    params = _checks.params_given(wrapper, params)
    _axes.require_bound(names, wrapper)
    # `inner` may receive updates of another shape (stacked towers) if they do not select slices.
    check = _checks.same_shapes if only_touched else _checks.same_structure
    check(wrapper, updates, params)
    specs, inner_state = specs_of(params), state
    # Computed in every trace: the state has the form that init gave it.
    is_scheduled = _is_scheduled(specs, projection)
    if is_scheduled:
      require_state(wrapper, state, ProjectVariablesState)
      specs, inner_state = _at(specs, state.step), state.inner_state
    summed = _summed_axes(wrapper, specs, params)
    gradients = [None] * len(specs)
    if only_touched:
      gradients = _gradients(wrapper, updates, params, inner_state)
    new_updates, inner_state = inner.update(updates, inner_state, params, **extra_args)
    new_updates = _checks.arrays(new_updates)
    _checks.same_shapes(wrapper, new_updates, params)
    over = _sharded_over(wrapper, names, layout, params, summed)
    variables, treedef = jax.tree.flatten(params)
    columns = variables, treedef.flatten_up_to(new_updates), gradients, specs, summed, over
    emitted = treedef.unflatten(map(_project_arrays.project, *columns))
    if is_scheduled:
      step = optax.safe_increment(state.step)
      inner_state = ProjectVariablesState(step=step, inner_state=inner_state)
    return emitted, inner_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _summed_axes(wrapper, specs, params):
  """The axes of a slice of each leaf of params, nonnegative; None if the leaf is not projected."""
  named = _paths.named_leaves(params)
  if named and all(spec is None for spec in specs):
    names = ", ".join(name for name, _ in named)
    raise ValueError(f"{wrapper}: none of the variables is projected: {names}.")

  def of(path, leaf, spec):
    if spec is None:
      return None
    name = f"params{jax.tree_util.keystr(path)}"
    _checks.inexact(wrapper, leaf, name)
    if jnp.iscomplexobj(leaf) and not spec.takes_complex:
      raise TypeError(
        f"{wrapper}: {name} is complex, and its set is real. max_norm(limit, axes=()) bounds it."
      )
    return _checks.summed_axes(wrapper, name, spec.axes, jnp.ndim(leaf))

  columns = zip(jax.tree.leaves_with_path(params), named, specs, strict=True)
  return [of(path, leaf, spec) for (path, _), (_, leaf), spec in columns]


def _is_scheduled(specs, projection):
  """Whether a bound is a schedule, which needs a counter."""
  if not specs:  # optax.tree.map_params passes a tree without leaves
    is_set = _checks.is_a(_sets.Projection)
    specs = list(filter(is_set, jax.tree.leaves(projection, is_leaf=is_set)))
  return any(map(callable, jax.tree.leaves(specs, is_leaf=callable)))


def _at(specs, step):
  """The projections with schedules replaced by their values."""
  # Each is evaluated once for all variables. By identity, because not all of them are hashable.
  schedules = {id(x): x for x in jax.tree.leaves(specs, is_leaf=callable) if callable(x)}
  values = {key: jnp.asarray(schedule(step)) for key, schedule in schedules.items()}
  return jax.tree.map(lambda x: values.get(id(x), x), specs, is_leaf=callable)


def _names_and_layout(axis_name):
  """All mesh axes in `axis_name`; and `axis_name` if it holds PartitionSpecs, else None."""
  specs = list(filter(_is_spec, jax.tree.leaves(axis_name, is_leaf=_is_spec)))
  if not specs:
    return _axes.axis_names(axis_name), None
  names = [name for spec in specs for name in _axes.names_in(spec, range(len(spec)))]
  return tuple(dict.fromkeys(names)), axis_name


def _sharded_over(wrapper, names, layout, params, summed):
  """For each variable, the mesh axes that shard the axes of a slice."""
  if layout is None:
    return [names] * len(summed)
  specs = _checks.spread(wrapper, "axis_name", layout, params, _is_spec, "PartitionSpecs")
  return [_axes.names_in(spec, axes or ()) for spec, axes in zip(specs, summed, strict=True)]


def _gradients(wrapper, updates, params, inner_state):
  """The reduced gradient of each leaf; raises for that of one shard or one tower."""
  inside = _weights.names_of(_weights.inside(inner_state))
  if inside or any(instances(inner_state, (GatherTowersState, optax.MultiStepsState))):
    part = f"one shard of {inside}" if inside else "one tower"
    what = f"{wrapper}: only_touched needs the reduced gradient, and this is that of {part}"
    raise ValueError(f"{what}. Put {wrapper} inside cross_shard or gather_towers.")
  gradients = _checks.same_structure(wrapper, updates, params)
  mend = f"Put {wrapper} inside the reduction, so that all shards project the same slices."
  for (path, p), g in zip(jax.tree.leaves_with_path(params), gradients):
    if g is not None:
      what = f"the gradient of params{jax.tree_util.keystr(path)}, for only_touched,"
      _axes.require_like(g, p, wrapper, what, mend)
  return gradients
