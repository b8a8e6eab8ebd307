"""`speculation:` of a scenario: how many of an engine's drafts are right. Whether it drafts, and how many tokens, is
said by the engine's own options."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

from pydantic import Discriminator, Field, Tag, model_validator

from calibrate.acceptance import geometric, of_length, of_lengths, table
from calibrate.engine import EngineSpec
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from servecast.errors import ServecastError
from servecast.mistakes import MistakeError
from servecast.parts import Part, checked, known
from sim.drafts import Drafting

Rate = Annotated[float, Field(ge=0, le=1)]
Length = Annotated[float, Field(ge=1, lt=100)]


def _falling(rates: list[float]) -> list[str]:
    if not rates:
        return [": no positions; give the share of drafts accepted up to each, as [0.8, 0.6, 0.45]"]
    return [
        f".{i + 1}: {later:g} at position {i + 2} is above {rate:g} before it: a draft is accepted only where all "
        "before it were, so rates fall with the position (as in vLLM's log, Per-position acceptance rate)"
        for i, (rate, later) in enumerate(pairwise(rates))
        if later > rate
    ]


def _reachable(lengths: list[float]) -> list[str]:
    if not lengths:
        return [": empty; give what was measured with 1, 2, 3, ... drafted tokens, as [1.8, 2.3, 2.5]"]
    return [
        f".{i}: {length:g} tokens a step, and with {i + 1} drafted there are at most {i + 2}"
        for i, length in enumerate(lengths)
        if length > i + 2
    ]


class LengthPart(Part):
    """Mean acceptance length: tokens a step, the target's own among them. `length` with the drafts that the engine has,
    as its log says; `lengths`: as measured with 1, 2, 3, ... drafted tokens."""

    length: Length | None = None
    lengths: Annotated[list[Length], checked(_reachable)] | None = None

    @model_validator(mode="after")
    def _one(self) -> LengthPart:
        if (self.length is None) == (self.lengths is None):
            raise MistakeError([": give either length or lengths"])
        return self


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "[rates]"
    if isinstance(value, str):
        return "[table]"
    return "[lengths]" if isinstance(value, dict | LengthPart) else "[number]"


Acceptance = Annotated[
    Annotated[Rate, Tag("[number]")]
    | Annotated[list[Rate], checked(_falling), Tag("[rates]")]
    | Annotated[str, known(table), Tag("[table]")]
    | Annotated[LengthPart, Tag("[lengths]")],
    Discriminator(_kind),
]


class SpeculationPart(Part):
    """How many of an engine's drafts are accepted. `acceptance`: the probability of each once those before it are; or
    the share of drafts accepted up to each position; or a measured table (`servecast list acceptance`); or mean
    lengths. `proposes`: the share of steps in which n-gram lookup finds something to propose."""

    acceptance: Acceptance
    proposes: Rate = 1.0

    def rates(self, tokens: int) -> list[float]:
        """The share of drafts accepted up to each of `tokens` positions. Raises ServecastError where it is not said."""
        given = self.acceptance
        if isinstance(given, float | int):
            return geometric(float(given), tokens)
        if isinstance(given, LengthPart) and given.length is not None:
            if given.length > tokens + 1:
                raise ServecastError(
                    f"speculation.acceptance.length: {given.length:g} tokens a step, and with {tokens} drafted there "
                    f"are at most {tokens + 1}"
                )
            return of_length(given.length, tokens)
        if isinstance(given, LengthPart):
            assert given.lengths is not None
            known_rates = of_lengths(given.lengths)
        else:
            known_rates = table(given) if isinstance(given, str) else given
        if len(known_rates) < tokens:
            raise ServecastError(
                f"speculation.acceptance: said for {len(known_rates)} positions, and the engine drafts {tokens} "
                "tokens; give as many, or lower engine.speculative_config.num_speculative_tokens"
            )
        return known_rates[:tokens]


def drafting_of(part: SpeculationPart | None, engine: EngineSpec, seed: int) -> Drafting | None:
    """How an engine drafts; None where it does not. Raises ServecastError with every problem."""
    how = engine.speculation
    if how is None:
        return None
    if part is None:
        raise ServecastError(
            f"speculation.acceptance: missing, and engine.speculative_config drafts {how.tokens} tokens; give how many "
            "are right, as speculation: {acceptance: [0.8, 0.6, 0.45]} (vLLM logs it, Per-position acceptance rate), a "
            "probability, or a measured table (servecast list acceptance)"
        )
    if part.proposes != 1.0 and how.method != "ngram":
        raise ServecastError(
            f"speculation.proposes: {part.proposes:g}, and {how.method} drafts in every step; take it out"
        )
    return Drafting(
        how.tokens,
        part.rates(how.tokens),
        how.lookahead,
        how.at_admission,
        engine.max_model_len,
        engine.async_scheduling,
        seed,
        part.proposes,
    )


def no_drafts(
    model: ModelSpec, layout: Parallelism, engine: EngineSpec, role: str, own: object, tiers: object
) -> Iterator[str]:
    """Why an engine's drafts are not modelled; with a policy of the user's `own`, or `tiers` that keep KV."""
    if engine.speculation is None:
        return
    key, out = "engine.speculative_config", "take it out"
    if model.windows:
        yield f"{key}: {model.name} has layers with windows, with which drafts are not modelled; {out}"
    for name in ("dp", "pp", "dcp", "pcp"):
        if getattr(layout, name) > 1:
            yield f"{key}: drafts with {name} {getattr(layout, name)} are not modelled; {out}, or use tp and replicas"
    if role != "unified":
        yield f"{key}: drafts where prefill and decode are apart are not modelled; {out}"
    if tiers is not None:
        yield f"{key}: drafts with KV that tiers keep are not modelled; {out}, or the tiers"
    if own is not None:
        yield f"{key}: a policy of your own plans one token a sequence; take one of the two out"


def words(drafting: Drafting) -> str:
    """What is assumed of drafts, for the notes of a result."""
    said = ", ".join(f"{rate:.3g}" for rate in drafting.rates)
    found = "" if drafting.proposes == 1.0 else f" in {drafting.proposes:.0%} of steps"
    return (
        f"speculative decoding: {drafting.tokens} drafted tokens a sequence and step{found}, accepted up to each "
        f"position: {said} (yours), which makes {drafting.length:.2f} tokens a step"
    )
