"""Optimizers and norms of parameters that are sharded over devices."""

from optax_wrappers.sharded._global_norm import (
  ClipByGlobalNormState,
  clip_by_global_norm,
  global_norm,
)
from optax_wrappers.sharded._whole_matrices import WholeMatricesState, whole_matrices

__all__ = [
  "ClipByGlobalNormState",
  "WholeMatricesState",
  "clip_by_global_norm",
  "global_norm",
  "whole_matrices",
]
