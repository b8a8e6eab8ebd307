"""What a person can say about a file that the file does not say itself."""

from __future__ import annotations

from dataclasses import dataclass, fields

from servecast.errors import ServecastError, one_of
from workloads.trace import MAX_TIME_S


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """None or False: as the format has it. Each format says which of these it understands.

    block_tokens: tokens of a prefix block. spread_s: sessions that carry no start of their own begin at random times
    in [0, spread_s) seconds instead of all at 0. shared_prefix: sessions with equal tool schema and system prompt share
    those blocks. seed: of the random draws.
    """

    block_tokens: int | None = None
    spread_s: float | None = None
    shared_prefix: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.block_tokens is not None and not 1 <= self.block_tokens <= 2**20:
            problems.append(f"block_tokens: {self.block_tokens} is not a whole number of tokens from 1 to {2**20}")
        if self.spread_s is not None and not 0 <= self.spread_s <= MAX_TIME_S:
            problems.append(f"spread_s: {self.spread_s} is not a number of seconds from 0 to {MAX_TIME_S:g}")
        if problems:
            raise ServecastError(*problems)

    def given(self) -> list[str]:
        """Names of the options that were set (the seed alone asks for nothing)."""
        return [f.name for f in fields(self) if f.name != "seed" and getattr(self, f.name) not in (None, False)]


def check_options(options: ReadOptions, format: str, understood: tuple[str, ...]) -> None:
    """Raises ServecastError for an option that the format would ignore."""
    if ignored := [name for name in options.given() if name not in understood]:
        does = f"it understands {one_of(understood)}" if understood else "it takes none"
        raise ServecastError(f"format {format} has no option {one_of(ignored)}; {does}")
