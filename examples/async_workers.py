"""Asynchronous workers on real threads, one of them slow; `drop_stale` decides which gradients are
still good.

Each thread reads the parameters, computes a gradient on them while the others apply theirs, and
applies its own.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import threading
import time

import digits
import jax
import optax

import optax_wrappers as ow

WORKERS, GRADIENTS, BATCH = 4, 480, 64
SLOW = 0.05  # seconds more that the last worker needs for a gradient

gradient = jax.jit(jax.value_and_grad(digits.cross_entropy))


class Server:
  """The parameters and the optimizer's state, of which one thread at a time may take or replace
  both."""

  def __init__(self, params, tx, num_gradients):
    self.lock, self.num_gradients = threading.Lock(), num_gradients
    self.params, self.state = params, tx.init(params)
    self.staleness, self.losses = [], []

    @jax.jit
    def apply(params, state, grads, computed_at):
      updates, state = tx.update(grads, state, params, computed_at=computed_at)
      return optax.apply_updates(params, updates), state

    self.apply = apply

  def read(self):
    with self.lock:
      return self.params, self.state.step

  def push(self, loss, grads, computed_at):
    """Applies a gradient, unless enough were applied; says whether more are wanted."""
    with self.lock:
      if len(self.losses) >= self.num_gradients:
        return False
      self.staleness.append(int(self.state.step - computed_at))
      self.losses.append(float(loss))
      self.params, self.state = self.apply(self.params, self.state, grads, computed_at)
      return True


def work(server, batches, pause):
  for x, y in batches:
    params, computed_at = server.read()
    loss, grads = gradient(params, x, y)
    time.sleep(pause)
    if not server.push(loss, grads, computed_at):
      return


def train(max_staleness: int, num_gradients: int = GRADIENTS) -> Server:
  x_train, _, y_train, _ = digits.load()
  server = Server(digits.init(), ow.drop_stale(optax.sgd(0.2), max_staleness), num_gradients)
  # Compiles, before the race.
  server.push(*gradient(server.params, x_train[:BATCH], y_train[:BATCH]), server.state.step)
  threads = [
    threading.Thread(
      target=work,
      args=(
        server,
        digits.batches(x_train, y_train, BATCH, num_gradients, seed=i),
        SLOW if i == WORKERS - 1 else 0.002,
      ),
    )
    for i in range(WORKERS)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return server


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
  print(
    f"{accepted} gradients accepted, {dropped} dropped; the stalest was {max(server.staleness)}"
    " updates old"
  )
  print(f"test accuracy {accuracy:.3f}")
  assert accepted + dropped == GRADIENTS
  assert dropped == sum(age > args.max_staleness for age in server.staleness)
  assert accuracy > 0.9


if __name__ == "__main__":
  main()
