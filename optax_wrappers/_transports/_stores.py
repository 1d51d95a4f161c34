"""Write-once stores: a directory or a bucket.

A write is atomic: no reader sees a part of it. It is exclusive: a second writer fails. `os.rename`
overwrites, and a file opened exclusively is visible before it is complete; a hard link has both
properties.
"""

import contextlib
import os
import pathlib
import stat
import time
import uuid
from collections.abc import Iterator
from typing import Any, Protocol


class Store(Protocol):
  """What the log requires; `/` separates the parts of a name."""

  pause: float  # seconds between two polls

  def put(self, name: str, data: bytes) -> bool:
    """Writes it unless the name exists; then it writes nothing and returns False."""

  def get(self, name: str, limit: int) -> bytes | None:
    """What was written, or None; a ValueError for more bytes than `limit`."""

  def names(self, folder: str) -> list[str]:
    """The names in a folder, by their last part."""

  def delete(self, name: str) -> None:
    """Deletes what was written, if it exists."""


class Files:
  """A directory on a POSIX file system with hard links."""

  pause = 0.02

  def __init__(self, path: str | os.PathLike, sender: str):
    self.path, self.sender = pathlib.Path(path), sender
    self.unfinished = self.path / "tmp"
    self._make(self.unfinished)
    for left in self.unfinished.glob(f"{sender}~*"):  # from an earlier life
      left.unlink(missing_ok=True)

  def put(self, name: str, data: bytes) -> bool:
    path, written = self.path / name, self.unfinished / f"{self.sender}~{uuid.uuid4().hex}"
    self._make(path.parent)
    try:
      with open(written, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
      try:
        os.link(written, path)
      except FileNotFoundError:  # the folder of an old round was deleted meanwhile
        self._make(path.parent)
        os.link(written, path)
    except FileExistsError:
      return False
    finally:
      written.unlink(missing_ok=True)
    _sync(path.parent)
    return True

  def get(self, name: str, limit: int) -> bytes | None:
    try:
      # Anyone with write access may have put a pipe here, and opening it would wait forever.
      opened = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
      return None
    except OSError as error:
      raise ValueError(f"it cannot be read: {error.strerror}") from error
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
      os.close(opened)
      raise ValueError(f"it is not a file of at most {limit} bytes")
    with open(opened, "rb") as file:
      return file.read(limit)

  def names(self, folder: str) -> list[str]:
    try:
      return sorted(os.listdir(self.path / folder))
    except (FileNotFoundError, NotADirectoryError):
      return []

  def delete(self, name: str) -> None:
    path = self.path / name
    with contextlib.suppress(OSError):  # another pod was first, or has put something into it
      path.rmdir() if path.is_dir() else path.unlink()

  def _make(self, folder):
    if not folder.is_dir():
      self._make(folder.parent)
      folder.mkdir(mode=0o700, exist_ok=True)
      _sync(folder.parent)


class Bucket:
  """A bucket of S3, GCS, Azure or another that obstore knows, by conditional puts."""

  pause = 0.5

  def __init__(self, path: Any):
    import obstore  # imported only here: a directory does not need it

    self.obstore = obstore
    self.store = obstore.store.from_url(path) if isinstance(path, str) else path

  def put(self, name: str, data: bytes) -> bool:
    for attempt in range(5):
      try:
        self.obstore.put(self.store, name, data, mode="create")
        return True
      except self.obstore.exceptions.AlreadyExistsError:
        with contextlib.suppress(FileNotFoundError, self.obstore.exceptions.NotFoundError):
          self.obstore.head(self.store, name)  # S3 also says so if one is deleted at the same time
          return False
      except self.obstore.exceptions.GenericError:  # two at once: either may have to retry
        if attempt == 4:
          raise
      time.sleep(0.1 * 2**attempt)
    return False

  def get(self, name: str, limit: int) -> bytes | None:
    try:
      found = self.obstore.get(self.store, name)
    except (FileNotFoundError, self.obstore.exceptions.NotFoundError):
      return None
    if found.meta["size"] > limit:
      raise ValueError(f"it has more than {limit} bytes")
    return bytes(found.bytes())

  def names(self, folder: str) -> list[str]:
    found = self.obstore.list_with_delimiter(self.store, folder)
    paths: Iterator[str] = (x["path"] for x in found["objects"])
    return sorted([p.rsplit("/", 1)[-1] for p in (*paths, *found["common_prefixes"])])

  def delete(self, name: str) -> None:
    with contextlib.suppress(FileNotFoundError, self.obstore.exceptions.BaseError):
      self.obstore.delete(self.store, name)


def _sync(folder):
  """Makes the changes in a folder durable."""
  opened = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)
