"""Compression on a language model: of DiLoCo's pseudo-gradients and of data parallelism's
gradients.

Model, data and tuning are those of the study by number of rounds.
"""

import functools
import sys

import jax
import lab
import optax
import tasks
from diloco import WORKERS
from setting import Arm, Setting, measure_arms, one_rate, outer_rate, setting_text, two_rates

import optax_wrappers as ow
from optax_wrappers import codecs

jax.config.update("jax_num_cpu_devices", WORKERS)

TITLE = "Compressed DiLoCo on a language model"
MINUTES = 400
SIZES = {
  "full": {"seeds": 5, "width": 64, "depth": 3, "period": 20, "rounds": 300},
  "small": {"seeds": 2, "width": 16, "depth": 1, "period": 2, "rounds": 2, "bits": ["4 bits"]},
}
BITS = {f"{bits} bits": codecs.quantize(bits) for bits in (8, 4, 2)}
TOP = "top 1/64 of 2 bits"
SPARSE = codecs.compression(codecs.top_k(1 / 64, value=codecs.quantize(2, chunk=64)), decay=0.95)
STEP, ROUND = "every step", "in rounds"


def every_step(setting, codec):
  """Gradients of WORKERS workers, in every step."""

  def of(rate):
    tx = ow.cross_shard(setting.adamw(rate), tasks.AXIS, codec=codec)
    return tx, tasks.mean_of_workers

  return setting.run(of, WORKERS)


def sparse_loco(setting, period):
  def of(rate):
    options = {"communication_period": period, "outer": optax.sgd(1.0), "codec": SPARSE}
    return ow.local_steps(setting.adamw(rate), tasks.AXIS, **options), tasks.center

  return setting.run(of, WORKERS)


def arms(period, rounds, bits=tuple(BITS)) -> dict[str, Arm]:
  at, of = functools.partial(Arm, period * rounds), functools.partial
  plain = f"float32, {ROUND}"
  found = {f"float32, {STEP}": at(one_rate, Setting.parallel)}
  found[plain] = at(two_rates, of(Setting.diloco, period=period))
  for name in bits:
    found[f"{name}, {STEP}"] = at(one_rate, of(every_step, codec=BITS[name]))
    made = of(Setting.diloco, period=period, codec=BITS[name])
    found[f"{name}, {ROUND}"] = at(outer_rate(plain), made)
  found[f"{TOP}, {STEP}"] = at(one_rate, of(every_step, codec=SPARSE))
  found[f"{TOP}, {ROUND}"] = at(one_rate, of(sparse_loco, period=period))
  return found


def sends(codec, period):
  """A transformation that sends what an arm sends; its inner optimizer sends nothing."""
  coded, sgd = {"codec": codec} if codec else {}, optax.sgd(1.0)
  if period == 1:
    return ow.cross_shard(sgd, tasks.AXIS, **coded)
  return ow.local_steps(sgd, tasks.AXIS, communication_period=period, outer=sgd, **coded)


def measure(lab, width, depth, **options):
  measure_arms(lab, width, depth, arms(**options))
  task, codec_of = tasks.text(width, depth, 0), {"float32": None, TOP: SPARSE} | BITS
  for arm in arms(**options):
    name, kind = arm.split(", ")
    period = 1 if kind == STEP else options["period"]
    sent = tasks.bytes_of_exchange(sends(codec_of[name], period), task, WORKERS)
    lab.note(arm, "bytes", sent / period)


def codings(options):
  """The names of the codecs, the uncompressed one first."""
  return ["float32", *options.get("bits", BITS), TOP]


def page(results):
  options, loss = results.options, results.loss
  period, rounds = options["period"], options["rounds"]
  names = codings(options)
  data, diloco = f"float32, {STEP}", f"float32, {ROUND}"

  def sent(arm):
    return results.arms[arm]["bytes"]

  rows = [["", STEP, "kB a step", ROUND, "kB a step", "in rounds, above float32 every step"]]
  for name in names:
    arms = f"{name}, {STEP}", f"{name}, {ROUND}"
    cells = [
      cell for arm in arms for cell in (results.text(arm, "test"), f"{sent(arm) / 1e3:,.1f}")
    ]
    rows.append([name, *cells, f"{loss(f'{name}, {ROUND}') - loss(data):+.3f}"])

  def costs(when):
    """The codecs without significant cost, the others with their cost, and the ratio of bytes."""
    plain = f"float32, {when}"
    arms = {name: f"{name}, {when}" for name in names[1:]}
    more = {name: loss(arm) - loss(plain) for name, arm in arms.items()}
    same = [
      name
      for name, arm in arms.items()
      if not results.differs(arm, plain, "test") or more[name] < 0
    ]
    least = min([plain, *(arms[name] for name in same)], key=sent)
    dear = [f"{name} {more[name]:+.3f}" for name in arms if name not in same]
    return lab.listed(same), lab.listed(dear), sent(data) / sent(least)

  (free, dear, fewer), (free_step, dear_step, fewer_step) = costs(ROUND), costs(STEP)
  return lab.Page(
    claim=f"""For DiLoCo's pseudo-gradients, these codecs have no significant cost: {free}. The coarsest of them sends 1/{fewer:.0f} of the
      bytes of float32 data parallelism.""",
    numbers=f"""In nats per byte, DiLoCo in float32 is {lab.beside(loss(diloco) - loss(data))} data parallelism. The other codecs
      raise the loss of DiLoCo in float32: {dear}.""",
    caption="Held-out loss against bytes per step, for compressed gradients and pseudo-gradients.",
    table=rows,
    published="""Douillard et al. (2025), Streaming DiLoCo: outer gradients of 4 bits cost nothing. Sarfi et al. (2025):
SparseLoCo, with 1 to 3 % of the entries in 2 bits, has a lower loss than DiLoCo in float32. Thérien et al. (2025): with
feedback and inner Muon, 2 bits cost almost nothing.""",
    follows=f"""If the network can carry it, compress gradients in every step instead. Without significant cost: {free_step}; the coarsest of these
sends 1/{fewer_step:.0f} of the bytes. The other codecs raise the loss: {dear_step}.

We did not reproduce the published advantage of SparseLoCo: its loss is {loss(f"{TOP}, {ROUND}"):.3f}, and that of DiLoCo in
float32 {loss(diloco):.3f}.""",
    method=f"""{setting_text(options)} There are {rounds} rounds of {period} steps and {WORKERS} workers. In every step:
`cross_shard(codec=)`. In rounds: `local_steps(codec=)` with an outer Nesterov momentum of 0.9, at the best inner rate
for float32. The last row sends the largest 1/64 of each 4,096 entries, with residuals that decay by 0.95; in rounds it is
SparseLoCo, with `outer=optax.sgd(1.0)`. All use error feedback. Bytes are those that a worker sends, read from the program
compiled for {WORKERS} devices. Not tried: SparseLoCo with more entries or other outer rates, and inner Muon.""",
  )


# For the home page and the gallery.
CARD = {
  "names": [(ROUND, (0.2, 0.55)), (STEP, (0.6, 0.6))],
  "has_texts": False,
  "ylabel": "held-out loss",
  "xlabel": "kB per step",
}


def draw(figure, results):
  options = results.options
  names = codings(options)
  panel = figure.subplots()
  for color, when in ((0, ROUND), (2, STEP)):
    arms = [f"{name}, {when}" for name in names]
    x = [results.arms[arm]["bytes"] / 1e3 for arm in arms]
    for arm, place in zip(arms, x):
      lab.label(panel, arm.split(",")[0], (place, results.loss(arm)))
    lab.line(panel, x, [results.of(arm, "test") for arm in arms], lab.COLORS[color], when, "o")
  panel.set(xscale="log", xlabel="kB per step and worker", ylabel="held-out loss, nats per byte")
  panel.set_ylim(top=panel.get_ylim()[1] + 0.02)
  lab.ticks(panel.xaxis, [1, 10, 100, 1000])
  panel.legend(frameon=False)


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
