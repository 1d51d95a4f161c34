"""What the package says of itself."""

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
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


def test_a_tag_of_another_version_is_refused(tmp_path):
  for name in ("pyproject.toml", "CITATION.cff", ".ci/check_version.py"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / name, tmp_path / name)

  def refused(tag, heading):
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## 0.0.1\n")
    command = [sys.executable, tmp_path / ".ci" / "check_version.py", tag]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode == 0) == (run.stderr == "")
    return run.stderr

  version = ow.__version__
  assert "placeholders: Repository, Issues" in refused(f"v{version}", f"{version}, 2026-01-02")
  project = tmp_path / "pyproject.toml"
  project.write_text(project.read_text().replace("//example.org/", "//example.com/"))
  assert not refused(f"v{version}", f"{version}, 2026-01-02")
  assert "CHANGELOG.md" in refused(f"v{version}", f"{version}, not released yet")
  assert "pyproject.toml" in refused("v99.0.0", "99.0.0, 2026-01-02")


def test_tools_are_pinned_and_no_extras():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  extras = set(project["project"]["optional-dependencies"])
  assert extras == {"bucket", "examples", "flax", "ray", "studies", "tpu", "tunix"}
  for group, tools in project["dependency-groups"].items():
    for tool in tools:
      assert "==" in tool or tool.startswith(("equinox", "obstore")), (group, tool)


def test_public_vocabularies_show_their_public_names_alone():
  for module in (ow.projections, ow.inspect):
    for name in module.__all__:
      assert getattr(module, name).__doc__, name
  assert "NormRange" not in ow.projections.__all__
  assert not hasattr(ow.projections, "l2_ball")
