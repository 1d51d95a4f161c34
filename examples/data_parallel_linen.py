"""Data parallel training of a Linen model on 8 simulated devices, in Flax's TrainState."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import digits
import jax
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow


def step(state, x, y):
  """One shard's step; `x` and `y` are its part of the batch."""
  loss, grads = jax.value_and_grad(digits.cross_entropy)(ow.per_shard(state.params, "batch"), x, y)
  return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")


def main():
  x_train, x_test, y_train, y_test = digits.load()
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
  train = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=(P(), P("batch"), P("batch")), out_specs=P())
  )

  state = TrainState.create(
    apply_fn=None, params=digits.init(), tx=ow.cross_shard(optax.adam(5e-3), "batch")
  )
  for x, y in digits.batches(x_train, y_train, size=256, steps=200):
    # Simulated devices share a thread pool, in which queued steps can deadlock.
    state, loss = jax.block_until_ready(train(state, x, y))

  accuracy = digits.accuracy(state.params, x_test, y_test)
  print(f"loss {loss:.3f}, test accuracy {accuracy:.3f}")
  assert accuracy > 0.95


if __name__ == "__main__":
  main()
