"""Which variables a projection applies to."""

import jax
import numpy as np
from projections_cases import projected

from optax_wrappers import contrib, projections

# Which variables.

PARAMS = {
  "dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
  "conv": {"kernel": np.ones((3, 3, 2, 4), np.float32), "bias": np.ones(4, np.float32)},
  "table": {"embedding": np.ones((5, 3), np.float32)},
}


def test_projections_tree_with_prefix_and_none():
  tree = {
    "dense": {"kernel": projections.max_norm(1.0, 0), "bias": None},
    "conv": projections.box(0, 0.5),
    "table": None,
  }
  actual = projected(tree, PARAMS)
  np.testing.assert_allclose(actual["dense"]["kernel"], np.full((3, 2), 3**-0.5), rtol=1e-6)
  for path in (("dense", "bias"), ("table", "embedding")):
    np.testing.assert_array_equal(actual[path[0]][path[1]], 1)
  np.testing.assert_array_equal(actual["conv"]["kernel"], 0.5)


def test_by_path_projects_only_chosen_leaves():
  def choose(path, leaf):
    return projections.linf_ball(0.25) if path == "conv/bias" or leaf.ndim == 2 else None

  actual = projected(contrib.by_path(choose), PARAMS)
  changed = [
    path for path, leaf in jax.tree.leaves_with_path(actual) if (np.asarray(leaf) != 1).any()
  ]
  assert [jax.tree_util.keystr(p, simple=True, separator="/") for p in changed] == [
    "conv/bias",
    "dense/kernel",
    "table/embedding",
  ]
