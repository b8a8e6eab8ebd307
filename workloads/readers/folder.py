"""A folder in which every JSON file is one session, read as if it were one file; what is said names the file in it.

Files are taken in order of their names. It knows nothing of what a session holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servecast.errors import ServecastError, one_of
from workloads.readers.files import TraceFile, open_trace

ENDINGS = (".json", ".json.gz")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class TraceFolder(TraceFile):
    """files: the session files, in order. others: names of what else lies in the folder; it is not read."""

    files: tuple[Path, ...] = ()
    others: tuple[str, ...] = ()

    def sessions(self) -> Iterator[tuple[str, dict[str, Any] | str]]:
        """(file, its session or what is wrong with the file); a file may also hold one session a line."""
        for path in self.files:
            try:
                file = open_trace(path)
                if file.kind != "jsonl":
                    raise ServecastError(f"{path}: it is not JSON")
                for row, found in file.sessions():
                    yield str(path) if row == "1" else f"{path}: row {row}", found
            except ServecastError as error:
                yield from ((str(path), problem.removeprefix(f"{path}: ")) for problem in error.problems)

    def mistakes(self, what: str, shown: Sequence[str], count: int) -> list[str]:
        """One sentence a file."""
        more = [f"{self.path}: {what} in {count - len(shown):,} more sessions"] * (count > len(shown))
        return [f"{where}: {what}" for where in shown] + more

    def note(self) -> str:
        """What was read, and what was not."""
        also = f"; not read: {_listed(self.others)}" if self.others else ""
        return f"format claude_code: a folder of {len(self.files):,} session files, in order of their names{also}"


def is_folder(path: Path) -> bool:
    """Also for a path that nothing can have: opening it says what is wrong."""
    try:
        return path.is_dir()
    except OSError:
        return False


def open_folder(path: Path) -> TraceFolder:
    """Lists the folder. Raises ServecastError where it holds no session files, or one of them twice."""
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise ServecastError(f"{path}: cannot be read: {error.strerror or error}") from None
    files = tuple(f for f in inside if f.name.endswith(ENDINGS) and not f.name.startswith(".") and not f.is_dir())
    others = tuple(f.name for f in inside if f not in files)
    if not files:
        holds = f"it holds {_listed(others)}" if others else "it is empty"
        raise ServecastError(
            f"{path}: a folder without session files ({one_of(ENDINGS)}): {holds}. A folder is read as Claude Code "
            "sessions, one a file; for any other trace, name the file"
        )
    names = [f.name.removesuffix(".gz") for f in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ServecastError(f"{path}: {_listed(twice, 'file')} both plain and packed (.gz); remove one of each")
    return TraceFolder(path, "jsonl", (), 1, files=files, others=others)


def _listed(names: Sequence[str], what: str = "other") -> str:
    more = ", ..." * (len(names) > _SHOWN)
    return f"{len(names):,} {what}{'s' * (len(names) > 1)} ({one_of(names[:_SHOWN])}{more})"
