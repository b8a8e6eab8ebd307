"""Times in a wrong unit, recognised by what no engine and no run can do. It knows no format."""

from __future__ import annotations

from collections.abc import Mapping

FASTEST_TOKEN_MS = 0.1
"""A request gets no 10,000 tokens a second: several times what the fastest hardware does."""
FASTEST_FIRST_MS = 0.5
"""A request and its answer through a socket and one step of any model."""
SLOWEST_TOKEN_MS = 10_000.0
"""A token every 10 s is slower than weights read from disk for every token."""
LONGEST = 10.0
"""Mean E2E over duration: requests cut off by a measured window may be longer than it, but not that much."""


def wrong_units(summary: Mapping[str, float], source: str, unit: str) -> list[str]:
    """Problems of a run whose typical times cannot be in `unit` (of its file). Milliseconds in `summary`, but for the
    duration in seconds.
    """
    ttft, tpot, whole = (_typical(summary, name) for name in ("ttft_ms", "tpot_ms", "e2el_ms"))
    duration = summary.get("duration")
    allowed = f"times are {unit} here"
    if ttft is not None and 0 < ttft < FASTEST_FIRST_MS:
        return [
            f"{source}: half of the TTFTs are below {ttft:.4g} ms, and no engine answers within {FASTEST_FIRST_MS:g} "
            f"ms; {allowed}: if the file has a larger unit, such as seconds for milliseconds, multiply its times"
        ]
    if tpot is not None and 0 < tpot < FASTEST_TOKEN_MS and _decodes(ttft, whole):
        return [
            f"{source}: TPOT is {tpot:.4g} ms, and no engine gives a request a token every {FASTEST_TOKEN_MS:g} ms; "
            f"{allowed}: if the file has a larger unit, such as seconds for milliseconds, multiply its times"
        ]
    if tpot is not None and tpot > SLOWEST_TOKEN_MS:
        return [
            f"{source}: TPOT is {tpot / 1e3:.4g} s, and no engine takes {SLOWEST_TOKEN_MS / 1e3:g} s a token; "
            f"{allowed}: if the file has a smaller unit, such as milliseconds for seconds, divide its times"
        ]
    if whole is not None and duration is not None and whole > LONGEST * 1e3 * duration:
        return [
            f"{source}: requests take {whole / 1e3:.4g} s, but the whole run {duration:.4g} s; {allowed}, the duration "
            "in seconds: divide the times, or multiply the duration, that has another unit"
        ]
    return []


def _typical(summary: Mapping[str, float], name: str) -> float | None:
    return summary.get(f"median_{name}", summary.get(f"mean_{name}"))


def _decodes(ttft: float | None, whole: float | None) -> bool:
    """Whether a fair part of the time comes after the first token; where answers are not streamed none does."""
    return ttft is None or whole is None or whole - ttft > 0.01 * whole
