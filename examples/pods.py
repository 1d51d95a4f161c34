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
import signal
import subprocess
import sys
import tempfile
import time

import digits
import jax
import optax

import optax_wrappers as ow

BATCH, PERIOD, ROUNDS, LAST, PODS = 16, 10, 20, 10, "abc"

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--path", help="directory that all pods see (default: a temporary one)")
parser.add_argument("--pod", choices=PODS, help="be this pod (default: start all)")
parser.add_argument("--killed-after", type=int, help="this many rounds (default: never)")


def pod(path, name, killed_after):
  """One pod: local steps, and a synchronization after each round."""
  tx = ow.diloco(optax.adamw(1e-2), None, communication_period=None, codec=ow.codecs.quantize(8))
  directory = ow.pods.Directory(path, run="digits", sender=name, quorum=2, grace=1.0, timeout=120.0)

  @jax.jit
  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  x_train, x_test, y_train, y_test = digits.load()
  batches = digits.batches(x_train, y_train, BATCH, 10**6, seed=time.time_ns())
  params, state = directory.join(tx, digits.init())
  exchanges = 0
  # A fixed number of rounds: a pod that comes after the last one reads the same center.
  while directory.round[0] < ROUNDS:
    if directory.round[0] >= ROUNDS - LAST:
      directory.quorum = len(PODS)  # the last rounds wait for all
    for _ in range(PERIOD):
      params, state = step(params, state, *next(batches))
    time.sleep(0.2)  # the time of a larger model
    try:
      params, state = directory.exchange(tx, params, state)
      print(directory.report, flush=True)
      exchanges += 1
      if exchanges == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)
    except ow.pods.OutOfStepError:  # the others are rounds ahead
      params, state = directory.join(tx, params)

  center = ow.center_params(state)
  bits = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(jax.device_get(center))))
  accuracy = digits.accuracy(center, x_test, y_test)
  print(f"center {bits.hexdigest()[:16]}, test accuracy {accuracy:.3f}")


def main():
  args = parser.parse_args()
  if args.pod:
    return pod(args.path, args.pod, args.killed_after)
  with tempfile.TemporaryDirectory() as temporary:
    command = [sys.executable, __file__, "--path", args.path or temporary, "--pod"]
    pods = {}

    def start(name, *options):
      pods[name] = subprocess.Popen([*command, name, *options], stdout=subprocess.PIPE, text=True)

    try:
      start("a")
      start("b")
      start("c", "--killed-after", "3")
      pods["c"].communicate()
      start("c")
      printed = {name: one.communicate()[0].splitlines() for name, one in pods.items()}
    finally:
      for one in pods.values():
        one.kill()

  *rounds, end = printed["a"]
  for line in rounds:
    print(line)
  without, after = (sum(who in line for line in rounds) for who in (": a, b;", ": a, b, c;"))
  print(f"{without} rounds without c, {after} with it; {end}")
  assert without > 0 and ": a, b, c;" in rounds[-1]
  assert {lines[-1] for lines in printed.values()} == {end}
  assert float(end.rsplit(" ", 1)[1]) > 0.9


if __name__ == "__main__":
  main()
