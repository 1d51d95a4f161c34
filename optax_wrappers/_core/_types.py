"""Names of types that several modules use."""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, TypeAlias

Tree: TypeAlias = Any
"""A pytree of arrays."""

AxisName: TypeAlias = Hashable | Sequence[Hashable] | None
"""A mesh axis, several, or none, as a user names them."""

AxisNames: TypeAlias = tuple[Hashable, ...]
"""The same, as the library passes them on."""

MeanOrSum: TypeAlias = Literal["mean", "sum"]
Invariant: TypeAlias = Literal["summed", "reduced", "error"]
Nonfinite: TypeAlias = Literal["propagate", "drop"]
Exchange: TypeAlias = Literal["simultaneous", "sequential"]
InnerState: TypeAlias = Literal["keep", "reset", "average"]
Absent: TypeAlias = Literal["pull", "keep"]
Momentum: TypeAlias = Literal["keep", "project"]

STATIC = {"static": True}
"""Metadata of a dataclass's field that is no number, and so belongs to a pytree's structure."""
