"""Pods that exchange messages, for several test modules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow

X = ow.exchange

PARAMS = {"w": np.arange(32 * 32, dtype=np.float32).reshape(32, 32) / 100, "b": np.ones(5, "f")}

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)

NAMES = ["pod-a", "pod-b", "pod-c"]


def params():
  return jax.tree.map(jnp.asarray, PARAMS)


def local_steps(axis_name=None, **options):
  period = None if axis_name is None else 2
  options = {"outer": NESTEROV, "communication_period": period} | options
  return ow.local_steps(optax.sgd(0.1), axis_name, **options)


def gradients(seed, workers=3):
  rng = np.random.default_rng(seed)
  return [
    {name: (i + 1) * rng.normal(size=x.shape).astype("f") for name, x in PARAMS.items()}
    for i in range(workers)
  ]


def step_of(tx):
  """A step of one worker, from gradients, state and parameters to parameters and state."""

  @jax.jit
  def step(grads, state, x):
    updates, state = tx.update(grads, state, x)
    return optax.apply_updates(x, updates), state

  return step


class Pods:
  """Pods that train and exchange messages in one process."""

  def __init__(self, tx, start=None):
    self.tx, start = tx, params() if start is None else start
    self.pods = [(start, tx.init(start)) for _ in NAMES]
    self.step = step_of(tx)

  def train(self, seed, steps=2):
    for s in range(steps):
      for i, grads in enumerate(gradients(10 * seed + s)):
        x, state = self.pods[i]
        self.pods[i] = self.step(grads, state, x)

  def say(self, weights=(1.0, 2.0, 4.0), fragment=0):
    said = []
    for i, name in enumerate(NAMES):
      x, state = self.pods[i]
      one, state = X.message(self.tx, state, x, weights[i], sender=name, fragment=fragment)
      self.pods[i] = x, state
      said.append(one)
    return said

  def absorb(self, said, **options):
    for i in range(3):
      x, state = self.pods[i]
      self.pods[i] = X.absorb(self.tx, state, x, said[i:] + said[:i], **options)
