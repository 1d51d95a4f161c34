"""One process of a pod of several, for `test_pods_of_processes.py`: its arguments are in JSON."""

import hashlib
import json
import os
import resource
import signal
import sys
import time
import types

import jax
import numpy as np
from directory_cases import START, optimizer, train
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow
from optax_wrappers.pods import _processes, _stores

GIVEN = {
  "explicit": False,
  "rounds": 3,
  "weight": 1.0,
  "options": {},
  "codec": True,
  "reduction": None,
}


def signal_at(directory, number, question):
  """This process sends itself a signal before a question to the store, from the second round on."""
  seen = []

  def told(self, asked, ask, real=_processes.Shared._told):
    seen.append(asked) if directory.round[0] else None
    if len(seen) == question + 1:
      os.kill(os.getpid(), number)
    return real(self, asked, ask)

  _processes.Shared._told = told


def main(given):
  if "clock" in given:  # that runs so much faster
    clock = types.SimpleNamespace(monotonic=lambda: given["clock"] * time.monotonic())
    _stores.time = clock
  jax.distributed.initialize(
    given["coordinator"],
    given["processes"],
    given["rank"],
    coordinator_bind_address=given["coordinator"],
    heartbeat_timeout_seconds=10,
  )
  kind = AxisType.Explicit if given["explicit"] else AxisType.Auto
  mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(kind,))

  def place(x):
    spec = P("fsdp") if x.shape[0] % mesh.size == 0 else P()
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)

  with jax.set_mesh(mesh):
    params, state = pod(given, jax.tree.map(place, START))
  outer = jax.tree.leaves(state.outer_state, is_leaf=lambda x: "w" in x)
  for tree in (params, state.center, *outer):
    assert tree["w"].addressable_shards[0].data.size * mesh.size == tree["w"].size
  leaves = jax.tree.leaves(ow.exchange.snapshot(state))
  whole = multihost_utils.process_allgather(leaves, tiled=True)
  print("end", hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in whole)).hexdigest())


def pod(given, start):
  """The parameters and state after all rounds."""
  tx = optimizer(given["codec"], given["reduction"])
  options = {"run": "r", "quorum": 2, "grace": 0.5, "timeout": 60.0} | given["options"]
  directory = ow.pods.Directory(given["path"], sender="many", **options)
  params, state = directory.join(tx, start)
  if "signal" in given:
    signal_at(directory, getattr(signal, given["signal"]), given["question"])
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  if "largest" in given:  # file, after which the disk is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (given["largest"], limits[1]))
  while directory.round[0] < given["rounds"]:
    params, state = train(tx, params, state, 2.0)
    try:
      params, state = directory.exchange(tx, params, state, weight=given["weight"])
    except OSError as error:
      print("OSError", error.strerror)
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
      params, state = directory.exchange(tx, params, state)
    print(directory.report, flush=True)
  return params, state


if __name__ == "__main__":
  main(GIVEN | json.loads(sys.argv[1]))
