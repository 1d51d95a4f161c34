"""Checks that the installed wheel is imported, is complete, and needs neither Flax nor any tool."""

import importlib.metadata
import importlib.util
import pathlib

import optax_wrappers

for name in optax_wrappers.__all__:
  getattr(optax_wrappers, name)
assert "site-packages" in optax_wrappers.__file__, optax_wrappers.__file__
assert (pathlib.Path(optax_wrappers.__file__).parent / "py.typed").exists()
assert importlib.util.find_spec("flax") is None
metadata = importlib.metadata.metadata("optax_wrappers")
extras = metadata.get_all("Provides-Extra")
assert extras == ["bucket", "examples", "flax", "ray", "studies", "tpu", "tunix"], extras
assert optax_wrappers.__version__ == metadata["Version"]
print(f"optax_wrappers {optax_wrappers.__version__}: {len(optax_wrappers.__all__)} names")
