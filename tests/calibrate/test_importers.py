"""Importers of published layer and step times: what a row means, what is left out and counted, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from calibrate.importers import FORMATS, import_measurements
from calibrate.measurements import FAMILIES
from tests.calibrate.imported import H100, one, refused, sound
from tests.calibrate.published import write_llmservingsim, write_splitwise, write_vidur
from tests.reference import reference


def test_llmservingsim_layers_get_the_shapes_of_operators(tmp_path: Path) -> None:
    found = import_measurements("llmservingsim", write_llmservingsim(tmp_path))
    sound(found)
    assert (found.device.gpu, found.device.software, found.device.taken) == ("rtx-4090", "vLLM 0.19.0", "2026-08-17")
    gemm = {(row["n"], row["k"]) for row in found.tables["gemm"].iter_rows(named=True)}
    assert gemm == {(512 + 2 * 64, 1024), (1024, 512), (2 * 1408, 1024), (1024, 1408), (16000, 1024)}
    assert one(found, "gemm", n=16000) | {"spread": 0} == {
        "weights": "bf16", "m": 8, "n": 16000, "k": 1024, "seconds": 60.5e-6, "spread": 0, "kernel": "vLLM 0.19.0",
    }  # fmt: skip
    moved = {str(row["op"]): row["elements"] for row in found.tables["elementwise"].iter_rows(named=True)}
    assert moved == {
        "embedding": 2048, "norms": 4096, "qk_norm": 2 * (512 + 64), "rope": 2 * (512 + 64), "activation": 3 * 1408,
        "final_norm": 4096, "sampling": 3 * 32000,
    }  # fmt: skip
    heads = {"heads": 8, "kv_heads": 1, "head_dim": 64, "value_dim": 64, "window": 0, "kv_dtype": "bf16"}
    assert one(found, "prefill_attention", context=1024).items() >= {"q": 512, "sequences": 1, **heads}.items()
    assert one(found, "prefill_attention", context=0)["seconds"] == pytest.approx(40e-6)
    assert one(found, "decode_attention").items() >= {"sequences": 16, "context": 2048, **heads}.items()
    assert one(found, "moe", skew="touched=8").items() >= {"tokens": 64, "experts": 32, "topk": 4, "ep": 1}.items()
    notes = found.device.notes
    assert "maker/Toy-1B tp2 attention: 1 of 4 rows left out: a prompt chunk and decodes in one call" in notes
    assert "maker/Toy-1B tp2: 2 of 22 rows left out: wat: of no family" in notes
    assert any(note.startswith("skew.csv of 1 folders") for note in notes)


def test_llmservingsim_says_what_it_lacks(tmp_path: Path) -> None:
    profiles = write_llmservingsim(tmp_path)
    assert import_measurements("llmservingsim", profiles / "rtx4090" / "toy" / "tp2").device.gpu == "rtx-4090"
    assert "holds rtx-4090, but gpu is 'h100-sxm'" in refused("llmservingsim", profiles / "rtx4090", H100)
    assert "no 'h100-sxm'; it holds rtx-4090" in refused("llmservingsim", profiles, H100)
    (tmp_path / "model_configs" / "Toy-1B.json").rename(tmp_path / "model_configs" / "else.json")
    text = refused("llmservingsim", profiles)
    assert "the sizes of maker/Toy-1B are not known; put its config.json, named Toy-1B.json" in text
    (tmp_path / "model_configs" / "toy-1b.json").write_text('{"hidden_size": "wide"}')
    assert "no usable hidden_size, num_attention_heads" in refused("llmservingsim", profiles)
    (profiles / "rtx4090" / "toy" / "meta.json").write_text("[")
    assert "meta.json: expected a JSON or YAML mapping" in refused("llmservingsim", profiles)
    (profiles / "rtx4090" / "toy" / "meta.json").unlink()
    assert "no meta.json or meta.yaml" in refused("llmservingsim", profiles)


def test_the_older_llmservingsim_format_gives_gemms(tmp_path: Path) -> None:
    profiles = write_llmservingsim(tmp_path, tp=2)
    old = profiles / "h100" / "toy-1b" / "tp2"
    old.mkdir(parents=True)
    layers = ["layer_name,input,kv_cache,tp_size,latency(ns)", "q_proj,64,0,2,8000", "k_proj,64,0,2,7000"]
    layers += ["expert.w2,64,0,2,9000", "rope,64,0,2,9000"]
    (old / "layers.csv").write_text("\n".join(layers) + "\n")
    found = import_measurements("llmservingsim", profiles, H100)
    sound(found)
    assert one(found, "gemm", n=512, k=1024)["seconds"] == pytest.approx(8e-6)
    assert one(found, "gemm", n=64)["k"] == 1024
    assert one(found, "gemm", k=2816)["n"] == 1024
    assert "toy-1b tp2: 1 of 4 rows left out: rope: of no family" in found.device.notes


def test_vidur_is_milliseconds_and_bytes_of_one_node(tmp_path: Path) -> None:
    found = import_measurements("vidur", write_vidur(tmp_path), "a100-sxm")
    sound(found)
    gemm = {(row["n"], row["k"]) for row in found.tables["gemm"].iter_rows(named=True)}
    whole = {(2048 + 2 * 512, 2048), (2048, 2048), (2 * 5632, 2048), (2048, 5632)}
    half = {(1024 + 2 * 256, 2048), (2048, 1024), (5632, 2048), (2048, 2816)}
    assert gemm == whole | half
    assert one(found, "gemm", m=256, n=3072)["seconds"] == pytest.approx(23e-6)
    assert one(found, "elementwise", op="embedding")["elements"] == 2 * 2048  # at 1 token: 0.000 ms
    assert one(found, "prefill_attention").items() >= {"q": 512, "context": 1024, "heads": 8, "kv_heads": 2}.items()
    assert one(found, "decode_attention").items() >= {"sequences": 32, "context": 2048, "head_dim": 128}.items()
    row = one(found, "collective", op="all_reduce", backend="nccl", gpus=8)
    assert (row["bytes"], row["seconds"]) == (1048576, pytest.approx(60e-6))
    notes = "\n".join(found.device.notes)
    assert "all_reduce: 1 of 3 rows left out: between nodes" in notes
    assert "toy: 2 of 29 rows left out: 0.000 ms" in notes
    assert "network/ of other nodes is not taken: h100_dgx" in notes
    assert "are not taken: a100_cpu_overheads.csv" in notes


def test_vidur_says_what_it_lacks(tmp_path: Path) -> None:
    root = write_vidur(tmp_path)
    assert "say which GPU; it holds a100-sxm, h100-sxm" in refused("vidur", root)
    assert "no 'a100' (did you mean 'a100-sxm'?)" in refused("vidur", root, "a100")
    assert "no table of vidur for a GPU of the catalogue" in refused("vidur", root / "history")
    file = root / "compute" / "a100" / "maker" / "toy" / "mlp.csv"
    file.write_text(file.read_text().replace(",True,256,2", ",True,256,3"))
    assert f"{file}, row 3: 16 heads over 3 GPUs" in refused("vidur", root, "a100-sxm")


def test_splitwise_gives_whole_steps(tmp_path: Path) -> None:
    found = import_measurements("splitwise", write_splitwise(tmp_path), H100)
    sound(found)
    assert list(found.tables) == ["step"]
    prefill = one(found, "step", sequences=4, q=512, decodes=0, kv_tokens=0)
    assert prefill["seconds"] == pytest.approx(62e-3)
    assert prefill["spread"] == pytest.approx((63.6 - 60.4) / 62)
    decode = one(found, "step", sequences=0, q=0, decodes=4, kv_tokens=4 * (512 + 64))
    assert decode["seconds"] == pytest.approx(14e-3)
    assert "say which GPU; it holds a100-sxm, h100-sxm" in refused("splitwise", tmp_path)


def test_splitwise_batches_that_never_ran_are_left_out(tmp_path: Path) -> None:
    path = write_splitwise(tmp_path)
    lines = path.read_text().splitlines()
    fine = [f"toy-7b,h100-80gb,{500 + i},4,128,60,12,1" for i in range(40)]
    path.write_text("\n".join([*lines, *fine, "toy-7b,h100-80gb,2048,64,128,150,12,1"]) + "\n")
    found = import_measurements("splitwise", path, H100)
    assert found.tables["step"].filter((pl.col("q") == 2048) | (pl.col("decodes") == 64)).is_empty()
    assert any("1 of 46 rows left out" in note for note in found.device.notes)


def test_a_wrong_format_or_path_is_said(tmp_path: Path) -> None:
    assert set(FORMATS) == {"aiconfigurator", "llmservingsim", "vidur", "splitwise"}
    assert "unknown format 'vidor' (did you mean 'vidur'?)" in refused("vidor", tmp_path)
    assert "no such file or folder" in refused("vidur", tmp_path / "none")


@pytest.mark.parametrize(
    ("format", "parts", "gpu", "families"),
    [
        ("llmservingsim", ("llmservingsim", "profiles"), "rtx-4090", {"gemm", "elementwise", "decode_attention"}),
        ("llmservingsim", ("llmservingsim", "profiles_v0"), "rtx-3090", {"gemm"}),
        ("vidur", ("vidur",), H100, {"gemm", "elementwise", "collective"}),
        ("splitwise", ("splitwise_sim", "perf_model.csv"), "a100-sxm", {"step"}),
    ],
)
def test_reference_of_other_formats(format: str, parts: tuple[str, ...], gpu: str, families: set[str]) -> None:
    found = import_measurements(format, reference("reference", *parts), gpu)
    sound(found)
    assert set(found.tables) >= families


def test_two_sources_agree_on_one_gpu() -> None:
    """Shapes, units and contexts are right when independent measurements of the same kernels agree: to 10 %."""
    one_ = import_measurements("aiconfigurator", reference("reference", "aiconfigurator", "rtx_pro_6000_server"))
    other = import_measurements("llmservingsim", reference("reference", "llmservingsim", "profiles"), "rtx-pro-6000")
    shift: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
        "gemm": lambda table: table,
        "prefill_attention": lambda table: table,
        "decode_attention": lambda table: table.with_columns(pl.col("context") + 1),  # 2^n - 1 against 2^n
    }
    for family, moved in shift.items():
        both = moved(one_.tables[family]).join(other.tables[family], on=list(FAMILIES[family]), suffix="_other")
        large = both.filter(pl.col("seconds") > 100e-6)
        assert large.height >= 5, family
        assert 0.9 < float((large["seconds_other"] / large["seconds"]).median() or 0) < 1.1, family  # type: ignore[arg-type]
