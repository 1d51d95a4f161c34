"""Workers that are averaged in pairs."""

import numpy as np
import optax
from helpers import AXIS
from local_steps_cases import partners, steps_of

import optax_wrappers as ow


def test_pairs_are_drawn_anew_and_repeat_after_num_pairings():
  found = [partners(8, count).tolist() for count in range(6)]
  assert len({tuple(one) for one in found[:3]}) == 3
  assert found[3:] == found[:3]


def test_pairs_partner_of_absent_or_nan_worker_steps_alone():
  """Two workers; the absent one returns to its center, and participates in the next round."""
  rule = ow.contrib.Pairs(0.0, 1.0, 0.5)
  tx = ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)
  for lost, weights in ((np.nan, [1.0, 1.0]), (-6.0, [1.0, 0.0])):
    grads, given = [[-2.0, lost], [-2.0, -4.0]], [weights, [2.0, 3.0]]
    params, _ = steps_of(tx, given[:1], grads[:1])
    np.testing.assert_allclose(params, [2.0, 0.0])
    params, _ = steps_of(tx, given, grads)
    np.testing.assert_allclose(params, [4.5, 3.5])  # (2 + 4) / 2 on, and halfway to the mean
