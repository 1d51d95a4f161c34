"""DiLoCo in Tunix's `PeftTrainer`: two pods of four devices, killed halfway, and resumed exactly.

The trainer is not changed. Its optimizer is `stacked_workers(diloco(...))`, its model is two
stacked models, and its loss is the sum of theirs. Needs the extra `tunix`.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import contextlib
import pathlib
import signal
import subprocess
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType
from tunix.sft import hooks, peft_trainer

import optax_wrappers as ow

PODS, STEPS, PERIOD, SAVED = 2, 8, 3, 5  # saved, and killed, in the middle of a round
VOCABULARY, LENGTH, WIDTH = 32, 12, 16
RATE = 1e-2


class Model(nnx.Module):
  """Predicts the next token from the last two; its kernels are sharded over `fsdp`."""

  def __init__(self, rngs: nnx.Rngs):
    init = nnx.initializers.lecun_normal()
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    kernel = nnx.with_partitioning(init, (None, "fsdp"))
    self.hidden = nnx.Linear(2 * WIDTH, 64, kernel_init=kernel, rngs=rngs)
    kernel = nnx.with_partitioning(init, ("fsdp", None))
    self.logits = nnx.Linear(64, VOCABULARY, kernel_init=kernel, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    return self.logits(nnx.gelu(self.hidden(jnp.concatenate([x[:, 1:-1], x[:, :-2]], -1))))


def loss(model, tokens):
  logits = model(tokens)
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 2:]).mean()


def stacked_loss(model, tokens):
  # A sum, so that each worker's gradient is that of its own loss.
  return nnx.vmap(loss)(model, ow.reshape_batch(tokens, PODS)).sum()


@nnx.vmap(in_axes=None, out_axes=0, axis_size=PODS, transform_metadata={nnx.PARTITION_NAME: "pod"})
def stacked_model(seed):
  return Model(nnx.Rngs(seed))


def batches():
  """Returns sequences in which every token follows from the last two, by another rule in each
  pod."""
  rng = np.random.default_rng(0)
  found = []
  for _ in range(STEPS):
    tokens = rng.integers(0, VOCABULARY, (PODS * 8, 2))
    pod = np.arange(len(tokens)) // 8
    for _ in range(LENGTH - 2):
      following = (tokens[:, -1] + tokens[:, -2] + pod) % VOCABULARY
      tokens = np.concatenate([tokens, following[:, None]], 1)
    found.append(peft_trainer.TrainingInput(tokens, np.ones_like(tokens)))
  return found


@contextlib.contextmanager
def in_use(mesh):
  """Sets the mesh for Flax, and for Tunix 0.1.7 as a context manager, which JAX deprecates."""
  with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    entered = contextlib.ExitStack()
    entered.enter_context(jax.set_mesh(mesh))
    entered.enter_context(mesh)
  with entered:
    yield


class KilledAfter(hooks.TrainingHooks):
  """Kills this process without cleanup once a step has been taken and saved."""

  def __init__(self, step):
    self.step = step

  def on_train_step_start(self, train_ctx):
    if train_ctx.train_steps == self.step:
      os.kill(os.getpid(), signal.SIGKILL)

  def on_train_start(self, train_ctx): ...
  def on_train_end(self, train_ctx): ...
  def on_train_step_end(self, train_ctx, train_step, train_loss): ...
  def on_eval_step_start(self, train_ctx): ...
  def on_eval_step_end(self, train_ctx, eval_loss): ...


def trainer_of(model, tx, loss_fn, axes, **config):
  config = peft_trainer.TrainingConfig(eval_every_n_steps=STEPS, data_sharding_axis=axes, **config)
  trainer = peft_trainer.PeftTrainer(model, tx, config).with_loss_fn(loss_fn)
  return trainer.with_gen_model_input_fn(lambda x: {"tokens": x.input_tokens})


def train(root=None, killed_after=None):
  """Takes all steps in Tunix's trainer; returns the center, and the sharding of the stacked
  kernel."""
  mesh = jax.make_mesh((PODS, 4), ("pod", "fsdp"), axis_types=(AxisType.Auto,) * 2)
  with in_use(mesh):
    tx = ow.diloco(optax.adamw(RATE), "pod", communication_period=PERIOD)
    tx = ow.stacked_workers(tx, "pod", PODS, mesh=mesh)
    options = ocp.CheckpointManagerOptions(
      save_interval_steps=SAVED, enable_async_checkpointing=False
    )
    trainer = trainer_of(
      stacked_model(0),
      tx,
      stacked_loss,
      ("pod", "fsdp"),
      checkpoint_root_directory=root,
      checkpointing_options=options,
    )
    if killed_after:
      trainer.with_training_hooks(KilledAfter(killed_after))
    trainer.train(batches())
    workers = nnx.as_pure(nnx.state(trainer.model, nnx.Param))
    center = ow.center_params(nnx.as_pure(trainer.optimizer.opt_state))
    specs = jax.tree.map(lambda x: x.sharding.spec, (workers, center))
    print("a worker's kernel is sharded over", specs[0]["hidden"]["kernel"], end=", ")
    print("the center's over", specs[1]["hidden"]["kernel"])
    return jax.device_get((workers, center))


def by_hand():
  """The same with a trainer for each pod, on its half of every batch, and a hand-written outer
  step."""
  mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  with in_use(mesh):
    tx = optax.adamw(RATE)
    pods = [trainer_of(Model(nnx.Rngs(0)), tx, loss, ("fsdp",)) for _ in range(PODS)]
    center = jax.device_get(nnx.as_pure(nnx.state(pods[0].model, nnx.Param)))
    momentum = jax.tree.map(np.zeros_like, center)
    for step, batch in enumerate(batches(), 1):
      for i, pod in enumerate(pods):
        pod.is_managed_externally = True  # this program saves and closes it
        pod.train([jax.tree.map(lambda x, i=i: np.split(x, PODS)[i], batch)])
      if step % PERIOD == 0:
        found = [jax.device_get(nnx.as_pure(nnx.state(pod.model, nnx.Param))) for pod in pods]
        delta = jax.tree.map(lambda c, *xs: c - np.mean(xs, 0), center, *found)
        momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, delta)
        center = jax.tree.map(lambda c, m, d: c - 0.7 * (0.9 * m + d), center, momentum, delta)
        for pod in pods:
          nnx.update(pod.model, jax.tree.map(jnp.asarray, center))
    found = [jax.device_get(nnx.as_pure(nnx.state(pod.model, nnx.Param))) for pod in pods]
    return jax.tree.map(lambda *xs: np.stack(xs), *found), center


def difference(a, b):
  return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--killed", metavar="FOLDER", help="save there, and be killed in step 6")
  args = parser.parse_args()
  if args.killed:
    train(args.killed, SAVED)
    raise AssertionError("still alive")

  unbroken = train()
  with tempfile.TemporaryDirectory() as folder:
    killed = subprocess.run([sys.executable, __file__, "--killed", folder], check=False)
    assert killed.returncode == -signal.SIGKILL, killed.returncode
    print("killed; saved:", sorted(path.name for path in pathlib.Path(folder).iterdir()))
    resumed = train(folder)
  from_resumed, from_hand = difference(unbroken, resumed), difference(unbroken, by_hand())
  print(f"resumed and unbroken differ by {from_resumed}, unbroken and by hand by {from_hand:.1e}")
  assert from_resumed == 0
  assert from_hand < 2e-6


if __name__ == "__main__":
  main()
