"""Opens every page of a built site in a browser, at the widths of a desktop and a phone, in both
themes.

    python .ci/check_site.py SITE [--screenshots FOLDER]

Fails for an error in the console, a file that does not load, an image without pixels or alternative
text, an example that is rendered as prose, a page wider than its window, and, at desktop width,
code wider than its box. A search must find the page for each of the field's terms.
"""

import argparse
import functools
import html
import http.server
import json
import pathlib
import re
import shutil
import sys
import threading

from playwright.sync_api import sync_playwright

WIDTHS = {"desktop": 1280, "phone": 390}
THEMES = ("light", "dark")
AT_ONCE = 8  # pages that load together, because each waits until its network is idle

# Search terms, and the page that must be among the results.
SEARCHES = {
  "bandwidth": "compressed-exchange",
  "clients": "federated",
  "drop rate": "staleness-aware",
  "error feedback": "compressed-exchange",
  "federated": "federated",
  "GRPO": "asynchronous-rl",
  "GSPMD": "plain-jit",
  "int8": "compressed-exchange",
  "logging": "logging",
  "MaxText": "in-a-trainer",
  "micro-batch": "accumulate",
  "microbatch": "accumulate",
  "Muon": "whole-matrices",
  "non-IID": "federated",
  "policy version": "asynchronous-rl",
  "pseudo-gradient": "local-steps",
  "Ray": "asynchronous",
  "TensorBoard": "logging",
  "Tunix": "in-a-trainer",
  "wandb": "logging",
  "ZeRO-1": "shard-state",
}

# The text of a page without code.
PROSE = """() => {
  const found = [], article = document.querySelector('article');
  const walk = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (!node.parentElement.closest('code, pre')) found.push(node.textContent);
  }
  return found;
}"""
# Code blocks that do not fit: their longest line, and the excess in pixels.
WIDE_CODE = """() => [...document.querySelectorAll('article pre > code')]
  .filter(code => code.scrollWidth > code.clientWidth + 1)
  .map(code => [
    code.textContent.split('\\n').reduce((a, b) => b.length > a.length ? b : a),
    code.scrollWidth - code.clientWidth
  ])"""
# After a change of width: laid out anew, and every picture that is shown has loaded.
SETTLED = """() => {
  const shown = [...document.querySelectorAll('article img')].filter(i => i.clientWidth);
  return Promise.allSettled(shown.map(i => i.decode()));
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *_):
    pass


def opened(context, url):
  """A page that begins to load, and the list of what goes wrong in it."""
  page, faults = context.new_page(), []
  page.on(
    "console",
    lambda message: faults.append(f"console: {message.text}") if message.type == "error" else None,
  )
  page.on("pageerror", lambda error: faults.append(f"script: {error}"))
  page.on("requestfailed", lambda request: faults.append(f"did not load: {request.url}"))
  page.on(
    "response",
    lambda answer: (
      faults.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None
    ),
  )
  page.goto(url, wait_until="commit")
  return page, faults


def shown_at(page, width):
  """The loaded page at this width, with all that it then shows."""
  page.set_viewport_size({"width": width, "height": 900})
  page.evaluate(SETTLED)


def check(page, faults):
  """Appends what is wrong with a page as it is shown, as a person would name it."""
  images = page.eval_on_selector_all(
    "article img",
    "all => all.map(i => [i.getAttribute('src'), i.alt, i.naturalWidth, i.clientWidth])",
  )
  for source, text, natural, shown in images:
    if not natural:
      faults.append(f"missing image: {source}")
    if not text:
      faults.append(f"image without a text alternative: {source}")
    if shown and shown < 250:
      faults.append(f"image only {shown} pixels wide: {source}")
    if shown and "card" in source and natural > 1.1 * shown:
      faults.append(f"a card's picture shrunk from {natural} to {shown} pixels: {source}")
  if images and not any(shown for *_, shown in images):
    faults.append("no image is visible in this theme")
  prose = page.evaluate(PROSE)
  faults += [f"an example outside code: {text.strip()[:80]}" for text in prose if ">>>" in text]
  if page.viewport_size["width"] >= WIDTHS["desktop"]:
    for text, beyond in page.evaluate(WIDE_CODE):
      faults.append(f"code {beyond} pixels wider than its box: {text[:80]}")
  wide, window = page.evaluate(
    "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
  )
  if wide > window:
    faults.append(f"{wide} pixels wide in a window of {window}")


def unfound(site):
  """The searches that do not find their page in the built index."""
  found = {}
  for item in json.loads((site / "search.json").read_text())["items"]:
    page, text = item["location"].split("/")[0], f"{item['title']} {item['text']}"
    found[page] = f"{found.get(page, '')} {text}"

  def finds(word, page):  # whole words: every "array" contains "ray"
    return re.search(rf"\b{re.escape(word)}\b", found.get(page, ""), re.I)

  wrong = [word for word, page in SEARCHES.items() if not finds(word, page)]
  return [f"search: {word!r} does not find {SEARCHES[word]}" for word in wrong]


def unlinked(site):
  """Links without a target in the site, which those that templates write may be; entries without a
  guide; and sources of examples that a search would find before the guides."""
  text = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
  faults = []
  for path, page in text.items():
    for link in sorted(set(re.findall(r'<a [^>]*?href="([^"?:]+)"', page))):
      place, _, anchor = html.unescape(link).partition("#")
      target = (path.parent / place).resolve() if place else path
      target = target / "index.html" if target.is_dir() else target
      if not target.exists() or (anchor and f'id="{anchor}"' not in text.get(target, "")):
        faults.append(f"{path.relative_to(site)}: no target: {link}")
    if page.count(">Guide</a>") < len(re.findall(r'<h2 id="optax_wrappers\.', page)):
      faults.append(f"{path.relative_to(site)}: an entry without a guide")
  for item in json.loads((site / "search.json").read_text())["items"]:
    if item["location"].startswith("gallery") and "<pre>" in item["text"]:
      faults.append(f"search: finds the source of an example: {item['location']}")
  return faults


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("site", type=pathlib.Path)
  parser.add_argument("--screenshots", type=pathlib.Path, help="folder for a picture of each page")
  args = parser.parse_args()
  browser_path = shutil.which("chromium")
  if browser_path is None:
    parser.error("chromium is not installed; Debian has it as a package of that name")
  pages = sorted(
    str(path.relative_to(args.site))
    for path in args.site.rglob("*.html")
    if path.name != "404.html"
  )
  if not pages:
    parser.error(f"no pages in {args.site}")

  server = http.server.ThreadingHTTPServer(
    ("127.0.0.1", 0), functools.partial(Quiet, directory=args.site)
  )
  threading.Thread(target=server.serve_forever, daemon=True).start()
  address = f"http://127.0.0.1:{server.server_port}"
  faults = unfound(args.site) + unlinked(args.site.resolve())
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
    for theme in THEMES:
      context = browser.new_context(color_scheme=theme)
      for first in range(0, len(pages), AT_ONCE):
        names = pages[first : first + AT_ONCE]
        loading = [opened(context, f"{address}/{name}") for name in names]
        for name, (page, found) in zip(names, loading):
          page.wait_for_load_state("networkidle")
          for size, width in WIDTHS.items():
            shown_at(page, width)
            check(page, found)
            faults += [f"{name} ({size}, {theme}): {fault}" for fault in found]
            found.clear()
            if args.screenshots:
              shot = name.replace("/index.html", "").replace("/", "-")
              page.screenshot(path=args.screenshots / f"{shot}-{size}-{theme}.png", full_page=True)
          page.close()
      context.close()
    browser.close()
  server.shutdown()
  print(
    "\n".join(faults)
    or f"{len(pages)} pages, {len(WIDTHS)} widths, {len(THEMES)} themes: no faults"
  )
  sys.exit(bool(faults))


if __name__ == "__main__":
  main()
