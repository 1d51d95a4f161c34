"""Staleness policies against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from staleness_cases import POLICIES

import optax_wrappers as ow

# Policies.


@pytest.mark.parametrize("name", POLICIES)
def test_staleness_policies_match_numpy_and_age_zero_is_one(name):
  ours, theirs = POLICIES[name]
  ages = np.arange(-3, 40, dtype=np.int32).reshape(-1, 1)
  found = jax.jit(ours)(ages)
  assert (found.shape, found.dtype) == (ages.shape, jnp.float32)
  assert_close(found, theirs(ages), rtol=2e-6)
  assert float(ours(jnp.int32(0))) == 1.0


def test_cosine_gate_is_zero_from_cutoff_on():
  weights = np.asarray(jax.jit(ow.staleness.cosine_gate(4))(np.arange(6, dtype=np.int32)))
  assert list(weights > 0) == [True] * 4 + [False] * 2


def test_staleness_policies_traced_parameter_and_product_match_numpy():
  def rate_of(a):
    return ow.staleness.polynomial(a)(jnp.arange(4)) * ow.staleness.exponential(a)(jnp.arange(4))

  ages = np.arange(4)
  assert_close(jax.jit(rate_of)(np.float32(0.3)), (1.0 + ages) ** -0.3 * np.exp(-0.3 * ages))


@pytest.mark.parametrize(
  "make",
  [
    lambda: ow.staleness.inverse(-1),
    lambda: ow.staleness.polynomial(-0.5),
    lambda: ow.staleness.hinge(1.0, -1),
    lambda: ow.staleness.exponential(-1.0),
    lambda: ow.staleness.cosine_gate(0),
  ],
)
def test_staleness_policies_errors_parameter_out_of_range(make):
  with pytest.raises(ValueError, match=r"must be (at least|above)"):
    make()


def test_staleness_policies_weigh_rollouts_in_loss():
  """The same function weighs rollouts: the page's three lines, in NumPy."""
  rng = np.random.default_rng(2)
  losses, versions, step = rng.normal(size=6), np.array([7, 3, 12, 12, 9, 10]), 12
  age = jnp.asarray(step - versions, jnp.int32)
  w = jnp.where(age <= 8, ow.staleness.polynomial(0.5)(age), 0.0)
  loss = (w * jnp.asarray(losses, jnp.float32)).sum() / jnp.maximum((w > 0).sum(), 1).astype(float)
  kept = [i for i in range(6) if step - versions[i] <= 8]
  expected = sum(losses[i] / math.sqrt(1 + step - versions[i]) for i in kept) / len(kept)
  assert float(loss) == pytest.approx(expected, rel=1e-5)
