"""A bound on the norm of the parameters themselves, kept by a projection after the update."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from optax_wrappers import _checks, _collectives, _numerics

Tree = Any


def clip_variables(
  inner: optax.GradientTransformation,
  max_norm: Any,
  axes: int | Sequence[int] | None = None,
  *,
  mask: Tree | Callable[[Tree], Tree] | None = None,
  axis_name: _collectives.AxisName = None,
  only_touched: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Projects the updated parameters onto a ball: no slice has an L2 norm above `max_norm` after the update.

  With `y = params + inner(updates)`, a slice whose norm `||y||` is above `max_norm` (M) becomes `y M / ||y||`. The
  emitted update of a clipped slice is chosen so that the bound holds after `optax.apply_updates` has rounded, in the
  parameters' own dtype; a slice inside the ball gets the inner update bit for bit. Norms are taken in float64. The
  inner state is not told about the clip. NaN and inf pass through as they are.

  Args:
    inner: the optimizer to wrap. Its state is the state.
    max_norm: the bound M on each slice, above 0; a number, or a scalar array.
    axes: the axes summed inside the norm, negative ones counted from the end. None: the whole variable; `()`: each
      element; `1` or `(1,)`: each row of a matrix.
    mask: as in `optax.masked`: bools, a prefix of the parameters' structure, or a function from the parameters to them.
      Only variables with True are clipped. Wrap twice for two bounds.
    axis_name: inside shard_map, the mesh axes that shard the summed axes. Leaves that their types show to be replicated
      over them are not counted twice; where types are not tracked, mask them. Outside shard_map jit needs no name.
    only_touched: clip only the slices that have a non-zero element in the updates given to this wrapper.

  Returns:
    The wrapped optimizer. update needs params.

  Raises:
    ValueError: for a `max_norm` not above 0; at init, for an axis out of range for a variable or a mask of another
      structure; in update, for missing params or an axis name that is not bound.
    TypeError: for axes or a mask of a wrong type, and for integer variables that are not masked out.

  Extra args: all reach `inner`.

  **Communication**: with `axis_name` one float64 for each slice per step, else none.

  Example:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.clip_variables(optax.sgd(3.0), max_norm=2.0, axes=1)
    >>> params = jnp.array([[0.0, 1.0], [2.0, 3.0]])
    >>> updates, _ = tx.update(jnp.full((2, 2), 0.1), tx.init(params), params)
    >>> print(optax.apply_updates(params, updates))
    [[-0.3        0.7      ]
     [ 1.0656265  1.6924657]]

  Source: tf.contrib.opt.VariableClippingOptimizer.
  """
  wrapper = "clip_variables"
  max_norm = _checks.number(wrapper, "max_norm", max_norm, lambda x: x > 0, "above 0")
  given_axes = None
  if axes is not None:
    axis_list = axes if isinstance(axes, Sequence) else (axes,)
    given_axes = tuple(_checks.integer(wrapper, "axes", axis) for axis in axis_list)
  names = _collectives.axis_names(axis_name)
  inner = optax.with_extra_args_support(inner)

  def chosen(params):
    """For each leaf of params the axes summed inside its norm, or None if it is not clipped."""
    flags = _flatten_mask(wrapper, mask, params)
    paths = [(f"params{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(params)]
    for (name, leaf), flag in zip(paths, flags, strict=True):
      if flag:
        _checks.inexact_leaves(wrapper, leaf, name)
    return [
      _summed_axes(wrapper, name, given_axes, jnp.ndim(leaf)) if flag else None
      for (name, leaf), flag in zip(paths, flags, strict=True)
    ]

  def init_fn(params):
    chosen(params)
    return inner.init(params)

  def update_fn(updates, state, params=None, **extra_args):
    _checks.params_given(wrapper, params)
    _collectives.require_bound(names, wrapper)
    if only_touched:
      _checks.same_shapes(wrapper, updates, params)
    treedef = jax.tree.structure(params)
    new_updates, state = inner.update(updates, state, params, **extra_args)

    def clip(p, g, u, summed):
      if summed is None or u is None:
        return u
      return clip_leaf(p, u, g if only_touched else None, max_norm, summed, _collectives.unreduced_names(p, names))

    columns = (jax.tree.leaves(params), treedef.flatten_up_to(updates), treedef.flatten_up_to(new_updates))
    return treedef.unflatten(map(clip, *columns, chosen(params))), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def clip_leaf(
  p: jax.Array, u: jax.Array, g: jax.Array | None, max_norm: Any, axes: tuple[int, ...], names: _collectives.AxisNames
) -> jax.Array:
  """The update that takes `p` to where `u` would, or, slice by slice, onto the ball if that is outside.

  Args:
    p: the variable.
    u: the update that would be added to it.
    g: where given, only slices in which it has a non-zero element are clipped.
    max_norm: the radius of the ball.
    axes: the axes summed inside the norm, not negative.
    names: the mesh axes over which these axes are sharded.
  """
  if jnp.issubdtype(p.dtype, jnp.complexfloating):  # a complex number is a pair inside the norm
    clipped = clip_leaf(_pair(p), _pair(u), None if g is None else _pair(g), max_norm, (*axes, p.ndim), names)
    return lax.complex(clipped[..., 0], clipped[..., 1])

  emitted = _numerics.promote(p.dtype, u.dtype)  # of a narrower dtype, p + u could not be steered
  touched = None if g is None else _any(g != 0, axes, names)
  static_norm = None if isinstance(max_norm, jax.Array) else max_norm

  # The rounding below has no derivative of its own; the clip that it rounds has.
  @jax.custom_jvp
  def project(p, u, touched, max_norm):
    with jax.enable_x64(True):
      radius = _to_f64(max_norm) if static_norm is None else static_norm
      landed = _landing(p, u)
      norm = _norm(landed, axes, names)
      outside = (norm > radius) & jnp.isfinite(norm)
      if touched is not None:
        outside &= touched
      steered = _steer(p, _target(landed, radius / jnp.where(outside, norm, 1.0), p.dtype), emitted)
      return jnp.where(outside, steered, _to_f64(u)).astype(emitted), outside

  @project.defjvp
  def _(primals, tangents):
    p, u, _, max_norm = primals
    emitted_update, outside = project(*primals)

    def smooth(p, u, max_norm):
      with jax.enable_x64(True):
        radius = _to_f64(max_norm) if static_norm is None else static_norm
        moved = _to_f64(p) + _to_f64(u)
        safe = jnp.where(outside, moved, 1.0)
        clipped = safe * (radius / _norm(safe, axes, names)) - _to_f64(p)
        return jnp.where(outside, clipped, _to_f64(u)).astype(emitted)

    _, tangent = jax.jvp(smooth, (p, u, max_norm), (tangents[0], tangents[1], tangents[3]))
    return (emitted_update, outside), (tangent, np.zeros(outside.shape, jax.dtypes.float0))

  update, _ = project(p, u, touched, max_norm if static_norm is None else None)
  return update


def _pair(x):
  return jnp.stack([x.real, x.imag], -1)


def _to_f64(x):
  return x.astype(jnp.float64)


def _any(flags, axes, names):
  return _collectives.psum(jnp.any(flags, axes, keepdims=True).astype(jnp.int32), names) > 0


def _norm(x, axes, names):
  return jnp.sqrt(_collectives.psum(jnp.sum(x * x, axes, keepdims=True), names))


def _landing(p, u):
  """Where `optax.apply_updates` puts `p + u`, in float64: rounded to the dtype of the sum, then to that of `p`."""
  total = _to_f64(p) + _to_f64(u)
  return _round(_round(total, _numerics.promote(p.dtype, u.dtype)), p.dtype)


def _target(landed, shrink, dtype):
  """`landed * shrink` on the grid of `dtype`, rounded towards zero, for shrink < 1.

  The product is off by a few float64 ulps. Where they alone keep it from a point of the grid, it is that point (a clip
  to 2 must be able to reach 2); the grid of float64 itself is too fine for that, so there it stays this side.
  """
  if dtype == jnp.float64:
    return landed * (shrink * (1 - 2.0**-44))
  return _round(landed * (shrink * (1 + 2.0**-50)), dtype, away=False)


def _steer(p, target, dtype):
  """An update on the grid of `dtype` that takes `p` onto `target` or, where no such number exists, nearer to zero.

  `target - p` is rounded so that the exact sum does not pass `target` away from zero; the rounded sum does not either,
  because rounding is monotone and `target` is on the grid. A sum that lands beyond `-target` becomes zero.
  """
  p = _to_f64(p)
  step = target - p
  if dtype == jnp.float64:  # there the difference above is what was rounded, one way or the other
    step = jnp.where(jnp.abs(p + step) > jnp.abs(target), jnp.nextafter(step, -jnp.sign(target) * jnp.inf), step)
  else:
    step = _round(step, dtype, away=(step < 0) == (target > 0))
  limit = float(jnp.finfo(dtype).max)
  step = jnp.clip(step, -limit, limit)
  reach = jnp.abs(target) * (1 + 2.0**-50)  # XLA may fuse float64 target's product into the difference
  return jnp.where((jnp.abs(p + step) <= reach) & (target != 0), step, -p)


def _round(x, dtype, away=None):
  """Rounds float64 to the grid of `dtype`: to nearest even, or the magnitude up where `away` and down elsewhere.

  On the bits, because XLA may drop a conversion to a narrower dtype and back.
  """
  info = jnp.finfo(dtype)
  extra = 52 - info.nmant  # mantissa bits that the narrower dtype has no room for
  if not extra:
    return x
  bits = lax.bitcast_convert_type(x, jnp.uint64)
  ulp = jnp.uint64(1 << extra)
  steps = x / float(info.smallest_subnormal)
  if away is None:
    is_odd = (bits >> jnp.uint64(extra)) & jnp.uint64(1)
    bits = bits + (ulp // jnp.uint64(2) - jnp.uint64(1) + is_odd)
    steps = jnp.round(steps)
  else:
    bits = bits + jnp.where(away, ulp - jnp.uint64(1), jnp.uint64(0))
    steps = jnp.where(away, jnp.sign(steps) * jnp.ceil(jnp.abs(steps)), jnp.trunc(steps))
  rounded = lax.bitcast_convert_type(bits & ~(ulp - jnp.uint64(1)), jnp.float64)
  return jnp.where(jnp.abs(x) < float(info.smallest_normal), steps * float(info.smallest_subnormal), rounded)


def _summed_axes(wrapper: str, name: str, axes: tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
  """`axes` of one variable, not negative."""
  if axes is None:
    return tuple(range(ndim))
  for axis in axes:
    if not -ndim <= axis < ndim:
      raise ValueError(
        f"{wrapper}: axes must be axes of every clipped variable, but {axis} is out of range for {name} with {ndim}"
        f" axes. Leave it out with mask=lambda params: jax.tree.map(lambda p: p.ndim > {max(axis, -axis - 1)}, params)."
      )
  summed = tuple(axis % ndim for axis in axes)
  if len(set(summed)) != len(summed):
    raise ValueError(f"{wrapper}: axes must not name an axis twice, got {axes} for {name} with {ndim} axes.")
  return summed


def _flatten_mask(wrapper: str, mask: Any, params: Tree) -> list[bool]:
  """One bool for each leaf of `params`."""
  leaves, treedef = jax.tree.flatten(params)
  if mask is None or not leaves:
    return [True] * len(leaves)
  mask = mask(params) if callable(mask) else mask
  try:
    flags = jax.tree.leaves(jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), mask, params))
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{wrapper}: mask must have the structure of the parameters, or a prefix of it; got {jax.tree.structure(mask)}"
      f" for parameters {treedef}."
    ) from error
  for flag in flags:
    if not isinstance(flag, bool | np.bool_):
      raise TypeError(f"{wrapper}: mask must hold Python bools, got {flag!r} of type {type(flag).__name__}.")
  return [bool(flag) for flag in flags]
