"""Which axes of a Flax kernel are the incoming weights of a unit: known where shapes prove it,
refused elsewhere."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from projections_cases import norms, projected

import optax_wrappers as ow
from optax_wrappers import projections


def axes_of(params, **options):
  """From the path of each variable that is taken to the axes of a slice."""
  found = ow.contrib.chosen(
    ow.contrib.flax_kernels(lambda axes: projections.max_norm(1.0, axes), **options), params
  )
  return {path: spec.axes for path, spec in found.items()}


def params_of(module, *shape):
  """The shapes, of which alone it depends what is chosen."""
  x = jax.ShapeDtypeStruct(shape, jnp.int32 if isinstance(module, nn.Embed) else jnp.float32)
  return jax.eval_shape(module.init, jax.random.key(0), x)["params"]


KNOWN = {
  "Dense": (nn.Dense(3), (1, 4), {"kernel": (0,)}),
  "Dense without bias": (nn.Dense(3, use_bias=False), (1, 4), {"kernel": (0,)}),
  "1-D Conv": (nn.Conv(3, (2,)), (1, 5, 4), {"kernel": (0, 1)}),
  "2-D Conv": (nn.Conv(3, (2, 2)), (1, 5, 5, 4), {"kernel": (0, 1, 2)}),
  "depthwise Conv": (
    nn.Conv(4, (2, 2), feature_group_count=4),
    (1, 5, 5, 4),
    {"kernel": (0, 1, 2)},
  ),
  "ConvTranspose": (nn.ConvTranspose(3, (2,)), (1, 5, 4), {"kernel": (0, 1)}),
  "ConvLocal": (nn.ConvLocal(3, (2,), padding="VALID"), (1, 6, 4), {"kernel": (1,)}),
  "DenseGeneral to two": (nn.DenseGeneral((2, 3)), (1, 4), {"kernel": (0,)}),
  "DenseGeneral from two": (nn.DenseGeneral(3, axis=(-2, -1)), (1, 2, 4), {"kernel": (0, 1)}),
  "Embed": (nn.Embed(5, 3), (1,), {"embedding": (1,)}),
}


@pytest.mark.optax_promotes
@pytest.mark.parametrize("layer", KNOWN)
def test_flax_kernels_axes_of_linen_layers(layer):
  module, shape, expected = KNOWN[layer]
  assert axes_of(params_of(module, *shape)) == expected


@pytest.mark.optax_promotes
@pytest.mark.parametrize("use_bias", [True, False])
# Of heads and units of one size, shapes alone would allow two readings.
@pytest.mark.parametrize(("embed", "heads"), [(6, 2), (4, 4)])
def test_flax_kernels_attention_axes_of_linen_and_nnx(use_bias, embed, heads):
  module = nn.MultiHeadDotProductAttention(heads, qkv_features=3 * heads, use_bias=use_bias)
  expected = {f"{name}/kernel": (0,) for name in ("query", "key", "value")} | {"out/kernel": (0, 1)}
  assert axes_of(params_of(module, 1, 5, embed)) == expected

  def attention():
    return nnx.MultiHeadAttention(
      heads, embed, 3 * heads, use_bias=use_bias, decode=False, rngs=nnx.Rngs(0)
    )

  assert axes_of(nnx.state(nnx.eval_shape(attention), nnx.Param)) == expected


@pytest.mark.optax_promotes
def test_flax_kernels_attention_heads_are_bounded_separately():
  """Gradients that move one head alone: the bound of each unit takes nothing from the others."""
  params = params_of(nn.MultiHeadDotProductAttention(2, qkv_features=6), 1, 5, 4)
  params = jax.tree.map(lambda p: np.full(p.shape, 0.4, p.dtype), params)
  spec = ow.contrib.flax_kernels(lambda axes: projections.max_norm(1.0, axes))
  tx = ow.project_variables(optax.sgd(1.0), spec)
  grads = jax.tree.map(np.zeros_like, params)
  grads["query"]["kernel"][:, 0] = -9.0

  @jax.jit
  def step(params, grads):
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)

  norms = np.linalg.norm(step(params, grads)["query"]["kernel"], axis=0)
  np.testing.assert_allclose(norms, [[1.0] * 3, [0.8] * 3], rtol=2e-6)


def stacked(layer, axis=0):
  """Three layers by nn.scan, parameters stacked on `axis`."""

  class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return layer(x), None

  scanned = nn.scan(Block, variable_axes={"params": axis}, split_rngs={"params": True}, length=3)
  x = jax.ShapeDtypeStruct((1, 5, 4), jnp.float32)
  return jax.eval_shape(scanned().init, jax.random.key(0), x, None)["params"]


@pytest.mark.optax_promotes
def test_flax_kernels_stacked_layers_of_scan():
  assert list(axes_of(stacked(lambda x: nn.Dense(4, name="d")(x))).values()) == [(1,)]
  assert list(axes_of(stacked(lambda x: nn.Conv(4, (2,), name="c")(x))).values()) == [(1, 2)]
  attention = axes_of(
    stacked(lambda x: nn.MultiHeadDotProductAttention(2, qkv_features=10, name="a")(x))
  )
  assert attention == {f"a/{name}/kernel": (1,) for name in ("query", "key", "value")} | {
    "a/out/kernel": (1, 2)
  }


@pytest.mark.optax_promotes
def test_flax_kernels_stacked_axes_resolve_ambiguous_shapes():
  params = stacked(lambda x: nn.Dense(4, use_bias=False, name="d")(x))
  with pytest.raises(
    ValueError, match=r"flax_kernels: d/kernel of shape \[3, 4, 4\] has no reading as"
  ):
    axes_of(params)
  assert axes_of(params, stacked_axes=0) == {"d/kernel": (1,)}
  assert axes_of(params, stacked_axes=lambda path: (0,) if path.startswith("d/") else None) == {
    "d/kernel": (1,)
  }
  # A stack on axis 1: [in, layers, out], bias [out, layers].
  assert axes_of(
    stacked(lambda x: nn.Dense(6, name="d")(x[..., :4])[..., :4], axis=1), stacked_axes=1
  ) == {"d/kernel": (0,)}
  embedding = {"embedding": np.ones((3, 5, 4))}
  with pytest.raises(ValueError, match="embedding of shape"):
    axes_of(embedding)
  assert axes_of(embedding, stacked_axes=0) == {"embedding": (2,)}


@pytest.mark.optax_promotes
@pytest.mark.parametrize(
  ("name", "kernel", "bias", "options"),
  [
    ("mix", (4, 5, 6), None, {}),  # three axes and nothing to tell them by
    (
      "mix",
      (3, 3, 4),
      (3, 4),
      {},
    ),  # a stacked Dense [layers, in, out] or a DenseGeneral [in, a, b]
    ("Conv_0", (3, 3, 4, 4), None, {}),  # a 2-D filter or a stack of 1-D ones
    (
      "ConvTranspose_0",
      (2, 4, 4),
      (4,),
      {},
    ),  # [..., in, out] or, with transpose_kernel, [..., out, in]
    ("Dense_0", (4, 5), (4,), {}),  # bias of another size
  ],
)
def test_flax_kernels_ambiguous_or_unreadable_kernel_is_error(name, kernel, bias, options):
  params = {name: {"kernel": np.ones(kernel, np.float32)}}
  if bias:
    params[name]["bias"] = np.ones(bias, np.float32)
  spec = ow.contrib.flax_kernels(lambda axes: projections.max_norm(1.0, axes), **options)
  with pytest.raises(ValueError, match=rf"flax_kernels: {name}/kernel of shape"):
    ow.project_variables(optax.sgd(0.1), spec).init(params)


@pytest.mark.optax_promotes
def test_flax_kernels_conv_without_bias_and_no_stacked_axes_is_taken():
  params = params_of(nn.Sequential([nn.Conv(3, (2, 2), use_bias=False)]), 1, 5, 5, 4)
  assert axes_of({"Conv_0": params["layers_0"]}, stacked_axes=()) == {"Conv_0/kernel": (0, 1, 2)}


@pytest.mark.optax_promotes
def test_flax_kernels_lstm_cell_axes():
  cell = nn.OptimizedLSTMCell(4)

  def init(key, x):
    return cell.init(key, cell.initialize_carry(key, x.shape), x)["params"]

  x = jax.ShapeDtypeStruct((1, 3), jnp.float32)
  params = jax.eval_shape(init, jax.random.key(0), x)
  assert set(axes_of(params).values()) == {(0,)}
  assert len(axes_of(params)) == 8


def test_flax_kernels_of_linen_model_are_chosen_and_projected():
  import flax.linen as nn

  class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
      x = nn.Embed(7, 4, name="embed")(tokens)
      x = nn.Conv(6, (3,), name="conv")(x)
      x = nn.LayerNorm(name="norm")(x)
      return nn.Dense(2, name="dense")(x)

  params = jax.jit(Model().init)(jax.random.key(0), np.zeros((1, 5), np.int32))["params"]
  spec = ow.contrib.flax_kernels(lambda axes: projections.unit_norm(axes))
  chosen = ow.contrib.chosen(spec, params)
  assert {path: projection.axes for path, projection in chosen.items()} == {
    "conv/kernel": (0, 1),
    "dense/kernel": (0,),
    "embed/embedding": (1,),
  }
  actual = projected(spec, params)
  np.testing.assert_allclose(norms(actual["dense"]["kernel"], 0), 1, rtol=1e-6)
  np.testing.assert_allclose(norms(actual["conv"]["kernel"], (0, 1)), 1, rtol=1e-6)
  np.testing.assert_allclose(norms(actual["embed"]["embedding"], 1), 1, rtol=1e-6)
  np.testing.assert_array_equal(actual["norm"]["scale"], params["norm"]["scale"])
