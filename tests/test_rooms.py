"""Which rooms of the package may import which."""

import ast

import pytest
from fences import ROOT

import optax_wrappers as ow

PACKAGE = ROOT / "optax_wrappers"
OUTSIDE = ("contrib", "pods", "sharded")
PERIPHERY = sorted(path for room in OUTSIDE for path in (PACKAGE / room).rglob("*.py"))
KERNEL = sorted(set(PACKAGE.rglob("*.py")) - set(PERIPHERY))


def imported(tree, folder):
  """The dotted names of the package that a module of a folder imports, or reaches by attributes."""
  aliases = {"optax_wrappers": "optax_wrappers"}
  names = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        if alias.name.split(".")[0] == "optax_wrappers":
          names.append(alias.name)
          aliases[alias.asname or "optax_wrappers"] = (
            alias.name if alias.asname else "optax_wrappers"
          )
    if isinstance(node, ast.ImportFrom):
      above = ["optax_wrappers", *folder][: 2 + len(folder) - node.level] if node.level else []
      module = ".".join([*above, *filter(None, [node.module])])
      if module.split(".")[0] == "optax_wrappers":
        for alias in node.names:
          names.append(f"{module}.{alias.name}")
          aliases[alias.asname or alias.name] = names[-1]
  for node in ast.walk(tree):
    chain, value = [], node
    while isinstance(value, ast.Attribute):
      chain, value = [value.attr, *chain], value.value
    if chain and isinstance(value, ast.Name) and value.id in aliases:
      names.append(".".join([aliases[value.id], *chain]))
  return names


def private_names(source, room):
  """What a module in a room uses that is private to the package, outside its own room."""
  own = f"optax_wrappers.{room}."
  names = (name for name in imported(ast.parse(source), [room]) if not name.startswith(own))
  return [
    name
    for name in names
    if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
  ]


def rooms_used(source, folder):
  """The rooms outside the kernel that a module imports."""
  parts = [name.split(".") for name in imported(ast.parse(source), folder)]
  return [".".join(name) for name in parts if len(name) > 1 and name[1].lstrip("_") in OUTSIDE]


@pytest.mark.parametrize("path", PERIPHERY, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_outside_kernel_import_public_names_only(path):
  assert private_names(path.read_text(), path.relative_to(PACKAGE).parts[0]) == []


@pytest.mark.parametrize("path", KERNEL, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_kernel_imports_no_room_outside(path):
  folder = list(path.relative_to(PACKAGE).parts[:-1])
  allowed = {"__init__.py"} if not folder else set()
  assert path.name in allowed or rooms_used(path.read_text(), folder) == []


@pytest.mark.parametrize(
  "source",
  [
    "from optax_wrappers._core import _axes",
    "from optax_wrappers import _core",
    "import optax_wrappers._core._axes",
    "import optax_wrappers._core._axes as axes",
    "from optax_wrappers.codecs import _pack",
    "from .. import _core",
    "from .._core import _axes",
    "from ..codecs import _pack",
    "import optax_wrappers as ow\now._core._axes.axis_names(())",
    "from optax_wrappers import codecs\ncodecs._pack(1, 2)",
    "import optax_wrappers\noptax_wrappers.codecs._pack(1, 2)",
    "from optax_wrappers import codecs as c\nf = c._pack",
    "from optax_wrappers.pods import _stores",
  ],
)
def test_rooms_private_name_is_seen(source):
  assert private_names(source, "contrib")


@pytest.mark.parametrize(
  "source",
  [
    "from optax_wrappers import codecs, states\nstates.field('shared')",
    "from optax_wrappers.contrib._gossip_average import mix",
    "from . import _gossip_average",
    "from ._gossip_average import mix",
    "import optax_wrappers as ow\now.__version__",
    "import jax\njax._src",
  ],
)
def test_rooms_public_name_is_allowed(source):
  assert private_names(source, "contrib") == []


@pytest.mark.parametrize(
  "source",
  [
    "from optax_wrappers import contrib",
    "from optax_wrappers.contrib import adasum",
    "import optax_wrappers.pods",
    "from ..sharded import global_norm",
    "import optax_wrappers as ow\now.contrib.adasum()",
  ],
)
def test_rooms_of_periphery_in_kernel_are_seen(source):
  assert rooms_used(source, ["_core"])


def test_rooms_names_at_top_are_those_promised():
  text = (ROOT / "docs" / "promised.md").read_text()
  assert all(f"`{room}`" in text or f"`optax_wrappers.{room}`" in text for room in OUTSIDE)
  public = {name for name in dir(ow) if not name.startswith("_")}
  assert public - {"importlib", "train_state"} == set(ow.__all__)
  assert len(ow.__all__) <= 40


@pytest.mark.parametrize(
  ("name", "place"),
  [
    ("gossip_average", "contrib.gossip_average"),
    ("DropStaleState", "states.DropStaleState"),
    ("WholeMatricesState", "sharded.WholeMatricesState"),
    ("worker_specs", r"specs\(state, params, workers=axis_name\)"),
    ("drop_rate", r"metrics\(state\)\[\"drop_rate\"\]"),
    ("transports", "pods"),
  ],
)
def test_rooms_name_that_has_moved_says_where(name, place):
  with pytest.raises(AttributeError, match=f"optax_wrappers.{name} is optax_wrappers.{place}"):
    getattr(ow, name)
  with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
    ow.nothing  # noqa: B018
