"""The README's code runs, prints what it says, and is short."""

import pytest
from fences import README, check_python, fences


@pytest.mark.optax_promotes
def test_readme_python_fences_run_and_print_what_they_say():
  check_python(README)


def test_readme_is_short_and_starts_with_code():
  lines = README.read_text().splitlines()
  assert len(lines) <= 100
  assert "```python" in lines[:12]
  assert len(fences(README, "sh")) == 2
