"""Data parallel training of an NNX model on 8 simulated devices."""

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
    self.logits = nnx.Linear(64, 10, rngs=rngs)

  def __call__(self, x):
    return self.logits(nnx.relu(self.hidden(x)))


def main():
  x_train, x_test, y_train, y_test = digits.load()
  # The model's structure stays outside; its parameters go through the step like any other pytree.
  graphdef, params = nnx.split(Mlp(nnx.Rngs(0)), nnx.Param)
  tx = ow.cross_shard(optax.adam(5e-3), "batch")

  def cross_entropy(params, x, y):
    logits = nnx.merge(graphdef, params)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  def step(params, opt_state, x, y):
    grads = jax.grad(cross_entropy)(ow.per_shard(params, "batch"), x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
  train = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("batch"), P("batch")), out_specs=P())
  )

  opt_state = tx.init(params)
  for x, y in digits.batches(x_train, y_train, size=256, steps=200):
    # Simulated devices share their threads, and a queue of steps can come to wait for itself.
    params, opt_state = jax.block_until_ready(train(params, opt_state, x, y))

  accuracy = (nnx.merge(graphdef, params)(x_test).argmax(-1) == y_test).mean()
  print(f"test accuracy {accuracy:.3f}")
  assert accuracy > 0.95


if __name__ == "__main__":
  main()
