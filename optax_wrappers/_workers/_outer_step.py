"""The rule of `local_steps` and `diloco`: an outer step by the mean difference from the center."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _axes, _collectives, _numerics, _states
from optax_wrappers._core._checksums import fingerprint
from optax_wrappers._core._types import STATIC, Tree
from optax_wrappers._shards import _compress
from optax_wrappers._shards._cross_shard import all_reduce
from optax_wrappers._workers import _center, _participation
from optax_wrappers._workers._center import Center
from optax_wrappers._workers._rule import Rule
from optax_wrappers.reductions import Reduction


@_states.dataclass
class OuterKept(Center):
  """The state of a fragment of `local_steps` with an outer optimizer: a `Center`, and these fields.

  Attributes:
    reduction_state: the state of a `reduction` that is a transformation or a robust rule, each
      worker's own; else None.
    compressed: with a codec, a `CompressedState`; else None.
    sent: with messages and a reduction that has a state, the checksums of the latest; else None.
  """

  reduction_state: Any = _states.field("owned", default=None)
  compressed: Any = None
  sent: Any = None


class _Sent(NamedTuple):
  """The data that a worker needs when an exchange arrives.

  Attributes:
    target: the parameters toward which workers move, by the pull; None: the center.
    goes: whether this worker moves; bool scalar.
    weight: its weight in the exchange; real scalar.
  """

  target: Tree
  goes: jax.Array
  weight: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalSteps(Rule):
  """Applies the outer optimizer to the mean of center - params; workers move to the new center.

  Attributes:
    pull_rate: the fraction of the way; None: all of it.
    outer: the outer optimizer, or None.
    reduction: a `Reduction` or a transformation that replaces the weighted mean, or None.
    compression: of the differences, or None.
    is_mean: whether the weighted sum of the differences is divided by the sum of the weights.
    keeps_absent: whether a worker of participation 0 keeps its parameters.
  """

  pull_rate: Any
  outer: Any = dataclasses.field(metadata=STATIC)
  reduction: Any = dataclasses.field(metadata=STATIC)
  compression: _compress.Compressor | None = dataclasses.field(metadata=STATIC)
  is_mean: bool = dataclasses.field(metadata=STATIC)
  keeps_absent: bool = dataclasses.field(metadata=STATIC)

  def init(self, params, workers):
    if self.outer is None:
      return ()  # local SGD has no state
    center = workers.start(params)
    # Some optimizers store the initial parameters.
    outer_state = _states.copy_tree(self.outer.init(center))
    workers.check_outer(self.outer, center)
    compressed = self.compression and self.compression.start(center, self.compression.flags(center))
    reduction_state = self.reduction and self._reducer(workers).init(center)
    in_messages = not workers.names and jax.tree.leaves(reduction_state)
    return OuterKept(
      center=center,
      outer_state=outer_state,
      reduction_state=reduction_state,
      compressed=compressed,
      sent=jnp.zeros(2, jnp.uint32) if in_messages else None,
    )

  def idle(self, params):
    start = _center.copied(params)
    weight = jnp.zeros((), _numerics.weight_dtype(jax.tree.leaves(start)))
    nothing = _Sent(start if self.outer is None else None, jnp.zeros((), bool), weight)
    return _axes.vary_with(nothing, params)

  def send(self, moved, params, kept, workers):
    weight = workers.weight  # 0: absent, or not finite
    if self.outer is None:
      # Local SGD: x_i <- mean_j x_j.
      mean, total = _center.mean(workers, moved, weight)
      return kept, _Sent(mean, self._goes(weight, total), weight)

    if self.compression or self.reduction:
      difference = workers.difference(kept.center, moved, params)
      total = _collectives.psum(weight, workers.names)
    else:
      difference, total = workers.sum_of_differences(kept.center, moved, params, weight)
      difference = _center.divided(difference, total) if self.is_mean else difference
    moves = total > 0
    if self.compression:
      difference, kept = self._compressed(difference, total, kept, workers)
    if self.reduction:
      # Such as a median, which may have rejected all workers.
      difference, kept = self._reduced(difference, kept, workers)
      moves &= ~_participation.is_zero(difference, workers.names)
    # The mean difference plays the role of a gradient for the outer optimizer.
    updates, outer_state = self.outer.update(difference, kept.outer_state, kept.center)
    new = optax.apply_updates(kept.center, updates), outer_state
    # If no worker participates, nothing changes, not even the counters of the outer optimizer.
    center, outer_state = _numerics.select(moves, new, (kept.center, kept.outer_state))
    kept = kept.replace(center=center, outer_state=outer_state)
    return kept, _Sent(None, self._goes(weight, total), weight)

  def encode(self, difference, kept, is_void):
    """The parts of one worker's message, and the new state."""
    if self.compression is None:
      parts = jax.tree.leaves(difference)
    else:
      parts, compressed = self.compression.coded(difference, kept.compressed, is_void)
      kept = kept.replace(compressed=compressed)
    parts = (*parts, *jax.tree.leaves(kept.reduction_state))
    return parts, kept if kept.sent is None else kept.replace(sent=fingerprint(parts))

  def decode(self, parts, kept):
    """The difference in the parts of a message."""
    treedef: Any = jax.tree.structure(kept.center)
    parts = parts[: treedef.num_leaves]
    if self.compression is None:
      return treedef.unflatten(parts)
    return self.compression.read(parts, kept.center)

  def sent_state(self, parts, kept):
    """The state of the reduction in the parts of a message."""
    num_leaves = len(jax.tree.leaves(kept.center))
    return jax.tree.unflatten(jax.tree.structure(kept.reduction_state), parts[num_leaves:])

  def take_back(self, parts, kept):
    """With feedback, the state with these parts back in the residual; else None."""
    if self.compression is None or not self.compression.feedback:
      return None
    before, sent = kept.compressed.residual, self.decode(parts, kept)
    residual = jax.tree.map(
      lambda e, d: None if e is None else e + d, before, sent, is_leaf=lambda x: x is None
    )
    return kept.replace(compressed=kept.compressed.replace(residual=residual))

  def merge(self, moved, params, sent, kept, workers):
    target = workers.whole(kept.center, params) if sent.target is None else sent.target

    def end(x, c):
      # With a pull of 1 the center is assigned: `x + (c - x)` is another number, and NaN if x is.
      there = c if self.pull_rate is None else x + _numerics.times(self.pull_rate, c - x)
      return jnp.where(sent.goes, there, x)

    return jax.tree.map(end, moved, target), kept

  def replaces(self, sent):
    return sent.goes if self.pull_rate is None else False

  def _goes(self, weight, total):
    """Whether a worker of this weight moves: to a center always, to a mean only if there is one."""
    if self.keeps_absent:
      return weight > 0
    return total > 0 if self.outer is None else jnp.ones_like(total, bool)

  def _compressed(self, difference, total, kept, workers):
    """The mean or sum of the decoded differences, and the new state."""
    factor = _numerics.share(workers.weight, total) if self.is_mean else workers.weight
    difference = _numerics.scale_tree(difference, factor)
    summed, compressed = self.compression.sum_tree(
      difference, kept.compressed, workers.names, total == 0
    )
    return summed, kept.replace(compressed=compressed)

  def _reducer(self, workers):
    """The reduction as a transformation over the axes of the workers."""
    if isinstance(self.reduction, Reduction):
      return all_reduce(workers.names, reduction=self.reduction)
    return self.reduction

  def _reduced(self, difference, kept, workers):
    """The result of `reduction` on the differences, and the new state."""
    participates = workers.weight > 0
    # The difference of an absent worker may be NaN; it must be zero.
    difference = _numerics.zeros_unless(participates, difference)
    # Without a participation all have equal weights, and a reduction without weights, such as a
    # median, may be used.
    extra_args = {"weight": workers.weight} if workers.is_weighed else {}
    reduced, state = self._reducer(workers).update(
      difference, kept.reduction_state, kept.center, **extra_args
    )
    mend = "End it with the reduction: optax.chain(..., all_reduce(axis_name))."
    what, names = "what reduction returns", frozenset(workers.names)
    for leaf in jax.tree.leaves(reduced):
      _axes.require_equal(leaf, "local_steps", what, mend, axes=names)
    state = _numerics.select(participates, state, kept.reduction_state)
    return reduced, kept.replace(reduction_state=state)
