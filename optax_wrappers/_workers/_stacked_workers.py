"""Workers in any trainer: a transformation of stacked parameters."""

from collections.abc import Hashable

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_wrappers._core import _axes, _checks, _paths
from optax_wrappers._workers._layout import Holder, holders, stack_workers
from optax_wrappers._workers._map_workers import map_workers


def stacked_workers(
  tx: optax.GradientTransformation,
  axis_name: Hashable,
  num_workers: int,
  *,
  mesh: Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
  """An optimizer of the stacked parameters of all workers, for trainers under `jit`.

  Every leaf of parameters and gradients is `[num_workers, ...]`, and the state is that of `tx`
  stacked by `stack_workers`. The gradients are those of the *sum* of the
  workers' losses, such as `jax.vmap(loss)(params, batches).sum()`: a mean would divide each
  worker's gradient by their number.

  Args:
    tx: the optimizer of each worker, such as `diloco(optax.adamw(1e-3), axis_name)`.
    axis_name: the axis over which `tx` communicates, and the name of the first in Flax's boxes.
    num_workers: the length of every first axis.
    mesh: see `map_workers`; without it a codec or `shard_center` saves no bytes.

  Returns:
    A gradient transformation. All workers must start with equal parameters: a center starts at
    those of the first worker. Every non-scalar array among the extra args of update must have the
    workers' axis first; other extra args go to every worker. For a large model call `init` under
    `jax.jit` with `out_shardings`, as trainers do, so that its results are sharded.

  Raises:
    ValueError: for parameters or updates that are not stacked for as many workers, or boxes of Flax
      that do not name the workers' axis; in update, what `map_workers` raises.

  **Communication**: that of `tx`.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.diloco(optax.sgd(0.5), "pod", communication_period=2)
    >>> tx = ow.stacked_workers(tx, "pod", 2)
    >>> def loss(x, target):
    ...   return (x - target) ** 2 / 2
    >>> targets = jnp.array([1.0, 3.0])
    >>> grad = jax.grad(lambda params: jax.vmap(loss)(params, targets).sum())
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...   updates, state = tx.update(grad(params), state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   print(params)
    [0.5 1.5]
    [1.9949999 1.9949999]
  """
  wrapper = "stacked_workers"
  tx = _checks.optimizer(wrapper, tx, "tx")
  num_workers = _checks.integer(wrapper, "num_workers", num_workers, minimum=1)

  def require_stacked(what, tree):
    for name, leaf in _paths.named_leaves(tree):
      if np.shape(leaf)[:1] != (num_workers,):
        what = f"{wrapper}: {what} must have a first axis of the {num_workers} workers"
        raise ValueError(f"{what}; {name or 'it'} is {list(np.shape(leaf))}.")

  def init_fn(params):
    require_stacked("params", params)
    worker = _paths.renamed_axes(params, unnamed)
    worker = jax.tree.map(lambda x: _axes.undivided(x, 1)[0], worker)
    state = stack_workers(tx.init(worker), num_workers, axis_name=axis_name)
    # Per-worker leaves come from `init` with that worker's parameters.
    each = jax.tree.structure(state).unflatten(jax.tree.leaves(jax.vmap(tx.init)(params)))
    return jax.tree.map(
      lambda holder, x, own: own if holder is Holder.OWN else x, holders(state), state, each
    )

  def unnamed(names, leaf):
    if names[0] != axis_name:
      what = f"{wrapper}: boxes must name their first axis {axis_name!r}, got {names}"
      mend = "stack_workers(params, n, axis_name=...) does, and PARTITION_NAME of nnx.vmap."
      raise ValueError(f"{what} for {list(np.shape(leaf))}. {mend}")
    return names[1:]

  def update_fn(updates, state, params=None, **extra_args):
    require_stacked("updates", updates)
    leaves, treedef = jax.tree.flatten(extra_args)
    arrays = [x if isinstance(x, jax.Array | np.ndarray) else None for x in leaves]

    def step(updates, state, params, arrays):
      inputs = (x if array is None else array for x, array in zip(leaves, arrays))
      return tx.update(updates, state, params, **treedef.unflatten(inputs))

    axes = [0 if np.ndim(x) else None for x in arrays]
    mapped = map_workers(step, axis_name, in_axes=(0, 0, 0, axes), mesh=mesh)
    return mapped(updates, state, params, arrays)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
