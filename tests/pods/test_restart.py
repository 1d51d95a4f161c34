"""A new version of a program that starts from the center of the run before it."""

import jax
import numpy as np
import optax
import pytest
from directory_cases import START, optimizer, pod, train
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow


def old_run(path, tx, params=START, **options):
  """The center after two rounds."""
  one = pod(path, "a", **options)
  held = one.join(tx, params)
  for _ in range(2):
    held = one.exchange(tx, *train(tx, *held, 1.0))
  return jax.tree.map(np.asarray, ow.center_params(held[1]))


def new_pod(path, **options):
  return ow.pods.Directory(path, run="s", sender="a", quorum=1, grace=0.0, **options)


@pytest.mark.parametrize("fragments", [1, {"w": 0, "b": 1}], ids=["one", "two"])
def test_start_from_takes_center_of_other_optimizer_codec_and_fragments(tmp_path, fragments):
  old = ow.diloco(optax.sgd(0.1), None, communication_period=None, fragments=fragments)
  one = pod(tmp_path, "a", key=b"k")
  held = one.join(old, START)
  for k in range(len(one.round)):
    held = one.exchange(old, *train(old, *held, 1.0), fragment=k)
  center = jax.tree.map(np.asarray, ow.center_params(held[1]))
  new = new_pod(tmp_path, key=b"k")
  params, names = new.start_from("r", jax.tree.map(np.zeros_like, START))
  assert not names
  params, state = new.join(optimizer(), params)
  for found in (params, ow.center_params(state)):
    jax.tree.map(np.testing.assert_array_equal, found, center)
  assert np.abs(center["b"] - START["b"]).max() > 0.05


def test_start_from_keeps_new_variables_and_lists_them(tmp_path):
  center = old_run(tmp_path, optimizer())
  mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  w = jax.device_put(np.zeros((64, 64), "f"), NamedSharding(mesh, P("d")))
  head = {"scale": np.full(3, 7.0, "f")}
  params, names = new_pod(tmp_path).start_from("r", {"w": w, "head": head})
  assert names == ["['head']['scale']"]
  np.testing.assert_array_equal(params["head"]["scale"], 7.0)
  np.testing.assert_array_equal(params["w"], center["w"])
  assert params["w"].sharding == w.sharding and params["w"].dtype == np.float32


def test_start_from_errors_shape_run_key_and_cut_variables(tmp_path):
  old_run(tmp_path, optimizer())
  bad = START | {"b": np.zeros(6, "f")}
  with pytest.raises(ValueError, match=r"params\['b'\] has the shape \[6\], and in that run \[5\]"):
    new_pod(tmp_path).start_from("r", bad)
  with pytest.raises(ValueError, match="there is no run 'q' of this version with this key"):
    new_pod(tmp_path).start_from("q", START)
  with pytest.raises(ValueError, match="no run 'r' of this version with this key"):
    new_pod(tmp_path, key=b"k").start_from("r", START)
  with pytest.raises(ValueError, match="run must be a letter"):
    new_pod(tmp_path).start_from("../r", START)
  cut = {"w": ow.exchange.stripes(64, 2), "b": 0}
  tx = ow.diloco(optax.sgd(0.1), None, communication_period=None, fragments=cut)
  ow.pods.Directory(tmp_path, run="cut", sender="a", quorum=1).join(tx, START)
  with pytest.raises(ValueError, match="fragments of the run 'cut' are parts of variables"):
    new_pod(tmp_path).start_from("cut", START)


@pytest.mark.parametrize(
  "text", [b"[", b'[[["a", "float32", [9e99]]]]', b'[[["a", "x", [1]]]]', b"{}"]
)
def test_start_from_hostile_model_is_no_run(tmp_path, text):
  (tmp_path / "r").mkdir()
  message = ow.exchange.Message(
    np.zeros((), "f"), np.zeros(2, "u4"), (np.frombuffer(text, np.uint8),), "model", 0
  )
  data = ow.exchange.to_bytes(message, run="r/model", round=0)
  (tmp_path / "r" / "run.model").write_bytes(data)
  with pytest.raises(ValueError, match="Directory: "):
    new_pod(tmp_path).start_from("r", START)
