"""Workers average a small part of their entries at a time."""

import dataclasses

import jax
import jax.numpy as jnp

from optax_wrappers import codecs, exchange
from optax_wrappers.contrib._arrays import wide


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SparseAverage(exchange.Rule):
  """A rule: workers average one of every `1 / fraction` adjacent entries (SPARTA).

  With random entries S, different in each synchronization and equal on all workers, and y_i the
  parameters that worker i sends,

      x_ij <- x_ij + (mean_i y_ij - y_ij)     for j in S, `delay` steps later

  The mean is added and does not replace the parameters, so steps during the delay are kept, and so
  is the mean of the workers. A worker with participation 0 or a NaN stays.

  Attributes:
    fraction: of the entries, in (0, 1]; its inverse is rounded to an integer.
    seed: of the draws.

  **Communication**: in a synchronization that fraction of the parameters, in float32 or wider, as
  an all-reduce, and 4 bytes.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> rule = ow.contrib.SparseAverage(0.5)
    >>> tx = ow.exchange.periodic_exchange(
    ...   optax.sgd(1.0), "workers", rule, communication_period=1
    ... )
    >>> params = jnp.array([[0.0, 0.0], [2.0, 4.0]])  # of two workers
    >>> state = ow.stack_workers(tx.init(params[0]), 2)
    >>> update = ow.map_workers(tx.update, "workers")
    >>> updates, state = update(jnp.zeros_like(params), state, params)
    >>> print(params + updates)
    [[0. 2.]
     [2. 2.]]

  Source: LOSCAR-SGD (arXiv 2605.20866); with a period of 1 and without a delay SPARTA, of EXO Labs'
  gym, which draws each entry by itself.
  """

  fraction: float
  seed: int = 0

  def __post_init__(self):
    if not 0 < self.fraction <= 1:
      raise ValueError(f"SparseAverage: fraction must be in (0, 1], got {self.fraction}.")
    if self.seed < 0:
      raise ValueError(f"SparseAverage: seed must be at least 0, got {self.seed}.")

  def idle(self, params):
    return jax.tree.map(lambda x: jnp.zeros_like(wide(x)), params)

  def send(self, moved, params, kept, workers):
    leaves, treedef = jax.tree.flatten(moved)
    codec = codecs.random_k(self.fraction, self.seed)
    means, drawn, _ = codec.reduce(workers.mean, leaves, workers.round)
    moves = [jnp.where(workers.weight > 0, m - x, 0) for m, x in zip(means, drawn)]
    return kept, treedef.unflatten(moves)

  def merge(self, moved, params, sent, kept, workers):
    return jax.tree.map(jnp.add, moved, sent), kept
