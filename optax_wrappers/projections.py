"""Projections of parameters, for `project_variables`.

Each is the nearest point of a set, slice by slice: `axes` are the axes summed inside a norm, as in
`clip_variables`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_wrappers import _checks, _collectives, _paths, _rounding
from optax_wrappers._types import AxisNames, Tree

Axes = int | Sequence[int] | None


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
    """Projects `y`, float64 on the grid of `dtype`; its summed `axes` are sharded over the mesh
    axes `names`."""
    raise NotImplementedError

  def quick_sizes(self, y: jax.Array, axes: tuple[int, ...], slack: float) -> jax.Array | None:
    """Float32 numbers that are all at most 1 only if `land` changes nothing; None where they are no
    quicker than it.

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


@dataclasses.dataclass(frozen=True)
class NormRange(Projection):
  """Slices whose L2 norm lies between two bounds; see `min_max_norm`."""

  lower: Any
  upper: Any
  rate: Any
  axes: tuple[int, ...] | None  # type: ignore[misc]

  takes_complex = True

  def land(self, y, axes, names, dtype):
    norm = jnp.sqrt(_collectives.psum(jnp.sum(y * y, axes, keepdims=True), names))
    lower, upper, rate = (_f64(x) for x in (self.lower, self.upper, self.rate))
    # A slice of zeros has no direction to grow in. NaN and inf stay visible.
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


@dataclasses.dataclass(frozen=True)
class Box(Projection):
  """Elements between two bounds; see `box`."""

  lower: Any
  upper: Any

  def land(self, y, axes, names, dtype):
    del axes, names
    # The bounds themselves, rounded into the box; a variable is never moved past them.
    lower, upper = jnp.asarray(_f64(self.lower)), jnp.asarray(_f64(self.upper))
    lower, upper = (
      _rounding.to_grid(lower, dtype, lower < 0),
      _rounding.to_grid(upper, dtype, upper > 0),
    )
    return Landed(
      changed=(y < lower) | (y > upper),
      target=lambda y: jnp.where(jnp.isnan(y), y, jnp.clip(y, lower, upper)),
      toward_zero=jnp.where(y > upper, upper > 0, lower < 0),
    )


@dataclasses.dataclass(frozen=True)
class L1Ball(Projection):
  """Slices whose absolute values sum to at most a bound; see `l1_ball`."""

  radius: Any
  axes: tuple[int, ...] | None  # type: ignore[misc]

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
    radius = _f64(self.radius)
    total = jnp.sum(jnp.abs(y), axes, keepdims=True)
    changed = (total > radius) & jnp.isfinite(total)
    rest = [axis for axis in range(y.ndim) if axis not in axes]
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


@dataclasses.dataclass(frozen=True)
class ByPath:
  """Chooses a projection for each variable; see `by_path`."""

  choose: Callable[[str, Any], Any]

  def specs(self, wrapper: str, named: list[tuple[str, Any]]) -> list[Any]:
    """What is chosen for each of the named leaves of a tree."""
    del wrapper
    return [self.choose(path, leaf) for path, leaf in named]


@dataclasses.dataclass(frozen=True)
class FlaxKernels(ByPath):
  """Chooses the weights of Flax's layers; see `flax_kernels`."""

  stacked_axes: Any

  def specs(self, wrapper, named):
    shapes = {path: tuple(leaf.shape) for path, leaf in named}

    def spec(path):
      axes = _incoming_axes(wrapper, path, shapes, self._stacked(path, len(shapes[path])))
      return None if axes is None else self.choose(path, axes)

    return [spec(path) for path, _ in named]

  def _stacked(self, path, ndim):
    """The axes of a variable that stack layers; None if nothing was said."""
    axes = self.stacked_axes(path) if callable(self.stacked_axes) else self.stacked_axes
    return (
      None
      if axes is None
      else tuple(axis % ndim if ndim else axis for axis in _axes("flax_kernels", axes) or ())
    )


for _class, _static in ((NormRange, ["axes"]), (Box, []), (L1Ball, ["axes"])):
  _data = [field.name for field in dataclasses.fields(_class) if field.name not in _static]
  jax.tree_util.register_dataclass(_class, data_fields=_data, meta_fields=_static)


def max_norm(limit: Any, axes: Axes = None) -> Projection:
  """Slices of L2 norm at most `limit`: Keras's `MaxNorm`, `torch.renorm` with p = 2.

  Unlike Keras's, slices inside the ball are left bit for bit as they are.

  Args:
    limit: the bound, above 0; a number, a scalar array or a schedule.
    axes: the axes summed inside the norm.

  Returns:
    The projection.

  Raises:
    ValueError, TypeError: for a limit not above 0, or axes that are no ints.
  """
  limit = _bound("max_norm", "limit", limit, lambda x: x > 0, "above 0")
  return NormRange(0.0, limit, 1.0, _axes("max_norm", axes))


def unit_norm(axes: Axes = None) -> Projection:
  """Slices of L2 norm 1: Keras's `UnitNorm`. A slice of zeros stays as it is.

  Args:
    axes: the axes summed inside the norm.

  Returns:
    The projection.
  """
  return NormRange(1.0, 1.0, 1.0, _axes("unit_norm", axes))


def min_max_norm(lower: Any, upper: Any, rate: Any = 1.0, axes: Axes = None) -> Projection:
  """Slices of L2 norm between two bounds: Keras's `MinMaxNorm`. A slice of zeros stays as it is.

  A slice of norm n outside the bounds gets the norm `rate * clip(n, lower, upper) + (1 - rate) *
  n`.

  Args:
    lower: at least 0; a number, a scalar array or a schedule.
    upper: above 0 and not below `lower`; likewise.
    rate: the part of the way to go in one step, in (0, 1]; likewise.
    axes: the axes summed inside the norm.

  Returns:
    The projection.

  Raises:
    ValueError, TypeError: for numbers out of range.
  """
  name = "min_max_norm"
  lower = _bound(name, "lower", lower, lambda x: x >= 0, "at least 0")
  upper = _bound(name, "upper", upper, lambda x: x > 0, "above 0")
  rate = _bound(name, "rate", rate, lambda x: 0 < x <= 1, "in (0, 1]")
  _in_order(name, lower, upper)
  return NormRange(lower, upper, rate, _axes(name, axes))


def box(lower: Any, upper: Any) -> Projection:
  """Elements between two bounds.

  Args:
    lower: a number, a scalar array or a schedule; may be minus infinity.
    upper: not below `lower`; likewise, may be infinity.

  Returns:
    The projection.

  Raises:
    ValueError, TypeError: for bounds in the wrong order, or no numbers.
  """
  lower = _bound("box", "lower", lower, lambda x: x < math.inf, "below infinity")
  upper = _bound("box", "upper", upper, lambda x: x > -math.inf, "above minus infinity")
  _in_order("box", lower, upper)
  return Box(lower, upper)


def non_negative() -> Projection:
  """Elements not below zero: Keras's `NonNeg`."""
  return Box(0.0, math.inf)


def l1_ball(radius: Any, axes: Axes = None) -> Projection:
  """Slices whose absolute values sum to at most `radius`, by
  `optax.projections.projection_l1_ball`.

  Args:
    radius: above 0; a number, a scalar array or a schedule.
    axes: the axes summed.

  Returns:
    The projection.

  Raises:
    ValueError, TypeError: for a radius not above 0, or axes that are no ints.
  """
  return L1Ball(
    _bound("l1_ball", "radius", radius, lambda x: x > 0, "above 0"), _axes("l1_ball", axes)
  )


def l2_ball(radius: Any, axes: Axes = None) -> Projection:
  """Slices of L2 norm at most `radius`: another name of `max_norm`."""
  return max_norm(radius, axes)


def linf_ball(radius: Any) -> Projection:
  """Elements of size at most `radius`, above 0; a number, a scalar array or a schedule."""
  radius = _bound("linf_ball", "radius", radius, lambda x: x > 0, "above 0")
  if callable(radius):
    return Box(lambda step: -radius(step), radius)
  return Box(-radius, radius)


def by_path(choose: Callable[[str, Any], Any]) -> ByPath:
  """A projection for each variable, chosen by its path and itself.

  Args:
    choose: `(path, leaf)` to a projection, or None to leave the variable alone. A path reads
      `hidden/kernel`; the leaf has at least a shape and a dtype.

  Returns:
    What `project_variables` takes as its projection.

  Examples:
    >>> import optax, optax_wrappers as ow
    >>> from optax_wrappers import projections
    >>> ball = projections.max_norm(2.0, axes=0)
    >>> choose = lambda path, leaf: ball if path.endswith("kernel") else None
    >>> tx = ow.project_variables(optax.sgd(0.1), projections.by_path(choose))
  """
  return ByPath(choose)


def flax_kernels(make: Callable[[tuple[int, ...]], Any], stacked_axes: Any = None) -> ByPath:
  """A projection for the weights of a Flax model's usual layers, one slice for each output unit.

  | Leaf | Shape | A slice is | axes |
  |---|---|---|---|
  | `kernel` of a Dense | `[in, out]` | the incoming weights of a unit | `(0,)` |
  | `kernel` of a Conv | `[..., in, out]` | one filter | all but the last |
  | `query`, `key`, `value` of an attention | `[in, heads, head_dim]` | those of a unit | `(0,)` |
  | `out` of an attention | `[heads, head_dim, out]` | the incoming weights of a unit | `(0, 1)` |
  | `embedding` | `[num_embeddings, features]` | one row | `(1,)` |
  | any of these, by `nn.scan`, `nnx.vmap` | `[layers, ...]` | the same, of one layer | one more |

  Which it is follows from the shapes of kernel and bias: the bias has the axes of the layers and of
  the units. A kernel of more than two axes without a bias is known if it is one of an attention's
  four. Where shapes allow two readings nothing is guessed. Other leaves, such as biases and scales,
  are left alone; `chosen` says which were taken. The paths of NNX models are alike in all their
  forms: `hidden/kernel`, split or not.

  Args:
    make: from the axes of a slice to the projection, such as `lambda axes: max_norm(2.0, axes)`.
    stacked_axes: the axes that stack layers, for kernels and embeddings that do not show it: ints,
      `()` for none, or a function from the path to them, with None where nothing is said.

  Returns:
    What `project_variables` takes as its projection. At init it raises a ValueError, with the path,
    for a kernel or an embedding that is not provably one of these.
  """
  return FlaxKernels(lambda path, axes: make(axes), stacked_axes)


_ATTENTION = ("query", "key", "value", "out")


def _incoming_axes(wrapper, path, shapes, stacked):
  """The axes of one slice of a kernel or an embedding; None for other leaves."""
  parent, _, name = path.rpartition("/")
  outer, _, module = parent.rpartition("/")
  shape = shapes[path]
  if name not in ("kernel", "embedding") or len(shape) < 2:
    return None
  kept = [axis for axis in range(len(shape)) if axis not in (stacked or ())]

  def of_kept(summed):
    return tuple(kept[axis] for axis in summed)

  if name == "embedding":
    found = {(1,)} if len(kept) == 2 else set()
  else:
    siblings = [f"{outer}/{other}/kernel".lstrip("/") for other in _ATTENTION]
    is_attention = (
      module in _ATTENTION and all(other in shapes for other in siblings) and len(kept) > 2
    )
    bias = shapes.get(f"{parent}/bias".lstrip("/"))
    units = (
      None
      if bias is None
      else tuple(size for axis, size in enumerate(bias) if axis not in (stacked or ()))
    )
    found = _readings(
      [shape[axis] for axis in kept], units, module.lower(), is_stacked_known=stacked is not None
    )
    if is_attention:
      first = len(kept) - 3
      known = (first, first + 1) if module == "out" else (first,)
      if bias is None or known in found:
        found = {known} if stacked is None or not first else set()
  if len(found) != 1:
    how = "has no reading as" if not found else f"could be read in {len(found)} ways as"
    raise ValueError(
      f"{wrapper}: projections.flax_kernels: {path} of shape {list(shape)} {how} a Dense, Conv,"
      " embedding or attention projection. Say which axes stack layers, stacked_axes=() if none"
      " do, or choose this variable's axes with projections.by_path."
    )
  return of_kept(found.pop())


def _readings(shape, units, module, is_stacked_known):
  """The ways to read a kernel, each as the axes of one slice: `[layers..., incoming...,
  units...]`."""
  if "transpose" in module and shape[-1] == shape[-2]:  # its kernel may be [..., out, in]
    return set()
  if units is None:
    is_conv = "conv" in module and "local" not in module and (is_stacked_known or len(shape) == 3)
    return {tuple(range(len(shape) - 1))} if is_conv or len(shape) == 2 else set()
  found = set()
  for num_layers in range(1 if is_stacked_known else len(units)):
    first, last = num_layers, len(shape) - (len(units) - num_layers)
    fits = tuple(shape[:first]) == units[:first] and tuple(shape[last:]) == units[first:]
    if first < last and fits:
      found.add(tuple(range(first, last)))
  return found


def chosen(projection: Any, params: Tree) -> dict[str, Projection]:
  """Which variables a projection takes, and what it does to each.

  Args:
    projection: as in `project_variables`.
    params: the parameters, or abstract values of them.

  Returns:
    From the path of each variable that is projected to its projection.

  Raises:
    ValueError, TypeError: as `project_variables` at init.

  Examples:
    >>> import jax.numpy as jnp
    >>> from optax_wrappers import projections
    >>> params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
    >>> kernels = projections.flax_kernels(lambda axes: projections.max_norm(2.0, axes))
    >>> projections.chosen(kernels, params)
    {'dense/kernel': NormRange(lower=0.0, upper=2.0, rate=1.0, axes=(0,))}
  """
  specs = for_each_leaf("projections.chosen", projection, params)
  named = _paths.named_leaves(params)
  return {path: spec for (path, _), spec in zip(named, specs, strict=True) if spec is not None}


def for_each_leaf(wrapper: str, projection: Any, params: Tree) -> list[Projection | None]:
  """The projection of each leaf of `params`; None for a leaf that is left alone."""
  named = _paths.named_leaves(params)
  if isinstance(projection, ByPath):
    specs = projection.specs(wrapper, named)
  elif named:
    specs = _spread(wrapper, projection, params)
  else:
    specs = []
  found: list[Projection | None] = []
  for (path, _), spec in zip(jax.tree.leaves_with_path(params), specs, strict=True):
    if spec is not None and not isinstance(spec, Projection):
      if not callable(spec):
        name = f"params{jax.tree_util.keystr(path)}"
        raise TypeError(
          f"{wrapper}: projection for {name} must be a projection, a function or None; got"
          f" {spec!r}."
        )
      spec = Function(spec)
    found.append(spec)
  return found


def summed_axes(
  wrapper: str, name: str, axes: tuple[int, ...] | None, ndim: int
) -> tuple[int, ...]:
  """`axes` of one variable, none of them negative."""
  if axes is None:
    return tuple(range(ndim))
  for axis in axes:
    if not -ndim <= axis < ndim:
      raise ValueError(
        f"{wrapper}: axes must be axes of every variable, but {axis} is out of range for {name}"
        f" with {ndim} axes. Leave it out, for example with mask=lambda params:"
        f" jax.tree.map(lambda p: p.ndim > {max(axis, -axis - 1)}, params)."
      )
  summed = tuple(axis % ndim for axis in axes)
  if len(set(summed)) != len(summed):
    raise ValueError(
      f"{wrapper}: axes must not name an axis twice, got {axes} for {name} with {ndim} axes."
    )
  return summed


def _spread(wrapper, projection, params):
  """A prefix of the structure of `params` with projections for leaves, as one projection for each
  leaf."""

  def is_spec(x):
    return x is None or isinstance(x, Projection) or callable(x)

  def spread(spec, part):
    return [spec] * len(jax.tree.leaves(part))

  try:
    parts = jax.tree.map(
      spread, _paths.unboxed(projection), _paths.unboxed(params), is_leaf=is_spec
    )
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{wrapper}: projection must be one projection, or have the structure of the parameters or a"
      f" prefix of it; got {projection!r} for parameters {jax.tree.structure(params)}."
    ) from error
  return [
    spec for part in jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, list)) for spec in part
  ]


def _is_static(x):
  return not isinstance(x, jax.Array)


def _f64(x):
  return jnp.asarray(x).astype(jnp.float64) if isinstance(x, jax.Array) else jnp.float64(x)


def _bound(name, argument, value, holds, needed):
  """A number that holds, or a schedule of such."""
  return value if callable(value) else _checks.number(name, argument, value, holds, needed)


def _in_order(name, lower, upper):
  is_known = not any(callable(x) or isinstance(x, jax.core.Tracer) for x in (lower, upper))
  if is_known and lower > upper:
    raise ValueError(f"{name}: lower must not be above upper, got {lower} and {upper}.")


def _axes(name, axes):
  if axes is None:
    return None
  return tuple(
    _checks.integer(name, "axes", axis)
    for axis in (axes if isinstance(axes, Sequence) else (axes,))
  )
