"""Who reads from whom, against vLLM's own mapping where its sources are at hand (`SERVECAST_VLLM_SOURCES`)."""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from calibrate.layout import Parallelism
from calibrate.models import load_model
from calibrate.routes import Route, kv_routes, state_routes

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
SIZES = (1, 2, 4, 8, 16)
KINDS: tuple[type, type] = (type("AttentionSpec", (), {}), type("MambaSpec", (), {}))


@pytest.fixture(scope="module")
def mapping() -> Any:
    """`compute_tp_mapping`; the modules that it imports only for annotations and types are empty here."""
    root = Path(os.environ.get("SERVECAST_VLLM_SOURCES", "nowhere")) / "0.32.0"
    path = root.joinpath(*CONNECTOR.split("."), "v1", "nixl", "tp_mapping.py")
    if not path.is_file():
        pytest.skip("vLLM's sources not found (set SERVECAST_VLLM_SOURCES)")
    utils, interface = ModuleType(f"{CONNECTOR}.utils"), ModuleType("vllm.v1.kv_cache_interface")
    vars(utils).update(BlockIds=object, TransferTopology=object)
    vars(interface).update(AttentionSpec=KINDS[0], MambaSpec=KINDS[1], KVCacheSpec=object)
    packages = [
        ModuleType(name) for name in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", CONNECTOR, "vllm.v1")
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module in (*packages, utils, interface):
            patch.setitem(sys.modules, module.__name__, module)
        return runpy.run_path(str(path), run_name="tp_mapping_of_vllm")["compute_tp_mapping"]


def readers(routes: list[Route]) -> dict[int, tuple[int, ...]]:
    """The source ranks of each destination rank."""
    found: dict[int, set[int]] = {}
    for route in routes:
        found.setdefault(route.destination, set()).add(route.source)
    return {rank: tuple(sorted(peers)) for rank, peers in found.items()}


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 0])
def test_the_ranks_that_vllm_reads_from(mapping: Any, heads: int) -> None:
    """`heads` KV heads, 0: a latent. Of states only where no KV head has copies: else vLLM reads what it need not."""
    model = replace(load_model("llama-3.1-8b"), kv_heads=heads) if heads else load_model("deepseek-v3")
    for p, d in itertools.product(SIZES, SIZES):
        kv = readers(kv_routes(model, Parallelism(p), Parallelism(d)))
        states = readers(state_routes(model, Parallelism(p), Parallelism(d)))
        for rank in range(d):
            topology = SimpleNamespace(
                tp_rank=rank, tp_size=d, total_num_kv_heads=model.kv_heads, is_mla=not heads,
                dcp_consumer_count=lambda *_: 1,
            )  # fmt: skip
            theirs = mapping(topology, p, KINDS).source_ranks_per_group
            assert tuple(sorted(theirs[0])) == kv[rank], (p, d, rank)
            if heads >= p:
                assert tuple(sorted(theirs[1])) == states[rank], (p, d, rank)
