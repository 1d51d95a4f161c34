"""Synchronization through a write-once log in a directory or a bucket, without a server.

The center is a fold of the log: `center of round r + 1 = absorb(center of r, decision of r)`. The
decision of a round is a small file that lists messages by their digests and is created only if it
does not exist: the first pod decides, and all others read it. There is no leader, no lease and no
shared clock. Recovery is reading, and so is joining.

    run.settings                   digests of what is trained, so that no other model is mixed in
    run.model                      names and shapes of the center, for a later run
    f0/00000007/pod-a.msg          the message of a pod for fragment 0 in round 7
    f0/00000007/pod-c.late         a mark: the message came after the round was decided
    f0/00000007.set                the decision: the messages to absorb
    f0/00000007.center             the center and the outer state before the round

All are messages of `exchange`, signed if there is a key (`_log`). A name, as everything in the
directory, may be anyone's: only what can be read as a record decides.
"""

import functools
import hashlib
import math
import os
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_wrappers import exchange
from optax_wrappers.pods._joining import base_of, check_run, settings_of
from optax_wrappers.pods._log import NAME, Log, digest
from optax_wrappers.pods._processes import Shared, require_equal
from optax_wrappers.pods._records import Records
from optax_wrappers.pods._report import Report
from optax_wrappers.pods._restart import center_of, started_from, write_model
from optax_wrappers.pods._rounds import OutOfStepError, Rounds
from optax_wrappers.pods._stores import Bucket, Files, pause_after

Tree = Any
_message = jax.jit(exchange.message, static_argnums=0, static_argnames=("sender", "fragment"))


_LATE, _VOID = "came late", "sent weight 0"
_MEND = {
  _LATE: "Give all a longer grace, or this one fewer steps, or let late messages count: max_age=1.",
  _VOID: "Its weight was 0, or its parameters hold a NaN or an infinity at the end of each round.",
}
# What `join` cannot see.
_COMPUTES_OTHERWISE = "A pod has another center if its schedule of outer or settings of JAX differ."


class Directory:
  """Fault-tolerant pods that synchronize through write-once files.

  Each pod is an independent program of one or more processes, which may come, go, stall and die.
  All processes of a pod make the same calls.

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
    integers = ("quorum", quorum, 1), ("max_age", max_age, 0), ("snapshot_every", snapshot_every, 1)
    for what, value, least in integers:
      if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"Directory: {what} must be an int of at least {least}, got {value!r}.")
    for what, seconds in (("timeout", timeout), ("grace", 0.0 if grace is None else grace)):
      if not float(seconds) >= 0:
        raise ValueError(f"Directory: {what} must be at least 0, got {seconds}.")
    # An empty one, as of a variable that is not set, would sign nothing.
    if key is not None and not (isinstance(key, bytes) and key):
      raise TypeError("Directory: key must be bytes, not empty.")
    self.path = os.fsdecode(path) if isinstance(path, bytes) else path
    self.run, self.sender, self.key = _name("run", run), _name("sender", sender), key
    self.grace, self.timeout, self.staleness = grace, timeout, staleness
    self.quorum, self.max_age = int(quorum), int(max_age)
    self.snapshot_every = int(snapshot_every)
    self.round: dict[int, int] = {}
    self.report: Report | None = None
    self._rounds: dict[int, Rounds] = {}
    # What an earlier report says was refused.
    self._reported: set[str] = set()
    # Rounds that were late, or of weight 0.
    self._in_a_row: dict[tuple[str, int], list[int]] = {}

  def join(self, tx: optax.GradientTransformation, params: Tree) -> tuple[Tree, Any]:
    """The initial parameters and state: all pods start from the center in the log.

    Args:
      tx: what `local_steps` or `diloco` returned, as in `exchange.message`.
      params: parameters; the first pod's are the first center.

    Raises:
      ValueError: for a log of another model, `tx`, key, `max_age` or `staleness`.
      OSError: where nothing can be written once.
    """
    forms = [
      (jax.tree_util.keystr(path), jnp.shape(x), str(jnp.result_type(x)))
      for path, x in jax.tree.leaves_with_path(params)
    ]
    require_equal(self._arguments() | {"params": forms})
    self._tx, self._log = tx, self._log_of(self.run)
    state = tx.init(params)
    # Raises for a tx without messages.
    exchange.template(tx, state, params)
    fragments = []
    for k in range(len(state.of_fragments("center"))):
      template = exchange.template(tx, state, params, k)
      fragments.append(Records(self._log, k, template, exchange.snapshot(state, k)))
    settings, measured = settings_of(tx, params, state, fragments, self.quorum, self.max_age)
    staleness = self.staleness or jnp.ones_like
    weights = [np.asarray(staleness(jnp.int32(k))).tolist() for k in range(self.max_age + 1)]
    settings["max_age and staleness"] = weights
    require_equal(settings)
    check_run(self._log, self.path, settings, measured)
    write_model(self._log, fragments)
    self._rounds = {records.number: Rounds(records, self.max_age) for records in fragments}
    for k in self._rounds:
      params, state, self.round[k] = self._entered(tx, params, state, k)
      self._rounds[k].begun = self._rounds[k].now()
    return params, state

  def start_from(self, run: str, params: Tree) -> tuple[Tree, list[str]]:
    """Parameters at the newest center of another run in the same place, for `join` of a new run.

    For a new version of a program, with another outer optimizer, reduction, codec, fragments or
    model. Only the first pod of a run decides where it starts.

    Args:
      run: its name.
      params: the parameters of this program, which give names, shapes, dtypes and layout.

    Returns:
      The parameters, and the names of those that the other run does not have: they keep their
      values here. What only the other run has is left out.

    Raises:
      ValueError: for a parameter of another shape there, a run without a readable center or with
        another key, and one whose fragments are parts of variables.
    """
    require_equal(self._arguments() | {"run to start from": run})
    return started_from(center_of(self._log_of(_name("run", run))), params)

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
    return self._agreed(state, fragment, self._round_of(fragment)) is not None

  def receive(
    self, tx: optax.GradientTransformation, params: Tree, state: Any, fragment: int = 0
  ) -> tuple[Tree, Any]:
    """The second half of `exchange`. Returns the parameters and the state."""
    k, r = fragment, self._round_of(fragment)
    rounds = self._rounds[k]
    begin = rounds.now()
    decision = self._awaited(state, k, r, self.timeout)
    if decision is None:
      raise TimeoutError(
        f"Directory: round {r} of fragment {k} has no quorum of {self.quorum} after {self.timeout}"
        f" s; received {rounds.received(r)}, refused {self._refused(k)}. {_COMPUTES_OTHERWISE}"
      )
    waited = rounds.now() - begin
    before = rounds.took_part(r - 1)  # while it still exists
    params, state, messages, found = self._absorbed(tx, params, state, k, r, decision)
    refused = self._refused(k)
    params, state, r_next = self._caught_up(tx, params, state, k, r + 1)
    if self._in_a_row.get((_LATE, k)) and not self.max_age:
      # It would be just as late again, so it begins the next round with the others, who wait for
      # it.
      since = rounds.now()
      # Theirs includes a grace period.
      length = 2 * (begin - rounds.begun)
      self._awaited(state, k, r_next, min(length, self.timeout))
      waited += rounds.now() - since
      params, state, r_next = self._caught_up(tx, params, state, k, r_next)
      rounds.records.mark(r_next - 1, self.sender)
    state = self._with_uncounted(tx, params, state, k, r_next)
    names = [f"{x.sender}-{x.age}" if x.age else x.sender for x in messages]
    is_present = [float(x.weight) > 0 for x in messages]
    counted = {name: x for name, x, counts in zip(names, found, is_present) if counts}
    self.report = Report(
      fragment=k,
      round=r,
      present=tuple(counted),
      absent=tuple(name for name, counts in zip(names, is_present) if not counts),
      norms={name: x.norm for name, x in counted.items()},
      weights={name: x.weight for name, x in counted.items()},
      late=tuple(name for name, how in before.items() if how == "late"),
      refused=refused,
      num_bytes=sum(x.nbytes for x in jax.tree.leaves(messages)),
      waited=waited,
    )
    self.round[k] = r_next
    self._reported |= set(self._log.refused)
    rounds.end()
    return params, state

  def _log_of(self, run):
    is_url = isinstance(self.path, str) and "://" in self.path
    is_path = isinstance(self.path, str | os.PathLike) and not is_url
    root = os.path.join(self.path, run) if is_path else self.path
    open_store = functools.partial(Files, root, self.sender) if is_path else lambda: Bucket(root)
    store = Shared(open_store) if jax.process_count() > 1 else open_store()
    return Log(store, "" if is_path else f"{run}/", run, self.key)

  # One round.

  def _sent(self, tx, params, state, weight, fragment):
    here = {"round": self.round, "weight": weight, "fragment": fragment}
    require_equal(self._arguments() | here)
    k, r = fragment, self._round_of(fragment)
    rounds = self._rounds[k]
    rounds.worked.setdefault(r, rounds.now() - rounds.begun)
    weight = _checked_weight(weight)
    if weight not in (0, 1):  # which a reduction may refuse, where it has a value
      given = functools.partial(exchange.message, tx, weight=weight, sender=self.sender, fragment=k)
      jax.eval_shape(given, state, params)
    message, new = _message(tx, state, params, weight, sender=self.sender, fragment=k)
    is_late = rounds.records.decision(r) is not None
    is_void = float(message.weight) == 0 and int(state.step) > 0
    self._warn_of(_LATE, k, r, is_late)
    self._warn_of(_VOID, k, r, is_void)
    data = self._log.packed("msg", r, message)
    can_count = self.max_age or not is_late
    if not (can_count and rounds.records.put_message(r, message, data)):
      there = rounds.records.message(r, self.sender)
      if there is not None and there[0] != digest(data):
        # Of an earlier life, or of another pod. The content goes into the next message.
        if not rounds.is_new:
          warnings.warn(
            f"Directory: another pod has the name {self.sender!r}, or has had it in this round: the"
            " message of this one is ignored.",
            stacklevel=3,
          )
        return exchange.take_back(tx, new, params, message)
    if _has_residual(state, k):
      rounds.sent[r] = digest(data), message
    return new

  def _arguments(self):
    """What all processes of a pod must have in common, beside `tx`."""
    names = "run", "sender", "quorum", "grace", "timeout", "max_age", "snapshot_every"
    key = self.key and hashlib.sha256(self.key).hexdigest()
    return {name: getattr(self, name) for name in names} | {"key": key}

  def _warn_of(self, what, k, r, is_so):
    """Warns of what has been so in three rounds in a row."""
    rounds = self._in_a_row.setdefault((what, k), [])
    if not is_so:
      rounds.clear()
    elif r not in rounds:
      rounds.append(r)
      if len(rounds) == 3:
        text = f"Directory: {self.sender!r} {what} three times in a row. {_MEND[what]}"
        warnings.warn(text, stacklevel=4)

  def _awaited(self, state, k, r, seconds):
    """The decision of a round, or None after this many seconds without one."""
    now = self._rounds[k].now
    begin = now()
    while (decision := self._agreed(state, k, r)) is None:
      waited = now() - begin
      if waited > seconds:
        return None
      time.sleep(pause_after(waited, self._log.store.pause))
    return decision

  def _agreed(self, state, k, r):
    """The decision of a round. If there is none, decides it if possible, else returns None."""
    base = functools.partial(self._base_of, state, k)
    return self._rounds[k].agree(r, base, self.quorum, self.grace)

  def _base_of(self, state, k):
    return np.asarray(base_of(self._tx, state, k)).tolist()

  def _absorbed(self, tx, params, state, k, r, decision):
    """The parameters and the state after a round, its messages, and what each has added."""
    if decision.base != self._base_of(state, k):
      raise OutOfStepError(
        f"Directory: round {r} of fragment {k} begins at another center than this pod's. Steps must"
        " not exchange: communication_period=None. Then join again. " + _COMPUTES_OTHERWISE
      )
    rounds = self._rounds[k]
    messages = rounds.messages(r, decision)
    for sender, q, name in decision.messages:
      if sender == self.sender and rounds.sent.get(q, ("",))[0] == name:
        del rounds.sent[q]
    params, state, found = exchange.merge(tx, state, params, messages, staleness=self.staleness)
    number, rest = divmod(r + 1, self.snapshot_every)
    if not rest and rounds.is_turn(number, decision, self.sender):
      rounds.keep(r + 1, exchange.snapshot(state, k))
    return params, state, messages, found

  def _with_uncounted(self, tx, params, state, k, r_next):
    """The state with the content of this pod's messages back in the residual that no round before
    this one has counted and none will."""
    sent = self._rounds[k].sent
    for q in [q for q in sent if q + self.max_age < r_next]:
      state = exchange.take_back(tx, state, params, sent.pop(q)[1])
    return state

  def _caught_up(self, tx, params, state, k, r):
    """The result of all rounds that have been decided in the meantime."""
    while (decision := self._rounds[k].records.decision(r)) is not None:
      params, state, *_ = self._absorbed(tx, params, state, k, r, decision)
      r += 1
    return params, state, r

  def _entered(self, tx, params, state, k, attempts=10):
    """The parameters and the state after all decided rounds, and the next round."""
    *start, r = self._newest(tx, params, state, k)
    try:
      return self._caught_up(tx, *start, k, r)
    except OutOfStepError:
      if attempts == 1:
        raise
    # Meanwhile the others continued and deleted files that were needed.
    return self._entered(tx, params, state, k, attempts - 1)

  def _newest(self, tx, params, state, k):
    """A pod's initial state: the newest readable snapshot, and its round."""
    rounds = self._rounds[k]
    if not rounds.records.snapshots():
      rounds.keep(0, exchange.snapshot(state, k))
    newest = rounds.records.newest()
    if newest is None:
      raise ValueError(f"Directory: no snapshot of fragment {k} can be read: {self._refused(k)}.")
    rounds.snapshot, snapshot = newest
    return *exchange.adopt(tx, state, params, snapshot, k), rounds.snapshot

  def _round_of(self, k):
    if k not in self.round:
      raise ValueError(
        f"Directory: fragment must be one of {sorted(self.round)}, after join; got {k}."
      )
    return self.round[k]

  def _refused(self, k):
    """What could not be used and is in no report yet, with reasons, fit for a log."""
    refused = self._log.refused | self._rounds[k].refused
    new = ((name, why) for name, why in refused.items() if name not in self._reported)
    return {_plain(name): _plain(why) for name, why in new}


def _name(what, name):
  if not (isinstance(name, str) and re.fullmatch(NAME, name)):
    requirement = "a letter or digit, and then letters, digits, '.', '_' and '-', 100 at most"
    raise ValueError(f"Directory: {what} must be {requirement}; got {name!r}.")
  return str(name)


def _checked_weight(weight):
  if np.ndim(weight) or np.iscomplexobj(weight) or not 0 <= float(weight) < math.inf:
    raise ValueError(f"Directory: weight must be a finite number of at least 0, got {weight}.")
  # JAX has no integer above 2**31 without jax_enable_x64.
  return np.float64(weight)


def _has_residual(state, k):
  """Whether `take_back` changes a state."""
  return state.compressed is not None and state.compressed[k].residual is not None


def _plain(text):
  """Text from outside, fit for one line of a log: without surrogates and line breaks."""
  return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
