"""Untrusted bytes: data, never code, with a tag against accidents, or with a key against forgery.

The bytes of a message are `OWX1`, a tag of 32 bytes, the length of the header, the header in JSON,
and the arrays. The tag is the SHA-256 of everything after it, or with a key its HMAC. Shapes and
dtypes are not included: the receiver takes them from a template.
"""

import hashlib
import hmac
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np

from optax_wrappers._workers._merge import whole
from optax_wrappers._workers._messages import NAME, Message

MAGIC = b"OWX1"
LONGEST_HEADER = 1024  # bytes


def to_bytes(message: Message, *, run: str, round: int, key: bytes | None = None) -> bytes:
  """A message as bytes, for any transport.

  Args:
    message: of age 0.
    run: a name for what all workers train together.
    round: the number of the synchronization of this fragment.
    key: a shared secret that signs it, not empty; None: only a checksum, against accidents.

  Returns:
    44 bytes, the header, and those of the parts.

  **Communication**: none; with parts that are sharded over processes all must call it, and each is
  gathered, one after the other.
  """
  _check_key("to_bytes", key)
  header = json.dumps(["message", run, int(round), message.fragment, message.sender]).encode()
  arrays = [whole(x).tobytes() for x in jax.tree.leaves(message)]
  signed = b"".join([struct.pack("<I", len(header)), header, *arrays])
  return MAGIC + _tag(signed, key) + signed


def from_bytes(
  data: bytes, template: Message, *, run: str, round: int, key: bytes | None = None
) -> Message:
  """A message from untrusted bytes: none is executed, and no size in them is trusted.

  Args:
    data: the bytes.
    template: from the receiver's `exchange.template`.
    run: as in `to_bytes`; bytes of another run are refused.
    round: the same.
    key: the same.

  Raises:
    ValueError: for bytes that are not a complete, unchanged message of this run, round and
      fragment.
  """
  _check_key("from_bytes", key)
  try:
    header, body = _opened(bytes(data), key)
    expected = ["message", run, int(round), template.fragment]
    if header[:4] != expected or len(header) != 5:
      raise ValueError(f"it is of {header[:4]}, and {expected} was needed")
    sender = header[4]
    if not (isinstance(sender, str) and NAME.fullmatch(sender)):
      raise ValueError(f"its sender is {sender!r:.100}")
    weight, base, *parts = _arrays(body, jax.tree.leaves(template))
    if not (np.isfinite(weight) and weight >= 0):
      raise ValueError(f"its weight is {weight}")
    return Message(weight, base, tuple(parts), sender, template.fragment)
  except ValueError as error:
    raise ValueError(f"from_bytes: these bytes are not a message: {error}.") from error


def _opened(data, key):
  """The header and the body; a ValueError for anything but bytes of this key."""
  tag, signed = data[4:36], data[36:]
  if data[:4] != MAGIC or not hmac.compare_digest(tag, _tag(signed, key)):
    what = "truncated, changed, or signed with another key" if key else "truncated or changed"
    raise ValueError(f"it is {what}")
  (length,) = struct.unpack("<I", signed[:4].ljust(4, b"\xff"))
  if length > LONGEST_HEADER:
    raise ValueError("its header is too long")
  try:
    header = json.loads(signed[4 : 4 + length])
  except (ValueError, RecursionError) as error:
    raise ValueError("it is not JSON") from error
  if not (isinstance(header, list) and all(isinstance(x, str | int) for x in header)):
    raise ValueError("its header is not a list of strings and integers")
  return header, signed[4 + length :]


def _arrays(data, shapes):
  """NumPy arrays of these shapes and dtypes."""
  sizes = [int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in shapes]
  if len(data) != sum(sizes):
    raise ValueError("it belongs to another model, codec or outer optimizer")
  parts = np.split(np.frombuffer(data, np.uint8), np.cumsum(sizes)[:-1])
  return [part.view(x.dtype).reshape(x.shape) for part, x in zip(parts, shapes)]


def _check_key(function, key):
  if key is not None and not (isinstance(key, bytes) and key):
    # An empty one, as of a variable that is not set, would sign nothing. Not the secret itself.
    kind = "none" if key == b"" else type(key).__name__
    raise TypeError(f"{function}: key must be bytes, not empty; got {kind}.")


def _tag(signed, key):
  return hmac.digest(key, signed, "sha256") if key else hashlib.sha256(signed).digest()
