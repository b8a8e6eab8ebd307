"""The workload of a scenario, as people type it: what arrives, from where, and how clients behave."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from servecast.errors import one_of
from servecast.mistakes import MistakeError, shown
from servecast.parts import Count, Limit, Part, Time, checked, kind_of, known, known_model, named
from servecast.units import Duration, duration_text
from workloads.arrivals import ARRIVALS
from workloads.lengths import LENGTHS
from workloads.mixes import load_mix
from workloads.people import THINK
from workloads.readers import READERS
from workloads.sessions import check_sessions
from workloads.trace import MAX_TOKENS

MAX_REQUESTS = 100_000_000
"""More than these is a slip of the pen, and would exhaust the memory before anything is said."""
MAX_SAMPLES = 16_384
"""vLLM's own limit of `n` (VLLM_MAX_N_SEQUENCES)."""


def _cap(value: Any) -> Any:
    if value == "unlimited" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_TOKENS):
        return value
    raise ValueError(f"{shown(value)} is neither a whole number of tokens from 1 to {MAX_TOKENS} nor unlimited")


Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
Share = Annotated[float, Field(ge=0, lt=1)]
Arrivals = Annotated[dict[str, Any], kind_of(ARRIVALS)]
LengthsOf = Annotated[dict[str, Any], kind_of(LENGTHS)]
Format = Annotated[str, named("trace format", READERS)]
Cap = Annotated[int | Literal["unlimited"], BeforeValidator(_cap)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Span = Annotated[list[Duration], Field(min_length=2, max_length=2)]


class SloPart(Part):
    """Limits that every request should meet; goodput counts those that meet all of them. gap: of every gap of its
    stream."""

    ttft: Limit | None = None
    tpot: Limit | None = None
    e2e: Limit | None = None
    gap: Limit | None = None

    def limits(self) -> dict[str, float]:
        """The limits that are given, in seconds."""
        return {name: getattr(self, name) for name in type(self).model_fields if getattr(self, name) is not None}


class ClosedLoopPart(Part):
    """`concurrency` clients, each of which sends its next request `think` after it has its answer, at once if unset."""

    concurrency: Count
    think: Annotated[dict[str, Any], kind_of(THINK)] | None = None


class LengthsPart(Part):
    """Prompt and output lengths, drawn independently or with a rank correlation; or pairs drawn from a trace."""

    prompt: LengthsOf | None = None
    output: LengthsOf | None = None
    correlation: Annotated[float, Field(ge=-1, le=1)] | None = None
    trace: str | None = None
    format: Format | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> LengthsPart:
        if self.trace is None and (self.prompt is None or self.output is None):
            missing = one_of(name for name in ("prompt", "output") if getattr(self, name) is None)
            raise ValueError(f"{missing} missing; give prompt and output, or trace")
        if self.trace is not None and (self.prompt or self.output or self.correlation is not None):
            raise ValueError("give prompt and output, or trace, not both")
        if self.trace is None and self.format is not None:
            raise ValueError("format belongs to trace, which is missing")
        return self


class TimeoutPart(Part):
    """How long a client, or a gateway for it, waits for the first token and for all of an answer, from when the request
    gets to the gateway; and how often it sends it again after that (`retries`): first after `backoff`, then twice as
    long each time. `timeout: 60s` is `timeout: {total: 60s}`."""

    first_token: Limit | None = None
    total: Limit | None = None
    retries: Annotated[int, Field(ge=0, le=20)] = 0
    backoff: Time = 0.5

    @model_validator(mode="after")
    def _sense(self) -> TimeoutPart:
        problems = []
        if self.first_token is None and self.total is None:
            problems.append(": nothing times out; give first_token, total or both, for example {first_token: 10s}")
        elif self.first_token is not None and self.total is not None and self.first_token >= self.total:
            first, total = duration_text(self.first_token), duration_text(self.total)
            problems.append(f".first_token: {first} is not below total, {total}; the whole answer takes longer")
        if "backoff" in self.model_fields_set and not self.retries:
            problems.append(".backoff: nothing is sent again; give retries, or take it out")
        if problems:
            raise MistakeError(problems)
        return self


def _total(value: Any) -> Any:
    return value if value is None or isinstance(value, dict | TimeoutPart) else {"total": value}


Timeout = Annotated[TimeoutPart, BeforeValidator(_total)]


class NetworkPart(Part):
    """Between clients and the gateway: `latency`, there and back; half of it each way."""

    latency: Time


class ClassPart(Part):
    """Requests of one kind: their share of all (by `weight`), their lengths, how many samples of its prompt each asks
    for (`n`), an SLO instead of the scenario's, their priority (the lowest goes first, if the engine's
    `scheduling_policy` is priority), the share of their output that is `reasoning`, a `timeout` and a `network` instead
    of the workload's, and the model that they ask for where pools serve several."""

    name: Annotated[str, Field(min_length=1)]
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    lengths: LengthsPart
    n: Samples = 1
    slo: SloPart | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    reasoning: Share | None = None
    timeout: Timeout | None = None
    network: NetworkPart | None = None
    model: Annotated[str, known_model] | None = None


class PriorityPart(Part):
    """What a gateway makes the requests' priority of, for an engine that goes by it: the length of the answer that a
    model predicts, off by a lognormal factor whose logarithm has the standard deviation `sigma`; or the time by which
    the first token is due under the SLO."""

    by: Literal["predicted-output", "deadline"]
    sigma: Annotated[float, Field(ge=0, le=5)] = 0.0

    @model_validator(mode="after")
    def _stated_error(self) -> PriorityPart:
        given = "sigma" in self.model_fields_set
        if self.by == "predicted-output" and not given:
            raise MistakeError([".sigma: missing; the error of the prediction, from 0 (a perfect one) to 5"])
        if given and self.by != "predicted-output":
            raise MistakeError([f".sigma: the error of a prediction; by: {self.by} predicts nothing, take it out"])
        return self


class PrometheusPart(Part):
    """What vLLM's metrics say of prompts, answers and the rate: a scrape, or the difference of two."""

    scrape: str
    earlier: str | None = None
    interval: Limit | None = None
    model: str | None = None
    max_model_len: Tokens | None = None


class ServegenPart(Part):
    """A ServeGen client pool: its folder or tar file, the part of its time, and the mean rate to scale it to."""

    pool: str
    span: Span | None = None
    rate: Factor | None = None
    even: bool = False
    comonotone: bool = False
    by_client: bool = False


KINDS: dict[str, tuple[set[str], set[str]]] = {
    "trace": (
        set(),
        {"format", "block_tokens", "spread", "shared_prefix", "window", "sample", "rate_scale", "jitter",
         "num_requests", "prompt_scale", "output_scale", "max_prompt", "max_output", "over_long", "turns", "hold_kv"},
    ),
    "closed_loop": ({"num_requests"}, {"lengths", "classes"}),
    "prometheus": ({"num_requests"}, {"arrivals"}),
    "servegen": (set(), {"num_requests"}),
    "sessions": ({"num_sessions"}, {"hold_kv"}),
    "mix": (set(), {"num_requests", "num_sessions", "rate", "hold_kv"}),
    "arrivals": ({"num_requests"}, {"lengths", "classes"}),
}  # fmt: skip
"""What a workload can be made of -> (keys that must, keys that may stand beside it). The first one there decides."""
ANYWHERE = {"max_tokens", "n", "network", "priority", "reasoning", "timeout"}


class WorkloadPart(Part):
    """What arrives: one of KINDS, the keys that belong to it, how long clients wait and how far they are. n: samples of
    each prompt, as vLLM and OpenAI name them. reasoning: the share of every output that comes before its answer.
    hold_kv: for how long the engine holds a turn's KV for the next one, whatever others need."""

    trace: str | None = None
    format: Format | None = None
    block_tokens: Count | None = None
    spread: Limit | None = None
    shared_prefix: bool | None = None
    window: Span | None = None
    sample: Annotated[float, Field(gt=0, le=1)] | None = None
    rate_scale: Factor | None = None
    jitter: Limit | None = None
    prompt_scale: Factor | None = None
    output_scale: Factor | None = None
    max_prompt: Tokens | None = None
    max_output: Tokens | None = None
    over_long: Literal["reject", "truncate"] | None = None
    turns: Literal["follow", "as_recorded"] | None = None
    num_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    num_sessions: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    arrivals: Arrivals | None = None
    lengths: LengthsPart | None = None
    classes: Annotated[list[ClassPart], Field(min_length=1)] | None = None
    closed_loop: ClosedLoopPart | None = None
    prometheus: PrometheusPart | None = None
    servegen: ServegenPart | None = None
    sessions: Annotated[dict[str, Any], checked(lambda spec: check_sessions(spec, ""))] | None = None
    mix: Annotated[str, known(load_mix)] | None = None
    rate: Factor | None = None
    max_tokens: Cap | None = None
    n: Samples = 1
    timeout: Timeout | None = None
    network: NetworkPart | None = None
    hold_kv: Limit | None = None
    priority: PriorityPart | None = None
    reasoning: Share | None = None

    @property
    def kind(self) -> str:
        """Which of KINDS it is made of."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _one_kind(self) -> WorkloadPart:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        kinds = [kind for kind in KINDS if kind in given]
        if "prometheus" in kinds and "arrivals" in kinds:
            kinds.remove("arrivals")  # they replace the measured rate
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of {one_of(KINDS)}; found {one_of(kinds) or 'none'}")
        must, may = KINDS[kinds[0]]
        extra = sorted(given - must - may - ANYWHERE - {kinds[0]})
        needs: list[str] = [name for name in ("num_requests", "num_sessions") if name in must - given]
        if "lengths" in may and len(given & {"lengths", "classes"}) != 1:
            needs.append("lengths" if not given & {"lengths", "classes"} else "one of lengths and classes")
        if extra or needs:
            said = [f"{one_of(extra)} has no meaning with {kinds[0]}"] * bool(extra)
            said += [f"{one_of(needs)} missing"] * bool(needs)
            raise ValueError(f"{'; '.join(said)} ({kinds[0]} takes {one_of(sorted(must | may | ANYWHERE))})")
        spans = {"window": self.window, "servegen.span": None if self.servegen is None else self.servegen.span}
        for name, span in spans.items():
            if span is not None and not span[0] < span[1]:
                raise ValueError(f"{name} is [start, end] with start before end, for example [0s, 10min]")
        if self.over_long is not None and self.max_prompt is None and self.max_output is None:
            raise ValueError("over_long says what becomes of requests over max_prompt or max_output: give one of them")
        if self.n > 1 and any(part.n > 1 for part in self.classes or []):
            raise ValueError("n is given for all requests and for classes: take one of them out")
        if self.priority is not None and any(part.priority for part in self.classes or []):
            raise ValueError("priority is given for all requests and for classes: take one of them out")
        names = [part.name for part in self.classes or []]
        if len(set(names)) < len(names):
            raise ValueError(f"classes: two have the same name ({one_of(names)})")
        return self
