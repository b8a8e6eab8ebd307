"""Kernel tables of NVIDIA aiconfigurator: the Parquet folders of its package, or the same tables as CSV.

vLLM's tables in the newest version, and NCCL's; of other engines TensorRT-LLM's GEMMs in FILLED, its all-reduce and the
attention kernels of MLA, of which vLLM's tables hold whole layers only. It knows where the files lie and what was timed
(from the collectors' sources of 2026); `aiconfigurator_tables.py` knows the columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.hardware import load_gpu
from calibrate.importers.aiconfigurator_deepep import DEEPEP, add_deepep
from calibrate.importers.aiconfigurator_tables import EVERYWHERE, FUSED, TABLES, add_fused, add_quantize
from calibrate.importers.gather import Gathered
from calibrate.measurements import Device, Measurements
from calibrate.rows import read_rows
from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    import polars as pl

SYSTEMS = {
    "a100_sxm": ("a100-sxm", "A100"),
    "h100_sxm": ("h100-sxm", "H100"),
    "h100_pcie": ("h100-pcie", "H100"),
    "h200_sxm": ("h200-sxm", "H200"),
    "b200_sxm": ("b200-sxm", "B200"),
    "b300_sxm": ("b300-sxm", "B300"),
    "gb200": ("gb200", "GB200"),
    "gb300": ("gb300", "GB300"),
    "l4": ("l4", "L4"),
    "l40s": ("l40s", "L40S"),
    "rtx_pro_6000_server": ("rtx-pro-6000", "RTX PRO 6000"),
}
"""Folder -> id of the catalogue, and the word that the driver's name of the device must hold."""
FILLED = ("fp8_block", "int4_wo", "sq")
"""GEMMs that are better known from TensorRT-LLM's tables: vLLM's fp8_block were timed without a graph and show the
host's launches (55 us on Hopper to 280 us on L40S where the kernel takes 4 to 10); it has no int4 and int8 (sq)."""
ENGINES = {"vllm": "vLLM", "nccl": "NCCL", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
OTHERS = ("sglang", "trtllm")
NOTES = (
    "times are of one call in a CUDA graph at locked clocks: no launch, no gaps; vLLM's fp8_block GEMMs are not",
    "fp8, fp8_block and nvfp4 GEMMs time the layer from bf16 activations: the quantisation is in them, on H100 and "
    "B200 at 2 to 3 times the time of the fp8 kernel in `quantize`",
    "moe: the expert kernels without router and shared experts; with ep > 1 and a skewed load, of the fullest rank",
    "mla_*_module: whole attention layers with projections and norms; their source gives 4 digits after the point (ms)",
    "custom_graph and custom_eager are vLLM's own dispatch: beyond a few MB it runs NCCL or another library",
    "nccl: message_size counts elements of nccl-tests' -b (the larger buffer of a rank); one process, out of place",
)


@dataclass(frozen=True, slots=True)
class _File:
    table: str
    area: str
    engine: str
    version: str
    path: Path


def read_aiconfigurator(path: Path, gpu: str | None) -> Measurements:
    """The measurements of one system: `path` is its folder, or one that holds several, of which `gpu` picks one.

    Raises `ServecastError` with every problem: unknown systems, missing or damaged files, columns, values with row.
    """
    folder, gpu_id, word = _system(path, gpu)
    found = Gathered(load_gpu(gpu_id))
    files = _newest(folder, found.notes)
    if not files:
        raise ServecastError(
            f"{folder}: holds no vLLM kernel table; expected files such as gemm/vllm/<version>/gemm_perf.parquet or "
            "gemm__vllm<version>.csv.gz"
        )
    devices: dict[str, Path] = {}
    software: set[str] = set()
    tables: dict[str, pl.DataFrame] = {}
    for file in files:
        rows = read_rows(
            file.path, TABLES[file.table].columns | EVERYWHERE, found.problems, nullable=("window_size", *EVERYWHERE)
        )
        if rows is None:
            continue
        tables[file.table] = rows
        devices |= dict.fromkeys(rows["device"].drop_nulls().unique(maintain_order=True), file.path)
        software.add(f"{ENGINES[file.engine]} {file.version}" + f" ({file.table})" * (file.engine in OTHERS))
        if others := sorted(set(rows["version"].drop_nulls().unique()) - {file.version}):
            found.notes.append(f"{file.table}: the folder says version {file.version}, rows also {one_of(others)}")
    if "gemm" in tables and (more := _filled_gemm(folder, tables["gemm"], found)):
        tables["gemm"], library = more
        software.add(library)
    if (fused := _fused_allreduce(folder, found)) is not None:
        software.add(fused)
    software |= _all_to_all(folder, found)
    wrong = [name for name in devices if not re.search(rf"\b{word}\b", name)]
    found.problems += [f"{devices[name]}: measured on {name!r}, not on {gpu_id}" for name in wrong]
    for name, rows in tables.items():
        TABLES[name].add(found, rows)
    add_quantize(found, tables)
    device = Device(
        gpu=gpu_id,
        device=one_of(devices) or "not stated",
        measured_by="NVIDIA, the collectors of aiconfigurator",
        source=f"aiconfigurator{_package(folder)}, github.com/ai-dynamo/aiconfigurator, system {folder.name}",
        licence="Apache-2.0, (c) NVIDIA CORPORATION & AFFILIATES",
        software=one_of(sorted(software)),
        taken="not stated",
        notes=NOTES,
    )
    return found.measurements(device, folder, needed=("gemm", "prefill_attention", "decode_attention"))


def _filled_gemm(folder: Path, rows: pl.DataFrame, found: Gathered) -> tuple[pl.DataFrame, str] | None:
    """vLLM's GEMMs with FILLED taken from TensorRT-LLM's newest table, and its name; None where it has none."""
    import polars as pl

    paths = sorted(folder.glob("gemm/trtllm/*/gemm_perf.parquet"), key=lambda path: _newness(path.parent.name))
    if not paths:
        return None
    theirs = read_rows(paths[-1], TABLES["gemm"].columns | EVERYWHERE, found.problems, nullable=tuple(EVERYWHERE))
    if theirs is None or not len(theirs := theirs.filter(pl.col("gemm_dtype").is_in(FILLED))):
        return None
    dtypes = sorted(theirs["gemm_dtype"].unique())
    kept = rows.filter(~pl.col("gemm_dtype").is_in(dtypes))
    named = f"TensorRT-LLM {paths[-1].parent.name} (GEMM of {one_of(dtypes)})"
    return pl.concat([kept, theirs.select(kept.columns)]), named


def _fused_allreduce(folder: Path, found: Gathered) -> str | None:
    """Adds TensorRT-LLM's all-reduce, which FlashInfer runs for vLLM in one kernel with the norm after it; its name."""
    paths = sorted(folder.glob("comm/trtllm/*/custom_allreduce_perf.parquet"), key=lambda p: _newness(p.parent.name))
    if not paths:
        return None
    rows = read_rows(paths[-1], FUSED | EVERYWHERE, found.problems, nullable=tuple(EVERYWHERE))
    if rows is None:
        return None
    add_fused(found, rows)
    return f"TensorRT-LLM {paths[-1].parent.name} (custom_allreduce)"


def _all_to_all(folder: Path, found: Gathered) -> set[str]:
    """Adds DeepEP's dispatch and combine as SGLang's benchmarks timed them, for every number of nodes the newest; what
    they were timed with. vLLM's own tables of them hold the host's waiting and scatter by a factor of two."""
    import polars as pl

    software = set()
    for mode in DEEPEP:
        paths = sorted(folder.glob(f"comm/sglang/*/wideep_deepep_{mode}_perf.parquet"), key=_age)
        tables = [
            read_rows(path, DEEPEP[mode] | EVERYWHERE, found.problems, nullable=tuple(EVERYWHERE)) for path in paths
        ]
        seen: set[int] = set()
        for path, rows in zip(reversed(paths), reversed(tables), strict=True):
            if rows is None or not len(rows := rows.filter(~pl.col("node_num").is_in(seen))):
                continue
            seen |= set(rows["node_num"].unique())
            add_deepep(found, rows, mode, load_gpu(found.gpu.id).gpus_per_node)
            software.add(f"SGLang {path.parent.name} (DeepEP)")
    return software


def _age(path: Path) -> tuple[int, ...]:
    return _newness(path.parent.name)


def _system(path: Path, gpu: str | None) -> tuple[Path, str, str]:
    """(folder, id, word in device names)."""
    if path.name in SYSTEMS and path.is_dir():
        gpu_id, word = SYSTEMS[path.name]
        if gpu not in (None, gpu_id):
            raise ServecastError(f"{path}: holds {gpu_id}, but gpu is {gpu!r}; leave gpu out or give another folder")
        return path, gpu_id, word
    roots = [path, path / "data", path / "systems" / "data", path / "aiconfigurator_core" / "systems" / "data"]
    here = {
        SYSTEMS[f.name][0]: f for root in roots if root.is_dir() for f in sorted(root.iterdir()) if f.name in SYSTEMS
    }
    if not here:
        raise ServecastError(f"{path}: no system of aiconfigurator in it; expected folders such as {one_of(SYSTEMS)}")
    if gpu not in here:
        said = "say which GPU" if gpu is None else f"no {gpu!r}{nearest(str(gpu), here)}"
        raise ServecastError(f"{path}: {said}; it holds {one_of(here)}")
    return here[gpu], gpu, SYSTEMS[here[gpu].name][1]


def _newest(folder: Path, notes: list[str]) -> list[_File]:
    """The newest file of every table, in TABLES' order."""
    every = []
    for path in sorted(folder.glob("*/*/*/*_perf.parquet")):
        area, engine, version, name = *path.parts[-4:-1], path.stem.removesuffix("_perf")
        every.append(_File(name, area, engine, version, path))
    for path in sorted(folder.glob("*__*.csv*")):
        if match := re.fullmatch(r"(\w+)__([a-z]+)(\d.*?)\.csv(?:\.gz)?", path.name):
            name = match[1].removeprefix("quantize_")
            every.append(_File(name, TABLES[name].area if name in TABLES else "", match[2], match[3], path))
    chosen = []
    for name, table in TABLES.items():
        same = []
        for engine in reversed(table.engines):
            mine = [f for f in every if f.table == name and f.area == table.area and f.engine == engine.lower()]
            same += sorted(mine, key=lambda file: _newness(file.version))
        chosen += same[-1:]
        if same[:-1]:
            others = one_of(f"{f.engine} {f.version}" for f in same[:-1])
            notes.append(f"{name}: {same[-1].engine} {same[-1].version} taken, not {others}")
    if left := sorted({file.table for file in every if file.engine == "vllm" and file.table not in TABLES}):
        notes.append(f"tables that are not imported: {one_of(left)}")
    return chosen


def _newness(version: str) -> tuple[int, ...]:
    """0.24.0 > 0.19.1 > 0.1.dev19262: the numbers of the release, without what follows it."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in release[0].split(".")) if release else ()


def _package(folder: Path) -> str:
    """The version of the installed package that `folder` belongs to, from the metadata beside it; may be empty."""
    beside = [meta for parent in folder.parents[:4] for meta in sorted(parent.glob("aiconfigurator_core-*.dist-info"))]
    return f"-core {beside[0].name.split('-')[1].removesuffix('.dist')}" if beside else ""
