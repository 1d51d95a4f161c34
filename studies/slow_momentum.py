"""An outer optimizer around an existing one: post-local SGD, SlowMo, Lookahead, MuLoCo with one
worker.

Language model, data and start are those of the DiLoCo study.
"""

import sys

import diloco
import lab
import optax
import tasks
from diloco import ROWS, WORKERS, adamw, at_peak

import optax_wrappers as ow

TITLE = "Post-local SGD, SlowMo, Lookahead, MuLoCo"
MINUTES = 17
SIZES = {
  "full": tasks.SIZES["full"] | {"period": 20},
  "small": tasks.SIZES["small"] | {"period": 4, "only": ["Muon", "MuLoCo, one worker"]},
}


def methods(steps, period):
  """By name: the number of workers, and the function that returns wrapper and model for a learning
  rate."""

  def muon(rate):
    schedule = lambda count: rate * at_peak(steps)(count)
    inner = optax.contrib.muon(schedule, consistent_rms=0.2)
    return optax.chain(optax.clip_by_global_norm(1.0), inner)

  def local(inner, period=period, **options):
    options |= {"communication_period": period}
    model = tasks.center if "outer" in options else tasks.mean_of_workers
    return lambda rate: (ow.local_steps(inner(rate), tasks.AXIS, **options), model)

  def alone(inner):
    return lambda rate: (inner(rate), tasks.mean_of_workers)

  def adam(rate):
    return adamw(rate, steps)

  def gradients_first(rate):
    return optax.chain(tasks.mean_until(steps // 2), adam(rate))

  slow = optax.sgd(1.0, momentum=0.5)
  nesterov = optax.sgd(0.7, momentum=0.6, nesterov=True)
  return {
    "local SGD": (WORKERS, local(adam)),
    "post-local SGD": (WORKERS, local(gradients_first)),
    "SlowMo": (WORKERS, local(adam, outer=slow)),
    "AdamW": (1, alone(adam)),
    "Lookahead around AdamW": (1, local(adam, period=5, outer=optax.sgd(0.5))),
    "Muon": (1, alone(muon)),
    "MuLoCo, one worker": (1, local(muon, outer=nesterov)),
  }


BASE = {
  "post-local SGD": "AdamW",
  "SlowMo": "local SGD",
  "Lookahead around AdamW": "AdamW",
  "MuLoCo, one worker": "Muon",
}


def measure(lab, width, depth, pretrained, steps, period, only=None):
  task = tasks.text(width, depth, pretrained)
  for name, (workers, of) in methods(steps, period).items():
    if only and name not in only:
      continue
    batch = ROWS // workers
    run = tasks.runs(task, of, workers=workers, batch=batch, steps=steps, at_once=False)
    lab.tuned(name, run, 1e-3, tuning_seeds=1)


def page(results):
  rows = [["", "held-out loss, nats per byte", "against its base", "learning rate"]]
  gains = {}
  for name in results.arms:
    cell = ""
    if name in BASE:
      gains[name] = results.loss(name) - results.loss(BASE[name])
      cell = f"{gains[name]:+.4f} ({BASE[name]})"
    rows.append([name, results.text(name, "test"), cell, results.rate(name)])
  differing = [name for name in gains if results.differs(name, BASE[name], "test")]
  better = [name for name in differing if gains[name] < 0]
  worse = [name for name in differing if gains[name] > 0]
  between = ""
  if "post-local SGD" in results.arms:
    between = f"""Post-local SGD communicates in half of the steps and has {results.loss("post-local SGD"):.3f} nats per byte; AdamW,
which communicates in every step, has {results.loss("AdamW"):.3f}, and local SGD, in a {results.options["period"]}th of the steps,
{results.loss("local SGD"):.3f}."""
  return lab.Page(
    claim=f"""Significantly better than their baseline: {"; ".join(better) or "none"}. Significantly worse: {"; ".join(worse) or "none"}.""",
    numbers=between,
    caption="Held-out loss of each method and of its baseline.",
    table=rows,
    published="""SlowMo: 93.20 % against 91.73 % for local SGD on CIFAR-10 (Wang et al. 2019). MuLoCo with
one worker: 2.6773 against 2.6792 for Muon at 78 M parameters (Therien et al. 2025). Post-local SGD closes the gap of large
batches (Lin et al. 2018). Lookahead (Zhang et al. 2019).""",
    follows=f"""An outer momentum needs rounds, and there are
{results.options["steps"] // results.options["period"]} here; its rate and momentum are the published ones, not tuned.""",
    method=f"""{diloco.method(results)} Muon's steps have the RMS of Adam (`consistent_rms=0.2`). Rounds have
{results.options["period"]} steps, for Lookahead 5. Outer optimizers: SlowMo SGD (1.0, momentum 0.5), Lookahead SGD (0.5), MuLoCo
Nesterov (0.7, 0.6). Post-local SGD averages gradients in the first half of the steps.""",
  )


def draw(figure, results):
  panel = figure.subplots()
  names = list(results.arms)
  values = [results.of(name, "test") for name in names]
  lab.dots(panel, names, values, [lab.COLORS[name in BASE] for name in names])
  panel.set_xlabel("held-out loss, nats per byte")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
