"""DiLoCo by the number of rounds, on a language model trained from scratch.

A transformer over bytes reads Python sources. At a given number of steps, all arms have seen
equally many bytes; only "one worker" has seen a quarter of them. Every rate of every arm is tuned.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import lab
import numpy as np
import optax
import tasks
from diloco import WORKERS
from setting import Arm, Setting, as_tuned, measure_arms, one_rate, setting_text, two_rates

from optax_wrappers import reductions

TITLE = "DiLoCo by the number of rounds"
MINUTES = 700
SIZES = {
  "full": {
    "seeds": 5,
    "width": 64,
    "depth": 3,
    "period": 20,
    "rounds": [10, 30, 100, 300],
    "periods": [50, 500],
    "workers": [2, 8],
    "further": 1000,
  },
  "small": {
    "seeds": 2,
    "width": 16,
    "depth": 1,
    "period": 2,
    "rounds": [2],
    "periods": [],
    "workers": [],
    "further": 4,
  },
}
ALONE = "one worker, a quarter of the data"
MUON = "data parallel, Muon"
AWAY = "one worker absent for a third of the run"
NOISE, MEDIAN = "one worker trained on noise", "one worker trained on noise, median"
BROKEN = {NOISE: f"{NOISE}, with the mean", MEDIAN: f"{NOISE}, with the median"}


def parallel(steps, name="data parallel"):
  return f"{name}, {steps} steps"


def in_rounds(rounds, period, name="DiLoCo"):
  return f"{name}, {rounds} rounds of {period}"


def away(setting, tx):
  """The first worker is absent in the middle third."""

  def update(updates, state, params=None):
    is_third = (state.step >= setting.steps // 3) & (state.step < 2 * setting.steps // 3)
    is_away = is_third & (jax.lax.axis_index(tasks.AXIS) == 0)
    return tx.update(updates, state, params, participation=jnp.where(is_away, 0.0, 1.0))

  return optax.GradientTransformation(tx.init, update)


def noisy(setting, **options):
  """DiLoCo whose first worker reads random bytes."""
  task = setting.task

  def loss(params, rows, key):
    noise = jax.random.randint(key, rows.shape, 0, 256).astype(rows.dtype)
    return task.loss(params, jnp.where(jax.lax.axis_index(tasks.AXIS) == 0, noise, rows), key)

  return setting._replace(task=task._replace(loss=loss)).diloco(**options)


def kinds(number, period):
  """The four arms of a number of rounds: their names, tuning and training."""
  steps, of = number * period, functools.partial
  return [
    (parallel(steps), one_rate, Setting.parallel),
    (in_rounds(number, period), two_rates, of(Setting.diloco, period=period)),
    (in_rounds(number, period, "averaging"), one_rate, of(Setting.averaging, period=period)),
    (parallel(steps, ALONE), one_rate, of(Setting.parallel, part=WORKERS)),
  ]


def arms(period, rounds, periods, workers, further) -> dict[str, Arm]:
  found, longest, of = {}, period * max(rounds), functools.partial
  for number in reversed(rounds):
    for name, tune, made in kinds(number, period):
      found[name] = Arm(number * period, tune, made)
  tuned = [name for name, *_ in kinds(max(rounds), period)]
  for (name, _, made), other in zip(kinds(further, period), tuned):
    found[name] = Arm(further * period, as_tuned(other), made)
  for each in periods:
    made = of(Setting.diloco, period=each)
    found[in_rounds(longest // each, each)] = Arm(longest, two_rates, made)
  at = functools.partial(in_rounds, max(rounds), period)
  for each in workers:
    made = of(Setting.diloco, period=period, workers=each)
    found[at(f"DiLoCo, {each} workers")] = Arm(longest, two_rates, made)
  found[parallel(longest, MUON)] = Arm(longest, one_rate, of(Setting.parallel, inner=Setting.muon))
  made = of(Setting.diloco, period=period, inner=Setting.muon)
  found[at("MuLoCo")] = Arm(longest, two_rates, made)
  broken = {
    AWAY: of(Setting.diloco, wrap=away),
    NOISE: noisy,
    MEDIAN: of(noisy, reduction=reductions.median()),
  }
  for name, made in broken.items():
    found[at(f"DiLoCo, {name}")] = Arm(longest, as_tuned(at()), of(made, period=period))
  return found


def measure(lab, width, depth, **options):
  measure_arms(lab, width, depth, arms(**options))


def page(results):
  options, loss = results.options, results.loss
  period, rounds = options["period"], [*options["rounds"], options["further"]]
  most = max(options["rounds"])
  longest = period * most
  at = functools.partial(in_rounds, most, period)

  def above(arm, steps=longest, base="data parallel"):
    return loss(arm) - loss(parallel(steps, base))

  def gap(*args):
    return f"{above(*args):+.3f}"

  rows = [["rounds", "data parallel", "averaging", "DiLoCo", ALONE, "DiLoCo above data parallel"]]
  for number in rounds:
    data, diloco, averaging, alone = (name for name, *_ in kinds(number, period))
    cells = [results.text(arm, "test") for arm in (data, averaging, diloco, alone)]
    rows.append([f"{number}, of {period} steps", *cells, gap(diloco, number * period)])

  def varied(what, arm, data=""):
    cells = [
      data,
      "",
      results.text(arm, "test"),
      "",
      gap(arm, longest, MUON if data else "data parallel"),
    ]
    rows.append([what, *cells])

  for each in options["periods"]:
    number = longest // each
    varied(f"{number}, of {each} steps", in_rounds(number, each))
  for each in options["workers"]:
    varied(f"{most}, {each} workers", at(f"DiLoCo, {each} workers"))
  varied(f"{most}, Muon", at("MuLoCo"), results.text(parallel(longest, MUON), "test"))
  for each in (AWAY, NOISE, MEDIAN):
    varied(f"{most}, {each}", at(f"DiLoCo, {each}"))

  def differ(one, other):
    return results.differs(one, other, "test")

  def beside(number):
    """How DiLoCo compares with averaging."""
    one, other = in_rounds(number, period), in_rounds(number, period, "averaging")
    if not differ(one, other):
      return "equal"
    return "better" if loss(one) < loss(other) else "worse"

  gaps = [above(in_rounds(n, period), n * period) for n in rounds]
  stands = {n: beside(n) for n in rounds}
  equal = [n for n in rounds if not differ(in_rounds(n, period), parallel(n * period))]
  reached = (
    f"from {equal[0]} rounds on the gap is not significant"
    if equal
    else "the gap is always significant"
  )
  no_worse = [n for n in rounds if stands[n] != "worse"]
  beat = [n for n in rounds if stands[n] == "better"]
  turn = f"not worse than averaging from {no_worse[0]} rounds on" if no_worse else "worse"
  turn += f", better from {beat[0]} on" if beat else ", but never significantly better"
  alone = parallel(longest, ALONE)
  lost = {p: in_rounds(longest // p, p) for p in options["periods"]}
  lost |= {each: at(f"DiLoCo, {each}") for each in (NOISE, MEDIAN)}
  spent = [
    f"rounds of {each} steps" if isinstance(each, int) else BROKEN[each]
    for each, arm in lost.items()
    if not differ(arm, alone) or loss(arm) > loss(alone)
  ]
  numbers = lab.listed(rounds)
  periods, workers = [period, *options["periods"]], [*options["workers"], WORKERS]
  of_workers = {n: at() if n == WORKERS else at(f"DiLoCo, {n} workers") for n in sorted(workers)}
  is_muon_parallel = not differ(at("MuLoCo"), parallel(longest))
  return lab.Page(
    claim=f"""From scratch, DiLoCo's loss after {rounds[-1]:,} rounds of {period} steps is {lab.beside(gaps[-1])} data parallelism, in nats
      per byte; after {rounds[0]} rounds it is {lab.beside(gaps[0])}.""",
    numbers=f"""After {numbers} rounds of {period} steps, DiLoCo's held-out loss minus that of data parallelism is
      {", ".join(f"{one:+.3f}" for one in gaps)} nats per byte; {reached}. Its outer momentum is {turn}.""",
    caption=f"""Left: held-out loss above data parallelism by the number of rounds, of DiLoCo, averaging and one worker
      alone. Right: held-out loss by steps per round, at {longest} steps.""",
    table=rows,
    published="""Douillard et al. (2023), as in [the DiLoCo study](diloco.md). Thérien et al. (2026), MuLoCo: with more
than two workers, DiLoCo with inner Muon comes closer to data-parallel Muon than DiLoCo with AdamW does to data-parallel AdamW.""",
    follows=f"""Estimate how many rounds your run will have: after {lab.listed([n for n in rounds if stands[n] == "worse"])}, DiLoCo is worse than
averaging, which needs no outer learning rate. [From a trained model](diloco.md), DiLoCo is closer
to data parallelism after 10 rounds. Rounds and total steps grow together here, so this study cannot separate them.

Longer rounds cost more: at {longest:,} steps the gap is {", ".join(f"{gap(in_rounds(longest // p, p))} with rounds of {p}" for p in periods)}.
So does splitting the same batch over more workers: {", ".join(f"{gap(arm)} with {n}" for n, arm in of_workers.items())}. With inner
Muon, DiLoCo is {lab.beside(above(at("MuLoCo"), longest, MUON))} data parallelism with Muon, and
{"not " if is_muon_parallel else ""}significantly different from data parallelism with AdamW ({gap(at("MuLoCo"))}).

At {longest:,} steps, a single worker with a quarter of the data is {lab.beside(above(alone))} data parallelism. Not significantly
better there than a single worker: {"; ".join(spent) or "none"}. A worker that is absent for a third of the run costs
{loss(at(f"DiLoCo, {AWAY}")) - loss(at()):+.3f}. One that is trained on noise costs
{loss(at(f"DiLoCo, {NOISE}")) - loss(at()):+.3f} with the mean of {WORKERS} workers, and
{loss(at(f"DiLoCo, {MEDIAN}")) - loss(at()):+.3f} with their median.""",
    method=f"""{setting_text(options)} DiLoCo has an outer Nesterov momentum of 0.9. There are {WORKERS} workers. Rows of
{options["further"]} rounds, and those with a worker that is absent or trained on noise,
use the best rates for {most} rounds. Muon takes the matrices of the layers, AdamW the rest. The absent worker has
`participation=0.0` in the middle third of the steps; noise is random bytes. Not tried: larger batches and models.""",
  )


# For the home page.
CARD = {
  "names": [
    ("DiLoCo", (0.16, 0.48)),
    ("averaging", (0.06, 0.13)),
    ("one worker", (0.42, 0.68)),
    ("data parallel", (0.39, 0.06)),
  ],
  "ylabel": "nats per byte above",
}


def draw(figure, results):
  options = results.options
  period, rounds = options["period"], [*options["rounds"], options["further"]]
  longest = period * max(options["rounds"])
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
    xscale="log", xlabel=f"rounds of {period} steps", ylabel="held-out loss above, nats per byte"
  )
  left.set_ylim(top=1.25 * max(np.max(line.get_ydata()) for line in left.lines))
  lab.ticks(left.xaxis, rounds)
  left.legend(frameon=False, fontsize=8, loc="upper right")
  periods = sorted({period, *options["periods"]})
  values = [results.of(in_rounds(longest // p, p), "test") for p in periods]
  lab.line(right, periods, values, lab.COLORS[0], f"DiLoCo, {longest} steps")
  right.axhline(
    base[max(options["rounds"])], color=lab.COLORS[2], linestyle="--", label="data parallel"
  )
  alone = results.loss(parallel(longest, ALONE))
  right.axhline(alone, color=lab.COLORS[3], linestyle="--", label=ALONE)
  right.set(xscale="log", xlabel="steps of a round", ylabel="held-out loss, nats per byte")
  lab.ticks(right.xaxis, periods)
  right.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.08))


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
