"""What is exchanged between workers, and how: the base class of all rules."""

from typing import Any, ClassVar

from optax_wrappers._core._types import Tree
from optax_wrappers._workers._center import WorkerGroup


class Rule:
  """An algorithm: `init`, `pull`, `send`, `merge` and `idle`, each for one fragment.

  A rule is a frozen dataclass, registered with JAX as a pytree whose leaves are the numbers that
  may be traced. Its state, `kept`, is any pytree of fixed structure. Each worker has its own copy
  of a leaf, except those in a `Center`, which are shared.

  Attributes:
    name: what errors call the wrapper.
  """

  name: ClassVar[str] = "periodic_exchange"

  def __init_subclass__(cls) -> None:
    for field in cls.__annotations__:
      if callable(getattr(Rule, field, None)):
        raise ValueError(
          f"exchange.Rule: {cls.__name__} has a field named {field!r}, which is a method of rules."
          " Choose another name."
        )

  def init(self, params: Tree, workers: WorkerGroup) -> Any:
    """The initial state."""
    del params, workers
    return ()

  def pull(self, updates: Tree, params: Tree, kept: Any) -> Tree:
    """Changes the updates before the inner step, in every step."""
    del params, kept
    return updates

  def send(self, moved: Tree, params: Tree, kept: Any, workers: WorkerGroup) -> tuple[Any, Any]:
    """The exchange. All collectives of the rule are here, except `workers.whole` in `merge`.

    Args:
      moved: this worker's parameters after its step, in the dtype of the center.
      params: its parameters before the step, in their dtype.
      kept: the state. With `shard_center` a `Center` holds this worker's share.
      workers: the workers that synchronize; all that the rule sees of them. `workers.weight` is
        this worker's weight in the exchange: its `participation`, or 0 if `moved` holds a NaN or an
        infinity.

    Returns:
      The new state, and the input of `merge`.
    """
    raise NotImplementedError

  def merge(
    self, moved: Tree, params: Tree, sent: Any, kept: Any, workers: WorkerGroup
  ) -> tuple[Tree, Any]:
    """The worker's new parameters, and the state. With a delay `workers.weight` is None here."""
    raise NotImplementedError

  def replaces(self, sent: Any) -> Any:
    """Whether `merge` replaces the worker's parameters, whatever they were; a bool scalar.

    If they were not finite, the worker's inner state begins again."""
    del sent
    return False

  def idle(self, params: Tree) -> Any:
    """With a delay, the first `sent`, by which `merge` must not move the worker."""
    what = f"{type(self).__name__}: this rule has no delay"
    raise NotImplementedError(f"{what}, because it does not override Rule.idle.")
