"""Two clusters with a slow link between them: FSDP inside a cluster, Streaming DiLoCo between.

One program from the mesh to the evaluation: fragments that are sent one after another in 4 bits and
arrive some steps later, checkpoints (also in the middle of a round), a cluster that is absent for a
while, and metrics. On real clusters, every process runs this file without the two lines with
`os.environ`, with `jax.distributed.initialize()` after `import jax`, and with `--checkpoint`.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
import pathlib
import tempfile

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

CLUSTERS, DEVICES, PERIOD, STEPS, LOG_EVERY, SAVE_EVERY = 2, 4, 20, 200, 50, 75
AWAY = range(80, 120)  # steps in which the second cluster does not participate

# Devices of one cluster are neighbors in the mesh, so that "cluster" is the slow axis.
mesh = jax.make_mesh(
  (CLUSTERS, DEVICES), ("cluster", "data"), axis_types=(AxisType.Auto, AxisType.Auto)
)
# FSDP of one worker's parameters: every matrix is sharded over the devices of its cluster.
layout = {
  "Dense_0": {"kernel": P("data"), "bias": P()},
  "Dense_1": {"kernel": P("data"), "bias": P()},
}
tx = ow.diloco(
  optax.adamw(5e-3),
  "cluster",
  communication_period=PERIOD,
  outer_learning_rate=0.4,
  fragments=2,  # the layers are sent one after another
  delay=5,  # and arrive five steps later
  pull=0.5,  # and are mixed with the cluster's own progress
  codec=ow.codecs.quantize(bits=4),
)


def start():
  params = digits.init()
  return ow.stack_workers((params, tx.init(params)), CLUSTERS)


specs = ow.specs(jax.eval_shape(start), workers="cluster", params=layout)
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
everywhere = NamedSharding(mesh, P())  # so that every process can print it


def step(params, state, x, y, participation):
  """The step of one cluster, on its part of the batch."""
  loss, grads = jax.value_and_grad(digits.cross_entropy)(params, x, y)
  updates, state = tx.update(grads, state, params, participation=participation)
  return optax.apply_updates(params, updates), state, loss


mapped = jax.jit(
  ow.map_workers(step, "cluster", mesh=mesh),
  out_shardings=(*shardings, NamedSharding(mesh, P("cluster"))),
  donate_argnums=(0, 1),
)


@functools.partial(jax.jit, out_shardings=everywhere)
@functools.partial(ow.map_workers, axis_name="cluster")
def metrics(state, params, loss):
  """The metrics of each cluster, sent to every process, and therefore not in every step."""
  return ow.metrics(state, params) | {"loss": loss}


@functools.partial(jax.jit, out_shardings=everywhere)
def center(params, state):
  """The parameters to evaluate, equal in both clusters."""
  return ow.center_params(state, jax.tree.map(lambda leaf: leaf[0], params))


def train(params, state, batches, first, manager=None):
  data = NamedSharding(mesh, P("cluster", "data"))
  for t, (x, y) in enumerate(batches[first:], first):
    x, y = x.reshape(CLUSTERS, -1, 64), y.reshape(CLUSTERS, -1)
    participation = np.array([1.0, 0.0 if t in AWAY else 1.0], np.float32)
    # Every process has all of the data here, and makes its own part of the array.
    x, y = (jax.make_array_from_callback(a.shape, data, lambda i, a=a: a[i]) for a in (x, y))
    params, state, loss = jax.block_until_ready(mapped(params, state, x, y, participation))
    if manager and ((t + 1) % SAVE_EVERY == 0 or t + 1 == STEPS):
      manager.save(t + 1, args=ocp.args.StandardSave((params, state)))
      manager.wait_until_finished()
    if (t + 1) % LOG_EVERY == 0:
      logged = jax.block_until_ready(metrics(state, params, loss))
      for name in ("loss", "center_distance"):
        print(f"step {t + 1}, {name} of each cluster: {np.asarray(logged[name]).round(2)}")
  return params, state


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument(
    "--checkpoint", help="directory to save to, and to continue from, which all processes see"
  )
  args = parser.parse_args()
  x_train, x_test, y_train, y_test = digits.load()
  batches = list(digits.batches(x_train, y_train, size=128, steps=STEPS))
  # No device holds everything.
  params, state = jax.block_until_ready(jax.jit(start, out_shardings=shardings)())
  like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))

  with tempfile.TemporaryDirectory() as temporary:
    directory = pathlib.Path(args.checkpoint or temporary).resolve()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(directory, options=options) as manager:
      first = manager.latest_step() or 0  # of an earlier run
      if first:
        params, state = manager.restore(first, args=ocp.args.StandardRestore(like))
      params, state = train(params, state, batches, first, manager)
      middle = min(manager.all_steps())
      restored = manager.restore(middle, args=ocp.args.StandardRestore(like))
  resumed = train(*restored, batches, middle)

  same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), (params, state), resumed)
  accuracy = digits.accuracy(center(params, state), x_test, y_test)
  print(f"test accuracy {accuracy:.3f}; resumed bit for bit: {all(jax.tree.leaves(same))}")
  assert all(jax.tree.leaves(same))
  assert accuracy > 0.93


if __name__ == "__main__":
  main()
