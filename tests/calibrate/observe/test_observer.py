"""The observer on a vLLM: what it writes is what happened, our scheduler makes the same of it, nothing is disturbed."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace

import pytest

from calibrate.observe.read import read_steps
from servecast.conformance.check import check_conformance
from servecast.errors import ServecastError
from tests.calibrate.observe.engine import case, config, fake_vllm, observer, serve


@pytest.fixture(autouse=True)
def _fake(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVECAST_OBSERVE", str(tmp_path / "steps.jsonl"))
    with fake_vllm():
        yield


def start(policy, num_blocks, block_size, asynchronous, **parallel):
    vllm_config, kv_cache_config = config(policy, num_blocks, block_size, asynchronous, **parallel)
    return observer().Observer(vllm_config=vllm_config, kv_cache_config=kv_cache_config)


def observe(seed, tmp_path):
    """A case, run and read: (run, policy, num_blocks, block_size, requests)."""
    policy, num_blocks, block_size, asynchronous, rows = case(seed)
    scheduler = start(policy, num_blocks, block_size, asynchronous)
    requests = serve(scheduler, rows, asynchronous)
    scheduler.shutdown()
    path = tmp_path / "steps.jsonl"
    run = read_steps(path)
    path.unlink()
    return run, policy, num_blocks, block_size, requests


class Moody:
    """A policy that makes every fifth plan by another one."""

    def __init__(self, policy):
        self.policy, self.by_priority, self.plans, self.moods = policy, policy.by_priority, 0, 0
        halves = max(1, policy.max_num_batched_tokens // 2), max(1, policy.max_num_seqs // 2)
        self.other = replace(policy, max_num_batched_tokens=halves[0], max_num_seqs=halves[1])

    def plan(self, state):
        self.plans += 1
        self.moods += self.plans % 5 == 0
        return (self.policy if self.plans % 5 else self.other).plan(state)


def test_our_scheduler_reproduces_what_is_observed(tmp_path):
    steps = preemptions = aborted = differing = 0
    for seed in range(60):
        run, policy, num_blocks, block_size, requests = observe(seed, tmp_path)
        assert run.notes == ()
        found = check_conformance(run, policy, num_blocks, block_size)
        assert found.agreeing == found.steps, (seed, found.text())
        assert found.preemptions == sum(r.preemptions for r in requests)
        assert run.requests["output_tokens"].to_list() == [r.out for r in requests]
        ended = run.requests["status"].is_in(["stopped", "length_capped"])
        assert found.finished == ended.sum()
        moody = Moody(policy)
        other = check_conformance(run, moody, num_blocks, block_size)
        assert other.compared == other.steps
        assert other.compared - other.agreeing <= moody.moods  # each difference is counted once: then they go on alike
        differing += other.compared - other.agreeing
        steps, preemptions, aborted = steps + found.steps, preemptions + found.preemptions, aborted + (~ended).sum()
    assert steps > 2000
    assert min(preemptions, aborted, differing) > 50


@pytest.mark.parametrize("asynchronous", [False, True])
def test_facts_of_the_engine(tmp_path, asynchronous):
    policy, num_blocks, block_size, _, rows = case(3)
    scheduler = start(policy, num_blocks, block_size, asynchronous)
    assert [type(scheduler).__name__, *(c.__name__ for c in type(scheduler).__mro__[1:4])] == (
        ["Observer", "Observer", "AsyncScheduler", "Scheduler"] if asynchronous
        else ["Observer", "Observer", "Scheduler", "object"]
    )  # fmt: skip
    serve(scheduler, rows, asynchronous)
    scheduler.shutdown()
    run = read_steps(tmp_path / "steps.jsonl")
    assert run.most_in_flight == asynchronous
    expected = {
        "vllm": "0.32.0+fake", "gpu": "NVIDIA H100 80GB HBM3", "model": "meta-llama/Llama-3.1-8B-Instruct",
        "dtype": "bfloat16", "kv_cache_dtype": "auto", "enable_prefix_caching": False, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "scheduling_policy": policy.scheduling_policy, "async_scheduling": asynchronous,
        "enable_chunked_prefill": policy.enable_chunked_prefill, "max_num_seqs": policy.max_num_seqs,
        "long_prefill_token_threshold": policy.long_prefill_token_threshold, "kv_cache_groups": 1,
        "max_num_batched_tokens": policy.max_num_batched_tokens, "max_model_len": 4096, "block_size": block_size,
        "num_gpu_blocks": num_blocks,
    }  # fmt: skip
    assert {name: value for name, value in run.facts.items() if name != "unix_s"} == expected
    assert (run.steps["busy_s"] >= 0).all()
    assert (run.steps["busy_s"] <= run.steps["end_s"] - run.steps["begin_s"]).all()
    if not asynchronous:
        assert (run.steps["busy_s"] == run.steps["end_s"] - run.steps["begin_s"]).all()


def test_each_engine_has_a_file_of_its_own(tmp_path):
    policy, num_blocks, block_size, _, rows = case(3)
    for parallel in ({}, {}, {"data_parallel_size": 2, "data_parallel_rank": 1}):
        scheduler = start(policy, num_blocks, block_size, False, **parallel)
        serve(scheduler, rows, False)
        scheduler.shutdown()
    names = ["steps.1.jsonl", "steps.dp1.jsonl", "steps.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert len({len(read_steps(tmp_path / name).steps) for name in names}) == 1


def break_blocks(scheduler, monkeypatch):
    left = iter(range(10))
    scheduler._record.free_blocks = lambda: next(left)


def break_output(scheduler, monkeypatch):
    scheduler._record.flight = None


def break_file(scheduler, monkeypatch):
    monkeypatch.setattr("os.write", lambda *args: 1 / 0)


def break_requests(scheduler, monkeypatch):
    scheduler._record.index = {}


@pytest.mark.parametrize("broken", [break_blocks, break_output, break_file, break_requests])
def test_it_never_disturbs_the_engine(tmp_path, monkeypatch, capfd, broken):
    policy, num_blocks, block_size, asynchronous, rows = case(5)
    expected = [(r.out, r.preemptions, r.status.name) for r in observe(5, tmp_path)[4]]
    scheduler = start(policy, num_blocks, block_size, asynchronous)
    reached, scheduler.add_request = scheduler.add_request, lambda request: (reached(request), broken_once())
    calls = iter([broken])

    def broken_once():
        for breaks in calls:
            breaks(scheduler, monkeypatch)

    requests = serve(scheduler, rows, asynchronous)
    assert [(r.out, r.preemptions, r.status.name) for r in requests] == expected
    monkeypatch.undo()
    assert scheduler._record is None
    assert "observes no more: " in capfd.readouterr().err
    if broken is not break_file:
        last = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
        assert last[0] == "e"
        assert last[2].split(":")[0] in ("planned", "updated", "finished")


def test_an_engine_that_cannot_be_observed_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SERVECAST_OBSERVE", str(tmp_path / "no" / "folder"))
    policy, num_blocks, block_size, asynchronous, rows = case(5)
    scheduler = start(policy, num_blocks, block_size, asynchronous)
    assert all(r.done for r in serve(scheduler, rows, asynchronous))
    scheduler.shutdown()
    assert "not observing this engine: FileNotFoundError" in capfd.readouterr().err


def test_streamed_input_ends_the_record(tmp_path):
    scheduler = start(*case(3)[:3], False)
    from vllm.v1.core.sched.scheduler import Request

    for _ in range(2):
        scheduler.add_request(Request(0, 0.0, 2, 2, 2))
    last = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    assert last[0] == "e"
    assert "streamed input" in last[2]


def test_an_engine_that_is_killed_leaves_what_it_did(tmp_path):
    policy, num_blocks, block_size, asynchronous, rows = case(4)
    serve(start(policy, num_blocks, block_size, asynchronous), rows, asynchronous)
    run = read_steps(tmp_path / "steps.jsonl")
    assert run.notes == ()
    found = check_conformance(run, policy, num_blocks, block_size)
    assert found.agreeing == found.steps > 20


def changed(lines, seed):
    """A record with a few numbers changed, so that it may contradict itself."""
    r, lines = random.Random(seed), json.loads(json.dumps(lines))
    for _ in range(r.randint(1, 6)):
        line = r.choice(lines[1:])
        place = r.randrange(1, len(line))
        if line[0] == "s" and place == 7 and line[7]:
            r.choice(line[7])[r.randrange(3)] += 1
        elif line[0] == "s" and place == 13:
            line[13] = [*line[13], r.randrange(4)]
        elif line[0] == "f" and place == 6:
            line[6] = r.choice(["aborted", "stopped", "length_capped", "error"])
        elif type(line[place]) is int and not (line[0] == "s" and place == 1):
            line[place] = max(0, line[place] + r.choice([-3, -1, 1, 2, 50]))
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_record_that_contradicts_itself_is_compared_or_refused(tmp_path):
    path = tmp_path / "steps.jsonl"
    compared = 0
    for seed in range(12):
        policy, num_blocks, block_size, asynchronous, rows = case(seed)
        scheduler = start(policy, num_blocks, block_size, asynchronous)
        serve(scheduler, rows, asynchronous)
        scheduler.shutdown()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for k in range(15):
            path.write_text(changed(lines, 100 * seed + k))
            with contextlib.suppress(ServecastError):
                found = check_conformance(read_steps(path), policy, num_blocks, block_size)
                assert 0 <= found.agreeing <= found.compared <= found.steps
                assert found.text()
                compared += found.agreeing < found.steps
        path.unlink()
    assert compared > 50
