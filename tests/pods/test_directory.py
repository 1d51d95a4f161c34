"""Pods that exchange through files that are written once: real processes, killed and stopped."""

import itertools
import math
import os
import pathlib
import resource
import shutil
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from directory_cases import START, center_of, optimizer, pod, received, sent, train
from flax import serialization

import optax_wrappers as ow
from optax_wrappers.pods import _directory, _stores


def test_exchange_of_weighted_pods_matches_numpy(tmp_path):
  tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=optax.sgd(0.5))
  pods = [pod(tmp_path, name, quorum=2) for name in "ab"]
  held = [one.join(tx, START) for one in pods]
  held = [train(tx, *one, slope) for one, slope in zip(held, (1.0, -5.0), strict=True)]
  said = [p.send(tx, *one, w) for p, one, w in zip(pods, held, (1.0, 3.0), strict=True)]
  for p, (params, _), state in zip(pods, held, said, strict=True):
    params, state = p.receive(tx, params, state)
    mean = (1 * 0.1 - 3 * 0.5) / 4
    np.testing.assert_allclose(params["w"], START["w"] - 0.5 * mean, rtol=1e-5)
    assert p.report.present == ("a", "b") and p.round == {0: 1}
    assert str(p.report).startswith("round 0 of fragment 0: a, b; 3")
    assert p.report.weights == {"a": 0.25, "b": 0.75} and not p.report.cut
    size = np.sqrt(64 * 64 + 5)
    assert p.report.norms == pytest.approx({"a": 0.1 * size, "b": 0.5 * size}, rel=1e-4)


def test_late_pod_keeps_work_in_residual_and_is_reported(tmp_path):
  tx = optimizer()
  fast, slow = pod(tmp_path, "fast"), pod(tmp_path, "slow")
  (x, s), (y, t) = fast.join(tx, START), slow.join(tx, START)
  x, s = fast.exchange(tx, *train(tx, x, s, 1.0))
  y, t = train(tx, y, t, 2.0)
  moved = np.asarray(y["w"])
  y, t = slow.exchange(tx, y, t)
  assert center_of(s) == center_of(t)
  residual = t.compressed[0].residual["w"]
  np.testing.assert_allclose(residual, START["w"] - moved, rtol=1e-4, atol=1e-5)
  fast.exchange(tx, *train(tx, x, s, 1.0))
  assert fast.report.late == ("slow",)


def test_late_message_written_during_decision_stays_in_residual(tmp_path):
  """They have not seen it, and it has not seen that they decided."""
  tx = optimizer()
  fast, slow = pod(tmp_path, "fast"), pod(tmp_path, "slow")
  (x, s), (y, t) = fast.join(tx, START), slow.join(tx, START)
  x, s = train(tx, x, s, 1.0)
  s, put, ended = fast.send(tx, x, s), slow._log.store.put, []

  def put_too_late(name, data):
    if name.endswith("slow.msg"):
      ended.append(fast.receive(tx, x, s))
    return put(name, data)

  slow._log.store.put = put_too_late
  y, t = train(tx, y, t, 2.0)
  moved = np.asarray(y["w"])
  y, t = slow.exchange(tx, y, t)
  assert slow.report.present == ("fast",) and center_of(ended[0][1]) == center_of(t)
  residual = t.compressed[0].residual["w"]
  np.testing.assert_allclose(residual, START["w"] - moved, rtol=1e-4, atol=1e-5)


def test_late_pod_waits_twice_the_length_of_its_round_for_lost_pods(tmp_path, monkeypatch):
  tx = optimizer()
  gone, slow = pod(tmp_path, "gone"), pod(tmp_path, "slow", timeout=60.0)
  held, behind = gone.join(tx, START), slow.join(tx, START)
  begin = time.monotonic()
  gone.exchange(tx, *train(tx, *held, 1.0))
  params, state = train(tx, *behind, 2.0)
  state = slow.send(tx, params, state)
  time.sleep(1.0)
  length = time.monotonic() - begin
  waits, awaited = [], slow._awaited
  monkeypatch.setattr(slow, "_awaited", lambda *args: waits.append(args[-1]) or awaited(*args))
  slow.receive(tx, params, state)
  assert slow.round == {0: 1} and waits[0] == 60.0
  assert 2 * length <= waits[1] < 2.4 * length
  assert time.monotonic() - begin < 4 * length + 20


def test_last_pod_with_nan_goes_back_to_center(tmp_path):
  """From 1 towards 3; in the second round a gradient is NaN, and there is no other pod."""
  tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=optax.sgd(1.0))
  one = pod(tmp_path, "a")
  (params, state), expected = one.join(tx, jnp.float32(1.0)), 1.0
  for r in range(4):
    for k in range(2):
      factor = jnp.nan if (r, k) == (1, 0) else 1.0
      updates, state = tx.update((params - 3.0) * factor, state, params)
      params = optax.apply_updates(params, updates)
      expected += 0.1 * (3.0 - expected) * (r != 1)
    params, state = one.exchange(tx, params, state)
    assert float(params) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seen_before", ["on time", "late"])
def test_grace_waits_for_known_pod_and_ends_once_all_sent(tmp_path, seen_before):
  tx = optimizer()
  a, b = pod(tmp_path, "a"), pod(tmp_path, "b")
  held = [a.join(tx, START), b.join(tx, START)]
  if seen_before == "on time":
    held = received(tx, (a, b), sent(tx, (a, b), held, [1.0, 2.0]))
  else:
    held[0] = a.exchange(tx, *train(tx, *held[0], 1.0))
    held[1] = b.exchange(tx, *train(tx, *held[1], 2.0))
  a.grace = b.grace = 30.0
  ended = []
  mine = train(tx, *held[0], 1.0)
  thread = threading.Thread(target=lambda: ended.extend(a.exchange(tx, *mine)))
  thread.start()
  time.sleep(1.0)
  assert not ended  # for whom it has seen
  begin = time.monotonic()
  held[1] = b.exchange(tx, *train(tx, *held[1], 2.0))
  thread.join(60)
  assert time.monotonic() - begin < 20  # all are there
  assert a.report.present == ("a", "b") and center_of(ended[1]) == center_of(held[1][1])


def test_late_pod_three_times_in_a_row_warns_once(tmp_path):
  tx = optimizer()
  fast, slow = (pod(tmp_path, name, snapshot_every=9) for name in ("fast", "slow"))
  held, behind = fast.join(tx, START), slow.join(tx, START)
  with pytest.warns(UserWarning, match="'slow' came late three times in a row") as told:
    for _ in range(4):
      held = fast.exchange(tx, *train(tx, *held, 1.0))
      behind = slow.exchange(tx, *train(tx, *behind, 2.0))
  assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.optax_promotes
def test_rejoin_with_moments_of_checkpoint_keeps_center_equal(tmp_path):
  tx = ow.diloco(optax.adam(0.1), None, communication_period=None)
  a, b = (pod(tmp_path, name) for name in "ab")
  held = received(tx, (a, b), sent(tx, (a, b), [a.join(tx, START), b.join(tx, START)], [1.0, 3.0]))
  saved = serialization.to_bytes(held[1])  # parameters and state, which are behind soon
  alone = a.exchange(tx, *train(tx, *held[0], 1.0))
  again = pod(tmp_path, "b")
  params, state = again.join(tx, START)
  assert state.inner_state[0].count == 0
  _, before = serialization.from_bytes((params, state), saved)
  state = state.replace(inner_state=before.inner_state)
  ends = received(tx, (a, again), sent(tx, (a, again), [alone, (params, state)], [1.0, 3.0]))
  assert a.report.present == ("a", "b")
  assert center_of(ends[0][1]) == center_of(ends[1][1])
  adam = ends[1][1].inner_state[0]
  assert adam.count == 2
  np.testing.assert_allclose(adam.mu["b"], 3.0 * (1 - 0.9**2), rtol=1e-6)


def test_max_age_late_message_is_absorbed_next_round(tmp_path):
  tx = optimizer(codec=False)
  fast, slow = (pod(tmp_path, name, max_age=1) for name in ("fast", "slow"))
  (x, s), (y, t) = fast.join(tx, START), slow.join(tx, START)
  x, s = fast.exchange(tx, *train(tx, x, s, 1.0))
  y, t = slow.exchange(tx, *train(tx, y, t, 2.0))
  x, s = fast.exchange(tx, *train(tx, x, s, 1.0))
  assert fast.report.present == ("fast", "slow-1")
  y, t = slow.exchange(tx, *train(tx, y, t, 2.0))
  assert center_of(s) == center_of(t)


def test_max_age_late_message_is_weighted_by_staleness(tmp_path):
  tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=optax.sgd(1.0))
  options = {"max_age": 1, "staleness": lambda age: jnp.where(age > 0, 0.5, 1.0)}
  fast, slow = (pod(tmp_path, name, **options) for name in ("fast", "slow"))
  held, behind = fast.join(tx, START), slow.join(tx, START)
  held = fast.exchange(tx, *train(tx, *held, 1.0))
  slow.exchange(tx, *train(tx, *behind, 4.0))
  params, _ = fast.exchange(tx, *train(tx, *held, 1.0))
  expected = START["b"] - 0.1 - (1 * 0.1 + 0.5 * 0.4) / 1.5
  np.testing.assert_allclose(params["b"], expected, rtol=1e-6)


def test_quorum_missing_times_out_and_retry_succeeds(tmp_path):
  tx = optimizer()
  a = pod(tmp_path, "a", quorum=2, timeout=0.1)
  held = train(tx, *a.join(tx, START), 1.0)
  for _ in range(2):
    with pytest.raises(TimeoutError, match=r"no quorum of 2 .* received \['a'\]"):
      a.exchange(tx, *held)
  b = pod(tmp_path, "b", quorum=2)
  b.exchange(tx, *train(tx, *b.join(tx, START), 1.0))
  a.exchange(tx, *held)
  assert a.report.present == ("a", "b")


def test_refused_messages_are_reported_with_reason(tmp_path):
  tx = optimizer()
  a, b = (pod(tmp_path, name, key=b"secret") for name in "ab")
  held, other = train(tx, *a.join(tx, START), 1.0), train(tx, *b.join(tx, START), 2.0)
  b.send(tx, *other)
  folder = tmp_path / "r" / "f0" / "00000000"
  data = (folder / "b.msg").read_bytes()
  strewn = {"cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "other": data}
  strewn |= {"empty": b"", "long": data * 3}
  elsewhere = jax.tree.map(lambda x: x + 1, START)
  moved = train(tx, elsewhere, tx.init(elsewhere), 1.0)
  said, _ = ow.exchange.message(tx, *moved[::-1], sender="elsewhere")
  strewn["elsewhere"] = ow.exchange.to_bytes(said, run="r", round=0, key=b"secret")
  for name, text in strewn.items():
    (folder / f"{name}.msg").write_bytes(text)
  os.mkfifo(folder / "pipe.msg")
  a.exchange(tx, *held)
  assert a.report.refused["f0/00000000/elsewhere.msg"] == "it was made at another center"
  assert a.report.present == ("a", "b")
  refused = {pathlib.Path(path).stem for path in a.report.refused}
  assert refused == {*strewn, "pipe"}


def test_join_errors_other_model_key_or_policy(tmp_path):
  pod(tmp_path, "a").join(optimizer(), START)
  renamed = {"w": START["w"], "c": START["b"]}
  codec = ow.codecs.quantize(8)

  def other(rate=0.7, momentum=0.9, **other):
    outer = optax.sgd(rate, momentum, nesterov=True)
    given = {"outer": outer, "codec": codec, "communication_period": None} | other
    return ow.local_steps(optax.sgd(0.1), None, **given)

  doubled = codec._replace(decode=lambda *args: 2 * codec.decode(*args))
  for one, tx, params, what in [
    ({}, optimizer(), {"w": START["w"]}, r"params \(names and shapes\) must be as in the run 'r'"),
    ({}, optimizer(), renamed, r"params \(names and shapes\) must"),
    ({}, other(fragments=2), START, r"fragments \(.*\) must"),
    ({}, optimizer(codec=False), START, "codec must"),
    ({}, other(codec=ow.codecs.quantize(8, chunk=64)), START, "codec must"),
    ({}, other(codec=doubled), START, r"codec \(a setting of it\) must"),
    ({}, optimizer(reduction="clip"), START, r"reduction \(or a setting of it\) must"),
    ({}, other(reduction="sum"), START, r"reduction \(or a setting of it\) must"),
    ({}, other(outer=optax.adam(0.7)), START, "outer must"),
    ({}, other(rate=0.5), START, r"outer \(its rate, momentum or another setting\) must"),
    ({}, other(momentum=0.8), START, r"outer \(its rate, momentum or another setting\) must"),
    ({"key": b"k"}, optimizer(), START, "has another key"),
    ({"max_age": 1}, optimizer(), START, "max_age and staleness must"),
  ]:
    with pytest.raises(ValueError, match=what):
      pod(tmp_path, "b", **one).join(tx, params)


@pytest.mark.parametrize(
  "codec",
  [
    ow.codecs.quantize(8),
    ow.codecs.quantize(2),
    ow.codecs.signs(),
    ow.codecs.top_k(0.1),
    ow.codecs.cast("float16"),
  ],
  ids=lambda codec: codec.name,
)
def test_join_errors_other_outer_rate_though_all_is_compressed(tmp_path, codec):
  """And allows other parameters."""

  def join(name, rate, params):
    outer = optax.sgd(rate)
    tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=outer, codec=codec)
    pod(tmp_path, name).join(tx, params)

  join("a", 0.7, {"w": START["w"]})
  join("b", 0.7, {"w": -START["w"]})
  with pytest.raises(ValueError, match=r"outer \(its rate, momentum"):
    join("c", 0.6, {"w": START["w"]})


def test_out_of_step_error_after_missed_rounds_or_moved_center(tmp_path):
  tx = optimizer()
  a, b = pod(tmp_path, "a"), pod(tmp_path, "b")
  x, s = a.join(tx, START)
  held = train(tx, *b.join(tx, START), 1.0)
  for _ in range(4):
    x, s = a.exchange(tx, *train(tx, x, s, 1.0))
  with pytest.raises(ow.pods.OutOfStepError, match="over and deleted"):
    b.exchange(tx, *held)
  y, t = b.join(tx, START)
  assert center_of(t) == center_of(s)
  _, moved = tx.update(None, train(tx, y, t, 1.0)[1], y, exchange=True)
  moved = moved.replace(kept=(moved.kept[0].replace(center=jax.tree.map(jnp.cos, START)),))
  a.exchange(tx, *train(tx, x, s, 1.0))
  with pytest.raises(ow.pods.OutOfStepError, match="another center"):
    b.exchange(tx, y, moved)


def test_log_of_old_rounds_is_deleted(tmp_path):
  tx = optimizer()
  a = pod(tmp_path, "a", snapshot_every=2)
  x, s = a.join(tx, START)
  for _ in range(9):
    x, s = a.exchange(tx, *train(tx, x, s, 1.0))
  names = sorted(p.name for p in (tmp_path / "r" / "f0").iterdir())
  assert names[0].startswith("00000006") and len(names) == 8
  assert not list((tmp_path / "r" / "tmp").iterdir())


class _Killed(BaseException):
  """Nothing of the library catches it."""


def test_pod_killed_before_any_question_to_the_store_leaves_others_equal(tmp_path, monkeypatch):
  """One that is first to decide, in its third round, and that writes the center after it."""
  tx, present, questions = optimizer(), [], itertools.count()

  class Mortal(_stores.Files):
    left = math.inf

    def __getattribute__(self, name):
      if name in ("put", "get", "names", "delete", "now"):
        self.left -= 1
        if self.left < 0:
          raise _Killed
      return super().__getattribute__(name)

  monkeypatch.setattr(_directory, "Files", Mortal)
  # The trial at each `join` would take most of the time.
  monkeypatch.setattr(_directory, "settings_of", lambda *_: ({}, np.zeros((2, 33), "f")))
  for question in questions:
    path = tmp_path / str(question)
    a, b = pods = [pod(path, name, quorum=1) for name in "ab"]
    held = [one.join(tx, START) for one in pods]
    for _ in range(2):
      held = received(tx, pods, sent(tx, pods, held, [1.0, 3.0]))
    held[:1] = sent(tx, [a], held[:1], [1.0])
    b._log.store.left = question
    try:
      b.exchange(tx, *train(tx, *held[1], 3.0))
    except _Killed:
      pass
    else:
      break
    held[:1] = received(tx, [a], held[:1])
    present.append(a.report.present)
    b = pod(path, "b")
    pods, held[1] = [a, b], b.join(tx, START)
    assert a.round == b.round and center_of(held[0][1]) == center_of(held[1][1]), question
    held = received(tx, pods, sent(tx, pods, held, [1.0, 3.0]))
    assert a.report.present == b.report.present == ("a", "b")
    assert center_of(held[0][1]) == center_of(held[1][1]), question
  # Either it had not yet sent, or it counts.
  assert len(present) > 20 and set(present) == {("a",), ("a", "b")} and present == sorted(present)


@pytest.mark.parametrize("every", [1, 3])
def test_pods_take_turns_to_write_center_and_one_that_dies_leaves_gap(tmp_path, every):
  tx, pods = optimizer(), [pod(tmp_path, name, quorum=2, snapshot_every=every) for name in "abc"]
  held = [one.join(tx, START) for one in pods]

  def there():
    return {int(path.stem) for path in (tmp_path / "r/f0").glob("*.center")}

  def rounds(number):
    """Who has written which center."""
    written = {}
    for _ in range(number):
      held[:] = sent(tx, pods, held, [1.0, 2.0, 3.0][-len(pods) :])
      for i, one in enumerate(pods):
        before = there()
        held[i] = one.receive(tx, *held[i])
        written |= dict.fromkeys(there() - before, one.sender)
    return written

  rounds(every)  # in its first round each pod writes
  assert rounds(5 * every - 1) == {every * i: "abc"[i % 3] for i in range(2, 6)}
  # It is the turn of the first, which is killed after its message.
  held = sent(tx, pods, held, [1.0, 2.0, 3.0])
  del pods[0], held[0]
  held[:] = received(tx, pods, held)
  # What somebody puts into the gap does not let the center before it be deleted.
  (tmp_path / f"r/f0/{every * 6:08d}.center").write_bytes(b"none")
  assert rounds(every) == {every * 7: "c"}
  assert there() == {every * 5, every * 6, every * 7}
  again = pod(tmp_path, "a", quorum=2)
  assert center_of(again.join(tx, START)[1]) == center_of(held[0][1])


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".x", "x" * 101])
def test_sender_name_unfit_for_file_is_error(tmp_path, bad):
  with pytest.raises(ValueError, match="sender must be"):
    pod(tmp_path, bad)


def test_sender_name_of_two_live_pods_warns_once(tmp_path):
  tx = optimizer()
  one, two = pod(tmp_path, "a"), pod(tmp_path, "a")
  held, other = one.join(tx, START), two.join(tx, START)
  with pytest.warns(UserWarning, match="another pod has the name 'a'") as told:
    for _ in range(2):
      held = one.exchange(tx, *train(tx, *held, 1.0))
      other = two.exchange(tx, *train(tx, *other, 2.0))
  assert len(told) == 1 and told[0].filename == __file__  # an earlier life's may be there at first
  assert center_of(held[1]) == center_of(other[1])


@pytest.mark.parametrize("kind", ["spoilt", "sound"])
def test_out_of_step_error_if_agreed_message_was_replaced(tmp_path, kind):
  tx = optimizer()
  a, b, c = (pod(tmp_path, name, quorum=2) for name in "abc")
  held = [train(tx, *one.join(tx, START), 1.0) for one in (a, b, c)]
  b.send(tx, *held[1])
  a.exchange(tx, *held[0])
  path = tmp_path / "r" / "f0" / "00000000" / "b.msg"
  path.unlink()
  if kind == "spoilt":
    path.write_bytes(b"another")
  else:  # of another weight, which could be absorbed
    assert a.round == {0: 1}
    said, _ = ow.exchange.message(tx, held[1][1], held[1][0], 5.0, sender="b")
    path.write_bytes(ow.exchange.to_bytes(said, run="r", round=0))
  with pytest.raises(ow.pods.OutOfStepError, match=r"of 'b' in round 0 .* is needed, but"):
    c.receive(tx, *held[2])
  _, state = c.join(tx, START)
  assert c.round == {0: 1} and int(state.exchanges) == 0


def test_join_that_is_overtaken_ten_times_is_error(tmp_path, monkeypatch):
  tx, one, tries = optimizer(), pod(tmp_path, "a"), []

  def overtaken(*args):
    tries.append(args)
    raise ow.pods.OutOfStepError("meanwhile")

  monkeypatch.setattr(one, "_caught_up", overtaken)
  with pytest.raises(ow.pods.OutOfStepError, match="meanwhile"):
    one.join(tx, START)
  assert len(tries) == 10


def test_join_while_others_go_on_reads_newer_snapshot(tmp_path, monkeypatch):
  """It has read what was decided after its snapshot, whose messages are deleted then."""
  tx = optimizer()
  a, b = (pod(tmp_path, name, snapshot_every=2) for name in "ab")
  held = [a.exchange(tx, *train(tx, *a.join(tx, START), 1.0))]
  absorbed = b._absorbed

  def absorb_slowly(*args):
    for _ in range(5 if len(held) == 1 else 0):
      held.append(a.exchange(tx, *train(tx, *held[-1], 1.0)))
    return absorbed(*args)

  monkeypatch.setattr(b, "_absorbed", absorb_slowly)
  _, state = b.join(tx, START)
  assert b.round == {0: 6} and center_of(state) == center_of(held[-1][1])


def test_snapshot_truncated_is_rebuilt_from_one_before(tmp_path):
  tx = optimizer()
  a = pod(tmp_path, "a")
  held = a.join(tx, START)
  for _ in range(3):
    held = a.exchange(tx, *train(tx, *held, 1.0))
  snapshots = sorted((tmp_path / "r" / "f0").glob("*.center"))
  assert [path.stem for path in snapshots] == ["00000002", "00000003"]
  snapshots[1].write_bytes(snapshots[1].read_bytes()[:-1])
  b = pod(tmp_path, "b")
  assert center_of(b.join(tx, START)[1]) == center_of(held[1]) and b.round == {0: 3}
  snapshots[0].unlink()
  assert center_of(pod(tmp_path, "c").join(tx, START)[1]) == center_of(held[1])  # b has written it
  (tmp_path / "r/f0/00000003~1.center").unlink()
  with pytest.raises(
    ValueError, match=r"no snapshot of fragment 0 can be read: .*truncated or changed"
  ):
    pod(tmp_path, "d").join(tx, START)


def test_full_disk_is_error_and_retry_succeeds(tmp_path):
  tx = optimizer()
  a = pod(tmp_path, "a")
  held = train(tx, *a.join(tx, START), 1.0)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the message is cut in the middle
  try:
    with pytest.raises(OSError, match="too large"):
      a.exchange(tx, *held)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert not list((tmp_path / "r").glob("*/*/*.msg")) and not list((tmp_path / "r/tmp").iterdir())
  a.exchange(tx, *held)
  assert a.report.present == ("a",)


def test_full_disk_at_join_says_so(tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
  try:
    with pytest.raises(OSError, match=r"cannot be written once in .*too large. Make room."):
      pod(tmp_path, "a").join(optimizer(), START)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  pod(os.fsencode(tmp_path), "a").join(optimizer(), START)  # a path of bytes


def test_deleted_run_is_begun_again_from_center(tmp_path):
  tx = optimizer()
  a = pod(tmp_path, "a")
  params, state = a.exchange(tx, *train(tx, *a.join(tx, START), 1.0))
  shutil.rmtree(tmp_path / "r")
  with pytest.raises(FileNotFoundError, match="to begin it again from this pod's center, join"):
    a.exchange(tx, *train(tx, params, state, 1.0))
  center = ow.center_params(state)
  again, _ = a.join(tx, center)
  other, _ = pod(tmp_path, "b").join(tx, START)
  for found in (again, other):
    np.testing.assert_array_equal(found["w"], center["w"])
  assert a.round == {0: 0}


def test_grace_by_default_is_of_time_of_work_not_of_outage(tmp_path):
  """A quarter of the time to the message, however long the quorum then takes."""
  tx = optimizer()
  a, b, _ = pods = [pod(tmp_path, name, quorum=2, grace=None) for name in "abc"]
  held = [one.join(tx, START) for one in pods]
  held = received(tx, pods, sent(tx, pods, held, [1.0, 2.0, 3.0]))  # so that c is waited for
  params, state = train(tx, *held[0], 1.0)
  state = a.send(tx, params, state)
  a._rounds[0].begun -= 100.0  # the others are away for so long
  b.send(tx, *train(tx, *held[1], 2.0))
  a.receive(tx, params, state)
  assert a.report.present == ("a", "b") and a.report.waited < 10


def test_outer_with_random_key_is_refused_at_join(tmp_path):
  outer = optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, key=jax.random.key(0)))
  tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=outer)
  with pytest.raises(TypeError, match=r"rng_key, in the state of outer, is a random key"):
    pod(tmp_path, "a").join(tx, START)


def test_nan_pod_takes_center_and_all_nan_moves_nothing(tmp_path):
  tx = optimizer()
  a, b = (pod(tmp_path, name, quorum=2) for name in "ab")
  held = [one.join(tx, START) for one in (a, b)]
  for slopes in [(1.0, np.nan), (np.nan, np.nan)]:
    before = [center_of(state) for _, state in held]
    held = received(tx, (a, b), sent(tx, (a, b), held, slopes))
    centers = [center_of(state) for _, state in held]
    assert centers[0] == centers[1] and int(held[0][1].exchanges) == a.round[0]
    if np.isnan(slopes[0]):
      assert centers == before
    else:
      assert centers != before
      np.testing.assert_array_equal(held[1][0]["w"], held[1][1].kept[0].center["w"])
  assert a.round == b.round == {0: 2}


def test_two_runs_in_one_directory_are_separate(tmp_path):
  tx, other = optimizer(), optimizer(codec=False)
  a, b = pod(tmp_path, "a"), ow.pods.Directory(tmp_path, run="s", sender="a", quorum=1)
  held, mine = a.join(tx, START), b.join(other, {"x": np.ones(3, "f")})
  held = a.exchange(tx, *train(tx, *held, 1.0))
  assert b.round == {0: 0}
  b.exchange(other, *train(other, *mine, 1.0))
  assert a.report.present == b.report.present == ("a",)


def test_wall_clock_and_file_times_are_not_read(tmp_path, monkeypatch):
  clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep)  # and nothing else
  for module in (_directory, _stores):
    monkeypatch.setattr(module, "time", clock)
  tx = optimizer()
  a, b = (pod(tmp_path, name, quorum=2) for name in "ab")
  held = [one.join(tx, START) for one in (a, b)]
  for year in (1970, 2100):
    held = sent(tx, (a, b), held, (1.0, 1.0))
    for path in tmp_path.rglob("*"):
      os.utime(path, (0, (year - 1970) * 3e7))
    held = received(tx, (a, b), held)
  assert a.report.present == ("a", "b") and a.round == {0: 2}


@pytest.mark.parametrize("is_counted", [True, False])
def test_two_live_pods_of_one_name_each_keep_their_own_work(tmp_path, is_counted):
  """The message of the first is in time, or is overtaken by the decision of another pod."""
  tx, fast = optimizer(), pod(tmp_path, "fast")
  start = {"w": np.zeros((64, 64), "f")}
  x, s = fast.join(tx, start)
  pods = [pod(tmp_path, "x") for _ in range(2)]
  held = [train(tx, *one.join(tx, start), slope) for one, slope in zip(pods, (-10.0, -20.0))]
  s, put = fast.send(tx, x, s), pods[0]._log.store.put

  def overtaken(name, data):
    if name.endswith("x.msg"):
      fast.receive(tx, x, s)
    return put(name, data)

  if not is_counted:
    pods[0]._log.store.put = overtaken
  states = [pods[0].send(tx, *held[0])]
  states.append(pods[1].send(tx, *held[1]))  # no warning yet: it may be its own earlier life's
  found = [
    one.receive(tx, params, state)[1]
    for one, (params, _), state in zip(pods, held, states, strict=True)
  ]
  residuals = [float(np.asarray(one.compressed[0].residual["w"])[0, 0]) for one in found]
  np.testing.assert_allclose(residuals, [0.0 if is_counted else -1.0, -2.0], atol=1e-6)
  assert center_of(found[0]) == center_of(found[1])
