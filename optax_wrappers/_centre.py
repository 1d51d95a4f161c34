"""Where a centre lies: whole on every worker, or divided over them.

A centre is what workers exchange with: parameters that belong to all of them. Both forms have one
face, so that the rule of an exchange does not know which it has. A centre is kept in float32 or
wider, whatever the parameters are. In bfloat16 it would stand still where its steps are below half
an ulp, which after a few hundred rounds they are.
"""

import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_wrappers import _axes, _collectives, _numerics
from optax_wrappers._state import copy_tree
from optax_wrappers._types import AxisNames, Tree


class Centre(Protocol):
  """The face of both. Arguments and results are trees of the parameters' structure.

  Attributes:
    field: the field of a state that holds it.
  """

  field: ClassVar[str]

  @property
  def names(self) -> AxisNames:
    """The axes of the workers."""

  def start(self, params: Tree) -> Tree:
    """The centre at these parameters, as `init` returns it; it shares no buffer with them."""

  def gather(self, kept: Tree, params: Tree) -> Tree:
    """The whole centre on every worker, from what each keeps of it."""

  def sum(self, tree: Tree) -> Tree:
    """What a worker keeps of the sum over all workers."""

  def share(self, whole: Tree) -> Tree:
    """What a worker keeps of a centre that it has whole."""

  def differences(
    self, kept: Tree, moved: Tree, params: Tree, weight: jax.Array
  ) -> tuple[Tree, jax.Array]:
    """`sum_i w_i (centre - moved_i)`, what a worker keeps of it, and `sum_i w_i`, in one exchange.

    The centre counts as it was given to the workers, rounded to the dtype of their `params`. What
    is kept beyond that is none of their doing; as a part of every difference it would be fed to a
    momentum again and again. Where a weight is zero a NaN is too.
    """


@dataclasses.dataclass(frozen=True)
class Whole:
  """Every worker keeps all of it. A sum is one all-reduce."""

  field: ClassVar[str] = "center"
  names: AxisNames

  def start(self, params):
    return copy_tree(jax.tree.map(in_center, params))

  def gather(self, kept, params):
    del params
    return kept

  def sum(self, tree):
    return _collectives.psum(tree, self.names, bucketed=True)

  def share(self, whole):
    return whole

  def differences(self, kept, moved, params, weight):
    own = jax.tree.map(
      lambda c, y, x: _numerics.scale(_given(c, x) - y, weight), kept, moved, params
    )
    return self.sum((own, weight))


@dataclasses.dataclass(frozen=True)
class Divided:
  """Each of W workers keeps a share. A sum is a reduce-scatter, and reading is an all-gather.

  Each leaf is flattened, padded with zeros to a multiple of W, and cut into W equal rows.
  """

  field: ClassVar[str] = "center_share"
  wrapper: str
  names: AxisNames

  def start(self, params):
    return jax.tree.map(lambda x: _flat(self.wrapper, in_center(x)), params)

  def gather(self, kept, params):
    num_workers = _axes.axis_size(self.names)

    def whole(share, x):
      # A centre that was never dealt out is still whole, and would be taken for a share of one
      # worker.
      size = -(-x.size // num_workers)
      if share.shape != (size,):
        raise ValueError(
          f"{self.wrapper}: center_share must be 1/{num_workers} of each variable, [{size}] for"
          f" {list(x.shape)}, got {list(share.shape)}. Deal the centre out:"
          " stack_workers(tx.init(params), num_workers)."
        )
      row = _collectives.all_gather(share, self.names).ravel()
      return row[: x.size].reshape(x.shape)

    return jax.tree.map(whole, kept, params)

  def sum(self, tree):
    return _collectives.sum_scatter(tree, self.names)

  def share(self, whole):
    # Every worker has computed the whole, so that nothing is sent to divide it.
    index, num_workers = _axes.axis_index(self.names), _axes.axis_size(self.names)
    return jax.tree.map(lambda c: _collectives.shares(c, num_workers)[index], whole)

  def differences(self, kept, moved, params, weight):
    # No worker has the whole centre to subtract from. To send it first would be half as much again.
    sums = self.sum(jax.tree.map(lambda y: _numerics.scale(y, weight), moved))
    total = _collectives.psum(weight, self.names)
    given = jax.tree.map(
      lambda c, y, x: _given(c, x) * total.astype(c.dtype) - y, kept, sums, params
    )
    return given, total


def dtype_of(dtype: Any) -> Any:
  """The dtype in which the centre of parameters of a dtype is kept."""
  return _numerics.at_least_float32(dtype)


def in_center(x: Any) -> Any:
  """A parameter, or an abstract one, as the centre holds it."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype_of(x.dtype))
  x = x if hasattr(x, "dtype") else jnp.asarray(x)
  return x.astype(dtype_of(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _given(c, x):
  """The centre as a worker with parameters of the dtype of `x` was given it."""
  return c.astype(x.dtype).astype(c.dtype)


def join(params: Tree, shares: Tree) -> Tree:
  """The whole centre from all workers' shares `[num_workers, share]`, outside a step."""

  def whole(p, rows):
    laid_out = jax.typeof(rows).sharding
    if any(laid_out.spec):  # over the axes of an Explicit mesh, which a reshape may not merge
      rows = jax.sharding.reshard(rows, NamedSharding(laid_out.mesh, PartitionSpec()))
    return rows.ravel()[: p.size].reshape(p.shape)

  return jax.tree.map(whole, params, shares)


def _flat(wrapper, x):
  """A copy of a leaf as one flat row."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct((x.size,), x.dtype)
  spec = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else ()
  if any(spec[1:]):
    raise ValueError(
      f"{wrapper}: shard_center flattens the variables, and one is laid out as {spec} over an"
      " Explicit mesh, which cannot be flattened. Make the mesh with AxisType.Auto, or leave"
      " shard_center out."
    )
  return jnp.array(x, copy=True).ravel()
