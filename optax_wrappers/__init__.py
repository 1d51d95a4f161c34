"""Optax wrappers for training on more than one device, or with more than one worker."""

from optax_wrappers._state import get_state as get_state
from optax_wrappers._state import stack_workers as stack_workers
from optax_wrappers._state import worker_axes as worker_axes
from optax_wrappers._state import worker_specs as worker_specs

__all__ = [
  "get_state",
  "stack_workers",
  "worker_axes",
  "worker_specs",
]
