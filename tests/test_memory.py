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
