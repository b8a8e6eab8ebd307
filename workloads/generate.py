"""Workloads made from a seed. It knows named random streams and what to draw from each, not how anything is drawn.

The same seed gives the same requests on every machine with the same numpy version, and the first k of n requests are
the same for every n (except where lengths are correlated, which needs all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from servecast.errors import ServecastError
from workloads.arrivals import ARRIVALS
from workloads.kinds import Spec, call_kind, check_kind
from workloads.lengths import LENGTHS, draw_weighted, pairs_from_trace
from workloads.trace import Ints, Trace

Lengths = tuple[Spec, Spec] | Trace
"""The (prompt, output) length specs, drawn independently unless correlated, or a trace whose pairs are drawn."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests of one kind: on average weight / (sum of weights) of all requests, with lengths of their own."""

    name: str
    weight: float
    lengths: Lengths
    correlation: float | None = None


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one subsystem: independent of every other name's, and always the same for (seed, name).

    The bit generator is named because numpy's default one may change.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ServecastError(f"seed: {seed!r} is not a whole number of 0 or more")
    entropy = np.random.SeedSequence(seed, spawn_key=tuple(name.encode()))
    return np.random.Generator(np.random.PCG64(entropy))


def generate(n: int, seed: int, arrivals: Spec, lengths: Lengths, *, correlation: float | None = None) -> Trace:
    """n requests; max_tokens is the output length. Arrivals, prompts and outputs each have their own stream, so a
    change of one leaves the others as they were. `correlation`: see `correlate`. Raises ServecastError with every
    problem of the specs.
    """
    _check(n, _length_problems(lengths, correlation, "lengths"), check_kind(ARRIVALS, arrivals, "arrivals"))
    arrival_s = call_kind(ARRIVALS, arrivals, n, stream(seed, "arrivals"))
    prompt, output = _draw_lengths(n, seed, lengths, correlation)
    source = f"generated: {arrivals['kind']} arrivals, {_describe(lengths, correlation)}, seed {seed}"
    return Trace(arrival_s, prompt, output, output, source=source)


def generate_lengths(n: int, seed: int, lengths: Lengths, *, correlation: float | None = None) -> tuple[Ints, Ints]:
    """(prompt_tokens, output_tokens), each int64[n]: what a closed loop needs, whose arrivals come from the run. The
    same lengths as `generate` draws for the same seed. Raises ServecastError with every problem of the specs.
    """
    _check(n, _length_problems(lengths, correlation, "lengths"))
    return _draw_lengths(n, seed, lengths, correlation)


def generate_classes(n: int, seed: int, arrivals: Spec, classes: Sequence[RequestClass]) -> Trace:
    """n requests of one arrival process, each of a class drawn by weight. Which class comes from a stream of its own,
    and the lengths of a class from streams named after it, so that another class leaves them as they were. For classes
    that arrive each in their own way, generate each and `workloads.merge.merge` them.
    """
    _check(n, class_problems(classes), check_kind(ARRIVALS, arrivals, "arrivals"))
    arrival_s = call_kind(ARRIVALS, arrivals, n, stream(seed, "arrivals"))
    index, prompt, output = generate_class_lengths(n, seed, classes)
    names = tuple(one.name for one in classes)
    source = f"generated: {arrivals['kind']} arrivals of classes {', '.join(names)}, seed {seed}"
    return Trace(arrival_s, prompt, output, output, source=source, classes=(index, names))


def generate_class_lengths(n: int, seed: int, classes: Sequence[RequestClass]) -> tuple[Ints, Ints, Ints]:
    """(class index, prompt_tokens, output_tokens), each int64[n], as `generate_classes` draws them: for closed loops.
    Raises ServecastError with every problem.
    """
    _check(n, class_problems(classes))
    weights = [float(one.weight) for one in classes]
    index = draw_weighted(n, stream(seed, "classes"), list(range(len(classes))), weights)
    prompt, output = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    for i, one in enumerate(classes):
        mine = np.flatnonzero(index == i)
        drawn = _draw_lengths(mine.size, seed, one.lengths, one.correlation, f"class {one.name}: ")
        prompt[mine], output[mine] = drawn
    return index, prompt, output


def correlate(prompt: Ints, output: Ints, correlation: float, rng: np.random.Generator) -> Ints:
    """The outputs in another order, so that prompt and output have about this rank correlation (Spearman's, -1 to 1).

    Both distributions stay exactly as they were drawn; only who gets which output changes. A hidden score that has
    correlation r = 2 sin(pi/6 * correlation) with the prompt's normal score decides, which gives a normal copula (Iman
    and Conover 1982); equal prompts are told apart by chance, so many of them lower what is reached. The order depends
    on all n requests: the first k of n requests are not the same for another n.
    """
    n = prompt.size
    scores, hidden, chance = np.sort(rng.standard_normal(n)), rng.standard_normal(n), rng.random(n)
    score = np.empty(n)
    score[np.lexsort((chance, prompt))] = scores
    r = 2 * np.sin(np.pi / 6 * correlation)
    wanted = r * score + np.sqrt(max(0.0, 1 - r * r)) * hidden
    ordered = np.empty_like(output)
    ordered[np.argsort(wanted, kind="stable")] = np.sort(output)
    return ordered


def class_problems(classes: Sequence[RequestClass]) -> list[str]:
    """Every problem of the classes, each beginning with `classes.` and the class's position."""
    names = [one.name for one in classes]
    problems = [] if classes else ["classes: none given; give at least one"]
    problems += [f"classes: {name!r} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    for i, one in enumerate(classes):
        if not one.name:
            problems.append(f"classes.{i}.name: a class needs a name")
        if not (_is_number(one.weight) and 0 < one.weight <= 1e18):
            problems.append(f"classes.{i}.weight: {one.weight!r} is not a number above 0")
        problems += _length_problems(one.lengths, one.correlation, f"classes.{i}.lengths")
    return problems


def _draw_lengths(n: int, seed: int, lengths: Lengths, correlation: float | None, owner: str = "") -> tuple[Ints, Ints]:
    if isinstance(lengths, Trace):
        return pairs_from_trace(n, stream(seed, owner + "lengths"), lengths)
    prompt = call_kind(LENGTHS, lengths[0], n, stream(seed, owner + "prompt"))
    output = call_kind(LENGTHS, lengths[1], n, stream(seed, owner + "output"))
    if correlation is not None:
        output = correlate(prompt, output, correlation, stream(seed, owner + "correlation"))
    return prompt, output


def _check(n: int, of_lengths: list[str], of_arrivals: Sequence[str] = ()) -> None:
    problems = [*of_arrivals, *([f"num_requests: {n} is below 1"] if n < 1 else []), *of_lengths]
    if problems:
        raise ServecastError(*problems)


def _length_problems(lengths: Lengths, correlation: float | None, where: str) -> list[str]:
    problems = []
    if not isinstance(lengths, Trace):
        prompt, output = lengths
        problems += check_kind(LENGTHS, prompt, f"{where}.prompt") + check_kind(LENGTHS, output, f"{where}.output")
    elif correlation is not None:
        problems.append(f"{where}.correlation: the pairs of a trace have their own; leave it out")
    if correlation is not None and not (_is_number(correlation) and -1 <= correlation <= 1):
        problems.append(f"{where}.correlation: {correlation!r} is not a number from -1 to 1")
    return problems


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _describe(lengths: Lengths, correlation: float | None) -> str:
    if isinstance(lengths, Trace):
        return f"lengths of {lengths.source}"
    together = "" if correlation is None else f", rank correlation {correlation:g}"
    return f"{lengths[0]['kind']} prompts, {lengths[1]['kind']} outputs{together}"
