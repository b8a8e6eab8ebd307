"""Measured kernel times as they were taken: one table a family, and the facts of the device they were taken on.

What `measure` writes, importers build and `fit` reads. A folder: `device.yaml` and one CSV a family. It knows nothing
of models, fits or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.rows import Kind, read_rows
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    import polars as pl

WEIGHTS = ("bf16", "fp8", "fp8_block", "nvfp4", "mxfp4", "int8", "int4", "fp32")
"""Dtypes of a GEMM's or an expert's weights: fp8 with one scale a tensor or token, fp8_block with one a 128x128 block;
int8 multiplies int8 activations, int4 and mxfp4 are weight-only (bf16 activations) unless the kernel says otherwise;
fp32, of activations and caches too, on CPUs only."""

HEADS = ("heads", "kv_heads", "head_dim", "value_dim", "window")
"""Elements of a key are `head_dim`, of a value `value_dim`. One KV head of more than 256 elements is a cached latent
(MLA), whose first `value_dim` elements are the value; `window` 0 is full attention."""
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("weights", "m", "n", "k"),
    "prefill_attention": ("kv_dtype", "sequences", "q", "context", *HEADS),
    "decode_attention": ("kv_dtype", "sequences", "context", *HEADS),
    "decode_skew": ("kv_dtype", "sequences", "context", "longer", "longer_context", *HEADS),
    "mla_prefill_module": ("model", "weights", "attn_dtype", "kv_dtype", "sequences", "q", "context", "heads"),
    "mla_decode_module": ("model", "weights", "attn_dtype", "kv_dtype", "sequences", "context", "heads"),
    "moe": ("weights", "tokens", "hidden", "inter", "experts", "topk", "tp", "ep", "skew"),
    "elementwise": ("op", "rows", "elements"),
    "quantize": ("op", "weights", "m", "k"),
    "collective": ("op", "backend", "gpus", "bytes"),
    "host": ("what", "sequences"),
    "step": ("model", "tp", "sequences", "q", "context", "decodes", "kv_tokens"),
    "mode": ("what", "mode", "model", "sequences", "q", "context", "decodes", "kv_tokens"),
    "rate": ("op", "weights", "work"),
}
"""The columns that name a point of each family; every table has `seconds`, `spread` and `kernel` besides.

All sizes are those of one GPU (heads after the tensor-parallel split). gemm: y[m, n] = x[m, k] W. Attention:
`sequences` of `q` new tokens each after `context` cached ones (decode: `context` cached ones, one new).
decode_skew: a decode batch of two lengths, of whose `sequences` `longer` have `longer_context` cached tokens and the
rest `context`. mla_*_module: a whole MLA attention layer of `model`, its projections and norms included, `weights`
being theirs, to check sums of kernels against and not to price with. moe: `tokens` enter a layer of `experts` (whole
model) experts of which this rank holds 1/ep, each `inter`/tp wide; `skew` is "balanced", the distribution's name, or
"touched=N" where exactly N experts get tokens.
elementwise: `rows` that read and write `elements` elements each, as `operators.py` counts them (besides its ops:
"kv_cache", new keys and values into the cache, and "greedy", the likeliest token). quantize: x[m, k] to the
dtype that multiplies `weights`; `op` is "static" (the scale is given) or "dynamic" (found per token). collective:
`bytes` of the whole buffer of one rank, the larger of what it gives in and gets out (all_gather: gathered;
reduce_scatter: before scattering). step: a whole engine step of `model`, to check sums of kernels against and not to
price with: `sequences` prompts of `q` tokens after `context` cached ones, and `decodes` sequences with `kv_tokens`
cached ones between them. mode: the same work in ways that people choose between, which no other family mixes: `what`
is "layer" (one of `model`; `mode` eager, compiled, graph) or "attention" (of one layer; `mode` naive, fused). rate:
what the device reaches at best: `op` "matmul" does `work` FLOPs in `weights`, "copy" (read and written), "read",
"to_device" and "to_host" move `work` bytes. host: `what` names a cost of the host's, such as launch_eager, one
kernel's.
`seconds` of one call; `spread` is (p90 - p10) / median over the repetitions, or null; `kernel` names the library that
ran.
"""
TEXT = frozenset({"weights", "kv_dtype", "attn_dtype", "model", "skew", "op", "backend", "what", "mode"})
VALUES = ("seconds", "spread", "kernel")


@dataclass(frozen=True, slots=True)
class Device:
    """Where measurements come from. `gpu` is an id of the catalogue (or "cpu"); `device` the name that the driver
    gives; `software` names engine, kernel libraries and driver with their versions; `taken` a date or period."""

    gpu: str
    device: str
    measured_by: str
    source: str
    licence: str
    software: str
    taken: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurements:
    """The tables by family, as FAMILIES describes them, and the device."""

    device: Device
    tables: Mapping[str, pl.DataFrame]

    def save(self, folder: Path) -> None:
        """Write `device.yaml` and one `<family>.csv` a table into `folder`, which is made."""
        import yaml

        folder.mkdir(parents=True, exist_ok=True)
        facts = asdict(self.device) | {"notes": list(self.device.notes)}
        (folder / "device.yaml").write_text(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True), "utf-8")
        for family, table in self.tables.items():
            table.write_csv(folder / f"{family}.csv")


def load_measurements(folder: Path) -> Measurements:
    """Read what `save` wrote; `ServecastError` with every problem: file, row and what is allowed."""
    if not (folder / "device.yaml").is_file():
        raise ServecastError(f"{folder}: no device.yaml in it; expected a folder that `servecast calibrate` wrote")
    problems: list[str] = []
    device = _device(folder / "device.yaml", problems)
    tables = {}
    for path in sorted(folder.glob("*.csv")):
        if path.stem not in FAMILIES:
            problems.append(f"{path}: no such family{nearest(path.stem, FAMILIES)}; known: {one_of(FAMILIES)}")
        elif (table := _table(path, problems)) is not None:
            tables[path.stem] = table
    if not problems and not tables:
        problems.append(f"{folder}: holds no table; expected files such as gemm.csv")
    if problems or device is None:
        raise ServecastError(*problems)
    return Measurements(device, tables)


def measured_rates(measured: Measurements) -> tuple[dict[str, float], float]:
    """(best FLOP/s by weights, best bytes/s of the memory) that the device reached: a roofline where no datasheet is.

    From `rate` and the GEMMs; `ServecastError` where the measurements hold no rate.
    """
    import polars as pl

    rate = measured.tables.get("rate")
    moved = None if rate is None else rate.filter(pl.col("op").is_in(["copy", "read"]))
    if rate is None or moved is None or not len(moved):
        raise ServecastError("the measurements hold no rate of the device: no row of rate.csv is of op copy or read")
    done = [rate.filter(pl.col("op") == "matmul").select("weights", "seconds", work=pl.col("work").cast(pl.Float64))]
    if "gemm" in measured.tables:
        sizes = [pl.col(size).cast(pl.Float64) for size in ("m", "n", "k")]
        done.append(measured.tables["gemm"].select("weights", "seconds", work=2 * sizes[0] * sizes[1] * sizes[2]))
    best = pl.concat(done).group_by("weights").agg((pl.col("work") / pl.col("seconds")).max())
    flops = dict(zip(best["weights"], best["work"], strict=True))
    return flops, float((moved["work"] / moved["seconds"]).to_numpy().max())


def impossible(family: str) -> dict[str, pl.Expr]:
    """Column -> what of it no measurement can have: null, sizes below 1 (0 where that means none), seconds <= 0."""
    import polars as pl

    may_be_zero = {"context", "window", "decodes", "kv_tokens"}
    may_be_zero |= {"host": {"sequences"}, "step": {"sequences", "q"}, "mode": {"sequences", "q"}}.get(family, set())
    rules = {c: pl.col(c) < (0 if c in may_be_zero else 1) for c in FAMILIES[family] if c not in TEXT}
    rules["seconds"] = ~pl.col("seconds").is_finite() | (pl.col("seconds") <= 0)
    return {column: bad | pl.col(column).is_null() for column, bad in rules.items()}


def checked(family: str, table: pl.DataFrame, where: str) -> list[str]:
    """What is wrong with a table's values, one sentence a kind of problem, with the first row (the header is row 1)."""
    problems = []
    numbered = table if "row" in table.columns else table.with_row_index("row", offset=2)
    for column, bad in impossible(family).items():
        rows = numbered.filter(bad)
        if len(rows):
            more = f" (and {len(rows) - 1:,} more rows)" if len(rows) > 1 else ""
            problems.append(f"{where}, row {rows['row'][0]}: {column} is {rows[column][0]}; expected more{more}")
    twice = numbered.filter(table.select(FAMILIES[family]).is_duplicated())
    if len(twice):
        problems.append(
            f"{where}, row {twice['row'][-1]}: the same point as another row ({len(twice):,} rows are not unique); "
            "keep one of them"
        )
    return problems


def _device(path: Path, problems: list[str]) -> Device | None:
    import yaml

    try:
        facts: Any = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problems.append(f"{path}: not YAML: {error}")
        return None
    known = [field.name for field in fields(Device)]
    if not isinstance(facts, dict):
        problems.append(f"{path}: expected keys {one_of(known)}")
        return None
    problems += [f"{path}: {key!r} is not known{nearest(str(key), known)}" for key in facts if key not in known]
    missing = [key for key in known if key not in facts and key != "notes"]
    problems += [f"{path}: {key!r} is missing" for key in missing]
    if missing:
        return None
    words = {key: str(facts[key]) for key in known if key != "notes"}
    return Device(**words, notes=tuple(str(note) for note in facts.get("notes") or ()))


def _table(path: Path, problems: list[str]) -> pl.DataFrame | None:
    family = path.stem
    columns: dict[str, Kind] = {c: str if c in TEXT else int for c in FAMILIES[family]}
    columns |= {"seconds": float, "spread": float, "kernel": str}
    table = read_rows(path, columns, problems, nullable=("spread", "kernel"))
    if table is None:
        return None
    problems += checked(family, table, str(path))
    return table.select(list(columns))
