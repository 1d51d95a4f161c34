"""Maps a step for one worker over all workers, and divides batches."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_wrappers._core import _axes, _checks, _waits
from optax_wrappers._core._states import instances
from optax_wrappers._core._types import AxisName, Tree
from optax_wrappers._workers._exchange_state import ExchangeState
from optax_wrappers._workers._layout import MAY_SKIP, Holder, holders, renamed_where


def reshape_batch(batch: Tree, num_workers: int) -> Tree:
  """Splits a batch over workers: `[b, ...]` becomes `[num_workers, b / num_workers, ...]`.

  Each worker gets adjacent examples. A batch sharded over the workers' axis and further axes of a
  mesh, `PartitionSpec(("pod", "data"))`, does not move: it becomes `PartitionSpec("pod", "data")`.

  Args:
    batch: any pytree of arrays.
    num_workers: a divisor of the length of each leaf's first axis, else a ValueError.

  Returns:
    The same structure.

  **Communication**: none for a batch with that sharding, or with none.

  Examples:
    >>> import jax.numpy as jnp, optax_wrappers as ow
    >>> print(ow.reshape_batch(jnp.arange(6), 2))
    [[0 1 2]
     [3 4 5]]
  """
  num_workers = _checks.integer("reshape_batch", "num_workers", num_workers, minimum=1)

  def divided(path, x):
    shape = jnp.shape(x)
    if not shape or shape[0] % num_workers:
      what = f"reshape_batch: batch{jax.tree_util.keystr(path)} must have a first axis that is a"
      raise ValueError(f"{what} multiple of the {num_workers} workers, got {list(shape)}.")
    shape = num_workers, shape[0] // num_workers, *shape[1:]
    place = _divided_place(x, num_workers)
    if place is None or isinstance(x, jax.core.Tracer):
      return jnp.reshape(x, shape, out_sharding=place)
    return jax.jit(jnp.reshape, static_argnums=1, out_shardings=place)(x, shape)

  return jax.tree_util.tree_map_with_path(divided, batch)


def _divided_place(x, num_workers):
  """The sharding of a leaf whose first axis is split in two; None: left to XLA."""
  place = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
  if not isinstance(place, NamedSharding) or not any(place.spec):
    return None
  names = _axes.names_in(place.spec, [0])
  sizes = [place.mesh.shape[name] for name in names]
  # 0: the workers' axis is not among those of the batch, which shard each worker's part.
  k = next((k for k in range(len(names) + 1) if math.prod(sizes[:k]) == num_workers), 0)
  is_even = (x.shape[0] // num_workers) % math.prod(sizes[k:]) == 0
  first, rest = names[:k], names[k:] if is_even else ()
  return NamedSharding(place.mesh, PartitionSpec(first or None, rest or None, *place.spec[1:]))


def map_workers(
  step: Callable[..., Any],
  axis_name: AxisName,
  *,
  in_axes: Any = 0,
  out_axes: Any = 0,
  mesh: Mesh | None = None,
) -> Callable[..., Any]:
  """Maps a step for one worker over all workers.

  The mapped step takes and returns the trees of `step` as `stack_workers` makes them, with a
  leading axis of workers. Shared parts of a state, such as a center, have none and need no mention.

  Args:
    step: a function of positional arguments, any pytrees: one worker's parameters, state, data.
    axis_name: the axis over which `step` communicates, or with a mesh several.
    in_axes: a tuple with 0 for each argument, or None for one value for all workers; an entry may
      be a prefix of its argument's tree. 0 alone: for all arguments.
    out_axes: the same for the results. None is for results that are equal on all workers, such as
      the `lax.pmean` of a loss.
    mesh: None: `jax.vmap` maps the workers, on one device or wherever their arrays are. Otherwise
      `jax.shard_map` with `check_vma=True` maps a worker to each position of the named axes (one
      worker: `jax.vmap`), and XLA partitions the other axes. JAX before 0.11.2 gathers arrays
      sharded over them on an Explicit mesh, with a UserWarning: make all axes Auto.

  Returns:
    The mapped step, for `jax.jit`.

  Raises:
    ValueError: for axes that the mesh does not have, or several without a mesh; when called, for a
      leaf without a workers' axis, for a result under None that may differ, and with a mesh what
      `inspect.check_step` raises, asked once for each structure and static value of the arguments.
    TypeError: when called, for a keyword argument; functools.partial binds it.

  **Communication**: none of its own.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> options = {"communication_period": 1, "moving_rate": 0.5}
    >>> tx = ow.elastic_average(optax.sgd(0.1), "workers", **options)
    >>> def step(params, state, x):
    ...   loss, grad = jax.value_and_grad(lambda p: (p - x) ** 2)(params)
    ...   updates, state = tx.update(grad, state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   return params, state, jax.lax.pmean(loss, "workers")
    >>> start = jnp.array(0.0)
    >>> params, state = ow.stack_workers((start, tx.init(start)), 2)
    >>> mapped = jax.jit(ow.map_workers(step, "workers", out_axes=(0, 0, None)))
    >>> params, state, loss = mapped(params, state, jnp.array([1.0, 3.0]))
    >>> print(params, ow.center_params(state), loss)
    [0.1 0.3] 0.4 5.0
  """
  names = _axes.axis_names(axis_name)
  num_workers = _num_places(names, mesh)
  # The structures of arguments, with their static values, that no shard waits with.
  checked = set()

  @functools.wraps(step)
  def mapped(*args, **kwargs):
    if kwargs:
      what = f"map_workers: arguments are mapped by position, got {', '.join(kwargs)} by name"
      raise TypeError(f"{what}. Bind them before, with functools.partial.")
    leaves, structure = jax.tree.flatten(args)
    # vmap and shard_map take layouts as trees that match the arguments. Two flat lists, of
    # per-worker and of shared values, need only two entries, whatever the trees are.
    is_own = _own_flags("in_axes", in_axes, args)
    _check_stacked(args, is_own, num_workers)
    one, name_in_boxes = _structure_of_one(args, is_own, names)
    results = {}

    def one_worker(own, shared):
      out = step(*one.unflatten(_merged(own, shared, is_own)))
      # The structure of the results is known only after the step is traced: it is stored here for
      # the code below, which runs afterwards.
      results["is_own"] = flags = _own_flags("out_axes", out_axes, out)
      _check_shared(out, flags, names)
      values, plain = jax.tree.flatten(out)
      if name_in_boxes:
        out = renamed_where(plain.unflatten(flags), out, lambda given, _: name_in_boxes + given)
      results["treedef"] = jax.tree.structure(out)
      return _split(values, flags)

    try:
      run = _map(one_worker, names, mesh, num_workers, structure in checked)
      own, shared = run(*_split(leaves, is_own))
    except ValueError as error:
      if "out_axes is None" not in str(error):
        raise
      raise ValueError(_one_value_for_all("one of the results", names)) from error
    except TypeError as error:
      # With a mesh, JAX finds earlier that only some workers would change what they share.
      skipping = instances(args, MAY_SKIP)
      is_shared = any(any(instances(list(one), ExchangeState)) for one in skipping)
      if not is_shared or "cond branches must have equal output types" not in str(error):
        raise
      raise ValueError(_one_value_for_all("a part of a state", names)) from error
    checked.add(structure)
    return results["treedef"].unflatten(_merged(own, shared, results["is_own"]))

  return mapped


def _structure_of_one(args, is_own, names):
  """The structure of one worker's arguments, and the name of the workers' axis in their boxes.

  One worker's boxes do not name that axis. The name is a tuple of one, or empty if there is none.
  """
  found = ()

  def without(in_box, leaf):
    nonlocal found
    # Boxes may have been stacked without a name, as by `jax.tree.map`.
    if len(in_box) < np.ndim(leaf) and in_box[0] not in (*names, names):
      return in_box
    found = in_box[:1]
    return in_box[1:]

  flags = jax.tree.structure(args).unflatten(is_own)
  one = jax.tree.structure(renamed_where(flags, args, without))
  return one, found


def _map(one_worker, names, mesh, num_workers, is_checked):
  """`one_worker(own, shared)` over the leading axis of the per-worker values."""
  if mesh is None:
    return jax.vmap(one_worker, in_axes=(0, None), out_axes=(0, None), axis_name=names[0])
  kinds = dict(zip(mesh.axis_names, mesh.axis_types))
  is_explicit = any(kinds[name] == AxisType.Explicit for name in names)
  if num_workers == 1:
    return _alone(one_worker, names, mesh, is_explicit)
  # For per-worker values, and for shared ones.
  specs = PartitionSpec(names), PartitionSpec()

  def in_place(own, shared):
    # shard_map keeps each worker's leading axis, of length one.
    own, shared = one_worker([x[0] for x in own], shared)
    return [jnp.expand_dims(x, 0) for x in own], shared

  sharded = jax.shard_map(
    in_place, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=frozenset(names)
  )
  # The check and the call share one trace.
  sharded = jax.jit(sharded, inline=True)

  def placed(own, shared):
    if is_explicit:
      _warn_if_gathered([*own, *shared], names)
      own = [_laid_out(x, mesh, names) for x in own]
      shared = [_laid_out(x, mesh, ()) for x in shared]
    if not is_checked:
      _waits.require_none("map_workers", sharded.trace(own, shared).jaxpr.jaxpr)
    return sharded(own, shared)

  return placed


def _alone(one_worker, names, mesh, is_explicit):
  """Calls the step for the only worker, with the axes bound by `jax.vmap`.

  In jax 0.10.2, XLA crashes on a `shard_map` over an axis of size one next to Auto axes.
  """
  bound = one_worker
  for name in reversed(names):
    bound = jax.vmap(bound, in_axes=None, axis_name=name, axis_size=1)

  def alone(own, shared):
    own = [_axes.undivided(jnp.asarray(x), 1)[0] for x in own]
    own, shared = jax.tree.map(lambda x: x[(0,) * len(names)], bound(own, shared))
    own = [jnp.expand_dims(x, 0) for x in own]
    return ([_laid_out(x, mesh, names) for x in own] if is_explicit else own), shared

  return alone


def _warn_if_gathered(leaves, names):
  if jax.__version_info__ >= (0, 11, 2):
    return  # JAX leaves them where they are
  specs = [jax.typeof(jnp.asarray(x)).sharding.spec for x in leaves]
  others = {name for spec in specs for name in _axes.names_in(spec, range(len(spec)))} - set(names)
  if others:
    warnings.warn(
      "map_workers: the mesh is Explicit, and arguments are sharded over"
      f" {sorted(map(str, others))} next to the workers' axis. JAX before 0.11.2 gathers these in"
      " every step. Make the mesh with axis_types=(AxisType.Auto,) * len(names).",
      stacklevel=3,
    )


def _laid_out(x, mesh, first):
  """An array sharded over `first` along its leading axis; its type must say so on Explicit axes."""
  laid_out = jax.typeof(jnp.asarray(x)).sharding
  spec = PartitionSpec(first, *laid_out.spec[1:]) if first else laid_out.spec
  if laid_out.mesh.shape == mesh.shape and spec == laid_out.spec:
    return x
  return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _num_places(names, mesh):
  """The number of workers according to a mesh; None without one."""
  if not names or (mesh is None and len(names) > 1):
    raise ValueError(f"map_workers: axis_name must be one axis, or several of mesh; got {names}")
  missing = [] if mesh is None else [name for name in names if name not in mesh.shape]
  if missing:
    raise ValueError(f"map_workers: mesh has the axes {mesh.axis_names}, and not {missing}.")
  return mesh and math.prod(mesh.shape[name] for name in names)


def _own_flags(name, axes, tree):
  """For each leaf of a tree, whether it has an axis of workers."""
  axes = tuple(axes) if isinstance(axes, list) else axes
  # Python treats False as 0, but it is not meant as an axis.
  if any(axis != 0 or isinstance(axis, bool) for axis in jax.tree.leaves(axes)):
    raise ValueError(f"map_workers: {name} must hold 0 and None, got {axes!r}.")

  def of(axis, part):
    return jax.tree.map(lambda _: Holder.SHARED, part) if axis is None else holders(part)

  try:
    flags = jax.tree.map(of, axes, tree, is_leaf=lambda x: x is None)
  except (ValueError, TypeError) as error:
    what = "arguments" if name == "in_axes" else "results"
    requirement = f"must be 0, None, or have the structure of the {what} or a prefix of it"
    raise ValueError(f"map_workers: {name} {requirement}; got {axes!r}.") from error
  return [holder is not Holder.SHARED for holder in jax.tree.leaves(flags)]


def _split(leaves, is_own):
  """The leaves that have an axis of workers, and the others."""
  own = [x for x, flag in zip(leaves, is_own, strict=True) if flag]
  return own, [x for x, flag in zip(leaves, is_own) if not flag]


def _merged(own, shared, is_own):
  """The inverse of `_split`."""
  own, shared = iter(own), iter(shared)
  return [next(own if flag else shared) for flag in is_own]


def _check_stacked(args, is_own, num_workers):
  """Raises unless all per-worker values have a leading axis of one length."""
  # The first leaf of each length; () is that of a scalar.
  lengths: dict[tuple[int, ...], str] = {}
  for (path, leaf), flag in zip(jax.tree.leaves_with_path(args), is_own, strict=True):
    if flag:
      shape = jnp.shape(leaf)
      name = f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])} {list(shape)}"
      lengths.setdefault(shape[:1], name)
  requirement = f"of the {num_workers} workers" if num_workers else "of workers, all of one length"
  wrong = [name for length, name in lengths.items() if length != (num_workers,)]
  if wrong if num_workers else () in lengths or len(lengths) > 1:
    raise ValueError(
      f"map_workers: arguments must have a leading axis {requirement}; got"
      f" {', '.join(wrong)}. stack_workers(tree, num_workers) adds it to parameters and states, and"
      " reshape_batch(batch, num_workers) to a batch. One value for all needs None in in_axes."
    )


def _check_shared(out, is_own, names):
  for (path, x), flag in zip(jax.tree.leaves_with_path(out), is_own, strict=True):
    if not flag and _axes.varying(x) & set(names):
      raise ValueError(_one_value_for_all(f"result{jax.tree_util.keystr(path)}", names))


def _one_value_for_all(what, names):
  return (
    f"map_workers: {what} must be one value for all workers, but may differ over {names}. Reduce"
    " it, or pass 0 in out_axes; worker_axes(state, replicated=True) gives the axes of a state of"
    " replicated parameters. If it is shared in a state, put optax.MultiSteps and"
    " optax.apply_if_finite inside the wrapper."
  )
