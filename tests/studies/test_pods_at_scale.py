"""The simulation of pods at scale decides and counts as `pods.Directory` does."""

import itertools
import json
import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
from directory_cases import START, optimizer, pod, sent, train

from optax_wrappers.pods import _directory, _rounds, _stores

STUDIES = pathlib.Path(__file__).parents[2] / "studies"


@pytest.fixture
def study(monkeypatch):
  monkeypatch.syspath_prepend(STUDIES)
  import pods_at_scale

  return pods_at_scale


@pytest.fixture
def clock(monkeypatch):
  """The time of all pods, by hand; `passes` is what happens while one sleeps."""
  clock = types.SimpleNamespace(now=0.0, passes=lambda: None)

  def sleep(seconds):
    clock.now += seconds
    clock.passes()

  fake = types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
  for module in (_directory, _rounds, _stores):
    monkeypatch.setattr(module, "time", fake, raising=False)
  return clock


def test_pods_at_equal_speed_without_failures_do_not_wait_and_all_count(study):
  """Except in the first round, in which nobody knows how many there are."""
  found = study.simulate([[100.0]] * 5, 3, None, 4)
  np.testing.assert_array_equal(found["at"], [125.0, 225.0, 325.0, 425.0])
  np.testing.assert_array_equal(found["wait"], [25.0, 0.0, 0.0, 0.0])
  np.testing.assert_array_equal(found["counted"], [5, 5, 5, 5])
  assert (found["made"], found["worked"]) == (20, 2000.0)
  assert (found["waited"], found["graced"]) == (0.0, 5 * 25.0)


@pytest.mark.parametrize(("timeout", "polls"), [(0.3, 15), (3.0, 20 + 41), (50.0, 20 + 47 + 230)])
def test_pauses_grow_with_the_time_waited(study, clock, tmp_path, timeout, polls):
  """From 0.02 s by 5 % to 0.2 s."""
  one, tx = pod(tmp_path, "a", quorum=2, timeout=timeout), optimizer()
  held, counted = train(tx, *one.join(tx, START), 1.0), []
  clock.passes = lambda: counted.append(clock.now)
  with pytest.raises(TimeoutError):
    one.exchange(tx, *held)
  assert len(counted) == pytest.approx(polls, abs=2)
  assert study.num_polls(timeout, _stores.Files.pause) == pytest.approx(polls, abs=2)
  assert timeout < clock.now <= timeout + 0.21


LATE = [[100.0], [100.0], [200.0, 120.0]]  # the third pod, in the first round


def test_late_pod_begins_with_the_others_and_is_awaited(study):
  """It waits from 200 s to 225 s. Graces are a quarter of 100 s, so that the others await it to
  345 s."""
  found = study.simulate(LATE, 2, None, 3)
  np.testing.assert_array_equal(found["at"], [125.0, 225.0, 345.0])
  np.testing.assert_array_equal(found["wait"], [25.0, 0.0, 20.0])
  np.testing.assert_array_equal(found["counted"], [2, 2, 3])
  assert (found["made"], found["worked"]) == (8, 720.0)
  assert (found["waited"], found["graced"]) == (25.0, 2 * 25.0 + 2 * 20.0)


def test_simulated_late_pod_matches_directory(study, clock, tmp_path):
  """Its pods are polled at the instants before and after those of the decisions."""
  tx, found = optimizer(), study.simulate(LATE, 2, None, 3)
  a, b, c = pods = [pod(tmp_path, name, quorum=2, grace=None, timeout=3600.0) for name in "abc"]
  held = [one.join(tx, START) for one in pods]

  clock.now = 100.0
  held[:2] = sent(tx, pods[:2], held[:2], [1.0, 2.0])
  clock.now = found["at"][0] - 0.01
  assert not a.ready(held[0][1]) and not b.ready(held[1][1])
  clock.now = found["at"][0] + 0.01
  held[:2] = [one.receive(tx, *mine) for one, mine in zip(pods[:2], held[:2])]

  def others_send():
    if clock.now >= found["at"][1] and a.round[0] == 1:
      held[:2] = sent(tx, pods[:2], held[:2], [1.0, 2.0])
      held[:2] = [one.receive(tx, *mine) for one, mine in zip(pods[:2], held[:2])]

  clock.now, clock.passes = 200.0, others_send
  held[2] = c.exchange(tx, *train(tx, *held[2], 3.0))
  assert clock.now == pytest.approx(found["at"][1], abs=10 * _stores.Files.pause)
  assert (a.report.waited, c.round[0]) == (0.0, 2)

  clock.now = found["at"][2] - 20.0
  held[:2] = sent(tx, pods[:2], held[:2], [1.0, 2.0])
  assert not a.ready(held[0][1])
  clock.now = found["at"][2] - 0.1
  assert not a.ready(held[0][1])  # it waits for the pod that was late
  [held[2]] = sent(tx, [c], [held[2]], [3.0])
  assert a.ready(held[0][1])
  c.receive(tx, *held[2])
  assert c.report.present == ("a", "b", "c") and c.report.late == ("c",)


def test_late_pod_begins_alone_after_two_of_its_rounds(study):
  """It is late at 200 s, begins at 600 s, and has the shortest grace, a quarter of 50 s."""
  work = [[100.0, 1000.0], [100.0, 1100.0], [200.0, 50.0]]
  found = study.simulate(work, 2, None, 2)
  np.testing.assert_array_equal(found["at"], [125.0, 1125.0 + 12.5])
  np.testing.assert_array_equal(found["wait"], [25.0, 1125.0 + 12.5 - 650.0])
  np.testing.assert_array_equal(found["until_quorum"], [0.0, 1125.0 - 650.0])
  np.testing.assert_array_equal(found["counted"], [2, 2])


def test_late_pod_that_begins_alone_is_awaited(study):
  """It is late at 200 s and sends at 1140 s, after a quorum."""
  work = [[100.0, 1000.0], [100.0, 1000.0], [200.0, 540.0]]
  found = study.simulate(work, 2, None, 2)
  np.testing.assert_array_equal(found["at"], [125.0, 1140.0])
  np.testing.assert_array_equal(found["counted"], [2, 3])


def test_pod_that_is_rounds_behind_joins_again(study):
  """At 1000 s, in the tenth round, which it misses; it waits to 1125 s and is in the twelfth."""
  found = study.simulate([[100.0], [100.0], [1000.0] + [100.0] * 3], 2, None, 13)
  np.testing.assert_array_equal(found["at"], 125.0 + 100.0 * np.arange(13))
  np.testing.assert_array_equal(found["counted"], [2] * 11 + [3, 3])
  assert found["made"] == 2 * 13 + 4


def test_pod_that_is_gone_is_awaited_for_one_grace(study):
  found = study.simulate([[100.0], [100.0], [100.0, 1e9]], 2, 10.0, 4)
  np.testing.assert_array_equal(found["wait"], [10.0, 10.0, 0.0, 0.0])
  np.testing.assert_array_equal(found["counted"], [3, 2, 2, 2])


def test_pods_that_fail_come_back(study):
  """Each is down for a tenth of the time in the mean, and loses half a round more, and a wait."""
  found = study.simulate([[100.0]] * 50, 26, 10.0, 500, (3.6, 111.0))
  assert 0.7 < found["counted"].mean() / 50 < 0.9
  assert (np.diff(found["counted"]) > 0).sum() > 100


def test_requests_and_bytes_match_directory(study, tmp_path, monkeypatch):
  """Of three pods, in a round in which the first looks in vain before and after the quorum."""
  calls = []

  class Counted(_stores.Files):
    def put(self, name, data):
      calls.append((self.sender, "put", len(data)))
      return super().put(name, data)

    def get(self, name, limit):
      data = super().get(name, limit)
      calls.append((self.sender, "get", len(data or b"")))
      return data

    def names(self, folder):
      calls.append((self.sender, "list", 0))
      return super().names(folder)

    def delete(self, name):
      calls.append((self.sender, "delete", 0))
      super().delete(name)

  monkeypatch.setattr(_directory, "Files", Counted)
  tx = optimizer()
  a, *_ = pods = [pod(tmp_path, name, quorum=2, grace=100.0) for name in "abc"]
  held = [one.join(tx, START) for one in pods]
  for _ in range(2):  # until there are rounds to delete
    held = sent(tx, pods, held, [1.0, 2.0, 3.0])
    for one in pods:
      one.grace = 0.0
    held = [one.receive(tx, *mine) for one, mine in zip(pods, held)]
  for one in pods:
    one.grace = 100.0

  calls.clear()
  held[:1] = sent(tx, pods[:1], held[:1], [1.0])
  assert [a.ready(held[0][1]) for _ in range(5)] == [False] * 5
  held[1:2] = sent(tx, pods[1:2], held[1:2], [2.0])
  assert [a.ready(held[0][1]) for _ in range(4)] == [False] * 4
  held[2:] = sent(tx, pods[2:], held[2:], [3.0])
  for one, mine in zip(pods, held):
    one.receive(tx, *mine)

  expected = {
    "a": study.requests(3, 5, 4, decides=True, writes_center=True),
    "b": study.requests(3),
    "c": study.requests(3),
  }
  for name, asked in expected.items():
    assert {what: sum(x[:2] == (name, what) for x in calls) for what in asked} == asked, name

  paper = study.on_paper(3, sum(x.size for x in START.values()))
  for name, what in itertools.product("ab", ("put", "get")):
    size = paper["written" if what == "put" else "read"] + (name == "a") * paper["center"]
    moved = sum(n for who, kind, n in calls if (who, kind) == (name, what))
    # A frame for each record, and scales for each of two variables, not for all numbers at once.
    assert size <= moved <= size + 6 * study.LARGEST_FRAME, what


def test_all_read_all_up_to_a_tenth_of_a_round(study):
  most = study.most_pods(10**9)
  share = [study.on_paper(pods, 10**9)["reading"] for pods in (most, most + 1)]
  assert share[0] <= 0.1 < share[1]
  assert study.sizes(most, 10**9)["center"] == 8 * 10**9
  assert study.on_paper(1000, 10**9)["reading_in_tree"] < 0.1


def test_decision_of_most_pods_fits(study):
  line = len(f"pod-1000 {study.RUN} {'0' * 64}\n")
  most = study.sizes(1000, 1)["most_pods"]
  assert most * line + study.LARGEST_FRAME <= study.LARGEST_DECISION < (most + 30) * line


def test_study_prints_the_same_json_twice():
  command = [sys.executable, STUDIES / "pods_at_scale.py", "--json", "--pods", "4"]
  first, second = (subprocess.run(command, capture_output=True, check=True).stdout for _ in "12")
  assert first == second
  found = json.loads(first)
  assert len(found["rounds"]) == 4 * 2 * 2 * 4 and len(found["on_paper"]) == 2
  assert all(math.isfinite(one["wait_99"]) for one in found["rounds"])
