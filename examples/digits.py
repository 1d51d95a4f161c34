"""Shared by the short examples: scikit-learn's digits, a small Flax model, its loss and
accuracy."""

import functools
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Mlp(nn.Module):
  """One hidden layer on 8 x 8 pixels."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


@functools.cache
def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Returns training and test images, float32 [n, 64], then training and test labels, int [n]."""
  digits = load_digits()
  return train_test_split(
    (digits.data / 16).astype(np.float32),
    digits.target,
    test_size=0.25,
    random_state=0,
    stratify=digits.target,
  )


def init(seed: int = 0):
  return Mlp().init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]


def cross_entropy(params, x, y):
  return optax.softmax_cross_entropy_with_integer_labels(
    Mlp().apply({"params": params}, x), y
  ).mean()


@jax.jit
def accuracy(params, x, y):
  return (Mlp().apply({"params": params}, x).argmax(-1) == y).mean()


def batches(x: np.ndarray, y: np.ndarray, size: int, steps: int, seed: int = 0) -> Iterator[tuple]:
  """Yields `steps` batches of `size` examples, drawn with replacement."""
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    rows = rng.integers(0, len(x), size)
    yield x[rows], y[rows]
