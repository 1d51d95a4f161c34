"""Random nestings of wrappers and inner jits, in random contexts, with random weights, stamps and
NaNs, compared with NumPy.

    python -m pytest tests/fuzz --tier full --fuzz-cases 10000 --fuzz-seed 1

Each case is saved in the middle, as by a checkpoint: only one copy is kept of what a layout calls
shared.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference as ref
import reference_staleness
from helpers import AXIS, CONTEXTS, Net, in_context
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_wrappers as ow

SHAPE, SIZE = (3, 2), 6

SCALES = ["gradients", "relative", "updates"]

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2}


# The reference's weight by age, and the library's.
POLICIES = {
  reference_staleness.inverse(): ow.staleness.inverse(),
  reference_staleness.polynomial(0.7): ow.staleness.polynomial(0.7),
  reference_staleness.cosine_gate(2): ow.staleness.cosine_gate(2),
}


# The parameters are three rows of two, in any of these forms; each from `[..., 3, 2]` and back.


def as_tree(x):
  """A list, as of layers, a box of Flax, and an array without elements."""
  rows = [x[..., i : i + 1, :] for i in range(3)]
  empty = jnp.zeros((*x.shape[:-2], 0, 2), x.dtype)
  return {"layers": rows[:2], "box": nn.Partitioned(rows[2], (None, None)), "empty": empty}


def of_tree(tree):
  return jnp.concatenate([*tree["layers"], tree["box"].value], -2)


def as_complex(x):
  """Two of the rows as complex numbers."""
  return {"z": jax.lax.complex(x[..., :2, :1], x[..., :2, 1:]), "x": x[..., 2:, :]}


def of_complex(tree):
  z = jnp.concatenate([tree["z"].real, tree["z"].imag], -1)
  return jnp.concatenate([z, tree["x"]], -2)


def as_boxed(x):
  """An array whose code has the same parts."""
  empty = jnp.zeros((*x.shape[:-2], 0, 2), x.dtype)
  return [{"layers": [nn.Partitioned(x, (None, None))]}, empty]


FORMS = {
  "array": (lambda x: x, lambda x: x),
  "boxed": (as_boxed, lambda tree: tree[0]["layers"][0].value),
  "tree": (as_tree, of_tree),
  "complex": (as_complex, of_complex),
  "model": (
    lambda x: Net(x[..., :1, :], x[..., 1:, :]),
    lambda net: jnp.concatenate([net.w, net.b], -2),
  ),
}


def nodes(node):
  yield node
  if hasattr(node, "inner"):
    yield from nodes(node.inner)


def form_of(case, number):
  """Parts of a code are not those of rows; complex numbers are not clipped by value."""
  form = list(FORMS)[number % len(FORMS)]
  is_coded = any(getattr(node, "sent", 1.0) != 1.0 for node in nodes(case.node))
  if form in ("tree", "complex", "model") and is_coded:
    return "boxed"
  is_clipped = any(isinstance(node, ref.Clip) for node in nodes(case.node))
  is_wide = case.dtype in ("float32", "float64")
  return "tree" if form == "complex" and (is_clipped or not is_wide) else form


@dataclasses.dataclass
class Case:
  """One program: a nesting, its context, and its inputs.

  Attributes:
    node: the nesting, as a node of `reference`.
    world: the mesh axes and their sizes.
    own: the axes over which every worker owns its parameters; over the others they are replicated.
    context: a key of CONTEXTS or PODS, or for two axes whether shard_map checks its types.
    dtype: of the gradients.
    weighted: whether every call has weights.
    stamp: "none", "one" for all shards, or "each".
    form: a key of FORMS, the form of the parameters.
  """

  node: Any
  world: dict
  own: tuple
  context: Any
  dtype: str
  weighted: bool
  stamp: str
  form: str = "array"


# Workers that are pods of two devices, with parameters sharded inside the pod.
PODS = {"pods": AxisType.Auto, "explicit pods": AxisType.Explicit}


def part_of_it(sent):
  """A codec that loses a part of everything, so that no rounding decides a comparison."""

  def encode(x):
    found = jax.lax.bitcast_convert_type(jnp.float32(sent) * x, jnp.uint8)
    return found.reshape(*x.shape[:-1], -1)

  def decode(code, n):
    return jax.lax.bitcast_convert_type(code.reshape(*code.shape[:-1], n, 4), jnp.float32)

  return ow.codecs.Codec(encode, decode, lambda n: 4 * n, applies_to=lambda shape: True)


def wrapped(node):
  """The library's optimizer for a nesting of the reference."""
  if isinstance(node, ref.Sgd):
    return optax.sgd(node.rate, momentum=node.momentum or None)
  inner = wrapped(node.inner)
  axes = getattr(node, "axes", ()) or None
  match node:
    case ref.Clip():
      return optax.chain(optax.clip(node.limit), inner)
    case ref.CrossShard():
      codec = None if node.sent == 1.0 else part_of_it(node.sent)
      options = {"reduction": node.reduction, "nonfinite": node.nonfinite, "codec": codec}
      return ow.cross_shard(inner, axes, shard_state=node.divided, **options)
    case ref.GatherTowers():
      return ow.gather_towers(inner, node.num_towers, reduction=node.reduction)
    case ref.DropStale():
      if node.weight is None:
        return ow.drop_stale(inner, node.max_staleness, axis_name=axes)
      how = {"normalize": True} if node.scale == "relative" else {"scale": node.scale}
      return ow.staleness_aware(
        inner, POLICIES[node.weight], max_staleness=node.max_staleness, axis_name=axes, **how
      )
    case ref.SimulateWorkers():
      return ow.contrib.simulate_workers(inner, node.num_workers, node.order)
    case ref.Elastic():
      numbers = {"communication_period": node.period, "moving_rate": node.alpha, "rho": node.rho}
      return ow.elastic_average(inner, axes, order=node.exchange, **numbers)
    case ref.LocalSteps():
      outer = None
      if node.rate is not None:
        outer = optax.sgd(node.rate, momentum=node.decay, nesterov=True)
      return ow.local_steps(inner, axes, communication_period=node.period, outer=outer)
    case ref.Gossip():
      options = {"communication_period": node.period, "order": node.order}
      return ow.contrib.gossip_average(inner, axes, topology=node.topology, **options)
    case ref.Jit():
      trace = (jax.jit, jax.checkpoint)[isinstance(node.inner, ref.CrossShard)]
      return optax.GradientTransformationExtraArgs(inner.init, trace(inner.update))
    case ref.ClipVariables():
      return ow.clip_variables(inner, node.limit, axes=1, only_touched=node.only_touched)


def has_mean(node):
  """Whether it contains a mean over shards."""
  if isinstance(node, ref.CrossShard) and node.axes and node.reduction == "mean":
    return True
  return not isinstance(node, ref.Sgd) and has_mean(node.inner)


def has_no_weights(node, is_weighted, is_handed_on=False):
  """Whether a sum consumes a weight that a wrapper outside has passed on to a mean behind it."""
  match node:
    case ref.Sgd():
      return False
    case ref.DropStale():
      is_weighted |= bool(node.axes) and ref.takes_weight(node.inner, node.axes)
      is_handed_on |= is_weighted
    case ref.GatherTowers() | ref.CrossShard():
      is_weighted |= getattr(node, "nonfinite", "") == "drop"
      if is_weighted and node.reduction == "sum":
        if is_handed_on and has_mean(node.inner):
          return True
        is_weighted = False
      is_handed_on = is_weighted
  return has_no_weights(node.inner, is_weighted, is_handed_on)


def cannot_be_divided(case):
  """Whether a share would be too short for the devices that already shard its dimension, which
  fails on an Explicit mesh."""
  count = case.world.get(AXIS)
  if case.context != "explicit pods" or not any(
    getattr(x, "divided", False) for x in nodes(case.node)
  ):
    return False

  def is_short(x):
    divided = next((d for d, n in enumerate(x.shape) if n % count == 0), int(np.argmax(x.shape)))
    is_sharded = divided == x.ndim - 1 and x.shape[-1] % 2 == 0
    return x.size > 0 and is_sharded and -(-x.shape[-1] // count) % 2 > 0

  variables = jax.eval_shape(FORMS[case.form][0], jnp.zeros(SHAPE))
  return any(map(is_short, jax.tree.leaves(variables)))


# Drawing a case.


def draw(rng):
  return [shards, workers, hosts, simulated][rng.choice(4, p=[0.3, 0.3, 0.25, 0.15])](rng)


def has_sum(node):
  """Whether a sum may overflow float16 where the mean of the same gradients does not."""
  return not isinstance(node, ref.Sgd) and (
    getattr(node, "reduction", "") == "sum" or has_sum(node.inner)
  )


def layers(rng, *names):
  """Some of the named layers, in random order; each a function from an inner node to the node
  around it."""
  chosen = [name for name in names if rng.random() < 0.45]
  rng.shuffle(chosen)
  return chosen


def build(rng, names, axes, sent=1.0):
  """Nests layers around an SGD; `axes` are those of the reductions and of per-shard stamps, and
  `sent` is what a code says of what is reduced."""
  node = ref.Sgd(0.1, float(rng.choice([0.0, 0.9])))
  for place, name in reversed(list(enumerate(names))):
    below = names[place + 1 :]
    reduction = str(rng.choice(["mean", "mean", "sum"]))
    match name:
      case "clip":
        node = ref.Clip(1.0, node)
      case "cross":
        drop = str(rng.choice(["propagate", "drop"]))
        # A projection of rows cannot be given shares of them.
        may_divide = sent == 1.0 and axes == (AXIS,) and "ball" not in below
        divided = may_divide and bool(rng.random() < 0.5)
        node = ref.CrossShard(axes, reduction, drop, node, sent, divided)
      case "finite":
        node = ref.CrossShard((), reduction, "drop", node)
      case "towers":
        node = ref.GatherTowers(2, reduction, node)
      case "stale" | "own stale":
        weight = [None, *POLICIES][rng.integers(len(POLICIES) + 1)]
        scale = "gradients" if weight is None else SCALES[rng.integers(3)]
        limit = int(rng.integers(0, 4))
        node = ref.DropStale(limit, axes if name == "stale" else (), node, weight, scale)
      case "simulated":
        count = int(rng.integers(1, 4))
        order = tuple(rng.integers(0, count, 5).tolist())
        node = ref.SimulateWorkers(count, order, node)
      case "ball":
        # Around what reduces, it would see a part of the gradient, and raises.
        touched = bool(rng.random() < 0.5) and not {"towers", "cross"} & set(below)
        node = ref.ClipVariables(0.8, touched, SHAPE[0], node)
      case "exchange":
        node = exchange(rng, axes, node)
      case "jit":
        node = ref.Jit(node)
  return node


def exchange(rng, axes, inner):
  """Workers that exchange over these axes, by one of the algorithms."""
  period = int(rng.integers(1, 4))
  if rng.random() < 0.25:
    topology = str(rng.choice(["exponential", "ring"]))
    order = str(rng.choice(["adapt_first", "combine_first"]))
    return ref.Gossip(axes, period, topology, order, inner)
  if rng.random() < 0.5:
    rate, decay = [(None, 0.0), (1.0, 0.0), (0.7, 0.5)][rng.integers(3)]
    return ref.LocalSteps(axes, period, rate, decay, inner)
  way = str(rng.choice(["simultaneous", "sequential"]))
  return ref.Elastic(axes, period, 0.2, float(rng.choice([0.0, 0.3])), way, inner)


def shards(rng):
  """Replicas of one set of parameters over one axis."""
  above = layers(rng, "stale", "ball", "clip", "towers", "jit")
  if "stale" not in above and rng.random() < 0.2:
    above.insert(0, "own stale")
  below = layers(rng, "clip", "ball", "jit", *([] if "towers" in above else ["towers"]))
  stamp = {"stale": "each", "own stale": "one"}.get(
    next((name for name in above if "stale" in name), ""), "none"
  )
  dtype = draw_dtype(rng)
  context = draw_context(rng)
  sent = 0.75 if context in PODS else float(rng.choice([1.0, 0.75]))
  sent = 1.0 if dtype == "float64" else sent
  node = build(rng, [*above, "cross", *below], (AXIS,), sent)
  return Case(
    node,
    {AXIS: int(rng.choice([2, 3, 4]))},
    (),
    context,
    dtype,
    rng.random() < 0.5,
    stamp,
  )


def simulated(rng):
  """Shards that train as asynchronous workers would, with the stamps of the simulation."""
  names = ["simulated", *layers(rng, "stale", "own stale", "ball", "clip", "jit"), "cross", "clip"]
  if {"stale", "own stale"} <= set(names):
    names.remove("stale")
  node = build(rng, names, (AXIS,))
  world = {AXIS: int(rng.choice([2, 3]))}
  return Case(node, world, (), draw_context(rng), draw_dtype(rng), False, "none")


def workers(rng):
  """Workers that own their parameters, over one axis."""
  above = layers(rng, "clip", "towers", "ball", "jit")
  below = layers(
    rng, "clip", "jit", "own stale", "finite", "ball", *([] if "towers" in above else ["towers"])
  )
  if not {"own stale", "finite"} & set(below) and rng.random() < 0.4:
    below.append("exchange")
  node = build(rng, [*above, "exchange", *below], (AXIS,))
  stamp = "each" if "own stale" in below else "none"
  world = {AXIS: int(rng.choice([2, 3, 4]))}
  return Case(node, world, (AXIS,), draw_context(rng), draw_dtype(rng), rng.random() < 0.5, stamp)


def hosts(rng):
  """Hosts that pull at a center, each with two devices that share parameters; or two reductions,
  one after the other."""
  above = layers(rng, "stale", "clip", "jit")
  below = layers(rng, "clip", "ball", "towers", "jit")
  node = build(rng, [*above, "cross", *below], ("device",))
  own = ("host",) if rng.random() < 0.6 else ()
  if own:
    node = exchange(rng, ("host",), node)
  else:
    node = build(rng, ["clip"] if rng.random() < 0.5 else [], ("device",))
    node = ref.CrossShard(("host",), str(rng.choice(["mean", "sum"])), "propagate", node)
    node = ref.CrossShard(("device",), "mean", "propagate", node)
    if "stale" in above:
      node = ref.DropStale(1, ("host", "device"), node)
  stamp = "each" if "stale" in above else "none"
  world = {"host": int(rng.choice([2, 3])), "device": 2}
  return Case(
    node, world, own, bool(rng.random() < 0.5), draw_dtype(rng), rng.random() < 0.5, stamp
  )


def draw_context(rng):
  return str(rng.choice([*CONTEXTS, "eager vmap", *PODS, *PODS]))


def draw_dtype(rng):
  return str(rng.choice(["float32", "float32", "float32", "float64", "float16"]))


def draw_call(rng, case, node_state):
  """The gradients [N, n] of one call, its weights and its stamps; some rows zero, some shards with
  NaN."""
  count = ref.num_shards(case.world)
  grads = rng.normal(size=(count, *SHAPE))
  grads[rng.random((count, SHAPE[0])) < 0.3] = 0.0
  if case.dtype == "float16" and rng.random() < 0.2 and not has_sum(case.node):
    grads = grads * 12_000  # their sum over shards overflows float16, their mean does not
  grads = grads.astype(case.dtype)
  if rng.random() < 0.2:
    of_whom = slice(None) if rng.random() < 0.2 else rng.integers(count)
    # If one part of a complex number is NaN, so is the other.
    grads[of_whom, 0, : 2 if case.form == "complex" else 1] = np.nan
  weight = (
    rng.choice([0.0, 0.5, 1.0, 2.0, 3.0], count).astype(np.float32) if case.weighted else None
  )
  stamp = None
  if case.stamp != "none":
    delay = rng.integers(0, 4, count if case.stamp == "each" else 1)
    stamp = (ref.stale_step(case.node, node_state) - delay).astype(np.int32)
  return grads, weight, stamp


# Running it.


def mapped(case, tx, state):
  """One worker's step over the case's world; arguments and results have vmap's leading axes."""

  def step(params, state, grad, weight, stamp):
    extra = {}
    if case.weighted:
      extra["weight"] = weight
    if case.stamp != "none":
      extra["computed_at"] = stamp
    updates, state = tx.update(grad, state, params, **extra)
    return optax.apply_updates(params, updates), state

  axes = ow.worker_axes(state, replicated=not case.own)
  own = 0 if case.own else None
  if len(case.world) == 1:
    stamp = None if case.stamp == "one" else 0
    if case.context == "eager vmap":  # in which a sum over all shards is an array, not a tracer
      return jax.vmap(step, (own, axes, 0, 0, stamp), (own, axes), axis_name=AXIS)
    if case.context in PODS:
      return in_pods(case, step, state, axes, (own, axes, 0, 0, stamp))
    return in_context(case.context, step, case.world[AXIS], (own, axes, 0, 0, stamp), (own, axes))

  mesh = jax.make_mesh(
    tuple(case.world.values()),
    tuple(case.world),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[: ref.num_shards(case.world)],
  )
  data, by_owner = P(tuple(case.world)), P(case.own[0]) if case.own else P()
  specs = ow.specs(state, workers="host") if case.own else jax.tree.map(lambda _: P(), state)

  def strip(tree):
    return jax.tree.map(
      lambda a, x: x if a is None else x[0], axes, tree, is_leaf=lambda a: a is None
    )

  def one(params, state, *given):
    squeezed = jax.tree.map(lambda x: x[0], given)
    if not case.own:
      return step(params, state, *squeezed)
    params, state = step(jax.tree.map(lambda x: x[0], params), strip(state), *squeezed)
    add = jax.tree.map(
      lambda a, x: x if a is None else x[None], axes, state, is_leaf=lambda a: a is None
    )
    return jax.tree.map(lambda x: x[None], params), add

  in_specs, out_specs = (by_owner, specs, data, data, data), (by_owner, specs)
  sharded = jax.jit(
    jax.shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=case.context)
  )

  def run(params, state, *given):
    placed = [jax.device_put(x, NamedSharding(mesh, data)) for x in given]
    return jax.block_until_ready(sharded(params, state, *placed))

  return run


def in_pods(case, step, state, axes, in_axes):
  """One worker's step over pods of two devices, which shard every variable of even size."""
  count, own = case.world[AXIS], in_axes[0]
  mesh = jax.make_mesh(
    (count, 2), (AXIS, "data"), (PODS[case.context],) * 2, devices=jax.devices()[: 2 * count]
  )
  fun = ow.map_workers(step, AXIS, in_axes=in_axes, out_axes=(own, axes), mesh=mesh)
  params = jax.eval_shape(FORMS[case.form][0], jnp.zeros(SHAPE))
  inside = jax.tree.map(lambda x: P(None, *["data"] * (x.shape[-1] % 2 == 0)), params)
  stacked = jax.tree.map(lambda spec: P(AXIS, *spec), inside)
  stacked_state = ow.stack_workers(state, count, replicated=not case.own)
  specs = ow.specs(stacked_state, workers=AXIS, replicated=not case.own, params=inside, mesh=mesh)
  ours = (stacked if case.own else inside), specs
  given = stacked, P(AXIS), P() if in_axes[-1] is None else P(AXIS)

  def lay(tree):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)

  jitted = jax.jit(fun, in_shardings=lay((*ours, *given)), out_shardings=lay(ours))

  def run(*args):
    with jax.set_mesh(mesh):
      placed = jax.device_put(jax.tree.map(np.asarray, args), lay((*ours, *given)))
      return jax.tree.map(np.asarray, jax.block_until_ready(jitted(*placed)))

  return run


def saved_and_restored(tree):
  return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def has_policy(node):
  """Whether it weights by age, in float32 whatever the dtype of the gradients."""
  return getattr(node, "weight", None) is not None or (
    hasattr(node, "inner") and has_policy(node.inner)
  )


def check(case, rng, num_calls=7):
  tolerance = max(TOLERANCE[case.dtype], 1e-5 if has_policy(case.node) else 0)
  dtype = "float64" if case.dtype == "float64" else "float32"
  with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("standard"):
    tx = optax.with_extra_args_support(wrapped(case.node))
    start = np.linspace(-0.6, 0.5, SIZE)
    to_form, of_form = FORMS[case.form]
    params = to_form(jnp.asarray(start.reshape(SHAPE), dtype))
    state = tx.init(params)
    step = mapped(case, tx, state)
    owners = case.world[case.own[0]] if case.own else 1
    if case.own or len(case.world) == 1:
      count = owners if case.own else ref.num_shards(case.world)
      state = ow.stack_workers(state, count, replicated=not case.own)
      params = ow.stack_workers(params, count) if case.own else params

    expected, node_state = start, None
    save_at = int(rng.integers(1, num_calls))
    for i in range(num_calls):
      if node_state is None:
        expected, node_state = ref.run(case.node, expected, [], case.world)
      grads, weight, stamp = draw_call(rng, case, node_state)
      expected, node_state = ref.run(
        case.node,
        expected,
        [(grads.reshape(len(grads), SIZE), weight, stamp)],
        case.world,
        node_state,
      )
      if i == save_at:
        params, state = saved_and_restored((params, state))
      none = jnp.zeros(len(grads), jnp.int32)
      params, state = step(
        params,
        state,
        to_form(jnp.asarray(grads)),
        none if weight is None else jnp.asarray(weight),
        none if stamp is None else jnp.asarray(stamp[0] if case.stamp == "one" else stamp),
      )
      shown = np.asarray(of_form(params), np.float64).reshape(-1, SIZE)
      repeats = ref.num_shards(case.world) // len(shown)
      wanted = expected[::repeats] if case.own else expected
      scale = max(1.0, np.nanmax(np.abs(expected))) if np.isfinite(expected).any() else 1.0
      np.testing.assert_allclose(
        np.broadcast_to(shown, wanted.shape),
        wanted,
        rtol=0,
        atol=tolerance * scale,
        err_msg=f"call {i}",
      )


@pytest.mark.optax_promotes
@pytest.mark.filterwarnings("ignore:elastic_average. moving_rate")
@pytest.mark.filterwarnings("ignore:map_workers. the mesh is Explicit")
def test_fuzz_random_nestings_match_numpy(fuzz_case):
  seed, number = fuzz_case
  rng = np.random.default_rng([seed, number])
  case = draw(rng)
  case.form = form_of(case, number)
  print(case)  # shown if it fails
  if has_no_weights(case.node, case.weighted):
    with pytest.raises(ValueError, match="no longer has weights"):
      check(case, rng)
  elif cannot_be_divided(case):
    with pytest.raises(ValueError, match="cannot be divided into"):
      check(case, rng)
  else:
    check(case, rng)
