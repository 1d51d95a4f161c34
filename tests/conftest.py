"""The tiers of the suite, and promotion rules, so that the library promotes nothing by accident."""

import collections

import jax
import pytest
from tiers import SLOW_FOLDERS, every_value_once, is_slow

OPTIMIZED = pytest.StashKey()  # cases


def pytest_configure(config):
  for argument in config.args if config.option.tier == "fast" else ():
    if is_slow(config.invocation_params.dir / argument.split("::")[0]):
      raise pytest.UsageError(f"{argument} is slow and needs --tier full; this is --tier fast")


def pytest_report_header(config):
  if config.option.tier == "fast":
    folders = ", ".join(f"tests/{folder}" for folder in SLOW_FOLDERS)
    return f"tier: fast; products of parameters and {folders} only with --tier full"
  return "tier: full"


def pytest_ignore_collect(collection_path, config):
  return True if config.option.tier == "fast" and is_slow(collection_path) else None


def pytest_collection_modifyitems(config, items):
  functions = collections.defaultdict(list)
  for item in items:
    functions[item.nodeid.split("[")[0]].append(item)
  chosen = set()
  for cases in functions.values():
    parameters = [case.callspec.params if hasattr(case, "callspec") else {} for case in cases]
    chosen.update(cases[place] for place in every_value_once(parameters))
  if config.option.tier == "fast":
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
  else:
    config.stash[OPTIMIZED] = chosen


@pytest.fixture(autouse=True)
def optimized(request):
  """In the full tier, cases with each value of each parameter are compiled as a user's program is,
  in every folder; their products, and what tests start, are compiled quickly."""
  if request.node not in request.config.stash.get(OPTIMIZED, ()):
    yield
    return
  quickly = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", quickly)


@pytest.fixture(autouse=True)
def strict_promotion(request):
  """Tests marked optax_promotes use an Optax optimizer that fails under strict promotion by itself,
  such as Adam."""
  dtypes = "standard" if request.node.get_closest_marker("optax_promotes") else "strict"
  with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion("raise"):
    yield
