"""Messages have the same bits on other processors."""

import hashlib
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from helpers import bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages_cases import NAMES, PARAMS, X, gradients, local_steps

import optax_wrappers as ow

ROOT = pathlib.Path(__file__).parents[2]


def digests():
  """Of the center after four exchanges, plain and with a codec, from a process of its own."""
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("d",), axis_types=auto)
  layout = NamedSharding(mesh, P("d") if os.environ["LAYOUT"] == "divided" else P())
  for codec in (None, ow.codecs.quantize(8)):
    tx = local_steps(codec=codec)
    x = {"w": jax.device_put(PARAMS["w"], layout)}
    state = tx.init(x).replace(step=jnp.int32(1))
    for r in range(4):
      said, center = [], np.asarray(state.center["w"])
      for i, grads in enumerate(gradients(r)):
        own = {"w": jax.device_put(center - grads["w"], layout)}
        one, _ = X.message(tx, state, own, i + 1.0, sender=NAMES[i])
        said.append(one)
      x, state = X.absorb(tx, state, x, said)
    print(hashlib.sha256(bits(state.center)[0]).hexdigest())


def test_absorb_on_other_processors_and_layouts_has_equal_bits():
  code = """if True:
    import sys
    sys.path[:0] = ["tests", "tests/processes"]
    import test_messages
    test_messages.digests()
  """
  flags = "--xla_force_host_platform_device_count=4"
  found = set()
  for layout, isa in [("", ""), ("", " --xla_cpu_max_isa=SSE4_2"), ("divided", "")]:
    env = os.environ | {"XLA_FLAGS": flags + isa, "LAYOUT": layout}
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    found.add(run.stdout)
  assert len(found) == 1 and len(set(found.pop().split())) == 2
