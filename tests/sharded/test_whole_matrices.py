"""Optimizers of whole matrices on divided parameters, against NumPy and one device in every
context; what is sent, and what is held."""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

SHAPES = {"a": (16, 8), "b": (16, 8), "c": (8, 16)}

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

GRID = {"data": 2, "model": 4}


# A mesh, the axes that deal, and how the parameters are divided.
LAYOUTS = {
  "rows": ({"data": 4}, "data", P("data")),
  "rows over 2": ({"data": 2}, ("data",), P("data")),
  "columns, fewer matrices than devices": ({"data": 8}, "data", P(None, "data")),
  "replicas": ({"data": 4}, "data", P()),
  "both": (GRID, ("data", "model"), P("data", "model")),
  "both, the other way": (GRID, ("model", "data"), P("data", "model")),
  "one dimension over two": (GRID, ("data", "model"), P(("model", "data"))),
  "replicas of columns": (GRID, ("data", "model"), P(None, "model")),
  "each its own": (
    {"r": 2, "data": 2, "model": 2},
    ("data", "r", "model"),
    {"a": P("data"), "b": P(("r", "model")), "c": P("model", "r")},
  ),
}

CONTEXTS = "jit", "explicit", "explicit, by types", "shard_map", "unchecked"


def mesh_of(sizes, kind=AUTO):
  shape = tuple(sizes.values())
  devices = jax.devices()[: int(np.prod(shape))]
  return jax.make_mesh(shape, tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def tree_of(specs, shapes):
  return dict.fromkeys(shapes, specs) if isinstance(specs, P) else specs


def random(rng, shapes=SHAPES, dtype=np.float64):
  return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def whitened():
  """A statistic of `[m, m]`, a count, a norm of the whole matrix, parameters and an extra arg."""

  def init(param):
    return jnp.zeros((), jnp.int32), jnp.eye(param.shape[0], dtype=param.dtype)

  def update(update, state, param, *, scale):
    count, statistic = state
    statistic = statistic + update @ update.T
    update = jnp.linalg.solve(statistic, update)
    step = scale * update / jnp.linalg.norm(update) + 0.1 * param
    return -step / (1 + count).astype(step.dtype), (count + 1, statistic)

  return optax.GradientTransformationExtraArgs(init, update)


def whitened_in_numpy(params, grads_of_steps, scales):
  """The parameters after these steps, each `[m, n]` matrix alone."""
  params = {name: x.copy() for name, x in params.items()}
  for name, x in params.items():
    for index in np.ndindex(x.shape[:-2]):
      statistic = np.eye(x.shape[-2])
      for count, (grads, scale) in enumerate(zip(grads_of_steps, scales, strict=True)):
        g = grads[name][index]
        statistic = statistic + g @ g.T
        u = np.linalg.solve(statistic, g)
        x[index] -= (scale * u / np.linalg.norm(u) + 0.1 * x[index]) / (1 + count)
  return params


class Run:
  """Steps of an optimizer in a context."""

  def __init__(self, inner, context, layout, shapes=SHAPES, **options):
    sizes, self.names, specs = layout
    self.specs = tree_of(specs, shapes)
    self.mesh = mesh_of(sizes, EXPLICIT if "explicit" in context else AUTO)
    given = None if context == "explicit, by types" else self.specs
    mesh = self.mesh if context == "jit" else None
    self.tx = ow.whole_matrices(inner, self.names, specs=given, mesh=mesh, **options)
    self.init, self.step = self.tx.init, self._step
    if context in ("shard_map", "unchecked"):
      over = P(self.names if isinstance(self.names, tuple) else (self.names,))
      mapped = functools.partial(jax.shard_map, mesh=self.mesh, check_vma=context == "shard_map")
      self.init = mapped(self.init, in_specs=(self.specs,), out_specs=over)
      self.step = mapped(
        self.step, in_specs=(self.specs, over, self.specs, P()), out_specs=(self.specs, over)
      )
    self.init, self.step = jax.jit(self.init), jax.jit(self.step)

  def _step(self, params, state, grads, scale):
    updates, state = self.tx.update(grads, state, params, scale=scale)
    return optax.apply_updates(params, updates), state

  def here(self):
    is_explicit = EXPLICIT in self.mesh.axis_types
    return jax.set_mesh(self.mesh) if is_explicit else contextlib.nullcontext()

  def placed(self, tree):
    return {k: jax.device_put(x, NamedSharding(self.mesh, self.specs[k])) for k, x in tree.items()}

  def __call__(self, params, grads_of_steps, scales):
    with self.here():
      params = self.placed(params)
      state = self.init(params)
      for grads, scale in zip(grads_of_steps, scales, strict=True):
        params, state = jax.block_until_ready(
          self.step(params, state, self.placed(grads), np.asarray(scale, params["a"].dtype))
        )
    return params, state

  def compiled(self, params):
    with self.here():
      params = self.placed(params)
      args = params, self.init(params), params, np.ones((), params["a"].dtype)
      return self.step.lower(*args).compile()


def close(found, expected, tolerance):
  for name, x in expected.items():
    np.testing.assert_allclose(np.asarray(found[name]), x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_matrices_every_layout_and_context_matches_numpy(layout, context):
  rng, scales = np.random.default_rng(0), [0.5, 1.5]
  with jax.enable_x64(True):
    params, *grads = (random(rng) for _ in range(3))
    run = Run(whitened(), context, LAYOUTS[layout])
    found, state = run(params, grads, scales)
    close(found, whitened_in_numpy(params, grads, scales), 1e-11)
  for name, x in found.items():
    assert x.sharding.is_equivalent_to(NamedSharding(run.mesh, run.specs[name]), x.ndim)
  over = P(run.names if isinstance(run.names, tuple) else (run.names,))
  for leaf in jax.tree.leaves(state):
    assert leaf.sharding.is_equivalent_to(NamedSharding(run.mesh, over), leaf.ndim)


@pytest.mark.parametrize("context", ["jit", "explicit, by types", "shard_map"])
def test_whole_matrices_stacked_match_numpy_and_whole_send_nothing(context):
  """Layers as a scan has them, two leading axes, and experts that are divided themselves."""
  shapes = {"a": (3, 16, 8), "experts": (4, 16, 8), "deep": (2, 3, 8, 16), "b": (16, 8)}
  specs = {
    "a": P(None, None, "data"),
    "experts": P("data"),
    "deep": P(None, None, "data"),
    "b": P(None, "data"),
  }
  rng, scales = np.random.default_rng(1), [0.5, 1.5]
  with jax.enable_x64(True):
    params, *grads = (random(rng, shapes) for _ in range(3))
    stacked = {"a": 1, "experts": 1, "deep": 2, "b": 0}
    layout = {"data": 4}, "data", specs
    run = Run(whitened(), context, layout, shapes, stacked=stacked)
    found, state = run(params, grads, scales)
    close(found, whitened_in_numpy(params, grads, scales), 1e-11)
    sent = ow.inspect.compiled_collectives(run.compiled(params))
  # Leaf "a" and leaf "b" are one kind, of four matrices; the experts send nothing.
  assert [len(x[0]) for x in state.inner_state.values()] == [4, 4, 8]
  assert collections.Counter(one.kind for one in sent) == {"all-to-all": 6}


@pytest.mark.optax_promotes
@pytest.mark.parametrize("layout", ["rows", "both"])
def test_whole_matrices_muon_matches_optax_on_one_device(layout):
  """`optax.contrib.muon`, decay and all, beside itself on one device; momentum of a device."""
  rng = np.random.default_rng(2)
  params, *grads = (random(rng, dtype=np.float32) for _ in range(4))
  muon = optax.contrib.muon(0.1, weight_decay=0.1)

  @jax.jit
  def step(param, state, grad):
    update, state = muon.update(grad, state, param)
    return param + update, state

  expected, states = dict(params), {name: jax.jit(muon.init)(x) for name, x in params.items()}
  for of_step in grads:
    for name, grad in of_step.items():
      expected[name], states[name] = step(expected[name], states[name], grad)
  run = Run(optax.with_extra_args_support(muon), "jit", LAYOUTS[layout])
  found, _ = run(params, grads, [1.0] * 3)
  close(found, expected, 3e-6)


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("layout", "spec"), [({"data": 4}, P("data")), ({"data": 4}, P(None, "data")), (GRID, P(*GRID))]
)
def test_whole_matrices_of_equal_shape_send_two_all_to_alls(layout, spec):
  """Of their own bytes, and nothing else; the momentum is an N-th."""
  shapes = {f"layer{i}": (64, 64) for i in range(8)}
  mesh, names = mesh_of(layout), tuple(layout)
  tx = ow.whole_matrices(optax.contrib.scale_by_muon(), names, specs=spec, mesh=mesh)
  lay = NamedSharding(mesh, spec)
  params = {k: jax.device_put(np.zeros(s, np.float32), lay) for k, s in shapes.items()}
  state = jax.jit(tx.init)(params)
  compiled = jax.jit(tx.update).lower(params, state).compile()
  part = 8 * 64 * 64 * 4 // mesh.size
  sent = ow.inspect.compiled_collectives(compiled)
  assert [(one.kind, one.num_bytes) for one in sent] == [("all-to-all", part)] * 2
  kept = jax.tree.leaves(state)
  momentum = [x for x in kept if x.ndim == 3]
  assert ow.inspect.device_bytes(momentum) == part
  # The same layout from the state's types alone, for a trainer that asks before the first step.
  specs = ow.specs(jax.eval_shape(tx.init, params), spec, mesh=mesh)
  for leaf, found in zip(kept, jax.tree.leaves(specs), strict=True):
    assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, found), leaf.ndim)


@pytest.mark.optax_promotes
def test_whole_matrices_in_partition_and_diloco_match_one_device():
  """Biases go to Adam, all is clipped, and the whole is DiLoCo's inner optimizer on two pods."""
  mesh = mesh_of({"pod": 2, "data": 4})
  specs = {"kernel": P("data"), "bias": P()}
  labels = {"kernel": "matrix", "bias": "rest"}
  rng = np.random.default_rng(3)
  shapes = {"kernel": (8, 16), "bias": (5,)}
  params = random(rng, shapes, np.float32)
  grads = random(rng, {k: (2, *s) for k, s in shapes.items()}, np.float32)

  def make(matrix):
    inner = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.partition({"matrix": matrix, "rest": optax.adam(0.1)}, labels),
    )
    return ow.diloco(inner, "pod", communication_period=2)

  def train(tx, mesh, grads):
    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    mapped = ow.map_workers(step, "pod", mesh=mesh)

    @jax.jit
    def four_steps(params, grads):
      start = ow.stack_workers((params, tx.init(params)), 2)
      return jax.lax.scan(lambda at, _: (mapped(*at, grads), None), start, length=4)[0]

    return jax.block_until_ready(four_steps(params, grads))[0]

  muon = optax.contrib.muon(0.1)
  with jax.set_mesh(mesh):
    dealt = ow.whole_matrices(muon, "data", specs=specs)
    lay = {k: NamedSharding(mesh, P("pod", *spec)) for k, spec in specs.items()}
    found = train(make(dealt), mesh, {k: jax.device_put(x, lay[k]) for k, x in grads.items()})
  close(found, train(make(muon), None, grads), 3e-6)


def test_whole_matrices_nan_stays_in_its_matrix():
  run = Run(whitened(), "jit", LAYOUTS["rows"])
  rng = np.random.default_rng(4)
  params, grads = (random(rng, dtype=np.float32) for _ in range(2))
  grads["a"][3, 2] = np.nan
  found, _ = run(params, [grads], [1.0])
  assert {k: bool(np.isnan(x).any()) for k, x in found.items()} == {
    "a": True,
    "b": False,
    "c": False,
  }


def test_whole_matrices_state_resumes_on_more_devices():
  """Slot u is matrix u: from 4 devices to 8, where 8 matrices fill the slots of both."""
  shapes = {"a": (8, 16, 8)}
  rng, scales = np.random.default_rng(5), [0.5, 1.5, 1.0]
  params, *grads = (random(rng, shapes, np.float32) for _ in range(4))
  first = Run(whitened(), "jit", ({"data": 4}, "data", P(None, "data")), shapes, stacked=1)
  then = Run(whitened(), "jit", ({"data": 8}, "data", P(None, None, "data")), shapes, stacked=1)
  at, state = first(params, grads[:2], scales[:2])
  at = then.placed(jax.tree.map(np.asarray, at))
  like = then.init(at)
  saved = map(np.asarray, jax.tree.leaves(state))
  restored = [jax.device_put(x, y.sharding) for x, y in zip(saved, jax.tree.leaves(like))]
  state = jax.tree.structure(like).unflatten(restored)
  at, _ = then.step(at, state, then.placed(grads[2]), jnp.float32(scales[2]))
  close(at, whitened_in_numpy(params, grads, scales), 1e-4)


def test_whole_matrices_sharded_stack_state_keys_name_device_count():
  """Its slots are in the order of its devices: the state has other names there."""
  shapes = {"a": (8, 16, 8), "b": (8, 16, 8)}
  layout = lambda n: ({"data": n}, "data", P("data"))  # noqa: E731
  keys = [
    set(jax.eval_shape(run.init, random(np.random.default_rng(0), shapes, np.float32)).inner_state)
    for run in (Run(whitened(), "jit", layout(n), shapes, stacked=1) for n in (2, 4))
  ]
  assert keys == [{"float32_16x8_-_-_data2"}, {"float32_16x8_-_-_data4"}]


def test_whole_matrices_arrays_without_elements_keep_shape():
  mesh = mesh_of({"data": 4})
  shapes = {"a": (0, 3), "b": (4, 3), "c": (0, 4, 3)}
  x = {k: np.ones(shape, np.float32) for k, shape in shapes.items()}
  tx = ow.whole_matrices(
    optax.sgd(1.0), "data", specs=P(), mesh=mesh, stacked={"a": 0, "b": 0, "c": 1}
  )
  updates = jax.jit(lambda x: tx.update(x, tx.init(x))[0])(x)
  assert {k: update.shape for k, update in updates.items()} == shapes
  np.testing.assert_array_equal(updates["b"], -1.0)


def refused(match, error=ValueError):
  return pytest.raises(error, match=match)


def test_whole_matrices_errors_arguments_specs_and_updates():
  mesh, x = (
    mesh_of(GRID),
    {
      "kernel": np.ones((8, 4), np.float32),
      "bias": np.ones(4, np.float32),
    },
  )
  plain = functools.partial(ow.whole_matrices, optax.sgd(0.1))
  with refused("axis_name must name an axis, got None"):
    plain(None)
  with refused("specs is needed: the type of bias does not say how it is divided over"):
    plain("data", mesh=mesh).init(x)
  with refused("axis_name 'pod' is neither bound here nor an axis of the mesh"):
    plain(("data", "pod"), specs=P(), mesh=mesh).init(x)
  with refused("axis_name 'data' is neither bound here nor an axis of the mesh, {}. Pass mesh="):
    plain("data", specs=P()).init(x)
  with refused(r"specs must have the structure of the parameters or a prefix of it"):
    plain("data", specs={"kernel": P()}, mesh=mesh).init(x)
  with refused("kernel is divided over 'model' by .* which is not in axis_name=.'data',."):
    plain("data", specs={"kernel": P("data", "model"), "bias": P()}, mesh=mesh).init(x)
  with refused(r"does not divide bias \[4\] over \{'data': 2, 'model': 4\}"):
    plain(("data", "model"), specs={"kernel": P(), "bias": P(tuple(GRID))}, mesh=mesh).init(x)
  with refused("stacked=2 and .* must fit bias, which has 1 axes"):
    plain("data", specs=P(), mesh=mesh, stacked=2).init(x)
  with refused("stacked must hold Python ints", TypeError):
    plain("data", specs=P(), mesh=mesh, stacked=0.5).init(x)
  with refused("of axis_name=.'data', 'model'. only .'data'. are axes of the shard_map around it"):
    init = plain(("data", "model"), specs=P()).init
    mapped = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"})
    jax.eval_shape(mapped, x)

  tx = plain("data", specs=P(), mesh=mesh)
  state = jax.jit(tx.init)(x)
  with refused("state must be a WholeMatricesState", TypeError):
    tx.update(x, optax.EmptyState())
  with refused("the state was made for 2 parameters, got 1 in updates"):
    tx.update({"kernel": x["kernel"]}, state)
  with refused(r"updates of kernel must be \[8, 4\], as init was given it; got \[4, 8\]"):
    tx.update({"kernel": x["kernel"].T, "bias": x["bias"]}, state)
  with refused(r"params of bias must be \[4\], as init was given it; got \[5\]"):
    tx.update(x, state, {**x, "bias": np.ones(5, np.float32)})
  with refused("the state was made for .'data',., and this is .'model',."):
    plain("model", specs=P(), mesh=mesh).update(x, state)
  with refused("updates of bias differs from device to device over .'data'., and its spec is"):
    own = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
    mapped = jax.shard_map(
      lambda x: own(ow.per_shard(x, "data")), mesh=mesh, in_specs=P(), out_specs=P("data")
    )
    jax.eval_shape(mapped, x)
  momentum = ow.whole_matrices(optax.trace(0.9), "data", specs=P(), mesh=mesh)
  state = jax.jit(momentum.init)(x)
  more = jax.tree.map(lambda s: np.concatenate([s, s]), state)
  with refused(r"a device must have 1 slots of inner_state\['float32_4_-'\], got \[2, 4\]"):
    momentum.update(x, more)


NORMED = optax.stateless_with_tree_map(lambda g, _: g / jnp.sqrt((g * g).sum()))


@pytest.mark.parametrize(
  "inner",
  [
    ow.cross_shard(NORMED, "a"),
    ow.diloco(NORMED, "a", communication_period=1, outer_momentum=0.0),
    optax.chain(ow.clip_by_global_norm(1.0, specs=P("a")), NORMED),
    optax.chain(NORMED, optax.stateless(lambda g, _: jax.lax.pmean(g, "a"))),
  ],
  ids=["cross_shard", "diloco", "norm", "pmean"],
)
def test_reduction_over_dealing_axis_inside_is_error(inner):
  """Each device has another matrix there. Over another axis it is right."""
  mesh = jax.make_mesh((2,), ("a",), axis_types=(AUTO,), devices=jax.devices()[:2])
  tx = ow.whole_matrices(inner, "a", specs=P(None, "a"), mesh=mesh, stacked=1)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4, 2)), jnp.float32)
  with pytest.raises(ValueError, match=r"inner reduces or sends over \['a'\], where each device"):
    jax.jit(tx.update)(x, jax.jit(tx.init)(x), x)


def test_reduction_over_other_axis_inside_is_right():
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AUTO,) * 2, devices=jax.devices()[:4])
  tx = ow.whole_matrices(ow.cross_shard(NORMED, "b"), "a", specs=P("a"))

  def step(x):
    return tx.update(x[0], tx.init(x[0]), x[0])[0]

  x = np.random.default_rng(0).normal(size=(2, 4, 2)).astype("f")  # for each of b
  layout = {"in_specs": P("b", "a"), "out_specs": P("a"), "check_vma": False}
  mean = x.mean(0)
  found = jax.jit(jax.shard_map(step, mesh=mesh, **layout))(x)
  np.testing.assert_allclose(found, mean / np.sqrt((mean**2).sum()), rtol=1e-5)


@pytest.mark.parametrize("stacked", [0, 1])
def test_axis_that_divides_parameters_and_is_not_named_is_error(stacked):
  """Its devices would have states of their own, which the state's layout does not show."""
  mesh = jax.make_mesh(
    (2, 2), ("expert", "fsdp"), axis_types=(AUTO,) * 2, devices=jax.devices()[:4]
  )
  spec = P("expert", "fsdp")
  tx = ow.whole_matrices(optax.trace(0.9), "fsdp", specs=spec, stacked=stacked)
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=spec, out_specs=P("fsdp"), check_vma=False)
  with pytest.raises(ValueError, match=r"Name it too: axis_name=\('expert', 'fsdp'\)"):
    init(jnp.ones((4, 4, 4)))


def test_parameter_equal_over_axis_of_its_spec_is_error():
  mesh = jax.make_mesh((2,), ("a",), axis_types=(AUTO,), devices=jax.devices()[:2])
  tx = ow.whole_matrices(optax.trace(0.9), "a", specs=P("a"))

  def step(x):
    return tx.update(x, tx.init(x))[0]

  with pytest.raises(ValueError, match=r"is equal on all devices of \['a'\]"):
    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.ones((4, 4)))


def test_whole_matrices_outside_jit_equals_inside():
  """Over one of two axes, which JAX alone does not run there."""
  mesh = jax.make_mesh((2, 2), ("pod", "a"), axis_types=(AUTO,) * 2, devices=jax.devices()[:4])
  tx, w = ow.whole_matrices(optax.trace(0.9), "a", specs=P("a"), mesh=mesh), jnp.ones((8, 4))
  with jax.default_device(jax.devices()[0]):
    found = [tx.update(w, tx.init(w))[0], jax.jit(lambda w: tx.update(w, tx.init(w))[0])(w)]
  np.testing.assert_array_equal(*found)
