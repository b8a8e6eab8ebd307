"""What-ifs on a trace: fewer sessions, other lengths, limits, arrivals off a grid; from a Trace to another one.

Windows, heads and rates are Trace's own. Nothing is changed silently: the notes count it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from servecast.errors import ServecastError
from workloads.chains import sessions
from workloads.prefix import Prefix
from workloads.trace import MAX_TIME_S, MAX_TOKENS, Ints, Trace

OverLong = Literal["reject", "truncate"]


def sample(trace: Trace, share: float, seed: int = 0) -> Trace:
    """A random share (0 to 1) of the requests, whole sessions together; a smaller share is part of a larger one."""
    from workloads.generate import stream

    if not 0 < share <= 1:
        raise ServecastError(f"{trace.source}: a share of {share:g} was asked for; give a number above 0 and up to 1")
    previous = np.full(len(trace), -1) if trace.turns is None else trace.turns.previous
    first, _ = sessions(previous)
    draw = stream(seed, "sample").uniform(size=len(trace))  # one a request, so that each keeps its own for any share
    kept = np.flatnonzero(draw[first] < share)
    if not kept.size:
        raise ServecastError(
            f"{trace.source}: a share of {share:g} leaves no request of {len(trace):,}; give a larger one"
        )
    whole = "" if trace.turns is None else ", whole sessions together"
    taken = trace.take(
        kept, f"a random share of {share:g} (seed {seed}{whole}): {kept.size:,} of {len(trace):,} requests"
    )
    return replace(taken, arrival_s=taken.arrival_s - taken.arrival_s[0])


def scale_lengths(trace: Trace, prompt: float = 1.0, output: float = 1.0) -> Trace:
    """Prompt and output lengths times a factor above 0, rounded to whole tokens, at least 1. The client's cap goes with
    the output. Prefix blocks shrink or grow with the prompts where the block size times the factor is whole; otherwise
    the last ones of a shorter prompt go, and what a longer prompt gains is taken as never shared.
    """
    for name, factor in (("prompt", prompt), ("output", output)):
        if not (factor > 0 and math.isfinite(factor)):
            raise ServecastError(f"{trace.source}: {name} factor {factor} is not a finite number above 0")
    prompts, few = _scaled(trace, "prompt", trace.prompt_tokens, prompt)
    outputs, fewer = _scaled(trace, "output", trace.output_tokens, output)
    caps = np.maximum(outputs, np.minimum(np.round(trace.max_tokens * output), MAX_TOKENS).astype(np.int64))
    notes = [f"{what} lengths times {f:g}" for what, f in (("prompt", prompt), ("output", output)) if f != 1]
    if few or fewer:
        notes.append(f"{few:,} prompts and {fewer:,} outputs would have rounded to 0 tokens and have 1")
    prefix = trace.prefix
    if prefix is not None and prompt != 1:
        size = prefix.block_tokens * prompt
        if size >= 1 and size == int(size):
            prefix = replace(prefix, block_tokens=int(size))
            notes.append(f"prefix blocks have {int(size):,} tokens instead of {trace.prefix.block_tokens:,}")  # type: ignore[union-attr]
        prefix, cut = _cut(prefix, prompts)
        if cut:
            notes.append(f"{cut:,} prefix blocks behind the end of scaled prompts were cut")
    return _with(trace, notes, prompt_tokens=prompts, output_tokens=outputs, max_tokens=caps, prefix=prefix)


def limit_lengths(
    trace: Trace,
    *,
    prompt: int | None = None,
    output: int | None = None,
    total: int | None = None,
    over_long: OverLong = "reject",
) -> Trace:
    """Limits in tokens on prompts, outputs and their sum. over_long: reject counts requests above one and leaves them
    to the engine, which knows its own limit; truncate cuts outputs, then prompts from their end, with their blocks.
    """
    for name, most, least in (("prompt", prompt, 1), ("output", output, 1), ("total", total, 2)):
        if most is not None and not least <= most <= 2 * MAX_TOKENS:
            raise ServecastError(
                f"{trace.source}: a {name} limit of {most} tokens leaves no request; give {least} or more"
            )
    outputs, prompts = trace.output_tokens, trace.prompt_tokens
    if output is not None:
        outputs = outputs.clip(max=output)
    if prompt is not None:
        prompts = prompts.clip(max=prompt)
    if total is not None:
        outputs = outputs.clip(max=total - 1)
        prompts = np.minimum(prompts, total - outputs)
    long_prompts = int(np.count_nonzero(prompts < trace.prompt_tokens))
    long_outputs = int(np.count_nonzero(outputs < trace.output_tokens))
    if not long_prompts and not long_outputs:
        return trace
    limits = ", ".join(
        f"{name} {most:,}"
        for name, most in (("prompt", prompt), ("output", output), ("prompt + output", total))
        if most
    )
    over = f"{long_prompts:,} prompts and {long_outputs:,} outputs of {len(trace):,} requests"
    count = f"{over} are over the limits ({limits})"
    if over_long == "reject":
        return _with(trace, [f"{count}; left as they are, for the engine to reject"])
    lost = (trace.prompt_tokens - prompts).sum(), (trace.output_tokens - outputs).sum()
    prefix, cut = (None, 0) if trace.prefix is None else _cut(trace.prefix, prompts)
    notes = [
        f"{count}; truncated, which took {lost[0]:,} prompt and {lost[1]:,} output tokens and {cut:,} prefix blocks"
    ]
    caps = np.where(outputs < trace.output_tokens, outputs, trace.max_tokens)
    return _with(trace, notes, prompt_tokens=prompts, output_tokens=outputs, max_tokens=caps, prefix=prefix)


def jitter(trace: Trace, step_s: float, seed: int = 0) -> Trace:
    """Every arrival moved by a random time in [0, step_s) seconds, which spreads requests over a grid's step. A turn
    never comes before the one it follows; think times stay.
    """
    from workloads.generate import stream

    if not 0 < step_s <= MAX_TIME_S:
        raise ServecastError(f"{trace.source}: a jitter of {step_s:g} s is not a number of seconds above 0")
    times = trace.arrival_s + stream(seed, "jitter").uniform(0.0, step_s, len(trace))
    if trace.turns is not None:
        previous = trace.turns.previous
        for i in np.flatnonzero(previous >= 0):
            times[i] = max(times[i], times[previous[i]])
    order = np.argsort(times, kind="stable")
    times = times[order] - times[order[0]]
    note = f"arrivals spread by up to {step_s:g} s (seed {seed})"
    alone = replace(trace, arrival_s=np.zeros(len(trace)), turns=None).take(order, note)
    return replace(alone, arrival_s=times, turns=None if trace.turns is None else trace.turns.rows(order))


def _scaled(trace: Trace, what: str, lengths: Ints, factor: float) -> tuple[Ints, int]:
    scaled = np.round(lengths * factor)
    if over := int(np.count_nonzero(scaled > MAX_TOKENS)):
        raise ServecastError(
            f"{trace.source}: {what} factor {factor:g} gives {over:,} requests more than {MAX_TOKENS} tokens; lower it"
        )
    return np.maximum(scaled, 1).astype(np.int64), int(np.count_nonzero(scaled < 1))


def _cut(prefix: Prefix, prompts: Ints) -> tuple[Prefix, int]:
    """Without the blocks that begin behind a prompt's end, and how many these are."""
    counts = np.diff(prefix.offsets)
    fit = np.minimum(counts, -(-prompts // prefix.block_tokens))
    cut = int((counts - fit).sum())
    if not cut:
        return prefix, 0
    place = np.arange(prefix.ids.size) - np.repeat(prefix.offsets[:-1], counts)
    kept = prefix.ids[place < np.repeat(fit, counts)]
    return replace(prefix, offsets=np.concatenate([[0], np.cumsum(fit)]), ids=kept), cut


def _with(trace: Trace, notes: list[str], **changes: Any) -> Trace:
    return replace(trace, notes=(*trace.notes, *notes), **changes)
