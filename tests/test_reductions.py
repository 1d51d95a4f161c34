"""Reductions against NumPy, over shards and over towers, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_reductions as ref
from helpers import AXIS, CONTEXTS, in_context, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers import reductions

# Each of ours, NumPy's, and whether NumPy's is of each leaf or of all entries as one gradient; an
# entry is both.
RULES = {
  "median": (reductions.median(), ref.median),
  "trimmed_mean": (reductions.trimmed_mean(1), lambda g: ref.trimmed_mean(g, 1)),
  "krum": (reductions.krum(1), lambda g: ref.krum(g, 1, 1)),
  "multi_krum": (reductions.krum(1, 2), lambda g: ref.krum(g, 1, 2)),
  "geometric_median": (
    reductions.geometric_median(),
    lambda g: ref.geometric_median(g, 8, 1e-6),
  ),
  "adasum": (reductions.adasum(), ref.adasum),
  "adasum of all": (reductions.adasum(per_leaf=False), ref.adasum),
}
FEWEST = {"trimmed_mean": 3, "krum": 4, "multi_krum": 4}
SHAPES = {"kernel": (5, 3), "bias": (2,), "scale": (), "empty": (0, 2)}


def gradients(rng, n, dtype=jnp.float32):
  return {name: rng.normal(size=(n, *shape)).astype(dtype) for name, shape in SHAPES.items()}


def expected(name, tree):
  leaves, treedef = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), tree))
  rows = [x.reshape(len(x), -1) for x in leaves]
  if name == "adasum":
    results = [RULES[name][1](x) for x in rows]
  else:
    ends = np.cumsum([x.shape[1] for x in rows])
    results = np.split(RULES[name][1](np.concatenate(rows, 1)), ends[:-1])
  shaped = [r.reshape(x.shape[1:]) for r, x in zip(results, leaves)]
  return jax.tree.unflatten(treedef, shaped)


def over_shards(context, rule, tree, n):
  tx = ow.cross_shard(optax.sgd(-1.0), AXIS, reduction=rule)
  is_typed = context in ("shard_map", "explicit")
  update = in_context(
    context, lambda g: tx.update(g, tx.init(g))[0], n, (0,), None if is_typed else 0
  )
  found = jax.tree.map(np.asarray, update(tree))
  if is_typed:
    return found
  for x in jax.tree.leaves(found):  # all shards have the same bits
    np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
  return jax.tree.map(lambda x: x[0], found)


def assert_near(found, wanted, tolerance=1e-5):
  for name in wanted:
    np.testing.assert_allclose(
      np.asarray(found[name], np.float64), wanted[name], tolerance, tolerance, err_msg=name
    )


@pytest.mark.parametrize("context", sorted(CONTEXTS))
@pytest.mark.parametrize("name", ["median", "krum", "adasum"])
def test_every_context(name, context):
  tree = gradients(np.random.default_rng(0), 4)
  assert_near(over_shards(context, RULES[name][0], tree, 4), expected(name, tree))


def is_defined(name, n):
  return n >= FEWEST.get(name, 1) and not ("adasum" in name and n & (n - 1))


@pytest.mark.parametrize(
  "name, n", [(name, n) for name in sorted(RULES) for n in (1, 2, 3, 5, 8) if is_defined(name, n)]
)
def test_every_number_of_shards_and_towers(name, n):
  tree = gradients(np.random.default_rng(n), n)
  wanted = expected(name, tree)
  tolerance = 1e-3 if "adasum" in name else 1e-5  # of shards at nearly right angles
  assert_near(over_shards("vmap", RULES[name][0], tree, n), wanted, tolerance)
  for axis in (0, -1):
    tx = ow.reduce_towers(optax.sgd(-1.0), reduction=RULES[name][0], axis=axis)
    stacked = jax.tree.map(lambda x, a=axis: np.moveaxis(x, 0, a), tree)
    params = jax.tree.map(lambda x: x[0], tree)
    update = jax.jit(lambda g, p, tx=tx: tx.update(g, tx.init(p), p)[0])
    assert_near(update(stacked, params), wanted, tolerance)


@pytest.mark.parametrize("n", [5, 6])
@pytest.mark.parametrize("bad", ["times -10", "NaN", "infinite", "zero", "one NaN"])
@pytest.mark.parametrize(
  "name", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]
)
def test_a_bad_shard(name, bad, n):
  rng = np.random.default_rng(1)
  tree = jax.tree.map(lambda x: x + np.float32(3), gradients(rng, n))
  if bad == "one NaN":  # in one leaf of two shards
    tree["bias"][[0, 3], 1] = np.nan
  else:
    factor = {"times -10": -10.0, "NaN": np.nan, "infinite": np.inf, "zero": 0.0}[bad]
    for x in tree.values():
      x[2] *= np.float32(factor)
  found = over_shards("shard_map", RULES[name][0], tree, n)
  assert_near(found, expected(name, tree))
  if bad != "one NaN":  # of which two are more than trim=1 allows
    sound = jax.tree.map(lambda x: np.delete(x, 2, 0), tree)
    for x, rows in zip(jax.tree.leaves(found), jax.tree.leaves(sound)):
      assert (np.asarray(x) >= rows.min(0) - 3.1).all() and (np.asarray(x) <= rows.max(0)).all()


@pytest.mark.parametrize("num_bad, num_chosen", [(0, 1), (1, 1), (2, 3)])
def test_krum_chooses_whom_numpy_chooses(num_bad, num_chosen):
  # Many draws: of one alone a wrong number of neighbors often has the same nearest gradient.
  rng = np.random.default_rng(9)
  of_products = jax.jit(reductions.krum(num_bad, num_chosen).of_products)
  for _ in range(40):
    rows = rng.normal(size=(6, 3))
    coefficients = of_products((rows @ rows.T).astype(np.float32))
    np.testing.assert_allclose(
      np.asarray(coefficients) @ rows, ref.krum(rows, num_bad, num_chosen), 1e-5, 1e-6
    )


def test_adasum_of_a_gradient_that_is_zero():
  tree = gradients(np.random.default_rng(10), 4)
  for x in tree.values():
    x[1] = 0
  assert_near(over_shards("vmap", reductions.adasum(), tree, 4), expected("adasum", tree), 1e-3)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum"])
def test_ties(name):
  rng = np.random.default_rng(2)
  tree = {"w": rng.integers(-1, 2, size=(6, 40)).astype(np.float32)}
  tree["w"][4] = tree["w"][1]
  assert_near(over_shards("vmap", RULES[name][0], tree, 6), expected(name, tree))


@pytest.mark.parametrize("n", range(1, 20))
def test_the_network_sorts_with_nans_last(n):
  rows = np.random.default_rng(n).integers(0, 3, size=(n, 300)).astype(np.float32)
  rows[np.random.default_rng(n).random(rows.shape) < 0.1] = np.nan
  np.testing.assert_array_equal(np.stack(reductions._sorted(rows)), np.sort(rows, 0))


@pytest.mark.parametrize(
  "dtype, tolerance", [("bfloat16", 2e-2), ("float16", 5e-3), ("float64", 1e-12)]
)
@pytest.mark.parametrize("name", ["median", "geometric_median"])
def test_other_dtypes(name, dtype, tolerance):
  with jax.enable_x64(dtype == "float64"):
    tree = gradients(np.random.default_rng(3), 4, dtype)
    found = over_shards("shard_map", RULES[name][0], tree, 4)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    assert_near(found, expected(name, tree), tolerance)


def test_leaves_of_several_dtypes_and_sizes_over_two_axes():
  rng = np.random.default_rng(4)
  mesh = jax.make_mesh((2, 4), ("pod", "chip"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  tree = gradients(rng, 8) | {"narrow": rng.normal(size=(8, 7)).astype(jnp.bfloat16)}
  for name in ("median", "krum"):
    tx = ow.all_reduce(("pod", "chip"), reduction=RULES[name][0])

    def step(g, tx=tx):
      g = jax.tree.map(lambda x: x[0], g)
      return tx.update(g, tx.init(g))[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(("pod", "chip")), out_specs=P())
    assert_near(jax.jit(mapped)(tree), expected(name, tree), 1e-2)


def compiled(rule, shapes, n):
  tx = ow.all_reduce(AXIS, reduction=rule)

  def step(g):
    g = jax.tree.map(lambda x: x[0], g)
    return tx.update(g, tx.init(g))[0]

  mesh = mesh_of(n)
  place = NamedSharding(mesh, P(AXIS))
  grads = {
    name: jax.ShapeDtypeStruct((n, *shape), jnp.float32, sharding=place)
    for name, shape in shapes.items()
  }
  mapped = jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P())
  return jax.jit(mapped).lower(grads).compile()


def test_what_is_sent_and_held():
  shapes = {f"layer {i}": (100, 40) for i in range(4)}
  size = 4 * 100 * 40 * 4
  for name in ("median", "krum", "adasum"):
    program = compiled(RULES[name][0], shapes, 8)
    sent = [(one.kind, one.num_bytes) for one in ow.inspect.compiled_collectives(program)]
    grams = {"median": [], "krum": [("all-reduce", 256)], "adasum": [("all-reduce", 4 * 256)]}
    assert sent == [
      ("all-to-all", size),
      *grams[name],
      ("all-gather", size // 8),
    ]  # of each its part
    # Beside the gradient and the result: what is sent, what comes, and the copy that is cut.
    assert program.memory_analysis().temp_size_in_bytes < 3.5 * size


@pytest.mark.parametrize("per_leaf", [False, True])
def test_rules_of_ones_own(per_leaf):
  tree = gradients(np.random.default_rng(5), 3)
  del tree["empty"]
  unit = reductions.from_gram(lambda g: 1 / jnp.sqrt(jnp.diag(g)), per_leaf=per_leaf)
  found = over_shards("shard_map", unit, tree, 3)
  held = {name: np.asarray(x, np.float64).reshape(3, -1) for name, x in tree.items()}
  whole = np.sqrt(sum((x**2).sum(1) for x in held.values()))
  for name, x in held.items():
    norm = np.sqrt((x**2).sum(1)) if per_leaf else whole
    np.testing.assert_allclose(found[name].ravel(), (x / norm[:, None]).sum(0), 1e-5, 1e-6)
  first = reductions.coordinatewise(lambda g: g[0])
  assert_near(over_shards("vmap", first, tree, 3), jax.tree.map(lambda x: x[0], tree), 0)
  assert len({first, reductions.median(), first}) == 2  # they can be keys, and static arguments


def test_pods_whose_parameters_are_laid_out_by_xla():
  # Each pod of two devices holds its gradient in two halves, which stay where they are.
  mesh = jax.make_mesh((4, 2), (AXIS, "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  tree = {"w": np.random.default_rng(6).normal(size=(4, 64, 8)).astype(np.float32)}
  placed = jax.device_put(tree, NamedSharding(mesh, P(AXIS, "data")))
  for name in ("median", "krum"):
    tx = ow.all_reduce(AXIS, reduction=RULES[name][0])

    def step(g, tx=tx):
      g = jax.tree.map(lambda x: x[0], g)
      return tx.update(g, tx.init(g))[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P(), axis_names={AXIS})
    program = jax.jit(mapped).lower(placed).compile()
    kinds = {one.kind for one in ow.inspect.compiled_collectives(program)}
    assert kinds == {"all-reduce"}
    assert_near(program(placed), expected(name, tree))
  squares = reductions.from_gram(jnp.diag)  # for which the size of the products matters
  tx = ow.all_reduce(AXIS, reduction=squares)
  mapped = jax.shard_map(
    lambda g: tx.update(g["w"][0], tx.init(g["w"][0]))[0],
    mesh=mesh,
    in_specs=P(AXIS),
    out_specs=P(),
    axis_names={AXIS},
  )
  rows = tree["w"].astype(np.float64)
  wanted = np.einsum("i,ijk->jk", (rows**2).sum((1, 2)), rows)
  np.testing.assert_allclose(jax.jit(mapped)(placed), wanted, 1e-4, 1e-2)


def test_a_replicated_parameter_needs_per_shard():
  x = np.random.default_rng(7).normal(size=(4, 3)).astype(np.float32)
  tx = ow.cross_shard(optax.sgd(-1.0), AXIS, reduction=reductions.median())

  def step(w, x, own):
    grad = jax.grad(lambda w: jnp.sum(w * x[0]))(ow.per_shard(w, AXIS) if own else w)
    return tx.update(grad, tx.init(w), w)[0]

  def run(own):
    mapped = jax.shard_map(
      functools.partial(step, own=own), mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P()
    )
    return jax.jit(mapped)(np.zeros(3, np.float32), x)

  np.testing.assert_allclose(run(own=True), np.median(x, 0), 1e-6)
  with pytest.raises(ValueError, match=r"reduced before shards could be distinguished.*per_shard"):
    run(own=False)


@pytest.mark.parametrize(
  "make, message",
  [
    (
      lambda r: ow.cross_shard(optax.sgd(1.0), AXIS, reduction=r, nonfinite="drop"),
      'nonfinite="drop"',
    ),
    (lambda r: ow.all_reduce(AXIS, reduction=r, axis_index_groups=[[0, 1]]), "axis_index_groups"),
    (lambda r: ow.all_reduce(AXIS, reduction=r, sharded=True), "sharded cannot be used"),
    (
      lambda r: ow.all_reduce(AXIS, reduction=r, codec=ow.codecs.quantize()),
      "codec cannot be used",
    ),
    (
      lambda r: ow.gather_towers(optax.sgd(1.0), 2, reduction=r),
      "towers are added up as they come",
    ),
  ],
)
def test_what_they_cannot_be_combined_with(make, message):
  with pytest.raises(ValueError, match=message):
    make(reductions.median())


def test_every_shard_has_one_vote():
  x = np.arange(8, dtype=np.float32).reshape(4, 2)
  for outer in (
    lambda tx: tx,
    lambda tx: ow.drop_stale(tx, 1, axis_name=AXIS),
    lambda tx: ow.staleness_aware(tx, ow.staleness.inverse(), axis_name=AXIS),
    lambda tx: ow.gather_towers(tx, 1),
  ):
    tx = outer(ow.cross_shard(optax.sgd(1.0), AXIS, reduction=reductions.median()))
    takes_stamp = isinstance(jax.eval_shape(tx.init, x[0]), ow.StalenessState)
    extra = {"computed_at": 0} if takes_stamp else {"weight": 1.0}

    def update(g, tx=tx, extra=extra):
      return tx.update(g, tx.init(g), **extra)[0]

    with pytest.raises(ValueError, match="every shard has one vote"):
      jax.eval_shape(jax.vmap(update, axis_name=AXIS), x)

  # Nor inside a conditional of somebody else.
  hidden = optax.conditionally_transform(
    ow.cross_shard(optax.sgd(1.0), AXIS, reduction=reductions.median()), lambda step: step >= 0
  )
  stale = ow.drop_stale(hidden, 1, axis_name=AXIS)
  with pytest.raises(ValueError, match="every shard has one vote"):
    jax.eval_shape(
      jax.vmap(lambda g: stale.update(g, stale.init(g), computed_at=0)[0], axis_name=AXIS), x
    )
  towers = ow.reduce_towers(optax.sgd(1.0), reduction=reductions.median())
  with pytest.raises(ValueError, match="every tower has one vote"):
    towers.update(x, towers.init(x[0]), weight=np.ones(4, np.float32))


@pytest.mark.parametrize(
  "rule, n, message",
  [
    (reductions.trimmed_mean(2), 4, "trim must be below half of the 4 shards, got 2"),
    (reductions.krum(2), 4, "need at least 5 shards, got 4"),
    (reductions.krum(0, 4), 3, "need at least 4 shards, got 3"),
    (reductions.adasum(), 3, "must be a power of 2, got 3"),
    (reductions.coordinatewise(lambda g: g), 2, r"fn must return \[1\] for \[2, 1\]"),
    (reductions.from_gram(lambda g: g), 2, "a coefficient for each of the 2 shards"),
  ],
)
def test_too_few_shards_and_wrong_functions(rule, n, message):
  with pytest.raises(ValueError, match=message):
    over_shards("vmap", rule, {"w": np.ones((n, 2), np.float32)}, n)


@pytest.mark.parametrize(
  "make, error, message",
  [
    (lambda: reductions.trimmed_mean(-1), ValueError, "trim must be at least 0"),
    (lambda: reductions.trimmed_mean(0.1), TypeError, "trim must be a Python int"),
    (lambda: reductions.krum(-1), ValueError, "num_bad must be at least 0"),
    (lambda: reductions.krum(1, 0), ValueError, "num_chosen must be at least 1"),
    (lambda: reductions.geometric_median(0), ValueError, "iterations must be at least 1"),
    (lambda: reductions.geometric_median(eps=0.0), ValueError, "eps must be above 0"),
    (lambda: reductions.coordinatewise(3), TypeError, "fn must be a function"),
    (lambda: ow.cross_shard(optax.sgd(1.0), reduction=reductions.median), ValueError, "one of"),
  ],
)
def test_refuses(make, error, message):
  with pytest.raises(error, match=message):
    make()


def test_derivatives():
  rng = np.random.default_rng(8)
  tree = {"w": rng.normal(size=(5, 4)).astype(np.float32)}
  for name in ("median", "trimmed_mean", "geometric_median"):
    tx = ow.all_reduce(AXIS, reduction=RULES[name][0])

    @jax.jit
    def loss(tree, tx=tx):
      reduced = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(tree)
      return jnp.sum(jnp.sin(reduced["w"]))

    jax.test_util.check_grads(loss, (tree,), order=1, modes=["fwd", "rev"], atol=2e-2, rtol=2e-2)


def reduced(rule, grads):
  """What each shard gets."""
  tx = ow.all_reduce(AXIS, reduction=rule)
  return jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS))(grads)


@pytest.mark.parametrize("name", RULES)
def test_complex_gradients_are_pairs_of_reals(name):
  """One bad shard of four, in its imaginary part, beside a real leaf."""
  rule, reference = RULES[name]
  rng = np.random.default_rng(2)
  z = rng.normal(size=(4, 3)) + 1j * rng.normal(size=(4, 3))
  z[3] += 100j
  grads = {"z": z.astype(np.complex64), "x": rng.normal(size=(4, 2)).astype(np.float32)}
  found = jax.tree.map(np.asarray, reduced(rule, grads))
  pairs = np.concatenate([z.real, z.imag], 1)
  if rule.of_products is not None and not rule.per_leaf:
    whole = reference(np.concatenate([pairs, grads["x"].astype(np.float64)], 1))
    of_z, of_x = whole[:6], whole[6:]
  else:
    of_z, of_x = reference(pairs), reference(grads["x"].astype(np.float64))
  assert found["z"].dtype == jnp.complex64
  for shard in range(4):
    wanted = of_z[:3] + 1j * of_z[3:]
    np.testing.assert_allclose(found["z"][shard], wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["x"][shard], of_x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1.0, 1e18, 1e25])
def test_adasum_of_equal_gradients_is_their_mean_however_small_or_large(size):
  grads = np.full((4, 3), size, np.float32)
  np.testing.assert_allclose(reduced(reductions.adasum(), grads), grads, rtol=1e-5)


def test_adasum_of_one_gradient_whose_square_overflows_is_the_mean():
  grads = np.array([[1e25, 2e25], [1.0, -1.0]], np.float32)
  found = np.asarray(reduced(reductions.adasum(), grads))
  np.testing.assert_allclose(found[0], [5e24, 1e25], rtol=1e-5)
