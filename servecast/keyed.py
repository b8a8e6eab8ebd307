"""Where in a scenario a problem lies that a room found without knowing about scenarios."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from servecast.errors import ServecastError

T = TypeVar("T")
_NAMED = re.compile(r"(model|cluster|engine|workload)[.:]")


def keyed(key: str, call: Callable[[], T]) -> T:
    """`call()`, with the key path `key` in front of problems that do not begin with one."""
    try:
        return call()
    except ServecastError as error:
        raise ServecastError(*(p if _NAMED.match(p) else f"{key}: {p}" for p in error.problems)) from None
