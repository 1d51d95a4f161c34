"""The holder of each leaf of a state, and the layout of states over workers."""

import dataclasses
import enum
import functools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from optax_wrappers._core import (
  _axes,
  _checks,
  _numerics,
  _paths,
  _pods,
  _shares,
  _states,
  _weights,
)
from optax_wrappers._core._states import declared
from optax_wrappers._core._types import AxisName, AxisNames, Tree
from optax_wrappers._workers._exchange_state import ExchangeState

# Optax's states (named tuples) with a conditional that each worker may or may not take.
MAY_SKIP = (
  optax.ApplyIfFiniteState,
  optax.MultiStepsState,
  optax.ConditionallyTransformState,
  optax.ConditionallyMaskState,
)
# States whose fields have different holders.
_LOOKED_INTO = (_states.State, optax.InjectStatefulHyperparamsState, *MAY_SKIP)


class Holder(enum.Enum):
  """The holder of a leaf of a state."""

  SHARED = "one value for all workers or shards"
  OWN = "a separate value for each of them"
  DIVIDED = "a share of one value for each of them"
  PART = "a separate value for each of them; their sum must be kept"
  VOTE = "a separate value for each of them; their mean must be kept"


class _Place(NamedTuple):
  """The surroundings of a state, which determine the holders of its leaves."""

  is_replicated: bool  # all shards have one set of parameters
  is_reduced: bool = False  # updates are reduced over the shards before they arrive here
  # Inside a worker's own state. What workers share elsewhere is their own here, because each has a
  # whole state.
  is_own: bool = False
  is_divided: bool = False  # the exchange around it divides its center over the workers
  may_skip: bool = False  # some workers may skip a call that others make: counters differ

  def inside(self, node: Any) -> "_Place":
    """The surroundings of the fields of `node`."""
    # Workers that own their parameters decide by their own gradients. Shards with replicated
    # parameters all decide the same.
    may_skip = isinstance(node, MAY_SKIP) or getattr(node, "may_skip", False)
    return self._replace(
      is_divided=node.is_divided if isinstance(node, ExchangeState) else self.is_divided,
      may_skip=self.may_skip or (self.is_own and may_skip),
    )


@functools.cache
def _holder_by_word(place: _Place) -> dict[str | None, Holder]:
  """The holder of a field by its word in `states.field`; without an entry, its value decides."""
  of_shard = Holder.SHARED if place.is_reduced else Holder.OWN
  of_sum = Holder.SHARED if place.is_reduced else Holder.VOTE
  alone: dict[str | None, Holder] = {
    "shared": Holder.SHARED,
    "per_shard": of_shard,
    "gathered": of_sum,
    "counted": of_sum,
    "center": Holder.DIVIDED if place.is_divided else Holder.SHARED,
    "divided": Holder.DIVIDED,
    "summed": Holder.PART,
  }
  by_word = dict.fromkeys(alone, Holder.OWN) if place.is_own else alone
  # A counter of calls stays equal even inside workers' own states, because they call together.
  return by_word | {"lockstep": Holder.OWN if place.may_skip else Holder.SHARED}


def _fields_of(node):
  """The fields of a composite state, and the words of those that have one."""
  if isinstance(node, _states.State):
    return node.fields(), {name: x.get("whose") for name, x in declared(type(node)).items()}
  # Injected hyperparameters of an exchange of workers are shared by all of them.
  is_injected = isinstance(node, optax.InjectStatefulHyperparamsState)
  is_of_exchange = is_injected and isinstance(node.inner_state, ExchangeState)
  shared = set(node._fields) - {"inner_state"} if is_of_exchange else ()
  return node._asdict(), dict.fromkeys(shared, "shared")


def _by_reductions(word, node, by_word):
  """The word for a field that depends on the reductions in the state."""
  if word == "reduced":
    return "divided" if node.reduced.is_divided else word
  means = [reduced.is_mean for _, reduced in _weights.inside(node.inner_state)]
  if not means or by_word[word] is not Holder.VOTE:
    return "per_shard"
  # Each shard's mean over calls is still divided by the number of its calls before it is summed.
  return "summed" if word == "gathered" and not all(means) else word


def holders(opt_state: Tree, *, replicated: bool = False) -> Tree:
  """The same structure with the `Holder` of each leaf. All layouts are derived from it."""
  return _holders(_Place(replicated), opt_state)


def _holders(place, tree):
  alone = Holder.SHARED if place.is_replicated else Holder.OWN

  def visit(node):
    fields, words = _fields_of(node)
    inside, by_word = place.inside(node), _holder_by_word(place)
    for name, value in fields.items():
      word = words.get(name)
      if word in ("reduced", "gathered", "counted"):
        word = _by_reductions(word, node, by_word)
      holder = by_word.get(word)
      if holder is None:
        is_reduced = word == "reduced" and bool(node.reduced.names)
        is_own = word == "owned" and not place.is_replicated
        surroundings = inside._replace(
          is_reduced=place.is_reduced or is_reduced, is_own=place.is_own or is_own
        )
        fields[name] = _holders(surroundings, value)
      else:
        # A scalar, such as a count, cannot be divided.
        pair = Holder.SHARED if holder is Holder.DIVIDED else holder, holder
        fields[name] = jax.tree.map(lambda x, pair=pair: pair[np.ndim(x) > 0], value)
    return type(node)(**fields)

  return jax.tree.map(
    lambda x: visit(x) if isinstance(x, _LOOKED_INTO) else alone,
    tree,
    is_leaf=lambda x: isinstance(x, _LOOKED_INTO),
  )


def _by_holder(opt_state, replicated, shared, own, divided=None):
  """Applies to each leaf the function for its holder; `divided` is `own` if not given."""
  of = dict.fromkeys(Holder, own) | {Holder.SHARED: shared, Holder.DIVIDED: divided or own}
  whose = holders(opt_state, replicated=replicated)
  return jax.tree.map(lambda holder, x: of[holder](x), whose, opt_state)


def stack_workers(
  opt_state: Tree, num_workers: int, *, replicated: bool = False, axis_name: Hashable | None = None
) -> Tree:
  """Adds a leading axis for the workers to each leaf of which every worker has its own copy.

  Args:
    opt_state: one worker's optimizer state, as `init` returns it. In a tree without wrapper states,
      such as parameters, all leaves get the axis.
    num_workers: the length of the new axis.
    replicated: False for workers with their own parameters. True for shards with replicas of one
      set of parameters: only leaves that differ between shards get the axis, such as
      `GatherTowersState.accumulated` and a codec's residuals.
    axis_name: the axis's name in Flax's boxes, which name axes by position; `map_workers` removes
      it inside the step. None: boxes do not change.

  Returns:
    The same structure; leaves with the axis are `[num_workers, ...]`, all equal. Divided leaves,
    such as the center with `shard_center`, are split into shares on the same axis.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), "workers")
    >>> state = ow.stack_workers(tx.init(jnp.zeros(3)), 4)
    >>> state.center.shape, state.inner_state[0].trace.shape
    ((3,), (4, 3))
    >>> ow.worker_axes(state).inner_state[0]
    TraceState(trace=0)
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
  return renamed_where(is_own, stacked, lambda names, _: (axis_name, *names))


def renamed_where(is_own, tree, rename):
  """`_paths.renamed_axes` of the boxes whose leaf has an axis of workers."""
  boxes = _paths.box_classes()

  def renamed(box, flag):
    return _paths.renamed_axes(box, rename) if any(jax.tree.leaves(flag)) else box

  return jax.tree.map(
    lambda x, flag: renamed(x, flag) if isinstance(x, boxes) else x,
    tree,
    is_own,
    is_leaf=lambda x: isinstance(x, boxes),
  )


def worker_axes(opt_state: Tree, *, replicated: bool = False) -> Tree:
  """The axis of the workers in every leaf of a stacked state, for vmap and pmap.

  Args:
    opt_state: the state, stacked or not; only its structure is read.
    replicated: see `stack_workers`.

  Returns:
    The same structure: 0 for leaves with the workers' axis, None for shared ones.
  """
  return _by_holder(opt_state, replicated, lambda _: None, lambda _: 0)


def specs(
  opt_state: Tree,
  params: Tree = None,
  *,
  workers: AxisName = None,
  replicated: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
) -> Tree:
  """The `PartitionSpec` of every leaf of a state, for shard_map and NamedSharding.

  Inside shard_map the workers' axis is still there, of length one: `x[0]` removes it, `x[None]`
  adds it back.

  Args:
    opt_state: the state of any optimizer, of arrays or `jax.ShapeDtypeStruct`; with `workers`
      stacked, which without `params` does not matter.
    params: the PartitionSpecs of the parameters; of stacked workers those of one, without their
      axis. Leaves that belong to a parameter, by their path, get them, after the workers' axis.
    workers: the mesh axis, or axes, of stacked workers or shards; None: there are none.
    replicated: see `stack_workers`.
    mesh: for `params`; None: the one in use (`jax.set_mesh`). An axis that does not divide a leaf
      as it divides the parameter goes to the first dimension that it divides, if any.

  Returns:
    The same structure: `PartitionSpec(workers)` first for leaves with the workers' axis, then the
    parameter's; `PartitionSpec()` for all others.

  Raises:
    TypeError: if `params` holds anything but PartitionSpecs.
    ValueError: if the mesh is unknown and a worker's devices may not divide its share.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import PartitionSpec as P
    >>> params, layout = {"kernel": jnp.zeros((8, 4))}, {"kernel": P("data")}
    >>> state = jax.eval_shape(optax.adam(0.1).init, params)
    >>> ow.specs(state, layout)[0].mu
    {'kernel': P('data',)}
    >>> tx = ow.diloco(optax.sgd(0.1, momentum=0.9), "pod")
    >>> state = ow.stack_workers(tx.init(params), 2)
    >>> found = ow.specs(state, layout, workers="pod")
    >>> found.center, found.inner_state[0].trace
    ({'kernel': P('data',)}, {'kernel': P('pod', 'data')})
  """
  names = _axes.axis_names(workers)
  replicated = replicated or not names
  stacked = PartitionSpec(*([names] if len(names) > 1 else names))
  leading = _by_holder(opt_state, replicated, lambda _: PartitionSpec(), lambda _: stacked)
  if params is None:
    return leading
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  whose = jax.tree.leaves(holders(opt_state, replicated=replicated))
  return _with_params(leading, opt_state, params, whose, dict(mesh.shape))


def _with_params(specs, opt_state, params, whose, sizes):
  """The specs of a stacked state: the axis of the workers, then the parameters' specs."""
  of_params = _specs_by_path(params)
  of_state = _paths.leaves_with_keys(opt_state)
  whose_param = _paths.OfParams((keys for keys, _ in of_state), of_params)
  leaves: list[PartitionSpec] = []
  unknown: list[str] = []  # moments without a parameter
  used: set[Any] = set()
  columns = of_state, whose, jax.tree.leaves(specs), jax.tree.leaves(_spots(opt_state))
  for (keys, leaf), holder, spec, spot in zip(*columns, strict=True):
    # The content of slots that are sharded over devices is not sharded further.
    path = None if any(spot.slots) else whose_param.path(keys)
    used.add(path)
    if path is None and spot.is_moment and np.ndim(leaf) > len(spec):
      unknown.append("/".join(keys))
    # A count for each worker has only the workers' axis, whatever its path.
    whole = PartitionSpec(*spec, *spot.slots, *of_params.get(path, ()))
    whole = whole if np.ndim(leaf) >= len(whole) else spec
    if sizes:
      whole = _fitted(whole, np.shape(leaf), sizes)
    elif holder is Holder.DIVIDED:
      _check_divides("/".join(keys), whole, leaf)
    leaves.append(whole)
  unused = ["/".join(keys) for keys in of_params if keys not in used]
  if unknown and unused:
    raise ValueError(
      f"specs: {unknown[0]} of the state belongs to no parameter of params, and the state has"
      f" nothing of {unused[0]}. Correct the names."
    )
  return jax.tree.structure(opt_state).unflatten(leaves)


def _specs_by_path(params):
  of_params = dict(_paths.leaves_with_keys(params))
  for keys, spec in of_params.items():
    if not isinstance(spec, PartitionSpec):
      name = "/".join(keys)
      raise TypeError(f"specs: params must hold PartitionSpecs, got {spec!r} for {name}.")
  return of_params


def _fitted(spec, shape, sizes):
  """A valid spec for an array of this shape."""
  cuts = [_axes.names_in(spec, [d]) for d in range(len(spec))]
  sizes = {name: sizes.get(name, 1) for names in cuts for name in names}
  if all(shape[d] % math.prod(sizes[x] for x in names) == 0 for d, names in enumerate(cuts)):
    return spec
  return _pods.fitted(spec, len(shape), sizes, lambda d, num_parts: shape[d] % num_parts == 0)


def _check_divides(name, spec, share):
  """Raises if a worker's devices, whose number is unknown, may not divide its share."""
  num_workers, *shape = np.shape(share)
  most = jax.device_count() // num_workers  # devices of a worker
  for d, n in enumerate(shape):
    if not _axes.names_in(spec, [d + 1]):
      continue
    # They divide the parameter, of which a share may have been padded.
    sizes = range(max(1, (n - 1) * num_workers + 1), n * num_workers + 1)
    wholes = ((*shape[:d], size, *shape[d + 1 :]) for size in sizes)
    cut = [x[d] for x in wholes if _shares.divided_dimension(x, num_workers) == d]
    for k in range(most, 1, -1):
      # Of those that divide their number, or else of a share without padding.
      sizes_here = cut if most % k == 0 else sizes[-1:]
      if n % k and any(size % k == 0 for size in sizes_here):
        raise ValueError(
          f"specs: mesh is needed for {name}, each worker's share of a parameter,"
          f" {list(shape)}: {spec} may not divide it over {k} devices. Pass mesh=mesh."
        )


@dataclasses.dataclass(frozen=True)
class _Spot:
  """Where in a state a leaf is."""

  slots: AxisNames  # the mesh axes of its axes of slots, which come before those of a parameter
  is_moment: bool  # an optimizer of Optax or the like may hold it for a parameter


def _spots(tree, slots=(), is_of_optimizer=True):
  def visit(node):
    if isinstance(node, _states.State):
      inside = *slots, node.slot_names or None
      marks, fields = declared(type(node)), node.fields()
      kinds = {name: inside if marks[name].get("slots") else slots for name in fields}
      return type(node)(**{name: _spots(x, kinds[name], False) for name, x in fields.items()})
    if hasattr(node, "_fields"):
      return type(node)(*(_spots(x, slots) for x in node))
    # The content of slots that are sharded belongs to no parameter.
    is_moment = is_of_optimizer and not any(slots) and _numerics.is_inexact(node)
    return _Spot(slots, is_moment)

  return jax.tree.map(
    visit, tree, is_leaf=lambda x: isinstance(x, _states.State) or hasattr(x, "_fields")
  )
