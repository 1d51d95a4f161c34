"""Stale gradients: asynchronous workers of equal speed and random durations, five optimizers, four
rules.

With M workers, a gradient is M - 1 updates old on average. Scikit-learn's digits, 400 gradients of
32 examples.
"""

import sys

import lab
import optax
import tasks

import optax_wrappers as ow

TITLE = "Stale gradients"
MINUTES = 6
PICTURE = (9, 6)  # inches
SIZES = {
  "full": {"seeds": 5, "updates": 400, "workers": [2, 4, 8, 16]},
  "small": {"seeds": 2, "updates": 20, "workers": [4], "optimizers": ["momentum"]},
}
BATCH = 32
OPTIMIZERS = {
  "SGD": (optax.sgd, 0.4),
  "momentum": (lambda rate: optax.sgd(rate, momentum=0.9), 0.05),
  "Adam": (optax.adam, 0.01),
  "NAdam": (optax.nadam, 0.01),
  "Muon": (optax.contrib.muon, 0.02),
}
INVERSE = ow.staleness.inverse()
RULES = {
  "none": lambda inner, workers: inner,
  "drop above M": lambda inner, workers: ow.drop_stale(inner, workers),
  "weight 1/(1+t)": lambda inner, workers: ow.staleness_aware(inner, INVERSE),
  "compensation": lambda inner, workers: optax.chain(
    ow.contrib.delay_compensation(2.0, decay=0.95), inner
  ),
}


def measure(lab, updates, workers, optimizers=tuple(OPTIMIZERS)):
  task = tasks.digits()

  def run(make, rule, num_workers):
    arrivals = ow.contrib.arrival_order([1.0] * num_workers, updates, seed=0)

    def of(rate):
      inner = rule(make(rate), num_workers)
      return ow.contrib.simulate_workers(inner, num_workers, arrivals), tasks.mean_of_workers

    # The first calls, of all workers but one, fill the pipeline: `updates` gradients are applied.
    steps = updates + num_workers - 1
    return tasks.runs(task, of, workers=1, batch=BATCH, steps=steps)

  for optimizer in optimizers:
    make, start = OPTIMIZERS[optimizer]
    lab.tuned(arm(optimizer, "none", 1), run(make, RULES["none"], 1), start, points=5)
    for num_workers in workers:
      for name, rule in RULES.items():
        run_of_rule = run(make, rule, num_workers)
        lab.tuned(arm(optimizer, name, num_workers), run_of_rule, start, points=5)


def arm(optimizer, rule, num_workers):
  return f"{optimizer}, {rule}, {num_workers} worker{'s' * (num_workers > 1)}"


def page(results):
  workers = results.options["workers"]
  optimizers = results.options.get("optimizers", list(OPTIMIZERS))
  fewer, most = (workers[0], *workers)[-2:]
  last = f"age {most - 1}, rate tuned at age 0"
  rows = [["Test loss", "mean age 0", *(f"age {n - 1}" for n in workers), last]]
  for optimizer in optimizers:
    for rule in RULES:
      fresh = results.text(arm(optimizer, "none", 1), "test") if rule == "none" else ""
      cells = [results.text(arm(optimizer, rule, n), "test") for n in workers]
      untuned = results.arms[arm(optimizer, "none", 1)]["best"]
      untuned = results.loss_at(arm(optimizer, rule, most), untuned)
      rows.append([f"{optimizer}, {rule}", fresh, *cells, untuned])
  times = {
    one: results.loss(arm(one, "none", most)) / results.loss(arm(one, "none", 1))
    for one in optimizers
  }
  least, worst = (choose(times, key=times.get) for choose in (min, max))

  def significant(n, sign):
    """The rules and optimizers for which a rule is significantly better (sign -1) or worse (1)."""
    found = []
    for optimizer in optimizers:
      for rule in RULES:
        pair = [arm(optimizer, one, n) for one in (rule, "none")]
        change = results.loss(pair[0]) - results.loss(pair[1])
        if sign * change > 0 and results.differs(*pair, "test"):
          found.append(f"{rule} ({optimizer})")
    return lab.listed(found)

  factors = ", ".join(f"{value:.2g} ({one})" for one, value in times.items())
  return lab.Page(
    claim=f"""{least} is the most robust optimizer: a mean age of {most - 1} multiplies its test loss by {times[least]:.2g}, compared
      with {times[worst]:.2g} for {worst}.""",
    numbers=f"""With learning rates tuned for each age, a mean age of {most - 1} multiplies the test loss by {factors}. Of
      {(len(RULES) - 1) * len(optimizers)} combinations of a rule and an optimizer, these are significantly better than no rule at that age:
      {significant(most, -1)}. Significantly worse: {significant(most, 1)}.""",
    caption="Test loss against the mean age of gradients, a panel for each optimizer, a line for each rule.",
    table=rows,
    published="""Zheng et al. (2017) report 8.19 % error on CIFAR-10 with delay compensation and 9.27 % without, with 4 workers. A
study of 2026 (arXiv 2606.30634) finds that a delay of one hurts AdamW, but hardly Muon. With a mixture of experts and 3,000 steps
(Marin, [marin#6431](https://github.com/marin-community/marin/issues/6431), 2026), a delay of 2 costs Muon 0.14 of its loss of 3.63 and
a variant of Adam 0.74 of 3.70, one of 8 costs 0.85 and 2.21, and delay compensation changes neither by more than 0.01.""",
    follows=f"""First tune the learning rate for your ages: the last column uses the best rate for fresh gradients. Then choose the
optimizer, and then a rule. Significantly better than no rule at a mean age of {fewer - 1}: {significant(fewer, -1)}.""",
    method=f"""scikit-learn's digits, one hidden layer of 64 units, {results.options["updates"]} gradients of {BATCH} examples.
`simulate_workers` gives workers random durations of equal mean, so M workers have a mean age of M - 1. All seeds share one order of
arrivals. "drop above M" drops gradients older than M accepted updates. Compensation is `delay_compensation(2.0, decay=0.95)`.""",
  )


def draw(figure, results):
  workers = results.options["workers"]
  optimizers = results.options.get("optimizers", list(OPTIMIZERS))
  panels = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
  delays = [0, *(n - 1 for n in workers)]
  for panel, optimizer in zip(panels, optimizers):
    for rule, color in zip(RULES, lab.COLORS):
      arms = [arm(optimizer, "none", 1), *(arm(optimizer, rule, n) for n in workers)]
      lab.line(panel, delays, [results.of(one, "test") for one in arms], color, rule)
    panel.set(title=optimizer, xlabel="mean age", yscale="log", xticks=delays[::2])
    panel.set_ylabel("test loss")
    lab.ticks(panel.yaxis, [0.05, 0.1, 0.2, 0.4])
  for panel in panels[len(optimizers) :]:
    panel.axis("off")
  panels[-1].legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="center")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
