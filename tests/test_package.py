"""What the package says of itself."""

import importlib.metadata
import re
import tomllib

from fences import PAGES, README, ROOT

import optax_wrappers as ow


def first(pattern, name):
  return re.search(pattern, (ROOT / name).read_text(), re.M)[1]


def test_package_version_is_equal_in_all_files():
  declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
  assert ow.__version__ == importlib.metadata.version("optax_wrappers") == declared
  assert first(r"^version: (\S+)$", "CITATION.cff") == declared
  assert first(r"^## (\d+\.\d+\.\d+)", "CHANGELOG.md") == declared


def test_package_tools_are_pinned_and_not_extras():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  extras = set(project["project"]["optional-dependencies"])
  assert extras == {"bucket", "examples", "flax", "ray", "studies", "tpu", "tunix"}
  for group, tools in project["dependency-groups"].items():
    for tool in tools:
      assert "==" in tool or tool.startswith(("equinox", "obstore")), (group, tool)


def test_workflows_pin_actions_by_commit_and_publish_the_tested_wheel():
  workflows = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
  used = [use for text in workflows.values() for use in re.findall(r"uses: (.*)", text)]
  assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", use) for use in used), used
  build, test, publish = workflows["release.yml"].split("    needs: ")
  assert "python -m build" in build and "upload-artifact" in build
  assert "build" not in publish.split("steps:")[1]
  assert ".ci/run dist/*.whl" in test


def test_newest_tested_versions_are_at_least_the_oldest():
  pins = {}
  for name in ("oldest", "newest"):
    lines = re.findall(r"^(\w+)==([\d.]+)$", (ROOT / ".ci" / f"{name}.txt").read_text(), re.M)
    pins[name] = {package: tuple(map(int, version.split("."))) for package, version in lines}
  assert pins["oldest"].keys() == pins["newest"].keys() >= {"jax", "optax", "chex"}
  assert all(pins["newest"][package] >= version for package, version in pins["oldest"].items())


def test_package_projections_and_inspect_export_documented_names():
  for module in (ow.projections, ow.inspect):
    for name in module.__all__:
      assert getattr(module, name).__doc__, name
  assert "NormRange" not in ow.projections.__all__
  assert not hasattr(ow.projections, "l2_ball")


def test_docs_code_lines_fit_width_of_site():
  shown = []
  for page in (ROOT / "docs").rglob("*.md"):
    for indent, code in re.findall(r"^( *)```+.*\n((?:.*\n)*?)\1```", page.read_text(), re.M):
      shown += [line.removeprefix(indent) for line in code.splitlines()]
  for source in (ROOT / "optax_wrappers").rglob("*.py"):
    shown += re.findall(r"^ *((?:>>>|\.\.\.) .*)", source.read_text(), re.M)
  assert [line for line in shown if len(line) > 76] == []


def test_docs_links_to_files_of_repository_exist():
  for page in [README, *PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
      if not target.startswith("http"):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_api_reference_has_every_public_name_with_docstring():
  pages = (ROOT / "docs" / "reference").glob("*.md")
  reference = "".join(page.read_text() for page in pages)
  found = re.findall(r"::: optax_wrappers\.([\w.]+)$", reference, re.M)
  assert len(found) == len(set(found))
  by_use = set(re.findall(r"\[`([\w.]+)`\]\(reference/", (ROOT / "docs" / "api.md").read_text()))
  assert by_use == {name for name in found if name[-5:] != "State"} | {"train_state.TrainState"}
  rooms = {"inspect", "exchange", "states", "sharded", "pods", "contrib"}
  inside = {f"{room}.{name}" for room in rooms for name in getattr(ow, room).__all__}
  inside -= {f"sharded.{name}" for name in ow.__all__}  # which are at the top as well
  assert set(found) == (set(ow.__all__) - rooms) | inside | {"train_state.TrainState"}
  for name in ow.__all__:
    assert getattr(ow, name).__doc__, name
