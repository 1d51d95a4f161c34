"""staleness_aware with every optimizer and option against a server in NumPy."""

import pytest
from staleness_cases import COMPENSATIONS, INNERS, check_against_server


@pytest.mark.optax_promotes
@pytest.mark.parametrize("compensation", COMPENSATIONS)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(
  "options",
  [
    {"max_staleness": 2},
    {"weight": "inverse"},
    {"weight": "hinge", "max_staleness": 3, "normalize": True},
    {"weight": "cosine_gate", "scale": "updates"},
  ],
  ids=["drop", "gradients", "normalized", "updates"],
)
def test_staleness_aware_optimizers_and_options_match_numpy_server(options, inner, compensation):
  check_against_server("vmap", 3, inner, options, compensation)
