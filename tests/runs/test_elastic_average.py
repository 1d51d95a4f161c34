"""elastic_average with a divided center against NumPy."""

import numpy as np
import optax
import pytest
from elastic_cases import run, simulate
from helpers import AXIS, CONTEXTS, as_numpy, assert_close

import optax_wrappers as ow

SHARDED_CASES = [("simultaneous", context) for context in CONTEXTS] + [
  ("sequential", c) for c in ("shard_map", "vmap")
]


@pytest.mark.parametrize(("order", "context"), SHARDED_CASES)
def test_elastic_average_shard_center_matches_numpy(context, order):
  """Three workers, so that no leaf divides evenly; against the NumPy simulator."""
  rng = np.random.default_rng(0)
  params = {
    "a": rng.normal(size=(2, 5)).astype(np.float32),
    "b": rng.normal(size=()).astype(np.float32),
  }
  grads = {
    "a": rng.normal(size=(5, 3, 2, 5)).astype(np.float32),
    "b": rng.normal(size=(5, 3)).astype(np.float32),
  }
  sgd = optax.sgd(0.1, momentum=0.9)
  tx = ow.elastic_average(
    sgd,
    AXIS,
    communication_period=2,
    moving_rate=0.2,
    rho=0.3,
    order=order,
    shard_center=True,
  )

  flat_params = np.concatenate([params["a"].ravel(), params["b"].ravel()])
  flat_grads = np.concatenate([grads["a"].reshape(5, 3, -1), grads["b"].reshape(5, 3, 1)], axis=-1)
  expected = simulate(
    flat_params,
    flat_grads,
    period=2,
    alpha=0.2,
    rho=0.3,
    lr=0.1,
    momentum=0.9,
    sequential=order == "sequential",
  )
  for (found, state), (x, c, _) in zip(run(context, tx, params, grads, 3), expected, strict=True):
    assert_close(np.concatenate([found["a"].reshape(3, -1), found["b"].reshape(3, 1)], axis=-1), x)
    assert {name: part.shape for name, part in state.center_share.items()} == {
      "a": (3, 2, 2),  # no dimension is a multiple of 3: the largest, 5, is filled up to 6
      "b": (),  # one element lies whole on each worker
    }
    assert state.center is None
    center = as_numpy(ow.center_params(state, params))
    assert center["a"].shape == (2, 5)
    assert_close(np.concatenate([center["a"].ravel(), center["b"].ravel()]), c)
