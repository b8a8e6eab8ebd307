"""Columns of a trace file as arrays, checked: every mistake is kept with its rows, all of them are reported at once.

It knows no format. Batches of text become numbers one by one, so that memory holds the numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from servecast.errors import ServecastError, one_of
from workloads.readers.files import TraceFile
from workloads.trace import MAX_TIME_S, MAX_TOKENS, Floats, Ints

if TYPE_CHECKING:
    import polars as pl

Mask = NDArray[np.bool_]
SHOWN = 5
"""Rows that a message names; the rest are counted."""
ID_LIST = r"^\[\s*(?:-?\d{1,18}(?:\s*,\s*-?\d{1,18})*)?\s*\]$"
"""JSON text of whole numbers that fit 64 bits for sure."""


class Column(Protocol):
    """One column that is wanted; `add` takes a batch, `close` is called after the last one."""

    name: str
    optional: bool
    seen: bool

    def add(self, raw: pl.Series, blank: Mask, row: int) -> None: ...

    def close(self) -> None: ...

    def problems(self, file: TraceFile) -> list[str]: ...


class Checked:
    """What all columns share: mistakes by kind, with how many rows and the first few as text.

    optional: the column may be missing altogether; gaps: values may be absent in some rows. seen: any value was there.
    """

    def __init__(self, name: str, rule: str, *, optional: bool = False, gaps: bool = False) -> None:
        self.name, self.rule = name, rule
        self.optional, self.gaps, self.seen = optional, gaps, False
        self._mistakes: dict[str, tuple[int, list[str]]] = {}

    def _wrong(self, what: str, mask: Mask, row: int, raw: pl.Series | None) -> None:
        where = np.flatnonzero(mask)
        count, shown = self._mistakes.get(what, (0, []))
        for i in where[: SHOWN - len(shown)]:
            shown.append(str(row + i) + (f" ({_short(raw[int(i)])})" if raw is not None else ""))
        self._mistakes[what] = (count + where.size, shown)

    def problems(self, file: TraceFile) -> list[str]:
        """Sentences, by kind of mistake; none for an optional column that holds no value."""
        if self.optional and not self.seen:
            return []
        return [
            f"{file.path}: column {self.name!r} {what} in {file.rows(shown, count)}; {self.rule}"
            for what, (count, shown) in self._mistakes.items()
            if count
        ]


class Numbers(Checked):
    """float64 values. whole: token counts; least and most: what is allowed, after division by
    `divisor`. NaN stands where gaps allow no value."""

    def __init__(
        self,
        name: str,
        rule: str,
        *,
        least: float = 0,
        most: float,
        whole: bool = False,
        convert: Callable[[pl.Series], pl.Series] | None = None,
        divisor: float = 1.0,
        optional: bool = False,
        gaps: bool = False,
    ) -> None:
        super().__init__(name, rule, optional=optional, gaps=gaps)
        self.least, self.most, self.whole, self.divisor = least, most, whole, divisor
        self.convert = convert or numbers
        self._parts: list[Floats] = []
        self.values: Floats = np.empty(0)

    def add(self, raw: pl.Series, blank: Mask, row: int) -> None:
        """A batch whose first row has the number `row`; `blank` rows hold nothing."""
        read = self.convert(raw)
        unread, absent = read.is_null().to_numpy(), raw.is_null().to_numpy()
        values = read.to_numpy().astype(np.float64, copy=False) / self.divisor
        finite = np.isfinite(values)
        kinds = {
            "is empty": absent & ~blank & (not self.gaps),
            "is not understood": unread & ~absent,
            "is not finite": ~finite & ~unread,
            "is negative": finite & (values < min(self.least, 0)),
            "is too large": finite & (values > self.most),
        }
        if self.least > 0:
            kinds["is too small"] = finite & (values >= 0) & (values < self.least)
        if self.whole:
            kinds["is fractional"] = finite & (values >= 0) & (values <= self.most) & (values != np.floor(values))
        for what, mask in kinds.items():
            self._wrong(what, mask, row, None if what == "is empty" else raw)
        self.seen |= not absent.all()
        self._parts.append(values)

    def close(self) -> None:
        """All batches as one array."""
        self.values = np.concatenate(self._parts) if self._parts else np.empty(0)
        self._parts.clear()


class Texts(Checked):
    """Words, as whole numbers from 0 in order of first appearance (-1 where there is none), and the words."""

    def __init__(self, name: str, rule: str = "give one value a row", *, optional: bool = False, gaps: bool = False):
        super().__init__(name, rule, optional=optional, gaps=gaps)
        self._parts: list[pl.Series] = []
        self.codes: Ints = np.empty(0, dtype=np.int64)
        self.words: tuple[str, ...] = ()

    def add(self, raw: pl.Series, blank: Mask, row: int) -> None:
        """A batch whose first row has the number `row`."""
        import polars as pl

        nested = raw.dtype.is_nested()
        text = pl.Series([None], dtype=pl.String).new_from_index(0, len(raw)) if nested else raw.cast(pl.String)
        text = text.set(text == "", None)
        absent = text.is_null().to_numpy()
        self._wrong("is empty", absent & ~blank & (not self.gaps), row, None)
        self.seen |= not absent.all()
        self._parts.append(text)

    def close(self) -> None:
        """All batches as codes."""
        import polars as pl

        whole = pl.concat(self._parts, rechunk=True) if self._parts else pl.Series([], dtype=pl.String)
        self._parts.clear()
        words = whole.drop_nulls().unique(maintain_order=True)
        number = pl.DataFrame({"word": words, "code": np.arange(len(words))})
        codes = pl.DataFrame({"word": whole}).join(number, on="word", how="left", maintain_order="left")["code"]
        self.codes = codes.fill_null(-1).to_numpy().astype(np.int64)
        self.words = tuple(words.to_list())


class Blocks(Checked):
    """Lists of whole numbers: ids of row i are ids[offsets[i]:offsets[i + 1]]; none where there is no list."""

    def __init__(self, name: str, *, optional: bool = False, gaps: bool = False) -> None:
        rule = "give a list of whole numbers of up to 18 digits, like [0, 1, 2]"
        super().__init__(name, rule, optional=optional, gaps=gaps)
        self._counts: list[Ints] = []
        self._ids: list[Ints] = []
        self.offsets: Ints = np.zeros(1, dtype=np.int64)
        self.ids: Ints = np.empty(0, dtype=np.int64)

    def add(self, raw: pl.Series, blank: Mask, row: int) -> None:
        """A batch whose first row has the number `row`."""
        import polars as pl

        absent = raw.is_null().to_numpy()
        if raw.dtype.base_type() is pl.List and raw.dtype.inner.is_integer():  # type: ignore[attr-defined]
            lists = raw.cast(pl.List(pl.Int64), strict=False)
            wrong = lists.list.eval(pl.element().is_null()).list.any().fill_null(False).to_numpy()
            counts, ids = lists.list.len(), lists.explode(empty_as_null=False, keep_nulls=False)
        else:
            text = raw if raw.dtype == pl.String else pl.Series([""] * len(raw), dtype=pl.String)
            wrong = ~text.str.strip_chars().str.contains(ID_LIST).fill_null(True).to_numpy()
            inner = text.set(pl.Series(wrong | absent), "").str.strip_chars(" \t[]")
            counts = inner.str.count_matches(",", literal=True).cast(pl.Int64) + (inner != "")
            ids = inner.filter(inner != "").str.split(",").explode().str.strip_chars().cast(pl.Int64)
        self._wrong("is empty", absent & ~blank & (not self.gaps), row, None)
        self._wrong("is not understood", wrong & ~absent, row, raw)
        self.seen |= not absent.all()
        self._counts.append(counts.fill_null(0).to_numpy().astype(np.int64))
        self._ids.append(ids.drop_nulls().to_numpy().astype(np.int64))

    def close(self) -> None:
        """All batches as two arrays."""
        counts = np.concatenate([np.zeros(1, dtype=np.int64), *self._counts])
        self.offsets = np.cumsum(counts)
        self.ids = np.concatenate([self.ids, *self._ids])
        self._counts.clear()
        self._ids.clear()


def tokens(name: str, *, optional: bool = False) -> Numbers:
    """A column of token counts."""
    rule = f"token counts must be whole numbers from 0 to {MAX_TOKENS}"
    return Numbers(name, rule, most=MAX_TOKENS, whole=True, optional=optional)


def times(name: str, *, milliseconds: bool = False, optional: bool = False, gaps: bool = False) -> Numbers:
    """A column of times or durations from 0; `values` are seconds."""
    if milliseconds:
        rule = f"times must be milliseconds as numbers from 0 to {1e3 * MAX_TIME_S:g}"
    else:
        rule = (
            f"times must be seconds as numbers from 0 to {MAX_TIME_S:g} "
            "(above that, are they milliseconds? divide by 1000)"
        )
    divisor = 1e3 if milliseconds else 1.0  # dividing rounds once: 27482 ms are 27.482 s
    return Numbers(name, rule, most=MAX_TIME_S, divisor=divisor, optional=optional, gaps=gaps)


def read_columns(file: TraceFile, columns: Sequence[Column]) -> Mask:
    """Fill the columns from the file. Returns bool[rows]: which rows are blank. Raises ServecastError with every
    mistake of every column, by row, and for a file without rows.
    """
    import polars as pl

    blanks: list[Mask] = []
    for row, frame in file.load([column.name for column in columns]):
        blank = frame.select(pl.all_horizontal(pl.all().is_null())).to_series().to_numpy()
        for column in columns:
            column.add(frame[column.name], blank, row)
        blanks.append(blank)
    blank = np.concatenate(blanks) if blanks else np.empty(0, dtype=bool)
    if blank.all():
        raise ServecastError(f"{file.path}: no requests: a header ({one_of(file.columns)}) without rows below it")
    for column in columns:
        column.close()
    if problems := [problem for column in columns for problem in column.problems(file)]:
        raise ServecastError(*problems)
    return blank


def numbers(values: pl.Series) -> pl.Series:
    """float64 of a column of numbers or of their text; null where the text is not a number."""
    import polars as pl

    text = values.dtype == pl.String
    if not (text or values.dtype.is_numeric() or values.dtype == pl.Null):
        return pl.Series([None] * len(values), dtype=pl.Float64)
    return (values.str.strip_chars() if text else values).cast(pl.Float64, strict=False)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
