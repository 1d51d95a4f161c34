"""How a weight reaches what reduces by it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from nesting_cases import each_context, emitted, jitted, stamps

import optax_wrappers as ow


def test_weight_taken_by_two_links_of_chain_is_error():
  tx = optax.chain(ow.all_reduce("chip"), ow.all_reduce("pod"))
  mesh = jax.make_mesh(
    (2, 2), ("pod", "chip"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
  )

  def step(grad, weight):
    return tx.update(grad[0], tx.init(grad[0]), grad[0], weight=weight[0])[0]

  both = P(("pod", "chip"))
  with pytest.raises(ValueError, match=r"has been reduced already.*axis_name=\('pod', 'chip'\)"):
    jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(both, both), out_specs=P()))(
      np.ones(4, np.float32), np.ones(4, np.float32)
    )


HIDES = {
  "jit": jitted,
  "checkpoint": lambda tx: optax.GradientTransformationExtraArgs(
    tx.init, jax.checkpoint(tx.update)
  ),
  "two jits": lambda tx: jitted(optax.chain(jitted(tx))),
  "named_chain": lambda tx: jitted(optax.named_chain(("one", tx))),
}


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("hide", HIDES)
@each_context
def test_weight_through_inner_jit_arrives_in_every_call(context, hide, calls_before):
  """JAX does not trace an inner jit again that it has traced before: what is known must be in
  data."""
  hide, sgd = HIDES[hide], optax.sgd(1.0)
  grads, fresh = np.array([10.0, 1.0, 3.0, 5.0]), stamps(0, 1, 1, 0)
  mean = hide(ow.cross_shard(sgd, AXIS))
  total = hide(ow.cross_shard(sgd, AXIS, reduction="sum"))
  finite = hide(ow.cross_shard(sgd, AXIS, nonfinite="drop"))
  for call in range(calls_before + 1):
    if calls_before and not call:  # traced without a weight
      for tx in (mean, total, finite):
        emitted(context, tx, grads)
      continue
    weights = np.array([1.0, 3.0, 0.0, 2.0], np.float32)
    tx = ow.gather_towers(mean, 1)
    expected = -(weights * grads).sum() / weights.sum()
    assert_close(emitted(context, tx, grads, weight=weights), expected)
    for tx, expected in ((mean, -2.0), (total, -4.0), (finite, -3.0)):
      given = np.array([10.0, np.nan, 3.0, 5.0]) if tx is finite else grads
      stale = ow.drop_stale(tx, 0, axis_name=AXIS)
      assert_close(emitted(context, stale, given, computed_at=fresh), expected)


@pytest.mark.parametrize("calls_before", [0, 1])
def test_weight_lost_without_extra_args_is_error_in_every_call(calls_before):
  """A transformation that takes no extra args loses them: Optax says so by its type."""

  def narrow(tx):
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))

  sgd, grads = optax.sgd(1.0), np.array([10.0, 1.0])
  every = [
    narrow(ow.cross_shard(sgd, AXIS)),
    narrow(ow.cross_shard(sgd, AXIS, reduction="sum")),
    narrow(ow.cross_shard(sgd, AXIS, nonfinite="drop")),
    optax.chain(narrow(ow.all_reduce(AXIS)), sgd),
  ]
  for tx in every:
    for _ in range(calls_before):
      emitted("vmap", tx, grads)
    for _ in range(2):
      with pytest.raises(ValueError, match=r"passes on a weight .* takes no extra args"):
        emitted("vmap", ow.drop_stale(tx, 0, axis_name=AXIS), grads, computed_at=stamps(0, 1))
      with pytest.raises(ValueError, match=r"passes on a weight .* takes no extra args"):
        emitted("vmap", ow.gather_towers(tx, 1), grads, weight=np.ones(2, np.float32))


@pytest.mark.optax_promotes
def test_weight_into_multi_steps_around_reduction_is_error():
  """optax.MultiSteps gives what is inside the weight of its last call."""
  behind = optax.MultiSteps(ow.cross_shard(optax.sgd(1.0), AXIS), 2).gradient_transformation()
  ones = np.ones((2, 3))
  with pytest.raises(ValueError, match="takes the weight of its last call"):
    emitted("vmap", ow.reduce_towers(behind), ones, weight=ones.astype(np.float32))
  with pytest.raises(ValueError, match="takes the weight of its last call"):
    emitted("vmap", ow.drop_stale(behind, 0, axis_name=AXIS), np.ones(2), computed_at=stamps(0, 1))


def test_weight_passed_on_by_each_wrapper():
  """Who takes a weight hands on that of what it hands on."""
  seen = []

  def update(updates, state, params=None, **extra):
    seen.append(extra.get("weight"))
    return updates, state

  spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)

  def weights(tx, grads, **extra):
    def step(grad, extra):
      updates, _ = tx.update(grad, tx.init(jnp.zeros(())), jnp.zeros(()), **extra)
      return updates, seen.pop()

    return np.asarray(jax.jit(jax.vmap(step, axis_name=AXIS))(grads, extra)[1]).tolist()

  given = np.array([1.0, 3.0, 0.5], np.float32)
  assert weights(ow.cross_shard(spy, AXIS), np.ones(3), weight=given) == [4.5] * 3
  assert weights(ow.gather_towers(spy, 1), np.ones(3), weight=given) == [1.0, 3.0, 0.5]
  stacked = np.array([[1.0, 2.0], [0.0, 0.0], [4.0, 0.5]], np.float32)
  assert weights(ow.reduce_towers(spy), np.ones((3, 2)), weight=stacked) == [3.0, 0.0, 4.5]
  inner = ow.cross_shard(spy, AXIS)
  stale = ow.drop_stale(inner, 0, axis_name=AXIS)
  assert weights(stale, np.ones(3), computed_at=stamps(1, 0, 1)) == [2.0] * 3
  assert weights(stale, np.ones(3), weight=given, computed_at=stamps(1, 0, 1)) == [1.5] * 3
  seen.clear()
  tx = ow.cross_shard(spy, AXIS)
  jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS))(np.ones(3, np.float32))
  assert seen == [None]


def test_weight_is_not_passed_to_line_search():
  """Optax's raises on an extra arg that its function does not take."""
  inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
  tx = ow.cross_shard(inner, AXIS)

  def loss(p):
    return (p - 2.0) ** 2

  def step(grad, weight):
    param = jnp.array(0.0)
    search = {"value": loss(param), "grad": jax.grad(loss)(param), "value_fn": loss}
    return tx.update(grad, tx.init(param), param, weight=weight, **search)[0]

  grads, weights = np.array([-4.0, -8.0], np.float32), np.array([3.0, 1.0], np.float32)
  updates = np.asarray(jax.jit(jax.vmap(step, axis_name=AXIS))(grads, weights))
  assert updates[0] == updates[1] > 0


def test_weights_markers_in_state_survive_checkpoint():
  """Through pickle and Flax, which save no structure, and in mid-step."""
  import pickle

  from flax import serialization

  tx = ow.drop_stale(ow.gather_towers(ow.cross_shard(optax.adam(0.1), AXIS), 2), 0, axis_name=AXIS)
  state = tx.init(jnp.zeros(3))
  pickled = pickle.loads(pickle.dumps(state))
  restored = serialization.from_bytes(tx.init(jnp.ones(3)), serialization.to_bytes(state))
  for found in (pickled, restored):
    assert jax.tree.structure(found) == jax.tree.structure(state)


def test_weight_of_gradient_is_not_used_in_exchange():
  """The reduction in what `local_steps` keeps is of differences, and not of gradients."""
  options = {"outer": optax.sgd(1.0), "reduction": ow.all_reduce(AXIS)}
  rounds = ow.local_steps(optax.sgd(0.1), AXIS, communication_period=1, **options)
  tx = ow.drop_stale(rounds, max_staleness=0)

  @jax.jit
  def updates_of(grads, params):
    def step(grads, state, params):
      return tx.update(grads, state, params, computed_at=0, weight=2.0)[0]

    state = ow.stack_workers(tx.init(jnp.zeros(())), 4)
    return ow.map_workers(step, AXIS)(grads, state, params)

  updates = updates_of(np.arange(4, dtype=np.float32), np.zeros(4, np.float32))
  np.testing.assert_allclose(updates, [-0.15] * 4, rtol=1e-6)


def test_weight_lost_inside_local_steps_is_error():
  """What stands between a weight and what divides by it is seen inside an exchange too."""
  mean = ow.cross_shard(optax.sgd(1.0), "chip")
  deaf = optax.GradientTransformation(mean.init, lambda u, s, p=None: mean.update(u, s, p))
  params = np.zeros((), np.float32)

  def workers(inner):
    tx = ow.gather_towers(ow.local_steps(inner, "pod", communication_period=9), 2)

    def step(grad):
      state = tx.init(params)
      _, state = tx.update(grad, state, params, weight=3.0)
      return tx.update(grad * 5, state, params, weight=grad)[0]

    of_all = jax.vmap(jax.vmap(step, axis_name="chip"), axis_name="pod")
    return jax.jit(of_all)(np.array([[1.0, 2.0]], np.float32))

  # Of the towers g and 5 g, weighed by 3 and g, on two chips with g = 1 and 2.
  assert_close(workers(mean), np.full((1, 2), -(3 * 1 + 1 * 5 + 3 * 2 + 2 * 10) / (3 + 1 + 3 + 2)))
  with pytest.raises(ValueError, match="a wrapper outside passes on a weight that is lost"):
    workers(deaf)
