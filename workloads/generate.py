"""Workloads made from a seed. It knows named random streams and what to draw from each, not how anything is drawn.

The same seed gives the same requests on every machine with the same numpy version, and the first k of n requests are
the same for every n.
"""

from __future__ import annotations

import numpy as np

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS
from workloads.kinds import Spec, call_kind, check_kind
from workloads.lengths import LENGTHS, pairs_from_trace
from workloads.trace import Ints, Trace

Lengths = tuple[Spec, Spec] | Trace
"""The (prompt, output) length specs, drawn independently, or a trace whose pairs are drawn."""


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one subsystem: independent of every other name's, and always the same for (seed, name).

    The bit generator is named because numpy's default one may change.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ServecastError(f"seed: {seed!r} is not a whole number of 0 or more")
    entropy = np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))
    return np.random.Generator(np.random.PCG64(entropy))


def generate(n: int, seed: int, arrivals: Spec, lengths: Lengths) -> Trace:
    """n requests; max_tokens is the output length. Arrivals, prompts and outputs each have their own stream, so a
    change of one leaves the others as they were. Raises ServecastError with every problem of the specs.
    """
    _check(n, lengths, check_kind(ARRIVALS, arrivals, "arrivals"))
    arrival_s = call_kind(ARRIVALS, arrivals, n, stream(seed, "arrivals"))
    prompt, output = generate_lengths(n, seed, lengths)
    source = f"generated: {arrivals['kind']} arrivals, {_describe(lengths)}, seed {seed}"
    return Trace(arrival_s, prompt, output, output, source=source)


def generate_lengths(n: int, seed: int, lengths: Lengths) -> tuple[Ints, Ints]:
    """(prompt_tokens, output_tokens), each int64[n]: what a closed loop needs, whose arrivals come from the run. The
    same lengths as `generate` draws for the same seed. Raises ServecastError with every problem of the specs.
    """
    _check(n, lengths, [])
    if isinstance(lengths, Trace):
        return pairs_from_trace(n, stream(seed, "lengths"), lengths)
    prompt, output = lengths
    return (
        call_kind(LENGTHS, prompt, n, stream(seed, "prompt")),
        call_kind(LENGTHS, output, n, stream(seed, "output")),
    )


def _check(n: int, lengths: Lengths, problems: list[str]) -> None:
    if n < 1:
        problems.append(f"num_requests: {n} is below 1")
    if not isinstance(lengths, Trace):
        prompt, output = lengths
        problems += check_kind(LENGTHS, prompt, "lengths.prompt") + check_kind(LENGTHS, output, "lengths.output")
    if problems:
        raise ServecastError(*problems)


def _describe(lengths: Lengths) -> str:
    if isinstance(lengths, Trace):
        return f"lengths of {lengths.source}"
    return f"{lengths[0]['kind']} prompts, {lengths[1]['kind']} outputs"
