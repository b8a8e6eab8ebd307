"""A page in a real browser: what it drew, and whether it complained."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest


def figures_drawn(html: str, folder: Path) -> int:
    """How many figures headless Chromium draws of the page, after it has said nothing on its console.

    Skips the test, visibly, where there is no browser.
    """
    return _opened(html, folder).count('<div class="plot-container plotly"')


def dom(html: str, folder: Path, name: str, width: int = 1280) -> str:
    """What the page's own script left in `document.body.dataset`, under that name; otherwise the same. `width`: of the
    screen in pixels; headless Chromium has no window below 500, so that the page is then in a frame of that width."""
    if width < 500:
        inner = escape(html)
        html = f"""<!DOCTYPE html><body>
<iframe srcdoc="{inner}" style="width: {width}px; height: 2400px; border: 0"></iframe>
<script>setInterval(() => Object.assign(document.body.dataset,
  document.querySelector("iframe").contentDocument?.body?.dataset), 100);</script></body>"""
    found = re.search(rf'<body[^>]* data-{name}="([^"]*)"', _opened(html, folder))
    assert found, "the script did not come to its end"
    return unescape(found[1])


def _opened(html: str, folder: Path) -> str:
    """The page's elements after its scripts have run."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs a chromium binary on the PATH")
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", "--window-size=1280,2400",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in done.stderr
    return done.stdout
