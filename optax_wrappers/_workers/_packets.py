"""Untrusted bytes: data, never code, with a tag against accidents, or with a key against forgery.

A packet is `OWX1`, a tag of 32 bytes, the length of the header, the header in JSON, and the body.
The tag is the SHA-256 of everything after it, or with a key its HMAC. Shapes and dtypes are not
included: the receiver takes them from a template.
"""

import hashlib
import hmac
import json
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_wrappers._core._types import Tree
from optax_wrappers._workers._messages import NAME, Message

MAGIC = b"OWX1"
LONGEST_HEADER = 1024  # bytes


def digest(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def checked_key(function: str, key: Any) -> bytes | None:
  """A key, or None; an empty one, as of a variable that is not set, would sign nothing."""
  if key is not None and not (isinstance(key, bytes) and key):
    given = "none" if key == b"" else type(key).__name__  # not the secret itself
    raise TypeError(f"{function}: key must be bytes, not empty; got {given}.")
  return key


def plain(text: str) -> str:
  """Text from outside, fit for one line of a log: without surrogates and line breaks."""
  return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def parsed(data: bytes) -> Any:
  """JSON from outside; a ValueError for anything else, however deep."""
  try:
    return json.loads(data)
  except (ValueError, RecursionError) as error:
    raise ValueError("it is not JSON") from error


def pack(header: list[Any], body: bytes, key: bytes | None) -> bytes:
  """A packet; the header holds strings and ints."""
  written = json.dumps(header).encode()
  rest = struct.pack("<I", len(written)) + written + body
  return MAGIC + _tag(rest, key) + rest


def unpack(data: bytes, key: bytes | None) -> tuple[list[Any], bytes]:
  """The header and the body; a ValueError for anything but a packet of this key."""
  data = bytes(data)
  tag, rest = data[4:36], data[36:]
  if data[:4] != MAGIC or not hmac.compare_digest(tag, _tag(rest, key)):
    what = "truncated, changed, or signed with another key" if key else "truncated or changed"
    raise ValueError(f"it is {what}")
  (length,) = struct.unpack("<I", rest[:4].ljust(4, b"\xff"))
  if length > LONGEST_HEADER:
    raise ValueError("its header is too long")
  header = parsed(rest[4 : 4 + length])
  if not (isinstance(header, list) and all(isinstance(x, str | int) for x in header)):
    raise ValueError("its header is not a list of strings and integers")
  return header, rest[4 + length :]


def largest(tree: Tree) -> int:
  """The maximum number of bytes of a packet with these arrays as its body."""
  return 4 + 32 + 4 + LONGEST_HEADER + sum(_num_bytes(x) for x in jax.tree.leaves(tree))


def body(tree: Tree) -> bytes:
  """The bytes of all leaves, concatenated."""
  return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))


def arrays(data: bytes, like: Tree) -> Tree:
  """The leaves of a body, as NumPy arrays in the shapes of another tree."""
  leaves = jax.tree.leaves(like)
  treedef: Any = jax.tree.structure(like)
  if len(data) != sum(map(_num_bytes, leaves)):
    raise ValueError("it belongs to another model, codec or outer optimizer")
  found, rest = [], memoryview(data)
  for x in leaves:
    found.append(np.frombuffer(rest[: _num_bytes(x)], jnp.dtype(x.dtype)).reshape(x.shape))
    rest = rest[_num_bytes(x) :]
  return treedef.unflatten(found)


def to_bytes(message: Message, *, run: str, round: int, key: bytes | None = None) -> bytes:
  """A message as bytes, for any transport.

  Args:
    message: of age 0.
    run: a name for what all workers train together.
    round: the number of the synchronization of this fragment.
    key: a shared secret that signs it, not empty; None: only a checksum, against accidents.

  Returns:
    44 bytes, the header, and those of the parts.
  """
  checked_key("to_bytes", key)
  return pack(["message", run, int(round), message.fragment, message.sender], body(message), key)


def from_bytes(
  data: bytes, template: Message, *, run: str, round: int, key: bytes | None = None
) -> Message:
  """A message from untrusted bytes.

  Nothing in them is executed, and no size in them is trusted.

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
  checked_key("from_bytes", key)
  try:
    header, data = unpack(data, key)
    needed = ["message", run, int(round), template.fragment]
    if header[:4] != needed or len(header) != 5:
      raise ValueError(f"it is of {header[:4]}, and {needed} was needed")
    leaves = jax.tree.leaves(arrays(data, template))
    if not (np.isfinite(leaves[0]) and leaves[0] >= 0):
      raise ValueError(f"its weight is {leaves[0]}")
    sender = header[4]
    if not (isinstance(sender, str) and NAME.fullmatch(sender)):
      raise ValueError(f"its sender is {sender!r:.100}")
    return Message(leaves[0], leaves[1], tuple(leaves[2:]), sender, template.fragment)
  except ValueError as error:
    raise ValueError(f"from_bytes: these bytes are not a message: {error}.") from error


def _num_bytes(x):
  return int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize


def _tag(rest, key):
  return hmac.digest(key, rest, "sha256") if key else hashlib.sha256(rest).digest()
