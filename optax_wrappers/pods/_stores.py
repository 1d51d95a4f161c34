"""Write-once stores: a directory or a bucket.

A write is atomic: no reader sees a part of it. It is exclusive: a second writer fails. `os.rename`
overwrites, and a file opened exclusively is visible before it is complete; a hard link has both
properties.
"""

import contextlib
import errno
import os
import pathlib
import stat
import time
import uuid
from collections.abc import Iterator
from typing import Any, Protocol

# nothing, a file, or a link.
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Store(Protocol):
  """What the log requires; `/` separates the parts of a name."""

  pause: float  # seconds between two polls, at first

  def put(self, name: str, data: bytes) -> bool:
    """Writes it unless the name exists; then it writes nothing and returns False."""

  def get(self, name: str, limit: int) -> bytes | None:
    """What was written, or None; a ValueError for more bytes than `limit`."""

  def names(self, folder: str) -> list[str]:
    """The names in a folder, by their last part."""

  def delete(self, name: str) -> None:
    """Deletes what was written, if it exists."""

  def now(self) -> float:
    """Seconds since some moment, by a clock of its own: no times of files are read."""


# A pause is this share of the time waited, up to so many of the shortest.
SHARE, LONGEST = 1 / 20, 10


def pause_after(waited: float, shortest: float) -> float:
  """Seconds to the next poll."""
  return min(max(shortest, SHARE * waited), LONGEST * shortest)


class Files:
  """A directory on a POSIX file system with hard links.

  Anyone with write access may have put anything anywhere: below `path` no link is followed.
  """

  pause = 0.02

  def __init__(self, path: str | os.PathLike, sender: str):
    self.path, self.sender = pathlib.Path(path), sender
    _make(self.path)
    with self._folder(["tmp"], make=True) as unfinished:
      for left in os.listdir(unfinished):
        if left.startswith(f"{sender}~"):  # from an earlier life
          os.unlink(left, dir_fd=unfinished)

  def put(self, name: str, data: bytes) -> bool:
    *parts, last = name.split("/")
    written = f"{self.sender}~{uuid.uuid4().hex}"
    with self._folder(["tmp"], make=True) as unfinished:
      try:
        _write(written, data, unfinished)
        try:
          self._link(written, unfinished, parts, last)
        except FileNotFoundError:  # the folder of an old round was deleted meanwhile
          self._link(written, unfinished, parts, last)
      except FileExistsError:
        return False
      finally:
        with contextlib.suppress(FileNotFoundError):
          os.unlink(written, dir_fd=unfinished)
    return True

  def get(self, name: str, limit: int) -> bytes | None:
    *parts, last = name.split("/")
    try:
      with self._folder(parts) as folder:
        # Opening a pipe would wait forever.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        opened = os.open(last, flags, dir_fd=folder)
    except FileNotFoundError:
      return None
    except OSError as error:
      if error.errno not in (*_NO_FOLDER, errno.EACCES, errno.ENXIO):
        raise  # of the disk or the network, not of what is there
      raise ValueError(f"it cannot be read: {error.strerror}") from error
    entry = os.fstat(opened)
    if not stat.S_ISREG(entry.st_mode) or entry.st_size > limit:
      os.close(opened)
      raise ValueError(f"it is not a file of at most {limit} bytes")
    with open(opened, "rb") as file:
      return file.read(limit)

  def names(self, folder: str) -> list[str]:
    try:
      with self._folder(folder.split("/")) as opened:
        return sorted(os.listdir(opened))
    except OSError as error:
      if error.errno in _NO_FOLDER:
        return []
      raise

  def delete(self, name: str) -> None:
    *parts, last = name.split("/")
    # Another pod was first, or has put something into it.
    with contextlib.suppress(OSError), self._folder(parts) as folder:
      entry = os.stat(last, dir_fd=folder, follow_symlinks=False)
      (os.rmdir if stat.S_ISDIR(entry.st_mode) else os.unlink)(last, dir_fd=folder)

  def now(self) -> float:
    return time.monotonic()

  def _link(self, written, unfinished, parts, last):
    with self._folder(parts, make=True) as folder:
      os.link(written, last, src_dir_fd=unfinished, dst_dir_fd=folder)
      os.fsync(folder)

  @contextlib.contextmanager
  def _folder(self, parts, make=False):
    """A descriptor of a folder; with `make` it is made, and takes the place of what is none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
      opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
      gone = "The run is gone; to begin it again from this pod's center, join"
      raise FileNotFoundError(errno.ENOENT, gone, str(self.path)) from error
    try:
      for part in parts:
        try:
          inner = os.open(part, flags, dir_fd=opened)
        except OSError as error:
          if not make or error.errno not in _NO_FOLDER:
            raise
          # A link, or a file; another pod may be first.
          with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=opened)
          with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=opened)
          os.fsync(opened)
          inner = os.open(part, flags, dir_fd=opened)
        os.close(opened)
        opened = inner
      yield opened
    finally:
      os.close(opened)


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
          # S3 also says so if one is deleted at the same time.
          self.obstore.head(self.store, name)
          return False
      except self.obstore.exceptions.GenericError:  # two at once: either may have to retry
        if attempt == 4:
          raise
      time.sleep(0.1 * 2**attempt)
    return False

  def get(self, name: str, limit: int) -> bytes | None:
    try:
      response = self.obstore.get(self.store, name)
    except (FileNotFoundError, self.obstore.exceptions.NotFoundError):
      return None
    if response.meta["size"] > limit:
      raise ValueError(f"it has more than {limit} bytes")
    return bytes(response.bytes())

  def names(self, folder: str) -> list[str]:
    listing = self.obstore.list_with_delimiter(self.store, folder)
    paths: Iterator[str] = (x["path"] for x in listing["objects"])
    return sorted([p.rsplit("/", 1)[-1] for p in (*paths, *listing["common_prefixes"])])

  def delete(self, name: str) -> None:
    with contextlib.suppress(FileNotFoundError, self.obstore.exceptions.BaseError):
      self.obstore.delete(self.store, name)

  def now(self) -> float:
    return time.monotonic()


def _make(folder):
  """Makes a folder and those above it, durably."""
  if folder.is_dir():
    return
  _make(folder.parent)
  folder.mkdir(mode=0o700, exist_ok=True)
  opened = os.open(folder.parent, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def _write(name, data, folder):
  """Writes a new file durably."""
  opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
  with open(opened, "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
