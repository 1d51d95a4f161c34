"""Communication of a compiled step, memory per device, and a check for what no type tells."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optax_wrappers._core import _waits

__all__ = ["Collective", "check_step", "compiled_collectives", "device_bytes"]

_KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "collective-broadcast",
)

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
  r"(?P<op>[\w\-]+)\((?P<operands>.*?)\)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\w=(%[\w.\-]+|\{%[^}]*\})")
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
# XLA writes replica groups as {{0,4},{1,5}}, as a range in a shape and an order,
# [2,2]<=[2,2]T(1,0), or as axes of a mesh, mesh['a'=2,'b'=2] {'a'}, with a part of one as 'a':(1)2.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_RANGE = r"\[(?P<counted>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
_OF_RANGE = re.compile(r"replica_groups=\[(?P<shape>[\d,]+)\]<=" + _RANGE)
_OF_MESH = re.compile(
  r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>\[.*?\)|[^)]*)\))? "
  r"\{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'(?P<name>\w+)'(?::\((?P<before>\d+)\)(?P<size>\d+))?")
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+\d+\w*)\[(?P<dimensions>[\d,]*)\]")


def check_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
  """Raises if one shard of a step could wait for another forever (deadlock), or for a reduced loss.

  A shard may wait if a conditional or a loop contains a collective and depends on local data, as
  with `optax.apply_if_finite` around `cross_shard`. The mean of the gradient of a loss that is a
  `psum` or `pmean` already would be too small by the number of shards, under `check_vma=True`. The
  step is traced, not run. `map_workers(mesh=)` runs this check.

  Values that `jax.shard_map` or `jax.pmap` splits may differ between shards, and so may results
  computed from them, until they are reduced. With `check_vma=False` and under `pmap`, an integer
  scalar counts as a shared counter.

  Args:
    step: a function that maps over shards somewhere inside, or a `jax.jit` of one.
    *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
    **kwargs: keyword arguments.

  Raises:
    ValueError: with the line of the conditional, or of the sum that the loss is, and the axes.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> def step_of(tx):
    ...   return jax.pmap(lambda g: tx.update(g, tx.init(g))[0], "batch")
    >>> mean = ow.cross_shard(optax.sgd(1.0), "batch")
    >>> ow.inspect.check_step(step_of(mean), jnp.ones(4))
    >>> ow.inspect.check_step(
    ...   step_of(optax.apply_if_finite(mean, 5)), jnp.ones(4)
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: check_step: one shard may enter the conditional at ...
  """
  _waits.require_none("check_step", jax.make_jaxpr(step)(*args, **kwargs).jaxpr)


def device_bytes(tree: Any) -> int:
  """The bytes that one device holds of a tree of arrays, by their shardings.

  Args:
    tree: arrays, or `jax.ShapeDtypeStruct`s; one without a sharding counts in full, and anything
      else counts as zero.

  Examples:
    Adam's moments, sharded and unsharded: one line distinguishes ZeRO from a copy on every device.

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    >>> params = jnp.zeros((8, 16), device=NamedSharding(mesh, P()))
    >>> state = optax.adam(0.1).init(params)
    >>> specs = ow.specs(state, P("data"), mesh=mesh)
    >>> laid_out = jax.device_put(
    ...   state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    ... )
    >>> ow.inspect.device_bytes(state), ow.inspect.device_bytes(laid_out)
    (1028, 260)
  """

  def size(x):
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
      return 0
    sharding = getattr(x, "sharding", None)
    shape = sharding.shard_shape(x.shape) if sharding is not None else x.shape
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(size, jax.tree.leaves(tree)))


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled program.

  Attributes:
    kind: one of XLA's names, such as "all-reduce".
    num_bytes: bytes that one device hands to it.
    conditional: whether some calls may skip it: it is in a conditional, or in a loop whose number
      of iterations is unknown.
    groups: the devices that meet in it, by their numbers in the order of the mesh, smallest first:
      `((0, 4), (1, 5))` are two pairs. Empty: all devices.
    times: how often one call of the program runs it, by the trip counts of the loops around it that
      XLA knows; None where it does not, and in a conditional.
  """

  kind: str
  num_bytes: int
  conditional: bool
  groups: tuple[tuple[int, ...], ...] = ()
  times: int | None = 1


def compiled_collectives(compiled: Any) -> list[Collective]:
  """The collectives of a compiled step, in the program's order.

  Args:
    compiled: what `jax.jit(step).lower(...).compile()` returns, or the text of an optimized HLO
      module. Anything else is a TypeError, and the text of another program a ValueError.

  Returns:
    A list. What a call sends is the sum of `num_bytes * times`.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.cross_shard(optax.sgd(1.0), "batch")
    >>> step = jax.pmap(lambda g: tx.update(g, tx.init(g))[0], "batch")
    >>> compiled = step.lower(jnp.ones((4, 3))).compile()
    >>> (one,) = ow.inspect.compiled_collectives(compiled)
    >>> one.kind, one.num_bytes, one.conditional, one.groups, one.times
    ('all-reduce', 12, False, ((0, 1, 2, 3),), 1)
  """
  text = _text_of(compiled)
  collectives: list[Any] = []  # with the computations that they are in
  callers: dict[str, list[tuple[str, int | None]]] = {}  # how often which computations call one
  sizes: dict[str, int] = {}
  computation = ""
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      computation, sizes = header["name"], {}
    elif instruction := _INSTRUCTION.match(line):
      sizes[instruction["name"]] = _num_bytes(instruction["shape"])
      for name in _NAME.findall(" ".join(_CALLED.findall(line))):
        callers.setdefault(name, []).append((computation, _times(line, instruction["op"])))
      if kind := _kind_of(instruction["op"], computation):
        operands = _NAME.findall(instruction["operands"])
        num_bytes = sum(sizes.get(operand, 0) for operand in operands)
        collectives.append((computation, kind, num_bytes, _groups(line)))

  @functools.cache
  def times(where):
    products = [(times(caller), number) for caller, number in callers.get(where, ())]
    # Also what a branch calls, such as the body of a fusion.
    if any(None in product for product in products):
      return None
    return sum(map(math.prod, products)) if products else 1

  return [
    Collective(kind, num_bytes, times(where) is None, groups, times(where))
    for where, kind, num_bytes, groups in collectives
  ]


def _times(line, op):
  """How often an instruction runs what it calls; None: unknown, as for a branch."""
  if op == "while":
    # XLA records the trip count of a loop if it is known, which that of `apply_if` is not.
    trips = _TRIPS.search(line)
    return int(trips[1]) if trips else None
  return None if op == "conditional" else 1


def _kind_of(op, computation):
  """The kind of a collective; None for another operation."""
  # An asynchronous collective is a pair of instructions; the start has the operands.
  kind = op.removesuffix("-start")
  # A reduce-scatter on a TPU is a fusion of this name around an all-reduce.
  if kind == "all-reduce" and "all-reduce-scatter" in computation:
    return "reduce-scatter"
  return kind if kind in _KINDS else None


def _text_of(compiled):
  """The text of an optimized HLO module."""
  is_compiled = hasattr(compiled, "as_text") and hasattr(compiled, "memory_analysis")
  if not is_compiled and not isinstance(compiled, str):
    requirement = "compiled must be what jax.jit(step).lower(...).compile() returns, or its text"
    raise TypeError(f"compiled_collectives: {requirement}; got {type(compiled).__name__}.")
  text = compiled.as_text() if is_compiled else compiled
  if not re.search(r"^ENTRY %", text, re.M):
    what = "compiled must be an optimized HLO module, and this text is not one"
    mend = "Compile first: jax.jit(step).lower(...).compile()."
    raise ValueError(f"compiled_collectives: {what}. {mend}")
  return text


def _num_bytes(shape: str) -> int:
  """Bytes of an HLO shape, such as `f32[64,64]{1,0}` or a tuple of such."""
  total = 0
  for array in _ARRAY.finditer(shape):
    bits = 8 if array["type"] == "pred" else int(re.findall(r"\d+", array["type"])[0])
    count = math.prod(map(int, filter(None, array["dimensions"].split(","))))
    total += (count * bits + 7) // 8
  return total


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
  if listed := _LISTED.search(line):
    # Groups of a permutation are pairs of neighbors: connected devices communicate.
    groups: list[set[int]] = []
    for group in re.findall(r"\{([\d,]+)\}", listed[1]):
      members = set(_ints(group))
      linked = [one for one in groups if not one.isdisjoint(members)]
      groups = [one for one in groups if one.isdisjoint(members)] + [members.union(*linked)]
    return _in_order(groups)
  if ranged := _OF_RANGE.search(line):
    return _in_order(_range(ranged).reshape(_ints(ranged["shape"])).tolist())
  if placed := _OF_MESH.search(line):
    return _in_order(_of_mesh(placed))
  return ()


def _in_order(groups):
  return tuple(sorted(tuple(sorted(group)) for group in groups))


def _of_mesh(placed):
  """The groups along some axes of a mesh, or along parts of them."""
  sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", placed["sizes"])}
  ids = placed["ids"]
  if ids is None:
    numbers = np.arange(np.prod(list(sizes.values())))
  else:
    ranged = re.fullmatch(_RANGE, ids)
    numbers = _range(ranged).ravel() if ranged else np.array(_ints(ids))
  chosen = {axis["name"]: axis for axis in _AXIS.finditer(placed["axes"])}
  shape: list[int] = []
  for name, size in sizes.items():
    axis = chosen.get(name)
    before, here = (int(axis["before"] or 1), int(axis["size"] or size)) if axis else (1, 1)
    shape += [before, here, size // (before * here)]
  along = range(1, len(shape), 3)
  numbers = np.moveaxis(numbers.reshape(shape), along, range(-len(along), 0))
  return numbers.reshape(-1, math.prod(shape[1::3])).tolist()


def _range(written):
  """As "[2,4]T(1,0)" tells: the numbers from 0 in a shape, its axes in an order."""
  counted = _ints(written["counted"])
  order = _ints(written["order"]) if written["order"] else range(len(counted))
  return np.arange(np.prod(counted)).reshape(counted).transpose(order)


def _ints(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]
