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

FORMAT = 3


def check_run(log: Log, path: Any, settings: dict[str, Any]) -> None:
  """Raises for another model, other settings or another key, or without exclusive writes."""
  digests = [hashlib.sha256(repr(value).encode()).digest() for value in settings.values()]
  here = record("run", 0, [np.frombuffer(digest, np.uint8) for digest in digests])
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
  for what, mine, others in zip(settings, here.parts, there.parts, strict=True):
    if not np.array_equal(mine, others):
      raise ValueError(
        f"Directory: the run {log.run!r} in {path} belongs to another {what}. Give this one another"
        " name."
      )


def settings_of(
  tx: optax.GradientTransformation,
  params: Any,
  state: Any,
  fragments: list[Records],
  quorum: int,
  max_age: int,
) -> dict[str, Any]:
  """What all pods must have in common, by names; raises for a reduction of more than `quorum`."""
  model = []
  for path, x in jax.tree.leaves_with_path([fragment.shapes for fragment in fragments]):
    name = jax.tree_util.keystr(path)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
      raise TypeError(
        f"Directory: {name}, in the state of outer, is a random key, and files hold numbers only."
        " Take an outer without one."
      )
    model.append(f"{name}: {_form(x)}")
  code = [_form(x) for fragment in fragments for x in fragment.template.parts]
  return {
    "format": FORMAT,
    "model or wrapper": [repr(state.workers), model],
    "codec": code,
    # A pod whose center moved otherwise would be found out of step, but only a round later.
    "outer optimizer, reduction or codec, or its settings": [
      _moved(tx, params, state, fragment, start, quorum, max_age)
      for fragment, start in zip(fragments, _starts(tx, params, len(fragments)), strict=True)
    ],
  }


def _moved(tx, params, state, fragment, start, quorum, max_age):
  """A digest of the center after two rounds that are the same in all pods."""
  first = exchange.adopt(tx, state, params, start, fragment.number)
  absorbed = functools.partial(_absorbed, tx, fragment, age=min(max_age, 1))
  number = 1
  if state.reduction_state is not None:
    number = _enough(lambda number: absorbed(*first, number))
    # Raises now, not in a round.
    absorbed(*first, min(quorum, number))
  center, _ = exchange.snapshot(absorbed(*absorbed(*first, number), number)[1], fragment.number)
  leaves = [jnp.nan_to_num(x) for x in jax.tree.leaves(center)]
  data = exchange.to_bytes(record("center", fragment.number, leaves), run="settings", round=0)
  return hashlib.sha256(data).hexdigest()


def _enough(absorbed):
  """How many messages a reduction can take, and tell it from others."""
  for number in (5, 9, 17):
    try:
      absorbed(number)
      return number
    except ValueError:
      continue
  absorbed(33)  # the last error is for the user
  return 33


def _absorbed(tx, fragment, params, state, number, age):
  """The parameters and state after these messages."""
  template, k = fragment.template, fragment.number
  messages = [
    dataclasses.replace(
      template,
      weight=np.ones((), template.weight.dtype),
      base=base_of(tx, state, k),
      parts=tuple(_fixed(x, i) for x in template.parts),
      sender=str(i),
      age=age,
    )
    for i in range(number)
  ]
  return exchange.absorb(tx, state, params, messages)


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


def _fixed(x, i):
  """A pseudo-gradient, or a code."""
  places = np.arange(x.size).reshape(x.shape) + 7 * i
  if jnp.issubdtype(x.dtype, jnp.inexact):
    return (places % 97 / 97 - 0.5).astype(x.dtype)
  # Read as a number of any format, such bytes are neither infinite nor subnormal.
  return (32 + places % 41).astype(x.dtype)


def _form(x):
  return f"{x.dtype}{list(x.shape)}"
