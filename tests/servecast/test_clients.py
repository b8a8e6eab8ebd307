"""Clients as a scenario describes them: far away, impatient, persistent; and what is wrong with such a description."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import servecast
from reports.formats.seen import seen
from servecast.exporting import simulated_of
from tests.servecast.helpers import QUICKSTART

BASE: dict[str, Any] = {"workload.num_requests": 300, "workload.arrivals.rate": 30, "engine.max_num_seqs": 16}


def run(**changes: Any) -> servecast.Result:
    return servecast.simulate(servecast.load_scenario(QUICKSTART, BASE | changes))


def test_a_network_moves_everything_by_half_of_it_and_latencies_by_all() -> None:
    near, far = run(), run(**{"workload.network": {"latency": "80ms"}})
    a, b = near.requests, far.requests
    assert np.allclose(b["arrival_s"], a["arrival_s"])
    assert np.allclose(b["first_token_s"] - a["first_token_s"], 0.04, atol=1e-9)
    for name in ("ttft_s", "e2e_s"):
        assert np.allclose(b[name] - a[name], 0.08, atol=1e-9)
    for name in ("queue_s", "tpot_s"):
        assert np.allclose(b[name].drop_nulls(), a[name].drop_nulls(), atol=1e-9)
    parts = far.summary()["spent"]["ttft_ms"]["mean"]
    assert parts["network"] == pytest.approx(80)
    assert "network" not in near.summary()["spent"]["ttft_ms"]["mean"]
    assert sum(parts.values()) == pytest.approx(far.summary()["mean_ttft_ms"])
    listed = seen(simulated_of(far))
    for name in ("ttft_s", "e2e_s"):
        assert np.allclose(getattr(listed, name), b[name], atol=1e-9), "load generators are where clients are"


def test_closed_loops_go_on_when_clients_have_heard() -> None:
    lengths = {"prompt": {"kind": "fixed", "tokens": 100}, "output": {"kind": "fixed", "tokens": 10}}
    loop = {"closed_loop": {"concurrency": 1}, "num_requests": 5, "lengths": lengths, "network": {"latency": "1s"}}
    rows = servecast.simulate(servecast.load_scenario(QUICKSTART, {"workload": loop})).requests
    assert np.allclose(rows["arrival_s"][1:], (rows["arrival_s"] + rows["e2e_s"])[:-1], atol=1e-9)


def test_classes_are_as_far_and_as_patient_as_they_say() -> None:
    lengths = {"prompt": {"kind": "fixed", "tokens": 2000}, "output": {"kind": "fixed", "tokens": 100}}
    classes = [
        {"name": "near", "lengths": lengths, "timeout": "500s"},
        {"name": "far", "lengths": lengths, "network": {"latency": "300ms"}},
    ]
    workload = {"num_requests": 200, "arrivals": {"kind": "poisson", "rate": 30}, "classes": classes}
    workload |= {"timeout": {"first_token": "1s"}}
    result = servecast.simulate(servecast.load_scenario(QUICKSTART, {"workload": workload, "engine.max_num_seqs": 4}))
    rows, summary = result.requests, result.summary()
    cancelled = rows.filter(rows["status"] == "cancelled")
    assert cancelled["class"].unique().to_list() == ["far"]
    assert np.allclose(cancelled["finish_s"] - cancelled["arrival_s"], 1.15, atol=1e-9), (
        "half of the way, and the limit"
    )
    assert summary["classes"]["near"]["completed"] == summary["classes"]["near"]["submitted"]
    assert summary["timed_out_first_token"] == summary["cancelled"] == cancelled.height > 20
    assert set(rows.filter(rows["class"] == "far")["network_s"]) == {0.3}


def test_tries_are_counted_and_what_was_computed_for_them() -> None:
    result = run(**{"workload.timeout": {"first_token": "2s", "retries": 2, "backoff": "1s"}})
    summary, rows = result.summary(), result.requests
    tries = result._given_up
    assert summary["timeout_retries"] == int(tries["again"].sum()) > 100
    assert summary["timed_out_first_token"] == tries.height == summary["timeout_retries"] + summary["cancelled"]
    assert summary["completed"] + summary["cancelled"] == summary["submitted"] == 300
    late = rows.filter((rows["retried_s"] > 0) & (rows["status"] == "finished"))
    assert late.height > 5
    # After one try: 2 s until it is given up, 1 s of waiting. After two: 2 s more for each.
    assert set(np.round(late["retried_s"].to_numpy(), 6)) <= {3.0, 7.0}
    assert (late["ttft_s"] > late["retried_s"]).all()
    steps = result.steps
    total = steps["prefill_tokens"].sum() + steps["output_tokens"].sum()
    assert summary["vain_fraction"] == pytest.approx(summary["vain_tokens"] / total)
    done = rows.filter(rows["status"] == "finished")
    served = (done["prompt_tokens"] - done["cached_tokens"]).sum() + done["output_tokens"].sum()
    assert summary["preemptions"] == 0
    assert summary["vain_tokens"] == pytest.approx(total - served, abs=summary["timed_out_first_token"])


def test_retries_make_goodput_fall_under_overload() -> None:
    once, again = (
        run(
            **{
                "workload.timeout": {"first_token": "1s", "retries": n},
                "slo": {"ttft": "1s"},
                "workload.num_requests": 1500,
            }
        ).summary()["request_goodput"]
        for n in (0, 5)
    )
    assert again < 0.9 * once


def test_a_try_finds_what_the_one_before_has_computed() -> None:
    timeout = {"first_token": "1500ms", "retries": 4, "backoff": "100ms"}
    hits = [
        run(**{"workload.timeout": timeout, "engine.enable_prefix_caching": caching}).summary()["total_cached_tokens"]
        for caching in (True, False)
    ]
    assert hits[0] > 0 == hits[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"workload.timeout": {"first_token": "10s", "total": "5s"}},
            "timeout.first_token: 10s is not below total, 5s",
        ),
        ({"workload.timeout": {"retries": 2}}, "timeout: nothing times out; give first_token, total or both"),
        ({"workload.timeout": {"total": "5s", "backoff": "1s"}}, "timeout.backoff: nothing is sent again"),
        ({"workload.timeout": {"total": "-5s"}}, "timeout.total"),
        ({"workload.timeout": "-5s"}, "timeout.total"),
        ({"workload.timeout": {"total": "5s", "retries": -1}}, "timeout.retries"),
        ({"workload.timeout": {"total": "5s", "retry": 1}}, "timeout.retry: .*retries"),
        ({"workload.timeout": 5}, "timeout.total"),
        ({"workload.network": {"latency": "-1ms"}}, "network.latency"),
        ({"workload.network": "20ms"}, "network"),
        ({"workload.network": {"latncy": "20ms"}}, "network.latncy: .*latency"),
        ({"workload.timeout": {"total": "5s", "retries": 1}, "workload.n": 2}, "timeout.retries: of several samples"),
    ],
)
def test_bad_descriptions_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(servecast.ServecastError, match=said):
        run(**changes)


def test_retries_where_prefill_and_decode_are_apart_are_refused() -> None:
    split = QUICKSTART.with_name("split-serving.yaml")
    changes = {"workload.timeout": {"total": "5s", "retries": 1}}
    with pytest.raises(servecast.ServecastError, match="retries: where prefill and decode are apart"):
        servecast.simulate(servecast.load_scenario(split, changes))


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_first_tokens_of_split_servers_are_in_time_where_they_come_from(side: str) -> None:
    split = QUICKSTART.with_name("split-serving.yaml")
    base = {"workload.num_requests": 300, "cluster.split.first_token": side}
    rows = servecast.simulate(servecast.load_scenario(split, base)).requests
    limit = float(np.percentile(rows["ttft_s"].to_numpy(), 70))
    some = servecast.simulate(servecast.load_scenario(split, base | {"workload.timeout": {"first_token": f"{limit}s"}}))
    done = some.requests.filter(some.requests["status"] == "finished")
    assert 0 < some.summary()["cancelled"] < 150
    assert done["ttft_s"].max() <= limit + 1e-9
