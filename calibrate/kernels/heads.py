"""Head shapes of attention, what an attention kernel must compute and move, and the fit that both phases share.

A kind is (KV dtype, elements of keys and values, window): kernels of one kind share their code. It knows no kernel's
time structure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.kernels.additive import Axes, Tables, read_tables
from calibrate.kernels.plain import field, mapping, number, positive, rounded, text
from calibrate.kernels.roofline import Roofline
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

KV_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp32": 4.0}
QUERY_BYTES = 2.0  # queries in and outputs out are 16 bit
COLUMNS = ("heads", "kv_heads", "head_dim", "value_dim", "window")
KIND_COLUMNS = ("kv_dtype", "head_dim", "value_dim", "window")
WIDEST = 256  # elements of a head that kernels take, but for the cached latents of MLA


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one GPU in one layer, with keys of `head_dim` and values of `value_dim` elements; `window` 0 is full
    attention. A KV head wider than WIDEST is a cached latent (MLA), whose first elements are its value."""

    kv_dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int = 0

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_BYTES:
            raise ServecastError(
                f"kv_dtype {self.kv_dtype!r} is not known{nearest(self.kv_dtype, KV_BYTES)}; known: {one_of(KV_BYTES)}"
            )

    @property
    def kind(self) -> str:
        """The name of the kind, as a profile writes it."""
        return kind_name(self.kv_dtype, self.head_dim, self.value_dim, self.window)

    @property
    def owner(self) -> str:
        """The name of the head shape within its kind."""
        return f"{self.heads}/{self.kv_heads}"

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of one token's keys and values."""
        own = self.value_dim if self.head_dim <= WIDEST or self.value_dim == self.head_dim else 0
        return float(self.kv_heads * (self.head_dim + own)) * KV_BYTES[self.kv_dtype]

    @property
    def query_token_bytes(self) -> float:
        """Bytes of one token's queries in and outputs out."""
        return float(self.heads * (self.head_dim + self.value_dim)) * QUERY_BYTES

    @property
    def pair_flops(self) -> float:
        """FLOPs of one query token meeting one cached token: QK^T and PV, 2 a multiply-add."""
        return 2.0 * self.heads * (self.head_dim + self.value_dim)

    def peak(self, roofline: Roofline) -> float:
        """FLOP/s of the multiplication, which is at most in the KV's dtype where the GPU has a rate for that."""
        widest = roofline.flops.get("bf16") or max(roofline.flops.values())
        return roofline.flops.get(self.kv_dtype) or widest


def kind_name(kv_dtype: str, head_dim: int, value_dim: int, window: int) -> str:
    """KV dtype/elements/window: bf16/128/0, or with values of another size bf16/192:128/0."""
    elements = f"{head_dim}" if head_dim == value_dim else f"{head_dim}:{value_dim}"
    return f"{kv_dtype}/{elements}/{window}"


def kind_sizes(name: str) -> tuple[str, int, int, int]:
    """What `kind_name` was given; `ServecastError` where it gives no such name."""
    parts = re.fullmatch(r"(\w+)/(\d+)(?::(\d+))?/(\d+)", name)
    if parts is None or parts[1] not in KV_BYTES:
        raise ServecastError(f"{name!r} is no kind; expected KV dtype/head dimension/window: bf16/128/0")
    return parts[1], int(parts[2]), int(parts[3] or parts[2]), int(parts[4])


@dataclass(frozen=True, slots=True)
class Kind:
    """A fitted kind: seconds are `(fixed_s + work / share) x exp(tables)`, where `work` is the time of the roofline.

    `floor` is how many times faster than the roofline the fastest measured kernel ran: 1 where none did. `extent` is
    the measured range of each named size, `kernel` the library that ran most of the points.
    """

    kernel: str
    fixed_s: float
    share: float
    floor: float
    tables: Tables
    extent: Mapping[str, tuple[float, float]]

    def to_json(self, axes: Sequence[Axes]) -> dict[str, Any]:
        """Plain JSON; `axes` are those that all kinds' tables are made of."""
        extent = {name: [rounded(low, 12), rounded(high, 12)] for name, (low, high) in self.extent.items()}
        return {
            "kernel": self.kernel,
            "fixed_us": rounded(1e6 * self.fixed_s),
            "share": rounded(self.share),
            "floor": rounded(self.floor),
            "extent": extent,
            "tables": self.tables.to_json(axes),
        }


def read_kind(data: Any, axes: Sequence[Axes], where: str) -> Kind:
    """What `Kind.to_json` gave; `ServecastError` with the key where it is something else."""
    return Kind(
        field(data, "kernel", where, text),
        1e-6 * field(data, "fixed_us", where, positive),
        field(data, "share", where, positive),
        max(field(data, "floor", where, positive), 1.0),
        field(data, "tables", where, lambda value, at: read_tables(value, axes, at)),
        field(data, "extent", where, mapping(_range)),
    )


def read_roofline(data: Any, where: str) -> Roofline:
    """The "flops" and "bandwidth_bytes_per_s" of a model's JSON."""
    flops = field(data, "flops", where, mapping(positive))
    if not flops:
        raise ServecastError(f"{where}.flops: holds no rate; expected at least that of bf16")
    return Roofline(flops, field(data, "bandwidth_bytes_per_s", where, positive))


def write_roofline(roofline: Roofline) -> dict[str, Any]:
    """What `read_roofline` reads."""
    return {"flops": dict(roofline.flops), "bandwidth_bytes_per_s": roofline.bandwidth_bytes_per_s}


def checked_kinds(names: list[str], where: str) -> None:
    """`ServecastError` where a name is not a kind's, or there is none."""
    if not names:
        raise ServecastError(f"{where}: holds no kind; expected at least one such as bf16/128/0")
    for name in names:
        try:
            kind_sizes(name)
        except ServecastError as error:
            raise ServecastError(f"{where}: {error}") from None


def closest_kind(names: list[str], shape: HeadShape) -> str:
    """The kind of the shape, or the one whose factors stand for it: latents for latents, full attention for full
    attention and windows for windows, then the same KV dtype, then the nearest head dimension and window."""

    def distance(name: str) -> tuple[bool, bool, bool, float, float]:
        kv_dtype, head_dim, value_dim, window = kind_sizes(name)
        return (
            (head_dim == value_dim) != (shape.head_dim == shape.value_dim),
            (window == 0) != (shape.window == 0),
            kv_dtype != shape.kv_dtype,
            abs(float(np.log(head_dim / shape.head_dim))),
            abs(float(np.log((window or 1) / (shape.window or 1)))),
        )

    return min(names, key=distance)


def base_of(work: Floats, seconds: Floats) -> tuple[float, float, float]:
    """(fixed_s, share, floor) of `fixed_s + work / share`: what the smallest kernels take, what the best ones reach."""
    fixed = max(float(np.quantile(seconds, 0.01)) - float(np.quantile(work, 0.01)), 0.05 * float(seconds.min()))
    large = seconds >= min(4 * fixed, float(np.quantile(seconds, 0.5)))
    share = float(np.quantile(work[large] / np.maximum(seconds[large] - fixed, 0.1 * seconds[large]), 0.9))
    return fixed, min(max(share, 0.01), 1.0), max(float((work / seconds).max()), 1.0)


def extended(seconds: Floats, sequences: Floats, most: float) -> Floats:
    """`seconds[i, ...]` of `sequences[i]` (each twice the one before) where those beyond the `most` that were measured
    lie on the line through the last two that were: every further sequence costs the same."""
    measured = int(np.searchsorted(sequences, most * (1 + 1e-9), side="right"))
    out = seconds.copy()
    for i in range(max(measured, 2), len(sequences)):
        out[i] = np.maximum(3 * out[i - 1] - 2 * out[i - 2], seconds[i])
    return out


def by_kind(table: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """The kinds of a table of measurements with their rows, in order."""
    for key, rows in table.sort(KIND_COLUMNS).group_by(*KIND_COLUMNS, maintain_order=True):
        yield kind_name(*key), rows


def by_shape(kv_dtype: str, *sizes: Floats) -> Iterator[tuple[HeadShape, NDArray[np.bool_]]]:
    """The distinct head shapes among points (COLUMNS: one array each) and where they are."""
    if all((x == x[0]).all() for x in sizes if len(x)):
        if len(sizes[0]):
            yield HeadShape(kv_dtype, *(int(x[0]) for x in sizes)), np.ones(len(sizes[0]), bool)
        return
    shapes, which = np.unique(np.stack(sizes), axis=1, return_inverse=True)
    for i, each in enumerate(shapes.T):
        yield HeadShape(kv_dtype, *(int(x) for x in each)), which.ravel() == i


def kernel_of(rows: pl.DataFrame) -> str:
    """The library that ran most of the rows."""
    return (
        str(rows["kernel"].drop_nulls().value_counts(sort=True)["kernel"][0]) if "kernel" in rows.columns else "unknown"
    )


def owners_of(rows: pl.DataFrame) -> list[str]:
    """The owner of every row, see `HeadShape.owner`."""
    return [f"{h}/{k}" for h, k in rows.select("heads", "kv_heads").iter_rows()]


def _range(value: Any, where: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ServecastError(f"{where}: expected the smallest and the largest measured")
    return number(value[0], where), number(value[1], where)
