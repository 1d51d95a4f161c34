"""The style of every picture of the documentation, and saving in the light and the dark theme.

A picture may also have a card: one of its panels at the width of a card of the site, with the names
of lines beside them.
"""

import pathlib
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.gridspec import GridSpec

THEMES = {
  "light": "#333333",
  "dark": "#cccccc",
}  # of text, ticks and frames, on a background that shows through
SETTINGS = {"svg.hashsalt": "optax_wrappers", "font.size": 10, "axes.titlesize": 10}
NAMED = "named"  # of texts in the color of their line
CARD = (3.2, 2.0)  # inches, of 96 pixels each
COLORS = ("#4c8edb", "#e07b39", "#3fa56b", "#b565c9", "#c9a227")


def save(
  draw,
  name: str,
  size: tuple[float, float] | None,
  folder: pathlib.Path,
  card: Callable[..., None] | None = None,
):
  """Saves what `draw(figure)` draws as `name`-light.svg and `name`-dark.svg, and returns its
  result. What `card(figure)` makes of it is saved as `name`-card-light.svg and so on, and only that
  if there is no size."""
  with plt.rc_context(SETTINGS):
    figure = plt.figure(figsize=size or CARD, layout="constrained")
    said = draw(figure)
    if size is not None:
      write(figure, name, folder)
    if card is not None:
      figure.set_size_inches(CARD)
      card(figure)
      write(figure, f"{name}-card", folder)
    plt.close(figure)
  return said


def write(figure, name: str, folder: pathlib.Path) -> None:
  """Writes a figure in both themes."""
  for theme, color in THEMES.items():
    paint(figure, color)
    path = folder / f"{name}-{theme}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def one_panel(names=(), panel: int = 0, has_texts=True, **settings) -> Callable[..., None]:
  """A card of one panel.

  Args:
    names: what stands beside lines, in the order in which they were drawn: a text and its place, in
      parts of the panel; None for a line without one.
    panel: its number in the picture.
    has_texts: whether other texts in it stay.
    **settings: of the panel.
  """

  def card(figure):
    kept = figure.axes[panel]
    for other in [one for one in figure.axes if one is not kept]:
      other.remove()
    kept.set_subplotspec(GridSpec(1, 1, figure=figure)[0])
    kept.tick_params(labelleft=True)
    kept.set(**{"title": ""} | settings)
    if legend := kept.get_legend():
      legend.remove()
    for text in [] if has_texts else list(kept.texts):
      text.remove()
    for line, named in zip(kept.get_lines(), names):
      if named is not None:
        text, place = named
        kept.text(*place, text, color=line.get_color(), transform=kept.transAxes, gid=NAMED)

  return card


def label(panel, text: str, place, up: bool = True) -> None:
  """Draws a label at a point, at an angle, so that labels of neighbors do not overlap."""
  side = 1 if up else -1
  panel.annotate(
    text,
    place,
    xytext=(3, 4 * side),
    textcoords="offset points",
    fontsize=8,
    rotation=40 * side,
    rotation_mode="anchor",
    va="bottom" if up else "top",
  )


def paint(figure, color: str) -> None:
  """Sets every text, tick and frame to one color."""
  for panel in figure.axes:
    panel.tick_params(colors=color, which="both")
    panel.grid(alpha=0.25)
    for text in (panel.title, panel.xaxis.label, panel.yaxis.label, *panel.texts):
      if text.get_gid() != NAMED:
        text.set_color(color)
    for spine in panel.spines.values():
      spine.set_edgecolor(color)
    if legend := panel.get_legend():
      legend.set_frame_on(False)
      for text in legend.get_texts():
        text.set_color(color)
