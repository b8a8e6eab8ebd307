"""Why a run has come to a stop with work left: who waits for what, and what to set so that it does not happen."""

from __future__ import annotations

from collections.abc import Sequence

from servecast.errors import one_of
from sim.direct import Direct
from sim.handover import HandOver, SplitDesk
from sim.replica import Replica
from sim.request import Request


def why_stuck(replicas: Sequence[Replica], desks: Sequence[Direct | SplitDesk], done: int, total: int) -> str:
    """What is wrong when nothing happens any more after `done` of `total` requests."""
    after = f"after {done} of {total}"
    if waiting := sum(len(desk.waiting) for desk in desks):
        return (
            f"{waiting} requests wait for a replica, {after}: all that could serve "
            "them have failed or were drained, and none will be back; give failures a repair time, or start others"
        )
    stuck = [replica for replica in replicas if replica.in_flight]
    for desk in desks:
        if isinstance(desk, SplitDesk) and (locked := [r for r in stuck if desk.answers(r.index) and r.state.waiting]):
            return _locked(desk, locked, replicas, after)
    states = "; ".join(
        f"replica {r.index}: {len(r.state.waiting)} waiting, {len(r.state.running)} running, "
        f"{r.state.kv.free} of {r.state.kv.usable} KV blocks free"
        for r in stuck
    )
    policies = one_of(dict.fromkeys(r.policy for r in stuck))
    return f"no progress: {policies} plans nothing while work waits, {after} requests ({states})"


def _locked(desk: SplitDesk, locked: Sequence[Replica], replicas: Sequence[Replica], after: str) -> str:
    """Decode replicas wait for blocks that nobody will give back, and prefill replicas for them."""
    lines = [_decode_side(replica) for replica in locked]
    lines += [line for replica in replicas if desk.reads(replica.index) and (line := _prefill_side(replica, locked))]
    remedies = dict.fromkeys(replica.remedy for replica in locked)
    return (
        f"no progress, {after} requests: prefill and decode wait for each other's KV blocks. "
        f"{'; '.join(lines)}. Give the decode pool more blocks (replicas, tp, a larger share of the memory), send it "
        f"fewer requests at once, or {one_of(remedies)}"
    )


def _decode_side(replica: Replica) -> str:
    state = replica.state
    kv, head = state.kv, next((r for r in state.waiting if not r.there), state.waiting[0])
    there = [request for request in state.waiting if request.there]
    held = sum(kv.blocks(request.target) for request in there)
    return (
        f"Replica {replica.index} (decode): the first of {len(state.waiting)} in its queue wants "
        f"{kv.blocks(replica.wants(head))} blocks, {kv.free} of {kv.usable} are free, and {held} are held by "
        f"{_count(len(there), 'request')} whose KV has come and whose turn has not"
    )


def _prefill_side(replica: Replica, locked: Sequence[Replica]) -> str:
    """What a prefill replica has done or would do for those who wait at `locked` ones."""
    kept: list[Request] = []
    for request in (request for each in locked for request in each.state.waiting):
        reading = request.of.reading if isinstance(request.of, HandOver) else request
        if reading.kept and reading.replica == replica.index and reading.over:
            kept.append(reading)
    if not (kept or replica.in_flight):
        return ""
    kv = replica.state.kv
    blocks = sum(kv.blocks(reading.computed) for reading in kept)
    return (
        f"replica {replica.index} (prefill) keeps {blocks} of {kv.usable} blocks for {_count(len(kept), 'prompt')} "
        f"that the decode side has no room for, {replica.in_flight} wait there, {kv.free} blocks are free"
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
