"""The state that all rules of the engine share."""

import jax.numpy as jnp
import optax
import pytest
from helpers import bits

import optax_wrappers as ow


def test_center_params_found_in_chain_and_mask():
  tx = optax.chain(
    optax.clip(1.0),
    optax.masked(ow.elastic_average(optax.adam(0.1), None), {"a": True, "b": False}),
  )
  state = tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
  assert bits(ow.center_params(state)["a"]) == bits(jnp.ones(2))
  with pytest.raises(ValueError, match="exactly one center, found 0"):
    ow.center_params(optax.adam(0.1).init(jnp.ones(2)))
