"""Runs one worker's function in every parallel context; trees and optimizers that tests share."""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_wrappers as ow

AXIS = "w"

# The TPU compiler that the numbers in the tests belong to. Others give other numbers.
TPU_COMPILER = "0.0.50.1"


def _tpu_compiler():
  try:
    return importlib.metadata.version("libtpu")
  except importlib.metadata.PackageNotFoundError:
    return None


needs_tpu_compiler = pytest.mark.skipif(
  _tpu_compiler() != TPU_COMPILER,
  reason=f"needs libtpu {TPU_COMPILER}, that of jax[tpu]==0.12.0.1; got {_tpu_compiler()}",
)


def _is_none(x):
  return x is None


def specs_of(axes):
  """The PartitionSpecs for a tree of vmap axes: 0 is the worker's axis, None one value for all."""
  return jax.tree.map(
    lambda a: PartitionSpec() if a is None else PartitionSpec(AXIS), axes, is_leaf=_is_none
  )


def _per_leaf(fun, axes, tree):
  return jax.tree.map(
    lambda a, part: jax.tree.map(lambda x: x if a is None else fun(x), part),
    axes,
    tree,
    is_leaf=_is_none,
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
  """A model that is a pytree and may be called, as those of Equinox."""

  w: Any
  b: Any

  def __call__(self, x):
    raise AssertionError("a model was called for its parameters")


def mesh_of(num_workers, axis_type=AxisType.Auto):
  return jax.make_mesh(
    (num_workers,), (AXIS,), axis_types=(axis_type,), devices=jax.devices()[:num_workers]
  )


def _shard_map(fun, in_axes, out_axes, num_workers, axis_type=AxisType.Auto):
  mesh = mesh_of(num_workers, axis_type)
  mapped = ow.map_workers(fun, AXIS, in_axes=in_axes, out_axes=out_axes, mesh=mesh)
  return _placed(jax.jit(mapped), in_axes, mesh)


def _unchecked(fun, in_axes, out_axes, num_workers, axis_type=AxisType.Auto):
  """shard_map with check_vma=False; each worker's leading axis is removed inside."""
  mesh = mesh_of(num_workers, axis_type)

  def one_worker(*args):
    return _per_leaf(lambda x: x[None], out_axes, fun(*_per_leaf(lambda x: x[0], in_axes, args)))

  specs = {"in_specs": specs_of(in_axes), "out_specs": specs_of(out_axes)}
  sharded = jax.shard_map(one_worker, mesh=mesh, check_vma=False, **specs)
  return _placed(jax.jit(sharded), in_axes, mesh)


def _placed(fun, in_axes, mesh):
  def run(*args):
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(in_axes))
    args = jax.device_get(args)  # to place what is on a device takes a program for each shape
    args = [
      jax.tree.map(lambda s, part: jax.device_put(part, s), sharding, arg)
      for sharding, arg in zip(shardings, args)
    ]
    with jax.set_mesh(mesh):
      # Queued steps can take the threads that the first one waits for.
      return jax.block_until_ready(fun(*args))

  return run


def _sharded_vmap(fun, in_axes, out_axes, num_workers):
  mapped = jax.vmap(fun, in_axes, out_axes, axis_name=AXIS, spmd_axis_name=AXIS)
  return _placed(jax.jit(mapped), in_axes, mesh_of(num_workers))


CONTEXTS = {
  "shard_map": _shard_map,
  "unchecked": _unchecked,
  "explicit": lambda *a: _shard_map(*a, axis_type=AxisType.Explicit),
  "pmap": lambda f, i, o, n: jax.pmap(f, AXIS, in_axes=i, out_axes=o, devices=jax.devices()[:n]),
  "vmap": lambda f, i, o, n: jax.jit(ow.map_workers(f, AXIS, in_axes=i, out_axes=o)),
  "sharded_vmap": _sharded_vmap,
  "explicit_unchecked": lambda *a: _unchecked(*a, axis_type=AxisType.Explicit),
}


def in_context(context, fun, num_workers, in_axes, out_axes):
  """`fun` of one worker, mapped over workers in a context of `CONTEXTS`; arguments and results have
  vmap's shapes."""
  return CONTEXTS[context](fun, in_axes, out_axes, num_workers)


def workers_alike(tx, params, num_workers, replicated=False):
  """Parameters and states of workers that start alike."""
  state = ow.stack_workers(tx.init(params), num_workers, replicated=replicated)
  return params if replicated else ow.stack_workers(params, num_workers), state


def start_of_workers(tx, params, num_workers, replicated=False):
  """`workers_alike` from one program; on the host, from where they are placed without another."""
  start = jax.jit(lambda params: workers_alike(tx, params, num_workers, replicated))
  return jax.device_get(start(params))


@contextlib.contextmanager
def compilations():
  """A list that gets an entry for each program that is compiled in the block; that it does is seen
  at the block's end."""
  events = []

  def listen(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield events
    count = len(events)
    jax.jit(lambda x: x + 1)(np.ones(3, np.float32))
    assert len(events) == count + 1
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def as_numpy(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def assert_close(actual, expected, rtol=1e-6, atol=1e-7):
  """Compares two trees leaf by leaf as float64."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected)):
    np.testing.assert_allclose(
      np.asarray(a, np.float64),
      np.asarray(e, np.float64),
      rtol,
      atol,
      err_msg=jax.tree_util.keystr(path),
    )


def bits(tree):
  """The bytes of every leaf, for exact comparisons."""
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def random_tree(rng, *leading):
  """A small float32 tree with unequal values; each leaf has the given leading axes."""
  shapes = {"dense": {"kernel": (3, 2), "bias": (2,)}, "scale": ()}
  return jax.tree.map(
    lambda shape: np.asarray(rng.normal(size=leading + shape), np.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


RATE = 0.1
SGD = ref.Sgd(RATE, 0.0)


def _mean(axes, inner=SGD):
  return ref.CrossShard(axes, "mean", "propagate", inner)


class Held(NamedTuple):
  """The memory of a compiled step, in copies of the parameters.

  Attributes:
    state: of the optimizer.
    tpu: what XLA writes on a TPU in addition to state and arguments.
    cpu: the same on a CPU, which copies the operands of a select and what a branch passes through.
  """

  state: float
  tpu: float
  cpu: float


@dataclasses.dataclass(frozen=True)
class Wrapped:
  """One public wrapper, for all tables of tests.

  Attributes:
    make: from (inner, axis_name) to the wrapped optimizer, with settings that exercise all it does.
    neutral: from inner to the wrapped optimizer, with settings that make it a no-op on one shard.
    node: from a tuple of axes to the NumPy reference of `make` around SGD with rate RATE.
    held: the memory of a donated step of `make` around Adam on one shard.
    extra_args: the extra args that update needs.
    stacked: whether its updates have a leading axis of towers.
    owned: whether every worker owns its parameters.
    narrow: whether parameters may be narrower than float32.
  """

  make: Callable[..., Any]
  neutral: Callable[..., Any]
  node: Callable[..., Any]
  held: Held
  extra_args: dict[str, Any] = dataclasses.field(default_factory=dict)
  stacked: bool = False
  owned: bool = False
  narrow: bool = True

  def updates(self, tree, num_towers=1):
    """Updates in the form that the wrapper takes."""
    if not self.stacked:
      return tree
    parts = [2 * (k + 1) / (num_towers + 1) for k in range(num_towers)]  # unequal, with mean 1
    return jax.tree.map(lambda leaf: jnp.stack([leaf * part for part in parts]), tree)


LIMIT = 0.7
BALL, WIDE = ow.projections.max_norm(LIMIT), ow.projections.max_norm(1e6)

# Add a new wrapper here; test_contract fails while one is missing.
WRAPPERS = {
  "all_reduce": Wrapped(
    make=lambda inner, a: optax.chain(ow.all_reduce(a), inner),
    neutral=lambda inner: optax.chain(ow.all_reduce(None), inner),
    node=_mean,
    held=Held(2, tpu=0, cpu=0),
  ),
  "cross_shard": Wrapped(
    make=ow.cross_shard,
    neutral=lambda inner: ow.cross_shard(inner, None),
    node=_mean,
    held=Held(2, tpu=0, cpu=0),
  ),
  "gather_towers": Wrapped(
    make=lambda inner, a: ow.gather_towers(ow.cross_shard(inner, a), 2),
    neutral=lambda inner: ow.gather_towers(inner, 1),
    node=lambda a: ref.GatherTowers(2, "mean", _mean(a)),
    held=Held(3, tpu=1, cpu=2),
  ),
  "reduce_towers": Wrapped(
    make=lambda inner, a: ow.reduce_towers(ow.cross_shard(inner, a)),
    neutral=ow.reduce_towers,
    node=lambda a: ref.ReduceTowers("mean", _mean(a)),
    held=Held(2, tpu=0, cpu=1),
    stacked=True,
  ),
  "elastic_average": Wrapped(
    make=lambda inner, a: ow.elastic_average(
      inner, a, communication_period=2, moving_rate=0.1, rho=0.01
    ),
    neutral=lambda inner: ow.elastic_average(inner, None, communication_period=10**6),
    node=lambda a: ref.Elastic(a, 2, 0.1, 0.01, "simultaneous", SGD),
    held=Held(4, tpu=0.77, cpu=2),
    owned=True,
  ),
  "local_steps": Wrapped(
    make=lambda inner, a: ow.local_steps(inner, a, communication_period=2),
    neutral=lambda inner: ow.local_steps(inner, None, communication_period=10**6),
    node=lambda a: ref.LocalSteps(a, 2, None, 0.0, SGD),
    held=Held(2, tpu=1.78, cpu=2),
    owned=True,
  ),
  "diloco": Wrapped(
    make=lambda inner, a: ow.diloco(inner, a, communication_period=2),
    neutral=lambda inner: ow.diloco(inner, None, communication_period=10**6),
    node=lambda a: ref.LocalSteps(a, 2, 0.7, 0.9, SGD),
    held=Held(4, tpu=1.78, cpu=3.5),
    owned=True,
  ),
  "gossip_average": Wrapped(
    make=lambda inner, a: ow.contrib.gossip_average(inner, a, communication_period=2),
    neutral=lambda inner: ow.contrib.gossip_average(inner, None, communication_period=10**6),
    node=lambda a: ref.Gossip(a, 2, "exponential", "adapt_first", SGD),
    held=Held(2, tpu=0, cpu=2),
    owned=True,
  ),
  "primal_average": Wrapped(
    make=lambda inner, a: ow.contrib.primal_average(ow.cross_shard(inner, a), 0.5, 0.2),
    neutral=lambda inner: ow.contrib.primal_average(inner, 1.0, 0.0),
    node=lambda a: ref.PrimalAverage(0.5, 0.2, _mean(a)),
    held=Held(3, tpu=1, cpu=1.25),
    narrow=False,
  ),
  "drop_stale": Wrapped(
    make=lambda inner, a: ow.drop_stale(ow.cross_shard(inner, a), 2, axis_name=a),
    neutral=lambda inner: ow.drop_stale(inner, 9),
    node=lambda a: ref.DropStale(2, a, _mean(a)),
    held=Held(2, tpu=0, cpu=2),
    extra_args={"computed_at": 0},
  ),
  "skip_spikes": Wrapped(
    make=lambda inner, a: ow.contrib.skip_spikes(ow.cross_shard(inner, a), a, sigma=1e9),
    neutral=lambda inner: ow.contrib.skip_spikes(inner, sigma=1e9),
    node=_mean,
    held=Held(2, tpu=0, cpu=2),
  ),
  "staleness_aware": Wrapped(
    make=lambda inner, a: ow.staleness_aware(
      ow.cross_shard(inner, a), ow.staleness.inverse(), max_staleness=2, axis_name=a
    ),
    neutral=lambda inner: ow.staleness_aware(inner, ow.staleness.hinge(b=9)),
    node=lambda a: ref.DropStale(2, a, _mean(a), lambda age: 1 / (1 + age)),
    held=Held(2, tpu=0, cpu=1.75),
    extra_args={"computed_at": 0},
  ),
  "simulate_workers": Wrapped(
    make=lambda inner, a: ow.contrib.simulate_workers(ow.cross_shard(inner, a), 2, [0, 0, 1]),
    neutral=lambda inner: ow.contrib.simulate_workers(inner, 1),
    node=lambda a: ref.SimulateWorkers(2, (0, 0, 1), _mean(a)),
    held=Held(4, tpu=0, cpu=1.25),
  ),
  "project_variables": Wrapped(
    make=lambda inner, a: ow.project_variables(ow.cross_shard(inner, a), BALL),
    neutral=lambda inner: ow.project_variables(inner, WIDE),
    node=lambda a: ref.ClipVariables(LIMIT, False, 1, _mean(a)),
    held=Held(2, tpu=0, cpu=1.25),
  ),
  "clip_variables": Wrapped(
    make=lambda inner, a: ow.clip_variables(ow.cross_shard(inner, a), LIMIT),
    neutral=lambda inner: ow.clip_variables(inner, 1e6),
    node=lambda a: ref.ClipVariables(LIMIT, False, 1, _mean(a)),
    held=Held(2, tpu=0, cpu=1.25),
  ),
}


def mark_own(tree, replicated):
  """Inside shard_map: gives the leaves that each worker holds the type of a per-shard value."""
  axes = ow.worker_axes(tree, replicated=replicated)
  return jax.tree.map(
    lambda a, part: part if a is None else ow.per_shard(part, AXIS), axes, tree, is_leaf=_is_none
  )


def with_kept(state, **fields):
  """An `ExchangeState` of one fragment, with other values in its rule's state."""
  return state.replace(kept=(state.kept[0].replace(**fields),))
