"""What a compiled step sends, read from the program that XLA made of it."""

import dataclasses
import re
from typing import Any

__all__ = ["Collective", "compiled_collectives"]

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
_CALLED = re.compile(r"(?P<role>\w+)=(?:%(?P<one>[\w.\-]+)|\{(?P<many>%[^}]*)\})")
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+\d+\w*)\[(?P<dimensions>[\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a compiled program.

  Attributes:
    kind: one of XLA's names, such as "all-reduce".
    num_bytes: bytes that one device hands to it.
    conditional: whether it stands inside a conditional, or a loop of which the compiler does not
      know how often it runs, so that it may not run in every call.
  """

  kind: str
  num_bytes: int
  conditional: bool


def compiled_collectives(compiled: Any) -> list[Collective]:
  """Lists the collectives of a compiled step, in the program's order.

  A collective inside a loop is listed once, however often the loop runs.

  Args:
    compiled: what `jax.jit(step).lower(...).compile()` returns, or the text of an optimized HLO
      module.

  Returns:
    One `Collective` for each.

  Raises:
    TypeError: if it is neither.
    ValueError: for the text of a program that is not compiled yet: what it will send is decided
      later.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> from jax.sharding import PartitionSpec as P
    >>> tx = ow.cross_shard(optax.sgd(1.0), "batch")
    >>> mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> step = lambda g: tx.update(g[0], tx.init(g[0]))[0]
    >>> step = jax.shard_map(step, mesh=mesh, in_specs=P("batch"), out_specs=P())
    >>> ow.inspect.compiled_collectives(jax.jit(step).lower(jnp.ones((4, 3))).compile())
    [Collective(kind='all-reduce', num_bytes=12, conditional=False)]
  """
  text = compiled if isinstance(compiled, str) else _text_of(compiled)
  if not re.search(r"^ENTRY %", text, re.M):
    raise ValueError(
      "compiled_collectives: compiled must be an optimized HLO module, and this text is none."
      " Compile first: jax.jit(step).lower(...).compile(), or its as_text()."
    )
  found: list[tuple[str, Collective]] = []
  conditional: set[str] = set()  # computations that are branches, then all that these call
  calls: dict[str, set[str]] = {}
  sizes: dict[str, int] = {}
  computation = ""
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      computation = header["name"]
      sizes = {}
      continue
    instruction = _INSTRUCTION.match(line)
    if not instruction:
      continue
    sizes[instruction["name"]] = _num_bytes(instruction["shape"])
    for call in _CALLED.finditer(line):
      names = [name.strip(" %") for name in (call["one"] or call["many"]).split(",")]
      calls.setdefault(computation, set()).update(names)
      # XLA notes the trip count of loops that it can count. The loops of `_branches.apply_if` run
      # once or not at all, which it cannot.
      if instruction["op"] == "conditional" or (
        instruction["op"] == "while" and "known_trip_count" not in line
      ):
        conditional.update(names)
    # An asynchronous collective is a pair of instructions, of which the start has the operands.
    kind = instruction["op"].removesuffix("-start")
    if kind in _KINDS:
      sent = sum(
        sizes.get(operand, 0) for operand in re.findall(r"%([\w.\-]+)", instruction["operands"])
      )
      found.append((computation, Collective(kind, sent, conditional=False)))

  # A collective may stand in a computation that a branch calls, such as the body of a fusion.
  pending = list(conditional)
  while pending:
    inside = calls.get(pending.pop(), set()) - conditional
    conditional |= inside
    pending.extend(inside)
  return [dataclasses.replace(one, conditional=where in conditional) for where, one in found]


def _text_of(compiled: Any) -> str:
  if not hasattr(compiled, "as_text") or not hasattr(compiled, "memory_analysis"):
    raise TypeError(
      "compiled_collectives: compiled must be what jax.jit(step).lower(...).compile() returns, or"
      f" the text of an HLO module; got {type(compiled).__name__}."
    )
  return compiled.as_text()


def _num_bytes(shape: str) -> int:
  """Bytes of an HLO shape, such as `f32[64,64]{1,0}` or a tuple of such."""
  total = 0
  for array in _ARRAY.finditer(shape):
    bits = 8 if array["type"] == "pred" else int(re.findall(r"\d+", array["type"])[0])
    count = 1
    for dimension in filter(None, array["dimensions"].split(",")):
      count *= int(dimension)
    total += (count * bits + 7) // 8
  return total
