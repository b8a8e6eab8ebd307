"""KV transfers that others measured, beside our costs. `python -m tests.calibrate.published_transfer` prints the tables
of docs/transfer.md.

Only mean times of transfers are compared; what a request waits for besides is the simulator's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from calibrate.connectors import load_connector, load_transfer_link, node_link
from calibrate.routes import Side
from calibrate.transfer import TransferCosts
from tests.calibrate.helpers import parts

MIB = 2**20

# D-01: vLLM PD Disaggregation Performance, kvcache-ai/Mooncake (Apache-2.0): tokens of the prompt -> KV in MiB ("MB",
# in three digits), transfer in ms. Prompts came by the chat endpoint, whose template adds a few tokens: one block more.
MOONCAKE: Mapping[int, tuple[float, float]] = {
    128: (20, 0.54), 512: (74, 0.92), 1024: (146, 1.50), 2048: (290, 2.51), 4096: (578, 4.75), 8192: (1157, 8.84),
    16384: (2304, 16.43), 32768: (4608, 31.65),
}  # fmt: skip
MOONCAKE_ALSO = {256: (38, 0.61)}  # on the page, not in the case
FITTED = (128, 512, 4096, 32768)
TEMPLATE = 9  # tokens of Qwen3's chat template around a user's message

# Llama-3.3-70B, blocks of 128 tokens, 32 clients, one output token (rajkiranjoshi/llm-d, Apache-2.0): tp -> prompt ->
# (ms of posting, of the transfer). A step of 8,192 tokens ends several short prefills at once.
LLMD_IB: Mapping[int, Mapping[int, tuple[float, float]]] = {
    8: {1024: (0.20, 6.02), 2048: (0.27, 5.28), 4096: (0.31, 5.62), 8192: (0.56, 7.68), 16384: (0.77, 14.21),
        24000: (0.90, 20.56)},
    4: {1024: (0.19, 10.97), 2048: (0.26, 12.40), 4096: (0.34, 13.93), 8192: (0.67, 14.29), 16384: (0.91, 27.64),
        24000: (1.15, 40.41)},
}  # fmt: skip
LLMD_EFA: Mapping[int, Mapping[int, tuple[float, float]]] = {
    8: {1024: (3.3, 11.9), 2048: (7.3, 16.0), 4096: (11.0, 16.9), 8192: (25.4, 25.7), 16384: (47.3, 47.6),
        24000: (73.2, 73.5)},
    4: {1024: (3.65, 12.31), 2048: (7.43, 17.37), 4096: (24.85, 92.28), 8192: (28.49, 28.74), 16384: (54.38, 54.66),
        24000: (76.55, 76.85)},
}  # fmt: skip
STEP_TOKENS = 8192


def costs(
    model: str = "qwen3-8b",
    tp: int = 8,
    connector: str = "mooncake",
    link: str = "rdma-200",
    run_blocks: float = 1.0,
    gpu: str = "h100-sxm",
    **options: object,
) -> TransferCosts:
    """Between two alike instances; `link` "node": within one."""
    spec, layout, card, engine = parts(model, gpu, tp, preset="vllm-0.32", **options)
    side = Side(card, layout, engine, node_link(card) if link == "node" else load_transfer_link(link))
    return TransferCosts.for_(spec, side, side, load_connector(connector), run_blocks)


def d01() -> TransferCosts:
    """The case's H800s link as H100s do here; their pool was fresh: 50 prompts do not go round it once."""
    return costs(run_blocks=math.inf)


def llmd(tp: int, link: str) -> TransferCosts:
    """The costs of the two llm-d reports."""
    return costs("llama-3.3-70b", tp, "nixl", link, gpu="h200-sxm", block_size=128)


@dataclass(frozen=True, slots=True)
class Together:
    """ms of a transfer that `count` begin at once: alone, and all together when they share or take turns."""

    alone: float
    count: int
    turns: float
    shared: float


def together(found: TransferCosts, tokens: int) -> Together:
    """Of the prompts that one step of 8,192 tokens ends."""
    count = max(1, STEP_TOKENS // tokens)
    busy = found.seconds(tokens) - found.fixed_s
    times = (1, (count + 1) / 2, count)
    alone, turns, shared = (1e3 * (found.fixed_s + n * busy) for n in times)
    return Together(alone, count, turns, shared)


def mooncake_rows() -> Iterator[str]:
    yield "| prompt | KV, MiB | transfer, ms | error | |"
    yield "|---|---|---|---|---|"
    found = d01()
    for tokens, (size, ms) in sorted({**MOONCAKE, **MOONCAKE_ALSO}.items()):
        ours = found.seconds(tokens + TEMPLATE) * 1e3
        moved = found.moved_bytes(tokens + TEMPLATE) / MIB
        role = "fitted" if tokens in FITTED else "held out" if tokens in MOONCAKE else "held out, not in the case"
        yield f"| {tokens:,} | {size:,} / {moved:,.0f} | {ms} / {ours:.2f} | {ours / ms - 1:+.1%} | {role} |"


def llmd_rows(published: Mapping[int, Mapping[int, tuple[float, float]]], link: str) -> Iterator[str]:
    yield "| tp | prompt | posting, ms | transfer, ms | ours alone | at once | ours, taking turns to sharing |"
    yield "|---|---|---|---|---|---|---|"
    for tp, rows in published.items():
        found = llmd(tp, link)
        for tokens, (post, ms) in rows.items():
            ours = together(found, tokens)
            several = f"{ours.turns:.1f} to {ours.shared:.1f}" if ours.count > 1 else ""
            yield (
                f"| {tp} | {tokens:,} | {post} / {found.posting_s(tokens) * 1e3:.2f} | {ms} | {ours.alone:.1f} | "
                f"{ours.count} | {several} |"
            )


def tables() -> dict[str, list[str]]:
    """The tables by name, each as the lines of its Markdown."""
    return {
        "Mooncake": list(mooncake_rows()),
        "NIXL over InfiniBand": list(llmd_rows(LLMD_IB, "rdma-400")),
        "NIXL over EFA": list(llmd_rows(LLMD_EFA, "efa-400")),
    }


if __name__ == "__main__":
    for name, lines in tables().items():
        print(f"## {name}\n", *lines, "", sep="\n")
