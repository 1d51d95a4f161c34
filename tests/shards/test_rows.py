"""Reductions that need the gradients of all shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reductions_cases import RULES, assert_near, expected, gradients, reduced

import optax_wrappers as ow
from optax_wrappers import reductions


def test_rows_of_mixed_dtypes_over_two_axes_match_numpy():
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


def test_rows_collectives_bytes_and_temporary_memory():
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


def test_rows_of_pods_with_sharded_params_send_all_reduce_only():
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


def test_votes_with_weight_of_any_wrapper_is_error():
  x = np.arange(8, dtype=np.float32).reshape(4, 2)
  for outer in (
    lambda tx: tx,
    lambda tx: ow.drop_stale(tx, 1, axis_name=AXIS),
    lambda tx: ow.staleness_aware(tx, ow.staleness.inverse(), axis_name=AXIS),
    lambda tx: ow.gather_towers(tx, 1),
  ):
    tx = outer(ow.cross_shard(optax.sgd(1.0), AXIS, reduction=reductions.median()))
    takes_stamp = isinstance(jax.eval_shape(tx.init, x[0]), ow.states.StalenessState)
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


@pytest.mark.parametrize("name", RULES)
def test_rows_complex_gradients_are_pairs_of_reals(name):
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
