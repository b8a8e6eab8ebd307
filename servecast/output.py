"""What several commands do with the terminal and the folder that they write into."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from servecast.errors import ServecastError

PARTIAL = 130
"""Exit status of what ctrl-C ended early."""


def write_texts(folder: Path, texts: Mapping[str, str], what: str) -> None:
    """Files of a folder, by name. Raises ServecastError that `what` cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServecastError(f"{folder}: cannot write {what}: {error.strerror or error}") from None


def progress_line() -> tuple[Callable[[str, int, int], None], Callable[[], None]]:
    """(show(what, done, in all), close): a line on a terminal's stderr, taken away at the end; nothing elsewhere."""
    if not sys.stderr.isatty():
        return (lambda what, done, total: None), (lambda: None)

    def show(what: str, done: int, total: int) -> None:
        sys.stderr.write(f"\r\x1b[K{what} {done} of {total}")
        sys.stderr.flush()

    def close() -> None:
        sys.stderr.write("\r\x1b[K")

    return show, close
