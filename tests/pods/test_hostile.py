"""A directory in which anyone may have put anything, and pods that go on."""

import dataclasses
import hashlib
import json
import os
import shutil
import struct

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from directory_cases import START, center_of, optimizer, pod, train

import optax_wrappers as ow


def forged(header, body=b""):
  """A packet without a key."""
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  rest = struct.pack("<I", len(text)) + text + body
  return b"OWX1" + hashlib.sha256(rest).digest() + rest


DEEP = forged(b"[" * 1024)
A_SET = bytes(12) + f"a 0 {'0' * 64}".encode()  # a weight, the base, and the messages
FILES = {
  "empty": b"",
  "deep": DEEP,
  "numbers": forged([["message"], {"r": 1}, None]),
  "unsigned set": forged(["message", "r/set", 1, 0, "set"], A_SET),
}
PLACES = [
  "f0/00000001.set",
  "f0/00000001.center",
  "f0/00000002.center",
  "f0/99999999.center",
  "f0/00000001/c.msg",
  "f0/00000000/c.late",
  "f0/00000001/\udcff.msg",
]


def planted(root, place, kind):
  path = os.fsencode(root / place)
  if os.path.exists(path):
    return  # a snapshot that pods have written
  os.makedirs(os.path.dirname(path), exist_ok=True)
  if kind == "directory":
    os.mkdir(path)
  elif kind == "link":
    os.symlink(b"/etc/passwd", path)
  else:
    with open(path, "wb") as file:
      file.write(FILES[kind])


@pytest.mark.parametrize("kind", [*FILES, "directory", "link"])
def test_planted_files_stop_no_pod_and_decide_nothing(tmp_path, kind):
  """Two pods with a key go through three rounds, and a third joins."""
  tx, options = optimizer(), {"key": b"secret", "quorum": 2, "timeout": 20.0}
  root, pods = tmp_path / "r", [pod(tmp_path, name, **options) for name in "ab"]
  held = [one.join(tx, START) for one in pods]
  alone = [(x, s) for x, s in held]
  for r in range(3):
    if r == 1:
      for place in PLACES:
        planted(root, place, kind)
    slopes = 1.0 + r, 2.0 - r
    held = [train(tx, *one, slope) for one, slope in zip(held, slopes, strict=True)]
    held = [(x, one.send(tx, x, s)) for one, (x, s) in zip(pods, held, strict=True)]
    held = [one.receive(tx, *mine) for one, mine in zip(pods, held, strict=True)]
    # What they have without a directory.
    alone = [train(tx, *one, slope) for one, slope in zip(alone, slopes, strict=True)]
    sent = [
      ow.exchange.message(tx, s, x, sender=name) for (x, s), name in zip(alone, "ab", strict=True)
    ]
    alone = [
      ow.exchange.absorb(tx, s, x, [m for m, _ in sent])
      for (x, _), (_, s) in zip(alone, sent, strict=True)
    ]
    assert center_of(held[0][1]) == center_of(held[1][1]) == center_of(alone[0][1])
    for one in pods:
      assert one.report.present == ("a", "b")
      str(one.report).encode("ascii")
  assert center_of(pod(tmp_path, "c", key=b"secret").join(tx, START)[1]) == center_of(held[0][1])
  assert (root / "f0/99999999.center").is_symlink() or (root / "f0/99999999.center").exists()


def test_refused_file_is_reported_once(tmp_path):
  tx = optimizer()
  a = pod(tmp_path, "a", key=b"secret")
  held = a.join(tx, START)
  planted(tmp_path / "r", "f0/00000000/c.msg", "empty")
  for refused in ({"f0/00000000/c.msg"}, set()):
    held = a.exchange(tx, *train(tx, *held, 1.0))
    assert set(a.report.refused) == refused


DIGEST = "0" * 64


@pytest.mark.parametrize(
  "lines",
  [
    f"a 0 {DIGEST}",
    f"../a 0 {DIGEST}",
    f"a 1 {DIGEST}",
    f"a -1 {DIGEST}",
    f"a {'9' * 5000} {DIGEST}",
    f"a 0 {DIGEST}\n",
    "a 0 /etc/passwd",
    "\udcff",
    "",
  ],
)
def test_decision_lists_only_senders_rounds_and_digests(tmp_path, lines):
  """Without a key, when anyone can write one. The first line is what a decision may be."""
  tx, a = optimizer(), pod(tmp_path, "a")
  held = train(tx, *a.join(tx, START), 1.0)
  body = bytes(12) + lines.encode("utf8", "surrogateescape")
  path = tmp_path / "r/f0/00000000.set"
  path.write_bytes(forged(["message", "r/set", 0, 0, "set"], body))
  if lines == f"a 0 {DIGEST}":
    with pytest.raises(ow.pods.OutOfStepError, match="begins at another center"):
      a.exchange(tx, *held)
    return
  a.exchange(tx, *held)
  assert a.report.present == ("a",) and [*a.report.refused] == ["f0/00000000.set"]


@pytest.mark.parametrize("source", ["00000000.center", "00000000/a.msg", "../run.settings"])
@pytest.mark.parametrize("place", ["00000000.set", "00000001.center", "00000000/c.msg"])
def test_signed_record_of_one_kind_is_none_of_another(tmp_path, source, place):
  tx, pods = optimizer(codec=False), [pod(tmp_path, name, key=b"k", quorum=2) for name in "ab"]
  held = [train(tx, *one.join(tx, START), 1.0) for one in pods]
  held = [(x, one.send(tx, x, state)) for one, (x, state) in zip(pods, held, strict=True)]
  folder = tmp_path / "r" / "f0"
  shutil.copy(folder / source, folder / place)
  held = [one.receive(tx, *mine) for one, mine in zip(pods, held, strict=True)]
  for one in pods:
    assert one.report.present == ("a", "b") and one.round == {0: 1}
  assert any(name.startswith("f0/" + place[:8]) for name in pods[0]._log.refused)
  assert center_of(pod(tmp_path, "c", key=b"k").join(tx, START)[1]) == center_of(held[0][1])


def test_pod_deletes_nothing_through_a_link(tmp_path):
  victim = tmp_path / "victim"
  victim.mkdir()
  (victim / "precious.txt").write_text("x")
  tx, a = optimizer(), pod(tmp_path, "a", key=b"secret")
  held = a.exchange(tx, *train(tx, *a.join(tx, START), 1.0))
  shutil.rmtree(tmp_path / "r/f0/00000000")
  (tmp_path / "r/f0/00000000").symlink_to(victim, target_is_directory=True)
  for _ in range(3):
    held = a.exchange(tx, *train(tx, *held, 1.0))
  assert [path.name for path in victim.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_directory_weight_that_is_none_is_error_and_sends_nothing(tmp_path, weight):
  tx, a = optimizer(), pod(tmp_path, "a")
  held = train(tx, *a.join(tx, START), 1.0)
  for call in (a.exchange, a.send):
    with pytest.raises(ValueError, match=r"^Directory: weight must be"):
      call(tx, *held, weight=weight)
  assert not list((tmp_path / "r").glob("f0/*/*.msg"))
  a.exchange(tx, *held)
  assert a.report.present == ("a",)


def test_directory_weights_above_int32_count_in_full(tmp_path):
  """5e9 tokens at -1, and 1e9 at 1, as NumPy's and Python's integers."""
  tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=optax.sgd(1.0))
  pods, start = [pod(tmp_path, name, quorum=2) for name in "ab"], {"w": jnp.zeros(())}
  held = [train(tx, *one.join(tx, start), slope) for one, slope in zip(pods, (10.0, -10.0))]
  weights = np.int64(5_000_000_000), 1_000_000_000
  held = [(x, d.send(tx, x, s, w)) for d, (x, s), w in zip(pods, held, weights, strict=True)]
  for d, mine in zip(pods, held, strict=True):
    np.testing.assert_allclose(d.receive(tx, *mine)[0]["w"], -4 / 6, rtol=1e-6)


@pytest.mark.optax_promotes
def test_nan_pod_is_listed_as_absent_and_warned_of(tmp_path):
  """Its moments begin again, so that it counts in the round after a bad gradient."""
  tx = ow.diloco(optax.adam(0.1), None, communication_period=None)
  pods = [pod(tmp_path, name, quorum=2) for name in "ab"]
  held = [one.join(tx, START) for one in pods]
  for r in range(3):
    for k in range(2):
      slopes = 1.0, np.nan if (r, k) == (1, 0) else 1.0
      held = [train(tx, *one, slope) for one, slope in zip(held, slopes, strict=True)]
    held = [(x, d.send(tx, x, s)) for d, (x, s) in zip(pods, held, strict=True)]
    held = [d.receive(tx, *mine) for d, mine in zip(pods, held, strict=True)]
    listed = (("a",), ("b",)) if r == 1 else (("a", "b"), ())
    assert (pods[0].report.present, pods[0].report.absent) == listed
  a, b = pods
  with pytest.warns(UserWarning, match="'b' sent weight 0 three times in a row"):
    for _ in range(3):
      held = [train(tx, *one, slope) for one, slope in zip(held, (1.0, np.nan), strict=True)]
      held[1] = held[1][0], b.send(tx, *held[1])
      held = [a.exchange(tx, *held[0]), b.receive(tx, *held[1])]


def test_message_that_is_not_finite_has_no_weight_in_any_pod():
  """Made by others, or a difference of finite parameters that overflows."""
  tx = ow.local_steps(optax.sgd(0.1), None, communication_period=None, outer=optax.sgd(1.0))
  params, state = train(tx, START, tx.init(START), 1.0)
  one, state = ow.exchange.message(tx, state, params, sender="a")
  parts = tuple(jnp.full_like(x, jnp.nan) for x in one.parts)
  bad = dataclasses.replace(one, parts=parts, sender="b")
  expected = ow.exchange.absorb(tx, state, params, [one])[1]
  assert center_of(ow.exchange.absorb(tx, state, params, [one, bad])[1]) == center_of(expected)
  huge = {"w": jnp.full(3, 3e38)}
  _, state = train(tx, huge, tx.init(huge), 0.0)
  assert ow.exchange.message(tx, state, {"w": -huge["w"]}, sender="a")[0].weight == 0


def listed(root, r):
  """The senders and the rounds of a set, read from its file."""
  data = (root / f"f0/{r:08d}.set").read_bytes()
  (length,) = struct.unpack("<I", data[36:40])
  lines = data[40 + length + 12 :].decode().split("\n")
  return [(sender, int(q)) for sender, q, _ in map(str.split, lines)]


@pytest.mark.filterwarnings("ignore:Directory. '[abc]' came late three times")
@pytest.mark.parametrize("trial", range(4))
@pytest.mark.parametrize("seed", range(5))
def test_all_sent_work_is_in_center_or_residual_whatever_pods_are_killed(tmp_path, seed, trial):
  """With `max_age=1`: in random order, some killed between both halves, some late for ever."""
  rng = np.random.default_rng([seed, trial])
  tx = ow.local_steps(
    optax.sgd(0.1),
    None,
    communication_period=None,
    outer=optax.sgd(1.0),
    codec=ow.codecs.quantize(8),
    reduction="sum",
  )
  start = {"w": np.zeros((64, 32), "f")}

  def residual(state):
    return float(np.asarray(state.compressed[0].residual["w"])[0, 0])

  def life(name):
    one = pod(tmp_path, name, max_age=1, snapshot_every=1000)
    return [one, *one.join(tx, start), 0.0, {}]  # its work, and what it has sent by rounds

  lives, dead = {name: life(name) for name in "abc"}, []
  for turn in range(14):
    name = rng.choice([*"abc"])
    one, params, state, work, sent = lives[name]
    slope = (turn + 1.0) * (-1) ** turn  # no two messages are alike
    params, state = train(tx, params, state, 10 * slope)
    content, r = residual(state) + slope, one.round[0]
    is_taken = (tmp_path / f"r/f0/{r:08d}/{name}.msg").exists()  # by an earlier life
    state = one.send(tx, params, state)
    if not is_taken:
      sent[r] = content
    if name != "a" and rng.random() < 0.2:  # killed
      dead.append((name, sent))
      lives[name] = life(name)
      continue
    params, state = one.receive(tx, params, state)
    lives[name] = [one, params, state, work + slope, sent]
  last = max(one.round[0] for one, *_ in lives.values())
  rounds = {pair for r in range(last) for pair in listed(tmp_path / "r", r)}
  counted, ends = 0.0, set()
  for name, (one, _, state, work, sent) in lives.items():
    mine = sum(content for r, content in sent.items() if (name, r) in rounds)
    still = {r for r in one._rounds[0].sent if (name, r) not in rounds}  # may still count
    held = [content for r, content in sent.items() if r in still]
    assert mine + sum(held) + residual(state) == pytest.approx(work, abs=1e-3), name
    counted += mine
    if one.round[0] == last:
      ends.add(float(np.asarray(ow.center_params(state)["w"])[0, 0]))
  for name, sent in dead:
    counted += sum(content for r, content in sent.items() if (name, r) in rounds)
  assert len(ends) == 1 and ends.pop() == pytest.approx(-counted, abs=1e-3)
