"""Fails unless a tag, the package, CITATION.cff and the changelog name the same version, and the
package's URLs are real.

python .ci/check_version.py v0.1.0
"""

import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parent.parent


def versions() -> dict[str, str]:
  """The version in each file."""
  package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
  citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
  heading = r"^## (.+?)(?:, \d{4}-\d\d-\d\d)?$"  # with its date, or "not released yet"
  changelog = re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.M)
  return {
    "pyproject.toml": package,
    "CITATION.cff": citation[1] if citation else "no version",
    "CHANGELOG.md, its first heading": changelog[1] if changelog else "no version",
  }


def main(tag: str) -> None:
  wrong = {file: said for file, said in versions().items() if f"v{said}" != tag}
  if wrong:
    lines = [f"{file} says {said}" for file, said in wrong.items()]
    sys.exit(f"The tag is {tag}, but " + ", ".join(lines))
  urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
  placeholders = [name for name, url in urls.items() if "//example.org/" in url]
  if placeholders:
    sys.exit(f"[project.urls] of pyproject.toml has placeholders: {', '.join(placeholders)}")


if __name__ == "__main__":
  main(*sys.argv[1:])
