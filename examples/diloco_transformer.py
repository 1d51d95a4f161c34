"""A small transformer language model (NNX): DiLoCo with 4 workers compared with data parallelism.

Both see the same tokens, the source code of Python's standard library, in the same number of steps.
Data parallelism sends the gradient in every step. DiLoCo does so in the first steps (--warmup), and
then sends the parameters once per round. Prints the held-out loss and the bytes that a worker
sends.
"""

import argparse
import functools
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_wrappers as ow

WORKERS, BATCH, LENGTH, WIDTH = 4, 4, 64, 64

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=360, help="default: %(default)s")
parser.add_argument(
  "--warmup", type=int, default=60, help="of them first, at least 1 (default: %(default)s)"
)
parser.add_argument("--period", type=int, default=20, help="steps a round (default: %(default)s)")


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=WIDTH, decode=False, rngs=rngs)
    self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
    self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

  def __call__(self, x):
    mask = nnx.make_causal_mask(x[..., 0])
    x = x + self.attention(self.norms[0](x), mask=mask)
    return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
  """Two transformer blocks over bytes."""

  def __init__(self, rngs):
    self.embedding = nnx.Embed(256, WIDTH, rngs=rngs)
    self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

  def __call__(self, tokens):
    x = self.embedding(tokens) + self.position(jnp.arange(tokens.shape[-1]))
    for block in self.blocks:
      x = block(x)
    return self.embedding.attend(self.norm(x))


def text():
  """Returns the source code of the standard library, as bytes."""
  folder = pathlib.Path(os.__file__).parent
  sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
  return np.frombuffer(b"".join(sources), np.uint8)


def batches(data, steps):
  """Yields rows of all workers for each step; each worker reads its own part of the text."""
  rng = np.random.default_rng(0)
  parts = np.array_split(data, WORKERS)
  for _ in range(steps):
    starts = [rng.integers(len(part) - LENGTH - 1, size=BATCH) for part in parts]
    yield np.stack([[p[i : i + LENGTH + 1] for i in own] for p, own in zip(parts, starts)])


graph, START = nnx.split(Transformer(nnx.Rngs(0)))


def loss(params, rows):
  rows = rows.astype(jnp.int32)
  logits = nnx.merge(graph, params)(rows[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def train(tx, params, state, stream):
  """Returns the workers after all steps, their state, and the bytes of one synchronization."""
  mesh = jax.make_mesh((WORKERS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))

  def step(params, state, rows):
    grads = jax.grad(loss)(params, rows)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.jit(ow.map_workers(step, "workers", mesh=mesh))
  compiled = mapped.lower(params, state, stream[0]).compile()
  for rows in stream:
    params, state = jax.block_until_ready(compiled(params, state, rows))
  # The gradient and the parameters have equal size; the plan has an entry for each.
  return params, state, max(one.num_bytes for one in ow.inspect.compiled_collectives(compiled))


def main():
  args = parser.parse_args()
  data = text()
  data, held_out = data[:-200_000], data[-200_000:]
  rows = held_out[: len(held_out) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)[:256]
  evaluate = jax.jit(functools.partial(loss, rows=jnp.asarray(rows)))
  stream = list(batches(data, args.steps))
  first, rest = stream[: args.warmup], stream[args.warmup :]

  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
  together = ow.cross_shard(inner, "workers")
  alone = ow.diloco(inner, "workers", communication_period=args.period)
  begin = ow.stack_workers((START, together.init(START)), WORKERS)
  params, state, _ = train(together, *begin, first)

  # Data parallelism continues. DiLoCo takes over the parameters and the inner optimizer state.
  ends, _, num_bytes = train(together, params, state, rest)
  report("data parallel", evaluate(jax.tree.map(lambda p: p[0], ends)), num_bytes * args.steps)
  own = ow.stack_workers(alone.init(jax.tree.map(lambda p: p[0], params)), WORKERS)
  _, own, num_bytes = train(alone, params, own.replace(inner_state=state.inner_state), rest)
  exchanges = args.warmup + len(rest) // args.period
  report("DiLoCo", evaluate(ow.center_params(own)), num_bytes * exchanges)


def report(name, held_out_loss, num_bytes):
  print(f"{name}: held-out loss {held_out_loss:.3f} nats a byte, {num_bytes / 1e6:,.0f} MB sent")


if __name__ == "__main__":
  main()
