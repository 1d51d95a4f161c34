"""The records of one fragment: messages, decisions, snapshots and marks of late pods.

What is read is a record of this run, or None. Nothing else is trusted: a decision may list only
names that can be senders and rounds that were.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_wrappers import exchange
from optax_wrappers.pods._log import NAME, Log, digest, largest, record

LARGEST_DECISION = 2**20  # bytes
_LINE = re.compile(rf"({NAME}) ([0-9]{{1,18}}) ([0-9a-f]{{64}})")


class Decision(NamedTuple):
  """What all pods absorb in a round.

  Attributes:
    base: the fingerprint of the center before it.
    messages: of each message its sender, its round and its digest.
  """

  base: list[int]
  messages: list[tuple[str, int, str]]


class Records:
  """The records of fragment `number`.

  Attributes:
    template: of its messages.
    shapes: of its snapshots.
  """

  def __init__(self, log: Log, number: int, template: exchange.Message, snapshot: Any):
    self.log, self.number, self.template = log, number, template
    self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), snapshot)

  # Messages, and marks of senders that were late.

  def message(self, r: int, sender: str) -> tuple[str, exchange.Message] | None:
    """The digest of a message, and the message."""
    template = dataclasses.replace(self.template, sender=sender)

    def read(data):
      return digest(data), self.log.unpacked("msg", r, template, data)

    return self.log.get(self.message_name(r, sender), largest(template), read)

  def put_message(self, r: int, message: exchange.Message, data: bytes) -> bool:
    """Writes a message, unless its sender has one in this round; returns whether it did."""
    read = functools.partial(self.log.unpacked, "msg", r, message)
    return self.log.put(self.message_name(r, message.sender), data, largest(message), read)

  def message_name(self, r: int, sender: str) -> str:
    return self.log.name(self.number, r, f"{sender}.msg")

  def senders(self, r: int) -> tuple[set[str], set[str]]:
    """Those of whom there are claimed to be messages, and marks."""
    stems = self.log.names(self.number, r)
    return stems.get("msg", set()), stems.get("late", set())

  def is_marked(self, r: int, sender: str) -> bool:
    """Whether a sender says that it was late."""
    template, name = record(sender, self.number), self.log.name(self.number, r, f"{sender}.late")
    read = functools.partial(self.log.unpacked, "late", r, template)
    return self.log.get(name, largest(template), read) is not None

  def mark(self, r: int, sender: str) -> None:
    """Says that this sender was late."""
    mark, name = record(sender, self.number), self.log.name(self.number, r, f"{sender}.late")
    read = functools.partial(self.log.unpacked, "late", r, mark)
    self.log.put(name, self.log.packed("late", r, mark), largest(mark), read)

  # Decisions.

  def decision(self, r: int) -> Decision | None:
    """What the first pod has decided in a round."""
    name = self.log.name(self.number, f"{r:08d}.set")
    return self.log.get(name, LARGEST_DECISION, lambda data: self._decision_from(data, r))

  def decide(self, r: int, decision: Decision) -> Decision | None:
    """Decides a round, unless it is decided; returns the decision of the first pod."""
    lines = "\n".join(f"{sender} {q} {name}" for sender, q, name in decision.messages)
    text = np.frombuffer(lines.encode(), np.uint8)
    data = self.log.packed("set", r, record("set", self.number, [text], decision.base))
    name = self.log.name(self.number, f"{r:08d}.set")
    self.log.put(name, data, LARGEST_DECISION, lambda there: self._decision_from(there, r))
    return self.decision(r)

  def _decision_from(self, data, r):
    length = len(data) - len(self.log.packed("set", r, record("set", self.number)))
    text = jax.ShapeDtypeStruct((max(0, length),), np.uint8)
    written = self.log.unpacked("set", r, record("set", self.number, [text]), data)
    lines = bytes(written.parts[0]).decode("ascii").split("\n")
    matches = [match for match in map(_LINE.fullmatch, lines) if match]
    messages = [(match[1], int(match[2]), match[3]) for match in matches]
    if len(matches) < len(lines) or any(q > r for _, q, _ in messages):
      raise ValueError("it lists no messages")
    return Decision(written.base.tolist(), messages)

  # Snapshots.

  def snapshots(self) -> list[int]:
    """The rounds that are claimed to begin with a snapshot."""
    stems = self.log.names(self.number).get("center", set())
    return sorted(int(x) for x in stems if re.fullmatch("[0-9]{8,18}", x))

  def snapshot(self, r: int) -> Any:
    """The center and the outer state before a round."""
    template = record("center", self.number, jax.tree.leaves(self.shapes))
    read = functools.partial(self.log.unpacked, "center", r, template)
    snapshot = self.log.get(self._snapshot_name(r), largest(template), read)
    treedef: Any = jax.tree.structure(self.shapes)
    return None if snapshot is None else treedef.unflatten(snapshot.parts)

  def newest(self) -> tuple[int, Any] | None:
    """The newest of the rounds that begin with a readable snapshot, and the snapshot."""
    read = ((r, self.snapshot(r)) for r in reversed(self.snapshots()))
    return next(((r, snapshot) for r, snapshot in read if snapshot is not None), None)

  def put_snapshot(self, r: int, snapshot: Any) -> None:
    """Writes the center and the outer state before a round, unless another pod has."""
    center = record("center", self.number, jax.tree.leaves(snapshot))
    read = functools.partial(self.log.unpacked, "center", r, center)
    data = self.log.packed("center", r, center)
    self.log.put(self._snapshot_name(r), data, largest(center), read)

  def _snapshot_name(self, r):
    return self.log.name(self.number, f"{r:08d}.center")

  def delete(self, before: int, snapshots_before: int) -> None:
    """Deletes rounds, and snapshots of rounds, before these."""
    store, log, k = self.log.store, self.log, self.number
    for name in store.names(log.name(k)):
      stem = name.split(".")[0].split("~")[0]
      end = snapshots_before if name.endswith(".center") else before
      if not stem.isdecimal() or int(stem) >= end:
        continue
      for inside in store.names(log.name(k, name)):
        store.delete(log.name(k, name, inside))
      store.delete(log.name(k, name))
