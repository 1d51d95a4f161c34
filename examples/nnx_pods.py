"""An NNX transformer on two pods with FSDP in each: DiLoCo with 8 bits, checkpoints, a lost pod.

The loop is that of any trainer with `nnx.Optimizer`. It is saved in the middle of a round and
resumed bit for bit, its center is evaluated, and one pod is lost: the other goes on with the
devices that remain. At the end the center is compared with that of a loop for each pod and an outer
step by hand.

    python examples/nnx_pods.py [--tensorboard FOLDER]    # needs tensorboardX
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType

import optax_wrappers as ow

STEPS, PERIOD, SAVED = 8, 4, 6  # saved in the middle of the second round
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 32, 16, 64, 4, 1
ROWS = 8  # of a pod's batch


def linear(num_in, num_out, rngs):
  init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
  return nnx.Linear(num_in, num_out, kernel_init=init, use_bias=False, rngs=rngs)


class Block(nnx.Module):
  def __init__(self, rngs):
    self.first, self.second = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
    self.qkv, self.out = linear(WIDTH, 3 * WIDTH, rngs), linear(WIDTH, WIDTH, rngs)
    self.up, self.down = linear(WIDTH, 4 * WIDTH, rngs), linear(4 * WIDTH, WIDTH, rngs)

  def __call__(self, x):
    q, k, v = (
      y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(self.qkv(self.first(x)), 3, -1)
    )
    y = nnx.dot_product_attention(q, k, v, mask=nnx.make_causal_mask(x[..., 0]))
    x = x + self.out(y.reshape(x.shape))
    return x + self.down(nnx.gelu(self.up(self.second(x))))


class Model(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
    self.logits = linear(WIDTH, VOCABULARY, rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    for block in self.blocks:
      x = block(x)
    return self.logits(x)


def loss(model, tokens):  # of one pod
  logits = model(tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batch(step, num_pods=2):
  """Sequences in which each token follows from the last two, by another rule in each pod."""
  rng = np.random.default_rng(step)
  tokens = rng.integers(0, VOCABULARY, (num_pods * ROWS, 2))
  pod = np.arange(len(tokens)) // ROWS
  for _ in range(LENGTH - 1):
    following = (tokens[:, -1] + tokens[:, -2] + pod) % VOCABULARY
    tokens = np.concatenate([tokens, following[:, None]], 1)
  return tokens


def adamw():
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))


def mesh_of(num_pods, devices):
  shape = (num_pods, len(devices) // num_pods)
  return jax.make_mesh(shape, ("pod", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)


@functools.cache  # so that a step is compiled once
def optimizer_of(mesh, codec):
  tx = ow.diloco(adamw(), "pod", communication_period=PERIOD, codec=codec)
  return ow.stacked_workers(tx, "pod", mesh.shape["pod"], mesh=mesh)


def build(mesh, codec):
  """The stacked model and its optimizer, laid out over a mesh of pods."""
  num_pods = mesh.shape["pod"]
  naming = {nnx.PARTITION_NAME: "pod"}
  stack = nnx.vmap(
    lambda: Model(nnx.Rngs(0)), out_axes=0, axis_size=num_pods, transform_metadata=naming
  )
  model = stack()
  variables = nnx.state(model)
  layout = nnx.get_partition_spec(variables)
  nnx.update(model, jax.lax.with_sharding_constraint(variables, layout))
  return model, nnx.Optimizer(model, optimizer_of(mesh, codec), wrt=nnx.Param)


@nnx.jit(static_argnames="num_pods")
def train_step(model, optimizer, tokens, num_pods):
  def stacked_loss(model):
    # A sum: each pod's gradient is that of its own loss.
    return nnx.vmap(loss)(model, ow.reshape_batch(tokens, num_pods)).sum()

  value, grads = nnx.value_and_grad(stacked_loss)(model)
  optimizer.update(model, grads)
  return value / num_pods


def train(model, optimizer, steps, num_pods=2, log=lambda step, values: None):
  for step in steps:
    value = train_step(model, optimizer, batch(step, num_pods), num_pods)
    log(step, {"loss": float(value)})
  return model, optimizer


def center_of(optimizer):
  return jax.device_get(nnx.to_pure_dict(ow.center_params(optimizer.opt_state)))


def evaluate(optimizer):
  """The loss of the center, in a model of one worker."""
  model = Model(nnx.Rngs(0))
  nnx.update(model, ow.center_params(optimizer.opt_state))
  return float(loss(model, jnp.asarray(batch(1000))))


def without_second_pod(saved, devices):
  """Model and optimizer of the pod that is left, on four devices, from the states of both."""
  mesh = mesh_of(2, devices)  # both pods for a moment, on the devices that are left
  with jax.set_mesh(mesh):
    model, optimizer = build(mesh, ow.codecs.quantize(8))
    restore(saved, model, optimizer)
    params = nnx.state(model, nnx.Param)
    params, state = ow.resize_workers((params, optimizer.opt_state), keep=[0])
  mesh = mesh_of(1, devices)
  with jax.set_mesh(mesh):
    model, optimizer = build(mesh, ow.codecs.quantize(8))

    def laid_out(new, like):  # without it, arrays keep the layout of the old mesh
      return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), new, like)

    nnx.update(model, laid_out(params, nnx.state(model, nnx.Param)))
    optimizer.opt_state = laid_out(state, optimizer.opt_state)
  return mesh, model, optimizer


def save(folder, model, optimizer):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, (nnx.state(model), nnx.state(optimizer)))


def restore(folder, model, optimizer):
  states = nnx.state(model), nnx.state(optimizer)
  with ocp.StandardCheckpointer() as checkpointer:
    saved = checkpointer.restore(folder, jax.tree.map(ocp.utils.to_shape_dtype_struct, states))
  nnx.update(model, saved[0])
  nnx.update(optimizer, saved[1])


def by_hand():
  """The center of a loop for each pod and a Nesterov step by hand, without compression."""
  pods = [Model(nnx.Rngs(0)) for _ in range(2)]
  optimizers = [nnx.Optimizer(pod, adamw(), wrt=nnx.Param) for pod in pods]

  @nnx.jit
  def step(model, optimizer, tokens):
    optimizer.update(model, nnx.grad(loss)(model, tokens))

  center = jax.device_get(nnx.to_pure_dict(nnx.state(pods[0], nnx.Param)))
  momentum = jax.tree.map(np.zeros_like, center)
  for i in range(STEPS):
    for pod, optimizer, tokens in zip(pods, optimizers, np.split(batch(i), 2)):
      step(pod, optimizer, tokens)
    if (i + 1) % PERIOD == 0:
      ends = [jax.device_get(nnx.to_pure_dict(nnx.state(pod, nnx.Param))) for pod in pods]
      delta = jax.tree.map(lambda c, *xs: c - np.mean(xs, 0), center, *ends)
      momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, delta)
      center = jax.tree.map(lambda c, m, d: c - 0.7 * (0.9 * m + d), center, momentum, delta)
      for pod in pods:
        variables = nnx.state(pod, nnx.Param)
        nnx.replace_by_pure_dict(variables, jax.tree.map(jnp.asarray, center))
        nnx.update(pod, variables)
  return center


def difference(a, b):
  return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


def logger(folder):
  if folder is None:
    return lambda step, values: None
  from tensorboardX import SummaryWriter

  writer = SummaryWriter(folder)

  def log(step, values):
    for name, value in values.items():
      writer.add_scalar(name, value, step)

  return log


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--tensorboard", metavar="FOLDER")
  log = logger(parser.parse_args().tensorboard)
  mesh = mesh_of(2, jax.devices())

  centers = {}
  with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
    for name, codec in (("float32", None), ("8 bits", ow.codecs.quantize(8))):
      model, optimizer = train(*build(mesh, codec), range(SAVED), log=log)
      save(f"{folder}/{name}", model, optimizer)
      train(model, optimizer, range(SAVED, STEPS), log=log)
      centers[name] = center_of(optimizer)
      spec = model.blocks[0].up.kernel[...].sharding.spec
      print(f"{name}: kernels over {spec}, loss of the center {evaluate(optimizer):.3f}")

    of_pods = jax.jit(ow.map_workers(ow.metrics, "pod", mesh=mesh))
    values = of_pods(optimizer.opt_state, nnx.state(model, nnx.Param))
    log(STEPS, {name: float(np.mean(value)) for name, value in values.items()})

    model, optimizer = build(mesh, ow.codecs.quantize(8))
    restore(f"{folder}/8 bits", model, optimizer)
    train(model, optimizer, range(SAVED, STEPS))
    resumed = difference(center_of(optimizer), centers["8 bits"])

    smaller, model, optimizer = without_second_pod(f"{folder}/8 bits", jax.devices()[:4])

  with jax.set_mesh(smaller):
    before = evaluate(optimizer)
    train(model, optimizer, range(SAVED, STEPS), num_pods=1)
    kept = model.blocks[0].up.kernel[...].sharding.spec
    print(f"one pod, over {kept}: loss of the center {before:.3f}, then {evaluate(optimizer):.3f}")

  with jax.set_mesh(mesh):
    expected = by_hand()
  exact, coded = (difference(centers[name], expected) for name in ("float32", "8 bits"))
  print(
    f"resumed differs by {resumed}, from two loops by hand {exact:.0e}, with 8 bits {coded:.0e}"
  )
  assert resumed == 0
  assert exact < 5e-5
  assert coded < 5e-3


if __name__ == "__main__":
  main()
