"""The sets onto which parameters are projected, and the projections."""

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


class Projected(NamedTuple):
  """The projection of one variable."""

  # bool, the elements that must change; broadcasts against the variable.
  changed: jax.Array
  # Their targets, float64, computed from a y that equals the y given to `project` wherever
  # `changed`.
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
    """Projects `y`, float64 numbers of `dtype`, whose `axes` are sharded over mesh axes `names`."""
    raise NotImplementedError

  def quick_sizes(self, y: jax.Array, axes: tuple[int, ...], slack: float) -> jax.Array | None:
    """A cheap test: one float32 per slice; if all are at most 1, `project` can be skipped.

    `y` is float32 or wider, and off by a factor of up to `1 + slack / 2`. None: no test.
    """
    return None


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
    norm = jnp.sqrt(_collectives.psum(jnp.sum(y * y, axes, keepdims=True), names))
    lower, upper, rate = (_f64(x) for x in (self.lower, self.upper, self.rate))
    # A slice of zeros has no direction in which to grow. A slice with NaN or inf stays, and is
    # visible.
    changed = ((norm > upper) | ((norm < lower) & (norm > 0))) & jnp.isfinite(norm)
    # Keras's MinMaxNorm.
    wanted = rate * jnp.clip(norm, lower, upper) + (1 - rate) * norm
    factor = wanted / jnp.where(changed, norm, 1.0)
    shrinks = factor < 1
    # A product within a few ulps of float64 of a grid point becomes that point, so that a clip to 2
    # can reach 2. The grid of float64 itself is too fine for this, so there the product stays on
    # the inner side.
    slack = -(2.0**-44) if dtype == jnp.float64 else 2.0**-50
    factor = factor * jnp.where(shrinks, 1 + slack, 1 - slack)
    return Projected(changed, lambda y: y * factor, toward_zero=self._only_shrinks() or shrinks)

  def quick_sizes(self, y, axes, slack):
    # A sum of n squares is off by at most n ulps, in any order; 8 more cover everything else. A sum
    # that overflows counts as outside.
    num_ulps = math.prod(y.shape[axis] for axis in axes) + 8
    room = slack + num_ulps * float(jnp.finfo(jnp.float32).eps)
    if not self._only_shrinks() or room > 0.5:
      return None
    scale = jnp.asarray(1 / self.upper, jnp.float32)
    sizes = jnp.sum(jnp.square(y), axes).astype(jnp.float32) * jnp.square(scale) / (1 - room)
    # If squares of y or of the scale may underflow, nothing counts as inside.
    return jnp.where((scale > 1e-18) & (scale < 1e15), sizes, jnp.inf)

  def _only_shrinks(self):
    return not isinstance(self.lower, jax.Array) and self.lower == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Box(Projection):
  """Elements between two bounds; see `box`."""

  lower: Any
  upper: Any

  def project(self, y, axes, names, dtype):
    # Rounded into the box, so that no variable crosses a bound.
    lower, upper = jnp.asarray(_f64(self.lower)), jnp.asarray(_f64(self.upper))
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
    radius = _f64(self.radius)
    total = jnp.sum(jnp.abs(y), axes, keepdims=True)
    changed = (total > radius) & jnp.isfinite(total)
    # Optax's function projects a vector, so slices become rows.
    last = tuple(range(-len(axes), 0))
    moved = jnp.moveaxis(y, axes, last)
    slices = moved.reshape(math.prod(moved.shape[: y.ndim - len(axes)]), -1)
    ball = jax.vmap(lambda row: optax.projections.projection_l1_ball(row, radius * (1 - 2.0**-44)))
    # Optax's own arithmetic promotes.
    with jax.numpy_dtype_promotion("standard"):
      flat = ball(jnp.where(jnp.isfinite(slices), slices, 0.0))
    target = jnp.moveaxis(flat.reshape(moved.shape), last, axes)
    return Projected(changed, lambda _: target, toward_zero=True)


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
    return Projected(target != y, lambda _: target, toward_zero=None)


def _f64(x):
  return jnp.asarray(x).astype(jnp.float64) if isinstance(x, jax.Array) else jnp.float64(x)
