"""Scalars of an optimizer's state for a logger."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics, _paths, _states
from optax_wrappers._core._states import OfParams, instances
from optax_wrappers._core._types import AxisName, Tree


def metrics(
  opt_state: Tree, params: Tree = None, axis_name: AxisName = None
) -> dict[str, jax.Array]:
  """Metrics for logging, from every wrapper in a state, however nested.

  | Name | Value |
  |---|---|
  | `exchanges` | synchronizations so far; each fragment counts |
  | `center_distance` | norm of params - center; needs `params`; not with `shard_center` |
  | `residual_norm` | norm of this shard's error-feedback residual; needs `params` |
  | `drop_rate`, `staleness_mean` | fraction dropped; mean age, with ages capped at 31 |
  | `nonfinite_shards` | updates of shards left out by `nonfinite="drop"` |
  | `noise_scale`, `gradient_gain` | of `measure_noise`, in shards |
  | `skipped_steps` | of `skip_spikes` |
  | `cosine` | of this shard's update, or a worker's pseudo-gradient, with the mean |
  | your names | scalars measured by `optax.snapshot(name, measure)` |

  A stacked state has no scalars: map `metrics` like a step. Each worker's metrics are
  `map_workers(metrics, axis_name)(opt_state, params)`, and their mean is
  `map_workers(functools.partial(metrics, axis_name=axis_name), axis_name, out_axes=None)`.

  Args:
    opt_state: an optimizer state, or any pytree that holds states. Boxes of Flax are opened.
    params: the parameters of the state.
    axis_name: the axis or axes to average over; None: the metrics of this shard.

  Returns:
    A dict of float32 scalars. Repeated names (of nested wrappers and further fragments) become
    `name_2`, `name_3`, ... Inside a shard_map that shards parameters over further axes,
    `center_distance` and `residual_norm` are those of the local part.

  Raises:
    ValueError: for a state or parameters that are stacked, for other parameters than those of the
      state, and an unbound axis.

  **Communication**: with `axis_name` 4 bytes per metric; otherwise none.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.drop_stale(optax.sgd(0.1), 1)
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> for version in (0, 1, 0):
    ...   _, state = tx.update(params, state, params, computed_at=version)
    >>> print({name: float(x) for name, x in ow.metrics(state).items()})
    {'drop_rate': 0.3333333432674408, 'staleness_mean': 0.6666666865348816}
  """
  names = _axes.axis_names(axis_name)
  _axes.require_bound(names, "metrics")
  of_params = None if params is None else dict(_paths.leaves_with_keys(params))
  scalars: dict[str, jax.Array] = {}
  seen: collections.Counter[str] = collections.Counter()
  for name, value in _values(opt_state, of_params):
    if np.ndim(value):
      if any(node.slot_names for node in instances(opt_state, _states.State)):
        what = f"metrics: inside whole_matrices each matrix has its own {name}"
        raise ValueError(f"{what}, {jnp.shape(value)}. Put its wrapper around whole_matrices.")
      _raise_stacked(name, value)
    seen[name] += 1
    scalars[f"{name}_{seen[name]}" if seen[name] > 1 else name] = value.astype(jnp.float32)
  if names and scalars:
    means = _collectives.psum(jnp.stack(list(scalars.values())), names) / lax.axis_size(names)
    scalars = dict(zip(scalars, means))
  return scalars


def _values(tree: Tree, of_params: OfParams) -> Iterator[tuple[str, Any]]:
  kinds = _states.State, optax.transforms.SnapshotState
  for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)):
    if isinstance(node, _states.State):
      yield from node.metrics(of_params).items()
      yield from _values(list(node), of_params)
    elif isinstance(node, optax.transforms.SnapshotState):
      measured = node.measurement.items()
      yield from ((k, x) for k, x in measured if hasattr(x, "ndim") and not x.ndim)


def length(tree: Tree, of_params: Any, *, is_origin: bool = True) -> jax.Array | None:
  """The norm of a tree whose leaves are named like the parameters.

  Without `is_origin`, of the parameters minus the tree; None if a leaf's shape differs from its
  parameter's, as that of a share does.
  """
  squared = jnp.zeros((), jnp.float32)
  leaves = _paths.leaves_with_keys(tree)
  whose = _paths.OfParams((keys for keys, _ in leaves), of_params)
  for keys, x in leaves:
    if not _numerics.is_inexact(x):
      continue
    name, p = "/".join(keys), of_params.get(whose.path(keys))
    if p is None:
      raise ValueError(f"metrics: params has nothing of the name of {name}, which the state has.")
    if np.ndim(p) != np.ndim(x):
      _raise_stacked(name, x)
    if not is_origin and np.shape(p) != np.shape(x):
      return None
    rest = x if is_origin else jnp.asarray(p).astype(x.dtype) - x
    rest = rest.astype(_numerics.at_least_float32(rest.dtype))
    squared += jnp.sum(jnp.square(jnp.abs(rest))).astype(jnp.float32)
  return jnp.sqrt(squared)


def _raise_stacked(name, x):
  what = f"metrics: opt_state and params must be one worker's or shard's, {name} is {jnp.shape(x)}"
  raise ValueError(f"{what}. Map it: map_workers(metrics, axis_name)(opt_state, params).")
