"""DiLoCo with lost synchronizations: every worker misses each with some probability.

Eight workers, each with 8 of MNIST's digits per step. A worker that misses a synchronization either
takes the new center and loses its round, or continues alone until the next synchronization.
"""

import functools
import sys

import jax
import lab
import optax
import tasks

import optax_wrappers as ow

TITLE = "Lost synchronizations"
MINUTES = 5
SIZES = {
  "full": {"seeds": 5, "steps": 384, "period": 16, "lost": [0.0, 0.1, 0.3, 0.5]},
  "small": {"seeds": 2, "steps": 16, "period": 4, "lost": [0.5]},
}
WORKERS, BATCH = 8, 8
DATA = {"at random": False, "by label": True}
ABSENT = {"takes the center": "pull", "goes on alone": "keep"}


def arm(data, absent, probability):
  return f"{data}, {absent}, {probability:g}"


def measure(lab, steps, period, lost):
  inner = optax.sgd(0.1, momentum=0.9)

  def optimizer(rate, absent):
    outer = optax.sgd(rate, momentum=0.9, nesterov=True)
    options = {"communication_period": period, "outer": outer, "absent": absent}
    return ow.local_steps(inner, tasks.AXIS, **options), tasks.center

  def arrive(probability, key):
    return {"participation": jax.random.bernoulli(key, 1 - probability).astype("float32")}

  for data, by_label in DATA.items():
    task = tasks.digits(large=True, sorted_by_label=by_label)
    for absent, policy in ABSENT.items():
      for probability in lost:
        run = tasks.runs(
          task,
          functools.partial(optimizer, absent=policy),
          workers=WORKERS,
          batch=BATCH,
          steps=steps,
          evaluations=8,
          extra=functools.partial(arrive, probability),
        )
        lab.tuned(arm(data, absent, probability), run, 0.4, points=5)


def page(results):
  lost = results.options["lost"]
  rows = [["Test error, %", *(f"{p:.0%} lost" for p in lost)]]
  for data in DATA:
    for absent in ABSENT:
      names = [arm(data, absent, p) for p in lost]
      rows.append([f"data {data}, {absent}", *map(results.error_text, names)])

  def change(data, absent):
    ends = [arm(data, absent, p) for p in (lost[-1], lost[0])]
    return results.error(ends[0]) - results.error(ends[1])

  pulled, alone = ABSENT
  sound = results.error(arm("at random", alone, lost[0]))
  if change("at random", alone) > 0.2 * sound:
    first = "We did not reproduce the published robustness of workers that continue alone"
  else:
    first = "As published, half of the synchronizations may be lost"
  return lab.Page(
    claim=f"{first}.",
    numbers=f"""With {lost[-1]:.0%} of synchronizations lost, the test error of workers that continue alone changes by
      {change("at random", alone):+.1f} points from {sound:.1f} %, and by {change("by label", alone):+.1f} points if each worker has only some
      classes. If absent workers move to the center instead, it changes by {change("at random", pulled):+.1f} and
      {change("by label", pulled):+.1f} points.""",
    caption="""Test error against the share of lost synchronizations, a panel for each distribution of the
      data.""",
    table=rows,
    published="""Douillard et al. (2023): DiLoCo loses little with half of the synchronizations lost, on random and on clustered
data. In their runs, a worker that misses a synchronization continues alone.""",
    follows="""Pass `participation=0.0` for a worker that misses a synchronization. With `absent="pull"`, the default, the worker
takes the center, and its round is lost. With `absent="keep"` it continues alone.""",
    method=f"""MNIST's digits, one hidden layer of 64 units, {WORKERS} workers, {BATCH} examples each,
{results.options["steps"]} steps of SGD (0.1, momentum 0.9), rounds of {results.options["period"]} steps, an outer Nesterov momentum
of 0.9, the outer learning rate tuned. Each worker misses each synchronization independently.""",
  )


def draw(figure, results):
  lost = results.options["lost"]
  panels = figure.subplots(1, len(DATA), sharey=True)
  for panel, data in zip(panels, DATA):
    for absent, color in zip(ABSENT, lab.COLORS):
      values = [100 * results.of(arm(data, absent, p), "error") for p in lost]
      lab.line(panel, lost, values, color, f"absent: {absent}")
    panel.set(title=f"data {data}", xlabel="share of synchronizations lost", xticks=lost)
  panels[0].set_ylabel("test error, %")
  panels[0].set_ylim(bottom=0)
  panels[0].legend(frameon=False)


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
