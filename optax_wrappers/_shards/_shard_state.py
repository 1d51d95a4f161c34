"""An inner state that is sharded: what `cross_shard(shard_state=True)` passes to `inner`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _checks, _elementwise, _paths, _shares
from optax_wrappers._core._types import AxisNames, Tree
from optax_wrappers._shards._global_norm import Shares, with_shares


def shares_for(
  wrapper: str,
  names: AxisNames,
  inner: optax.GradientTransformationExtraArgs,
  updates: Tree,
  inner_state: Tree,
  params: Tree,
  extra_args: dict[str, Any],
) -> tuple[Tree, Tree]:
  """This shard's share of the parameters, and the inner state with their layout."""
  num_shards = _axes.axis_size(names)
  asked = optax.GradientTransformationExtraArgs(
    lambda params: with_shares(inner.init(params), Shares(is_asked=True)), inner.update
  )
  if num_shards > 1:
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _checks.arrays(updates))
    _elementwise.require(
      wrapper, "shard_state", "inner_state", asked, like, num_shards, **extra_args
    )
  shapes = {_shares.share_shape(jnp.shape(x), num_shards) for x in jax.tree.leaves(updates)}
  for path, leaf in jax.tree.leaves_with_path(inner_state):
    if leaf.shape and leaf.shape not in shapes:
      name = f"inner_state{jax.tree_util.keystr(path)}"
      raise ValueError(
        f"{wrapper}: {name} {list(leaf.shape)} must be a share. Divide it:"
        f" stack_workers(tx.init(params), {num_shards}, replicated=True)."
      )
  given = tuple((keys, leaf.shape) for keys, leaf in _paths.leaves_with_keys(updates))
  inner_state = with_shares(inner_state, Shares(names, given))
  if params is None:
    return None, inner_state
  params = _checks.arrays(params)
  _checks.same_shapes(wrapper, updates, params)
  return _shares.share_of(params, names), inner_state
