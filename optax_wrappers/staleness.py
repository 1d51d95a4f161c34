"""Staleness policies: from the age of a gradient or rollout to its weight.

A policy is a function from an int32 array of ages (updates accepted since the parameters were read)
to float32 weights of the same shape, at least 0; a bool array is a gate. You can write your own, or
multiply two:

```python
def policy(age):
  return staleness.exponential(0.1)(age) * staleness.cosine_gate(8)(age)
```

The same function can weight rollouts in a loss. An age below 0, of a version from the future,
counts as 0. Functions that make a policy raise a TypeError for arguments of another type, and a
ValueError for arguments out of range.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_wrappers._core import _checks

__all__ = ["Policy", "cosine_gate", "exponential", "hinge", "inverse", "polynomial"]

Policy: TypeAlias = Callable[[jax.Array], jax.Array]


def inverse(shift: int = 1) -> Policy:
  """`1 / (age + shift)` for a shift above 0, and `1 / max(age, 1)` for 0.

  With a shift of 1 an age of one halves the weight, with 0 it costs nothing.

  Source: Zhang et al. 2016 (arXiv 1511.05950), `shift=0`; TorchRL's StalenessAwareSampler,
  `shift=1`.
  """
  shift = _checks.integer("inverse", "shift", shift, minimum=0)
  return lambda age: 1 / jnp.maximum(_updates(age) + shift, 1)


def polynomial(a: ArrayLike = 0.5) -> Policy:
  """`(1 + age) ** -a`, with `a` at least 0.

  Source: FedAsync (Xie et al. 2019, arXiv 1903.03934); with `a=0.5` FedBuff (Nguyen et al. 2021,
  arXiv 2106.06639).
  """
  power = _rate("polynomial", "a", a)
  return lambda age: (1 + _updates(age)) ** -power


def hinge(a: ArrayLike = 10.0, b: int = 4) -> Policy:
  """1 up to an age of `b`, and `1 / (a (age - b) + 1)` beyond, with `a` and `b` at least 0.

  Source: FedAsync (Xie et al. 2019, arXiv 1903.03934).
  """
  slope = _rate("hinge", "a", a)
  b = _checks.integer("hinge", "b", b, minimum=0)
  return lambda age: 1 / (slope * jnp.maximum(_updates(age) - b, 0) + 1)


def exponential(rate: ArrayLike) -> Policy:
  """`exp(-rate age)`, with a rate of at least 0 for each update of age.

  Source: the decay of CGAD (arXiv 2605.09126), as its abstract has it.
  """
  decay = _rate("exponential", "rate", rate)
  return lambda age: jnp.exp(-decay * _updates(age))


def cosine_gate(cutoff: int) -> Policy:
  """`(1 + cos(pi age / cutoff)) / 2`, and 0 from an age of `cutoff`, at least 1, on.

  Source: after the cosine gate in the abstract of CGAD (arXiv 2605.09126); the formula is ours.
  """
  cutoff = _checks.integer("cosine_gate", "cutoff", cutoff, minimum=1)

  def policy(age):
    age = _updates(age)
    # The cosine in float32 does not reach zero at the cutoff, and only a weight of zero is a drop.
    return jnp.where(age < cutoff, (1 + jnp.cos(jnp.pi * age / cutoff)) / 2, 0.0)

  return policy


def _updates(age: ArrayLike) -> jax.Array:
  """Ages as float32, none below 0."""
  return jnp.maximum(jnp.asarray(age), 0).astype(jnp.float32)


def _rate(policy: str, name: str, value: ArrayLike) -> Any:
  value = _checks.number(policy, name, value, lambda x: x >= 0, "at least 0")
  # A number stays a number: an array here would initialize a backend.
  return value.astype(jnp.float32) if isinstance(value, jax.Array) else value
