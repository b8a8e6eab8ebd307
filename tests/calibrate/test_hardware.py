"""The GPU catalogue: complete, plausible, and its messages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from calibrate.catalog import read
from calibrate.hardware import gpu_ids, load_gpu
from servecast.errors import ServecastError

IDS = (
    "a10 a100-sxm a100-sxm-40gb a6000 l4 l40s h20 h100-sxm h100-pcie h100-nvl h200-sxm b200-sxm b300-sxm gb200 gb300 "
    "rtx-3090 rtx-4090 rtx-5090 rtx-pro-6000 mi300x mi325x mi355x"
)
REFERENCE = Path(os.environ.get("SERVECAST_REFERENCE", Path(__file__).parents[3] / "shared")) / "reference"


def test_every_canonical_id_is_there() -> None:
    assert gpu_ids() == [*IDS.split(), "cpu"]


@pytest.mark.parametrize("gpu_id", IDS.split())
def test_a_gpu_is_plausible(gpu_id: str) -> None:
    gpu = load_gpu(gpu_id)
    assert gpu.source
    assert gpu.efficiency.source
    assert 0.9 * gpu.memory_bytes < gpu.visible_bytes <= gpu.memory_bytes
    assert 5e13 < gpu.flops["bf16"] < 3e15, "dense, in FLOP/s"
    assert 2e11 < gpu.bandwidth_bytes_per_s < 1e13
    shares = [
        v for k, v in read("gpus")["efficiencies"][read("gpus")["gpus"][gpu_id]["class"]].items() if k != "source"
    ]
    assert all(0 < share <= 1 for share in shares)
    assert all(0 < gpu.link.share(n) <= 1 for n in range(2, 17))


def test_amd_is_not_nvidia() -> None:
    amd, nvidia = load_gpu("mi300x").efficiency, load_gpu("h100-sxm").efficiency
    assert amd.source.startswith("assumed")
    assert amd.gemm_flops < nvidia.gemm_flops
    assert amd.decode_bandwidth < nvidia.decode_bandwidth


@pytest.mark.parametrize(
    ("word", "meant"), [("h100", "h100-sxm"), ("rtx4090", "rtx-4090"), ("MI300X", "mi300x"), ("a100", "a100-sxm")]
)
def test_a_misspelt_gpu_names_the_nearest(word: str, meant: str) -> None:
    with pytest.raises(ServecastError, match=f"did you mean '{meant}'"):
        load_gpu(word)


def test_figures_agree_with_a_published_spec_file() -> None:
    file = REFERENCE / "aiconfigurator" / "system_specs.json"
    if not file.exists():
        pytest.skip(f"no reference data at {file}")
    theirs = json.loads(file.read_text())
    names = {"rtx-pro-6000": "rtx_pro_6000_server"}
    compared = 0
    for gpu_id in gpu_ids():
        spec = theirs.get(names.get(gpu_id, gpu_id.replace("-", "_")), {}).get("gpu")
        if spec is None:
            continue
        compared += 1
        gpu = load_gpu(gpu_id)
        assert gpu.bandwidth_bytes_per_s == pytest.approx(spec["mem_bw"], rel=0.01)
        assert gpu.flops["bf16"] == pytest.approx(spec["bfloat16_tc_flops"], rel=0.01)
        assert gpu.memory_bytes == pytest.approx(spec["mem_capacity"], rel=0.07)
    assert compared >= 9
