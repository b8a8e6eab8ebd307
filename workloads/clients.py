"""Requests of a pool of clients, each with a rate, a burstiness and lengths that change from window to window.

Arrivals of a client are one renewal process along its expected number of requests: gaps of mean 1 from the family of
the window, stretched by the inverse of the rate. It begins at a random phase, and what is left of a gap at the end of
a window is carried into the next, so that clients with less than one request a window send as many as they should.
(ServeGen's own sampler makes the gaps of each window sum to the window and loses the last arrival, which silences such
clients.) Gaps with the recorded CV are drawn from the recorded family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from servecast.errors import ServecastError
from workloads.arrivals import weibull_shape
from workloads.generate import stream
from workloads.servegen import FAMILIES, Client, Distribution, Pool, distribution
from workloads.trace import MAX_TOKENS, Floats, Ints, Trace

MAX_REQUESTS = 20_000_000
_KINDS = ("image", "audio", "video")


def generate_servegen(
    pool: Pool,
    seed: int,
    *,
    span_s: tuple[float, float] | None = None,
    rate: float | None = None,
    even: bool = False,
    comonotone: bool = False,
    by_client: bool = False,
) -> Trace:
    """The requests that the pool sends in the span [start, end) of its time (all of it unless given); the span begins
    at time 0.

    rate: requests per second on average over the span; every client is scaled alike, and its CV stays. As recorded
    without one. even: every window has the same total, with the clients' shares of that window.
    comonotone: long prompts get long answers (one random number decides both, as in ServeGen's sampler); otherwise they
    are independent, since the data say nothing about it. by_client: a request class for each client.
    A prompt of a multimodal pool is its text and the tokens of its images, audio and video.
    Clients without a dataset are left out, with the share of the requests that is theirs in the notes; `rate` is then
    that of the others. Raises ServecastError with every problem, by client and window.
    """
    span = _span(pool, span_s)
    inside = np.minimum(pool.starts + pool.width_s, span[1]) - np.maximum(pool.starts, span[0])
    seconds = np.maximum(inside, 0.0)
    known = [client for client in pool.clients if _has_lengths(client)]
    notes = _absent(pool, seconds)
    total = np.sum([client.rate for client in known], axis=0) if known else np.zeros(seconds.size)
    factor = _factors(pool, span, seconds, total, rate, even)
    expected = float(seconds @ (total * factor))
    if expected > MAX_REQUESTS:
        raise ServecastError(
            f"{pool.source}: about {expected:,.0f} requests come in {span[1] - span[0]:,.0f} s; at most "
            f"{MAX_REQUESTS:,} are made, so give a shorter span or a lower rate"
        )
    problems: list[str] = []
    drawn = [_draw(pool, client, seed, span, seconds, client.rate * factor, comonotone, problems) for client in known]
    if problems:
        raise ServecastError(*problems)
    arrival_s, prompt, output = (
        np.concatenate([getattr(one, name) for one in drawn]) for name in ("arrival_s", "prompt", "output")
    )
    owner = np.repeat(np.arange(len(known)), [one.arrival_s.size for one in drawn])
    empty = (prompt < 1) | (output < 1)
    order = np.argsort(arrival_s, kind="stable")
    order = order[~empty[order]]
    if not order.size:
        raise ServecastError(
            f"{pool.source}: no request in the span [{span[0]:g} s, {span[1]:g} s) ({expected:.2g} were expected); "
            "give a longer span or a higher rate"
        )
    notes += _more_notes(drawn, expected, len(known))
    return Trace(
        arrival_s[order],
        prompt[order],
        output[order],
        output[order],
        source=f"generated: ServeGen pool {pool.source}, seed {seed}",
        classes=(owner[order], tuple(f"client-{client.name}" for client in known)) if by_client else None,
        dropped={"0 tokens": int(empty.sum())} if empty.any() else {},
        notes=tuple(notes),
    )


def _span(pool: Pool, span_s: tuple[float, float] | None) -> tuple[float, float]:
    whole = float(pool.starts[0]), float(pool.starts[-1] + pool.width_s)
    if span_s is None:
        return whole
    if not whole[0] <= span_s[0] < span_s[1] <= whole[1]:
        raise ServecastError(
            f"span [{span_s[0]:g} s, {span_s[1]:g} s) is empty or not within that of {pool.source}, "
            f"[{whole[0]:g} s, {whole[1]:g} s)"
        )
    return span_s


def _absent(pool: Pool, seconds: Floats) -> list[str]:
    absent = [client for client in pool.clients if not _has_lengths(client)]
    if not absent:
        return []
    theirs, all_of_them = sum(float(client.rate @ seconds) for client in absent), float(pool.rate @ seconds)
    share = theirs / all_of_them if all_of_them else 0.0
    return [
        f"{len(absent)} of {len(pool.clients)} clients have no lengths and are left out; {share:.1%} of the requests "
        "in the span are theirs, so the others' lengths stand for less than all"
    ]


def _factors(
    pool: Pool, span: tuple[float, float], seconds: Floats, total: Floats, rate: float | None, even: bool
) -> Floats:
    """What every client's rate is multiplied with, window by window."""
    recorded = float(seconds @ total) / (span[1] - span[0])
    if rate is not None and not (0 < rate < math.inf):
        raise ServecastError(f"rate: {rate!r} is not a number of requests per second above 0")
    if recorded == 0:
        raise ServecastError(
            f"{pool.source}: no client with lengths sends anything in the span [{span[0]:g} s, {span[1]:g} s)"
        )
    goal = recorded if rate is None else rate
    if not even:
        return np.full(total.size, goal / recorded)
    if silent := int(((total == 0) & (seconds > 0)).sum()):
        raise ServecastError(f"even: nobody sends anything in {silent} windows of the span, which no factor changes")
    return goal / np.where(total > 0, total, 1.0)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Requests of one client. later: how many had to take lengths of a later window. reasoning: the expected share of
    the output tokens that is reasoning, times the output tokens; NaN where the pool does not say."""

    arrival_s: Floats
    prompt: Ints
    output: Ints
    later: int
    reasoning: float


def _draw(
    pool: Pool,
    client: Client,
    seed: int,
    span: tuple[float, float],
    seconds: Floats,
    rate: Floats,
    comonotone: bool,
    problems: list[str],
) -> _Drawn:
    window, arrival_s = client_arrivals(
        pool, client, rate, seconds, span, stream(seed, f"client {client.name} arrivals")
    )
    prompt, output = np.zeros(arrival_s.size), np.zeros(arrival_s.size)
    rng = stream(seed, f"client {client.name} lengths")
    later, reasoning = 0, math.nan
    parsed: dict[float, dict[str, Distribution]] = {}
    force = _in_force(client, pool.starts)
    for start in sorted(set(force[window].tolist())):
        where = f"{pool.source}: client {client.name}, window {start:g}"
        mine = np.flatnonzero(force[window] == start)
        try:
            if start not in parsed:
                parsed[start] = _distributions(where, client.lengths[start])
            prompt[mine], output[mine] = _lengths(where, parsed[start], mine.size, rng, comonotone)
        except ServecastError as error:
            problems.extend(error.problems)
            continue
        later += int((start > pool.starts[window[mine]]).sum())
        if (ratio := parsed[start].get("reason_ratio")) is not None:
            reasoning = (0.0 if math.isnan(reasoning) else reasoning) + ratio.mean * float(output[mine].sum())
    return _Drawn(arrival_s, prompt.astype(np.int64), output.astype(np.int64), later, reasoning)


def client_arrivals(
    pool: Pool, client: Client, rate: Floats, seconds: Floats, span: tuple[float, float], rng: np.random.Generator
) -> tuple[Ints, Floats]:
    """(rate window, arrival in s from the start of the span) of the client's requests. rate, seconds: requests per
    second and seconds that count, one value a window.
    """
    windows, times = [], []
    rest: float | None = None
    for i in np.flatnonzero((rate > 0) & (seconds > 0)).tolist():
        expected = float(rate[i] * seconds[i])
        family = FAMILIES[client.family[i]]
        shape = _shape(family, float(client.cv[i]), float(client.shape[i]))
        if rest is None:
            rest = _first(family, shape, rng)
        if rest >= expected:
            rest -= expected
            continue
        found = [np.array([rest])]
        reached = rest
        while reached < expected:
            gaps = _gaps(family, shape, 16 + int(1.1 * (expected - reached)), rng)
            found.append(reached + np.cumsum(gaps))
            reached = float(found[-1][-1])
        places = np.concatenate(found)
        inside = places[places < expected]
        rest = float(places[inside.size] - expected)
        windows.append(np.full(inside.size, i))
        times.append(max(float(pool.starts[i]), span[0]) - span[0] + inside / rate[i])
    if not windows:
        return np.empty(0, dtype=np.int64), np.empty(0)
    return np.concatenate(windows).astype(np.int64), np.concatenate(times)


def _shape(family: str, cv: float, fitted: float) -> float:
    """The shape that has the recorded CV; the fitted one where the CV is out of reach."""
    if not 0.01 <= cv <= 100:
        return fitted
    return 1 / (cv * cv) if family == "Gamma" else weibull_shape(cv)


def _gaps(family: str, shape: float, n: int, rng: np.random.Generator) -> Floats:
    """n gaps of mean 1."""
    if family == "Gamma":
        return rng.gamma(shape, 1 / shape, n)
    return rng.weibull(shape, n) / math.gamma(1 + 1 / shape)


def _first(family: str, shape: float, rng: np.random.Generator) -> float:
    """What is left of a gap (mean 1) at a random time: a uniform part of a gap that was met with a probability in
    proportion to its length. Such a gap is Gamma with shape + 1; for Weibull, its power `shape` is Gamma(1 + 1/shape).
    """
    part = rng.random()
    if family == "Gamma":
        return float(part * rng.gamma(shape + 1, 1 / shape))
    return float(part * rng.gamma(1 + 1 / shape) ** (1 / shape) / math.gamma(1 + 1 / shape))


def _in_force(client: Client, starts: Floats) -> Floats:
    """The length window for each rate window: the latest one, not empty, that begins at or before it; the first one
    after it where there is none.
    """
    full = np.array([start for start, fields in client.lengths.items() if not _is_empty(fields)])
    return full[np.maximum(np.searchsorted(full, starts, side="right") - 1, 0)]


def _has_lengths(client: Client) -> bool:
    return not all(_is_empty(fields) for fields in client.lengths.values())


def _is_empty(fields: Mapping[str, str]) -> bool:
    """Idle windows have no lengths, or only zeros."""
    prompt = fields.get("input_tokens", fields.get("text_tokens", ""))
    return any(text.strip() in ("", "{}", "{0: 1.0}") for text in (prompt, fields.get("output_tokens", "")))


def _distributions(where: str, fields: Mapping[str, str]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    problems: list[str] = []
    for field, text in fields.items():
        try:
            if (one := distribution(f"{where}, {field}", text)) is not None:
                found[field] = one
        except ServecastError as error:
            problems += error.problems
    if not problems and ("output_tokens" not in found or not found.keys() & {"input_tokens", "text_tokens"}):
        problems.append(f"{where}: requests come, but no window has both prompt and output lengths")
    if problems:
        raise ServecastError(*problems)
    return found


def _lengths(
    where: str, of: Mapping[str, Distribution], n: int, rng: np.random.Generator, comonotone: bool
) -> tuple[Floats, Floats]:
    """(prompt, output) tokens of n requests, as recorded: 0 may be among them."""
    same = rng.random(n)

    def quantiles() -> Floats:
        return same if comonotone else rng.random(n)

    output = of["output_tokens"].at(quantiles())
    prompt = of["input_tokens" if "input_tokens" in of else "text_tokens"].at(quantiles())
    for kind in _KINDS:
        count, tokens = of.get(f"{kind}_count"), of.get(f"{kind}_tokens")
        if count is None or tokens is None:
            continue
        items = count.at(quantiles()).astype(np.int64)
        owner = np.repeat(np.arange(n), items)
        each = tokens.at(same[owner] if comonotone else rng.random(owner.size))
        prompt = prompt + np.bincount(owner, weights=each, minlength=n)
    if (prompt > MAX_TOKENS).any():
        raise ServecastError(f"{where}: prompts of more than {MAX_TOKENS} tokens")
    return prompt, output


def _more_notes(drawn: list[_Drawn], expected: float, clients: int) -> list[str]:
    notes = [f"{expected:,.0f} requests were expected of {clients} clients"]
    if later := sum(one.later for one in drawn):
        notes.append(f"{later:,} requests came before their client's first length window and took its lengths")
    reasoning = [one for one in drawn if not math.isnan(one.reasoning)]
    if tokens := sum(int(one.output.sum()) for one in reasoning):
        share = sum(one.reasoning for one in reasoning) / tokens
        notes.append(f"about {share:.0%} of the output tokens are reasoning (reason_ratio of the pool)")
    return notes
