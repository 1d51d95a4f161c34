"""Zero to three of eight shards send wrong gradients: the mean compared with robust reductions.

Scikit-learn's digits, 16 examples per shard, SGD. Bad shards multiply their gradients by -10, send
zeros, or send NaN.
"""

import sys

import jax
import jax.numpy as jnp
import lab
import optax
import tasks

import optax_wrappers as ow
from optax_wrappers import reductions

TITLE = "Bad shards"
MINUTES = 4
SIZES = {
  "full": {"seeds": 5, "steps": 200, "bad": [1, 2, 3]},
  "small": {
    "seeds": 2,
    "steps": 8,
    "bad": [1],
    "kinds": ["NaN"],
    "rules": ["mean", "geometric median", "Krum"],
  },
}
SHARDS, BATCH = 8, 16
RULES = {
  "mean": lambda bad: "mean",
  "median": lambda bad: reductions.median(),
  "trimmed mean": lambda bad: reductions.trimmed_mean(max(bad, 1)),
  "geometric median": lambda bad: reductions.geometric_median(),
  "Krum": lambda bad: reductions.krum(max(min(bad, 2), 1)),
}
FACTORS = {"times -10": -10.0, "zeros": 0.0, "NaN": float("nan")}


def measure(lab, steps, bad, kinds=tuple(FACTORS), rules=tuple(RULES)):
  task = tasks.digits()

  def run(rule, num_bad, factor):
    def spoil(grads, worker):
      return jax.tree.map(lambda g: jnp.where(worker < num_bad, factor, 1.0) * g, grads)

    def of(rate):
      return ow.cross_shard(optax.sgd(rate), tasks.AXIS, reduction=rule(num_bad)), first_worker

    return tasks.runs(task, of, workers=SHARDS, batch=BATCH, steps=steps, spoil=spoil)

  for name in rules:
    rule = RULES[name]
    lab.tuned(arm(name, 0, ""), run(rule, 0, 1.0), 0.4, points=5)
    for kind in kinds:
      for num_bad in bad:
        lab.tuned(arm(name, num_bad, kind), run(rule, num_bad, FACTORS[kind]), 0.4, points=5)


def first_worker(params, state):
  """All shards take the same step."""
  return jax.tree.map(lambda leaf: leaf[0], params)


def arm(rule, num_bad, kind):
  return f"{rule}, {num_bad} {kind}" if num_bad else f"{rule}, all sound"


def page(results):
  bad = results.options["bad"]
  kinds = results.options.get("kinds", list(FACTORS))
  rules = results.options.get("rules", list(RULES))
  cases = [(0, "")] + [(n, kind) for kind in kinds for n in bad]
  rows = [["Test error, %", *rules]]
  for case in cases:
    names = [arm(rule, *case) for rule in rules]
    head = f"{case[0]} of {SHARDS}: {case[1]}" if case[0] else "all sound"
    rows.append([head, *map(results.error_text, names)])
  worst = {
    rule: max(results.error(arm(rule, *case), diverged=100.0) for case in cases[1:])
    for rule in rules
  }
  best = min(worst, key=worst.get)
  lost = [rule for rule in rules if worst[rule] > 50]
  sound = {rule: arm(rule, 0, "") for rule in rules}
  costly = ", ".join(
    f"{rule} ({results.error(sound[rule]):.1f} against {results.error(sound['mean']):.1f} %)"
    for rule in rules
    if results.differs(sound[rule], sound["mean"], "error")
    and results.error(sound[rule]) > results.error(sound["mean"])
  )
  costly = costly or "none"
  return lab.Page(
    claim=f"""The most robust reduction is the {best}; {lab.listed(lost)} can fail completely.""",
    numbers=f"""With up to {max(bad)} bad shards out of {SHARDS}, the test error of the {best} is at most {worst[best]:.1f} %; that of the mean,
      with no bad shard, is {results.error(arm("mean", 0, "")):.1f} %.""",
    caption="""Test error against the number of bad shards, a panel for each kind. The mean fails at one shard that sends
      -10 times its gradient, or NaN; Krum at two that send zeros.""",
    table=rows,
    published="""The papers use other data and attacks. Blanchard et al. (2017) show that one bad worker can make the mean fail, and
that Krum tolerates f of N workers if N > 2f + 2 and gradients are large compared to their noise.""",
    follows=f"""Start with the {best}. If no shard is bad, significantly worse than the mean: {costly}.

Krum fails with zeros, which agree with one another; the mean only needs a larger learning rate there.
Against NaN alone use `cross_shard(nonfinite="drop")`.""",
    method=f"""scikit-learn's digits, one hidden layer of 64 units, {results.options["steps"]} steps of SGD, {BATCH} examples per
shard. The trimmed mean cuts as many shards at each end as are bad; Krum is set to at most two, its limit for {SHARDS}.""",
  )


# For the home page and the gallery.
CARD = {
  "names": [("mean", (0.5, 0.82)), ("median", (0.1, 0.06))],
  "ylabel": "test error, %",
  "ylim": (1.2, 130),
}


def draw(figure, results):
  bad = results.options["bad"]
  kinds = results.options.get("kinds", list(FACTORS))
  rules = results.options.get("rules", list(RULES))
  panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
  for panel, kind in zip(panels, kinds):
    for rule, color in zip(rules, lab.COLORS):
      values = [100 * results.of(arm(rule, n, kind), "error") for n in [0, *bad]]
      lab.line(panel, [0, *bad], values, color, rule)
    panel.set(title=kind, xlabel=f"bad shards of {SHARDS}", xticks=[0, *bad], yscale="log")
    lab.ticks(panel.yaxis, [2, 5, 10, 20, 50, 100])
  panels[0].set_ylabel("test error, %")
  panels[len(panels) // 2].legend(frameon=False, loc="upper left")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
