"""A policy of the user's own: it runs, and what is wrong with it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

import servecast
from servecast.errors import ServecastError
from servecast.own_policy import own_policy
from servecast.run import simulate
from servecast.scenario import load_scenario
from servecast.setup import set_up
from sim.schedulers.audit import Audited
from tests.servecast.helpers import QUICKSTART, fixed, small

EXAMPLE = Path(__file__).parents[2] / "docs" / "own-policy" / "shortest_prompt.py"

GOOD = """
from sim.schedulers import Scheduler
from sim.batch import Batch

class Mine(Scheduler):
    def plan(self, state):
        batch = Batch()
        state.kv.free -= state.decodes.demand(state.decodes.step)
        batch.decodes, batch.kv_tokens = state.decodes.count, state.decodes.kv_tokens
        while state.waiting:
            state.admit(batch, state.waiting[0].target)
        return batch
"""


def run(folder, code, **changes):
    path = folder / "policy.py"
    path.write_text(code, encoding="utf-8")
    engine = {"engine__scheduler": f"{path}:Mine", "engine__enable_prefix_caching": False}
    return servecast.simulate(small(**engine, **changes)).summary()


def refusal(folder, code, **changes):
    with pytest.raises(ServecastError) as error:
        run(folder, code, **changes)
    return str(error.value)


def test_a_policy_of_a_few_lines_runs(tmp_path):
    assert run(tmp_path, GOOD)["completed"] == 40


def test_the_example_is_short_and_lets_short_prompts_go_first():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
    engine = {"engine.enable_prefix_caching": False, "engine.max_num_seqs": 4, "workload.num_requests": 200}
    median = []
    for own in (f"{EXAMPLE}:ShortestPrompt", None):
        scenario = servecast.load_scenario(EXAMPLE.with_name("scenario.yaml"), engine | {"engine.scheduler": own})
        result = servecast.simulate(scenario)
        assert result.summary()["completed"] == 200
        assert any("ShortestPrompt" in note for note in result.manifest["notes"]) is (own is not None)
        median.append(result.summary()["median_ttft_ms"])
    assert median[0] < 0.8 * median[1]


TWICE = GOOD.replace("        return batch", "        batch.chunks += batch.chunks[:1]\n        return batch")
OVER = GOOD.replace("while state.waiting:", "while state.waiting and len(state.running) < 300:")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (TWICE, "Mine.plan, step 0: Request(0,"),
        (TWICE, "is planned twice; 0 waiting, 1 running (0 in their prompt, 0 decoding)"),
        (OVER, "may have 8192"),
        (GOOD.replace("state.kv.free -= ", "0 - "), "KV blocks are taken, but the running requests need"),
        (GOOD.replace("batch.decodes, batch.kv_tokens", "batch.spare_blocks, batch.kv_tokens"), "0 decodes, but 1"),
        (GOOD.replace("state.decodes.kv_tokens", "7"), "decodes over 7 KV tokens; they have"),
        (GOOD.replace("Batch()", "Batch(1)"), "Mine.plan failed in step 0: TypeError"),
        (GOOD.replace("return batch", "return None"), "Mine.plan gave None"),
        (GOOD.replace("while state.waiting:", "while False:"), "Mine plans nothing while work waits, after 0 of 40"),
    ],
)
def test_a_wrong_plan_is_stopped_with_the_state(tmp_path, code, said):
    changes = (
        {"workload__arrivals": {"kind": "all-at-once"}, "workload__lengths": fixed(4000, 30)} if code is OVER else {}
    )
    assert said in refusal(tmp_path, code, **changes)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (GOOD.replace("Mine", "Other"), "has no class Mine that inherits from sim.schedulers.Scheduler; it has Other"),
        (GOOD.replace("(Scheduler)", ""), "it has none that does"),
        (GOOD + "1 / 0\n", "cannot be loaded: ZeroDivisionError"),
        (GOOD + "    def __init__(self, budget):\n        pass\n", "asks for budget, which vllm-0.19 does not have"),
    ],
)
def test_a_file_that_has_no_policy_is_refused(tmp_path, code, said):
    assert said in refusal(tmp_path, code)


def test_a_word_that_names_no_class_is_refused():
    with pytest.raises(ServecastError, match=r"engine.scheduler: 'mine'; expected a file and a class"):
        small(engine__scheduler="mine")
    with pytest.raises(ServecastError, match="there is no file"):
        servecast.simulate(small(engine__scheduler="absent.py:Mine"))


def test_a_policy_may_be_a_dataclass_and_must_plan(tmp_path: Path) -> None:
    """With postponed annotations, as most files have them."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom sim.schedulers import Scheduler\n"
        "@dataclass\nclass Mine(Scheduler):\n    max_num_seqs: int\n    def plan(self, state):\n        ...\n"
        "class Idle(Scheduler):\n    pass\n",
        encoding="utf-8",
    )
    engine = set_up(load_scenario(QUICKSTART)).pool.engine
    own_policy(path, "Mine", engine)
    with pytest.raises(ServecastError, match=r"Idle has no plan\(state\)"):
        own_policy(path, "Idle", engine)


@pytest.mark.parametrize(
    "preset", ["vllm-0.19", "vllm-0.6", "sglang-0.5", "tensorrt-llm-1", "tgi-3", "mlc-llm", "orca"]
)
def test_a_presets_policy_that_is_watched_is_the_same(preset: str) -> None:
    scenario = load_scenario(QUICKSTART, [f"engine.preset={preset}", "workload.num_requests=60"])
    setup = set_up(scenario)
    engine = setup.pool.engine
    audited = Audited(setup.pool.scheduler, "Mine", engine.max_num_batched_tokens, engine.max_num_seqs)
    same = simulate(setup.with_pool(scheduler=audited)).summary()
    assert {k: v for k, v in same.items() if k.endswith("_ms")} == {
        k: v for k, v in simulate(setup).summary().items() if k.endswith("_ms")
    }
