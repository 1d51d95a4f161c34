"""The center of an earlier run, for a new version of a program that cannot join it.

The model of a run is written once, as the names, dtypes and shapes of its centers and outer states:
without the program of that run nothing else says what its files hold.
"""

import json
from typing import Any

import jax
import numpy as np

from optax_wrappers.pods._log import Log, record
from optax_wrappers.pods._records import Records

LARGEST_MODEL = 2**24  # bytes
_CENTER = "[0]"  # of a snapshot, a center and an outer state


def write_model(log: Log, fragments: list[Records]) -> None:
  """Writes what a run holds, unless it is there."""
  model = [
    [[jax.tree_util.keystr(path), str(x.dtype), list(x.shape)] for path, x in leaves]
    for leaves in (jax.tree.leaves_with_path(fragment.shapes) for fragment in fragments)
  ]
  text = np.frombuffer(json.dumps(model).encode(), np.uint8)
  data = log.packed("model", 0, record("model", 0, [text]))
  log.put(f"{log.prefix}run.model", data, LARGEST_MODEL, lambda there: _model_from(log, there))


def center_of(log: Log) -> dict[str, np.ndarray]:
  """The newest center in a run, by the names of its variables; a ValueError if there is none."""
  model = log.get(f"{log.prefix}run.model", LARGEST_MODEL, lambda data: _model_from(log, data))
  if model is None:
    raise ValueError(f"Directory: there is no run {log.run!r} of this version with this key.")
  center: dict[str, np.ndarray] = {}
  for k, shapes in enumerate(model):
    records = Records(log, k, record("none", k), [shape for _, shape in shapes])
    newest = records.newest()
    if newest is None:
      what = f"no center of fragment {k} can be read: {log.refused}"
      raise ValueError(f"Directory: of the run {log.run!r} {what}.")
    for (name, _), leaf in zip(shapes, newest[1], strict=True):
      if name.startswith(_CENTER):
        if name.removeprefix(_CENTER) in center:
          mend = "Join it with its own tx, and take center_params(state)."
          what = f"the fragments of the run {log.run!r} are parts of variables"
          raise ValueError(f"Directory: {what}. {mend}")
        center[name.removeprefix(_CENTER)] = leaf
  return center


def started_from(center: dict[str, np.ndarray], params: Any) -> tuple[Any, list[str]]:
  """Parameters at a center, in their own dtypes and layout, and the names of those not in it."""
  new: list[str] = []

  def of(path, x):
    name = jax.tree_util.keystr(path)
    if name not in center:
      new.append(name)
      return x
    value = center[name]
    if value.shape != np.shape(x):
      what = f"params{name} has the shape {list(np.shape(x))}, and in that run {list(value.shape)}"
      raise ValueError(f"Directory: {what}.")
    value = value.astype(x.dtype)
    if not isinstance(x, jax.Array):
      return value
    return jax.make_array_from_callback(value.shape, x.sharding, value.__getitem__)

  return jax.tree.map_with_path(of, params), new


def _model_from(log, data):
  """Of each fragment the names and shapes of a snapshot."""
  length = len(data) - len(log.packed("model", 0, record("model", 0)))
  text = jax.ShapeDtypeStruct((max(0, length),), np.uint8)
  written = log.unpacked("model", 0, record("model", 0, [text]), data)
  try:
    fragments = json.loads(bytes(written.parts[0]))
    if not fragments:
      raise ValueError("it is empty")
    return [
      [(str(name), jax.ShapeDtypeStruct(map(int, shape), dtype)) for name, dtype, shape in leaves]
      for leaves in fragments
    ]
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f"it is no model: {error}") from error
