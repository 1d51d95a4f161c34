"""The sets onto which parameters are projected, and the projections."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core._types import STATIC, AxisNames
from optax_wrappers._norms import _lengths, _rounding
from optax_wrappers._norms._lengths import UNIT


class Projected(NamedTuple):
  """The projection of one variable."""

  # bool, the elements that must change; broadcasts against the variable.
  changed: jax.Array
  # Their targets, computed from a y that equals the y given to `project` wherever `changed`.
  target: Callable[[jax.Array], jax.Array]
  # The side of a target that cannot be reached: True nearer to zero, False farther from it. None:
  # as near as possible.
  toward_zero: jax.Array | bool | None


class Projection:
  """Base of the projections. A number in a field may be a schedule, a function of the step.

  Attributes:
    axes: the axes summed inside a norm; None: the whole variable; `()`: single elements.
    takes_complex: whether complex numbers are projected too, by their absolute value.
  """

  axes: ClassVar[tuple[int, ...] | None] = ()
  takes_complex: ClassVar[bool] = False

  def project(self, y: jax.Array, axes: tuple[int, ...], names: AxisNames, dtype: Any) -> Projected:
    """Projects `y`, numbers of `dtype` in float32 or wider.

    Its `axes` are sharded over mesh axes `names`.
    """
    raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormRange(Projection):
  """Slices with an L2 norm between two bounds; see `min_max_norm`."""

  lower: Any
  upper: Any
  rate: Any
  axes: tuple[int, ...] | None = dataclasses.field(metadata=STATIC)  # type: ignore[misc]

  takes_complex = True

  def project(self, y, axes, names, dtype):
    low, high = (None if isinstance(x, jax.Array) else x for x in (self.lower, self.upper))
    norms = _lengths.lengths(y, axes, names, least=high if low == 0 and high else 0.0)
    near, room = _margins(norms.half_ulps, y.dtype)
    is_sphere = low is not None and low == high
    if is_sphere:
      near, room = -near, 0.0
    # In units of UNIT, and rounded to the inner side.
    upper = _rounding.bound(self.upper / UNIT, y.dtype, up=False)
    lower = _rounding.bound(self.lower / UNIT, y.dtype, up=True)
    root = norms.root / UNIT
    # A slice of zeros has no direction in which to grow. A slice with NaN or inf stays, and is
    # visible.
    above = root > _times(upper, 1 - near) * norms.scale
    below = (root < _times(lower, 1 + near) * norms.scale) & (norms.root > 0)
    highest = _times(upper, 1 - room)
    wanted = jnp.where(above, highest, jnp.minimum(_times(lower, 1 + room), highest))

    def target(y):
      # Keras's MinMaxNorm.
      inside = norms.resized(y, wanted)
      if not isinstance(self.rate, jax.Array) and self.rate == 1:
        return inside
      rate = jnp.asarray(self.rate, y.dtype)
      return rate * inside + (1 - rate) * y

    side = None if is_sphere else low == 0 or above
    return Projected((above | below) & jnp.isfinite(norms.root), target, side)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Box(Projection):
  """Elements between two bounds; see `box`."""

  lower: Any
  upper: Any

  def project(self, y, axes, names, dtype):
    # Rounded into the box, so that no variable crosses a bound.
    lower = jnp.asarray(_rounding.bound(self.lower, y.dtype, up=True))
    upper = jnp.asarray(_rounding.bound(self.upper, y.dtype, up=False))
    lower = _rounding.toward(lower, dtype, lower < 0)
    upper = _rounding.toward(upper, dtype, upper > 0)
    return Projected(
      changed=(y < lower) | (y > upper),
      target=lambda y: jnp.where(jnp.isnan(y), y, jnp.clip(y, lower, upper)),
      toward_zero=jnp.where(y > upper, upper > 0, lower < 0),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class L1Ball(Projection):
  """Slices whose absolute values sum to at most a bound; see `l1_ball`."""

  radius: Any
  axes: tuple[int, ...] | None = dataclasses.field(metadata=STATIC)  # type: ignore[misc]

  def project(self, y, axes, names, dtype):
    if names:
      raise ValueError(f"l1_ball: the summed axes cannot be sharded inside shard_map, got {names}.")
    spec = jax.typeof(y).sharding.spec
    if any(spec[axis] is not None for axis in axes) or (any(spec) and y.ndim - len(axes) > 1):
      raise ValueError(
        f"l1_ball: each slice must be whole on one device, got {spec}. Use jax.sharding.reshard."
      )
    # Relative to the largest element, so that no sum overflows.
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(y)), axes, keepdims=True, initial=0)
    largest = jnp.where(largest == 0, 1, largest)
    radius = _rounding.bound(self.radius, y.dtype, up=False) / largest

    def sum_of(y):
      return _lengths.pair_sums([jnp.abs(jax.lax.stop_gradient(y))], axes)[0]

    near, room = _margins(_lengths.half_ulps_of_sum(y, axes), y.dtype)
    total = sum_of(y / largest)
    changed = (total > radius * (1 - near)) & jnp.isfinite(total)
    ball = jax.vmap(optax.projections.projection_l1_ball)

    def target(y):
      # Optax's function projects a vector, so slices become rows.
      last = tuple(range(-len(axes), 0))
      moved = jnp.moveaxis(jnp.where(changed, y / largest, 0.0), axes, last)
      # Optax's own arithmetic promotes.
      with jax.numpy_dtype_promotion("standard"):
        rows = ball(moved.reshape(radius.size, -1), radius.ravel())
      nearest = jnp.moveaxis(rows.reshape(moved.shape), last, axes)
      # Its sums are in the order that XLA takes, so the result may be outside by some ulps.
      total = sum_of(nearest)
      inner = jnp.minimum(radius * (1 - room) / jnp.where(total == 0, 1, total), 1)
      return nearest * inner * largest

    return Projected(changed, target, toward_zero=True)


@dataclasses.dataclass(frozen=True)
class Function(Projection):
  """A function such as those of `optax.projections`, applied to each variable separately."""

  function: Callable[[jax.Array], jax.Array]

  def project(self, y, axes, names, dtype):
    if names:
      raise ValueError(f"{self.function}: cannot take a variable that is sharded over {names}.")
    # Optax's own functions promote.
    with jax.numpy_dtype_promotion("standard"):
      target = jnp.asarray(self.function(y))
    if target.shape != y.shape:
      raise ValueError(
        f"{self.function}: must return an array of the shape that it is given, {y.shape}; got"
        f" {target.shape}."
      )
    target = target.astype(y.dtype)
    return Projected(target != y, lambda _: target, toward_zero=None)


def _margins(half_ulps, dtype):
  """What a norm may be below its bound and still be taken for outside; and where it lands below.

  A sum of squares is off by `half_ulps`, its root by half of that. On any device 4 half ulps are
  enough for the root and the bound, and 9 for these, a quotient and two products. One more, so that
  what has landed is found inside. None: norms are exact.
  """
  if half_ulps is None:
    return 0.0, 0.0
  half = float(jnp.finfo(dtype).eps) / 2
  return (half_ulps / 2 + 4) * half, (half_ulps / 2 + 10) * half


def _times(bound, factor):
  """The bound times a factor near 1, as a constant for a constant bound."""
  return bound if factor == 1 else bound * bound.dtype.type(factor)
