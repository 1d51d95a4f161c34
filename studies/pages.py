"""Writes the pages and pictures of all studies from their results, and the summary of them.

All numbers on these pages are computed.
"""

import argparse
import functools
import importlib
import pathlib
import sys
import textwrap

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import lab  # which knows where theme is
import theme

DOCS = HERE.parent / "docs"
STUDIES = (
  "diloco",
  "rounds",
  "compressed_rounds",
  "streaming",
  "easgd",
  "newer_methods",
  "slow_momentum",
  "large_batch",
  "lost_exchanges",
  "pods",
  "fewer_bytes",
  "staleness",
  "bad_shards",
  "max_norm",
)


def table(rows) -> str:
  head, *body = rows
  lines = [head, ["---"] * len(head), *body]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(study, results, folder) -> str:
  """Writes the page of a study; returns its line in the summary."""
  name = study.__name__
  page = study.page(results)
  claim, numbers, caption = (
    " ".join(text.split()) for text in (page.claim, page.numbers, page.caption)
  )
  claim = claim[0].upper() + claim[1:]
  pictures = "\n".join(
    f"![{caption}](pictures/{name}-{light}.svg#only-{light})" for light in theme.THEMES
  )
  minutes = results.content["seconds"] / 60
  is_tuned = any(len(held["grid"]) > 1 for held in results.arms.values())
  seeds = results.options["seeds"]
  text = f"""# {study.TITLE}

**{claim}**

{numbers}

{pictures}

{table(page.table)}

Mean and standard deviation of {seeds} seeds. {TUNED if is_tuned else NOT_TUNED} Significant means p < 0.05 in Welch's t-test; among
many pairs some are significant by chance.

## Published results

{page.published}

## Recommendations

{page.follows}

## Method

{page.method}

[All runs]({name}.json) took {minutes:.0f} minutes. To repeat them (you can interrupt and continue):

```sh
python studies/{name}.py --results new
python studies/pages.py --results new --docs new --studies {name}
```
{grids(results) if is_tuned else ""}"""
  (folder / f"{name.replace('_', '-')}.md").write_text(text)
  return f"| [{study.TITLE}]({folder.name}/{name.replace('_', '-')}.md) | {claim} |"


def grids(results) -> str:
  steps = {
    round(held["grid"][1] / held["grid"][0], 2)
    for held in results.arms.values()
    if len(held["grid"]) > 1
  }
  factors = " or ".join(f"{step:g}" for step in sorted(steps, reverse=True))
  rates = table([["", "best (grid)"], *([arm, results.rate(arm)] for arm in results.arms)])
  return f"""
??? note "Learning rates"

    Rates of a grid differ by a factor of {factors}; a grid is extended until the best rate is in its interior. If none of 12 rates
    learns anything, the best (*) may be at the edge. A grid of one value uses the rate of another row.

{textwrap.indent(rates, "    ")}
"""


TUNED = "Learning rates are tuned on validation data."
NOT_TUNED = "No learning rate is tuned."


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--results", type=pathlib.Path, default=lab.RESULTS)
  parser.add_argument("--docs", type=pathlib.Path, default=DOCS)
  parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES, metavar="NAME")
  args = parser.parse_args()
  folder = args.docs / "studies"
  (folder / "pictures").mkdir(parents=True, exist_ok=True)
  lines = []
  for name in args.studies:
    study = importlib.import_module(name)
    results = lab.Results.load(name, args.results)
    lines.append(write(study, results, folder))
    draw = functools.partial(study.draw, results=results)
    theme.save(draw, name, getattr(study, "PICTURE", (9, 3.6)), folder / "pictures")
  summary = SUMMARY.format(lines="\n".join(lines))
  if tuple(args.studies) == STUDIES:
    (args.docs / "what-to-expect.md").write_text(summary)


SUMMARY = """# What to expect

Each study uses real data, tuned learning rates (except the one with pods) and five seeds. Its page compares our results with the published
ones. Models are small and workers are simulated on one machine, so trust the ranking of methods more than the size of the
differences.

| Study | Result |
|---|---|
{lines}
"""


if __name__ == "__main__":
  main()
