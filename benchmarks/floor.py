"""Every cost that has a goal, in one table with its goal.

    python benchmarks/floor.py [--torch-python PYTHON] [--rounds 10]

The rows come from the other scripts, which print more; this one runs them one after another. Rows
that compare with PyTorch need a Python that has it.
"""

import argparse

import communication_period
import data_parallel
import machine
import overhead
import projection_cost

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--rounds", type=int, default=15, help="of each (default: %(default)s)")
parser.add_argument(
  "--processes", type=int, nargs="+", default=[2, 4], help="over gloo (default: %(default)s)"
)
parser.add_argument("--trees", nargs="+", default=data_parallel.TREES, metavar="TREE")
parser.add_argument("--torch-python", help="an interpreter that has PyTorch")
parser.add_argument("--out", default="floor.png", help="the picture (default: %(default)s)")

BY_COUNTER = "gather_towers(2)", "elastic_average(10**6)", "local_steps(10**6)", "diloco(10**6)"
BY_CALLER = "elastic_average, exchange=False", "diloco, exchange=False"


def data_parallel_rows(args):
  for processes in args.processes:
    runs = data_parallel.measure(processes, args.rounds, args.trees, args.torch_python)
    for tree, times in runs.items():
      what = f"cross_shard, {processes} processes, {tree}"
      best = data_parallel.better_by_hand(times)
      yield f"{what}: times {best}", 1.05, machine.ratios(times, best)["cross_shard"]
      if args.torch_python:
        yield f"{what}: times DDP", 1.0, machine.ratios(times, "PyTorch DDP")["cross_shard"]


def overhead_rows(args):
  costs = overhead.measure(args.rounds)
  goals = dict.fromkeys(BY_COUNTER, 1.15) | dict.fromkeys(BY_CALLER, 1.03)
  goals |= {"drop_stale": 1.03, "clip_variables, inside": 1.15}
  for name, goal in goals.items():
    yield f"{name}: times bare Adam", goal, costs[name, "bare"].times
  for name in goals:
    compiling = costs[name, "bare"].compiling
    yield f"{name}: to compile 1,000 leaves, times bare", 1.15, (compiling,) * 3


def projection_rows(args):
  given = ["--rounds", str(args.rounds)]
  times = projection_cost.measure(projection_cost.parser.parse_args(given))
  for base, goal in (("by hand", 1.0), ("read twice", 2.0)):
    ratio = machine.ratios(times, f"sgd, {base}")["sgd, clip_variables"]
    yield f"clip_variables, half outside: times {base}", goal, ratio


def period_rows(args):
  if not args.torch_python:
    return
  runs = communication_period.measure(max(3, args.rounds // 3), args.torch_python)
  mean = {name: [step for step, _ in run] for name, run in runs.items()}
  for period in communication_period.PERIODS:
    for way in ("local_steps", "local_steps by the caller", "elastic_average by the caller"):
      ratio = machine.ratios(mean, f"PyTorch PostLocalSGD, period {period}")
      name = f"{way}, period {period}"
      yield f"{name}: times PostLocalSGD", 1.0, ratio[name]


def main():
  args = parser.parse_args()
  print(machine.describe())
  rows, found = [], {}
  for part in (overhead_rows, projection_rows, period_rows, data_parallel_rows):
    for what, goal, ratio in part(args):
      print(f"{what}: {machine.spread(ratio)}", flush=True)  # the table may be an hour away
      found[what] = ratio
      is_met = "yes" if ratio[1] <= goal else "no"
      rows.append([what, f"{goal:.2f}", machine.spread(ratio), is_met])
  machine.show(
    f"Goals and figures, {args.rounds} rounds", ["what", "goal", "figure (range)", "met"], rows
  )
  machine.draw("times what it is measured against", found, args.out)


if __name__ == "__main__":
  main()
