"""The cost of a norm bound: a step of the bare optimizer, with clip_variables, with hand-written
code, with PyTorch.

The hand-written version uses float32 norms and returns `y * M / norm - p`, which exceeds the bound
by an ulp. In the same run, if PyTorch is installed, `torch.renorm` is timed after a step of its
optimizer.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import machine
import optax

import optax_wrappers as ow

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rounds", type=int, default=15, help="paired rounds (default: %(default)s)")
parser.add_argument(
  "--out", default="projection_cost.png", help="the picture (default: %(default)s)"
)
parser.add_argument("--layers", type=int, default=50)
parser.add_argument("--width", type=int, default=512)

LIMIT = 1.0


def clip_by_hand(inner, max_norm):
  """A straightforward implementation."""

  def update(updates, state, params):
    updates, state = inner.update(updates, state, params)

    def clip(p, u):
      y = p + u
      norm = jnp.linalg.norm(y, axis=0, keepdims=True)
      # The sum with p is rounded, and exceeds the bound.
      return jnp.where(norm > max_norm, y * (max_norm / norm), y) - p

    return jax.tree.map(clip, params, updates), state

  return optax.GradientTransformation(inner.init, update)


def read_twice(inner):
  """The minimum for a bound on columns: reads parameters and updates twice, writes once."""

  def update(updates, state, params):
    updates, state = inner.update(updates, state, params)

    def look(p, u):
      return u * (jnp.max(p + u, axis=0, keepdims=True) < jnp.inf)

    return jax.tree.map(look, params, updates), state

  return optax.GradientTransformation(inner.init, update)


def jax_steps(args):
  shape = (args.width, args.width)
  keys = jax.random.split(jax.random.key(0), 2 * args.layers)
  # Columns of norm near 1, so that about half of them are clipped per step.
  matrices = [jax.random.normal(key, shape) / args.width**0.5 for key in keys]
  start, grads = matrices[: args.layers], matrices[args.layers :]
  calls = {}
  for name, optimizer in (("sgd", optax.sgd(0.01)), ("adam", optax.adam(0.001))):
    wrappers = {
      "bare": optimizer,
      "read twice": read_twice(optimizer),
      "by hand": clip_by_hand(optimizer, LIMIT),
      "clip_variables": ow.clip_variables(optimizer, LIMIT, 0),
    }
    for wrapper, tx in wrappers.items():

      def step(params, state, grads, tx=tx):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

      carried = [jax.tree.map(jnp.copy, start), tx.init(start)]
      compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carried, grads).compile()

      def call(compiled=compiled, carried=carried):
        carried[:] = compiled(*carried, grads)
        jax.block_until_ready(carried)

      calls[f"{name}, {wrapper}"] = call
  return calls


def torch_steps(args):
  try:
    import torch
  except ImportError:
    return {}
  calls = {}
  for name, make in (
    ("sgd", lambda p: torch.optim.SGD(p, 0.01)),
    ("adam", lambda p: torch.optim.Adam(p, 0.001)),
  ):
    for clipped in (False, True):
      params = [
        torch.nn.Parameter(torch.randn(args.width, args.width) / args.width**0.5)
        for _ in range(args.layers)
      ]
      for p in params:
        p.grad = torch.randn_like(p) / args.width**0.5
      optimizer = make(params)

      def call(params=params, optimizer=optimizer, clipped=clipped):
        optimizer.step()
        if clipped:
          with torch.no_grad():
            for p in params:
              p.copy_(torch.renorm(p, 2, 1, LIMIT))

      calls[f"{name}, torch {'renorm' if clipped else 'bare'}"] = call
  return calls


def measure(args):
  """Milliseconds of each step."""
  return machine.paired({**jax_steps(args), **torch_steps(args)}, args.rounds)


def main():
  args = parser.parse_args()
  print(machine.describe())
  times = measure(args)
  rows, found = [], {}
  for name, mine in times.items():
    optimizer, what = name.split(", ")
    base = f"{optimizer}, torch bare" if "torch" in what else f"{optimizer}, bare"
    low, middle, high = found[name] = machine.ratios(times, base)[name]
    rows.append(
      [name, f"{statistics.median(mine):.1f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
    )
  machine.show(
    f"A step on {args.layers} matrices of {args.width} x {args.width}, {args.rounds} paired rounds",
    ["step", "ms, median", "times the bare step", "range"],
    rows,
  )
  machine.draw("time of a step, times the bare one", found, args.out)


if __name__ == "__main__":
  main()
