"""Pods that are JAX programs of several processes, one of which is killed, stopped or differs."""

import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest
from directory_cases import START, center_of, optimizer, pod, train

HERE = pathlib.Path(__file__).parent
PATH = os.pathsep.join([str(HERE.parent), str(HERE.parents[1])])


class Many:
  """A pod of several processes; arguments of one process alone by its rank."""

  def __init__(self, path, processes=2, devices=2, of_rank=(), **given):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{free.getsockname()[1]}"
    given |= {"path": str(path), "processes": processes, "coordinator": address}
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"PYTHONPATH": PATH, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    self.processes = [
      subprocess.Popen(
        [
          sys.executable,
          HERE / "pod_process.py",
          json.dumps(given | {"rank": rank} | dict(of_rank).get(rank, {})),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
      )
      for rank in range(processes)
    ]

  def ends(self, seconds=100):
    """The output of all processes, and how they have ended."""
    try:
      texts = [one.communicate(timeout=seconds)[0] for one in self.processes]
    finally:
      for one in self.processes:
        one.kill()
        one.stdout.close()
    return texts, [one.returncode for one in self.processes]


def one_pod(path, rounds, codec=True, reduction=None):
  """The pod of this process, of one device: who is present in each round, and its last line."""
  tx, one = optimizer(codec, reduction), pod(path, "one", quorum=2, grace=0.5, timeout=100.0)
  params, state = one.join(tx, START)
  present = []
  while one.round[0] < rounds:
    params, state = one.exchange(tx, *train(tx, params, state, 1.0))
    present.append(one.report.present)
  return present, f"end {hashlib.sha256(b''.join(center_of(state))).hexdigest()}"


def one_pod_after(path, is_gone):
  """The same, until it has been alone for two rounds; with a quorum of 1 once the other is gone."""
  tx, one = optimizer(), pod(path, "one", quorum=2, grace=0.5, timeout=1.0)
  params, state = one.join(tx, START)
  present, begin = [], time.monotonic()
  while present[-2:] != [("one",)] * 2:
    params, state = train(tx, params, state, 1.0)
    while True:
      try:
        params, state = one.exchange(tx, params, state)
        break
      except TimeoutError:
        assert time.monotonic() - begin < 150
        one.quorum = 1 if is_gone() else 2
    present.append(one.report.present)
  return present, one.round[0]


def is_gone(process):
  """Killed, or stopped."""
  if process.poll() is not None:
    return True
  status = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
  return status.rsplit(")", 1)[1].split()[0] == "T"


BOTH = ("many", "one")


@pytest.mark.parametrize(
  ("processes", "devices", "explicit", "codec", "reduction"),
  [
    (2, 2, False, True, None),
    (2, 2, True, False, "clip"),
    (4, 1, False, False, None),
    (2, 1, False, True, "median"),
  ],
)
def test_pod_of_processes_has_bits_of_pod_of_one(
  tmp_path, processes, devices, explicit, codec, reduction
):
  # Only the first process reads its clock.
  of_rank = {1: {"clock": 1000.0}}
  given = {"explicit": explicit, "codec": codec, "reduction": reduction}
  many = Many(tmp_path, processes, devices, of_rank, **given)
  present, end = one_pod(tmp_path, 3, codec, reduction)
  texts, codes = many.ends()
  assert codes == [0] * processes, texts
  assert present == [BOTH] * 3
  assert [text.splitlines()[-1] for text in texts] == [end] * processes


@pytest.mark.parametrize(
  ("how", "rank", "question"),
  [
    ("SIGKILL", 0, 0),  # before its message
    ("SIGKILL", 1, 2),
    ("SIGKILL", 0, 9),
    ("SIGKILL", 1, 12),
    ("SIGKILL", 0, 16),
    ("SIGKILL", 1, 20),
    ("SIGSTOP", 0, 6),
    ("SIGSTOP", 1, 14),
  ],
)
def test_half_dead_pod_ends_and_others_go_on(tmp_path, how, rank, question):
  """At any step of a round; the heartbeat is of ten seconds."""
  many = Many(tmp_path, rounds=99, of_rank={rank: {"signal": how, "question": question}})
  half, other = many.processes[rank], many.processes[1 - rank]
  try:
    present, rounds = one_pod_after(tmp_path, lambda: is_gone(half))
    assert present[0] == BOTH
    text, _ = other.communicate(timeout=60)
    assert other.returncode != 0
    assert "another process of this pod is gone" in text or "Terminating process" in text
  finally:
    for process in many.processes:
      process.kill()
      process.communicate()
  back = Many(tmp_path, rounds=rounds + 2)
  present, end = one_pod(tmp_path, rounds + 2)
  texts, codes = back.ends()
  assert codes == [0, 0], texts
  assert present == [BOTH] * 2
  assert [text.splitlines()[-1] for text in texts] == [end] * 2


@pytest.mark.parametrize(
  ("differs", "what"),
  [
    ({"options": {"grace": 9.0}}, "grace must be equal in all processes of a pod"),
    ({"weight": 3.0}, "weight must be equal in all processes of a pod"),
  ],
  ids=["argument", "weight"],
)
def test_process_that_differs_from_siblings_is_refused_in_all(tmp_path, differs, what):
  many = Many(tmp_path, of_rank={1: differs})
  texts, codes = many.ends()
  assert 0 not in codes
  for text in texts:
    assert what in text
  assert not list(tmp_path.rglob("*.msg"))


def test_full_disk_is_error_in_all_processes_and_retry_succeeds(tmp_path):
  many = Many(tmp_path, of_rank={0: {"largest": 1000}})  # the other writes nothing
  present, end = one_pod(tmp_path, 3)
  texts, codes = many.ends()
  assert codes == [0, 0], texts
  assert present == [BOTH] * 3
  for text in texts:
    assert "OSError File too large" in text and text.splitlines()[-1] == end
