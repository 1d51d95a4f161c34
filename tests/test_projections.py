"""Public projections by rules of Keras and PyTorch, and by functions of Optax."""

import numpy as np
import pytest
from helpers import assert_close
from projections_cases import WEIGHTS, norms, projected

from optax_wrappers import projections

# The rules of Keras and PyTorch. Keras divides by norm + 1e-7, which also shrinks what is inside;
# ours by the norm.


def keras_max_norm(w, limit, axes):
  return w * np.clip(norms(w, axes), 0, limit) / (1e-7 + norms(w, axes))


def keras_unit_norm(w, axes):
  return w / (1e-7 + norms(w, axes))


def keras_min_max_norm(w, lower, upper, rate, axes):
  norm = norms(w, axes)
  return w * (rate * np.clip(norm, lower, upper) + (1 - rate) * norm) / (1e-7 + norm)


def torch_renorm(w, limit, dim):
  """Sub-tensors along dim; torch.renorm divides by norm + 1e-7 only where the norm is above the
  limit."""
  axes = tuple(axis for axis in range(w.ndim) if axis != dim)
  norm = norms(w, axes)
  return np.where(norm > limit, w * limit / (norm + 1e-7), w)


@pytest.mark.parametrize("axes", [0, 1, (0, 1), None, -1])
@pytest.mark.parametrize(
  ("projection", "rule"),
  [
    (lambda axes: projections.max_norm(1.5, axes), lambda w, axes: keras_max_norm(w, 1.5, axes)),
    (projections.unit_norm, keras_unit_norm),
    (
      lambda axes: projections.min_max_norm(0.5, 1.5, axes=axes),
      lambda w, axes: keras_min_max_norm(w, 0.5, 1.5, 1, axes),
    ),
    (
      lambda axes: projections.min_max_norm(0.5, 1.5, 0.3, axes),
      lambda w, axes: keras_min_max_norm(w, 0.5, 1.5, 0.3, axes),
    ),
  ],
  ids=["MaxNorm", "UnitNorm", "MinMaxNorm", "MinMaxNorm-rate"],
)
def test_norm_projections_match_keras_constraints(projection, rule, axes):
  expected = rule(WEIGHTS.astype(np.float64), axes if axes is not None else (0, 1, 2))
  assert_close(projected(projection(axes), WEIGHTS), expected, rtol=2e-6, atol=2e-7)


def test_box_non_negative_and_linf_ball_match_numpy():
  w = WEIGHTS
  np.testing.assert_array_equal(projected(projections.non_negative(), w), np.maximum(w, 0))
  np.testing.assert_array_equal(projected(projections.box(-0.25, 0.5), w), np.clip(w, -0.25, 0.5))
  np.testing.assert_array_equal(projected(projections.linf_ball(0.25), w), np.clip(w, -0.25, 0.25))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_max_norm_matches_torch_renorm(dim):
  axes = tuple(axis for axis in range(3) if axis != dim)
  actual = projected(projections.max_norm(1.5, axes), WEIGHTS)
  assert_close(actual, torch_renorm(WEIGHTS.astype(np.float64), 1.5, dim), 2e-6)


def numpy_l1_ball(row, radius):
  """Duchi et al. 2008, figure 1."""
  if np.abs(row).sum() <= radius:
    return row
  u = np.sort(np.abs(row))[::-1]
  above = u - (np.cumsum(u) - radius) / np.arange(1, len(u) + 1) > 0
  rho = np.nonzero(above)[0][-1]
  theta = (u[: rho + 1].sum() - radius) / (rho + 1)
  return np.sign(row) * np.maximum(np.abs(row) - theta, 0)


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (0, 1, 2)])
def test_l1_ball_matches_numpy_and_holds_radius(axes):
  rest = [axis for axis in range(3) if axis not in axes]
  order = (*rest, *axes)
  rows = WEIGHTS.astype(np.float64).transpose(order)
  flat = rows.reshape(-1, int(np.prod([WEIGHTS.shape[axis] for axis in axes])))
  expected = (
    np.stack([numpy_l1_ball(row, 1.5) for row in flat])
    .reshape(rows.shape)
    .transpose(np.argsort(order))
  )
  actual = projected(projections.l1_ball(1.5, axes), WEIGHTS)
  assert_close(actual, expected, rtol=1e-5, atol=1e-6)
  assert np.abs(np.asarray(actual, np.float64)).sum(axes).max() <= 1.5


# Bad input.


def test_projections_errors_arguments_out_of_range():
  for call, match in (
    (lambda: projections.max_norm(0.0), "max_norm: limit must be above 0"),
    (lambda: projections.min_max_norm(-1.0, 1.0), "lower must be at least 0"),
    (lambda: projections.min_max_norm(2.0, 1.0), "lower must not be above upper, got 2.0 and 1.0"),
    (lambda: projections.min_max_norm(0.0, 1.0, 0.0), r"rate must be in \(0, 1\]"),
    (lambda: projections.box(1.0, 0.0), "lower must not be above upper"),
    (lambda: projections.linf_ball(-1.0), "radius must be above 0"),
    (lambda: projections.l1_ball(0.0), "radius must be above 0"),
  ):
    with pytest.raises(ValueError, match=match):
      call()
  with pytest.raises(TypeError, match="axes must be a Python int"):
    projections.unit_norm("rows")
