"""A stack of layers against layers of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fragments_cases import W, run
from helpers import AXIS, assert_close

import optax_wrappers as ow


def local(inner, **options):
  return ow.diloco(inner, AXIS, communication_period=3, **options)


def elastic(inner, **options):
  more = {"communication_period": 3, "moving_rate": 0.2}
  return ow.elastic_average(inner, AXIS, **more, **options)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
@pytest.mark.parametrize(
  ("make", "options"),
  [
    (local, {}),
    (local, {"delay": 2, "pull": 0.5}),
    (local, {"inner_state": "average"}),
    (local, {"inner_state": "reset"}),
    (elastic, {"rho": 0.3}),
    (elastic, {"order": "sequential"}),
    (elastic, {"delay": 1}),
  ],
)
def test_fragments_of_stack_equal_separate_layers(make, options, context):
  """In bfloat16 too, where an update is wider than its variable."""
  rng = np.random.default_rng(5)
  numbers = {"a": [1, 0, 2, 1], "b": [0, 2, 0]}

  def stacks(*leading):
    a, b = (rng.normal(size=(*leading, n, 3)).astype(np.float32) for n in (4, 3))
    return {"a": a, "b": b.astype(jnp.bfloat16)}

  def apart(tree):
    return {name: {str(i): x[..., i, :] for i in range(x.shape[-2])} for name, x in tree.items()}

  start, grads = stacks(), [stacks(W) for _ in range(8)]
  inner = optax.sgd(0.1, momentum=0.9)
  tx = make(inner, fragments={name: np.array(k) for name, k in numbers.items()}, **options)
  of_layers = {name: {str(i): n for i, n in enumerate(k)} for name, k in numbers.items()}
  by_layer = make(inner, fragments=of_layers, **options)
  found, state = run(tx, start, grads, context)
  expected, wanted = run(by_layer, apart(start), map(apart, grads), context)
  for x, y in zip(found, expected, strict=True):
    assert_close(apart(x), y)
  state, wanted = jax.device_get((state, wanted))
  assert_close(apart(jax.device_get(ow.center_params(state))), ow.center_params(wanted))
