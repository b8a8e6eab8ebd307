"""A step in pieces: engines that hand the GPU at most so many tokens at a time (llama.cpp's `ubatch_size`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calibrate.cost import StepCost


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

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, kv_tokens: int) -> float:
        """Seconds of one step; see `StepCost`."""
        total, room = 0.0, self.tokens - decodes
        piece: list[tuple[int, int]] = []
        for tokens, context in chunks:
            done = 0
            while done < tokens:
                if not room:
                    total += self.cost.step_s(piece, decodes, kv_tokens)
                    piece, decodes, kv_tokens, room = [], 0, 0, self.tokens
                part = min(tokens - done, room)
                piece.append((part, context + done))
                done += part
                room -= part
        return total + self.cost.step_s(piece, decodes, kv_tokens)

    def decode_line(self, decodes: int, kv_tokens: int) -> tuple[float, float, float, float] | None:
        """Decodes alone are one piece."""
        return self.cost.decode_line(decodes, kv_tokens)
