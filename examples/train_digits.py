"""Trains a Flax model on handwritten digits, once plainly, once with each of the five wrappers that
began as TensorFlow's, and with local SGD and DiLoCo, and compares the runs.

Sets up its own simulated devices, one for each worker. Prints a table, saves the curves, and
asserts that every run reaches 0.95 test accuracy (with the default number of steps and workers).
"""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

DEFAULT_STEPS, DEFAULT_WORKERS = 500, 8
WRAPPERS = (
  "plain",
  "cross_shard",
  "gather_towers",
  "elastic_average",
  "local_steps",
  "diloco",
  "drop_stale",
  "clip_variables",
)

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
  "--wrapper", choices=(*WRAPPERS, "all"), default="all", help="which run (default: all)"
)
parser.add_argument(
  "--workers", type=int, default=DEFAULT_WORKERS, help="simulated devices (default: %(default)s)"
)
parser.add_argument(
  "--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps a run (default: %(default)s)"
)
parser.add_argument(
  "--seed", type=int, default=0, help="of the weights, batches and delays (default: %(default)s)"
)
parser.add_argument(
  "--out", default="digits.png", help="where to save the curves (default: %(default)s)"
)
parser.add_argument("--json", help="where to save the table as a list of objects")

if __name__ == "__main__":
  args = parser.parse_args()
  for option in ("workers", "steps"):
    if getattr(args, option) < 1:
      parser.error(f"--{option} must be at least 1, got {getattr(args, option)}")
  # The number of devices must be known before JAX starts.
  os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.workers}"
  )
  os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_wrappers as ow
from optax_wrappers.train_state import TrainState

matplotlib.use("Agg")
import matplotlib.pyplot as plt

AXIS = "workers"
BATCH = 16  # examples per worker and step
NUM_TOWERS = 2
PERIOD = 10
MAX_STALENESS, MAX_DELAY = 2, 4
MAX_NORM = 1.0
EVALUATE_EVERY = 20


class Mlp(nn.Module):
  """Two hidden layers on 8 x 8 pixels."""

  @nn.compact
  def __call__(self, x):
    for i, width in enumerate((64, 64)):
      x = nn.relu(nn.Dense(width, name=f"hidden_{i}")(x))
    return nn.Dense(10, name="logits")(x)


class StaleTrainState(TrainState):
  """Also stores recent parameters, newest first, for gradients computed at old ones."""

  history: Any


def cross_entropy(params, x, y):
  return optax.softmax_cross_entropy_with_integer_labels(
    Mlp().apply({"params": params}, x), y
  ).mean()


def replicated_step(state, batch):
  """One worker's step on parameters that all workers share; the wrapper reduces the gradients."""
  loss, grads = jax.value_and_grad(cross_entropy)(
    ow.per_shard(state.params, AXIS), batch["x"], batch["y"]
  )
  return state.apply_gradients(grads=grads), loss


def own_step(state, batch):
  """One worker's step on its own parameters (or those of the only worker)."""
  loss, grads = jax.value_and_grad(cross_entropy)(state.params, batch["x"], batch["y"])
  return state.apply_gradients(grads=grads), loss


def stale_step(state, batch):
  """One worker's step with a gradient of the parameters `delay` accepted updates ago."""
  now = ow.get_state(state.opt_state, ow.states.DropStaleState).step
  delay = jnp.minimum(batch["delay"], now)
  old_params = jax.tree.map(lambda leaf: leaf[delay], state.history)
  loss, grads = jax.value_and_grad(cross_entropy)(old_params, batch["x"], batch["y"])
  stepped = state.apply_gradients(grads=grads, computed_at=now - delay)
  accepted = ow.get_state(stepped.opt_state, ow.states.DropStaleState).step > now
  history = jax.tree.map(
    lambda new, old: jnp.where(accepted, jnp.concatenate([new[None], old[:-1]]), old),
    stepped.params,
    state.history,
  )
  return stepped.replace(history=history), loss


@dataclasses.dataclass(frozen=True)
class Run:
  """The training of one row of the table.

  Attributes:
    tx: the optimizer.
    step: (state, batch) of one worker to (state, loss).
    replicated: whether the workers share their parameters.
    calls_per_step: calls of `step` for one optimizer step.
    calls_per_branch: of so many calls, one takes the conditionals of the compiled program.
    evaluated: the parameters to evaluate.
    particular: what is special about the final state, for the table.
  """

  tx: optax.GradientTransformation
  step: Callable = replicated_step
  replicated: bool = True
  calls_per_step: int = 1
  calls_per_branch: int = 1
  evaluated: Callable = lambda state: state.params
  particular: Callable = lambda state: ""


def hidden_kernels(params):
  return jax.tree.map_with_path(
    lambda path, _: "hidden" in str(path[0]) and "kernel" in str(path[-1]), params
  )


def largest_norm(state):
  columns = [jnp.linalg.norm(state.params[f"hidden_{i}"]["kernel"], axis=0) for i in range(2)]
  return f"largest norm {max(float(c.max()) for c in columns):.4f}"


def distance_from_center(state):
  center = ow.center_params(state.opt_state)
  squares = jax.tree.map(
    lambda x, c: ((x - c) ** 2).reshape(x.shape[0], -1).sum(-1), state.params, center
  )
  return f"workers {float(jnp.sqrt(sum(jax.tree.leaves(squares))).mean()):.2f} from center"


def make_runs():
  adam = optax.adam(2e-3)
  local = {"step": own_step, "replicated": False, "calls_per_branch": PERIOD}
  center = {"evaluated": lambda state: ow.center_params(state.opt_state)}
  return {
    "plain": Run(adam, own_step),
    "cross_shard": Run(ow.cross_shard(adam, AXIS)),
    "gather_towers": Run(
      ow.gather_towers(ow.cross_shard(adam, AXIS), NUM_TOWERS),
      calls_per_step=NUM_TOWERS,
      calls_per_branch=NUM_TOWERS,
      particular=lambda state: f"{NUM_TOWERS} batches per step",
    ),
    "elastic_average": Run(
      ow.elastic_average(adam, AXIS, communication_period=PERIOD, moving_rate=0.1),
      particular=distance_from_center,
      **local,
      **center,
    ),
    "local_steps": Run(
      ow.local_steps(adam, AXIS, communication_period=PERIOD),
      evaluated=lambda state: jax.tree.map(lambda leaf: leaf.mean(0), state.params),
      particular=lambda state: "local SGD",
      **local,
    ),
    "diloco": Run(
      ow.diloco(adam, AXIS, communication_period=PERIOD, outer_learning_rate=0.3),
      particular=distance_from_center,
      **local,
      **center,
    ),
    "drop_stale": Run(
      ow.drop_stale(ow.cross_shard(adam, AXIS), MAX_STALENESS, axis_name=AXIS),
      stale_step,
      particular=lambda state: f"dropped {float(ow.metrics(state.opt_state)['drop_rate']):.0%}",
    ),
    "clip_variables": Run(
      ow.clip_variables(ow.cross_shard(adam, AXIS), MAX_NORM, axes=0, mask=hidden_kernels),
      particular=largest_norm,
    ),
  }


def batches(x, y, num_workers, num_calls, seed):
  """Yields batches, leaves [worker, example, ...]; every worker draws its own examples and
  delay."""
  rng = np.random.default_rng(seed)
  for _ in range(num_calls):
    rows = rng.integers(0, len(x), (num_workers, BATCH))
    yield {
      "x": x[rows],
      "y": y[rows],
      "delay": rng.integers(0, MAX_DELAY + 1, num_workers, dtype=np.int32),
    }


def train(name, run, data, num_workers, num_steps, seed, advance):
  """Trains one run; returns its row of the table and its curves."""
  x_train, x_test, y_train, y_test = data
  params = Mlp().init(jax.random.key(seed), x_train[:1])["params"]
  fields = {}
  cls = TrainState
  if run.step is stale_step:
    cls, fields = StaleTrainState, {"history": ow.stack_workers(params, MAX_DELAY + 1)}
  state = cls.create(apply_fn=None, params=params, tx=run.tx, **fields)
  state = state.replace(step=jnp.zeros((), jnp.int32))

  num_calls = num_steps * run.calls_per_step
  calls = batches(x_train, y_train, num_workers, num_calls, seed)
  if name == "plain":  # one device, with all workers' examples
    calls = (jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch) for batch in calls)
    step = jax.jit(run.step, donate_argnums=0)
  else:
    # One worker's step, mapped over workers; the layout of the state says which leaves each worker
    # has for itself.
    mesh = jax.make_mesh((num_workers,), (AXIS,), axis_types=(AxisType.Auto,))
    axes = ow.worker_axes(state, replicated=run.replicated)
    specs = ow.specs(state, workers=AXIS, replicated=run.replicated)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    by_worker = NamedSharding(mesh, PartitionSpec(AXIS))
    mapped = jax.vmap(run.step, (axes, 0), (axes, 0), axis_name=AXIS, spmd_axis_name=AXIS)
    step = jax.jit(
      mapped,
      in_shardings=(shardings, by_worker),
      out_shardings=(shardings, by_worker),
      donate_argnums=0,
    )
    state = jax.device_put(
      ow.stack_workers(state, num_workers, replicated=run.replicated), shardings
    )
    calls = (jax.device_put(batch, by_worker) for batch in calls)
  first = next(calls)
  compiled = step.lower(state, first).compile()
  calls = itertools.chain([first], calls)

  @jax.jit
  def accuracy(state):
    return (Mlp().apply({"params": run.evaluated(state)}, x_test).argmax(-1) == y_test).mean()

  curve = collections.defaultdict(list)
  times, losses = [], []
  for i in range(num_steps):
    start = time.perf_counter()
    for batch in itertools.islice(calls, run.calls_per_step):
      state, loss = compiled(state, batch)
    jax.block_until_ready(state)
    times.append(time.perf_counter() - start)
    losses.append(float(jnp.mean(loss)))
    if (i + 1) % EVALUATE_EVERY == 0 or i + 1 == num_steps:
      curve["step"].append(i + 1)
      curve["loss"].append(statistics.fmean(losses[-EVALUATE_EVERY:]))
      curve["accuracy"].append(float(accuracy(state)))
    advance()

  collectives = [c for c in ow.inspect.compiled_collectives(compiled) if c.kind == "all-reduce"]
  often = [run.calls_per_step / (run.calls_per_branch if c.conditional else 1) for c in collectives]
  return {
    "wrapper": name,
    "accuracy": curve["accuracy"][-1],
    "loss": curve["loss"][-1],
    "all_reduces_per_step": sum(often),
    "bytes_per_step": sum(n * c.num_bytes for n, c in zip(often, collectives)),
    "ms_per_step": 1e3 * statistics.median(times),
    "particular": run.particular(state),
  }, curve


def show(rows):
  table = Table(title="Handwritten digits")
  for heading in ("run", "test accuracy", "loss", "all-reduces/step", "bytes/step", "ms/step", ""):
    table.add_column(heading, justify="left" if heading in ("run", "") else "right")
  for row in rows:
    table.add_row(
      row["wrapper"],
      f"{row['accuracy']:.3f}",
      f"{row['loss']:.4f}",
      f"{row['all_reduces_per_step']:g}",
      f"{row['bytes_per_step']:,.0f}",
      f"{row['ms_per_step']:.2f}",
      row["particular"],
    )
  Console(width=max(Console().width, 120)).print(table)  # shows every column in full, in a pipe too


def plot(curves, path):
  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
  for (name, curve), style in zip(
    curves.items(), itertools.cycle(("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1))))
  ):
    left.plot(curve["step"], curve["loss"], linestyle=style, label=name)
    right.plot(curve["step"], curve["accuracy"], linestyle=style, label=name)
  left.set(
    xlabel="optimizer step", ylabel=f"training loss, mean of {EVALUATE_EVERY} steps", yscale="log"
  )
  right.set(xlabel="optimizer step", ylabel="test accuracy", ylim=(0.8, 1.0))
  right.axhline(0.95, color="gray", linewidth=0.8)
  right.legend(loc="lower right")
  for axes in (left, right):
    axes.grid(alpha=0.3)
  figure.savefig(path, dpi=150)
  plt.close(figure)


def main(args):
  digits = load_digits()
  data = train_test_split(
    (digits.data / 16).astype(np.float32),
    digits.target,
    test_size=0.25,
    random_state=0,
    stratify=digits.target,
  )
  runs = make_runs()
  names = WRAPPERS if args.wrapper == "all" else (args.wrapper,)
  rows, curves = [], {}
  with Progress() as progress:
    for name in names:
      task = progress.add_task(f"{name:16}", total=args.steps)
      row, curves[name] = train(
        name,
        runs[name],
        data,
        args.workers,
        args.steps,
        args.seed,
        lambda task=task: progress.advance(task),
      )
      rows.append(row)
  show(rows)
  plot(curves, args.out)
  print(f"curves: {args.out}")
  if args.json:
    with open(args.json, "w") as file:
      json.dump(rows, file, indent=2)

  for row in rows:
    assert np.isfinite(row["loss"]), f"{row['wrapper']}: the loss is {row['loss']}"
    if args.steps >= DEFAULT_STEPS and args.workers == DEFAULT_WORKERS:
      assert row["accuracy"] >= 0.95, (
        f"{row['wrapper']}: test accuracy {row['accuracy']:.3f} is below 0.95"
      )


if __name__ == "__main__":
  main(args)
