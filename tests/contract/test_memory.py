"""What a compiled step holds beside its arguments, by XLA's own analysis, for a TPU and a CPU."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import AXIS, WRAPPERS, Held, needs_tpu_compiler
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import optax_wrappers as ow

SMALL = 0.05  # of the parameters: counters, norms of slices, alignment


# A TPU keeps small arrays near its cores, where nothing has to be written.
WIDTHS = {"tpu": 2048, "cpu": 256}

ADAM = optax.adam(0.1)


# Forms that the table of wrappers does not have.
MORE = {
  "bare adam": (ADAM, Held(2, tpu=0, cpu=0)),
  "elastic_average without rho": (ow.elastic_average(ADAM, None), Held(3, tpu=0, cpu=2.75)),
  "one choice in another": (
    ow.contrib.simulate_workers(ow.cross_shard(ow.drop_stale(ADAM, 3), None, nonfinite="drop"), 5),
    Held(2 + 5, tpu=0.02, cpu=1.75),
  ),
  "simulate_workers with compensation": (
    ow.contrib.simulate_workers(
      optax.chain(ow.contrib.delay_compensation(), ow.staleness_aware(ADAM)), 5
    ),
    Held(2 + 5 + 5, tpu=1, cpu=2),
  ),
  "cross_shard without nonfinite": (
    ow.cross_shard(ADAM, None, nonfinite="drop"),
    Held(2, tpu=0, cpu=1.75),
  ),
}


@pytest.fixture(params=[pytest.param("tpu", marks=needs_tpu_compiler), "cpu"])
def device(request, monkeypatch):
  """A device to compile for; a TPU need not be there."""
  if request.param == "cpu":
    return jax.devices("cpu")[0]
  monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
  monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  return topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices[0]


def parameters(device):
  width = WIDTHS[device.platform]
  return [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4


def size(tree):
  return sum(x.size * x.dtype.itemsize for x in tree)


def compiled(device, step, *args):
  """A step of (params, state, ...) that donates both."""
  sharding = SingleDeviceSharding(device)
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding), args
  )
  return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile().memory_analysis()


@pytest.mark.optax_promotes
@pytest.mark.parametrize("name", [*WRAPPERS, *MORE])
def test_memory_of_donated_step_holds_state_once(name, device):
  """A row for every public wrapper, because it is a column of their table."""
  wrapped = WRAPPERS.get(name, WRAPPERS["cross_shard"])
  tx, held = MORE.get(name) or (wrapped.make(ADAM, None), wrapped.held)
  tx, extra = optax.with_extra_args_support(tx), wrapped.extra_args
  params = parameters(device)
  tree = size(params)
  grads = jax.eval_shape(lambda params: wrapped.updates(params, 2), params)
  num_grads = 2 if wrapped.stacked else 1

  def step(params, state, grads, extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  memory = compiled(device, step, params, jax.eval_shape(tx.init, params), grads, extra)
  assert memory.argument_size_in_bytes == pytest.approx(
    (1 + num_grads + held.state) * tree, rel=SMALL
  )
  # Nothing donated is copied.
  assert memory.alias_size_in_bytes == pytest.approx((1 + held.state) * tree, rel=SMALL)
  assert memory.output_size_in_bytes == pytest.approx(memory.alias_size_in_bytes, rel=SMALL)
  assert memory.temp_size_in_bytes <= (getattr(held, device.platform) + SMALL) * tree


@pytest.mark.optax_promotes
@pytest.mark.parametrize("compensates", [False, True])
def test_memory_of_params_history_is_written_in_place(compensates, device):
  """XLA copies all of it in a step that reads a slot before it writes one."""
  inner = ow.drop_stale(ADAM, 4)
  if compensates:
    inner = optax.chain(ow.contrib.delay_compensation(decay=0.9), inner)
  tx = ow.contrib.params_history(inner, 4)
  params = parameters(device)
  tree = size(params)

  def step(params, state, grads, computed_at):
    updates, state = tx.update(grads, state, params, computed_at=computed_at)
    return optax.apply_updates(params, updates), state

  memory = compiled(device, step, params, jax.eval_shape(tx.init, params), params, 0)
  assert memory.output_size_in_bytes >= 9 * tree  # the parameters twice, Adam's two and five
  beside = {"tpu": 1.5 if compensates else 0, "cpu": 1.25}[device.platform]
  assert memory.temp_size_in_bytes <= (beside + SMALL) * tree


def test_memory_of_64_workers_in_vmap_is_linear_in_workers():
  """Bytes that XLA needs for a step of 8 and of 64 workers, all in one vmap."""
  tx = ow.elastic_average(optax.sgd(0.1, momentum=0.9), AXIS, communication_period=4)
  model = {"kernel": jax.ShapeDtypeStruct((256, 256), jnp.float32)}

  def num_bytes(num_workers):
    state = jax.eval_shape(lambda p: ow.stack_workers(tx.init(p), num_workers), model)
    params = jax.eval_shape(lambda p: ow.stack_workers(p, num_workers), model)
    axes = ow.worker_axes(state)
    step = jax.vmap(tx.update, (0, axes, 0), (0, axes), axis_name=AXIS)
    memory = (
      jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile().memory_analysis()
    )
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

  assert num_bytes(64) < 8.5 * num_bytes(8)
