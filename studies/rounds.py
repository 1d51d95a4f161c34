"""DiLoCo by the number of its rounds, on a language model trained from nothing.

A transformer over bytes reads Python sources. At a number of steps all arms see as many bytes; only
"one worker" sees a quarter of them. Every rate of every arm is tuned.
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import lab
import numpy as np
import tasks
from diloco import OUTER, WORKERS, adamw

import optax_wrappers as ow

TITLE = "DiLoCo by the number of rounds"
QUESTION = "From how many rounds on does DiLoCo lose nothing, and does its outer momentum pay?"
MINUTES = 300
SIZES = {
  "full": {
    "seeds": 5,
    "width": 64,
    "depth": 3,
    "period": 20,
    "rounds": [10, 30, 100, 300],
    "periods": [50, 500],
  },
  "small": {
    "seeds": 2,
    "width": 16,
    "depth": 1,
    "period": 2,
    "rounds": [2, 4],
    "periods": [4],
  },
}
ROWS = 32  # examples a step, of all workers together
RATE, OUTER_RATE = 8e-3, 0.7  # the middle of the first grids
GRID = {"points": 5, "tuning_seeds": 1, "chance": np.log(256)}


# ---- What is trained; other studies have it too ----


class Setting(NamedTuple):
  """A language model, and for how long it is trained."""

  task: tasks.Task
  steps: int

  def adamw(self, rate):
    return adamw(rate, self.steps)

  def run(self, of, workers, part=1):
    """What `Lab.tuned` calls; `of(rate)`: the wrapper, and what makes the model."""
    options = {"evaluations": 5 if self.steps % 5 == 0 else 1, "at_once": False}
    options |= {"steps": self.steps, "workers": workers, "batch": ROWS // part // workers}
    return tasks.runs(self.task, of, **options)

  def parallel(self, part=1):
    """Data parallelism is one worker that has all examples; with a part, a worker alone."""
    return self.run(lambda rate: (self.adamw(rate), tasks.mean_of_workers), 1, part)

  def averaging(self, period, **options):
    def of(rate):
      more = options | {"communication_period": period}
      return ow.local_steps(self.adamw(rate), tasks.AXIS, **more), tasks.mean_of_workers

    return self.run(of, WORKERS)

  def diloco(self, period):
    """The rates are the inner optimizer's and the outer's."""

    def of(rates):
      options = {"communication_period": period, "outer": OUTER["Nesterov"](rates[1])}
      return ow.local_steps(self.adamw(rates[0]), tasks.AXIS, **options), tasks.center

    return self.run(of, WORKERS)


class Arm(NamedTuple):
  """A row of a study: how long it trains, what tunes it, and a `Setting` to what is tuned."""

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
  """Tunes the outer rate, at the inner one that is best for another arm."""

  def tune(lab, arm, run):
    inner = lab.results.arms[inner_of(other)]["best"]
    of_outer = lambda rates, seeds: run([(inner, rate) for rate in rates], seeds)
    lab.tuned(arm, of_outer, OUTER_RATE, factor=1.5, **GRID)

  return tune


def as_tuned(other):
  """At the rate that is best for another arm."""
  return lambda lab, arm, run: lab.at(arm, run, lab.results.arms[other]["best"])


def inner_of(arm):
  """The name of the tuning of an arm's inner rate."""
  return f"{arm} (inner rate)"


def measure_arms(lab, width, depth, arms):
  for name, arm in arms.items():
    arm.tune(lab, name, arm.make(Setting(tasks.text(width, depth, 0), arm.steps)))


def setting_text(options):
  """What a page says of the model and the tuning."""
  width, depth = options["width"], options["depth"]
  return f"""A transformer over bytes with {depth} layers of width {width}
({tasks.text_size(width, depth) / 1e6:.2f} M parameters, {tasks.LENGTH} bytes of context) reads the
sources of Python's standard library (the runs that are kept: Python 3.11's), from one random start.
20 files are held out; the loss is that of 128 windows of {tasks.LENGTH} bytes from 10 of them. A step
takes {ROWS} examples, which workers divide. AdamW clips to a norm of 1; its rate warms up and falls by a
cosine to a tenth. The inner rate is tuned first, then the outer, on the first seed. Seeds differ in
the order of the data. Part of the runs that are kept was made on one GPU (H200), in float32, the rest
on two cores, by the same program."""


# ---- This study ----

ALONE = "one worker, a quarter of the data"


def parallel(steps, name="data parallel"):
  return f"{name}, {steps} steps"


def in_rounds(rounds, period, name="DiLoCo"):
  return f"{name}, {rounds} rounds of {period}"


def arms(period, rounds, periods) -> dict[str, Arm]:
  found, longest, of = {}, period * max(rounds), functools.partial
  for number in reversed(rounds):
    steps = number * period
    found[parallel(steps)] = Arm(steps, one_rate, Setting.parallel)
    found[in_rounds(number, period)] = Arm(steps, two_rates, of(Setting.diloco, period=period))
    averaging = Arm(steps, one_rate, of(Setting.averaging, period=period))
    found[in_rounds(number, period, "averaging")] = averaging
    found[parallel(steps, ALONE)] = Arm(steps, one_rate, of(Setting.parallel, part=WORKERS))
  for each in periods:
    made = of(Setting.diloco, period=each)
    found[in_rounds(longest // each, each)] = Arm(longest, two_rates, made)
  return found


def measure(lab, width, depth, **options):
  measure_arms(lab, width, depth, arms(**options))


def page(results):
  options, loss = results.options, results.loss
  period, rounds = options["period"], options["rounds"]
  longest = period * max(rounds)

  def gap(arm, steps):
    return f"{loss(arm) - loss(parallel(steps)):+.3f}"

  rows = [["rounds", "data parallel", "averaging", "DiLoCo", ALONE, "DiLoCo above data parallel"]]
  for number in rounds:
    steps = number * period
    names = [parallel(steps), in_rounds(number, period, "averaging"), in_rounds(number, period)]
    cells = [results.text(arm, "test") for arm in [*names, parallel(steps, ALONE)]]
    rows.append([f"{number}, of {period} steps", *cells, gap(names[2], steps)])
  for each in options["periods"]:
    arm, name = in_rounds(longest // each, each), f"{longest // each}, of {each} steps"
    rows.append([name, "", "", results.text(arm, "test"), "", gap(arm, longest)])

  gaps = {n: gap(in_rounds(n, period), n * period) for n in rounds}
  means = {n: gap(in_rounds(n, period, "averaging"), n * period) for n in rounds}
  alone = gap(parallel(longest, ALONE), longest)

  def beside(number):
    """How DiLoCo stands to averaging."""
    one, other = in_rounds(number, period), in_rounds(number, period, "averaging")
    if not results.differs(one, other, "test"):
      return "equal"
    return "better" if loss(one) < loss(other) else "worse"

  stands = {n: beside(n) for n in rounds}
  equal = [
    n for n in rounds if not results.differs(in_rounds(n, period), parallel(n * period), "test")
  ]
  reached = (
    f"from {equal[0]} rounds on it is within the noise"
    if equal
    else "it is nowhere within the noise"
  )
  no_worse = [n for n in rounds if stands[n] != "worse"]
  beat = [n for n in rounds if stands[n] == "better"]
  turn = (
    f"no worse than averaging from {no_worse[0]} rounds on" if no_worse else "worse than averaging"
  )
  turn += f", better from {beat[0]} on" if beat else ", and nowhere better beyond the noise"
  worse = lab.listed([n for n in rounds if stands[n] == "worse"])
  spent = [
    p
    for p in options["periods"]
    if not results.differs(in_rounds(longest // p, p), parallel(longest, ALONE), "test")
  ]
  numbers = lab.listed(rounds)
  return lab.Page(
    verdict=f"""After {numbers} rounds of {period} steps DiLoCo's held-out loss is
      {", ".join(gaps.values())} nats a byte above data parallelism's; {reached}. Its outer momentum is
      {turn}.""",
    caption="""Left: held-out loss above data parallelism's, by the number of rounds, of DiLoCo,
      averaging and one worker alone. Right: held-out loss by the steps of a round, at the most
      steps.""",
    table=rows,
    published="""Douillard et al. (2023): with 8 workers and 128 rounds of 500 steps, after 24,000 of
pretraining, DiLoCo reaches the perplexity of data parallelism, and of the outer optimizers Nesterov
momentum is best. Their models have 60 to 400 M parameters.""",
    follows=f"""Count the rounds that you will have. Averaging, with no rate to tune outside, is
{", ".join(means.values())} above data parallelism after {numbers} rounds; DiLoCo is worse than that
after {worse}. An outer momentum of 0.9 is a mean over ten
rounds, and a center that starts from nothing has far to go. [Begun from a trained model](diloco.md), DiLoCo is
nearer after 10 rounds.

Longer rounds cost more: {longest} steps are
{", ".join(f"{gap(in_rounds(longest // p, p), longest)} in rounds of {p}" for p in [period, *options["periods"]])}. One worker
that sees a quarter of the data is {alone}; not told apart from it are rounds of {lab.listed(spent)}.""",
    method=f"""{setting_text(options)} DiLoCo is `local_steps` with Nesterov momentum of 0.9 outside, averaging has no outer
optimizer; {WORKERS} workers. Not tried: more or fewer workers, larger batches and models, and inner Muon.""",
  )


def draw(figure, results):
  options = results.options
  period, rounds = options["period"], options["rounds"]
  longest = period * max(rounds)
  left, right = figure.subplots(1, 2)
  base = {n: results.loss(parallel(n * period)) for n in rounds}
  lines = {
    "DiLoCo": lambda n: in_rounds(n, period),
    "averaging": lambda n: in_rounds(n, period, "averaging"),
    ALONE: lambda n: parallel(n * period, ALONE),
  }
  for color, (name, arm) in zip((0, 1, 3), lines.items()):
    values = [results.of(arm(n), "test") - base[n] for n in rounds]
    lab.line(left, rounds, values, lab.COLORS[color], name)
  left.axhline(0, color=lab.COLORS[2], linestyle="--", label="data parallel")
  left.set(
    xscale="log", xlabel=f"rounds of {period} steps", ylabel="held-out loss above, nats a byte"
  )
  left.set_ylim(top=1.25 * max(np.max(line.get_ydata()) for line in left.lines))
  lab.ticks(left.xaxis, rounds)
  left.legend(frameon=False, fontsize=8, loc="upper right")
  periods = sorted({period, *options["periods"]})
  values = [results.of(in_rounds(longest // p, p), "test") for p in periods]
  lab.line(right, periods, values, lab.COLORS[0], f"DiLoCo, {longest} steps")
  right.axhline(base[max(rounds)], color=lab.COLORS[2], linestyle="--", label="data parallel")
  alone = results.loss(parallel(longest, ALONE))
  right.axhline(alone, color=lab.COLORS[3], linestyle="--", label=ALONE)
  right.set(xscale="log", xlabel="steps of a round", ylabel="held-out loss, nats a byte")
  lab.ticks(right.xaxis, periods)
  right.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.08))


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
