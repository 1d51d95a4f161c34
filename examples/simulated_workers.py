"""Eight simulated asynchronous workers, one of them slow: compares rules for stale gradients.

scikit-learn's digits, 500 gradients in an order that workers of these speeds, with random
durations, would produce. Each optimizer and rule has the best of six learning rates.
"""

import argparse
import functools

import digits
import jax
import jax.numpy as jnp
import optax

import optax_wrappers as ow

SECONDS, UPDATES, BATCH = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 6.0], 500, 64
OPTIMIZERS = {
  "SGD": (optax.sgd, 0.4),
  "momentum": (functools.partial(optax.sgd, momentum=0.9), 0.1),
  "Adam": (optax.adam, 0.01),
}
INVERSE_ROOT = ow.staleness.polynomial(0.5)
RULES = {
  "all alike": lambda inner: ow.staleness_aware(inner),
  "drop beyond 8": lambda inner: ow.drop_stale(inner, 8),
  "weights on gradients": lambda inner: ow.staleness_aware(inner, INVERSE_ROOT),
  "weights on updates": lambda inner: ow.staleness_aware(inner, INVERSE_ROOT, scale="updates"),
}


def train(rate, make_inner, rule, arrivals, data):
  """Returns the training loss after all updates."""
  tx = ow.contrib.simulate_workers(rule(make_inner(rate)), len(SECONDS), arrivals)
  params = digits.init()

  def step(held, batch):
    params, state = held
    updates, state = tx.update(jax.grad(digits.cross_entropy)(params, *batch), state, params)
    return (optax.apply_updates(params, updates), state), None

  x, y = data
  rows = jax.random.randint(jax.random.key(1), (UPDATES + len(SECONDS) - 1, BATCH), 0, len(x))
  (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), (x[rows], y[rows]))
  return digits.cross_entropy(params, x, y)


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seed", type=int, default=0, help="of the times (default: %(default)s)")
  parser.add_argument(
    "--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS], help="(default: all)"
  )
  args = parser.parse_args()
  arrivals = ow.contrib.arrival_order(SECONDS, UPDATES, seed=args.seed)
  x_train, _, y_train, _ = digits.load()
  data = jnp.asarray(x_train), jnp.asarray(y_train)
  best = {}
  print(f"{'loss, best learning rate':26}" + "".join(f"{name:>16}" for name in args.optimizers))
  for name, rule in RULES.items():
    shown = []
    for optimizer in args.optimizers:
      make_inner, middle = OPTIMIZERS[optimizer]
      rates = middle * 2.0 ** jnp.arange(-3, 3)
      run = functools.partial(train, make_inner=make_inner, rule=rule, arrivals=arrivals, data=data)
      losses = jax.jit(jax.vmap(run))(rates)
      best[name, optimizer] = float(jnp.nanmin(losses))
      shown.append(f"{best[name, optimizer]:.3f} at {float(rates[jnp.nanargmin(losses)]):.3f}")
    print(f"{name:26}" + "".join(f"{text:>16}" for text in shown))
  # The reason for the default: a stale gradient should enter a momentum with its weight.
  if "momentum" in args.optimizers:
    others = best["weights on updates", "momentum"], best["all alike", "momentum"]
    assert best["weights on gradients", "momentum"] < min(others)


if __name__ == "__main__":
  main()
