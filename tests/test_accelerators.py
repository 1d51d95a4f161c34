"""The programs that XLA makes for a TPU: what a wrapper costs there, times the same by hand.

They are compiled ahead of time, without a TPU. The figures are the compiler's own, and the same
whenever it is the same: what is above them is a change of ours.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs_tpu_compiler

pytestmark = needs_tpu_compiler

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "accelerators.py"

# Times by hand, on 12 leaves of 128 x 128. On leaves so small what is once for each step, as a
# counter, weighs more than anywhere else. The goals stand in the benchmark, and its misses in
# benchmarks/README.md.
SMALL = {
  "cross_shard": {"calls": 1.0, "temporaries": 0},
  "all_reduce": {"calls": 1.0, "temporaries": 0},
  'cross_shard(nonfinite="drop")': {"calls": 1.052, "temporaries": 0.042},
  "drop_stale": {"calls": 1.33, "temporaries": 0},
  "staleness_aware": {"calls": 1.355, "temporaries": 0},
  "gather_towers": {"calls": 2.134, "temporaries": 1.082},
  "local_steps": {"between": 1.329, "exchange": 2.635, "temporaries": 3.072},
  "diloco": {"between": 2.262, "exchange": 1.853, "temporaries": 1.034},
  "diloco, exchange=False": {"calls": 1.0, "temporaries": 0},
  "elastic_average": {"between": 2.262, "exchange": 1.382, "temporaries": 0},
  "elastic_average, exchange=False": {"calls": 1.0, "temporaries": 0},
  "clip_variables, Adam": {"between": 0.9, "exchange": 1.2, "temporaries": 2.747},
  "clip_variables, SGD": {"between": 0.914, "exchange": 1.227, "temporaries": 1.415},
}
# 100 leaves of 256 x 256, which must not be copied into a buffer.
HUNDRED = {name: SMALL[name] for name in ("cross_shard", "all_reduce")}


@pytest.mark.parametrize(
  ("tree", "bounds", "only"),
  [("small", SMALL, []), ("hundred", HUNDRED, ["--only", "cross_shard", "all_reduce"])],
)
def test_a_tpus_program_costs_no_more_than_it_did(tree, bounds, only):
  command = [sys.executable, str(BENCHMARK), "--json", "--tree", tree, *only]
  run = subprocess.run(command, capture_output=True, text=True, timeout=280)
  assert run.returncode == 0, run.stderr[-3000:]
  (found,) = json.loads(run.stdout).values()
  assert {name: found[name].keys() for name in bounds} == {
    name: bound.keys() for name, bound in bounds.items()
  }
  above = {
    (name, what): (found[name][what], bound)
    for name, goals in bounds.items()
    for what, bound in goals.items()
    if found[name][what] > bound + 0.005
  }
  assert not above, f"(found, bound): {above}"
