"""Studies run at their small size, and the pages of the site are what their results say."""

import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]

STUDIES = ROOT / "studies"

PAGES = ROOT / "docs" / "studies"

CHANCE = math.log(10)  # the loss of a network that knows nothing of ten digits

OF_BYTES = math.log(256)

NAMES = sorted(
  path.stem
  for path in STUDIES.glob("*.py")
  if path.stem not in ("lab", "tasks", "setting", "pages", "pods_at_scale")
)


def run(script, *arguments):
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
  command = [sys.executable, STUDIES / f"{script}.py", *arguments]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
  assert done.returncode == 0, done.stderr
  return done.stdout


def arms(path):
  return json.loads(path.read_text())["arms"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """The folder of all small results."""
  return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize("name", NAMES)
def test_studies_run_at_small_size(small, name):
  run(name, "--size", "small", "--results", small)
  for what, arm in arms(small / f"{name}.json").items():
    assert arm["best"] in arm["grid"]
    seeds = {0} if what.endswith("(inner rate)") else {0, 1}  # only tuned
    assert {run["seed"] for run in arm["runs"] if run["rate"] == arm["best"]} == seeds


def test_studies_models_in_one_program_match_sequential(monkeypatch):
  """Of seven models two programs' worth, the second filled up; on a CPU one after another."""
  monkeypatch.syspath_prepend(STUDIES)
  import setting
  import tasks

  rates, seeds = [(0.01 * (1 + k), 0.7) for k in range(7)], [0, 1, 0, 2, 0, 0, 1]
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    model = setting.Setting(tasks.text(8, 1, 0), 4)
    expected = model.diloco(2)(rates, seeds)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = model.diloco(2)(rates, seeds)
  for name, values in expected.items():
    np.testing.assert_allclose(found[name], values, rtol=1e-5)
  assert len(set(expected["test"].tolist())) == 7


def test_studies_pages_are_written_from_small_results(small, tmp_path):
  if not any(small.glob("*.json")):  # another process may run all studies
    run("bad_shards", "--size", "small", "--results", small)
  names = [path.stem for path in small.glob("*.json")]  # those that were run
  run("pages", "--results", small, "--docs", tmp_path, "--studies", *names)
  for name in names:
    page = (tmp_path / "studies" / f"{name.replace('_', '-')}.md").read_text()
    title, _, verdict, *_ = page.splitlines()
    assert title.startswith("# ") and verdict.startswith("**")
    for theme in ("light", "dark"):
      assert (tmp_path / "studies" / "pictures" / f"{name}-{theme}.svg").exists()


def test_studies_rerun_only_missing_results(tmp_path):
  results = tmp_path / "bad_shards.json"
  run("bad_shards", "--size", "small", "--results", tmp_path)
  content = json.loads(results.read_text())
  lost = content["arms"].pop("Krum, all sound")
  kept = content["arms"]["mean, all sound"]["runs"]
  kept[0]["train"] = 1234.5  # which no run would give
  results.write_text(json.dumps(content))
  run("bad_shards", "--size", "small", "--results", tmp_path)
  again = arms(results)
  assert again["mean, all sound"]["runs"] == kept
  assert again["Krum, all sound"] == lost


def test_studies_results_of_other_options_are_error(tmp_path):
  results = tmp_path / "bad_shards.json"
  results.write_text(json.dumps({"study": "bad_shards", "options": {"seeds": 3}, "arms": {}}))
  with pytest.raises(AssertionError, match="results of other options"):
    run("bad_shards", "--size", "small", "--results", tmp_path)
  assert json.loads(results.read_text())["options"] == {"seeds": 3}


def test_studies_pages_in_docs_match_results(tmp_path):
  run("pages", "--docs", tmp_path)
  written = sorted((tmp_path / "studies").glob("*.md"))
  assert [path.stem.replace("-", "_") for path in written] == NAMES
  for path in [*written, tmp_path / "what-to-expect.md"]:
    assert path.read_text() == (ROOT / "docs" / path.relative_to(tmp_path)).read_text(), path


@pytest.mark.parametrize("name", NAMES)
def test_studies_best_rate_is_not_at_edge_of_grid(name):
  chance = OF_BYTES if name in ("rounds", "newer_methods", "compressed_rounds") else CHANCE
  for arm, held in arms(PAGES / f"{name}.json").items():
    found = [run["validation"] for run in held["runs"] if run["rate"] == held["best"]]
    assert len(found) >= (1 if arm.endswith("(inner rate)") else 5), f"{name}: {arm}"
    if all(loss is not None and loss < chance for loss in found):
      assert not held["on_edge"], f"{name}: {arm}"
    else:  # Nothing is learned, at any rate of a grid as wide as there is.
      assert len(held["grid"]) == 12, f"{name}: {arm}"
