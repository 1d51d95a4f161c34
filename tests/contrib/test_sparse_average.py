"""Averages of randomly drawn entries."""

import jax
import numpy as np
import optax
import pytest
from helpers import AXIS
from local_steps_cases import drawn, steps_of

import optax_wrappers as ow


@pytest.mark.parametrize("delay", [0, 1])
def test_sparse_average_leaves_out_absent_worker_and_nan(delay):
  """All entries of four workers: the third is absent, and the fourth has a NaN."""
  rule = ow.contrib.SparseAverage(1.0)
  options = {"communication_period": 2, "delay": delay}
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, **options)
  grads = [[-1.0, -3.0, 5.0, np.nan]] * 2 + [[0.0] * 4]
  weights = [[1.0, 3.0, 0.0, 1.0]] * 3
  params, state = steps_of(tx, weights, grads, num_workers=4)
  np.testing.assert_allclose(params, [5.0, 5.0, -10.0, np.nan])  # (1 * 2 + 3 * 6) / 4
  assert int(state.exchanges) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sparse_average_with_shard_center_is_whole(dtype):
  """All entries, also with 64 bits and strict promotion."""
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    tx = ow.exchange.periodic_exchange(
      optax.sgd(1.0),
      AXIS,
      ow.contrib.SparseAverage(1.0),
      communication_period=1,
      shard_center=True,
    )
    x = np.arange(16, dtype=dtype).reshape(4, 4)
    state = ow.stack_workers(tx.init(x[0]), 4)
    updates, _ = jax.jit(ow.map_workers(tx.update, AXIS))(np.zeros_like(x), state, x)
    assert updates.dtype == dtype
    np.testing.assert_allclose(x + updates, [[6, 7, 8, 9]] * 4)


def test_sparse_average_draws_entries_anew_per_exchange_and_seed():
  """One of every two neighbors; in 40 exchanges each of them about 20 times."""
  rule = ow.contrib.SparseAverage(0.5, seed=3)
  found = np.stack([drawn(rule, count) for count in range(40)])
  a, b, rest = found[:, :2], found[:, 2:4], found[:, 4:]
  assert (a.sum(1) == 1).all() and (b.sum(1) == 1).all()
  assert (found.sum(0) >= 8).all() and (rest.sum(0) <= 32).all()
  others = [drawn(ow.contrib.SparseAverage(0.5, seed=4), count) for count in range(4)]
  assert (np.stack(others) != found[:4]).any()


@pytest.mark.parametrize(("options", "what"), [((0.0,), "fraction"), ((0.5, -1), "seed")])
def test_sparse_average_errors_fraction_and_seed(options, what):
  with pytest.raises(ValueError, match=f"SparseAverage: {what} must be"):
    ow.contrib.SparseAverage(*options)
