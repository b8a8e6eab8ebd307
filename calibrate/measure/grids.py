"""The sizes that are measured on a GPU and on a CPU. Data; `points.py` crosses them with the shapes of models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """One pass: every size that it crosses with the models' shapes. Tuples of attention and steps are the columns of
    their family; `steps` are (sequences, q, context, decodes, cached tokens of each)."""

    tps: tuple[int, ...] = (1,)
    tokens: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int, int], ...] = ()
    decode: tuple[tuple[int, int], ...] = ()
    skew: tuple[tuple[int, int, int, int], ...] = ()
    moe: tuple[int, ...] = ()
    steps: tuple[tuple[int, int, int, int, int], ...] = ()
    modes: tuple[tuple[int, int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """The rounds, and what does not depend on models: sizes of the square multiplication, bytes of the copies, layers
    of experts as (hidden, inter, experts, topk), bytes of collectives."""

    rounds: tuple[Round, ...]
    square: tuple[int, ...]
    copies: tuple[int, ...]
    host_copies: tuple[int, ...]
    experts: tuple[tuple[int, int, int, int], ...]
    collectives: tuple[int, ...] = ()


STEPS = ((1, 512, 0, 0, 0), (0, 0, 0, 8, 512), (1, 256, 0, 8, 512), (0, 0, 0, 1, 2048), (2, 256, 512, 4, 1024))
GPU = Grid(
    rounds=(
        Round(
            tokens=(1, 16, 64, 256, 1024, 4096),
            samples=(1, 16, 128),
            prefill=((1, 512, 0), (1, 2048, 0), (1, 8192, 0), (8, 512, 0), (1, 512, 4096), (1, 2048, 8192)),
            decode=((1, 1024), (1, 16384), (16, 1024), (16, 8192), (64, 1024), (64, 4096), (256, 1024)),
            skew=((64, 1024, 4, 16384), (64, 1024, 32, 4096)),
            moe=(1, 16, 128, 1024, 8192),
            steps=(*STEPS, (0, 0, 0, 64, 1024), (1, 2048, 0, 64, 1024), (1, 8192, 0, 0, 0)),
            modes=((1, 512, 0, 0, 0), (0, 0, 0, 8, 1024)),
        ),
        Round(
            tps=(1, 2, 4, 8),
            tokens=(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            samples=(1, 4, 16, 64, 128, 256, 512),
            prefill=(
                *((1, q, 0) for q in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
                *((n, q, 0) for n in (2, 4, 16) for q in (128, 1024)),
                *((1, q, c) for q in (128, 512, 2048, 8192) for c in (1024, 4096, 16384, 65536)),
            ),
            decode=tuple((n, c) for n in (1, 4, 16, 64, 128, 256) for c in (128, 512, 2048, 8192, 32768)),
            skew=tuple((n, 1024, n // part, c) for n in (16, 128) for part in (2, 8) for c in (4096, 32768)),
            moe=(1, 4, 16, 64, 256, 1024, 4096, 16384),
            steps=((4, 512, 0, 16, 2048), (0, 0, 0, 256, 512), (1, 512, 8192, 32, 4096), (0, 0, 0, 32, 8192)),
        ),
        Round(
            tps=(1, 2, 4, 8),
            tokens=(
                *(2, 4, 24, 48, 63, 65, 96, 127, 129, 160, 192, 255, 257, 320, 384, 511, 513, 640, 768, 1023, 1025),
                *(1280, 1536, 2049, 3072, 6144, 12288, 16384),
            ),
            samples=(2, 8, 24, 32, 48, 96, 192, 384, 1024),
            prefill=tuple((1, q, c) for q in (16, 96, 192, 384, 768, 1536, 3072, 6144) for c in (0, 512, 2048, 8192)),
            decode=tuple((n, c) for n in (2, 8, 24, 32, 48, 96, 192, 512) for c in (256, 1024, 4096, 16384)),
            moe=(2, 8, 32, 128, 512, 2048, 8192),
        ),
    ),
    square=(4096, 8192),
    copies=(2**30, 2**32),
    host_copies=(2**16, 2**20, 2**26),
    experts=(  # as in the config.json of Mixtral 8x7B, Qwen3 30B A3B, gpt-oss 120B, DeepSeek-V3
        *((4096, 14336, 8, 2), (2048, 768, 128, 8)),
        *((2880, 2880, 128, 4), (7168, 2048, 256, 8)),
    ),
    collectives=tuple(2**n for n in range(12, 29, 2)),
)
CPU = Grid(
    rounds=(
        Round(
            tokens=(1, 8, 64, 256),
            samples=(1, 8),
            prefill=((1, 64, 0), (1, 256, 0), (1, 1024, 0), (1, 128, 512), (2, 128, 0)),
            decode=((1, 256), (1, 2048), (4, 512), (8, 256), (8, 1024)),
            skew=((8, 256, 1, 2048), (8, 256, 4, 1024)),
            moe=(1, 16, 128),
            steps=((1, 64, 0, 0, 0), (0, 0, 0, 4, 512), (1, 64, 0, 4, 512), (1, 256, 0, 0, 0), (1, 64, 256, 8, 256)),
            modes=((1, 64, 0, 0, 0), (0, 0, 0, 4, 512)),
        ),
        Round(
            tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
            samples=(1, 2, 4, 16),
            prefill=tuple((1, q, c) for q in (16, 64, 128, 256, 512) for c in (0, 256, 1024)),
            decode=tuple((n, c) for n in (1, 2, 4, 8, 16) for c in (64, 256, 1024)),
            moe=(1, 4, 16, 64, 256),
            steps=((0, 0, 0, 1, 256), (0, 0, 0, 16, 256), (2, 32, 0, 2, 256), (1, 128, 512, 0, 0)),
        ),
        Round(
            tps=(1, 2, 4, 8),
            tokens=(1, 3, 6, 12, 15, 17, 24, 31, 33, 48, 63, 65, 96, 127, 129, 192, 255, 257, 384, 768, 1024, 2048),
            samples=(3, 6, 12, 24, 32),
            prefill=tuple((1, q, c) for q in (32, 96, 192, 384, 1024, 2048) for c in (0, 512, 2048, 4096)),
            decode=tuple((n, c) for n in (1, 3, 6, 12, 24, 32) for c in (128, 512, 2048, 4096)),
            moe=(2, 8, 32, 128, 512),
        ),
    ),
    square=(1024, 2048),
    copies=(2**28,),
    host_copies=(),
    experts=((1024, 512, 32, 8),),  # as in the config.json of Granite 3.0 1B A400M
)
