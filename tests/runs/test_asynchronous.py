"""Asynchronous workers of equal durations against DiLoCo."""

import optax
import pytest
from helpers import AXIS, bits
from local_steps_cases import CONTEXTS, PERIOD, problem, run

import optax_wrappers as ow


@pytest.mark.optax_promotes
@pytest.mark.parametrize("context", ["vmap", *CONTEXTS])
def test_asynchronous_equal_durations_equal_diloco_bit_for_bit(context):
  """Rates and momentum are powers of two, whose products every compiler rounds equally."""
  task, options = problem(4), {"communication_period": PERIOD}
  outer = optax.sgd(0.5, momentum=0.5, nesterov=True)
  rule = ow.contrib.Asynchronous(outer, (1,) * 4, ow.staleness.polynomial())
  inner = optax.sgd(0.125, momentum=0.5)
  found, state = run(ow.exchange.periodic_exchange(inner, AXIS, rule, **options), task, context)
  rates = {"outer_learning_rate": 0.5, "outer_momentum": 0.5}
  expected, same = run(ow.diloco(inner, AXIS, **options, **rates), task, context)
  assert bits(found) == bits(expected)
  assert bits(ow.center_params(state)) == bits(ow.center_params(same))
