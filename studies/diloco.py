"""DiLoCo on a language model: loss and bytes, compared with data parallelism.

A transformer over bytes reads Python sources. All runs start from one model, pretrained with data
parallelism, and see equally many bytes; only "one worker" sees a quarter of them.
"""

import functools
import sys

import lab
import numpy as np
import optax
import tasks

import optax_wrappers as ow

TITLE = "DiLoCo on a language model"
MINUTES = 35
SIZES = {
  "full": tasks.SIZES["full"] | {"periods": [5, 20, 50, 100], "workers": [2, 4, 8]},
  "small": tasks.SIZES["small"] | {"periods": [4], "workers": [4], "outers": ["SGD", "Nesterov"]},
}
ROWS = 16  # examples per step, over all workers
WORKERS, PERIOD = 4, 20
OUTER = {
  "SGD": lambda rate: optax.sgd(rate),
  "heavy ball": lambda rate: optax.sgd(rate, momentum=0.9),
  "Nesterov": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
  "Adam": lambda rate: optax.adam(rate, b1=0.9, b2=0.95, eps=1e-3),
}
OUTER_RATE = {"SGD": 1.0, "heavy ball": 0.35, "Nesterov": 0.35, "Adam": 0.002}
ALONE = "one worker, a quarter of the data"
LONGER = "one worker, four times the steps"


def diloco(outer, period, num_workers=WORKERS):
  """The name of an arm with an outer optimizer."""
  return f"{outer}, period {period}, {num_workers} workers"


def outer_arms(outers, periods, workers):
  """The outer optimizer, the period and the number of workers of each arm, by name."""
  period = usual(periods)
  arms = [(outer, period, WORKERS) for outer in outers]
  arms += [("Nesterov", each, WORKERS) for each in periods]
  arms += [("Nesterov", period, num_workers) for num_workers in workers]
  return {diloco(*arm): arm for arm in arms}


def usual(periods):
  """The period of the arms that vary something else."""
  return min(PERIOD, max(periods))


def at_peak(steps):
  """The schedule of a learning rate, relative to its peak."""
  return optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 20, steps, 0.1)


def clipped(optimizer, rate, steps, **options):
  """An Optax optimizer with this peak rate, for gradients clipped to norm 1."""
  inner = optimizer(lambda count: rate * at_peak(steps)(count), **options)
  return optax.chain(optax.clip_by_global_norm(1.0), inner)


def adamw(rate, steps):
  return clipped(optax.adamw, rate, steps, b2=0.95)


def measure(lab, width, depth, pretrained, steps, periods, workers, outers=tuple(OUTER)):
  task = tasks.text(width, depth, pretrained)
  evaluations = 5 if steps % 5 == 0 else 1
  runs = functools.partial(tasks.runs, task, evaluations=evaluations, at_once=False)

  def plain(rows, steps):
    of = lambda rate: (adamw(rate, steps), tasks.mean_of_workers)
    return runs(of, workers=1, batch=rows, steps=steps)

  def rounds(num_workers, period, outer, inner_rate=None):
    def of(rate):
      options = {"communication_period": period, "outer": outer and outer(rate)}
      tx = ow.local_steps(adamw(inner_rate or rate, steps), tasks.AXIS, **options)
      return tx, tasks.center if outer else tasks.mean_of_workers

    return runs(of, workers=num_workers, batch=ROWS // num_workers, steps=steps)

  def tuned(arm, run, start):
    return lab.tuned(arm, run, start, tuning_seeds=1)

  tuned("data parallel", plain(ROWS, steps), 1e-3)
  tuned(ALONE, plain(ROWS // WORKERS, steps), 1e-3)
  tuned(LONGER, plain(ROWS // WORKERS, WORKERS * steps), 1e-3)
  inner = tuned("averaging", rounds(WORKERS, usual(periods), None), 1e-3)
  for arm, (outer, period, num_workers) in outer_arms(outers, periods, workers).items():
    tuned(arm, rounds(num_workers, period, OUTER[outer], inner), OUTER_RATE[outer])


def megabytes(results, exchanges, num_workers):
  """Megabytes that a worker sends: each parameter in float32, in an all-reduce."""
  size = tasks.text_size(results.options["width"], results.options["depth"])
  return exchanges * 2 * (num_workers - 1) / num_workers * 4 * size / 1e6


def page(results):
  steps, periods = results.options["steps"], results.options["periods"]
  outers = results.options.get("outers", list(OUTER))
  period = usual(periods)
  loss = results.loss
  sends = {"data parallel": (steps, WORKERS), "averaging": (steps // period, WORKERS)}
  for arm, (_, each, num_workers) in outer_arms(
    outers, periods, results.options["workers"]
  ).items():
    sends[arm] = steps // each, num_workers
  rows = [["", "held-out loss, nats per byte", "MB sent by a worker", "learning rate"]]
  for arm in results.arms:
    sent = megabytes(results, *sends.get(arm, (0, 1)))
    rows.append([arm, results.text(arm, "test"), f"{sent:,.0f}", results.rate(arm)])
  data_parallel = loss("data parallel")
  arm_of = {outer: diloco(outer, period) for outer in outers}
  best = min(outers, key=lambda outer: loss(arm_of[outer]))
  equals = [name for name in outers if not results.differs(arm_of[name], arm_of[best], "test")]
  nesterov = arm_of["Nesterov"]
  gap = loss(nesterov) - data_parallel
  rounds = steps // period
  is_worse = gap > 0 and results.differs(nesterov, "data parallel", "test")
  return lab.Page(
    claim=f"""Starting from a trained model, DiLoCo {"does not match" if is_worse else "is not significantly worse than"} data parallelism after
      {rounds} rounds with 1/{period} of the bytes. Best outer optimizer: {"; ".join(equals)}.""",
    numbers=f"""In nats per byte of held-out text, data parallelism reaches {data_parallel:.3f}. Plain averaging is
      {lab.beside(loss("averaging") - data_parallel)} it, and DiLoCo with Nesterov {lab.beside(gap)} it. One worker with a quarter of the data is
      {lab.beside(loss(ALONE) - data_parallel)} it, {"" if results.differs(nesterov, ALONE, "test") else "not "}significantly different from DiLoCo.""",
    caption="""Left: held-out loss against bytes sent per worker. Right: held-out loss along the run, of
      DiLoCo, averaging, data parallelism and one worker alone.""",
    table=rows,
    published="""Douillard et al. (2023): with 8 workers and 128 rounds of 500 steps, after 24,000 steps of pretraining, DiLoCo reaches the
perplexity of data parallelism, and Nesterov is the best outer optimizer. Models have 60 to 400 M parameters.""",
    follows=f"""In a short run, average: there is no center and no outer rate to tune. An outer momentum of 0.9 averages over ten rounds, and
there are {rounds} here; [another study](rounds.md) has up to 1,000. SGD at an outer rate of
{results.arms[arm_of["SGD"]]["best"]:g} is the same as averaging.""",
    method=f"""{method(results)} Rows name the outer optimizer; the inner one is AdamW.
W workers take {ROWS} / W examples each per step. With an outer optimizer, the inner rate is that of
averaging ({results.arms["averaging"]["best"]:g}). Workers send float32 in an all-reduce.""",
  )


def method(results):
  width, depth = results.options["width"], results.options["depth"]
  return f"""{tasks.text_setting(width, depth)} All runs start from one model, trained for
{results.options["pretrained"]} steps, and take {results.options["steps"]} more."""


def draw(figure, results):
  steps, periods = results.options["steps"], results.options["periods"]
  left, right = figure.subplots(1, 2)
  x = [megabytes(results, steps // p, WORKERS) for p in periods]
  y = [results.of(diloco("Nesterov", p), "test") for p in periods]
  lab.line(left, x, y, lab.COLORS[0], "DiLoCo, Nesterov")
  for p, *place in zip(periods, x, [one.mean() for one in y]):
    lab.label(left, f"{p} steps", place, up=False)
  period = usual(periods)
  dots = {"averaging": (steps // period, 1), "data parallel": (steps, 2)}
  for name, (exchanges, color) in dots.items():
    place = megabytes(results, exchanges, WORKERS)
    left.plot(place, results.mean(name, "test"), "s", color=lab.COLORS[color], label=name)
  alone = results.mean(ALONE, "test")
  left.axhline(alone, color=lab.COLORS[3], linestyle="--", label="one worker, its quarter")
  left.set(xlabel="MB sent by a worker", ylabel="held-out loss, nats per byte", xscale="log")
  left.legend(frameon=False, fontsize=8)
  shown = {
    diloco("Nesterov", period): 0,
    "averaging": 1,
    "data parallel": 2,
    ALONE: 3,
  }
  for name, color in shown.items():
    curves = results.of(name, "test curve")
    x = steps * (1 + np.arange(curves.shape[1])) / curves.shape[1]
    lab.line(right, x, curves.T, lab.COLORS[color], name)
  right.set(xlabel="step", ylabel="held-out loss, nats per byte")
  right.legend(frameon=False, fontsize=8)


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
