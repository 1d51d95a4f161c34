"""A worker in a program of its own: one fragment of it, and the rule, split at the sum."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_wrappers._core import _checks, _numerics
from optax_wrappers._core._checksums import fingerprint
from optax_wrappers._core._states import require_same, require_state
from optax_wrappers._core._types import Tree
from optax_wrappers._workers import _center, _merge, _participation
from optax_wrappers._workers._engine import Exchanging
from optax_wrappers._workers._fragments import Fragment
from optax_wrappers._workers._local_steps import LocalStepsState
from optax_wrappers._workers._merge import whole
from optax_wrappers._workers._outer_step import LocalSteps


@dataclasses.dataclass(frozen=True)
class LoneWorker:
  """One fragment of one worker."""

  rule: LocalSteps
  fragment: Fragment
  part: Tree  # of the parameters
  kept: Any

  @classmethod
  def of(cls, function: str, tx: Any, state: Any, params: Tree, fragment: int) -> "LoneWorker":
    parts, rule = _rule_of(function, tx)
    params = _checks.arrays(params)
    plan = parts.plan(params)
    require_state(function, state, LocalStepsState)
    require_same(function, state.workers, parts.made_for(plan))
    number = _checks.integer(function, "fragment", fragment, minimum=0)
    if number >= len(plan):
      raise ValueError(f"{function}: fragment must be below {len(plan)}, got {number}.")
    part = plan[number].part(plan[number].take(jax.tree.leaves(params)))
    return cls(rule, plan[number], part, state.kept[number])

  @property
  def moved(self) -> Tree:
    """The worker's parameters, in the dtype of the center."""
    return jax.tree.map(_center.in_center, self.part)

  @property
  def has_votes(self) -> bool:
    """Whether the reduction takes no weights."""
    return _merge.has_votes(self.rule.reduction, self.kept.center, self.kept.reduction_state)

  def with_kept(self, state: Any, kept: Any) -> Any:
    held = list(state.kept)
    held[self.fragment.number] = kept
    return state.replace(kept=tuple(held))

  def moved_to(self, ends, params, state, kept, is_replaced):
    """All parameters, with these variables at their ends, and the state with what is kept."""
    column = jax.tree.leaves(_checks.arrays(params))
    leaves = self.fragment.take(column)
    whole = self.fragment.with_part(leaves, ends)
    new = jax.tree.map(lambda x, e: e.astype(x.dtype), leaves, whole)
    self.fragment.write(column, laid_out(new, leaves))
    # A center may have replaced parameters that were not finite.
    is_lost = ~_participation.is_finite(self.moved, ()) & is_replaced
    state = self.with_kept(state.replace(restarts=state.restarts | is_lost), kept)
    return jax.tree.unflatten(jax.tree.structure(params), column), state

  def absorbed(self, tx, state, params, ordered, staleness, weighs):
    """The parameters and state, and with `weighs` what each message has added."""
    reduction, kept, contributions = self.rule.reduction, self.kept, [] if weighs else None
    if reduction is None:
      arrived = map(self._arrived(staleness, kept.center), ordered)
      merged = _merge.summed(arrived, kept.center, contributions)
      if weighs and self.rule.is_mean:
        contributions = _merge.shares(contributions, merged.total)
    else:
      with jax.default_device(_merge.host()):
        arrived = list(map(self._arrived(staleness), ordered))
        merged, states = _merge.reduced(reduction, arrived, kept.center)
        contributions = _merge.coefficients(arrived, merged.sums) if weighs else None
      sums = laid_out(merged.sums, kept.center)
      merged = dataclasses.replace(merged, sums=sums, total=np.asarray(merged.total))
      kept = self._with_own_state(ordered, arrived, states)
    # The rule as in a step. What arrives is decoded and reduced already.
    rule = dataclasses.replace(self.rule, compression=None, reduction=None)
    kept, sent = rule.send(self.moved, self.part, kept, merged)
    ends, kept = rule.merge(self.moved, self.part, sent, kept, merged)
    params, state = self.moved_to(ends, params, state, kept, rule.replaces(sent))
    if tx.parts.policy == "reset":
      fresh = tx.parts.inner.init(params)
      inner_state = _numerics.select(sent.goes, fresh, state.inner_state)
      state = state.replace(inner_state=inner_state)
    state = state.replace(exchanges=_numerics.saturating_add(state.exchanges, 1))
    return params, state, contributions

  def _arrived(self, staleness, layout=None):
    """From a message to its content, in the layout of the center or on the host."""
    # No device holds the whole of what is divided.
    is_divided = any(len(x.devices()) > 1 for x in jax.tree.leaves(self.kept.center))
    device = _merge.host() if layout is None or is_divided else None

    def arrived(message):
      weight = jnp.asarray(whole(message.weight))
      if staleness is not None:
        weight = weight * jnp.asarray(staleness(jnp.int32(message.age))).astype(weight.dtype)
      # As from bytes: the layout of a worker's own message is none of the decoder's.
      with jax.default_device(device):
        parts = [jnp.asarray(whole(x)) for x in message.parts]
        difference = self.rule.decode(parts, self.kept)
      difference = difference if layout is None else laid_out(difference, layout)
      return _merge.Arrived.of(difference, weight, self.rule.sent_state(parts, self.kept))

    return arrived

  def _with_own_state(self, ordered, arrived, states):
    """What is kept, with the new state of the reduction if this worker's message counts."""
    kept, sent = self.kept, self.kept.sent
    for i, message in enumerate(ordered if sent is not None else ()):
      if np.array_equal(fingerprint(message.parts), sent) and arrived[i].weight > 0:
        state = jax.tree.map(lambda x, i=i: x[i], states)
        return kept.replace(reduction_state=laid_out(state, kept.reduction_state))
    return kept


def laid_out(tree, like):
  """The arrays on the devices of others of their shapes, in the same layout."""

  def place(x, y):
    if not isinstance(y, jax.Array) or isinstance(y, jax.core.Tracer):
      return x
    if y.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
      return jax.device_put(x, y.sharding)
    # Every process has all of x: nothing is sent.
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, y.sharding, x.__getitem__)

  return jax.tree.map(place, tree, like)


def _rule_of(function, tx):
  """The parts of an exchange, and its rule; raises if the rule does not support messages."""
  if not isinstance(tx, Exchanging) or not isinstance(tx.parts.rule, LocalSteps):
    mend = "Put wrappers around it inside, as inner."
    what = f"{function}: tx must be what local_steps or diloco returned"
    raise TypeError(f"{what}, got {tx!r}. {mend}")
  parts, rule = tx.parts, tx.parts.rule
  forms = dict(parts.made_for([]).arguments)
  code = rule.compression
  is_of_one = code is None or not (code.is_linear or code.after or code.codec.recodes)
  refused = {
    "axis_name=None: messages replace the collectives": not parts.names,
    "an outer optimizer: outer=optax.sgd(1.0) takes the mean": rule.outer is not None,
    "delay=0: take steps between message and absorb": not forms["delay"],
    "shard_center=False: a pod stores the whole center": not forms["shard_center"],
    'absent="pull": messages do not say who is absent': not rule.keeps_absent,
    'inner_state="keep" or "reset": it is not sent': parts.policy in (None, "reset"),
    "a codec that encodes without communication from the start: quantize, top_k": is_of_one,
  }
  for what, is_so in refused.items():
    if not is_so:
      raise ValueError(f"{function}: messages need {what}.")
  return parts, rule
