"""Asynchronous workers on threads, one of them slow; `staleness_aware` weights their gradients.

Each thread computes a gradient at the parameters that it has read, while others apply theirs. The
order of arrivals is logged, and the run is replayed from that log, one gradient after another, as
often as needed and also in a debugger.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import threading
import time

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow

WORKERS, GRADIENTS, BATCH = 4, 480, 64
SLOW = 0.05  # additional seconds that the last worker needs for a gradient


def optimizer(max_staleness):
  return ow.staleness_aware(
    optax.sgd(0.2), ow.staleness.polynomial(0.5), max_staleness=max_staleness
  )


def batch(worker, number):
  """Returns the data of a worker's n-th gradient."""
  x_train, _, y_train, _ = digits.load()
  rows = np.random.default_rng([worker, number]).integers(0, len(x_train), BATCH)
  return x_train[rows], y_train[rows]


gradient = jax.jit(jax.value_and_grad(digits.cross_entropy))


class Server:
  """The parameters and the optimizer state, which one thread at a time may read or replace
  together.

  Parameters are not donated, because a worker may still read the old ones.
  """

  def __init__(self, params, tx, num_gradients):
    self.lock, self.num_gradients = threading.Lock(), num_gradients
    self.params, self.state = params, tx.init(params)
    self.arrivals, self.losses = [], []

    @jax.jit
    def apply(params, state, grads, computed_at):
      updates, state = tx.update(grads, state, params, computed_at=computed_at)
      return optax.apply_updates(params, updates), state

    self.apply = apply
    apply(params, self.state, params, 0)  # compiles before the race

  def read(self):
    """Returns the parameters and their version, read under one lock."""
    with self.lock:
      return self.params, self.state.step

  def push(self, worker, loss, grads, computed_at):
    """Applies a gradient and returns the new parameters. If enough are applied, returns None."""
    with self.lock:
      if len(self.arrivals) >= self.num_gradients:
        return None
      self.arrivals.append(worker)
      self.losses.append(float(loss))
      self.params, self.state = self.apply(self.params, self.state, grads, computed_at)
      return self.params, self.state.step


def work(server, worker, pause, start):
  """Computes gradients and pushes them until the server is done."""
  held, number = server.read(), 0
  start.wait()  # until all have read
  while held is not None:
    params, computed_at = held
    loss, grads = gradient(params, *batch(worker, number))
    time.sleep(pause)
    held, number = server.push(worker, loss, grads, computed_at), number + 1


def train(max_staleness: int | None, num_gradients: int = GRADIENTS) -> Server:
  """Trains with threads."""
  server = Server(digits.init(), optimizer(max_staleness), num_gradients)
  gradient(server.params, *batch(0, 0))  # compiles
  start = threading.Barrier(WORKERS)
  threads = [
    threading.Thread(
      target=work, args=(server, worker, SLOW if worker == WORKERS - 1 else 0.002, start)
    )
    for worker in range(WORKERS)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return server


def replay(arrivals: list[int], max_staleness: int | None):
  """Repeats the run from the order of arrivals; returns parameters and state."""
  tx = ow.contrib.simulate_workers(optimizer(max_staleness), WORKERS, arrivals)
  # A worker reads when its gradient has arrived, and all read at first. Each has its own batches.
  readers = [*range(WORKERS), *arrivals[:-1]]
  numbers = [readers[:i].count(reader) for i, reader in enumerate(readers)]
  batches = [batch(reader, number) for reader, number in zip(readers, numbers)]

  def call(held, data):
    params, state = held
    updates, state = tx.update(jax.grad(digits.cross_entropy)(params, *data), state, params)
    return (optax.apply_updates(params, updates), state), None

  params = digits.init()
  stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
  return jax.jit(lambda held: jax.lax.scan(call, held, stacked)[0])((params, tx.init(params)))


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--max-staleness", type=int, default=6, help="(default: %(default)s)")
  args = parser.parse_args()
  server = train(args.max_staleness)
  _, x_test, _, y_test = digits.load()
  accuracy = digits.accuracy(server.params, x_test, y_test)
  accepted, dropped = int(server.state.step), int(server.state.dropped)
  ages = ow.get_state(server.state, ow.states.StalenessState).histogram
  print(f"{accepted} gradients accepted, {dropped} dropped; of ages 0, 1, 2, ...: {ages}")
  print(f"test accuracy {accuracy:.3f}")
  assert accepted + dropped == GRADIENTS == int(ages.sum())
  assert dropped == int(ages[args.max_staleness + 1 :].sum())
  assert accuracy > 0.9

  params, state = replay(server.arrivals, args.max_staleness)
  off = max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max(), params, server.params)))
  print(f"replayed from the log of arrivals: parameters at most {off:.0e} apart")
  assert (ow.get_state(state, ow.states.StalenessState).histogram == ages).all()
  assert off < 1e-3


if __name__ == "__main__":
  main()
