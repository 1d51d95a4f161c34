"""Which projection each parameter gets: one for all, a tree of them, by path, or by layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from optax_wrappers._core import _checks, _paths
from optax_wrappers._core._types import Tree
from optax_wrappers._norms import _sets


@dataclasses.dataclass(frozen=True)
class ByPath:
  """Chooses a projection for each variable; see `by_path`."""

  choose: Callable[[str, Any], Any]

  def specs(self, wrapper: str, named: list[tuple[str, Any]]) -> list[Any]:
    """The projection of each of the named leaves."""
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
    """The axes of a variable that stack layers; None if not given."""
    axes = self.stacked_axes(path) if callable(self.stacked_axes) else self.stacked_axes
    if axes is None:
      return None
    return tuple(axis % ndim if ndim else axis for axis in _checks.axes("flax_kernels", axes))


_ATTENTION = ("query", "key", "value", "out")


def _incoming_axes(wrapper, path, shapes, stacked):
  """The axes of one slice of a kernel or an embedding; None for other leaves."""
  shape, name = shapes[path], path.rpartition("/")[2]
  if name not in ("kernel", "embedding") or len(shape) < 2:
    return None
  kept = [axis for axis in range(len(shape)) if axis not in (stacked or ())]
  if name == "kernel":
    found = _readings_of_kernel(path, shapes, kept, stacked)
  else:
    # A slice of an embedding is a row, whatever the number of units.
    found = {(1,)} if len(kept) == 2 else set()
  if len(found) != 1:
    how = f"could be read in {len(found)} ways as" if found else "has no reading as"
    raise ValueError(
      f"{wrapper}: projections.flax_kernels: {path} of shape {list(shape)} {how} a Dense, Conv,"
      " embedding or attention projection. Pass stacked_axes, or choose with projections.by_path."
    )
  return tuple(kept[axis] for axis in found.pop())


def _readings_of_kernel(path, shapes, kept, stacked):
  """The possible readings of a kernel, by its shape, its bias's and its siblings'."""
  parent = path.rpartition("/")[0]
  module = parent.rpartition("/")[2]
  shape = [shapes[path][axis] for axis in kept]
  bias = shapes.get(f"{parent}/bias".lstrip("/"))
  units = bias and tuple(size for axis, size in enumerate(bias) if axis not in (stacked or ()))
  found = _readings(shape, units, module.lower(), is_stacked_known=stacked is not None)
  # A module named `query` may be anything; with its three siblings it is Flax's attention.
  siblings = [f"{parent.rpartition('/')[0]}/{name}/kernel".lstrip("/") for name in _ATTENTION]
  is_attention = module in _ATTENTION and all(kernel in shapes for kernel in siblings)
  if len(kept) < 3 or not is_attention:
    return found
  # [in, heads, head_dim], or for `out` [heads, head_dim, out]; axes before these stack layers.
  first = len(kept) - 3
  known = (first, first + 1) if module == "out" else (first,)
  if bias is not None and known not in found:
    return found
  return {known} if stacked is None or not first else set()


def _readings(shape, units, module, is_stacked_known):
  """The readings of a kernel as `[layers..., incoming..., units...]`: the axes of one slice."""
  if "transpose" in module and shape[-1] == shape[-2]:  # its kernel may be [..., out, in]
    return set()
  if units is None:
    return _readings_without_bias(shape, module, is_stacked_known)
  found = set()
  for num_layers in range(1 if is_stacked_known else len(units)):
    last = len(shape) - (len(units) - num_layers)
    # The bias is [layers..., units...]: the kernel must begin and end with its axes.
    layers_fit = tuple(shape[:num_layers]) == units[:num_layers]
    units_fit = tuple(shape[last:]) == units[num_layers:]
    if num_layers < last and layers_fit and units_fit:
      found.add(tuple(range(num_layers, last)))
  return found


def _readings_without_bias(shape, module, is_stacked_known):
  # Nothing else determines the number of unit axes.
  is_conv = "conv" in module and "local" not in module
  is_known = len(shape) == 2 or (is_conv and (is_stacked_known or len(shape) == 3))
  return {tuple(range(len(shape) - 1))} if is_known else set()


def for_each_leaf(wrapper: str, projection: Any, params: Tree) -> list[_sets.Projection | None]:
  """The projection of each leaf of `params`; None for a leaf that is not projected."""
  named = _paths.named_leaves(params)
  if isinstance(projection, ByPath):
    specs = projection.specs(wrapper, named)
  else:
    specs = _checks.spread(wrapper, "projection", projection, params, _is_spec) if named else []
  for (path, _), spec in zip(jax.tree.leaves_with_path(params), specs, strict=True):
    if not _is_spec(spec):
      raise TypeError(
        f"{wrapper}: projection for params{jax.tree_util.keystr(path)} must be a projection,"
        f" a function or None; got {spec!r}."
      )
  return [x if isinstance(x, _sets.Projection | None) else _sets.Function(x) for x in specs]


def _is_spec(x):
  return isinstance(x, _sets.Projection | None) or _checks.is_function(x)
