"""Trains on several processes with cross_shard, elastic_average or diloco; each reads its part of
the data.

    python examples/multi_process.py --processes 2

starts the processes on this machine's CPU, over loopback. Under a launcher that starts them, give
each its rank:

    python examples/multi_process.py --processes 4 --coordinator HOST:PORT --rank 0

and `--rank` 1, 2 and 3 on the others. Under SLURM, JAX finds these itself:

    srun --ntasks 4 python examples/multi_process.py --processes 4 --launcher

There every device that JAX finds is a worker, on any platform; `--platform cpu` tries the same
without accelerators. With `--pod 4` a worker is four devices, over which its parameters are
sharded:

    python examples/multi_process.py --processes 2 --local-devices 4 --pod 4 --wrapper diloco

`--simulate` runs the same training in one process with that many simulated devices. With
`--checkpoint DIR`, a restarted run continues from the last checkpoint. Exits with an error if two
processes end with different shared values.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--processes", type=int, default=2, help="how many (default: %(default)s)")
parser.add_argument(
  "--wrapper",
  choices=("cross_shard", "elastic_average", "diloco", "both"),
  default="both",
  help="both: the first two (default)",
)
parser.add_argument("--steps", type=int, default=200, help="steps a wrapper (default: %(default)s)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument(
  "--coordinator", help="HOST:PORT of process 0; it trusts all that reach it (default: loopback)"
)
parser.add_argument("--rank", type=int, help="which of the processes this one is")
parser.add_argument(
  "--launcher", action="store_true", help="a launcher that JAX knows, such as SLURM, says all that"
)
parser.add_argument(
  "--platform",
  choices=("cpu", "gpu", "tpu"),
  help="of the devices (default: what each machine has)",
)
parser.add_argument(
  "--local-devices",
  type=int,
  default=1,
  help="of each process on --platform cpu (default: %(default)s)",
)
parser.add_argument(
  "--pod", type=int, default=1, help="devices of each worker or shard (default: %(default)s)"
)
parser.add_argument(
  "--simulate", action="store_true", help="one process that simulates the devices of all"
)
parser.add_argument("--checkpoint", help="directory to save to, and to continue from")
parser.add_argument("--checkpoint-every", type=int, default=25, help="steps (default: %(default)s)")
parser.add_argument("--json", help="where process 0 writes the final values")
parser.add_argument(
  "--diverge", type=int, metavar="RANK", help="this process falsifies its values, to see it caught"
)

HEARTBEAT_SECONDS = 10  # a process that is gone this long ends the others
PERIOD = 10
BATCH = 16


def start_processes(args):
  """Starts the processes over loopback and waits; returns the exit status for all."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    coordinator = f"127.0.0.1:{free.getsockname()[1]}"
  # Processes on one machine would compete for its accelerators.
  command = [
    sys.executable,
    __file__,
    *sys.argv[1:],
    "--platform",
    "cpu",
    "--coordinator",
    coordinator,
    "--rank",
  ]
  processes = [subprocess.Popen([*command, str(rank)]) for rank in range(args.processes)]
  try:
    while any(process.poll() is None for process in processes):
      if any(process.poll() for process in processes):  # one failed: give the others time to notice
        time.sleep(3 * HEARTBEAT_SECONDS)
        break
      time.sleep(0.1)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return max(abs(process.returncode) for process in processes)


def train(args, wrapper):
  """Trains; returns the values that all processes share, their test accuracy, and the loss."""
  axis = "workers"
  num_workers = jax.device_count() // args.pod
  mesh = jax.make_mesh((num_workers, args.pod), (axis, "data"), axis_types=(AxisType.Auto,) * 2)
  adam = optax.adam(2e-3)
  owned = wrapper != "cross_shard"
  tx = {
    "cross_shard": lambda: ow.cross_shard(adam, axis),
    "elastic_average": lambda: ow.elastic_average(
      adam, axis, communication_period=PERIOD, moving_rate=0.2
    ),
    "diloco": lambda: ow.diloco(adam, axis, communication_period=PERIOD, shard_center=args.pod > 1),
  }[wrapper]()

  digits = load_digits()
  x_train, x_test, y_train, y_test = train_test_split(
    (digits.data / 16).astype(np.float32),
    digits.target,
    test_size=0.25,
    random_state=0,
    stratify=digits.target,
  )
  # The workers whose devices this process holds, with their parts of the data only.
  mine = [i for i, pod in enumerate(mesh.devices) if pod[0].process_index == jax.process_index()]
  parts = {worker: (x_train[worker::num_workers], y_train[worker::num_workers]) for worker in mine}
  del x_train, y_train

  def batch(step):
    """Returns the global batch [worker, example, ...], made from this process's part."""

    def draw(worker):
      x, y = parts[worker]
      rows = np.random.default_rng([args.seed, worker, step]).integers(0, len(x), BATCH)
      return x[rows], y[rows]

    local = [np.stack(leaves) for leaves in zip(*map(draw, mine))]
    return tuple(jax.make_array_from_process_local_data(by_worker, leaf) for leaf in local)

  model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(10)])

  def init():
    params = model.init(jax.random.key(args.seed), jnp.zeros((1, 64)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return ow.stack_workers(
      state.replace(step=jnp.zeros((), jnp.int32)), num_workers, replicated=not owned
    )

  def step(state, x, y):
    def loss(params):
      logits = state.apply_fn({"params": params}, x)
      return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value

  # Rows of every kernel are sharded over the devices of a pod, and so is the state for them.
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64)))["params"]
  inside = jax.tree.map(lambda x: P("data") if len(x.shape) == 2 else P(), shapes)
  abstract = jax.eval_shape(init)
  axes = ow.worker_axes(abstract, replicated=not owned)
  specs = ow.specs(abstract, workers=axis, replicated=not owned, params=inside)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  by_worker = NamedSharding(mesh, P(axis, "data"))
  everywhere = NamedSharding(mesh, P())
  state = jax.jit(init, out_shardings=shardings)()
  mapped = jax.vmap(step, (axes, 0, 0), (axes, 0), axis_name=axis, spmd_axis_name=axis)
  compiled = jax.jit(
    lambda state, x, y: (lambda out: (out[0], out[1].mean()))(mapped(state, x, y)),
    out_shardings=(shardings, everywhere),
    donate_argnums=0,
  )

  manager, start = None, 0
  if args.checkpoint:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=args.checkpoint_every, max_to_keep=2)
    manager = ocp.CheckpointManager(
      os.path.join(os.path.abspath(args.checkpoint), wrapper), options=options
    )
    if manager.latest_step() is not None:
      start = manager.latest_step()
      target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
      )
      state = manager.restore(start, args=ocp.args.StandardRestore(target))
  loss = jnp.nan
  for i in range(start, args.steps):
    state, loss = compiled(state, *batch(i))
    if manager:
      manager.save(i + 1, args=ocp.args.StandardSave(state))
  if manager:
    manager.wait_until_finished()
    manager.close()

  def shared_by_all(state):
    return ow.center_params(state, shapes) if owned else state.params

  shared = jax.jit(shared_by_all, out_shardings=everywhere)(state)
  accuracy = (
    model.apply({"params": jax.tree.map(local_value, shared)}, x_test).argmax(-1) == y_test
  ).mean()
  return shared, float(accuracy), float(loss)


def local_value(leaf):
  """Returns this process's copy of a value that is the same everywhere."""
  return np.asarray(leaf.addressable_data(0))


def checksums_agree(shared, falsify):
  """Returns whether every process holds the same bits, and this process's checksum."""
  digest = (
    zlib.crc32(b"".join(local_value(leaf).tobytes() for leaf in jax.tree.leaves(shared))) + falsify
  )
  everyones = multihost_utils.process_allgather(np.uint32(digest & 0xFFFFFFFF))
  return bool((everyones == everyones.flat[0]).all()), digest


def main(args):
  if jax.process_index() == 0:
    platforms = sorted({device.platform for device in jax.devices()})
    print(
      f"{jax.device_count()} {'/'.join(platforms)} devices in {jax.process_count()} processes",
      flush=True,
    )
  agree = True
  result = {}
  for wrapper in ("cross_shard", "elastic_average") if args.wrapper == "both" else (args.wrapper,):
    shared, accuracy, loss = train(args, wrapper)
    same, digest = checksums_agree(shared, falsify=args.diverge == jax.process_index())
    agree &= same
    print(
      f"process {jax.process_index()} of {jax.process_count()}, {wrapper}: test accuracy"
      f" {accuracy:.3f}, loss {loss:.4f}, shared values"
      f" {digest:08x}{'' if same else ' DIFFER between processes'}",
      flush=True,
    )
    result[wrapper] = {
      "accuracy": accuracy,
      "shared": [local_value(leaf).tolist() for leaf in jax.tree.leaves(shared)],
      "digest": digest,
    }
  if args.json and jax.process_index() == 0:
    with open(args.json, "w") as file:
      json.dump(result, file)
  if not agree:
    sys.exit(3)


if __name__ == "__main__":
  args = parser.parse_args()
  for option in ("processes", "steps", "checkpoint_every", "local_devices", "pod"):
    if getattr(args, option) < 1:
      parser.error(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}")
  is_cpu = args.platform == "cpu" or args.simulate or not (args.launcher or args.coordinator)
  if is_cpu and args.local_devices % args.pod:
    parser.error(f"--pod must divide --local-devices, {args.local_devices}, got {args.pod}")
  if (args.rank is None) != (args.coordinator is None):
    parser.error("--rank and --coordinator go together")
  if not (args.simulate or args.launcher or args.coordinator):
    sys.exit(start_processes(args))

  if args.simulate:
    args.platform = "cpu"
  if args.platform:
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda,rocm"}.get(args.platform, args.platform)
  if args.platform == "cpu":
    num_devices = args.local_devices * (args.processes if args.simulate else 1)
    flags = [
      flag
      for flag in os.environ.get("XLA_FLAGS", "").split()
      if "host_platform_device_count" not in flag
    ]
    os.environ["XLA_FLAGS"] = " ".join(
      [*flags, f"--xla_force_host_platform_device_count={num_devices}"]
    )

  import zlib

  import flax.linen as nn
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  from jax.experimental import multihost_utils
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P
  from sklearn.datasets import load_digits
  from sklearn.model_selection import train_test_split

  import optax_wrappers as ow
  from optax_wrappers.train_state import TrainState

  if args.launcher:
    jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
  elif args.coordinator:
    # By default the coordinator listens on every interface, and it trusts everyone who can reach
    # it.
    is_local = args.coordinator.rpartition(":")[0] in ("127.0.0.1", "localhost")
    jax.distributed.initialize(
      args.coordinator,
      args.processes,
      args.rank,
      coordinator_bind_address=args.coordinator if is_local else None,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
  main(args)
