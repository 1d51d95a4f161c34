"""Workers: whose each leaf of a state is, how states are laid out over them, and steps mapped."""

import enum
import functools
import math
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from optax_wrappers._core import _axes, _checks, _paths, _pods, _shares, _waits
from optax_wrappers._core._state import WrapperState
from optax_wrappers._core._types import AxisName, Tree
from optax_wrappers._workers._exchange_state import ExchangeState

# Optax's states, all named tuples, behind a conditional that each worker may take or not.
_OPTAX_MAY_SKIP = (
  optax.ApplyIfFiniteState,
  optax.MultiStepsState,
  optax.ConditionallyTransformState,
  optax.ConditionallyMaskState,
)


class Holder(enum.Enum):
  """Whose a leaf of a state is."""

  SHARED = "one value for all workers or shards"
  OWN = "a value of its own for each of them"
  DIVIDED = "a share of one value for each of them"
  PART = "a value of its own for each of them, whose sum over all is to stay"


class _Place(NamedTuple):
  """What stands outside a state, which decides whose its leaves are.

  Attributes:
    replicated: whether the parameters are one for all shards, rather than each worker's own.
    is_reduced: whether updates are reduced over the shards before they come here.
    is_own: whether it lies inside a worker's own state. What workers share elsewhere is their own
      there, because each has a whole one.
    is_divided: whether the exchange that it belongs to divides its center over the workers.
    may_skip: whether some workers may skip a call of it that others make, so that counters of calls
      differ.
  """

  replicated: bool
  is_reduced: bool = False
  is_own: bool = False
  is_divided: bool = False
  may_skip: bool = False

  def inside(self, node: Any, name: str) -> "_Place":
    """The place of what a field of `node` holds."""
    # Workers that own their parameters decide by their own gradients. Shards with replicated
    # parameters decide alike.
    if isinstance(node, _OPTAX_MAY_SKIP):
      return self._replace(may_skip=self.may_skip or self.is_own)
    if not isinstance(node, WrapperState):
      return self
    return self._replace(
      is_reduced=self.is_reduced or name in node.reduced_fields,
      is_own=self.is_own or (name in node.owned_fields and not self.replicated),
      is_divided=node.is_divided if isinstance(node, ExchangeState) else self.is_divided,
      may_skip=self.may_skip or (self.is_own and node.may_skip),
    )

  def holder_of(self, node: Any, name: str) -> Holder | None:
    """Whose a field of a state is; None: of several, so look inside."""
    if not isinstance(node, WrapperState):
      return self._of_hyperparams(node, name)
    # A counter of calls stays equal even inside workers' own states, because they call together.
    counter = Holder.OWN if self.may_skip else Holder.SHARED
    reduced = Holder.SHARED if self.is_reduced else Holder.OWN
    for fields, alone, of_worker in (
      (node.lockstep_fields, counter, counter),
      (node.shared_fields, Holder.SHARED, Holder.OWN),
      (node.per_shard_fields, reduced, Holder.OWN),
      (node.center_fields, Holder.DIVIDED if self.is_divided else Holder.SHARED, Holder.OWN),
      (node.divided_fields, Holder.DIVIDED, Holder.OWN),
      (node.summed_fields, Holder.PART, Holder.OWN),
    ):
      if name in fields:
        return of_worker if self.is_own else alone
    return None

  def _of_hyperparams(self, node, name):
    """The same of a state of Optax: numbers of an exchange of workers are one for all of them."""
    if not isinstance(node, optax.InjectStatefulHyperparamsState) or name == "inner_state":
      return None
    is_exchange = isinstance(node.inner_state, ExchangeState)
    return Holder.SHARED if is_exchange and not self.is_own else None


def holders(opt_state: Tree, *, replicated: bool = False) -> Tree:
  """Whose each leaf is: the same structure with a `Holder` for each. All layouts ask here."""

  def stops(x):
    return isinstance(x, (WrapperState, optax.InjectStatefulHyperparamsState, *_OPTAX_MAY_SKIP))

  def visit(node, place):
    if not stops(node):
      return Holder.SHARED if replicated else Holder.OWN
    is_ours = isinstance(node, WrapperState)
    held, fields = node.fields() if is_ours else node._asdict(), {}
    for name, value in held.items():
      holder = place.holder_of(node, name)
      inside = functools.partial(visit, place=place.inside(node, name))
      fields[name] = (
        jax.tree.map(inside, value, is_leaf=stops)
        if holder is None
        else jax.tree.map(functools.partial(_whole, holder), value)
      )
    return type(node)(**fields)

  visit_first = functools.partial(visit, place=_Place(replicated))
  return jax.tree.map(visit_first, opt_state, is_leaf=stops)


def _whole(holder, leaf):
  """The holder of one leaf of a field: a scalar, such as a count, cannot be divided."""
  if holder is Holder.DIVIDED and np.ndim(leaf) == 0:
    return Holder.SHARED
  return holder


def _by_holder(opt_state, replicated, shared, own, divided=None):
  """Applies to each leaf the function for its holder; `divided` is `own` if not given."""
  of = {Holder.SHARED: shared, Holder.OWN: own, Holder.DIVIDED: divided or own, Holder.PART: own}
  found = holders(opt_state, replicated=replicated)
  return jax.tree.map(lambda holder, x: of[holder](x), found, opt_state)


def stack_workers(
  opt_state: Tree, num_workers: int, *, replicated: bool = False, axis_name: Hashable | None = None
) -> Tree:
  """Adds a leading worker axis to the leaves that each worker holds for itself.

  In a tree without wrapper states, such as parameters, every leaf is a worker's own.

  Args:
    opt_state: one worker's optimizer state, as `init` returns it.
    num_workers: the length of the new axis.
    replicated: False for workers with parameters of their own. True for shards with replicas of
      one set of parameters: only `GatherTowersState.accumulated` and the residuals of a
      `CompressedState` get the axis.
    axis_name: a name of the new axis for Flax's boxes, which name axes by position; `map_workers`
      takes it off inside the step. None: boxes stay as they are.

  Returns:
    The same structure; a worker's own leaves are `[num_workers, ...]`, all equal. Of what is
    divided, such as the center with `shard_center`, each worker gets its share.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), "workers")
    >>> state = ow.stack_workers(tx.init(jnp.zeros(3)), 4)
    >>> state.center.shape, state.inner_state[0].trace.shape
    ((3,), (4, 3))
  """
  num_workers = _checks.integer("stack_workers", "num_workers", num_workers, minimum=1)

  def stack(x):
    return jnp.repeat(jnp.asarray(x)[None], num_workers, axis=0)

  def divide(x):
    return _shares.shares(jnp.asarray(x), num_workers)

  stacked = _by_holder(opt_state, replicated, lambda x: x, stack, divide)
  if axis_name is None:
    return stacked
  is_own = _by_holder(opt_state, replicated, lambda _: False, lambda _: True)
  return _renamed_where(is_own, stacked, functools.partial(_paths.with_axis, name=axis_name))


def _renamed_where(is_own, tree, rename):
  """What `rename` makes of those boxes whose leaf has an axis of workers."""
  boxes = _paths.box_classes()
  parts, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, boxes))
  flags = treedef.flatten_up_to(is_own)
  return treedef.unflatten(
    rename(part) if isinstance(part, boxes) and any(jax.tree.leaves(flag)) else part
    for part, flag in zip(parts, flags)
  )


def reshape_batch(batch: Tree, num_workers: int) -> Tree:
  """Divides a batch over workers: `[b, ...]` becomes `[num_workers, b / num_workers, ...]`.

  Each worker gets neighbours. A batch that is sharded over the workers' axis and further axes of a
  mesh, `PartitionSpec(("pod", "data"))`, stays where it is, as `PartitionSpec("pod", "data")`.

  Args:
    batch: any pytree of arrays.
    num_workers: a divisor of the length of each leaf's first axis.

  Returns:
    The same structure.

  Raises:
    ValueError: for a leaf whose first axis cannot be divided.

  **Communication**: none for a batch that is sharded so, or not at all.

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
      raise ValueError(
        f"reshape_batch: batch{jax.tree_util.keystr(path)} must have a first axis that is a"
        f" multiple of the {num_workers} workers, got {list(shape)}."
      )
    shape = num_workers, shape[0] // num_workers, *shape[1:]
    place = _divided_place(x, num_workers)
    if place is None:
      return jnp.reshape(x, shape)
    if isinstance(x, jax.core.Tracer):
      return jnp.reshape(x, shape, out_sharding=place)
    return jax.jit(jnp.reshape, static_argnums=1, out_shardings=place)(x, shape)

  return jax.tree_util.tree_map_with_path(divided, batch)


def _divided_place(x, num_workers):
  """Where a leaf lies when its first axis is two; None: as XLA has it."""
  place = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
  if not isinstance(place, NamedSharding) or not any(place.spec):
    return None
  names = _axes.names_in(place.spec, [0])
  sizes = [place.mesh.shape[name] for name in names]
  for k in range(len(names) + 1):
    if math.prod(sizes[:k]) == num_workers:
      first, rest = names[:k] or None, names[k:] or None
      break
  else:
    # The workers' axis is not among those of the batch, which cut each worker's part.
    is_even = (x.shape[0] // num_workers) % math.prod(sizes) == 0
    first, rest = None, names if names and is_even else None
  return NamedSharding(place.mesh, PartitionSpec(first, rest, *place.spec[1:]))


def worker_axes(opt_state: Tree, *, replicated: bool = False) -> Tree:
  """The axis of the workers in every leaf of a stacked state, for vmap and pmap.

  Args:
    opt_state: the state, stacked or not; only its structure is read.
    replicated: as in `stack_workers`.

  Returns:
    The same structure with 0 for a worker's own leaves and None for shared ones.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> inner = optax.sgd(0.1, momentum=0.9)
    >>> axes = ow.worker_axes(
    ...   ow.elastic_average(inner, "workers").init(jnp.zeros(2))
    ... )
    >>> print(axes.inner_state[0], axes.center)
    TraceState(trace=0) None
  """
  return _by_holder(opt_state, replicated, lambda _: None, lambda _: 0)


def worker_specs(
  opt_state: Tree,
  axis_name: Hashable | tuple[Hashable, ...],
  *,
  replicated: bool = False,
  params: Tree = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> Tree:
  """The `PartitionSpec` of every leaf of a stacked state: shard_map's specs, and NamedShardings.

  Inside shard_map a worker's own leaf still has its leading axis, of length one: `x[0]` takes it
  off, `x[None]` puts it back.

  Args:
    opt_state: the state, stacked or not; only its structure is read, unless `params` is given.
    axis_name: the mesh axis, or axes, over which the workers lie.
    replicated: as in `stack_workers`.
    params: the PartitionSpecs of one worker's parameters over further axes, without the workers'.
      What a state holds for a parameter, known by its path, gets them after the workers' axis.
      `opt_state` must be stacked, of arrays or `jax.ShapeDtypeStruct`.
    mesh: the mesh, for `params`; None: the one in use (`jax.set_mesh`). An axis that does not
      divide a leaf where the parameter has it goes to the first dimension that it divides, if any.

  Returns:
    The same structure with `PartitionSpec(axis_name)` for a worker's own leaves, `PartitionSpec()`
    for shared ones.

  Raises:
    TypeError: if `params` holds anything but PartitionSpecs.
    ValueError: if the mesh is not known, and a worker's devices may not divide its share.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"kernel": jnp.zeros((8, 4))}
    >>> state = ow.stack_workers(
    ...   ow.diloco(optax.sgd(0.1), "pod").init(params), 2
    ... )
    >>> ow.worker_specs(state, "pod", params={"kernel": P("data")}).center
    {'kernel': P('data',)}
  """
  names = _axes.axis_names(axis_name)
  own = PartitionSpec(names[0] if len(names) == 1 else names)
  specs = _by_holder(opt_state, replicated, lambda _: PartitionSpec(), lambda _: own)
  if params is None:
    return specs
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  whose = jax.tree.leaves(holders(opt_state, replicated=replicated))
  return _with_params(specs, opt_state, params, whose, dict(mesh.shape))


def _with_params(specs, opt_state, params, whose, sizes):
  """The specs of a stacked state, with those of the parameters after the axis of the workers."""
  of_params = dict(_paths.leaves_with_keys(params))
  for keys, spec in of_params.items():
    if not isinstance(spec, PartitionSpec):
      name = "/".join(keys)
      raise TypeError(f"worker_specs: params must hold PartitionSpecs, got {spec!r} for {name}.")
  leaves = []
  slots = jax.tree.leaves(_slot_axes(opt_state))
  columns = _paths.leaves_with_keys(opt_state), jax.tree.leaves(specs), slots, whose
  for (keys, leaf), spec, num_slots, holder in zip(*columns, strict=True):
    further = _paths.by_end(keys, of_params, ())
    # A count for each worker has no more axes than that, whatever its path.
    whole = PartitionSpec(*spec, *[None] * num_slots, *further)
    whole = whole if np.ndim(leaf) >= len(whole) else spec
    if sizes:
      whole = _fitted(whole, np.shape(leaf), sizes)
    elif holder is Holder.DIVIDED:
      _check_divides("/".join(keys), whole, leaf)
    leaves.append(whole)
  return jax.tree.structure(opt_state).unflatten(leaves)


def _fitted(spec, shape, sizes):
  """A spec that divides an array of a shape."""
  cuts = [_axes.names_in(spec, [d]) for d in range(len(spec))]
  sizes = {name: sizes.get(name, 1) for names in cuts for name in names}
  if all(shape[d] % math.prod(sizes[x] for x in names) == 0 for d, names in enumerate(cuts)):
    return spec
  return _pods.fitted(spec, len(shape), sizes, lambda d, num_parts: shape[d] % num_parts == 0)


def _check_divides(name, spec, share):
  """Raises where a worker's devices, whose number is not known, may not divide its share."""
  num_workers, *shape = np.shape(share)
  most = jax.device_count() // num_workers
  for d, n in enumerate(shape, 1):
    # They divide the parameter, which is at most `num_workers` times the share.
    numbers = [k for k in range(2, most + 1) if n * num_workers % k == 0 and n % k]
    if numbers and _axes.names_in(spec, [d]):
      raise ValueError(
        f"worker_specs: mesh is needed for {name}, each worker's share of a parameter,"
        f" {list(shape)}: {spec} may not divide it over {numbers[-1]} devices. Pass mesh=mesh."
      )


def _slot_axes(tree, num_axes=0):
  """For each leaf the number of axes of slots that it has before those of a parameter."""

  def visit(node):
    if not isinstance(node, WrapperState):
      return num_axes
    fields = {
      name: _slot_axes(value, num_axes + (name in node.slotted_fields))
      for name, value in node.fields().items()
    }
    return type(node)(**fields)

  return jax.tree.map(visit, tree, is_leaf=lambda x: isinstance(x, WrapperState))


def map_workers(
  step: Callable[..., Any],
  axis_name: AxisName,
  *,
  in_axes: Any = 0,
  out_axes: Any = 0,
  mesh: Mesh | None = None,
) -> Callable[..., Any]:
  """Maps a step that is written for one worker over all workers.

  The mapped step takes and returns the trees of `step` with a leading axis of workers, as
  `stack_workers` makes them. What workers share of an optimizer state, such as a center, has no
  such axis, and is known without being named.

  Args:
    step: a function of positional arguments, any pytrees: one worker's parameters, state, data.
      Bind what is the same for all workers before, with functools.partial.
    axis_name: the axis over which `step` communicates, or with a mesh several.
    in_axes: a tuple with 0 for each argument, or None for one value that all workers get; an entry
      may be a prefix of its argument's tree. 0 alone: for all arguments.
    out_axes: the same for the results. None is for what is equal on all workers, such as the
      `lax.pmean` of a loss.
    mesh: None: the workers are mapped by `jax.vmap`, on one device or wherever their arrays lie.
      Otherwise one worker lies at each place of the axes named, by `jax.shard_map` with
      `check_vma=True` (a single worker by `jax.vmap`). A worker's arrays may be sharded over the
      other axes, which are left to XLA. Make all axes Auto: of an Explicit mesh JAX before 0.11.2
      gathers such arrays in every step.

  Returns:
    The mapped step, to be given to `jax.jit`.

  Raises:
    ValueError: for axes that the mesh does not have, or several without a mesh; when called, for a
      leaf without a leading axis of workers, for a result under None that may differ, and with a
      mesh where one worker may wait for another for ever.
    TypeError: when called, for an argument by name.

  Warns:
    UserWarning: for an argument that is sharded over other axes of an Explicit mesh, with JAX
      before 0.11.2.

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
    >>> params = ow.stack_workers(jnp.array(0.0), 2)
    >>> data = jnp.array([1.0, 3.0])
    >>> state = ow.stack_workers(tx.init(jnp.array(0.0)), 2)
    >>> mapped = ow.map_workers(step, "workers", out_axes=(0, 0, None))
    >>> params, state, loss = jax.jit(mapped)(params, state, data)
    >>> print(params, ow.center_params(state), loss)
    [0.1 0.3] 0.4 5.0
  """
  names = _axes.axis_names(axis_name)
  num_workers = _num_places(names, mesh)

  @functools.wraps(step)
  def mapped(*args, **kwargs):
    if kwargs:
      given = ", ".join(kwargs)
      raise TypeError(f"map_workers: arguments are mapped by their position, got {given} by name.")
    leaves = jax.tree.leaves(args)
    # vmap and shard_map take layouts as trees that match the arguments. Flat lists of what is a
    # worker's own and of what is shared need two entries, whatever the trees are.
    is_own = _own_flags("in_axes", in_axes, args)
    _check_stacked(args, is_own, num_workers)
    one, name_in_boxes = _structure_of_one(args, is_own, names)
    results = {}

    def one_worker(own, shared):
      own, shared = iter(own), iter(shared)
      out = step(*one.unflatten([next(own if flag else shared) for flag in is_own]))
      # The structure of the results is known when the step has been traced, and not before: it is
      # left here for the code below, which runs afterwards.
      results["is_own"] = flags = _own_flags("out_axes", out_axes, out)
      _check_shared(out, flags, names)
      found, plain = jax.tree.flatten(out)
      if name_in_boxes:
        (name,) = name_in_boxes
        out = _renamed_where(plain.unflatten(flags), out, lambda x: _paths.with_axis(x, name))
      results["treedef"] = jax.tree.structure(out)
      return _split(found, flags)

    try:
      run = _map(one_worker, names, mesh, num_workers)
      own, shared = map(iter, run(*_split(leaves, is_own)))
    except ValueError as error:
      if "out_axes is None" not in str(error):
        raise
      raise ValueError(_one_value_for_all("one of the results is", names)) from error
    merged = [next(own if flag else shared) for flag in results["is_own"]]
    return results["treedef"].unflatten(merged)

  return mapped


def _structure_of_one(args, is_own, names):
  """The structure of one worker's arguments, and the name of the workers' axis in their boxes.

  One worker's boxes do not name that axis. The name is a tuple of one, or empty: there was none.
  """
  found = ()

  def without(in_box, leaf):
    nonlocal found
    # Boxes may have been stacked without a name, as `jax.tree.map` does it.
    if len(in_box) < np.ndim(leaf) and in_box[0] not in (*names, names):
      return in_box
    found = in_box[:1]
    return in_box[1:]

  flags = jax.tree.structure(args).unflatten(is_own)
  one = _renamed_where(flags, args, lambda box: _paths.renamed_axes(box, without))
  return jax.tree.structure(one), found


def _map(one_worker, names, mesh, num_workers):
  """`one_worker(own, shared)` over the leading axis of what is its own."""
  if mesh is None:
    return jax.vmap(one_worker, in_axes=(0, None), out_axes=(0, None), axis_name=names[0])
  kinds = dict(zip(mesh.axis_names, mesh.axis_types))
  is_explicit = any(kinds[name] == AxisType.Explicit for name in names)
  if num_workers == 1:
    return _alone(one_worker, names, mesh, is_explicit)
  specs = PartitionSpec(names), PartitionSpec()

  def in_place(own, shared):
    # shard_map leaves each worker's leading axis in place, of length one.
    own, shared = one_worker([x[0] for x in own], shared)
    return [jnp.expand_dims(x, 0) for x in own], shared

  sharded = jax.shard_map(
    in_place, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=frozenset(names)
  )
  sharded = jax.jit(sharded, inline=True)  # the check and the call share one trace

  def placed(own, shared):
    if is_explicit:
      _warn_if_gathered([*own, *shared], names)
      own = [_laid_out(x, mesh, names) for x in own]
      shared = [_laid_out(x, mesh, ()) for x in shared]
    _waits.require_none("map_workers", sharded.trace(own, shared).jaxpr.jaxpr)
    return sharded(own, shared)

  return placed


def _alone(one_worker, names, mesh, is_explicit):
  """The only worker, with the axes bound by `jax.vmap`.

  In jax 0.10.2 XLA dies of a `shard_map` over an axis of one place beside axes left to it.
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
    return  # JAX leaves them where they lie
  specs = [jax.typeof(jnp.asarray(x)).sharding.spec for x in leaves]
  others = {name for spec in specs for name in _axes.names_in(spec, range(len(spec)))} - set(names)
  if others:
    warnings.warn(
      "map_workers: the mesh is Explicit, and arguments are sharded over"
      f" {sorted(map(str, others))} beside the workers' axis. JAX before 0.11.2 gathers these in"
      " every step. Make the mesh with axis_types=(AxisType.Auto,) * len(names).",
      stacklevel=3,
    )


def _laid_out(x, mesh, first):
  """An array whose leading axis lies over `first`, as its type must say on an Explicit mesh."""
  laid_out = jax.typeof(jnp.asarray(x)).sharding
  spec = PartitionSpec(first, *laid_out.spec[1:]) if first else laid_out.spec
  if laid_out.mesh.shape == mesh.shape and spec == laid_out.spec:
    return x
  return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _num_places(names, mesh):
  """The number of workers that a mesh has places for; None without one."""
  if not names or (mesh is None and len(names) > 1):
    raise ValueError(f"map_workers: axis_name must be one axis, or several of mesh; got {names}")
  if mesh is None:
    return None
  missing = [name for name in names if name not in mesh.shape]
  if missing:
    raise ValueError(f"map_workers: mesh has the axes {mesh.axis_names}, and not {missing}.")
  return math.prod(mesh.shape[name] for name in names)


def _own_flags(name, axes, tree):
  """For each leaf of a tree whether it has an axis of workers."""
  axes = tuple(axes) if isinstance(axes, list) else axes
  # False is 0 to Python, and not meant as an axis.
  if any(axis != 0 or isinstance(axis, bool) for axis in jax.tree.leaves(axes)):
    raise ValueError(f"map_workers: {name} must hold 0 and None, got {axes!r}.")

  def of(axis, part):
    return jax.tree.map(lambda _: Holder.SHARED, part) if axis is None else holders(part)

  try:
    found = jax.tree.map(of, axes, tree, is_leaf=lambda x: x is None)
  except (ValueError, TypeError) as error:
    what = "arguments" if name == "in_axes" else "results"
    raise ValueError(
      f"map_workers: {name} must be 0, None, or have the structure of the {what}; got {axes!r}."
    ) from error
  return [holder is not Holder.SHARED for holder in jax.tree.leaves(found)]


def _split(leaves, is_own):
  """The leaves that have an axis of workers, and the others."""
  own = [x for x, flag in zip(leaves, is_own, strict=True) if flag]
  return own, [x for x, flag in zip(leaves, is_own) if not flag]


def _check_stacked(args, is_own, num_workers):
  """Raises unless all that is a worker's own has a leading axis of one length."""
  found: dict[tuple[int, ...], str] = {}  # the first leaf of each length; () is that of a scalar
  for (path, leaf), flag in zip(jax.tree.leaves_with_path(args), is_own, strict=True):
    if flag:
      shape = jnp.shape(leaf)
      name = f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])} {list(shape)}"
      found.setdefault(shape[:1], name)
  needed = f"of the {num_workers} workers" if num_workers else "of workers, all of one length"
  wrong = [name for length, name in found.items() if length != (num_workers,)]
  if wrong if num_workers else () in found or len(found) > 1:
    raise ValueError(
      f"map_workers: what is a worker's own must have a leading axis {needed}; got"
      f" {', '.join(wrong)}. stack_workers(tree, num_workers) adds it to parameters and states, and"
      " reshape_batch(batch, num_workers) to a batch. What all workers share needs None in in_axes."
    )


def _check_shared(out, is_own, names):
  for (path, leaf), flag in zip(jax.tree.leaves_with_path(out), is_own, strict=True):
    if not flag and _axes.varying(leaf) & set(names):
      raise ValueError(_one_value_for_all(f"result{jax.tree_util.keystr(path)} is", names))


def _one_value_for_all(what, names):
  return (
    f"map_workers: {what} to be one value for all workers, but may differ over {names}. Reduce it,"
    " or pass 0 in out_axes. If it is shared in a state, put optax.MultiSteps and"
    " optax.apply_if_finite inside the wrapper."
  )
