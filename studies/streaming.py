"""Streaming DiLoCo on a language model: fragments, delay and mixing, compared with plain DiLoCo.

Language model, data and start are those of the DiLoCo study. A fragment is a part of the leaves
that is synchronized at its own step of a round; the delay is in steps; mix is the fraction of a
worker's own parameters that it keeps.
"""

import functools
import sys

import diloco
import lab
import tasks
from diloco import OUTER, OUTER_RATE, PERIOD, ROWS, WORKERS, adamw

import optax_wrappers as ow

TITLE = "Streaming DiLoCo"
MINUTES = 14
SIZES = {
  "full": tasks.SIZES["full"]
  | {
    "inner_rate": 1e-3,
    "arms": [[1, 0, 0.0], [1, 0, 0.5], [3, 0, 0.0], [6, 0, 0.0], [6, 5, 0.0], [6, 5, 0.5]],
  },
  "small": tasks.SIZES["small"]
  | {"steps": 40, "inner_rate": 1e-3, "arms": [[1, 0, 0.0], [2, 1, 0.5]]},
}


def name(fragments, delay, mix):
  return f"{fragments} fragments, delay {delay}, mix {mix:g}".replace("1 fragments", "1 fragment")


def measure(lab, width, depth, pretrained, steps, inner_rate, arms):
  task = tasks.text(width, depth, pretrained)

  def optimizer(rate, fragments, delay, mix):
    tx = ow.local_steps(
      adamw(inner_rate, steps),
      tasks.AXIS,
      communication_period=PERIOD,
      outer=OUTER["Nesterov"](rate),
      fragments=fragments,
      delay=delay,
      pull=1 - mix,
    )
    return tx, tasks.center

  for fragments, delay, mix in arms:
    of = functools.partial(optimizer, fragments=fragments, delay=delay, mix=mix)
    run = tasks.runs(
      task, of, workers=WORKERS, batch=ROWS // WORKERS, steps=steps, evaluations=5, at_once=False
    )
    lab.tuned(name(fragments, delay, mix), run, OUTER_RATE["Nesterov"], tuning_seeds=1)


def page(results):
  arms = [name(*arm) for arm in results.options["arms"]]
  plain, *others = arms
  rows = [["", "held-out loss, nats per byte", "difference", "outer learning rate"]]
  gaps = {arm: results.loss(arm) - results.loss(plain) for arm in arms}
  for arm in arms:
    rows.append([arm, results.text(arm, "test"), f"{gaps[arm]:+.4f}", results.rate(arm)])
  differing = [arm for arm in others if results.differs(arm, plain, "test")]
  worse = [f"{arm} ({gaps[arm]:+.3f})" for arm in differing if gaps[arm] > 0]
  better = [f"{arm} ({gaps[arm]:+.3f})" for arm in differing if gaps[arm] < 0]
  if worse:
    first = f"Some streaming is significantly worse than plain DiLoCo, unlike published: {'; '.join(worse)}"
  else:
    first = "As published, no streaming variant is significantly worse than plain DiLoCo"
  return lab.Page(
    claim=f"{first}.",
    numbers=f"""Plain DiLoCo has a held-out loss of {results.loss(plain):.3f} nats per byte. Significantly better:
      {"; ".join(better) or "none"}.""",
    caption="Held-out loss of plain DiLoCo and of streaming with fragments, delays and mixing.",
    table=rows,
    published="""Douillard et al. (2025): the loss hardly depends on the number of fragments, a delay of up to 5 inner
steps, or the mixing coefficient.""",
    follows="""Use fragments to divide the peak bandwidth and a delay to overlap communication with steps. A delay of 5 is a
quarter of a round here, but a twentieth of the paper's 100 steps.""",
    method=f"""{diloco.method(results)} There are {WORKERS} workers, rounds of {PERIOD} steps, an outer Nesterov momentum of 0.9
and an inner rate of AdamW of {results.options["inner_rate"]:g}. The mix is 1 - `pull`.""",
  )


def draw(figure, results):
  panel = figure.subplots()
  arms = [name(*arm) for arm in results.options["arms"]]
  values = [results.of(arm, "test") for arm in arms]
  lab.dots(panel, arms, values, [lab.COLORS[0]] * len(arms))
  panel.axvline(values[0].mean(), color=lab.COLORS[1], linestyle="--")
  panel.set_xlabel("held-out loss, nats per byte")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
