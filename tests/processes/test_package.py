"""Importing the package in a new process."""

import os
import subprocess
import sys


def test_import_starts_no_jax_backend():
  """jax.distributed.initialize must still be possible after it."""
  code = (
    "import jax, optax_wrappers; jax.config.update('jax_num_cpu_devices', 3);"
    " assert jax.device_count() == 3"
  )
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  environment["JAX_PLATFORMS"] = "cpu"
  subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=environment)
