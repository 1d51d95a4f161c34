"""The order of the tests, and promotion rules under which the library must not promote by
accident."""

import collections

import jax
import pytest

# Their few tests are whole programs.
SLOWEST = ("test_studies.py", "test_docs.py", "test_multi_process.py")


def pytest_collection_modifyitems(items):
  """Begins with the slowest files, and then the largest, so that at the end no core is idle."""
  sizes = collections.Counter(item.path for item in items)

  def order(item):
    name = item.path.name
    rank = SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)
    return rank, -sizes[item.path], item.path

  items.sort(key=order)


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
