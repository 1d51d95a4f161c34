"""The agreement of pods on whose messages count in a round: the first that can decides.

A round is decided by a record that lists messages and is written only if it does not exist. A pod
that dies before it exists has decided nothing, and after that everything.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from optax_wrappers import exchange
from optax_wrappers.pods._records import Decision, Records


class OutOfStepError(RuntimeError):
  """The log has moved on without this pod, or from a different center; `join` again."""


class Rounds:
  """The rounds of one fragment since this pod has joined.

  Attributes:
    records: of this fragment.
    begun: when this pod's last exchange ended.
    worked: by rounds, how long after it this pod sent its message.
    sent: this pod's messages that no decision lists yet, by rounds, with their digests.
    snapshot: the round of the last one that this pod has read or written.
    refused: messages of the round that are no use in it, with reasons.
    is_new: whether no exchange has ended yet.
  """

  def __init__(self, records: Records, max_age: int):
    self.records, self.max_age = records, max_age
    self.begun = self.now()
    self.worked: dict[int, float] = {}
    self.sent: dict[int, tuple[str, exchange.Message]] = {}
    self.snapshot: int | None = None
    self.refused: dict[str, str] = {}
    self.is_new = True
    self._received: dict[int, dict[str, tuple[str, exchange.Message]]] = {}
    self._took_part: dict[int, dict[str, str]] = {}
    self._complete: dict[int, float] = {}  # when a quorum had sent

  def now(self) -> float:
    return self.records.log.store.now()

  def agree(
    self, r: int, base: Callable[[], list[int]], quorum: int, grace: float | None
  ) -> Decision | None:
    """The decision of a round. If there is none, decides it if possible, else returns None."""
    # Before the decision, because a pod writes a snapshot only after it has read the decision.
    later = [q for q in self.records.snapshots() if q > r]
    decision = self.records.decision(r)
    if decision is not None:
      return decision
    if any(self.records.snapshot(q) is not None for q in later):
      raise OutOfStepError(
        f"Directory: round {r} of fragment {self.records.number} is over and deleted. Join again:"
        " params, state = directory.join(tx, params)."
      )
    center = base()
    usable = self.usable(r, center)
    if len(usable) < quorum or self._waits(r, set(usable), grace):
      return None
    messages = [(sender, r, digest) for sender, (digest, _) in usable.items()] + self._late(r)
    messages.sort(key=lambda x: (-x[1], x[0]))
    return self.records.decide(r, Decision(center, messages))

  def _waits(self, r, senders, grace):
    """Whether this pod waits for more messages than those of a quorum."""
    now = self.now()
    complete = self._complete.setdefault(r, now)
    if grace is None:
      # Without what it has waited since: an outage of the others makes no grace longer.
      grace = self.worked.get(r, complete - self.begun) / 4
    expected = set(self.took_part(r - 1))
    return not (expected and expected <= senders) and now - complete < grace

  def usable(self, r: int, base: list[int]) -> dict[str, tuple[str, exchange.Message]]:
    """The messages of a round that can be absorbed, with their digests, by sender."""
    received = self._received.setdefault(r, {})
    senders, _ = self.records.senders(r)
    for sender in sorted(senders):
      name = self.records.message_name(r, sender)
      if sender in received or name in self.refused:
        continue
      message = self.records.message(r, sender)
      if message is None:
        continue  # refused, or gone
      if np.asarray(message[1].base).tolist() == base:
        received[sender] = message
      else:
        self.refused[name] = "it was made at another center"
    return dict(sorted(received.items()))

  def took_part(self, r: int) -> dict[str, str]:
    """Who took part in an earlier round: "counted", "late", or "sent" too late to count."""
    if r < 0:
      return {}
    how = self._took_part.setdefault(r, {})
    decision = None if how else self.records.decision(r)
    if decision is not None:
      how.update({sender: "counted" for sender, q, _ in decision.messages if q == r})
    senders, late = self.records.senders(r)
    for sender in sorted(late):
      if how.get(sender) != "late" and self.records.is_marked(r, sender):
        how[sender] = "late"
    for sender in sorted(senders - set(how)):
      if self.records.message(r, sender):
        how[sender] = "sent"
    return how

  def _late(self, r):
    """Messages of earlier rounds that no decision lists."""
    decisions: dict[int, Decision] = {}
    for q in reversed(range(max(0, r - self.max_age), r)):
      decision = self.records.decision(q)
      if decision is None:
        break  # what was listed before it cannot be known
      decisions[q] = decision
    listed = {(sender, q) for x in decisions.values() for sender, q, _ in x.messages}
    late: list[tuple[str, int, str]] = []
    for q, decision in decisions.items():
      usable = self.usable(q, decision.base).items()
      late += [(sender, q, digest) for sender, (digest, _) in usable if (sender, q) not in listed]
    return late

  def messages(self, r: int, decision: Decision) -> list[exchange.Message]:
    """The messages that a decision lists, with their ages."""
    messages = []
    for sender, q, digest in decision.messages:
      message = self._received.get(q, {}).get(sender)
      if message is None or message[0] != digest:
        message = self.records.message(q, sender)
      if message is None or message[0] != digest:
        # Leaving it out would make this center differ from the others'.
        why = "it is gone or cannot be read" if message is None else "it is not the one agreed on"
        raise OutOfStepError(
          f"Directory: the message of {sender!r} in round {q} of fragment {self.records.number} is"
          f" needed, but {why}. Join again."
        )
      messages.append(dataclasses.replace(message[1], age=r - q))
    return messages

  def received(self, r: int) -> list[str]:
    """Whose messages of a round have been read."""
    return sorted(self._received.get(r, {}))

  def is_turn(self, number: int, decision: Decision, sender: str) -> bool:
    """Whether this sender writes the snapshot of this number, after this decision."""
    # Another one each time, so that a pod that dies before it writes leaves a gap of one snapshot,
    # and one that has joined fills it.
    return self.is_new or sender == decision.messages[number % len(decision.messages)][0]

  def keep(self, r: int, snapshot: object) -> None:
    """Writes a snapshot, and deletes everything older than the one before it."""
    self.records.put_snapshot(r, snapshot)
    for q in reversed(self.records.snapshots()):
      # Anyone may claim to have written one.
      if q < r and (q == self.snapshot or self.records.snapshot(q) is not None):
        # Decisions are kept: they tell which of the messages that may still come late were listed.
        self.records.delete(q - self.max_age, snapshots_before=q)
        break
    self.snapshot = r

  def end(self) -> None:
    """Forgets what was read for an exchange that has ended."""
    for read in (self._received, self._complete, self._took_part, self.worked, self.refused):
      read.clear()
    self.begun, self.is_new = self.now(), False
