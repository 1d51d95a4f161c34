"""Shared by the studies: resumable runs, learning rates tuned with equal budgets, and results in
one file.

A study is a module with

  TITLE             of its page
  MINUTES           of the full size on two cores
  PICTURE           size in inches, default (9, 3.6)
  SIZES             {"full": options, "small": options}, passed to `measure` by name
  measure(lab, ...) trains through `lab.tuned`
  page(results)     a `Page`
  draw(figure, results)
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import scipy.stats
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

sys.path.append(str(pathlib.Path(__file__).parent.parent / "docs" / "pictures"))

from theme import COLORS as COLORS
from theme import label as label

METHOD = "../what-to-expect.md#method"  # what all studies share, as a link from a page
RESULTS = pathlib.Path(__file__).parent.parent / "docs" / "studies"
WIDEST = {"full": 12, "small": 3}  # of a grid, in points
CHANCE = np.log(10)  # the loss of guessing among ten digits


@dataclasses.dataclass(frozen=True)
class Page:
  """The text of a page, computed from the results."""

  claim: str  # one sentence, also on the summary
  numbers: str  # the numbers that it rests on
  caption: str  # of the picture: its alternative text
  table: Sequence[Sequence[str]]  # the header first
  published: str
  follows: str
  method: str


class Results:
  """The runs of a study, by arm: the rates that were tried, the best one, and the seeds at that
  rate."""

  def __init__(self, content: dict):
    self.content = content

  @classmethod
  def load(cls, name: str, folder: pathlib.Path = RESULTS) -> "Results":
    return cls(json.loads((folder / f"{name}.json").read_text()))

  @property
  def arms(self) -> dict:
    return self.content["arms"]

  @property
  def options(self) -> dict:
    return self.content["options"]

  def runs(self, arm: str) -> list[dict]:
    """One for each seed, at the arm's best rate."""
    best = self.arms[arm]["best"]
    found = [run for run in self.arms[arm]["runs"] if run["rate"] == best]
    return sorted(found, key=lambda run: run["seed"])[: self.options["seeds"]]

  def of(self, arm: str, metric: str) -> np.ndarray:
    """A metric of each seed at the best rate; curves are [seeds, points]."""
    return np.array([_number(run[metric]) for run in self.runs(arm)])

  def mean(self, arm: str, metric: str) -> float:
    return float(self.of(arm, metric).mean())

  def spread(self, arm: str, metric: str) -> float:
    """The standard deviation over the seeds."""
    return float(self.of(arm, metric).std(ddof=1))

  def text(self, arm: str, metric: str, digits: int = 3, scale: float = 1.0) -> str:
    values = scale * self.of(arm, metric)
    if not np.isfinite(values).all():
      return f"diverged in {np.sum(~np.isfinite(values))} of {len(values)}"
    return f"{values.mean():.{digits}f}\u00a0±\u00a0{values.std(ddof=1):.{digits}f}"

  def loss_at(self, arm: str, rate: float) -> str:
    """The mean loss on test data at a rate other than the best, if it was tried."""
    found = [_number(run["test"]) for run in self.arms[arm]["runs"] if run["rate"] == rate]
    if not found:
      return ""
    return f"{np.mean(found):.3g}" if np.isfinite(found).all() else "diverged"

  def loss(self, arm: str) -> float:
    """The mean loss on test data."""
    return self.mean(arm, "test")

  def error(self, arm: str, diverged: float = np.nan) -> float:
    """The mean error on test data, in percent."""
    mean = 100 * self.mean(arm, "error")
    return mean if np.isfinite(self.of(arm, "test")).all() else diverged

  def error_text(self, arm: str) -> str:
    return self.text(arm, "error", 1, 100) if np.isfinite(self.loss(arm)) else "diverged"

  def differs(self, arm: str, other: str, metric: str) -> bool:
    """Whether two arms differ significantly over the seeds: Welch's t-test, p < 0.05."""
    values = self.of(arm, metric), self.of(other, metric)
    if not all(np.isfinite(one).all() for one in values):
      return True
    return bool(scipy.stats.ttest_ind(*values, equal_var=False).pvalue < 0.05)

  def width(self, arm: str) -> float:
    """The ratio of the largest to the smallest rate whose validation loss is within twice the
    best."""
    scores = {}
    for run in self.arms[arm]["runs"]:
      scores.setdefault(run["rate"], []).append(_number(run["validation"]))
    means = {rate: np.mean(values) for rate, values in scores.items()}
    good = [rate for rate, mean in means.items() if mean <= 2 * np.nanmin([*means.values()])]
    return max(good) / min(good)

  def rate(self, arm: str) -> str:
    """The best learning rate, with a star at the edge of its grid."""
    star = "*" if self.arms[arm]["on_edge"] else ""
    return f"{self.arms[arm]['best']:.3g}{star}"


def beside(difference: float) -> str:
  """The text "0.018 above" for 0.018."""
  return f"{abs(difference):.3f} {'below' if difference < 0 else 'above'}"


def listed(things) -> str:
  """Joins texts as "one, two and three"; "none" if there are none."""
  *first, last = [str(one) for one in things] or ["none"]
  return f"{', '.join(first)} and {last}" if first else last


def line(panel, x, values, color, label, style="o-") -> None:
  """Draws the mean over seeds of values [points][seeds], with a band of one standard deviation."""
  mean = np.array([np.mean(one) for one in values])
  spread = np.array([np.std(one, ddof=1) for one in values])
  panel.plot(x, mean, style, color=color, label=label, markersize=4)
  panel.fill_between(
    x, np.maximum(mean - spread, 0.5 * mean), mean + spread, color=color, alpha=0.2
  )


def dots(panel, names, values, colors) -> None:
  """Draws a row for each name, the first on top: the mean over seeds of values [names][seeds], with
  one standard deviation to each side."""
  for row, (one, color) in enumerate(zip(values, colors)):
    panel.errorbar(one.mean(), row, xerr=one.std(ddof=1), fmt="o", color=color)
  panel.set_yticks(range(len(names)), names)
  panel.invert_yaxis()


def ticks(axis, places) -> None:
  """Labels a logarithmic axis with these values, as plain numbers."""
  axis.set_ticks(places, [f"{place:g}" for place in places])
  axis.set_minor_locator(NullLocator())


class Lab:
  """Runs what is missing in the results, and saves after every piece."""

  def __init__(self, name: str, size: str, options: dict, folder: pathlib.Path):
    self.path = folder / f"{name}.json"
    self.options = options
    self.widest = WIDEST[size]
    content = {"study": name, "size": size, "options": options, "seconds": 0.0, "arms": {}}
    if self.path.exists():
      found = json.loads(self.path.read_text())
      if found["options"] != json.loads(json.dumps(options)):
        raise SystemExit(f"{self.path} has results of other options: move it, or delete it")
      content = found
    self.results = Results(content)
    self.progress = Progress(
      TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True)
    )
    self.line = self.progress.add_task("")

  def tuned(
    self,
    arm: str,
    run: Callable[[Sequence[float], Sequence[int]], dict],
    start: float,
    *,
    points: int = 3,
    factor: float = 2.0,
    tuning_seeds: int | None = None,
    chance: float = CHANCE,
    is_first: bool = False,
  ) -> float:
    """Tunes the learning rate of an arm, runs all seeds at the best rate, and returns it.

    The grid has `points` rates around `start`, adjacent ones differing by `factor`. It grows at its
    edges until the best rate (the lowest mean "validation" over the tuning seeds) is in its
    interior. If the loss is above `chance` at every rate, it grows downward. `run(rates, seeds)`
    trains one model per pair and returns arrays [pairs, ...] by metric. `is_first`: another rate of
    the arm is tuned next, so the other seeds are not run.
    """
    seeds = range(self.options["seeds"])
    tuning = seeds[: tuning_seeds or len(seeds)]
    self.progress.update(self.line, description=arm)
    held = self.results.arms.setdefault(arm, {"runs": []})
    grid = [start * factor ** (k - points // 2) for k in range(points)]
    while True:
      self._run(held, run, grid, tuning)
      scores = [self._score(held, rate, tuning) for rate in grid]
      best = int(np.argmin(scores))
      learns = scores[best] < chance
      if (learns and 0 < best < len(grid) - 1) or len(grid) >= self.widest:
        break
      below = best == 0 or not learns
      grid = [grid[0] / factor, *grid] if below else [*grid, grid[-1] * factor]
    held.update(grid=grid, best=grid[best], on_edge=best in (0, len(grid) - 1))
    self._run(held, run, [grid[best]], tuning if is_first else seeds)
    for one in held["runs"]:
      if one["rate"] != held["best"]:
        for curve in [key for key, value in one.items() if isinstance(value, list)]:
          del one[curve]
    self._save()
    return held["best"]

  def at(self, arm: str, run: Callable, rate: float) -> None:
    """Runs all seeds at a rate that was tuned elsewhere."""
    self.progress.update(self.line, description=arm)
    held = self.results.arms.setdefault(arm, {"runs": []})
    held.update(grid=[rate], best=rate, on_edge=False)
    self._run(held, run, [rate], range(self.options["seeds"]))
    self._save()

  def note(self, arm: str, name: str, value: float) -> None:
    """Stores a value that all runs of an arm share."""
    self.results.arms[arm][name] = value
    self._save()

  def _run(self, held, run, rates, seeds):
    done = {(one["rate"], one["seed"]) for one in held["runs"]}
    missing = [(rate, seed) for rate in rates for seed in seeds if (rate, seed) not in done]
    if not missing:
      return
    began = time.time()
    measured = run(*zip(*missing))
    for i, (rate, seed) in enumerate(missing):
      values = {key: _rounded(value[i]) for key, value in measured.items()}
      held["runs"].append({"rate": rate, "seed": seed, **values})
    self.results.content["seconds"] += time.time() - began
    self._save()

  def _score(self, held, rate, seeds):
    found = [one for one in held["runs"] if one["rate"] == rate and one["seed"] in seeds]
    score = np.mean([_number(one["validation"]) for one in found])
    return score if np.isfinite(score) else np.inf

  def _save(self):
    self.path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = self.path.with_suffix(".part")
    unfinished.write_text(json.dumps(self.results.content, indent=0) + "\n")
    unfinished.replace(self.path)


def _rounded(value):
  """Floats with five digits; None, as in JSON, for values that are not finite."""
  if np.ndim(value):
    return [_rounded(one) for one in value]
  return float(f"{value:.5g}") if np.isfinite(value) else None


def _number(value):
  """The inverse of `_rounded`."""
  return np.array([np.nan if one is None else one for one in np.atleast_1d(value)]).reshape(
    np.shape(value)
  )


def main(study) -> None:
  """The command line of a study."""
  name = pathlib.Path(study.__file__).stem
  parser = argparse.ArgumentParser(description=study.__doc__)
  parser.add_argument("--size", choices=study.SIZES, default="full", help="default: %(default)s")
  parser.add_argument(
    "--results", type=pathlib.Path, default=RESULTS, help="folder (default: %(default)s)"
  )
  args = parser.parse_args()
  options = study.SIZES[args.size]
  lab = Lab(name, args.size, options, args.results)
  if args.size == "full":
    print(f"Takes {study.MINUTES} minutes on two cores. Stop it when you like: it goes on there.")
  with lab.progress:
    study.measure(lab, **{key: value for key, value in options.items() if key != "seeds"})
  for row in study.page(lab.results).table:
    print(" | ".join(row))
  print(f"{lab.path}; python studies/pages.py writes the page")
