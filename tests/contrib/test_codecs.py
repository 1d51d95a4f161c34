"""PowerSGD and majority votes in compressed reductions, against NumPy."""

import numpy as np
import pytest
import reference_codecs as ref
from compress_cases import LARGE, SHAPES, Run, changed, gradients, zeros
from helpers import AXIS

import optax_wrappers as ow


@pytest.mark.parametrize("num_shards", [2, 3, 4])
def test_majority_vote_over_shards_matches_numpy_and_tie_is_one(num_shards):
  """Vectors vote as well, and a tie is 1."""
  tx = ow.all_reduce(AXIS, codec=ow.contrib.majority_vote())
  grads = gradients(num_shards)
  updates = Run(tx, num_shards)(grads)
  for name, g in grads.items():
    votes = np.where(g >= 0, 1, -1).sum(0)
    np.testing.assert_array_equal(updates[name], np.where(votes >= 0, 1, -1))


# Linear codecs.


def test_power_sgd_ten_steps_match_numpy():
  """No longer: feedback and warm start make much of a rounding error, as the method has it."""
  run = Run(ow.all_reduce(AXIS, codec=ow.contrib.power_sgd(2)), 3)
  memory = dict(zip(LARGE, map(np.asarray, run.compressed.memory), strict=True))
  qs = {name: q if name == "stack" else q[0] for name, q in memory.items()}
  residuals = {name: np.zeros((3, *SHAPES[name])) for name in LARGE}
  for k in range(10):
    grads = gradients(3, seed=k)
    updates = run(grads)
    for name in LARGE:
      expected, residuals[name], qs[name] = ref.power_sgd(
        grads[name].astype(np.float64) / 3, residuals[name], qs[name], 2
      )
      np.testing.assert_allclose(updates[name], expected, rtol=1e-2, atol=1e-2)
      np.testing.assert_allclose(
        run.compressed.residual[name], residuals[name], rtol=1e-2, atol=1e-2
      )


def test_power_sgd_low_rank_matrix_arrives_within_rounding():
  rng = np.random.default_rng(0)
  low = rng.normal(size=(4, 48, 2)) @ np.ones((4, 2, 1)) @ rng.normal(size=(1, 1, 35))
  low = (low + rng.normal(size=(48, 1)) @ rng.normal(size=(1, 35))).astype(np.float32)
  run = Run(ow.all_reduce(AXIS, codec=ow.contrib.power_sgd(2)), 4, params=zeros({"w": (48, 35)}))
  for _ in range(2):
    # Each shard's part is of rank 2, and so is the mean.
    np.testing.assert_allclose(run({"w": low})["w"], low.mean(0), atol=1e-4)


def test_power_sgd_stacked_layers_are_compressed_separately():
  """Which they are not if a stack is taken for one matrix."""
  shape = (3, 64, 48)
  run = Run(ow.all_reduce(AXIS, codec=ow.contrib.power_sgd(2)), 2, params=zeros({"w": shape}))
  grads = gradients(2, shapes={"w": shape})
  q = np.asarray(run.compressed.memory[0])
  assert q.shape == (3, 48, 2)
  expected, *_ = ref.power_sgd(grads["w"] / 2, np.zeros((2, *shape)), q, 2)
  np.testing.assert_allclose(run(grads)["w"], expected, rtol=1e-3, atol=1e-3)


def test_power_sgd_nan_does_not_stay_in_state():
  run = Run(ow.all_reduce(AXIS, codec=ow.contrib.power_sgd(2)), 2)
  grads = gradients(2)
  updates = run(changed(grads, "odd", (1, 3, 3), np.nan))
  assert np.isnan(np.asarray(updates["odd"])).any()
  assert np.isfinite(np.asarray(run(grads)["odd"])).all()


def test_majority_vote_with_weight_is_error():
  tx = ow.all_reduce(AXIS, codec=ow.contrib.majority_vote())
  with pytest.raises(ValueError, match="every shard has one vote"):
    Run(tx, 2, extra_axes={"weight": 0})(gradients(2), weight=np.ones(2, np.float32))
