"""Optax wrappers for training on more than one device, or with more than one worker."""

import importlib.metadata

from optax_wrappers import codecs as codecs
from optax_wrappers import exchange as exchange
from optax_wrappers import inspect as inspect
from optax_wrappers import projections as projections
from optax_wrappers import reductions as reductions
from optax_wrappers import staleness as staleness
from optax_wrappers._core._state import get_state as get_state
from optax_wrappers._late._delay_compensation import (
  DelayCompensationState as DelayCompensationState,
)
from optax_wrappers._late._delay_compensation import delay_compensation as delay_compensation
from optax_wrappers._late._history import ParamsHistoryState as ParamsHistoryState
from optax_wrappers._late._history import params_history as params_history
from optax_wrappers._late._history import past_params as past_params
from optax_wrappers._late._simulate_workers import SimulatedWorkersState as SimulatedWorkersState
from optax_wrappers._late._simulate_workers import arrival_order as arrival_order
from optax_wrappers._late._simulate_workers import simulate_workers as simulate_workers
from optax_wrappers._late._staleness_aware import DropStaleState as DropStaleState
from optax_wrappers._late._staleness_aware import StalenessState as StalenessState
from optax_wrappers._late._staleness_aware import drop_rate as drop_rate
from optax_wrappers._late._staleness_aware import drop_stale as drop_stale
from optax_wrappers._late._staleness_aware import staleness_aware as staleness_aware
from optax_wrappers._late._staleness_aware import staleness_histogram as staleness_histogram
from optax_wrappers._norms._clip_variables import clip_variables as clip_variables
from optax_wrappers._norms._project_variables import ProjectVariablesState as ProjectVariablesState
from optax_wrappers._norms._project_variables import project_variables as project_variables
from optax_wrappers._shards._compress import CompressedState as CompressedState
from optax_wrappers._shards._cross_shard import AllReduceState as AllReduceState
from optax_wrappers._shards._cross_shard import CrossShardState as CrossShardState
from optax_wrappers._shards._cross_shard import all_reduce as all_reduce
from optax_wrappers._shards._cross_shard import cross_shard as cross_shard
from optax_wrappers._shards._noise import NoiseState as NoiseState
from optax_wrappers._shards._noise import gradient_gain as gradient_gain
from optax_wrappers._shards._noise import measure_noise as measure_noise
from optax_wrappers._shards._noise import noise_scale as noise_scale
from optax_wrappers._shards._replicas import broadcast_from as broadcast_from
from optax_wrappers._shards._replicas import is_replicated as is_replicated
from optax_wrappers._shards._replicas import per_shard as per_shard
from optax_wrappers._shards._towers import GatherTowersState as GatherTowersState
from optax_wrappers._shards._towers import gather_towers as gather_towers
from optax_wrappers._shards._towers import reduce_towers as reduce_towers
from optax_wrappers._shards._towers import tower_value_and_grad as tower_value_and_grad
from optax_wrappers._workers._elastic_average import ElasticAverageState as ElasticAverageState
from optax_wrappers._workers._elastic_average import elastic_average as elastic_average
from optax_wrappers._workers._exchange_state import center_params as center_params
from optax_wrappers._workers._gossip_average import GossipState as GossipState
from optax_wrappers._workers._gossip_average import consensus_distance as consensus_distance
from optax_wrappers._workers._gossip_average import gossip_average as gossip_average
from optax_wrappers._workers._layout import stack_workers as stack_workers
from optax_wrappers._workers._layout import worker_axes as worker_axes
from optax_wrappers._workers._layout import worker_specs as worker_specs
from optax_wrappers._workers._local_round import local_round as local_round
from optax_wrappers._workers._local_steps import LocalStepsState as LocalStepsState
from optax_wrappers._workers._local_steps import diloco as diloco
from optax_wrappers._workers._local_steps import local_steps as local_steps
from optax_wrappers._workers._map_workers import map_workers as map_workers
from optax_wrappers._workers._map_workers import reshape_batch as reshape_batch
from optax_wrappers._workers._resize import resize_workers as resize_workers

__version__ = importlib.metadata.version("optax_wrappers")

__all__ = [
  "AllReduceState",
  "CompressedState",
  "CrossShardState",
  "DelayCompensationState",
  "DropStaleState",
  "ElasticAverageState",
  "GatherTowersState",
  "GossipState",
  "LocalStepsState",
  "NoiseState",
  "ParamsHistoryState",
  "ProjectVariablesState",
  "SimulatedWorkersState",
  "StalenessState",
  "all_reduce",
  "arrival_order",
  "broadcast_from",
  "center_params",
  "clip_variables",
  "codecs",
  "consensus_distance",
  "cross_shard",
  "delay_compensation",
  "diloco",
  "drop_rate",
  "drop_stale",
  "elastic_average",
  "exchange",
  "gather_towers",
  "get_state",
  "gossip_average",
  "gradient_gain",
  "inspect",
  "is_replicated",
  "local_round",
  "local_steps",
  "map_workers",
  "measure_noise",
  "noise_scale",
  "params_history",
  "past_params",
  "per_shard",
  "project_variables",
  "projections",
  "reduce_towers",
  "reductions",
  "reshape_batch",
  "resize_workers",
  "simulate_workers",
  "stack_workers",
  "staleness",
  "staleness_aware",
  "staleness_histogram",
  "tower_value_and_grad",
  "worker_axes",
  "worker_specs",
]
