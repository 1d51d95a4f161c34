"""A problem for workers with local steps, and the loops that several test modules run on it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import AXIS, in_context, mesh_of, start_of_workers

import optax_wrappers as ow

PERIOD, STEPS = 4, 14

SIZES = {"a": 2, "b": 3, "c": 1}  # variables, and the parts of the reference's vector

FRAGMENTS = {"a": 1, "b": 0, "c": 1}


def nesterov(rate, decay):
  return optax.sgd(rate, momentum=decay, nesterov=True)


@functools.partial(jax.jit, static_argnums=0)
def _first_updates(tx, updates, params, count):
  """Of an exchange with this number, from a new state."""
  one, num_workers = jax.tree.map(lambda x: x[0], params), len(jax.tree.leaves(params)[0])
  state = tx.init(one)
  state = state.replace(exchanges=jnp.int32(count))
  update = ow.map_workers(tx.update, AXIS)
  return update(updates, ow.stack_workers(state, num_workers), params)[0]


@functools.cache
def _in_every_step(rule):
  return ow.exchange.periodic_exchange(optax.sgd(1.0), AXIS, rule, communication_period=1)


def partners(num_workers, count):
  """The partner of each worker in this exchange; a worker without one is its own partner.

  Worker i is 2^i away from its center, so the result tells its partner.
  """
  tx = _in_every_step(ow.contrib.Pairs(0.0, 1.0, 0.0, num_pairings=3, seed=2))
  own = 2.0 ** np.arange(num_workers, dtype=np.float32)[:, None]
  updates = _first_updates(tx, -own, np.zeros_like(own), count)
  found = np.log2(2 * np.asarray(updates) - own).astype(int)[:, 0]
  assert (found[found] == np.arange(num_workers)).all()
  assert (found == np.arange(num_workers)).sum() == num_workers % 2
  return found


def drawn(rule, count):
  """The entries that a rule averages in this exchange: those that are equal on two workers
  afterwards."""
  tx = _in_every_step(rule)
  x = {name: np.float32([[0] * size, [1] * size]) for name, size in SIZES.items()}
  updates = _first_updates(tx, jax.tree.map(np.zeros_like, x), x, count)
  return np.concatenate([updates[name][0] for name in SIZES]) == 0.5


@dataclasses.dataclass(frozen=True)
class Problem:
  """Workers that each descend to their own point, which moves."""

  num_workers: int
  start: Any
  curvature: Any
  points: Any

  def grad(self, t, x):
    return self.curvature * (x - self.points[t])


def problem(num_workers, num_steps=STEPS):
  rng = np.random.default_rng(num_workers)
  n = sum(SIZES.values())
  return Problem(
    num_workers,
    rng.normal(size=n),
    rng.uniform(0.5, 2, size=(num_workers, n)),
    rng.normal(size=(num_steps, num_workers, n)),
  )


def split(vector):
  """Parameters from the last axis of a vector."""
  ends = np.cumsum(list(SIZES.values()))[:-1]
  return dict(zip(SIZES, jnp.split(jnp.asarray(vector), ends, axis=-1)))


def joined(tree):
  return jnp.concatenate([tree[name] for name in SIZES], axis=-1)


def run(tx, task, context, weights=None):
  """The workers after each step `[steps, W, n]`, and the state at the end; all in one program."""
  num_steps = len(task.points)
  params, state = start_of_workers(tx, split(task.start), task.num_workers)
  axes = ow.worker_axes(state)
  points = np.moveaxis(task.points, 1, 0)
  if weights is None:
    shares = np.zeros((task.num_workers, num_steps, 0))
  else:
    shares = np.moveaxis(np.stack([weights(t, task.num_workers) for t in range(num_steps)]), 1, 0)[
      ..., None
    ]

  def all_steps(params, state, curvature, points, shares):
    def step(carry, data):
      params, state = carry
      point, share = data
      grads = jax.tree.map(lambda h, x, b: h * (x - b), split(curvature), params, split(point))
      extra = {"participation": share[0]} if share.size else {}
      updates, state = tx.update(grads, state, params, **extra)
      params = optax.apply_updates(params, updates)
      return (params, state), joined(params)

    (params, state), xs = jax.lax.scan(step, (params, state), (points, shares))
    return xs, state

  mapped = in_context(context, all_steps, task.num_workers, (0, axes, 0, 0, 0), (0, axes))
  xs, state = mapped(params, state, task.curvature, points, shares)
  return np.moveaxis(np.asarray(xs), 0, 1), state


CONTEXTS = ["shard_map", "unchecked", "explicit", "pmap", "sharded_vmap"]


def by_caller(tx, task, asked, num_workers=3):
  """Steps for which the caller decides: the workers after each, and the final state."""
  params, state = start_of_workers(tx, split(task.start), num_workers)
  found = []

  @functools.cache
  def compiled(decided):
    return jax.jit(ow.map_workers(functools.partial(tx.update, **dict(decided)), AXIS))

  for t, decided in enumerate(asked):
    grads = split(task.grad(t, np.asarray(joined(params))))
    updates, state = compiled(tuple(decided.items()))(grads, state, params)
    params = optax.apply_updates(params, updates)
    found.append(np.asarray(joined(params)))
  return np.stack(found), state


# What it sends.


def collectives(tx, num_workers, **extra):
  """Collectives of a compiled step on a mesh: kind, bytes, and whether it is in a conditional."""
  params = split(np.zeros(6, np.float32))
  mesh = mesh_of(num_workers)
  stacked = ow.stack_workers((params, tx.init(params), params), num_workers)

  def step(grads, state, params, extra):
    return tx.update(grads, state, params, **extra)

  mapped = ow.map_workers(step, AXIS, mesh=mesh)
  text = jax.jit(mapped).lower(*stacked, extra).compile()
  found = ow.inspect.compiled_collectives(text)
  return sorted((one.kind, one.num_bytes, one.conditional) for one in found)


TREE, WEIGHT = 24, 4  # bytes


def steps_of(tx, participation, grads, num_workers=2):
  """The state after some steps from 0, with these weights and gradients."""
  params, state = jnp.zeros(num_workers), ow.stack_workers(tx.init(jnp.float32(0.0)), num_workers)
  update = jax.jit(ow.map_workers(lambda g, s, p, w: tx.update(g, s, p, participation=w), AXIS))
  for weights, grad in zip(participation, grads):
    updates, state = update(jnp.float32(grad), state, params, jnp.float32(weights))
    params = params + updates
  return params, state


def call(tx, params=None, **extra):
  params = jnp.zeros(2) if params is None else params
  state = ow.stack_workers(tx.init(jnp.float32(0.0)), 2)
  return ow.map_workers(lambda g, s, p: tx.update(g, s, p, **extra), AXIS)(params, state, params)
