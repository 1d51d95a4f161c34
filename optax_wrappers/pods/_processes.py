"""A pod of several processes: the first of them asks the store and the clock, for all.

What a pod does is a function of its arguments, and of what the store and the clock answer. All
processes compute it from the same answers, so they decide the same in the same call, and run the
same collectives in the same order.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_wrappers.pods._stores import Store

_SMALLEST, _LARGEST = 2**10, 2**26  # bytes that are sent at once

_GONE = (
  "Directory: another process of this pod is gone, or has not made the same call. End this one too,"
  " start the pod again, and join."
)


class Shared:
  """A store that the first process uses; all get its answers, or its errors.

  Args:
    open_store: opens it, in the first process.
  """

  def __init__(self, open_store: Callable[[], Store]):
    self._store: Any = None
    self.pause: float = self._told("open", lambda: self._opened(open_store))

  def put(self, name: str, data: bytes) -> bool:
    return self._told(f"put {name}", lambda: self._store.put(name, data))

  def get(self, name: str, limit: int) -> bytes | None:
    return self._told(f"get {name}", lambda: self._store.get(name, limit))

  def names(self, folder: str) -> list[str]:
    return self._told(f"names {folder}", lambda: self._store.names(folder))

  def delete(self, name: str) -> None:
    return self._told(f"delete {name}", lambda: self._store.delete(name))

  def now(self) -> float:
    return self._told("now", lambda: self._store.now())

  def _opened(self, open_store):
    self._store = open_store()
    return self._store.pause

  def _told(self, question: str, ask: Callable[[], Any]) -> Any:
    answer, error = None, None
    if jax.process_index() == 0:
      try:
        answer = ask()
      except Exception as raised:  # whatever a store raises is for all
        error = raised
    asked, is_error, told = _unpacked(_sent(_packed(question, answer, error)))
    if error is not None:
      raise error
    if asked != question:
      raise RuntimeError(f"{_GONE} The first process: {asked!r}; this one: {question!r}.")
    if is_error:
      kind, number, text = told
      raise ValueError(text) if kind == "ValueError" else OSError(number, text)
    return told


def require_equal(arguments: dict[str, Any]) -> None:
  """Raises in all processes if something differs between them. Sends a few bytes of fixed size."""
  if jax.process_count() == 1:
    return
  digests = [hashlib.sha256(repr(x).encode()).digest()[:8] for x in arguments.values()]
  here = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 8)
  everywhere = _collective(lambda: np.asarray(multihost_utils.process_allgather(here)))
  for i, (what, value) in enumerate(arguments.items()):
    if (everywhere[:, i] != everywhere[0, i]).any():
      shown = "" if what == "key" else f"; in process {jax.process_index()} it is {value!r:.200}"
      raise ValueError(f"Directory: {what} must be equal in all processes of a pod{shown}.")


def _packed(question, answer, error):
  """The answer of the first process as bytes; of the others nothing is read."""
  body = answer if isinstance(answer, bytes) else b""
  if error is not None:
    kind = "ValueError" if isinstance(error, ValueError) else "OSError"
    answer = [kind, getattr(error, "errno", None), str(getattr(error, "strerror", None) or error)]
  has_body = isinstance(answer, bytes)
  answer = None if has_body else answer
  header = json.dumps([question, error is not None, answer, has_body]).encode()
  return struct.pack("<QQ", len(header), len(header) + len(body)) + header + body


def _unpacked(data):
  length, _ = struct.unpack("<QQ", data[:16])
  question, is_error, answer, has_body = json.loads(data[16 : 16 + length])
  return question, is_error, data[16 + length :] if has_body else answer


def _sent(data):
  """The bytes of the first process, in all. Most are few, and are sent at once."""
  first = _broadcast(data[:_SMALLEST], _SMALLEST)
  _, total = struct.unpack("<QQ", first[:16])
  parts, end = [first], _SMALLEST
  while end < total + 16:
    # Of few sizes, each of which is compiled.
    size = min(_LARGEST, 1 << (total + 16 - end - 1).bit_length())
    parts.append(_broadcast(data[end : end + size], size))
    end += size
  return b"".join(parts)[: total + 16]


def _broadcast(data, size):
  buffer = np.zeros(size, np.uint8)
  if jax.process_index() == 0:
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
  return _collective(lambda: np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes())


def _collective(send):
  try:
    return send()
  except jax.errors.JaxRuntimeError as error:
    raise RuntimeError(f"{_GONE} JAX: {error!s:.200}") from error
