"""The norm of all updates together, against NumPy, wherever and however they are divided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

SPECS = {"rows": P("data"), "both": P("data", "model"), "one": P(None, "model"), "whole": P()}

SHAPES = {"rows": (4, 3), "both": (2, 8), "one": (3, 4), "whole": (5,)}

GRID = {"data": 2, "model": 4}

DTYPES = {"float64": 1e-14, "float32": 2e-7, "bfloat16": 2e-2, "complex64": 3e-7}


def mesh_of(kind=AxisType.Auto):
  return jax.make_mesh(tuple(GRID.values()), tuple(GRID), axis_types=(kind,) * 2)


def tree_of(dtype, seed=0):
  rng = np.random.default_rng(seed)

  def leaf(shape):
    x = rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype == "complex64" else 0)
    return x.astype(jnp.dtype(dtype))

  return {name: leaf(shape) for name, shape in SHAPES.items()}


def norm_of(tree):
  wide = [np.asarray(x, np.complex128) for x in jax.tree.leaves(tree)]
  return np.sqrt(sum((np.abs(x) ** 2).sum() for x in wide))


def in_context(fun, context, num_results=1):
  """`fun(tree)` in a context, its results laid out as the tree."""
  kind = AxisType.Explicit if context == "explicit" else AxisType.Auto
  mesh = mesh_of(kind)
  mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=(SPECS, P()))
  if context == "partly manual":
    over_data = {
      name: P(*(x if x == "data" else None for x in spec)) for name, spec in SPECS.items()
    }
    options = {"axis_names": {"data"}, "out_specs": (over_data, P())}
    fun = mapped(fun, in_specs=(over_data,), **options)
  elif context in ("shard_map", "unchecked"):
    fun = mapped(fun, in_specs=(SPECS,), check_vma=context == "shard_map")
  fun = jax.jit(fun)

  def run(tree):
    with jax.set_mesh(mesh):
      return fun({k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in tree.items()})

  run.fun = fun
  return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", ["shard_map", "unchecked", "partly manual", "jit", "explicit"])
def test_global_norm_and_clip_every_context_match_numpy(context, dtype):
  with jax.enable_x64(dtype == "float64"):
    tree, limit = tree_of(dtype), 1.5
    clip = ow.clip_by_global_norm(limit, specs=SPECS)

    def fun(tree):
      return clip.update(tree, clip.init(tree))[0], ow.global_norm(tree, specs=SPECS)

    clipped, norm = in_context(fun, context)(tree)
    tolerance = DTYPES[dtype]
    np.testing.assert_allclose(norm, norm_of(tree), tolerance if dtype != "bfloat16" else 1e-6)
    assert norm.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
    assert norm_of(clipped) == pytest.approx(limit, rel=tolerance)
    for name, x in tree.items():
      expected = np.asarray(x, np.complex128) * limit / norm_of(tree)
      np.testing.assert_allclose(np.asarray(clipped[name], np.complex128), expected, tolerance * 4)
      assert clipped[name].dtype == x.dtype


@pytest.mark.parametrize("context", ["shard_map", "jit"])
def test_clip_by_global_norm_below_limit_is_bit_for_bit(context):
  tree = tree_of("float32")
  clip = ow.clip_by_global_norm(norm_of(tree) * 1.0001, specs=SPECS)
  fun = lambda tree: (clip.update(tree, clip.init(tree))[0], jnp.zeros(()))  # noqa: E731
  clipped, _ = in_context(fun, context)(tree)
  for name, x in tree.items():
    assert np.asarray(clipped[name]).tobytes() == np.asarray(x).tobytes()


def test_clip_by_global_norm_one_device_equals_optax_bit_for_bit():
  tree = tree_of("float32")
  for limit in (0.5, 100.0):
    ours, theirs = ow.clip_by_global_norm(limit), optax.clip_by_global_norm(limit)
    found, expected = (jax.jit(tx.update)(tree, tx.init(tree))[0] for tx in (ours, theirs))
    for name, x in expected.items():
      assert np.asarray(found[name]).tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("context", ["shard_map", "unchecked"])
def test_global_norm_sends_one_all_reduce_of_scalar_per_leaf(context):
  fun = lambda tree: (tree, ow.global_norm(tree, specs=SPECS))  # noqa: E731
  compiled = in_context(fun, context).fun.lower(tree_of("float32")).compile()
  sent = ow.inspect.compiled_collectives(compiled)
  # Over "data", over "model" and over both; the whole leaf is summed nowhere.
  assert sorted((one.num_bytes, len(one.groups)) for one in sent) == [(4, 1), (4, 2), (4, 4)]


def test_global_norm_specs_as_prefix_and_in_partition_match_numpy():
  """Two groups of parameters, each clipped by its own norm."""
  labels = {"rows": "a", "both": "a", "one": "b", "whole": "b"}
  tx = optax.partition({k: ow.clip_by_global_norm(1.0, specs=SPECS) for k in "ab"}, labels)
  tree = tree_of("float32")
  fun = lambda tree: (tx.update(tree, tx.init(tree))[0], jnp.zeros(()))  # noqa: E731
  clipped, _ = in_context(fun, "shard_map")(tree)
  for label in "ab":
    group = [name for name in tree if labels[name] == label]
    assert norm_of([clipped[name] for name in group]) == pytest.approx(1.0)

  mesh = mesh_of()
  mapped = jax.shard_map(
    lambda x: ow.global_norm(x, specs=P("data")), mesh=mesh, in_specs=P("data"), out_specs=P()
  )
  parts = [np.full(2, 3, np.float32), np.full(4, 2, np.float32)]
  assert float(jax.jit(mapped)(parts)) == pytest.approx(np.sqrt(34))


def test_clip_by_global_norm_of_empty_tree_zeros_and_nan():
  clip = ow.clip_by_global_norm(1.0)
  assert clip.update({}, clip.init({}))[0] == {}
  assert float(ow.global_norm({})) == 0
  assert not np.asarray(clip.update(jnp.zeros(3), clip.init(None))[0]).any()
  assert np.isnan(clip.update(jnp.array([1.0, jnp.nan]), clip.init(None))[0]).all()
  none = ow.clip_by_global_norm(0.0)
  assert not np.asarray(none.update(jnp.ones(3), none.init(None))[0]).any()


def test_clip_by_global_norm_inject_hyperparams_changes_max_norm():
  tx = optax.inject_hyperparams(ow.clip_by_global_norm)(max_norm=1.0)
  state = tx.init(jnp.zeros(2))
  state.hyperparams["max_norm"] = jnp.asarray(0.5)
  assert norm_of(jax.jit(tx.update)(jnp.ones(2), state)[0]) == pytest.approx(0.5)


def test_global_norm_errors_max_norm_state_dtype_and_specs():
  for wrong in (-1.0, float("nan")):
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
      ow.clip_by_global_norm(wrong)
  with pytest.raises(TypeError, match="max_norm must be a real scalar"):
    ow.clip_by_global_norm("1")
  clip = ow.clip_by_global_norm(1.0)
  with pytest.raises(TypeError, match="state must be a ClipByGlobalNormState"):
    clip.update(jnp.ones(2), optax.EmptyState())
  with pytest.raises(TypeError, match=r"updates has dtype int32; it must be floating point"):
    clip.update(jnp.ones(2, int), clip.init(None))
  tree = tree_of("float32")

  def mapped(specs, tree=tree, **options):
    fun = lambda tree: (tree, ow.global_norm(tree, specs=specs))  # noqa: E731
    return in_context(fun, "shard_map")(tree)

  with pytest.raises(
    ValueError, match=r"specs is needed: both differs .* over \['data', 'model'\]"
  ):
    mapped(None)
  with pytest.raises(ValueError, match="specs must have the structure of the parameters"):
    mapped({"rows": P()})
  with pytest.raises(TypeError, match="specs must hold PartitionSpecs"):
    mapped(1)
  with pytest.raises(ValueError, match="for both, but 'pod' is no axis here"):
    mapped(P("pod"))
  with pytest.raises(ValueError, match=r"for whole, but it has 1 axes"):
    mapped({**SPECS, "whole": P(None, "data")})


@pytest.mark.parametrize("check_vma", [True, False])
def test_local_gradient_beside_sharded_one_counts_its_own_norm(check_vma):
  """Of two shards: 3 is sharded, and each has its own 4 or 40 of a replicated parameter."""
  specs = {"sharded": P("a"), "own": P()}
  tx = optax.chain(
    ow.clip_by_global_norm(1.0, specs=specs),
    ow.cross_shard(optax.sgd(1.0), "a", sharded={"sharded": True, "own": False}),
  )

  def step(sharded, own):
    grads = {"sharded": sharded, "own": own[0]}
    return tx.update(grads, tx.init(grads))[0]["own"], ow.global_norm(grads, specs=specs)[None]

  mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  layout = {"in_specs": (P("a"), P("a")), "out_specs": (P(), P("a")), "check_vma": check_vma}
  found, norms = jax.jit(jax.shard_map(step, mesh=mesh, **layout))(
    np.float32([3, 0]), np.float32([[4], [40]])
  )
  np.testing.assert_allclose(norms, np.hypot(3, [4, 40]), rtol=1e-6)
  np.testing.assert_allclose(found, [-np.mean([4, 40] / np.hypot(3, [4, 40]))], rtol=1e-6)


def test_specs_that_types_contradict_are_error():
  mesh = jax.make_mesh(
    (2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def norm(specs, layout):
    fun = lambda tree: ow.global_norm(tree, specs=specs)[None, None]  # noqa: E731
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=(layout,), out_specs=P("a", "b"))
    return mapped({"k": np.ones((4, 4), "f"), "z": np.ones(4, "f")})

  whole = P(("a", "b"))
  with pytest.raises(ValueError, match=r"for k, which differs over \['b'\] too"):
    norm({"k": P("a"), "z": whole}, {"k": P("a", "b"), "z": whole})
  with pytest.raises(ValueError, match=r"for z, which is equal over \['b'\]"):
    norm({"k": P("a", "b"), "z": whole}, {"k": P("a", "b"), "z": P("a")})


@pytest.mark.parametrize(
  ("dtype", "size", "value", "limit", "expected"),
  [
    ("float16", 2, 60000.0, 1.0, 2**-0.5),
    ("float16", 2048, 2000.0, 1.0, 2048**-0.5),
    ("float16", 2048, 2000.0, 70000.0, 70000 / 2048**0.5),
    ("float8_e4m3fn", 64, 400.0, 8.0, 1.0),
    ("bfloat16", 2, 3e18, 1.0, 2**-0.5),
    ("float32", 2, 0.0, 0.0, 0.0),
    ("float32", 2, 5.0, 0.0, 0.0),
  ],
)
def test_clip_by_global_norm_in_dtype_that_cannot_hold_the_norm(
  dtype, size, value, limit, expected
):
  tx, x = ow.clip_by_global_norm(limit), jnp.full(size, value, dtype)
  found, _ = tx.update(x, tx.init(x))
  assert found.dtype == x.dtype
  np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=4e-3)
  # Beside a wide variable, whose norm the narrow one cannot hold.
  mixed = {"narrow": jnp.ones(1, dtype), "wide": jnp.full(1, 1e6)}
  found = ow.clip_by_global_norm(5e5).update(mixed, tx.init(mixed))[0]["narrow"]
  np.testing.assert_allclose(np.asarray(found, np.float64), 0.5, rtol=1e-3)
