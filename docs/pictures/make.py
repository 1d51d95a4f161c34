"""Draws every picture of the documentation from its own runs, in the light and in the dark theme.

Prints the numbers that the pages mention.

python docs/pictures/make.py [--out FOLDER] [--only NAME] [--quick]
"""

import argparse
import functools
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "examples"))

import bad_shards
import compressed_digits
import diagrams
import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from theme import COLORS, label, one_panel, save

import optax_wrappers as ow
from optax_wrappers import projections

# After the examples, which configure devices when they are imported.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"


options = argparse.Namespace(quick=False)


def number_of(steps):
  """Steps of a run; a tenth of them if it only has to work."""
  return steps // 10 if options.quick else steps


def train(tx, axis, step_of, params, data):
  """Scans a worker's step over data, leaves [steps, workers, ...], for workers that own their
  parameters."""
  num_workers = jax.tree.leaves(data)[0].shape[1]
  state = ow.stack_workers(tx.init(params), num_workers)
  workers = ow.map_workers(step_of(tx), axis)

  def step(carry, batch):
    carry = workers(*carry, batch)
    return carry, carry

  return lax.scan(step, (ow.stack_workers(params, num_workers), state), data)[1]


def valley(figure, ways):
  """Paths of 4 workers from one start to the minimum of a curved valley; one panel per
  optimizer."""

  def loss(w):
    x, y = w
    return 0.5 * (x**2 / 6 + 4 * (y - 0.25 * x**2 + 0.6) ** 2)

  def step_of(tx):
    def step(w, state, noise):
      updates, state = tx.update(jax.grad(loss)(w) + noise, state, w)
      return optax.apply_updates(w, updates), state

    return step

  noise = jnp.asarray(np.random.default_rng(1).normal(0, 2.0, (120, 4, 2)), jnp.float32)
  start, ends = jnp.array([-3.2, 0.6]), {}
  grid = np.meshgrid(np.linspace(-4, 3, 120), np.linspace(-2.4, 3.4, 120))
  heights = np.asarray(jax.vmap(jax.vmap(loss))(jnp.stack(grid, -1)))
  for panel, (title, tx) in zip(figure.subplots(1, 3, sharey=True), ways.items()):
    path, state = train(tx, "workers", step_of, start, noise)
    panel.contour(*grid, np.sqrt(heights), levels=10, colors="gray", linewidths=0.5, alpha=0.7)
    for worker in range(path.shape[1]):
      whole = np.concatenate([start[None], path[:, worker]])
      panel.plot(*whole.T, color=COLORS[worker], linewidth=0.9, alpha=0.85)
    if (center := getattr(state, "center", None)) is not None:
      panel.plot(
        *np.concatenate([start[None], center]).T, color=COLORS[4], linewidth=2.6, label="center"
      )
      panel.legend(loc="upper right")
    foreground = panel.spines["left"].get_edgecolor()
    panel.plot(0, -0.6, "+", color=foreground, markersize=40, zorder=9)
    panel.set(title=title, xlim=(-4, 3), ylim=(-2.4, 3.4), xlabel="first parameter")
    ends[title] = float(loss(path[-20:].mean((0, 1))))
  figure.axes[0].set_ylabel("second parameter")
  return "loss at the mean of the last 20 steps: " + ", ".join(
    f"{title} {end:.3f}" for title, end in ends.items()
  )


def pmean(figure):
  """Eight shards under shard_map: a manual mean, and cross_shard."""
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
  x = jax.random.normal(jax.random.key(0), (64, 3))
  y = x @ jnp.array([1.0, -2.0, 0.5])
  sgd = optax.sgd(0.15)
  average = functools.partial(jax.lax.pmean, axis_name="batch")
  by_hand = optax.GradientTransformation(
    sgd.init, lambda grads, state, params: sgd.update(average(grads), state, params)
  )
  ways = {"jax.lax.pmean by hand": by_hand, "cross_shard": ow.cross_shard(sgd, "batch")}
  panel, ends = figure.subplots(), {}
  for (name, tx), color in zip(ways.items(), (COLORS[1], COLORS[0])):

    def step(params, x, y, tx=tx):
      loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)
      updates, _ = tx.update(grads, tx.init(params), params)
      return optax.apply_updates(params, updates), average(loss)

    mapped = jax.jit(
      jax.shard_map(step, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
    )
    params, losses = jnp.zeros(3), []
    for _ in range(25):
      params, loss = jax.block_until_ready(mapped(params, x, y))
      losses.append(float(loss))
    panel.plot(losses, label=name, color=color)
    ends[name] = losses[-1]
  panel.set(xlabel="step", ylabel="loss", yscale="log")
  panel.legend()
  return ", ".join(f"{name} {end:.3g}" for name, end in ends.items())


def surface(figure):
  """All-reduce, elastic averaging and local averaging."""
  sgd, axis = optax.sgd(0.08), "workers"
  return valley(
    figure,
    {
      "all-reduce: one model": ow.cross_shard(sgd, axis),
      "elastic averaging, period 8": ow.elastic_average(
        sgd, axis, communication_period=8, moving_rate=0.225
      ),
      "local averaging, period 8": ow.local_steps(sgd, axis, communication_period=8),
    },
  )


def rounds(figure):
  """Three lists of arguments of local_steps."""
  sgd, axis, period = optax.sgd(0.08), "workers", {"communication_period": 8}
  slow = optax.sgd(0.7, momentum=0.5, nesterov=True)
  return valley(
    figure,
    {
      "local SGD": ow.local_steps(sgd, axis, **period),
      "DiLoCo": ow.local_steps(sgd, axis, outer=slow, **period),
      "delay=3, pull=0.5": ow.local_steps(sgd, axis, outer=slow, delay=3, pull=0.5, **period),
    },
  )


def digits_batches(steps, workers, size, seed=0):
  x, x_test, y, y_test = digits.load()
  rows = np.random.default_rng(seed).integers(0, len(x), (steps, workers, size))
  return (x[rows], y[rows]), (x_test, y_test)


def digits_step(tx):
  def step(params, state, batch):
    updates, state = tx.update(jax.grad(digits.cross_entropy)(params, *batch), state, params)
    return optax.apply_updates(params, updates), state

  return step


def communication(figure):
  """Test accuracy against the megabytes that each of 8 workers has sent."""
  batches, test = digits_batches(320, 8, 16)
  params, axis = digits.init(), "workers"
  once = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6
  said = []
  panel = figure.subplots()
  sgd = optax.sgd(0.2)
  local = functools.partial(ow.local_steps, sgd, axis)
  outer = optax.sgd(0.4, momentum=0.9, nesterov=True)
  runs = {
    "data parallel (cross_shard)": (ow.cross_shard(sgd, axis), 1),
    "local SGD (local_steps), period 16": (local(communication_period=16), 16),
    "DiLoCo, period 16": (local(communication_period=16, outer=outer), 16),
  }
  for period in (16, 64):
    tx = ow.elastic_average(sgd, axis, communication_period=period, moving_rate=0.9 / 8)
    runs[f"elastic_average, period {period}"] = (tx, period)
  accuracy = jax.jit(jax.vmap(digits.accuracy, (0, None, None)))
  for (name, (tx, period)), color in zip(runs.items(), COLORS):
    path, state = jax.jit(lambda data, tx=tx: train(tx, axis, digits_step, params, data))(batches)
    # All workers equal after a mean.
    center = getattr(state, "center", None)
    shared = jax.tree.map(lambda p: p[:, 0], path) if center is None else center
    every = np.arange(period - 1, 320, max(period, 8))
    reached = accuracy(jax.tree.map(lambda p, every=every: p[every], shared), *test)
    said.append(f"{name} {reached[-1]:.3f} after {once * (320 // period):.2f} MB")
    panel.plot(once * ((every + 1) // period), reached, "o-", markersize=3, color=color, label=name)
  panel.set(
    xscale="log", xlabel="megabytes sent by a worker", ylabel="test accuracy", ylim=(0.5, 1.0)
  )
  panel.legend(loc="lower right")
  return "; ".join(said)


def compression(figure):
  """Loss at the end against the kilobytes that each of 8 shards sends in a step, by codec."""
  said = []
  for panel, (title, inner) in zip(
    figure.subplots(1, 2), {"SGD": optax.sgd(0.3), "Adam": optax.adam(3e-3)}.items()
  ):
    ends = {}
    for name, codec in compressed_digits.CODECS.items():
      sent, losses, accuracy = compressed_digits.train(codec, number_of(300), inner)
      ends[name] = sent / 1e3, losses[-20:].mean()
      said.append(f"{title}, {name} {ends[name][0]:.1f} kB {ends[name][1]:.4f} {accuracy:.3f}")
    panel.scatter(*zip(*ends.values()), s=22, color=COLORS[0])
    panel.axhline(ends["float32"][1], color="gray", linewidth=0.8, linestyle="--")
    for name, place in ends.items():
      label(panel, name, place, up=name != "signs")  # which is next to "top 2 %"
    panel.set(title=title, xscale="log", yscale="log", xlabel="kilobytes per step")
    panel.set(xlim=(6, 500), ylim=(0.005, 0.5))
  figure.axes[0].set_ylabel("training loss at the end")
  return "; ".join(said)


def votes(figure):
  """Loss of the good shards by reduction, while two of eight send wrong gradients."""
  panels = figure.subplots(1, 3, sharey=True)
  steps, said = number_of(200), []
  for (name, rule), color in zip(bad_shards.RULES.items(), ("gray", *COLORS)):
    factors = [factor for kind, factor in bad_shards.FACTORS.items() if kind != "sound"]
    losses = np.asarray(bad_shards.train(rule, factors, steps))
    said.append(f"{name} {np.round(losses[:, -20:].mean(1), 3).tolist()}")
    for panel, curve in zip(panels, losses):
      smooth = np.convolve(curve, np.ones(10) / 10, "valid")
      panel.plot(np.arange(10, steps + 1), smooth, color=color, linewidth=1.1, label=name)
  for panel, kind in zip(panels, list(bad_shards.FACTORS)[1:]):
    panel.set(title=f"two of eight: {kind}", xlabel="step", yscale="log", ylim=(0.1, 10))
  panels[0].set_ylabel("loss of the sound shards")
  panels[2].legend(fontsize=8)
  return "; ".join(said)


def noise(figure):
  """The noise scale during training, and the steps that batches of several sizes need."""
  left, right = figure.subplots(1, 2)
  steps, shards, size = 600, 8, 16
  (x, y), _ = digits_batches(steps, shards, size)
  tx = optax.chain(ow.contrib.measure_noise("shards", decay=0.97), optax.sgd(0.2))

  def shard(params, state, x, y):
    loss, grads = jax.value_and_grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, lax.pmean(loss, "shards")

  mapped = jax.vmap(shard, (None, None, 0, 0), None, axis_name="shards")

  def step(held, batch):
    *held, loss = mapped(*held, *batch)
    return held, (size * ow.metrics(held[1])["noise_scale"], loss)

  params = digits.init()
  scales, losses = map(np.asarray, lax.scan(step, [params, tx.init(params)], (x, y))[1])
  left.plot(scales, color=COLORS[0], label="noise scale, in examples")
  left.axhline(shards * size, color=COLORS[1], linestyle="--", label="the batch of this run")
  left.set(yscale="log", xlabel="step", ylim=(1, 3e3))
  left.legend(loc="lower right")

  # Steps to a smoothed loss, each size with its best learning rate.
  goal, sizes, rates = 0.3, [4, 16, 64, 256, 1024], 0.0125 * 2.0 ** jnp.arange(8)
  needed = []
  for batch in sizes:
    (x, y), _ = digits_batches(300, 1, batch, seed=1)

    def run(rate, data=(x[:, 0], y[:, 0])):
      sgd = optax.sgd(rate)

      def step(held, examples):
        params, smooth = held
        loss, grads = jax.value_and_grad(digits.cross_entropy)(params, *examples)
        updates, _ = sgd.update(grads, sgd.init(params))
        smooth = 0.9 * smooth + 0.1 * loss
        return (optax.apply_updates(params, updates), smooth), smooth

      curve = lax.scan(step, (digits.init(), jnp.float32(2.3)), data)[1]
      return jnp.where((curve < goal).any(), jnp.argmax(curve < goal), jnp.inf)

    needed.append(float(jax.jit(lambda rates, run=run: lax.map(run, rates))(rates).min()))
  met = int(np.argmax(np.convolve(losses, np.ones(10) / 10, "valid") < goal))
  scale = float(np.mean(scales[: met + 10]))
  right.plot(sizes, needed, "o-", color=COLORS[0], label=f"steps to a loss of {goal}")
  right.axvline(scale, color=COLORS[1], linestyle="--", label="noise scale until then, mean")
  right.set(xscale="log", yscale="log", xlabel="examples in a batch", ylim=(30, 300))
  right.legend()
  found = ", ".join(f"{b}: {n:.0f}" for b, n in zip(sizes, needed))
  ends = ", ".join(f"{scales[i]:.0f} at {i + 1}" for i in (49, 199, 599))
  return (
    f"noise scale {ends}; mean of it until the loss is {goal} {scale:.0f}; steps needed {found}"
  )


def row_norms(figure):
  """Norms of the 64 hidden units' incoming weights during training, with and without a bound of
  2."""
  (x, y), _ = digits_batches(300, 1, 64)
  left, right = figure.subplots(1, 2, sharey=True)
  params = digits.init()
  only = jax.tree.map_with_path(
    lambda path, _: "Dense_0" in str(path) and "kernel" in str(path), params
  )
  adam = optax.adam(1e-2)
  said = []
  wrappers = {
    "Adam": adam,
    "clip_variables(Adam, 2.0, axes=0)": ow.clip_variables(adam, 2.0, axes=0, mask=only),
  }
  for panel, (title, tx) in zip((left, right), wrappers.items()):

    def step(carry, batch, tx=tx):
      params, state = digits_step(tx)(*carry, batch)
      return (params, state), jnp.linalg.norm(params["Dense_0"]["kernel"], axis=0)

    norms = lax.scan(step, (params, tx.init(params)), (x[:, 0], y[:, 0]))[1]
    said.append(f"{float(norms.max()):.2f}")
    panel.plot(norms, color=COLORS[0], linewidth=0.5, alpha=0.5)
    panel.axhline(2.0, color=COLORS[1], linewidth=1.2, label="2.0")
    panel.set(title=f"{title}: largest {float(norms.max()):.2f}", xlabel="step")
  assert float(norms.max()) <= 2.000001
  left.set_ylabel("norm of a unit's incoming weights")
  right.legend(loc="lower right")
  return f"largest norm {said[0]} without a bound, {said[1]} with one"


def staleness(figure):
  """Training loss after 300 updates when every second gradient is computed on parameters `delay`
  updates old."""
  steps = number_of(300)
  data = [digits_batches(steps, 1, 32, seed)[0] for seed in range(5)]
  x, y = (
    jnp.stack([batches[i][:, 0] for batches in data]) for i in range(2)
  )  # [seeds, steps, examples, ...]
  params, oldest = digits.init(), 48
  delays = np.array([0, 2, 4, 6, 8, 12, 16, 24, 32, 48])

  def final_loss(tx, delay, x, y):
    def step(carry, inputs):
      params, state = carry
      i, batch = inputs
      now = ow.get_state(state, ow.states.StalenessState).step
      age = jnp.minimum(jnp.where(i % 2 == 1, delay, 0), now)
      grads = jax.grad(digits.cross_entropy)(ow.contrib.past_params(state, age), *batch)
      updates, state = tx.update(grads, state, params, computed_at=now - age)
      return (optax.apply_updates(params, updates), state), None

    last = lax.scan(step, (params, tx.init(params)), (jnp.arange(steps), (x, y)))[0][0]
    return digits.cross_entropy(last, x.reshape(-1, 64), y.reshape(-1))

  panel, said = figure.subplots(), []
  sgd = optax.sgd(0.1, momentum=0.9)
  policies = {
    "all accepted": None,
    "weights (1 + age)^-1/2": ow.staleness.polynomial(0.5),
    "drop_stale, max_staleness=4": lambda age: age <= 4,
  }
  for (name, policy), color in zip(policies.items(), [COLORS[1], COLORS[2], COLORS[0]]):
    tx = ow.contrib.params_history(ow.staleness_aware(sgd, policy, max_staleness=oldest), oldest)
    over_delays = jax.vmap(lambda delay, x, y, tx=tx: final_loss(tx, delay, x, y), (0, None, None))
    losses = jax.jit(jax.vmap(over_delays, (None, 0, 0)))(delays, x, y)
    said.append(
      f"{name}: " + ", ".join(f"{d}: {loss:.2f}" for d, loss in zip(delays, losses.mean(0)))
    )
    panel.plot(delays, losses.mean(0), "o-", markersize=4, color=color, label=name)
    panel.fill_between(delays, losses.min(0), losses.max(0), color=color, alpha=0.15, linewidth=0)
  panel.axvline(4, color="gray", linewidth=0.8, linestyle="--")
  panel.set(
    xlabel="staleness of every second gradient, in updates",
    ylabel="training loss, 5 seeds",
    yscale="log",
  )
  panel.legend(loc="lower right")
  return "mean loss by staleness; " + "; ".join(said)


def scale(figure):
  """Loss of the same step under shard_map's default types: a manual `lax.pmean`, and
  `cross_shard`."""
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
  (x, y), _ = digits_batches(60, 8, 16)
  sgd = optax.sgd(0.5)

  def by_hand(updates, state, params=None):
    return sgd.update(jax.tree.map(lambda g: lax.pmean(g, "batch"), updates), state, params)

  panel, said = figure.subplots(), []
  runs = {
    "lax.pmean by hand: the sum, 8 times too large": optax.GradientTransformation(
      sgd.init, by_hand
    ),
    "cross_shard: the mean": ow.cross_shard(sgd, "batch"),
  }
  for (name, tx), color in zip(runs.items(), COLORS[1::-1]):

    def run(params, state, x, y, tx=tx):
      def step(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(digits.cross_entropy)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), lax.pmean(value, "batch")

      return lax.scan(step, (params, state), (x[:, 0], y[:, 0]))[1]

    specs = (P(), P(), P(None, "batch"), P(None, "batch"))
    params = digits.init()
    losses = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P()))(
      params, tx.init(params), x, y
    )
    said.append(f"{name}: largest loss {losses.max():.1f}, last {losses[-1]:.2f}")
    panel.plot(losses, color=color, label=name)
  panel.set(xlabel="step", ylabel="training loss", yscale="log")
  panel.legend(loc="upper right")
  return "; ".join(said)


def towers(figure):
  """Bytes that a compiled step on a batch of 4,096 digits needs in addition to arguments, by number
  of towers."""
  params, numbers = digits.init(), (1, 2, 4, 8, 16, 32)
  held = []
  for number in numbers:
    tx = ow.gather_towers(optax.adam(1e-3), number)
    batch = (jnp.zeros((4096 // number, 64)), jnp.zeros(4096 // number, jnp.int32))
    compiled = jax.jit(digits_step(tx)).lower(params, tx.init(params), batch).compile()
    held.append(compiled.memory_analysis().temp_size_in_bytes / 1e6)
  panel = figure.subplots()
  panel.plot(numbers, held, "o-", color=COLORS[0])
  panel.set(xscale="log", yscale="log", xlabel="towers", ylabel="megabytes of temporaries")
  panel.set_xticks(numbers, numbers)
  panel.minorticks_off()
  return ", ".join(f"{number}: {megabytes:.2f} MB" for number, megabytes in zip(numbers, held))


def sets(figure):
  """Projections of 60 random pairs of parameters."""
  points = jnp.asarray(np.random.default_rng(0).normal(0, 1.1, (60, 2)), jnp.float32)
  kinds = {
    "max_norm(1)": projections.max_norm(1.0, 1),
    "unit_norm()": projections.unit_norm(1),
    "l1_ball(1)": projections.l1_ball(1.0, 1),
    "non_negative()": projections.non_negative(),
  }
  for panel, (title, kind) in zip(figure.subplots(1, 4, sharey=True), kinds.items()):
    tx = ow.project_variables(optax.sgd(0.0), kind)
    updates, _ = tx.update(jnp.zeros_like(points), tx.init(points), points)
    landed = optax.apply_updates(points, updates)
    for a, b in zip(points, landed):
      panel.plot([a[0], b[0]], [a[1], b[1]], color="gray", linewidth=0.6)
    panel.scatter(*points.T, s=9, color="gray")
    panel.scatter(*landed.T, s=13, color=COLORS[0], zorder=3)
    panel.set(title=title, aspect="equal", xlim=(-2.8, 2.8), ylim=(-2.8, 2.8))
  return f"{len(points)} points, {len(kinds)} projections"


PICTURES = {
  pmean: None,  # only a card
  surface: (9.5, 3.5),
  rounds: (9.5, 3.5),
  communication: (7, 3.6),
  compression: (9.5, 3.6),
  votes: (9.5, 3.4),
  noise: (9.5, 3.4),
  row_norms: (8.5, 3.4),
  staleness: (7, 3.4),
  scale: (7, 3.2),
  towers: (6, 3.0),
  sets: (9.5, 2.9),
  diagrams.timeline: (8, 4.4),
  diagrams.feedback: (7, 2.6),
  diagrams.pods: (7.5, 3.9),
  diagrams.order: (7, 3),
  diagrams.decisions: (4.4, 6.2),
  diagrams.layout: (4.6, 2.8),
}

# For the cards of the gallery and of the home page.
PATHS = {"xlabel": "", "ylabel": "", "xticks": [], "yticks": []}
CARDS = {
  pmean: one_panel([("pmean by hand", (0.08, 0.8)), ("cross_shard", (0.5, 0.35))]),
  surface: one_panel([*[None] * 4, ("center", (0.3, 0.8))], 1, **PATHS),
  rounds: one_panel([*[None] * 4, ("center", (0.3, 0.8))], 1, **PATHS),
  communication: one_panel(
    [
      ("data parallel", (0.6, 0.5)),
      None,
      ("DiLoCo", (0.1, 0.1)),
      None,
      ("elastic averaging", (0.03, 0.9)),
    ],
    ylim=(0.5, 1.1),
  ),
  staleness: one_panel(
    [("all accepted", (0.5, 0.9)), ("weighted", (0.5, 0.1)), ("dropped above 4", (0.5, 0.42))],
    xlabel="age of every second gradient",
    ylabel="training loss",
  ),
  towers: one_panel(ylabel="megabytes"),
  diagrams.timeline: one_panel(),
  diagrams.pods: diagrams.pods_card,
}


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--out", type=pathlib.Path, default=HERE, help="folder (default: beside this script)"
  )
  parser.add_argument("--only", choices=[make.__name__ for make in PICTURES], help="one picture")
  parser.add_argument("--quick", action="store_true", help="a tenth of the steps of long runs")
  args = parser.parse_args(namespace=options)
  args.out.mkdir(parents=True, exist_ok=True)
  for make, size in PICTURES.items():
    if args.only in (None, make.__name__):
      print(f"{make.__name__}: {save(make, make.__name__, size, args.out, CARDS.get(make))}")


if __name__ == "__main__":
  main()
