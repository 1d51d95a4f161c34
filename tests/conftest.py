"""Promotion rules under which nothing of ours may be promoted by accident."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def fresh_caches():
  """Compiled programs of one module are of no use to the next, and thousands of them take
  gigabytes."""
  yield
  jax.clear_caches()


@pytest.fixture(autouse=True)
def strict_promotion(request):
  """Tests marked optax_promotes use an optimizer of Optax that fails under strict promotion on its
  own, like Adam."""
  dtypes = "standard" if request.node.get_closest_marker("optax_promotes") else "strict"
  with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion("raise"):
    yield
