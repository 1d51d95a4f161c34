"""Sets up JAX before anything imports it, for the docstrings' examples too: simulated devices, and
a folder of compiled programs, which both test processes and the next run share.
"""

import gc
import os
import pathlib

# Processes that tests start inherit all of it.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
programs = pathlib.Path(__file__).parent / ".pytest_cache" / "programs"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # a tenth of the time
# A third of the time; tests/conftest.py says what is optimized in spite of it.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def _stay_on_one_processor():
  """Where each test process has one of its own; XLA prepares a compiler for every one that it sees,
  which takes a tenth of the time."""
  worker, count = (os.environ.get(f"PYTEST_XDIST_WORKER{end}") for end in ("", "_COUNT"))
  if worker and hasattr(os, "sched_setaffinity"):
    processors = sorted(os.sched_getaffinity(0))
    if int(count) >= len(processors):
      os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})


def pytest_configure():
  _stay_on_one_processor()


def pytest_collection_finish():
  gc.freeze()  # modules and cases are no garbage, and walking over them takes a tenth of the time


def pytest_addoption(parser):
  parser.addoption(
    "--tier",
    choices=["fast", "full"],
    default="fast",
    help="fast: every test outside the slow folders, with every value of each of its parameters "
    "(default); full: also their products, and the slow folders",
  )
  parser.addoption(
    "--fuzz-cases", type=int, default=60, help="random nestings to compare with NumPy (default: 60)"
  )
  parser.addoption("--fuzz-seed", type=int, default=0, help="seed of their choice (default: 0)")


def pytest_generate_tests(metafunc):
  if "fuzz_case" in metafunc.fixturenames:
    options = metafunc.config.option
    metafunc.parametrize(
      "fuzz_case", [(options.fuzz_seed, i) for i in range(options.fuzz_cases)], ids=str
    )
