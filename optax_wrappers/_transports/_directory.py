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
"""

import hashlib
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
from optax_wrappers._transports import _packets
from optax_wrappers._transports._stores import Bucket, Files, Store
from optax_wrappers._workers import _messages

FORMAT, LARGEST_SET = 1, 2**20
_message = jax.jit(_messages.message, static_argnums=0, static_argnames=("sender", "fragment"))


class OutOfStepError(RuntimeError):
  """The log has moved on without this pod, or from a different center; `join` again."""


class Report(NamedTuple):
  """What happened in a synchronization. `str` gives a line for the log.

  Attributes:
    fragment: its number.
    round: the number of the synchronization.
    present: the pods that counted, as `name` or, from an earlier round, `name-age`.
    late: the pods that came after the previous round was decided.
    refused: messages that could not be used, with reasons.
    num_bytes: bytes of the messages that were absorbed.
    waited: seconds.
  """

  fragment: int
  round: int
  present: tuple[str, ...]
  late: tuple[str, ...]
  refused: dict[str, str]
  num_bytes: int
  waited: float

  def __str__(self) -> str:
    refused = ", ".join(f"{name} ({why})" for name, why in self.refused.items())
    others = (("late", ", ".join(self.late)), ("refused", refused))
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
    grace: seconds to wait for others after the quorum; None: a quarter of the time since this pod's
      last exchange. No pod waits if all pods of the previous round have sent. A late pod waits for
      the others to end their round, at most for two of its own rounds, and is expected in the next.
    timeout: seconds to wait for the quorum.
    key: a shared secret that signs all files; None: only checksums.
    staleness: as in `exchange.absorb`, the same in all pods.
    max_age: late messages are absorbed up to this many rounds later; the same in all pods. 0: they
      are dropped, and a codec's feedback adds their content to the next message.
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
    self.run = _packets.name("Directory", "run", run)
    self.sender = _packets.name("Directory", "sender", sender)
    self.quorum = _checks.integer("Directory", "quorum", quorum, minimum=1)
    not_negative = (lambda x: x >= 0), "at least 0"
    self.timeout = _checks.number("Directory", "timeout", timeout, *not_negative)
    self.grace = grace
    if grace is not None:
      self.grace = _checks.number("Directory", "grace", grace, *not_negative)
    if key is not None and not (isinstance(key, bytes) and key):
      raise TypeError(f"Directory: key must be bytes, not empty; got {type(key).__name__}.")
    self.key, self.staleness = key, staleness
    self.max_age = _checks.integer("Directory", "max_age", max_age, minimum=0)
    self.snapshot_every = _checks.integer("Directory", "snapshot_every", snapshot_every, minimum=1)
    self.path = path
    self.round: dict[int, int] = {}
    self.report: Report | None = None
    self._begun: dict[int, float] = {}  # when this pod's last exchange ended
    self._templates: dict[int, Any] = {}  # of the messages of each fragment
    self._received: dict[tuple[int, int], dict[str, Any]] = {}  # what has been read of a round
    self._since: dict[tuple[int, int], float] = {}  # when its quorum was complete
    self._refused: dict[str, str] = {}
    self._late: dict[int, int] = {}  # consecutive late rounds
    self._is_new: set[int] = set()  # fragments without a message since `join`

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
    self._prefix = "" if is_path else f"{self.run}/"
    self._store: Store = Files(root, self.sender) if is_path else Bucket(root)
    state = tx.init(params)
    count = _messages.num_fragments(tx, params)
    self._templates = {k: _messages.template(tx, state, params, k) for k in range(count)}
    self._check_run(state, count)
    self._received.clear()
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
      raise TimeoutError(
        f"{what} after {self.timeout} s; received {received}, refused {self._refused}."
      )
    waited = time.monotonic() - begin
    before = self._store.names(self._name(k, r - 1)) if r else []  # while it still exists
    late = tuple(name.removesuffix(".late") for name in before if name.endswith(".late"))
    params, state, num_bytes = self._absorbed(tx, params, state, k, r, decided)
    state = self._with_uncounted(tx, params, state, k, r, decided)
    present = tuple(s if q == r else f"{s}-{r - q}" for s, q, _ in decided["messages"])
    refused = dict(self._refused)
    params, state, now = self._caught_up(tx, params, state, k, r + 1)
    if self._late.get(k) and not self.max_age:
      # It would be just as late again, so it begins the next round with the others, who wait for
      # it.
      since = time.monotonic()
      length = 2 * (begin - self._begun[k])  # theirs includes a grace period
      self._awaited(state, k, now, min(length, self.timeout))
      waited += time.monotonic() - since
      params, state, now = self._caught_up(tx, params, state, k, now)
      self._store.put(self._name(k, now - 1, f"{self.sender}.late"), b"")
    self.report = Report(k, r, present, late, refused, num_bytes, waited)
    self.round[k], self._begun[k] = now, time.monotonic()
    for held in (self._received, self._since):
      for at in [at for at in held if at[0] == k]:
        del held[at]
    self._refused.clear()
    return params, state

  # One round.

  def _sent(self, tx, params, state, weight, fragment):
    k, r = fragment, self._round_of(fragment)
    own, new = _message(tx, state, params, weight, sender=self.sender, fragment=k)
    data = _packets.to_bytes(own, run=self.run, round=r, key=self.key)
    name, is_late = self._name(k, r, f"{self.sender}.msg"), self._set(k, r) is not None
    is_new = k in self._is_new
    self._is_new.discard(k)
    self._late[k] = (self._late.get(k, 0) + 1) * is_late
    if self._late[k] == 3:
      warnings.warn(
        f"Directory: {self.sender!r} came late three times in a row. Give all a longer grace, or"
        " this one fewer steps, or let late messages count: max_age=1.",
        stacklevel=3,
      )
    if (self.max_age or not is_late) and self._store.put(name, data):
      return new
    try:
      before = self._store.get(name, len(data))
    except ValueError:
      before = b""
    if before is None:  # too late: its content goes into the next message
      return _messages.take_back(tx, new, params, own)
    if before != data and not is_new:
      warnings.warn(
        f"Directory: another pod has the name {self.sender!r}, or has had it in this round: the"
        " message of this one is ignored.",
        stacklevel=3,
      )
    return new if before == data else state  # the message of an earlier call, or of an earlier life

  def _awaited(self, state, k, r, seconds):
    """The decision of a round, or None after this many seconds without one."""
    begin = time.monotonic()
    while (decided := self._look(state, k, r)) is None:
      if time.monotonic() - begin > seconds:
        return None
      time.sleep(self._store.pause)
    return decided

  def _look(self, state, k, r):
    """The decision of a round. If there is none, decides it if possible, else returns None."""
    # Before the set, because a pod writes a center only after it has read the set.
    newest = max(self._centers(k), default=r)
    decided = self._set(k, r)
    if decided is not None:
      return decided
    if newest > r:
      what = f"Directory: round {r} of fragment {k} is over and deleted"
      raise OutOfStepError(f"{what}. Join again: params, state = directory.join(tx, params).")
    base = np.asarray(_messages.base(state, k)).tolist()
    good = self._good(k, r, base)
    if len(good) < self.quorum:
      return None
    now = time.monotonic()
    since = self._since.setdefault((k, r), now)
    grace = (since - self._begun[k]) / 4 if self.grace is None else self.grace
    before = self._store.names(self._name(k, r - 1)) if r else []
    expected = {n.rsplit(".", 1)[0] for n in before if n.endswith((".msg", ".late"))}
    if not (expected and expected <= set(good)) and now - since < grace:
      return None
    listed = [[sender, r, found] for sender, (found, _) in good.items()] + self._aged(k, r)
    listed.sort(key=lambda x: (-x[1], x[0]))
    text = json.dumps({"base": base, "messages": listed}).encode()
    self._store.put(self._name(k, f"{r:08d}.set"), self._packed("set", k, r, text))
    return self._set(k, r)  # of the first pod to write it

  def _good(self, k, r, base):
    """The messages of a round that can be absorbed, by sender: digests and messages."""
    seen = self._received.setdefault((k, r), {})
    for name in self._store.names(self._name(k, r)):
      sender, path = name.removesuffix(".msg"), self._name(k, r, name)
      if not name.endswith(".msg") or sender in seen or path in self._refused:
        continue
      try:
        found, one = self._read(k, r, sender)
        if np.asarray(one.base).tolist() != base:
          raise ValueError("it was made at another center")
        seen[sender] = found, one
      except ValueError as error:
        self._refused[path] = str(error)
    return dict(sorted(seen.items()))

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
      mend = "Steps must not exchange: communication_period=None"
      raise OutOfStepError(f"{what}. {mend}. Then join again.")
    messages = []
    for sender, q, digest in decided["messages"]:
      held = self._received.get((k, q), {}).get(sender)
      try:
        found, one = held if held and held[0] == digest else self._read(k, q, sender)
        if found != digest:
          raise ValueError("it is not the one that was agreed on")
      except ValueError as error:
        # Leaving it out would make this center differ from the others'.
        what = f"Directory: the message of {sender!r} in round {q} of fragment {k} is needed"
        raise OutOfStepError(f"{what}, but {error}. Join again.") from error
      messages.append(_messages.aged(one, r - q))
    params, state = _messages.absorb(tx, state, params, messages, staleness=self.staleness)
    if (r + 1) % self.snapshot_every == 0:
      self._keep(k, r + 1, state)
    return params, state, sum(x.nbytes for one in messages for x in jax.tree.leaves(one))

  def _with_uncounted(self, tx, params, state, k, r, decided):
    """The state with this pod's message added back to the residual, if the round did not count
    it."""
    if self.max_age or any(s == self.sender for s, _, _ in decided["messages"]):
      return state
    try:
      _, own = self._read(k, r, self.sender)
    except ValueError:
      return state  # there was no message
    return _messages.take_back(tx, state, params, own)

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

  def _name(self, k, *parts):
    written = (f"{x:08d}" if isinstance(x, int) else x for x in parts)
    return self._prefix + "/".join((f"f{k}", *written))

  def _packed(self, kind, k, r, body):
    return _packets.pack([kind, self.run, r, k], body, self.key)

  def _unpacked(self, kind, k, r, data):
    header, body = _packets.unpack(data, self.key)
    if header != [kind, self.run, r, k]:
      raise ValueError(f"it is of {header}, and {[kind, self.run, r, k]} was needed")
    return body

  def _read(self, k, r, sender):
    """The digest of a message, and the message."""
    _packets.name("Directory", "sender", sender)
    template = self._templates[k]
    data = self._store.get(self._name(k, r, f"{sender}.msg"), _packets.largest(template))
    if data is None:
      raise ValueError("it is gone")
    one = _packets.from_bytes(data, template, run=self.run, round=r, key=self.key)
    if one.sender != sender:
      raise ValueError(f"it is signed by {one.sender!r}")
    return _packets.digest(data), one

  def _set(self, k, r):
    """The decision of a round, or None."""
    name = self._name(k, f"{r:08d}.set")
    try:
      data = self._store.get(name, LARGEST_SET)
      return None if data is None else json.loads(self._unpacked("set", k, r, data))
    except ValueError as error:
      raise ValueError(
        f"Directory: {name} cannot be read: {error}. No pod can continue."
      ) from error

  def _centers(self, k):
    """The rounds that begin with a snapshot."""
    names = self._store.names(self._name(k))
    stems = (n.removesuffix(".center") for n in names if n.endswith(".center"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())

  def _keep(self, k, r, state):
    """Writes a snapshot, and deletes everything older than the one before it."""
    name = self._name(k, f"{r:08d}.center")
    if r not in self._centers(k):
      body = _packets.body(_messages.snapshot(state, k))
      self._store.put(name, self._packed("center", k, r, body))
    oldest = self._centers(k)[-2:][0]
    for found in self._store.names(self._name(k)):
      stem = found.split(".")[0]
      # Sets are kept: they tell which of the messages that may still come late were listed.
      kept = oldest if found.endswith(".center") else oldest - self.max_age
      if not stem.isdecimal() or int(stem) >= kept:
        continue
      for inside in self._store.names(self._name(k, found)):
        self._store.delete(self._name(k, found, inside))
      self._store.delete(self._name(k, found))

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
    like = _messages.snapshot(state, k)
    if not self._centers(k):
      self._keep(k, 0, state)
    for r in reversed(self._centers(k)):
      name = self._name(k, f"{r:08d}.center")
      try:
        data = self._store.get(name, _packets.largest(like))
        if data is None:
          continue
        held = _packets.arrays(self._unpacked("center", k, r, data), like)
      except ValueError as error:
        self._refused[name] = str(error)
        continue
      return *_messages.adopt(tx, state, params, held, k), r
    raise ValueError(f"Directory: no snapshot of fragment {k} can be read: {self._refused}.")

  def _check_run(self, state, count):
    """Raises for another model, other settings or another key, or without exclusive writes."""
    ages = range(self.max_age + 1)
    weights = [float(self.staleness(jnp.int32(age))) if self.staleness else 1.0 for age in ages]
    held = [(self._templates[k], _messages.snapshot(state, k)) for k in range(count)]
    shapes = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(held)]
    text = json.dumps([FORMAT, repr(state.workers), shapes, weights])
    mine = self._packed("run", 0, 0, hashlib.sha256(text.encode()).digest())
    try:
      self._store.put(f"{self._prefix}run.json", mine)
    except OSError as error:
      what = f"Directory: a file cannot be written once in {self.path}: {error}"
      raise OSError(f"{what}. It needs a file system with hard links, or a bucket.") from error
    if self._store.get(f"{self._prefix}run.json", LARGEST_SET) != mine:
      what = (
        f"Directory: the run {self.run!r} in {self.path} belongs to another model, optimizer, codec"
      )
      raise ValueError(f"{what}, key, max_age or staleness. Give this one another name.")
