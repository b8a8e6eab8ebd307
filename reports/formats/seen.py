"""What a load generator would have seen of a simulated run: the arrays that all tools' figures are made of.

It knows no format: each tool's file has its own definitions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from reports.simulated import SimulatedRun
from reports.token_gaps import token_gaps
from servecast.errors import ServecastError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNKNOWN_GAPS = (
    "not known are the times of all tokens of several samples of a prompt, of speculative decoding, of pipelines, "
    "and of prompts that another replica read"
)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A run as its clients saw it; arrays [n] over all requests, by id. Seconds on the clock of the simulation.

    done: which succeeded. output: tokens, 0 of those that did not. ttft_s and e2e_s, which ends with the last token,
    are NaN where there is none. tpot_s: (E2E - TTFT) / (output - 1), NaN for one token. gaps: between the tokens of
    each (its messages, where the engine's stream_interval joins tokens), None where that is not known. errors: why it
    did not succeed, else None. limits: `ttft`, `tpot`, `e2e` -> the limit of each request's SLO, infinite where it has
    none.
    """

    run: SimulatedRun
    ids: Ints
    done: Bools
    sent_s: Floats
    input: Ints
    output: Ints
    ttft_s: Floats
    e2e_s: Floats
    tpot_s: Floats
    gaps: list[Floats | None]
    errors: list[str | None]
    limits: dict[str, Floats]

    @property
    def duration_s(self) -> float:
        """From time 0 to the last token."""
        return float(self.run.summary["duration"])

    @property
    def gaps_known(self) -> bool:
        """Of every request that succeeded."""
        return all(gaps is not None for gaps, done in zip(self.gaps, self.done, strict=True) if done)

    @property
    def all_gaps(self) -> Floats:
        """Of the requests that succeeded, one after the other, as far as they are known."""
        found = [gaps for gaps in self.gaps if gaps is not None]
        return np.concatenate(found) if found else np.empty(0)

    def meets(self, undefined: bool) -> dict[str, Bools]:
        """Whether each request that succeeded is within each limit (inclusive) that there is; `undefined`: what a TPOT
        that does not exist counts as."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        found = {}
        for name, limit in self.limits.items():
            value = values[name]
            within = np.where(np.isnan(value) & np.isfinite(limit), undefined, ~(value > limit))
            found[name] = within[self.done]
        return found

    def good(self, undefined: bool) -> int:
        """How many requests are within all limits, as `meets`."""
        met = np.ones(int(self.done.sum()), dtype=bool)
        for within in self.meets(undefined).values():
            met &= within
        return int(met.sum())


def seen(run: SimulatedRun) -> Seen:
    """The run's requests. Raises ServecastError when none finished: no tool has figures of that."""
    frame = run.requests
    done = (frame["status"] == "finished").to_numpy()
    if not done.any():
        raise ServecastError(
            f"{run.source}: no request finished, so a load generator would have no figures; formats csv and perfetto "
            "can show such a run"
        )
    gaps = _messages(run, token_gaps(frame, run.steps, run.gaps))
    if "network_s" in frame.columns:  # times are the server's
        frame = frame.with_columns(frame[name] + frame["network_s"] / 2 for name in ("first_token_s", "finish_s"))
        run = replace(run, requests=frame)
    first, finish, sent = (frame[name].to_numpy() for name in ("first_token_s", "finish_s", "arrival_s"))
    output = np.where(done, frame["output_tokens"].to_numpy(), 0)
    ttft, e2e = first - sent, np.where(done, finish - sent, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (e2e - ttft) / (output - 1), np.nan)
    return Seen(
        run=run,
        ids=frame["id"].to_numpy(),
        done=done,
        sent_s=sent,
        input=frame["prompt_tokens"].to_numpy().astype(np.int64),
        output=output,
        ttft_s=ttft,
        e2e_s=e2e,
        tpot_s=tpot,
        gaps=gaps,
        errors=[
            None if status == "finished" else status if reason == status else f"{status}: {reason}"
            for status, reason in frame.select("status", "reason").iter_rows()
        ],
        limits=_limits(run),
    )


def _messages(run: SimulatedRun, gaps: list[Floats | None]) -> list[Floats | None]:
    """The gaps between messages, of those between tokens: the first token is a message of its own."""
    of = run.stream_intervals
    if max(of) == 1:
        return gaps
    own = [of[0]] * len(gaps) if len(set(of)) == 1 else [of[i or 0] for i in run.requests["replica"].to_list()]
    return [
        g if g is None or not len(g) else np.add.reduceat(g, np.arange(0, len(g), n))
        for g, n in zip(gaps, own, strict=True)
    ]


def _limits(run: SimulatedRun) -> dict[str, Floats]:
    frame = run.requests
    own = frame["class"].cast(str).to_list() if "class" in frame.columns else [""] * len(frame)
    of = [run.class_slo.get(name, run.slo) for name in own]
    columns = {metric: np.array([slo.get(metric, np.inf) for slo in of]) for metric in ("ttft", "tpot", "e2e")}
    return {metric: limits for metric, limits in columns.items() if np.isfinite(limits).any()}
