"""Dropout with and without max-norm on few handwritten digits, several seeds: test error and the
norms of the weights.

Srivastava et al. (2014), table 9, report on MNIST 1.25% test error for dropout + L2 and 1.05% for
dropout + max-norm. Here a network of 1.3 million weights sees 400 images of 8 x 8 pixels; what is
measured is printed, and nothing more is claimed.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax import lax
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_wrappers as ow

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TRAIN, BATCH, LIMIT, EVERY = 400, 50, 1.0, 25

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=300, help="(default: %(default)s)")
parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
parser.add_argument(
  "--out", default="max_norm.png", help="where to save the picture (default: %(default)s)"
)


class Net(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    for _ in range(2):
      x = nn.relu(nn.Dense(1024)(x))
      x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(10)(x)


def train(tx, seed, steps, x, y, x_test, y_test):
  """Test error and largest incoming norm of a hidden unit, every EVERY steps."""
  params = Net().init(jax.random.key(seed), x[:1], train=False)["params"]

  def step(carry, key):
    params, state = carry
    draw, drop = jax.random.split(key)
    rows = jax.random.randint(draw, (BATCH,), 0, TRAIN)

    def loss(params):
      logits = Net().apply({"params": params}, x[rows], train=True, rngs={"dropout": drop})
      return optax.softmax_cross_entropy_with_integer_labels(logits, y[rows]).mean()

    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return (optax.apply_updates(params, updates), state), None

  @jax.jit
  def chunk(carry, keys):
    carry, _ = lax.scan(step, carry, keys)
    params, _ = carry
    error = (Net().apply({"params": params}, x_test, train=False).argmax(-1) != y_test).mean()
    norm = jnp.stack(
      [jnp.linalg.norm(params[f"Dense_{i}"]["kernel"], axis=0).max() for i in range(2)]
    ).max()
    return carry, (error, norm)

  carry, seen = (params, tx.init(params)), []
  keys = jax.random.split(jax.random.key(seed + 1000), steps)
  for start in range(0, steps, EVERY):
    carry, measured = chunk(carry, keys[start : start + EVERY])
    seen.append([float(value) for value in measured])
  return np.array(seen)


def main():
  args = parser.parse_args()
  digits = load_digits()
  x, x_test, y, y_test = train_test_split(
    (digits.data / 16).astype(np.float32),
    digits.target,
    train_size=TRAIN,
    random_state=0,
    stratify=digits.target,
  )
  x, y, x_test, y_test = map(jnp.asarray, (x, y, x_test, y_test))
  sgd = optax.sgd(0.1, momentum=0.9)
  hidden = {
    "Dense_0": {"kernel": True, "bias": False},
    "Dense_1": {"kernel": True, "bias": False},
    "Dense_2": False,
  }
  optimizers = {
    "dropout": sgd,
    "dropout + max-norm": ow.clip_variables(sgd, LIMIT, axes=0, mask=hidden),
  }
  runs = [(name, seed) for name in optimizers for seed in range(args.seeds)]
  curves = {
    run: train(optimizers[run[0]], run[1], args.steps, x, y, x_test, y_test)
    for run in track(runs, "runs")
  }

  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
  print("                     test error, last step, mean of seeds (range)    largest norm")
  for name, style in zip(optimizers, ("-", "--")):
    mine = np.stack([curves[name, seed] for seed in range(args.seeds)])
    steps = EVERY * np.arange(1, mine.shape[1] + 1)
    for panel, column in ((left, 100 * mine[..., 0]), (right, mine[..., 1])):
      (line,) = panel.plot(steps, column.mean(0), style, label=name)
      panel.fill_between(steps, column.min(0), column.max(0), color=line.get_color(), alpha=0.2)
    error, norm = 100 * mine[:, -1, 0], mine[:, -1, 1].max()
    print(f"{name:20} {error.mean():5.2f}% ({error.min():.2f} to {error.max():.2f}) {norm:35.3f}")
  left.set(xlabel="step", ylabel="test error, %", ylim=(0, 20))
  right.set(xlabel="step", ylabel="largest norm of a hidden unit's incoming weights")
  left.legend()
  for panel in (left, right):
    panel.grid(alpha=0.3)
  figure.savefig(args.out, dpi=150)

  bounded = max(curves["dropout + max-norm", seed][:, 1].max() for seed in range(args.seeds))
  assert bounded <= LIMIT * (1 + 1e-6), f"a norm reached {bounded}"
  if args.steps >= 300:
    for (name, seed), curve in curves.items():
      assert curve[-1, 0] < 0.08, f"{name}, seed {seed}: test error {curve[-1, 0]:.1%}"


if __name__ == "__main__":
  main()
