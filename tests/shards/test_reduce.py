"""How a reduction is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AXIS, CONTEXTS, assert_close, in_context

import optax_wrappers as ow


def test_all_reduce_float16_with_large_weights_does_not_overflow():
  tx = ow.all_reduce(AXIS)
  grads = jnp.array([2.0, 4.0], jnp.float16)
  weights = jnp.array([40_000, 40_000], jnp.int32)
  update = jax.vmap(lambda g, w: tx.update(g, tx.init(g), weight=w)[0], axis_name=AXIS)
  assert_close(update(grads, weights), np.array([3.0, 3.0]))


# Precision.


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
  ("dtype", "value"), [("float16", 9000), ("float8_e4m3fn", 96), ("float8_e5m2", 24576)]
)
@pytest.mark.parametrize("weight", [None, 3.0])
def test_all_reduce_mean_of_float16_and_float8_does_not_overflow(context, dtype, value, weight):
  tx = ow.all_reduce(AXIS)
  extra = {} if weight is None else {"weight": np.full(8, weight, np.float32)}

  def mean(grad, extra):
    return tx.update(grad, tx.init(None), **extra)[0]

  grads = np.full(8, value, jnp.dtype(dtype))
  actual = in_context(context, mean, 8, (0, dict.fromkeys(extra, 0)), None)(grads, extra)
  assert (actual.dtype, float(actual)) == (jnp.dtype(dtype), value)


def test_all_reduce_mean_of_subnormal_float16_is_exact():
  """Dividing before the sum would lose these subnormal float16 numbers."""
  grads = jnp.asarray([3, 5, 7, 9], jnp.float16) * jnp.float16(2.0**-24)
  mean = jax.vmap(lambda g: ow.all_reduce(AXIS).update(g, None)[0], axis_name=AXIS, out_axes=None)
  assert float(mean(grads)) == 6 * 2.0**-24


@pytest.mark.parametrize(
  ("make", "extra"),
  [
    (lambda: ow.cross_shard(optax.identity(), AXIS), {}),
    (lambda: ow.cross_shard(optax.identity(), AXIS), {"weight": jnp.array([1, 1, 1, 0])}),
    (lambda: ow.cross_shard(optax.identity(), AXIS, nonfinite="drop"), {}),
    (
      lambda: ow.drop_stale(ow.cross_shard(optax.identity(), AXIS), 0, axis_name=AXIS),
      {"computed_at": [0, 0, 0, -1]},
    ),
    (
      lambda: ow.drop_stale(
        optax.stateless(lambda g, _: jax.lax.pmean(g, AXIS)), 0, axis_name=AXIS
      ),
      {"computed_at": [0, 0, 0, -1]},
    ),
    (
      lambda: ow.gather_towers(ow.cross_shard(optax.identity(), AXIS), 1),
      {"weight": jnp.array([1, 1, 1, 0])},
    ),
  ],
  ids=["plain", "integer weights", "nonfinite", "drop_stale", "by hand", "one tower"],
)
def test_cross_shard_float64_mean_keeps_precision(make, extra):
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    grads = np.random.default_rng(0).normal(size=(4, 9))
    if getattr(make().init(grads[0]), "nonfinite", None) is not None:
      grads[3] = np.nan
    tx, extra = make(), {name: np.asarray(value, np.int32) for name, value in extra.items()}
    update = jax.vmap(lambda g, e: tx.update(g, tx.init(g), g, **e)[0], axis_name=AXIS)
    actual = jax.jit(update)(grads, extra)
    good = 4 if not extra and np.isfinite(grads).all() else 3
    np.testing.assert_allclose(actual[0], grads[:good].mean(0), rtol=1e-14)
