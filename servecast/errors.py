"""What went wrong, said to a person. The one module that every room may import; it knows nothing of any of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ServecastError(Exception):
    """A user's mistake or an impossible request: one or more problems, each a complete sentence for a person.

    A problem says where (file, key or row), what was found, what is allowed and how to fix it. The command line
    prints every problem and exits with 2; nothing of this family ever reaches a user as a traceback.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: tuple[str, ...] = problems


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the allowed word closest to `word`, or an empty string when none is close; one of
    two letters (`l5`) may differ."""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6 if len(word) > 2 else 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def one_of(allowed: Iterable[str]) -> str:
    """The allowed words, for the end of a message: `a, b, c`."""
    return ", ".join(allowed)
