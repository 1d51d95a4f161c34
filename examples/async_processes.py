"""Asynchronous workers in separate processes, which come and go; one of them is killed.

The server is an object of `multiprocessing.managers`: workers on this machine, or on others in a
trusted network, call its methods. Each process is a separate JAX program, so none waits for
another, and `jax.distributed` is not used. NumPy arrays are sent: parameters with their version one
way, a gradient with its version the other.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
import multiprocessing
import multiprocessing.managers
import threading
import time

import digits
import jax
import optax

import optax_wrappers as ow

BATCH, STEPS = 64, 120


class Server:
  """The parameters and the optimizer state. The manager runs each call in its own thread."""

  def __init__(self):
    tx = ow.staleness_aware(optax.sgd(0.2), ow.staleness.polynomial(0.5), max_staleness=8)
    self.lock, self.pushes = threading.Lock(), {}
    self.params = digits.init()
    self.state = tx.init(self.params)

    @jax.jit
    def apply(params, state, grads, computed_at):
      updates, state = tx.update(grads, state, params, computed_at=computed_at)
      return optax.apply_updates(params, updates), state

    self.apply = apply

  def _held(self):
    return jax.device_get((self.params, self.state.step))

  def read(self):
    """Returns the parameters and their version, read under one lock."""
    with self.lock:
      return self._held()

  def push(self, worker, grads, computed_at):
    """Applies a gradient and returns the new parameters with their version."""
    with self.lock:
      self.params, self.state = self.apply(self.params, self.state, grads, computed_at)
      self.pushes[worker] = self.pushes.get(worker, 0) + 1
      return self._held()

  def num_pushes(self):
    """The number of gradients that each worker has pushed."""
    with self.lock:
      return dict(self.pushes)

  def result(self):
    """Returns parameters and state."""
    with self.lock:
      return jax.device_get((self.params, self.state))


@functools.cache
def the_server() -> Server:
  """The only server, created in the manager's process on first use."""
  return Server()


class Manager(multiprocessing.managers.BaseManager):
  """Gives access to the server to clients that know the address and the key."""


Manager.register("server", the_server)


def work(address, authkey, worker):
  """One worker's process: connects, and pushes a gradient in each step."""
  manager = Manager(address, authkey)
  manager.connect()
  server = manager.server()
  x_train, _, y_train, _ = digits.load()
  gradient = jax.jit(jax.grad(digits.cross_entropy))
  held = server.read()
  for x, y in digits.batches(x_train, y_train, BATCH, STEPS, seed=worker):
    params, computed_at = held
    held = server.push(worker, jax.device_get(gradient(params, x, y)), computed_at)


def main():
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  # JAX has threads, which a forked process would not have, so processes are spawned.
  spawn = multiprocessing.get_context("spawn")
  authkey = os.urandom(32)
  manager = Manager(("127.0.0.1", 0), authkey, ctx=spawn)
  manager.start()
  server = manager.server()

  def start(worker):
    process = spawn.Process(target=work, args=(manager.address, authkey, worker), daemon=True)
    process.start()
    return process

  workers = [start(0), start(1)]
  while workers[1].is_alive() and server.num_pushes().get(1, 0) < 20:
    time.sleep(0.05)
  workers[1].kill()
  workers.append(start(2))
  for worker in workers:
    worker.join()

  pushes, (params, state) = server.num_pushes(), server.result()
  manager.shutdown()
  accepted, dropped = int(state.step), int(state.dropped)
  _, x_test, _, y_test = digits.load()
  accuracy = digits.accuracy(params, x_test, y_test)
  for worker, number in sorted(pushes.items()):
    killed = ", then killed" if workers[worker].exitcode else ""
    print(f"worker {worker}: {number} gradients{killed}")
  print(f"{accepted} accepted, {dropped} dropped; test accuracy {accuracy:.3f}")
  assert accepted + dropped == sum(pushes.values())
  assert pushes[0] == pushes[2] == STEPS and pushes[1] >= 20
  assert accuracy > 0.85


if __name__ == "__main__":
  main()
