"""A NumPy simulator of nested optimizer wrappers on N shards.

The fuzz test compares the JAX code with this module, so nothing here is shared with that code.
Every array is float64 (or int for counters) and has the shards on axis 0. The shards lie on the
named axes of `world`, an ordered dict of name to size, in row-major order. A group over some axes
is the set of shards which agree on their index along all the other axes.

A node has `init(params)`, which returns its state (a dict), and `update(updates, state, params,
call)`, which returns the new updates and the new state. No node changes its inputs in place.
"""

import dataclasses
import itertools

import numpy as np
from reference_reductions import mixing_matrix


@dataclasses.dataclass(frozen=True)
class Call:
  """The arguments besides the updates: `weight` is [N] (or [N, towers] for ReduceTowers)."""

  world: dict
  weight: object = None
  stamp: object = None


def num_shards(world):
  return int(np.prod(list(world.values()), dtype=int))


def groups(world, axes):
  """The groups over `axes`: a list of lists of shard indices, each in increasing order."""
  assert set(axes) <= set(world), (axes, world)
  found = {}
  coordinates = itertools.product(*[range(size) for size in world.values()])
  for shard, coordinate in enumerate(coordinates):
    key = tuple(c for name, c in zip(world, coordinate) if name not in axes)
    found.setdefault(key, []).append(shard)
  return list(found.values())


def group_sum(world, axes, values):
  """The sum of `values` over each group, given to every shard of the group."""
  result = np.zeros_like(values)
  for members in groups(world, axes):
    result[members] = values[members].sum(axis=0)
  return result


def spread(values, like):
  """Appends axes of size 1 to `values` until it has as many axes as `like`."""
  return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def select(mask, new, old):
  """The new state on the shards where `mask` holds and the old state elsewhere."""
  if isinstance(new, dict):
    return {key: select(mask, new[key], old[key]) for key in new}
  return np.where(spread(mask, new), new, old)


def product(a, b):
  """The product a * b, which is exactly 0 where either factor is 0."""
  return np.where((a == 0) | (b == 0), 0.0, a * b)


def effective_weight(call, shape):
  """The weight, in the given shape: [N] or [N, towers]."""
  if call.weight is None:
    return np.ones(shape)
  weight = np.asarray(call.weight, float)
  return np.broadcast_to(spread(weight, np.zeros(shape)), shape)


def weigh(weight, updates):
  """The weighted updates, which are 0 where the weight is 0 even if the update is not finite."""
  return np.where(spread(weight == 0, updates), 0.0, spread(weight, updates) * updates)


def divide(total, weight):
  """The quotient total / weight, which is 0 where the weight is 0."""
  weight = spread(weight, total)
  return np.where(weight == 0, 0.0, total / np.where(weight == 0, 1.0, weight))


def finite_or_zero(values):
  """The values, and 0 where they are not finite."""
  return np.where(np.isfinite(values), values, 0.0)


def takes_weight(node, axes):
  """Whether a reduction over some of the axes is inside."""
  if isinstance(node, CrossShard) and set(node.axes) & set(axes):
    return True
  return not isinstance(node, Sgd) and takes_weight(node.inner, axes)


@dataclasses.dataclass(frozen=True)
class Jit:
  """A node whose update is traced separately, which changes no result."""

  inner: object

  def init(self, params):
    return {"inner": self.inner.init(params)}

  def update(self, updates, state, params, call):
    updates, inner = self.inner.update(updates, state["inner"], params, call)
    return updates, {"inner": inner}


@dataclasses.dataclass(frozen=True)
class Sgd:
  """Gradient descent with momentum."""

  rate: float
  momentum: float

  def init(self, params):
    return {"trace": np.zeros_like(params)}

  def update(self, updates, state, params, call):
    # Without momentum there is no state: 0 * NaN would keep a NaN forever.
    trace = self.momentum * state["trace"] + updates if self.momentum else updates
    return -self.rate * trace, {"trace": trace}


@dataclasses.dataclass(frozen=True)
class Clip:
  """Clips each element of the updates to [-limit, limit]; NaN stays NaN."""

  limit: float
  inner: object

  def init(self, params):
    return {"inner": self.inner.init(params)}

  def update(self, updates, state, params, call):
    updates = np.clip(updates, -self.limit, self.limit)
    updates, inner = self.inner.update(updates, state["inner"], params, call)
    return updates, {"inner": inner}


@dataclasses.dataclass(frozen=True)
class CrossShard:
  """Reduces the updates over each group; `nonfinite="drop"` leaves out non-finite shards.

  With `sent`, a code transmits that fraction of its input, and the rest is kept for the next call:
  by each shard, and in groups of three, of which each member owns a third of every variable, also
  of the sums. Variables of three rows cannot be divided by four, and are sent in full. Whether the
  inner state is `divided` over the shards makes no difference here.
  """

  axes: tuple
  reduction: str
  nonfinite: object
  inner: object
  sent: float = 1.0
  divided: bool = False

  def init(self, params):
    kept = {"residual": np.zeros_like(params), "owner": np.zeros_like(params)}
    return {"nonfinite": np.zeros(len(params), int), "inner": self.inner.init(params), **kept}

  def encoded_sum(self, world, parts, state):
    """The sums that arrive, and the residuals."""
    size = len(groups(world, self.axes)[0])
    kept = {"residual": state["residual"], "owner": state["owner"]}
    if self.sent == 1.0 or size not in (2, 3):
      return group_sum(world, self.axes, parts), kept
    wanted = parts + state["residual"]
    result, owner = group_sum(world, self.axes, self.sent * wanted), state["owner"]
    if size == 3:
      total = result + owner
      result = self.sent * total
      owner = finite_or_zero(total - result)
    return result, {"residual": finite_or_zero(wanted - self.sent * wanted), "owner": owner}

  def update(self, updates, state, params, call):
    assert self.reduction in ("mean", "sum"), self.reduction
    drop = self.nonfinite == "drop"
    weight = effective_weight(call, updates.shape[:1])
    nonfinite = state["nonfinite"]
    if drop:
      bad = ~np.isfinite(updates).all(axis=1)
      weight = np.where(bad, 0.0, weight)
      nonfinite = nonfinite + group_sum(call.world, self.axes, bad.astype(int))
    total = group_sum(call.world, self.axes, weight)
    parts = weigh(weight, updates)
    if self.reduction == "mean":
      parts = divide(parts, total)
    result, kept = self.encoded_sum(call.world, parts, state)
    if self.sent != 1.0:  # if no shard has a weight, nothing moves
      some = group_sum(call.world, self.axes, weight) != 0
      result = np.where(spread(some, result), result, 0.0)
      kept = select(some, kept, {name: state[name] for name in kept})
    is_weighed = self.reduction == "mean" and (call.weight is not None or drop)
    inner_call = dataclasses.replace(call, weight=total if is_weighed else None)
    result, inner = self.inner.update(result, state["inner"], params, inner_call)
    if drop:
      result = np.where(spread(total != 0, result), result, 0.0)
      inner = select(total != 0, inner, state["inner"])
      kept = select(total != 0, kept, {name: state[name] for name in kept})
    return result, {"nonfinite": nonfinite, "inner": inner, **kept}


@dataclasses.dataclass(frozen=True)
class GatherTowers:
  """Accumulates the updates of `num_towers` calls and then makes one inner step."""

  num_towers: int
  reduction: str
  inner: object

  def init(self, params):
    count = len(params)
    return {
      "tower": np.zeros(count, int),
      "total": np.zeros(count),
      "accumulated": np.zeros_like(params),
      "inner": self.inner.init(params),
    }

  def update(self, updates, state, params, call):
    assert self.reduction in ("mean", "sum"), self.reduction
    mean = self.reduction == "mean"
    weight = effective_weight(call, updates.shape[:1])
    tower = state["tower"] + 1
    total = state["total"] + weight
    accumulated = state["accumulated"] + weigh(weight, updates)
    result = divide(accumulated, total) if mean else accumulated
    is_weighed = mean and call.weight is not None
    inner_call = dataclasses.replace(call, weight=total if is_weighed else None)
    result, inner = self.inner.update(result, state["inner"], params, inner_call)
    full = tower == self.num_towers
    gathered = {"tower": tower, "total": total, "accumulated": accumulated}
    empty = {key: np.zeros_like(value) for key, value in gathered.items()}
    gathered = select(full, empty, gathered)
    result = np.where(spread(full, result), result, 0.0)
    return result, {**gathered, "inner": select(full, inner, state["inner"])}


@dataclasses.dataclass(frozen=True)
class ReduceTowers:
  """Reduces updates [N, towers, n] over the towers."""

  reduction: str
  inner: object

  def init(self, params):
    return {"inner": self.inner.init(params)}

  def update(self, updates, state, params, call):
    assert self.reduction in ("mean", "sum"), self.reduction
    mean = self.reduction == "mean"
    weight = effective_weight(call, updates.shape[:2])
    total = weight.sum(axis=1)
    result = weigh(weight, updates).sum(axis=1)
    result = divide(result, total) if mean else result
    is_weighed = mean and call.weight is not None
    inner_call = dataclasses.replace(call, weight=total if is_weighed else None)
    result, inner = self.inner.update(result, state["inner"], params, inner_call)
    return result, {"inner": inner}


@dataclasses.dataclass(frozen=True)
class DropStale:
  """Leaves out the shards whose stamp is too old; without a stamp every shard is fresh.

  With a `weight` (age -> weight) it weights what it keeps: "gradients" absolutely, "relative" by
  their mean, "updates" relatively with the mean on the update.
  """

  max_staleness: int
  axes: tuple
  inner: object
  weight: object = None
  scale: str = "gradients"

  def init(self, params):
    count = len(params)
    return {
      "step": np.zeros(count, int),
      "dropped": np.zeros(count, int),
      "inner": self.inner.init(params),
    }

  def update(self, updates, state, params, call):
    stamp = state["step"] if call.stamp is None else np.asarray(call.stamp)
    age = state["step"] - stamp
    fresh = age <= self.max_staleness
    weight = fresh * (1.0 if self.weight is None else self.weight(np.maximum(age, 0)))
    fresh = weight > 0
    num_fresh = group_sum(call.world, self.axes, fresh.astype(int))
    size = group_sum(call.world, self.axes, np.ones(len(fresh), int))
    live = num_fresh > 0
    mean = divide(group_sum(call.world, self.axes, weight), num_fresh)
    updates = weigh(weight if self.scale == "gradients" else divide(weight, mean), updates)
    handed = call.weight
    if self.axes and takes_weight(self.inner, self.axes):
      handed = product(effective_weight(call, fresh.shape), fresh.astype(float))
    elif self.axes:
      updates = updates * spread(size / np.maximum(num_fresh, 1), updates)
    inner_call = dataclasses.replace(call, weight=handed, stamp=None)
    result, inner = self.inner.update(updates, state["inner"], params, inner_call)
    result = np.where(spread(live, result), result, 0.0)
    if self.scale == "updates":
      result = weigh(mean, result)
    return result, {
      "step": state["step"] + live,
      "dropped": state["dropped"] + size - num_fresh,
      "inner": select(live, inner, state["inner"]),
    }


@dataclasses.dataclass(frozen=True)
class SimulateWorkers:
  """Steps with the gradient of the worker that arrives, in a given order."""

  num_workers: int
  order: tuple
  inner: object

  def init(self, params):
    count = len(params)
    return {
      "call": np.zeros(count, int),
      "reader": np.zeros(count, int),
      "stamp": np.zeros((count, self.num_workers), int),
      "gradients": np.zeros((count, self.num_workers, params.shape[1])),
      "inner": self.inner.init(params),
    }

  def update(self, updates, state, params, call):
    number, reader = int(state["call"][0]), int(state["reader"][0])
    applied = max(number - self.num_workers + 1, 0)
    clock = stale_step(self.inner, state["inner"])
    gradients, stamp = state["gradients"].copy(), state["stamp"].copy()
    gradients[:, reader], stamp[:, reader] = updates, applied if clock is None else clock
    if number < self.num_workers - 1:  # some have not read yet
      result, inner, reader = np.zeros_like(params), state["inner"], number + 1
    else:
      reader = self.order[applied % len(self.order)]
      inner_call = dataclasses.replace(call, stamp=stamp[:, reader])
      result, inner = self.inner.update(gradients[:, reader], state["inner"], params, inner_call)
    return result, {
      "call": state["call"] + 1,
      "reader": np.full(len(params), reader),
      "stamp": stamp,
      "gradients": gradients,
      "inner": inner,
    }


@dataclasses.dataclass(frozen=True)
class Elastic:
  """Pulls the params of a group and their center toward each other every `period` steps."""

  axes: tuple
  period: int
  alpha: float
  rho: float
  exchange: str
  inner: object

  def init(self, params):
    return {
      "step": np.zeros(len(params), int),
      "center": params.copy(),
      "pulled": params.copy(),
      "inner": self.inner.init(params),
    }

  def update(self, updates, state, params, call):
    assert self.exchange in ("simultaneous", "sequential"), self.exchange
    if self.rho:
      pull = self.rho * (params - state["pulled"])
      updates = updates + (pull if updates.ndim == 2 else pull[:, None, :])
    updates, inner = self.inner.update(updates, state["inner"], params, call)
    step = state["step"] + 1
    before = params + updates
    x, center, pulled = before.copy(), state["center"].copy(), state["center"].copy()
    if self.exchange == "simultaneous":
      distance = before - state["center"]
      x = before - self.alpha * distance
      center = state["center"] + self.alpha * group_sum(call.world, self.axes, distance)
    else:
      for members in groups(call.world, self.axes):
        current = state["center"][members[0]].copy()
        for shard in members:
          distance = before[shard] - current
          pulled[shard] = current
          x[shard] = before[shard] - self.alpha * distance
          current = current + self.alpha * distance
        center[members] = current
    due = step % self.period == 0
    x = select(due, x, before)
    return x - params, {
      "step": step,
      "center": select(due, center, state["center"]),
      "pulled": select(due, pulled, state["pulled"]),
      "inner": inner,
    }


def begun_again(node, state, again):
  """The state with the moments of the shards in `again` as at the start; counts, and the centers of
  exchanges inside, go on."""
  moments = {Sgd: ["trace"], GatherTowers: ["total", "accumulated"]}.get(type(node), [])
  start = {name: np.zeros_like(state[name]) for name in moments}
  new = select(again, start, {name: state[name] for name in moments})
  if "inner" in state:
    new["inner"] = begun_again(node.inner, state["inner"], again)
  return {**state, **new}


@dataclasses.dataclass(frozen=True)
class LocalSteps:
  """Every `period` steps the params of a group move to a center that moves with Nesterov momentum
  by the mean of (center - params), or without a `rate` to their mean.

  A shard whose params are not finite is left out of the mean, and moves to the center too, if its
  params were finite before this step; its moments begin again in the next. If all are left out, a
  center stands still, and they move to it; without a `rate` nobody has a mean, and they stay.
  """

  axes: tuple
  period: int
  rate: object
  decay: float
  inner: object

  def init(self, params):
    return {
      "step": np.zeros(len(params), int),
      "center": params.copy(),
      "trace": np.zeros_like(params),
      "again": np.zeros(len(params), bool),
      "inner": self.inner.init(params),
    }

  def update(self, updates, state, params, call):
    inner = begun_again(self.inner, state["inner"], state["again"])
    updates, inner = self.inner.update(updates, inner, params, call)
    before = params + updates
    step = state["step"] + 1
    x, center, trace = before.copy(), state["center"].copy(), state["trace"].copy()
    again = np.zeros(len(params), bool)
    for members in groups(call.world, self.axes):
      present = [shard for shard in members if np.isfinite(before[shard]).all()]
      if step[members[0]] % self.period:
        continue
      if present or self.rate is not None:
        again[members] = ~np.isfinite(before[members]).all(axis=1)
      if self.rate is None:
        if present:
          x[members] = before[present].mean(axis=0)
        continue
      if present:
        away = center[members[0]] - before[present].mean(axis=0)
        trace[members] = away + self.decay * trace[members[0]]
        center[members] -= self.rate * (away + self.decay * trace[members[0]])
      x[members] = center[members]
    # A NaN plus anything is NaN.
    x = np.where(np.isfinite(params), x, np.nan)
    kept = {"center": center, "trace": trace, "again": again}
    return x - params, {"step": step, "inner": inner, **kept}


@dataclasses.dataclass(frozen=True)
class Gossip:
  """Every `period` steps the workers of a group average with their neighbors of that round, after
  their own steps or, with "combine_first", before them."""

  axes: tuple
  period: int
  topology: str
  order: str
  inner: object

  def init(self, params):
    return {"step": np.zeros(len(params), int), "inner": self.inner.init(params)}

  def update(self, updates, state, params, call):
    updates, inner = self.inner.update(updates, state["inner"], params, call)
    step, x = state["step"] + 1, params + updates
    for members in groups(call.world, self.axes):
      if step[members[0]] % self.period:
        continue
      number = step[members[0]] // self.period - 1
      matrix = mixing_matrix(self.topology, len(members), number)
      at = x[members] if self.order == "adapt_first" else params[members]
      # A worker that is not a neighbor sends nothing, not even a NaN.
      mixed = np.array([sum(w * at[j] for j, w in enumerate(row) if w) for row in matrix])
      x[members] = mixed if self.order == "adapt_first" else mixed + updates[members]
    return x - params, {"step": step, "inner": inner}


@dataclasses.dataclass(frozen=True)
class PrimalAverage:
  """GPA: the inner step moves z, x is the running mean of z, and params are between them."""

  mu_y: float
  mu_x: float
  inner: object

  def init(self, params):
    return {"z": params.copy(), "inner": self.inner.init(params)}

  def update(self, updates, state, params, call):
    z = state["z"]
    x = (params - (1 - self.mu_y) * z) / self.mu_y
    moves, inner = self.inner.update(updates, state["inner"], z, call)
    z = z + moves
    x = self.mu_x * x + (1 - self.mu_x) * z
    return self.mu_y * x + (1 - self.mu_y) * z - params, {"z": z, "inner": inner}


@dataclasses.dataclass(frozen=True)
class ClipVariables:
  """Scales rows of the new params down to the L2 norm `limit`; other rows stay as they are.

  With `only_touched` these are the rows with a nonzero gradient.
  """

  limit: float
  only_touched: bool
  rows: int
  inner: object

  def init(self, params):
    return {"inner": self.inner.init(params)}

  def update(self, updates, state, params, call):
    result, inner = self.inner.update(updates, state["inner"], params, call)
    matrix = (params + result).reshape(len(params), self.rows, -1)
    norm = np.sqrt((matrix**2).sum(axis=2))
    clipped = np.isfinite(norm) & (norm > self.limit)
    if self.only_touched:
      gradient = updates.reshape(len(params), -1, self.rows, matrix.shape[2])
      clipped = clipped & (gradient != 0).any(axis=(1, 3))
    scaled = matrix * (self.limit / np.where(clipped, norm, 1.0))[:, :, None]
    new_params = np.where(clipped[:, :, None], scaled, matrix).reshape(params.shape)
    return new_params - params, {"inner": inner}


def stale_step(node, state):
  """The per-shard step of the outermost DropStale in `node`; None if there is none."""
  while not isinstance(node, DropStale):
    if not hasattr(node, "inner"):
      return None
    node, state = node.inner, state["inner"]
  return state["step"].copy()


def run(node, params, calls, world, state=None):
  """Makes one update for each (updates, weight, stamp) of `calls`; returns params and state.

  `params` is [n], the same start for all shards, or [N, n]. The updates are an array or a function
  of the params [N, n]. With a `state` the run continues from it.
  """
  params = np.asarray(params, float)
  params = np.broadcast_to(params, (num_shards(world), params.shape[-1])).copy()
  state = node.init(params) if state is None else state
  with np.errstate(invalid="ignore", over="ignore"):
    for updates, weight, stamp in calls:
      updates = np.asarray(updates(params) if callable(updates) else updates, float)
      call = Call(world, weight, stamp)
      updates, state = node.update(updates, state, params, call)
      params = params + updates
  return params, state
