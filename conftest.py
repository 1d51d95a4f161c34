"""Sets the simulated devices up before anything imports JAX, for the docstrings' examples too."""

import os

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_addoption(parser):
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
