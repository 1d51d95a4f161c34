"""A Linen language model on pod x fsdp x tensor: DiLoCo over the pods, logical axis rules inside.

The loop is that of Flax's lm1b: the shape of the state from `jax.eval_shape`, its layout from the
rules and the names of the parameters' axes, one jitted step. There are two differences: the
parameters of both pods are stacked, and the optimizer is `stacked_workers(diloco(...))`. At the
end, the parameters are compared with those of a separate loop per pod and a hand-written outer
step. XLA warns that it copies the embeddings of a batch; a larger model would constrain its
activations too.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

PODS, STEPS, PERIOD, VOCABULARY, LENGTH, WIDTH, HEADS = 2, 9, 3, 64, 16, 32, 4
RULES = (
  ("pod", "pod"),
  ("embed", "fsdp"),
  ("vocab", "tensor"),
  ("mlp", "tensor"),
  ("heads", "tensor"),
)
ADAMW = optax.adamw(3e-3)


def dense(features, names, **options):
  init = nn.with_logical_partitioning(nn.initializers.xavier_uniform(), names)
  return nn.DenseGeneral(features, kernel_init=init, use_bias=False, **options)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    y = nn.RMSNorm()(x)
    q, k, v = (dense((HEADS, WIDTH // HEADS), ("embed", "heads", None))(y) for _ in range(3))
    mask = nn.make_causal_mask(x[..., 0])
    y = nn.dot_product_attention(q, k, v, mask=mask)
    x = x + dense(WIDTH, ("heads", None, "embed"), axis=(-2, -1))(y)
    y = dense(4 * WIDTH, ("embed", "mlp"))(nn.RMSNorm()(x))
    return x + dense(WIDTH, ("mlp", "embed"))(nn.gelu(y))


class Model(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    init = nn.with_logical_partitioning(nn.initializers.normal(0.1), ("vocab", "embed"))
    embed = nn.Embed(VOCABULARY, WIDTH, embedding_init=init)
    x = embed(tokens)
    for _ in range(2):
      x = Block()(x)
    return embed.attend(nn.RMSNorm()(x))


def loss(params, tokens):
  logits = Model().apply({"params": params}, tokens)[:, :-1]
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches():
  """Yields sequences that count upward, by different steps in each pod."""
  rng = np.random.default_rng(0)
  for _ in range(STEPS):
    start = rng.integers(0, VOCABULARY, (PODS, 8, 1))
    by = rng.integers(1, 4, (PODS, 8, 1)) + 3 * np.arange(PODS)[:, None, None]
    yield (start + by * np.arange(LENGTH)) % VOCABULARY


def init_params(key):
  return Model().init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]


def init_state(tx, key):
  params = ow.stack_workers(init_params(key), PODS, axis_name="pod")
  return TrainState.create(apply_fn=None, params=params, tx=tx)


def train_step(state, tokens):
  def total(params):
    # A sum, so that each pod's gradient is that of its own loss.
    return jax.vmap(loss, spmd_axis_name="pod")(params, tokens).sum()

  summed, grads = jax.value_and_grad(total)(state.params)
  return state.apply_gradients(grads=grads), summed / PODS


def train(mesh):
  tx = ow.diloco(ADAMW, "pod", communication_period=PERIOD)
  init = functools.partial(init_state, ow.stacked_workers(tx, "pod", PODS, mesh=mesh))
  specs = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
  places = nn.logical_to_mesh_sharding(specs, mesh, RULES)
  state = nn.unbox(jax.jit(init, out_shardings=places)(jax.random.key(0)))
  step = jax.jit(train_step, out_shardings=(places, None), donate_argnums=0)
  log = jax.jit(ow.map_workers(ow.metrics, "pod", mesh=mesh))
  for tokens in batches():
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("pod", "fsdp")))
    state, mean_loss = jax.block_until_ready(step(state, tokens))
    distances = log(state.opt_state, state.params)["center_distance"]
    apart = " and ".join(f"{x:.2f}" for x in distances)
    print(f"step {state.step}: loss {mean_loss:.3f}, pods {apart} from the center")
  return state


def by_hand():
  """Two loops, and a hand-written Nesterov step between them."""
  center = jax.device_get(nn.unbox(init_params(jax.random.key(0))))
  momentum = jax.tree.map(np.zeros_like, center)
  pods = [(center, ADAMW.init(center)) for _ in range(PODS)]

  @jax.jit
  def step(params, state, tokens):
    updates, state = ADAMW.update(jax.grad(loss)(params, tokens), state, params)
    return optax.apply_updates(params, updates), state

  for t, tokens in enumerate(batches(), 1):
    pods = [step(*pod, own) for pod, own in zip(pods, tokens)]
    if t % PERIOD == 0:
      params = [jax.device_get(pod[0]) for pod in pods]
      delta = jax.tree.map(lambda c, *xs: c - np.mean(xs, 0), center, *params)
      momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, delta)
      center = jax.tree.map(lambda c, m, d: c - 0.7 * (0.9 * m + d), center, momentum, delta)
      pods = [(center, state) for _, state in pods]
  return center


def main():
  mesh = jax.make_mesh((PODS, 2, 2), ("pod", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  state = train(mesh)
  center = ow.center_params(state.opt_state)
  trees = {
    "parameters": state.params,
    "Adam's mu": state.opt_state.inner_state[0].mu,
    "center": center,
  }
  for name, tree in trees.items():
    print(f"{name:10}", tree["Block_0"]["DenseGeneral_4"]["kernel"].sharding.spec)
  apart = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), jax.device_get(center), by_hand())
  apart = max(jax.tree.leaves(apart))
  print(f"the center and that of two loops by hand differ by {apart:.1e}")
  assert apart < 1e-4


if __name__ == "__main__":
  main()
