"""Which workers participate in an exchange, and with which weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics
from optax_wrappers._core._types import AxisNames, Tree


def weight(
  wrapper: str, names: AxisNames, participation: Any, is_finite: jax.Array, moved: Tree
) -> jax.Array:
  """This worker's weight in an exchange to which it brings the parameters `moved`.

  It is the extra arg `participation`, checked, or 1; and 0 unless `is_finite`.
  """
  leaves = jax.tree.leaves(moved)
  share = jnp.asarray(1.0 if participation is None else participation)
  known = frozenset(names).union(*_axes.all_varying(leaves))
  mend = "Sum it over the devices of a worker: jax.lax.psum(participation, axis_name)."
  others = _axes.varying(share) - known
  _axes.require_equal(share, wrapper, "participation, one weight of a worker,", mend, axes=others)
  share = share.astype(_numerics.weight_dtype(leaves))
  return jnp.where((share > 0) & is_finite, share, 0)


def goes(workers: Any) -> jax.Array | None:
  """Whether this worker participates, bool scalar; None without a `participation`: all do."""
  return workers.weight > 0 if workers.is_weighed else None


def is_finite(tree: Tree, names: AxisNames) -> jax.Array:
  """Whether all of this worker's leaves are finite, including the parts on its other devices."""
  return _everywhere(lambda x: jnp.isfinite(x).all(), tree, names)


def is_zero(tree: Tree, names: AxisNames) -> jax.Array:
  """Whether all of this worker's leaves are zero, including the parts on its other devices."""
  return _everywhere(lambda x: (x == 0).all(), tree, names)


def _everywhere(holds, tree, names):
  flags = [
    holds(lax.stop_gradient(x)) for x in filter(_numerics.is_inexact, jax.tree.leaves(tree))
  ] or [jnp.ones((), bool)]
  # Each flag is computed in the pass that makes its leaf. Without the barrier XLA would fuse the
  # one scalar of them all into every array that uses it: compile time grew with the square of the
  # number of leaves.
  holds_here = lax.optimization_barrier(jnp.stack(flags).all())
  others = tuple(sorted(_axes.varying(holds_here).difference(names), key=str))
  if not others:
    return holds_here
  return _collectives.psum((~holds_here).astype(jnp.int32), others) == 0
