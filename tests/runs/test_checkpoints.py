"""Checkpoints by Orbax, of every wrapper."""

import jax
import pytest
from contract_cases import PARAMS, alone, each_wrapper, make_step
from helpers import AXIS, bits, mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.optax_promotes


@each_wrapper
@pytest.mark.filterwarnings("ignore")  # Orbax has warnings of its own
def test_checkpoint_by_orbax_onto_other_sharding_resumes(wrapped, tmp_path):
  import orbax.checkpoint as ocp

  tx = alone(wrapped)
  step = jax.jit(make_step(tx, wrapped))
  params = {"kernel": PARAMS["kernel"]}
  half = params, tx.init(params)
  for i in range(3):  # in mid-period, and in mid-step of the towers
    half = step(*half, i)
  one, other = mesh_of(2), mesh_of(1)
  saved = jax.device_put(half, NamedSharding(one, P()))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", saved)
    checkpointer.wait_until_finished()
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(other, P(None, AXIS) if x.ndim == 2 else P())
      ),
      half,
    )
    restored = checkpointer.restore(tmp_path / "state", target)
  assert jax.tree.structure(restored) == jax.tree.structure(half)
  assert bits(restored) == bits(half)
  expected = half
  for i in range(3, 6):
    expected, restored = step(*expected, i), step(*restored, i)
  assert bits(restored) == bits(expected)
