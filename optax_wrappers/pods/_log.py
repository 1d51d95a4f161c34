"""The records of a run in a store, where anyone may have put anything.

A record is a message of `exchange`, and what is signed in it includes the kind of the record. A
name is written once. What is under it but cannot be read, because it is no record of this run, kind
and key, decides nothing: a record then takes the next slot of its name, `00000007~1.set` after
`00000007.set`. All pods try the slots in the same order, so they read the same record.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from optax_wrappers import exchange
from optax_wrappers.pods._stores import Store

T = TypeVar("T")
# Of runs and senders, which are names of files.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
LARGEST_FRAME = 2048  # bytes of a record that are none of its arrays


class Log:
  """Signed records, by name.

  Attributes:
    store: where they are.
    refused: the names of what could not be read, with reasons.
  """

  def __init__(self, store: Store, prefix: str, run: str, key: bytes | None):
    self.store, self.prefix, self.run, self.key = store, prefix, run, key
    self.refused: dict[str, str] = {}

  def name(self, k: int, *parts: Any) -> str:
    """The name of a record, or of a folder, of fragment `k`."""
    written = (f"{x:08d}" if isinstance(x, int) else x for x in parts)
    return self.prefix + "/".join((f"f{k}", *written))

  def names(self, k: int, *parts: Any) -> dict[str, set[str]]:
    """What is claimed in a folder: the stems, by their extensions."""
    stems: dict[str, set[str]] = {}
    for name in self.store.names(self.name(k, *parts)):
      stem, _, kind = name.rpartition(".")
      stems.setdefault(kind, set()).add(stem.split("~")[0])
    return stems

  def packed(self, kind: str, r: int, record: exchange.Message) -> bytes:
    """The bytes of a record."""
    return exchange.to_bytes(record, run=self._signed_run(kind), round=r, key=self.key)

  def unpacked(
    self, kind: str, r: int, template: exchange.Message, data: bytes
  ) -> exchange.Message:
    """A record from its sender; a ValueError for any other bytes."""
    run = self._signed_run(kind)
    record = exchange.from_bytes(data, template, run=run, round=r, key=self.key)
    if record.sender != template.sender:
      raise ValueError(f"it is signed by {record.sender!r}")
    return record

  def get(self, name: str, limit: int, read: Callable[[bytes], T]) -> T | None:
    """The record under a name, or None; `read` raises a ValueError for what is none."""
    for slot in self._slots(name):
      try:
        data = self.store.get(slot, limit)
        return None if data is None else read(data)
      except ValueError as error:
        self.refused[slot] = str(error)
    return None

  def put(self, name: str, data: bytes, limit: int, read: Callable[[bytes], Any]) -> bool:
    """Writes a record, unless there is one; returns whether it did."""
    for slot in self._slots(name):
      if self.store.put(slot, data):
        return True
      try:
        there = self.store.get(slot, limit)
        if there is not None:
          read(there)
        return False
      except ValueError as error:
        self.refused[slot] = str(error)
    return False

  def _signed_run(self, kind: str) -> str:
    # No run is named like that, so a record of one kind is none of another.
    return self.run if kind == "msg" else f"{self.run}/{kind}"

  def _slots(self, name: str) -> Iterator[str]:
    """The slots of a name, without those that hold no record, now and for ever."""
    stem, _, kind = name.rpartition(".")
    slots = (f"{stem}~{i}.{kind}" if i else name for i in itertools.count())
    return (slot for slot in slots if slot not in self.refused)


def record(sender: str, k: int, parts: Any = (), base: Any = (0, 0)) -> exchange.Message:
  """A record that is no message between workers, or with shapes as its parts a template of one."""
  weight: Any = np.zeros((), np.float32)
  center: Any = np.asarray(base, np.uint32)
  return exchange.Message(weight, center, tuple(parts), sender, k)


def largest(template: exchange.Message) -> int:
  """The maximum number of bytes of a record."""
  return LARGEST_FRAME + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(template))


def digest(data: bytes) -> str:
  """The name of a message in a decision."""
  return hashlib.sha256(data).hexdigest()
