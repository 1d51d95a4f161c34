"""Simulates asynchronous workers and their server, one gradient after another."""

import fractions
import heapq
import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_wrappers import states
from optax_wrappers.contrib import _gradients, _inner
from optax_wrappers.contrib._delay_compensation import DelayCompensationState

Arrivals: TypeAlias = ArrayLike | Sequence[int] | Callable[[jax.Array], jax.Array] | None


@states.dataclass
class SimulatedWorkersState(states.State):
  """State of `simulate_workers`, with M workers.

  Attributes:
    call: gradients given so far; int32 scalar.
    reader: the worker that read the parameters last, whose gradient comes next; int32 scalar.
    computed_at: the step at which each worker read its parameters; int32 `[M]`.
    gradients: each worker's gradient, each leaf `[M, ...]`, float32 or wider, each shard's own.
    computed_params: the parameters that each worker read, each leaf `[M, ...]`; None unless `inner`
      compensates delays.
    inner_state: state of the wrapped optimizer.
  """

  may_skip = True

  call: jax.Array = states.field("lockstep")
  reader: jax.Array = states.field("lockstep")
  computed_at: jax.Array = states.field("shared")
  gradients: Any = states.field("per_shard", slots=True)
  computed_params: Any = states.field(slots=True)
  inner_state: Any


def simulate_workers(
  inner: optax.GradientTransformation, num_workers: int, arrivals: Arrivals = None
) -> optax.GradientTransformationExtraArgs:
  """Trains as `num_workers` asynchronous workers and a parameter server would, on one device.

  Each call passes the gradient of the current parameters, as in any training loop. It belongs to
  the worker that read them last, and is stored until that worker's turn. In the first M - 1 calls
  the workers read, and nothing moves. In each later call, worker `arrivals[t]` arrives: `inner`
  steps with its gradient, and the worker reads the new parameters. `staleness_aware` inside gets
  `computed_at`, and `delay_compensation` gets `computed_params`.

  Args:
    inner: the optimizer that the server runs.
    num_workers: M, at least 1. With 1 it is exactly `inner`.
    arrivals: the worker of the t-th arrival: ints `[T]`, from `arrival_order` or a log, repeated
      after the T-th; or a function of the int32 scalar t. None: a round robin.

  Returns:
    The wrapped optimizer, with a `SimulatedWorkersState`. Its `reader` is the worker whose data the
    next gradient needs.

  Raises:
    TypeError, ValueError: for a number of workers below 1, or arrivals that are no ints below it;
      in init, for more than one `StalenessState` inside; in update, for integer updates, missing
      params where delays are compensated, and the extra args below.

  Extra args:
    computed_at, computed_params, weight: an error, because `inner` steps with another gradient than
      the one given. All others reach `inner`, in the calls that step it.

  **Communication**: that of `inner`, in every call.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.contrib.simulate_workers(optax.sgd(0.5), num_workers=2)
    >>> params = jnp.array(1.0)
    >>> state = tx.init(params)
    >>> for _ in range(3):
    ...   updates, state = tx.update(params, state)  # of params**2 / 2
    ...   params = optax.apply_updates(params, updates)
    ...   print(params, state.reader)
    1.0 1
    0.5 0
    0.0 1

  Source: the asynchronous SGD of parameter servers (Dean et al. 2012, DistBelief).
  """
  inner = _inner.checked("simulate_workers", inner)
  if not isinstance(num_workers, numbers.Integral) or num_workers < 1:
    raise ValueError(f"simulate_workers: num_workers must be at least 1, got {num_workers!r}.")
  arrives = arrivals if callable(arrivals) else _repeated(arrivals, num_workers)

  def init_fn(params):
    inner_state = inner.init(params)
    _require_one_clock(inner_state)
    # Inside shard_map no value is known.
    if callable(arrivals) and not jax.sharding.get_abstract_mesh().manual_axes:
      with jax.ensure_compile_time_eval():
        first = jnp.stack([arrives(jnp.int32(t)) for t in range(2 * num_workers)])
      _require_workers(first, num_workers)
    gradients = jax.tree.map(lambda x: jnp.zeros_like(x, _gradients.wide_dtype(x)), params)
    compensates = _gradients.instances(inner_state, DelayCompensationState)
    return SimulatedWorkersState(
      call=jnp.zeros((), jnp.int32),
      reader=jnp.zeros((), jnp.int32),
      computed_at=jnp.zeros(num_workers, jnp.int32),
      gradients=states.filled_slots(gradients, num_workers),
      computed_params=states.filled_slots(params, num_workers) if compensates else None,
      inner_state=inner_state,
    )

  def update_fn(updates, state, params=None, **extra_args):
    _check_call(state, num_workers, extra_args)
    of_worker = jax.eval_shape(lambda slots: states.read_slot(slots, 0), state.gradients)
    updates = _gradients.checked("simulate_workers", updates, of_worker)
    # t, the number of this arrival.
    num_applied = jnp.maximum(state.call - (num_workers - 1), 0)
    clocks = _gradients.instances(state.inner_state, states.StalenessState)
    step = clocks[0].step if clocks else num_applied
    # Written before anything is read, so that XLA updates in place.
    gradients = states.write_slot(state.gradients, updates, state.reader)
    computed_at = states.write_slot(state.computed_at, step, state.reader)
    computed_params = _with_params(state, params)

    all_have_read = state.call >= num_workers - 1
    # Until then inner's step is discarded. It still uses the reader's gradient, because its
    # derivative at a gradient of zeros may be NaN.
    worker = jnp.where(all_have_read, jnp.asarray(arrives(num_applied), jnp.int32), state.reader)
    if clocks:
      extra_args["computed_at"] = states.read_slot(computed_at, worker)
    if computed_params is not None:
      extra_args["computed_params"] = states.read_slot(computed_params, worker)
    arrived = states.read_slot(gradients, worker)
    arrived = jax.tree.map(lambda g, u: u if u is None else g.astype(u.dtype), arrived, updates)
    # Collectives in inner run in every step, so that no shard waits for another.
    new_updates, inner_state = inner.update(arrived, state.inner_state, params, **extra_args)

    new_updates, inner_state = _inner.taken_if(
      all_have_read, new_updates, inner_state, state.inner_state
    )
    return new_updates, state.replace(
      call=optax.safe_increment(state.call),
      reader=jnp.where(all_have_read, worker, state.call + 1),
      computed_at=computed_at,
      gradients=gradients,
      computed_params=computed_params,
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def arrival_order(
  seconds: Sequence[float], num_updates: int, *, seed: int | None = None
) -> np.ndarray:
  """The order in which workers of unequal speed push their gradients, for `simulate_workers`.

  All start together. Of two that push at the same time the lower index is first.

  Args:
    seconds: the time each worker needs for a gradient, finite and above 0, in any unit of time.
    num_updates: the number of arrivals, at least 1.
    seed: if given, times are drawn from exponential distributions with these means; else exact.

  Returns:
    int32 `[num_updates]`, the worker of each arrival.

  Examples:
    >>> import optax_wrappers as ow
    >>> print(ow.contrib.arrival_order([1.0, 2.5], 6))
    [0 0 1 0 0 0]
  """
  if not isinstance(num_updates, numbers.Integral) or num_updates < 1:
    raise ValueError(f"arrival_order: num_updates must be at least 1, got {num_updates!r}.")
  times = np.asarray(seconds, float)
  if times.ndim != 1 or not times.size or not (np.isfinite(times) & (times > 0)).all():
    raise ValueError(f"arrival_order: seconds must be finite times above 0, got {seconds!r}.")
  rng = None if seed is None else np.random.default_rng(seed)

  def duration(worker):
    # As a decimal fraction: three times 0.1 is exactly 0.3, unlike in floating point.
    mean = float(times[worker])
    return fractions.Fraction(repr(mean)) if rng is None else rng.exponential(mean)

  due = [(duration(worker), worker) for worker in range(len(times))]
  heapq.heapify(due)
  order = np.empty(num_updates, np.int32)
  for i in range(num_updates):
    now, worker = due[0]  # who finishes first
    order[i] = worker
    heapq.heapreplace(due, (now + duration(worker), worker))
  return order


def _repeated(arrivals, num_workers):
  """The worker of each arrival, as a function of its number, from a list; None: a round robin."""
  order = np.arange(num_workers) if arrivals is None else np.asarray(arrivals)
  _require_workers(order, num_workers)
  return lambda t: jnp.asarray(order)[t % len(order)]


def _require_one_clock(inner_state):
  num_clocks = len(_gradients.instances(inner_state, states.StalenessState))
  if num_clocks > 1:
    raise ValueError(
      f"simulate_workers: inner holds {num_clocks} wrappers that count their own steps; only one"
      " can. Weight or drop once, outside: staleness_aware(optax.partition(...))."
    )


def _check_call(state, num_workers, extra_args):
  """Raises for another state, and for extra args that `inner` cannot have."""
  if not isinstance(state, SimulatedWorkersState):
    raise TypeError(f"simulate_workers: state must be a SimulatedWorkersState, got {state!r}.")
  if len(state.computed_at) != num_workers:
    raise ValueError(
      f"simulate_workers: the state was made for num_workers={len(state.computed_at)}, and this"
      f" is {num_workers}. Pass that number, or start again with tx.init(params)."
    )
  for name in ("computed_at", "computed_params", "weight"):
    if extra_args.pop(name, None) is not None:
      raise ValueError(
        f"simulate_workers: {name} cannot be given, because inner steps with an earlier gradient."
        " Put simulate_workers outside of a wrapper that weights gradients."
      )


def _with_params(state, params):
  """The `computed_params` of a state, with those that its reader reads."""
  if state.computed_params is None:
    return None
  if params is None:
    raise ValueError("simulate_workers: params is needed: tx.update(updates, state, params).")
  now = jax.tree.map(jnp.asarray, params)
  return states.write_slot(state.computed_params, now, state.reader)


def _require_workers(workers, num_workers):
  """Raises for anything but the indices of workers, or abstract ones."""
  if workers.ndim != 1 or not workers.size or not jnp.issubdtype(workers.dtype, jnp.integer):
    raise TypeError(
      "simulate_workers: arrivals must be ints [T], or a function to an int scalar, got"
      f" {workers.dtype}{list(workers.shape)}."
    )
  if isinstance(workers, jax.core.Tracer):
    return
  workers = np.asarray(workers)
  wrong = workers[(workers < 0) | (workers >= num_workers)]
  if wrong.size:
    raise ValueError(
      f"simulate_workers: arrivals must be from 0 to num_workers - 1 = {num_workers - 1}, got"
      f" {wrong[0]}."
    )
