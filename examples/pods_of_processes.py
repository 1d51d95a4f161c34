"""Pods of several processes: one is killed whole, one by half, and both come back.

Each pod is a JAX program of two processes, over which its parameters are sharded; between the pods
there are only files. Here one process starts two pods on this machine, kills what it says, and
starts a pod again when it has ended, as a scheduler would. On other machines, start each process by
hand:

    python pods_of_processes.py --path /a/shared/directory --pod a --rank 0 --coordinator host:1234
"""

import argparse
import hashlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

PODS, PROCESSES, DEVICES = "ab", 2, 2
BATCH, PERIOD, ROUNDS, LAST = 16, 10, 12, 4
HEARTBEAT = 10  # seconds after which the processes of a pod end if one of them is gone

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--path", help="directory that all pods see (default: a temporary one)")
parser.add_argument("--pod", choices=PODS, help="be a process of this pod (default: start all)")
parser.add_argument("--rank", type=int, help="the number of this process in its pod")
parser.add_argument("--coordinator", help="address of the pod's process 0")


def process(args):
  """One process of a pod."""
  import digits
  import jax
  import numpy as np
  import optax
  from jax.experimental import multihost_utils
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import optax_wrappers as ow

  jax.distributed.initialize(
    args.coordinator,
    PROCESSES,
    args.rank,
    coordinator_bind_address=args.coordinator if args.coordinator.startswith("127.") else None,
    heartbeat_timeout_seconds=HEARTBEAT,
  )
  mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
  tx = ow.diloco(optax.adamw(1e-2), None, communication_period=None, codec=ow.codecs.quantize(8))
  directory = ow.pods.Directory(
    args.path, run="digits", sender=args.pod, quorum=1, grace=2.0, timeout=120.0
  )

  def place(x):
    """Divided over all devices, if its first dimension can be."""
    spec = P("fsdp") if x.ndim and x.shape[0] % mesh.size == 0 else P()
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)

  @jax.jit
  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  x_train, x_test, y_train, y_test = digits.load()
  by_row = NamedSharding(mesh, P("fsdp"))
  batches = digits.batches(x_train, y_train, BATCH // PROCESSES, 10**6, seed=time.time_ns())
  init = jax.tree.map(lambda x: place(np.asarray(x)), digits.init())
  params, state = directory.join(tx, init)
  # A fixed number of rounds: a pod that comes after the last one reads the same center.
  while directory.round[0] < ROUNDS:
    if directory.round[0] >= ROUNDS - LAST:
      directory.quorum = len(PODS)  # the last rounds wait for all
    for _ in range(PERIOD):
      mine = next(batches)
      batch = (jax.make_array_from_process_local_data(by_row, part) for part in mine)
      params, state = step(params, state, *batch)
    try:
      params, state = directory.exchange(tx, params, state)
      if args.rank == 0:
        print(directory.report, flush=True)
    except ow.pods.OutOfStepError:  # the others are rounds ahead
      params, state = directory.join(tx, init)

  center = multihost_utils.process_allgather(ow.center_params(state), tiled=True)
  bits = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(center)))
  accuracy = digits.accuracy(center, x_test, y_test)
  print(f"center {bits.hexdigest()[:16]}, test accuracy {accuracy:.3f}")


class Pod(threading.Thread):
  """The processes of a pod, started again when they have ended before the last round."""

  def __init__(self, name, path):
    super().__init__()
    self.name, self.path, self.lives, self.printed = name, path, 0, []
    self.processes = []

  def run(self):
    while True:
      self.lives += 1
      with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
      self.processes = [self.started(rank, address) for rank in range(PROCESSES)]
      for line in self.processes[0].stdout:
        self.printed.append(line.strip())
      codes = [one.wait() for one in self.processes]
      if not any(codes):
        return

  def started(self, rank, address):
    command = [sys.executable, __file__, "--path", self.path, "--pod", self.name]
    command += ["--rank", str(rank), "--coordinator", address]
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    quiet = subprocess.DEVNULL  # Gloo and the coordinator
    out = subprocess.PIPE if rank == 0 else quiet
    return subprocess.Popen(command, stdout=out, stderr=quiet, text=True, env=environment)

  def kill(self, ranks):
    for rank in ranks:
      self.processes[rank].kill()

  def rounds(self):
    return [line for line in self.printed if line.startswith("round")]


def wait_for(holds, *pods):
  while not holds():
    assert all(pod.is_alive() for pod in pods), [pod.printed for pod in pods]
    time.sleep(0.05)


def main():
  args = parser.parse_args()
  if args.pod:
    return process(args)
  with tempfile.TemporaryDirectory() as temporary:
    pods = a, b = [Pod(name, args.path or temporary) for name in PODS]
    try:
      for pod in pods:
        pod.start()
      wait_for(lambda: len(b.rounds()) >= 1, *pods)
      time.sleep(random.random())
      b.kill([0, 1])
      wait_for(lambda: b.lives == 2 and len(b.rounds()) >= 2, *pods)
      time.sleep(random.random())
      a.kill([random.randrange(PROCESSES)])
      for pod in pods:
        pod.join()
    finally:
      for pod in pods:
        pod.kill(range(len(pod.processes)))

  for line in b.rounds():
    print(line)
  print(f"pod b was killed, pod a by half; lives: {a.lives} and {b.lives}; {b.printed[-1]}")
  assert a.lives == b.lives == 2
  assert a.printed[-1] == b.printed[-1]
  assert float(b.printed[-1].rsplit(" ", 1)[1]) > 0.9


if __name__ == "__main__":
  main()
