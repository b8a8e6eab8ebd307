"""The folder of a sweep: `sweep.json` says what it is, `rows/` has a row a run. One sweep at a time writes into it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from servecast.errors import ServecastError
from servecast.sweeping.axes import Axis, label
from servecast.sweeping.runs import FAILED, Base, Row

if TYPE_CHECKING:
    import polars as pl

EVERY_S = 2.0
"""Rows are written so often: what a killed sweep has to run again."""
SMALL_FILES = 64
"""So many files of new rows are made one."""
ROW_BYTES = 1000
"""What a row takes on the disk, about."""


class Store:
    """Rows as they come, to be used in a `with`. Raises ServecastError where the folder holds something else, is in
    use, or cannot be written."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], types: Mapping[str, type]) -> None:
        self.folder, self._types = folder, dict(types)
        self._rows = folder / "rows"
        self._new: list[Row] = []
        self._small: list[Path] = []
        self._written = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / "lock")
            try:
                self._begin(facts)
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise self._unwritable(error) from None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.flush()
        except ServecastError:
            if kind is None:  # else the first error is the one to be said
                raise
        finally:
            self._lock.close()

    def _begin(self, facts: Mapping[str, Any]) -> None:
        """Make a new folder, or take up what an earlier call left."""
        file = self.folder / "sweep.json"
        text = json.dumps(facts, indent=2, default=str) + "\n"
        if file.exists():
            if problems := _differences(file, json.loads(text)):
                raise ServecastError(
                    f"{self.folder} holds another sweep: {'; '.join(problems)}. Give another --out, or remove it"
                )
        elif others := sorted(p.name for p in self.folder.iterdir() if p.name != "lock"):
            raise ServecastError(f"{self.folder}: holds other files ({others[0]}); give a new folder with --out")
        self._rows.mkdir(exist_ok=True)
        for left in self._rows.glob("*.part"):
            left.unlink()
        self.save(file.name, text)
        self._forget_failed()

    def _forget_failed(self) -> None:
        """Runs that broke are tried again: it may have been the machine."""
        for file in self._files():
            rows = _read(file)
            if (rows["status"] == FAILED).any():
                self._write(rows.filter(rows["status"] != FAILED), file)

    def add(self, row: Row) -> None:
        """Keep a row; it is on the disk a little later."""
        self._new.append(row)
        if time.monotonic() - self._written > EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet. Raises ServecastError when that fails; nothing else is lost then."""
        from polars.exceptions import PolarsError

        try:
            if self._new:
                count = len(self._new)
                self._small.append(self._write(self._table(self._new), self._next()))
                del self._new[:count]
            if len(self._small) >= SMALL_FILES:
                whole = self._write(_together([_read(file) for file in self._small]), self._next())
                for file in self._small:
                    file.unlink()
                self._small = []
                assert whole.exists()
        except (OSError, PolarsError) as error:  # polars has its own word for a full disk
            raise self._unwritable(error) from None
        self._written = time.monotonic()

    def rows(self) -> pl.DataFrame:
        """All rows, each once, by point, seed and draw."""
        import polars as pl

        self.flush()
        tables = [_read(file) for file in self._files()]
        rows = _together([self._table([]), *tables]).unique("id", keep="first")
        return rows.with_columns(pl.col("draw").fill_null(0)).sort("point", "seed", "draw", "id")  # older ones lack it

    def ids(self) -> set[str]:
        """The runs that are there."""
        return set(self.rows()["id"])

    def save(self, name: str, text: str) -> Path:
        """Write a file beside the rows."""
        file, part = self.folder / name, self.folder / f"{name}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(file)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._unwritable(error) from None
        return file

    def _files(self) -> list[Path]:
        return sorted(self._rows.glob("*.parquet"))

    def _next(self) -> Path:
        numbers = [int(file.stem) for file in self._files()]
        return self._rows / f"{max(numbers, default=0) + 1:06}.parquet"

    def _write(self, table: pl.DataFrame, file: Path) -> Path:
        """Whole, or not at all."""
        part = file.with_suffix(".part")
        try:
            table.write_parquet(part, statistics=False)
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return file

    def _table(self, rows: list[Row]) -> pl.DataFrame:
        """Rows as a table; a column that holds nothing but null keeps its place, and takes another's type later."""
        import polars as pl

        kinds = {int: pl.Int64, float: pl.Float64, bool: pl.Boolean, str: pl.String}
        known: dict[str, Any] = {"id": pl.String, "point": pl.Int64, "seed": pl.Int64, "draw": pl.Int64}
        known |= {key: kinds[kind] for key, kind in self._types.items()}
        known |= {"status": pl.String, "error": pl.String, "scenario": pl.String, "wall_s": pl.Float64}
        for name in dict.fromkeys(name for row in rows for name in row):
            if name not in known:
                found = {type(row[name]) for row in rows if row.get(name) is not None}
                known[name] = pl.Boolean if found == {bool} else pl.Float64 if found else pl.Null
        columns = {name: [row.get(name) for row in rows] for name in known}
        return pl.DataFrame(
            [pl.Series(name, values, dtype=known[name], strict=False) for name, values in columns.items()]
        )

    def _unwritable(self, error: Exception) -> ServecastError:
        reason = getattr(error, "strerror", None) or error
        return ServecastError(
            f"{self.folder}: cannot write: {reason}. What was written before is kept; the same command goes on with it"
        )


def fingerprints(base: Base, axes: Iterable[Axis]) -> dict[str, str]:
    """Path -> hash of the content, of every file that the scenario or a value names: rows of before and after a change
    would not belong together."""
    named: list[tuple[Path, str]] = [(base.here, word) for axis in axes for word in _words(axis.settings)]
    named += [(folder, word) for folder in (base.path.parent, base.here) for word in _words(base.file({}).data)]
    found = {}
    for path in sorted({folder / word for folder, word in named if word and "\0" not in word and len(word) < 1000}):
        try:
            if path.is_file():
                with path.open("rb") as file:
                    found[str(path)] = _hash(file)
        except OSError:
            continue
    return found


def _hash(file: Any) -> str:
    whole = sha256()
    while block := file.read(2**20):
        whole.update(block)
    return whole.hexdigest()[:16]


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value, value.rpartition(":")[0]]  # file.py:Class
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [word for child in children for word in _words(child)]


def _differences(file: Path, facts: dict[str, Any]) -> list[str]:
    """How the sweep in `file` is not the one that `facts` describe."""
    try:
        there = json.loads(file.read_text(encoding="utf-8"))
        assert isinstance(there, dict)
    except (ValueError, AssertionError):
        return [f"{file.name} is not one of ours"]
    # Where it lies and how it is written changes no result, and how many draws there are none of those that there are.
    for written in ("path", "text", "intervals"):
        there.pop(written, None)
        facts.pop(written, None)
    return _unlike("", there, facts)


def _unlike(key: str, old: Any, new: Any) -> list[str]:
    """What differs, each with its place."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys([*old, *new])
        return [said for name in names for said in _unlike(f"{key} {name}".strip(), old.get(name), new.get(name))]
    return [] if old == new else [f"{key}: {_said(old)} there, {_said(new)} here"]


def _said(value: Any) -> str:
    text = "none" if value is None else label(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _read(file: Path) -> pl.DataFrame:
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        return pl.read_parquet(file, memory_map=False)
    except (OSError, PolarsError) as error:
        said = " ".join(str(error).split())[:200]
        raise ServecastError(f"{file}: cannot be read: {said}; remove it, and its runs are done again") from None


def _together(tables: list[pl.DataFrame]) -> pl.DataFrame:
    import polars as pl

    return pl.concat(tables, how="diagonal_relaxed", rechunk=True)


def _locked(path: Path) -> Any:
    """An open file that only one process can have."""
    file = path.open("a+", encoding="utf-8")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        who = file.read().strip()
        file.close()
        raise ServecastError(
            f"{path.parent}: another sweep writes there{f' (process {who})' if who else ''}; wait for it, or give "
            "another --out"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
