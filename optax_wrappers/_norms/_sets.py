"""The sets onto which parameters are projected: where each lands."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _collectives
from optax_wrappers._core._types import STATIC, AxisNames
from optax_wrappers._norms import _rounding


class Landed(NamedTuple):
  """What a projection says of one variable, all in float64 and bool.

  Attributes:
    changed: which elements are not where they should be; broadcasts against the variable.
    target: where they should be, of a y that is the one projected wherever `changed`.
    toward_zero: the side of target to stay on if it cannot be reached: True nearer to zero, False
      farther from it; None: as near as possible.
  """

  changed: jax.Array
  target: Callable[[jax.Array], jax.Array]
  toward_zero: jax.Array | bool | None


class Projection:
  """Base of the projections. A number in a field may be a schedule, a function of the step.

  Attributes:
    axes: the axes summed inside a norm; None for the whole variable, none at all for what looks at
      single elements.
    takes_complex: whether the set is one of complex numbers too, by their absolute value.
  """

  axes: ClassVar[tuple[int, ...] | None] = ()
  takes_complex: ClassVar[bool] = False

  def land(self, y: jax.Array, axes: tuple[int, ...], names: AxisNames, dtype: Any) -> Landed:
    """Projects `y`, float64 numbers of `dtype`.

    Its summed `axes` are sharded over the mesh axes `names`.
    """
    raise NotImplementedError

  def quick_sizes(self, y: jax.Array, axes: tuple[int, ...], slack: float) -> jax.Array | None:
    """A cheap test in float32: one number for each slice, or None where there is no such test.

    If all are at most 1, every slice is inside the set, and `land` can be skipped.

    Args:
      y: what `land` gets, in its own dtype or float32, and off by a factor of up to `1 + slack /
        2`.
      axes: the summed axes.
      slack: see y.
    """
    del y, axes, slack
    return None

  def is_scheduled(self) -> bool:
    """Whether a field is a schedule."""
    return any(callable(getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]

  def at(self, step: jax.Array) -> "Projection":
    """The projection of one step: schedules replaced by their values."""
    values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
    return type(self)(
      **{name: jnp.asarray(v(step)) if callable(v) else v for name, v in values.items()}
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormRange(Projection):
  """Slices whose L2 norm lies between two bounds; see `min_max_norm`."""

  lower: Any
  upper: Any
  rate: Any
  axes: tuple[int, ...] | None = dataclasses.field(metadata=STATIC)  # type: ignore[misc]

  takes_complex = True

  def land(self, y, axes, names, dtype):
    norm = jnp.sqrt(_collectives.psum(jnp.sum(y * y, axes, keepdims=True), names))
    lower, upper, rate = (_f64(x) for x in (self.lower, self.upper, self.rate))
    # A slice of zeros has no direction to grow in. NaN and inf stay visible.
    # NaN compares as false with everything, so a slice that holds one stays, and is seen.
    changed = ((norm > upper) | ((norm < lower) & (norm > 0))) & jnp.isfinite(norm)
    wanted = rate * jnp.clip(norm, lower, upper) + (1 - rate) * norm
    factor = wanted / jnp.where(changed, norm, 1.0)
    shrinks = factor < 1
    # Where a few ulps of float64 alone keep the product from a point of the grid, it is that point:
    # a clip to 2 can reach 2. The grid of float64 itself is too fine to absorb them, so there the
    # product stays on the inner side.
    slack = -(2.0**-44) if dtype == jnp.float64 else _rounding.SLACK
    factor = factor * jnp.where(shrinks, 1 + slack, 1 - slack)
    return Landed(changed, lambda y: y * factor, toward_zero=self._only_shrinks() or shrinks)

  def quick_sizes(self, y, axes, slack):
    # A sum of n squares is off by at most n ulps, whatever its order, and 8 are more than all else
    # takes; one that overflows is outside.
    room = slack + (math.prod(y.shape[axis] for axis in axes) + 8) * float(
      jnp.finfo(jnp.float32).eps
    )
    if not self._only_shrinks() or room > 0.5:
      return None
    scale = jnp.asarray(1 / self.upper, jnp.float32)
    sizes = jnp.sum(jnp.square(y), axes).astype(jnp.float32) * jnp.square(scale) / (1 - room)
    # Where squares of y or of the scale may underflow, nothing is told to be inside.
    return jnp.where((scale > 1e-18) & (scale < 1e15), sizes, jnp.inf)

  def _only_shrinks(self):
    return _is_static(self.lower) and self.lower == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Box(Projection):
  """Elements between two bounds; see `box`."""

  lower: Any
  upper: Any

  def land(self, y, axes, names, dtype):
    del axes, names
    # The bounds themselves, rounded into the box; a variable is never moved past them.
    lower, upper = jnp.asarray(_f64(self.lower)), jnp.asarray(_f64(self.upper))
    lower = _rounding.toward(lower, dtype, lower < 0)
    upper = _rounding.toward(upper, dtype, upper > 0)
    return Landed(
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

  def land(self, y, axes, names, dtype):
    del dtype
    if names:
      raise ValueError(
        f"l1_ball: the summed axes cannot be sharded inside shard_map, over {names}; project"
        " outside it."
      )
    spec = jax.typeof(y).sharding.spec
    if any(spec[axis] is not None for axis in axes) or (any(spec) and y.ndim - len(axes) > 1):
      raise ValueError(
        f"l1_ball: its slices must lie whole on one device, but the variable is laid out as {spec}"
        " over an Explicit mesh. Replicate it (jax.sharding.reshard), or make the mesh with"
        " AxisType.Auto."
      )
    # In float64, as all projections are.
    radius = _f64(self.radius)
    total = jnp.sum(jnp.abs(y), axes, keepdims=True)
    changed = (total > radius) & jnp.isfinite(total)
    rest = [axis for axis in range(y.ndim) if axis not in axes]
    # Optax's function projects a vector, so slices become rows.
    order = (*rest, *axes)
    slices = jnp.transpose(y, order).reshape(math.prod(y.shape[axis] for axis in rest), -1)
    ball = jax.vmap(lambda row: optax.projections.projection_l1_ball(row, radius * (1 - 2.0**-44)))
    with jax.numpy_dtype_promotion("standard"):  # Optax's own arithmetic promotes
      flat = ball(jnp.where(jnp.isfinite(slices), slices, 0.0))
    target = flat.reshape([y.shape[axis] for axis in order]).transpose(
      [order.index(axis) for axis in range(y.ndim)]
    )
    return Landed(changed, lambda _: target, toward_zero=True)


@dataclasses.dataclass(frozen=True)
class Function(Projection):
  """A function such as those of `optax.projections`, applied to each variable by itself."""

  function: Callable[[jax.Array], jax.Array]

  def is_scheduled(self):
    return False

  def land(self, y, axes, names, dtype):
    del axes, dtype
    if names:
      raise ValueError(
        f"{self.function}: cannot be applied to a variable sharded inside shard_map, over {names}."
      )
    with jax.numpy_dtype_promotion("standard"):  # Optax's own functions promote
      target = jnp.asarray(self.function(y))
    if target.shape != y.shape:
      raise ValueError(
        f"{self.function}: a projection must return an array of the shape that it is given,"
        f" {y.shape}; got {target.shape}."
      )
    return Landed(target != y, lambda _: target, toward_zero=None)


def _is_static(x):
  return not isinstance(x, jax.Array)


def _f64(x):
  return jnp.asarray(x).astype(jnp.float64) if isinstance(x, jax.Array) else jnp.float64(x)
