"""What each replica did, and what became of each request: rows appended while the simulation runs, columns after it.

Rows are flat float64 numbers, since a million requests must fit into memory; integers are exact in them.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sim.request import Request

STEP_COLUMNS = (
    "replica",
    "step",  # number of the first step of the row, per replica
    "start_s",
    "end_s",
    "steps",  # engine steps in the row: 1, or a run of decode steps during which nothing changes
    "first_step_s",  # duration of the first step; the others follow a straight line up to end_s
    "prefill_requests",  # prompt chunks in the step
    "prefill_tokens",
    "decodes",  # sequences that decode one token in each step
    "kv_tokens",  # tokens in KV of the decoding sequences, before the first step
    "output_tokens",  # tokens produced for clients in all steps of the row together
    "gaps",  # of those in each step: tokens whose predecessor came one step earlier
    "running",  # requests, finished ones not yet released left out
    "waiting",  # requests in the queue once the first step was planned; later arrivals are not in it
    "kv_blocks",  # blocks in use once the first step was planned
    "kv_blocks_end",  # and at the end of the row, before anything is freed
    "preempted",
)
"""Columns of a step log row: one engine step, or a run of equal decode steps. Seconds, tokens, blocks, requests."""

REQUEST_COLUMNS = (
    "id",
    "replica",
    "arrival_s",
    "scheduled_s",
    "first_token_s",
    "finish_s",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "preemptions",
    "first_step",
    "last_step",
    "outcome",
)
"""Columns of a request row; `outcome` indexes OUTCOMES, times that do not exist are NaN. A cancelled request has its
end in `finish_s`, and like an unfinished one the tokens that its client received in `output_tokens`."""

OUTCOMES = ("length", "stop", "cancelled", "prompt_too_long", "over_max_model_len", "over_kv_cache", "unfinished")
"""What became of a request: finished at its `max_tokens` (`length`) or before it (`stop`); given up by its client
(`cancelled`); rejected at arrival: its prompt leaves no room in `max_model_len`, prompt + max_tokens exceed it, or it
can never fit the KV cache; or `unfinished` when the run was stopped early."""
LENGTH, STOP, CANCELLED, PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN, OVER_KV_CACHE, UNFINISHED = range(len(OUTCOMES))
FINISHED = (LENGTH, STOP)
REJECTED = (PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN, OVER_KV_CACHE)
"""Outcomes, by what they mean."""


class Rows:
    """A growing table of float64 rows: `extend(pack(...))` appends one, a number a column.

    Packed bytes, because that is four times faster than an array's `extend` and this is in the hot loop.
    """

    __slots__ = ("_data", "columns", "extend", "pack")

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._data = bytearray()
        self.extend = self._data.extend
        self.pack = Struct(f"{len(columns)}d").pack

    def __len__(self) -> int:
        return len(self._data) // (8 * len(self.columns))

    def table(self) -> dict[str, npt.NDArray[np.float64]]:
        """The columns by name, as views on the rows' memory: append nothing while they live."""
        rows = np.frombuffer(self._data, dtype=np.float64).reshape(-1, len(self.columns))
        return {name: rows[:, i] for i, name in enumerate(self.columns)}


class Log:
    """All rows of one simulation: steps, requests, and the token gaps that are longer than a step."""

    __slots__ = ("gaps", "requests", "steps")

    def __init__(self) -> None:
        self.steps = Rows(STEP_COLUMNS)
        self.requests = Rows(REQUEST_COLUMNS)
        self.gaps = array("d")
        """Seconds between two tokens of one request with a preemption or a skipped step between them."""

    def record(self, replica: int, request: Request, tokens: int) -> None:
        """What became of a request, whose client received `tokens` (or asked for them, if it was rejected)."""
        rows = self.requests
        rows.extend(
            rows.pack(
                request.id,
                replica,
                request.arrival_s,
                request.scheduled_s,
                request.first_token_s,
                request.finish_s,
                request.prompt_tokens,
                tokens,
                request.max_tokens,
                request.preemptions,
                request.first_step,
                request.finish_step if request.outcome in FINISHED else -1,
                request.outcome,
            )
        )
