"""Workers that are whole pods: the parameters of each are sharded over further axes of the mesh.

All forms in which users have them, compared with the same run on one device; what is sent, over
which devices; and states that move to another mesh.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_codecs as ref
from helpers import RATE, WRAPPERS, assert_close, start_of_workers, workers_alike
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

# Before JAX 0.11.2, arrays on an Explicit mesh are gathered at the edge of a shard_map over some of
# its axes: correct, but slow.
GATHERS_AT_EDGES = jax.__version_info__ < (0, 11, 2)

pytestmark = pytest.mark.filterwarnings("ignore:map_workers. the mesh is Explicit:UserWarning")

POD, W = "pod", 2

SHAPES = {"kernel": (8, 16), "layers": (4, 8, 4), "scale": (), "odd": (3,)}

MESHES = {
  "2x2x2": (
    {POD: 2, "data": 2, "model": 2},
    {"kernel": P("data", "model"), "layers": P(None, "data")},
  ),
  "2x4": ({POD: 2, "data": 4}, {"kernel": P("data"), "layers": P(None, None, "data")}),
}


@dataclasses.dataclass(frozen=True)
class Pods:
  """A mesh, and the sharding of one worker's parameters over it."""

  sizes: dict[str, int]
  specs: dict[str, P]

  def mesh(self, kind=AxisType.Auto):
    names = tuple(self.sizes)
    return jax.make_mesh(tuple(self.sizes.values()), names, axis_types=(kind,) * len(names))

  def local_bytes(self, shape, spec):
    """Bytes of one device's part of a variable."""
    parts = np.prod([self.sizes[name] for name in jax.tree.leaves(tuple(spec)) if name])
    return int(4 * np.prod(shape) / parts)

  @property
  def groups(self):
    """The groups of devices in a collective over the pods."""
    numbers = np.arange(np.prod(list(self.sizes.values()))).reshape(self.sizes[POD], -1)
    return tuple(map(tuple, numbers.T.tolist()))


PODS = {
  name: Pods(sizes, {key: specs.get(key, P()) for key in SHAPES})
  for name, (sizes, specs) in MESHES.items()
}


def tree(shapes, rng, *leading):
  return {k: np.float32(rng.normal(size=(*leading, *shape))) for k, shape in shapes.items()}


# The forms. Each maps a `step` for one worker; its first argument is the optimizer, and layouts are
# PartitionSpecs.


def auto(step, axes, specs, pods):
  return ow.map_workers(step, POD, in_axes=axes, out_axes=axes[:2], mesh=pods.mesh())


def explicit(step, axes, specs, pods):
  return ow.map_workers(
    step, POD, in_axes=axes, out_axes=axes[:2], mesh=pods.mesh(AxisType.Explicit)
  )


def sharded_vmap(step, axes, specs, pods):
  return jax.vmap(step, axes, axes[:2], axis_name=POD, spmd_axis_name=POD)


def by_hand(check_vma):
  """Everything manual: each device sees its own part of its worker's parameters."""

  def form(step, axes, specs, pods):
    def is_none(x):
      return x is None

    def per_leaf(fun, axes, tree):
      return jax.tree.map(
        lambda axis, part: part if axis is None else jax.tree.map(fun, part),
        axes,
        tree,
        is_leaf=is_none,
      )

    def one_device(*args):
      return per_leaf(lambda x: x[None], axes[:2], step(*per_leaf(lambda x: x[0], axes, args)))

    return jax.shard_map(
      one_device, mesh=pods.mesh(), in_specs=specs, out_specs=specs[:2], check_vma=check_vma
    )

  return form


FORMS = {
  "auto": auto,
  "explicit": explicit,
  "sharded_vmap": sharded_vmap,
  "manual": by_hand(check_vma=True),
  "manual_unchecked": by_hand(check_vma=False),
}


@dataclasses.dataclass
class Run:
  """An optimizer of workers or shards, which can step in any form."""

  tx: Any
  wrapped: Any
  pods: Pods
  shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: SHAPES)
  num_workers: int = W

  @property
  def params(self):
    return tree(self.shapes, np.random.default_rng(0))

  def init(self, params):
    return workers_alike(self.tx, params, self.num_workers, not self.wrapped.owned)

  def start(self):
    return start_of_workers(self.tx, self.params, self.num_workers, not self.wrapped.owned)

  def grads(self, step):
    return tree(self.shapes, np.random.default_rng(step + 1), self.num_workers)

  def delays(self, step):
    return np.array([step % 2, 2 * step] * (self.num_workers // 2), np.int32)

  def axes(self, state):
    own = self.wrapped.owned
    return (0 if own else None), ow.worker_axes(state, replicated=not own), 0, 0

  def specs(self, state):
    """The layout of everything: a worker's axis first, and then the parameter's own spec."""
    specs = {name: self.pods.specs[name] for name in self.shapes}
    stacked = {name: P(POD, *spec) for name, spec in specs.items()}
    state = ow.specs(state, workers=POD, replicated=not self.wrapped.owned, params=specs)
    return (stacked if self.wrapped.owned else specs), state, stacked, P(POD)

  def step(self, params, state, grads, delay):
    extra = dict(self.wrapped.extra_args)
    if extra:
      extra["computed_at"] = ow.get_state(state, ow.states.StalenessState).step - delay
    updates, state = self.tx.update(self.wrapped.updates(grads, 2), state, params, **extra)
    return optax.apply_updates(params, updates), state

  def on_one_device(self, num_steps):
    carried = self.start()
    axes = self.axes(carried[1])
    fun = jax.jit(jax.vmap(self.step, axes, axes[:2], axis_name=POD))
    for step in range(num_steps):
      carried = fun(*carried, self.grads(step), self.delays(step))
    return carried

  def mesh(self, form):
    return self.pods.mesh(AxisType.Explicit if form == "explicit" else AxisType.Auto)

  def shardings(self, form, args):
    lay = functools.partial(NamedSharding, self.mesh(form))
    return jax.tree.map(lay, self.specs(args[1])[: len(args)])

  def placed(self, form, args):
    return jax.tree.map(jax.device_put, args, self.shardings(form, args))

  def shapes_of_args(self, form):
    """The types of all arguments of a step, with their shardings."""
    start = jax.eval_shape(self.init, self.params)
    args = jax.eval_shape(lambda *args: args, *start, self.grads(0), self.delays(0))
    return jax.tree.map(lambda x, to: x.update(sharding=to), args, self.shardings(form, args))

  def compiled(self, form):
    args = self.shapes_of_args(form)
    fun = FORMS[form](self.step, self.axes(args[1]), self.specs(args[1]), self.pods)
    # Without out_shardings, XLA shards the results as it chooses.
    fun = jax.jit(fun, out_shardings=self.shardings(form, args)[:2])
    with jax.set_mesh(self.mesh(form)):
      return fun.lower(*args).compile()

  def in_form(self, form, num_steps, carried=None, first=0, compiled=None):
    carried, compiled = carried or self.start(), compiled or self.compiled(form)
    for step in range(first, num_steps):
      args = self.placed(form, (*carried, self.grads(step), self.delays(step)))
      carried = jax.block_until_ready(compiled(*args))
    return carried


def make(name, form, pods):
  """The optimizer, and its row: where a worker's axes are manual, a norm must know them."""
  wrapped = WRAPPERS[name]
  if form.startswith("manual") and name in ("clip_variables", "project_variables"):
    reduced = ow.cross_shard(optax.sgd(RATE), POD)
    return ow.clip_variables(reduced, 0.7, axis_name=pods.specs), wrapped
  if name == "skip_spikes":
    names = tuple(pods.sizes) if form.startswith("manual") else POD
    reduced = ow.cross_shard(optax.sgd(RATE), POD)
    tx = ow.contrib.skip_spikes(reduced, names, sigma=1e9)
    # A loss, because the norm of a device's parts is another one.
    update = functools.partial(tx.update, value=1.0)
    return optax.GradientTransformationExtraArgs(tx.init, update), wrapped
  return optax.with_extra_args_support(wrapped.make(optax.sgd(RATE), POD)), wrapped


@functools.cache
def wrapper_on_one_device(name):
  """After three steps without any mesh."""
  return Run(*make(name, "one device", PODS["2x4"]), PODS["2x4"]).on_one_device(3)


@pytest.mark.parametrize("mesh", PODS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_sharded_in_every_form_match_one_device(name, form, mesh):
  pods = PODS[mesh]
  run = Run(*make(name, form, pods), pods)
  found = run.in_form(form, 3)
  expected = wrapper_on_one_device(name)
  assert_close(found, expected, rtol=1e-5, atol=1e-6)
  moved = np.asarray(expected[0]["kernel"]) - run.params["kernel"]
  assert np.abs(moved).min() > 0


# Exchanges: what each form sends, and over which devices.

SGD = optax.sgd(RATE, momentum=0.9)

OPTIONS = {"communication_period": 2, "moving_rate": 0.1}

EXCHANGES = {
  "elastic": lambda: ow.elastic_average(SGD, POD, **OPTIONS, rho=0.01),
  "sequential": lambda: ow.elastic_average(SGD, POD, **OPTIONS, order="sequential"),
  "elastic, divided": lambda: ow.elastic_average(SGD, POD, **OPTIONS, shard_center=True),
  "sequential, divided": lambda: ow.elastic_average(
    SGD, POD, **OPTIONS, order="sequential", shard_center=True
  ),
  "local": lambda: ow.local_steps(SGD, POD, communication_period=2),
  "diloco": lambda: ow.diloco(SGD, POD, communication_period=2),
  "diloco, delayed, in fragments": lambda: ow.diloco(
    SGD, POD, communication_period=2, delay=1, fragments=2
  ),
  "diloco, divided": lambda: ow.diloco(SGD, POD, communication_period=2, shard_center=True),
  "diloco, divided, in fragments": lambda: ow.diloco(
    SGD, POD, communication_period=2, shard_center=True, fragments=2
  ),
}


# If no type tells how a variable is sharded, one of odd length cannot be divided: see
# test_what_is_cut_by_hand_must_be_a_multiple_of_the_workers.
EVEN = {name: shape for name, shape in SHAPES.items() if name != "odd"}


def exchange(name, form, pods):
  shapes = EVEN if form == "manual_unchecked" and "divided" in name else SHAPES
  return Run(EXCHANGES[name](), WRAPPERS["diloco"], pods, shapes)


@functools.cache
def exchange_on_one_device(name, is_even):
  """After four steps, which are two periods."""
  form = "manual_unchecked" if is_even else "auto"
  return exchange(name, form, PODS["2x4"]).on_one_device(4)


def bytes_over_pods(name, form, run):
  """The expected bytes that a device hands to each kind of collective over the pods."""
  parts = {
    key: run.pods.local_bytes(shape, run.pods.specs[key]) for key, shape in run.shapes.items()
  }
  whole = sum(parts.values())
  beside_others = form in ("auto", "explicit")  # Auto or Explicit axes of the mesh
  weight = 0 if "elastic" in name or "sequential" in name else 4
  weight *= 2 if "fragments" in name else 1
  if "divided" not in name:
    if "sequential" not in name:
      return {"all-reduce": whole + weight}
    # Rows of zeros with the worker's own row in its place.
    return {"all-reduce": W * whole} if beside_others else {"all-gather": whole}
  alone = parts.pop("scale")  # a single element is not divided
  if "odd" in parts:
    parts["odd"] += 4  # padding, so that two workers have two elements each
  share = sum(parts.values()) // W
  if "sequential" in name:
    if beside_others:
      return {"all-reduce": W * whole, "collective-permute": share}
    return {"all-gather": whole + share}
  if beside_others:  # both halves in rings of W - 1 messages each
    return {"collective-permute": 2 * share, "all-reduce": alone + weight}
  if form == "sharded_vmap":  # XLA:CPU computes the whole sum, and takes a share of it
    return {"all-gather": share, "all-reduce": W * share + alone + weight}
  return {"all-gather": share, "reduce-scatter": W * share, "all-reduce": alone + weight}


# The Explicit form on one mesh; its wrappers are tested on both.
PLACES = [(form, mesh) for form in FORMS for mesh in PODS if (form, mesh) != ("explicit", "2x2x2")]


@pytest.mark.parametrize(("form", "mesh"), PLACES)
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_match_one_device_and_send_expected_bytes(name, form, mesh):
  """The results of one device, and a device's own part over the pods, and nothing inside them."""
  run = exchange(name, form, PODS[mesh])
  compiled = run.compiled(form)
  found = run.in_form(form, 4, compiled=compiled)
  expected = exchange_on_one_device(name, run.shapes is EVEN)
  assert_close(found, expected, rtol=1e-5, atol=1e-6)

  if form == "explicit" and GATHERS_AT_EDGES:
    return  # JAX gathers: test_jax_gathers_at_the_edge_of_a_shard_map_over_an_explicit_mesh
  sent = ow.inspect.compiled_collectives(compiled)
  over_pods = [one for one in sent if one.groups == run.pods.groups]
  # Whether a worker is finite depends on all its devices: a flag per variable, or a count.
  flags = sum(one.num_bytes for one in sent if one.groups != run.pods.groups)
  assert flags <= (0 if "elastic" in name or "sequential" in name else 4 * len(SHAPES))
  if (name, form) == ("sequential, divided", "sharded_vmap"):
    # XLA distributes the round robin's rows as it chooses: over the pods only.
    return
  assert all(one.conditional for one in sent)
  num_bytes = collections.Counter()
  for one in over_pods:
    num_bytes[one.kind] += one.num_bytes
  assert num_bytes == bytes_over_pods(name, form, run)


@dataclasses.dataclass
class Absent(Run):
  """Workers of unequal weight; one has a NaN in one device's part in one of the steps."""

  def grads(self, step):
    grads = super().grads(step)
    if step == 1:
      grads["kernel"][1, 0, 0] = np.nan
    return grads

  def step(self, params, state, grads, delay):
    weight = 1.0 + delay.astype(jnp.float32)
    updates, state = self.tx.update(grads, state, params, participation=weight)
    return optax.apply_updates(params, updates), state


PAIRS = {
  "averaged": {"inner_state": "average", "outer": optax.sgd(0.7)},
  "delayed, divided": {
    "delay": 1,
    "shard_center": True,
    "outer": optax.sgd(0.7, momentum=0.9),
    "pull": 0.5,
  },
  "reset, sums": {"inner_state": "reset", "reduction": "sum", "outer": optax.sgd(0.1)},
}


# If everything is manual and no type is tracked, each device decides for its own part.
@pytest.mark.parametrize("form", [form for form in FORMS if form != "manual_unchecked"])
@pytest.mark.parametrize("options", PAIRS)
def test_participation_and_nan_on_one_device_apply_to_worker(options, form):
  tx = ow.local_steps(SGD, POD, communication_period=2, **PAIRS[options])
  run = Absent(tx, WRAPPERS["local_steps"], PODS["2x4"], EVEN)
  expected = run.on_one_device(5)
  assert all(np.isfinite(x[0]).all() for x in jax.tree.leaves(jax.device_get(expected[0])))
  assert_close(run.in_form(form, 5), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.xfail(
  GATHERS_AT_EDGES,
  raises=AssertionError,
  strict=True,
  reason="JAX before 0.11.2: shard_map over some axes of an Explicit mesh gathers over the others",
)
def test_explicit_mesh_partial_shard_map_does_not_gather():
  pods = PODS["2x4"]
  mesh = pods.mesh(AxisType.Explicit)
  specs = {"in_specs": P(POD), "out_specs": P(POD), "axis_names": {POD}}
  x = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32, sharding=NamedSharding(mesh, P(POD, "data")))
  with jax.set_mesh(mesh):
    doubled = jax.shard_map(lambda x: 2 * x, mesh=mesh, **specs)
    assert ow.inspect.compiled_collectives(jax.jit(doubled).lower(x).compile()) == []


@pytest.mark.parametrize("num_workers", [2, 4])
def test_shard_center_rings_send_shares_and_match_one_device(num_workers):
  """With four pods every ring has three iterations, in a loop that is listed once."""
  pods = Pods({POD: num_workers, "data": 8 // num_workers}, {"w": P("data")})
  tx = ow.diloco(SGD, POD, communication_period=1, shard_center=True)
  run = Run(tx, WRAPPERS["diloco"], pods, {"w": (16, 5)}, num_workers)
  compiled = run.compiled("auto")
  found = [c for c in ow.inspect.compiled_collectives(compiled) if c.kind == "collective-permute"]
  share = 4 * 16 * 5 // 8
  assert [(c.num_bytes, c.groups) for c in found] == [(share, pods.groups)] * 2
  ends = run.in_form("auto", 2, compiled=compiled)
  assert_close(ends, run.on_one_device(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_center_manual_part_not_multiple_is_error(check_vma):
  """Otherwise each device would pad its own part, and the shares of the parts would not be
  shares."""
  pods = Pods({POD: 4, "data": 2}, {"w": P("data")})
  tx = ow.diloco(SGD, POD, shard_center=True)
  params, state = start_of_workers(tx, {"w": np.zeros(6, np.float32)}, 4)
  specs = ow.specs((params, state), workers=POD, params=pods.specs)

  def update(params, state):
    state = jax.tree.map(lambda spec, x: x[0] if spec and spec[0] == POD else x, specs[1], state)
    params = jax.tree.map(lambda x: x[0], params)
    return tx.update(params, state, params)[0]["w"][None]

  mapped = jax.shard_map(
    update, mesh=pods.mesh(), in_specs=specs, out_specs=P(POD, "data"), check_vma=check_vma
  )
  with pytest.raises(ValueError, match=r"multiple of 4 workers, and a device has"):
    jax.eval_shape(mapped, params, state)


def test_shard_center_lowers_memory_of_device():
  """Bytes of the arguments of a donated step of diloco around momentum, in addition to parameters
  (1 part of a worker), gradients (1) and momentum (1): center and outer momentum, whole and divided
  by two."""
  pods = Pods({POD: 2, "data": 4}, {"w": P("data")})
  part = 4 * 256 * 256 // 4

  def held(**options):
    tx = ow.diloco(SGD, POD, communication_period=2, **options)
    run = Run(tx, WRAPPERS["diloco"], pods, {"w": (256, 256)})
    args, mesh = run.shapes_of_args("auto"), run.mesh("auto")
    mapped = ow.map_workers(run.step, POD, in_axes=run.axes(args[1]), out_axes=0, mesh=mesh)
    compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*args).compile()
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes / part, memory.temp_size_in_bytes / part

  whole, divided = held(), held(shard_center=True)
  assert whole[0] == pytest.approx(5, rel=0.01)
  assert divided[0] == pytest.approx(4, rel=0.01)
  assert whole[1] < 3.1 and divided[1] < 2.6  # updates, differences, and what a ring has in flight


# Four workers, first two per pod and then one: states that move.

MOVED = {"w": (32, 6), "b": (8,)}


def four_workers(tx, num_pods):
  pods = Pods({POD: num_pods, "data": 8 // num_pods}, {"w": P("data"), "b": P()})
  return Run(tx, WRAPPERS["diloco"], pods, MOVED, num_workers=4)


@pytest.mark.filterwarnings("ignore")  # Orbax has warnings of its own
@pytest.mark.parametrize("name", ["elastic", "elastic, divided", "diloco", "diloco, divided"])
def test_checkpoint_by_orbax_resumes_on_mesh_of_more_pods(name, tmp_path):
  """From (pod, data) = (2, 4) to (4, 2), in mid-round."""
  import orbax.checkpoint as ocp

  tx = EXCHANGES[name]()
  before, after = four_workers(tx, 2), four_workers(tx, 4)
  half = before.in_form("sharded_vmap", 3)
  shardings = jax.tree.map(
    functools.partial(NamedSharding, after.pods.mesh()), after.specs(half[1])[:2]
  )
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", half)
    checkpointer.wait_until_finished()
    target = jax.tree.map(
      lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), half, shardings
    )
    restored = checkpointer.restore(tmp_path / "state", target)
  assert restored[0]["w"].sharding.shard_shape((4, 32, 6)) == (1, 16, 6)
  found = after.in_form("sharded_vmap", 6, restored, first=3)
  assert_close(found, before.on_one_device(6), rtol=1e-5, atol=1e-6)
  # The same with map_workers, which has one worker per pod.
  found = after.in_form("auto", 6, restored, first=3)
  assert_close(found, before.on_one_device(6), rtol=1e-5, atol=1e-6)


def test_center_params_of_fewer_workers_start_more_workers():
  """Also of a divided center: whole again, and divided by four."""
  tx = EXCHANGES["diloco, divided"]()
  pods = Pods({POD: 2, "data": 4}, {"w": P("data"), "b": P()})
  _, state = Run(tx, WRAPPERS["diloco"], pods, MOVED).in_form("auto", 4)
  shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in MOVED.items()}
  center = ow.center_params(state, shapes)
  one_device = Run(tx, WRAPPERS["diloco"], pods, MOVED).on_one_device(4)[1]
  assert_close(center, ow.center_params(one_device, shapes), rtol=1e-5, atol=1e-6)
  run = four_workers(tx, 4)
  start = start_of_workers(tx, jax.device_get(center), 4)
  found = run.in_form("auto", 2, start)
  expected = start
  fun = jax.jit(ow.map_workers(run.step, POD, in_axes=run.axes(start[1]), out_axes=0))
  for step in range(2):
    expected = fun(*expected, run.grads(step), run.delays(step))
  assert_close(found, expected, rtol=1e-5, atol=1e-6)
  assert_close(ow.center_params(start[1], shapes), center)


# Codes between pods: each device encodes its own part.

CODECS = {
  "cast": (ow.codecs.cast("bfloat16"), lambda x: ref.cast(x, "bfloat16")),
  "8 bits": (ow.codecs.quantize(8), lambda x: ref.quantize(x, 8, 256, "power_of_two")),
  "4 bits": (ow.codecs.quantize(4), lambda x: ref.quantize(x, 4, 256, "float32")),
  "signs": (ow.codecs.signs(), ref.signs),
  "top": (
    ow.codecs.top_k(0.05, 256),
    lambda x: ref.top_k(x, 0.05, 256, lambda v: ref.cast(v, "bfloat16")),
  ),
}

CODED = {"w": (64, 48)}


def coded_by_parts(grads, round_trip, codec, num_devices, d, num_steps):
  """In NumPy: the parts of a variable along dimension `d` are separate variables."""
  num_workers = len(grads[0])
  found = []
  for part in range(num_devices):
    own = [np.split(np.asarray(g), num_devices, d + 1)[part] for g in grads]
    residuals, owner = np.zeros_like(own[0]), np.zeros_like(own[0][0])
    for step in range(num_steps):
      result, residuals, owner = ref.exchange(
        own[step] / np.float32(num_workers), residuals, owner, round_trip, second=codec.recodes
      )
    found.append((result, residuals))
  return np.concatenate([x for x, _ in found], d), np.concatenate([x for _, x in found], d + 1)


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize(
  ("kind", "spec", "d"),
  # On an Explicit mesh types say how a variable is sharded; elsewhere the first dimension is used.
  [("Auto", P("data"), 0), ("Auto", P(None, "data"), 0), ("Explicit", P(None, "data"), 1)],
)
@pytest.mark.parametrize("name", CODECS)
def test_codec_encodes_own_part_of_each_device(name, kind, spec, d, num_workers):
  codec, round_trip = CODECS[name]
  pods = Pods({POD: num_workers, "data": 8 // num_workers}, {"w": spec})
  tx = ow.all_reduce(POD, codec=codec)
  mesh = pods.mesh(getattr(AxisType, kind))
  rng = np.random.default_rng(0)
  sizes = 10.0 ** np.arange(num_workers)[:, None, None]  # no two round equally
  grads = [np.float32(rng.normal(size=(num_workers, *CODED["w"])) * sizes) for _ in range(3)]
  _, state = start_of_workers(tx, {"w": np.zeros(CODED["w"], np.float32)}, num_workers)
  places = jax.tree.map(
    functools.partial(NamedSharding, mesh),
    ow.specs(state, workers=POD, params=pods.specs, mesh=mesh),
  )
  with jax.set_mesh(mesh):
    step = jax.jit(ow.map_workers(tx.update, POD, mesh=mesh), out_shardings=(None, places))
    state = jax.tree.map(jax.device_put, state, places)
    for grad in grads:
      given = {"w": jax.device_put(grad, NamedSharding(mesh, P(POD, *spec)))}
      updates, state = step(given, state)
  expected, residual = coded_by_parts(grads, round_trip, codec, 8 // num_workers, d, 3)
  for update in np.asarray(updates["w"]):
    np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-2)
  found = ow.get_state(state, ow.states.CompressedState).residual["w"]
  np.testing.assert_allclose(found, residual, rtol=1e-5, atol=1e-2)
  assert found.sharding.shard_shape(found.shape)[0] == 1  # and is sharded like the parameter
  assert found.sharding.is_equivalent_to(places.compressed.residual["w"], found.ndim)


@functools.cache
def wire_bytes_between_pods(codec, num_workers, form):
  """Bytes that a device sends to other pods in a compiled step."""
  pods = Pods({POD: num_workers, "data": 8 // num_workers}, {"w": P("data")})
  tx = ow.local_steps(SGD, POD, communication_period=1, outer=optax.sgd(1.0), codec=codec)
  run = Run(tx, WRAPPERS["local_steps"], pods, {"w": (1024, 64)}, num_workers)
  total = 0
  for one in ow.inspect.compiled_collectives(run.compiled(form)):
    if one.groups == pods.groups:
      w = num_workers
      factor = {"all-reduce": 2 * (w - 1) / w, "all-gather": w - 1, "all-to-all": (w - 1) / w}
      total += factor[one.kind] * one.num_bytes
  return total


@pytest.mark.parametrize("form", ["auto", "explicit"])
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("name", CODECS)
def test_codec_bytes_between_pods_match_num_bytes(name, num_workers, form):
  codec = CODECS[name][0]
  size = 1024 * 64 // (8 // num_workers)
  ratio = codec.num_bytes(size) / (4 * size)
  if codec.recodes is False:  # each sends to every other
    ratio *= num_workers / 2
  found, whole = (wire_bytes_between_pods(c, num_workers, form) for c in (codec, None))
  assert found == pytest.approx(whole * ratio, rel=0.05)


def test_random_k_draws_entries_in_own_part_of_each_device():
  """A quarter of the entries of each device's part, with their indices."""
  pods = Pods({POD: 2, "data": 4}, {"w": P("data")})
  tx = ow.all_reduce(POD, codec=ow.codecs.random_k(0.25))
  mesh = pods.mesh()
  grad = np.random.default_rng(0).normal(size=(2, *CODED["w"])).astype(np.float32)
  _, state = start_of_workers(tx, {"w": np.zeros(CODED["w"], np.float32)}, 2)
  step = jax.jit(ow.map_workers(tx.update, POD, mesh=mesh))
  updates, _ = step({"w": grad}, state)
  found, mean = np.asarray(updates["w"])[0], grad.mean(0)
  assert ((found == 0) | np.isclose(found, mean, rtol=1e-5, atol=1e-6)).all()
  assert [(part != 0).sum() for part in np.split(found, 4)] == [16 * 48 // 4] * 4
  for form in ("auto", "explicit"):
    found = wire_bytes_between_pods(ow.codecs.random_k(0.25), 2, form)
    assert found == pytest.approx(wire_bytes_between_pods(None, 2, form) / 4, rel=0.05)


# One remaining pod: the same program text.


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["local", "diloco", "diloco, divided", "elastic", "coded"])
def test_resize_to_single_pod_goes_on_and_matches_one_device(name, kind):
  make = {**EXCHANGES, "coded": lambda: ow.diloco(SGD, POD, codec=ow.codecs.quantize(8))}[name]
  tx, shapes = make(), {"w": (8, 4)}

  def train(num_pods, start, steps):
    mesh = jax.make_mesh(
      (num_pods, 4), (POD, "data"), axis_types=(getattr(AxisType, kind),) * 2,
      devices=jax.devices()[-4 * num_pods:],
    )  # fmt: skip
    specs = ow.specs(start, workers=POD, params={"w": P("data")}, mesh=mesh)
    lay = functools.partial(NamedSharding, mesh)
    params, state = jax.tree.map(lambda x, s: jax.device_put(x, lay(s)), start, specs)

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      loss = jax.lax.pmean(grads["w"].sum(), POD)
      return optax.apply_updates(params, updates), state, loss

    mapped = jax.jit(ow.map_workers(step, POD, out_axes=(0, 0, None), mesh=mesh))
    for k in steps:
      grads = jax.tree.map(lambda g, s: jax.device_put(g[:num_pods], lay(s)), grad(k), specs[0])
      params, state, _ = mapped(params, state, grads)
    return params, state

  def grad(k):
    return tree(shapes, np.random.default_rng(k), 2)

  def on_one_device(num_pods, start, steps):
    axes = ow.worker_axes(start)

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    mapped = jax.jit(jax.vmap(step, (*axes, 0), axes, axis_name=POD))
    for k in steps:
      start = mapped(*start, jax.tree.map(lambda g: g[:num_pods], grad(k)))
    return start

  params = tree(shapes, np.random.default_rng(9))
  start = start_of_workers(tx, params, 2)
  found, expected = train(2, start, range(3)), on_one_device(2, start, range(3))
  found, expected = (
    ow.resize_workers(jax.tree.map(np.asarray, x), [0], params=params) for x in (found, expected)
  )
  found, expected = train(1, found, range(3, 8)), on_one_device(1, expected, range(3, 8))
  assert_close(found, expected, rtol=1e-5, atol=1e-6)
  assert found[0]["w"].sharding.shard_shape((1, 8, 4)) == (1, 2, 4)


@pytest.mark.parametrize("options", [{"codec": ow.codecs.quantize(8)}, {"shard_center": True}])
def test_specs_lay_share_over_divisible_dimension(options):
  """A kernel [4, 512] over four devices, whose share for two workers has two rows."""
  pods = Pods({POD: 2, "data": 4}, {"w": P("data")})
  tx = ow.diloco(SGD, POD, communication_period=2, **options)
  params = tree({"w": (4, 512)}, np.random.default_rng(0))
  _, state = start_of_workers(tx, params, 2)
  name = "owner_residual" if "codec" in options else "kept/0/center"
  with pytest.raises(ValueError, match=rf"mesh is needed for .*{name}/w, .*Pass mesh=mesh"):
    ow.specs(state, workers=POD, params=pods.specs)
  specs = ow.specs(state, workers=POD, params=pods.specs, mesh=pods.mesh())
  with jax.set_mesh(pods.mesh()):
    assert specs == ow.specs(state, workers=POD, params=pods.specs)
  of_share = dict(ow._core._paths.named_leaves(specs))
  (found,) = (spec for path, spec in of_share.items() if name in path)
  assert found == P(POD, None, "data")
  jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(pods.mesh(), s)), state, specs)
