"""Reductions against NumPy, over shards and over towers, and what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_reductions as ref
from helpers import AXIS, CONTEXTS, mesh_of
from jax.sharding import PartitionSpec as P
from reductions_cases import RULES, assert_near, expected, gradients, over_shards

import optax_wrappers as ow
from optax_wrappers import reductions

FEWEST = {"trimmed_mean": 3, "krum": 4, "multi_krum": 4}


@pytest.mark.parametrize("context", sorted(CONTEXTS))
@pytest.mark.parametrize("name", ["median", "krum", "adasum"])
def test_reductions_every_context_matches_numpy(name, context):
  tree = gradients(np.random.default_rng(0), 4)
  assert_near(over_shards(context, RULES[name][0], tree, 4), expected(name, tree))


def is_defined(name, n):
  return n >= FEWEST.get(name, 1) and not ("adasum" in name and n & (n - 1))


@pytest.mark.parametrize(
  "name, n", [(name, n) for name in sorted(RULES) for n in (1, 2, 3, 5, 8) if is_defined(name, n)]
)
def test_reductions_over_shards_and_towers_match_numpy(name, n):
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


def test_median_of_more_rows_than_sorting_network_takes_matches_numpy():
  rows = np.random.default_rng(0).normal(size=(66, 5)).astype(np.float32)
  rows[:3, 0] = np.nan  # of which the median is NaN in the end, and not before
  tx = ow.reduce_towers(optax.sgd(-1.0), reduction=reductions.median())
  params = np.zeros(5, np.float32)
  found = jax.jit(lambda g: tx.update(g, tx.init(params), params)[0])(rows)
  ordered = np.sort(rows, axis=0)  # NaNs last
  np.testing.assert_allclose(found, (ordered[32] + ordered[33]) / 2, rtol=1e-6)


@pytest.mark.parametrize("n", [5, 6])
@pytest.mark.parametrize("bad", ["times -10", "NaN", "infinite", "zero", "one NaN"])
@pytest.mark.parametrize(
  "name", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]
)
def test_robust_reductions_with_bad_or_nan_shard_match_numpy(name, bad, n):
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
def test_krum_chooses_same_gradients_as_numpy(num_bad, num_chosen):
  # Many draws: of one alone a wrong number of neighbors often has the same nearest gradient.
  rng = np.random.default_rng(9)
  of_products = jax.jit(reductions.krum(num_bad, num_chosen).of_products)
  for _ in range(40):
    rows = rng.normal(size=(6, 3))
    coefficients = of_products((rows @ rows.T).astype(np.float32))
    np.testing.assert_allclose(
      np.asarray(coefficients) @ rows, ref.krum(rows, num_bad, num_chosen), 1e-5, 1e-6
    )


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum"])
def test_robust_reductions_ties_match_numpy(name):
  rng = np.random.default_rng(2)
  tree = {"w": rng.integers(-1, 2, size=(6, 40)).astype(np.float32)}
  tree["w"][4] = tree["w"][1]
  assert_near(over_shards("vmap", RULES[name][0], tree, 6), expected(name, tree))


@pytest.mark.parametrize("n", range(1, 20))
def test_sorting_network_puts_nan_last_as_numpy(n):
  rows = np.random.default_rng(n).integers(0, 3, size=(n, 300)).astype(np.float32)
  rows[np.random.default_rng(n).random(rows.shape) < 0.1] = np.nan
  np.testing.assert_array_equal(np.stack(reductions._sorted(rows)), np.sort(rows, 0))


@pytest.mark.parametrize(
  "dtype, tolerance", [("bfloat16", 2e-2), ("float16", 5e-3), ("float64", 1e-12)]
)
@pytest.mark.parametrize("name", ["median", "geometric_median"])
def test_reductions_16_bit_and_float64_keep_dtype_match_numpy(name, dtype, tolerance):
  with jax.enable_x64(dtype == "float64"):
    tree = gradients(np.random.default_rng(3), 4, dtype)
    found = over_shards("shard_map", RULES[name][0], tree, 4)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    assert_near(found, expected(name, tree), tolerance)


@pytest.mark.parametrize("per_leaf", [False, True])
def test_custom_reductions_match_numpy_and_are_hashable(per_leaf):
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


def test_reductions_of_summed_gradient_without_per_shard_is_error():
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
def test_reductions_errors_options_not_combinable(make, message):
  with pytest.raises(ValueError, match=message):
    make(reductions.median())


@pytest.mark.parametrize(
  "rule, n, message",
  [
    (reductions.trimmed_mean(2), 4, "trim must be below half of the 4 shards, got 2"),
    (reductions.krum(2), 4, "need at least 5 shards, got 4"),
    (reductions.krum(0, 4), 3, "need at least 4 shards, got 3"),
    (ow.contrib.adasum(), 3, "must be a power of 2, got 3"),
    (reductions.coordinatewise(lambda g: g), 2, r"fn must return \[1\] for \[2, 1\]"),
    (reductions.from_gram(lambda g: g), 2, "a coefficient for each of the 2 shards"),
  ],
)
def test_reductions_errors_number_of_shards_and_custom_functions(rule, n, message):
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
def test_reductions_errors_arguments_out_of_range(make, error, message):
  with pytest.raises(error, match=message):
    make()


BAD = [1e3, -1e6, 1e12, 1e18, -1e30, np.inf, np.nan]


@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "geometric_median"])
def test_promised_number_of_bad_shards_may_send_anything(name, n):
  """Alike, opposed, or each something else; the result stays among the good ones."""
  num_bad = (n - 3 if name == "krum" else n - 1) // 2
  rule = {
    "median": reductions.median,
    "trimmed_mean": lambda: reductions.trimmed_mean(num_bad),
    "krum": lambda: reductions.krum(num_bad),
    "geometric_median": reductions.geometric_median,
  }[name]()
  tx = ow.reduce_towers(optax.sgd(-1.0), reduction=rule)
  reduced = jax.jit(lambda g: tx.update(g, tx.init(g[0]), g[0])[0])
  rng = np.random.default_rng(n)
  for trial in range(30):
    rows = rng.normal(size=(n, 6)).astype("f")
    bad = rng.permutation(n)[:num_bad]
    kind = trial % 3
    for i, at in enumerate(bad):
      value = BAD[trial % len(BAD)] if kind < 2 else rng.choice(BAD)
      rows[at] = value * (-1) ** (i * kind) * (1 if kind == 0 else rng.normal(size=6))
    good = np.delete(rows, bad, 0)
    found = reduced(rows)
    # Of the geometric median: 2 (n - b) / (n - 2 b) radii (Pillutla et al., lemma 1).
    center = good.mean(0)
    radius = np.linalg.norm(good - center, axis=1).max()
    bound = 2 * (n - num_bad) / (n - 2 * num_bad) * radius
    assert np.linalg.norm(found - center) <= bound, (kind, rows)
    if name in ("median", "trimmed_mean"):
      assert (found >= good.min(0)).all() and (found <= good.max(0)).all()


@pytest.mark.parametrize(
  "values", [[1.0, 1.0, 1.0, 1000.0, 1000.0], [1.0, 1.0, 1e6], [1.0, 1.0, 1e18]]
)
def test_geometric_median_of_equal_majority_is_its_value(values):
  tx = ow.reduce_towers(optax.sgd(-1.0), reduction=reductions.geometric_median())
  found, _ = tx.update(jnp.float32(values), tx.init(jnp.zeros(())), jnp.zeros(()))
  assert float(found) == pytest.approx(1.0, abs=1e-5)
