"""What a logger is told of a state, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_local_steps as ref
from helpers import AXIS, assert_close, in_context, mesh_of, start_of_workers
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

W, STEPS, PERIOD = 4, 8, 3

RNG = np.random.default_rng(0)

TARGETS = RNG.normal(size=(STEPS, W, 6)) * np.arange(1, W + 1)[:, None]

START = RNG.normal(size=6)

CUT = {"a": np.array([0, 1]), "b": 1}  # the stack `a` and the vector `b`


def tree_of(rows):
  return {"a": rows[..., :4].reshape(*rows.shape[:-1], 2, 2), "b": rows[..., 4:]}


def told(state, params):
  """Each worker's metrics."""
  return jax.jit(ow.map_workers(ow.metrics, AXIS))(state, params)


def expected(parts):
  """Of DiLoCo in NumPy: each worker's distance from the center, and of the last pseudo-gradients of
  all fragments the norms."""
  options = {"num_workers": W, "period": PERIOD, "eta": 0.7, "mu": 0.9}
  options |= {"alpha": 0.0, "delay": 0, "fragments": parts}

  def grad(t, x):
    return x - TARGETS[t]

  xs, cs = ref.streaming_diloco_early(START, grad, STEPS, ref.Sgd(0.1), **options)
  norms = []
  for part in parts:
    center, before, at = START.copy(), START, 0
    for t in range(STEPS):
      if not np.array_equal(cs[t][part], center[part]):  # exchanged in this step
        at, before, center = t, center, cs[t]
    x, last = (xs[at - 1] if at else np.tile(START, (W, 1))), before
    moved = x - 0.1 * (x - TARGETS[at])
    norms.append(np.linalg.norm((last - moved.mean(0))[part]))
  return np.linalg.norm(xs[-1] - cs[-1], axis=1), norms


PARTS = {1: [np.arange(6)], 2: [np.arange(2), np.arange(2, 6)]}


@pytest.mark.parametrize("num_fragments", PARTS)
@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked", "pmap"])
def test_metrics_diloco_center_distance_and_snapshot_match_numpy(context, num_fragments):
  fragments = CUT if num_fragments == 2 else 1
  norm = optax.snapshot("pseudo_gradient_norm", optax.tree.norm)
  outer = optax.chain(norm, optax.sgd(0.7, momentum=0.9, nesterov=True))
  options = {"communication_period": PERIOD, "fragments": fragments, "outer": outer}
  tx = ow.local_steps(optax.sgd(0.1), AXIS, **options)
  params, state = start_of_workers(tx, jax.tree.map(np.float32, tree_of(START)), W)

  def step(params, state, target):
    grads = jax.tree.map(jnp.subtract, params, target)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, ow.metrics(state, params), ow.metrics(state, params, AXIS)

  axes = (0, ow.worker_axes(state))
  train = in_context(context, step, W, (*axes, 0), (*axes, 0, None))
  for rows in TARGETS:
    params, state, own, mean = train(params, state, jax.tree.map(np.float32, tree_of(rows)))
  distances, norms = expected(PARTS[num_fragments])
  of_fragments = ["pseudo_gradient_norm", "pseudo_gradient_norm_2"][:num_fragments]
  assert own.keys() == mean.keys() == {"exchanges", "center_distance", *of_fragments}
  assert all(x.shape == () and x.dtype == jnp.float32 for x in mean.values())
  exchanges = sum((t + 1) % PERIOD in (0, 1) for t in range(STEPS)) if num_fragments == 2 else 2
  assert_close(own["exchanges"], np.full(W, exchanges))
  assert_close(own["center_distance"], distances, rtol=1e-5)
  assert_close(mean["center_distance"], distances.mean(), rtol=1e-5)
  for name, norm in zip(of_fragments, norms, strict=True):
    assert_close(mean[name], norm, rtol=1e-5)
  assert mean["exchanges"] == exchanges
  # Outside of the step, and of jit.
  of_all = functools.partial(ow.metrics, axis_name=AXIS)
  assert_close(ow.map_workers(ow.metrics, AXIS)(state, params), own)
  assert_close(ow.map_workers(of_all, AXIS, out_axes=None)(state, params), mean)


@pytest.mark.parametrize("make", [ow.elastic_average, ow.contrib.gossip_average, ow.local_steps])
def test_metrics_exchanges_counted_for_every_synchronization(make):
  tx = make(optax.sgd(0.1), AXIS, communication_period=2)
  params, state = start_of_workers(tx, np.ones(3, np.float32), W)
  quietly = functools.partial(tx.update, exchange=False)
  update, quiet = (jax.jit(ow.map_workers(one, AXIS)) for one in (tx.update, quietly))
  alone = jax.jit(ow.map_workers(lambda s, p: tx.update(None, s, p, exchange=True), AXIS))
  for call in (update, update, quiet, quiet, update, update):  # the counter counts on
    _, state = call(params, state, params)
  _, state = alone(state, params)
  found = told(state, params)
  assert_close(found["exchanges"], np.full(W, 3.0))
  if make is ow.elastic_average:
    distance = np.linalg.norm(1 - np.asarray(state.center))
    assert distance > 0
    assert_close(found["center_distance"], np.full(W, distance))
  else:
    assert found.keys() == {"exchanges"}


@pytest.mark.parametrize("context", ["vmap", "shard_map"])
def test_metrics_drop_rate_nonfinite_and_residual_in_chain(context):
  """Everything at once, in a chain: each number once, a shard's own and the mean."""
  codec = ow.codecs.signs()
  inner = ow.cross_shard(optax.sgd(0.1), AXIS, nonfinite="drop", codec=codec)
  tx = optax.chain(optax.clip(100.0), ow.drop_stale(inner, 1, axis_name=AXIS))
  params = {"k": np.zeros((64, 64), np.float32)}
  state = jax.jit(lambda: ow.stack_workers(tx.init(params), W, replicated=True))()
  axes = ow.worker_axes(state, replicated=True)
  grads = np.random.default_rng(0).normal(size=(3, W, 64, 64)).astype(np.float32)
  grads[1, 2, 0, 0] = np.nan
  stamps = np.array([[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 0, 1]], np.int32)

  def step(g, stamp, state, params):
    _, state = tx.update({"k": g}, state, params, computed_at=stamp)
    return state, ow.metrics(state, params), ow.metrics(state, params, AXIS)

  run = in_context(context, step, W, (0, 0, axes, None), (axes, 0, None))
  for g, stamp in zip(grads, stamps):
    state, own, mean = run(g, stamp, state, params)
  residuals = np.asarray(ow.get_state(state, ow.states.CompressedState).residual["k"])
  lengths = np.linalg.norm(residuals.reshape(W, -1), axis=1)
  assert lengths.min() > 0
  names = {"drop_rate", "staleness_mean", "nonfinite_shards", "residual_norm"}
  assert own.keys() == mean.keys() == names
  ages = np.arange(3)[:, None] - stamps
  assert_close(mean["drop_rate"], (ages > 1).mean(), rtol=1e-6)
  assert_close(mean["staleness_mean"], ages.mean(), rtol=1e-6)
  assert mean["nonfinite_shards"] == 1
  assert_close(own["residual_norm"], lengths, rtol=1e-5)
  assert_close(mean["residual_norm"], lengths.mean(), rtol=1e-5)
  without = jax.eval_shape(ow.map_workers(ow.metrics, AXIS, in_axes=(axes,)), state)
  assert without.keys() == names - {"residual_norm"}


@pytest.mark.parametrize("fragments", [1, 2])
def test_metrics_codec_residual_norm_of_each_fragment(fragments):
  options = {"communication_period": 2, "outer_momentum": 0.0, "fragments": fragments}
  tx = ow.diloco(optax.sgd(0.1), AXIS, codec=ow.codecs.signs(), **options)
  first = {"a": np.zeros((64, 64), np.float32), "b": np.zeros((32, 128), np.float32)}
  params, state = start_of_workers(tx, first, W)
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), params)
  update = jax.jit(ow.map_workers(tx.update, AXIS))
  for _ in range(2):
    _, state = update(grads, state, params)
  found = told(state, params)
  for name, one in zip(["residual_norm", "residual_norm_2"], state.compressed):
    kept = [np.asarray(x).reshape(W, -1) for x in jax.tree.leaves(one.residual)]
    assert len(kept) == 2 // fragments
    lengths = np.sqrt(sum((x**2).sum(1) for x in kept))
    assert lengths.min() > 0
    assert_close(found[name], lengths)


def test_metrics_repeated_name_is_numbered():
  tx = ow.drop_stale(ow.staleness_aware(optax.sgd(0.1), max_staleness=0), 5)
  state = tx.init(jnp.zeros(2))
  state = state.replace(dropped=jnp.array(1), accepted=jnp.array(1))
  found = ow.metrics(state)
  assert list(found) == ["drop_rate", "staleness_mean", "drop_rate_2", "staleness_mean_2"]
  assert found["drop_rate"] == 0.5 and found["drop_rate_2"] == 0


def test_metrics_of_optax_state_are_empty():
  assert ow.metrics(optax.adam(0.1).init(jnp.zeros(2)), jnp.zeros(2)) == {}
  mapped = ow.map_workers(lambda s: ow.metrics(s, axis_name=AXIS), AXIS, out_axes=None)
  assert mapped(ow.stack_workers(optax.sgd(0.1, 0.9).init(jnp.zeros(2)), 2)) == {}


def test_metrics_send_four_bytes_per_name_only_for_mean():
  """A number for each name where the mean is asked for, and nothing where it is not."""
  tx = ow.diloco(optax.sgd(0.1), AXIS)
  params, state = start_of_workers(tx, np.zeros(8, np.float32), W)
  mesh = jax.make_mesh((W,), (AXIS,), axis_types=(AxisType.Auto,))

  def sent(fun, **options):
    mapped = jax.jit(ow.map_workers(fun, AXIS, mesh=mesh, **options))
    found = ow.inspect.compiled_collectives(mapped.lower(state, params).compile())
    return [(x.kind, x.num_bytes) for x in found]

  assert sent(ow.metrics) == []
  of_all = functools.partial(ow.metrics, axis_name=AXIS)
  assert sent(of_all, out_axes=None) == [("all-reduce", 8)]


def test_metrics_center_distance_of_masked_and_nnx_params():
  from flax import nnx

  tx = optax.masked(ow.diloco(optax.sgd(0.1), None), {"kernel": True, "bias": False})
  params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
  state = tx.init(params)
  moved = jax.tree.map(lambda x: x + 3, params)
  assert_close(ow.metrics(state, moved)["center_distance"], np.float32(6))

  model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, ow.diloco(optax.sgd(0.1), None), wrt=nnx.Param)
  model.bias[...] += 2.0
  found = ow.metrics(optimizer.opt_state, nnx.state(model, nnx.Param))
  assert_close(found["center_distance"], np.float32(np.sqrt(8)))


def test_metrics_center_distance_ignores_integers_and_prng_keys():
  params = {"x": jnp.zeros(2), "n": jnp.array(5), "key": jax.random.key(0)}
  state = ow.diloco(optax.sgd(0.1), None).init(params)
  moved = {"x": jnp.array([3.0, 4.0]), "n": jnp.array(9), "key": jax.random.key(1)}
  assert ow.metrics(state, moved)["center_distance"] == 5


def test_metrics_of_snapshot_are_scalars_only():
  measures = {"norm": optax.tree.norm, "all": lambda u: u, "tree": lambda u: {"a": u}}
  tx = optax.chain(*(optax.snapshot(*item) for item in measures.items()))
  state = tx.init(jnp.array([3.0, 4.0]))
  assert ow.metrics(state) == {"norm": 5}


def test_metrics_errors_count_of_each_whole_matrix():
  inner = ow.drop_stale(optax.sgd(0.1), 2)
  tx = ow.whole_matrices(inner, AXIS, specs=P(AXIS), mesh=mesh_of(4))
  with pytest.raises(ValueError, match=r"each matrix has its own drop_rate, \(4,\). Put its"):
    ow.metrics(tx.init(jnp.ones((8, 4))))
  outside = ow.drop_stale(ow.whole_matrices(optax.sgd(0.1), AXIS, mesh=mesh_of(4), specs=P()), 2)
  assert float(ow.metrics(outside.init(jnp.ones((8, 4))))["drop_rate"]) == 0.0


def test_metrics_errors_unknown_params_unmapped_and_unbound_axis():
  whole = ow.diloco(optax.sgd(0.1), None).init({"a": np.zeros(3, np.float32)})
  with pytest.raises(ValueError, match="params has nothing of the name of a, which the state has"):
    ow.metrics(whole, {"b": np.ones(3, np.float32)})
  tx = ow.diloco(ow.drop_stale(optax.sgd(0.1), 1), AXIS)
  params, state = start_of_workers(tx, np.zeros(3, np.float32), W)
  mend = r"Map it: map_workers\(metrics, axis_name\)\(opt_state, params\)"
  with pytest.raises(ValueError, match=f"drop_rate is \\({W},\\).*{mend}"):
    ow.metrics(state)
  with pytest.raises(ValueError, match=f"one worker's or shard's, .* is .*{mend}"):
    ow.metrics(state.replace(inner_state=()), params)
  with pytest.raises(ValueError, match="axis_name 'w' is not bound"):
    ow.metrics(state, axis_name=AXIS)
