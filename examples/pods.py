"""Pods that share no program: DiLoCo through a directory; one pod is killed and comes back.

Each pod is a separate process, which reads and writes files that all can see: no `jax.distributed`,
no server, no address. Here one process starts three pods on this machine and kills one of them. On
other machines, start each by hand:

    python pods.py --path /a/shared/directory --pod a
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time

import digits
import jax
import optax

import optax_wrappers as ow

BATCH, PERIOD, ROUNDS, PODS = 16, 10, 40, "abc"

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--path", help="directory that all pods see (default: a temporary one)")
parser.add_argument("--pod", choices=PODS, help="be this pod (default: start all)")


def pod(path, name):
  """One pod: local steps, and a synchronization after each round."""
  tx = ow.diloco(optax.adamw(1e-2), None, communication_period=None, codec=ow.codecs.quantize(8))
  directory = ow.transports.Directory(
    path, run="digits", sender=name, quorum=2, grace=1.0, timeout=120.0
  )

  @jax.jit
  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  x_train, x_test, y_train, y_test = digits.load()
  batches = digits.batches(x_train, y_train, BATCH, 10**6, seed=time.time_ns())
  params, state = directory.join(tx, digits.init())
  # A fixed number of rounds: a pod that comes after the last one reads the same center.
  while directory.round[0] < ROUNDS:
    for _ in range(PERIOD):
      params, state = step(params, state, *next(batches))
    time.sleep(0.2)  # the time of a larger model
    try:
      params, state = directory.exchange(tx, params, state)
      print(directory.report, flush=True)
    except ow.transports.OutOfStepError:  # the others are rounds ahead
      params, state = directory.join(tx, params)

  center = ow.center_params(state)
  bits = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(jax.device_get(center))))
  accuracy = digits.accuracy(center, x_test, y_test)
  print(f"center {bits.hexdigest()[:16]}, test accuracy {accuracy:.3f}")


def main():
  args = parser.parse_args()
  if args.pod:
    return pod(args.path, args.pod)
  with tempfile.TemporaryDirectory() as temporary:
    command = [sys.executable, __file__, "--path", args.path or temporary, "--pod"]
    pods = {}

    def start(name):
      pods[name] = subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True)

    try:
      for name in PODS:
        start(name)
      for _ in range(3):
        pods["c"].stdout.readline()
      pods["c"].kill()
      pods["c"].communicate()
      start("c")
      printed = {name: one.communicate()[0].splitlines() for name, one in pods.items()}
    finally:
      for one in pods.values():
        one.kill()

  *rounds, end = printed["a"]
  for line in rounds:
    print(line)
  without = sum(": a, b;" in line for line in rounds)
  print(f"{without} of {ROUNDS} rounds without c; all end with {end}")
  assert {lines[-1] for lines in printed.values()} == {end}
  assert float(end.rsplit(" ", 1)[1]) > 0.9


if __name__ == "__main__":
  main()
