"""The rule of the fast tier: which folders it leaves out, and which cases it chooses elsewhere."""

import pathlib

TESTS = pathlib.Path(__file__).parent
# What starts processes or a TPU's compiler, trains, tries all of Optax, or compares whole runs of
# which other tests try each part: for `--tier full` alone.
SLOW_FOLDERS = ("docs", "fuzz", "optimizers", "processes", "runs", "studies", "tpu")


def is_slow(path):
  return any(path.is_relative_to(TESTS / folder) for folder in SLOW_FOLDERS)


def every_value_once(parameters):
  """The places of few of a test's cases in which each value of each parameter stands once or more.

  Each case is a dict from names of parameters to values; without parameters all are chosen.
  """
  values = [{(name, identity(value)) for name, value in case.items()} for case in parameters]
  missing = set().union(*values)
  if not missing:
    return list(range(len(parameters)))
  chosen = []
  while missing:
    chosen.append(max(range(len(values)), key=lambda case: len(values[case] & missing)))
    missing -= values[chosen[-1]]
  return sorted(chosen)


def identity(value):
  """Equal for values that make the same case; an object that is not plain equals itself alone."""
  if isinstance(value, tuple):
    return tuple(identity(part) for part in value)
  return repr(value) if isinstance(value, bool | int | float | str | None) else id(value)
