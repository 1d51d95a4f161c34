"""Collectives as they are read from a compiled program."""

import jax
import numpy as np
import pytest

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
