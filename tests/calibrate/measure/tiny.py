"""A tiny model, a tiny grid of points for it, and what tests of measuring share."""

from __future__ import annotations

from typing import Any

from calibrate.measure.grids import Grid, Round
from calibrate.measure.points import Point, rounds_of
from calibrate.model import ModelSpec

TINY = ModelSpec(
    name="tiny",
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=128,
    max_position=512,
    dtype="fp32",
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm="head",
)
GRID = Grid(
    rounds=(
        Round(
            tokens=(1, 9),
            samples=(2,),
            prefill=((2, 8, 0), (1, 4, 12)),
            decode=((3, 20),),
            skew=((4, 8, 1, 40),),
            moe=(5,),
            steps=((1, 8, 4, 0, 0), (0, 0, 0, 3, 10), (2, 8, 0, 2, 10)),
        ),
        Round(tps=(2,), tokens=(3,), samples=(1,)),
    ),
    square=(64,),
    copies=(2**16,),
    host_copies=(),
    experts=((32, 16, 4, 2),),
)


def close(one: Any, other: Any) -> None:
    """torch's own assertion takes seconds to import."""
    assert one.shape == other.shape
    assert float((one - other).abs().max()) <= 1e-6 + 1e-4 * float(other.abs().max())


def every(grid: Grid, models: list[ModelSpec], device: str = "cpu", dtype: str = "fp32", gpus: int = 1) -> list[Point]:
    return [point for points in rounds_of(grid, models, device, dtype, gpus) for point in points]
