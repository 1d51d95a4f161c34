"""Local SGD, DiLoCo and related algorithms: local steps, and one synchronization per round."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

import jax
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _checks, _states
from optax_wrappers._core._types import Absent, AxisName, InnerState, MeanOrSum, Tree
from optax_wrappers._shards import _compress
from optax_wrappers._workers._engine import exchanging
from optax_wrappers._workers._exchange_state import ExchangeState
from optax_wrappers._workers._inner_state import policy_of
from optax_wrappers._workers._outer_step import LocalSteps
from optax_wrappers.codecs import AnyCodec, Compression
from optax_wrappers.reductions import Reduction


@_states.dataclass
class LocalStepsState(ExchangeState):
  """State of `local_steps`: an `ExchangeState` that keeps a `Center` of each fragment with `outer`.

  The following are tuples with an entry for each fragment, or None.

  Attributes:
    outer_state: the states of the outer optimizer, each with counters of its own.
    reduction_state: those of the `reduction`.
    compressed: with a codec, each `CompressedState`.
  """

  outer_state = property(lambda self: self.of_fragments("outer_state"))
  reduction_state = property(lambda self: self.of_fragments("reduction_state"))
  compressed = property(lambda self: self.of_fragments("compressed"))


def local_steps(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  communication_period: int | Callable[[jax.Array], ArrayLike] | None = 10,
  fragments: int | Tree = 1,
  delay: int = 0,
  outer: optax.GradientTransformation | None = None,
  reduction: MeanOrSum | Reduction | optax.GradientTransformation = "mean",
  codec: AnyCodec | Compression | None = None,
  pull: ArrayLike = 1.0,
  inner_state: InnerState | Mapping[str, int] = "keep",
  absent: Absent = "pull",
  shard_center: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Local SGD, DiLoCo and FedAvg: workers take local steps and synchronize once per round.

  Each of W workers has its own parameters `x_i` and inner state; the center `c` is shared and in
  the state. A step of worker i is

      x_i <- x_i + inner(g_i)
      and after the last step of each round:
        D   = mean_i (c - x_i)            the pseudo-gradient
        c   <- c + outer(D)
        x_i <- x_i + pull (c - x_i)       with pull 1: c

  With `outer=None` there is no center, and the workers take their mean: local SGD. DiLoCo, SlowMo,
  BMUF, FedAvg, Lookahead and others are arguments of this function; the documentation has a table.
  Evaluate and save `center_params(state)`, which is float32 or wider, or, with `outer=None`, any
  worker right after a synchronization.

  Args:
    inner: the optimizer of each worker.
    axis_name: the axis or axes of the workers; None: one worker.

  Args: Schedule
    communication_period: steps per round, at least 1. Or a function from the step at which a round
      begins, an int32 scalar, to an integer scalar. Every round has at least `delay` steps, or
      `delay + 1` with a `pull` of 1. None: the extra arg `exchange` or messages decide
      (`exchange.message`).
    fragments: sets of variables, each with its own outer state, synchronized in different steps of
      a round. An int P: P sets of adjacent variables with about equal bytes. Or a tree of fragment
      numbers, from 0, with the structure of the parameters or a prefix of it; for a stack of layers
      an array, one number for each entry of the first axis, such as
      `exchange.stripes(num_layers, 2)`, or `exchange.AlongAxis(array, axis)`. Fragment k of P is
      synchronized at step `(k + 1) * communication_period // P` of a round.
    delay: steps between sending and arriving, at most a round. The center moves when
      pseudo-gradients are sent; `delay` steps later the workers move to it, and keep `1 - pull` of
      the steps in between.

  Args: Outer step
    outer: any Optax optimizer. Its schedules count synchronizations, not steps.
    reduction: how pseudo-gradients are combined. "mean"; with `outer` also "sum", one of
      `optax_wrappers.reductions`, or a transformation that ends in a reduction, such as
      `all_reduce(axis_name)`. It gets this worker's `center - params`, zeros if it is absent, and
      the extra arg `weight` if `participation` is given. Each worker has its own state of it. If it
      returns only zeros, for example because it has rejected every worker, the center stays.
    codec: compresses the pseudo-gradients, scaled by the worker's share of the weights; see
      `all_reduce`. Needs `outer` and a `reduction` of "mean" or "sum"; not with `shard_center`.
    pull: the mixing coefficient: how far a worker moves to the new center, in [0, 1]; `1 - alpha`
      of Streaming DiLoCo.

  Args: State of the workers
    inner_state: what happens to a worker's inner state at a synchronization. "keep": nothing.
      "reset": `inner.init` again. "average": the mean over the workers. Or the fields to average
      and how often, such as `{"mu": 3, "nu": 6}` of Adam: at every third and sixth synchronization.
      This needs one fragment and no delay.
    absent: whether a worker with participation 0 takes the center ("pull") or continues alone
      ("keep").
    shard_center: whether each of W workers stores and computes 1/W of the center and the outer
      state: the same results up to rounding, for the same bytes. Needs an elementwise `outer`, such
      as sgd or adam. `stack_workers` divides both.

  Returns:
    The wrapped optimizer, with a `LocalStepsState`. `init` takes one worker's parameters;
    `stack_workers` gives every worker its own state. update needs params.

  Raises:
    ValueError: for arguments out of range or that contradict each other; in update, for an axis
      that is not bound, missing params, or params that are typed as equal on all workers.
    TypeError: for arguments of a wrong type; in update, for a traced `exchange`.

  **Extra args**, each optional. All others reach `inner`; in nested wrappers these are for the
  outermost.

  - `participation`: this worker's weight in a synchronization, a real scalar, at least 0, such as
    its number of examples; default 1. A worker with a NaN or an infinity in its variables has 0. If
    all are absent, center and outer state do not change, and the workers take this center ("pull").
    A robust `reduction` takes no weights.
  - `exchange`: what to synchronize in this step, a Python bool or the numbers of fragments, equal
    on all workers; None: the counter decides. The counter always advances. False compiles to a step
    of `inner` alone. With `updates=None` there is a synchronization and no step.
  - `arrival`: with a delay, the same for what arrives in this step.

  **Communication**: nothing between synchronizations. A synchronization sends every parameter once,
  in the center's dtype, as an all-reduce, and 4 bytes for the sum of the weights; with
  `shard_center` as a reduce-scatter and, on arrival, an all-gather; with a `codec` or another
  `reduction` as described there. Averaged parts of the inner state are sent when they are averaged.

  Examples:
    Two workers, only one with a nonzero gradient; heavy-ball momentum as the outer optimizer:

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> options = {"communication_period": 1, "outer": optax.sgd(1.0, 0.5)}
    >>> tx = ow.local_steps(optax.sgd(1.0), "workers", **options)
    >>> params = ow.stack_workers(jnp.array(0.0), 2)
    >>> state = ow.stack_workers(tx.init(jnp.array(0.0)), 2)
    >>> update = jax.jit(ow.map_workers(tx.update, "workers"))
    >>> for _ in range(2):
    ...   updates, state = update(jnp.array([-1.0, 0.0]), state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   print(params, ow.center_params(state))
    [0.5 0.5] 0.5
    [1.25 1.25] 1.25

  Source: Stich, "Local SGD converges fast and communicates little" (2018); Douillard et al.,
  "DiLoCo" (2023), algorithm 1, and "Streaming DiLoCo with overlapping communication" (2025).
  """
  wrapper = "local_steps"
  policy = policy_of(wrapper, inner_state, fragments, delay)
  rule = _rule(wrapper, axis_name, outer, reduction, codec, pull, absent, shard_center)
  return _made(
    wrapper, inner, axis_name, rule, communication_period, fragments, delay, policy, shard_center
  )


def _made(
  wrapper, inner, axis_name, rule, communication_period, fragments, delay, policy, shard_center
):
  return exchanging(
    wrapper,
    inner,
    axis_name,
    rule,
    LocalStepsState,
    communication_period=communication_period,
    fragments=fragments,
    delay=delay,
    shard_center=shard_center,
    undoes=rule.pull_rate is None,
    policy=policy,
    outer=rule.outer is not None,
    reduction="mean or sum" if rule.reduction is None else "a transformation",
    codec=rule.compression is not None,
  )


def _rule(wrapper, axis_name, outer, reduction, codec, pull, absent, shard_center):
  _checks.choice(wrapper, "absent", absent, get_args(Absent))
  pull = _checks.number(wrapper, "pull", pull, lambda x: 0 <= x <= 1, "in [0, 1]")
  reducer = _reducer(wrapper, reduction)
  _check_outer_given(wrapper, axis_name, outer, reduction, shard_center, codec)
  return LocalSteps(
    pull_rate=None if isinstance(pull, float) and pull == 1 else pull,
    outer=None if outer is None else _checks.optimizer(wrapper, outer, "outer"),
    reduction=reducer,
    compression=_compression(wrapper, codec, axis_name),
    is_mean=reduction == "mean",
    keeps_absent=absent == "keep",
  )


def _compression(wrapper, codec, axis_name):
  """The compression of the differences, or None."""
  compression = _compress.Compressor.make(wrapper, codec)
  if compression is None or axis_name is not None or compression.is_linear:
    return compression
  # With one worker, or with messages, there is no compressed sum.
  recodes = compression.codec.recodes or False
  return dataclasses.replace(compression, codec=compression.codec._replace(recodes=recodes))


def _reducer(wrapper, reduction):
  """What replaces the weighted mean or sum, or None."""
  if isinstance(reduction, Reduction):
    return reduction
  if isinstance(reduction, optax.GradientTransformation):
    return _checks.optimizer(wrapper, reduction, "reduction")
  _checks.choice(wrapper, "reduction", reduction, get_args(MeanOrSum))
  return None


def _check_outer_given(wrapper, axis_name, outer, reduction, shard_center, codec):
  """Raises for arguments that contradict each other."""
  needs_outer = {
    'a reduction other than "mean"': reduction != "mean",
    "shard_center": shard_center,
    "codec": codec is not None,
  }
  given = [name for name, is_given in needs_outer.items() if is_given]
  if given and outer is None:
    mend = "outer=optax.sgd(1.0) takes the mean."
    raise ValueError(f"{wrapper}: {given[0]} needs an outer optimizer. {mend}")
  # What arrives in messages is decoded before it is reduced.
  is_compressed = codec is not None and axis_name is not None
  if (not isinstance(reduction, str)) + shard_center + is_compressed > 1:
    raise ValueError(
      f"{wrapper}: only one of these can be used: a reduction other than the mean or the sum, a"
      " codec, and shard_center."
    )


# In other libraries and in the papers.
_NAMES_ELSEWHERE = {
  "H": "it is communication_period",
  "sync_every": "it is communication_period",
  "outer_lr": "it is outer_learning_rate",
  "momentum": "it is outer_momentum",
  "alpha": "it is pull, which is 1 - alpha",
  "fragment_update_alpha": "it is pull, which is 1 - alpha",
  "tau": "it is delay",
  "fragment_sync_delay": "it is delay",
  "num_fragments": "it is fragments",
  "outer": "use outer_learning_rate and outer_momentum, or local_steps for another optimizer",
  "reduction": "local_steps has it, with outer=optax.sgd(0.7, momentum=0.9, nesterov=True)",
}


@_checks.spelled(**_NAMES_ELSEWHERE)
def diloco(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  communication_period: int | Callable[[jax.Array], ArrayLike] | None = 500,
  fragments: int | Tree = 1,
  delay: int = 0,
  outer_learning_rate: Any = 0.7,
  outer_momentum: float = 0.9,
  codec: AnyCodec | Compression | None = None,
  pull: ArrayLike = 1.0,
  inner_state: InnerState | Mapping[str, int] = "keep",
  absent: Absent = "pull",
  shard_center: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """DiLoCo: `local_steps` with Nesterov momentum as the outer optimizer and the paper's defaults.

  State, extra args and errors are those of `local_steps`, which describes the shared arguments.

  Args:
    inner: the optimizer of each worker; the paper's is AdamW.
    axis_name: the axis or axes of the workers; None: one worker.

  Args: Schedule
    communication_period: steps per round.
    fragments: sets of variables, or of layers, that are synchronized together.
    delay: steps between sending and arriving.

  Args: Outer step
    outer_learning_rate: learning rate of the outer `optax.sgd`, a number or a schedule over
      synchronizations. 0.7 was tuned for rounds of 500 steps; published alternatives are 0.3 for 36
      steps, and 0.4 with a delay.
    outer_momentum: momentum of the outer `optax.sgd`.
    codec: compresses the pseudo-gradients.
    pull: the mixing coefficient; with `fragments` and `delay` this is Streaming DiLoCo.

  Args: State of the workers
    inner_state: what happens to a worker's inner state at a synchronization.
    absent: whether an absent worker takes the center or continues alone.
    shard_center: whether each worker stores a share of the center.

  Returns:
    The wrapped optimizer, with a `LocalStepsState`.

  **Communication**: that of `local_steps`.

  Source: Douillard et al., "DiLoCo: distributed low-communication training of language models"
  (2023), algorithm 1.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> options = {"communication_period": 10, "outer_learning_rate": 0.3}
    >>> tx = ow.diloco(optax.sgd(0.1), "workers", **options)
    >>> def step(params, state, target):
    ...   updates, state = tx.update(params - target, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> start = jnp.zeros(2)
    >>> params, state = ow.stack_workers((start, tx.init(start)), 4)
    >>> step = jax.jit(ow.map_workers(step, "workers"))
    >>> # Each worker has its own target, and takes 10 local steps.
    >>> for _ in range(1000):
    ...   params, state = step(params, state, jnp.arange(8.0).reshape(4, 2))
    >>> print(ow.center_params(state).round(2))
    [3. 4.]
  """
  _warn_of_momentum(codec, outer_momentum)
  wrapper = "diloco"
  outer = optax.sgd(outer_learning_rate, momentum=outer_momentum, nesterov=True)
  policy = policy_of(wrapper, inner_state, fragments, delay)
  rule = _rule(wrapper, axis_name, outer, "mean", codec, pull, absent, shard_center)
  return _made(
    wrapper, inner, axis_name, rule, communication_period, fragments, delay, policy, shard_center
  )


def _warn_of_momentum(codec, outer_momentum):
  if codec is None or isinstance(outer_momentum, jax.core.Tracer) or not outer_momentum:
    return
  coded = _compress.settings(codec)
  if coded.feedback and coded.codec.feedback == "needed":
    warnings.warn(
      f"diloco: {coded.codec.name} with feedback under an outer momentum of {outer_momentum} does"
      " worse than without feedback: the momentum repeats late contributions. Pass"
      " outer_momentum=0.0 with codecs.compression(codec, decay=0.95), in which the residual is the"
      " momentum, or a codec of every entry, such as codecs.quantize(bits=4).",
      stacklevel=4,
    )
