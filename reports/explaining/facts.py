"""What is known of one engine, and of one request on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.breakdown import Step
from calibrate.draft_worth import DraftWorth


@dataclass(frozen=True, slots=True)
class Alone:
    """One request with nobody else: seconds. `tpot_s` is the mean over its tokens after the first; without a KV cache
    every token reads all before it anew."""

    front_end_s: float
    prefill: Step
    tpot_s: float
    without_cache_s: float
    output: int

    @property
    def ttft_s(self) -> float:
        """Front end and prompt."""
        return self.front_end_s + self.prefill.seconds

    @property
    def e2e_s(self) -> float:
        """TTFT and the other tokens."""
        return self.ttft_s + (self.output - 1) * self.tpot_s


@dataclass(frozen=True, slots=True)
class Kept:
    """What one GPU keeps: bytes of weights, of a token in the KV cache, tokens that fit, and requests of this length
    that run at once (as many as fit, and as the engine lets run)."""

    weight_bytes: int
    token_bytes: int
    kv_tokens: int
    at_once: int


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed: `now` is the request alone and what is kept, `batch_tpot_s` TPOT with the batch that was at
    once before; or why it cannot be."""

    name: str
    now: Alone | None = None
    kept: Kept | None = None
    batch_tpot_s: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Static:
    """What static batches of the workload's requests would compute in vain: of the prompt tokens, padded to the
    longest, and of the decodes, until the longest answer ends; shares from 0 to 1."""

    batch: int
    prompt_waste: float
    decode_waste: float


@dataclass(frozen=True, slots=True)
class Explained:
    """One engine of a pool, and a request of `prompt` and `output` tokens on it. `peaks`: FLOP/s by dtype, and bytes/s
    of "bandwidth"; `rate`: the dtype in which the weights are multiplied.

    `by_length`: a prompt alone, by its tokens; `by_batch`: a decode step of so many at `context` tokens each;
    `by_context`: one of a single request after so many tokens; `by_chunk`: a step with a chunk of so many tokens beside
    `beside` decodes, in seconds, with 0 for no chunk. `turns_empty` and `turns`: the batch from which on decoding is
    bound by compute, without context and with `context`; None: never. All steps are without drafts: what these are
    worth is in `drafts`, where the engine makes them.
    """

    setup: str
    pool: str
    gpus: int
    prompt: int
    output: int
    workload: str
    peaks: Mapping[str, float]
    rate: str
    alone: Alone
    kept: Kept
    budget: int
    context: int
    by_length: Mapping[int, Step]
    by_batch: Mapping[int, Step]
    by_context: Mapping[int, Step]
    by_chunk: Mapping[int, float]
    beside: int
    turns_empty: int | None
    turns: int | None
    half_cached_s: float
    static: Static | None
    drafts: DraftWorth | None
    changes: tuple[Change, ...]
    pricing: str
    version: str

    @property
    def batch(self) -> Step:
        """The decode step of as many as run at once."""
        return self.by_batch[max(self.by_batch)]


def plain(e: Explained) -> dict[str, Any]:
    """All of it as JSON values: seconds, bytes, FLOPs and tokens."""
    found = asdict(e)
    for name in ("by_length", "by_batch", "by_context"):
        found[name] = {n: _step(step) for n, step in getattr(e, name).items()}
    found["alone"] |= {"prefill": _step(e.alone.prefill), "ttft_s": e.alone.ttft_s, "e2e_s": e.alone.e2e_s}
    for shown, change in zip(found["changes"], e.changes, strict=True):
        if change.now is not None:
            shown["now"] |= {"prefill": _step(change.now.prefill), "ttft_s": change.now.ttft_s}
    return found


def _step(step: Step) -> dict[str, Any]:
    parts = {part.name: {**asdict(part), "bound": part.bound} for part in step.parts}
    return {
        "seconds": step.seconds,
        "flops": step.flops,
        "hbm_bytes": step.hbm_bytes,
        "bound": step.bound,
        "parts": parts,
    }
