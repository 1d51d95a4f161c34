"""Promotion rules under which the library must not promote by accident."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def fresh_caches():
  """Compiled programs of one module are useless to the next, and thousands of them take
  gigabytes."""
  yield
  jax.clear_caches()


@pytest.fixture(autouse=True)
def strict_promotion(request):
  """Tests marked optax_promotes use an Optax optimizer that fails under strict promotion by itself,
  such as Adam."""
  dtypes = "standard" if request.node.get_closest_marker("optax_promotes") else "strict"
  with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion("raise"):
    yield
