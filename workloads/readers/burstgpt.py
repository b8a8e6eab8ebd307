"""BurstGPT, releases 1 to 3: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type` as CSV.

Times are seconds from midnight of day 1. A failed request has no response tokens: left out and counted. Release 3 has
two columns more, `Session ID` (empty for API calls, which stand alone) and `Elapsed time` (whole response, seconds):
the think time of a turn is the gap from the end of the answer before. Source: github.com/HPMLL/BurstGPT (KDD'25).
"""

from __future__ import annotations

import numpy as np

from workloads.chains import follow
from workloads.readers.clean import Requests, noted, to_trace
from workloads.readers.columns import Texts, read_columns, times, tokens
from workloads.readers.files import TraceFile, missing
from workloads.readers.options import ReadOptions
from workloads.trace import Ints, Trace, Turns

OPTIONS: tuple[str, ...] = ()


def lacks(file: TraceFile) -> list[str]:
    """What the header lacks to be of this format, in words; empty when it is."""
    names = ["Timestamp", "Request tokens", "Response tokens"]
    sessions = {"Session ID", "Elapsed time"}
    return missing(file, *names, *sorted(sessions if sessions & set(file.columns) else ()))


def read(file: TraceFile, options: ReadOptions) -> Trace:
    """The trace of an opened file. Raises ServecastError by column and row."""
    arrival, prompt, output = times("Timestamp"), tokens("Request tokens"), tokens("Response tokens")
    session = Texts("Session ID", optional=True, gaps=True)
    elapsed = times("Elapsed time", optional=True, gaps=True)
    blank = read_columns(file, [arrival, prompt, output, session, elapsed])
    notes: list[str] = []

    def turns(rows: Ints) -> Turns:
        previous = follow(session.codes[rows])
        start = arrival.values[rows]
        end = start + np.nan_to_num(elapsed.values[rows])
        think_s = np.where(previous >= 0, start - end[previous], 0.0)
        if early := int(np.count_nonzero(think_s < 0)):
            notes.append(f"{early:,} turns were sent before the answer before had ended; their think time is 0 s")
        return Turns(previous, think_s.clip(min=0))

    failed = {"failed (0 response tokens)": output.values == 0}
    trace = to_trace(
        file,
        blank,
        Requests(arrival.values, prompt, output, turns=turns if session.seen else None, skip=failed),
    )
    return noted(trace, *notes)
