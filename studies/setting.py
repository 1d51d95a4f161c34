"""A small language model, trained from scratch, that several studies share.

A transformer over bytes reads Python sources. At a given number of steps, all arms have seen
equally many bytes. A rate is tuned, or taken from another arm.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import optax
import tasks
from diloco import OUTER, WORKERS, adamw, clipped

import optax_wrappers as ow

ROWS = 32  # examples per step, over all workers
RATE, OUTER_RATE = 8e-3, 0.7  # the centers of the first grids
GRID = {"points": 5, "tuning_seeds": 1, "chance": np.log(256)}


class Setting(NamedTuple):
  """A language model, and the length of its training."""

  task: tasks.Task
  steps: int

  def adamw(self, rate):
    return adamw(rate, self.steps)

  def muon(self, rate):
    options = {"consistent_rms": 0.2, "muon_weight_dimension_numbers": _matrices}
    return clipped(optax.contrib.muon, rate, self.steps, **options)

  def run(self, of, workers, part=1):
    """The function for `Lab.tuned`; `of(rate)` returns the wrapper and the function that reads the
    model."""
    options = {"evaluations": 5 if self.steps % 5 == 0 else 1, "at_once": False}
    options |= {"steps": self.steps, "workers": workers, "batch": ROWS // part // workers}
    return tasks.runs(self.task, of, **options)

  def parallel(self, inner=adamw, part=1):
    """Data parallelism as one worker with all examples; with a part, one worker alone."""
    return self.run(lambda rate: (inner(self, rate), tasks.mean_of_workers), 1, part)

  def averaging(self, period, **options):
    def of(rate):
      more = options | {"communication_period": period}
      return ow.local_steps(self.adamw(rate), tasks.AXIS, **more), tasks.mean_of_workers

    return self.run(of, WORKERS)

  def diloco(self, period, workers=WORKERS, inner=adamw, wrap=None, **options):
    """The rates are the inner optimizer's and the outer's."""

    def of(rates):
      more = options | {"communication_period": period, "outer": OUTER["Nesterov"](rates[1])}
      tx = ow.local_steps(inner(self, rates[0]), tasks.AXIS, **more)
      return wrap(self, tx) if wrap else tx, tasks.center

    return self.run(of, workers)


def _matrices(params):
  """The dimensions of what Muon takes for a matrix; None: not of embeddings."""

  def of(path, x):
    name, to = jax.tree_util.keystr(path), optax.contrib.MuonDimensionNumbers
    if x.ndim < 2 or "embedding" in name:
      return None
    if x.ndim == 2:
      return to()
    return to((0, 1), 2) if "'out'" in name else to(0, (1, 2))  # heads are a separate dimension

  return jax.tree_util.tree_map_with_path(of, params)


class Arm(NamedTuple):
  """A row of a study: its length, its tuning, and a function from a `Setting` to what is tuned."""

  steps: int
  tune: Callable
  make: Callable


def one_rate(lab, arm, run):
  lab.tuned(arm, run, RATE, **GRID)


def two_rates(lab, arm, run):
  """Tunes the inner rate, then the outer."""
  of_inner = lambda rates, seeds: run([(rate, OUTER_RATE) for rate in rates], seeds)
  lab.tuned(inner_of(arm), of_inner, RATE, is_first=True, **GRID)
  outer_rate(arm)(lab, arm, run)


def outer_rate(other):
  """Tunes the outer rate, at the best inner rate of another arm."""

  def tune(lab, arm, run):
    lab.tuned(arm, of_outer(lab, other, run), OUTER_RATE, factor=1.5, **GRID)

  return tune


def as_tuned(other):
  """Uses the best rates of another arm."""

  def tune(lab, arm, run):
    arms = lab.results.arms
    has_two = inner_of(other) in arms
    lab.at(arm, of_outer(lab, other, run) if has_two else run, arms[other]["best"])

  return tune


def of_outer(lab, other, run):
  """A run of two rates as one of the outer rate only, at the best inner rate of another arm."""
  inner = lab.results.arms[inner_of(other)]["best"]
  return lambda rates, seeds: run([(inner, rate) for rate in rates], seeds)


def inner_of(arm):
  """The name of the tuning of an arm's inner rate."""
  return f"{arm} (inner rate)"


def measure_arms(lab, width, depth, arms):
  for name, arm in arms.items():
    arm.tune(lab, name, arm.make(Setting(tasks.text(width, depth, 0), arm.steps)))


def setting_text(options):
  """The description of the model on a page."""
  width, depth = options["width"], options["depth"]
  return f"""{tasks.text_setting(width, depth)} All runs start from one random initialization. A step takes {ROWS} examples,
divided over the workers."""
