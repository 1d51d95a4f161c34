"""Data parallel training of an NNX model, with BatchNorm and dropout, on 8 simulated devices.

Three lines differ from a loop on one device: the optimizer, the mesh and the `nnx.shard_map`.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import digits
import jax
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow


class Mlp(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.hidden = nnx.Linear(64, 64, rngs=rngs)
    # With the axis, the statistics are those of all shards, and equal on all.
    self.norm = nnx.BatchNorm(64, axis_name="batch", rngs=rngs)
    self.dropout = nnx.Dropout(0.2)
    self.logits = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x, rngs=None):
    return self.logits(self.dropout(nnx.relu(self.norm(self.hidden(x))), rngs=rngs))


def cross_entropy(model, x, y, rngs):
  return optax.softmax_cross_entropy_with_integer_labels(model(x, rngs), y).mean()


def main():
  x_train, x_test, y_train, y_test = digits.load()
  model = Mlp(nnx.Rngs(0))
  tx = ow.cross_shard(optax.adam(5e-3), "batch")
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
  specs = (P(), P(), P("batch"), P("batch"), P())

  @nnx.jit
  @nnx.shard_map(mesh=mesh, in_specs=specs, out_specs=P())
  def train(model, optimizer, x, y, key):
    # The key is the same on all shards: without their index, all would drop the same units.
    rngs = nnx.Rngs(dropout=jax.random.fold_in(key, jax.lax.axis_index("batch")))
    grads = nnx.grad(cross_entropy)(model, x, y, rngs)
    optimizer.update(model, grads)

  for step, (x, y) in enumerate(digits.batches(x_train, y_train, size=256, steps=200)):
    train(model, optimizer, x, y, jax.random.key(step))
    # Simulated devices share a thread pool, in which queued steps can deadlock.
    jax.block_until_ready(nnx.state(model))

  model.eval()
  accuracy = (model(x_test).argmax(-1) == y_test).mean()
  print(f"test accuracy {accuracy:.3f}")
  assert accuracy > 0.95


if __name__ == "__main__":
  main()
