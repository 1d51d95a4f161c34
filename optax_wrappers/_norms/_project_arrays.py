"""The projection of an array: finds the update that moves it into its set."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers._core import _axes, _collectives, _numerics
from optax_wrappers._core._types import AxisNames
from optax_wrappers._norms import _rounding, _sets


def project(
  p: jax.Array,
  u: jax.Array | None,
  g: jax.Array | None,
  spec: _sets.Projection | None,
  axes: tuple[int, ...],
  names: AxisNames,
) -> jax.Array | None:
  """The update that moves the variable `p` to the projection of `p + u`; `u` if there is none.

  `axes` are those of a slice, nonnegative, and sharded over those mesh axes `names` over which `p`
  varies. Only slices in which `g`, if given, has a nonzero element are projected.
  """
  if u is None or spec is None:
    return u
  (names,) = _axes.unreduced_names([p], names)
  # An update of a narrower dtype than p + u could not move p precisely enough.
  u = u.astype(_numerics.promote(p.dtype, u.dtype))
  if not jnp.iscomplexobj(p):
    return _project_real(p, u, g, spec, axes, names)
  # Complex numbers as pairs, which are one more axis of a slice.
  axes = *axes, p.ndim
  p, u, g = jax.tree.map(lambda x: jnp.stack([x.real, x.imag], -1), (p, u, g))
  emitted = _project_real(p, u, g, spec, axes, names)
  return lax.complex(emitted[..., 0], emitted[..., 1])


def _project_real(p, u, g, spec, axes, names):
  touched = None
  if g is not None:
    count = jnp.any(g != 0, axes, keepdims=True).astype(jnp.int32)
    touched = _collectives.psum(count, names) > 0
  # The arrays of a projection, which have derivatives; Python numbers stay, in full precision.
  arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, spec)

  def projected(y, arrays):
    now = jax.tree.map(lambda x, array: x if array is None else array, spec, arrays)
    return now.project(y, axes, names, p.dtype)

  # The rounding works on bits and has no derivative; the derivative is that of the projection.
  @jax.custom_jvp
  def emit(p, u, touched, arrays):
    # XLA may recompute u wherever it is used, and fuse its last product with the addition to p in
    # only one of these places. All must use the same u, which the caller adds too.
    u = lax.optimization_barrier(u)
    projection = projected(_rounding.rounded_sum(p, u), arrays)
    changed = projection.changed if touched is None else projection.changed & touched
    # Computed again: if the norm and the projection shared y, XLA would write it to memory.
    y = _rounding.rounded_sum(p, jnp.where(changed, u, jnp.zeros_like(u)))
    steered = _rounding.steer(p, projection.target(y), projection.toward_zero, u.dtype)
    return jnp.where(changed, steered, u), changed

  @emit.defjvp
  def _(primals, tangents):
    p, u, _, arrays = primals
    emitted, changed = emit(*primals)

    def smooth(p, u, arrays):
      wide = _numerics.at_least_float32(u.dtype)
      y = jnp.where(changed, p.astype(wide) + u.astype(wide), 1.0)
      target = projected(y, arrays).target(y)
      return jnp.where(changed, (target - p.astype(wide)).astype(u.dtype), u)

    _, tangent = jax.jvp(smooth, (p, u, arrays), (tangents[0], tangents[1], tangents[3]))
    return (emitted, changed), (tangent, np.zeros(changed.shape, jax.dtypes.float0))

  return emit(p, u, touched, arrays)[0]
