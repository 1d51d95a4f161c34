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
)
from optax_wrappers._core._metrics import metrics
from optax_wrappers._core._states import get_state
from optax_wrappers._late._staleness_aware import drop_stale, staleness_aware
from optax_wrappers._norms._clip_variables import clip_variables
from optax_wrappers._norms._project_variables import project_variables
from optax_wrappers._shards._cross_shard import all_reduce, cross_shard
from optax_wrappers._shards._replicas import broadcast_from, is_replicated, per_shard
from optax_wrappers._shards._towers import gather_towers, reduce_towers, tower_value_and_grad
from optax_wrappers._shards._unreduced import reduced
from optax_wrappers._workers._elastic_average import elastic_average
from optax_wrappers._workers._exchange_state import center_params
from optax_wrappers._workers._layout import specs, stack_workers, worker_axes
from optax_wrappers._workers._local_round import local_round
from optax_wrappers._workers._local_steps import diloco, local_steps
from optax_wrappers._workers._map_workers import map_workers, reshape_batch
from optax_wrappers._workers._resize import resize_workers
from optax_wrappers._workers._stacked_workers import stacked_workers

# The rooms on public names come last: they import what is above.
from optax_wrappers import contrib, pods, sharded  # isort: skip
from optax_wrappers.sharded import clip_by_global_norm, global_norm, whole_matrices  # isort: skip

__version__ = importlib.metadata.version("optax_wrappers")

__all__ = [
  "all_reduce",
  "broadcast_from",
  "center_params",
  "clip_by_global_norm",
  "clip_variables",
  "codecs",
  "contrib",
  "cross_shard",
  "diloco",
  "drop_stale",
  "elastic_average",
  "exchange",
  "gather_towers",
  "get_state",
  "global_norm",
  "inspect",
  "is_replicated",
  "local_round",
  "local_steps",
  "map_workers",
  "metrics",
  "per_shard",
  "pods",
  "project_variables",
  "projections",
  "reduce_towers",
  "reduced",
  "reductions",
  "reshape_batch",
  "resize_workers",
  "sharded",
  "specs",
  "stack_workers",
  "stacked_workers",
  "staleness",
  "staleness_aware",
  "states",
  "tower_value_and_grad",
  "whole_matrices",
  "worker_axes",
]

_MOVED = {
  "drop_rate": 'metrics(state)["drop_rate"]',
  "gradient_gain": 'metrics(state)["gradient_gain"]',
  "noise_scale": 'metrics(state)["noise_scale"], in shards',
  "staleness_histogram": "get_state(state, states.StalenessState).histogram",
  "state_specs": "specs(state, params)",
  "transports": "pods",
  "worker_specs": "specs(state, params, workers=axis_name)",
}


def __getattr__(name: str) -> object:
  """Says where a name is that people look for here."""
  rooms = {"states": states, "contrib": contrib, "sharded": sharded}
  places = [f"{room}.{name}" for room, module in rooms.items() if name in module.__all__]
  if place := _MOVED.get(name) or next(iter(places), None):
    raise AttributeError(f"optax_wrappers.{name} is optax_wrappers.{place}")
  raise AttributeError(f"module 'optax_wrappers' has no attribute {name!r}")
