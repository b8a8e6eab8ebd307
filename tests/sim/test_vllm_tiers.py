"""What a tier keeps and loses against vLLM's own manager of host memory (`v1/kv_offload/cpu/manager.py`).

Its LRU policy and reference counts are real; prompts come one after the other, so that nothing is on its way when the
next one looks. For the sources: see `test_vllm_sources`. 0.24 has these classes as they are used here.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import types
from pathlib import Path
from unittest.mock import patch

import pytest

from sim.tiers import LATER, Job, Tier, TierSpec
from tests.sim.test_vllm_sources import ROOT, VERSIONS

FILES = (
    "vllm.v1.kv_offload.cpu.policies.base",
    "vllm.v1.kv_offload.cpu.policies.lru",
    "vllm.v1.kv_offload.cpu.manager",
)


class Anything(types.ModuleType):
    """A module with whatever is asked for."""

    def __getattr__(self, name):
        return type(name, (), {})


def manager_of(version, chunks):
    """vLLM's manager of so many chunks; what it does not need is not real."""
    folder = Path(ROOT or "") / version
    unreal = {
        name: Anything(name)
        for name in (
            "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
            "vllm.v1.kv_offload.base",
            "vllm.v1.kv_offload.cpu.policies.arc",
        )
    }
    unreal["vllm.v1.kv_offload.base"].PrepareStoreOutput = types.SimpleNamespace
    common = Anything("vllm.v1.kv_offload.cpu.common")
    common.CPULoadStoreSpec = type("Spec", (), {"__init__": lambda self, ids: None, "medium": staticmethod(str)})
    with patch.dict(sys.modules, unreal | {common.__name__: common}):
        for name in FILES:
            spec = importlib.util.spec_from_file_location(name, folder / (name.replace(".", "/") + ".py"))
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return module.CPUOffloadingManager(chunks)


@pytest.mark.skipif("0.24.0" not in VERSIONS, reason="vLLM 0.24's sources not found (set SERVECAST_VLLM_SOURCES)")
def test_a_tier_keeps_what_vllms_manager_keeps():
    found = lost = 0
    for seed in range(300):
        r = random.Random(seed)
        chunks = r.randint(18, 60)  # room for the longest prompt: a longer one takes its own chunks' place in ours
        theirs, ours = manager_of("0.24.0", chunks), Tier(TierSpec("host", chunks, 0.0))
        for now in range(60):
            shared, own = r.choice([0, r.randint(0, 12)]), r.randint(0, 6)
            prompt = [(r.randint(0, 3), 0, shared)] * (shared > 0) + [(-1 - now, shared, shared + own)] * (own > 0)
            names = [(content, i) for content, start, end in prompt for i in range(start, end)]
            hits = next((i for i, name in enumerate(names) if not theirs.lookup(name, None)), len(names))
            at = 0
            for content, start, end in prompt:
                at = ours.follow(content, start, end, now)
                if at < end:
                    break
            assert at == hits, (seed, now)
            theirs.touch(names, None)
            ours.touch(prompt, now)
            if hits:
                theirs.prepare_load(names[:hits], None)
                theirs.complete_load(list(reversed(names[:hits])), None)
                theirs.touch(names, None)
            stored = theirs.prepare_store(names, None)
            lacks = ours.split(prompt, LATER)[1]
            job = Job()
            assert (stored is not None) == (not lacks or ours.store(lacks, job, now)), (seed, now)
            if stored is not None:
                theirs.touch(names, None)
                theirs.complete_store(list(reversed(stored.keys_to_store)), None)
                theirs.touch(names, None)
                job.ready_s = now
                ours.touch(prompt, now)
            found, lost = found + hits, lost + len(getattr(stored, "evicted_keys", ()))
    assert found > 1000
    assert lost > 1000
