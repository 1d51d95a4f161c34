"""Conditionals around an update that sends something: `inspect.check_step` finds those in which one
shard may wait for another forever, and says nothing of the others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, mesh_of, specs_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers._core import _waits

pytestmark = pytest.mark.optax_promotes

WORKERS = 4

SENDERS = {
  "elastic_average": lambda inner: ow.elastic_average(
    inner, AXIS, communication_period=1, moving_rate=0.1
  ),
  "cross_shard": lambda inner: ow.cross_shard(inner, AXIS),
  "all_reduce": lambda inner: optax.chain(ow.all_reduce(AXIS), inner),
  "gather_towers": lambda inner: ow.gather_towers(ow.cross_shard(inner, AXIS), 2),
  "nonfinite": lambda inner: ow.cross_shard(inner, AXIS, nonfinite="drop"),
}

BY_GRADIENT = {
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
  "skip_not_finite": lambda tx: optax.MultiSteps(
    tx, 2, should_skip_update_fn=optax.skip_not_finite
  ),
  "skip_large_updates": lambda tx: optax.MultiSteps(
    tx, 2, should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=9.0)
  ),
}

CONTEXTS = ["tracked", "untracked", "pmap"]

REFUSED = r"one shard may enter the (conditional|loop) at .*\.py:\d+ .* a collective over \['w'\]"


def check(context, tx, in_jit=False):
  """Asks of one worker's step with everything its own; it is not run, because it could hang."""
  params = jnp.ones(2)
  state = jax.eval_shape(tx.init, params)
  update = jax.jit(lambda *args: tx.update(*args)) if in_jit else tx.update

  def step(params, state, grads):
    return update(grads, state, params)

  def stacked(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype), tree)

  args = stacked((params, state, params))
  if context == "pmap":
    mapped = jax.pmap(step, AXIS, devices=jax.devices()[:WORKERS])
    return ow.inspect.check_step(mapped, *args)
  axes = ow.worker_axes(args[1])
  shared = jax.tree.map(
    lambda a, x, y: y if a is None else x, axes, args[1], state, is_leaf=lambda a: a is None
  )

  def squeezed(params, state, grads):
    state = jax.tree.map(
      lambda a, x: x if a is None else x[0], axes, state, is_leaf=lambda a: a is None
    )
    return jax.tree.map(lambda x: x[None], step(params[0], state, grads[0]))

  specs = (P(AXIS), specs_of(axes), P(AXIS))
  mapped = jax.shard_map(
    squeezed,
    mesh=mesh_of(WORKERS),
    in_specs=specs,
    out_specs=P(AXIS),
    check_vma=context == "tracked",
  )
  return ow.inspect.check_step(mapped, args[0], shared, args[2])


@pytest.mark.parametrize("in_jit", [False, True], ids=["plain", "jit"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("outer", BY_GRADIENT)
@pytest.mark.parametrize("sender", SENDERS)
def test_check_step_collective_in_cond_on_own_gradient_is_error(sender, outer, context, in_jit):
  tx = BY_GRADIENT[outer](SENDERS[sender](optax.sgd(0.1)))
  # Under check_vma=True JAX refuses it first, where the two branches differ in their types.
  errors = (TypeError, ValueError) if context == "tracked" else ValueError
  with pytest.raises(errors, match=f"({REFUSED}|branches must have equal output types)"):
    check(context, tx, in_jit)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("place", ["cond", "switch", "scan in cond", "remat in cond", "while"])
def test_check_step_collective_in_users_cond_or_loop_is_error(place, context):
  elastic = SENDERS["elastic_average"](optax.sgd(0.1))

  def update(grads, state, params):
    def sends():
      return elastic.update(grads, state, params)[0]

    def scanned():
      return jax.lax.scan(lambda carry, _: (sends(), None), grads, None, length=2)[0]

    taken = {"scan in cond": scanned, "remat in cond": jax.checkpoint(sends)}.get(place, sends)
    if place == "while":
      own = jax.lax.while_loop(lambda g: g[0] > 0, lambda g: g + sends(), grads)
      return own, state
    if place == "switch":
      return jax.lax.switch((grads[0] > 0).astype(jnp.int32), [lambda: grads, taken]), state
    return jax.lax.cond(grads[0] > 0, taken, lambda: grads), state

  with pytest.raises(ValueError, match=REFUSED):
    check(context, optax.GradientTransformation(elastic.init, update))


def on_a_counter(tx):
  """Optax's conditional on a counter of its own, one value for all workers."""
  return optax.transforms.conditionally_transform(tx, lambda step: step % 2 == 0)


@pytest.mark.parametrize("context", CONTEXTS[1:])
@pytest.mark.parametrize(
  "outer", [on_a_counter, lambda tx: optax.MultiSteps(tx, 2)], ids=["counter", "MultiSteps"]
)
@pytest.mark.parametrize("sender", SENDERS)
def test_check_step_allows_collective_in_cond_on_counter(sender, outer, context):
  check(context, outer(SENDERS[sender](optax.sgd(0.1))))


@pytest.mark.parametrize("context", CONTEXTS)
def test_check_step_allows_collective_in_loop_or_cond_on_step(context):
  elastic = SENDERS["elastic_average"](optax.sgd(0.1))

  def update(grads, state, params):
    def body(carry, _):
      updates, state = elastic.update(grads, carry[1], params)
      return (updates, state), None

    carry = (grads, state)
    carry, _ = jax.lax.scan(body, carry, None, length=2)
    return jax.lax.cond(state.step > 3, lambda: body(carry, None)[0], lambda: carry)

  check(context, optax.GradientTransformation(elastic.init, update))


@pytest.mark.parametrize("check_vma", [True, False])
def test_check_step_finds_collective_in_jit_traced_before(check_vma):
  """JAX keeps the trace of an inner jit, and so nothing that only listens would hear it again."""
  tx = ow.cross_shard(optax.sgd(1.0), AXIS)
  update = jax.jit(tx.update)

  def own(x):
    return ow.per_shard(x, AXIS)

  def plain(g):
    return own(update(g[0], tx.init(g[0]), g[0])[0])[None]

  def careful(g):
    def inside():
      return own(update(g[0], tx.init(g[0]), g[0])[0])

    return jax.lax.cond(jnp.isfinite(g[0]), inside, lambda: 0 * g[0])[None]

  def mapped(step):
    return jax.shard_map(
      step, mesh=mesh_of(WORKERS), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )

  grads = jnp.arange(4.0)
  for _ in range(2):
    ow.inspect.check_step(mapped(plain), grads)
    with pytest.raises(ValueError, match=REFUSED):
      ow.inspect.check_step(jax.jit(mapped(careful)), grads)


def test_map_workers_checks_step_for_deadlock():
  tx = SENDERS["elastic_average"](optax.sgd(0.1))

  def step(params, state, x):
    params = jax.lax.cond(
      x > 0, lambda: optax.apply_updates(params, tx.update(x, state, params)[0]), lambda: params
    )
    return params

  params, state = ow.stack_workers((jnp.zeros(()), tx.init(jnp.zeros(()))), WORKERS)
  mapped = ow.map_workers(step, AXIS, mesh=mesh_of(WORKERS))
  with pytest.raises(ValueError, match="map_workers: " + REFUSED):
    mapped(params, state, jnp.arange(4.0))


def test_map_workers_checks_each_structure_and_static_value_once(monkeypatch):
  """Not each shape, but a step that waits only with another static value is still refused."""
  tx = SENDERS["elastic_average"](optax.sgd(0.1))
  checks, check = [], _waits.require_none
  monkeypatch.setattr(_waits, "require_none", lambda *args: checks.append(1) or check(*args))

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Batch:
    x: jax.Array
    may_skip: bool = dataclasses.field(metadata={"static": True})

  def step(params, state, batch):
    def after():
      return optax.apply_updates(params, tx.update(jnp.sum(batch.x), state, params)[0])

    return jax.lax.cond(batch.x[0] > 0, after, lambda: params) if batch.may_skip else after()

  params, state = ow.stack_workers((jnp.zeros(()), tx.init(jnp.zeros(()))), WORKERS)
  mapped = jax.jit(ow.map_workers(step, AXIS, mesh=mesh_of(WORKERS)))
  for size in (2, 3, 2):
    jax.block_until_ready(mapped(params, state, Batch(jnp.ones((WORKERS, size)), may_skip=False)))
  assert len(checks) == 1
  with pytest.raises(ValueError, match="map_workers: " + REFUSED):
    mapped(params, state, Batch(jnp.ones((WORKERS, 2)), may_skip=True))
  assert len(checks) == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_check_step_allows_branch_without_collective(check_vma):
  def step(w, x):
    def gradient():
      return jax.grad(lambda w: w * x[0])(ow.per_shard(w, AXIS))

    return jax.lax.cond(x[0] > 0, gradient, lambda: ow.per_shard(0.0, AXIS))[None]

  mapped = jax.shard_map(
    step, mesh=mesh_of(2), in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=check_vma
  )
  ow.inspect.check_step(mapped, jnp.array(1.0), jnp.array([1.0, -1.0]))
  np.testing.assert_array_equal(mapped(jnp.array(1.0), jnp.array([1.0, -1.0])), [1.0, 0.0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_check_step_allows_reduced_predicate_but_not_axis_index(check_vma):
  def step(decide):
    def one(x):
      return jax.lax.cond(
        decide(x), lambda: jax.lax.psum(x, AXIS), lambda: jax.lax.psum(0 * x, AXIS)
      )

    specs = {"in_specs": P(AXIS), "out_specs": P()}
    return jax.shard_map(one, mesh=mesh_of(2), check_vma=check_vma, **specs)

  x = jnp.array([1.0, -1.0])
  ow.inspect.check_step(step(lambda x: jax.lax.pmax(x, AXIS)[0] > 0), x)
  for own in (lambda x: x[0] > 0, lambda x: jax.lax.axis_index(AXIS) == 0):
    with pytest.raises(ValueError, match=REFUSED):
      ow.inspect.check_step(step(own), x)


def test_vmap_apply_if_finite_around_cross_shard_runs():
  tx = optax.apply_if_finite(SENDERS["cross_shard"](optax.sgd(1.0)), 5)
  grads = jnp.array([1.0, 2.0, 3.0])
  step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)
  np.testing.assert_allclose(step(grads), [-2.0, -2.0, -2.0])


@pytest.mark.parametrize("context", ["tracked", "untracked"])
def test_apply_if_finite_inside_elastic_average_matches_numpy(context):
  """One worker's NaN freezes its own inner state; the exchange goes on with what it has."""
  tx = SENDERS["elastic_average"](optax.apply_if_finite(optax.sgd(1.0), 5))
  state, start = tx.init(jnp.zeros(())), jnp.arange(4.0)
  specs = specs_of(axes := ow.worker_axes(state))

  def pick(fun, tree):
    return jax.tree.map(
      lambda a, x: x if a is None else fun(x), axes, tree, is_leaf=lambda a: a is None
    )

  def step(params, state, grad):
    updates, state = tx.update(grad[0], pick(lambda x: x[0], state), params[0])
    return (params[0] + updates)[None], pick(lambda x: x[None], state)

  mapped = jax.shard_map(
    step,
    mesh=mesh_of(4),
    in_specs=(P(AXIS), specs, P(AXIS)),
    out_specs=(P(AXIS), specs),
    check_vma=context == "tracked",
  )
  x, after = jax.jit(mapped)(start, ow.stack_workers(state, 4), jnp.array([1.0, np.nan, 1.0, 1.0]))
  moved = np.array([-1.0, 1.0, 1.0, 2.0])
  np.testing.assert_allclose(x, moved - 0.1 * moved, rtol=1e-6)
  np.testing.assert_allclose(ow.center_params(after), 0.1 * moved.sum(), rtol=1e-6)


def test_check_step_reads_predicate_from_inner_jit():
  """A jit that reduces makes all shards decide alike; one that returns their index does not."""

  def step_of(decide):
    def step(x):
      return jax.lax.cond(jax.jit(decide)(x), lambda: jax.lax.psum(x, AXIS), lambda: x)

    return jax.shard_map(
      step, mesh=mesh_of(4), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )

  ow.inspect.check_step(step_of(lambda x: jax.lax.pmax(x, AXIS)[0] > 0), jnp.ones(4))
  with pytest.raises(ValueError, match=REFUSED):
    ow.inspect.check_step(step_of(lambda x: jax.lax.axis_index(AXIS) > 0), jnp.ones(4))
