"""Replicas that fail, start and stop: against times worked out by hand, and what must hold in every run."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.engine import FrontEndTime
from servecast.errors import ServecastError
from sim.changes import Autoscale, Changes, Event, Failures, Limits
from sim.cluster import Cluster, Pool, Routing
from sim.handover import Split
from sim.kvcache import KVCache
from sim.prefixcache import PrefixCache
from sim.presence import Presence
from sim.routers import ROUTERS, Known
from sim.schedulers import VllmV1
from sim.source import ClosedLoop, OpenLoop, Requests
from sim.steplog import CHANGES, FAILED, FINISHED, LENGTH, OUTCOMES, REJECTED, UNFINISHED, UP
from tests.sim.engine import NO_TIME, LinearCost
from tests.sim.test_handover import Wire
from tests.sim.test_lockstep import Group

COST = LinearCost(base=1.0, token=0.01, decode=0.1, kv=0.0, attention=0.0)


def pool(replicas=1, blocks=100, asynchronous=False, role="unified", seqs=64, cache=KVCache, time=NO_TIME, ranks=1):
    """Of so many replicas, each of `ranks` engines that step together."""
    together = {"group": Group(COST, shared=0.0), "ranks": ranks} if ranks > 1 else {}
    engines = replicas * ranks
    return Pool(engines, VllmV1(512, seqs), COST, blocks, 16, 1000, asynchronous, time, cache, role=role, **together)


LEAST = Routing("least-outstanding")


def run(rows, changes, pools=None, routing=LEAST, patience_s=None):
    """`rows` of (arrival, prompt, output); (the cluster, its requests by id, changes as (time, replica, word))."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    source = OpenLoop(arrival.astype(float), Requests(prompt, output, output, patience_s))
    cluster = Cluster(source, pools or [pool()], routing, changes)
    assert cluster.run()
    table = cluster.log.requests.table()
    order = np.argsort(table["id"])
    log = cluster.log.changes.table()
    said = [(t, int(r), CHANGES[int(c)]) for t, r, c in zip(log["time_s"], log["replica"], log["change"], strict=True)]
    return cluster, {name: column[order] for name, column in table.items()}, said


def fail(at_s, replica=0, repair_s=inf, pool=0):
    return Event(at_s, "fail", pool, replica, repair_s=repair_s)


def test_a_request_begins_anew_elsewhere():
    """Reads 100 tokens in 2 s, then 1.1 s a token; fails in the third step, and starts from nothing on the other."""
    cluster, requests, said = run([(0.0, 100, 4)], Changes((2,), events=(fail(3.5),), retries=1), [pool(2)])
    assert requests["outcome"][0] == LENGTH
    assert (requests["arrival_s"][0], requests["replica"][0]) == (0.0, 1)
    assert requests["scheduled_s"][0] == 3.5
    assert requests["first_token_s"][0] == 5.5
    assert requests["finish_s"][0] == pytest.approx(5.5 + 3 * 1.1)
    losses = cluster.log.losses.table()
    assert (losses["time_s"][0], losses["replica"][0], losses["output_tokens"][0]) == (3.5, 0, 2)
    assert said == [(0.0, 0, "up"), (0.0, 1, "up"), (3.5, 0, "failed")]
    steps = cluster.log.steps.table()
    assert list(steps["end_s"][steps["replica"] == 0]) == pytest.approx([2.0, 3.1]), "the third step is not there"


def test_without_retries_it_has_failed_and_its_tokens_are_known():
    _, requests, _ = run([(0.0, 100, 9), (50.0, 100, 2)], Changes((1,), events=(fail(5.0, repair_s=20.0),)))
    assert [int(o) for o in requests["outcome"]] == [FAILED, LENGTH]
    assert (requests["finish_s"][0], requests["output_tokens"][0]) == (5.0, 3)
    assert requests["first_token_s"][1] == 52.0


def test_with_no_replica_requests_wait_until_one_is_back():
    """Fails at 5 s with one request, is back at 25: that one and the one that came meanwhile begin then, in order."""
    rows = [(0.0, 100, 9), (10.0, 100, 2)]
    changes = Changes((1,), events=(fail(5.0, repair_s=20.0),), retries=1)
    _, requests, said = run(rows, changes, [pool(seqs=1)])
    assert list(requests["scheduled_s"]) == pytest.approx([25.0, 27.0 + 8 * 1.1])
    assert said == [(0.0, 0, "up"), (5.0, 0, "failed"), (25.0, 0, "up")]
    _, requests, _ = run(rows, changes, patience_s=np.array([inf, 3.0]))
    assert (requests["finish_s"][1], requests["replica"][1]) == (13.0, -1), "given up while there was none"


def test_none_that_is_ever_back_is_an_error():
    with pytest.raises(ServecastError, match="1 requests wait for a replica, after 1 of 2"):
        run([(0.0, 100, 2), (20.0, 100, 2)], Changes((1,), events=(fail(10.0),)))
    with pytest.raises(ServecastError, match="2 requests wait for a replica"):
        run([(0.0, 100, 2), (20.0, 100, 2)], Changes((1,), events=(fail(1.0),), retries=1))


def test_a_drained_replica_ends_what_it_has():
    rows = [(0.0, 100, 9), (4.0, 100, 2), (30.0, 100, 2)]
    changes = Changes((2,), (), (Event(3.0, "drain", 0, 0),))
    _, requests, said = run(rows, changes, [pool(2)])
    end = 2.0 + 8 * 1.1
    assert list(requests["replica"]) == [0, 1, 1]
    assert requests["finish_s"][0] == pytest.approx(end)
    assert said[2:] == [(3.0, 0, "drain"), (pytest.approx(end), 0, "gone")]


def test_a_drained_replica_that_fails_is_gone_for_good():
    """It comes back neither after the repair, nor is it gone twice; another is started under its number."""
    changes = Changes((2,), (1.0,), (Event(3.0, "drain", 0, 0), fail(5.0, 0, 2.0), Event(8.0, "start", 0)), retries=1)
    rows = [(0.0, 100, 9), (4.0, 100, 30), (9.5, 100, 2)]
    _, requests, said = run(rows, changes, [pool(2)])
    assert said[2:] == [(3.0, 0, "drain"), (5.0, 0, "failed"), (8.0, 0, "start"), (9.0, 0, "up")]
    assert list(requests["replica"]) == [1, 1, 0]


def test_one_that_starts_takes_requests_once_it_has_started():
    rows = [(0.0, 100, 20), (8.0, 100, 2), (12.0, 100, 2)]
    changes = Changes((1,), (10.0,), (Event(1.0, "start", 0),))
    _, requests, said = run(rows, changes, [pool(2)])
    assert list(requests["replica"]) == [0, 0, 1]
    assert said == [(0.0, 0, "up"), (1.0, 1, "start"), (11.0, 1, "up")]


def test_a_start_that_is_drained_is_gone_at_once_and_so_is_a_repair():
    changes = Changes((1,), (10.0,), (Event(1.0, "start", 0), Event(2.0, "drain", 0, 1)))
    assert run([(20.0, 100, 2)], changes, [pool(2)])[2][1:] == [(1.0, 1, "start"), (2.0, 1, "gone")]
    changes = Changes((2,), (), (fail(1.0, 1, 5.0), Event(2.0, "drain", 0, 1)))
    assert run([(20.0, 100, 2)], changes, [pool(2)])[2][2:] == [(1.0, 1, "failed"), (2.0, 1, "gone")]


def test_engines_that_step_together_fail_and_come_back_together():
    """Two groups of two. At 3.5 s the first fails, with a request in each of its engines, which begin anew in the other
    group's; the place of a group in its pool names it. It is back at 13.5 s, all of it, and shares what waits."""
    rows = [(0.0, 100, 4)] * 2
    changes = Changes((2,), events=(fail(3.5, 0, 10.0),), retries=1)
    cluster, requests, said = run(rows, changes, [pool(2, ranks=2)], Routing("round-robin"))
    assert list(requests["replica"]) == [2, 3]
    assert list(requests["scheduled_s"]) == [3.5, 3.5]
    assert list(requests["finish_s"]) == pytest.approx([5.5 + 3 * 1.1] * 2)
    assert said[4:] == [(3.5, 0, "failed"), (3.5, 1, "failed")]
    assert list(cluster.log.losses.table()["replica"]) == [0.0, 1.0]
    changes = Changes((1,), events=(fail(3.5, 0, 10.0),), retries=1)
    _, requests, said = run(rows, changes, [pool(1, ranks=2)], Routing("round-robin"))
    assert list(requests["scheduled_s"]) == [13.5, 13.5]
    assert sorted(requests["replica"]) == [0, 1], "all of the group are back before requests are given out"
    assert said[2:] == [(3.5, 0, "failed"), (3.5, 1, "failed"), (13.5, 0, "up"), (13.5, 1, "up")]


def test_engines_that_step_together_stay_until_all_are_done():
    """The second engine has nothing left at 3.1 s, the first one at 10.8 s."""
    changes = Changes((2,), (1.0,), (Event(1.0, "drain", 0, 0), Event(2.0, "start", 0)))
    _, requests, said = run([(0.0, 100, 9), (0.0, 100, 2)], changes, [pool(3, ranks=2)], Routing("round-robin"))
    end = max(requests["finish_s"])
    assert said[4:] == [
        (1.0, 0, "drain"), (1.0, 1, "drain"), (2.0, 4, "start"), (2.0, 5, "start"), (3.0, 4, "up"), (3.0, 5, "up"),
        (pytest.approx(end), 0, "gone"), (pytest.approx(end), 1, "gone"),
    ]  # fmt: skip


def test_engines_that_step_together_are_scaled_as_one():
    """9 requests at 1 s; looked at after 15 s for 3 a group: three groups."""
    made = [pool(4, ranks=2)]
    rule = Autoscale(1, 4, "outstanding", 3.0, down_after_s=1e6)
    said = run([(1.0, 10, 50)] * 9, Changes((1,), (10.0,), autoscale={0: rule}), made)[2]
    assert [each for each in said if each[0] == 15.0] == [(15.0, n, "start") for n in (2, 3, 4, 5)]
    half = Autoscale(1, 4, "kv", 0.5, down_after_s=1e6)
    said = run([(1.0, 900, 20)] * 2, Changes((1,), (10.0,), autoscale={0: half}), [pool(4, 80, ranks=2)])[2]
    assert [each for each in said if each[0] == 15.0] == [(15.0, 2, "start"), (15.0, 3, "start")], "57 of 79 in each"


def test_failures_are_exponential_and_of_the_seed():
    """Idle, a replica fails after 50 s on average and is back 10 s later; times up are exponential."""

    def times_up(seed):
        changes = Changes((4,), failures={0: Failures(50.0, 10.0)}, retries=100)
        source = OpenLoop(np.array([0.0, 60_000.0]), Requests(*(np.array([1, 1]) for _ in range(3))))
        cluster = Cluster(source, [pool(4)], Routing(seed=seed), changes)
        assert cluster.run()
        log = cluster.log.changes.table()
        each = [log["time_s"][log["replica"] == r] for r in range(4)]
        assert all(np.allclose(t[2::2] - t[1:-1:2], 10.0) for t in each), "repairs"
        return np.concatenate([(t[1::2] - t[: len(t) - len(t) % 2 : 2]) for t in each])

    up = times_up(1)
    assert len(up) == pytest.approx(4 * 60_000 / 60, rel=0.06)
    assert up.mean() == pytest.approx(50.0, rel=0.06)
    assert up.std() == pytest.approx(up.mean(), rel=0.06)
    assert (up == times_up(1)).all()
    assert len(times_up(2)) != len(up) or (times_up(2) != up).any()


def split_pools(prefill=1, decode=1, **made):
    return [pool(prefill, role="prefill", **made), pool(decode, role="decode", **made)]


def split_routing(seed=0, **split):
    return Routing("least-outstanding", seed=seed, split=Split({(0, 1): Wire()}, router="least-outstanding", **split))


def test_a_prefill_replica_loses_what_it_keeps():
    """Read by 2 s, the KV would be there at 3.5 s. At 3 s it is lost: the other prefill replica reads it again, though
    the decode side had its blocks already."""
    changes = Changes((2, 1), events=(fail(3.0),), retries=1)
    cluster, requests, _ = run([(0.0, 100, 4)], changes, split_pools(2), split_routing())
    moves = cluster.log.transfers.table()
    assert list(moves["prefill_replica"]) == [0, 1]
    assert moves["read_s"][1] == 5.0
    assert requests["scheduled_s"][0] == 3.0
    assert requests["first_token_s"][0] == pytest.approx(moves["end_s"][1] + 1.01)
    _, requests, _ = run([(0.0, 100, 4)], Changes((2, 1), events=(fail(3.6),)), split_pools(2), split_routing())
    assert requests["first_token_s"][0] == pytest.approx(4.51), "what has been moved is not lost"


def test_what_was_on_its_way_to_the_engine_does_not_arrive_in_the_place_of_the_new_one():
    """A front end of 10 s: handed over at 2 s, lost at 3, read again by 5, at the decode engine at 15, not at 12."""
    of = [pool(2, role="prefill"), pool(role="decode", time=FrontEndTime(10.0, 0.0))]
    cluster, requests, _ = run([(0.0, 100, 4)], Changes((2, 1), events=(fail(3.0),), retries=1), of, split_routing())
    assert list(cluster.log.transfers.table()["reserved_s"]) == [15.0]
    assert requests["first_token_s"][0] == pytest.approx(15.0 + 0.5 + 1.0 + 1.01)


def test_what_a_decode_replica_loses_starts_from_prefill():
    changes = Changes((1, 2), events=(fail(5.0, pool=1),), retries=1)
    cluster, requests, _ = run([(0.0, 100, 4)], changes, split_pools(1, 2), split_routing())
    moves = cluster.log.transfers.table()
    assert list(moves["decode_replica"]) == [1, 2]
    assert requests["scheduled_s"][0] == 5.0
    assert requests["first_token_s"][0] == pytest.approx(7.0 + 0.5 + 1.0 + 1.01)
    assert list(cluster.log.losses.table()["output_tokens"]) == [1.0]


def test_a_drained_prefill_replica_stays_until_its_kv_has_moved():
    changes = Changes((2, 1), events=(Event(1.0, "drain", 0, 0),))
    _, _, said = run([(0.0, 100, 4)], changes, split_pools(2), split_routing())
    assert said[3:] == [(1.0, 0, "drain"), (pytest.approx(3.5), 0, "gone")]


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_name_only_replicas_that_take_requests(router):
    """Replicas fail, come back, are drained and started under load: no request is begun where there is none, and every
    one that is there gets some."""
    n = 1500
    rng = np.random.default_rng(0)
    session = rng.integers(0, 300, n)
    known = Known(lambda i: [(int(session[i]), 3)], 16, session.tolist().__getitem__)
    rows = list(zip(np.cumsum(rng.exponential(0.4, n)), rng.integers(48, 90, n), rng.integers(1, 9, n), strict=True))
    events = (
        fail(50.0, 0, 100.0), fail(60.0, 1, 100.0), Event(70.0, "drain", 0, 2), Event(300.0, "start", 0, count=3),
        fail(310.0, 1, 50.0), Event(400.0, "drain", 0, 0), Event(500.0, "start", 0),
    )  # fmt: skip
    changes = Changes((4,), (20.0,), events, retries=3)
    _, requests, said = run(rows, changes, [pool(6, blocks=400)], Routing(router, known=known, stale_s=1.0))
    assert (requests["outcome"] == LENGTH).all()
    for number in range(6):
        mine = [(t, word) for t, r, word in said if r == number]
        here = requests["scheduled_s"][requests["replica"] == number]
        ups = [t for t, word in mine if word == "up"]
        ends = [next((e for e, word in mine if e > t and word in ("failed", "gone")), inf) for t in ups]
        inside = [(here >= t) & (here < e) for t, e in zip(ups, ends, strict=True)]
        assert np.any(inside, axis=0).all()
        assert all(each.any() for each in inside), (number, router)


def test_sessions_stay_where_their_replica_stays():
    n = 1200
    session = np.random.default_rng(3).integers(0, 60, n)
    rows = [(0.5 * i, 50, 2) for i in range(n)]
    routing = Routing("session-affinity", known=Known(session=session.tolist().__getitem__))
    changes = Changes((5,), events=(fail(300.0, 2),), retries=1)
    _, requests, _ = run(rows, changes, [pool(5)], routing)
    before = requests["scheduled_s"] < 300
    moved = 0
    for s in range(60):
        old, new = (set(requests["replica"][(session == s) & part].astype(int)) for part in (before, ~before))
        if old == {2}:
            moved += 1
            assert len(new) == 1 and new != {2}  # noqa: PT018
        else:
            assert old == new
    assert moved > 5


def outcomes(requests):
    return [OUTCOMES[int(outcome)] for outcome in requests["outcome"]]


def test_a_gateway_turns_away_what_is_too_much_and_says_why():
    """Requests of 3.1 s, one a second: of the second and third one is still there when the fourth arrives."""
    rows = [(float(i), 100, 2) for i in range(4)] + [(20.0, 101, 2), (30.0, 100, 2)]
    _, requests, _ = run(rows, Changes((1,), limits=Limits(outstanding=2, prompt_tokens=100)), [pool(seqs=1)])
    over = "over_outstanding"
    assert outcomes(requests) == ["length", "length", over, over, "over_prompt_tokens", "length"]
    _, requests, _ = run(rows[:4], Changes((2,), limits=Limits(per_replica=1)), [pool(2)])
    assert outcomes(requests) == ["length", "length", over, over]
    _, requests, _ = run(rows[:4], Changes((2,), limits=Limits(per_replica=1), events=(fail(0.5, 1),)), [pool(2)])
    assert outcomes(requests) == ["length", over, over, over], "one replica less"


def test_a_closed_loop_survives_a_gateway_that_takes_nothing():
    n = np.full(5000, 10)
    cluster = Cluster(ClosedLoop(2, Requests(n, n, n)), [pool()], LEAST, Changes((1,), limits=Limits(prompt_tokens=9)))
    assert cluster.run()
    assert len(cluster.log.requests) == 5000


def scaled(rows, rule, start=1, cold_start_s=10.0, most=4, **also):
    cluster, requests, said = run(rows, Changes((start,), (cold_start_s,), autoscale={0: rule}, **also), [pool(most)])
    return cluster, requests, [each for each in said if each[0] > 0]


def test_a_pool_grows_in_proportion_and_shrinks_later():
    """9 requests at 1 s; looked at every 15 s for 3 a replica: 3 at 15 s, which take requests at 25 s, and one again
    once that was so for 60 s."""
    rows = [(1.0, 10, 50)] * 9 + [(1000.0, 10, 2)]
    rule = Autoscale(1, 4, "outstanding", 3.0, down_after_s=60.0)
    _, requests, said = scaled(rows, rule)
    assert said[:4] == [(15.0, 1, "start"), (15.0, 2, "start"), (25.0, 1, "up"), (25.0, 2, "up")]
    end = requests["finish_s"][0]
    first = 15.0 * np.ceil(end / 15.0)  # the first look at which it wants one; the last at which it did not is before
    assert [each[0] for each in said[4:]] == [first - 15.0 + 60.0] * 4
    assert [each[1:] for each in said[4:]] == [(2, "drain"), (1, "drain"), (1, "gone"), (2, "gone")]
    assert requests["replica"][9] == 0


def test_within_the_tolerance_nothing_changes_and_the_most_is_the_most():
    rows = [(1.0, 10, 50)] * 11
    for target, word in ((10.1, None), (9.9, "start")):  # 11 are within 10 % of 10.1
        _, _, said = scaled(rows, Autoscale(1, 4, "outstanding", target, down_after_s=1e6))
        assert {each[2] for each in said} == ({word, "up"} if word else set())
    _, _, said = scaled(rows, Autoscale(1, 3, "outstanding", 1.0, down_after_s=1e6))
    assert [each[2] for each in said] == ["start", "start", "up", "up"]


def test_it_flaps_without_a_window_and_not_with_one():
    """Bursts of 8 every 60 s, over before the next one."""
    rows = [(60.0 * i + 5, 10, 5) for i in range(10) for _ in range(8)]

    def starts(down_after_s):
        said = scaled(rows, Autoscale(1, 4, "outstanding", 2.0, 5.0, down_after_s=down_after_s), cold_start_s=2.0)[2]
        return sum(word == "start" for _, _, word in said)

    assert starts(0.0) == 30
    assert starts(120.0) == 3


def test_what_waits_and_what_is_full_can_be_the_metric():
    rows = [(1.0, 10, 50)] * 9
    waiting = Changes((1,), (10.0,), autoscale={0: Autoscale(1, 4, "waiting", 4.0)})
    said = run(rows, waiting, [pool(4, seqs=1)])[2]
    assert [each for each in said if each[2] == "start"] == [(15.0, 1, "start")], "8 wait: two replicas"
    full = Changes((1,), (10.0,), autoscale={0: Autoscale(1, 4, "kv", 0.5)})
    said = run([(1.0, 900, 20)], full, [pool(4, blocks=80)])[2]
    assert [each for each in said if each[2] == "start"] == [(15.0, 1, "start")], "57 of 79 blocks: two at a half"


def test_missed_slos_ask_for_one_more_and_met_ones_for_one_fewer():
    """Five at once, one after the other on a replica, want their first token within 2.2 s: that takes five replicas."""
    rows = [(10.0 * i, 100, 1) for i in range(40) for _ in range(5)]
    rule = Autoscale(2, 6, "slo", 0.9, down_after_s=1e6, window_s=10.0, slo=lambda number: {"ttft": 2.2})
    made = [Pool(6, VllmV1(512, 1), COST, 100, 16, 1000, False, NO_TIME)]
    changes = Changes((2,), (1.0,), autoscale={0: rule})
    said = [each for each in run(rows, changes, made)[2] if each[0] > 0]
    assert [word for _, _, word in said] == ["start", "up"] * 3
    rule = Autoscale(2, 6, "slo", 0.9, down_after_s=0.0, window_s=10.0, slo=lambda number: {"ttft": 1e6})
    said = run(rows, Changes((6,), (1.0,), autoscale={0: rule}), made)[2]
    assert sum(word == "gone" for _, _, word in said) == 4


def test_autoscalers_replace_nothing_that_is_repaired_and_stop_when_all_wait_for_ever():
    rule = Autoscale(2, 4, "outstanding", 100.0, down_after_s=0.0)
    rows = [(0.0, 10, 2), (400.0, 10, 2)]
    said = scaled(rows, rule, 2, events=(fail(20.0, 1, 100.0),))[2]
    assert said == [(20.0, 1, "failed"), (120.0, 1, "up")]
    said = scaled(rows, rule, 2, events=(fail(20.0, 1),))[2]
    assert said == [(20.0, 1, "failed"), (30.0, 1, "start"), (40.0, 1, "up")], "one that is not is replaced"
    small = Changes((1, 1), (1.0, 1.0), autoscale={0: Autoscale(1, 2, "outstanding", 1.0)},
                    events=(fail(1.0, 0, pool=1),))  # fmt: skip
    with pytest.raises(ServecastError, match="1 requests wait for a replica"):
        run([(5.0, 100, 4)], small, split_pools(2, 1), split_routing())


def test_a_run_that_is_stopped_counts_those_for_whom_there_is_no_replica():
    """Asked after 20,000 events: the first arrivals after the failure, at one a millisecond."""
    n = 30_000
    one = np.ones(n, int)
    source = OpenLoop(np.arange(n) * 1e-3, Requests(one, one, one))
    cluster = Cluster(source, [pool()], LEAST, Changes((1,), events=(fail(0.5, repair_s=1e6),), retries=1))
    assert not cluster.run(lambda done, now: False)
    table = cluster.log.requests.table()
    assert (table["outcome"] == UNFINISHED).all()
    assert sorted(table["id"]) == list(range(len(table["id"])))
    assert len(table["id"]) == pytest.approx(20_000, rel=0.01)


def test_gpus_count_while_their_replica_exists():
    """Two replicas: one fails at 10 and is back at 30, one is drained at 40 and gone at 50, one starts at 20."""
    rows = [(0, 0, "up"), (0, 1, "up"), (10, 0, "failed"), (20, 2, "start"), (30, 0, "up"), (35, 2, "up"),
            (40, 1, "drain"), (50, 1, "gone")]  # fmt: skip
    times, replicas, words = zip(*rows, strict=True)
    columns = {"time_s": np.array(times, float), "replica": np.array(replicas, float),
               "change": np.array([CHANGES.index(word) for word in words], float)}  # fmt: skip
    presence = Presence(columns)
    assert presence.each(range(4), 60.0) == pytest.approx([40.0, 50.0, 40.0, 0.0])
    assert presence.seconds(range(3), 60.0) == pytest.approx(130.0)
    assert presence.seconds(range(3), 15.0) == pytest.approx(25.0)
    assert presence.most(range(3)) == 3
    at, serving = presence.counts(range(3), (UP,))
    assert [serving[np.searchsorted(at, t, side="right") - 1] for t in (5, 15, 25, 32, 37, 45)] == [2, 1, 1, 2, 3, 2]


@st.composite
def histories(draw):
    """(seconds of arrival, prompts, outputs, patience), pools, what happens, the seed."""
    n = draw(st.integers(1, 30))
    split = draw(st.booleans())
    replicas = tuple(draw(st.integers(1, 3)) for _ in range(1 + split))
    rows = [(draw(st.floats(0, 60)), draw(st.integers(1, 120)), draw(st.integers(1, 12))) for _ in range(n)]
    patience = np.array([draw(st.sampled_from([inf, inf, 2.0, 7.5, 20.0])) for _ in range(n)])
    events = []
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.sampled_from([0.0, 2.0, 3.5])) + draw(st.integers(0, 60))
        which = draw(st.integers(0, split))
        kind = draw(st.sampled_from(["fail", "fail", "drain", "start"]))
        place = draw(st.integers(0, replicas[which] - 1))
        events.append(Event(at, kind, which, place, draw(st.integers(1, 2)), draw(st.sampled_from([1.0, 15.0, inf]))))
    failures = {p: Failures(draw(st.floats(10, 80)), 5.0) for p in range(1 + split) if draw(st.booleans())}
    last = [Event(200.0, "start", which) for which in range(1 + split)]  # somebody is back in the end
    scaled = {
        p: Autoscale(1, draw(st.integers(1, 3)), draw(st.sampled_from(["outstanding", "waiting", "kv"])),
                     draw(st.sampled_from([0.02, 0.5, 2.0])), 3.0, 0.1, 0.0, draw(st.sampled_from([0.0, 20.0])))
        for p in range(1 + split) if draw(st.integers(0, 3)) == 0
    }  # fmt: skip
    limits = draw(st.sampled_from([None, Limits(8), Limits(per_replica=4), Limits(prompt_tokens=90)]))
    changes = Changes(
        replicas, (draw(st.sampled_from([0.0, 4.0])),) * (1 + split), (*events, *last), failures,
        draw(st.integers(0, 3)), scaled, limits,
    )  # fmt: skip
    how = (draw(st.booleans()), draw(st.integers(0, 9)), draw(st.booleans()), draw(st.sampled_from([1, 1, 2, 3])))
    return (sorted(rows), patience, split, changes, *how)


def simulated(history, router, closed):
    """A history with that router, of clients that wait for answers or not; (the cluster, its pools, the requests)."""
    rows, patience, split, changes, asynchronous, seed, caching, ranks = history
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    n = len(rows)

    def cache(num_blocks, block_size):
        return PrefixCache(num_blocks, block_size, lambda i: [(0, 2)], False)

    made = {"asynchronous": asynchronous, "ranks": ranks, "cache": cache if caching else KVCache,
            "time": FrontEndTime(1.5, 0.01) if seed % 2 else NO_TIME}  # fmt: skip
    blocks = 25 if seed % 3 == 0 else 100  # with few, requests are preempted; split pools could lock
    pools = split_pools(3, 3, **made) if split else [pool(3, blocks, **made)]
    samples = 1 + np.arange(n) % (1 if split else 1 + seed % 3)
    known = Known(lambda i: [(i % 3, 1)], 16, lambda i: i % 4)
    if split:
        wired = Split({(0, 1): Wire()}, router=router, first_token="prefill" if seed % 2 else "decode",
                      local_tokens=10 * (seed % 3))  # fmt: skip
        routing = Routing(router, seed=seed, known=known, split=wired)
    else:
        routing = Routing(router, seed=seed, known=known)
    requests = Requests(prompt, output, output, patience, samples=samples if samples.max() > 1 else None)
    source = ClosedLoop(4, requests) if closed else OpenLoop(arrival.astype(float), requests)
    cluster = Cluster(source, pools, routing, changes)
    assert cluster.run()
    return cluster, pools, requests


@given(histories(), st.sampled_from(list(ROUTERS)), st.booleans())
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_or_counted_twice(history, router, closed):
    cluster, _, requests = simulated(history, router, closed)
    changes, output, n = history[3], requests.output_tokens, len(requests.output_tokens)
    samples = np.ones(n, int) if requests.samples is None else requests.samples
    table, log = cluster.log.requests.table(), cluster.log
    assert sorted(table["id"]) == list(range(n))
    assert UNFINISHED not in table["outcome"]
    done = np.isin(table["outcome"], FINISHED)
    assert (table["output_tokens"][done] == (output * samples)[table["id"][done].astype(int)]).all()
    times = [table[c][done] for c in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")]
    assert (np.diff(times, axis=0) >= 0).all()
    lost = np.bincount(log.losses.table()["id"].astype(int), minlength=n)
    failed = table["id"][table["outcome"] == FAILED].astype(int)
    assert (lost[failed] == changes.retries + 1).all()
    assert (np.delete(lost, failed) <= changes.retries).all()
    # Tokens: those in steps are what clients have of requests that are over, and of what was lost.
    given = ~np.isin(table["outcome"], [FAILED, *REJECTED])
    tokens = table["output_tokens"][given].sum() + log.losses.table()["output_tokens"].sum()
    assert 0 <= log.steps.table()["output_tokens"].sum() - tokens <= (samples[table["id"].astype(int)] * ~done).sum()
    check_replicas(cluster)


def check_replicas(cluster):
    """Steps lie within lives; nothing is left in those that are there, nor in what routers know of them."""
    steps, changes = cluster.log.steps.table(), cluster.log.changes.table()
    for number, front_end in enumerate(cluster.front_ends):
        mine = steps["replica"] == number
        said = changes["replica"] == number
        for begin, end in zip(steps["start_s"][mine], steps["end_s"][mine], strict=True):
            before = changes["change"][said][changes["time_s"][said] <= begin]
            assert len(before)
            assert before[-1] in (UP, CHANGES.index("drain"))
            inside = (changes["time_s"][said] > begin) & (changes["time_s"][said] < end)
            assert (changes["change"][said][inside] == CHANGES.index("drain")).all()
        assert (np.diff(steps["step"][mine]) > 0).all()
        state = front_end.replica.state
        assert state.kv.free == state.kv.usable
        assert not any((front_end.in_flight, state.running, state.waiting, state.pulling, front_end.unfinished))
    for desk in cluster._desks:
        sides = [desk] if not hasattr(desk, "_prefill") else [desk._prefill, desk._decode]
        assert not any(any(load._now) for side in sides for load in side._fleet.loads)
        assert not desk.waiting
