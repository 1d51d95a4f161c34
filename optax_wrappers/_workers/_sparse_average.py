"""Workers average a small part of their entries at a time."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_wrappers._core import _axes, _checks, _draws, _numerics
from optax_wrappers._core._types import STATIC
from optax_wrappers._workers._engine import Rule


class _Sent(NamedTuple):
  """An exchange in flight.

  Attributes:
    moves: the mean minus this worker's parameters, for the drawn entries.
    round: the round in which they were drawn.
  """

  moves: tuple[jax.Array, ...]
  round: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseAverage(Rule):
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
    >>> rule = ow.exchange.SparseAverage(0.5)
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

  fraction: float = dataclasses.field(metadata=STATIC)
  seed: int = dataclasses.field(default=0, metadata=STATIC)

  def __post_init__(self):
    rule = "SparseAverage"
    _checks.number(rule, "fraction", self.fraction, lambda x: 0 < x <= 1, "in (0, 1]")
    _checks.integer(rule, "seed", self.seed, minimum=0)

  def idle(self, params):
    def nothing(x):
      return jnp.zeros(
        _draws.num_groups(x.shape, self._length), _numerics.at_least_float32(x.dtype)
      )

    leaves = jax.tree.leaves(params)
    moves = tuple(_axes.to_varying(nothing(x), tuple(_axes.varying(x))) for x in leaves)
    return _Sent(moves, jnp.zeros((), jnp.int32))

  def send(self, moved, params, kept, workers):
    leaves = jax.tree.leaves(moved)
    places = self._places(workers.round, leaves)
    own = tuple(_draws.taken(x, p, self._length) for x, p in zip(leaves, places))
    takes_part = workers.weight > 0
    moves = tuple(jnp.where(takes_part, m - x, 0) for m, x in zip(workers.mean(own), own))
    return kept, _Sent(moves, workers.round)

  def merge(self, moved, params, sent, kept, workers):
    leaves = jax.tree.leaves(moved)
    rows = zip(leaves, sent.moves, self._places(sent.round, leaves))
    ends = [x + _draws.spread(m, p, x.shape, self._length) for x, m, p in rows]
    return jax.tree.structure(moved).unflatten(ends), kept

  @property
  def _length(self):
    return round(1 / self.fraction)

  def _places(self, count, leaves):
    return _draws.draw(self.seed, count, [x.shape for x in leaves], self._length)
