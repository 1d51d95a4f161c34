"""The check of a tag before a release."""

import pathlib
import shutil
import subprocess
import sys

import optax_wrappers as ow

ROOT = pathlib.Path(__file__).parents[2]


def test_release_tag_of_other_version_is_error(tmp_path):
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
