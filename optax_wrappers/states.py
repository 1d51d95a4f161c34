"""States of optimizers: how to declare your own, and those of the wrappers.

A wrapper's state, and that of a rule of `exchange`, is a class of `dataclass`. `get_state` finds
one of a class inside any other state.
"""

from optax_wrappers._core._slots import filled_slots, read_slot, write_slot
from optax_wrappers._core._states import State, dataclass, field, static
from optax_wrappers._late._staleness_aware import DropStaleState, StalenessState
from optax_wrappers._norms._project_variables import ProjectVariablesState
from optax_wrappers._shards._compress import CompressedState
from optax_wrappers._shards._cross_shard import AllReduceState, CrossShardState
from optax_wrappers._shards._shard_state import Shares
from optax_wrappers._shards._towers import GatherTowersState
from optax_wrappers._workers._elastic_average import ElasticAverageState
from optax_wrappers._workers._exchange_state import ExchangeState
from optax_wrappers._workers._local_steps import LocalStepsState

__all__ = [
  "AllReduceState",
  "CompressedState",
  "CrossShardState",
  "DropStaleState",
  "ElasticAverageState",
  "ExchangeState",
  "GatherTowersState",
  "LocalStepsState",
  "ProjectVariablesState",
  "Shares",
  "StalenessState",
  "State",
  "dataclass",
  "field",
  "filled_slots",
  "read_slot",
  "static",
  "write_slot",
]
