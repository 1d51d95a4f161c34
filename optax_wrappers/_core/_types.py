"""Names of types that several modules use."""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias

Tree: TypeAlias = Any  # a pytree of arrays
# Mesh axes as users pass them.
AxisName: TypeAlias = Hashable | Sequence[Hashable] | None
AxisNames: TypeAlias = tuple[Hashable, ...]

MeanOrSum: TypeAlias = Literal["mean", "sum"]
Invariant: TypeAlias = Literal["summed", "reduced", "error"]
Nonfinite: TypeAlias = Literal["propagate", "drop"]
Order: TypeAlias = Literal["simultaneous", "sequential"]
InnerState: TypeAlias = Literal["keep", "reset", "average"]
Absent: TypeAlias = Literal["pull", "keep"]

# Metadata of a dataclass field that is not a number and so belongs to the pytree's structure.
STATIC = {"static": True}
