"""Lines of JSON objects as columns of text. It knows neither files nor what the columns mean."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


def strict_frame(lines: Sequence[str], names: Sequence[str]) -> tuple[pl.DataFrame, list[int]]:
    """(the named keys as text, a row a line, null where absent; positions of lines that are neither blank nor an
    object with at least one of the keys). Numbers keep their value to the last bit, lists and objects are JSON text.
    """
    import polars as pl

    text = pl.Series(lines, dtype=pl.String).str.strip_chars()
    blank = text == ""
    schema = dict.fromkeys(names, pl.String)
    try:
        whole = "\n".join(text.set(blank, "{}").to_list()).encode()
        frame = pl.read_ndjson(whole, schema=schema)
        exact = len(frame) == len(lines) and bool(text.filter(~blank).str.starts_with("{").all())
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        exact = False  # polars does not say which line, and refuses numbers that are merely too large
    if not exact:
        values = [found if isinstance(found, dict) else {} for found in _parsed(lines)]
        frame = pl.DataFrame([[_text(value.get(name)) for name in names] for value in values], schema, orient="row")
    empty = frame.select(pl.all_horizontal(pl.all().is_null())).to_series()
    return frame, (empty & ~blank).arg_true().to_list()


def objects(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(position, the object of the line or what is wrong with it); blank lines are left out."""
    for i, found in enumerate(_parsed(lines)):
        if isinstance(found, dict) or found:
            yield i, found


def _parsed(lines: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    for line in lines:
        if not (text := line.strip()):
            yield ""
            continue
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            yield "is not a whole JSON object (is the file truncated?)"
            continue
        yield found if isinstance(found, dict) else "is not a JSON object; every line must hold one"


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # JSON can spell half a surrogate pair, text cannot hold it
    return None if value is None else json.dumps(value)
