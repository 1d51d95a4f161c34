"""Stores in which a name is written once."""

import os
import threading

import pytest
from directory_cases import START, center_of, optimizer, pod, received, sent

from optax_wrappers.pods import _stores


def test_files_put_by_threads_writes_name_once(tmp_path):
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


def test_files_get_of_link_directory_or_pipe_is_error(tmp_path):
  store = _stores.Files(tmp_path, "a")
  (tmp_path / "secret").write_bytes(b"1")
  (tmp_path / "link").symlink_to(tmp_path / "secret")
  (tmp_path / "folder").mkdir()
  os.mkfifo(tmp_path / "pipe")
  with pytest.raises(ValueError, match=r"^it cannot be read"):
    store.get("link", 10)
  (tmp_path / "other").symlink_to(tmp_path, target_is_directory=True)
  with pytest.raises(ValueError, match=r"^it cannot be read"):
    store.get("other/secret", 10)
  for name in ("folder", "pipe"):
    with pytest.raises(ValueError, match=r"^it is not a file of at most 10"):
      store.get(name, 10)
  assert (store.get("secret", 10), store.get("none", 10)) == (b"1", None)


def test_files_follow_no_link_below_their_folder(tmp_path):
  """In the place of a folder; what is written takes the place of the link, or of a file."""
  victim = tmp_path / "victim"
  victim.mkdir()
  (victim / "precious").write_bytes(b"1")
  store = _stores.Files(tmp_path / "log", "a")
  for place in ("f0", "f1/00000001", "tmp"):
    path = tmp_path / "log" / place
    path.parent.mkdir(exist_ok=True)
    if path.exists():
      path.rmdir()
    path.symlink_to(victim, target_is_directory=True)
    assert store.names(place) == []
    store.delete(f"{place}/precious")
  (tmp_path / "log/f2").write_bytes(b"")  # a file
  for name in ("f0/a.msg", "f1/00000001/a.msg", "f2/a.msg"):
    assert store.put(name, b"2")
    assert store.get(name, 10) == b"2"
  assert [x.name for x in victim.iterdir()] == ["precious"]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of open files, on Linux")
def test_files_put_makes_file_and_every_folder_above_it_durable(tmp_path, monkeypatch):
  """And its folders are for their owner alone."""
  store, synced, fsync = _stores.Files(tmp_path / "new", "a"), [], os.fsync

  def noted(opened):
    path = os.path.relpath(os.readlink(f"/proc/self/fd/{opened}"), tmp_path)
    synced.append("file" if os.path.isfile(tmp_path / path) else path)
    fsync(opened)

  monkeypatch.setattr(_stores.os, "fsync", noted)
  assert store.put("f0/00000001/a.msg", b"1")
  assert synced == ["file", "new", "new/f0", "new/f0/00000001"]
  for folder in ("f0", "f0/00000001", "tmp"):
    assert (tmp_path / "new" / folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_bucket_exchange_join_and_put_once(tmp_path, kind):
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
  assert paths == {"r/run.model", "r/run.settings", "r/f0/00000003.set", *centers} | {
    f"r/f0/00000003/{name}.msg" for name in "ab"
  }
  late = pod(store, "c")
  assert center_of(late.join(tx, START)[1]) == center_of(held[0][1])
  bucket = _stores.Bucket(store)
  with pytest.raises(ValueError, match="more than 10 bytes"):
    bucket.get("r/f0/00000004.center", 10)
  assert [bucket.put("r/once", data) for data in (b"first", b"second")] == [True, False]
  assert bucket.get("r/once", 10) == b"first"


@pytest.mark.parametrize("failures", [2, 5])
def test_bucket_put_is_tried_five_times_at_growing_intervals(monkeypatch, failures):
  obstore = pytest.importorskip("obstore")
  bucket, tries, pauses, put = _stores.Bucket("memory:///"), [], [], obstore.put

  def fails_first(*args, **kwargs):
    tries.append(args[1])
    if len(tries) <= failures:
      raise obstore.exceptions.GenericError("two at once")
    return put(*args, **kwargs)

  monkeypatch.setattr(obstore, "put", fails_first)
  monkeypatch.setattr(_stores.time, "sleep", pauses.append)
  if failures == 5:
    with pytest.raises(obstore.exceptions.GenericError, match="two at once"):
      bucket.put("a", b"1")
    assert bucket.get("a", 10) is None
  else:
    assert bucket.put("a", b"1") and bucket.get("a", 10) == b"1"
  assert pauses == [0.1, 0.2, 0.4, 0.8][:failures]
