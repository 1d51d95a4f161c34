"""Stores in which a name is written once."""

import os
import threading

import pytest
from directory_cases import START, center_of, optimizer, pod, received, sent

from optax_wrappers._transports import _stores


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
  for name in ("folder", "pipe"):
    with pytest.raises(ValueError, match=r"^it is not a file of at most 10"):
      store.get(name, 10)
  assert (store.get("secret", 10), store.get("none", 10)) == (b"1", None)


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
