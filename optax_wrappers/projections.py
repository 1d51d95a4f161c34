"""Projections of parameters, for `project_variables`.

Each maps a variable, slice by slice, to the nearest point of a set. `axes` are the axes summed
inside a norm; None: the whole variable. A bound is a number, a scalar array, or a schedule of the
step. Bounds and axes of another kind raise a TypeError, bounds out of range a ValueError.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import optax

from optax_wrappers._core import _checks, _paths
from optax_wrappers._core._types import Tree
from optax_wrappers._norms import _chosen
from optax_wrappers._norms._chosen import ByName
from optax_wrappers._norms._sets import Box, L1Ball, NormRange, Projection

Axes: TypeAlias = int | Sequence[int] | None

__all__ = [
  "ByName",
  "box",
  "chosen",
  "l1_ball",
  "linf_ball",
  "max_norm",
  "min_max_norm",
  "non_negative",
  "unit_norm",
]


def max_norm(limit: optax.ScalarOrSchedule, axes: Axes = None) -> Projection:
  """Slices of L2 norm at most `limit`, above 0: Keras's `MaxNorm`, `torch.renorm` with p = 2.

  Unlike with Keras's, slices inside the ball stay bit for bit as they are.
  """
  limit = _bound("max_norm", "limit", limit, lambda x: x > 0, "above 0")
  return NormRange(0.0, limit, 1.0, _checks.axes("max_norm", axes))


def unit_norm(axes: Axes = None) -> Projection:
  """Slices of L2 norm 1 along `axes`: Keras's `UnitNorm`. A slice of zeros stays as it is."""
  return NormRange(1.0, 1.0, 1.0, _checks.axes("unit_norm", axes))


def min_max_norm(
  lower: optax.ScalarOrSchedule,
  upper: optax.ScalarOrSchedule,
  rate: optax.ScalarOrSchedule = 1.0,
  axes: Axes = None,
) -> Projection:
  """Slices of L2 norm between two bounds: Keras's `MinMaxNorm`. A slice of zeros stays as it is.

  A slice of norm n outside the bounds gets the norm `rate clip(n, lower, upper) + (1 - rate) n`,
  with `lower` at least 0, `upper` above 0 and not below `lower`, and `rate`, the part of the way to
  go in one step, in (0, 1].
  """
  name = "min_max_norm"
  lower = _bound(name, "lower", lower, lambda x: x >= 0, "at least 0")
  upper = _bound(name, "upper", upper, lambda x: x > 0, "above 0")
  rate = _bound(name, "rate", rate, lambda x: 0 < x <= 1, "in (0, 1]")
  _in_order(name, lower, upper)
  return NormRange(lower, upper, rate, _checks.axes(name, axes))


def box(lower: optax.ScalarOrSchedule, upper: optax.ScalarOrSchedule) -> Projection:
  """Elements from `lower`, maybe minus infinity, to `upper`, not below it and maybe infinity."""
  lower = _bound("box", "lower", lower, lambda x: x < math.inf, "below infinity")
  upper = _bound("box", "upper", upper, lambda x: x > -math.inf, "above minus infinity")
  _in_order("box", lower, upper)
  return Box(lower, upper)


def non_negative() -> Projection:
  """Elements not below zero: Keras's `NonNeg`."""
  return Box(0.0, math.inf)


def l1_ball(radius: optax.ScalarOrSchedule, axes: Axes = None) -> Projection:
  """Slices whose absolute values sum to at most `radius`, above 0: Optax's `projection_l1_ball`."""
  radius = _bound("l1_ball", "radius", radius, lambda x: x > 0, "above 0")
  return L1Ball(radius, _checks.axes("l1_ball", axes))


def linf_ball(radius: optax.ScalarOrSchedule) -> Projection:
  """Elements of absolute value at most `radius`, which is above 0."""
  radius = _bound("linf_ball", "radius", radius, lambda x: x > 0, "above 0")
  if callable(radius):
    return Box(lambda step: -radius(step), radius)
  return Box(-radius, radius)


def chosen(projection: Any, params: Tree) -> dict[str, Projection]:
  """The variables that a projection takes, and the projection of each.

  Args:
    projection: as in `project_variables`.
    params: the parameters, concrete or abstract.

  Returns:
    The projection of each variable that is projected, by its path.
  """
  specs = _chosen.for_each_leaf("contrib.chosen", projection, params)
  named = _paths.named_leaves(params)
  return {path: spec for (path, _), spec in zip(named, specs, strict=True) if spec is not None}


def _bound(name, argument, value, holds, needed):
  """A number for which `holds`, or a schedule, whose values are not checked."""
  return value if callable(value) else _checks.number(name, argument, value, holds, needed)


def _in_order(name, lower, upper):
  is_known = not any(callable(x) or isinstance(x, jax.core.Tracer) for x in (lower, upper))
  if is_known and lower > upper:
    raise ValueError(f"{name}: lower must not be above upper, got {lower} and {upper}.")
