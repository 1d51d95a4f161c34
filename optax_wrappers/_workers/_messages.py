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
from optax_wrappers._core._states import copy_tree
from optax_wrappers._core._types import STATIC, Tree
from optax_wrappers._workers import _center, _participation
from optax_wrappers._workers._local_steps import LocalStepsState
from optax_wrappers._workers._lone_worker import LoneWorker, laid_out
from optax_wrappers._workers._merge import Contribution

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
  worker = LoneWorker.of("message", tx, state, params, fragment)
  if weight is None:
    raise TypeError("message: weight must be a real scalar, got None.")
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
  worker = LoneWorker.of("absorb", tx, state, params, fragment)
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
  worker = LoneWorker.of("take_back", tx, state, params, message.fragment)
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
  worker = LoneWorker.of("adopt", tx, state, params, fragment)
  fresh = worker.rule.init(worker.part, _center.WorkerGroup(()))
  expected, types = (
    jax.tree.map(lambda x: (jnp.shape(x), _numerics.dtype_of(x)), tree)
    for tree in ((fresh.center, fresh.outer_state), tuple(snapshot))
  )
  if expected != types:
    raise ValueError(f"adopt: snapshot must be of this model and outer optimizer; got {types}.")
  held = copy_tree(jax.tree.map(jnp.asarray, tuple(snapshot)))
  center, outer_state = laid_out(held, (worker.kept.center, worker.kept.outer_state))
  adopted = fresh.replace(center=center, outer_state=outer_state)
  return worker.moved_to(copy_tree(center), params, state, adopted, is_replaced=True)


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
  forms, expected = (
    [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(one)] for one in (found, needed)
  )
  if forms != expected:
    what = f"{function}: the message of {found.sender!r} belongs to another model or codec"
    raise ValueError(f"{what}: needed {expected}, got {forms}.")
  weight = float(found.weight)
  if not (np.isfinite(weight) and weight >= 0):
    what = f"the weight of the message of {found.sender!r} must be finite and at least 0"
    raise ValueError(f"{function}: {what}, got {weight}.")
  if before is not None and (before.age, before.sender) == (found.age, found.sender):
    raise ValueError(f"{function}: two messages are of {found.sender!r} and age {found.age}.")
