"""Published measurements that state enough to be run (`cases.yaml`, with their sources)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.run import run

DATA = "published benchmarks"
OURS = {
    "duration_s": "duration", "TTFT": "mean_ttft_ms", "TPOT": "mean_tpot_ms", "TTFT p50": "p50_ttft_ms",
    "ITL p50": "p50_itl_ms",
}  # fmt: skip


def compare() -> Iterator[Row]:
    """Every run of every case."""
    for case in yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text("utf-8")):
        for each in case["runs"]:
            found = run({
                "model": case["model"], "engine": case["engine"] | each.get("engine", {}),
                "cluster": {"gpu": case["gpu"]}, "workload": _workload(each),
            }).summary()  # fmt: skip
            assumed = case.get("assumed", "")
            ours = {metric: found[OURS[metric]] for metric in each["measured"]}
            yield Row(DATA, case["source"].split(": ")[-1], case["gpu"], "tp 1", each["load"], each["measured"], ours,
                      assumed=assumed)  # fmt: skip


def _workload(each: Mapping[str, Any]) -> dict[str, Any]:
    lengths = {name: _length(each[name], each.get("spread", 0.0)) for name in ("prompt", "output")}
    clients = {"closed_loop": {"concurrency": each["clients"]}} if "clients" in each else {}
    return {"num_requests": each["requests"], "lengths": lengths} | (clients or {"arrivals": {"kind": "all-at-once"}})


def _length(tokens: int, spread: float) -> dict[str, Any]:
    if not spread:
        return {"kind": "fixed", "tokens": tokens}
    return {"kind": "uniform", "low": round(tokens * (1 - spread)), "high": round(tokens * (1 + spread))}
