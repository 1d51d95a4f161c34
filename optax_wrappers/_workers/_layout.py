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


def _by_holder(opt_state, replicated, shared, own, divided):
  """Applies to each leaf the function for its holder."""
  of = {Holder.SHARED: shared, Holder.OWN: own, Holder.DIVIDED: divided, Holder.PART: own}
  found = holders(opt_state, replicated=replicated)
  return jax.tree.map(lambda holder, x: of[holder](x), found, opt_state)


def stack_workers(
  opt_state: Tree, num_workers: int, *, replicated: bool = False, axis_name: Hashable | None = None
) -> Tree:
  """Adds a leading worker axis to the leaves that each worker holds for itself.

  Works on parameters too: in a tree without wrapper states every leaf is a worker's own.

  Args:
    opt_state: one worker's optimizer state, as `init` returns it.
    num_workers: the length of the new axis.
    replicated: False for workers, each with parameters of its own. True for shards that hold
      replicas of the same parameters: then only what differs by nature gets the axis,
      `GatherTowersState.accumulated` and the residuals of a `CompressedState`.
    axis_name: a name of the new axis for Flax's boxes, of Linen and NNX, which name axes by
      position; `map_workers` takes it off inside the step. None: boxes stay as they are.

  Returns:
    The same structure; a worker's own leaves are `[num_workers, ...]`, all workers starting equal.
    Of what is divided, such as the center with `shard_center`, each worker gets its share,
    `[num_workers, share]`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), "workers")
    >>> state = tx.init(jnp.zeros(3))
    >>> state = ow.stack_workers(state, 4)
    >>> state.center.shape, state.inner_state[0].trace.shape
    ((3,), (4, 3))
  """
  num_workers = _checks.integer("stack_workers", "num_workers", num_workers, minimum=1)

  def stack(x):
    return jnp.repeat(jnp.asarray(x)[None], num_workers, axis=0)

  def deal(x):
    return _shares.shares(jnp.asarray(x), num_workers)

  stacked = _by_holder(opt_state, replicated, lambda x: x, stack, deal)
  if axis_name is None:
    return stacked
  is_own = _by_holder(opt_state, replicated, lambda _: False, lambda _: True, lambda _: True)
  return _renamed_where(is_own, stacked, functools.partial(_paths.with_axis, name=axis_name))


def _renamed_where(is_own, tree, rename):
  """What `rename` makes of those boxes whose leaf has an axis of workers."""

  def visit(box, flags):
    return rename(box) if any(jax.tree.leaves(flags)) else box

  return jax.tree.map(visit, tree, is_own, is_leaf=_paths.is_box)


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
  wrapper = "reshape_batch"
  num_workers = _checks.integer(wrapper, "num_workers", num_workers, minimum=1)

  def divided(path, x):
    shape = jnp.shape(x)
    if not shape or shape[0] % num_workers:
      raise ValueError(
        f"{wrapper}: batch{jax.tree_util.keystr(path)} must have a first axis that is a multiple of"
        f" the {num_workers} workers, got {list(shape)}."
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
      rest = names[k:] or None
      return NamedSharding(place.mesh, PartitionSpec(names[:k] or None, rest, *place.spec[1:]))
  # The workers' axis is not among those of the batch, which cut each worker's part.
  is_even = (x.shape[0] // num_workers) % math.prod(sizes) == 0
  rest = names if names and is_even else None
  return NamedSharding(place.mesh, PartitionSpec(None, rest, *place.spec[1:]))


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
  return _by_holder(opt_state, replicated, lambda _: None, lambda _: 0, lambda _: 0)


def worker_specs(
  opt_state: Tree,
  axis_name: Hashable | tuple[Hashable, ...],
  *,
  replicated: bool = False,
  params: Tree = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> Tree:
  """The `PartitionSpec` of every leaf of a stacked state: shard_map's specs, and NamedShardings.

  Inside shard_map a worker's own leaf still has its leading axis, of length one: take it off with
  `x[0]` on the way in and put it back with `x[None]` on the way out.

  Args:
    opt_state: the state, stacked or not; only its structure is read, unless `params` is given.
    axis_name: the mesh axis, or axes, over which the workers lie.
    replicated: as in `stack_workers`.
    params: where a worker's parameters are sharded over further axes of the mesh, their
      PartitionSpecs, same structure as the parameters, without the axis of the workers. What a
      state holds for a parameter, known by its path, then gets them after the workers' axis.
      `opt_state` must be stacked, of arrays or `jax.ShapeDtypeStruct`.
    mesh: the mesh, for `params`; None: the one in use (`jax.set_mesh`). An axis that does not
      divide a leaf where the parameter has it, as may be with the shares of a parameter, goes to
      the first dimension of the leaf that it divides, or is left out.

  Returns:
    The same structure with `PartitionSpec(axis_name)` for a worker's own leaves, `PartitionSpec()`
    for shared ones.

  Raises:
    TypeError: if `params` holds anything but PartitionSpecs.
    ValueError: if the mesh is not known, and the devices of a worker may be too many for its share
      of a parameter.

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
  specs = _by_holder(opt_state, replicated, lambda _: PartitionSpec(), lambda _: own, lambda _: own)
  if params is None:
    return specs
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  whose = jax.tree.leaves(holders(opt_state, replicated=replicated))
  return _with_params(specs, opt_state, params, whose, dict(mesh.shape))


def _with_params(specs, opt_state, params, whose, sizes):
  """The specs of a stacked state, with those of the parameters after the axis of the workers."""
  of_params = dict(_paths.leaves_with_keys(params))
  wrong = ["/".join(keys) for keys, x in of_params.items() if not isinstance(x, PartitionSpec)]
  if wrong:
    raise TypeError(
      "worker_specs: params must hold the PartitionSpecs of the parameters, PartitionSpec() for one"
      f" that is not sharded; got something else for {', '.join(wrong)}."
    )
  leaves = []
  slots = jax.tree.leaves(_slot_axes(opt_state))
  columns = _paths.leaves_with_keys(opt_state), jax.tree.leaves(specs), slots, whose
  for (keys, leaf), spec, num_slots, holder in zip(*columns, strict=True):
    further = _paths.by_end(keys, of_params, ())
    # A count for each worker has no more axes than that, whatever its path.
    whole = PartitionSpec(*spec, *[None] * num_slots, *further)
    whole = whole if np.ndim(leaf) >= len(whole) else spec
    if sizes:
      whole = _fitted(whole, leaf, sizes)
    elif holder is Holder.DIVIDED:
      _check_divides("/".join(keys), whole, leaf)
    leaves.append(whole)
  return jax.tree.structure(opt_state).unflatten(leaves)


def _fitted(spec, leaf, sizes):
  """A spec that divides a leaf."""
  names = _axes.names_in(spec, range(len(spec)))
  if all(np.shape(leaf)[d] % _num_parts(spec, d, sizes) == 0 for d in range(len(spec))):
    return spec

  def may_cut(d, num_parts):
    return np.shape(leaf)[d] % num_parts == 0

  return _pods.fitted(spec, np.ndim(leaf), {name: sizes.get(name, 1) for name in names}, may_cut)


def _num_parts(spec, d, sizes):
  return math.prod(sizes.get(name, 1) for name in _axes.names_in(spec, [d]))


def _check_divides(name, spec, share):
  """Raises where a worker's devices, whose number is not known, may not divide its share.

  They divide the parameter, which is at most as many times the share as there are workers.
  """
  num_workers, *shape = np.shape(share)
  for d, n in enumerate(shape, 1):
    most = jax.device_count() // num_workers
    numbers = [k for k in range(2, most + 1) if n * num_workers % k == 0 and n % k]
    if _axes.names_in(spec, [d] if d < len(spec) else []) and numbers:
      raise ValueError(
        f"worker_specs: mesh is needed for {name}, each worker's share of a parameter,"
        f" {list(shape)}: {spec} cannot lay it out over {numbers[-1]} devices. Pass mesh=mesh, with"
        " which it is laid out over what divides it."
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

  `step` sees one worker's parameters, its optimizer state and its own data, and calls
  `update` as on one device. The mapped step takes and returns the same trees with a leading axis of
  workers, as `stack_workers` makes them. In an optimizer state the leaves that workers share, such
  as a center, have no such axis, and need no word: they are known.

  Args:
    step: a function of positional arguments, any pytrees.
    axis_name: the axis over which `step` communicates, or with a mesh several.
    in_axes: for each argument 0, or None for one value that all workers get, such as a step's
      number. A tuple with one entry for each argument; an entry may be a prefix of its tree. 0
      alone: for all arguments.
    out_axes: the same for the results. None is for what is equal on all workers, such as the
      `lax.pmean` of a loss.
    mesh: None: the workers are mapped by `jax.vmap`, on one device or wherever their arrays lie.
      Otherwise a mesh with the axes named, whose sizes are the number of workers: one worker to
      each of its places, by `jax.shard_map` with `check_vma=True` (a single one by `jax.vmap`, so
      that a run goes on when one worker is left). Its other axes are left to XLA,
      over which a worker's own arrays may be sharded. Make all its axes Auto; or all Explicit, but
      then JAX before 0.11.2 gathers arrays that are sharded over the other axes in every step.

  Returns:
    The mapped step, to be given to `jax.jit`.

  Raises:
    ValueError: for axes that the mesh does not have, or several without a mesh; when called, for a
      leaf without a leading axis of workers, and with a mesh for a result that is said to be equal
      on all workers and may differ.

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
      raise TypeError(
        f"map_workers: arguments are mapped by their position, got {', '.join(kwargs)} by name."
        " Bind what is the same for all workers before, map_workers(functools.partial(step,"
        " name=value))."
      )
    leaves, treedef = jax.tree.flatten(args)
    # vmap and shard_map take layouts as trees that match the arguments. Flat lists of what is a
    # worker's own and of what is shared need two entries, whatever the trees are.
    is_own = _own_flags("in_axes", in_axes, args)
    _check_stacked(args, is_own, num_workers)
    results, name = {}, _AxisNameInBoxes(names)
    # One worker's boxes do not name the axis of workers, as the center's do not.
    one = jax.tree.structure(_renamed_where(treedef.unflatten(is_own), args, name.taken_off))

    def one_worker(own, shared):
      own, shared = iter(own), iter(shared)
      out = step(*one.unflatten([next(own if flag else shared) for flag in is_own]))
      # The structure of the results is known when the step has been traced, and not before: it is
      # left here for the code below, which runs afterwards.
      results["is_own"] = flags = _own_flags("out_axes", out_axes, out)
      found, plain = jax.tree.flatten(out)
      named = _renamed_where(plain.unflatten(flags), out, name.put_back)
      results["treedef"] = jax.tree.structure(named)
      _check_shared(out, flags, names)
      return _split(found, flags)

    try:
      own, shared = map(iter, _map(one_worker, names, mesh)(*_split(leaves, is_own)))
    except ValueError as error:
      if "out_axes is None" not in str(error):
        raise
      raise ValueError(_one_value_for_all("one of the results is", names)) from error
    merged = [next(own if flag else shared) for flag in results["is_own"]]
    return results["treedef"].unflatten(merged)

  return mapped


class _AxisNameInBoxes:
  """The name that stacked boxes have for the axis of workers, taken off and put back."""

  def __init__(self, names: tuple[Hashable, ...]):
    self.names, self.found = names, ()

  def taken_off(self, tree: Tree) -> Tree:
    return _paths.renamed_axes(tree, self._without)

  def put_back(self, tree: Tree) -> Tree:
    return _paths.with_axis(tree, *self.found) if self.found else tree

  def _without(self, names, leaf):
    # Boxes may have been stacked without a name, as `jax.tree.map` does it.
    if len(names) < np.ndim(leaf) and names[0] not in (*self.names, self.names):
      return names
    self.found = names[:1]
    return names[1:]


def _map(one_worker, names, mesh):
  """`one_worker(own, shared)` over the leading axis of what is its own."""
  if mesh is None:
    return jax.vmap(one_worker, in_axes=(0, None), out_axes=(0, None), axis_name=names[0])
  kinds = dict(zip(mesh.axis_names, mesh.axis_types))
  is_explicit = any(kinds[name] == AxisType.Explicit for name in names)
  if _num_places(names, mesh) == 1:
    return _alone(one_worker, names, mesh, is_explicit)
  specs = PartitionSpec(names), PartitionSpec()

  def in_place(own, shared):
    # shard_map leaves each worker's leading axis in place, of length one.
    own, shared = one_worker([x[0] for x in own], shared)
    return [jnp.expand_dims(x, 0) for x in own], shared

  sharded = jax.jit(
    jax.shard_map(
      in_place, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=frozenset(names)
    ),
    inline=True,
  )

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
    own, shared = (
      jax.tree.map(lambda x: x[(0,) * len(names)], part) for part in bound(own, shared)
    )
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
      " every step, where shard_map begins and where it ends. Make the mesh with AxisType.Auto:"
      " jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names)).",
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
    raise ValueError(
      "map_workers: axis_name must be one axis, or with a mesh one or more of its axes; got"
      f" {names}"
    )
  if mesh is None:
    return None
  missing = [name for name in names if name not in mesh.shape]
  if missing:
    raise ValueError(
      f"map_workers: mesh has the axes {mesh.axis_names}, and not {missing}. Pass a mesh with an"
      " axis for the workers: jax.make_mesh((num_workers,), (axis_name,))."
    )
  return math.prod(mesh.shape[name] for name in names)


def _own_flags(name, axes, tree):
  """For each leaf of a tree whether it has an axis of workers."""
  axes = tuple(axes) if isinstance(axes, list) else axes
  if any(axis != 0 or isinstance(axis, bool) for axis in jax.tree.leaves(axes)):
    raise ValueError(f"map_workers: {name} must hold 0 and None, got {axes!r}.")

  def of(axis, part):
    return jax.tree.map(lambda _: Holder.SHARED, part) if axis is None else holders(part)

  try:
    found = jax.tree.map(of, axes, tree, is_leaf=lambda x: x is None)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"map_workers: {name} must be 0, None, or have the structure of the"
      f" {'arguments' if name == 'in_axes' else 'results'} or a prefix of it; got {axes!r}."
    ) from error
  return [holder is not Holder.SHARED for holder in jax.tree.leaves(found)]


def _split(leaves, is_own):
  """The leaves that have an axis of workers, and the others."""
  own = [x for x, flag in zip(leaves, is_own, strict=True) if flag]
  return own, [x for x, flag in zip(leaves, is_own) if not flag]


def _check_stacked(args, is_own, num_workers):
  """Raises unless all that is a worker's own has a leading axis of one length."""
  found: dict[int | None, str] = {}
  for (path, leaf), flag in zip(jax.tree.leaves_with_path(args), is_own, strict=True):
    if flag:
      name = f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])} {list(jnp.shape(leaf))}"
      found.setdefault(jnp.shape(leaf)[0] if jnp.shape(leaf) else None, name)
  needed = f"of the {num_workers} workers" if num_workers else "of workers, all of one length"
  wrong = [name for length, name in found.items() if length is None or length != num_workers]
  if None in found or len(found) > 1 or (num_workers and wrong):
    raise ValueError(
      f"map_workers: what is a worker's own must have a leading axis {needed}; got"
      f" {', '.join(wrong)}. stack_workers(tree, num_workers) adds it to parameters and states, of"
      " which each worker gets a copy, and reshape_batch(batch, num_workers) to a batch, of which"
      " each gets a part. Pass None in in_axes for what is one value for all of them."
    )


def _check_shared(out, is_own, names):
  for (path, leaf), flag in zip(jax.tree.leaves_with_path(out), is_own, strict=True):
    if not flag and _axes.varying(leaf) & set(names):
      raise ValueError(_one_value_for_all(f"result{jax.tree_util.keystr(path)} is", names))


def _one_value_for_all(what, names):
  return (
    f"map_workers: {what} to be one value for all workers, but may differ over {names}. Reduce it,"
    " as with lax.pmean, or pass 0 for it in out_axes. If it is a shared field of a state,"
    " something outside may skip a call for one worker alone: put optax.MultiSteps or"
    " optax.apply_if_finite inside elastic_average(...) or local_steps(...)."
  )
