"""Synchronization through a write-once log in a directory or a bucket, without a server.

The center is a fold of the log: `center of round r + 1 = absorb(center of r, set of r)`. The set of
a round is a small file that lists messages by their digests and is created only if it does not
exist: the first pod decides, and all others read it. There is no leader, no lease and no shared
clock. A pod that dies before the file exists has decided nothing, and after that everything.
Recovery is reading, and so is joining.

    run.json                       what is trained, so that no other model is mixed in
    f0/00000007/pod-a.msg          the message of a pod for fragment 0 in round 7
    f0/00000007/pod-c.late         a mark: the message came after the round was decided
    f0/00000007.set                the messages to absorb
    f0/00000007.center             the center and the outer state before the round

All are packets, signed if there is a key (`_log`, `_packets`). A name, as everything in the
directory, may be anyone's: only what can be read as a record decides.
"""

import errno
import functools
import json
import os
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _checks
from optax_wrappers._core._types import Tree
from optax_wrappers._workers import _messages, _packets
from optax_wrappers._workers._messages import checked_name
from optax_wrappers.pods._log import SMALL, Log
from optax_wrappers.pods._stores import Bucket, Files

FORMAT, LARGEST_SET = 2, 2**20
_message = jax.jit(_messages.message, static_argnums=0, static_argnames=("sender", "fragment"))


# What `join` cannot see.
_COMPUTES_OTHERWISE = "A pod has another center if its schedule of outer or settings of JAX differ."


class OutOfStepError(RuntimeError):
  """The log has moved on without this pod, or from a different center; `join` again."""


class Report(NamedTuple):
  """What happened in a synchronization. `str` gives a line for the log.

  Attributes:
    fragment: its number.
    round: the number of the synchronization.
    present: the pods that counted, as `name` or, from an earlier round, `name-age`.
    absent: those whose messages had weight 0, for a NaN or for want of a step.
    late: the pods that came after the previous round was decided.
    refused: messages that could not be used, with reasons.
    num_bytes: bytes of the messages that were absorbed.
    waited: seconds.
  """

  fragment: int
  round: int
  present: tuple[str, ...]
  absent: tuple[str, ...]
  late: tuple[str, ...]
  refused: dict[str, str]
  num_bytes: int
  waited: float

  def __str__(self) -> str:
    refused = ", ".join(f"{name} ({why})" for name, why in self.refused.items())
    absent, late = ", ".join(self.absent), ", ".join(self.late)
    others = ("absent", absent), ("late", late), ("refused", refused)
    more = "".join(f"; {what}: {who}" for what, who in others if who)
    what = f"{', '.join(self.present)}{more}; {self.num_bytes:,} bytes, waited {self.waited:.1f} s"
    return f"round {self.round} of fragment {self.fragment}: {what}"


class Directory:
  """Fault-tolerant pods that synchronize through write-once files.

  Each pod is an independent program of one process, which may come, go, stall and die.

  Args:
    path: a directory that all pods see, on a POSIX file system with hard links; or, with
      `optax_wrappers[bucket]`, the URL of a bucket (`"s3://..."`, `"gs://..."`), or a store of
      obstore.
    run: a name for what is trained together, unique in the directory.
    sender: the name of this pod, unique among live pods.
    quorum: the least number of messages that decides a round, at least 1. The attribute may
      be set between exchanges.
    grace: seconds to wait for others after the quorum; None: a quarter of the time from this pod's
      last exchange to its message. No pod waits if all pods of the previous round have sent. A late
      pod waits for the others to end their round, at most for two of its own rounds, and is
      expected in the next.
    timeout: seconds to wait for the quorum.
    key: a shared secret that signs all files; None: only checksums.
    staleness: as in `exchange.absorb`, the same in all pods.
    max_age: late messages are absorbed up to this many rounds later; the same in all pods. 0: they
      are dropped. A codec's feedback adds the content of dropped ones to the next message.
    snapshot_every: rounds between snapshots of the center; files older than the last but one are
      deleted.

  Attributes:
    round: the number of the next exchange of each fragment.
    report: what happened in the last exchange, or None.

  Raises:
    ValueError: for names and numbers out of range.
  """

  def __init__(
    self,
    path: str | os.PathLike | Any,
    *,
    run: str,
    sender: str,
    quorum: int,
    grace: float | None = None,
    timeout: float = 3600.0,
    key: bytes | None = None,
    staleness: Callable[[jax.Array], ArrayLike] | None = None,
    max_age: int = 0,
    snapshot_every: int = 1,
  ):
    self.run = checked_name("Directory", "run", run)
    self.sender = checked_name("Directory", "sender", sender)
    self.quorum = _checks.integer("Directory", "quorum", quorum, minimum=1)
    not_negative = (lambda x: x >= 0), "at least 0"
    self.timeout = _checks.number("Directory", "timeout", timeout, *not_negative)
    self.grace = grace
    if grace is not None:
      self.grace = _checks.number("Directory", "grace", grace, *not_negative)
    self.key, self.staleness = _packets.checked_key("Directory", key), staleness
    self.max_age = _checks.integer("Directory", "max_age", max_age, minimum=0)
    self.snapshot_every = _checks.integer("Directory", "snapshot_every", snapshot_every, minimum=1)
    self.path = os.fsdecode(path) if isinstance(path, bytes) else path
    self.round: dict[int, int] = {}
    self.report: Report | None = None
    self._begun: dict[int, float] = {}  # when this pod's last exchange ended
    self._worked: dict[tuple[int, int], float] = {}  # how long after it this pod sent a message
    self._templates: dict[int, Any] = {}  # of the messages of each fragment
    self._received: dict[tuple[int, int], dict[str, Any]] = {}  # what has been read of a round
    self._since: dict[tuple[int, int], float] = {}  # when its quorum was complete
    self._refused: dict[str, str] = {}  # messages of the round that are no use in it
    self._told: set[str] = set()  # what an earlier report says was refused
    self._snapshots: dict[int, list[int]] = {}  # the rounds of those that this pod has read or made
    self._senders: dict[tuple[int, int], dict[str, str]] = {}  # of an earlier round: how each came
    self._in_a_row: dict[tuple[str, int], list[int]] = {}  # rounds that were late, or of weight 0
    self._own: dict[int, dict[int, Any]] = {}  # this pod's messages that no set lists yet
    self._is_new: set[int] = set()  # fragments that have not been exchanged since `join`

  def join(self, tx: optax.GradientTransformation, params: Tree) -> tuple[Tree, Any]:
    """The initial parameters and state: all pods start from the center in the log.

    Args:
      tx: what `local_steps` or `diloco` returned, as in `exchange.message`.
      params: parameters; the first pod's are the first center.

    Raises:
      ValueError: for a log of another model, `tx`, key, `max_age` or `staleness`.
      OSError: where nothing can be written once.
    """
    if jax.process_count() > 1:
      raise ValueError("Directory: a pod must be one process; this one is of several.")
    is_url = isinstance(self.path, str) and "://" in self.path
    is_path = isinstance(self.path, str | os.PathLike) and not is_url
    root = os.path.join(self.path, self.run) if is_path else self.path
    store = Files(root, self.sender) if is_path else Bucket(root)
    self._log = Log(store, "" if is_path else f"{self.run}/", self.run, self.key)
    state = tx.init(params)
    count = _messages.num_fragments(tx, params)
    self._templates = {k: _messages.template(tx, state, params, k) for k in range(count)}
    self._check_run(tx, params, state, count)
    for held in (self._received, self._senders, self._snapshots, self._own, self._worked):
      held.clear()
    for k in range(count):
      params, state, self.round[k] = self._entered(tx, params, state, k)
      self._begun[k] = time.monotonic()
    self._is_new = set(range(count))
    return params, state

  def exchange(
    self,
    tx: optax.GradientTransformation,
    params: Tree,
    state: Any,
    weight: ArrayLike = 1.0,
    fragment: int = 0,
  ) -> tuple[Tree, Any]:
    """Synchronizes: writes this pod's message, waits for the others, and takes the center.

    Args:
      tx: as in `join`.
      params: this pod's.
      state: this pod's.
      weight: as in `exchange.message`.
      fragment: its number.

    Returns:
      The parameters and the state.

    Raises:
      TimeoutError: if there is no quorum in time. Call again with the same arguments.
      OSError: if a file cannot be written, such as on a full disk. Call again too.
      OutOfStepError: if this pod must join again.
    """
    state = self._sent(tx, params, state, weight, fragment)
    return self.receive(tx, params, state, fragment)

  def send(
    self,
    tx: optax.GradientTransformation,
    params: Tree,
    state: Any,
    weight: ArrayLike = 1.0,
    fragment: int = 0,
  ) -> Any:
    """The first half of `exchange`; steps may run between it and `receive`. Returns the state."""
    return self._sent(tx, params, state, weight, fragment)

  def ready(self, state: Any, fragment: int = 0) -> bool:
    """Whether `receive` would return without waiting; decides the round if possible."""
    return self._look(state, fragment, self._round_of(fragment)) is not None

  def receive(
    self, tx: optax.GradientTransformation, params: Tree, state: Any, fragment: int = 0
  ) -> tuple[Tree, Any]:
    """The second half of `exchange`. Returns the parameters and the state."""
    k, r = fragment, self._round_of(fragment)
    begin = time.monotonic()
    decided = self._awaited(state, k, r, self.timeout)
    if decided is None:
      received = sorted(self._received.get((k, r), {}))
      what = f"Directory: round {r} of fragment {k} has no quorum of {self.quorum}"
      refused = self._all_refused()
      what = f"{what} after {self.timeout} s; received {received}, refused {refused}"
      raise TimeoutError(f"{what}. {_COMPUTES_OTHERWISE}")
    waited = time.monotonic() - begin
    before = self._came(k, r - 1) if r else {}  # while it still exists
    params, state, messages = self._absorbed(tx, params, state, k, r, decided)
    by_weight: dict[bool, list[str]] = {True: [], False: []}
    for one in messages:
      name = f"{one.sender}-{one.age}" if one.age else one.sender
      by_weight[float(one.weight) > 0].append(name)
    refused = self._all_refused()
    params, state, now = self._caught_up(tx, params, state, k, r + 1)
    if self._in_a_row.get(("late", k)) and not self.max_age:
      # It would be just as late again, so it begins the next round with the others, who wait for
      # it.
      since = time.monotonic()
      length = 2 * (begin - self._begun[k])  # theirs includes a grace period
      self._awaited(state, k, now, min(length, self.timeout))
      waited += time.monotonic() - since
      params, state, now = self._caught_up(tx, params, state, k, now)
      self._mark_late(k, now - 1)
    state = self._with_uncounted(tx, params, state, k, now)
    self.report = Report(
      fragment=k,
      round=r,
      present=tuple(by_weight[True]),
      absent=tuple(by_weight[False]),
      late=tuple(name for name, how in before.items() if how == "late"),
      refused=refused,
      num_bytes=sum(x.nbytes for one in messages for x in jax.tree.leaves(one)),
      waited=waited,
    )
    self.round[k], self._begun[k] = now, time.monotonic()
    for held in (self._received, self._since, self._senders, self._worked):
      for at in [at for at in held if at[0] == k]:
        del held[at]
    self._told |= set(self._log.refused)
    self._refused.clear()
    self._is_new.discard(k)
    return params, state

  # One round.

  def _sent(self, tx, params, state, weight, fragment):
    k, r = fragment, self._round_of(fragment)
    self._worked.setdefault((k, r), time.monotonic() - self._begun[k])
    weight = _messages.checked_weight("Directory", weight)
    own, new = _message(tx, state, params, weight, sender=self.sender, fragment=k)
    data = _packets.to_bytes(own, run=self.run, round=r, key=self.key)
    path, is_late = self._log.name(k, r, f"{self.sender}.msg"), self._set(k, r) is not None
    self._note(
      "late",
      k,
      r,
      is_late,
      "came late",
      "Give all a longer grace, or this one fewer steps, or let late messages count: max_age=1.",
    )
    is_void = float(own.weight) == 0 and int(state.step) > 0
    self._note(
      "void",
      k,
      r,
      is_void,
      "sent weight 0",
      "Its weight was 0, or its parameters hold a NaN or an infinity at the end of each round.",
    )
    read = functools.partial(self._message_of, k, r, self.sender)
    before = None
    can_count = self.max_age or not is_late
    if not (can_count and self._log.put(path, data, len(data), read)):
      before = self._log.get(path, len(data), lambda data: read(data) and data)
    if before not in (None, data):  # of an earlier life, or of another pod
      if k not in self._is_new:
        warnings.warn(
          f"Directory: another pod has the name {self.sender!r}, or has had it in this round: the"
          " message of this one is ignored.",
          stacklevel=3,
        )
      return _messages.take_back(tx, new, params, own)  # its content goes into the next message
    if _messages.has_residual(tx):
      self._own.setdefault(k, {})[r] = _packets.digest(data), own
    return new

  def _note(self, what, k, r, is_so, said, mend):
    """Warns of what has been so in three rounds in a row."""
    rounds = self._in_a_row.setdefault((what, k), [])
    if not is_so:
      rounds.clear()
    elif r not in rounds:
      rounds.append(r)
      if len(rounds) == 3:
        who = f"Directory: {self.sender!r} {said} three times in a row"
        warnings.warn(f"{who}. {mend}", stacklevel=4)

  def _awaited(self, state, k, r, seconds):
    """The decision of a round, or None after this many seconds without one."""
    begin = time.monotonic()
    while (decided := self._look(state, k, r)) is None:
      if time.monotonic() - begin > seconds:
        return None
      time.sleep(self._log.store.pause)
    return decided

  def _look(self, state, k, r):
    """The decision of a round. If there is none, decides it if possible, else returns None."""
    # Before the set, because a pod writes a center only after it has read the set.
    newer = sorted(q for q in self._centers(k) if q > r)
    decided = self._set(k, r)
    if decided is not None:
      return decided
    if any(self._snapshot(state, k, q) for q in newer):
      what = f"Directory: round {r} of fragment {k} is over and deleted"
      raise OutOfStepError(f"{what}. Join again: params, state = directory.join(tx, params).")
    base = np.asarray(_messages.base(state, k)).tolist()
    good = self._good(k, r, base)
    if len(good) < self.quorum:
      return None
    now = time.monotonic()
    since = self._since.setdefault((k, r), now)
    # Without what it has waited since: an outage of the others makes no grace longer.
    worked = self._worked.get((k, r), since - self._begun[k])
    grace = worked / 4 if self.grace is None else self.grace
    expected = set(self._came(k, r - 1)) if r else set()
    if not (expected and expected <= set(good)) and now - since < grace:
      return None
    listed = [[sender, r, found] for sender, (found, _) in good.items()] + self._aged(k, r)
    listed.sort(key=lambda x: (-x[1], x[0]))
    text = json.dumps({"base": base, "messages": listed}).encode()
    data, read = self._log.packed("set", k, r, text), functools.partial(self._set_of, k, r)
    self._log.put(self._log.name(k, f"{r:08d}.set"), data, LARGEST_SET, read)
    return self._set(k, r)  # of the first pod to write it

  def _good(self, k, r, base):
    """The messages of a round that can be absorbed, by sender: digests and messages."""
    seen = self._received.setdefault((k, r), {})
    for sender in sorted(self._log.names(k, r).get("msg", ())):
      path = self._log.name(k, r, f"{sender}.msg")
      if sender in seen or path in self._refused:
        continue
      found = self._read(k, r, sender)
      if found is None:
        continue  # refused, or gone
      if np.asarray(found[1].base).tolist() != base:
        self._refused[path] = "it was made at another center"
        continue
      seen[sender] = found
    return dict(sorted(seen.items()))

  def _came(self, k, q):
    """Who took part in an earlier round: "counted", "late", or "sent" too late for the set."""
    came = self._senders.setdefault((k, q), {})
    if not came:
      came |= {
        s: "counted" for s, t, _ in (self._set(k, q) or {"messages": ()})["messages"] if t == q
      }
    claimed = self._log.names(k, q)
    for sender in claimed.get("late", set()) - {s for s, how in came.items() if how == "late"}:
      name = self._log.name(k, q, f"{sender}.late")
      if self._log.get(name, SMALL, functools.partial(self._mark_of, k, q, sender)):
        came[sender] = "late"
    for sender in claimed.get("msg", set()) - set(came):
      if self._read(k, q, sender):
        came[sender] = "sent"
    return came

  def _mark_late(self, k, q):
    name, read = f"{self.sender}.late", functools.partial(self._mark_of, k, q, self.sender)
    data = self._log.packed("late", k, q, self.sender.encode())
    self._log.put(self._log.name(k, q, name), data, SMALL, read)

  def _aged(self, k, r):
    """Late messages of earlier rounds that no set lists."""
    found: list[Any] = []
    rounds = range(max(0, r - self.max_age), r)
    sets = {q: self._set(k, q) for q in rounds}
    listed = {(s, q) for one in sets.values() if one for s, q, _ in one["messages"]}
    for q in rounds:
      if sets[q] and all(sets[t] for t in range(q, r)):
        late = self._good(k, q, sets[q]["base"])
        found += [[s, q, digest] for s, (digest, _) in late.items() if (s, q) not in listed]
    return found

  def _absorbed(self, tx, params, state, k, r, decided):
    """The parameters and the state after a round, and the bytes of its messages."""
    if decided["base"] != np.asarray(_messages.base(state, k)).tolist():
      what = f"Directory: round {r} of fragment {k} begins at another center than this pod's"
      mend = "Steps must not exchange: communication_period=None. Then join again"
      raise OutOfStepError(f"{what}. {mend}. {_COMPUTES_OTHERWISE}")
    messages = []
    for sender, q, digest in decided["messages"]:
      held = self._received.get((k, q), {}).get(sender)
      if not (held and held[0] == digest):
        held = self._read(k, q, sender)
      if held is None or held[0] != digest:
        # Leaving it out would make this center differ from the others'.
        why = "it is gone or cannot be read" if held is None else "it is not the one agreed on"
        what = f"Directory: the message of {sender!r} in round {q} of fragment {k} is needed"
        raise OutOfStepError(f"{what}, but {why}. Join again.")
      messages.append(_messages.aged(held[1], r - q))
      if sender == self.sender and self._own.get(k, {}).get(q, ("",))[0] == digest:
        del self._own[k][q]
    params, state = _messages.absorb(tx, state, params, messages, staleness=self.staleness)
    if (r + 1) % self.snapshot_every == 0:
      self._keep(k, r + 1, state)
    return params, state, messages

  def _with_uncounted(self, tx, params, state, k, now):
    """The state with the content of this pod's messages back in the residual that no round before
    `now` has counted and none will."""
    own = self._own.get(k, {})
    for q in [q for q in own if q + self.max_age < now]:
      state = _messages.take_back(tx, state, params, own.pop(q)[1])
    return state

  def _caught_up(self, tx, params, state, k, r):
    """The result of all rounds that have been decided in the meantime."""
    while (decided := self._set(k, r)) is not None:
      params, state, _ = self._absorbed(tx, params, state, k, r, decided)
      r += 1
    return params, state, r

  # The content of the log.

  def _round_of(self, k):
    if k not in self.round:
      raise ValueError(
        f"Directory: fragment must be one of {sorted(self.round)}, after join; got {k}."
      )
    return self.round[k]

  def _all_refused(self):
    """What could not be used, with reasons, fit for a log."""
    found = self._log.refused | self._refused
    told = ((name, why) for name, why in found.items() if name not in self._told)
    return {_packets.plain(name): _packets.plain(why) for name, why in told}

  def _read(self, k, r, sender):
    """The digest of a message, and the message; None if there is none that can be read."""
    read = functools.partial(self._message_of, k, r, sender)
    name, limit = self._log.name(k, r, f"{sender}.msg"), _packets.largest(self._templates[k])
    return self._log.get(name, limit, read)

  def _message_of(self, k, r, sender, data):
    one = _packets.from_bytes(data, self._templates[k], run=self.run, round=r, key=self.key)
    if one.sender != sender:
      raise ValueError(f"it is signed by {one.sender!r}")
    return _packets.digest(data), one

  def _mark_of(self, k, q, sender, data):
    if self._log.unpacked("late", k, q, data) != sender.encode():
      raise ValueError("it is signed by another pod")
    return True

  def _set(self, k, r):
    """The decision of a round, or None."""
    name = self._log.name(k, f"{r:08d}.set")
    return self._log.get(name, LARGEST_SET, functools.partial(self._set_of, k, r))

  def _set_of(self, k, r, data):
    found = _packets.parsed(self._log.unpacked("set", k, r, data))
    match found:
      case {"base": [int(), int()], "messages": list(listed)} if listed:
        for one in listed:
          match one:
            case [str(sender), int(q), str()] if 0 <= q <= r and _messages.NAME.fullmatch(sender):
              continue
          raise ValueError("it lists no messages")
        return found
    raise ValueError("it is no set")

  def _centers(self, k):
    """The rounds that are claimed to begin with a snapshot."""
    return sorted(int(x) for x in self._log.names(k).get("center", ()) if x.isdecimal())

  def _snapshot(self, state, k, r):
    """The center and the outer state of a round, or None if there is no readable snapshot."""
    like, name = _messages.snapshot(state, k), self._log.name(k, f"{r:08d}.center")
    read = functools.partial(self._center_of, like, k, r)
    return self._log.get(name, _packets.largest(like), read)

  def _center_of(self, like, k, r, data):
    return _packets.arrays(self._log.unpacked("center", k, r, data), like)

  def _keep(self, k, r, state):
    """Writes a snapshot, and deletes everything older than the one before it."""
    like = _messages.snapshot(state, k)
    data = self._log.packed("center", k, r, _packets.body(like))
    read = functools.partial(self._center_of, like, k, r)
    self._log.put(self._log.name(k, f"{r:08d}.center"), data, _packets.largest(like), read)
    known = self._snapshots.setdefault(k, [])
    known.append(r)
    if len(known) < 2:
      return
    oldest, store = known[-2], self._log.store
    for found in store.names(self._log.name(k)):
      stem = found.split(".")[0].split("~")[0]
      # Sets are kept: they tell which of the messages that may still come late were listed.
      kept = oldest if found.endswith(".center") else oldest - self.max_age
      if not stem.isdecimal() or int(stem) >= kept:
        continue
      for inside in store.names(self._log.name(k, found)):
        store.delete(self._log.name(k, found, inside))
      store.delete(self._log.name(k, found))

  def _entered(self, tx, params, state, k, attempts=10):
    """The parameters and the state after all decided rounds, and the next round."""
    newest = self._newest(tx, params, state, k)
    try:
      return self._caught_up(tx, *newest[:2], k, newest[2])
    except OutOfStepError:
      # Meanwhile the others continued and deleted files that were needed: start from a newer
      # snapshot.
      if attempts == 1:
        raise
      return self._entered(tx, params, state, k, attempts - 1)

  def _newest(self, tx, params, state, k):
    """A pod's initial state: the newest readable snapshot, and its round."""
    if not self._centers(k):
      self._keep(k, 0, state)
    for r in reversed(self._centers(k)):
      held = self._snapshot(state, k, r)
      if held is not None:
        self._snapshots[k] = [r]
        return *_messages.adopt(tx, state, params, held, k), r
    refused = self._all_refused()
    raise ValueError(f"Directory: no snapshot of fragment {k} can be read: {refused}.")

  def _check_run(self, tx, params, state, count):
    """Raises for another model, other settings or another key, or without exclusive writes."""
    ages = range(self.max_age + 1)
    weights = [float(self.staleness(jnp.int32(age))) if self.staleness else 1.0 for age in ages]
    parts = range(count)
    paths = jax.tree.leaves_with_path([_messages.snapshot(state, k) for k in parts])
    for path, x in paths:
      if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        what = f"Directory: {jax.tree_util.keystr(path)}, in the state of outer, is a random key"
        raise TypeError(f"{what}, and files hold numbers only. Take an outer without one.")
    model = [f"{jax.tree_util.keystr(path)}: {_form(x)}" for path, x in paths]
    code = [_form(x) for k in parts for x in self._templates[k].parts]
    probes = [_messages.probe(tx, state, params, k) for k in parts]
    outer, codec = ([_packets.digest(_packets.body(x)) for x in one] for one in zip(*probes))
    # A pod whose center moved otherwise would be found out of step, but only a round later.
    mine = {
      "format": FORMAT,
      "model or wrapper": [repr(state.workers), model],
      "outer optimizer, or its settings": outer,
      "codec": [code, codec],
      "max_age or staleness": weights,
    }
    mine = {what: _packets.digest(json.dumps(value).encode()) for what, value in mine.items()}
    # In no other slot: what cannot be read may be a run with another key.
    name = f"{self._log.prefix}run.json"
    data = self._log.packed("run", 0, 0, json.dumps(mine).encode())
    try:
      self._log.store.put(name, data)
    except OSError as error:
      what = f"Directory: a file cannot be written once in {self.path}: {error}"
      is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
      mend = "Make room." if is_full else "It needs a file system with hard links, or a bucket."
      raise OSError(f"{what}. {mend}") from error
    here = f"the run {self.run!r} in {self.path}"
    try:
      there = self._log.store.get(name, SMALL)
      if there is None:
        raise ValueError("it is gone")
      found = _packets.parsed(self._log.unpacked("run", 0, 0, there))
      if not isinstance(found, dict):
        raise ValueError("it is no run of this version")
    except ValueError as error:
      what = f"Directory: {here} has another key, or its run.json is no record ({error})"
      raise ValueError(f"{what}. Give this one another name.") from error
    others = [what for what, digest in mine.items() if found.get(what) != digest]
    if others:
      what = f"Directory: {here} belongs to another {', another '.join(others)}"
      raise ValueError(f"{what}. Give this one another name.")


def _form(x):
  return f"{x.dtype}{list(x.shape)}"
