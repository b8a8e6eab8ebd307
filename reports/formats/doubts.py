"""What is impossible or suspicious in the requests of a measured run. One function a doubt; it knows no format.

Each says how many requests are concerned, and shows the first few with both values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.words import requests as counted

if TYPE_CHECKING:
    import polars as pl

SHOWN = 3
TOLERANCE = 0.01
"""Share of E2E, and 2 ms, that TTFT and TPOT may miss it by: files round."""
TOLERANCE_S = 0.002
MANY_TOKENS = 10
NO_STREAM_S = 1e-4
"""No engine is faster for one token; answers in one piece have 0."""
LONG_PAUSE_S = 600.0


def of(frame: pl.DataFrame, duration_s: float | None) -> list[str]:
    """All doubts about requests as `request_table` gives them. duration_s: what the file states, if it does."""
    found = (
        _failed(frame),
        *_times(frame),
        _tpot_against_e2e(frame),
        _gaps_against_e2e(frame),
        *_chunks(frame),
        _not_streamed(frame),
        *_lengths(frame),
        *_clock(frame),
        _longer_than_run(frame, duration_s),
    )
    return [doubt for doubt in found if doubt]


def _say(what: str, rows: pl.DataFrame, show: Callable[[Mapping[str, Any]], str]) -> str:
    """`what in 5 requests: request 3 (...), ... and 2 more`; empty where there are no rows."""
    if not len(rows):
        return ""
    shown = [f"{row['label']} ({show(row)})" for row in rows.head(SHOWN).iter_rows(named=True)]
    more = f" and {len(rows) - SHOWN:,} more" if len(rows) > SHOWN else ""
    return f"{what} in {counted(len(rows))}: {', '.join(shown)}{more}"


def _failed(frame: pl.DataFrame) -> str:
    rows = frame.filter(frame["error"].is_not_null())
    return _say("failures, left out of every figure,", rows, lambda row: _last_line(row["error"]))


def _times(frame: pl.DataFrame) -> Iterator[str]:
    done = frame.filter(frame["error"].is_null())
    for name, column in (("TTFT", "ttft_s"), ("E2E", "e2e_s")):
        rows = done.filter(done[column] <= 0)
        yield _say(f"{name} of 0 or less", rows, lambda row, column=column: _s(row[column]))  # type: ignore[misc]
    rows = done.filter(done["e2e_s"] < done["ttft_s"])
    yield _say("E2E below TTFT", rows, lambda row: f"{_s(row['e2e_s'])} against {_s(row['ttft_s'])}")
    unknown = done.filter(done["ttft_s"].is_null() & (done["output_tokens"] > 0))
    yield _say("no time of the first token (not streamed?)", unknown, lambda row: f"E2E {_s(row['e2e_s'])}")


def _tpot_against_e2e(frame: pl.DataFrame) -> str:
    several = frame.filter(frame["error"].is_null() & (frame["output_tokens"] > 1))
    parts = several.with_columns(
        parts=several["ttft_s"] + several["said_tpot_s"] * (several["output_tokens"] - 1),
    )
    return _say(
        "TTFT + TPOT x (tokens - 1) is not E2E",
        _unlike(parts),
        lambda row: f"{_s(row['parts'])} against {_s(row['e2e_s'])}",
    )


def _gaps_against_e2e(frame: pl.DataFrame) -> str:
    several = frame.filter(frame["error"].is_null() & (frame["itl_s"].list.len() > 0))
    parts = several.with_columns(parts=several["ttft_s"] + several["itl_s"].list.sum())
    return _say(
        "TTFT + all ITLs is not E2E", _unlike(parts), lambda row: f"{_s(row['parts'])} against {_s(row['e2e_s'])}"
    )


def _unlike(parts: pl.DataFrame) -> pl.DataFrame:
    return parts.filter((parts["parts"] - parts["e2e_s"]).abs() > TOLERANCE * parts["e2e_s"].abs() + TOLERANCE_S)


def _chunks(frame: pl.DataFrame) -> Iterator[str]:
    import polars as pl

    listed = frame.filter(frame["error"].is_null() & frame["itl_s"].is_not_null())
    gaps = listed["itl_s"]
    counts = listed.with_columns(
        chunks=gaps.list.len().cast(pl.Int64) + 1,
        zeros=gaps.list.eval(pl.element() == 0).list.sum(),
        negative=gaps.list.eval(pl.element() < 0).list.sum(),
    )
    yield _say(
        "gaps below 0 s between chunks",
        counts.filter(counts["negative"] > 0),
        lambda row: f"{row['negative']:,} of {row['chunks'] - 1:,}",
    )
    yield _say(
        "gaps of 0 s between chunks, which arrived together,",
        counts.filter(counts["zeros"] > 0),
        lambda row: f"{row['zeros']:,} of {row['chunks'] - 1:,}",
    )
    # the last token often has no text, and so no chunk; answers in one piece are told of elsewhere
    whole = (counts["chunks"] == 1) & (counts["output_tokens"] >= MANY_TOKENS)
    fewer = counts.filter((counts["chunks"] < counts["output_tokens"] - 1) & ~whole)
    yield _say("several tokens a chunk, so that ITL is no time between tokens,", fewer, _per_chunk)
    more = counts.filter(counts["chunks"] > counts["output_tokens"].clip(1))
    yield _say("more chunks than tokens", more, _per_chunk)
    if counts.height:
        bare = frame.filter(frame["error"].is_null() & frame["itl_s"].is_null() & (frame["output_tokens"] > 1))
        yield _say("no ITLs, so the run has none,", bare, lambda row: f"{row['output_tokens']:,} tokens")


def _not_streamed(frame: pl.DataFrame) -> str:
    done = frame.filter(frame["error"].is_null() & (frame["output_tokens"] >= MANY_TOKENS) & (frame["ttft_s"] > 0))
    rest = done["e2e_s"] - done["ttft_s"]
    return _say(
        "TTFT is E2E, as if the answer came in one piece (not streamed),",
        done.filter(rest.is_between(0, NO_STREAM_S * (done["output_tokens"] - 1), closed="left")),
        lambda row: f"{_s(row['ttft_s'])} against {_s(row['e2e_s'])} with {row['output_tokens']:,} tokens",
    )


def _lengths(frame: pl.DataFrame) -> Iterator[str]:
    done = frame.filter(frame["error"].is_null())
    yield _say(
        "no token counts", done.filter(done["output_tokens"].is_null() | done["input_tokens"].is_null()), _counts
    )
    yield _say("no output tokens", done.filter(done["output_tokens"] == 0), _counts)
    yield _say("no input tokens", done.filter(done["input_tokens"] == 0), _counts)
    low, high = done["requested_least"], done["requested_most"]
    wrong = done.filter((done["output_tokens"] < low) | (done["output_tokens"] > high))
    yield _say(
        "output tokens unlike what was requested",
        wrong,
        lambda row: f"{row['output_tokens']:,} against {_span(row['requested_least'], row['requested_most'])}",
    )


def _clock(frame: pl.DataFrame) -> Iterator[str]:
    """Sends that go back in time further than a request lasts, and pauses in which nothing runs: several runs?"""
    sent = frame.filter(frame["sent_s"].is_not_null())
    if len(sent) < 2:
        return
    times, lasting = sent["sent_s"].to_numpy(), sent["e2e_s"].fill_null(0).to_numpy()
    longest = max(float(lasting.max()), 0.0)
    back = np.flatnonzero(np.diff(times) < -(longest + 1))
    if len(back):
        a, b = int(back[0]), int(back[0]) + 1
        yield (
            f"the clock goes back from {_s(times[a])} at {sent['label'][a]} to {_s(times[b])} at {sent['label'][b]}, "
            "further than any request lasts: several runs in one file, or a clock that was set?"
        )
    order = np.argsort(times, kind="stable")
    pauses = times[order][1:] - np.maximum.accumulate((times + lasting)[order])[:-1]
    largest = int(np.argmax(pauses))
    others = float(np.delete(pauses, largest).max(initial=0.0))
    if len(pauses) > 1 and pauses[largest] > max(LONG_PAUSE_S, 10 * others):
        before, after = sent["label"][int(order[largest])], sent["label"][int(order[largest + 1])]
        yield (
            f"nothing runs for {_s(pauses[largest])} between {before} and {after}: several runs in one file, or a "
            "clock that was set?"
        )


def _longer_than_run(frame: pl.DataFrame, duration_s: float | None) -> str:
    if duration_s is None:
        return ""
    ends = frame.with_columns(end_s=frame["sent_s"] + frame["e2e_s"])
    late = ends.filter(ends["error"].is_null() & (ends["end_s"] > 1.01 * duration_s + 0.1))
    return _say(
        "the end comes after that of the run",
        late,
        lambda row: f"{_s(row['end_s'])} after the first send against a duration of {_s(duration_s)}",
    )


def _last_line(error: str) -> str:
    """Of a traceback the line that says what happened."""
    return (error.strip().splitlines() or ["no reason given"])[-1][:80]


def _s(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.6g} s"


def _per_chunk(row: Mapping[str, Any]) -> str:
    return f"{row['chunks']:,} chunks for {row['output_tokens']:,} tokens"


def _counts(row: Mapping[str, Any]) -> str:
    said = ("unknown" if row[name] is None else f"{row[name]:,}" for name in ("input_tokens", "output_tokens"))
    return " in, ".join(said) + " out"


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
