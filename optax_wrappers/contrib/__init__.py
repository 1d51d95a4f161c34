"""Algorithms of fewer users, on the public names of this library; they may change in any version.

Each is a file of its formula. Rules of `exchange.periodic_exchange`: `Asynchronous`, `Eager`,
`Pairs`, `SparseAverage`. Reductions: `adasum`, `penalty`, `radial_mean`. Codecs: `float8`,
`majority_vote`, `power_sgd`. Projections: `by_path`, `flax_kernels`.
"""

from optax_wrappers.contrib._adasum import adasum
from optax_wrappers.contrib._asynchronous import Asynchronous
from optax_wrappers.contrib._delay_compensation import DelayCompensationState, delay_compensation
from optax_wrappers.contrib._delayed_nesterov import DelayedNesterovState, delayed_nesterov
from optax_wrappers.contrib._eager import Eager
from optax_wrappers.contrib._flax_kernels import by_path, chosen, flax_kernels
from optax_wrappers.contrib._float8 import float8
from optax_wrappers.contrib._gossip_average import consensus_distance, gossip_average
from optax_wrappers.contrib._majority_vote import majority_vote
from optax_wrappers.contrib._measure_noise import NoiseState, measure_noise
from optax_wrappers.contrib._pairs import Pairs
from optax_wrappers.contrib._params_history import ParamsHistoryState, params_history, past_params
from optax_wrappers.contrib._penalty import PenaltyState, penalty
from optax_wrappers.contrib._power_sgd import power_sgd
from optax_wrappers.contrib._primal_average import (
  PrimalAverageState,
  averaged_params,
  primal_average,
)
from optax_wrappers.contrib._radial_mean import radial_mean
from optax_wrappers.contrib._simulate_workers import (
  SimulatedWorkersState,
  arrival_order,
  simulate_workers,
)
from optax_wrappers.contrib._skip_spikes import SkipSpikesState, skip_spikes
from optax_wrappers.contrib._sparse_average import SparseAverage

__all__ = [
  "Asynchronous",
  "DelayCompensationState",
  "DelayedNesterovState",
  "Eager",
  "NoiseState",
  "Pairs",
  "ParamsHistoryState",
  "PenaltyState",
  "PrimalAverageState",
  "SimulatedWorkersState",
  "SkipSpikesState",
  "SparseAverage",
  "adasum",
  "arrival_order",
  "averaged_params",
  "by_path",
  "chosen",
  "consensus_distance",
  "delay_compensation",
  "delayed_nesterov",
  "flax_kernels",
  "float8",
  "gossip_average",
  "majority_vote",
  "measure_noise",
  "params_history",
  "past_params",
  "penalty",
  "power_sgd",
  "primal_average",
  "radial_mean",
  "simulate_workers",
  "skip_spikes",
]
