"""Everything shown runs: each fence of the docs by itself, examples, and what draws pictures."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_codecs as ref
from fences import PAGES, README, ROOT, SIMULATED, check_python, fences
from helpers import AXIS, in_context

import optax_wrappers as ow
from optax_wrappers import codecs


@pytest.mark.optax_promotes
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_python_fences_run_and_print_what_they_say(page):
  check_python(page)


@pytest.mark.parametrize(
  "code",
  [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in [README, *PAGES]
    for number, code in enumerate(fences(page, "python"))
    if re.search(SIMULATED, code)
  ],
)
def test_docs_fences_set_up_simulated_devices_in_new_process(code):
  """In a fresh Python process."""
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=200)


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
  "pods_of_processes": r"lives: 2 and 2; center \w+, test accuracy 0\.9",
  "pods_ray": r"without c, \d+ with it again; centers are equal: True; test accuracy 0\.9",
  "gossip_digits --steps 40": r"gossip, exponential +1\.00 x params",
  "diloco_transformer --steps 120 --warmup 20": r"DiLoCo: held-out loss",
  "nnx_pods": r"by 0\.0, from two loops by hand \de-0[5678], with 8 bits \de-0[345]",
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
def test_gallery_examples_run_and_print_result(example):
  name, *options = example.split()
  command = [sys.executable, ROOT / "examples" / f"{name}.py", *options]
  environment = os.environ.copy()
  if name == "linen_pods":
    # 1.2e-5 apart without XLA's optimizations, on some processors. As a user runs it, 5.5e-6.
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
  run = subprocess.run(
    command, check=True, timeout=280, capture_output=True, text=True, env=environment
  )
  assert re.search(GALLERY[example], run.stdout)


def test_gallery_page_shows_every_example():
  scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
  shown = re.findall(r'--8<-- "examples/(\w+\.py)"', (ROOT / "docs" / "gallery.md").read_text())
  assert sorted(shown) == sorted(scripts)


def test_rounds_beside_drjax_agree():
  command = [sys.executable, ROOT / "benchmarks" / "beside_drjax.py"]
  run = subprocess.run(command, check=True, timeout=200, capture_output=True, text=True)
  rows = re.findall(r"(\S+) apart, moved by (\S+)", run.stdout)
  assert len(rows) == 6
  assert all(float(apart) < 1e-6 and float(moved) > 0.1 for apart, moved in rows)


def test_pictures_are_made_by_script_and_shown(tmp_path):
  folder = ROOT / "docs" / "pictures"
  command = [sys.executable, folder / "make.py", "--out", tmp_path, "--quick"]
  subprocess.run(command, check=True, timeout=290)
  made = {path.name for path in tmp_path.glob("*.svg")}
  assert made == {path.name for path in folder.glob("*.svg")}
  # Pictures of studies have a separate script.
  shown = "".join(page.read_text() for page in [README, *PAGES] if page.parent.name != "studies")
  assert set(re.findall(r"(?<!studies/)pictures/([\w-]+\.svg)", shown)) == made
  for path in tmp_path.glob("*.svg"):
    assert path.read_text().count("<path") > 20


@pytest.mark.parametrize("wrapper", ["all", "elastic_average"])
def test_example_train_digits_reports_bytes_per_step(tmp_path, wrapper):
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


def test_example_train_digits_bad_options_are_error():
  run = subprocess.run(
    [sys.executable, ROOT / "examples" / "train_digits.py", "--workers", "0"],
    capture_output=True,
    text=True,
  )
  assert run.returncode == 2
  assert "--workers must be at least 1, got 0" in run.stderr


# DeMo, as the page of compressed exchanges has it.

FLOATS = codecs.Codec(
  lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1),
  lambda code, n: jax.lax.bitcast_convert_type(code.reshape(*code.shape[:-1], n, 4), jnp.float32),
  lambda n: 4 * n,
)


def in_dct():
  page = pathlib.Path(__file__).parents[2] / "docs" / "compressed-exchange.md"
  code = re.search(r"^import jax\nfrom jax.scipy.fft.*?(?=^largest)", page.read_text(), re.M | re.S)
  namespace = {"optax": optax}
  exec(code.group(), namespace)
  return namespace["in_dct"]


@pytest.mark.parametrize("num_shards", [2, 3, 4])  # one alone compresses nothing
@pytest.mark.parametrize("context", ["vmap", "shard_map", "unchecked"])
def test_demo_of_compressed_exchange_page_matches_numpy(context, num_shards):
  """Four blocks of 32 x 40, and a vector; five steps, what is left over included."""
  rng = np.random.default_rng(num_shards)
  grads = rng.normal(size=(5, num_shards, 64, 80))
  vectors = rng.normal(size=(5, num_shards, 3)).astype(np.float32)
  codec = codecs.compression(codecs.top_k(20 / 1280, 1280, FLOATS), decay=0.9)
  tx = in_dct()(ow.all_reduce(AXIS, codec=codec), side=40)

  def whole(matrices, vectors):
    def step(state, grads):
      means, state = tx.update(grads, state)
      return state, jax.tree.map(lambda x: ow.per_shard(x, AXIS), means)

    return jax.lax.scan(step, tx.init((matrices[0], vectors[0])), (matrices, vectors))[1]

  given = np.moveaxis(np.float32(grads), 1, 0), np.moveaxis(vectors, 1, 0)
  found, means = jax.tree.map(np.asarray, in_context(context, whole, num_shards, (0, 0), 0)(*given))
  expected = ref.demo(grads, 0.9, 20, 40)
  for row, mean in zip(found, means):
    np.testing.assert_allclose(row, expected, atol=2e-5)
    np.testing.assert_allclose(mean, vectors.mean(1), rtol=1e-5, atol=1e-6)
