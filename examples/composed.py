"""Two wrappers composed: the devices of a host average every gradient, and hosts average
elastically every 8th step.

On a 2 x 4 mesh, `elastic_average` uses the slow axis between hosts, and `cross_shard` inside it the
fast axis.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import digits
import jax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

HOSTS, DEVICES, PERIOD = 2, 4, 8


def main():
  x_train, x_test, y_train, y_test = digits.load()
  tx = ow.elastic_average(
    ow.cross_shard(optax.adam(5e-3), "devices"),
    "hosts",
    communication_period=PERIOD,
    moving_rate=0.3,
  )

  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = digits.init()
  state = ow.stack_workers(tx.init(params), HOSTS)
  params = ow.stack_workers(params, HOSTS)
  axes = ow.worker_axes(state)
  # Devices share their host's parameters; hosts have their own, and share the center.
  host = jax.vmap(step, (None, None, 0, 0), None, axis_name="devices", spmd_axis_name="devices")
  cluster = jax.vmap(host, (0, axes, 0, 0), (0, axes), axis_name="hosts", spmd_axis_name="hosts")

  mesh = jax.make_mesh((HOSTS, DEVICES), ("hosts", "devices"), axis_types=(AxisType.Auto,) * 2)
  by_host = NamedSharding(mesh, P("hosts"))
  by_device = NamedSharding(mesh, P("hosts", "devices"))
  layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), ow.specs(state, workers="hosts"))
  train = jax.jit(
    cluster,
    in_shardings=(by_host, layout, by_device, by_device),
    out_shardings=(by_host, layout),
    donate_argnums=(0, 1),
  )

  def place(array):
    return jax.device_put(array.reshape(HOSTS, DEVICES, -1, *array.shape[1:]), by_device)

  params, state = jax.device_put(params, by_host), jax.device_put(state, layout)
  for x, y in digits.batches(x_train, y_train, size=256, steps=200):
    # Simulated devices share a thread pool, in which queued steps can deadlock.
    params, state = jax.block_until_ready(train(params, state, place(x), place(y)))

  sent = ow.inspect.compiled_collectives(train.lower(params, state, place(x), place(y)).compile())
  between_devices = sum(c.num_bytes for c in sent if not c.conditional)
  between_hosts = sum(c.num_bytes for c in sent if c.conditional) / PERIOD
  accuracy = digits.accuracy(ow.center_params(state), x_test, y_test)
  print(
    f"test accuracy {accuracy:.3f}; a step sends {between_devices:,} bytes between devices,",
    end=" ",
  )
  print(f"{between_hosts:,.0f} between hosts")
  assert accuracy > 0.95
  assert between_hosts * PERIOD == between_devices


if __name__ == "__main__":
  main()
