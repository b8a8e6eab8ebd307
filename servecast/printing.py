"""A page as a PDF: a browser of this machine prints it, because nothing else draws what it holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from servecast.errors import ServecastError, one_of

BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "msedge",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)  # fmt: skip
"""Names under which browsers are found that print without a screen."""
DRAWING_MS, MOST_S = 10_000, 180
"""Virtual time in which a page draws its figures; seconds after which a browser is given up."""


def print_page(page: Path, out: Path) -> None:
    """Write the HTML file `page` as a PDF. Raises ServecastError where there is no page or browser, or it fails."""
    if not page.is_file():
        raise ServecastError(f"{page}: no such file; give the folder that a command wrote its report to")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ServecastError(
            f"format pdf: a browser prints the page, and none is found ({one_of(BROWSERS[:-1])}); install one, or open "
            f"{page} in yours and print it"
        )
    with tempfile.TemporaryDirectory(prefix="servecast-print-", ignore_cleanup_errors=True) as scratch:
        printed = Path(scratch) / "page.pdf"
        command = [
            browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-extensions", "--no-pdf-header-footer",
            f"--user-data-dir={scratch}/profile", f"--virtual-time-budget={DRAWING_MS}", f"--print-to-pdf={printed}",
        ]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # it refuses to run as root otherwise
            command.append("--no-sandbox")
        try:
            done = subprocess.run([*command, page.resolve().as_uri()], capture_output=True, text=True, timeout=MOST_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServecastError(f"{browser} does not print {page}: {error}") from None
        if not printed.is_file():
            reason = done.stderr.strip()[-300:] or "no reason given; one in a snap sees no files outside of your home"
            raise ServecastError(f"{browser} does not print {page}: {reason}")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(printed, out)
        except OSError as error:
            raise ServecastError(f"{out}: cannot be written: {error.strerror or error}") from None
