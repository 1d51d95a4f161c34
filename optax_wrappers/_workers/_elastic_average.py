"""Elastic averaging SGD: workers explore on their own, linked by a center."""

import dataclasses
import functools
import warnings
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_wrappers._core import _axes, _checks, _numerics, _states
from optax_wrappers._core._types import STATIC, AxisName, AxisNames, Order, Tree
from optax_wrappers._workers import _center, _participation
from optax_wrappers._workers._center import Center
from optax_wrappers._workers._engine import exchanging
from optax_wrappers._workers._exchange_state import ExchangeState
from optax_wrappers._workers._rule import Rule

# The paper's beta = workers x moving_rate x period; TensorFlow's default divides it by both.
BETA = 0.9


@_states.dataclass
class ElasticKept(Center):
  """The state of a fragment of `elastic_average`.

  Attributes:
    pulled_center: the center as this worker last pulled it; None unless rho needs it.
  """

  pulled_center: Tree = None


@_states.dataclass
class ElasticAverageState(ExchangeState):
  """State of `elastic_average`: an `ExchangeState` with a center, and `pulled_center`."""

  @property
  def pulled_center(self) -> Tree:
    """The center as this worker last pulled it, same structure as params; None without rho."""
    return self.joined("pulled_center")


def elastic_average(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  communication_period: int = 10,
  fragments: int | Tree = 1,
  delay: int = 0,
  moving_rate: ArrayLike | None = None,
  rho: ArrayLike | None = None,
  learning_rate: ArrayLike | None = None,
  order: Order = "simultaneous",
  shard_center: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Elastic averaging SGD (EASGD): workers and a shared center move toward each other.

  Each of W workers has its own parameters `x_i` and inner state; the center `c` is shared and in
  the state. A step of worker i is (in the paper's symbols alpha is `moving_rate`, tau is
  `communication_period`)

      g_i <- g_i + rho (x_i - lc_i)     lc_i: the center that worker i last received
      x_i <- x_i + inner(g_i)
      and after the tau-th step of each round:
        d_i = x_i - c;   x_i <- x_i - alpha d_i;   c <- c + alpha sum_i d_i

  A synchronization conserves `sum_i x_i + c`. Evaluate and save the center, which is float32 or
  wider: `center_params(state)`.

  Args:
    inner: the optimizer of each worker.
    axis_name: the axis or axes of the workers; None: one worker.

  Args: Schedule
    communication_period: steps between two synchronizations, at least 1.
    fragments: sets of variables that are synchronized together; see `local_steps`.
    delay: steps between sending and arriving, at most a period. The center moves when differences
      are sent; `delay` steps later each worker moves by `alpha d_i` as sent. 1 is the order of the
      paper: differences are taken before a step and applied after it.

  Args: Elastic force
    moving_rate: the fraction of its distance to the center by which a worker moves, in (0, 1];
      default `0.9 / communication_period / num_workers`.
    rho: strength of the pull to the last received center in every gradient, at least 0. It goes
      through `inner`. Default `moving_rate / learning_rate` if a learning rate is given, else 0.
    learning_rate: that of `inner`, a number above 0; only used for the default of `rho`.

  Args: Center
    order: "simultaneous": all workers use one center. "sequential": worker 0, then 1, ..., each
      uses the center after the previous worker, as in TensorFlow's tests.
    shard_center: whether each worker stores a share of the center; see `local_steps`.

  Returns:
    The wrapped optimizer, with an `ElasticAverageState`. `init` takes one worker's parameters;
    `stack_workers` gives every worker its own state. update needs params.

  Raises:
    ValueError: for arguments out of range; in update, for an unbound axis, missing params, or
      params that are typed as equal on all workers.
    TypeError: for arguments of a wrong type, such as a schedule for learning_rate.

  Warns:
    UserWarning: if `moving_rate > 2 / (num_workers + 1)`: a simultaneous synchronization then
      diverges.

  **Extra args**: `exchange` and `arrival`, see `local_steps`. `participation`: with 0, or with a
  NaN in its variables, this worker does not participate: its parameters stay, and it does not
  affect the center. Any number above 0 counts as 1. Without `participation` all take part, and a
  NaN on one worker reaches all. All other extra args reach `inner`.

  **Communication**: nothing between synchronizations. A synchronization sends every parameter once,
  as an all-reduce of the differences ("simultaneous"; with `shard_center` its two halves) or an
  all-gather of the workers ("sequential"; with `shard_center` one of the center too).

  Examples:
    Two workers, only one with a nonzero gradient:

    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> options = {"communication_period": 1, "moving_rate": 0.25}
    >>> tx = ow.elastic_average(optax.sgd(1.0), "workers", **options)
    >>> params = ow.stack_workers(jnp.array(0.0), 2)
    >>> state = ow.stack_workers(tx.init(jnp.array(0.0)), 2)
    >>> update = jax.jit(ow.map_workers(tx.update, "workers"))
    >>> updates, state = update(jnp.array([-1.0, 0.0]), state, params)
    >>> print(optax.apply_updates(params, updates), ow.center_params(state))
    [0.75 0.  ] 0.25

  Source: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD" (2015), section 3,
  in the order of tf.contrib.opt.ElasticAverageOptimizer: the synchronization follows the inner step
  and uses the updated parameters.
  """
  wrapper = "elastic_average"
  period = _checks.integer(wrapper, "communication_period", communication_period, minimum=1)
  _checks.choice(wrapper, "order", order, get_args(Order))
  number = functools.partial(_checks.number, wrapper)
  if moving_rate is not None:
    moving_rate = number("moving_rate", moving_rate, lambda x: 0 < x <= 1, "in (0, 1]")
  if rho is not None:
    rho = number("rho", rho, lambda x: x >= 0, "at least 0")
  if learning_rate is not None:
    requirement = "above 0 (for a schedule pass rho instead)"
    learning_rate = number("learning_rate", learning_rate, lambda x: x > 0, requirement)
  elif rho is None:
    rho = 0.0
  # The two kinds of exchange differ only in the rule.
  rule_class = _Simultaneous if order == "simultaneous" else _RoundRobin
  rule = rule_class(moving_rate, rho, learning_rate, period, _axes.axis_names(axis_name))
  return exchanging(
    wrapper,
    inner,
    axis_name,
    rule,
    ElasticAverageState,
    communication_period=period,
    fragments=fragments,
    delay=delay,
    shard_center=shard_center,
    rho=rule.pulls,
  )


@dataclasses.dataclass(frozen=True)
class _Elastic(Rule):
  """What simultaneous and sequential exchanges share.

  Attributes:
    moving_rate: alpha; None: its default, which depends on the number of workers.
    rho: strength of the pull; None: its default, which depends on alpha.
    learning_rate: for the default of rho.
    period: for the default of alpha.
    names: the axes of the workers.
  """

  moving_rate: Any
  rho: Any
  learning_rate: Any
  period: int = dataclasses.field(metadata=STATIC)
  names: AxisNames = dataclasses.field(metadata=STATIC)

  @property
  def pulls(self) -> bool:
    """Whether the pulled center is stored."""
    # An array may be an injected number, which may change later.
    return not isinstance(self.rho, int | float) or self.rho != 0

  def init(self, params, workers):
    pulled = _center.copied(params) if self.pulls else None
    return ElasticKept(center=workers.start(params), pulled_center=pulled)

  def idle(self, params):
    read = _center.copied(params)
    return read if self.pulls else None, jax.tree.map(jnp.zeros_like, read)

  @property
  def alpha(self) -> Any:
    """The moving rate; its default, `beta / (tau W)`, is known only in a step."""
    if self.moving_rate is not None:
      return self.moving_rate
    return BETA / self.period / lax.axis_size(self.names)

  def pull(self, updates, params, kept):
    if kept.pulled_center is None:
      return updates
    rho = self.alpha / self.learning_rate if self.rho is None else self.rho
    return jax.tree.map(
      lambda u, x, c: u + _numerics.times(rho, x.astype(c.dtype) - c).astype(u.dtype),
      updates,
      params,
      kept.pulled_center,
    )

  def merge(self, moved, params, sent, kept, workers):
    """`x_i <- x_i - alpha d_i`, and stores the center that it pulled."""
    pulled, distances = sent
    ends = jax.tree.map(lambda x, d: x - _numerics.times(self.alpha, d), moved, distances)
    return ends, kept.replace(pulled_center=pulled)

  def to_merge(self, moved, read, kept, goes):
    """The input of `merge`: the center as this worker last pulled it, and `d_i`."""
    pulled = kept.pulled_center
    if pulled is not None:
      pulled = read if goes is None else _numerics.select(goes, read, pulled)
    return pulled, _distances(moved, read, goes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Simultaneous(_Elastic):
  """All workers read the same center: `c <- c + alpha sum_i d_i`."""

  def pull(self, updates, params, kept):
    _warn_if_unstable(self.alpha, lax.axis_size(self.names))
    return super().pull(updates, params, kept)

  def send(self, moved, params, kept, workers):
    # c, the same on all workers.
    read = workers.whole(kept.center, params)
    sent = self.to_merge(moved, read, kept, _participation.goes(workers))
    new = _after(kept.center, self.alpha, workers.sum(sent[1]))
    return kept.replace(center=new), sent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _RoundRobin(_Elastic):
  """Worker 0, then 1, ...: each reads the center as its predecessor left it."""

  def send(self, moved, params, kept, workers):
    # c, as worker 0 reads it.
    whole = workers.whole(kept.center, params)
    # Each worker computes the whole round robin in the same order, instead of W consecutive
    # messages.
    goes = _participation.goes(workers)
    everyone = workers.all_gather((moved, goes))  # x_0, x_1, ...
    start = whole, jnp.asarray(self.alpha)
    # c at the end, and as each read it.
    (last, _), read_by = lax.scan(_visit, start, everyone)
    index = workers.index
    sent = self.to_merge(moved, jax.tree.map(lambda c: c[index], read_by), kept, goes)
    return kept.replace(center=workers.share(last)), sent


def _warn_if_unstable(alpha, num_workers):
  if not isinstance(alpha, jax.core.Tracer) and float(alpha) > 2 / (num_workers + 1):
    warnings.warn(
      f"elastic_average: moving_rate {alpha} is above 2 / (num_workers + 1) ="
      f" {2 / (num_workers + 1):.3g} for {num_workers} workers; the exchange is unstable. Lower it,"
      ' or use order="sequential".',
      stacklevel=2,
    )


def _distances(moved, read, goes):
  """`d_i = x_i - c`; zero for a worker that does not participate."""
  d = jax.tree.map(jnp.subtract, moved, read)
  return d if goes is None else _numerics.zeros_unless(goes, d)


def _after(center, alpha, distances):
  """The center after it has moved toward workers at these distances."""
  return jax.tree.map(lambda c, d: c + _numerics.times(alpha, d), center, distances)


def _visit(carried, worker):
  """One worker's exchange: the center after it, and the center that it read."""
  # Outside of jit a scan compiles again for each new function, so this one closes over nothing.
  (center, alpha), (moved, goes) = carried, worker
  return (_after(center, alpha, _distances(moved, center, goes)), alpha), center
