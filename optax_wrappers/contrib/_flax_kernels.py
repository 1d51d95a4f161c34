"""Projections by the names of variables, and of the usual layers of Flax."""

from collections.abc import Callable, Sequence
from typing import Any

from optax_wrappers import projections
from optax_wrappers.projections import chosen as chosen


def by_path(choose: Callable[[str, Any], Any]) -> projections.ByName:
  """A projection for each variable, chosen by its path and itself.

  Args:
    choose: from `(path, leaf)` to a projection, or to None to leave the variable alone. A path
      reads `hidden/kernel`; the leaf has at least a shape and a dtype.

  Examples:
    >>> import optax, optax_wrappers as ow
    >>> from optax_wrappers import projections
    >>> ball = projections.max_norm(2.0, axes=0)
    >>> choose = lambda path, leaf: ball if path.endswith("kernel") else None
    >>> tx = ow.project_variables(optax.sgd(0.1), ow.contrib.by_path(choose))
  """
  return projections.ByName(lambda named: [choose(path, leaf) for path, leaf in named])


def flax_kernels(
  make: Callable[[tuple[int, ...]], Any], stacked_axes: Any = None
) -> projections.ByName:
  """A projection for the weights of a Flax model's usual layers, one slice for each output unit.

  | Leaf | Shape | A slice is | axes |
  |---|---|---|---|
  | `kernel` of a Dense | `[in, out]` | the incoming weights of a unit | `(0,)` |
  | `kernel` of a Conv | `[..., in, out]` | one filter | all but the last |
  | `query`, `key`, `value` of an attention | `[in, heads, head_dim]` | those of a unit | `(0,)` |
  | `out` of an attention | `[heads, head_dim, out]` | the incoming weights of a unit | `(0, 1)` |
  | `embedding` | `[num_embeddings, features]` | one row | `(1,)` |
  | any of these, by `nn.scan`, `nnx.vmap` | `[layers, ...]` | the same, of one layer | one more |

  The shapes of kernel and bias decide: a bias has the axes of the layers and of the units. Without
  a bias a kernel of more than two axes is known only in an attention or a 1-D Conv; for other Convs
  pass `stacked_axes`. Other leaves, such as biases, are left alone; `chosen` says which are taken.

  Args:
    make: from the axes of a slice to the projection, such as `lambda axes: max_norm(2.0, axes)`.
    stacked_axes: the axes that stack layers, where shapes do not show it: ints, `()` for none, or a
      function from the path to these or to None, which leaves it to the shapes.

  Raises:
    ValueError: at init, for a kernel or an embedding that fits none of these layers, or several.
  """

  def choose(named):
    shapes = {path: tuple(leaf.shape) for path, leaf in named}
    specs = []
    for path, leaf in named:
      axes = _incoming_axes(path, shapes, _stacked(stacked_axes, path, len(leaf.shape)))
      specs.append(None if axes is None else make(axes))
    return specs

  return projections.ByName(choose)


def _stacked(stacked_axes, path, ndim):
  """The axes of a variable that stack layers; None if not given."""
  axes = stacked_axes(path) if callable(stacked_axes) else stacked_axes
  if axes is None:
    return None
  axes = axes if isinstance(axes, Sequence) else (axes,)
  for axis in axes:
    if isinstance(axis, bool) or not isinstance(axis, int):
      raise TypeError(f"flax_kernels: stacked_axes must be ints, got {axes!r}.")
  return tuple(axis % ndim if ndim else axis for axis in axes)


_ATTENTION = ("query", "key", "value", "out")


def _incoming_axes(path, shapes, stacked):
  """The axes of one slice of a kernel or an embedding; None for other leaves."""
  shape, name = shapes[path], path.rpartition("/")[2]
  if name not in ("kernel", "embedding") or len(shape) < 2:
    return None
  axes = [axis for axis in range(len(shape)) if axis not in (stacked or ())]
  if name == "kernel":
    readings = _readings_of_kernel(path, shapes, axes, stacked)
  else:
    # A slice of an embedding is a row, whatever the number of units.
    readings = {(1,)} if len(axes) == 2 else set()
  if len(readings) != 1:
    how = f"could be read in {len(readings)} ways as" if readings else "has no reading as"
    raise ValueError(
      f"flax_kernels: {path} of shape {list(shape)} {how} a Dense, Conv,"
      " embedding or attention projection. Pass stacked_axes, or choose with by_path."
    )
  return tuple(axes[axis] for axis in readings.pop())


def _readings_of_kernel(path, shapes, kept, stacked):
  """The possible readings of a kernel, by its shape, its bias's and its siblings'."""
  parent = path.rpartition("/")[0]
  module = parent.rpartition("/")[2]
  shape = [shapes[path][axis] for axis in kept]
  bias = shapes.get(f"{parent}/bias".lstrip("/"))
  units = bias and tuple(size for axis, size in enumerate(bias) if axis not in (stacked or ()))
  readings = _readings(shape, units, module.lower(), is_stacked_known=stacked is not None)
  if len(kept) < 3 or not _is_attention(parent, module, shapes):
    return readings
  # [in, heads, head_dim], or for `out` [heads, head_dim, out]; axes before these stack layers.
  first = len(kept) - 3
  known = (first, first + 1) if module == "out" else (first,)
  if bias is not None and known not in readings:
    return readings
  return {known} if stacked is None or not first else set()


def _is_attention(parent, module, shapes):
  """A module named `query` may be anything; with its three siblings it is Flax's attention."""
  siblings = [f"{parent.rpartition('/')[0]}/{name}/kernel".lstrip("/") for name in _ATTENTION]
  return module in _ATTENTION and all(kernel in shapes for kernel in siblings)


def _readings(shape, units, module, is_stacked_known):
  """The readings of a kernel as `[layers..., incoming..., units...]`: the axes of one slice."""
  # Its kernel may be [..., out, in].
  if "transpose" in module and shape[-1] == shape[-2]:
    return set()
  if units is None:
    return _readings_without_bias(shape, module, is_stacked_known)
  readings = set()
  for num_layers in range(1 if is_stacked_known else len(units)):
    last = len(shape) - (len(units) - num_layers)
    # The bias is [layers..., units...]: the kernel must begin and end with its axes.
    layers_fit = tuple(shape[:num_layers]) == units[:num_layers]
    units_fit = tuple(shape[last:]) == units[num_layers:]
    if num_layers < last and layers_fit and units_fit:
      readings.add(tuple(range(num_layers, last)))
  return readings


def _readings_without_bias(shape, module, is_stacked_known):
  # Nothing else determines the number of unit axes.
  is_conv = "conv" in module and "local" not in module
  is_known = len(shape) == 2 or (is_conv and (is_stacked_known or len(shape) == 3))
  return {tuple(range(len(shape) - 1))} if is_known else set()
