"""What happened in a round, for an operator and for a logger."""

from typing import NamedTuple


class Report(NamedTuple):
  """What happened in a synchronization. `str` gives a line for the log.

  Attributes:
    fragment: its number.
    round: the number of the synchronization.
    present: the pods that counted, as `name` or, from an earlier round, `name-age`.
    absent: those whose messages had weight 0, for a NaN or for want of a step.
    norms: of each that counted, the norm of its difference from the center.
    weights: of each that counted, its weight in what moved the center, as
      `exchange.Contribution.weight`.
    late: the pods that came after the previous round was decided.
    refused: messages that could not be used, with reasons.
    num_bytes: bytes of the messages that were absorbed.
    waited: seconds.
  """

  fragment: int
  round: int
  present: tuple[str, ...]
  absent: tuple[str, ...]
  norms: dict[str, float]
  weights: dict[str, float]
  late: tuple[str, ...]
  refused: dict[str, str]
  num_bytes: int
  waited: float

  @property
  def cut(self) -> tuple[str, ...]:
    """Those whose weight is below a hundredth of the largest."""
    largest = max(map(abs, self.weights.values()), default=0.0)
    return tuple(name for name, weight in self.weights.items() if abs(weight) < largest / 100)

  def metrics(self) -> dict[str, float]:
    """Scalars for a logger: `norm/<pod>` and `weight/<pod>` of each that counted, and others."""
    counts = {"present": len(self.present), "absent": len(self.absent), "cut": len(self.cut)}
    scalars = counts | {"num_bytes": self.num_bytes, "waited": self.waited}
    scalars |= {f"norm/{name}": x for name, x in self.norms.items()}
    scalars |= {f"weight/{name}": x for name, x in self.weights.items()}
    return {name: float(x) for name, x in scalars.items()}

  def __str__(self) -> str:
    refused = ", ".join(f"{name} ({why})" for name, why in self.refused.items())
    absent, late = ", ".join(self.absent), ", ".join(self.late)
    cut = ", ".join(f"{name} (norm {self.norms[name]:.3g})" for name in self.cut)
    others = ("absent", absent), ("cut", cut), ("late", late), ("refused", refused)
    more = "".join(f"; {what}: {who}" for what, who in others if who)
    what = f"{', '.join(self.present)}{more}; {self.num_bytes:,} bytes, waited {self.waited:.1f} s"
    return f"round {self.round} of fragment {self.fragment}: {what}"
