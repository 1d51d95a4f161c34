"""Runs with other workers from some step on, against runs that had them in another way."""

import jax
import numpy as np
import pytest
from helpers import assert_close
from resize_cases import OWNED, W, optimizer, run, trained, tree_of

import optax_wrappers as ow

pytestmark = pytest.mark.optax_promotes  # Adam does


@pytest.mark.parametrize("name", sorted(OWNED))
def test_resize_permutation_of_workers_permutes_run(name):
  tx, rng = optimizer(name), np.random.default_rng(1)
  params, state = trained(tx)
  order = [2, 0, 3, 1]
  more = tree_of(rng, 4, W)
  plain = run(tx, params, state, more)
  moved = ow.resize_workers((params, state), order)
  there = run(tx, *moved, jax.tree.map(lambda g: g[:, np.array(order)], more))
  atol = 0.3 if name == "codec" else 1e-5  # owners of sums, and so their roundings, are others
  back = ow.resize_workers(there, np.argsort(order).tolist())
  assert_close(back[0], plain[0], 1e-5, atol)
  if name != "codec":
    assert_close(back[1], plain[1], 1e-4, 1e-5)


@pytest.mark.parametrize(
  "name, keep, num_new",
  [
    ("elastic", [1, 2], 0),
    ("elastic delayed", [3], 2),
    ("diloco", [0, 1, 2, 3], 2),
    ("diloco", [], 3),
    ("streaming", [2, 0, 1], 0),
  ],
)
def test_resize_shard_center_matches_whole_center(name, keep, num_new):
  rng = np.random.default_rng(2)
  whole, divided = optimizer(name), optimizer(name, shard_center=True)
  like = tree_of(rng)
  results = []
  for tx in (whole, divided):

    @jax.jit
    def resize(params, state, tx=tx):
      center = ow.center_params(state, like)
      newcomer = center, tx.init(center)
      return ow.resize_workers((params, state), keep, num_new, newcomer=newcomer, params=like)

    resized = resize(*trained(tx))
    gradients = tree_of(np.random.default_rng(3), 5, len(keep) + num_new)
    params, state = run(tx, *resized, gradients)
    results.append((params, ow.center_params(state, like)))
  assert_close(*results, 1e-5, 1e-5)
