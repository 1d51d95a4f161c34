"""The style of every picture of the documentation, and saving in the light and the dark theme."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

THEMES = {
  "light": "#333333",
  "dark": "#cccccc",
}  # of text, ticks and frames, on a background that shows through
SETTINGS = {"svg.hashsalt": "optax_wrappers", "font.size": 10, "axes.titlesize": 10}
COLORS = ("#4c8edb", "#e07b39", "#3fa56b", "#b565c9", "#c9a227")


def save(draw, name: str, size: tuple[float, float], folder: pathlib.Path):
  """Saves what `draw(figure)` draws as `name`-light.svg and `name`-dark.svg, and returns its
  result."""
  with plt.rc_context(SETTINGS):
    figure = plt.figure(figsize=size, layout="constrained")
    said = draw(figure)
    for theme, color in THEMES.items():
      paint(figure, color)
      path = folder / f"{name}-{theme}.svg"
      figure.savefig(path, transparent=True, metadata={"Date": None})
      path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    plt.close(figure)
  return said


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
      text.set_color(color)
    for spine in panel.spines.values():
      spine.set_edgecolor(color)
    if legend := panel.get_legend():
      legend.set_frame_on(False)
      for text in legend.get_texts():
        text.set_color(color)
