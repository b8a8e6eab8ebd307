"""What a session has measured: rows by family, what there is to say, and the folder of it. Knows no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.measure.machine import Cpu, Cuda
from calibrate.measure.points import Point
from calibrate.measure.timing import Timed
from calibrate.measurements import FAMILIES, VALUES, Device, Measurements, load_measurements
from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    import polars as pl


@dataclass(slots=True)
class Record:
    """The rows of this call of `measure` and of the earlier ones in the same folder: point -> (seconds, spread,
    kernel)."""

    machine: Cpu | Cuda
    out: Path
    rows: dict[str, dict[tuple[Any, ...], tuple[float, float | None, str]]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    earlier: Device | None = None
    saved: float = 0.0
    began: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))

    def has(self, point: Point) -> bool:
        """Whether the point is measured."""
        return point.values in self.rows.get(point.family, {})

    def add(self, point: Point, timed: Timed, kernel: str) -> None:
        """A measured point."""
        self.rows.setdefault(point.family, {})[point.values] = (timed.seconds, timed.spread, kernel)

    def say(self, notes: Iterable[str]) -> None:
        """Notes of this run, with its date."""
        self.said += [f"run of {self.began}: {note}" for note in notes]

    def resume(self, plain: str) -> None:
        """Take what the folder holds; `ServecastError` where it is of another device, software or dtype than `plain`.

        Elementwise kernels and steps do not say their dtype, so that a folder holds one (GEMMs in fp8 beside bf16).
        """
        if not (self.out / "device.yaml").exists():
            return
        found = load_measurements(self.out)
        here = self._device(())
        for what in ("gpu", "device", "software"):
            before, now = getattr(found.device, what), getattr(here, what)
            if before != now:
                raise ServecastError(
                    f"{self.out}: holds measurements of another {what} ({before}) than this one ({now}); "
                    "give another folder"
                )
        self.earlier = found.device
        for family, table in found.tables.items():
            keys = table.select(FAMILIES[family]).rows()
            self.rows[family] = dict(zip(keys, table.select(VALUES).rows(), strict=True))
        others = {dtype for op, dtype, _ in self.rows.get("rate", {}) if op in ("read", "copy")} - {plain}
        if others:
            raise ServecastError(
                f"{self.out}: holds measurements in {one_of(sorted(others))}, not in {plain}; give another folder"
            )

    def measurements(self) -> Measurements:
        """All of it."""
        import polars as pl

        tables: dict[str, pl.DataFrame] = {}
        for family in [name for name in FAMILIES if self.rows.get(name)]:
            data = [(*values, *taken) for values, taken in self.rows[family].items()]
            columns = [*FAMILIES[family], *VALUES]
            table = pl.DataFrame(data, schema=columns, orient="row", infer_schema_length=None)
            tables[family] = table.with_columns(pl.col("spread").cast(pl.Float64)).sort(FAMILIES[family])
        return Measurements(self._device(tuple(self.said)), tables)

    def save(self) -> None:
        """Write the folder. Every file is replaced at once, so that a kill leaves the last state."""
        if not self.rows:
            return
        beside = self.out / ".writing"
        self.measurements().save(beside)
        for file in sorted(beside.iterdir()):
            os.replace(file, self.out / file.name)  # noqa: PTH105
        beside.rmdir()
        self.saved = time.monotonic()

    def _device(self, said: tuple[str, ...]) -> Device:
        machine, today = self.machine, datetime.now(UTC).date().isoformat()
        cache = machine.cache_bytes / 2**20
        notes = [
            f"weights and caches come from memory (other data every call, more than the last cache's {cache:.0f} MiB); "
            "activations are where the call before left them",
            "attention without writing the new keys and values (kv_cache, among the elementwise kernels); experts "
            "without their router; steps with random weights",
        ]
        if machine.kind == "cuda":
            notes.append("kernels are timed in CUDA graphs: launches are not in them, gaps between nodes are")
        earlier = self.earlier
        began = earlier.taken.split(" to ")[0] if earlier else today
        return Device(
            gpu=machine.gpu,
            device=machine.name,
            measured_by="servecast calibrate measure, on the device itself",
            source="servecast calibrate measure",
            licence="whoever measured decides",
            software=machine.software,
            taken=began if began == today else f"{began} to {today}",
            notes=tuple(dict.fromkeys([*(earlier.notes if earlier else ()), *notes, *said])),
        )
