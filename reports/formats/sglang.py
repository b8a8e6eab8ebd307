"""sglang's serving benchmark: one JSON line a run, also `--output-details`.

Seconds in arrays, milliseconds in statistics. There are no send times; E2E per request is not recorded either, but the
last token follows from TTFT and ITLs. Source: python/sglang/benchmark/serving.py in github.com/sgl-project/sglang.
"""

from __future__ import annotations

import math

from reports.formats import figures
from reports.formats.content import ResultFile
from reports.formats.details import has_details, rate_of, requests_of, stated_of
from reports.formats.fields import Fields, dig, is_number, named
from reports.formats.found import Found

NEEDED = ("duration", "completed", "total_input_tokens", "total_output_tokens", "total_output_tokens_retokenized")
_OURS = {"total_token_throughput": "total_throughput"}
STATED = {
    key: _OURS.get(key, key.replace("e2el_ms", "e2e_latency_ms"))
    for key in figures.KEYS
    if key not in ("duration", "submitted")
}
LOOSE = {key: 0.02 for key in figures.KEYS if key.endswith(("e2el_ms", "tpot_ms"))}
"""The tool's E2E, and with it its TPOT, ends with the last event of the stream, ours with the last token."""
NOTES = (
    "TTFT begins when the request is sent, the set-up of its connection (a new one each) included, and ends with the "
    "first text that is not empty",
    "E2E and TPOT end with the last token where they are computed from requests, with the last event of the stream "
    "where the file states them",
    "ITL is the gap between chunks divided by their tokens, once a token (endpoint /generate), or one gap a chunk",
    "rates are over the client's whole duration; output tokens are those the server counted, not retokenised",
    "every figure is over the requests that succeeded",
)


def lacks(file: ResultFile) -> list[str]:
    """What the file lacks to be of this format, in words; empty when it is."""
    return file.lacks(*NEEDED)


def read(file: ResultFile, problems: list[str]) -> list[Found]:
    """The runs of the file; mistakes by line and key."""
    return [_run(Fields(file.where(line), found, problems)) for line, found in file.objects]


def _run(run: Fields) -> Found:
    stated = stated_of(run, STATED, NEEDED)
    rate, notes = rate_of(run)
    retokenized = run.count("total_output_tokens_retokenized", need=True)
    server = run.found.get("server_info")
    run.used |= {"server_info"}
    if retokenized is not None and retokenized != stated.get("total_output_tokens"):
        notes.append(f"tokenised again, the answers have {retokenized:,} tokens")
    return Found(
        tool="sglang",
        source=run.where,
        version=named(dig(server, "version")) or "",
        model=named(dig(server, "served_model_name"), dig(server, "model_path")),
        requests=requests_of(run, "--output-details", _asked(run)) if has_details(run) else None,
        stated=stated,
        tolerance=LOOSE,
        duration_s=run.number("duration", least=figures.SHORTEST_S, need=True),
        rate=rate,
        concurrency=run.number("max_concurrency", least=1),
        unit="seconds in arrays and milliseconds in statistics",
        notes=(*NOTES, *notes, *run.unused()),
    )


def _asked(run: Fields) -> tuple[int, int] | None:
    """The least and most output tokens that the data set asked for, where the file says that."""
    if run.text("dataset_name") not in ("random", "random-ids"):
        return None
    most, ratio = run.count("random_output_len"), run.number("random_range_ratio", least=0, most=1)
    if most is None or ratio is None or not is_number(ratio):
        return None
    return max(1, math.floor(most * ratio)), most
