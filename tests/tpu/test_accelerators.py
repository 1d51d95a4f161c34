"""The programs that XLA makes for a TPU: what a wrapper costs there, times the same by hand.

They are compiled ahead of time, without a TPU. The figures are the compiler's own, and the same
whenever it is the same: what is above them is a change of ours.
"""

import collections
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import needs_tpu_compiler
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import optax_wrappers as ow

pytestmark = needs_tpu_compiler

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "accelerators.py"


# Times by hand, on 12 leaves of 128 x 128. On leaves so small what is once for each step, as a
# counter, weighs more than anywhere else. The goals stand in the benchmark, and its misses in
# benchmarks/README.md.
SMALL = {
  "cross_shard": {"calls": 1.0, "temporaries": 0},
  "all_reduce": {"calls": 1.0, "temporaries": 0},
  'cross_shard(nonfinite="drop")': {"calls": 1.052, "temporaries": 0.042},
  "cross_shard(shard_state=True)": {"calls": 1.55, "temporaries": 0},
  "clip_by_global_norm": {"calls": 1.0, "temporaries": 0},
  "drop_stale": {"calls": 1.33, "temporaries": 0},
  "staleness_aware": {"calls": 1.355, "temporaries": 0},
  "gather_towers": {"calls": 2.08, "temporaries": 0},
  "local_steps": {"between": 1.254, "exchange": 2.295, "temporaries": 4.9},
  "diloco": {"between": 2.135, "exchange": 1.68, "temporaries": 1.325},
  "diloco, exchange=False": {"calls": 0.804, "temporaries": 0},
  "elastic_average": {"between": 2.262, "exchange": 1.382, "temporaries": 0},
  "elastic_average, exchange=False": {"calls": 1.0, "temporaries": 0},
  "clip_variables, Adam": {"calls": 1.79, "temporaries": 0},
  "clip_variables, SGD": {"calls": 1.805, "temporaries": 0},
}


# Four leaves of 4096 x 4096, which do not fit near a TPU's cores.
FOUR = {
  "gather_towers": {"calls": 1.36, "temporaries": 1.76},
  "gather_towers, last=False": {"calls": 1.0, "temporaries": 0},
  "gather_towers, last=True": {"calls": 1.05, "temporaries": 0.76},
  "local_steps": {"between": 0.38, "exchange": 0.695, "temporaries": 0},
  "diloco": {"between": 1.25, "exchange": 1.19, "temporaries": 0.75},
  "elastic_average": {"between": 1.335, "exchange": 1.035, "temporaries": 1.5},
  "clip_variables, Adam": {"calls": 1.31, "temporaries": 0.005},
  "clip_variables, SGD": {"calls": 1.32, "temporaries": 0.255},
}
FOUR_BFLOAT16 = {
  "gather_towers": {"calls": 1.18, "temporaries": 1.52},
  "clip_variables, Adam": {"calls": 1.255, "temporaries": 0.015},
  "clip_variables, SGD": {"calls": 1.51, "temporaries": 0},
}


# 100 leaves of 256 x 256, which must not be copied into a buffer.
HUNDRED = {name: SMALL[name] for name in ("cross_shard", "all_reduce")}


@pytest.mark.parametrize(
  ("tree", "bounds", "only"),
  [
    ("small", SMALL, []),
    ("hundred", HUNDRED, ["--only", "cross_shard", "all_reduce"]),
    ("four", FOUR, ["--only", *FOUR]),
    ("four", FOUR_BFLOAT16, ["--only", *FOUR_BFLOAT16, "--dtype", "bfloat16"]),
  ],
)
def test_tpu_program_costs_stay_within_recorded_bounds(tree, bounds, only):
  command = [sys.executable, str(BENCHMARK), "--json", "--tree", tree, *only]
  run = subprocess.run(command, capture_output=True, text=True, timeout=280)
  assert run.returncode == 0, run.stderr[-3000:]
  (found,) = json.loads(run.stdout).values()
  assert {name: found[name].keys() for name in bounds} == {
    name: bound.keys() for name, bound in bounds.items()
  }
  above = {
    (name, what): (found[name][what], bound)
    for name, goals in bounds.items()
    for what, bound in goals.items()
    if found[name][what] > bound + 0.005
  }
  assert not above, f"(found, bound): {above}"


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("spec", "bare"), [(("data",), ("all-gather", 80)), ((None, "data"), ("all-reduce", 6))]
)
def test_whole_matrices_muon_on_tpu_sends_two_all_to_alls(spec, bare, monkeypatch):
  """Eight matrices in rows and in columns, beside what XLA makes of the bare optimizer."""
  monkeypatch.syspath_prepend(str(BENCHMARK.parent))
  import accelerators

  devices = np.array(accelerators.devices_of("tpu"))
  mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
  muon, spec = optax.contrib.muon(1e-3), PartitionSpec(*spec)
  dealt = ow.whole_matrices(muon, "data", specs=spec, mesh=mesh)

  def sends(tx):
    compiled = accelerators.muon_step(tx, mesh, spec, 8, (256, 512)).compile()
    return ow.inspect.compiled_collectives(compiled)

  part = 8 * 256 * 512 * 4 // 4
  assert [(one.kind, one.num_bytes) for one in sends(dealt)] == [("all-to-all", part)] * 2
  assert collections.Counter(one.kind for one in sends(muon))[bare[0]] == bare[1]


def test_norm_of_bfloat16_on_tpu_is_summed_in_float32(monkeypatch):
  """XLA there reduces in bfloat16 what is not used afterwards."""
  monkeypatch.syspath_prepend(str(BENCHMARK.parent))
  import accelerators

  place = accelerators.Place(
    Mesh(np.array(accelerators.devices_of("tpu")), ("w",), axis_types=(AxisType.Auto,)),
    {"kernel": jax.ShapeDtypeStruct((48, 256), "bfloat16")},
    check_vma=True,
  )
  tx = ow.clip_variables(optax.sgd(0.1), 1.0, axes=0)
  text = accelerators.ours(tx, averaged=True)(place).lower().compile().as_text()
  reduces = [line for line in text.splitlines() if " reduce(" in line]
  assert reduces and not [line for line in reduces if "bf16" in line.split(" reduce(")[0]]


def test_shard_state_on_tpu_compiles_to_reduce_scatter(monkeypatch):
  """Which a TPU has as a fusion of another name."""
  monkeypatch.syspath_prepend(str(BENCHMARK.parent))
  import accelerators

  mesh = Mesh(np.array(accelerators.devices_of("tpu")), ("w",), axis_types=(AxisType.Auto,))
  params = {"kernel": jax.ShapeDtypeStruct((256, 512), "float32")}
  place = accelerators.Place(mesh, params, check_vma=True)
  tx = ow.cross_shard(optax.sgd(0.1, momentum=0.9), "w", shard_state=True)
  found = ow.inspect.compiled_collectives(accelerators.ours(tx)(place).lower().compile())
  whole = 256 * 512 * 4
  kinds = [("all-gather", whole // 4), ("reduce-scatter", whole)]
  assert sorted((one.kind, one.num_bytes) for one in found) == kinds


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("spec", "kind"), [((), "all-reduce"), (("data",), "reduce-scatter")], ids=["whole", "zero-1"]
)
def test_reduced_on_tpu_leaves_the_loop_of_micro_batches_without_a_reduction(
  spec, kind, monkeypatch
):
  """A gradient is reduced once for four micro-batches, to shards if the parameters are."""
  monkeypatch.syspath_prepend(str(BENCHMARK.parent))
  import accelerators

  devices = np.array(accelerators.devices_of("tpu"))
  mesh = Mesh(devices, ("data",), axis_types=(AxisType.Explicit,))
  tx = ow.gather_towers(optax.adam(0.1), 4)

  def laid_out(shape, *spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

  def reductions(mark):
    def micro_batch(carry, x, last=False):
      params, state = carry
      grads = jax.grad(lambda w: jnp.mean(jnp.square(x @ w)))(mark(params))
      updates, state = tx.update(grads, state, params, last=last)
      return (optax.apply_updates(params, updates), state), None

    def step(carry, batches):
      carry, _ = jax.lax.scan(micro_batch, carry, batches[:-1])
      return micro_batch(carry, batches[-1], last=True)[0]

    params = laid_out((512, 256), *spec)
    state = jax.eval_shape(lambda params: tx.init(mark(params)), params)
    moments = jax.eval_shape(optax.adam(0.1).init, params)
    carry = params, state.replace(inner_state=moments)
    compiled = jax.jit(step).lower(carry, laid_out((4, 64, 512), None, "data")).compile()
    sends = ow.inspect.compiled_collectives(compiled)
    return [(c.kind, c.num_bytes, c.times) for c in sends if c.kind != "all-gather"]

  with jax.set_mesh(mesh):
    size = 512 * 256 * 4
    # A loop on a TPU has no recorded number of turns.
    assert reductions(lambda params: params) == [(kind, size, None), (kind, size, 1)]
    assert reductions(lambda params: ow.reduced(params, "data")) == [(kind, size, 1)]
