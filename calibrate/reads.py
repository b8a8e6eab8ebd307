"""What decoding sequences take to read the KV of layers with equal attention, as look-ups for a simulator's loop.

Sequences that decode alone have a kernel whose time is a line in what they read. In steps with prompt chunks some
kernels take both: see `calibrate.kernels.chunks.Riders`. It knows no fit, no host and no other kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calibrate.hardware import Gpu
    from calibrate.kernels.chunks import Chunks, Riders
    from calibrate.operators import AttentionGroup

    Lines = list[list[tuple[float, float, float]]]  # of KvLines

Line = tuple[float, float, float, float]
"""(a, b, floor, upto): the larger of `floor` and `a + b * tokens` seconds, for up to `upto` tokens."""
JOINT_ATTENTION = ("ampere", "ada", "blackwell-rtx")
"""GPU classes on which vLLM's attention is FlashAttention 2: one kernel takes the chunks and the decodes of a mixed
step, see `calibrate.kernels.chunks.Riders`. FlashAttention 3 (Hopper) and FlashInfer (Blackwell) are priced as two
kernels; nobody published mixed points of theirs."""


@dataclass(frozen=True, slots=True)
class Reads:
    """`lines[n]`: of n sequences alone. `joint[n]`: seconds, and seconds a token, in one kernel with chunks;
    `joint_read`: the least that takes (seconds to read a token, to read it again for all other heads, and how many
    tokens the cache holds)."""

    lines: Lines
    joint: list[tuple[float, float]]
    joint_read: tuple[float, float, float]

    def line(self, decodes: int, tokens: int) -> Line:
        """The line of so many sequences that read so many tokens; it has no floor."""
        for upto, a, b in self.lines[decodes]:
            if tokens <= upto:
                return a, b, 0.0, upto
        raise AssertionError("the last piece has no end")

    def mixed(self, decodes: int, tokens: int) -> tuple[float, float, float]:
        """Seconds in a step with chunks, of which the longest counts: in a kernel of their own, in that of the chunks,
        and to read from memory."""
        a, b, _, _ = self.line(decodes, tokens)
        tiles_s, token_s = self.joint[decodes]
        read_s, again_s, resident = self.joint_read
        again = again_s * min(3.0 * (tokens - resident), tokens) if tokens > resident else 0.0
        return a + b * tokens, tiles_s + token_s * tokens, read_s * tokens + again


def reads_of(groups: Sequence[tuple[int, Lines]], riding: Sequence[tuple[int, Riders]], max_sequences: int) -> Reads:
    """All of `groups` together: (layers, the lines of one layer), and (layers, what decodes take in the chunks' kernel
    of one) where they are not apart."""
    return Reads(
        lines=sum_of_lines(groups) if groups else [[(float("inf"), 0.0, 0.0)] for _ in range(max_sequences + 1)],
        joint=[
            (sum(layers * r.tiles_s(n) for layers, r in riding), sum(layers * r.token_s(n) for layers, r in riding))
            for n in range(max_sequences + 1)
        ],
        joint_read=(
            sum(layers * riders.read_s for layers, riders in riding),
            sum(layers * riders.again_s for layers, riders in riding),
            min((riders.resident for _, riders in riding), default=0.0),
        ),
    )


def riding(
    groups: Sequence[AttentionGroup], prefill: Sequence[tuple[int, Chunks]], gpu: Gpu
) -> list[tuple[int, Riders]]:
    """(layers, what decodes take in the chunks' kernel); nothing where they have a kernel of their own."""
    if gpu.architecture not in JOINT_ATTENTION or any(g.latent for g in groups):
        return []
    return [
        (layers, _shared(replace(chunks.riders, resident=gpu.l2_bytes * g.kv_heads / g.kv_token_bytes), g.dcp))
        for g, (layers, chunks) in zip(groups, prefill, strict=True)
    ]


def _shared(riders: Riders, ranks: int) -> Riders:
    """Where ranks share the tokens of the cache: each meets its part of them, with the query heads of all."""
    return replace(
        riders,
        key_s=riders.key_s / ranks,
        read_s=riders.read_s / ranks,
        heads=riders.heads * ranks,
        resident=riders.resident * ranks,
    )


def of_parts(lines: Lines, ranks: int) -> Lines:
    """Lines in the tokens of a rank's part of the cache, as lines in those of all `ranks` that share them."""
    return [[(upto * ranks, a, b / ranks) for upto, a, b in pieces] for pieces in lines] if ranks > 1 else lines


def of_fullest(lines: Lines, ranks: int) -> Lines:
    """Lines of one rank's sequences, as lines of the sequences that are dealt out to `ranks`, in the tokens of all:
    those of the rank with the most sequences, equally long."""
    found: Lines = [lines[0]]
    for n in range(1, len(lines)):
        most = -(-n // ranks)
        found.append([(upto * n / most, a, b * most / n) for upto, a, b in lines[most]])
    return found


def sum_of_lines(groups: Sequence[tuple[int, Lines]]) -> Lines:
    """Lines of all layers together, from those of one layer of each group."""
    if len(groups) == 1:
        layers, lines = groups[0]
        return [[(upto, layers * a, layers * b) for upto, a, b in pieces] for pieces in lines]
    total: Lines = []
    for pieces in zip(*(lines for _, lines in groups), strict=True):
        ends = sorted({upto for piece in pieces for upto, _, _ in piece})
        summed = []
        for end in ends:
            a = b = 0.0
            for (layers, _), piece in zip(groups, pieces, strict=True):
                _, at, slope = piece[bisect_left([upto for upto, _, _ in piece], end)]
                a += layers * at
                b += layers * slope
            summed.append((end, a, b))
        total.append(summed)
    return total
