"""Simulates asynchronous workers and their server, one gradient after another."""

import fractions
import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_wrappers._core import _axes, _branches, _checks, _numerics, _paths, _states
from optax_wrappers._core._states import instances, require_same, require_state
from optax_wrappers._core._types import Tree
from optax_wrappers._late._staleness_aware import StalenessState
from optax_wrappers.contrib._delay_compensation import DelayCompensationState
from optax_wrappers.states import filled_slots, read_slot, write_slot

Arrivals: TypeAlias = ArrayLike | Sequence[int] | Callable[[jax.Array], jax.Array] | None


@_states.dataclass
class SimulatedWorkersState(_states.State):
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

  call: jax.Array = _states.field("lockstep")
  reader: jax.Array = _states.field("lockstep")
  computed_at: jax.Array = _states.field("shared")
  gradients: Tree = _states.field("per_shard", slots=True)
  computed_params: Tree = _states.field(slots=True)
  inner_state: Tree


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
  wrapper = "simulate_workers"
  inner = _checks.optimizer(wrapper, inner)
  num_workers = _checks.integer(wrapper, "num_workers", num_workers, minimum=1)
  arrives = _check_arrivals(wrapper, arrivals, num_workers)

  def init_fn(params):
    inner_state = inner.init(params)
    clocks = list(instances(inner_state, StalenessState))
    if len(clocks) > 1:
      what = f"{wrapper}: inner holds {len(clocks)} wrappers that count their own steps"
      mend = "Weight or drop once, outside: staleness_aware(optax.partition(...))."
      raise ValueError(f"{what}; only one can. {mend}")
    if callable(arrivals):
      _check_first_arrivals(wrapper, arrives, num_workers)
    compensates = any(instances(inner_state, DelayCompensationState))
    return SimulatedWorkersState(
      call=jnp.zeros((), jnp.int32),
      reader=jnp.zeros((), jnp.int32),
      computed_at=jnp.zeros(num_workers, jnp.int32),
      gradients=filled_slots(jax.tree.map(_zeros, params), num_workers),
      computed_params=filled_slots(params, num_workers) if compensates else None,
      inner_state=inner_state,
    )

  def update_fn(updates, state, params=None, **extra_args):
    require_state(wrapper, state, SimulatedWorkersState)
    made_for = {"num_workers": state.computed_at.shape[0]}
    require_same(wrapper, made_for, {"num_workers": num_workers})
    for name in ("computed_at", "computed_params", "weight"):
      if extra_args.pop(name, None) is not None:
        mend = f"Put {wrapper} outside of a wrapper that weights gradients."
        why = "because inner steps with an earlier gradient"
        raise ValueError(f"{wrapper}: {name} cannot be given, {why}. {mend}")
    updates = _checks.inexact(wrapper, updates)
    num_applied = jnp.maximum(state.call - (num_workers - 1), 0)  # t, the number of this arrival
    found = next(instances(state.inner_state, StalenessState), None)
    clock = num_applied if found is None else found.step
    # Written before anything is read, so that XLA updates in place.
    gradients = _written(wrapper, state.gradients, updates, state.reader)
    computed_at = write_slot(state.computed_at, clock, state.reader)  # its version
    computed_params = state.computed_params
    if computed_params is not None:
      params = _checks.params_given(wrapper, params)
      computed_params = write_slot(computed_params, params, state.reader)

    all_have_read = state.call >= num_workers - 1
    # Until then inner's step is discarded. It still uses the reader's gradient, because its
    # derivative at a gradient of zeros may be NaN.
    worker = jnp.where(all_have_read, arrives(num_applied), state.reader)
    if found is not None:
      extra_args["computed_at"] = read_slot(computed_at, worker)
    if computed_params is not None:
      extra_args["computed_params"] = read_slot(computed_params, worker)
    arrived = _arrived(gradients, updates, worker)

    def update(inner_state):
      return inner.update(arrived, inner_state, params, **extra_args)

    new_updates, inner_state = _branches.update_if(
      all_have_read, update, state.inner_state, wrapper, "SimulatedWorkersState.call"
    )
    return new_updates, SimulatedWorkersState(
      call=_numerics.saturating_add(state.call, jnp.int32(1)),
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
  wrapper = "arrival_order"
  num_updates = _checks.integer(wrapper, "num_updates", num_updates, minimum=1)
  times = np.asarray(seconds, float)
  if times.ndim != 1 or not times.size or not (np.isfinite(times) & (times > 0)).all():
    raise ValueError(f"{wrapper}: seconds must be finite times above 0, got {seconds!r}.")
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


def _zeros(x):
  """Storage for a gradient, which may have a wider dtype than its parameter."""
  return jnp.zeros_like(x, _numerics.at_least_float32(_numerics.dtype_of(x)))


def _check_arrivals(wrapper, arrivals, num_workers):
  """A function from the index of an arrival to its worker."""
  if arrivals is None:
    return lambda t: t % num_workers
  if callable(arrivals):
    return lambda t: _checks.scalar(wrapper, "arrivals", arrivals(t), jnp.integer).astype(jnp.int32)
  order = np.asarray(arrivals)
  if order.ndim != 1 or not order.size or not np.issubdtype(order.dtype, np.integer):
    given = f"{order.dtype}{list(order.shape)}"
    raise TypeError(f"{wrapper}: arrivals must be ints [T] or a function, got {given}.")
  _check_workers(wrapper, order, num_workers, "the list holds")
  order = order.astype(np.int32)
  return lambda t: jnp.asarray(order)[t % len(order)]


def _check_first_arrivals(wrapper, arrives, num_workers):
  """Raises if a user's function returns a worker that does not exist."""
  if not _axes.can_evaluate():
    return
  with jax.ensure_compile_time_eval():
    found = [arrives(jnp.int32(t)) for t in range(2 * num_workers)]
  if not any(isinstance(worker, jax.core.Tracer) for worker in found):
    _check_workers(wrapper, np.array(list(map(int, found))), num_workers, "the function returned")


def _check_workers(wrapper, workers, num_workers, source):
  wrong = workers[(workers < 0) | (workers >= num_workers)]
  if wrong.size:
    what = f"{wrapper}: arrivals must be from 0 to num_workers - 1 = {num_workers - 1}"
    raise ValueError(f"{what}, and {source} {wrong[0]}.")


def _written(wrapper, slots, updates, slot):
  """The slots with these updates in one of them; a leaf without an update stays."""
  _checks.same_shapes(wrapper, updates, jax.eval_shape(lambda x: read_slot(x, 0), slots))
  new = _checks.same_structure(wrapper, updates, _paths.without_axis(slots))
  return write_slot(slots, jax.tree.structure(_paths.without_axis(slots)).unflatten(new), slot)


def _arrived(slots, updates, slot):
  """The content of a slot, in the structure and dtypes of the updates."""
  leaves, treedef = jax.tree.flatten(read_slot(slots, slot))
  like = zip(leaves, treedef.flatten_up_to(updates), strict=True)
  return treedef.unflatten([None if u is None else x.astype(u.dtype) for x, u in like])
