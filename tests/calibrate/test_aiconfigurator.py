"""aiconfigurator's tables in both forms: what a row means, what is left out and counted, what is refused and how."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.importers import import_measurements
from calibrate.measurements import load_measurements
from tests.calibrate.imported import H100, one, refused, sound
from tests.calibrate.published import Row, aiconfigurator_rows, deepep_rows, gemm_ms, write_aiconfigurator
from tests.reference import reference


@pytest.fixture
def system(tmp_path: Path) -> Path:
    return tmp_path / "h100_sxm"


def test_aiconfigurator_means_what_its_collectors_timed(system: Path) -> None:
    found = import_measurements("aiconfigurator", write_aiconfigurator(system, aiconfigurator_rows()))
    sound(found)
    assert found.device.gpu == H100
    assert found.device.device == "NVIDIA H100 80GB HBM3"
    assert "vLLM 0.24.0" in found.device.software
    row = one(found, "gemm", weights="fp8_block", m=8192, n=6144)
    assert (row["k"], row["kernel"]) == (4096, "lib_fp8_block")
    assert row["seconds"] == pytest.approx(gemm_ms(8192, 6144, 4096) / 1e3)
    assert one(found, "prefill_attention", q=4096, window=1024)["sequences"] == 2
    row = one(found, "decode_attention", sequences=64)  # step counts the tokens before the new one
    assert (row["context"], row["heads"], row["kv_heads"], row["kv_dtype"]) == (8191, 32, 8, "fp8")
    row = one(found, "prefill_attention", head_dim=192)  # timed twice, for another model's tp too
    assert (row["heads"], row["kv_heads"], row["value_dim"], row["seconds"]) == (16, 16, 128, pytest.approx(1.6e-3))
    row = one(found, "decode_attention", head_dim=576)
    assert (row["heads"], row["kv_heads"], row["value_dim"], row["kv_dtype"]) == (16, 1, 512, "bf16")
    assert any("1 of 2 rows left out: FlashAttention with an fp8 cache" in note for note in found.device.notes)
    assert "SGLang 0.24.0 (generation_mla), TensorRT-LLM 0.24.0 (context_mla)" in found.device.software
    row = one(found, "mla_decode_module")  # here step counts the new one, too
    assert (row["context"], row["weights"], row["attn_dtype"], row["heads"]) == (2047, "fp8_block", "bf16", 16)
    assert one(found, "mla_prefill_module")["q"] == 2048
    assert one(found, "moe", weights="mxfp4", tokens=1)["ep"] == 2
    assert one(found, "moe", weights="int4", tokens=4096)["seconds"] == pytest.approx(0.7096e-3)
    row = one(found, "collective", backend="custom_graph", bytes=2 * 65536)  # message_size counts bf16 elements
    assert (row["op"], row["gpus"]) == ("all_reduce", 4)
    assert one(found, "collective", op="all_gather")["bytes"] == 2 * 1048576
    assert found.tables["collective"].height == 4 + 2
    assert any("nccl: 2 of 4 rows left out: not 16-bit" in note for note in found.device.notes)


def test_deepep_s_tables_say_what_a_rank_sends(system: Path) -> None:
    write_aiconfigurator(system, aiconfigurator_rows())
    write_aiconfigurator(system, deepep_rows((1, 2), 3.0), version="0.5.6.post2", engine="sglang")
    write_aiconfigurator(system, deepep_rows((1,)), version="0.5.12", engine="sglang")  # one node again
    found = import_measurements("aiconfigurator", system)
    sound(found)

    def row(op: str, mode: str, gpus: int) -> Row:
        return one(found, "collective", op=op, backend=f"deepep_{mode}", gpus=gpus)

    low = row("dispatch", "low_latency", 8)  # fp8 with a scale for 128 elements, to all eight experts
    assert (low["bytes"], low["seconds"]) == (64 * 8 * (2048 + 64), pytest.approx(14e-6))
    assert row("combine", "low_latency", 8)["bytes"] == 64 * 8 * 2048 * 2
    high = row("combine", "high_throughput", 8)  # once to each of eight GPUs that has any
    assert high["bytes"] == round(64 * 8 * (1 - (7 / 8) ** 8) * 2048 * 2)
    assert high["seconds"] == pytest.approx(40e-6)
    assert row("combine", "low_latency", 16)["seconds"] == pytest.approx(3 * 18e-6)  # two nodes only there
    assert any("deepep ll: 1 of 2 rows left out: fewer than 4 experts" in note for note in found.device.notes)
    assert "SGLang 0.5.12 (DeepEP)" in found.device.software


def test_dynamic_quantisation_is_put_together_again(system: Path) -> None:
    found = import_measurements("aiconfigurator", write_aiconfigurator(system, aiconfigurator_rows()))
    row = one(found, "quantize", op="dynamic")  # m = 64 has a difference of zero
    assert (row["m"], row["k"], row["weights"], row["kernel"]) == (1, 4096, "fp8", "dyn")
    assert row["seconds"] == pytest.approx(2.5e-6)
    assert found.tables["quantize"].filter(pl.col("op") == "static")["seconds"].to_list() == pytest.approx([2e-6] * 2)
    assert any(note.startswith("computescale: 1 of 2 rows left out") for note in found.device.notes)


def test_both_forms_of_aiconfigurator_agree(tmp_path: Path) -> None:
    tables = aiconfigurator_rows()
    parquet = import_measurements("aiconfigurator", write_aiconfigurator(tmp_path / "a" / "h100_sxm", tables))
    csv = import_measurements("aiconfigurator", write_aiconfigurator(tmp_path / "b" / "h100_sxm", tables, csv=True))
    assert csv.device == parquet.device
    assert csv.tables.keys() == parquet.tables.keys()
    assert all(table.equals(csv.tables[family]) for family, table in parquet.tables.items())
    parquet.save(tmp_path / "saved")
    assert load_measurements(tmp_path / "saved").tables["moe"].equals(parquet.tables["moe"])


def test_tables_without_windows_are_of_full_attention(system: Path) -> None:
    tables = aiconfigurator_rows()
    rows = [
        {c: v for c, v in row.items() if c != "window_size"}
        for row in tables["context_attention"]
        if not row["window_size"]
    ]
    found = import_measurements("aiconfigurator", write_aiconfigurator(system, tables | {"context_attention": rows}))
    assert found.tables["prefill_attention"]["window"].to_list() == [0, 0, 0]


def test_the_newest_version_is_taken_and_said(system: Path) -> None:
    tables = aiconfigurator_rows()
    slower = [{**row, "latency": 2 * float(str(row["latency"]))} for row in tables["gemm"]]
    write_aiconfigurator(system, {"gemm": slower}, version="0.9.0")
    write_aiconfigurator(system, {"gemm": slower}, version="0.1.dev19262+g1")
    found = import_measurements("aiconfigurator", write_aiconfigurator(system, tables))
    assert one(found, "gemm", m=1, n=256, weights="bf16")["seconds"] == pytest.approx(gemm_ms(1, 256, 512) / 1e3)
    assert "gemm: vllm 0.24.0 taken, not vllm 0.1.dev19262+g1, vllm 0.9.0" in found.device.notes


def test_block_scaled_gemms_come_from_the_engine_that_timed_them_in_a_graph(system: Path) -> None:
    tables = aiconfigurator_rows()
    theirs = [{**row, "latency": 2 * float(str(row["latency"])), "kernel_source": "graph"} for row in tables["gemm"]]
    theirs += [{**row, "gemm_dtype": "int4_wo"} for row in theirs[:6]]
    write_aiconfigurator(system, {"gemm": theirs}, version="1.3.0rc20", engine="trtllm")
    found = import_measurements("aiconfigurator", write_aiconfigurator(system, tables))
    kernels = dict(found.tables["gemm"].select("weights", "kernel").unique().rows())
    assert kernels == {"bf16": "lib_bfloat16", "fp8_block": "graph", "int4": "graph"}
    assert "TensorRT-LLM 1.3.0rc20 (GEMM of fp8_block, int4_wo)" in found.device.software


def test_what_is_not_imported_is_counted(system: Path) -> None:
    tables = aiconfigurator_rows()
    tables["gemm"].append({**tables["gemm"][0], "gemm_dtype": "int3"})
    tables["context_attention"].append({**tables["context_attention"][0], "attn_dtype": "fp8"})
    tables["generation_attention"].append({**tables["generation_attention"][0], "beam_width": 4})
    other = system / "comm" / "vllm" / "0.24.0" / "moe_a2a_perf.parquet"
    write_aiconfigurator(system, tables)
    pl.DataFrame({"x": [1]}).write_parquet(other)
    notes = import_measurements("aiconfigurator", system).device.notes
    assert "gemm: 1 of 13 rows left out: gemm_dtype int3 is not known" in notes
    assert "prefill_attention: 1 of 4 rows left out: attention in another dtype than bf16" in notes
    assert "decode_attention: 1 of 3 rows left out: beam search" in notes
    assert "tables that are not imported: moe_a2a" in notes


def test_repeats_become_their_median(system: Path) -> None:
    tables = aiconfigurator_rows()
    base = tables["gemm"][0]
    tables["gemm"] += [{**base, "latency": float(str(base["latency"])) * factor} for factor in (1.1, 1.5)]
    found = import_measurements("aiconfigurator", write_aiconfigurator(system, tables))
    assert one(found, "gemm", m=1, n=256, weights="bf16")["seconds"] == pytest.approx(
        1.1e-3 * float(str(base["latency"]))
    )
    assert found.tables["gemm"].height == 12
    assert "gemm: 3 rows repeat 1 points; their median is kept (they differ by up to 50 %)" in found.device.notes


def test_rows_that_contradict_each_other_are_refused(system: Path) -> None:
    tables = aiconfigurator_rows()
    tables["gemm"].append({**tables["gemm"][0], "latency": 0.04})
    text = refused("aiconfigurator", write_aiconfigurator(system, tables, csv=True))
    assert "gemm__vllm0.24.0.csv.gz, row 14: the same gemm point as" in text
    assert "gemm__vllm0.24.0.csv.gz, row 2, but" in text


def scaled(rows: list[Row], factor: float) -> list[Row]:
    return [{**row, "latency": float(str(row["latency"])) * factor} for row in rows]


@pytest.mark.parametrize("table", ["gemm", "context_attention", "generation_attention", "mla_context_module"])
@pytest.mark.parametrize(("factor", "guess"), [(1e-3, "in s, or of another GPU?"), (1e3, "in us, or of another GPU?")])
def test_another_unit_is_refused_and_guessed(system: Path, table: str, factor: float, guess: str) -> None:
    tables = aiconfigurator_rows()
    text = refused("aiconfigurator", write_aiconfigurator(system, tables | {table: scaled(tables[table], factor)}))
    assert f"{table}_perf.parquet, row " in text
    assert guess in text
    assert H100 in text
    assert text.count("\n") == 0, "the other tables are fine"


def test_a_few_impossible_rows_are_left_out_and_counted(system: Path) -> None:
    tables = aiconfigurator_rows()
    more: list[Row] = [{**tables["gemm"][0], "m": 100 + i} for i in range(60)]
    fast: Row = {**tables["gemm"][0], "m": 8192, "n": 8192, "k": 8192, "latency": gemm_ms(8192, 8192, 8192) / 10}
    tables["gemm"] = [*tables["gemm"], *more, fast]
    found = import_measurements("aiconfigurator", write_aiconfigurator(system, tables))
    assert found.tables["gemm"].filter(pl.col("n") == 8192).is_empty()
    note = next(note for note in found.device.notes if "1 of 73 rows left out" in note)
    assert note.startswith("gemm_perf.parquet, row 73: gemm weights=bf16 m=8192 n=8192 k=8192 took")
    tables["gemm"] = [*tables["gemm"], *({**fast, "m": 8192 + i} for i in range(1, 9))]
    assert "row 73 (and 8 more rows)" in refused("aiconfigurator", write_aiconfigurator(system, tables))


def test_every_problem_is_said_at_once(system: Path) -> None:
    tables = aiconfigurator_rows()
    tables["gemm"][3]["latency"] = float("nan")
    tables["gemm"][4]["m"] = 0
    tables["moe"] = [{c: v for c, v in row.items() if c != "topk"} for row in tables["moe"]]
    tables["context_attention"][1]["batch_size"] = 0
    tables["nccl"][0]["latency"] = -1.0
    write_aiconfigurator(system, tables)
    cut = system / "attention" / "vllm" / "0.24.0" / "generation_attention_perf.parquet"
    cut.write_bytes(cut.read_bytes()[:-200])
    text = refused("aiconfigurator", system)
    assert "gemm_perf.parquet, row 4: latency is nan; expected a number" in text
    assert "moe_perf.parquet: no column topk; found num_tokens" not in text
    assert "moe_perf.parquet: no column topk; found" in text
    assert "context_attention_perf.parquet, row 2: sequences is 0; expected more" in text
    assert "nccl_perf.parquet, row 1: seconds is -0.001; expected more" in text
    assert "generation_attention_perf.parquet: cannot be read" in text
    assert text.count("\n") == 4


@pytest.mark.parametrize("keep", [0, 3, 0.5, 0.9])
@pytest.mark.parametrize("csv", [True, False])
def test_a_cut_off_file_is_refused(system: Path, keep: float, csv: bool) -> None:
    write_aiconfigurator(system, aiconfigurator_rows(), csv=csv)
    file = next(system.rglob("gemm*" if csv else "gemm_perf.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    assert f"{file}: cannot be read (" in refused("aiconfigurator", system)


def test_a_csv_that_ends_in_a_row_is_refused(system: Path) -> None:
    write_aiconfigurator(system, aiconfigurator_rows(), csv=True)
    file = next(system.glob("gemm*"))
    lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    file.unlink()
    plain = file.with_suffix("")
    plain.write_text("\n".join([*lines[:-1], ",".join(lines[-1].split(",")[:4])]))
    assert f"{plain}, row {len(lines)}: " in refused("aiconfigurator", system)
    assert "is missing" in refused("aiconfigurator", system)


def test_what_folder_is_meant(tmp_path: Path) -> None:
    tables = aiconfigurator_rows()
    for name in ("h100_sxm", "h200_sxm"):
        write_aiconfigurator(tmp_path / "systems" / "data" / name, tables)
    (tmp_path / "aiconfigurator_core-0.12.0.dist-info").mkdir()
    assert import_measurements("aiconfigurator", tmp_path, H100).device.gpu == H100
    found = import_measurements("aiconfigurator", tmp_path / "systems", H100)
    assert found.device.source.startswith("aiconfigurator-core 0.12.0, ")
    assert "say which GPU; it holds h100-sxm, h200-sxm" in refused("aiconfigurator", tmp_path)
    assert "no 'h20-sxm' (did you mean 'h200-sxm'?)" in refused("aiconfigurator", tmp_path, "h20-sxm")
    folder = tmp_path / "systems" / "data" / "h200_sxm"
    assert "measured on 'NVIDIA H100 80GB HBM3', not on h200-sxm" in refused("aiconfigurator", folder)
    assert "holds h200-sxm, but gpu is 'a10'" in refused("aiconfigurator", folder, "a10")
    empty = tmp_path / "a100_sxm"
    empty.mkdir()
    assert "holds no vLLM kernel table; expected files such as gemm/vllm" in refused("aiconfigurator", empty)
    (tmp_path / "none").mkdir()
    assert "no system of aiconfigurator in it" in refused("aiconfigurator", tmp_path / "none")


def test_a_missing_family_is_said(system: Path) -> None:
    tables = aiconfigurator_rows()
    write_aiconfigurator(system, {name: tables[name] for name in ("gemm", "moe")})
    text = refused("aiconfigurator", system)
    assert text == f"{system}: no table of prefill_attention, decode_attention in it; found gemm, moe"


@settings(max_examples=10, deadline=None)
@given(
    points=st.lists(
        st.tuples(st.integers(1, 8192), st.sampled_from([128, 4096]), st.sampled_from([512, 14336])),
        min_size=1,
        max_size=30,
    )
)
def test_every_row_becomes_a_point_or_a_repeat(
    tmp_path_factory: pytest.TempPathFactory, points: list[tuple[int, int, int]]
) -> None:
    tables = {name: rows for name, rows in aiconfigurator_rows().items() if name == "gemm" or "attention" in name}
    base = tables["gemm"][0]
    tables["gemm"] = [{**base, "m": m, "n": n, "k": k, "latency": gemm_ms(m, n, k)} for m, n, k in points]
    folder = tmp_path_factory.mktemp("p") / "h100_sxm"
    table = import_measurements("aiconfigurator", write_aiconfigurator(folder, tables)).tables["gemm"]
    assert {(r["m"], r["n"], r["k"]) for r in table.iter_rows(named=True)} == set(points)
    assert table.height == len(set(points))
    assert table["seconds"].to_list() == pytest.approx(
        [gemm_ms(r["m"], r["n"], r["k"]) / 1e3 for r in table.rows(named=True)]
    )


SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "l40s", "rtx_pro_6000_server")


def test_reference_aiconfigurator() -> None:
    found = import_measurements("aiconfigurator", reference("reference", "aiconfigurator", "a100_sxm"))
    sound(found)
    assert set(found.tables) >= {"gemm", "prefill_attention", "decode_attention", "moe", "collective"}
    assert found.tables["gemm"].height > 9000


@pytest.mark.parametrize("name", SYSTEMS)
def test_reference_agrees_with_the_installed_package(name: str) -> None:
    """The CSV form has 7 significant digits, fewer tables, and of GEMMs only vLLM's; the package has all of it."""
    folder = reference("reference", "aiconfigurator", name)
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None:
        pytest.skip("aiconfigurator-core is not installed (pip install aiconfigurator-core==0.12.0)")
    places = list(spec.submodule_search_locations or ())
    csv = import_measurements("aiconfigurator", folder)
    package = import_measurements("aiconfigurator", places[0], csv.device.gpu)
    assert csv.device.device == package.device.device
    for family, table in csv.tables.items():
        other = package.tables[family]
        if family == "gemm":
            table, other = (each.filter(each["weights"] != "fp8_block") for each in (table, other))
        other = other.join(table, on=[c for c in table.columns if c != "seconds"], how="semi", nulls_equal=True)
        assert table.drop("seconds").equals(other.drop("seconds")), family
        assert ((table["seconds"] / other["seconds"] - 1).abs() < 1e-6).all(), family
