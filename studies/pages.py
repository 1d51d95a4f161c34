"""Writes the pages and pictures of all studies from their results, and the summary of them.

No figure on these pages is typed by hand.
"""

import argparse
import functools
import importlib
import pathlib
import sys

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
  """The page of a study; its line of the summary."""
  name = study.__name__
  page = study.page(results)
  verdict, caption = (" ".join(text.split()) for text in (page.verdict, page.caption))
  verdict = verdict[0].upper() + verdict[1:]
  pictures = "\n".join(
    f"![{caption}](pictures/{name}-{light}.svg#only-{light})" for light in theme.THEMES
  )
  minutes = results.content["seconds"] / 60
  is_tuned = any(len(held["grid"]) > 1 for held in results.arms.values())
  seeds = results.options["seeds"]
  text = f"""# {study.TITLE}

**{verdict}**

{study.QUESTION}

{pictures}

{table(page.table)}

Mean and standard deviation of {seeds} seeds. {TUNED if is_tuned else NOT_TUNED} A significant difference has p < 0.05 in Welch's t-test; among many pairs some
are significant by chance.

## Published

{page.published}

## What follows

{page.follows}

## How it was done

{page.method}

[All runs]({name}.json) are kept, and took {minutes:.0f} minutes. This makes them anew, and a page of them; it can be stopped and
taken up again:

```sh
python studies/{name}.py --results new
python studies/pages.py --results new --docs new --studies {name}
```
{grids(results) if is_tuned else ""}"""
  (folder / f"{name.replace('_', '-')}.md").write_text(text)
  return f"| [{study.TITLE}]({folder.name}/{name.replace('_', '-')}.md) | {verdict} |"


def grids(results) -> str:
  steps = {
    round(held["grid"][1] / held["grid"][0], 2)
    for held in results.arms.values()
    if len(held["grid"]) > 1
  }
  factors = " or ".join(f"{step:g}" for step in sorted(steps, reverse=True))
  return f"""
## Learning rates

A grid has steps of a factor of {factors}, starts at the same place for rows of a kind, and grows until the best lies inside. Where
nothing is learned at any of 12 rates, the best (*) may lie at its end.

{table([["", "best (grid)"], *([arm, results.rate(arm)] for arm in results.arms)])}
"""


TUNED = """Learning rates are tuned on validation data ([the
grids](#learning-rates)); a row whose grid has one rate takes it from another row."""
NOT_TUNED = "No rate is tuned here."


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
    theme.save(draw, name, (9, 3.6), folder / "pictures")
  summary = SUMMARY.format(lines="\n".join(lines))
  if tuple(args.studies) == STUDIES:
    (args.docs / "what-to-expect.md").write_text(summary)


SUMMARY = """# What to expect

Each line is one study: real data, learning rates tuned for each method, five seeds, one command. Its page has the plot, the
table, and the published result next to ours. Models are small and workers are simulated on one machine: trust the ranking of
methods more than the size of the differences.

| Study | What it found |
|---|---|
{lines}
"""


if __name__ == "__main__":
  main()
