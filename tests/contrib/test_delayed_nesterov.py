"""Delayed Nesterov as an outer optimizer."""

import jax
import numpy as np
import optax
import pytest

import optax_wrappers as ow


@pytest.mark.parametrize("is_wide", [True, False])
def test_delayed_nesterov_buffer_of_one_equals_nesterov(is_wide):
  """Under a schedule, which counts updates."""
  with jax.enable_x64(is_wide):
    differences = np.random.default_rng(1).normal(size=(6, 4)).astype("d" if is_wide else "f")
    schedule = optax.linear_schedule(1.0, 0.1, 6)
    pair = (
      ow.contrib.delayed_nesterov(schedule, 0.9, buffer=1),
      optax.sgd(schedule, 0.9, nesterov=True),
    )
    states = [tx.init(differences[0]) for tx in pair]
    updates = [jax.jit(tx.update) for tx in pair]
    for d in differences:
      (ours, states[0]), (theirs, states[1]) = (u(d, s) for u, s in zip(updates, states))
      assert ours.dtype == d.dtype
      np.testing.assert_allclose(ours, theirs, rtol=1e-12 if is_wide else 1e-6)


@pytest.mark.parametrize(
  ("options", "match"),
  [({"momentum": 1.0}, "momentum must be"), ({"buffer": 0}, "buffer must be at least 1, got 0")],
)
def test_delayed_nesterov_errors_momentum_and_buffer(options, match):
  with pytest.raises(ValueError, match=f"delayed_nesterov: {match}"):
    ow.contrib.delayed_nesterov(0.7, **({"buffer": 2} | options))
