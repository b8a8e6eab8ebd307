"""The memory of one request's life as one self-contained HTML page that opens offline."""

from __future__ import annotations

from html import escape

from calibrate.lifetime import Life
from reports.memory import plan as words
from reports.memory.figures import gpu_memory, pool_use, step_memory
from reports.memory.plan import Planned
from reports.page import card, figure, page
from reports.words import gib, quantity

FIGURES = {
    "gpu": (gpu_memory, "Everything that is on one GPU while the request runs. The pool is reserved at start-up: a "
            "request takes blocks of it, and the rest is free for others. A step's activations come and go."),
    "step": (step_memory, "What moves: activations are large while chunks of the prompt are computed, small when it is "
             "a token at a time; the KV cache grows a block at a time and stays until the request ends."),
    "pool": (pool_use, "Blocks that such requests hold after their prompts, when all have got as far. Where "
             "a line meets the pool's, the engine preempts one of them."),
}  # fmt: skip


def life_html(planned: Planned, life: Life) -> str:
    """The whole page as text."""
    plan = planned.plan
    cards = [
        ("KV cache at its fullest", gib(life.most_blocks * plan.block_bytes), "", f"{life.most_blocks:,} blocks"),
        ("At once", quantity(life.at_once), "requests", "run to their end together"),
        ("Last output token", quantity(life.last), "", f"alone; then {life.stopped_by} ends"),
        ("Peak of its steps", gib(max(m.activation_bytes for m in life.moments)), "", "activations"),
    ]
    rows = "".join(
        f"<tr><th>{escape(name.strip())}</th><td class='number'>{gib(size)}</td><td>{escape(remark)}</td></tr>"
        for name, size, remark in words.terms(planned)
        if not name.startswith(" ")
    )
    body = "\n".join(
        [
            f"<h1>{life.prompt:,} tokens in, {life.output:,} out</h1>",
            f'<p class="soft">{escape(words.title(planned))}</p>',
            *(f'<div class="banner">{escape(line)}</div>' for line in sentences(planned, life)),
            '<div class="cards">' + "".join(card(*one) for one in cards) + "</div>",
            *(figure(name, caption) for name, (_, caption) in FIGURES.items()),
            f"<h2>One GPU</h2><table><tbody>{rows}</tbody></table>",
            "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in words.notes(planned)) + "</ul>",
            "<footer>Written by servecast. Prefix caching is not looked at: nothing is shared.</footer>",
        ]
    )
    drawn = {name: make(planned, life) for name, (make, _) in FIGURES.items()}
    return page(f"Memory of {planned.model.name}", body, drawn, "th { white-space: nowrap; }\n")


def sentences(planned: Planned, life: Life) -> list[str]:
    """Where it ends, in words."""
    said = []
    if 0 < life.last < life.output:
        said.append(f"It cannot finish: output token {life.last:,} is the last, because {life.stopped_by} ends there.")
    elif not life.last:
        return [f"It cannot even begin to answer: {life.stopped_by} ends before its {life.prompt:,} prompt tokens."]
    held, more = f"{life.at_once:,} such requests run to their end together", f"With {life.at_once + 1:,}"
    if life.full_at is None:
        said.append(f"{held}. {more} the pool is full before all prompts are computed.")
    elif life.full_at < life.end:
        said.append(f"{held}. {more} the pool is full when each has {life.full_at:,} output tokens: one is preempted.")
    else:
        most = planned.engine.name_of("max_num_seqs")
        said.append(f"{held}: as many as {most} allows; the KV pool would hold more.")
    return said
