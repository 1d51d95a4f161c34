"""What a compiled step holds beside its arguments, from XLA's own analysis."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import WRAPPERS

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes

PARAMS = [jnp.ones((256, 256))] * 4
TREE = sum(p.nbytes for p in PARAMS)
SMALL = 0.05  # of the parameters: counters, norms of slices, alignment

ADAM = optax.adam(0.1)
# Forms that the table of wrappers does not have: (transformation, as `Wrapped.held`).
MORE = {
  "bare adam": (ADAM, (2, 0)),
  "elastic_average without rho": (ow.elastic_average(ADAM, None), (3, 2.25)),
  "one choice in another": (
    ow.simulate_workers(ow.cross_shard(ow.drop_stale(ADAM, 3), None, nonfinite="drop"), 5),
    (2 + 5, 0.25),
  ),
  "simulate_workers with compensation": (
    ow.simulate_workers(ow.staleness_aware(ADAM, compensation=ow.delay_compensation()), 5),
    (2 + 5 + 5, 0.25),
  ),
  "cross_shard without nonfinite": (ow.cross_shard(ADAM, None, nonfinite="drop"), (2, 0.25)),
}


@pytest.mark.parametrize("name", [*WRAPPERS, *MORE])
def test_a_donated_step_holds_the_state_once_and_little_else(name):
  """A row for every public wrapper, because it is a column of their table."""
  wrapped = WRAPPERS.get(name, WRAPPERS["cross_shard"])
  tx, (in_state, beside) = MORE.get(name) or (wrapped.make(ADAM, None), wrapped.held)
  tx, extra = optax.with_extra_args_support(tx), wrapped.extra_args
  grads = wrapped.updates(PARAMS, 2)
  num_grads = 2 if wrapped.stacked else 1

  def step(params, state, grads, extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  state = tx.init(PARAMS)
  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, grads, extra).compile()
  memory = compiled.memory_analysis()
  assert memory.argument_size_in_bytes == pytest.approx(
    (1 + num_grads + in_state) * TREE, rel=SMALL
  )
  # Nothing donated is copied.
  assert memory.alias_size_in_bytes == pytest.approx((1 + in_state) * TREE, rel=SMALL)
  assert memory.output_size_in_bytes == pytest.approx(memory.alias_size_in_bytes, rel=SMALL)
  assert memory.temp_size_in_bytes <= (beside + SMALL) * TREE


@pytest.mark.parametrize("compensation", [None, ow.delay_compensation(decay=0.9)])
def test_a_history_is_written_in_place(compensation):
  """XLA:CPU copies all of it in a step that reads a slot before it writes one."""
  tx = ow.staleness_aware(ADAM, max_staleness=4, history=True, compensation=compensation)

  def step(params, state, grads, computed_at):
    updates, state = tx.update(grads, state, params, computed_at=computed_at)
    return optax.apply_updates(params, updates), state

  donating = jax.jit(step, donate_argnums=(0, 1))
  memory = donating.lower(PARAMS, tx.init(PARAMS), PARAMS, 0).compile().memory_analysis()
  assert memory.output_size_in_bytes >= 9 * TREE  # the parameters twice, Adam's two and five
  assert memory.temp_size_in_bytes <= (0.25 + SMALL) * TREE
