"""Independent pods on a language model: four processes, one of them killed or slow.

Language model, data, start and learning rates are those of the DiLoCo study. Each pod is a process
that synchronizes through a directory, and reads what a worker of that study reads in each step. All
pods are timed on one machine.
"""

import hashlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import lab
import optax
import tasks
from diloco import OUTER, ROWS, WORKERS, at_peak

import optax_wrappers as ow

TITLE = "Pods that come and go"
MINUTES = 30
INNER_RATE, OUTER_RATE = 1e-3, 0.175  # of the DiLoCo study, for rounds of 20 steps
BATCH = ROWS // WORKERS
GRACE = 1.0  # seconds; rounds take two or three
ARMS = {  # what happens to the last pod
  "undisturbed": {},
  "killed": {"killed": True},
  "slow": {"slower": 3},
  "slow, counted late": {"slower": 3, "max_age": 3},
  "slow, fewer steps": {"slower": 3, "fewer": 3},
}
NAMES = {
  "undisturbed": "four pods",
  "killed": "one is killed for a third of the run",
  "slow": "one is three times slower, and what comes late is dropped",
  "slow, counted late": "the same, but its messages count up to three rounds late, with less weight",
  "slow, fewer steps": "the same, and it makes a third of the steps, with that weight",
}
TOGETHER = "data parallel"
SIZES = {
  "full": tasks.SIZES["full"] | {"rounds": 10, "arms": list(ARMS)},
  "small": tasks.SIZES["small"] | {"rounds": 6, "steps": 12, "arms": ["undisturbed", "killed"]},
}


def of_this_step():
  """Scales updates by a rate that the caller passes, so that a pod that comes back uses that of the
  others."""

  def update(updates, state, params=None, *, rate, **_):
    return jax.tree.map(lambda u: rate * u, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def optimizer(outer_rate):
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, b2=0.95), of_this_step())
  outer = OUTER["Nesterov"](outer_rate)
  return ow.local_steps(inner, None, communication_period=None, outer=outer)


def directory(path, name, max_age, **options):
  staleness = ow.staleness.polynomial(0.5) if max_age else None
  return ow.pods.Directory(
    path, run="text", sender=name, grace=GRACE, max_age=max_age, staleness=staleness, **options
  )


def newest(path):
  """The number of rounds that are complete."""
  decisions = pathlib.Path(path, "text", "f0").glob("*.set")
  return max((int(decision.stem) + 1 for decision in decisions), default=0)


def live(path, number, seed, rate, size, slower, fewer, max_age, begins):
  """Runs a pod from a round on; writes its observations."""
  width, depth, steps, rounds = size
  task, period = tasks.text(width, depth, 0), steps // rounds
  _, places, keys = tasks._begin(task, seed, (steps, WORKERS, BATCH))
  tx = optimizer(rate)

  @jax.jit
  def step(params, state, places, key, rate):
    grads = jax.grad(task.loss)(params, task.read(places), key)
    updates, state = tx.update(grads, state, params, rate=rate)
    return optax.apply_updates(params, updates), state

  start = task.init(None)
  # Compiles everything.
  first = directory(path / f"{number}-{begins}", f"pod-{number}", max_age, quorum=1)
  params, state = step(*first.join(tx, start), places[0, number], keys[0, number], jnp.float32(0))
  first.exchange(tx, params, state, period // fewer)
  if begins is None:
    return
  while newest(path) < begins:
    time.sleep(0.01)
  mine = directory(path, f"pod-{number}", max_age, quorum=WORKERS)
  params, state = mine.join(tx, start)
  reports, begun = [], time.monotonic()
  while mine.round[0] < rounds:
    first, taken = mine.round[0] * period, time.monotonic()
    mine.quorum = WORKERS if mine.round[0] == 0 else 2  # all start together
    for i in range(first, first + period // fewer):
      rate = jnp.float32(INNER_RATE * at_peak(steps)(i))
      params, state = step(params, state, places[i, number], keys[i, number], rate)
    jax.block_until_ready(params)
    time.sleep((slower - 1) * (time.monotonic() - taken))
    try:
      params, state = mine.exchange(tx, params, state, period // fewer)
      reports.append(mine.report)
    except ow.pods.OutOfStepError:
      params, state = mine.join(tx, start)
  center = jax.device_get(ow.center_params(state))
  bits = b"".join(x.tobytes() for x in jax.tree.leaves(center))
  last = f"pod-{WORKERS - 1}"
  waits = [one.waited for one in reports[1:]]
  values = {name: float(x) for name, x in jax.jit(task.measure)(center).items()} | {
    "heard": sum(who.startswith(last) for one in reports for who in one.present),
    "megabytes": len(bits) / 1e6,
    "waited": sum(waits) / max(len(waits), 1),
    "seconds": time.monotonic() - begun,
  }
  text = json.dumps([hashlib.sha256(bits).hexdigest(), values])
  (path / f"{number}.json").write_text(text)


def run_pods(
  folder, start, seed, rate, size, slower=1, fewer=1, killed=False, max_age=0, only_compile=False
):
  """Returns the observations of the first pod; all pods must end with the same bits."""
  path = pathlib.Path(tempfile.mkdtemp(dir=folder))
  directory(path, "start", max_age, quorum=1).join(optimizer(rate), start)
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["tasks", "diloco"])

  def begin(number, begins=0):
    own = (slower, fewer) if number == WORKERS - 1 else (1, 1)
    args = (path, number, seed, rate, size, *own, max_age, begins)
    process = context.Process(target=live, args=args)
    process.start()
    return process

  if only_compile:
    begin(0, None).join()
    return None
  pods, rounds = [begin(number) for number in range(WORKERS)], size[-1]
  if killed:
    dies = 3 * rounds // 10
    spare = begin(WORKERS - 1, dies + rounds // 3)  # starts when as many rounds are complete
    while newest(path) < dies:
      time.sleep(0.01)
    pods[-1].kill()
    pods[-1].join()
    pods[-1] = spare
  for one in pods:
    one.join()
  ends = [json.loads((path / f"{number}.json").read_text()) for number in range(WORKERS)]
  assert len({bits for bits, _ in ends}) == 1, "pods differ"
  return ends[0][1]


def measure(lab, width, depth, pretrained, steps, rounds, arms):
  task = tasks.text(width, depth, pretrained)
  size = width, depth, steps, rounds

  def together(rate):
    inner = optax.adamw(lambda count: rate * at_peak(steps)(count), b2=0.95)
    return optax.chain(optax.clip_by_global_norm(1.0), inner), tasks.mean_of_workers

  run = tasks.runs(task, together, workers=1, batch=ROWS, steps=steps, at_once=False)
  lab.at(TOGETHER, run, INNER_RATE)
  with tempfile.TemporaryDirectory() as temporary:
    folder, start = pathlib.Path(temporary), task.init(None)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server that forks finds `tasks`
    run_pods(folder, start, 0, OUTER_RATE, size, only_compile=True)  # for all processes
    for arm in arms:

      def pods(rates, seeds, arm=arm):
        found = [run_pods(folder, start, *pair, size, **ARMS[arm]) for pair in zip(seeds, rates)]
        return {name: [one[name] for one in found] for name in found[0]}

      lab.at(arm, pods, OUTER_RATE)


def page(results):
  arms, rounds = results.options["arms"], results.options["rounds"]
  plain = results.loss("undisturbed")

  def gap(arm):
    if arm == "undisturbed":
      return ""
    found = "significant" if results.differs(arm, "undisturbed", "test") else "not significant"
    return f"{results.loss(arm) - plain:+.3f} ({found})"

  head = ["held-out loss, nats per byte", "difference from four pods"]
  head += ["rounds that counted the last pod", "wait, s per round"]
  rows = [["", *head], [TOGETHER, results.text(TOGETHER, "test"), "", "", ""]]
  for arm in arms:
    heard, waited = (results.text(arm, name, 1) for name in ("heard", "waited"))
    rows.append([NAMES[arm], results.text(arm, "test"), gap(arm), f"{heard} of {rounds}", waited])
  megabytes = results.mean("undisturbed", "megabytes")
  is_costly = results.differs("killed", "undisturbed", "test")
  return lab.Page(
    claim=f"""If one of four pods is down for a third of the run, the loss changes by {results.loss("killed") - plain:+.3f} nats per
      byte, which is {"" if is_costly else "not "}significant.""",
    numbers=f"""Four undisturbed pods have a held-out loss of {plain:.3f} nats per byte, and data parallelism has
      {results.loss(TOGETHER):.3f}.""",
    caption="Held-out loss of data parallelism, and of four pods of which one is killed or slow.",
    table=rows,
    published="""Decoupled DiLoCo (Douillard et al., 2026) continues with any quorum of its learners while others fail, and weights
them by their tokens. Its results are from thousands of chips and cannot be compared.""",
    follows=f"""[A pod that comes back](../pods.md#what-happens-if) in the middle of a round is late for that round, and begins
the round after the next together with the others. Per round, a pod writes
{megabytes:.1f} MB and reads as much from each of the others.

If late messages are dropped, a pod that is slower than the grace counts in few rounds. Give it fewer steps and less weight.""",
    method=f"""Four pods at one speed compute the row "Nesterov, period 20, 4 workers" of [the DiLoCo study](diloco.md), at its
rates, through messages in float32. They are processes that share a directory on one machine with two cores. The first round waits for all, later ones for two and a grace of {GRACE:g} s. The killed pod gets SIGKILL after
{3 * rounds // 10} rounds, and another takes its name {rounds // 3} rounds later. The slow pod sleeps twice as long as it computes.""",
  )


def draw(figure, results):
  panel = figure.subplots()
  arms = [TOGETHER, *results.options["arms"]]
  values = [results.of(arm, "test") for arm in arms]
  lab.dots(panel, [NAMES.get(arm, arm) for arm in arms], values, [lab.COLORS[0]] * len(arms))
  panel.set_xlabel("held-out loss, nats per byte")


if __name__ == "__main__":
  lab.main(sys.modules[__name__])
