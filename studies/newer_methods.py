"""Primal averaging, eager updates and DES-LOC on a language model, compared with their baselines.

Model, data and tuning are those of the study by number of rounds.
"""

import functools
import sys

import lab
import setting as shared
import tasks
from diloco import OUTER, WORKERS
from setting import Arm, Setting, as_tuned, measure_arms, one_rate, outer_rate, two_rates

import optax_wrappers as ow

TITLE = "Primal averaging, eager updates, DES-LOC"
MINUTES = 90
SIZES = {
  "full": {"seeds": 5, "width": 64, "depth": 3, "period": 20, "rounds": 100},
  "small": {"seeds": 2, "width": 16, "depth": 1, "period": 2, "rounds": 2},
}
LOCAL = "local AdamW, moments kept"
AVERAGED = "local AdamW, moments averaged"
DESLOC = "DES-LOC, moments at every 3rd and 6th round"
GPA, EAGER = "GPA around AdamW", "eager updates"
SHOWN = ("AdamW", GPA, "DiLoCo", EAGER, LOCAL, AVERAGED, DESLOC)
BASE = {GPA: "AdamW", EAGER: "DiLoCo", AVERAGED: LOCAL, DESLOC: AVERAGED}


def primal(setting):
  """GPA; its averaged parameters are evaluated."""

  def mean(params, state):
    return tasks.mean_of_workers(ow.contrib.averaged_params(state, params), state)

  return setting.run(lambda rate: (ow.contrib.primal_average(setting.adamw(rate)), mean), 1)


def eager(setting, period):
  def of(rates):
    rule = ow.contrib.Eager(OUTER["Nesterov"](rates[1]))
    options = {"communication_period": period}
    tx = ow.exchange.periodic_exchange(setting.adamw(rates[0]), tasks.AXIS, rule, **options)
    return tx, tasks.mean_of_workers

  return setting.run(of, WORKERS)


def arms(period, rounds) -> dict[str, Arm]:
  of, at = functools.partial, functools.partial(Arm, period * rounds)
  averaging = of(Setting.averaging, period=period)
  return {
    "AdamW": at(one_rate, Setting.parallel),
    GPA: at(one_rate, primal),
    "DiLoCo": at(two_rates, of(Setting.diloco, period=period)),
    EAGER: at(outer_rate("DiLoCo"), of(eager, period=period)),
    LOCAL: at(one_rate, averaging),
    AVERAGED: at(as_tuned(LOCAL), of(averaging, inner_state="average")),
    DESLOC: at(as_tuned(LOCAL), of(averaging, inner_state={"mu": 3, "nu": 6})),
  }


def measure(lab, width, depth, **options):
  measure_arms(lab, width, depth, arms(**options))


def page(results):
  period, rounds = results.options["period"], results.options["rounds"]
  loss = results.loss
  gains = {arm: loss(arm) - loss(base) for arm, base in BASE.items()}

  def is_significant(arm):
    return results.differs(arm, BASE[arm], "test")

  def stands(arm):
    if not is_significant(arm):
      return "not significantly different from"
    return f"significantly {'better' if gains[arm] < 0 else 'worse'} than"

  def change(arm):
    return f"{gains[arm]:+.3f}" + ("" if is_significant(arm) else " (not significant)")

  # Parameters once per round, and each moment with its own period.
  sends = {"AdamW": period, GPA: period, AVERAGED: 3, DESLOC: 1 + 1 / 3 + 1 / 6}
  rows = [["", "held-out loss, nats per byte", "baseline", "difference", "x parameters, per round"]]
  for arm in SHOWN:
    against = (BASE[arm], change(arm)) if arm in BASE else ("", "")
    rows.append([arm, results.text(arm, "test"), *against, f"{sends.get(arm, 1):.3g}"])
  return lab.Page(
    claim=f"""GPA is {stands(GPA)} AdamW, eager updates are {stands(EAGER)} DiLoCo, and DES-LOC is {stands(DESLOC)} local AdamW with
      averaged moments.""",
    numbers=f"""In nats per byte of held-out text, GPA is {lab.beside(gains[GPA])} AdamW ({loss("AdamW"):.3f}), eager updates
      are {lab.beside(gains[EAGER])} DiLoCo ({loss("DiLoCo"):.3f}), and DES-LOC, at half the bytes, is {lab.beside(gains[DESLOC])} local AdamW
      that averages all moments in every round ({loss(AVERAGED):.3f}).""",
    caption="Held-out loss of each method and of its baseline.",
    table=rows,
    published="""Defazio et al. (2025): GPA needs 9 to 10 % fewer steps than AdamW to reach the same loss, on Llama models
with 160 M to 8 B parameters. Kale et al. (2025): eager updates are competitive with DiLoCo, without waiting. Iacob et al. (2025): DES-LOC
has the loss of local Adam at half of its bytes.""",
    follows=f"""`inner_state={{"mu": 3, "nu": 6}}` (DES-LOC) has {loss(DESLOC):.3f}; `"keep"`, which sends no moments, has
{loss(LOCAL):.3f}. With eager updates, the contributions of {WORKERS - 1} of {WORKERS} workers arrive a round late.""",
    method=f"""{shared.setting_text(results.options)} There are {rounds} rounds of {period} steps and {WORKERS} workers. AdamW and
GPA take all examples in every step; GPA has the published 0.7 and 0.9967. Eager updates use the inner rate of DiLoCo, and all ways
to average moments use one rate.""",
  )


def draw(figure, results):
  panel = figure.subplots()
  colors = [lab.COLORS[i] for i in (0, 0, 1, 1, 2, 2, 2)]
  lab.dots(panel, SHOWN, [results.of(name, "test") for name in SHOWN], colors)
  panel.set(xlabel="held-out loss, nats per byte")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
