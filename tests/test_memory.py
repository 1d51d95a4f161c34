"""What a compiled step holds beside its arguments, from XLA's own analysis."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes

PARAMS = [jnp.ones((256, 256))] * 4
TREE = sum(p.nbytes for p in PARAMS)
SMALL = 0.05  # of the parameters: counters, norms of slices, alignment

# wrapper: (transformation, extra args, trees of the parameters' size in the state, written beside
# the arguments)
HELD = {
  "bare adam": (optax.adam(0.1), {}, 2, 0),
  "cross_shard": (ow.cross_shard(optax.adam(0.1), None), {}, 2, 0),
  "gather_towers": (ow.gather_towers(optax.adam(0.1), 2), {}, 3, 2),
  "drop_stale": (ow.drop_stale(optax.adam(0.1), 4), {"computed_at": jnp.int32(0)}, 2, 0),
  "elastic_average": (ow.elastic_average(optax.adam(0.1), None), {}, 3, 2.25),
  "elastic_average(rho)": (ow.elastic_average(optax.adam(0.1), None, rho=0.1), {}, 4, 2),
  "clip_variables": (ow.clip_variables(optax.adam(0.1), 1.0, 0), {}, 2, 1.25),
}


@pytest.mark.parametrize("name", HELD)
def test_a_donated_step_holds_the_state_once_and_little_else(name):
  tx, extra, in_state, beside = HELD[name]
  tx = optax.with_extra_args_support(tx)

  def step(params, state, grads, extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  state = tx.init(PARAMS)
  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(PARAMS, state, PARAMS, extra).compile()
  memory = compiled.memory_analysis()
  assert memory.argument_size_in_bytes == pytest.approx((2 + in_state) * TREE, rel=SMALL)
  assert memory.alias_size_in_bytes == pytest.approx(
    (1 + in_state) * TREE, rel=SMALL
  )  # nothing donated is copied
  assert memory.output_size_in_bytes == pytest.approx(memory.alias_size_in_bytes, rel=SMALL)
  assert memory.temp_size_in_bytes <= (beside + SMALL) * TREE
