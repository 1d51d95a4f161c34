"""Compressed exchanges: what is not sent now is kept, and sent later.

Of each contribution `g_i` to a sum, already divided or weighed, shard i sends the code of
`u_i = g_i + beta e_i`, and keeps what its code leaves out, `e_i <- u_i - decode(encode(u_i))`. All
leaves travel together, as bytes.

With two shards, or codes that are sparse, every shard gets the codes of all others. With more, a
shard gets those of its own part of each leaf, adds them up with the residual of that part, and
sends the code of the sum to all; it goes by the decoded code itself, so that all shards have the
same bits. Parts are shares (`_shares`) of as many whole places as there are for all; the few that
are left over travel as they are.
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_wrappers import codecs
from optax_wrappers._core import _axes, _branches, _checks, _collectives, _numerics, _pods, _shares
from optax_wrappers._core._state import WrapperState, state
from optax_wrappers._core._types import AxisNames, Tree

# Where as many shards or more decode each other's codes, they do it in a loop, one after another.
MANY = 8


@state
class CompressedState(WrapperState):
  """What a compressed exchange keeps. Trees have the updates' structure, None where it is exact.

  Attributes:
    residual: of this shard's contributions, what was not sent yet, in units of the result; float32,
      each shard's own though parameters are replicated; None without feedback.
    owner_residual: the same of the sums of this shard's part of each leaf, a share, as
      `stack_workers` deals it out; None for codecs of which sums are never encoded again. Two
      shards leave it at zero.
    memory: the linear codec's, one value for all; None for other codecs.
    step: exchanges so far, int32 scalar; None unless `compression(after=)` needs it.
  """

  shared_fields = frozenset({"memory", "step"})
  summed_fields = frozenset({"residual"})
  divided_fields = frozenset({"owner_residual"})

  residual: Tree
  owner_residual: Tree
  memory: Tree
  step: jax.Array | None


class _Held(NamedTuple):
  """What is kept, of the leaves that are compressed, in lists; None as in `CompressedState`."""

  residual: Any
  owner_residual: Any
  memory: Any


@dataclasses.dataclass(frozen=True)
class Compression:
  """The arguments of a compressed exchange, checked.

  Attributes:
    wrapper: the name that an error gives.
    codec: how leaves are encoded.
    feedback: whether residuals are kept.
    only: which leaves may be compressed: bools, a function to them, or None for all.
    after: exchanges that are exact before the first that is not.
    decay: beta.
  """

  wrapper: str
  codec: Any
  feedback: bool
  only: Any
  after: int
  decay: Any

  @classmethod
  def make(cls, wrapper, codec):
    """From a codec or `codecs.compression` of one; None without."""
    return None if codec is None else cls(wrapper, *codecs.settings(wrapper, codec))

  def warn_of_loss(self) -> None:
    """Warns where what is not sent is lost, and is most of what there is."""
    if not self.feedback and self.codec.feedback == "needed":
      warnings.warn(
        f"{self.wrapper}: {self.codec.name} without feedback loses what it does not send, and need"
        " not converge. Leave feedback=False out.",
        stacklevel=4,
      )

  @property
  def is_linear(self) -> bool:
    return isinstance(self.codec, codecs.LinearCodec)

  def flags(self, tree: Tree) -> list[bool]:
    """Which leaves of a tree of the parameters' shapes are compressed."""
    leaves = jax.tree.leaves(tree)
    may: list[Any] = [True] * len(leaves)
    if self.only is not None:
      mask = self.only(tree) if callable(self.only) else self.only
      kinds = _checks.is_a(bool, np.bool_)
      may = _checks.spread(self.wrapper, "only", mask, tree, kinds, "Python bools")
    return [bool(flag) and self._is_for(leaf) for flag, leaf in zip(may, leaves, strict=True)]

  def _is_for(self, leaf):
    # In float32 a float64 would lose what its owner wants it for.
    dtype = _numerics.dtype_of(leaf)
    is_real = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 32
    return is_real and self.codec.applies_to(jnp.shape(leaf))

  def start(self, params: Tree, flags: list[bool]) -> CompressedState:
    """The state at first."""
    leaves, treedef = jax.tree.flatten(params)

    def zeros():
      kept = (jnp.zeros_like(x, jnp.float32) if f else None for x, f in zip(leaves, flags))
      return treedef.unflatten(kept)

    recodes = not self.is_linear and self.codec.recodes is not False
    shapes = [jnp.shape(x) for x, flag in zip(leaves, flags) if flag]
    return CompressedState(
      residual=zeros() if self.feedback else None,
      owner_residual=zeros() if self.feedback and recodes else None,
      memory=self.codec.init(shapes) if self.is_linear else None,
      step=jnp.zeros((), jnp.int32) if self.after else None,
    )

  def check_kept(self, kept: Any, tree: Tree, flags: list[bool]) -> None:
    """Raises on a state that is not of this codec and these arguments."""
    if not isinstance(kept, CompressedState):
      raise TypeError(
        f"{self.wrapper}: with a codec the state's compressed is a CompressedState, got"
        f" {type(kept).__name__}. Pass what init returned."
      )
    needed = jax.eval_shape(lambda tree: self.start(tree, flags), tree)
    for name, value in needed.fields().items():
      found = getattr(kept, name)
      is_memory = name == "memory"  # residuals may be shares
      kinds = [(jax.tree.structure(x), is_memory and _shapes(x)) for x in (value, found)]
      if kinds[0] != kinds[1]:
        raise ValueError(
          f"{self.wrapper}: the state was made for another codec, for other arguments, or for"
          f" parameters of another structure than the updates have: {name} must be {value}, got"
          f" {found}. Take a state from init; for parameters that are not trained use"
          " optax.partition or optax.masked."
        )

  def sum_tree(
    self, tree: Tree, kept: CompressedState, names: AxisNames, is_void: jax.Array
  ) -> tuple[Tree, CompressedState]:
    """`sum` of every leaf; those that are not compressed are added exactly."""
    flags = self.flags(tree)
    self.check_kept(kept, tree, flags)
    leaves = jax.tree.leaves(tree)
    treedef: Any = jax.tree.structure(tree)
    flags = self._sent_coded(flags, names)
    _, exact = _split(flags)
    parts = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
    sums, kept = self.sum(parts, treedef, kept, names, is_void)
    totals = _collectives.psum([leaves[i] for i in exact], names)
    return treedef.unflatten(_merged(sums, exact, totals)), kept

  def _sent_coded(self, flags, names):
    """`flags`, of which a single shard, which sends nothing, keeps none."""
    return [flag and _axes.axis_size(names) > 1 for flag in flags]

  def sum(
    self,
    parts: list[jax.Array | None],
    treedef: Any,
    kept: CompressedState,
    names: AxisNames,
    is_void: jax.Array | None = None,
  ) -> tuple[list[jax.Array | None], CompressedState]:
    """The sums over the shards of `names`, two at least, and what is kept from here on.

    Args:
      parts: this shard's contributions, float32; None for leaves that are not compressed.
      treedef: the structure of the updates.
      kept: the state.
      names: the axes.
      is_void: whether nobody has contributed: the sums are zero then, and the state stays.
    """
    numbers = [i for i, part in enumerate(parts) if part is not None]
    if not numbers:  # all of them are sent exactly
      return list(parts), kept
    own = [parts[i] for i in numbers]
    held = self._read(kept, numbers, treedef)
    sums, new = self._after_exact(own, held, names, kept.step)
    if is_void is not None:
      sums = [jnp.where(is_void, 0.0, x) for x in sums]
      new = _numerics.select(is_void, held, new)
    new = _axes.vary_like(new, held)
    return _merged(parts, numbers, sums), self._write(kept, new, numbers, treedef, is_void)

  def _read(self, kept, numbers, treedef):
    """What is kept of the leaves with these numbers."""

    def column(tree):
      leaves = None if tree is None else treedef.flatten_up_to(tree)
      return leaves and [leaves[i] for i in numbers]

    return _Held(column(kept.residual), column(kept.owner_residual), kept.memory)

  def _write(self, kept, new, numbers, treedef, is_void):
    def tree(before, values):
      if before is None:
        return None
      return treedef.unflatten(_merged(treedef.flatten_up_to(before), numbers, values))

    step = kept.step
    if step is not None:
      counted = 1 if is_void is None else (~is_void).astype(jnp.int32)
      step = _numerics.saturating_add(step, counted)
    return CompressedState(
      residual=tree(kept.residual, new.residual),
      owner_residual=tree(kept.owner_residual, new.owner_residual),
      memory=new.memory,
      step=step,
    )

  def _after_exact(self, parts, held, names, step):
    """The compressed exchange, or an exact one while `step` is below `after`."""
    if step is None:
      return self._coded(parts, held, names)
    _axes.require_equal(step, self.wrapper, "CompressedState.step", axes=frozenset(names))

    def exact():
      sums = _collectives.psum(parts, names)
      return sums, _axes.vary_like(held, jax.eval_shape(coded, None)[1])

    def coded(_):
      return self._coded(parts, held, names)

    return _branches.cond(step < self.after, exact, coded, self.wrapper, "CompressedState.step")

  def _coded(self, parts, held, names):
    """`_exchange`, whose derivative is that of an exact sum: rounding has none."""

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
    wanted = parts
    if held.residual is not None:
      wanted = [part + self._decayed(e) for part, e in zip(parts, held.residual, strict=True)]
    wanted = _axes.to_varying(wanted, names)
    owners, memory = held.owner_residual, held.memory
    if self.is_linear:
      # The factors of a matrix are not those of its parts. They travel in an all-reduce as it is.
      how = _pods.by_device if self.codec.divisible else _pods.at_once
      sums, sent, _, memory = how(self._linear, names, wanted, None, memory)
    elif self._recodes(names):
      self._check_dealt(wanted, owners, names)
      sums, sent, owners, _ = _pods.by_device(self._cut_or_whole, names, wanted, owners, None)
    else:
      sums, sent, _, _ = _pods.by_device(self._gathered, names, wanted, None, None)
    residual = held.residual and [_rest(u, q) for u, q in zip(wanted, sent, strict=True)]
    return sums, _Held(residual, owners, memory)

  def _recodes(self, names):
    """Whether sums are encoded once more."""
    recodes = self.codec.recodes
    return _axes.axis_size(names) > 2 if recodes is None else recodes

  def _check_dealt(self, leaves, shares, names):
    """Raises on what owners keep if it is whole."""
    how = "stack_workers(tx.init(params), num_shards, replicated=True), or without replicated for"
    for x, f in zip(leaves, shares or ()):
      size = _axes.axis_size(names)
      _shares.require_share(self.wrapper, "owner_residual", f, x.shape, size, f"{how} workers")

  # Three ways to exchange, each `(names, leaves, shares, memory)` to the sums, this shard's parts
  # in them, and what is kept: for `_pods.by_device`.

  def _gathered(self, names, leaves, shares, memory):
    """Everybody's codes go to everybody."""
    return *gathered(self.codec, leaves, names), shares, memory

  def _linear(self, names, leaves, shares, memory):
    """Codes are summed as they are."""
    total = functools.partial(_collectives.psum, names=names)
    sums, sent, new = self._reduced(total, leaves, memory)
    if not self.feedback:
      sums = [x * self.codec.gain for x in sums]
    # A NaN is to be seen once, and not to stay.
    kept = jax.tree.map(lambda n, old: jnp.where(jnp.isfinite(n).all(), n, old), new, memory)
    return sums, sent, shares, kept

  def _reduced(self, total, leaves, memory):
    """What a linear codec returns, checked: it may be the user's own."""
    found = self.codec.reduce(total, leaves, memory)
    needed = _shapes(leaves), _shapes(leaves), _shapes(memory)
    if not isinstance(found, tuple) or tuple(map(_shapes, found)) != needed:
      raise ValueError(
        f"{self.codec.name}: reduce must return the sums and this shard's parts, lists of the"
        f" shapes {needed[0]}, and the memory in its own shapes {needed[2]}; got {_shapes(found)}."
      )
    return found

  def _decayed(self, e):
    is_one = isinstance(self.decay, float) and self.decay == 1
    return e if is_one else _numerics.times(self.decay, e)

  def _cut_or_whole(self, names, leaves, residuals, memory):
    """`_by_owners` of all leaves; what is too small for a part for each shard is sent as it is."""
    plans = [_Parts.of(leaf.shape, _axes.axis_size(names)) for leaf in leaves]
    cut, whole = _split([plan.length > 0 for plan in plans])

    def of_cut(column):
      return [column[i] for i in cut]

    sums, sent, new = self._by_owners(
      of_cut(plans), of_cut(leaves), residuals and of_cut(residuals), names
    )
    exact = [self._exactly(leaves[i]) for i in whole]
    totals = [self._exactly(x) for x in _collectives.psum(exact, names)]
    return (
      _merged(leaves, cut + whole, [*sums, *totals]),
      _merged(leaves, cut + whole, [*sent, *exact]),
      residuals and _merged(residuals, cut, new),
      memory,
    )

  def _by_owners(self, plans, leaves, residuals, names):
    """The sums, what this shard's part in them was, and the residuals of its own part of them."""
    codec = self.codec
    rows = [plan.rows(leaf) for plan, leaf in zip(plans, leaves)]
    codes = [encoded(codec, row) for row in rows]
    sent = [decoded(codec, code, plan.length) for code, plan in zip(codes, plans)]
    arrived = _collectives.together(codes, lambda buffer: _collectives.all_to_all(buffer, names))
    sums = [_added(codec, code, plan.length) for code, plan in zip(arrived, plans)]
    if residuals is not None:
      sums = [x + plan.own(f) for x, plan, f in zip(sums, plans, residuals)]
    codes = [encoded(codec, x) for x in sums]
    if residuals is not None:
      rests = [_rest(x, decoded(codec, code, x.size)) for x, code in zip(sums, codes)]
      residuals = [plan.held(rest, f) for plan, rest, f in zip(plans, rests, residuals)]
    everyone = _collectives.together(codes, lambda buffer: _collectives.all_gather(buffer, names))
    arrived = [decoded(codec, code, plan.length) for code, plan in zip(everyone, plans)]
    over = [self._exactly(plan.rest(leaf)) for plan, leaf in zip(plans, leaves)]
    over_sums = _collectives.psum(over, names)
    results = [p.whole(x, self._exactly(r)) for p, x, r in zip(plans, arrived, over_sums)]
    sent = [p.whole(x, r) for p, x, r in zip(plans, sent, over)]
    return results, sent, residuals

  def _exactly(self, x):
    """What is left over; a codec whose results are codes, as votes, has it as a code too."""
    if not self.codec.recodes or not x.size:
      return x
    return decoded(self.codec, encoded(self.codec, x.ravel()), x.size).reshape(x.shape)


def _merged(column, numbers, values):
  """A list with other values at these numbers."""
  column = list(column)
  for i, value in zip(numbers, values, strict=True):
    column[i] = value
  return column


def _split(flags):
  """The numbers of those that are flagged, and of the others."""
  numbers = range(len(flags))
  return [i for i in numbers if flags[i]], [i for i in numbers if not flags[i]]


def _shapes(tree):
  """The shapes of a tree of arrays, in its structure."""
  return jax.tree.map(jnp.shape, tree)


def _no_tangent(x):
  if _numerics.is_inexact(x):
    return jnp.zeros_like(x)
  return np.zeros(x.shape, jax.dtypes.float0)


def _rest(u, sent):
  """What is not sent; zero where that is a NaN, which is to be seen once and not to stay."""
  rest = u - sent
  return jnp.where(jnp.isfinite(rest), rest, 0.0)


class _Parts(NamedTuple):
  """How a leaf is cut into a part for each shard.

  Attributes:
    shape: the leaf's.
    num_shards: the number of parts.
    d: the dimension along which it is cut, as `_shares` does it.
    places: along it, those of one part.
    length: the entries of a part.
  """

  shape: tuple[int, ...]
  num_shards: int
  d: int
  places: int
  length: int

  @classmethod
  def of(cls, shape, num_shards):
    d = _shares.divided_dimension(shape, num_shards)
    if d is None:  # one entry
      return cls(shape, num_shards, 0, 0, 0)
    places = shape[d] // num_shards
    return cls(shape, num_shards, d, places, places * int(np.prod(shape)) // shape[d])

  @property
  def _cut(self):
    return self.places * self.num_shards

  def rows(self, leaf):
    """The parts, `[num_shards, length]`."""
    cut = _shares.cut(lax.slice_in_dim(leaf, 0, self._cut, axis=self.d), self.num_shards, self.d)
    return jnp.moveaxis(cut, self.d + 1, 0).reshape(self.num_shards, self.length)

  def rest(self, leaf):
    """What is left over."""
    return lax.slice_in_dim(leaf, self._cut, None, axis=self.d)

  def whole(self, rows, rest):
    """The leaf, from its parts and what is left over."""
    shape = self._with(self._cut)
    x = rows.reshape(self.num_shards, *self._with(self.places))
    x = _shares.joined(jnp.moveaxis(x, 0, self.d + 1), shape, self.d)
    return jnp.concatenate([x, rest], self.d) if rest.size else x

  def own(self, f):
    """The residual of a part, from a share, which has one place more where some are left over."""
    return lax.slice_in_dim(f, 0, self.places, axis=self.d).reshape(self.length)

  def held(self, rest, f):
    """The share that holds the residual of a part."""
    rest = rest.reshape(self._with(self.places))
    more = f.shape[self.d] - self.places
    return jnp.pad(rest, [(0, more if k == self.d else 0) for k in range(f.ndim)]) if more else rest

  def _with(self, places):
    return tuple(places if k == self.d else n for k, n in enumerate(self.shape))


def encoded(codec: codecs.Codec, x: jax.Array) -> jax.Array:
  """The code of `[..., n]`, checked: a codec may be the user's own."""
  code, n = codec.encode(x), x.shape[-1]
  shape = (*x.shape[:-1], codec.num_bytes(n))
  if code.dtype != jnp.uint8 or code.shape != shape:
    raise ValueError(
      f"{codec.name}: encode must return uint8{list(shape)} for float32{list(x.shape)}, as"
      f" num_bytes has it; got {code.dtype}{list(code.shape)}."
    )
  return code


def decoded(codec: codecs.Codec, code: jax.Array, n: int) -> jax.Array:
  """What codes of `[..., n]` say, checked likewise."""
  x, shape = codec.decode(code, n), (*code.shape[:-1], n)
  if x.dtype != jnp.float32 or x.shape != shape:
    raise ValueError(
      f"{codec.name}: decode must return float32{list(shape)} for uint8{list(code.shape)} and"
      f" n={n}; got {x.dtype}{list(x.shape)}."
    )
  return x


def gathered(
  codec: codecs.Codec, leaves: Sequence[jax.Array], names: AxisNames
) -> tuple[list[jax.Array], list[jax.Array]]:
  """The sums of what the codes of all shards say, and what this shard's own says."""
  codes = [encoded(codec, leaf.ravel()) for leaf in leaves]
  everyone = _collectives.together(codes, lambda buffer: _collectives.all_gather(buffer, names))
  sums = [_added(codec, code, leaf.size) for code, leaf in zip(everyone, leaves)]
  sent = [decoded(codec, code, leaf.size) for code, leaf in zip(codes, leaves)]

  def shaped(found):
    return [x.reshape(leaf.shape) for x, leaf in zip(found, leaves)]

  return shaped(sums), shaped(sent)


def _added(codec, codes, n):
  """The sum of what the rows say, in float32 and in their order.

  Added one after another: a sum over a short axis takes XLA:CPU many times as long, and its order
  is nobody's.
  """
  if len(codes) < MANY:
    rows = decoded(codec, codes, n)
    return functools.reduce(jnp.add, (rows[i] for i in range(len(codes))))

  def add(total, code):
    return total + decoded(codec, code, n), None

  return lax.scan(add, decoded(codec, codes[0], n), codes[1:])[0]
