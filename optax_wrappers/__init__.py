"""Optax wrappers for training on more than one device, or with more than one worker."""

import importlib.metadata

from optax_wrappers import (
  codecs,
  exchange,
  inspect,
  projections,
  reductions,
  staleness,
  states,
  transports,
)
from optax_wrappers._core._metrics import metrics
from optax_wrappers._core._states import get_state
from optax_wrappers._late._delay_compensation import DelayCompensationState, delay_compensation
from optax_wrappers._late._history import ParamsHistoryState, params_history, past_params
from optax_wrappers._late._simulate_workers import (
  SimulatedWorkersState,
  arrival_order,
  simulate_workers,
)
from optax_wrappers._late._staleness_aware import (
  DropStaleState,
  StalenessState,
  drop_rate,
  drop_stale,
  staleness_aware,
  staleness_histogram,
)
from optax_wrappers._norms._clip_variables import clip_variables
from optax_wrappers._norms._project_variables import ProjectVariablesState, project_variables
from optax_wrappers._shards._compress import CompressedState
from optax_wrappers._shards._cross_shard import (
  AllReduceState,
  CrossShardState,
  all_reduce,
  cross_shard,
)
from optax_wrappers._shards._global_norm import (
  ClipByGlobalNormState,
  clip_by_global_norm,
  global_norm,
)
from optax_wrappers._shards._noise import NoiseState, gradient_gain, measure_noise, noise_scale
from optax_wrappers._shards._replicas import broadcast_from, is_replicated, per_shard
from optax_wrappers._shards._towers import (
  GatherTowersState,
  gather_towers,
  reduce_towers,
  tower_value_and_grad,
)
from optax_wrappers._shards._whole_matrices import WholeMatricesState, whole_matrices
from optax_wrappers._workers._delayed_nesterov import DelayedNesterovState, delayed_nesterov
from optax_wrappers._workers._elastic_average import ElasticAverageState, elastic_average
from optax_wrappers._workers._exchange_state import center_params
from optax_wrappers._workers._gossip_average import GossipState, consensus_distance, gossip_average
from optax_wrappers._workers._layout import stack_workers, state_specs, worker_axes, worker_specs
from optax_wrappers._workers._local_round import local_round
from optax_wrappers._workers._local_steps import LocalStepsState, diloco, local_steps
from optax_wrappers._workers._map_workers import map_workers, reshape_batch
from optax_wrappers._workers._primal_average import (
  PrimalAverageState,
  averaged_params,
  primal_average,
)
from optax_wrappers._workers._resize import resize_workers
from optax_wrappers._workers._stacked_workers import stacked_workers

__version__ = importlib.metadata.version("optax_wrappers")

__all__ = [
  "AllReduceState",
  "ClipByGlobalNormState",
  "CompressedState",
  "CrossShardState",
  "DelayCompensationState",
  "DelayedNesterovState",
  "DropStaleState",
  "ElasticAverageState",
  "GatherTowersState",
  "GossipState",
  "LocalStepsState",
  "NoiseState",
  "ParamsHistoryState",
  "PrimalAverageState",
  "ProjectVariablesState",
  "SimulatedWorkersState",
  "StalenessState",
  "WholeMatricesState",
  "all_reduce",
  "arrival_order",
  "averaged_params",
  "broadcast_from",
  "center_params",
  "clip_by_global_norm",
  "clip_variables",
  "codecs",
  "consensus_distance",
  "cross_shard",
  "delay_compensation",
  "delayed_nesterov",
  "diloco",
  "drop_rate",
  "drop_stale",
  "elastic_average",
  "exchange",
  "gather_towers",
  "get_state",
  "global_norm",
  "gossip_average",
  "gradient_gain",
  "inspect",
  "is_replicated",
  "local_round",
  "local_steps",
  "map_workers",
  "measure_noise",
  "metrics",
  "noise_scale",
  "params_history",
  "past_params",
  "per_shard",
  "primal_average",
  "project_variables",
  "projections",
  "reduce_towers",
  "reductions",
  "reshape_batch",
  "resize_workers",
  "simulate_workers",
  "stack_workers",
  "stacked_workers",
  "staleness",
  "staleness_aware",
  "staleness_histogram",
  "state_specs",
  "states",
  "tower_value_and_grad",
  "transports",
  "whole_matrices",
  "worker_axes",
  "worker_specs",
]
