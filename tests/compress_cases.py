"""Gradients and runs of compressed reductions for several test modules."""

import numpy as np
import reference_codecs as ref
from helpers import in_context, start_of_workers

import optax_wrappers as ow
from optax_wrappers import codecs

# Neither 33 nor 35 divides evenly over shards: what is left over travels exactly.
SHAPES = {"odd": (33, 35), "stack": (3, 20, 24), "bias": (7,)}

LARGE = ("odd", "stack")


def zeros(shapes):
  return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


PARAMS = zeros(SHAPES)


def gradients(num_shards, seed=0, shapes=SHAPES):
  """Of unequal sizes, so that no two shards round alike."""
  rng = np.random.default_rng(seed)
  sizes = 10.0 ** np.arange(num_shards)

  def of(shape):
    values = rng.normal(size=(num_shards, *shape))
    return (values * sizes.reshape(-1, *[1] * len(shape))).astype(np.float32)

  return {name: of(shape) for name, shape in shapes.items()}


def changed(grads, name, place, value):
  """The gradients with another value at one place of a leaf."""
  leaf = grads[name].copy()
  leaf[place] = value
  return grads | {name: leaf}


def first_state(tx, params, num_shards, replicated=True):
  return start_of_workers(tx, params, num_shards, replicated)[1]


UNTYPED = "pmap", "unchecked", "explicit_unchecked"


class Run:
  """Shards with one replica of the parameters, that reduce their gradients step by step."""

  def __init__(self, tx, num_shards, context="vmap", params=PARAMS, extra_axes=None):
    self.tx, self.num_shards = tx, num_shards
    self.state = first_state(tx, params, num_shards)
    axes = ow.worker_axes(self.state, replicated=True)
    extra_axes = extra_axes or {}

    def step(grads, state, extra):
      return tx.update(grads, state, params, **extra)

    # Where no types say that all shards have the same, each returns its own.
    out = 0 if context in UNTYPED else None
    args = (0, axes, extra_axes), (out, axes)
    self.step = in_context(context, step, num_shards, *args)

  def __call__(self, grads, **extra):
    updates, self.state = self.step(grads, self.state, extra)
    return updates

  @property
  def compressed(self):
    return ow.get_state(self.state, ow.states.CompressedState)


TOP = codecs.top_k(0.05, 256)

# A codec, and its round trip.
CODECS = {
  "bfloat16": (codecs.cast("bfloat16"), lambda x: ref.cast(x, "bfloat16")),
  "8 bits": (codecs.quantize(8), lambda x: ref.quantize(x, 8, 256, "power_of_two")),
  "4 bits": (codecs.quantize(4), lambda x: ref.quantize(x, 4, 256, "float32")),
  "2 bits": (
    codecs.quantize(2, 64, "power_of_two"),
    lambda x: ref.quantize(x, 2, 64, "power_of_two"),
  ),
  "float8": (ow.contrib.float8(), lambda x: ref.float8(x, "e4m3fn", 256)),
  "signs": (codecs.signs(), ref.signs),
  "top": (TOP, lambda x: ref.top_k(x, 0.05, 256, lambda v: ref.cast(v, "bfloat16"))),
}

MANY = {
  **{name: CODECS[name][0] for name in ("8 bits", "2 bits", "signs", "top")},
  "random": codecs.random_k(0.05),
  "low rank": ow.contrib.power_sgd(1),
}
