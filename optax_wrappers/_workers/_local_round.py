"""A round of local steps as one program, in which communication overlaps with computation."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_wrappers._core import _numerics
from optax_wrappers._core._states import instances
from optax_wrappers._workers._exchange_state import ExchangeState


def local_round(
  step: Callable[..., Any], tx: optax.GradientTransformationExtraArgs
) -> Callable[..., Any]:
  """A round of `diloco`, `local_steps` or `elastic_average` as one function of its batches.

  It sends, scans `delay` steps while communication is in flight, applies what arrives, and scans
  the rest. Without a delay it scans all steps and then synchronizes. The parameters equal those of
  as many calls of `update` with the counter, up to rounding. With a delay, it sends at the
  beginning of a round what `update` sends at the end of the previous one: do not mix the two.

  Args:
    step: `step(params, state, batch) -> (params, state, ...)`, one worker's step. It calls
      `tx.update(grads, state, params, exchange=False)`.
    tx: the optimizer of `state`, whose period, fragments and delay it has. In a chain, a
      synchronization is a call with None for the updates, which transformations that store updates
      cannot handle.

  Returns:
    `round(params, state, batches, participation=None) -> (params, state, ...)`: every leaf of
    `batches`, and of its other results, has a leading axis of length `communication_period`.
    `participation` is this worker's weight in what the call sends. Map the function over the
    workers like a step, `jax.jit(map_workers(round, axis_name))`.

  Raises:
    ValueError: in the round, for batches of another length; for a `tx` without such a wrapper, or
      with two; for a `communication_period` that is a function or None.

  **Communication**: that of `tx` in one round.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_wrappers as ow
    >>> tx = ow.diloco(
    ...   optax.sgd(0.1), "workers", communication_period=4, delay=1
    ... )
    >>> def step(params, state, x):
    ...   grads = jax.grad(lambda p: (p - x) ** 2)(params)
    ...   updates, state = tx.update(grads, state, params, exchange=False)
    ...   return optax.apply_updates(params, updates), state
    >>> round = ow.local_round(step, tx)
    >>> train = jax.jit(ow.map_workers(round, "workers"))
    >>> params = ow.stack_workers(jnp.array(0.0), 2)
    >>> state = ow.stack_workers(tx.init(jnp.array(0.0)), 2)
    >>> params, state = train(params, state, jnp.ones((2, 4)))
    >>> print(jnp.round(params, 2), int(state.step))
    [0.59 0.59] 4

  Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025).
  """

  def run(params, state, batches, participation=None):
    period, sends, arrivals = _timetable(tx, params)
    for path, leaf in jax.tree.leaves_with_path(batches):
      if not leaf.shape or leaf.shape[0] != period:
        raise ValueError(
          f"local_round: batches must have a leading axis of communication_period, {period} steps;"
          f" batches{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}."
        )
    times = sorted({0, period} | set(sends) | set(arrivals))
    outputs = []
    for time, following in zip(times, [*times[1:], None]):
      if time in sends or time in arrivals:
        asked = {"exchange": sends.get(time, ()), "participation": participation}
        if arrivals:
          asked["arrival"] = arrivals.get(time, ())
        # An exchange, and no step.
        updates, state = tx.update(None, state, params, **asked)
        params = _numerics.apply_updates(params, updates)
      if following is not None:
        part = jax.tree.map(operator.itemgetter(slice(time, following)), batches)
        (params, state), out = jax.lax.scan(one, (params, state), part)
        outputs.append(out)
    return params, state, *jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)

  def one(carry, batch):
    params, state, *out = step(*carry, batch)
    return (params, state), tuple(out)

  return run


def _timetable(tx, params):
  """The steps of a round; by the number of steps before, the fragments that are sent and arrive."""
  exchanges = list(instances(jax.eval_shape(tx.init, params), ExchangeState))
  if len(exchanges) != 1:
    classes = ", ".join(type(state).__name__ for state in exchanges) or "none"
    raise ValueError(
      "local_round: tx must hold one wrapper over workers, such as diloco, local_steps or"
      f" elastic_average; it holds {classes}."
    )
  schedule = exchanges[0].workers.schedule
  period, plan, delay = (schedule[name] for name in ("period", "plan", "delay"))
  if not isinstance(period, int):
    raise ValueError(f"local_round: communication_period of tx must be an int, got {period!r}.")
  sends: dict[int, list[int]] = {}
  arrivals: dict[int, list[int]] = {}
  for fragment in plan:
    time = fragment.phase(period)
    if delay:
      # What is due at the end of a round is sent at the beginning of the next program, where it
      # can overlap with computation. What is in flight at the end of a program arrives in the next.
      time %= period
      arrival = (time + delay - 1) % period + 1
      arrivals.setdefault(arrival, []).append(fragment.number)
    sends.setdefault(time, []).append(fragment.number)
  return period, sends, arrivals
