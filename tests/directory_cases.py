"""Pods and their training for several test modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow

START = {"w": np.arange(64 * 64, dtype="f").reshape(64, 64) / 1000, "b": np.ones(5, "f")}

CLIP = optax.chain(optax.clip_by_global_norm(1.0), ow.all_reduce("pods"))
REDUCTIONS = {"median": ow.reductions.median(), "clip": CLIP}


@functools.cache  # what is compiled for it serves all tests
def optimizer(codec=True, reduction=None):
  codec = ow.codecs.quantize(8) if codec else None
  if reduction is not None:
    options = {"outer": optax.sgd(0.7, 0.9), "communication_period": None}
    given = {"codec": codec, "reduction": REDUCTIONS[reduction]}
    return ow.local_steps(optax.sgd(0.1), None, **given, **options)
  return ow.diloco(optax.sgd(0.1), None, communication_period=None, codec=codec)


def pod(path, name, **options):
  options = {"quorum": 1, "grace": 0.0, "timeout": 5.0} | options
  return ow.pods.Directory(path, run="r", sender=name, **options)


@functools.partial(jax.jit, static_argnums=0)
def train(tx, params, state, slope):
  grads = jax.tree.map(lambda x: jnp.full_like(x, slope), params)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def sent(tx, pods, held, slopes):
  """All of them after a step and the first half of an exchange."""
  held = [train(tx, *one, slope) for one, slope in zip(held, slopes, strict=True)]
  return [(x, one.send(tx, x, state)) for one, (x, state) in zip(pods, held, strict=True)]


def received(tx, pods, held):
  """After the second half."""
  return [one.receive(tx, *mine) for one, mine in zip(pods, held, strict=True)]


def center_of(state):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(ow.exchange.snapshot(state))]
