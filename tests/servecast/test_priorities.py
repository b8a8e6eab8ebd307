"""What a gateway makes priorities of."""

from __future__ import annotations

import numpy as np
import pytest

import servecast
from servecast.errors import ServecastError
from servecast.setup import set_up
from tests.servecast.helpers import fixed, small

BY_PRIORITY = {"engine__scheduling_policy": "priority", "engine__max_num_seqs": 4, "workload__num_requests": 300}


def requests(**changes):
    return set_up(small(**BY_PRIORITY, **changes)).requests


def test_a_prediction_is_off_by_the_stated_error():
    for sigma in (0.0, 0.5):
        r = requests(workload__priority={"by": "predicted-output", "sigma": sigma})
        off = np.log(r.priority / r.trace.output_tokens)[r.trace.output_tokens > 50]
        assert off.std() == pytest.approx(sigma, abs=0.06)
        assert abs(off.mean()) < 0.07


def test_predictions_have_a_stream_of_their_own():
    plain, predicted = (requests(**p) for p in ({}, {"workload__priority": {"by": "predicted-output", "sigma": 1}}))
    assert (plain.trace.output_tokens == predicted.trace.output_tokens).all()
    assert plain.priority is None


def test_the_shortest_go_first_the_less_the_worse_they_are_known():
    waits = {}
    for sigma in (None, 0.0, 3.0):
        part = {} if sigma is None else {"workload__priority": {"by": "predicted-output", "sigma": sigma}}
        engine = BY_PRIORITY | {"engine__scheduling_policy": "fcfs" if sigma is None else "priority"}
        waits[sigma] = servecast.simulate(small(**engine, **part)).summary()["mean_ttft_ms"]
    assert waits[0.0] < 0.9 * waits[3.0]
    assert waits[0.0] < 0.8 * waits[None]


def test_a_deadline_is_the_arrival_plus_the_limit_of_the_class():
    classes = [
        {"name": name, "weight": 1, "lengths": fixed(100, 20), "slo": slo}
        for name, slo in (("soon", {"ttft": "0.2s"}), ("later", None))
    ]
    arrivals = {"kind": "poisson", "rate": 5}
    workload = {"classes": classes, "arrivals": arrivals, "num_requests": 300, "priority": {"by": "deadline"}}
    r = set_up(small(engine__scheduling_policy="priority", workload=workload, slo={"ttft": "2s"})).requests
    ttft_s = np.array([0.2, 2.0])[r.trace.classes[0]]
    assert r.priority == pytest.approx(1e3 * (r.trace.arrival_s + ttft_s), abs=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workload__priority": {"by": "deadline"}, "slo": {"tpot": "1s"}}, "which is not given for all"),
        ({"workload__priority": {"by": "deadline", "sigma": 1}}, "by: deadline predicts nothing"),
        ({"workload__priority": {"by": "predicted-output"}}, "workload.priority.sigma: missing; the error"),
        ({"workload__priority": {"by": "deadline"}, "engine__scheduling_policy": "fcfs"}, "unless the engine's"),
    ],
)
def test_mistakes(changes, said):
    with pytest.raises(ServecastError, match=said):
        set_up(small(**BY_PRIORITY | changes))
