"""Breaks lines of the package, one at a time, and says which tests notice. Three commands:

    python .ci/mutants.py map                  # which tests execute which lines: one run of all
    python .ci/mutants.py run --tier fast      # 70 lines, drawn by --seed, each with these tests
    python .ci/mutants.py run --tier full --only-missed fast

Needs Python 3.12 or newer. The map and the results are JSON in --folder (.pytest_cache/mutants). A
line is negated, gets - for + or + for -, is dropped, reduces over another axis, or is off by one,
in a copy of the checkout. Only the test functions that execute it are run, the quick ones first,
until one fails; after ten minutes it is a timeout. `run --suite FOLDER` asks the tests of another
checkout instead, such as an older commit; `--names FILE`, a JSON object, then says what
a test function is called there.
"""

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "optax_wrappers"
INSIDE = f"{PACKAGE}{os.sep}"
MINUTES = 10

# A plugin of pytest, loaded by `map`: the lines that each test function executes.

executed = collections.defaultdict(set)  # (file, line) to test functions
seconds = collections.Counter()
lines_now = set()


def pytest_configure(config):
  config.mutants_started = time.time()
  sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "mutants")
  sys.monitoring.register_callback(
    sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, note_line
  )
  sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)


def note_line(code, line):
  if code.co_filename.startswith(INSIDE):
    lines_now.add((code.co_filename.removeprefix(f"{ROOT}{os.sep}"), line))
  return sys.monitoring.DISABLE


def pytest_pycollect_makemodule(module_path):
  """What a test module computes while it is imported belongs to all of its tests."""
  lines_now.clear()
  sys.monitoring.restart_events()


def pytest_collectreport(report):
  for line in lines_now if report.nodeid.endswith(".py") else ():
    executed[line].add(report.nodeid)
  lines_now.clear()


def pytest_runtest_logstart(nodeid):
  lines_now.clear()
  sys.monitoring.restart_events()
  seconds[nodeid.split("[")[0]] -= time.time()


def pytest_runtest_logfinish(nodeid):
  test = nodeid.split("[")[0]
  seconds[test] += time.time()
  for line in lines_now:
    executed[line].add(test)


def pytest_unconfigure():
  if executed:
    found = {
      "lines": [[file, line, sorted(tests)] for (file, line), tests in sorted(executed.items())],
      "seconds": dict(seconds),
    }
    path = pathlib.Path(os.environ["MUTANTS_MAP"]) / f"{os.getpid()}.json"
    path.write_text(json.dumps(found))


def make_map(folder, tier):
  parts = folder / "parts"
  shutil.rmtree(parts, ignore_errors=True)
  parts.mkdir(parents=True)
  environment = os.environ | {
    "MUTANTS_MAP": str(parts),
    "PYTHONPATH": str(pathlib.Path(__file__).parent),
  }
  command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants", "-n", "2", "--tier", tier]
  subprocess.run([*command, "--dist", "worksteal"], cwd=ROOT, env=environment, check=False)
  merged, times = collections.defaultdict(set), collections.Counter()
  for part in parts.glob("*.json"):
    found = json.loads(part.read_text())
    times.update(found["seconds"])
    for file, line, tests in found["lines"]:
      merged[f"{file}:{line}"].update(tests)
  (folder / "map.json").write_text(
    json.dumps({"lines": {k: sorted(v) for k, v in sorted(merged.items())}, "seconds": times})
  )


# The lines that are broken.


def mutations(source):
  """All (kind, line, start, end, text): the characters from start to end become the text."""
  starts = [0]
  for line in source.splitlines(keepends=True):
    starts.append(starts[-1] + len(line.encode()))

  def at(node):
    return starts[node.lineno - 1] + node.col_offset, starts[
      node.end_lineno - 1
    ] + node.end_col_offset

  def text(node):
    start, end = at(node)
    return source.encode()[start:end].decode()

  found = []

  def add(kind, node, new):
    found.append((kind, node.lineno, *at(node), new))

  def visit(node, known):
    if isinstance(node, ast.If | ast.IfExp | ast.While):
      add("negated condition", node.test, f"(not ({text(node.test)}))")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
      is_text = any(
        isinstance(x, ast.JoinedStr) or isinstance(getattr(x, "value", 0), str)
        for x in (node.left, node.right)
      )
      if not is_text:
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        add("+ and -", node, f"({text(node.left)}) {sign} ({text(node.right)})")
    if (
      isinstance(node, ast.keyword)
      and node.arg in ("axis", "axes")
      and isinstance(node.value, ast.Constant)
      and type(node.value.value) is int
    ):
      add("another axis", node.value, "1" if node.value.value == 0 else "0")
    elif isinstance(node, ast.Constant) and type(node.value) is int:
      add("off by one", node, str(node.value + 1))
    if (
      isinstance(node, ast.Compare)
      and len(node.ops) == 1
      and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    ):
      other = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}[type(node.ops[0])]
      add("off by one", node, f"{text(node.left)} {other} {text(node.comparators[0])}")
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_again = isinstance(node, ast.Assign) and all(
      isinstance(t, ast.Name) and t.id in known for t in node.targets
    )
    if is_call or is_again or isinstance(node, ast.AugAssign | ast.Raise):
      add("dropped statement", node, "pass")
    for name, value in ast.iter_fields(node):
      if name in ("annotation", "returns", "decorator_list", "type_params"):
        continue
      for child in value if isinstance(value, list) else [value]:
        if isinstance(child, ast.AST):
          visit(child, known)
          if isinstance(child, ast.Assign):
            known |= {n.id for t in child.targets for n in ast.walk(t) if isinstance(n, ast.Name)}

  for function in ast.walk(ast.parse(source)):
    if isinstance(function, ast.FunctionDef):
      arguments = function.args
      known = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
      for child in function.body:
        visit(child, known)
        if isinstance(child, ast.Assign):
          known |= {n.id for t in child.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
  return sorted(set(found))


def draw(seed, number):
  """Lines in turn of each folder of the package, and of each kind that the folder has."""
  rng = random.Random(seed)
  folders = collections.defaultdict(list)
  for path in sorted(PACKAGE.rglob("*.py")):
    for mutation in mutations(path.read_text()):
      folders[path.parent.name].append((str(path.relative_to(ROOT)), *mutation))
  drawn, lines = [], set()
  while len(drawn) < number:
    for folder in sorted(folders):
      kinds = sorted({mutation[1] for mutation in folders[folder]})
      kind = kinds[len(drawn) // len(folders) % len(kinds)]
      chosen = rng.choice([mutation for mutation in folders[folder] if mutation[1] == kind])
      if chosen[::2][:2] not in lines and len(drawn) < number:
        lines.add(chosen[::2][:2])
        drawn.append(chosen)
  return drawn


# What the tests say of them.


def tests_of(mutation, found, names):
  file, _, line, *_ = mutation
  tests = found["lines"].get(f"{file}:{line}", [])
  tests = sorted(tests, key=lambda test: found["seconds"].get(test, 1e9))  # whole modules last
  if names is not None:
    tests = [names[test] for test in tests if test in names]
  return tests


def run_one(mutation, tests, tier, suite):
  """Whether the line is caught, missed, a timeout or not executed; and the test that noticed."""
  file, _, _, start, end, new = mutation
  if not tests:
    return "not executed", ""
  with tempfile.TemporaryDirectory() as folder:
    copy = pathlib.Path(folder) / "checkout"
    ignored = shutil.ignore_patterns(".git", ".pytest_cache", "site", "__pycache__", ".venv")
    shutil.copytree(suite, copy, ignore=ignored)
    source = (copy / file).read_bytes()
    (copy / file).write_bytes(source[:start] + new.encode() + source[end:])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout", "120", *(["--tier", tier] if tier else [])]
    environment = os.environ | {
      "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "programs")
    }
    try:
      # In parts: the quick tests alone, before the others are collected.
      for part in (tests[:6], tests[6:60], tests[60:]):
        if part:
          run = subprocess.run(
            [*command, *part],
            cwd=copy,
            env=environment,
            timeout=60 * MINUTES,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
          )
          if run.returncode not in (0, 5):
            said = [
              line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
            ]
            return "caught", (said or run.stdout.splitlines()[-1:] or [""])[0][:200]
    except subprocess.TimeoutExpired:
      return "timeout", ""
  return "missed", ""


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("command", choices=["map", "draw", "run"])
  parser.add_argument("--folder", type=pathlib.Path, default=ROOT / ".pytest_cache" / "mutants")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--number", type=int, default=70)
  parser.add_argument(
    "--tier", choices=["fast", "full"], help="without it, no such option is given"
  )
  parser.add_argument("--suite", type=pathlib.Path, default=ROOT)
  parser.add_argument("--names", type=pathlib.Path)
  parser.add_argument("--only-missed", metavar="RESULTS", help="those that an earlier run missed")
  parser.add_argument("--also", nargs="*", default=[], help="tests or folders to run last, if any")
  parser.add_argument("--results", help="the name of the results; that of the tier by default")
  args = parser.parse_args()
  args.folder.mkdir(parents=True, exist_ok=True)
  if args.command == "map":
    make_map(args.folder, args.tier or "full")
    return
  drawn = draw(args.seed, args.number)
  if args.command == "draw":
    for file, kind, line, start, end, new in drawn:
      old = (ROOT / file).read_bytes()[start:end].decode()
      print(f"{file}:{line}: {kind}: {' '.join(old.split())} -> {new}")
    return
  found = json.loads((args.folder / "map.json").read_text())
  names = json.loads(args.names.read_text()) if args.names else None
  if args.only_missed:
    earlier = json.loads((args.folder / f"{args.only_missed}.json").read_text())
    drawn = [m for m, (*_, verdict, _) in zip(drawn, earlier) if verdict != "caught"]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    verdicts = pool.map(
      lambda m: run_one(m, tests_of(m, found, names) + args.also, args.tier, args.suite.resolve()),
      drawn,
    )
    rows = []
    for (file, kind, line, *_, new), (verdict, said) in zip(drawn, verdicts):
      rows.append((file, line, kind, new, verdict, said))
      print(f"{verdict:12} {file}:{line} {kind} {said}", flush=True)
      (args.folder / f"{args.results or args.tier}.json").write_text(json.dumps(rows, indent=1))
  print(dict(collections.Counter(row[4] for row in rows)))


if __name__ == "__main__":
  main()
