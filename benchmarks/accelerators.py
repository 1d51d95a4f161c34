"""The cost of each wrapper on a TPU and on GPUs, from XLA's programs; no accelerator is needed.

    python benchmarks/accelerators.py --training-step
    python benchmarks/accelerators.py [--platform gpu] [--tree large ...] [--only WRAPPER ...]

Every step is compiled ahead of time for four devices and compared with hand-written code as a user
would write it: leaf by leaf, `lax.cond`, `jnp.where`. For a TPU (v6e, the extra `tpu`) the cost is
XLA's estimated cycles, for GPUs (H100, `pip install "jax[cuda13]"`) the kilobytes that its kernels
read and write. A step that takes the cheapest branch of each conditional, as between
synchronizations, is counted separately from one that takes the most expensive branch, as with a
synchronization. The same versions give the same costs on any machine, except the CPU seconds of
compilation.
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import re
import resource
import sys
import warnings
from collections.abc import Callable
from typing import Any

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
TREES = "four", "transformer", "large", "hundred", "thousand", "small"
parser.add_argument("--platform", choices=["tpu", "gpu"], default="tpu")
parser.add_argument("--tree", nargs="+", choices=TREES, default=TREES[:5], metavar="TREE")
parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
parser.add_argument(
  "--fsdp", action="store_true", help="two workers, each a pod of two devices that divide them"
)
parser.add_argument("--unchecked", action="store_true", help="check_vma=False")
parser.add_argument("--only", nargs="+", metavar="WRAPPER", help="the rows that begin so")
parser.add_argument(
  "--training-step",
  action="store_true",
  help="a whole step of the transformer, forward, backward and update, beside the bare optimizer's",
)
parser.add_argument(
  "--matrices",
  action="store_true",
  help="Muon on 8, 24 and 96 sharded matrices of 1024 x 4096: whole_matrices beside optax.contrib",
)
parser.add_argument("--json", action="store_true", help="figures for a program")


def environment(platform):
  """Selects the platform, before JAX is imported."""
  if platform == "gpu":
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.pop("JAX_PLATFORMS", None)
  else:
    os.environ["JAX_PLATFORMS"] = "cpu"


if __name__ == "__main__":
  environment(parser.parse_args().platform)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from overlap import Program, tpu_devices

import optax_wrappers as ow

# The device data that the compiler for GPUs needs: NVIDIA's data for an H100 SXM.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0" model_str: "sm_9.0" device_address_bits: 64
  ecc_enabled: true name: "NVIDIA H100 80GB HBM3" driver_version: "12.8.0"
  runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

AXIS, INSIDE = "w", "data"
ADAM, SGD = optax.adam(1e-4), optax.sgd(0.1)
PERIOD, LIMIT = 10, 2.0
TOKENS = 8, 1025  # per device, in a training step
UNITS = {"tpu": "cycles", "gpu": "kB"}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def shapes_of(tree):
  """The shapes of the parameters."""
  if tree == "transformer":  # 124 million, layers stacked for a scan
    d, layers = 768, 12
    layer = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d), "norm": (d,)}
    stacked = {name: (layers, *shape) for name, shape in layer.items()}
    return stacked | {"embedding": (50304, d)}
  # Of the others only the first does not fit near a TPU's cores.
  sizes = {"four": (4, 4096), "large": (8, 1024), "hundred": (100, 256), "thousand": (1000, 32)}
  count, width = sizes.get(tree, (12, 128))
  return {f"leaf{i}": (width, width) for i in range(count)}


def transformer_loss(params, tokens):
  """The cross-entropy of the next token, computed in bfloat16; each layer is computed twice."""
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  embedding, layers = params["embedding"], {k: v for k, v in params.items() if k != "embedding"}
  batch, length = tokens[:, 1:].shape
  hidden = embedding.shape[1]

  def normed(x, scale):
    mean_square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * (1 + scale)

  @jax.checkpoint
  def layer(x, layer):
    heads = (normed(x, layer["norm"]) @ layer["qkv"]).reshape(batch, length, 3, hidden // 64, 64)
    attended = jax.nn.dot_product_attention(
      heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True
    )
    x = x + attended.reshape(batch, length, hidden) @ layer["out"]
    return x + jax.nn.gelu(normed(x, layer["norm"]) @ layer["up"]) @ layer["down"], None

  x, _ = lax.scan(layer, embedding[tokens[:, :-1]], layers)
  logits = (x @ embedding.T).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@dataclasses.dataclass(frozen=True)
class Step:
  """A step of an optimizer over a mesh.

  Attributes:
    fun: `(params, state, grads) -> (params, state)`, with each worker's own gradients, or with
      `tokens` in place of `grads`.
    args: its abstract arguments.
    init: makes one worker's state.
    own: for each argument, which leaves differ between workers.
  """

  mesh: Mesh
  fun: Callable[..., Any]
  args: tuple[Any, ...]
  init: Callable[..., Any]
  own: tuple[Any, ...]

  def lower(self):
    with jax.set_mesh(self.mesh):
      return jax.jit(self.fun, donate_argnums=(0, 1)).lower(*self.args)


@dataclasses.dataclass(frozen=True)
class Place:
  """Four devices, the parameters on them, and the mapping of a step over them."""

  mesh: Mesh
  params: dict[str, jax.ShapeDtypeStruct]
  check_vma: bool
  batch: jax.ShapeDtypeStruct | None = None  # of a whole step of the transformer

  @property
  def num_workers(self):
    return self.mesh.shape[AXIS]

  @property
  def num_bytes(self):
    """The bytes of one copy of the parameters."""
    return sum(x.size * x.dtype.itemsize for x in self.params.values())

  def spec(self, x):
    """The spec of a worker's array inside it: its first dimension that is divisible by two.

    Scalars and vectors, such as a histogram of ages, are replicated.
    """
    if INSIDE not in self.mesh.shape or x.ndim < 2:
      return PartitionSpec()
    even = [d for d, n in enumerate(x.shape) if n % self.mesh.shape[INSIDE] == 0]
    return PartitionSpec(*[None] * even[0], INSIDE) if even else PartitionSpec()

  def laid_out(self, tree, is_own):
    """A worker's tree as abstract arrays, stacked where each worker has its own."""

    def leaf(x, own):
      spec, shape = self.spec(x), x.shape
      if own:
        spec, shape = PartitionSpec(AXIS, *spec), (self.num_workers, *shape)
      return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    return jax.tree.map(leaf, tree, is_own)

  def step(self, step, init, state, own_params, own_state):
    """The step over the mesh.

    Args:
      step: of one worker.
      init: makes its state.
      state: abstract, of one worker.
      own_params: whether parameters are a worker's own.
      own_state: the same for each leaf of the state.
    """
    given = self.params if self.batch is None else self.batch
    own = jax.tree.map(lambda _: own_params, self.params), own_state
    own = *own, jax.tree.map(lambda _: True, given)
    specs = jax.tree.map(lambda is_own: PartitionSpec(AXIS) if is_own else PartitionSpec(), own)

    def one(*args):
      args = jax.tree.map(lambda x, is_own: x[0] if is_own else x, args, own)
      if self.batch is not None:
        params, state, tokens = args
        args = params, state, jax.grad(transformer_loss)(ow.per_shard(params, AXIS), tokens)
      return jax.tree.map(lambda x, is_own: x[None] if is_own else x, step(*args), own[:2])

    mapped = jax.shard_map(
      one,
      mesh=self.mesh,
      in_specs=specs,
      out_specs=specs[:2],
      axis_names={AXIS},
      check_vma=self.check_vma or INSIDE in self.mesh.shape,
    )
    args = tuple(map(self.laid_out, (self.params, state, given), own))
    return Step(self.mesh, mapped, args, init, own)


def ours(tx, own=False, averaged=False, **extra_args):
  """A step of an optimizer.

  Args:
    tx: the optimizer.
    own: whether the workers' parameters are their own.
    averaged: whether it receives the mean of the gradients, computed by hand.
    **extra_args: of its update.
  """
  tx = optax.with_extra_args_support(tx)

  def make(place):
    def step(params, state, grads):
      grads = mean(grads) if averaged else grads
      updates, state = tx.update(grads, state, params, **extra_args)
      return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, place.params)
    num_workers = place.num_workers
    stacked = jax.eval_shape(lambda x: ow.stack_workers(x, num_workers, replicated=not own), state)
    is_own = jax.tree.map(lambda x, y: y.ndim > x.ndim, state, stacked)
    # A worker has a share of divided leaves.
    state = jax.tree.map(lambda x, flag: x.update(shape=x.shape[flag:]), stacked, is_own)
    return place.step(step, tx.init, state, own, is_own)

  return make


# Hand-written code. Each is `(init, step)`, and says which values are per worker.


def by_hand(init, step, own=False, own_state=lambda state: False):
  def make(place):
    state = jax.eval_shape(init, place.params)
    flags = own_state(state)
    flags = jax.tree.map(lambda _: flags, state) if isinstance(flags, bool) else flags
    return place.step(step, init, state, own, flags)

  return make


def mean(tree):
  return jax.tree.map(lambda x: lax.pmean(x, AXIS), tree)


def step_of(tx, params, state, grads):
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def mean_by_hand(params, state, grads):
  return step_of(ADAM, params, state, mean(grads))


def chosen(accept, params, updates, new_state, state):
  """The new parameters and state where `accept` holds."""
  updates = jax.tree.map(lambda u: jnp.where(accept, u, jnp.zeros_like(u)), updates)
  state = jax.tree.map(lambda new, old: jnp.where(accept, new, old), new_state, state)
  return optax.apply_updates(params, updates), state


bare = by_hand(ADAM.init, functools.partial(step_of, ADAM), own=True, own_state=lambda state: True)


def zero_start(params):
  """Adam's state of the first rows, as many as a device holds."""
  return ADAM.init(jax.tree.map(lambda x: x[: x.shape[0] // 4], params))


def zero_by_hand(params, state, grads):
  """ZeRO-1: each device has a block of rows of the mean and of the state, and sends its updates."""
  num_rows = {k: x.shape[0] // 4 for k, x in params.items()}
  index = lax.axis_index(AXIS)
  means = {k: lax.psum_scatter(g, AXIS, tiled=True) / 4 for k, g in grads.items()}
  own = {
    k: lax.dynamic_slice_in_dim(x, index * n, n)
    for (k, x), n in zip(params.items(), num_rows.values())
  }
  updates, state = ADAM.update(means, state, own)
  options = {"to": "invarying"} if jax.typeof(index).manual_axis_type.varying else {}
  updates = {k: lax.all_gather(u, AXIS, tiled=True, **options) for k, u in updates.items()}
  return optax.apply_updates(params, updates), state


def norm_by_hand(params, state, grads):
  """The mean, clipped to a norm of 1, of replicated parameters."""
  grads = mean(grads)
  norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values()))
  grads = {k: jnp.where(norm < 1, g, g / norm) for k, g in grads.items()}
  return step_of(ADAM, params, state, grads)


def finite_by_hand(params, state, grads):
  """The mean of the shards whose gradients are finite."""
  is_finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
  count = lax.psum(is_finite.astype(jnp.float32), AXIS)

  def of_these(g):
    total = lax.psum(jnp.where(is_finite, g, jnp.zeros_like(g)), AXIS)
    return total / jnp.maximum(count, 1).astype(g.dtype)

  updates, new_state = ADAM.update(jax.tree.map(of_these, grads), state, params)
  return chosen(count > 0, params, updates, new_state, state)


def late_by_hand(params, state, grads):
  step, inner = state
  accept = step - 0 <= 2
  updates, new = ADAM.update(mean(grads), inner, params)
  params, inner = chosen(accept, params, updates, new, inner)
  return params, (step + accept, inner)


def weighed_by_hand(params, state, grads):
  """Each gradient times 1 / (1 + age)."""
  step, inner = state
  weight = 1 / (1 + step.astype(jnp.float32))
  grads = jax.tree.map(lambda g: g * weight.astype(g.dtype), mean(grads))
  updates, inner = ADAM.update(grads, inner, params)
  return optax.apply_updates(params, updates), (step + 1, inner)


def counted(params):
  return jnp.zeros((), jnp.int32), ADAM.init(params)


def aligned(branch):
  """A branch whose results vary over the same axes as what it replaces (`check_vma`)."""

  def varying(x):
    return jax.typeof(x).manual_axis_type.varying

  def fun(carried):
    return jax.tree.map(
      lambda new, old: lax.pcast(new, tuple(varying(old) - varying(new)), to="varying"),
      branch(carried),
      carried,
    )

  return fun


def add_tower(total, grad):
  return total + grad.astype(total.dtype)


def step_of_towers(carried):
  """The step by two gradients that are summed."""
  params, total, inner = carried
  sums = jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)
  params, inner = step_of(ADAM, params, inner, jax.tree.map(lambda g: g / 2, mean(sums)))
  return params, jax.tree.map(jnp.zeros_like, total), inner


def towers_by_hand(params, state, grads):
  """Two gradients of a device summed, with one all-reduce and one step in the second call."""
  tower, total, inner = state
  carried = params, jax.tree.map(add_tower, total, grads), inner
  carried = lax.cond(tower == 1, aligned(step_of_towers), lambda carried: carried, carried)
  return carried[0], ((tower + 1) % 2, *carried[1:])


def earlier_by_hand(params, state, grads):
  """The first of `towers_by_hand`, in a program of its own."""
  tower, total, inner = state
  return params, (tower + 1, jax.tree.map(add_tower, total, grads), inner)


def last_by_hand(params, state, grads):
  """The second."""
  tower, total, inner = state
  params, *rest = step_of_towers((params, jax.tree.map(add_tower, total, grads), inner))
  return params, (jnp.zeros_like(tower), *rest)


def towers_start(params):
  total = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  return jnp.zeros((), jnp.int32), total, ADAM.init(params)


def only_total(state):
  """Each device has its own accumulator."""
  return False, jax.tree.map(lambda _: True, state[1]), jax.tree.map(lambda _: False, state[2])


def rounds_by_hand(exchange):
  """Local steps of Adam with a synchronization, of `(params, center, outer)`, in a branch."""

  def step(params, state, grads):
    count, inner, center, outer = state
    updates, inner = ADAM.update(grads, inner, params)
    carried = optax.apply_updates(params, updates), center, outer

    is_due = count % PERIOD == PERIOD - 1
    carried = lax.cond(is_due, aligned(exchange), lambda carried: carried, carried)
    return carried[0], (count + 1, inner, *carried[1:])

  return step


def local_by_hand(carried):
  params, center, outer = carried
  return mean(params), center, outer


def diloco_by_hand(carried):
  params, center, outer = carried
  difference = mean(jax.tree.map(jnp.subtract, center, params))
  updates, outer = OUTER.update(difference, outer, center)
  center = optax.apply_updates(center, updates)
  return center, center, outer


def elastic_by_hand(carried):
  params, center, outer = carried
  rate = 0.9 / 4
  elastic = jax.tree.map(lambda x, c: rate * (x - c), params, center)
  center = jax.tree.map(lambda c, e: c + lax.psum(e, AXIS), center, elastic)
  return jax.tree.map(jnp.subtract, params, elastic), center, outer


def round_start(has_center, has_outer):
  def init(params):
    center = params if has_center else {}
    outer = OUTER.init(params) if has_outer else ()
    return jnp.zeros((), jnp.int32), ADAM.init(params), center, outer

  return init


def only_inner(state):
  """In a hand-written round, only the inner state is per worker."""
  _, inner, *others = state
  return False, jax.tree.map(lambda _: True, inner), *jax.tree.map(lambda _: False, others)


def clip_by_hand(inner):
  """Clips columns to norm 2; the result may be above it by rounding."""

  def step(params, state, grads):
    updates, state = inner.update(mean(grads), state, params)

    def clip(x):
      square = jnp.sum(jnp.square(x.astype(jnp.float32)), 0, keepdims=True)
      return (x * jnp.minimum(1, LIMIT * lax.rsqrt(square + 1e-30))).astype(x.dtype)

    return jax.tree.map(clip, optax.apply_updates(params, updates)), state

  return step


@dataclasses.dataclass(frozen=True)
class Row:
  """A wrapper, the code it is compared with, and its goals.

  Attributes:
    make: from a `Place` to its `Step`.
    base: the hand-written code.
    between: the goal for a step with the cheapest branches, relative to base; None: not compared.
    exchange: the goal for a step with the most expensive branches, relative to base.
    calls: the goal for `num_calls`, one with the most expensive branches, relative to base.
    temporaries: the goal for memory in addition to base, in copies of the parameters.
  """

  make: Callable[[Place], Step]
  base: Callable[[Place], Step]
  between: float | None = None
  exchange: float | None = None
  calls: float | None = None
  temporaries: float = 0.1
  num_calls: int = 1


def reduced(inner):
  return ow.cross_shard(inner, AXIS)


def rows():
  round_goals = {"between": 1.15, "exchange": 1.25, "temporaries": 0.3}
  averaged = by_hand(ADAM.init, mean_by_hand)
  late = {"computed_at": jnp.zeros((), jnp.int32)}
  towers = ow.gather_towers(reduced(ADAM), 2)
  diloco = ow.diloco(ADAM, AXIS, communication_period=PERIOD)
  elastic = ow.elastic_average(ADAM, AXIS, communication_period=PERIOD, moving_rate=0.9 / 4)
  diloco_hand = by_hand(
    round_start(True, True), rounds_by_hand(diloco_by_hand), own=True, own_state=only_inner
  )
  elastic_hand = by_hand(
    round_start(True, False), rounds_by_hand(elastic_by_hand), own=True, own_state=only_inner
  )
  local_hand = by_hand(
    round_start(False, False), rounds_by_hand(local_by_hand), own=True, own_state=only_inner
  )

  def towers_row(last, hand, **goals):
    mine = ours(towers, last=last)
    return Row(mine, by_hand(towers_start, hand, own_state=only_total), **goals)

  def clip_rows(name, inner):
    tx = ow.clip_variables(inner, LIMIT, axes=0)
    hand = by_hand(inner.init, clip_by_hand(inner))
    mine = ours(tx, averaged=True)
    return {f"clip_variables, {name}": Row(mine, hand, calls=1.4)}

  return {
    "cross_shard": Row(ours(reduced(ADAM)), averaged, calls=1.0, temporaries=0.01),
    "all_reduce": Row(
      ours(optax.chain(ow.all_reduce(AXIS), ADAM)), averaged, calls=1.0, temporaries=0.01
    ),
    'cross_shard(nonfinite="drop")': Row(
      ours(ow.cross_shard(ADAM, AXIS, nonfinite="drop")),
      by_hand(ADAM.init, finite_by_hand),
      calls=1.0,
    ),
    "cross_shard(shard_state=True)": Row(
      ours(ow.cross_shard(ADAM, AXIS, shard_state=True)),
      by_hand(zero_start, zero_by_hand, own_state=lambda s: jax.tree.map(lambda x: x.ndim > 0, s)),
      calls=1.05,
    ),
    "clip_by_global_norm": Row(
      ours(ow.cross_shard(optax.chain(ow.clip_by_global_norm(1.0), ADAM), AXIS)),
      by_hand(ADAM.init, norm_by_hand),
      calls=1.02,
    ),
    "drop_stale": Row(
      ours(ow.drop_stale(ADAM, 2), averaged=True, **late),
      by_hand(counted, late_by_hand),
      calls=1.02,
    ),
    "staleness_aware": Row(
      ours(ow.staleness_aware(ADAM, ow.staleness.inverse()), averaged=True, **late),
      by_hand(counted, weighed_by_hand),
      calls=1.02,
    ),
    "gather_towers": Row(
      ours(towers),
      by_hand(towers_start, towers_by_hand, own_state=only_total),
      calls=1.05,
      temporaries=0.3,
      num_calls=2,
    ),
    "gather_towers, last=False": towers_row(False, earlier_by_hand, calls=1.0),
    "gather_towers, last=True": towers_row(True, last_by_hand, calls=1.03),
    "local_steps": Row(
      ours(ow.local_steps(ADAM, AXIS, communication_period=PERIOD), own=True),
      local_hand,
      **round_goals,
    ),
    "diloco": Row(ours(diloco, own=True), diloco_hand, **round_goals),
    "diloco, exchange=False": Row(
      ours(diloco, own=True, exchange=False), bare, calls=1.0, temporaries=0.01
    ),
    "elastic_average": Row(ours(elastic, own=True), elastic_hand, **round_goals),
    "elastic_average, exchange=False": Row(
      ours(elastic, own=True, exchange=False), bare, calls=1.0, temporaries=0.01
    ),
    **clip_rows("Adam", ADAM),
    **clip_rows("SGD", SGD),
  }


# The cost of a compiled program.


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of one step.

  Attributes:
    between: cycles, or kilobytes, of a step with the cheapest branches: between synchronizations.
    exchange: of a step with the most expensive branches.
    kernels: between synchronizations.
    temporaries: bytes in addition to arguments and results.
    sent: bytes that a device hands to collectives, in every step and in a synchronization.
    seconds: CPU seconds of compilation.
  """

  between: int
  exchange: int
  kernels: int
  temporaries: int
  sent: tuple[int, int]
  seconds: float


_KERNEL = re.compile(r" (?:fusion|custom-call|copy|copy-start)\(")
_LOOP = re.compile(r" while\(.*? body=%?([\w.\-]+)")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)")
_MOVES = "fusion", "copy", "custom-call", "copy-start", "concatenate", "slice", "reduce"


def cost(lowered, platform):
  start = resource.getrusage(resource.RUSAGE_SELF)
  compiled = lowered.compile()
  end = resource.getrusage(resource.RUSAGE_SELF)
  return cost_of(compiled, platform, end.ru_utime - start.ru_utime)


def cost_of(compiled, platform, seconds=0.0):
  program = Program(compiled.as_text())
  (entry,) = (name for name, body in program.bodies.items() if body.startswith("ENTRY"))
  of = _cycles if platform == "tpu" else _kilobytes
  sends = ow.inspect.compiled_collectives(compiled)
  return Cost(
    _taken(program, entry, of, min),
    _taken(program, entry, of, max),
    _taken(program, entry, lambda body: len(_KERNEL.findall(body)), min),
    compiled.memory_analysis().temp_size_in_bytes,
    tuple(
      sum(c.num_bytes for c in sends if c.conditional == is_exchange)
      for is_exchange in (False, True)
    ),
    seconds,
  )


def _taken(program, name, of, which):
  """The cost of a computation if each conditional takes its cheapest, or its most expensive,
  branch. A loop without a constant trip count contains a synchronization: it runs at most once."""
  body = program.bodies[name]
  total = of(body)
  for line in body.splitlines():
    if branches := program.branches(line):
      total += which(_taken(program, branch, of, which) for branch in branches)
    elif loop := _LOOP.search(line):
      turns = program.turns(line)
      turns = which(0, 1) if turns is None else turns
      total += turns * _taken(program, loop[1], of, which)
  return total


def _cycles(body):
  return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', body)))


def _kilobytes(body):
  """The kilobytes that a computation's kernels read and write; a slice reads only its result."""
  sizes, total = {}, 0
  for line in body.splitlines()[1:]:
    found = _LINE.match(line)
    if not found:
      continue
    name, shape, op, operands = found.groups()
    sizes[name] = ow.inspect._num_bytes(shape)
    if op in _MOVES:
      written = sizes[name] // (2 if op == "copy-start" else 1)
      operands = [operand.strip().lstrip("%") for operand in operands.split(",")]
      read = sum(sizes.get(operand, 0) for operand in operands)
      total += written + (written if "slice" in line.split("metadata")[0] else read)
  return total // 1000


def devices_of(platform):
  if platform == "tpu":
    return tpu_devices("v6e:2x2")
  return topologies.get_topology_desc(
    platform="cuda", topology_name="", target_config=H100, topology="1x1x4"
  ).devices


def compared(row, place, platform):
  """The costs of a row and of its base, and its ratios with their goals."""
  mine, base = (cost(make(place).lower(), platform) for make in (row.make, row.base))

  def ratio(of):
    return of(mine) / max(1, of(base))

  found = {
    "between": ratio(lambda cost: cost.between),
    "exchange": ratio(lambda cost: cost.exchange),
    "calls": ratio(lambda cost: (row.num_calls - 1) * cost.between + cost.exchange),
  }
  goals = {what: getattr(row, what) for what in found}
  figures = {what: (found[what], goal) for what, goal in goals.items() if goal is not None}
  figures["temporaries"] = (mine.temporaries - base.temporaries) / place.num_bytes, row.temporaries
  if len(place.params) >= 1000:
    figures["compilation"] = mine.seconds / base.seconds, 1.3
  return mine, base, figures


def chosen_rows(args):
  """The selected names and rows."""
  return [(n, r) for n, r in rows().items() if not args.only or n.startswith(tuple(args.only))]


def place_of(args, devices, tree, dtype, with_tokens=False):
  shape, names = ((2, 2), (AXIS, INSIDE)) if args.fsdp else ((len(devices),), (AXIS,))
  axis_types = (AxisType.Auto,) * len(names)
  mesh = Mesh(np.array(devices).reshape(shape), names, axis_types=axis_types)
  params = {k: jax.ShapeDtypeStruct(v, dtype) for k, v in shapes_of(tree).items()}
  batch = jax.ShapeDtypeStruct(TOKENS, "int32") if with_tokens else None
  return Place(mesh, params, not args.unchecked, batch)


def measure(args, devices):
  """Yields for every row: tree and dtype, place, name, costs, and ratios with their goals."""
  for tree in args.tree:
    for dtype in args.dtype:
      place = place_of(args, devices, tree, dtype)
      for name, row in chosen_rows(args):
        yield (tree, dtype), place, name, *compared(row, place, args.platform)


def print_titles(*titles):
  print("|", " | ".join(titles), "|")
  print("|---" * len(titles) + "|")


def training_step(args, devices):
  """The overhead of each wrapper in a step of the transformer, 8 x 1024 tokens per device."""
  place = place_of(args, devices, "transformer", "float32", with_tokens=True)
  base = cost(bare(place).lower(), args.platform)
  print(f"{args.platform}: the step with bare Adam is {base.between:,} {UNITS[args.platform]}")
  print(f"and compiles in {base.seconds:.0f} s of CPU time\n")
  between, sent = "between synchronizations", ("MB sent between", "in one")
  print_titles("wrapper", between, "with one", *sent, "copies", "compile time")
  for name, row in chosen_rows(args):
    found = cost(row.make(place).lower(), args.platform)
    cells = [
      f"{found.between / base.between - 1:+.1%}",
      f"{found.exchange / base.between - 1:+.1%}",
      *(f"{sent / 1e6:.0f}" for sent in found.sent),
      f"{(found.temporaries - base.temporaries) / place.num_bytes:+.2f}",
      f"{found.seconds / base.seconds:.2f}",
    ]
    print("|", " | ".join((name, *cells)), "|", flush=True)


def muon_step(tx, mesh, spec, num_matrices, shape=(1024, 4096)):
  """The lowered step of an optimizer on sharded matrices, with results sharded like the inputs."""

  def placed(tree, specs):
    return jax.tree.map(lambda x, spec: x.update(sharding=NamedSharding(mesh, spec)), tree, specs)

  params = {f"layer{i}": jax.ShapeDtypeStruct(shape, "float32") for i in range(num_matrices)}
  specs = dict.fromkeys(params, spec)
  state = jax.eval_shape(tx.init, params)
  params, state = placed(params, specs), placed(state, ow.specs(state, specs, mesh=mesh))
  step = functools.partial(step_of, tx)
  laid_out = jax.tree.map(lambda x: x.sharding, (params, state))
  return jax.jit(step, donate_argnums=(0, 1), out_shardings=laid_out).lower(params, state, params)


def matrices(args, devices):
  """Muon on matrices sharded by rows or by columns, on four devices."""
  mesh = Mesh(np.array(devices), (INSIDE,), axis_types=(AxisType.Auto,))
  muon = optax.contrib.muon(1e-3)
  sent = "MB sent", "collectives", "temporaries, MB"
  print_titles("sharded", "matrices", "optimizer", UNITS[args.platform], *sent)
  for spec in (PartitionSpec(INSIDE), PartitionSpec(None, INSIDE)):
    for count in (8, 24, 96):
      dealt = ow.whole_matrices(muon, INSIDE, specs=spec, mesh=mesh)
      for name, tx in {"whole_matrices(muon)": dealt, "muon": muon}.items():
        lowered = muon_step(tx, mesh, spec, count)
        found = cost(lowered, args.platform)
        sends = ow.inspect.compiled_collectives(lowered.compile())
        kinds = collections.Counter(one.kind for one in sends)
        cells = (
          f"{found.exchange:,}",
          f"{sum(one.num_bytes for one in sends) / 1e6:,.0f}",
          ", ".join(f"{n} {kind}s" for kind, n in kinds.items()),
          f"{found.temporaries / 1e6:,.0f}",
        )
        print(
          "|",
          " | ".join(("rows" if spec[0] else "columns", str(count), name, *cells)),
          "|",
          flush=True,
        )


def main():
  args = parser.parse_args()
  warnings.filterwarnings("ignore")
  try:
    devices = devices_of(args.platform)
  except Exception as error:
    needed = "optax_wrappers[tpu]" if args.platform == "tpu" else "jax[cuda13]"
    first_line = str(error).splitlines()[0]
    sys.exit(f"not run: no compiler for a {args.platform} here ({first_line}). Install {needed}.")
  if args.training_step or args.matrices:
    (training_step if args.training_step else matrices)(args, devices)
    return
  figures_of, unit = {}, UNITS[args.platform]
  titles = f"{unit} of a step", "with an exchange", "kernels", "temporaries, trees", "seconds"
  for key, place, name, mine, base, figures in measure(args, devices):
    figures_of.setdefault(" ".join(key), {})[name] = {k: ratio for k, (ratio, _) in figures.items()}
    if args.json:
      continue
    if len(figures_of[" ".join(key)]) == 1:
      print(f"\n{args.platform}, {', '.join(key)}: with the wrapper (by hand)\n")
      print_titles("wrapper", *titles, "missed")
    tree = place.num_bytes
    cells = [
      f"{mine.between:,} ({base.between:,})",
      f"{mine.exchange:,} ({base.exchange:,})",
      f"{mine.kernels} ({base.kernels})",
      f"{mine.temporaries / tree:.2f} ({base.temporaries / tree:.2f})",
      f"{mine.seconds:.1f} ({base.seconds:.1f})",
    ]
    missed = [
      f"{what} {ratio:.2f}, goal {goal:.2f}"
      for what, (ratio, goal) in figures.items()
      if ratio > goal + 0.005
    ]
    print("|", " | ".join((name, *cells, "; ".join(missed))), "|", flush=True)
  if args.json:
    print(json.dumps(figures_of))


if __name__ == "__main__":
  main()
