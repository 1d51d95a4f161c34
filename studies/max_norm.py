"""Max-norm compared with dropout and L2, on 3,500 of MNIST's digits.

A network with two hidden layers of 256 units. L2's strength and the bound on the norm are tuned
like the learning rate, on the validation images.
"""

import sys

import jax
import lab
import optax
import tasks

import optax_wrappers as ow

TITLE = "Max-norm with dropout"
MINUTES = 10
SIZES = {
  "full": {"seeds": 5, "steps": 1200, "width": 256},
  "small": {"seeds": 2, "steps": 8, "width": 16, "strengths": [1e-3], "norms": [1.0]},
}
BATCH = 50


def hidden(params):
  """The kernels of hidden layers, to which the bound and L2 apply."""
  last = f"Dense_{len(params) - 1}"
  is_hidden = lambda path, _: path[0].key != last and path[-1].key == "kernel"
  return jax.tree_util.tree_map_with_path(is_hidden, params)


def measure(lab, steps, width, strengths=(1e-4, 5e-4, 2e-3), norms=(1.0, 2.0, 4.0)):
  def run(dropout, wrap):
    task = tasks.digits(tasks.Mlp((width, width), dropout=dropout), large=True)
    of = lambda rate: (wrap(optax.sgd(rate, momentum=0.9)), tasks.mean_of_workers)
    return tasks.runs(task, of, workers=1, batch=BATCH, steps=steps, evaluations=8)

  def decay(strength):
    return lambda sgd: optax.chain(optax.add_decayed_weights(strength, mask=hidden), sgd)

  def bound(norm):
    return lambda sgd: ow.clip_variables(sgd, norm, axes=0, mask=hidden)

  arms = {"nothing": (0.0, lambda sgd: sgd), "dropout": (0.5, lambda sgd: sgd)}
  arms |= {f"dropout, L2 {s:g}": (0.5, decay(s)) for s in strengths}
  arms |= {f"dropout, norm {c:g}": (0.5, bound(c)) for c in norms}
  for name, (dropout, wrap) in arms.items():
    lab.tuned(name, run(dropout, wrap), 0.1, points=5)


def page(results):
  def best(part):
    found = [arm for arm in results.arms if arm.startswith(f"dropout, {part}")]
    return min(found, key=lambda arm: results.mean(arm, "validation"))

  rows = [["", "test error, %", "test loss", "learning rate"]]
  for arm in results.arms:
    cells = results.text(arm, "error", 2, 100), results.text(arm, "test"), results.rate(arm)
    rows.append([arm, *cells])
  bound, baseline = best("norm"), min(("dropout", best("L2")), key=results.error)
  shows = results.differs(bound, baseline, "error") and results.error(bound) < results.error(
    baseline
  )
  if shows:
    first = "As published, max-norm improves dropout"
  else:
    first = "We did not reproduce the published gain of max-norm over dropout"
  return lab.Page(
    claim=f"{first}.",
    numbers=f"""The test error is {results.error(bound):.2f} % with max-norm and dropout, {results.error("dropout"):.2f} % with dropout,
      {results.error(best("L2")):.2f} % with dropout and L2, and {results.error("nothing"):.2f} % without regularization.""",
    caption="Test error of each regularization.",
    table=rows,
    published="""Srivastava et al. (2014), table 9, on all of MNIST: 1.25 % test error with dropout and L2, 1.05 % with dropout and
max-norm.""",
    follows="""Use `clip_variables` if you need the bound itself.""",
    method=f"""MNIST's digits, two hidden layers of
{results.options["width"]} units, {results.options["steps"]} steps of {BATCH} examples, SGD with momentum 0.9. The strength of L2, and
the bound, are those with the lowest validation loss.""",
  )


def draw(figure, results):
  panel = figure.subplots()
  arms = list(results.arms)
  values = [100 * results.of(arm, "error") for arm in arms]
  colors = [lab.COLORS["norm" in arm] for arm in arms]
  lab.dots(panel, arms, values, colors)
  panel.set_xlabel("test error, %")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
