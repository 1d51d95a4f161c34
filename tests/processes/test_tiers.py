"""The option of the tiers, as a person gives it."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def pytest_run(*arguments):
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_tier_other_than_fast_or_full_is_error():
  run = pytest_run("--tier", "quick", "tests/test_tiers.py")
  assert run.returncode == 4
  assert "argument --tier: invalid choice: 'quick'" in run.stderr


def test_tier_fast_of_slow_folder_is_error_that_says_full():
  run = pytest_run("tests/docs")
  assert run.returncode == 4
  assert "tests/docs is slow and needs --tier full" in run.stderr


def test_tier_fast_collects_every_function_outside_slow_folders():
  functions = {}
  for tier in ("fast", "full"):
    run = pytest_run("--collect-only", "--tier", tier)
    cases = [line for line in run.stdout.splitlines() if "::" in line]
    functions[tier] = {case.split("[")[0] for case in cases}
  slow = ("docs", "fuzz", "optimizers", "processes", "runs", "studies", "tpu")
  left_out = functions["full"] - functions["fast"]
  assert functions["fast"] < functions["full"]
  assert {name.split("/")[1] for name in left_out} == set(slow)
