"""A message's bytes: back again, cut, flipped, and of another place."""

import dataclasses
import hashlib
import pickle
import struct

import numpy as np
import pytest
from helpers import bits
from messages_cases import Pods, X, local_steps

import optax_wrappers as ow

# Bytes.

PLACE = {"run": "r", "round": 3}


def made(key=None):
  tx = local_steps(codec=ow.codecs.quantize(8))
  pods = Pods(tx)
  pods.train(0)
  said = pods.say()[1]
  x, state = pods.pods[0]
  return said, X.to_bytes(said, **PLACE, key=key), X.template(tx, state, x)


@pytest.mark.parametrize("key", [None, b"secret"])
def test_to_bytes_from_bytes_round_trip_of_message(key):
  said, data, template = made(key)
  found = X.from_bytes(data, template, **PLACE, key=key)
  assert found.sender == "pod-b" and bits(found) == bits(said)
  assert [x.dtype for x in found.parts] == [x.dtype for x in said.parts]
  assert 44 < len(data) - sum(map(len, bits(said))) < 120


@pytest.mark.parametrize("key", [None, b"secret"])
def test_from_bytes_truncated_or_flipped_bit_is_error(key):
  _, data, template = made(key)
  rng = np.random.default_rng(0)
  for at in [*range(60), *rng.integers(0, len(data), 100).tolist(), len(data) - 1]:
    with pytest.raises(ValueError, match="are not a message"):
      X.from_bytes(data[:at], template, **PLACE, key=key)
    flipped = bytearray(data)
    flipped[at] ^= 1 << int(rng.integers(8))
    with pytest.raises(ValueError, match="are not a message"):
      X.from_bytes(bytes(flipped), template, **PLACE, key=key)
  with pytest.raises(ValueError, match="are not a message"):
    X.from_bytes(data + b"x", template, **PLACE, key=key)


def test_from_bytes_errors_other_round_key_weight_or_pickle(tmp_path):
  said, data, template = made()
  assert X.from_bytes(data, template, **PLACE)
  for other in ({"run": "s"}, {"round": 4}, {"key": b"k"}):
    with pytest.raises(ValueError, match="are not a message"):
      X.from_bytes(data, template, **(PLACE | other))
  with pytest.raises(ValueError, match="are not a message"):
    X.from_bytes(data, dataclasses.replace(template, fragment=1), **PLACE)
  for bad in (np.nan, -1.0, np.inf):
    wrong = X.to_bytes(dataclasses.replace(said, weight=np.float32(bad)), **PLACE)
    with pytest.raises(ValueError, match="weight"):
      X.from_bytes(wrong, template, **PLACE)
  bad_name = X.to_bytes(dataclasses.replace(said, sender="../x"), **PLACE)
  with pytest.raises(ValueError, match="sender"):
    X.from_bytes(bad_name, template, **PLACE)

  class Trace:
    def __reduce__(self):
      return (open, (str(tmp_path / "trace"), "w"))

  with pytest.raises(ValueError, match="are not a message"):
    X.from_bytes(pickle.dumps(Trace()), template, **PLACE)
  assert not (tmp_path / "trace").exists()


def test_key_that_is_empty_is_error_and_memoryview_is_read():
  """An empty key is what a variable that is not set gives; a packet may have any header."""
  said, data, template = made()
  for key in (b"", "secret"):
    with pytest.raises(TypeError, match="to_bytes: key must be bytes, not empty"):
      X.to_bytes(said, **PLACE, key=key)
    with pytest.raises(TypeError, match="from_bytes: key must be bytes, not empty"):
      X.from_bytes(data, template, **PLACE, key=key)
  assert bits(X.from_bytes(memoryview(data), template, **PLACE)) == bits(said)
  for header in (b"[" * 1024, b'[["message"], 1]', b"3", b"\xff"):
    rest = struct.pack("<I", len(header)) + header
    with pytest.raises(ValueError, match="are not a message: it"):
      X.from_bytes(b"OWX1" + hashlib.sha256(rest).digest() + rest, template, **PLACE)
