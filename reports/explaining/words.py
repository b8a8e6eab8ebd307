"""What was found, in sentences and rows of plain text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator

from calibrate.breakdown import NAMES, Part, Step
from calibrate.draft_worth import DraftWorth
from reports import drafts
from reports.explaining.facts import Alone, Explained
from reports.words import gib, percent, quantity

BOUNDS = {"compute": "compute", "bandwidth": "memory bandwidth", "latency": "kernel latency",
          "link": "the link between GPUs", "host": "the host"}  # fmt: skip
"""What bounds a step or a part of it, in words."""
RATES = {"bf16": "16 bit", "fp8": "8 bit", "int8": "8 bit", "fp4": "4 bit"}


def title(e: Explained) -> str:
    """What it is about."""
    return f"{e.pool}: {e.setup}" if e.pool else e.setup


def ms(seconds: float) -> str:
    """Milliseconds, as all latencies are said; seconds from ten on."""
    return f"{quantity(seconds)} s" if seconds >= 10 else f"{quantity(1e3 * seconds)} ms"


def tokens(count: int) -> str:
    """A number of them."""
    return f"{count:,} token{'s' * (count != 1)}"


def answer(e: Explained) -> list[str]:
    """The whole in a few sentences."""
    read, token, batch = e.alone.prefill, e.by_batch[1], e.batch
    n = max(e.by_batch)
    each = batch.seconds / n
    then = f", then a token every {ms(e.alone.tpot_s)}; {_sum(e.alone)}" if e.output > 1 else ""
    said = [] if e.drafts is None else [_drafted(e.drafts)]
    said += [
        f"A request of {tokens(e.prompt)} in and {e.output:,} out, alone: TTFT {ms(e.alone.ttft_s)}{then}.",
        f"Its prompt is bound by {BOUNDS[read.bound]}: {_rate(read, e)}. Its answer is bound by {BOUNDS[token.bound]}: "
        f"{_rate(token, e)}.",
    ]
    if n > 1:
        said.append(
            f"{n:,} such requests at once take a step of {ms(batch.seconds)}, bound by {BOUNDS[batch.bound]}: TPOT is "
            f"{quantity(batch.seconds / token.seconds)} times as long, and a token costs {ms(each)} of the engine, "
            f"{quantity(token.seconds / each)} times less than alone."
        )
    return said


def _drafted(worth: DraftWorth) -> str:
    most = max(worth.by_batch)
    return (
        f"With its drafts a token comes every {ms(worth.tpot_s(1))} alone, and every {ms(worth.tpot_s(most))} with "
        f"{most:,} at once; all else here is of steps without them, unless it says so."
    )


def _sum(a: Alone) -> str:
    return f"{ms(a.ttft_s)} + {a.output - 1:,} x {ms(a.tpot_s)} = {ms(a.e2e_s)}"


def _rate(step: Step, e: Explained) -> str:
    """How near a step is to what bounds it."""
    if step.bound == "compute":
        rate = step.flops / step.seconds / 1e12
        return f"{quantity(rate)} TFLOP/s, {percent(step.compute_s / step.seconds)} of the peak"
    if step.bound == "bandwidth":
        rate = step.hbm_bytes / step.seconds / 1e12
        return f"{quantity(rate)} TB/s, {percent(step.bandwidth_s / step.seconds)} of the peak"
    least = max(step.compute_s, step.bandwidth_s)
    return f"at the GPU's peaks its work would take {ms(least)} of {ms(step.seconds)}"


PART_HEAD = ("", "time", "share", "bound by", "of the peak")


def part_rows(step: Step) -> Iterator[tuple[str, ...]]:
    """The parts of a step, the longest first."""
    for part in sorted(step.parts, key=lambda part: -part.seconds):
        if part.seconds:
            share = percent(part.seconds / step.seconds)
            yield NAMES[part.name], ms(part.seconds), share, BOUNDS[part.bound], _near(part)


def _near(part: Part) -> str:
    if part.name in ("communication", "host"):
        return ""
    share = max(part.compute_s, part.bandwidth_s) / part.seconds
    return percent(share) if share <= 1 else "all"  # a CPU's profile reaches more than its catalogue's figures


def steps(e: Explained) -> list[tuple[str, Step]]:
    """The steps whose parts are shown."""
    found = [
        (f"Prompt of {tokens(e.prompt)}, {ms(e.alone.prefill.seconds)}", e.alone.prefill),
        (f"One token after {e.context:,}, {ms(e.by_batch[1].seconds)}", e.by_batch[1]),
    ]
    if (n := max(e.by_batch)) > 1:
        found.append((f"A token each for {n:,} requests, {ms(e.batch.seconds)}", e.batch))
    return found


def kept(e: Explained) -> list[tuple[str, str]]:
    """What memory holds."""
    k = e.kept
    whole = f", {gib(e.gpus * k.weight_bytes)} on all {e.gpus}" if e.gpus > 1 else ""
    return [
        ("Weights", f"{gib(k.weight_bytes)} a GPU{whole}"),
        ("KV cache", f"{_kib(k.token_bytes)} a token and GPU; {_kib(e.prompt * k.token_bytes)} after this prompt"),
        ("Room", f"{k.kv_tokens:,} tokens: {k.at_once:,} such request{'s' * (k.at_once != 1)} at once"),
    ]


def _kib(size: float) -> str:
    for unit, one in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= one:
            return f"{quantity(size / one)} {unit}"
    return f"{quantity(size / 1024)} KiB"


def roofline(e: Explained) -> list[str]:
    """Where decoding turns from bandwidth to compute."""
    peak, n = e.peaks[e.rate], max(e.by_batch)
    ridge = peak / e.peaks["bandwidth"]
    several = f", {n:,} at once {quantity(e.batch.intensity)}" if n > 1 else ""
    said = [
        f"The GPU computes {quantity(peak / 1e12)} TFLOP/s in {RATES[e.rate]}, in which the weights are multiplied, "
        f"and reads {quantity(e.peaks['bandwidth'] / 1e12)} TB/s: a step with fewer than {quantity(ridge)} FLOPs a "
        f"byte waits for memory, one with more for arithmetic. This prompt has "
        f"{quantity(e.alone.prefill.intensity)}, one token {quantity(e.by_batch[1].intensity)}{several}."
    ]
    if e.turns_empty is None:
        said.append("Decoding as a whole never turns compute-bound here, however many decode at once.")
    elif e.turns is None:
        said.append(
            f"Decoding as a whole would turn compute-bound with {e.turns_empty:,} at once without any context. With "
            f"{e.context:,} tokens each it never does: every request brings KV of its own to read, as fast as it "
            "brings FLOPs."
        )
    else:
        reached = "" if e.turns <= e.kept.at_once else f", more than the {e.kept.at_once:,} that run at once"
        said.append(
            f"Decoding turns compute-bound with {e.turns:,} at once{reached}; without context with {e.turns_empty:,}."
        )
    return said


def lessons(e: Explained) -> list[tuple[str, str]]:
    """What the things that engines do are worth here."""
    a, found = e.alone, list[tuple[str, str]]()
    if a.output > 1:
        kept_s = a.prefill.seconds + (a.output - 1) * a.tpot_s
        found.append(
            (
                "Without a KV cache",
                f"each token would read all before it anew: {ms(a.without_cache_s)} in place of {ms(kept_s)}, "
                f"{quantity(a.without_cache_s / kept_s)} times as long.",
            )
        )
    if e.static:
        s = e.static
        found.append(
            (
                "Static batches",
                f"of {s.batch} of the workload's requests, padded to the longest prompt and run to the longest answer, "
                f"would spend {percent(s.prompt_waste)} of the prompt tokens and {percent(s.decode_waste)} of the "
                "decodes on nothing. Continuous batching spends none.",
            )
        )
    if e.prompt > 1:
        found.append(
            (
                "A prefix cache",
                f"that holds half of the prompt: TTFT {ms(e.half_cached_s)} in place of {ms(a.ttft_s)}.",
            )
        )
    if e.drafts is not None:
        found.append(("Drafts", drafts.lesson(e.drafts)))
    sizes = [n for n in e.by_chunk if n]
    if sizes and e.beside:
        none = e.by_chunk[0]
        shown = [n for n in (512, 2048, 8192) if n in e.by_chunk] or sizes[-1:]
        shown = list(dict.fromkeys([*shown, sizes[-1]]))
        found.append(
            (
                "Chunks of prompts",
                f"hold up the {e.beside:,} that decode: a step takes {ms(none)} without, "
                + ", ".join(f"{ms(e.by_chunk[n])} with {n:,} tokens" for n in shown)
                + f". This engine takes up to {e.budget:,} tokens a step.",
            )
        )
    return found


CHANGE_HEAD = ("", "TTFT", "TPOT alone", "TPOT of {batch}", "weights", "KV tokens", "at once")


def change_rows(e: Explained) -> Iterator[tuple[str, ...]]:
    """What other number formats would change; what cannot be, with the reason."""
    yield _row("as it is", e.alone, e.kept.weight_bytes, e.kept.kv_tokens, e.kept.at_once, e.batch.seconds)
    for change in e.changes:
        if change.now and change.kept and change.batch_tpot_s is not None:
            k = change.kept
            yield _row(change.name, change.now, k.weight_bytes, k.kv_tokens, k.at_once, change.batch_tpot_s)


def _row(name: str, a: Alone, weights: int, tokens: int, at_once: int, batch_s: float) -> tuple[str, ...]:
    return name, ms(a.ttft_s), ms(a.tpot_s), ms(batch_s), gib(weights), f"{tokens:,}", f"{at_once:,}"


def not_changed(e: Explained) -> list[str]:
    """Why some of it cannot be."""
    return [f"{change.name}: {change.why}" for change in e.changes if change.why]


def change_head(e: Explained) -> tuple[str, ...]:
    """The columns of `change_rows`."""
    return tuple(name.format(batch=f"{max(e.by_batch):,}") for name in CHANGE_HEAD)


def assumptions(e: Explained) -> list[str]:
    """What it rests on."""
    return [
        "One engine, one request or many that are alike; nobody waits. `servecast run` has queues and real lengths.",
        f"Seconds are those that a run would use ({e.pricing or 'prices of kernels'}); FLOPs and bytes are counted "
        "from the model's shapes, and peaks are the datasheet's.",
        "A part is bound by what it would need longer for at the peaks, or, below a fifth of them, by what its kernels "
        "take however little they do (kernel latency).",
        "Other number formats change no answer here: whether the model still answers as well is not looked at.",
        *(["The engine drafts tokens: the steps above are without."] if e.drafts is not None else []),
    ]
