"""Parameters have one name in every form in which a model's parameters come."""

import chex
import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import optax_wrappers as ow
from optax_wrappers import projections
from optax_wrappers._core import _paths

pytestmark = pytest.mark.optax_promotes


class Model(nnx.Module):
  """A submodule and a parameter of its own that are called `value`, as a box's payload is."""

  def __init__(self, rngs):
    self.hidden = nnx.Linear(2, 3, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(2, 6, 8, rngs=rngs, decode=False)
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
    self.value = nnx.Param(jnp.ones(2))


@nnx.jit
def model():
  return Model(nnx.Rngs(0))


FORMS = {
  "module": lambda m: m,
  "state": lambda m: nnx.state(m, nnx.Param),
  "split": lambda m: nnx.split(m)[1],
  "split by type": lambda m: nnx.split(m, nnx.Param, ...)[1],
  "pure": lambda m: nnx.as_pure(nnx.state(m, nnx.Param)),
  "dict": lambda m: nnx.to_pure_dict(nnx.state(m, nnx.Param)),
  "flat": lambda m: nnx.to_flat_state(nnx.state(m, nnx.Param)),
  "flattened": lambda m: flax.traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(m, nnx.Param))),
  "abstract": lambda m: jax.eval_shape(lambda: nnx.state(m, nnx.Param)),
}


@pytest.mark.parametrize("form", FORMS)
def test_named_leaves_of_nnx_model_same_in_every_form(form):
  tree = FORMS[form](model())
  named = dict(_paths.named_leaves(tree))
  attention = [
    f"attention/{name}/{leaf}"
    for name in ("query", "key", "value", "out")
    for leaf in ("bias", "kernel")
  ]
  layers = ["hidden/bias", "hidden/kernel", "layers/0/bias", "layers/0/kernel", "value"]
  assert sorted(named) == sorted(attention + layers)
  assert [leaf.shape for leaf in jax.tree.leaves(tree)] == [
    leaf.shape for _, leaf in _paths.named_leaves(tree)
  ]
  assert named["hidden/kernel"].shape == (2, 3)


def boxed_params():
  kernel_init = nn.with_partitioning(nn.initializers.normal(), (None, "model"))
  dense = nn.Dense(3, kernel_init=kernel_init)
  return jax.jit(dense.init)(jax.random.key(0), np.ones((1, 2), np.float32))["params"]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Named:
  value: jax.Array


@pytest.mark.parametrize(
  ("tree", "names"),
  [
    (lambda: {"a": [np.ones(1), (np.ones(1),)]}, ["a/0", "a/1/0"]),
    (lambda: np.ones(1), [""]),
    (boxed_params, ["bias", "kernel"]),
    (lambda: Named(value=np.ones(1)), ["value"]),  # a field, and no box
    (lambda: {"dense": Named(value=np.ones(1))}, ["dense/value"]),
  ],
  ids=["lists", "bare", "Linen's boxes", "field", "nested field"],
)
def test_named_leaves_of_lists_boxes_and_dataclasses(tree, names):
  assert [name for name, _ in _paths.named_leaves(tree())] == names


def test_named_leaves_of_equinox_model():
  import equinox as eqx

  mlp = eqx.filter(eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0)), eqx.is_inexact_array)
  assert [name for name, _ in _paths.named_leaves(mlp)] == [
    f"layers/{i}/{x}" for i in (0, 1) for x in ("weight", "bias")
  ]


# In use.


def column_norms(kernel):
  return np.linalg.norm(np.asarray(kernel, np.float64), axis=0)


def kernels(limit):
  return ow.contrib.flax_kernels(lambda axes: projections.max_norm(limit, axes))


def test_nnx_split_model_kernels_are_projected():
  params = nnx.split(model())[1]
  tx = ow.project_variables(optax.sgd(0.1), kernels(0.1))

  @jax.jit
  def step(params):
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    return optax.apply_updates(params, updates)

  moved = step(params)
  assert column_norms(moved["hidden"]["kernel"][...]).max() <= 0.1
  taken = ow.contrib.chosen(kernels(0.1), params)
  assert {path: spec.axes for path, spec in taken.items()} == {
    "hidden/kernel": (0,),
    "layers/0/kernel": (0,),
    "attention/query/kernel": (0,),
    "attention/key/kernel": (0,),
    "attention/value/kernel": (0,),
    "attention/out/kernel": (0, 1),
  }


@pytest.mark.parametrize(
  "choose", ["flax_kernels", "by_path", "tree of the boxes", "mask of the boxes"]
)
def test_nnx_optimizer_init_and_update_choose_same_variables(choose):
  """The bound is a schedule, so that the state must be the same one too."""
  m = model()
  bound = optax.constant_schedule(0.1)
  spec = projections.max_norm(bound, axes=0)
  is_hidden = jax.tree.map_with_path(
    lambda path, x: "hidden" in str(path[0]) and x.ndim == 2, nnx.state(m, nnx.Param)
  )
  tx = {
    "flax_kernels": lambda: ow.project_variables(optax.sgd(0.1), kernels(bound)),
    "by_path": lambda: ow.project_variables(
      optax.sgd(0.1), ow.contrib.by_path(lambda path, _: spec if path == "hidden/kernel" else None)
    ),
    "tree of the boxes": lambda: ow.project_variables(
      optax.sgd(0.1), jax.tree.map(lambda flag: spec if flag else projections.box(-9, 9), is_hidden)
    ),
    "mask of the boxes": lambda: ow.clip_variables(optax.sgd(0.1), bound, axes=0, mask=is_hidden),
  }[choose]()
  optimizer = nnx.Optimizer(m, tx, wrt=nnx.Param)

  @nnx.jit
  def step(m, optimizer):
    optimizer.update(m, nnx.grad(lambda m: m.hidden(jnp.ones((1, 2))).sum())(m))

  step(m, optimizer)
  assert column_norms(m.hidden.kernel[...]).max() <= 0.1


def test_linen_boxed_params_in_train_state_are_projected():
  params = boxed_params()
  assert list(ow.contrib.chosen(kernels(0.1), params)) == ["kernel"]
  state = train_state.TrainState.create(
    apply_fn=None, params=params, tx=ow.project_variables(optax.sgd(0.1), kernels(0.01))
  )
  state = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(
    state, jax.tree.map(np.ones_like, params)
  )
  assert column_norms(state.params["kernel"].value).max() <= 0.01
