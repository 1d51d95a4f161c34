"""DiLoCo on a language model: what it loses beside data parallelism, and what it sends.

A transformer over bytes reads Python sources. All runs begin at one model, which data parallelism
trained before, and see as many bytes; only "one worker" sees a quarter of them.
"""

import functools
import sys

import lab
import numpy as np
import optax
import tasks

import optax_wrappers as ow

TITLE = "DiLoCo on a language model"
QUESTION = "What does a language model lose when its workers meet once in many steps?"
MINUTES = 35
SIZES = {
  "full": {
    "seeds": 5,
    "width": 128,
    "depth": 5,
    "pretrained": 800,
    "steps": 200,
    "periods": [5, 20, 50, 100],
    "workers": [2, 4, 8],
  },
  "small": {
    "seeds": 2,
    "width": 16,
    "depth": 1,
    "pretrained": 2,
    "steps": 8,
    "periods": [4],
    "workers": [4],
    "outers": ["SGD", "Nesterov"],
  },
}
ROWS = 16  # examples a step, of all workers together
WORKERS, PERIOD = 4, 20  # of the arms that vary something else
OUTER = {
  "SGD": lambda rate: optax.sgd(rate),
  "heavy ball": lambda rate: optax.sgd(rate, momentum=0.9),
  "Nesterov": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
  "Adam": lambda rate: optax.adam(rate, b1=0.9, b2=0.95, eps=1e-3),
}
OUTER_RATE = {"SGD": 1.0, "heavy ball": 0.35, "Nesterov": 0.35, "Adam": 0.002}


def at_peak(steps):
  """The schedule of a learning rate of one."""
  return optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 20, steps, 0.1)


def adamw(rate, steps):
  inner = optax.adamw(lambda count: rate * at_peak(steps)(count), b2=0.95)
  return optax.chain(optax.clip_by_global_norm(1.0), inner)


def measure(lab, width, depth, pretrained, steps, periods, workers, outers=tuple(OUTER)):
  task = tasks.text(width, depth, pretrained)
  evaluations = 5 if steps % 5 == 0 else 1
  runs = functools.partial(tasks.runs, task, evaluations=evaluations, at_once=False)
  period = min(PERIOD, max(periods))

  def plain(rows, steps):
    of = lambda rate: (adamw(rate, steps), tasks.mean_of_workers)
    return runs(of, workers=1, batch=rows, steps=steps)

  def rounds(num_workers, period, outer, inner_rate=None):
    def of(rate):
      options = {"communication_period": period, "outer": outer and outer(rate)}
      tx = ow.local_steps(adamw(inner_rate or rate, steps), tasks.AXIS, **options)
      return tx, tasks.centre if outer else tasks.mean_of_workers

    return runs(of, workers=num_workers, batch=ROWS // num_workers, steps=steps)

  def tuned(arm, run, start):
    return lab.tuned(arm, run, start, tuning_seeds=1)

  tuned("data parallel", plain(ROWS, steps), 1e-3)
  tuned("one worker, a quarter of the data", plain(ROWS // WORKERS, steps), 1e-3)
  tuned("one worker, four times the steps", plain(ROWS // WORKERS, WORKERS * steps), 1e-3)
  inner = tuned("averaging", rounds(WORKERS, period, None), 1e-3)
  for name in outers:
    arm = f"{name}, period {period}, {WORKERS} workers"
    tuned(arm, rounds(WORKERS, period, OUTER[name], inner), OUTER_RATE[name])
  for num_workers, period in [(WORKERS, p) for p in periods] + [(w, period) for w in workers]:
    run = rounds(num_workers, period, OUTER["Nesterov"], inner)
    tuned(nesterov(period, num_workers), run, OUTER_RATE["Nesterov"])


def nesterov(period, num_workers):
  return f"Nesterov, period {period}, {num_workers} workers"


def megabytes(results, exchanges, num_workers):
  """What a worker sends: each parameter in float32, in an all-reduce."""
  size = tasks.text_size(results.options["width"], results.options["depth"])
  return exchanges * 2 * (num_workers - 1) / num_workers * 4 * size / 1e6


def page(results):
  steps, periods = results.options["steps"], results.options["periods"]
  period = min(PERIOD, max(periods))
  loss = results.loss
  exchanges = {"data parallel": steps, "averaging": steps // period}
  rows = [["", "held-out loss, nats a byte", "MB sent by a worker", "learning rate (grid)"]]
  for arm in results.arms:
    num_workers = WORKERS
    if "period" in arm:
      _, each, of = arm.split(", ")
      exchanges[arm] = steps // int(each.split()[1])
      num_workers = int(of.split()[0])
    sent = megabytes(results, exchanges[arm], num_workers) if arm in exchanges else 0.0
    rows.append([arm, results.text(arm, "test"), f"{sent:,.0f}", results.rate(arm)])
  data_parallel, alone = loss("data parallel"), loss("one worker, a quarter of the data")
  outers = {
    name: f"{name}, period {period}, {WORKERS} workers"
    for name in results.options.get("outers", OUTER)
  }
  best = min(outers, key=lambda name: loss(outers[name]))
  others = [name for name in outers if not results.differs(outers[name], outers[best], "test")]
  gap = loss(outers["Nesterov"]) - data_parallel
  longest = nesterov(periods[-1], WORKERS)
  rounds = steps // period
  if results.differs(outers["Nesterov"], "data parallel", "test") and gap > 0:
    first = f"The published equality with data parallelism does not show in {rounds} rounds"
  else:
    first = f"In {rounds} rounds DiLoCo is not told apart from data parallelism"
  by_itself = "one worker, a quarter of the data"
  told = "" if results.differs(outers["Nesterov"], by_itself, "test") else ", not told apart from"
  if others == [best]:
    second = f"The best outer optimizer is {best}"
  else:
    second = f"The best outer optimizers, not told apart, are {' and '.join(others)}"
  return lab.Page(
    verdict=f"""{first}. Held-out loss above data parallelism's {data_parallel:.3f}: averaging
      {loss("averaging") - data_parallel:+.3f}, DiLoCo with Nesterov {gap:+.3f}{told or ","} one worker alone
      {alone - data_parallel:+.3f}; the first two send a {period}th of the bytes. {second}.""",
    caption="""Left: held-out loss against what a worker sends. Right: held-out loss along the run, of
      DiLoCo, averaging, data parallelism and a worker alone.""",
    table=rows,
    published="""Douillard et al. (2023): with 8 workers and rounds of 500 steps DiLoCo reaches the
perplexity of data parallelism at 1/500 of the bytes, and of the outer optimizers Nesterov momentum is
best. Their models have 60 to 400 M parameters and train for 64,000 steps after 24,000 of
pretraining.""",
    follows=f"""In a short run average, without a centre and with nothing to tune outside: at rounds of
{period} steps the loss is {loss("averaging"):.3f}, and with outer optimizers
{", ".join(f"{loss(arm):.3f} ({name})" for name, arm in outers.items())}. An outer momentum of 0.9 is a
mean over ten rounds, and here there are {rounds}: whether it gains in long runs, as published, this
study cannot say. SGD outside, at a rate of {results.arms[outers["SGD"]]["best"]:g}, is averaging.

With Nesterov, rounds of {periods[-1]} steps are at {loss(longest) - data_parallel:+.3f} from data
parallelism, rounds of {period} at {gap:+.3f}.

Where time is no matter, one worker that takes all the data itself, in {WORKERS} times the steps, has
{loss("one worker, four times the steps"):.3f}.""",
    method=f"""{method(results)} Data parallelism takes {ROWS} examples a step, and W workers
{ROWS} / W each: equal tokens, equal updates. The inner rate of all with an outer optimizer is that of averaging,
{results.arms["averaging"]["best"]:g}; the outer rate is tuned. A worker alone is best at
{results.arms[by_itself]["best"]:g}. A worker sends each parameter in float32, in an all-reduce. Rounds of 500
steps, as published, would need runs of many thousand steps, days on two cores: not done.""",
  )


def method(results):
  width, depth = results.options["width"], results.options["depth"]
  return f"""A transformer over bytes with {depth} layers of width {width}
({tasks.text_size(width, depth) / 1e6:.2f} M parameters, {tasks.LENGTH} bytes of context) reads the
sources of Python's standard library (the runs that are kept: Python 3.11's). 20 files are held out; the
loss is that of 128 windows of {tasks.LENGTH} bytes from 10 of them. All runs begin at one model, trained
for {results.options["pretrained"]} steps, and take {results.options["steps"]} more with AdamW, or what
the row says, a warm-up and a cosine. Learning rates are tuned on the first seed. Seeds differ in the
order of the data."""


def draw(figure, results):
  steps, periods = results.options["steps"], results.options["periods"]
  left, right = figure.subplots(1, 2)
  x = [megabytes(results, steps // p, WORKERS) for p in periods]
  y = [results.of(nesterov(p, WORKERS), "test") for p in periods]
  lab.line(left, x, y, lab.COLORS[0], "DiLoCo, Nesterov")
  for p, *place in zip(periods, x, [one.mean() for one in y]):
    left.annotate(f"period {p}", place, xytext=(3, 4), textcoords="offset points", fontsize=8)
  period = min(PERIOD, max(periods))
  dots = {"averaging": (steps // period, 1), "data parallel": (steps, 2)}
  for name, (exchanges, color) in dots.items():
    place = megabytes(results, exchanges, WORKERS)
    left.plot(place, results.mean(name, "test"), "s", color=lab.COLORS[color], label=name)
  alone = results.mean("one worker, a quarter of the data", "test")
  left.axhline(alone, color=lab.COLORS[3], linestyle="--", label="one worker, its quarter")
  left.set(xlabel="MB sent by a worker", ylabel="held-out loss, nats a byte", xscale="log")
  left.legend(frameon=False, fontsize=8)
  shown = {
    nesterov(period, WORKERS): 0,
    "averaging": 1,
    "data parallel": 2,
    "one worker, a quarter of the data": 3,
  }
  for name, color in shown.items():
    curves = results.of(name, "test curve")
    x = steps * (1 + np.arange(curves.shape[1])) / curves.shape[1]
    lab.line(right, x, curves.T, lab.COLORS[color], name)
  right.set(xlabel="step")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
