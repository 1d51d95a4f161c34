"""The records of a run in a store, where anyone may have put anything.

A name is written once. What is under it but cannot be read, because it is no packet of this run,
kind and key, decides nothing: a record then takes the next slot of its name, `00000007~1.set` after
`00000007.set`. All pods try the slots in the same order, so they read the same record.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from optax_wrappers._workers import _packets
from optax_wrappers.pods._stores import Store

Found = TypeVar("Found")
SMALL = 4096  # bytes, of records without a body of arrays


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
    found: dict[str, set[str]] = {}
    for name in self.store.names(self.name(k, *parts)):
      stem, _, kind = name.rpartition(".")
      found.setdefault(kind, set()).add(stem.split("~")[0])
    return found

  def packed(self, kind: str, k: int, r: int, body: bytes) -> bytes:
    """A record without arrays of a message."""
    return _packets.pack([kind, self.run, r, k], body, self.key)

  def unpacked(self, kind: str, k: int, r: int, data: bytes) -> bytes:
    """The body of such a record; a ValueError for anything else."""
    header, body = _packets.unpack(data, self.key)
    if header != [kind, self.run, r, k]:
      raise ValueError(f"it is of {header}, and {[kind, self.run, r, k]} was needed")
    return body

  def get(self, name: str, limit: int, read: Callable[[bytes], Found]) -> Found | None:
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
        found = self.store.get(slot, limit)
        if found is not None:
          read(found)
        return False
      except ValueError as error:
        self.refused[slot] = str(error)
    return False

  def _slots(self, name: str) -> Iterator[str]:
    """The slots of a name, without those that hold no record, now and for ever."""
    stem, _, kind = name.rpartition(".")
    slots = (f"{stem}~{i}.{kind}" if i else name for i in itertools.count())
    return (slot for slot in slots if slot not in self.refused)
