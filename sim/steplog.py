"""What each replica did, and what became of each request: rows appended while the simulation runs, columns after it.

Rows are flat float64 numbers; integers are exact in them. A long log goes to a file without a name, so that memory does
not grow with it, and columns are loaded when they are asked for.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from servecast.errors import ServecastError

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
    "decodes",  # sequences that decode in each step: one token, or drafts besides
    "kv_tokens",  # tokens in KV of the decoding sequences, before the first step
    "output_tokens",  # tokens produced for clients in all steps of the row together
    "gaps",  # in each step: sequences whose last tokens came one step earlier
    "running",  # requests, finished ones not yet released left out
    "waiting",  # requests in the queue once the first step was planned; later arrivals are not in it
    "kv_blocks",  # blocks in use once the first step was planned
    "kv_blocks_end",  # and at the end of the row, before anything is freed
    "preempted",
    "draft_tokens",  # drafted for the decodes, and verified, in each step
)
"""Columns of a step log row: one engine step, or a run of equal decode steps. Seconds, tokens, blocks, requests."""

REQUEST_COLUMNS = (
    "id",
    "replica",
    "arrival_s",  # when its client sent it
    "network_s",  # the way to the gateway and back, half of it each; the times below are those of the server
    "retried_s",  # after how long the last try was sent, where clients give up and try again
    "sent_s",  # a replica's front end has it
    "queued_s",  # and its engine
    "scheduled_s",
    "first_token_s",
    "finish_s",
    "prompt_tokens",
    "cached_tokens",  # of the prompt, found in the prefix cache when it was first admitted
    "output_tokens",
    "max_tokens",
    "preemptions",
    "first_step",
    "last_step",
    "samples",  # of its prompt: tokens and preemptions are those of all, times those of the first and the last
    "outcome",
)
"""Columns of a request row; `outcome` indexes OUTCOMES, times that do not exist are NaN. A cancelled request has its
end in `finish_s`, and like an unfinished one the tokens that its client received in `output_tokens`."""

GIVEN_UP_COLUMNS = ("id", "replica", "arrival_s", "end_s", "late", "again", "prompt_tokens", "output_tokens")
"""Columns of the log of tries that clients gave up: when each got to the gateway, and its end; whether that was because
the first token was not there in time (`late`), whether it is sent `again`; and what was computed for it: tokens in
steps with prompts (again after a preemption), and those of the answer that its client received."""

HOLD_COLUMNS = ("id", "replica", "start_s", "end_s", "blocks", "why")
"""Columns of the log of KV that was held between turns: for so many blocks of a request, from its last token until it
was let go, and why: an index of HOLDS."""
HOLDS = ("resumed", "expired", "given_up")
"""The next turn was admitted, the time was over, or nothing else could run (or the replica was gone)."""
RESUMED, EXPIRED, GIVEN_UP = range(len(HOLDS))

GAP_COLUMNS = ("id", "since_s", "end_s", "tokens")
"""Columns of the log of long gaps: times of two consecutive tokens of one request, how many tokens ended such a gap,
and the `id` of the request that was preempted or left out; -1 where all that decode waited for prompts."""

TRANSFER_COLUMNS = (
    "id",
    "prefill_replica",
    "decode_replica",
    "tokens",
    "bytes",
    "read_s",  # the prefill side is done with the prompt
    "reserved_s",  # the decode side has the blocks
    "start_s",  # links move bytes
    "end_s",
)
"""Columns of the log of transfers from prefill to decode replicas, one a request that was handed over."""

CHANGE_COLUMNS = ("time_s", "replica", "change", "requests")
"""Columns of the log of replicas that come and go; `change` indexes CHANGES, `requests` that a failure took."""

CHANGES = ("start", "up", "drain", "gone", "failed")
"""What becomes of a replica: it starts, takes requests, takes no more and ends what it has, is gone; or it fails."""
START, UP, DRAIN, GONE, DOWN = range(len(CHANGES))

LOSS_COLUMNS = ("id", "replica", "time_s", "output_tokens")
"""Columns of the log of requests that were lost with a replica, each time, and what they had until then."""

STAGE_COLUMNS = ("replica", "stage", "busy_s")
"""Columns of the log of pipeline stages: how long each computed."""

DRAFT_COLUMNS = ("replica", "sequences", "draft_tokens", "accepted_tokens")
"""Columns of the log of drafts, where engines speculate: sequences that decoded in a step, summed over all steps, what
was drafted for them, and what of it was right."""
LOAD_COLUMNS = ("id", "replica", "tier", "tokens", "since_s", "end_s")
"""Columns of the log of KV that requests load from tiers, by the index of the tier in its pool, from when they have
blocks for it until it is there; tier -1, and no tokens: from when they wait for what another one loads."""

TIER_COLUMNS = ("replica", "tier", "held", "stored", "dropped", "evicted", "prefetched")
"""Columns of the log of tiers, tokens at the end of a run: what each holds, and what was written to it, found no room,
and made room for others, in all. Of a tier that several replicas share the first one's row has it."""

OUTCOMES = (
    "length", "stop", "cancelled", "prompt_too_long", "over_max_model_len", "over_kv_cache", "unfinished", "over_step",
    "failed", "over_outstanding", "over_prompt_tokens",
)  # fmt: skip
"""What became of a request: finished at its `max_tokens` (`length`) or before it (`stop`); given up by its client
(`cancelled`); rejected at arrival: its prompt leaves no room in `max_model_len`, prompt + max_tokens exceed it, it can
never fit the KV cache, or its prompt is longer than the policy takes in one step (`over_step`); turned away by the
gateway: too many requests are not over yet (`over_outstanding`), or its prompt is too long for it
(`over_prompt_tokens`); `failed` with the last replica that it was retried on; or `unfinished` when the run was stopped
early."""
(
    LENGTH, STOP, CANCELLED, PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN, OVER_KV_CACHE, UNFINISHED, OVER_STEP, FAILED,
    OVER_OUTSTANDING, OVER_PROMPT_TOKENS,
) = range(len(OUTCOMES))  # fmt: skip
FINISHED = (LENGTH, STOP)
REJECTED = (
    PROMPT_TOO_LONG, OVER_MAX_MODEL_LEN, OVER_KV_CACHE, OVER_STEP, OVER_OUTSTANDING, OVER_PROMPT_TOKENS,
)  # fmt: skip
"""Outcomes, by what they mean."""


BLOCK = 2**18
"""Rows that leave memory together, and that are read together where not a whole column is needed."""

Floats = npt.NDArray[np.float64]
Order = npt.NDArray[np.intp]


class Rows:
    """A growing table of float64 rows: `extend(pack(...))` appends one, a number a column.

    Packed bytes, because that is four times faster than an array's `extend` and this is in the hot loop. `spill` moves
    full blocks to a file that vanishes with the table: column after column, so that one can be read without the others.
    """

    __slots__ = ("__weakref__", "_data", "_file", "_spilled", "columns", "extend", "pack")

    def __init__(self, columns: tuple[str, ...], data: bytes = b"") -> None:
        self.columns = columns
        self._data = bytearray(data)
        self._file: IO[bytes] | None = None
        self._spilled = 0  # rows in the file
        self.extend = self._data.extend
        self.pack = Struct(f"{len(columns)}d").pack

    def __len__(self) -> int:
        return self._spilled + len(self._data) // (8 * len(self.columns))

    def __reduce__(self) -> tuple[type[Rows], tuple[tuple[str, ...], bytes]]:
        table = self.table()  # a file does not travel
        return Rows, (self.columns, np.stack([table[name] for name in self.columns], axis=1).tobytes())

    def spill(self) -> None:
        """Move full blocks out of memory. Raises ServecastError when there is no room for them on the disk."""
        width = len(self.columns)
        while len(self._data) >= 8 * BLOCK * width:
            block = np.frombuffer(self._data, np.float64, BLOCK * width).reshape(BLOCK, width).T.tobytes()
            try:
                if self._file is None:
                    self._file = tempfile.TemporaryFile()  # noqa: SIM115
                    weakref.finalize(self, self._file.close)
                self._file.write(block)
                self._file.flush()
            except OSError as error:
                raise ServecastError(
                    f"cannot write the log of a long run to a temporary file in {tempfile.tempdir}: "
                    f"{error.strerror or error}; let TMPDIR name a folder on a larger disk"
                ) from None
            del self._data[: len(block)]
            self._spilled += BLOCK

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Rows from `start` to before `stop` (default: to the end) of a column, as an array of their own."""
        width, i, spilled = len(self.columns), self.columns.index(name), self._spilled
        stop = len(self) if stop is None else min(stop, len(self))
        out = np.empty(max(stop - start, 0))
        for first in range(start // BLOCK * BLOCK, min(stop, spilled), BLOCK):
            a, b = max(start, first), min(stop, first + BLOCK)
            where = 8 * (first * width + i * BLOCK + a - first)
            out[a - start : b - start] = np.memmap(self._file, np.float64, "r", where, b - a)  # type: ignore[call-overload]
        if stop > spilled:
            a = max(start, spilled)
            out[a - start :] = np.frombuffer(self._data).reshape(-1, width)[a - spilled : stop - spilled, i]
        return out

    def table(self) -> Table:
        """All rows."""
        return Table(self, 0, len(self))


class Table(Mapping[str, Floats]):
    """The columns of some rows by name, each loaded anew whenever it is asked for: hold none longer than it is needed.

    Rows `start` to before `stop`; with `order` those of them, counted from `start`, in that order.
    """

    __slots__ = ("_order", "_rows", "_start", "_stop")

    def __init__(self, rows: Rows, start: int, stop: int, order: Order | None = None) -> None:
        self._rows, self._start, self._stop, self._order = rows, start, stop, order

    def __getitem__(self, name: str) -> Floats:
        column = self._rows.column(name, self._start, self._stop)
        return column if self._order is None else column[self._order]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.columns)

    def __len__(self) -> int:
        return len(self._rows.columns)

    @property
    def height(self) -> int:
        """How many rows."""
        return self._stop - self._start if self._order is None else len(self._order)

    def take(self, order: Order) -> Table:
        """The rows at these positions, in that order."""
        return Table(self._rows, self._start, self._stop, order if self._order is None else self._order[order])

    def where(self, chosen: npt.NDArray[np.bool_]) -> Table:
        """The rows that are `chosen` (bool[height])."""
        return self if chosen.all() else self.take(np.flatnonzero(chosen))

    def blocks(self) -> Iterator[Table]:
        """The rows in pieces of BLOCK, at least one piece; loading a column of one reads little more than its rows."""
        for first in range(0, max(self.height, 1), BLOCK):
            last = min(first + BLOCK, self.height)
            if self._order is None:
                yield Table(self._rows, self._start + first, self._start + last)
            else:
                order = self._order[first:last]
                low, high = (int(order.min()), int(order.max())) if len(order) else (0, -1)
                yield Table(self._rows, self._start + low, self._start + high + 1, order - low)


class Log:
    """All rows of one simulation: steps, requests, transfers, replicas that come and go and what they lose, the stages
    of pipelines, drafts, and the token gaps that are not as long as a step."""

    __slots__ = (
        "changes", "drafts", "gaps", "given_up", "holds", "in_vain", "loads", "losses", "requests", "stages", "steps",
        "tiers", "transfers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps = Rows(STEP_COLUMNS)
        self.requests = Rows(REQUEST_COLUMNS)
        self.gaps = Rows(GAP_COLUMNS)
        """Between tokens of one request with a preemption, or steps that it was left out of, between them."""
        self.given_up = Rows(GIVEN_UP_COLUMNS)
        self.holds = Rows(HOLD_COLUMNS)
        self.in_vain = 0
        """Tokens of steps with prompts that began when who asked for them had been given up: they had been planned."""
        self.transfers = Rows(TRANSFER_COLUMNS)
        self.changes = Rows(CHANGE_COLUMNS)
        self.losses = Rows(LOSS_COLUMNS)
        self.stages = Rows(STAGE_COLUMNS)
        self.drafts = Rows(DRAFT_COLUMNS)
        self.loads = Rows(LOAD_COLUMNS)
        self.tiers = Rows(TIER_COLUMNS)

    def spill(self) -> None:
        """Move what fills blocks out of memory."""
        self.steps.spill()
        self.requests.spill()
        self.gaps.spill()
        self.given_up.spill()
        self.holds.spill()
        self.transfers.spill()
        self.loads.spill()

    def transfer(self, *row: float) -> None:
        """KV was moved: TRANSFER_COLUMNS."""
        self.transfers.extend(self.transfers.pack(*row))

    def change(self, *row: float) -> None:
        """A replica came or went: CHANGE_COLUMNS."""
        self.changes.extend(self.changes.pack(*row))

    def loss(self, *row: float) -> None:
        """A request was lost with its replica: LOSS_COLUMNS."""
        self.losses.extend(self.losses.pack(*row))

    def hold(self, replica: int, request: Request, blocks: int, end_s: float, why: int) -> None:
        """The KV of a request that is over is held no longer."""
        self.holds.extend(self.holds.pack(request.id, replica, request.finish_s, end_s, blocks, why))

    def stage(self, *row: float) -> None:
        """What a pipeline stage did, in all: STAGE_COLUMNS."""
        self.stages.extend(self.stages.pack(*row))

    def drafted(self, *row: float) -> None:
        """What a replica drafted, in all: DRAFT_COLUMNS."""
        self.drafts.extend(self.drafts.pack(*row))

    def load(self, *row: float) -> None:
        """A request loads KV from a tier, or waits for one that does: LOAD_COLUMNS."""
        self.loads.extend(self.loads.pack(*row))

    def tier(self, *row: float) -> None:
        """What a tier did, in all: TIER_COLUMNS."""
        self.tiers.extend(self.tiers.pack(*row))

    def gap(self, since_s: float, end_s: float, tokens: int, id: int = -1) -> None:
        """`tokens` tokens came at `end_s`, each after one at `since_s`."""
        rows = self.gaps
        rows.extend(rows.pack(id, since_s, end_s, tokens))

    def record(self, replica: int, request: Request, tokens: int) -> None:
        """What became of a request, whose client received `tokens` (or asked for them, if it was rejected); several
        samples of one prompt are one request, once the last of them is over, and so are its two parts where one replica
        reads and another answers."""
        if request.of is not None:
            tokens = request.of.record(request, tokens)
            if tokens < 0:
                return
            request = request.of.request
        trip = request.trip
        if request.outcome == CANCELLED:
            again = trip is not None and trip.again
            row = request.id, replica, request.arrival_s, request.finish_s, request.late, again, request.read
            self.given_up.extend(self.given_up.pack(*row, tokens))
            if again:
                return
        rows = self.requests
        rows.extend(
            rows.pack(
                request.id,
                replica,
                request.arrival_s if trip is None else trip.since_s,
                0.0 if trip is None else trip.network_s,
                0.0 if trip is None else trip.retried_s,
                request.sent_s,
                request.queued_s,
                request.scheduled_s,
                request.first_token_s,
                request.finish_s,
                request.prompt_tokens,
                request.cached_tokens,
                tokens,
                request.max_tokens,
                request.preemptions,
                request.first_step,
                request.last_step,
                request.samples,
                request.outcome,
            )
        )
