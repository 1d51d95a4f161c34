"""Every optimizer that Optax exports: in all wrappers nested, and in a third of them alone."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import AXIS, WRAPPERS, assert_close, bits, mark_own, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes


# Exported, with a learning rate, but not to be built from defaults alone.
NOT_FROM_DEFAULTS = {
  "optax.contrib.dpsgd": "needs its clip, noise and key",
  "optax.contrib.schedule_free": "is itself a wrapper and needs an optimizer",
}


def exported_optimizers():
  """Name to optimizer, or to the error of building it, for all that take a learning rate."""
  found = {}
  for module in (optax, optax.contrib):
    for name, make in sorted(vars(module).items()):
      if name.startswith(("_", "scale_by_")) or not inspect.isfunction(make):
        continue
      rate = {"learning_rate", "max_learning_rate"} & set(inspect.signature(make).parameters)
      if rate:
        try:
          with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # noisy_sgd: deprecation of its default key
            built = make(**{rate.pop(): 0.01})
        except TypeError as error:
          built = error
        if isinstance(built, TypeError | optax.GradientTransformation):
          found[f"{module.__name__}.{name}"] = built
  return found


# (optimizer, wrapper) that cannot run under shard_map's default types, and why.
STOPPED_BY_OPTAX = dict.fromkeys(
  [("optax.lbfgs", name) for name, wrapped in WRAPPERS.items() if wrapped.owned],
  "the line search's conditionals have branches that vary over different axes",
)


# An exchange would leave their second sequence of parameters behind, and these wrappers say so.
HOLDS_Z = {"optax.contrib.schedule_free_adamw", "optax.contrib.schedule_free_sgd"}

MOVES = {"elastic_average", "local_steps", "diloco", "gossip_average"}

OPTIMIZERS = exported_optimizers()

NAMES = [name for name, built in OPTIMIZERS.items() if not isinstance(built, TypeError)]

PARAMS = {"kernel": jnp.arange(6.0).reshape(3, 2) / 7 + 0.1, "bias": jnp.array([0.3, -0.2])}

NUM_STEPS = 4


def test_optimizers_not_built_from_defaults_are_listed():
  assert {name for name, built in OPTIMIZERS.items() if isinstance(built, TypeError)} == set(
    NOT_FROM_DEFAULTS
  )
  assert len(NAMES) > 40


def objective(params, shift):
  return sum(jnp.sum((leaf - shift) ** 2) for leaf in jax.tree.leaves(params)) / 4


def train(tx, wrapped, params, state, shift, needs_obj_fn, towers=1):
  """NUM_STEPS steps as a scan, which holds the state's structure, dtypes and manual axes to what
  they were."""

  def step(carry, _):
    params, state = carry
    own = ow.per_shard(params, AXIS) if towers == 2 else params
    value, grads = jax.value_and_grad(objective)(own, shift)

    def fixed(p):  # the same function on all shards
      return objective(p, jnp.float32(0.5))

    # What line searches and loss-aware optimizers ask for.
    extra = {"value": fixed(params), "grad": jax.grad(fixed)(params), "value_fn": fixed}
    if needs_obj_fn:
      extra = {"obj_fn": fixed}
    updates, state = tx.update(
      wrapped.updates(grads, towers), state, params, **extra, **wrapped.extra_args
    )
    return (optax.apply_updates(params, updates), state), value

  (params, state), _ = jax.lax.scan(step, (params, state), None, length=NUM_STEPS)
  return params


# An age is computed once, and a simulation gives its own. reduce_towers, which is outermost, has
# settings of its own in each step of the other test.
NESTS = (
  set(WRAPPERS) - {"staleness_aware", "simulate_workers", "reduce_towers"},
  {"staleness_aware", "simulate_workers"},
)


def check_under_shard_map(name, wrappers, alone=None):
  """NUM_STEPS steps on two unequal shards, in each of those `alone`: finite, dtypes kept; and
  neutral settings, all of them nested, equal to the bare optimizer."""
  inner = OPTIMIZERS[name]
  needs_obj_fn = name == "optax.contrib.sophia"

  def run_all(params, shift):
    active, neutral = {}, []
    for wrapper in wrappers:
      if alone is not None and wrapper not in alone:
        continue
      wrapped = WRAPPERS[wrapper]
      tx = wrapped.make(inner, AXIS)
      state = mark_own(tx.init(params), replicated=not wrapped.owned)
      start = ow.per_shard(params, AXIS) if wrapped.owned else params
      trained = train(tx, wrapped, start, state, shift[0], needs_obj_fn, towers=2)
      active[wrapper] = jax.tree.map(lambda p: ow.per_shard(p, AXIS)[None], trained)
    for chosen in (set(), *NESTS):
      # All of them round each other compile in a fraction of the time that each alone takes.
      tx, wrapped = optax.with_extra_args_support(inner), WRAPPERS["all_reduce"]
      for wrapper in filter(chosen.__contains__, wrappers):
        tx = WRAPPERS[wrapper].neutral(tx)
      takes_stamp = "drop_stale" in chosen & set(wrappers)
      wrapped = WRAPPERS["drop_stale"] if takes_stamp else wrapped
      state = tx.init(params)
      neutral.append(train(tx, wrapped, params, state, jnp.float32(0.3), needs_obj_fn))
    return active, neutral

  mapped = jax.shard_map(
    run_all, mesh=mesh_of(2), in_specs=(P(), P(AXIS)), out_specs=(P(AXIS), P())
  )
  active, neutral = jax.jit(mapped)(PARAMS, jnp.array([0.1, 1.3]))
  for wrapper, trained in active.items():
    for leaf, start in zip(jax.tree.leaves(trained), jax.tree.leaves(PARAMS)):
      assert np.isfinite(leaf).all(), wrapper
      assert leaf.dtype == start.dtype, wrapper
      assert (np.asarray(leaf) != np.asarray(start)).any(), wrapper
  bare, *nested = neutral
  for trained in nested:
    assert_close(trained, bare, rtol=1e-5, atol=1e-6)


# What an optimizer keeps and asks for is one question, and what a wrapper does with it another.
# These ask for most. Each other is in a third of the wrappers alone, and in all of them nested.
ASKING = (
  "optax.adam",
  "optax.lbfgs",
  "optax.polyak_sgd",
  "optax.contrib.sophia",
  "optax.contrib.muon",
)


def wrappers_for(name):
  """Those that an optimizer is tried in, a different third for its neighbors."""
  turn = NAMES.index(name)
  tried = [w for k, w in enumerate(WRAPPERS) if name in ASKING or (k + turn) % 3 == 0]
  return [w for w in tried if not (name in HOLDS_Z and w in MOVES)]


def test_optimizers_table_tries_every_wrapper_often():
  tried = [wrapper for name in NAMES for wrapper in wrappers_for(name)]
  assert set(ASKING) <= set(NAMES)
  assert min(map(tried.count, WRAPPERS)) > 15


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_inside_wrappers_under_shard_map(name):
  stopped = {w for n, w in STOPPED_BY_OPTAX if n == name} | (MOVES if name in HOLDS_Z else set())
  allowed = [wrapper for wrapper in WRAPPERS if wrapper not in stopped]
  check_under_shard_map(name, allowed, set(wrappers_for(name)))


@pytest.mark.parametrize(("name", "wrapper"), STOPPED_BY_OPTAX)
@pytest.mark.xfail(raises=TypeError, strict=True, reason="Optax 0.2.8; see STOPPED_BY_OPTAX")
def test_optimizers_stopped_by_optax_under_shard_map_xfail(name, wrapper):
  check_under_shard_map(name, [wrapper])


@pytest.mark.parametrize("wrapper", sorted(MOVES))
@pytest.mark.parametrize("name", sorted(HOLDS_Z))
def test_schedule_free_inside_exchange_is_error(name, wrapper):
  with pytest.raises(ValueError, match="ScheduleFreeState inside would keep its z"):
    WRAPPERS[wrapper].make(OPTIMIZERS[name], AXIS).init(PARAMS)


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_neutral_wrappers_outside_jit_equal_bare(name):
  inner = optax.with_extra_args_support(OPTIMIZERS[name])
  # Those that search or orthogonalize take seconds a step, operation by operation.
  is_slow = name in ("optax.lbfgs", "optax.contrib.sophia", "optax.contrib.muon")
  num_steps = 1 if is_slow else 2
  grads = [jax.tree.map(lambda p, k=k: jnp.cos(p + k), PARAMS) for k in range(num_steps)]

  def fixed(params):
    return objective(params, jnp.float32(0.5))

  def run(tx, wrapped):
    params, state, seen = PARAMS, tx.init(PARAMS), []
    for grad in grads:
      extra = {"value": fixed(params), "grad": jax.grad(fixed)(params), "value_fn": fixed}
      if name == "optax.contrib.sophia":
        extra = {"obj_fn": fixed}
      updates, state = tx.update(
        wrapped.updates(grad), state, params, **extra, **wrapped.extra_args
      )
      params = optax.apply_updates(params, updates)
      seen.append(bits(updates))
    return seen

  expected = run(inner, WRAPPERS["all_reduce"])
  for wrapper in wrappers_for(name):
    wrapped = WRAPPERS[wrapper]
    assert run(wrapped.neutral(inner), wrapped) == expected, wrapper
