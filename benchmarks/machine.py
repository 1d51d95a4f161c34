"""Shared by the benchmarks: a description of the machine, ranks of a job, paired timings, a table
of ratios."""

import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
from rich.console import Console
from rich.table import Table


def describe() -> str:
  """Describes the machine and the versions, for the first line of a report."""
  devices = jax.devices()
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
  return (
    f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, Python"
    f" {platform.python_version()}, jax {jax.__version__}, {len(devices)} x"
    f" {devices[0].device_kind}"
  )


def paired(
  calls: dict[str, Callable[[], object]], rounds: int, inner: int = 1, warm: bool = True
) -> dict[str, list[float]]:
  """Milliseconds of each call, interleaved in every round, so that a slow moment of the machine
  affects all.

  The order is the same in every process, and changes from round to round, because a call pays for
  what the one before it left behind.
  """
  if warm:
    for call in calls.values():
      call()
  times: dict[str, list[float]] = {name: [] for name in calls}
  order, chance = list(calls), random.Random(0)
  for _ in range(rounds):
    chance.shuffle(order)
    for name in order:
      start = time.perf_counter()
      for _ in range(inner):
        calls[name]()
      times[name].append(1e3 * (time.perf_counter() - start) / inner)
  return times


def start(script: str, processes: int, *options: str, interpreter: str = sys.executable):
  """Runs a script as every rank of a job over loopback; returns the JSON that rank 0 prints."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  command = [interpreter, script, *options, "--coordinator", address, "--rank"]
  ranks = [
    subprocess.Popen(
      [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for rank in range(processes)
  ]
  with ThreadPoolExecutor(processes) as readers:  # a rank whose pipe is full waits until it is read
    outputs = list(readers.map(lambda rank: rank.communicate(timeout=3000), ranks))
  for rank, (_, errors) in zip(ranks, outputs):
    if rank.returncode:
      raise RuntimeError(f"a rank ended with {rank.returncode}: {errors[-2000:]}")
  return json.loads(outputs[0][0].splitlines()[-1])


def ratios(times: dict[str, list[float]], base: str) -> dict[str, tuple[float, float, float]]:
  """Minimum, median and maximum over the rounds of each call's time, divided by that of `base` in
  the same round."""
  found = {}
  for name, mine in times.items():
    each = [a / b for a, b in zip(mine, times[base])]
    found[name] = (min(each), statistics.median(each), max(each))
  return found


def spread(ratio: tuple[float, float, float]) -> str:
  low, middle, high = ratio
  return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def show(title: str, headings: list[str], rows: list[list[str]]) -> None:
  table = Table(title=title, title_justify="left")
  for i, heading in enumerate(headings):
    table.add_column(heading, justify="left" if i == 0 else "right")
  for row in rows:
    table.add_row(*row)
  Console(width=110).print(table)


def draw(title: str, found: dict[str, tuple[float, float, float]], path: str) -> None:
  """Saves a picture of ratios: a bar for each median, a line from minimum to maximum."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  names, (low, middle, high) = list(found)[::-1], zip(*list(found.values())[::-1])
  figure, panel = plt.subplots(figsize=(7, 1 + 0.35 * len(names)), layout="constrained")
  panel.barh(names, middle, color="#4c8edb")
  panel.hlines(names, low, high, color="#333333", linewidth=1)
  panel.axvline(1.0, color="gray", linewidth=0.8, linestyle="--")
  panel.set(xlabel=title)
  figure.savefig(path, dpi=150)
  plt.close(figure)
