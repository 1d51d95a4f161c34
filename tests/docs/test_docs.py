"""Everything shown runs: each fence of README and docs by itself, with the results that its
comments promise."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# Lines that ask for simulated devices, before anything runs.
SIMULATED = r"jax\.config\.update\(\"jax_num_cpu_devices\".*\n"


def fences(page, language):
  return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.optax_promotes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_fences(page):
  with jax.numpy_rank_promotion("allow"):
    for code in fences(page, "python"):
      code = re.sub(SIMULATED, "", code)  # the devices exist already
      printed = io.StringIO()
      with contextlib.redirect_stdout(printed):
        exec(compile(code, str(page), "exec"), {})
      # What a print promises: a comment after it, or comment lines below it.
      promised = []
      for behind, below in re.findall(r"print\(.*?\)(?:  # (.*))?$((?:\n *# .*)*)", code, re.M):
        promised += [behind] if behind else re.findall(r"# (.*)", below)
      assert printed.getvalue().split("\n")[:-1] == promised, code


@pytest.mark.parametrize(
  "code",
  [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(fences(page, "python"))
    if re.search(SIMULATED, code)
  ],
)
def test_a_fence_sets_up_its_devices(code):
  """In a fresh Python process."""
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=200)


def test_readme_is_short_and_starts_with_code():
  lines = (ROOT / "README.md").read_text().splitlines()
  assert len(lines) <= 100
  assert "```python" in lines[:12]
  assert len(fences(ROOT / "README.md", "sh")) == 2


def test_code_fits_its_box_on_the_site():
  shown = []
  for page in (ROOT / "docs").rglob("*.md"):
    for indent, code in re.findall(r"^( *)```+.*\n((?:.*\n)*?)\1```", page.read_text(), re.M):
      shown += [line.removeprefix(indent) for line in code.splitlines()]
  for source in (ROOT / "optax_wrappers").rglob("*.py"):
    shown += re.findall(r"^ *((?:>>>|\.\.\.) .*)", source.read_text(), re.M)
  assert [line for line in shown if len(line) > 76] == []


def test_links_inside_the_repository_lead_somewhere():
  for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
      if not target.startswith("http"):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


NEEDS = {"async_ray": "ray", "pods_ray": "ray", "tunix_diloco": "tunix"}  # separate extras
GALLERY = {  # the end of each example's output
  "data_parallel_linen": r"test accuracy 0\.9",
  "data_parallel_nnx": r"test accuracy 0\.9",
  "muon_fsdp --steps 20": r"8 all-to-alls, 393,216 bytes\n.*\n.*one device (\d\.\d+), eight \1",
  "towers_on_one_device": r"held beside the arguments",
  "elastic_workers": r"0\.9\d+ of the center",
  "async_workers": r"replayed from the log of arrivals: parameters at most \de",
  "async_processes": r"worker 1: \d+ gradients, then killed\nworker 2: [1-9]",
  "async_ray": r"\d+ accepted, \d+ dropped",
  "simulated_workers --optimizers momentum": r"weights on gradients",
  "stale_rollouts": r"1 / \(1 \+ age\) +-4\.0",
  "bad_shards": r"krum\(2, 4\) +0\.1",
  "workers_come_and_go": r"4 workers, one killed, 3 went on, then 4: test accuracy 0\.9",
  "pods": r"\d+ rounds without c, \d+ with it; center \w+, test accuracy 0\.9",
  "pods_ray": r"without c, \d+ with it again; centers are equal: True; test accuracy 0\.9",
  "gossip_digits --steps 40": r"gossip, exponential +1\.00 x params",
  "diloco_transformer --steps 120 --warmup 20": r"DiLoCo: held-out loss",
  "linen_pods": r"two loops by hand differ by \d\.\de-0[678]",
  "tunix_diloco": r"resumed and unbroken differ by 0\.0, unbroken and by hand by \d\.\de-0[678]",
  "two_clusters": r"resumed bit for bit: True",
  "composed": r"19,240 bytes between devices, 2,405 between hosts",
  "checkpoint": r"the same bits as an unbroken run: True",
  "compressed_digits --codecs signs": r"signs +6\.5 .*\n2 bits, without feedback +11\.9",
}


@pytest.mark.parametrize(
  "example",
  [
    pytest.param(
      name,
      marks=pytest.mark.skipif(
        name in NEEDS and not importlib.util.find_spec(NEEDS[name]), reason="an extra of its own"
      ),
    )
    for name in GALLERY
  ],
)
def test_gallery(example):
  name, *options = example.split()
  command = [sys.executable, ROOT / "examples" / f"{name}.py", *options]
  run = subprocess.run(command, check=True, timeout=200, capture_output=True, text=True)
  assert re.search(GALLERY[example], run.stdout)


def test_every_example_is_in_the_gallery():
  scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
  shown = re.findall(r'--8<-- "examples/(\w+\.py)"', (ROOT / "docs" / "gallery.md").read_text())
  assert sorted(shown) == sorted(scripts)


def test_every_picture_is_made_by_its_script(tmp_path):
  folder = ROOT / "docs" / "pictures"
  subprocess.run([sys.executable, folder / "make.py", "--out", tmp_path], check=True, timeout=290)
  made = {path.name for path in tmp_path.glob("*.svg")}
  assert made == {path.name for path in folder.glob("*.svg")}
  # Pictures of studies have a separate script.
  shown = "".join(page.read_text() for page in PAGES if page.parent.name != "studies")
  assert set(re.findall(r"(?<!studies/)pictures/([\w-]+\.svg)", shown)) == made
  for path in tmp_path.glob("*.svg"):
    assert path.read_text().count("<path") > 20


@pytest.mark.parametrize("wrapper", ["all", "elastic_average"])
def test_train_digits_runs_and_reports(tmp_path, wrapper):
  import json

  out, table = tmp_path / "curves.png", tmp_path / "table.json"
  options = [
    "--steps",
    "3",
    "--workers",
    "2",
    "--wrapper",
    wrapper,
    "--out",
    str(out),
    "--json",
    str(table),
  ]
  subprocess.run(
    [sys.executable, ROOT / "examples" / "train_digits.py", *options], check=True, timeout=200
  )
  assert out.read_bytes().startswith(b"\x89PNG")
  rows = {row["wrapper"]: row for row in json.loads(table.read_text())}
  parameters = 4 * (64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10)  # bytes in float32
  expected = {  # all-reduces and bytes per step
    "plain": (0, 0),
    "cross_shard": (1, parameters),
    "gather_towers": (1, parameters),
    "elastic_average": (0.1, parameters / 10),
    "local_steps": (0.1, (parameters + 4) / 10),  # and the sum of the weights
    "diloco": (0.1, (parameters + 4) / 10),
    "drop_stale": (2, parameters + 4 * 35),  # and its statistics, and the weight
    "clip_variables": (1, parameters),
  }
  for name in expected if wrapper == "all" else [wrapper]:
    row = rows.pop(name)
    assert row["all_reduces_per_step"] == pytest.approx(expected[name][0])
    assert row["bytes_per_step"] == pytest.approx(expected[name][1])
    assert {"accuracy", "loss", "ms_per_step"} <= set(row)
  assert not rows


def test_train_digits_refuses_bad_options():
  run = subprocess.run(
    [sys.executable, ROOT / "examples" / "train_digits.py", "--workers", "0"],
    capture_output=True,
    text=True,
  )
  assert run.returncode == 2
  assert "--workers must be at least 1, got 0" in run.stderr


def test_every_public_name_is_in_the_api_reference_and_has_a_docstring():
  import optax_wrappers as ow

  pages = (ROOT / "docs" / "reference").glob("*.md")
  reference = "".join(page.read_text() for page in pages)
  found = re.findall(r"::: optax_wrappers\.([\w.]+)$", reference, re.M)
  assert len(found) == len(set(found))
  by_use = set(re.findall(r"\[`([\w.]+)`\]\(reference/", (ROOT / "docs" / "api.md").read_text()))
  assert by_use == {name for name in found if name[-5:] != "State"} | {"train_state.TrainState"}
  rooms = {"inspect", "exchange", "transports"}
  inside = {f"{room}.{name}" for room in rooms for name in getattr(ow, room).__all__}
  assert set(found) == (set(ow.__all__) - rooms) | inside | {"train_state.TrainState"}
  for name in ow.__all__:
    assert getattr(ow, name).__doc__, name
