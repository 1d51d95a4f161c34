"""NoLoCo: workers synchronize in random pairs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_wrappers import exchange, states
from optax_wrappers.contrib._arrays import select
from optax_wrappers.contrib._gossip_average import Hops, mix


@states.dataclass
class PairsKept(states.State):
  """The state of `Pairs`.

  Attributes:
    center: the parameters at which this worker begins the round.
    momentum: the momentum of its center, same structure.
  """

  center: Any
  momentum: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Pairs(exchange.Rule):
  """A rule: NoLoCo, which synchronizes pairs of workers instead of an all-reduce.

  Every worker has a center phi_i and a momentum d_i. At the end of a round, with means over the
  worker and its partner,

      d_i <- momentum d_i + learning_rate mean(x - phi) + consensus (mean(phi) - phi_i)
      phi_i <- phi_i + d_i;  x_i <- phi_i

  Pairings repeat in a cycle that `seed` draws; of an odd number one worker has no partner. Centers
  differ a little: evaluate any worker or their mean. A worker with participation 0, or a NaN in
  the step of a synchronization, returns to its center, and its partner has none in that round.

  Attributes:
    momentum: in [0, 1).
    learning_rate: of the pseudo-gradient, at least 0.
    consensus: strength of the pull to the mean of both centers, in [0, 1].
    num_pairings: length of the cycle; each pairing is compiled.
    seed: of the draws.

  **Communication**: in a synchronization twice the parameters, in float32 or wider, to one other
  worker, as a collective permute.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> rule = ow.contrib.Pairs(momentum=0.5, learning_rate=1.0, consensus=0.5)
    >>> tx = ow.exchange.periodic_exchange(
    ...   optax.sgd(1.0), "workers", rule, communication_period=1
    ... )
    >>> params = jnp.zeros(2)  # of two workers
    >>> state = ow.stack_workers(tx.init(params[0]), 2)
    >>> update = ow.map_workers(tx.update, "workers")
    >>> print(update(jnp.array([2.0, 4.0]), state, params)[0])
    [-3. -3.]

  Source: NoLoCo (arXiv 2506.10911), and the signs and the numbers of its authors' program, in which
  `consensus` is the learning rate.
  """

  momentum: float = 0.5
  learning_rate: float = 0.7
  consensus: float = 0.7
  num_pairings: int = 8
  seed: int = 0

  def __post_init__(self):
    limits = {
      "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
      "learning_rate": (self.learning_rate >= 0, "at least 0"),
      "consensus": (0 <= self.consensus <= 1, "in [0, 1]"),
      "num_pairings": (self.num_pairings >= 1, "at least 1"),
      "seed": (self.seed >= 0, "at least 0"),
    }
    for name, (holds, limit) in limits.items():
      if not holds:
        raise ValueError(f"Pairs: {name} must be {limit}, got {getattr(self, name)}.")

  def init(self, params, workers):
    center = workers.start(params)
    return PairsKept(center=center, momentum=jax.tree.map(jnp.zeros_like, center))

  def send(self, moved, params, kept, workers):
    # x - phi.
    way = jax.tree.map(jnp.negative, workers.difference(kept.center, moved, params))
    pairings = _pairings(self.seed, self.num_pairings, workers.size)
    takes_part = workers.weight > 0
    ways, centers = mix((way, kept.center), takes_part, pairings, workers)

    def moved_on(d, way, mean, phi):
      return self.momentum * d + self.learning_rate * way + self.consensus * (mean - phi)

    momentum = jax.tree.map(moved_on, kept.momentum, ways, centers, kept.center)
    new = PairsKept(center=jax.tree.map(jnp.add, kept.center, momentum), momentum=momentum)
    return select(takes_part, new, kept), ()

  def merge(self, moved, params, sent, kept, workers):
    return kept.center, kept

  def replaces(self, sent):
    return True


@functools.cache
def _pairings(seed, number, num_workers):
  """A cycle of partners, as mixings for gossip: half of a worker's parameters and half of its
  partner's."""
  rng = np.random.default_rng(seed)

  def drawn():
    order, partners = rng.permutation(num_workers), np.arange(num_workers)
    for i, j in zip(order[::2], order[1::2]):
      partners[[i, j]] = j, i
    return Hops(1 / 2, (partners,))

  # For two workers all pairings are equal.
  return tuple(drawn() for _ in range(number if num_workers > 2 else 1))
