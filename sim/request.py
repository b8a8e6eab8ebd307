"""A request while it moves through the simulation: the only per-request object, from arrival to finish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.steplog import FINISHED

if TYPE_CHECKING:
    from sim.decodes import Decodes
    from sim.drafts import Ints
    from sim.handover import HandOver
    from sim.prefixcache import Path, Run
    from sim.radixcache import Node
    from sim.samples import Samples
    from sim.speculative import Stint
    from sim.tiers import Stretch

NOT_YET = float("nan")
IN_FLIGHT = -1
NEVER = 2**62


@dataclass(slots=True)
class Trip:
    """How a request came to the gateway: when its client first sent it, the seconds there and back, how long after its
    first try this one was sent, and how many were before it; `again`: it is given up, and will be sent once more."""

    since_s: float
    network_s: float
    retried_s: float = 0.0
    tries: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """The KV of a request that has ended stays, for `seconds` at most, for the request with the number `next`."""

    seconds: float
    next: int


class Request:
    """One request: what the client sent, and where it stands in its replica.

    What the client sent: `arrival_s` (when this try got to the gateway; `trip` says how, unless it was there at once),
    `prompt_tokens`, `max_tokens` (its cap, which a scheduler may see) and `output_tokens` (the true length, which only
    the end of the request reveals: no policy may read it); `priority`, of which less goes first where the policy looks
    at it; how many `samples` of its prompt, of which the engine sees each as a request `of` all of them. Where one
    replica reads prompts and another answers, each of them sees a request of its own: the one whose KV is `kept` for
    the other when it ends, and the one that `pulls` it.

    KV tokens of a decoding request are not stored but derived: before decode step `j` it has `j + kv_offset` tokens in
    KV, so that nothing is touched per step. `computed` holds them at all other times.
    """

    __slots__ = (
        "arrival_s",
        "arriving",
        "awaited",
        "brought",
        "cached_tokens",
        "chunk_step",
        "cohort",
        "computed",
        "decoding",
        "drafts",
        "drawn",
        "due",
        "emitted",
        "entered_s",
        "finish_s",
        "finish_step",
        "first_step",
        "first_token_s",
        "gap_from_s",
        "held",
        "hold",
        "id",
        "joined",
        "junction",
        "kept",
        "known",
        "kv_offset",
        "lag_step",
        "landed",
        "last_step",
        "late",
        "max_tokens",
        "node",
        "of",
        "outcome",
        "output_tokens",
        "padding",
        "path",
        "preemptions",
        "priority",
        "prompt_tokens",
        "pulls",
        "queued_s",
        "reach",
        "read",
        "read_from",
        "replica",
        "reserved_tokens",
        "samples",
        "scheduled_s",
        "sent_s",
        "slid",
        "stint",
        "stored",
        "streams",
        "stretches",
        "tables",
        "target",
        "there",
        "ticket",
        "trip",
        "verified",
    )

    # Of engines that speculate only: see sim.speculative.
    drafts: tuple[Ints, Ints]  # in each step that it decodes in: tokens drafted, tokens yielded
    drawn: int  # how many of these steps there have been
    due: int  # output tokens to come when it joins
    reach: int  # tokens that it has blocks for
    padding: int  # drafts that nobody made, computed beside the end of its prompt
    landed: int  # tokens that a prefix cache can know
    verified: Stint
    # Of models with windows only, and set when it is admitted: see sim.windowdecodes and State.slide.
    slid: int  # computed tokens by which it gave back last what its windows have passed
    read_from: int  # computed tokens before its last chunk
    chunk_step: int  # the step of that chunk
    joined: int  # the decode step from which on it decodes
    stint: int  # which of all requests' times of decoding this is
    known: int  # of a hybrid cache: how many of its leading blocks somebody may look for; and those held, by table
    tables: list[list[tuple[Run, int]]]
    junction: int  # how many of these blocks layers without windows had when it was looked up last, if more than all

    def __init__(
        self,
        id: int,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
        priority: int = 0,
        samples: int = 1,
    ) -> None:
        self.id = id
        self.arrival_s = arrival_s
        self.entered_s = arrival_s  # when it gets to its front end, and from there to the engine
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.samples = samples
        self.of: Samples | HandOver | None = None
        self.streams = True  # its tokens go to its client
        self.kept = False  # its blocks stay when it ends, until they are given back
        self.pulls = False  # the KV of all but the last of its `target` tokens is to come from elsewhere
        self.brought = False  # that KV is at hand: the step that admits it need not wait for it
        self.there = False  # it has come, and the request waits for its turn
        self.arriving = 0  # for how many tokens it has had blocks since its KV began to come
        self.awaited = False  # it waited for what another one loaded, and keeps its place for that
        self.stretches: list[Stretch] | None = None  # of a cache with tiers: `path`, in chunks of these
        self.stored = 0  # of the chunks of tiers that it can fill: how many were offered, or came from there
        self.target = (
            prompt_tokens  # KV tokens that its next output token needs: the prompt, and what it lost to preemption
        )
        self.computed = 0
        self.emitted = 0  # output tokens before the last preemption; while decoding, finish_step tells
        self.decoding = False
        self.cohort: Decodes | None = None  # with whom it decodes, and was last in a batch
        self.ticket = -1  # order of admission; the newest is preempted first
        self.kv_offset = 0
        self.first_step = -1
        self.finish_step = -1  # the decode step that yields the last token; known once decoding starts
        self.last_step = -1  # the step that yielded it
        self.preemptions = 0
        self.read = 0  # tokens that steps with prompts have computed for it, up to and with the one in progress
        self.cached_tokens = 0  # of its prompt, found in a prefix cache when it was first admitted
        self.reserved_tokens = 0  # of a cache that reserves: for how many it has had blocks since its admission
        self.trip: Trip | None = None
        self.hold: Hold | None = None
        self.late = False  # given up because its first token was not there in time
        self.path: Path | None = None  # of a prefix cache: what its prompt begins with
        self.node: Node | None = None  # of a radix cache: the last one that it locks, all before it too
        self.held: list[tuple[Run, int]] = []  # of a prefix cache: its leading blocks that somebody may look for
        self.tables = []
        self.drawn = 0  # of an engine that speculates
        self.lag_step = NEVER  # from this step on a prefix cache knows one token less than was computed; see registered
        self.replica = -1
        self.outcome = IN_FLIGHT  # see sim.steplog.OUTCOMES
        self.sent_s = NOT_YET  # when a front end had it, and its engine: what `entered_s` was there
        self.queued_s = NOT_YET
        self.scheduled_s = NOT_YET
        self.first_token_s = NOT_YET
        self.finish_s = NOT_YET
        self.gap_from_s = NOT_YET  # time of the last token before a preemption, a skipped or paused step: see sim.gaps

    def restart(self, now: float) -> None:
        """It was lost with its replica, and begins anew at `now`; when it arrived does not change."""
        trip, hold = self.trip, self.hold
        Request.__init__(
            self, self.id, self.arrival_s, self.prompt_tokens, self.output_tokens, self.max_tokens, self.priority,
            self.samples,
        )  # fmt: skip
        self.entered_s, self.trip, self.hold = now, trip, hold

    def registered(self, tokens: int, step: int) -> int:
        """How many of the `tokens` tokens that it has in KV after the plan of `step`, its last one, a prefix cache can
        know: in asynchronous engines the newest one is still in flight when the next is planned."""
        return tokens - (step >= self.lag_step)

    @property
    def begun(self) -> bool:
        """Its client has its first token."""
        return self.first_token_s == self.first_token_s if self.of is None else self.of.begun

    @property
    def hold_ends_s(self) -> float:
        """Until when its KV is held, once it is over."""
        return self.finish_s + (self.hold.seconds if self.hold is not None else 0.0)

    @property
    def over(self) -> bool:
        """It is finished, rejected or given up."""
        return self.outcome != IN_FLIGHT

    @property
    def finished(self) -> bool:
        """Its last token is out."""
        return self.outcome in FINISHED

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.prompt_tokens} in, {self.output_tokens} out, at {self.arrival_s:g} s)"
