"""What the pods of a run must have in common. The first one writes its digests."""

import dataclasses
import errno
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_wrappers import exchange
from optax_wrappers.pods._log import Log, largest, record
from optax_wrappers.pods._records import Records

FORMAT = 4
_MOST = 33  # messages of a trial
_CENTER = "outer (its rate, momentum or another setting)"
# What else makes a center differ, by what is measured.
_CAUSES = "codec (a setting of it)", "reduction (or a setting of it)"


def check_run(log: Log, path: Any, settings: dict[str, Any], measured: np.ndarray) -> None:
  """Raises for another model, other settings or another key, or without exclusive writes."""
  digests = [hashlib.sha256(repr(value).encode()).digest() for value in settings.values()]
  here = record("run", 0, [measured, *(np.frombuffer(digest, np.uint8) for digest in digests)])
  # In no other slot: what cannot be read may be a run with another key.
  name = f"{log.prefix}run.settings"
  try:
    log.store.put(name, log.packed("run", 0, here))
  except OSError as error:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    mend = "Make room." if is_full else "It needs a file system with hard links, or a bucket."
    raise OSError(f"Directory: a file cannot be written once in {path}: {error}. {mend}") from error
  try:
    data = log.store.get(name, largest(here))
    if data is None:
      raise ValueError("it is gone")
    there = log.unpacked("run", 0, here, data)
  except ValueError as error:
    raise ValueError(
      f"Directory: the run {log.run!r} in {path} has another key, or its run.settings is no record"
      f" of this version ({error}). Give this one another name."
    ) from error
  for what, mine, theirs in zip(settings, here.parts[1:], there.parts[1:], strict=True):
    if np.array_equal(mine, theirs):
      continue
    if what == _CENTER:
      causes = zip(_CAUSES, measured, np.asarray(there.parts[0]), strict=True)
      differs = (cause for cause, x, y in causes if not np.allclose(x, y, rtol=1e-3, atol=0))
      what = next(differs, what)
    raise ValueError(
      f"Directory: {what} must be as in the run {log.run!r} in {path}. Give this run another name;"
      " start_from gives it the center of that one."
    )


def settings_of(
  tx: optax.GradientTransformation,
  params: Any,
  state: Any,
  fragments: list[Records],
  quorum: int,
  max_age: int,
) -> tuple[dict[str, Any], np.ndarray]:
  """What all pods must have in common, by names, and what tells why a center moves otherwise.

  A pod whose center did would be found out of step, but only a round later.

  Raises:
    ValueError: for a reduction of more than `quorum` messages.
  """
  centers, outer_states = zip(*(fragment.shapes for fragment in fragments))
  for path, x in jax.tree.leaves_with_path(outer_states):
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
      raise TypeError(
        f"Directory: {jax.tree_util.keystr(path)}, in the state of outer, is a random key, and"
        " files hold numbers only. Take an outer without one."
      )
  starts = _starts(tx, params, len(fragments))
  trials = [
    _tried(tx, params, state, fragment, start, quorum, max_age)
    for fragment, start in zip(fragments, starts, strict=True)
  ]
  shapes = [
    (jax.tree_util.keystr(path), jnp.shape(x)) for path, x in jax.tree.leaves_with_path(params)
  ]
  settings = {
    "the version of optax_wrappers": FORMAT,
    "params (names and shapes)": shapes,
    "fragments (and the dtype of the center)": _forms(centers),
    "reduction": _forms(state.reduction_state),
    "codec": _forms([fragment.template.parts for fragment in fragments]),
    "outer": _forms(outer_states),
    _CENTER: [moved for moved, _ in trials],
  }
  return settings, np.sum([measured for _, measured in trials], 0)


def _tried(tx, params, state, fragment, start, quorum, max_age):
  """A digest of the center after two rounds that are the same in all pods; and the norms of codes,
  which tell a codec, and the weights of messages, which tell a reduction."""
  first = exchange.adopt(tx, state, params, start, fragment.number)
  merged = functools.partial(_merged, tx, fragment, age=min(max_age, 1))
  if state.reduction_state is None:
    *second, found = merged(*first, 2)
  else:
    *second, found = _of_enough(functools.partial(merged, *first))
    if quorum < len(found):
      merged(*first, quorum)  # raises now, not in a round
  *_, last, _ = merged(*second, len(found))
  center, _ = exchange.snapshot(last, fragment.number)
  leaves = [jnp.nan_to_num(x) for x in jax.tree.leaves(center)]
  data = exchange.to_bytes(record("center", fragment.number, leaves), run="settings", round=0)
  measured = np.zeros((2, _MOST), np.float32)
  if not all(map(_is_inexact, fragment.template.parts)):
    *_, coded = merged(*first, len(found), fixed=_fixed_code)
    # Of as many as all reductions take.
    measured[0, :2] = [x.norm for x in coded[:2]]
  measured[1, : len(found)] = [x.weight for x in found]
  return hashlib.sha256(data).hexdigest(), measured


def _of_enough(merged):
  """What is made of so many messages as a reduction can take, and as tell it from others."""
  for number in (5, 9, 17):
    try:
      return merged(number)
    except ValueError:
      continue
  return merged(_MOST)  # the last error is for the user


def _fixed(x, i):
  """A pseudo-gradient, or a code."""
  places = np.arange(x.size).reshape(x.shape) + 7 * i
  if _is_inexact(x):
    return (places % 97 / 97 - 0.5).astype(x.dtype)
  # Read as a number of any format, such bytes are neither infinite nor subnormal.
  return (32 + places % 41).astype(x.dtype)


def _fixed_code(x, i):
  """Only a code, which may be small beside a pseudo-gradient."""
  fixed = _fixed(x, i)
  return np.zeros_like(fixed) if _is_inexact(x) else fixed


def _is_inexact(x):
  return jnp.issubdtype(x.dtype, jnp.inexact)


def _merged(tx, fragment, params, state, number, age, fixed=_fixed):
  """What `merge` makes of these messages."""
  template, k = fragment.template, fragment.number
  messages = [
    dataclasses.replace(
      template,
      weight=np.ones((), template.weight.dtype),
      base=base_of(tx, state, k),
      parts=tuple(fixed(x, i) for x in template.parts),
      sender=str(i),
      age=age,
    )
    for i in range(number)
  ]
  return exchange.merge(tx, state, params, messages)


@functools.partial(jax.jit, static_argnums=(0, 2))
def base_of(tx, state, fragment):
  """The fingerprint of the center, which is all that is computed of this message."""
  return exchange.message(tx, state, state.center, sender="base", fragment=fragment)[0].base


@functools.partial(jax.jit, static_argnums=(0, 2))
def _starts(tx, params, num_fragments):
  """Centers of zeros and the states of outer for them, without the rest of a state."""
  # Nothing that a code may hold is too small to be seen beside a center of zeros.
  state = tx.init(jax.tree.map(jnp.zeros_like, params))
  return [exchange.snapshot(state, k) for k in range(num_fragments)]


def _forms(tree):
  leaves = jax.tree.leaves_with_path(tree)
  return [f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}" for path, x in leaves]
