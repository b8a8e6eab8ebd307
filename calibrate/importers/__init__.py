"""Published kernel tables -> `Measurements`: one format a file, and one line here. They know nothing of fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from calibrate.importers.aiconfigurator import read_aiconfigurator
from calibrate.importers.llmservingsim import read_llmservingsim
from calibrate.importers.splitwise import read_splitwise
from calibrate.importers.vidur import read_vidur
from calibrate.measurements import Measurements
from servecast.errors import ServecastError, nearest, one_of

FORMATS: dict[str, Callable[[Path, str | None], Measurements]] = {
    "aiconfigurator": read_aiconfigurator,  # NVIDIA: GEMM, attention, MoE, MLA, collectives of vLLM; 9 GPUs
    "llmservingsim": read_llmservingsim,  # KAIST: layers of vLLM; GEMM, elementwise, attention with context
    "vidur": read_vidur,  # Microsoft: layers and attention of 2024's kernels, NCCL; A100 and H100
    "splitwise": read_splitwise,  # whole steps of two models on A100 and H100, to check against
}


def import_measurements(format: str, path: Path | str, gpu: str | None = None) -> Measurements:
    """The measurements of one GPU from published tables: `format` is a key of FORMATS, `path` a file or folder of it.

    `gpu` (an id of the catalogue) says which, where the path holds several. Raises `ServecastError` with every problem
    of the tables, with file and row, among them values that are impossible on that GPU (wrong units).
    """
    if format not in FORMATS:
        raise ServecastError(f"unknown format {format!r}{nearest(format, FORMATS)}; formats: {one_of(FORMATS)}")
    if not Path(path).exists():
        raise ServecastError(f"{path}: no such file or folder")
    return FORMATS[format](Path(path), gpu)
