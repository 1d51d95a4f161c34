"""Pods as Ray actors: DiLoCo without a collective; one pod is killed, and Ray restarts it.

    python -m pip install ".[ray]"  # in a clone

Ray finds the machines, moves the messages, and restarts a lost pod. The driver waits for a quorum,
and a little longer for the others; then all absorb the messages that have arrived. A restarted pod
takes the center of another.
"""

import argparse
import time

import digits
import jax
import numpy as np
import optax
import ray

import optax_wrappers as ow

BATCH, PERIOD, ROUNDS, PODS, QUORUM, GRACE = 16, 10, 20, "abc", 2, 2.0


@ray.remote(num_cpus=0.5, max_restarts=-1)
class Pod:
  """A separate JAX program. An actor runs one call at a time, in order."""

  def __init__(self, name):
    self.name = name
    self.tx = ow.diloco(
      optax.adamw(1e-2), None, communication_period=None, codec=ow.codecs.quantize(8)
    )
    x, _, y, _ = digits.load()
    self.batches = digits.batches(x, y, BATCH, 10**6, seed=time.time_ns())
    self.params = digits.init()
    self.state = self.tx.init(self.params)

    @jax.jit
    def step(params, state, x, y):
      grads = jax.grad(digits.cross_entropy)(params, x, y)
      updates, state = self.tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    self.step = step

  def round(self):
    """Takes a round of steps, and returns its message."""
    for _ in range(PERIOD):
      self.params, self.state = self.step(self.params, self.state, *next(self.batches))
    time.sleep(0.2)  # the time of a larger model
    message, self.state = ow.exchange.message(self.tx, self.state, self.params, sender=self.name)
    return jax.device_get(message)

  def absorb(self, messages):
    """Goes to the center that these make."""
    self.params, self.state = ow.exchange.absorb(self.tx, self.state, self.params, messages)

  def snapshot(self):
    """The center and the outer state."""
    return jax.device_get(ow.exchange.snapshot(self.state))

  def adopt(self, snapshot):
    """Begins at the center of another pod."""
    self.params, self.state = ow.exchange.adopt(self.tx, self.state, self.params, snapshot)


def gather(calls, quorum):
  """Returns results by pod, of a quorum and of pods within the grace period; and the lost pods."""
  found, lost, pending = {}, set(), {call: name for name, call in calls.items()}
  while pending:
    done, _ = ray.wait([*pending], timeout=GRACE if len(found) >= quorum else None)
    if not done:
      break
    name = pending.pop(done[0])
    try:
      found[name] = ray.get(done[0])
    except ray.exceptions.RayActorError:  # the call of a lost actor has finished, but has no result
      lost.add(name)
  return found, lost


def main():
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  ray.init(
    num_cpus=len(PODS),
    include_dashboard=False,
    runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
  )
  pods = {name: Pod.remote(name) for name in PODS}
  absent, heard = set(), []
  while len(heard) < ROUNDS or len(heard[-1]) < len(PODS):
    r = len(heard)
    present = [name for name in PODS if name not in absent]
    calls = {name: pods[name].round.remote() for name in present}
    if r == 3:
      ray.kill(pods["c"], no_restart=False)
    received, lost = gather(calls, QUORUM)
    heard.append("".join(sorted(received)))
    print(f"round {r}: heard {heard[-1]}, lost {sorted(lost)}")
    messages = ray.put([*received.values()])
    calls = {name: pods[name].absorb.remote(messages) for name in present if name not in lost}
    done, others = gather(calls, QUORUM)
    absent |= lost | others
    center = pods[min(done)].snapshot.remote()
    # While an actor is not running again, calls to it fail at once.
    back, _ = gather({name: pods[name].adopt.remote(center) for name in absent}, 0)
    absent -= back.keys()

  centers = [ray.get(pods[name].snapshot.remote())[0] for name in PODS]
  ray.shutdown()
  same = all(
    np.array_equal(x, y)
    for one in centers
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(centers[0]))
  )
  _, x_test, _, y_test = digits.load()
  accuracy = digits.accuracy(centers[0], x_test, y_test)
  without, after = heard.count("ab"), heard[4:].count("abc")
  print(f"{without} rounds without c, {after} with it again; centers are equal: {same}; ", end="")
  print(f"test accuracy {accuracy:.3f}")
  assert same and without > 0 and after > 0
  assert accuracy > 0.9


if __name__ == "__main__":
  main()
