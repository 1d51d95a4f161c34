"""What the package says of itself."""

import importlib.metadata
import pathlib
import re
import tomllib

import optax_wrappers as ow

ROOT = pathlib.Path(__file__).parent.parent


def first(pattern, name):
  return re.search(pattern, (ROOT / name).read_text(), re.M)[1]


def test_the_version_is_the_same_everywhere():
  declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
  assert ow.__version__ == importlib.metadata.version("optax_wrappers") == declared
  assert first(r"^version: (\S+)$", "CITATION.cff") == declared
  assert first(r"^## (\d+\.\d+\.\d+)", "CHANGELOG.md") == declared


def test_tools_are_pinned_and_no_extras():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  assert set(project["project"]["optional-dependencies"]) == {"examples", "flax", "ray", "studies"}
  for group, tools in project["dependency-groups"].items():
    for tool in tools:
      assert "==" in tool or tool.startswith("equinox"), (group, tool)


def test_public_vocabularies_show_their_public_names_alone():
  for module in (ow.projections, ow.inspect):
    for name in module.__all__:
      assert getattr(module, name).__doc__, name
  assert "NormRange" not in ow.projections.__all__
  assert not hasattr(ow.projections, "l2_ball")
