"""KV that is held between the turns of a scenario's sessions."""

from __future__ import annotations

from typing import Any

import pytest

import servecast
from tests.servecast.helpers import QUICKSTART

AGENTS = QUICKSTART.with_name("sub-agents.yaml")
SMALL: dict[str, Any] = {"workload.num_sessions": 20, "workload.sessions.steps": {"kind": "fixed", "turns": 3}}


def run(**changes: Any) -> dict[str, Any]:
    return servecast.simulate(servecast.load_scenario(AGENTS, SMALL | changes)).summary()


def test_what_is_held_is_counted_and_each_hold_ends_once() -> None:
    plain, short, long = run(), run(**{"workload.hold_kv": "1s"}), run(**{"workload.hold_kv": "10min"})
    assert "kv_pinned_fraction" not in plain
    for summary in (short, long):
        ends = [summary[f"holds_{why}"] for why in ("resumed", "expired", "given_up")]
        assert sum(ends) == 20 * 2, "the last step of an agent is followed by none"
    assert (short["holds_expired"], long["holds_expired"]) == (40, 0)
    assert long["holds_resumed"] > 35
    assert 0 < short["kv_pinned_fraction"] < long["kv_pinned_fraction"] < 1
    assert long["kv_mean_fraction"] > plain["kv_mean_fraction"]
    assert long["completed"] == plain["completed"]


def test_with_little_room_what_is_held_costs_others_theirs() -> None:
    few = {"engine.num_gpu_blocks_override": 4000, "workload.sessions.context": 50000}
    plain, held = run(**few), run(**few, **{"workload.hold_kv": "2min"})
    assert held["holds_given_up"] > 0
    assert held["completed"] == plain["completed"], "nobody waits for ever"
    assert held["mean_queue_size"] > plain["mean_queue_size"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workload.hold_kv": "-1s"}, "hold_kv"),
        ({"workload.hold_kv": 5}, "hold_kv"),
        ({"workload.hold_kv": "5s", "engine.enable_prefix_caching": False}, "hold_kv: without a prefix cache"),
        ({"workload.hold_kv": "5s", "engine": "sglang-0.5"}, "hold_kv: modelled for vLLM V1"),
        ({"workload.hold_kv": "5s", "engine": "tensorrt-llm-1"}, "hold_kv: modelled for vLLM V1"),
        ({"workload.hold_kv": "5s", "cluster.pp": 2, "engine.preset": "vllm-0.32"}, "hold_kv: modelled for vLLM V1"),
        ({"workload.hold_kv": "5s", "workload.n": 2}, "hold_kv: of several samples"),
        ({"workload.hold_kv": "5s", "model": "gpt-oss-20b"}, "hold_kv: not modelled for layers with windows"),
    ],
)
def test_what_cannot_be_held_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(servecast.ServecastError, match=said):
        run(**changes)


def test_requests_on_their_own_hold_nothing() -> None:
    with pytest.raises(servecast.ServecastError, match="hold_kv has no meaning with arrivals"):
        servecast.load_scenario(QUICKSTART, {"workload.hold_kv": "5s"})
