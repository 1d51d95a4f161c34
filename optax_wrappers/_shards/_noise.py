"""How noisy gradients are, from the gradients of parts of a batch that are reduced anyway."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from optax_wrappers._core import _checks, _numerics
from optax_wrappers._core._state import WrapperState, instances, state
from optax_wrappers._core._types import Tree
from optax_wrappers.reductions import Reduction


@state
class NoiseState(WrapperState):
  """Running averages of what is known of the gradient's noise. In units of a part of the batch.

  Both begin at zero and decay alike, so that their quotient is right from the first step on. Of
  towers they are each shard's own, of shards one for all.

  Attributes:
    count: steps measured; int32 scalar. One with a NaN or an infinity is none.
    num_parts: the parts of a batch, shards or towers; int32 scalar.
    grad_sq: of the estimates of the squared length of the true gradient; float32 scalar.
    trace: of those of the sum of the variances of the gradient's entries; float32 scalar.
  """

  per_shard_fields = frozenset({"count", "num_parts", "grad_sq", "trace"})

  count: jax.Array
  num_parts: jax.Array
  grad_sq: jax.Array
  trace: jax.Array

  def after(
    self, squares: jax.Array, reduced: Tree, num_parts: int, is_mean: bool, decay: Any
  ) -> Any:
    """The averages after one more step.

    Args:
      squares: the squared lengths of the parts' gradients, added up.
      reduced: the mean or the sum of these gradients.
      num_parts: how many.
      is_mean: which of the two it is.
      decay: of both averages.
    """
    small = squares / num_parts
    big = _numerics.squared_length(reduced) / (1 if is_mean else num_parts**2)
    # McCandlish et al. 2018, equations A.1 and A.2, with B_small = 1 and B_big = num_parts.
    grad_sq = (num_parts * big - small) / (num_parts - 1)
    trace = (small - big) / (1 - 1 / num_parts)
    decay = jnp.asarray(decay, jnp.float32)
    is_sound = jnp.isfinite(grad_sq) & jnp.isfinite(trace)

    def averaged(old, new):
      return jnp.where(is_sound, decay * old + (1 - decay) * new, old)

    before: Any = self
    return before.replace(
      count=_numerics.saturating_add(self.count, is_sound.astype(jnp.int32)),
      num_parts=jnp.full_like(self.num_parts, num_parts),
      grad_sq=averaged(self.grad_sq, grad_sq),
      trace=averaged(self.trace, trace),
    )


@state
class GatheredNoiseState(NoiseState):
  """`NoiseState` of `gather_towers`, in which towers come one after another.

  Attributes:
    square: the squared lengths of the towers' gradients in this step so far, added up; float32
      scalar.
  """

  per_shard_fields = NoiseState.per_shard_fields | {"square"}

  square: jax.Array


def start(state_class: type[NoiseState], **more: Any) -> Any:
  """Nothing measured yet."""
  return state_class(**_nothing(), **more)


def _nothing():
  return {
    "count": jnp.zeros((), jnp.int32),
    "num_parts": jnp.ones((), jnp.int32),
    "grad_sq": jnp.zeros((), jnp.float32),
    "trace": jnp.zeros((), jnp.float32),
  }


def check_decay(wrapper: str, decay: Any, reduction: Any) -> Any:
  """Returns the decay of the averages; None: nothing is measured."""
  if decay is None:
    return None
  if isinstance(reduction, Reduction):
    raise ValueError(
      f"{wrapper}: noise_decay is for means and sums; got reduction={reduction.name}."
    )
  return _checks.number(wrapper, "noise_decay", decay, lambda d: 0 <= d < 1, "in [0, 1)")


def check_parts(wrapper: str, num_parts: int, what: str) -> None:
  """Raises where there is nothing to compare."""
  if num_parts < 2:
    raise ValueError(
      f"{wrapper}: noise_decay compares the gradients of {what}, and needs two at least; got"
      f" {num_parts}. Leave it out."
    )


def noise_scale(opt_state: Tree, examples_per_part: ArrayLike = 1) -> jax.Array:
  """The gradient noise scale: of how many examples a batch would be as much signal as noise.

  `trace(Sigma) / ||G||^2`, Sigma the covariance of one example's gradient and G the true gradient.
  Batches far below it gain nearly in proportion from more examples, batches far above it hardly at
  all. It grows while the loss falls.

  Args:
    opt_state: a state with the `noise_decay` of one wrapper, or any pytree that holds it; stacked
      or not.
    examples_per_part: the examples of one shard or tower. 1: the result is in shards or towers.

  Returns:
    A float32 scalar. NaN before the first step, infinite while no gradient can be told from noise.

  Raises:
    ValueError: if there is no `NoiseState`, or more than one.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.reduce_towers(optax.sgd(0.1), noise_decay=0.9)
    >>> params = jnp.zeros(1)
    >>> # Of 8 examples each.
    >>> gradients = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    >>> _, state = tx.update(gradients, tx.init(params), params)
    >>> print(ow.noise_scale(state, examples_per_part=8).round(3))
    2.286

  Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1: two averages, then a quotient.
  """
  noise = _found(opt_state, "noise_scale")
  trace, grad_sq = noise.trace.mean(), noise.grad_sq.mean()
  scale = jnp.where(grad_sq > 0, trace / jnp.where(grad_sq > 0, grad_sq, 1), jnp.inf)
  scale = jnp.where(noise.count.max() > 0, scale, jnp.nan)
  return scale * jnp.asarray(examples_per_part, jnp.float32)


def gradient_gain(opt_state: Tree) -> jax.Array:
  """AdaScale's gain: how many steps on one part of the batch a step on all of them is worth.

  From 1, where the gradient has no noise, to the number of parts.

  Args:
    opt_state: as in `noise_scale`.

  Returns:
    A float32 scalar; 1 before the first step.

  Raises:
    ValueError: if there is no `NoiseState`, or more than one.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.reduce_towers(optax.sgd(0.1), noise_decay=0.9)
    >>> gradients = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    >>> _, state = tx.update(gradients, tx.init(jnp.zeros(1)))
    >>> print(ow.gradient_gain(state).round(3))
    1.2

  Source: Johnson et al. 2020 (arXiv 2007.05105), `E[s + m] / E[s / S + m]`, s the variance of a
  part's gradient, m the squared length of the true one and S the number of parts.
  """
  noise = _found(opt_state, "gradient_gain")
  trace, grad_sq = jnp.maximum(noise.trace.mean(), 0), jnp.maximum(noise.grad_sq.mean(), 0)
  parts = noise.num_parts.max().astype(jnp.float32)
  divisor = trace / parts + grad_sq
  return jnp.where(divisor > 0, (trace + grad_sq) / jnp.where(divisor > 0, divisor, 1), 1.0)


def _found(opt_state, function):
  found = list(instances(opt_state, NoiseState))
  if len(found) != 1:
    raise ValueError(
      f"{function}: needed exactly one NoiseState, found {len(found)}. Pass noise_decay=0.99 to"
      " cross_shard, reduce_towers or gather_towers; where several have it, pass the part of the"
      " state that holds the one you mean."
    )
  return found[0]
