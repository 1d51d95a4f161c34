"""Names of types that several modules use."""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias

Tree: TypeAlias = Any  # a pytree of arrays
AxisName: TypeAlias = Hashable | Sequence[Hashable] | None  # as a user names mesh axes
AxisNames: TypeAlias = tuple[Hashable, ...]

MeanOrSum: TypeAlias = Literal["mean", "sum"]
Invariant: TypeAlias = Literal["summed", "reduced", "error"]
Nonfinite: TypeAlias = Literal["propagate", "drop"]
Exchange: TypeAlias = Literal["simultaneous", "sequential"]
InnerState: TypeAlias = Literal["keep", "reset", "average"]
Absent: TypeAlias = Literal["pull", "keep"]

# Metadata of a dataclass's field that is no number, and so belongs to a pytree's structure.
STATIC = {"static": True}
