"""Compressed exchanges with error feedback: what is not sent now is stored and sent later.

Shard i sends the code of `u_i = g_i + beta e_i`, where `g_i` is its contribution to a sum, and
keeps the residual, `e_i <- u_i - decode(encode(u_i))`. All leaves travel together, as bytes.

With two shards, or sparse codes, every shard receives all codes. With more, each shard owns a part
of each leaf: it receives the codes of that part, adds them and its residual of that part, sends the
code of the sum to all, and uses that code itself too. Parts are shares (`_shares`) with equal
numbers of whole positions; the few remaining positions are sent uncompressed.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers import codecs
from optax_wrappers._core import (
  _axes,
  _branches,
  _checks,
  _collectives,
  _numerics,
  _pods,
  _shares,
  _states,
)
from optax_wrappers._core._metrics import length
from optax_wrappers._core._states import OfParams
from optax_wrappers._core._types import Tree
from optax_wrappers._shards._codes import Parts, added, decoded, encoded


@_states.dataclass
class CompressedState(_states.State):
  """What a compressed exchange keeps. Trees have the updates' structure, None where it is exact.

  Attributes:
    residual: what was not sent yet of this shard's contributions, in units of the result; float32,
      each shard's own though parameters are replicated; None without feedback.
    owner_residual: the same of the sums of this shard's part of each leaf, a share, from
      `stack_workers`; None for codecs that never encode sums again.
    memory: the linear codec's, one value for all; None for other codecs.
    step: exchanges so far, int32 scalar; None without `compression(after=)`.
  """

  residual: Tree = _states.field("summed")
  owner_residual: Tree = _states.field("divided")
  memory: Tree = _states.field("shared")
  step: jax.Array | None = _states.field("shared")

  def metrics(self, of_params: OfParams) -> dict[str, Any]:
    """See `State`."""
    is_known = of_params is not None and self.residual is not None
    return {"residual_norm": length(self.residual, of_params)} if is_known else {}


def settings(codec: Any) -> codecs.Compression:
  """The settings of a codec, bare or not."""
  if isinstance(codec, codecs.Compression):
    return codec
  return codecs.compression(codec, feedback=getattr(codec, "feedback", "none") != "none")


@dataclasses.dataclass(frozen=True)
class Compressor:
  """`codecs.Compression`, checked, with the function's name for errors; `decay` is beta."""

  wrapper: str
  codec: Any
  feedback: bool
  only: Any
  after: int
  decay: Any

  @classmethod
  def make(cls, wrapper: str, codec: Any) -> "Compressor | None":
    return None if codec is None else cls(wrapper, *settings(codec))

  @property
  def is_linear(self) -> bool:
    return isinstance(self.codec, codecs.LinearCodec)

  def flags(self, tree: Tree) -> list[bool]:
    """For each leaf of a tree of the parameters' shapes, whether it is compressed."""

    def is_for(leaf):
      # In float32, a float64 would lose the precision that it is used for.
      dtype = _numerics.dtype_of(leaf)
      is_real = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 32
      return is_real and self.codec.applies_to(jnp.shape(leaf))

    flags = [is_for(leaf) for leaf in jax.tree.leaves(tree)]
    if self.only is None:
      return flags
    mask = self.only(tree) if _checks.is_function(self.only) else self.only
    kinds = _checks.is_a(bool, np.bool_)
    chosen = _checks.spread(self.wrapper, "only", mask, tree, kinds, "Python bools")
    return [bool(is_chosen) and flag for is_chosen, flag in zip(chosen, flags, strict=True)]

  def start(self, params: Tree, flags: list[bool]) -> CompressedState:
    leaves, treedef = jax.tree.flatten(params)

    def zeros():
      residuals = (jnp.zeros_like(x, jnp.float32) if f else None for x, f in zip(leaves, flags))
      return treedef.unflatten(residuals)

    recodes = not self.is_linear and self.codec.recodes is not False
    shapes = [jnp.shape(x) for x, flag in zip(leaves, flags) if flag]
    return CompressedState(
      residual=zeros() if self.feedback else None,
      owner_residual=zeros() if self.feedback and recodes else None,
      memory=self.codec.init(shapes) if self.is_linear else None,
      step=jnp.zeros((), jnp.int32) if self.after else None,
    )

  def check_kept(self, kept: Any, tree: Tree, flags: list[bool]) -> None:
    """Raises for a state of another codec or other arguments."""
    if not isinstance(kept, CompressedState):
      raise TypeError(f"{self.wrapper}: state.compressed must be a CompressedState, got {kept!r}.")
    expected = jax.eval_shape(lambda tree: self.start(tree, flags), tree)
    for name, value in expected.fields().items():
      found = getattr(kept, name)
      is_memory = name == "memory"  # residuals may be shares
      kinds = [(jax.tree.structure(x), is_memory and _shapes(x)) for x in (value, found)]
      if kinds[0] != kinds[1]:
        raise ValueError(
          f"{self.wrapper}: the state was made for another codec, other arguments, or parameters of"
          f" another structure than the updates have: {name} must be {value}, got {found}. Leave"
          " parameters that are not trained to optax.partition or optax.masked."
        )

  def sum_tree(self, tree, kept, names, is_void):
    """The `sum` of every leaf; uncompressed leaves are summed exactly."""
    flags = self.flags(tree)
    self.check_kept(kept, tree, flags)
    leaves, treedef = jax.tree.flatten(tree)
    # A single shard sends nothing, and so encodes nothing.
    flags = [flag and lax.axis_size(names) > 1 for flag in flags]
    parts = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    sums, kept = self.sum(parts, treedef, kept, names, is_void)
    exact = [None if flag else leaf for leaf, flag in zip(leaves, flags)]
    totals = _collectives.psum(exact, names)
    return treedef.unflatten(t if x is None else x for x, t in zip(sums, totals)), kept

  def sum(self, parts, treedef, kept, names, is_void):
    """The sums over the shards of `names` (at least two), and the new state.

    `parts` are this shard's, float32, and None for uncompressed leaves. With `is_void` no shard
    contributes: the sums are zero, and the state does not change.
    """
    flags = [part is not None for part in parts]
    if not any(flags):  # all of them are sent exactly
      return list(parts), kept
    held = self._of_leaves(kept, flags, treedef)
    sums, new = self._after_exact(jax.tree.leaves(parts), held, names, kept.step)
    if is_void is not None:
      sums = [jnp.where(is_void, 0.0, x) for x in sums]
      new = _numerics.select(is_void, held, new)
    # The new state has the types of the old one.
    new = _axes.vary_like(new, held)
    return _merged(parts, flags, sums), self._write(kept, new, flags, treedef, is_void)

  def coded(self, tree, kept, is_void):
    """What one shard sends if another takes the sum, codes or exact leaves; and the new state."""
    flags = self.flags(tree)
    self.check_kept(kept, tree, flags)
    leaves, treedef = jax.tree.flatten(tree)
    held = self._of_leaves(kept, flags, treedef)
    wanted = self._wanted(list(itertools.compress(leaves, flags)), held.residual)
    # Of an Explicit mesh's arrays, whose parts a codec cannot cut, the whole on each device.
    codes = [encoded(self.codec, _axes.undivided(u, u.ndim).ravel()) for u in wanted]
    if held.residual is not None:
      sent = _axes.laid_out_like(list(map(self._decoded, codes, wanted)), wanted)
      rests = list(map(_rest, wanted, sent))
      held = held.replace(residual=_numerics.select(is_void, held.residual, rests))
    return _merged(leaves, flags, codes), self._write(kept, held, flags, treedef, is_void)

  def read(self, parts, tree):
    """The decoded arrays of `coded`, in the shapes of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = zip(parts, leaves, self.flags(tree), strict=True)
    return treedef.unflatten(
      self._decoded(part, leaf) if flag else part for part, leaf, flag in columns
    )

  def _of_leaves(self, kept, flags, treedef):
    """The state of these leaves: lists of their residuals, and the memory."""

    def column(tree):
      if tree is None:
        return None
      return list(itertools.compress(treedef.flatten_up_to(tree), flags))

    residual, owner_residual = column(kept.residual), column(kept.owner_residual)
    return kept.replace(residual=residual, owner_residual=owner_residual, step=None)

  def _write(self, kept, new, flags, treedef, is_void):
    """The state with the new one of these leaves."""

    def tree(before, values):
      if before is None:
        return None
      return treedef.unflatten(_merged(treedef.flatten_up_to(before), flags, values))

    step = kept.step
    if step is not None:
      counted = 1 if is_void is None else (~is_void).astype(jnp.int32)
      step = _numerics.saturating_add(step, counted)
    residual = tree(kept.residual, new.residual)
    owner_residual = tree(kept.owner_residual, new.owner_residual)
    return new.replace(residual=residual, owner_residual=owner_residual, step=step)

  def _after_exact(self, parts, held, names, step):
    """The compressed exchange, or an exact one while `step` is below `after`."""
    coded = functools.partial(self._coded, parts, held, names)
    if step is None:
      return coded()
    _axes.require_equal(step, self.wrapper, "CompressedState.step", axes=frozenset(names))

    def exact():
      # An exact sum leaves no new residual. The state gets the types of the other branch.
      sums = _collectives.psum(parts, names)
      return sums, _axes.vary_like(held, jax.eval_shape(coded)[1])

    what = "CompressedState.step"
    return _branches.cond(step < self.after, exact, lambda _: coded(), self.wrapper, what)

  def _coded(self, parts, held, names):
    """`_exchange` with the derivative of an exact sum, because rounding has none."""

    @jax.custom_jvp
    def coded(parts, held):
      return self._exchange(parts, held, names)

    @coded.defjvp
    def _(primals, tangents):
      sums, new = coded(*primals)
      changes = _collectives.psum(tangents[0], names)
      return (sums, new), (changes, jax.tree.map(_no_tangent, new))

    return coded(parts, held)

  def _exchange(self, parts, held, names):
    wanted = _axes.to_varying(self._wanted(parts, held.residual), names)
    owners, memory = held.owner_residual, held.memory
    if self.is_linear:
      # The factors of a matrix are not those of its parts. They travel in a plain all-reduce.
      how = _pods.by_device if self.codec.divisible else _pods.at_once
      sums, sent, _, memory = how(self._linear, names, wanted, None, memory)
    elif self._recodes(names):
      size = lax.axis_size(names)
      mend = "stack_workers(state, num_shards), for data parallel shards with replicated=True"
      for x, f in zip(wanted, owners or ()):
        _shares.require_share(self.wrapper, "owner_residual", f, x.shape, size, mend)
      sums, sent, owners, _ = _pods.by_device(self._cut_or_whole, names, wanted, owners, None)
    else:
      sums, sent, _, _ = _pods.by_device(self._gathered, names, wanted, None, None)
    residual = held.residual and list(map(_rest, wanted, sent))
    return sums, held.replace(residual=residual, owner_residual=owners, memory=memory)

  def _wanted(self, parts, residual):
    """The quantity to encode: u_i = g_i + beta e_i."""
    if residual is None:
      return parts
    if not (isinstance(self.decay, float) and self.decay == 1):
      residual = [_numerics.times(self.decay, e) for e in residual]
    return list(map(jnp.add, parts, residual))

  def _recodes(self, names):
    recodes = self.codec.recodes
    return lax.axis_size(names) > 2 if recodes is None else recodes

  def _decoded(self, code, like):
    return decoded(self.codec, code, like.size).reshape(like.shape)

  # Three kinds of exchange, each from `(names, leaves, shares, memory)` to the sums, what this
  # shard's codes added to them, and the new shares and memory, for `_pods.by_device`.

  def _gathered(self, names, leaves, shares, memory):
    """Every shard sends its codes to all."""
    codes = [encoded(self.codec, leaf.ravel()) for leaf in leaves]
    everyone = _collectives.send_flat(codes, lambda x: _collectives.all_gather(x, names))
    pairs = zip(everyone, leaves)
    sums = [added(self.codec, code, leaf.size).reshape(leaf.shape) for code, leaf in pairs]
    return sums, list(map(self._decoded, codes, leaves)), shares, memory

  def _linear(self, names, leaves, shares, memory):
    """Codes are summed without decoding."""
    total = functools.partial(_collectives.psum, names=names)
    result = self.codec.reduce(total, leaves, memory)
    shapes = _shapes(leaves), _shapes(leaves), _shapes(memory)
    # A codec may be the user's own.
    if not isinstance(result, tuple) or tuple(map(_shapes, result)) != shapes:
      raise ValueError(
        f"{self.codec.name}: reduce must return the sums and this shard's parts, lists of the"
        f" shapes {shapes[0]}, and the memory in its own shapes {shapes[2]}; got {_shapes(result)}."
      )
    sums, sent, new = result
    if not self.feedback:
      sums = [x * self.codec.gain for x in sums]
    # A NaN is visible once, but must not stay.
    remembered = jax.tree.map(lambda n, old: jnp.where(jnp.isfinite(n).all(), n, old), new, memory)
    return sums, sent, shares, remembered

  def _cut_or_whole(self, names, leaves, residuals, memory):
    """`_by_owners` of all leaves; leaves too small for one part per shard are sent uncompressed."""
    plans = [Parts.of(leaf.shape, lax.axis_size(names)) for leaf in leaves]
    flags = [plan.length > 0 for plan in plans]
    columns = plans, leaves, residuals
    cut = (column and list(itertools.compress(column, flags)) for column in columns)
    sums, sent, new = self._by_owners(*cut, names)
    whole = [None if flag else self._exactly(leaf) for leaf, flag in zip(leaves, flags)]
    totals = jax.tree.map(self._exactly, _collectives.psum(whole, names))
    residuals = residuals and _merged(residuals, flags, new)
    return _merged(totals, flags, sums), _merged(whole, flags, sent), residuals, memory

  def _by_owners(self, plans, leaves, residuals, names):
    """The sums, what this shard's codes added to them, and the residuals of its own parts."""
    codec = self.codec
    rows = [plan.rows(leaf) for plan, leaf in zip(plans, leaves)]
    codes = [encoded(codec, row) for row in rows]
    sent = [decoded(codec, code, plan.length) for code, plan in zip(codes, plans)]
    arrived = _collectives.send_flat(codes, lambda x: _collectives.all_to_all(x, names))
    sums = [added(codec, code, plan.length) for code, plan in zip(arrived, plans)]
    if residuals is not None:
      sums = [x + plan.own(f) for x, plan, f in zip(sums, plans, residuals)]
    codes = [encoded(codec, x) for x in sums]  # the second encoding
    if residuals is not None:
      rests = [_rest(x, decoded(codec, code, x.size)) for x, code in zip(sums, codes)]
      residuals = [plan.held(rest, f) for plan, rest, f in zip(plans, rests, residuals)]
    everyone = _collectives.send_flat(codes, lambda x: _collectives.all_gather(x, names))
    arrived = [decoded(codec, code, plan.length) for code, plan in zip(everyone, plans)]
    over = [self._exactly(plan.rest(leaf)) for plan, leaf in zip(plans, leaves)]
    over_sums = _collectives.psum(over, names)
    results = [p.whole(x, self._exactly(r)) for p, x, r in zip(plans, arrived, over_sums)]
    sent = [p.whole(x, r) for p, x, r in zip(plans, sent, over)]
    return results, sent, residuals

  def _exactly(self, x):
    """What is sent uncompressed: for a codec whose results are codes, the value of its code."""
    if not self.codec.recodes or not x.size:
      return x
    return self._decoded(encoded(self.codec, x.ravel()), x)


def _merged(column, flags, values):
  """A list with other values where it is flagged."""
  rest = iter(values)
  return [next(rest) if flag else x for x, flag in zip(column, flags)]


def _shapes(tree):
  return jax.tree.map(jnp.shape, tree)


def _no_tangent(x):
  return jnp.zeros_like(x) if _numerics.is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)


def _rest(u, sent):
  rest = u - sent
  # A NaN is visible once, but must not stay.
  return jnp.where(jnp.isfinite(rest), rest, 0.0)
