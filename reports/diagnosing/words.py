"""What was found, in sentences and rows of plain text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reports.diagnosing.facts import SHOWN, Diagnosed, Price, Symptom, Tried
from reports.spent import said
from reports.words import NONE, headline, percent, quantity, verdict

if TYPE_CHECKING:
    from sim.result import Result

PRICES: dict[Price, str] = {
    "": "",
    "bits": "answers may change",
    "gpus": "costs more GPUs",
    "bound": "a bound: nobody reaches it",
}
"""What a change costs beside a setting."""


def figures_of(result: Result) -> Iterator[tuple[str, str]]:
    """What the simulated run is like: the figures that say whether a server is well."""
    s = result.summary()
    word, why = verdict(result)
    yield "load", f"{headline(word)}: {why}"
    for metric, text in said(s["spent"]):
        yield f"{metric} is", text
    yield "queue", f"mean {quantity(s['mean_queue_size'])}, peak {s['peak_queue_size'] or 0:,} requests waiting"
    yield "batch", f"mean {quantity(s['mean_batch_size_current'])}, peak {s['peak_batch_size_current'] or 0:,} a step"
    yield "KV cache", f"peak {percent(s['kv_peak_fraction'])}, {s['preemptions']:,} preemptions"
    if s["prefix_cache_hit_rate"] is not None:
        yield "prefix hits", f"{percent(s['prefix_cache_hit_rate'])} of prompt tokens"
    if s["slo_attainment"] is not None:
        yield "SLO", f"{percent(s['slo_attainment'])} of the requests meet it"


def shows_instead(result: Result) -> Iterator[str]:
    """The latencies of the simulated run."""
    s = result.summary()
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("E2E", "e2el_ms")):
        if s[f"mean_{key}"] is not None:
            mean, p50, p99 = (quantity(s[f"{stat}_{key}"]) for stat in ("mean", "p50", "p99"))
            yield f"{name} mean {mean}, p50 {p50}, p99 {p99} ms"


def to_compare(found: Diagnosed) -> Iterator[str]:
    """What to look at where the simulation shows nothing wrong: what is not in it, and what may differ from it."""
    names = {symptom.metric for symptom in found.symptoms}
    yield (
        f"Version, flags and GPUs: does {found.engine} run as the scenario says? Its start-up log has every option; "
        "`servecast run SCENARIO --serve-line` writes the line that the simulation is of."
    )
    yield (
        "The load: rate, lengths, bursts and what prompts share, as the server counts them (its metrics of prompt and "
        "answer tokens), against the scenario's workload; other clients on the same server."
    )
    if names & {"ttft", "e2e"}:
        yield (
            "The way to the server: the client's TTFT against the server's own (vllm:time_to_first_token_seconds, "
            "sglang:time_to_first_token_seconds). What the client has more is network, proxy, TLS, or the client."
        )
    if names & {"tpot", "itl", "e2e", "throughput"}:
        yield (
            "The machine: clocks (nvidia-smi -q -d CLOCK,PERFORMANCE: throttling), other processes on GPU or CPU, and "
            "a client that reads its stream slowly: the server's time between tokens tells."
        )
    yield "Whether it is the model of the server: `servecast validate SCENARIO --measured FILE`, of a run of yours."


def goes(share: float, half: float | None) -> str:
    """How much of a symptom goes."""
    text = f"{100 * share:.0f} %"
    return text if half is None else f"{text} ± {100 * half:.0f}"


def from_to(symptom: Symptom, effect: tuple[float | None, float | None]) -> str:
    """`p99 ttft goes from 4.1 s to 1.3 s (1 s is allowed)`."""
    before, after = (symptom.said(value) for value in effect)
    beyond = "" if symptom.fine(effect[1]) or symptom.limit is None else f" ({symptom.said(symptom.limit)} is allowed)"
    return f"{symptom.name} goes from {before} to {after}{beyond}"


def named(cause: Tried) -> str:
    """A cause, with its pool where there are several."""
    return f"{cause.pool}: {cause.words}" if cause.pool else cause.words


def shown(found: Diagnosed) -> tuple[Symptom, ...]:
    """The symptoms that the simulation shows."""
    return tuple(symptom for symptom in found.symptoms if symptom.shown)


def answer(found: Diagnosed) -> list[str]:
    """The whole in a few sentences, the most likely cause first."""
    if found.verdict == "healthy":
        return list(_healthy(found))
    if found.verdict == "outside":
        return list(_outside(found))
    if found.verdict == "unexplained":
        return [
            "No single cause: the simulation shows it, and none of the "
            f"{len(found.tried)} that were taken away takes a twentieth of it away, beyond chance."
        ]
    top, *others = found.foremost
    symptoms = shown(found)
    effects = _and([from_to(s, effect) for s, effect in zip(symptoms, top.effects, strict=True)])
    sentences = [
        f"Most likely: {named(top)}. {top.why[:1].upper()}{top.why[1:]}.",
        f"Change: {top.change}. Then {effects}: {goes(top.gone, top.half)} of it is gone{_but(top)}.",
    ]
    if others:
        rest = _and([f"{named(cause)} ({_short(cause)})" for cause in others[:2]])
        sentences.append(f"Less likely or dearer, each alone: {rest}.")
    hidden = [symptom.name for symptom in found.symptoms if not symptom.shown]
    if hidden:
        sentences.append(
            f"The simulation does not show {_and(hidden)} as it is seen: look for that outside of what is simulated."
        )
    return sentences


def _outside(found: Diagnosed) -> Iterator[str]:
    names = _and([symptom.name for symptom in found.symptoms])
    if found.like:
        yield f"Not as the scenario says: simulated, it does not show {names} as seen. One change, and it would."
        yield from found.like
        yield "Look these up on the server; if none is so, the cause is outside of what is simulated."
    else:
        yield f"Not in the model: the simulated deployment does not show {names} as seen."
        yield "The cause is likely outside of what is simulated."
    yield f"Simulated: {'; '.join(found.instead) or 'no request finishes'}."


def _healthy(found: Diagnosed) -> Iterator[str]:
    who = {"simulated": "simulated deployment", "measured": "measured run"}.get(found.asked)
    piles = "no work piles up" if not found.undecided else "the run is too short to tell whether work piles up"
    if who is None:
        yield f"Nothing wrong is seen: no request is turned away, and {piles}."
        yield "No slo says what should be met: give the scenario one, or say what is wrong with --symptom."
    else:
        yield f"Healthy: 99 % of the requests of the {who} meet each limit of the slo, and {piles}."


def _short(cause: Tried) -> str:
    gone = goes(cause.gone, cause.half)
    return f"{gone}, {PRICES[cause.price]}" if cause.price else gone


def _but(cause: Tried) -> str:
    said = [PRICES[cause.price]] * bool(cause.price)
    said += [f"{name} goes from {before} to {after}" for name, before, after in cause.worse]
    return f"; but {_and(said)}" if said else ""


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


SYMPTOM_HEAD = ("symptom", "seen", "allowed", "simulated", "")


def symptom_rows(found: Diagnosed) -> Iterator[tuple[str, ...]]:
    """What is wrong, and whether the simulation shows it."""
    for s in found.symptoms:
        seen, limit = (NONE if value is None else s.said(value) for value in (s.observed, s.limit))
        yield s.name, seen, limit, s.said(s.simulated), "shown" if s.shown else "not shown"


def how(cause: Tried) -> list[tuple[str, str]]:
    """How to check a cause, and what to change."""
    rows = [("because", f"{cause.why}."), ("check", cause.check)]
    rows += [("try here", " ".join(f"--set {_quoted(each)}" for each in cause.sets))]
    rows += [("server", flag) for flag in cause.flags]
    return rows


def _quoted(text: str) -> str:
    return f"'{text}'" if set(text) & set(' {}[]"') else text


CAUSE_HEAD = ("cause", "changed", "goes", "but")


def cause_row(cause: Tried) -> tuple[str, str, str, str]:
    """A cause that was tried."""
    harm = [PRICES[cause.price]] * bool(cause.price)
    harm += [f"{name} {before} to {after}" for name, before, after in cause.worse]
    gone = goes(cause.gone, cause.half) if cause.gone > 0 else "nothing"
    return named(cause), cause.change, gone, "; ".join(harm)


def tried(found: Diagnosed) -> str:
    """What was simulated."""
    of = f"the first {found.requests:,} of {found.of:,}" if found.of > found.requests else f"{found.requests:,}"
    if found.runs == 1:
        return f"One run of {of} requests."
    seeds = f"{len(found.seeds)} seeds, paired; ± is the 95 % interval over them"
    if len(found.seeds) == 1:
        seeds = found.one_course or "one seed: no change takes enough away to be tried under others"
        seeds = "one seed" if found.verdict == "outside" else seeds
    return f"{found.runs} runs of {of} requests; {seeds}."


def assumptions(found: Diagnosed) -> list[str]:
    """What it rests on."""
    return [
        "A cause is taken away by a change of the scenario, all else (requests, seeds) the same. What goes is of the "
        "simulated symptom: 100 % is down to what is allowed where that is said, else to nothing.",
        "Ranked by what goes, less 10 points for other number formats, 15 for bounds, 20 for more GPUs, 10 for every "
        "doubling of another figure that gets worse beyond its limit, 50 where work comes to pile up.",
        f"The simulation shows a symptom from {100 * SHOWN:.0f} % of what is seen on.",
        "Two causes can hide each other: change one, and ask again.",
        "Not looked at: attention kernels (all presets have flash attention), speculative decoding, clients, networks, "
        "other tenants, throttled clocks.",
    ]
