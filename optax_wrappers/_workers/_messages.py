"""Messages: synchronization of workers in independent programs, without collectives.

The rule is that of `local_steps`, split at the sum: `message` encodes one worker's pseudo-gradient,
and `absorb` computes the sum, or the result of the `reduction`, and the outer step. All workers
must compute equal centers from equal messages. XLA rounds compiled products and sums differently on
other processors and with other layouts, so `absorb` runs operation by operation, and adds in the
order of the senders' names.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _checks, _numerics
from optax_wrappers._core._checksums import fingerprint
from optax_wrappers._core._states import copy_tree, require_same, require_state
from optax_wrappers._core._types import STATIC, Tree
from optax_wrappers._workers import _center, _merge, _participation
from optax_wrappers._workers._engine import Exchanging
from optax_wrappers._workers._fragments import Fragment
from optax_wrappers._workers._local_steps import LocalStepsState
from optax_wrappers._workers._merge import Contribution, whole
from optax_wrappers._workers._outer_step import LocalSteps

# Of a sender, which may be that of a file.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Message:
  """The message of one worker for one fragment in one round.

  Attributes:
    weight: of the worker in the mean; real scalar.
    base: a fingerprint of the center and outer state of its start; uint32 `[2]`.
    parts: the pseudo-gradient, an array for each variable, or its code, uint8 `[bytes]`.
    sender: the name of the worker.
    fragment: the number of the fragment.
    age: the synchronizations since it was made.
  """

  weight: jax.Array
  base: jax.Array
  parts: tuple[jax.Array, ...]
  sender: str = dataclasses.field(metadata=STATIC)
  fragment: int = dataclasses.field(metadata=STATIC)
  age: int = dataclasses.field(default=0, metadata=STATIC)


def message(
  tx: optax.GradientTransformation,
  state: Any,
  params: Tree,
  weight: ArrayLike = 1.0,
  *,
  sender: str,
  fragment: int = 0,
) -> tuple[Message, Any]:
  """A worker's message for a synchronization: its pseudo-gradient, encoded by the codec.

  Args:
    tx: `local_steps` or `diloco` with `axis_name=None`, whose steps do not synchronize: with
      `communication_period=None`, or `exchange=False` in each. A `reduction` that is a
      transformation reduces over the axis "pods", such as `contrib.penalty("pods")`. Not with
      `shard_center`, `delay`, `absent="keep"`, `inner_state="average"`, a codec that is linear or a
      vote, or `compression(after=)`.
    state: the worker's.
    params: the worker's.
    weight: the worker's weight, a real scalar, at least 0, such as its number of examples; 0 or 1
      with a `reduction` that takes none. With a NaN or an infinity in params, and before the first
      step, the message has weight 0.
    sender: a unique name of the worker.
    fragment: the number of the fragment.

  Returns:
    The message, and the state with a new residual of the codec. The function is pure, and may be
    compiled.

  Raises:
    ValueError: for a `tx` that has no messages, or arguments out of range.
    TypeError: for another `tx`.

  **Communication**: none, nothing is sent. A message has the bytes of the parameters in the
  center's dtype, or those of the code, and 12 more, and with a `reduction` those of its state.

  Examples:
    Two independent pods, one of which has seen three times as much data:

    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.local_steps(
    ...   optax.sgd(1.0), None, communication_period=None, outer=optax.sgd(1.0)
    ... )
    >>> from optax_wrappers.exchange import absorb, message
    >>> start, messages, pods = jnp.zeros(2), [], []
    >>> for name, weight, slope in [("a", 1.0, 4.0), ("b", 3.0, -8.0)]:
    ...   params, state = start, tx.init(start)
    ...   updates, state = tx.update(jnp.full(2, slope), state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   one, state = message(tx, state, params, weight, sender=name)
    ...   messages.append(one)
    ...   pods.append((params, state))
    >>> for params, state in pods:
    ...   params, state = absorb(tx, state, params, messages)
    ...   print(params, state.center)
    [5. 5.] [5. 5.]
    [5. 5.] [5. 5.]

  Source: Douillard et al., "Decoupled DiLoCo" (2026), for pods that come and go.
  """
  worker = _One.of("message", tx, state, params, fragment)
  checked = _checks.weight("message", weight)
  if not isinstance(weight, jax.core.Tracer):  # which has no value yet
    if not np.isfinite(np.asarray(weight)):
      raise ValueError(f"message: weight must be finite, got {weight}.")
    if np.asarray(weight) not in (0, 1) and worker.has_votes:
      what = "message: every pod has one vote because of the reduction"
      raise ValueError(f"{what}. Leave out the weight, got {weight}.")
  moved = worker.moved
  difference = _center.WorkerGroup(()).difference(worker.kept.center, moved, worker.part)
  # A pod that has only joined has no work to send. Differences of finite parameters may overflow.
  is_finite = (state.step > 0) & _participation.is_finite(difference, ())
  weighed = _participation.weight("message", (), checked, is_finite, moved)
  # Zeros for an absent worker, whose difference may be NaN.
  difference = jax.tree.map(lambda d: jnp.where(weighed > 0, d, jnp.zeros_like(d)), difference)
  parts, kept = worker.rule.encode(difference, worker.kept, weighed == 0)
  if not isinstance(sender, str):
    raise TypeError(f"message: sender must be a name, a str; got {sender!r}.")
  if not NAME.fullmatch(sender):
    requirement = "a letter or digit, and then letters, digits, '.', '_' and '-', 100 at most"
    raise ValueError(f"message: sender must be {requirement}; got {sender!r}.")
  base = fingerprint(snapshot(state, fragment))
  made = Message(weighed, base, tuple(parts), str(sender), fragment)
  return made, worker.with_kept(state, kept)


def absorb(
  tx: optax.GradientTransformation,
  state: Any,
  params: Tree,
  messages: Sequence[Message],
  *,
  staleness: Callable[[jax.Array], ArrayLike] | None = None,
) -> tuple[Tree, Any]:
  """Applies the messages of all workers to the center, and moves the worker to it.

  All workers that absorb the same messages have the same center, bit for bit, whatever the order,
  processor and layout, if `outer` is elementwise, as sgd and adam are. The result equals that of
  `update(exchange=True)` on as many workers, up to rounding. It runs operation by operation.

  A `reduction` combines the decoded messages, all of them in the memory of the host; one of weight
  0 is zeros for it. If it is not coordinatewise, pods need hosts of one kind of processor for equal
  bits.

  Args:
    tx: as in `message`.
    state: the worker's.
    params: the worker's, after its steps.
    messages: of one fragment; a sender may have one of each age.
    staleness: from an age, an int32 scalar, to a factor of the weight, such as a policy of
      `optax_wrappers.staleness`; None: 1. A `reduction` without weights takes no late messages.

  Returns:
    The parameters and the state. If all weights are 0, only the count of exchanges changes.

  Raises:
    ValueError: for a message of another fragment, model or codec, twice from one sender, with an
      invalid weight, or made at another center. Nothing has changed then.
    TypeError: under a transformation of JAX (it cannot be traced), or for anything but a message.

  **Communication**: none.
  """
  return _absorb(tx, state, params, messages, staleness, weighs=False)[:2]


def merge(
  tx: optax.GradientTransformation,
  state: Any,
  params: Tree,
  messages: Sequence[Message],
  *,
  staleness: Callable[[jax.Array], ArrayLike] | None = None,
) -> tuple[Tree, Any, list[Contribution]]:
  """`absorb`, and what each message has added, so that a worker that goes wrong is seen.

  Args:
    tx: as in `absorb`, as is all else.
    state: the worker's.
    params: the worker's.
    messages: of one fragment.
    staleness: the same in all workers.

  Returns:
    The parameters and the state, and a `Contribution` for each message, in their order.

  **Communication**: none.
  """
  return _absorb(tx, state, params, messages, staleness, weighs=True)


def _absorb(tx, state, params, messages, staleness, weighs):
  fragment = _fragment_of(messages)
  leaves = jax.tree.leaves((state, params, list(messages)))
  if any(isinstance(x, jax.core.Tracer) for x in leaves):
    mend = "Call it outside of jax.jit: compiled, its bits would differ between pods."
    raise TypeError(f"absorb: the state, params and messages must be arrays, not traced. {mend}")
  worker = _One.of("absorb", tx, state, params, fragment)
  ordered = sorted(messages, key=lambda x: (x.age, x.sender))
  expected = template(tx, state, params, fragment)
  for before, message in zip([None, *ordered], ordered):
    _check("absorb", message, expected, before)
  here = np.asarray(fingerprint(snapshot(state, fragment)))
  is_late = any(message.age for message in ordered)
  if is_late and worker.has_votes:
    mend = "and this reduction takes none. Leave them out: max_age=0."
    raise ValueError(f"absorb: late messages count less by a weight, {mend}")
  for message in ordered:
    if not message.age and not np.array_equal(np.asarray(message.base), here):
      raise ValueError(
        f"absorb: the message of {message.sender!r} was made at another center than this one. Steps"
        " must not synchronize (communication_period=None), and a worker that missed a round takes"
        " the center of another: exchange.adopt."
      )
  with jax.disable_jit():
    params, state, found = worker.absorbed(tx, state, params, ordered, staleness, weighs)
  places = {id(message): i for i, message in enumerate(ordered)}
  return params, state, found and [found[places[id(message)]] for message in messages]


def take_back(
  tx: optax.GradientTransformation, state: LocalStepsState, params: Tree, message: Message
) -> Any:
  """With feedback, adds the content of a lost message to the residual, for the next message.

  Args:
    tx: as in `message`.
    state: of its sender, as `message` returned it, or later.
    params: the worker's, or arrays of their shapes.
    message: one that no worker has absorbed or will absorb.

  Returns:
    The new state; without a codec with feedback the same state.
  """
  worker = _One.of("take_back", tx, state, params, message.fragment)
  _check("take_back", message, template(tx, state, params, message.fragment))
  kept = worker.rule.take_back(message.parts, worker.kept)
  kept = worker.kept if kept is None else _numerics.select(message.weight > 0, kept, worker.kept)
  return worker.with_kept(state, kept)


def template(
  tx: optax.GradientTransformation, state: LocalStepsState, params: Tree, fragment: int = 0
) -> Message:
  """The shapes and dtypes of a message, as `jax.ShapeDtypeStruct`, for `from_bytes`.

  Args:
    tx: as in `message`.
    state: a state of it, or its shapes.
    params: one worker's, or their shapes.
    fragment: the number of the fragment.
  """

  of = functools.partial(message, tx, sender="template", fragment=fragment)
  return jax.eval_shape(of, state, params)[0]


def snapshot(state: Any, fragment: int = 0) -> tuple[Tree, Tree]:
  """The center of a fragment and the outer state, for a worker that joins.

  Args:
    state: of `local_steps` or `diloco`.
    fragment: the number of the fragment.
  """
  kept = state.kept[fragment]
  return kept.center, kept.outer_state


def adopt(
  tx: optax.GradientTransformation,
  state: Any,
  params: Tree,
  snapshot: tuple[Tree, Tree],
  fragment: int = 0,
) -> tuple[Tree, Any]:
  """The parameters and the state of a worker that starts from another worker's center.

  Args:
    tx: as in `message`.
    state: the worker's. A codec's residual is reset.
    params: the worker's.
    snapshot: of another worker's state, in the same round.
    fragment: the number of the fragment.
  """
  worker = _One.of("adopt", tx, state, params, fragment)
  fresh = worker.rule.init(worker.part, _center.WorkerGroup(()))
  expected, types = (
    jax.tree.map(lambda x: (jnp.shape(x), _numerics.dtype_of(x)), tree)
    for tree in ((fresh.center, fresh.outer_state), tuple(snapshot))
  )
  if expected != types:
    raise ValueError(f"adopt: snapshot must be of this model and outer optimizer; got {types}.")
  held = copy_tree(jax.tree.map(jnp.asarray, tuple(snapshot)))
  center, outer_state = _laid_out(held, (worker.kept.center, worker.kept.outer_state))
  adopted = fresh.replace(center=center, outer_state=outer_state)
  return worker.moved_to(copy_tree(center), params, state, adopted, is_replaced=True)


@dataclasses.dataclass(frozen=True)
class _One:
  """One fragment of one worker."""

  rule: LocalSteps
  fragment: Fragment
  part: Tree  # of the parameters
  kept: Any

  @classmethod
  def of(cls, function: str, tx: Any, state: Any, params: Tree, fragment: int) -> "_One":
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
    own = self.fragment.take(column)
    whole = self.fragment.with_part(own, ends)
    new = jax.tree.map(lambda x, e: e.astype(x.dtype), own, whole)
    self.fragment.write(column, _laid_out(new, own))
    # A center may have replaced parameters that were not finite.
    is_lost = ~_participation.is_finite(self.moved, ()) & is_replaced
    state = self.with_kept(state.replace(restarts=state.restarts | is_lost), kept)
    return jax.tree.unflatten(jax.tree.structure(params), column), state

  def absorbed(self, tx, state, params, ordered, staleness, weighs):
    """The parameters and state, and with `weighs` what each message has added."""
    reduction, kept, found = self.rule.reduction, self.kept, [] if weighs else None
    if reduction is None:
      arrived = map(self._arrived(staleness, kept.center), ordered)
      merged = _merge.summed(arrived, kept.center, found)
      if weighs and self.rule.is_mean:
        found = _merge.shares(found, merged.total)
    else:
      with jax.default_device(_merge.host()):
        arrived = list(map(self._arrived(staleness), ordered))
        merged, states = _merge.reduced(reduction, arrived, kept.center)
        found = _merge.coefficients(arrived, merged.sums) if weighs else None
      sums = _laid_out(merged.sums, kept.center)
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
    return params, state, found

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
      difference = difference if layout is None else _laid_out(difference, layout)
      return _merge.Arrived.of(difference, weight, self.rule.sent_state(parts, self.kept))

    return arrived

  def _with_own_state(self, ordered, arrived, states):
    """What is kept, with the new state of the reduction if this worker's message counts."""
    kept, sent = self.kept, self.kept.sent
    for i, message in enumerate(ordered if sent is not None else ()):
      if np.array_equal(fingerprint(message.parts), sent) and arrived[i].weight > 0:
        state = jax.tree.map(lambda x, i=i: x[i], states)
        return kept.replace(reduction_state=_laid_out(state, kept.reduction_state))
    return kept


def _laid_out(tree, like):
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


def _fragment_of(messages):
  for message in messages:
    if not isinstance(message, Message):
      raise TypeError(f"absorb: messages must hold what message returned, got {message!r}.")
  numbers = sorted({message.fragment for message in messages})
  if len(numbers) != 1:
    raise ValueError(f"absorb: messages must be of one fragment, got {numbers}.")
  return numbers[0]


def _check(function, found, needed, before=None):
  """Raises for a message that cannot be absorbed."""
  given, wanted = (
    [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(one)] for one in (found, needed)
  )
  if given != wanted:
    what = f"{function}: the message of {found.sender!r} belongs to another model or codec"
    raise ValueError(f"{what}: needed {wanted}, got {given}.")
  weight = float(found.weight)
  if not (np.isfinite(weight) and weight >= 0):
    what = f"the weight of the message of {found.sender!r} must be finite and at least 0"
    raise ValueError(f"{function}: {what}, got {weight}.")
  if before is not None and (before.age, before.sender) == (found.age, found.sender):
    raise ValueError(f"{function}: two messages are of {found.sender!r} and age {found.age}.")
