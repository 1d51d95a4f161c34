"""Sums under plain `jit` that XLA has not reduced yet: unreduced arrays of Explicit mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from optax_wrappers._core import _axes, _numerics
from optax_wrappers._core._types import AxisName, Tree


def reduced(tree: Tree, axis_name: AxisName) -> Tree:
  """Marks parameters so that `jax.grad` under plain `jit` leaves the sum over devices pending.

  XLA reduces a gradient where it is computed: once for each micro-batch. The gradient of
  `reduced(params, axis_name)` is *unreduced*: each device keeps its part of the sum. With a state
  from `tx.init(reduced(params, axis_name))`, `gather_towers` adds these parts and reduces them
  once, in the last call of a step. It is `per_shard` for plain `jit`.

  JAX has such types on Explicit mesh axes only, and rules for matrix products and look-ups. A bias
  or a scale is broadcast first, `jnp.broadcast_to(bias, shape, out_sharding=...)`, or left unmarked
  in both calls: then its gradient is reduced in each.

  Args:
    tree: any pytree of arrays on a mesh, or under `jax.set_mesh`. Integers stay as they are.
    axis_name: the Explicit mesh axis or axes that divide the batch; None does nothing.

  Returns:
    The same values, typed as `reduced={axis_name}`.

  Raises:
    ValueError: for a leaf on a mesh without such an Explicit axis, or on none.

  **Communication**: none; an all-gather of a leaf that is sharded over these axes.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    >>> tx = ow.gather_towers(optax.sgd(1.0), 2)
    >>> @jax.jit
    ... def step(w, state, x):
    ...   grad = jax.grad(lambda w: jnp.mean(x @ w))(ow.reduced(w, "data"))
    ...   updates, state = tx.update(grad, state, w)
    ...   return optax.apply_updates(w, updates), state
    >>> with jax.set_mesh(mesh):
    ...   w = jnp.zeros((2, 1))
    ...   state = tx.init(ow.reduced(w, "data"))
    ...   for scale in (1.0, 3.0):
    ...     x = jax.device_put(scale * jnp.arange(8.0).reshape(4, 2), P("data"))
    ...     w, state = step(w, state, x)
    >>> print(w.T)
    [[-6. -8.]]
  """
  names = _axes.axis_names(axis_name)
  if not names:
    return tree

  def mark(path, x):
    if not _numerics.is_inexact(x):
      return x
    mesh = _mesh(x)
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    for name in names:
      if types.get(name) != AxisType.Explicit:
        raise ValueError(_not_explicit(path, name, types.get(name)))
    spec = jax.typeof(x).sharding.spec
    parts = (_without(part, names) for part in _partitions(spec))
    spec = PartitionSpec(*parts, reduced=frozenset(names) | spec.reduced)
    return reshard(x, NamedSharding(mesh, spec))

  return jax.tree.map_with_path(mark, tree)


def _not_explicit(path, name, kind):
  what = f"reduced: tree{jax.tree_util.keystr(path)} needs a mesh with an Explicit axis {name!r}"
  if kind is None:
    return f"{what}, got none. Place it on the mesh, or call this under jax.set_mesh(mesh)."
  if kind == AxisType.Manual:
    return f"{what}, got a Manual one. Inside shard_map use per_shard(params, {name!r})."
  return (
    f"{what}, got an Auto one, for which JAX has no type of a pending sum. Pass axis_types="
    "(AxisType.Explicit,) to jax.make_mesh, or use shard_map and per_shard."
  )


def of_gradients(x: jax.Array) -> frozenset[str]:
  """The axes over which gradients with respect to `x` are pending sums."""
  return jax.typeof(x).sharding.spec.reduced


def pending(x: jax.Array) -> frozenset[str]:
  """The axes over which `x` is a pending sum."""
  return jax.typeof(x).sharding.spec.unreduced


def plain(x: jax.Array) -> jax.Array:
  """What `reduced` has marked, without the mark."""
  return reshard(x, _layout(x)) if _numerics.is_inexact(x) and of_gradients(x) else x


def zeros_like(x: jax.Array, dtype: Any = None) -> jax.Array:
  """`jnp.zeros_like`: pending sums for these or, of a marked parameter, for its gradients."""
  axes = pending(x) | of_gradients(x)
  if not axes:
    return jnp.zeros_like(x, dtype=dtype)
  # Outside jit jnp.zeros_like has no rule for a pending sum.
  return jnp.zeros(x.shape, dtype or x.dtype, out_sharding=_layout(x, unreduced=axes))


def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
  """`_numerics.scale` of a pending sum."""
  if jax.__version_info__ < (0, 10, 2):
    what = "gather_towers: weight of an unreduced gradient needs JAX 0.10.2"
    raise ValueError(f"{what}, got {jax.__version__}. Differentiate without reduced(...).")
  # JAX multiplies a pending sum only by a factor that is marked.
  marked = reshard(factor.astype(x.dtype), _layout(factor, x, reduced=pending(x)))
  return lax.cond(factor == 0, lambda: zeros_like(x), lambda: x * marked)


def reduce(total: jax.Array, like: jax.Array) -> jax.Array:
  """A pending sum, reduced to the layout of its parameter: an all-reduce, or a reduce-scatter."""
  has_mesh = not jax.typeof(like).sharding.mesh.empty
  return reshard(total, _layout(like if has_mesh else total))


def require_type(wrapper: str, path: Any, update: jax.Array, total: jax.Array) -> None:
  """Raises unless both are pending over the same axes."""
  given, needed = pending(update), pending(total)
  if given == needed:
    return
  names = tuple(sorted(needed or given))
  marked = f"reduced(params, {(names[0] if len(names) == 1 else names)!r})"
  mend = f"Differentiate {marked}" if needed else f"Make the state by tx.init({marked})"
  raise ValueError(
    f"{wrapper}: updates{jax.tree_util.keystr(path)} is {jax.typeof(update)}, but the state"
    f" accumulates {jax.typeof(total)}. {mend}, or mark the parameters in neither."
  )


def _mesh(x):
  mesh = jax.typeof(x).sharding.mesh
  return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def _layout(x, on=None, **marks):
  """The layout of an array without marks, or with other ones."""
  return NamedSharding(
    _mesh(x if on is None else on),
    PartitionSpec(*_partitions(jax.typeof(x).sharding.spec), **marks),
  )


def _partitions(spec):
  # JAX 0.10 has no `partitions`, and newer ones refuse to iterate over a spec with marks.
  return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def _without(part, names):
  if part is None or isinstance(part, str):
    return None if part in names else part
  return tuple(name for name in part if name not in names) or None
