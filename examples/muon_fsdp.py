"""A small transformer with Muon on eight devices, FSDP x tensor parallel, compared with one device.

The parameters are sharded over 4 x 2 devices under plain `jit`. Muon needs whole matrices:
`whole_matrices` distributes them over the devices, by all-to-alls. AdamW updates embedding and
norms. The text is the source code of Python's standard library. Prints the loss after training in
both ways, and what Muon sends, compared with what XLA makes of it by itself. XLA warns that it
copies activations; a larger model would constrain them.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import collections
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

BATCH, LENGTH, WIDTH, LAYERS, HEADS = 16, 64, 64, 4, 4

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")

# Layers are stacked for a scan.
SHAPES = {
  "qkv": (LAYERS, WIDTH, 3 * WIDTH),
  "out": (LAYERS, WIDTH, WIDTH),
  "up": (LAYERS, WIDTH, 4 * WIDTH),
  "down": (LAYERS, 4 * WIDTH, WIDTH),
  "norms": (LAYERS, 2, WIDTH),
  "embedding": (256, WIDTH),
}
SPECS = {
  "qkv": P(None, "fsdp", "tensor"),
  "out": P(None, "tensor", "fsdp"),
  "up": P(None, "fsdp", "tensor"),
  "down": P(None, "tensor", "fsdp"),
  "norms": P(),
  "embedding": P("tensor"),
}
LABELS = {name: "rest" if name in ("norms", "embedding") else "matrix" for name in SHAPES}


def start():
  keys = jax.random.split(jax.random.key(0), len(SHAPES))
  scale = {
    name: 1.0 if name == "embedding" else shape[-2] ** -0.5 for name, shape in SHAPES.items()
  }
  params = {
    name: scale[name] * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, SHAPES.items())
  }
  return params | {"norms": jnp.ones(SHAPES["norms"])}


def loss(params, rows):
  """The cross-entropy of the next byte."""

  def normed(x, scale):
    return scale * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

  def layer(x, own):
    q, k, v = jnp.split(normed(x, own["norms"][0]) @ own["qkv"], 3, -1)
    heads = [y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v)]
    x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ own["out"]
    return x + jax.nn.gelu(normed(x, own["norms"][1]) @ own["up"]) @ own["down"], None

  layers = {name: x for name, x in params.items() if name != "embedding"}
  x, _ = lax.scan(layer, params["embedding"][rows[:, :-1]], layers)
  logits = normed(x, 1.0) @ params["embedding"].T / WIDTH**0.5
  return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def optimizer(muon):
  return optax.chain(
    ow.clip_by_global_norm(1.0),  # like optax's under plain jit; inside shard_map pass specs=SPECS
    optax.partition({"matrix": muon, "rest": optax.adamw(1e-2)}, LABELS),
  )


def batches(steps):
  folder = pathlib.Path(os.__file__).parent
  text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
  data, rng = np.frombuffer(text, np.uint8), np.random.default_rng(0)
  for _ in range(steps):
    begins = rng.integers(len(data) - LENGTH - 1, size=BATCH)
    yield np.stack([data[i : i + LENGTH + 1] for i in begins]).astype(np.int32)


def train(tx, params, steps, lay=lambda rows: rows):
  """Returns the losses and the final parameters."""

  @jax.jit
  def step(params, state, rows):
    value, grads = jax.value_and_grad(loss)(params, rows)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  state, losses = jax.jit(tx.init)(params), []
  for rows in batches(steps):
    params, state, value = jax.block_until_ready(step(params, state, lay(rows)))
    losses.append(float(value))
  return losses, params


def sent(tx, params, specs, mesh):
  """Lists what the update alone sends, with results sharded like the inputs."""
  state = jax.eval_shape(tx.init, params)
  of_state = ow.specs(state, specs, mesh=mesh)
  lay = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, of_state))
  update = jax.jit(tx.update, in_shardings=(*lay, lay[0]), out_shardings=lay)
  found = ow.inspect.compiled_collectives(update.lower(params, state, params).compile())
  kinds = collections.Counter(one.kind for one in found)
  num_bytes = sum(one.num_bytes for one in found)
  return ", ".join(f"{n} {kind}s" for kind, n in kinds.items()) + f", {num_bytes:,} bytes"


def main():
  steps = parser.parse_args().steps
  # Optax's own needs to know which axes of a stack form a matrix.
  axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
  bare = optax.contrib.muon(
    0.02, muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: axes, params)
  )
  alone, expected = train(optimizer(bare), start(), steps)

  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

  def dealt(specs):
    muon = optax.contrib.muon(0.02)
    return ow.whole_matrices(muon, ("fsdp", "tensor"), specs=specs, mesh=mesh, stacked=1)

  params = jax.device_put(start(), {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()})
  rows = NamedSharding(mesh, P("fsdp"))
  losses, found = train(optimizer(dealt(SPECS)), params, steps, lambda x: jax.device_put(x, rows))

  matrices = {name: spec for name, spec in SPECS.items() if LABELS[name] == "matrix"}
  params = {name: found[name] for name in matrices}
  print(f"whole_matrices(muon): {sent(dealt(matrices), params, matrices, mesh)}")
  print(f"muon as it is: {sent(bare, params, matrices, mesh)}")
  print(f"after {steps} steps: one device {alone[-1]:.4f}, eight {losses[-1]:.4f}")
  assert max(float(jnp.abs(found[k] - expected[k]).max()) for k in SHAPES) < 1e-3


if __name__ == "__main__":
  main()
