"""Explanatory pictures, without measurements."""

from matplotlib.patches import Rectangle
from theme import COLORS

CENTERED = {"ha": "center", "va": "center"}
PERIOD, WORKERS, FRAGMENTS, DELAY = 8, 4, 4, 2


def arrow(panel, start, end, color):
  way = {"arrowstyle": "-|>", "color": color, "linewidth": 2}
  panel.annotate("", end, start, arrowprops=way)


def blank(figure, width, height):
  """A panel without axes."""
  panel = figure.subplots()
  panel.set(xlim=(0, width), ylim=(0, height))
  panel.axis("off")
  return panel


def timeline(figure):
  """Two rounds of DiLoCo, and below them two of Streaming DiLoCo, from left to right."""
  above, below = figure.subplots(2, 1)
  steps = 2 * PERIOD
  for worker in range(WORKERS):
    for t in range(steps):
      above.broken_barh([(t + 0.08, 0.84)], (worker - 0.3, 0.6), color=COLORS[0], alpha=0.5)
  for t in (PERIOD, steps):
    above.plot([t, t], [-0.5, WORKERS - 0.5], color=COLORS[1], linewidth=4)
    above.annotate("outer step", (t, -0.6), ha="center", va="bottom", fontsize=9)
  above.set_yticks(range(WORKERS), [f"worker {i}" for i in range(WORKERS)])
  above.set_title("DiLoCo: all parameters, at the end of a round")
  for fragment in range(FRAGMENTS):
    below.plot([0, steps], [fragment, fragment], color=COLORS[0], alpha=0.3, linewidth=8)
    for start in (0, PERIOD):
      sent = start + (fragment + 1) * PERIOD // FRAGMENTS
      arrow(below, (sent, fragment), (sent + DELAY, fragment), COLORS[1])
      below.plot(sent, fragment, "o", color=COLORS[1])
  below.annotate("sent", (2, -0.25), ha="center", va="bottom", fontsize=9)
  below.annotate("arrives", (2 + DELAY, -0.25), ha="center", va="bottom", fontsize=9)
  below.set_yticks(range(FRAGMENTS), [f"fragment {i}" for i in range(FRAGMENTS)])
  below.set_title(f"Streaming: fragments={FRAGMENTS}, delay={DELAY}")
  for panel, lowest in ((above, WORKERS), (below, FRAGMENTS)):
    panel.set(xlim=(-0.1, steps + DELAY + 0.2), ylim=(lowest - 0.4, -1.1))
    panel.set_xticks(range(0, steps + 1, 4))
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(left=False)
  below.set_xlabel("steps")


def feedback(figure):
  """Error feedback in three boxes."""
  panel = blank(figure, 10, 4)
  boxes = {
    (1.6, 2.7): "gradient\n+ residual",
    (5.0, 2.7): "code\nof fewer bytes",
    (8.4, 2.7): "sum over\nthe shards",
  }
  frame = {"boxstyle": "round,pad=0.6", "facecolor": "none", "edgecolor": COLORS[0], "linewidth": 2}
  for place, text in boxes.items():
    panel.annotate(text, place, **CENTERED, bbox=frame)
  panel.annotate("residual: what the code left out", (3.3, 0.5), **CENTERED)
  arrow(panel, (2.6, 2.7), (3.8, 2.7), COLORS[0])
  arrow(panel, (6.2, 2.7), (7.4, 2.7), COLORS[0])
  arrow(panel, (5.0, 2.0), (4.3, 0.8), COLORS[1])
  arrow(panel, (2.3, 0.8), (1.6, 2.0), COLORS[1])
  panel.annotate("encode", (3.2, 3.0), ha="center", fontsize=9)
  panel.annotate("send", (6.8, 3.0), ha="center", fontsize=9)


def pods(figure):
  """Two pods of four devices, each of which has a part of its worker's parameters."""
  panel = blank(figure, 10, 5.2)
  for pod, left in enumerate((0.3, 5.7)):
    panel.annotate(f"pod {pod}: one worker", (left + 2, 4.8), ha="center")
    frame = Rectangle((left, 0.5), 4, 4.0, fill=False, edgecolor=COLORS[0], linewidth=2)
    panel.add_patch(frame)
    for part in range(4):
      height = 4.0 - part
      box = Rectangle((left + 0.6, height - 0.3), 2.8, 0.6, color=COLORS[part], alpha=0.35)
      panel.add_patch(box)
      panel.annotate(f"device {part}: part {part}", (left + 2, height), **CENTERED)
      if part < 3:
        panel.plot([left + 2] * 2, [height - 0.3, height - 0.7], color=COLORS[0], linewidth=5)
      if pod == 0:
        panel.plot([left + 3.4, 6.3], [height] * 2, color=COLORS[1], linestyle="--")
    panel.annotate("in every step", (left + 2.2, 3.5), va="center", fontsize=8)
  panel.annotate("once\na round", (5, 3.5), **CENTERED, fontsize=8)


def pods_card(figure):
  """The same in a few words."""
  figure.clear()
  panel = blank(figure, 10, 6)
  for pod, left in enumerate((0.2, 6.2)):
    panel.annotate(f"pod {pod}", (left + 1.8, 5.3), ha="center")
    panel.add_patch(Rectangle((left, 0.3), 3.6, 4.7, fill=False, edgecolor=COLORS[0], linewidth=2))
    for part in range(4):
      height = 4.3 - 1.1 * part
      panel.add_patch(
        Rectangle((left + 0.4, height - 0.4), 2.8, 0.8, color=COLORS[part], alpha=0.35)
      )
      panel.annotate(f"device {part}", (left + 1.8, height), **CENTERED)
  panel.plot([4.0, 6.0], [3.0, 3.0], color=COLORS[1], linestyle="--")
  panel.annotate("once\na round", (5, 3.9), **CENTERED)


def order(figure):
  """The gradient enters through the outer wrapper, and the update leaves through it."""
  panel = blank(figure, 12, 5)
  for color, name in enumerate(("clip_variables", "cross_shard", "optax.adam")):
    left, low, high = 2.0 + color, 0.2 + 0.4 * color, 4.8 - 0.8 * color
    size = 12 - 2 * left, high - low
    panel.add_patch(Rectangle((left, low), *size, fill=False, edgecolor=COLORS[color], linewidth=2))
    panel.annotate(name, (6, high - 0.4), **CENTERED)
  arrow(panel, (0.9, 1.9), (4.8, 1.9), COLORS[3])
  arrow(panel, (7.2, 1.9), (11.1, 1.9), COLORS[3])
  panel.annotate("gradient", (0.9, 2.1), ha="center")
  panel.annotate("update", (11.1, 2.1), ha="center")


def decisions(figure):
  """Questions from top to bottom; each yes leads to the right."""
  rows = [
    ("One device?", "gather_towers\nclip_variables\nlocal_steps"),
    ("Stale gradients?", "staleness_aware\ndrop_stale"),
    ("A fast link between\nall devices?", "cross_shard"),
    ("Must pods survive\nthe loss of others?", "pods.Directory\nwith diloco"),
    ("High latency, and no\nall-reduce?", "gossip_average"),
    ("Workers that should\nstay different?", "elastic_average"),
  ]
  panel = blank(figure, 10, 2 * len(rows) + 1)
  asked = {"boxstyle": "round,pad=0.4", "facecolor": "none", "edgecolor": COLORS[0], "linewidth": 2}
  answer = asked | {"boxstyle": "square,pad=0.4", "edgecolor": COLORS[1]}
  places = [2 * i + 2 for i in reversed(range(len(rows)))]
  for (question, wrapper), height in zip(rows, places, strict=True):
    arrow(panel, (2.6, height - 0.65), (2.6, height - 1.35), COLORS[0])
    arrow(panel, (5.2, height), (6.3, height), COLORS[1])
    panel.annotate("yes", (5.7, height + 0.15), ha="center", fontsize=9)
    panel.annotate("no", (2.8, height - 1.0), va="center", fontsize=9)
    panel.annotate(question, (2.6, height), **CENTERED, bbox=asked)
    panel.annotate(wrapper, (8.2, height), **CENTERED, bbox=answer)
  panel.annotate("diloco or local_steps", (2.6, 0.25), **CENTERED, bbox=answer)


def layout(figure):
  """Which leaves of a state are per worker, and which all workers share."""
  panel = blank(figure, 10, 6.4)
  rows = ["parameters", "inner_state", "center", "outer_state", "step"]
  for row, name in enumerate(rows):
    height = 4.9 - row
    panel.annotate(name, (2.2, height), ha="right", va="center")
    boxes = [(2.6 + 2.5 * worker, 2.1) for worker in range(3)] if row < 2 else [(2.6, 7.1)]
    for left, width in boxes:
      box = Rectangle((left, height - 0.3), width, 0.6, color=COLORS[row >= 2], alpha=0.35)
      panel.add_patch(box)
      panel.annotate("one copy" if width > 3 else "own", (left + width / 2, height), **CENTERED)
  for worker in range(3):
    panel.annotate(f"worker {worker}", (3.65 + 2.5 * worker, 5.8), **CENTERED)
