"""Gradient compression: 4 shards learn the digits with each codec.

The wrapper is `cross_shard` with `codec=`. Prints the bytes that a shard sends per step, read from
the compiled program, the training loss, and the test accuracy.
"""

import argparse
import functools
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import digits
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers import codecs

SHARDS, BATCH = 4, 32

CODECS = {
  "float32": None,
  "bfloat16": codecs.cast("bfloat16"),
  "8 bits": codecs.quantize(8),
  "4 bits": codecs.quantize(4),
  "2 bits": codecs.quantize(2),
  "signs": codecs.signs(),
  "top 2 %": codecs.top_k(0.02),
  "PowerSGD, rank 2": ow.contrib.power_sgd(2),
}

INNER = {
  "sgd": optax.sgd(0.3),
  "momentum": optax.sgd(0.1, momentum=0.9),
  "adam": optax.adam(3e-3),
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
parser.add_argument("--inner", choices=INNER, default="sgd", help="default: %(default)s")
parser.add_argument(
  "--compress-after",
  type=int,
  default=0,
  help="exact steps at first; the program has both exchanges, and kB counts both",
)
parser.add_argument(
  "--codecs", nargs="+", default=list(CODECS), metavar="NAME", help="of the table"
)


class Mlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    for width in (128, 128):
      x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(10)(x)


def cross_entropy(params, x, y):
  logits = Mlp().apply({"params": params}, x)
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@functools.cache
def data(steps):
  x, x_test, y, y_test = digits.load()
  rows = np.random.default_rng(0).integers(0, len(x), (steps, SHARDS, BATCH))
  return (jnp.asarray(x), jnp.asarray(y)), jnp.asarray(rows), (x_test, y_test)


# Bytes that a shard in a ring sends, per byte that it hands to the collective.
SENT = {
  "all-reduce": 2 * (SHARDS - 1) / SHARDS,
  "all-to-all": (SHARDS - 1) / SHARDS,
  "all-gather": SHARDS - 1,
}


def train(codec, steps, inner=INNER["sgd"]):
  """Returns the bytes that a shard sends per step, the loss after each step, and the final
  accuracy."""
  tx = ow.cross_shard(inner, "shards", codec=codec)
  params = Mlp().init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
  # Each shard has its own residual, although all shards have the same parameters.
  state = ow.stack_workers(tx.init(params), SHARDS, replicated=True)
  specs = ow.specs(state, workers="shards", replicated=True)
  is_own = jax.tree.map(lambda spec: spec != P(), specs)
  (x, y), rows, test = data(steps)

  def step(params, state, rows):
    state = jax.tree.map(lambda own, leaf: leaf[0] if own else leaf, is_own, state)
    # per_shard: local gradients, not yet summed in float32.
    own_params = ow.per_shard(params, "shards")
    value, grads = jax.value_and_grad(cross_entropy)(own_params, x[rows[0]], y[rows[0]])
    updates, state = tx.update(grads, state, params)
    state = jax.tree.map(lambda own, leaf: leaf[None] if own else leaf, is_own, state)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "shards")

  mesh = jax.make_mesh((SHARDS,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
  outs = P(), specs, P()
  step = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("shards")), out_specs=outs)
  places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (P(), specs, P("shards")))
  params, state = (jax.device_put(tree, place) for tree, place in zip((params, state), places))
  jitted = jax.jit(step, donate_argnums=(0, 1), in_shardings=places)
  compiled = jitted.lower(params, state, rows[0]).compile()
  sent = sum(SENT[one.kind] * one.num_bytes for one in ow.inspect.compiled_collectives(compiled))

  losses = []
  for one in rows:
    params, state, value = compiled(params, state, jax.device_put(one, places[2]))
    losses.append(float(value))  # waits: simulated devices can starve each other
  x_test, y_test = test
  accuracy = (Mlp().apply({"params": params}, x_test).argmax(-1) == y_test).mean()
  return sent, np.asarray(losses), float(accuracy)


def main():
  args = parser.parse_args()
  ends = {}
  print(f"{'codec':26} {'kB a step':>9} {'loss':>7} {'accuracy':>8}")

  def report(name, codec, feedback=True):
    if codec:
      codec = codecs.compression(codec, feedback=feedback, after=args.compress_after)
    sent, losses, accuracy = train(codec, args.steps, INNER[args.inner])
    ends[name] = losses[-20:].mean()
    print(f"{name:26} {sent / 1e3:9.1f} {ends[name]:7.4f} {accuracy:8.1%}", flush=True)

  for name in args.codecs:
    report(name, CODECS[name])
  report("2 bits, without feedback", codecs.quantize(2), feedback=False)
  if args.inner == "sgd":
    *with_feedback, without = ends.values()
    assert max(with_feedback) < without  # even the coarsest with feedback


if __name__ == "__main__":
  main()
