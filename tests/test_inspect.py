"""Collectives as they are read from a compiled program."""

import jax
import numpy as np
import pytest
from helpers import AXIS, mesh_of
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow


def test_compiled_collectives_of_uncompiled_text_is_error():
  lowered = jax.jit(lambda x: x + 1).lower(np.ones(2))
  for text in (lowered.as_text(), lowered.as_text("hlo")):
    with pytest.raises(ValueError, match="Compile first"):
      ow.inspect.compiled_collectives(text)
  assert ow.inspect.compiled_collectives(lowered.compile().as_text()) == []


@pytest.mark.parametrize(
  ("written", "groups"),
  [
    ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
    ("replica_groups={{3,1},{2,0}}", ((0, 2), (1, 3))),
    ("replica_groups={}", ()),
    ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
    ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=1,'b'=4] {'b':(1)2}", ((0, 2), (1, 3))),
    ("replica_groups=mesh['a'=1,'b'=4] {'b':(2)2}", ((0, 1), (2, 3))),
    ("source_target_pairs={{0,2},{2,0},{1,3},{3,1}}", ((0, 2), (1, 3))),
    ("source_target_pairs={{0,1},{2,3},{1,2}}", ((0, 1, 2, 3),)),
  ],
)
def test_compiled_collectives_reads_every_form_of_groups(written, groups):
  text = f"""HloModule m

ENTRY %main (x: f32[3]) -> f32[3] {{
  %x = f32[3]{{0}} parameter(0)
  ROOT %sent = f32[3]{{0}} all-reduce(%x), channel_id=1, {written}, to_apply=%add
}}"""
  (found,) = ow.inspect.compiled_collectives(text)
  assert found == ow.inspect.Collective("all-reduce", 12, False, groups)


def test_collectives_in_loops_tell_how_often_they_run():
  """Alone, in a scan, in a scan of scans, in a branch, and in a loop of unknown length."""
  mesh = mesh_of(2)

  def found(fun):
    layout = {"in_specs": P(None, AXIS), "out_specs": P(), "check_vma": False}
    sharded = jax.jit(jax.shard_map(fun, mesh=mesh, **layout))
    sent = ow.inspect.compiled_collectives(sharded.lower(np.ones((8, 64), "f")).compile())
    assert {one.num_bytes for one in sent} <= {4 * 32}
    return [(one.times, one.conditional) for one in sent]

  def add(total, y):
    return total + jax.lax.psum(y, AXIS), None

  def scan(x):
    return jax.lax.scan(add, x[0], x)[0]

  def scan_of_scans(x):
    return jax.lax.scan(lambda c, y: (c + scan(x + y[None]), None), x[0], x[:3])[0]

  def branch(x):
    return jax.lax.scan(
      lambda c, y: (jax.lax.cond(y.sum() > 0, lambda: add(c, y)[0], lambda: c), None), x[0], x
    )[0]

  def unknown(x):
    return jax.lax.while_loop(lambda c: c.sum() < 99, lambda c: add(c, c * x[1])[0], x[0])

  assert found(lambda x: jax.lax.psum(x[0], AXIS)) == [(1, False)]
  assert found(scan) == [(8, False)]
  assert found(scan_of_scans) == [(24, False)]
  assert found(branch) == [(None, True)]
  assert found(unknown) == [(None, True)]
