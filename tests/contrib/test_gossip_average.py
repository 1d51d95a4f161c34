"""gossip_average against NumPy's workers and matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_reductions as ref
from helpers import AXIS, CONTEXTS, as_numpy, assert_close, in_context
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

RATE, STEPS = 0.1, 7

ORDERS = ("adapt_first", "combine_first")


def doubly_stochastic(num_workers, num_permutations, rng):
  """A mean of permutations, of which one is the identity: as many entries in a row at most."""
  everyone = np.eye(num_workers)
  chosen = [
    everyone,
    *(everyone[rng.permutation(num_workers)] for _ in range(num_permutations - 1)),
  ]
  weights = rng.dirichlet(np.ones(len(chosen)))
  return sum(w * one for w, one in zip(weights, chosen))


def workers_at(rng, num_workers, dtype=jnp.float32):
  shapes = {"kernel": (3, 2), "bias": (2,), "scale": ()}
  return jax.tree.map(
    lambda shape: rng.normal(size=(num_workers, *shape)).astype(dtype),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def gradient(params, target):
  return jax.tree.map(lambda x, t: 2 * (x - t), params, target)


def flat(tree):
  """`[workers, entries]`."""
  leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
  return np.concatenate([x.reshape(len(x), -1) for x in leaves], 1)


def run(
  context, topology, num_workers, order, period=1, steps=STEPS, dtype=jnp.float32, asked=None
):
  """Our run and NumPy's."""
  rng = np.random.default_rng(num_workers)
  start, targets = (workers_at(rng, num_workers, dtype) for _ in range(2))
  tx = ow.contrib.gossip_average(
    optax.sgd(RATE), AXIS, topology=topology, communication_period=period, order=order
  )
  state = ow.stack_workers(tx.init(jax.tree.map(lambda x: x[0], start)), num_workers)

  def step(params, state, target, exchange=None):
    updates, state = tx.update(gradient(params, target), state, params, exchange=exchange)
    return optax.apply_updates(params, updates), state

  axes = ow.worker_axes(state)
  mapped = {
    exchange: in_context(
      context, functools.partial(step, exchange=exchange), num_workers, (0, axes, 0), (0, axes)
    )
    for exchange in {None, *(asked or ())}
  }
  params = start
  for i in range(steps):
    params, state = mapped[asked[i] if asked else None](params, state, targets)

  def matrix(number):
    if isinstance(topology, str):
      return ref.mixing_matrix(topology, num_workers, number)
    return np.asarray(topology[number % len(topology)])

  matrices = matrix
  if asked:  # NumPy's steps between exchanges have an identity of their own
    done = np.cumsum(asked)
    matrices = [matrix(done[i] - 1) if asked[i] else np.eye(num_workers) for i in range(steps)]
    matrices = matrices.__getitem__
  target = flat(targets)
  expected = ref.gossip_run(
    flat(start), lambda i, x, _: 2 * (x - target[i]), RATE, steps, period, matrices, order
  )
  return params, state, expected


@pytest.mark.parametrize("context", sorted(CONTEXTS))
@pytest.mark.parametrize("topology", ["exponential", "ring"])
def test_gossip_average_every_context_matches_numpy(context, topology):
  order = ORDERS[topology == "ring"]
  params, state, expected = run(context, topology, 4, order, period=2)
  np.testing.assert_allclose(flat(params), expected, 1e-5, 1e-6)
  assert [int(x) for x in jax.tree.leaves((state.step, state.since, state.exchanges))] == [7, 1, 3]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
  "topology, num_workers",
  [("exponential", n) for n in (1, 2, 3, 5, 8)]
  + [("pairs", n) for n in (1, 2, 4, 8)]
  + [("ring", n) for n in (1, 2, 3, 6)],
)
def test_gossip_average_every_topology_matches_numpy(topology, num_workers, order):
  params, _, expected = run("vmap", topology, num_workers, order)
  np.testing.assert_allclose(flat(params), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("context", ["vmap", "shard_map"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_permutations", [(1, 2), (2, 3, 4), (9,)])
def test_gossip_average_custom_matrices_match_numpy(context, order, num_permutations):
  rng = np.random.default_rng(7)
  topology = [doubly_stochastic(5, k, rng) for k in num_permutations]
  params, _, expected = run(context, topology, 5, order)
  np.testing.assert_allclose(flat(params), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_gossip_average_matrices_follow_rounds_not_steps(order):
  # Exchanges at even steps only would use one of the two matrices if steps were counted.
  asked = [False, True, False, True, True, False, True]
  params, state, expected = run("shard_map", "exponential", 4, order, asked=asked)
  np.testing.assert_allclose(flat(params), expected, 1e-5, 1e-6)
  assert int(state.exchanges) == 4


@pytest.mark.parametrize("order", ORDERS)
def test_gossip_average_bfloat16_params_match_numpy(order):
  params, _, expected = run("shard_map", "exponential", 4, order, dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
  np.testing.assert_allclose(flat(params), expected, 2e-2, 2e-2)


@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("topology", ["ring", "exponential", "matrix"])
def test_gossip_average_absent_or_nan_worker_matches_numpy(context, order, topology):
  """Against NumPy's matrices, in which an absent worker's column is moved to the diagonal."""
  rng = np.random.default_rng(3)
  matrices = [doubly_stochastic(5, 9, rng)] if topology == "matrix" else topology
  tx = ow.contrib.gossip_average(optax.sgd(RATE), AXIS, topology=matrices, order=order)
  start, grads = rng.normal(size=(5, 3)), rng.normal(size=(4, 5, 3))
  weights = np.float32([[1, 0, 3, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 2, 0], [1, 1, 0, 1, 1]])
  grads[3, 4, 1] = np.nan  # the last worker is lost in the last step
  state = ow.stack_workers(tx.init(jnp.zeros(3)), 5)
  axes = ow.worker_axes(state)

  def step(params, state, grads, weight):
    updates, state = tx.update(grads, state, params, participation=weight)
    return optax.apply_updates(params, updates), state

  mapped = in_context(context, step, 5, (0, axes, 0, 0), (0, axes))
  params, x = jnp.asarray(start, jnp.float32), start
  for t in range(4):
    params, state = mapped(params, state, jnp.asarray(grads[t], jnp.float32), weights[t])
    full = matrices[0] if topology == "matrix" else ref.mixing_matrix(topology, 5, t)
    is_here = (weights[t] > 0) & np.isfinite(grads[t]).all(1)
    mixing = np.where(is_here[:, None] & is_here, full, 0.0)
    mixing += np.diag(1 - mixing.sum(1))
    moved = x - RATE * grads[t]
    known = np.nan_to_num(moved if order == "adapt_first" else x)
    mixed = mixing @ known
    there = mixed if order == "adapt_first" else mixed + moved - x
    x = np.where(is_here[:, None], there, moved)
    np.testing.assert_allclose(params, x, 1e-5, 1e-5)


def lowered(tx, params, num_workers):
  mesh = jax.make_mesh((num_workers,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  state = ow.stack_workers(tx.init(params), num_workers)
  params = ow.stack_workers(params, num_workers)
  return jax.jit(ow.map_workers(tx.update, AXIS, mesh=mesh)).lower(params, state, params)


def test_gossip_average_collectives_and_bytes_per_topology():
  params = {f"layer {i}": jnp.zeros(300) for i in range(20)}
  size = 20 * 300 * 4
  rng = np.random.default_rng(0)

  def sent(topology):
    tx = ow.contrib.gossip_average(optax.sgd(0.1), AXIS, topology=topology)
    found = ow.inspect.compiled_collectives(lowered(tx, params, 8).compile())
    return [(one.kind, one.num_bytes, one.conditional) for one in found]

  hop = ("collective-permute", size, True)
  assert sent("ring") == [hop] * 2
  assert sent("exponential") == [hop] * 3  # one in each of three branches, of which one runs
  assert {kind for kind, *_ in sent([doubly_stochastic(8, 3, rng)])} == {"all-gather"}
  # XLA:CPU has no bfloat16 on its wire; what it is told to send is half the bytes.
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  text = lowered(ow.contrib.gossip_average(optax.sgd(0.1), AXIS), narrow, 8).as_text()
  assert text.count("collective_permute") == 3
  assert all("6000xbf16" in line for line in text.splitlines() if "collective_permute" in line)


def test_gossip_average_reaches_exact_mean_after_log2_rounds():
  params = jnp.asarray(np.random.default_rng(1).normal(size=(8, 5)), jnp.float32)
  for topology in ("exponential", "pairs"):
    tx = ow.contrib.gossip_average(optax.sgd(1.0), AXIS, topology=topology)
    state = ow.stack_workers(tx.init(params[0]), 8)
    update = jax.jit(ow.map_workers(tx.update, AXIS))
    x = params
    for _ in range(3):
      updates, state = update(jnp.zeros_like(x), state, x)
      x = optax.apply_updates(x, updates)
    np.testing.assert_allclose(x, np.broadcast_to(np.asarray(params).mean(0), x.shape), atol=1e-6)


@pytest.mark.parametrize("context", sorted(CONTEXTS))
def test_consensus_distance_every_context_matches_numpy(context):
  params = workers_at(np.random.default_rng(2), 4)
  # Whole numbers, which are no parameters, do not count.
  distance = in_context(
    context,
    lambda tree: ow.contrib.consensus_distance({**tree, "count": jax.lax.axis_index(AXIS)}, AXIS),
    4,
    (0,),
    None if context in ("shard_map", "explicit") else 0,
  )
  expected = ref.consensus_distance(flat(params))
  np.testing.assert_allclose(distance(params), np.full(np.shape(distance(params)), expected), 1e-6)


def test_gossip_average_round_counter_per_worker_is_error():
  tx = ow.contrib.gossip_average(optax.sgd(0.1), AXIS)
  params = jnp.zeros((4, 3))
  state = ow.stack_workers(tx.init(params[0]), 4)
  own = state.replace(exchanges=jnp.zeros(4, jnp.int32))
  mesh = jax.make_mesh((4,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  specs = ow.specs(own, workers=AXIS).replace(exchanges=P(AXIS))

  def step(params, state):
    state = state.replace(exchanges=state.exchanges[0])
    # The caller's choice, so that no other counter is asked before.
    return tx.update(params[0], state, params[0], exchange=True)[0][None]

  mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(AXIS), specs), out_specs=P(AXIS))
  with pytest.raises(ValueError, match=r"the state's exchanges differs"):
    jax.jit(mapped)(params, own)


@pytest.mark.parametrize(
  "arguments, error, message",
  [
    ({"topology": "star"}, ValueError, "topology must be one of 'exponential'"),
    ({"topology": 3}, TypeError, "or a sequence of doubly stochastic matrices"),
    ({"topology": []}, TypeError, "or a sequence of doubly stochastic matrices"),
    ({"topology": np.eye(3)}, ValueError, "Put a single matrix into a list"),
    ({"topology": [np.ones((2, 2))]}, ValueError, "add up to 1"),
    ({"topology": [[[1, 0], [1, 0]]]}, ValueError, "add up to 1"),
    ({"topology": [[[1, 1], [0, 0]]]}, ValueError, "add up to 1"),
    ({"topology": [[[2, -1], [-1, 2]]]}, ValueError, "at least 0"),
    ({"topology": [[[np.nan, 1], [1, 0]]]}, ValueError, "at least 0"),
    ({"order": "first"}, ValueError, "order must be one of"),
    ({"communication_period": 0}, ValueError, "communication_period must be at least 1"),
    ({"axis_name": ("a", "b")}, ValueError, "axis_name must be one axis"),
  ],
)
def test_gossip_average_errors_arguments(arguments, error, message):
  with pytest.raises(error, match=f"gossip_average: .*{message}"):
    ow.contrib.gossip_average(optax.sgd(0.1), **{"axis_name": AXIS, **arguments})


def test_gossip_average_errors_topology_of_other_worker_count():
  def update(**options):
    tx = ow.contrib.gossip_average(optax.sgd(0.1), AXIS, **options)
    state = ow.stack_workers(tx.init(jnp.zeros(())), 3)
    return ow.map_workers(tx.update, AXIS)(jnp.zeros(3), state, jnp.zeros(3))

  with pytest.raises(ValueError, match="needs a number of workers that is a power of 2, got 3"):
    update(topology="pairs")
  with pytest.raises(ValueError, match="matrices of the 3 workers, got one of 2 x 2"):
    update(topology=[np.eye(2)])


def test_gossip_average_resize_keeps_round_counter():
  # Three workers go on as three that were always three.
  tx = ow.contrib.gossip_average(optax.sgd(RATE, 0.9), AXIS)
  params = workers_at(np.random.default_rng(3), 4)
  state = ow.stack_workers(tx.init(jax.tree.map(lambda x: x[0], params)), 4)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  _, state = update(params, state, params)
  params, state = ow.resize_workers((params, state), [0, 2, 3])
  assert jax.tree.leaves(state.inner_state)[0].shape[0] == 3
  _, state = update(params, state, params)
  assert_close(as_numpy(state.exchanges), as_numpy(np.int32(2)))
