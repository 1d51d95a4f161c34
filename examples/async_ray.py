"""Asynchronous workers on a Ray cluster: the server is an actor, the workers are tasks.

    python -m pip install ".[ray]"  # in a clone

Ray finds the machines, moves the arrays and notices lost workers. JAX does what it does in the
other examples: the server weights gradients by their age, and the workers do not know of each
other. Each process is a separate JAX program.
"""

import argparse

import digits
import jax
import optax
import ray

import optax_wrappers as ow

BATCH, GRADIENTS, WORKERS = 64, 300, 3


@ray.remote
class Server:
  """The parameters and the optimizer state. An actor runs one call at a time, so it needs no
  lock."""

  def __init__(self):
    tx = ow.staleness_aware(optax.sgd(0.2), ow.staleness.polynomial(0.5), max_staleness=8)
    self.params = digits.init()
    self.state = tx.init(self.params)

    @jax.jit
    def apply(params, state, grads, computed_at):
      updates, state = tx.update(grads, state, params, computed_at=computed_at)
      return optax.apply_updates(params, updates), state

    self.apply = apply

  def read(self):
    """Returns the parameters and their version, as NumPy arrays."""
    return jax.device_get((self.params, self.state.step))

  def push(self, grads, computed_at):
    """Applies a gradient and returns the new parameters. If enough are applied, returns None."""
    if self.state.histogram.sum() >= GRADIENTS:
      return None
    self.params, self.state = self.apply(self.params, self.state, grads, computed_at)
    return self.read()

  def result(self):
    return jax.device_get((self.params, self.state))


@ray.remote(num_cpus=0.5, max_retries=2)
def work(server, worker):
  """One worker: pushes gradients until the server is done. Restarted if it is lost."""
  x_train, _, y_train, _ = digits.load()
  gradient = jax.jit(jax.grad(digits.cross_entropy))
  held = ray.get(server.read.remote())
  for x, y in digits.batches(x_train, y_train, BATCH, 10**6, seed=worker):
    params, computed_at = held
    grads = jax.device_get(gradient(params, x, y))
    held = ray.get(server.push.remote(grads, computed_at))
    if held is None:
      return


def main():
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  ray.init(
    num_cpus=WORKERS + 1,
    include_dashboard=False,
    runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
  )
  server = Server.remote()
  ray.get([work.remote(server, worker) for worker in range(WORKERS)])
  params, state = ray.get(server.result.remote())
  ray.shutdown()
  _, x_test, _, y_test = digits.load()
  accuracy = digits.accuracy(params, x_test, y_test)
  print(f"ages 0, 1, 2, ...: {ow.get_state(state, ow.states.StalenessState).histogram}")
  print(f"{int(state.step)} accepted, {int(state.dropped)} dropped; test accuracy {accuracy:.3f}")
  assert int(state.step) + int(state.dropped) == GRADIENTS
  assert accuracy > 0.85


if __name__ == "__main__":
  main()
