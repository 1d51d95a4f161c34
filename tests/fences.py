"""Runs the Python of a page, fence by fence, with the results that its comments promise."""

import contextlib
import io
import pathlib
import re

import jax

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))

# Lines that ask for simulated devices, before anything runs.
SIMULATED = r"jax\.config\.update\(\"jax_num_cpu_devices\".*\n"


def fences(page, language):
  return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def check_python(page):
  with jax.numpy_rank_promotion("allow"):
    for code in fences(page, "python"):
      code = re.sub(SIMULATED, "", code)  # the devices exist already
      printed = io.StringIO()
      with contextlib.redirect_stdout(printed):
        exec(compile(code, str(page), "exec"), {})
      # A mesh that outlived it would be that of all tests after it.
      assert jax.sharding.get_abstract_mesh().empty, code
      # What a print promises: a comment after it, or comment lines below it.
      promised = []
      for behind, below in re.findall(r"print\(.*?\)(?:  # (.*))?$((?:\n *# .*)*)", code, re.M):
        promised += [behind] if behind else re.findall(r"# (.*)", below)
      assert printed.getvalue().split("\n")[:-1] == promised, code
