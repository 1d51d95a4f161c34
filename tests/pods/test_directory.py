"""Pods that exchange through files that are written once: real processes, killed and stopped."""

import functools
import io
import multiprocessing
import os
import pathlib
import resource
import signal
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import optax_wrappers as ow
from optax_wrappers._transports import _directory, _stores
from optax_wrappers._workers import _messages

START = {"w": np.arange(64 * 64, dtype="f").reshape(64, 64) / 1000, "b": np.ones(5, "f")}


@functools.cache  # what is compiled for it serves all tests
def optimizer(codec=True):
  codec = ow.codecs.quantize(8) if codec else None
  return ow.diloco(optax.sgd(0.1), None, communication_period=None, codec=codec)


def pod(path, name, **options):
  options = {"quorum": 1, "grace": 0.0, "timeout": 5.0} | options
  return ow.transports.Directory(path, run="r", sender=name, **options)


@functools.partial(jax.jit, static_argnums=0)
def train(tx, params, state, slope):
  grads = jax.tree.map(lambda x: jnp.full_like(x, slope), params)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def sent(tx, pods, held, slopes):
  """All of them after a step and the first half of an exchange."""
  held = [train(tx, *one, slope) for one, slope in zip(held, slopes, strict=True)]
  return [(x, one.send(tx, x, state)) for one, (x, state) in zip(pods, held, strict=True)]


def received(tx, pods, held):
  """After the second half."""
  return [one.receive(tx, *mine) for one, mine in zip(pods, held, strict=True)]


def center_of(state):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(ow.exchange.snapshot(state))]


def test_the_center_is_that_of_numpy(tmp_path):
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


def test_one_that_is_late_keeps_its_work_and_is_waited_for(tmp_path):
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


def test_what_is_written_as_others_decide_is_said_the_next_time(tmp_path):
  """They have not seen it, and it has not seen that they decided."""
  tx = optimizer()
  fast, slow = pod(tmp_path, "fast"), pod(tmp_path, "slow")
  (x, s), (y, t) = fast.join(tx, START), slow.join(tx, START)
  x, s = train(tx, x, s, 1.0)
  s, put, ended = fast.send(tx, x, s), slow._store.put, []

  def put_too_late(name, data):
    if name.endswith("slow.msg"):
      ended.append(fast.receive(tx, x, s))
    return put(name, data)

  slow._store.put = put_too_late
  y, t = train(tx, y, t, 2.0)
  moved = np.asarray(y["w"])
  y, t = slow.exchange(tx, y, t)
  assert slow.report.present == ("fast",) and center_of(ended[0][1]) == center_of(t)
  residual = t.compressed[0].residual["w"]
  np.testing.assert_allclose(residual, START["w"] - moved, rtol=1e-4, atol=1e-5)


def test_one_that_is_half_a_round_behind_begins_the_next_with_the_others(tmp_path):
  tx = optimizer()
  fast, slow = (pod(tmp_path, name, snapshot_every=9) for name in ("fast", "slow"))
  held, behind = fast.join(tx, START), slow.join(tx, START)
  held = fast.exchange(tx, *train(tx, *held, 1.0))
  time.sleep(2.0)  # the length of its round
  ended = []
  thread = threading.Thread(
    target=lambda: ended.extend(slow.exchange(tx, *train(tx, *behind, 2.0)))
  )
  thread.start()
  time.sleep(0.5)
  assert not ended  # it would come late again
  held = fast.exchange(tx, *train(tx, *held, 1.0))
  thread.join(60)
  assert slow.round == fast.round == {0: 2} and center_of(ended[1]) == center_of(held[1])
  said = slow.send(tx, *train(tx, *ended, 2.0))
  held = fast.exchange(tx, *train(tx, *held, 1.0))
  assert fast.report.present == ("fast", "slow") and fast.report.late == ("slow",)
  assert center_of(slow.receive(tx, ended[0], said)[1]) == center_of(held[1])


def test_one_that_is_late_waits_for_others_who_are_gone_no_longer_than_two_rounds(tmp_path):
  tx = optimizer()
  gone, slow = pod(tmp_path, "gone"), pod(tmp_path, "slow", timeout=60.0)
  held, behind = gone.join(tx, START), slow.join(tx, START)
  begin = time.monotonic()
  gone.exchange(tx, *train(tx, *held, 1.0))
  behind = train(tx, *behind, 2.0)
  length = time.monotonic() - begin
  slow.exchange(tx, *behind)
  assert slow.round == {0: 1} and time.monotonic() - begin < 4 * length + 20


@pytest.mark.parametrize("seen_before", ["on time", "late"])
def test_within_the_grace_one_waits_for_who_was_seen_before_and_for_nobody_else(
  tmp_path, seen_before
):
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


def test_one_that_is_late_three_times_in_a_row_is_told(tmp_path):
  tx = optimizer()
  fast, slow = (pod(tmp_path, name, snapshot_every=9) for name in ("fast", "slow"))
  held, behind = fast.join(tx, START), slow.join(tx, START)
  with pytest.warns(UserWarning, match="'slow' came late three times in a row") as told:
    for _ in range(4):
      held = fast.exchange(tx, *train(tx, *held, 1.0))
      behind = slow.exchange(tx, *train(tx, *behind, 2.0))
  assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.optax_promotes
def test_one_that_comes_back_may_go_on_with_the_moments_of_its_checkpoint(tmp_path):
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


def test_late_messages_count_where_they_may(tmp_path):
  tx = optimizer(codec=False)
  fast, slow = (pod(tmp_path, name, max_age=1) for name in ("fast", "slow"))
  (x, s), (y, t) = fast.join(tx, START), slow.join(tx, START)
  x, s = fast.exchange(tx, *train(tx, x, s, 1.0))
  y, t = slow.exchange(tx, *train(tx, y, t, 2.0))
  x, s = fast.exchange(tx, *train(tx, x, s, 1.0))
  assert fast.report.present == ("fast", "slow-1")
  y, t = slow.exchange(tx, *train(tx, y, t, 2.0))
  assert center_of(s) == center_of(t)


def test_late_messages_count_by_their_age(tmp_path):
  tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=optax.sgd(1.0))
  options = {"max_age": 1, "staleness": lambda age: jnp.where(age > 0, 0.5, 1.0)}
  fast, slow = (pod(tmp_path, name, **options) for name in ("fast", "slow"))
  held, behind = fast.join(tx, START), slow.join(tx, START)
  held = fast.exchange(tx, *train(tx, *held, 1.0))
  slow.exchange(tx, *train(tx, *behind, 4.0))
  params, _ = fast.exchange(tx, *train(tx, *held, 1.0))
  expected = START["b"] - 0.1 - (1 * 0.1 + 0.5 * 0.4) / 1.5
  np.testing.assert_allclose(params["b"], expected, rtol=1e-6)


def test_without_a_quorum_it_ends_in_time_and_may_be_called_again(tmp_path):
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


def test_what_is_no_message_is_refused_with_its_reason_and_stays(tmp_path):
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


def test_another_model_key_or_policy_is_an_error_at_join(tmp_path):
  pod(tmp_path, "a").join(optimizer(), START)
  for one, tx, params in [
    (pod(tmp_path, "b"), optimizer(codec=False), START),
    (pod(tmp_path, "b"), optimizer(), {"w": START["w"]}),
    (pod(tmp_path, "b", key=b"k"), optimizer(), START),
    (pod(tmp_path, "b", max_age=1), optimizer(), START),
  ]:
    with pytest.raises(ValueError, match="belongs to another model"):
      one.join(tx, params)


def test_one_that_moved_its_center_alone_or_missed_too_much_is_out_of_step(tmp_path):
  tx = optimizer()
  a, b = pod(tmp_path, "a"), pod(tmp_path, "b")
  x, s = a.join(tx, START)
  held = train(tx, *b.join(tx, START), 1.0)
  for _ in range(4):
    x, s = a.exchange(tx, *train(tx, x, s, 1.0))
  with pytest.raises(ow.transports.OutOfStepError, match="over and deleted"):
    b.exchange(tx, *held)
  y, t = b.join(tx, START)
  assert center_of(t) == center_of(s)
  _, moved = tx.update(None, train(tx, y, t, 1.0)[1], y, exchange=True)
  moved = moved.replace(kept=(moved.kept[0].replace(center=jax.tree.map(jnp.cos, START)),))
  a.exchange(tx, *train(tx, x, s, 1.0))
  with pytest.raises(ow.transports.OutOfStepError, match="another center"):
    b.exchange(tx, y, moved)


def test_the_log_does_not_grow(tmp_path):
  tx = optimizer()
  a = pod(tmp_path, "a", snapshot_every=2)
  x, s = a.join(tx, START)
  for _ in range(9):
    x, s = a.exchange(tx, *train(tx, x, s, 1.0))
  names = sorted(p.name for p in (tmp_path / "r" / "f0").iterdir())
  assert names[0].startswith("00000006") and len(names) == 8
  assert not list((tmp_path / "r" / "tmp").iterdir())


def test_a_name_is_written_once_by_one_of_many(tmp_path):
  stores, won = [_stores.Files(tmp_path, f"s{i}") for i in range(4)], []

  def write(i):
    for r in range(50):
      if stores[i].put(f"f0/{r}.set", bytes([i]) * 100):
        won.append((r, i))

  threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(r for r, _ in won) == list(range(50))
  assert all((tmp_path / f"f0/{r}.set").read_bytes() == bytes([i]) * 100 for r, i in won)


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".x", "x" * 101])
def test_names_are_those_of_files(tmp_path, bad):
  with pytest.raises(ValueError, match="sender must be"):
    pod(tmp_path, bad)


def test_two_live_pods_of_one_name_are_told(tmp_path):
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
def test_a_message_that_was_agreed_on_is_never_left_out(tmp_path, kind):
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
  with pytest.raises(ow.transports.OutOfStepError, match=r"of 'b' in round 0 .* is needed, but"):
    c.receive(tx, *held[2])
  _, state = c.join(tx, START)
  assert c.round == {0: 1} and int(state.exchanges) == 0


def test_one_that_joins_while_others_go_on_begins_with_a_newer_snapshot(tmp_path, monkeypatch):
  """It has read what was decided after its snapshot, whose messages are deleted then."""
  tx = optimizer()
  a, b = (pod(tmp_path, name, snapshot_every=2) for name in "ab")
  held = [a.exchange(tx, *train(tx, *a.join(tx, START), 1.0))]
  decided = b._set

  def read_slowly(k, r):
    found = decided(k, r)
    for _ in range(5 if len(held) == 1 else 0):
      held.append(a.exchange(tx, *train(tx, *held[-1], 1.0)))
    return found

  monkeypatch.setattr(b, "_set", read_slowly)
  _, state = b.join(tx, START)
  assert b.round == {0: 6} and center_of(state) == center_of(held[-1][1])


def test_a_snapshot_that_cannot_be_read_is_made_of_the_one_before(tmp_path):
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
  with pytest.raises(
    ValueError, match=r"no snapshot of fragment 0 can be read: .*truncated or changed"
  ):
    pod(tmp_path, "c").join(tx, START)


def test_a_full_disk_is_an_error_and_the_same_call_works_later(tmp_path):
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


def test_one_with_a_nan_goes_to_the_center_and_no_weights_move_nothing(tmp_path):
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


def test_two_runs_in_one_directory_do_not_meet(tmp_path):
  tx, other = optimizer(), optimizer(codec=False)
  a, b = pod(tmp_path, "a"), ow.transports.Directory(tmp_path, run="s", sender="a", quorum=1)
  held, mine = a.join(tx, START), b.join(other, {"x": np.ones(3, "f")})
  held = a.exchange(tx, *train(tx, *held, 1.0))
  assert b.round == {0: 0}
  b.exchange(other, *train(other, *mine, 1.0))
  assert a.report.present == b.report.present == ("a",)


def test_no_clock_is_read_but_that_of_this_process(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_bucket_is_as_good(tmp_path, kind):
  obstore = pytest.importorskip("obstore")
  store = obstore.store.MemoryStore() if kind == "memory" else obstore.store.LocalStore(tmp_path)
  tx = optimizer()
  a, b = (pod(store, name, quorum=2) for name in "ab")
  held = [one.join(tx, START) for one in (a, b)]
  for _ in range(4):
    held = received(tx, (a, b), sent(tx, (a, b), held, (1.0, 2.0)))
  assert center_of(held[0][1]) == center_of(held[1][1]) and a.report.present == ("a", "b")
  paths = {entry["path"] for entry in obstore.list(store).collect()}
  centers = {"r/f0/00000003.center", "r/f0/00000004.center"}
  assert paths == {"r/run.json", "r/f0/00000003.set", *centers} | {
    f"r/f0/00000003/{name}.msg" for name in "ab"
  }
  late = pod(store, "c")
  assert center_of(late.join(tx, START)[1]) == center_of(held[0][1])
  bucket = _stores.Bucket(store)
  with pytest.raises(ValueError, match="more than 10 bytes"):
    bucket.get("r/f0/00000004.center", 10)
  assert [bucket.put("r/once", data) for data in (b"first", b"second")] == [True, False]
  assert bucket.get("r/once", 10) == b"first"


# Pods that are processes of their own, one of which is killed or stopped.
#
# `c` is a process of its own, which decides a round as soon as all are heard. `a` and `b` are here:
# they have sent before, and look after. So it is `c` that writes what is written once.

ACTS = ("begin", "half", "written", "synced", "linked", "done")
POINTS = [f"{kind} {act}" for kind in ("msg", "set", "center") for act in ACTS]
POINTS += ["stepped", "absorbing", "absorbed"]
UNSAID = {"joined", "stepped", "msg begin", "msg half", "msg written", "msg synced"}
GRACE = 0.5


def signal_at(point, number, times):
  """Makes this process send itself a signal where it comes to a point for the `times`-th time."""
  seen, kinds = [], []

  def here(name):
    seen.append(name)
    if name == point and seen.count(name) == times:
      os.kill(os.getpid(), number)

  class Watched(io.FileIO):
    def write(self, data):
      half = len(data) // 2
      super().write(data[:half])
      here(f"{kinds[-1]} half")
      return half + super().write(data[half:])

    def fileno(self):  # for fsync
      here(f"{kinds[-1]} written")
      return super().fileno()

  def put(self, name, data, real=_stores.Files.put):
    kinds.append(name.rsplit(".", 1)[1])
    here(f"{kinds[-1]} begin")
    found = real(self, name, data)
    here(f"{kinds[-1]} done")
    return found

  def link(written, path, real=os.link):
    here(f"{kinds[-1]} synced")
    real(written, path)
    here(f"{kinds[-1]} linked")

  def absorb(*args, real=_messages.absorb, **kwargs):
    here("absorbing")
    found = real(*args, **kwargs)
    here("absorbed")
    return found

  _stores.open = lambda path, mode: (Watched if mode == "xb" else open)(path, mode)
  _stores.Files.put, _stores.os.link, _messages.absorb = put, link, absorb
  return here


def live(path, cache, point, number, times, rounds):
  """The process of `c`."""
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  here = signal_at(point, number, times)
  tx, one = optimizer(), pod(path, "c", quorum=3, timeout=60.0)
  params, state = one.join(tx, START)
  here("joined")
  while one.round[0] < rounds:
    params, state = train(tx, params, state, 3.0)
    here("stepped")
    try:
      params, state = one.exchange(tx, params, state)
    except ow.transports.OutOfStepError:
      params, state = one.join(tx, START)
  (path / "c.end").write_bytes(b"".join(center_of(state)))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """Starts `c`: processes that have JAX imported already, and share what they compile."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["jax", "optax", "optax_wrappers", "pytest"])
  cache, begun = str(tmp_path_factory.mktemp("cache")), []

  def begin(path, point, number=signal.SIGKILL, times=1, rounds=9):
    args = (path, cache, point, number, times, rounds)
    begun.append(context.Process(target=live, args=args))
    begun[-1].start()
    return begun[-1]

  yield begin
  for one in begun:
    one.kill()
    one.join()


class Others:
  """`a` and `b`."""

  def __init__(self, path):
    self.tx = optimizer()
    self.pods = [pod(path, name, quorum=2, grace=GRACE, timeout=60.0) for name in "ab"]
    self.held = [one.join(self.tx, START) for one in self.pods]

  def send(self):
    self.held = sent(self.tx, self.pods, self.held, (1.0, 2.0))

  def receive(self):
    """Who was heard, by one as by the other. Neither waits for longer than the grace."""
    self.held = received(self.tx, self.pods, self.held)
    assert all(one.report.waited < GRACE + 2.0 for one in self.pods)
    first, second = self.pods
    assert first.report.present == second.report.present
    assert center_of(self.held[0][1]) == center_of(self.held[1][1]) == self.center
    return first.report.present

  def round(self):
    self.send()
    return self.receive()

  @property
  def center(self):
    return center_of(self.held[0][1])


def until(true, seconds=60.0):
  end = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < end
    time.sleep(0.01)


@pytest.mark.parametrize(
  "point, times",
  [(point, 2) for point in POINTS]
  + [("joined", 1), ("msg linked", 1), ("set synced", 1), ("center half", 1)],
)
def test_one_is_killed_the_others_go_on_and_it_comes_back_equal(tmp_path, start, point, times):
  others, log = Others(tmp_path), tmp_path / "r" / "f0"
  killed = start(tmp_path, point, times=times)
  for r in range(1, times):
    others.send()
    until((log / f"{r:08d}.center").exists)  # which `c` has written
    assert others.receive() == ("a", "b", "c")
  others.send()
  killed.join(60)
  assert killed.exitcode == -signal.SIGKILL
  assert others.receive() == (("a", "b") if point in UNSAID else ("a", "b", "c"))
  assert others.round() == ("a", "b")
  assert len(list((tmp_path / "r" / "tmp").iterdir())) <= 1

  back = pod(tmp_path, "c", quorum=3, timeout=60.0)
  params, state = back.join(others.tx, jax.tree.map(np.zeros_like, START))
  assert center_of(state) == others.center and back.round == others.pods[0].round
  others.send()
  _, state = back.exchange(others.tx, *train(others.tx, params, state, 3.0))
  assert others.receive() == back.report.present == ("a", "b", "c")
  assert center_of(state) == others.center
  assert not list((tmp_path / "r" / "tmp").iterdir())


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("point", ["msg synced", "set synced", "absorbing", "center synced"])
def test_one_is_stopped_for_longer_than_the_grace_and_goes_on(tmp_path, start, point, rounds):
  others, log = Others(tmp_path), tmp_path / "r" / "f0"
  stopped = start(tmp_path, point, signal.SIGSTOP, times=2, rounds=rounds + 3)
  others.send()
  until((log / "00000001.center").exists)
  others.receive()
  others.send()
  status = pathlib.Path(f"/proc/{stopped.pid}/stat")
  until(lambda: status.read_text().rsplit(")", 1)[1].split()[0] == "T")
  others.receive()
  for _ in range(rounds):  # with 3 of them what it had decided is deleted
    assert others.round() == ("a", "b")
  os.kill(stopped.pid, signal.SIGCONT)
  others.send()
  until(lambda: (log / f"{rounds + 2:08d}" / "c.msg").exists())
  assert others.receive() == ("a", "b", "c")
  stopped.join(60)
  assert (tmp_path / "c.end").read_bytes() == b"".join(others.center)
