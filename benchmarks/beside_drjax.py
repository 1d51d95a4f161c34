"""The same rounds in DrJAX and here: prints the largest difference of each over all rounds.

python -m pip install -e . --group test
python benchmarks/beside_drjax.py
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow

CLIENTS, ROUNDS, STEPS, EXAMPLES, SIZE = 8, 6, 5, 16, 12
COUNTS = np.arange(1.0, 1 + CLIENTS, dtype=np.float32)  # of examples
DRAWN = np.random.default_rng(0)
X = DRAWN.normal(size=(CLIENTS, STEPS, EXAMPLES, SIZE)).astype(np.float32)
Y = np.tanh(X @ DRAWN.normal(size=(CLIENTS, 1, SIZE, 1)))[..., 0].astype(np.float32)
START = {
  "w": DRAWN.normal(size=(SIZE, 4)).astype(np.float32) / 4,
  "v": DRAWN.normal(size=4).astype(np.float32),
}


def loss(params, x, y):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def in_drjax(inner, outer, keeps_state, weights=None):
  """The models after each round, of a server with an optimizer of its own."""

  def client(params, state, batches):
    def step(held, batch):
      params, state = held
      updates, state = inner.update(jax.grad(loss)(params, *batch), state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), batches)[0]

  def reduce(x):
    return drjax.reduce_mean(x) if weights is None else drjax.reduce_weighted_mean(x, weights)

  @drjax.program(placements={"clients": CLIENTS})
  def round_of(server, outer_state, states, batches):
    start = drjax.broadcast(server)
    fresh = drjax.map_fn(inner.init, start)
    begin = states if keeps_state else fresh
    ends, states = drjax.map_fn(client, (start, begin, batches))
    way = drjax.map_fn(lambda a, b: jax.tree.map(jnp.subtract, a, b), (start, ends))
    mean = jax.tree.map(reduce, way)
    updates, outer_state = outer.update(mean, outer_state, server)
    return optax.apply_updates(server, updates), outer_state, states

  server, outer_state, states = START, outer.init(START), jax.vmap(inner.init)(stacked(START))
  models = []
  for _ in range(ROUNDS):
    server, outer_state, states = round_of(server, outer_state, states, (X, Y))
    models.append(server)
  return models


def here(tx, weights=None):
  """The same, from any worker after each round."""
  weights = np.ones(CLIENTS, np.float32) if weights is None else weights

  def train(params, state, batches, weight):
    def step(held, batch):
      params, state = held
      grads = jax.grad(loss)(params, *batch)
      updates, state = tx.update(grads, state, params, participation=weight)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), batches)[0]

  mapped = jax.jit(ow.map_workers(train, "clients"))
  held, models = ow.stack_workers((START, tx.init(START)), CLIENTS), []
  for _ in range(ROUNDS):
    held = mapped(*held, (X, Y), weights)
    models.append(jax.tree.map(lambda x: x[0], held[0]))
  return models


def stacked(tree):
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (CLIENTS, *np.shape(x))), tree)


def rows():
  """Each round there, and here."""
  sgd, adam, momentum = optax.sgd(0.1), optax.adamw(1e-2), optax.sgd(0.05, momentum=0.9)
  mean, fed_adam = optax.sgd(1.0), optax.adam(0.1)
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)

  def local(inner, **options):
    return ow.local_steps(inner, "clients", communication_period=STEPS, **options)

  return {
    "FedAvg": (in_drjax(sgd, mean, True), here(local(sgd))),
    "AdamW, state kept": (in_drjax(adam, mean, True), here(local(adam))),
    "momentum begun anew": (
      in_drjax(momentum, mean, False),
      here(local(momentum, inner_state="reset")),
    ),
    "weighted": (in_drjax(sgd, mean, True, COUNTS), here(local(sgd), COUNTS)),
    "FedAdam": (
      in_drjax(sgd, fed_adam, False),
      here(local(sgd, outer=fed_adam, inner_state="reset")),
    ),
    "DiLoCo": (
      in_drjax(adam, outer, True),
      here(ow.diloco(adam, "clients", communication_period=STEPS)),
    ),
  }


def main():
  for name, (there, ours) in rows().items():
    apart = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (there, ours)))]
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (there[-1], START)))]
    print(f"{name:20} {max(apart):.1e} apart, moved by {max(moved):.1f}")


if __name__ == "__main__":
  main()
