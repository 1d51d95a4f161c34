"""Pods that are processes of their own, one of which is killed or stopped."""

import io
import multiprocessing
import os
import pathlib
import signal
import threading
import time

import jax
import numpy as np
import optax
import pytest
from directory_cases import START, center_of, optimizer, pod, received, sent, train

import optax_wrappers as ow
from optax_wrappers.pods import _stores

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

  def link(written, path, real=os.link, **folders):
    here(f"{kinds[-1]} synced")
    real(written, path, **folders)
    here(f"{kinds[-1]} linked")

  def absorb(*args, real=ow.exchange.merge, **kwargs):
    if not kinds:  # of no round: `join` compares what outer does
      return real(*args, **kwargs)
    here("absorbing")
    found = real(*args, **kwargs)
    here("absorbed")
    return found

  _stores.open = lambda path, mode: (Watched if mode == "wb" else open)(path, mode)
  _stores.Files.put, _stores.os.link, ow.exchange.merge = put, link, absorb
  return here


def share_compiled(cache):
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def live(path, cache, point, number=signal.SIGKILL, times=1, rounds=9):
  """The process of `c`."""
  share_compiled(cache)
  here = signal_at(point, number, times)
  tx, one = optimizer(), pod(path, "c", quorum=3, timeout=60.0)
  params, state = one.join(tx, START)
  here("joined")
  while one.round[0] < rounds:
    params, state = train(tx, params, state, 3.0)
    here("stepped")
    try:
      params, state = one.exchange(tx, params, state)
    except ow.pods.OutOfStepError:
      params, state = one.join(tx, START)
  (path / "c.end").write_bytes(b"".join(center_of(state)))


def old_version(path, cache, name):
  """A pod that trains on and on."""
  share_compiled(cache)
  tx, one = optimizer(), pod(path, name, grace=GRACE)
  held = one.join(tx, START)
  while True:
    held = one.exchange(tx, *train(tx, *held, 1.0))
    (path / f"{name}.round").write_text(f"{one.round[0]:08d}")
    time.sleep(0.1)


def new_version(path, cache, name):
  """With one more variable and another outer rate."""
  share_compiled(cache)
  outer = optax.sgd(0.5, 0.9, nesterov=True)
  given = {"communication_period": None, "codec": ow.codecs.quantize(8)}
  tx = ow.local_steps(optax.sgd(0.1), None, outer=outer, **given)
  init, head = jax.tree.map(np.zeros_like, START), np.ones(3, "f")
  one = pod(path, name)
  with pytest.raises(ValueError, match=r"outer .* must be as in the run 'r'"):
    one.join(tx, init)
  with pytest.raises(ValueError, match=r"params .* must be as in the run 'r'"):
    one.join(tx, init | {"head": head})
  one = ow.pods.Directory(path, run="new", sender=name, quorum=3, timeout=60.0)
  init, added = one.start_from("r", init | {"head": head})
  assert added == ["['head']"] and init["b"].max() < START["b"].min()  # which has trained
  held = one.join(tx, init)
  if name == "a":  # the first
    jax.tree.map(np.testing.assert_array_equal, held[0], init)
  while one.round[0] < 3:
    held = one.exchange(tx, *train(tx, *held, 1.0))
    assert one.report.present == ("a", "b", "c")
  (path / f"{name}.end").write_bytes(b"".join(center_of(held[1])))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """Starts `c`: processes that have JAX imported already, and share what they compile."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["jax", "optax", "optax_wrappers", "pytest"])
  cache, begun = str(tmp_path_factory.mktemp("cache")), []

  def begin_process(run, path, *args, **kwargs):
    begun.append(context.Process(target=run, args=(path, cache, *args), kwargs=kwargs))
    begun[-1].start()
    return begun[-1]

  yield begin_process
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
def test_pod_killed_at_any_point_rejoins_with_equal_center(tmp_path, start, point, times):
  others, log = Others(tmp_path), tmp_path / "r" / "f0"
  killed = start(live, tmp_path, point, times=times)
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
def test_pod_stopped_longer_than_grace_ends_with_equal_center(tmp_path, start, point, rounds):
  others, log = Others(tmp_path), tmp_path / "r" / "f0"
  stopped = start(live, tmp_path, point, signal.SIGSTOP, times=2, rounds=rounds + 3)
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


def test_late_pod_half_round_behind_begins_next_with_others(tmp_path):
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


def test_rolling_restart_begins_new_run_from_center_of_old_one(tmp_path, start):
  """Pods are killed and come back as a new version, one by one; meanwhile the old ones go on."""

  def goes_on(name):
    file = tmp_path / f"{name}.round"
    until(file.exists)
    begin = file.read_text()
    until(lambda: file.read_text() > begin)

  old, new = {name: start(old_version, tmp_path, name) for name in "abc"}, []
  for name in "abc":
    for other in old:
      goes_on(other)
    old[name].kill()
    old.pop(name).join()
    new.append(start(new_version, tmp_path, name))
    until((tmp_path / f"new/f0/00000000/{name}.msg").exists)
  for one in new:
    one.join(60)
    assert one.exitcode == 0
  assert len({(tmp_path / f"{name}.end").read_bytes() for name in "abc"}) == 1
