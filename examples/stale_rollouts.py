"""Reinforcement learning from rollouts of older policies, with and without weights by age.

A policy learns to walk to a corner of a grid. In each step, half of the batch is rollouts of the
current policy, and half is rollouts of the policy some updates ago, as if other processes had
generated them. A rollout is stamped with the step at which its policy was read. The same function
that weights gradients in an optimizer weights rollouts here, in the loss.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

import optax_wrappers as ow

SIZE, HORIZON, BATCH, STEPS = 5, 12, 32, 400
AGES, SEEDS = (0, 1, 4, 16), 8
OPTIMIZERS = {"adam": optax.adam(0.3), "sgd": optax.sgd(0.1)}
MOVES = jnp.array([[0, 1], [0, -1], [1, 0], [-1, 0]])


def rollouts(policy, num, key):
  """Returns walks of the policy, logits [cell, move]: cells, moves and rewards, each [num,
  HORIZON].

  The reward is -1 for each move before the corner is reached, then 0.
  """

  def walk(key):
    start, *keys = jax.random.split(key, HORIZON + 1)

    def move(place, key):
      is_there = (place == SIZE - 1).all()
      cell = place[0] * SIZE + place[1]
      chosen = jax.random.categorical(key, policy[cell])
      moved = jnp.clip(place + MOVES[chosen], 0, SIZE - 1)
      return jnp.where(is_there, place, moved), (cell, chosen, jnp.where(is_there, 0.0, -1.0))

    return jax.lax.scan(move, jax.random.randint(start, (2,), 0, SIZE), jnp.stack(keys))[1]

  return jax.vmap(walk)(jax.random.split(key, num))


def loss(policy, batch, weights):
  """REINFORCE with a baseline, over weighted rollouts.

  Divided by their number, not by the sum of their weights: if the whole batch is old, the step
  should be small.
  """
  cells, moves, rewards = batch
  is_walking = rewards < 0
  returns = jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
  gain = (returns - returns.sum(0) / jnp.maximum(is_walking.sum(0), 1)) * is_walking
  of_rollout = -(jax.nn.log_softmax(policy)[cells, moves] * gain).sum(axis=1)
  return (weights * of_rollout).sum() / jnp.maximum((weights > 0).sum(), 1)


def train(age, key, weight_of, inner):
  """Returns the mean reward of a walk after training; half of the rollouts are `age` updates
  old."""
  tx = ow.contrib.params_history(ow.drop_stale(inner, max(AGES)), max_staleness=max(AGES))
  policy = jnp.zeros((SIZE**2, len(MOVES)))

  def step(held, key):
    policy, state = held
    keys, now = jax.random.split(key), ow.get_state(state, ow.states.StalenessState).step
    # A real generator would stamp its rollouts itself; this one is `age` updates late.
    own = rollouts(policy, BATCH // 2, keys[0])
    older = rollouts(ow.contrib.past_params(state, age), BATCH // 2, keys[1])
    stamps = jnp.repeat(jnp.stack([now, jnp.maximum(now - age, 0)]), BATCH // 2)

    batch = jax.tree.map(lambda *parts: jnp.concatenate(parts), own, older)
    grads = jax.grad(loss)(policy, batch, weight_of(now - stamps))
    updates, state = tx.update(grads, state, policy, computed_at=now)
    return (optax.apply_updates(policy, updates), state), None

  (policy, _), _ = jax.lax.scan(step, (policy, tx.init(policy)), jax.random.split(key, STEPS))
  return rollouts(policy, 512, key)[2].sum(axis=1).mean()


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(%(default)s)")
  inner = OPTIMIZERS[parser.parse_args().optimizer]
  rules = {
    "all alike": lambda age: jnp.ones(age.shape),
    "1 / (1 + age)": ow.staleness.inverse(),
  }
  keys, ages = jax.random.split(jax.random.key(0), SEEDS), jnp.array(AGES)
  rewards = {}
  print(f"{'age of half the rollouts':26}", *(f"{age:6}" for age in AGES))
  for name, weight_of in rules.items():
    run = jax.vmap(functools.partial(train, weight_of=weight_of, inner=inner), in_axes=(None, 0))
    rewards[name] = jax.jit(jax.vmap(run, in_axes=(0, None)))(ages, keys).mean(axis=1)
    print(f"{name:26}", *(f"{reward:6.2f}" for reward in rewards[name]))
  print(f"reward of a walk, the mean over {SEEDS} seeds; -4 is the shortest way")
  if inner is not OPTIMIZERS["adam"]:
    return
  plain, weighed = rewards.values()
  assert plain[0] > -4.2  # learned from fresh rollouts
  assert plain[-1] < plain[0] - 0.3  # not from rollouts of 16 updates ago
  assert weighed[-1] > weighed[0] - 0.2


if __name__ == "__main__":
  main()
