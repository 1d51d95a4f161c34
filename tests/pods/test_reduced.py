"""Pods whose messages a reduction combines, so that a bad one spoils nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from directory_cases import START, center_of, pod, received, sent, train

import optax_wrappers as ow
from optax_wrappers import reductions


def optimizer(reduction, codec=None, **options):
  options = {"outer": optax.sgd(1.0), "communication_period": None} | options
  return ow.local_steps(optax.sgd(0.1), None, reduction=reduction, codec=codec, **options)


@pytest.mark.parametrize("codec", [None, ow.codecs.quantize(8)], ids=["plain", "8 bits"])
def test_median_of_pods_survives_one_that_sends_parameters_times_1000(tmp_path, codec):
  tx = optimizer(reductions.median(), codec)
  pods = [pod(tmp_path, name, quorum=3) for name in "abc"]
  held = [one.join(tx, START) for one in pods]
  for _ in range(2):
    before = jax.tree.map(np.asarray, ow.center_params(held[0][1]))
    held = [train(tx, *one, slope) for one, slope in zip(held, (1.0, 2.0, 3.0), strict=True)]
    params, state = held[2]
    held[2] = jax.tree.map(lambda x: x * 1000, params), state
    said = [p.send(tx, x, s) for p, (x, s) in zip(pods, held, strict=True)]
    held = received(tx, pods, [(x, s) for (x, _), s in zip(held, said, strict=True)])
    for params, state in held:
      assert center_of(state) == center_of(held[0][1])
      # Differences of 0.1, 0.2 and one below zero, of the bad pod.
      np.testing.assert_allclose(before["b"] - params["b"], 0.1, atol=1e-2)
  for one in pods:
    assert one.report.present == ("a", "b", "c") and one.report.cut == ("c",)
    assert one.report.norms["c"] > 1000 > 10 > one.report.norms["a"]
    assert "; cut: c (norm " in str(one.report)
    assert one.report.metrics()["norm/c"] == one.report.norms["c"]
    assert one.report.metrics()["cut"] == 1.0


@pytest.mark.optax_promotes
def test_penalty_of_pods_leaves_out_one_that_moves_too_far(tmp_path):
  """It keeps a state, which travels with the messages; a pod that comes back begins again."""
  tx = optimizer(ow.contrib.penalty("pods", warmup=3, temperature=1e3, clip=1e6))
  pods = [pod(tmp_path, name, quorum=3) for name in "abc"]
  held = [one.join(tx, START) for one in pods]
  slopes = [1.0, 1.1, 0.9]
  for r in range(8):
    slopes = [slope * (1 + 0.1 * (-1) ** r) for slope in (1.0, 1.1, 0.9)]
    held = received(tx, pods, sent(tx, pods, held, slopes))
  before = np.asarray(held[0][0]["b"])
  held = received(tx, pods, sent(tx, pods, held, [1.0, 1.0, 1000.0]))
  np.testing.assert_allclose(before - np.asarray(held[0][0]["b"]), 0.1, rtol=1e-3)
  assert [int(s.reduction_state[0].count) for _, s in held] == [9, 9, 9]
  again = pod(tmp_path, "c", quorum=3)
  held[2], pods[2] = again.join(tx, START), again
  held = received(tx, pods, sent(tx, pods, held, [1.0, 1.0, 1.0]))
  assert [int(s.reduction_state[0].count) for _, s in held] == [10, 10, 1]
  assert len({str(center_of(state)) for _, state in held}) == 1


@pytest.mark.parametrize(
  ("reduction", "options", "error"),
  [
    (reductions.median(), {}, r"reduction \(or a setting of it\) must"),
    (reductions.trimmed_mean(1), {"max_age": 1}, "late messages count less by a weight"),
    (reductions.krum(1), {"quorum": 3}, "krum: .* need at least 4 shards, got 3"),
    (ow.contrib.adasum(), {}, "the number of shards must be a power of 2"),
    (ow.contrib.penalty(None), {}, "what reduction returns must be equal for all messages"),
    (ow.contrib.radial_mean("workers"), {}, "messages need a reduction over the axis 'pods'"),
  ],
  ids=["other", "late", "few", "power of 2", "no axis", "other axis"],
)
def test_join_errors_reduction_that_pods_cannot_use(tmp_path, reduction, options, error):
  pod(tmp_path, "a", quorum=3).join(optimizer(reductions.trimmed_mean(1)), START)
  with pytest.raises(ValueError, match=error):
    pod(tmp_path, "b", **{"quorum": 5} | options).join(optimizer(reduction), START)


def test_weight_with_votes_is_error_before_anything_is_written(tmp_path):
  tx = optimizer(reductions.median())
  one = pod(tmp_path, "a")
  params, state = train(tx, *one.join(tx, START), 1.0)
  with pytest.raises(ValueError, match="every pod has one vote because of the reduction"):
    one.exchange(tx, params, state, weight=20)
  assert not list(tmp_path.rglob("*.msg"))
  params, _ = one.exchange(tx, params, state)
  np.testing.assert_allclose(params["b"], START["b"] - jnp.float32(0.1), rtol=1e-6)
