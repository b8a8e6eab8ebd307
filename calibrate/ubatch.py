"""A step in pieces: engines that hand the GPU at most so many tokens at a time (llama.cpp's `ubatch_size`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibrate.cost import StepCost
from calibrate.reads import Line


@dataclass(frozen=True, slots=True)
class InPieces:
    """A `StepCost` that runs a step of more than `tokens` tokens piece by piece: the decodes, then the chunks in order.

    Decodes must be no more than `tokens`. Every piece pays what a step pays, its host's time included.
    """

    cost: StepCost
    tokens: int

    @property
    def provenance(self) -> Mapping[str, object]:
        """Of the cost."""
        return self.cost.provenance

    @property
    def swap_block_s(self) -> float:
        """Of the cost."""
        return self.cost.swap_block_s

    def step_s(
        self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, seen: Sequence[int] = ()
    ) -> float:
        """Seconds of one step; see `StepCost`."""
        total, room = 0.0, self.tokens - decodes
        piece: list[tuple[int, int]] = []
        for tokens, context in chunks:
            done = 0
            while done < tokens:
                if not room:
                    total += self.cost.step_s(piece, decodes, kv_tokens, seen)
                    piece, decodes, kv_tokens, seen, room = [], 0, 0, [0] * len(seen), self.tokens
                part = min(tokens - done, room)
                piece.append((part, context + done))
                done += part
                room -= part
        return total + self.cost.step_s(piece, decodes, kv_tokens, seen)

    def decode_line(self, decodes: int, kv_tokens: int) -> Line | None:
        """Decodes alone are one piece."""
        return self.cost.decode_line(decodes, kv_tokens)

    def window_lines(self, decodes: int, seen: Sequence[int]) -> Sequence[Line]:
        """See `StepCost`."""
        return self.cost.window_lines(decodes, seen)
