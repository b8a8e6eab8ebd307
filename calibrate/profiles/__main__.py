"""Builds the shipped profiles again: `python -m calibrate.profiles TABLES REFERENCE [GPU ...]`.

TABLES is the folder of an installed `aiconfigurator-core==0.12.0` (Apache-2.0), REFERENCE one that holds the published
tables of LLMServingSim (MIT) as `llmservingsim/`. Takes minutes a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from calibrate.fit import fit_profile
from calibrate.importers import import_measurements
from calibrate.measurements import Measurements
from calibrate.profile import FOLDER
from servecast.errors import ServecastError

AICONFIGURATOR = ("a100-sxm", "h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200", "l40s", "rtx-pro-6000")
ATTENTION = ("prefill_attention", "decode_attention")
EXTRA: Mapping[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "rtx-pro-6000": (("llmservingsim", "llmservingsim/profiles", ("elementwise",)),),
    "rtx-4090": (("llmservingsim", "llmservingsim/profiles", (*ATTENTION, "gemm", "elementwise")),),
}
"""GPU -> (format, folder in REFERENCE, families to take), after aiconfigurator's own. Not taken are vidur's elementwise
kernels of A100 and H100: torch's of 2024, unfused; an activation takes four times as long as in today's engines."""
ONE_MODEL = ("rtx-4090",)
"""GPUs of which only one model's layers were measured: other shapes are refused."""


def sources(gpu: str, tables: Path, reference: Path) -> list[Measurements]:
    """Everything that the profile of `gpu` is fitted to, the first source of a family first."""
    found = [import_measurements("aiconfigurator", tables, gpu)] if gpu in AICONFIGURATOR else []
    for format, folder, families in EXTRA.get(gpu, ()):
        more = import_measurements(format, reference / folder, gpu)
        found.append(replace(more, tables={f: t for f, t in more.tables.items() if f in families}))
    return found


def main(tables: str, reference: str, *gpus: str) -> None:
    """Fit and write the profiles of `gpus`, of all if none is named."""
    for gpu in gpus or (*AICONFIGURATOR, "rtx-4090"):
        measured = sources(gpu, Path(tables), Path(reference))
        profile = fit_profile(measured)
        if gpu in ONE_MODEL:
            shapes = measured[0].tables["gemm"].select("n", "k").unique().sort("n", "k")
            profile = replace(profile, only=tuple(shapes.iter_rows()))
        (FOLDER / f"{gpu}.json").write_text(profile.to_text(), "utf-8")
        print(f"{gpu}: {len(profile.to_text()) / 1024:.0f} KiB")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ServecastError as error:
        sys.exit("\n".join(error.problems))
