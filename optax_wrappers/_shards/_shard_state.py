"""An inner state that is sharded: what `cross_shard(shard_state=True)` passes to `inner`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_wrappers._core import _checks, _elementwise, _paths, _shares
from optax_wrappers._core._states import static
from optax_wrappers._core._types import AxisNames, Tree


@static
class Shares:
  """In the state of an optimizer that uses the global norm: whether it receives shares of updates.

  `cross_shard(shard_state=True)` sets it in each call: everything but scalars is a share.
  """

  names: AxisNames = ()  # the axes over which updates are shares
  shapes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = ()  # of whole ones, by path
  is_asked: bool = False  # whether only its elementwise behavior is examined

  def __repr__(self) -> str:
    return f"Shares({self.names})"

  def own(self, tree: Tree) -> Tree:
    """The tree, with padding in its shares set to zero again."""
    if not self.names:
      return tree
    shapes, num_shares = dict(self.shapes), lax.axis_size(self.names)
    index = lax.axis_index(self.names)

    def leaf(keys, x):
      # A transformation outside may have split a leaf, as into real and imaginary parts.
      starts = (keys[:n] for n in reversed(range(len(keys) + 1)))
      shape = next((shapes[start] for start in starts if start in shapes), None)
      if shape is None:
        what = f"clip_by_global_norm: updates has {'/'.join(keys)!r}, which no parameter has"
        raise ValueError(f"{what}. In cross_shard(shard_state=True) it needs their structure.")
      d = _shares.divided_dimension(shape, num_shares)
      if d is None or shape[d] % num_shares == 0:
        return x
      place = lax.broadcasted_iota(jnp.int32, x.shape, d) * num_shares + index
      return jnp.where(place < shape[d], x, jnp.zeros_like(x))

    treedef: Any = jax.tree.structure(tree)
    return treedef.unflatten(leaf(*pair) for pair in _paths.leaves_with_keys(tree))


def with_shares(opt_state: Tree, shares: Shares) -> Tree:
  """A state in which `shares` replaces every `Shares` node."""
  is_node = _checks.is_a(Shares)
  return jax.tree.map(lambda x: shares if is_node(x) else x, opt_state, is_leaf=is_node)


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
  num_shards = lax.axis_size(names)
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
  shapes_by_path = tuple((keys, leaf.shape) for keys, leaf in _paths.leaves_with_keys(updates))
  inner_state = with_shares(inner_state, Shares(names, shapes_by_path))
  if params is None:
    return None, inner_state
  params = _checks.arrays(params)
  _checks.same_shapes(wrapper, updates, params)
  return _shares.share_of(params, names), inner_state
