"""KV that is sent layer by layer: against times worked out by hand, a schedule piece by piece, and invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.prefixcache import PrefixCache
from sim.steplog import FINISHED
from sim.wires import Wires
from tests.sim.test_handover import Wire, pools, run, workloads


def test_one_request_by_hand():
    """Reads 100 tokens in 2 s, in four layers, and moves them in 1 s: a quarter of it is left at 2 s, half a second
    is for messages. The decode side computes the last token again at once, in 1.01 s, and 3 more in 1.1 s each."""
    _, requests, moves = run([(0.0, 100, 4)], layers=4)
    assert moves["read_s"][0] == 2.0
    assert moves["end_s"][0] == pytest.approx(2.75)
    assert requests["first_token_s"][0] == pytest.approx(2.75 + 1.01)
    assert requests["finish_s"][0] == pytest.approx(3.76 + 3 * 1.1)


def test_a_slow_link_is_waited_for_from_the_first_layer_on():
    """10 s of transfer from 0.5 s on, when the first of four layers is there."""
    _, _, moves = run([(0.0, 100, 4)], wire=Wire(0.0, 0.0, 0.1), layers=4)
    assert moves["end_s"][0] == pytest.approx(0.5 + 10.0)


def test_the_step_waits_and_nothing_is_kept_after_it():
    """The second prompt, of which there is no room beside the first, is read when the first has been sent."""
    cluster, requests, _ = run([(0.0, 100, 4), (0.0, 100, 4)], of=pools(blocks=12), wire=Wire(0.0, 0.0, 0.1), layers=4)
    assert requests["scheduled_s"][1] == pytest.approx(10.5)
    steps = cluster.log.steps.table()
    assert steps["end_s"][0] == pytest.approx(10.5)


def test_only_the_last_chunk_is_sent_along_with_the_whole_prompt():
    """600 tokens in chunks of 512 and 88, 6.12 and 1.88 s: sent while the second is computed, 2 layers."""
    _, _, moves = run([(0.0, 600, 4)], wire=Wire(0.0, 0.0, 0.01), layers=2)
    first, second = 1 + 5.12, 1 + 0.88
    assert moves["read_s"][0] == pytest.approx(first + second)
    assert moves["end_s"][0] == pytest.approx(first + second / 2 + 6.0)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 3)), min_size=1, max_size=4),
    st.floats(0.0, 30.0), st.floats(0.0, 20.0), st.integers(1, 80),
)  # fmt: skip
def test_when_all_is_there_piece_by_piece(prompts, step_s, busy_s, layers):
    wires, wire = Wires(4, False, True), Wire(0.5, 0.003, 0.01)
    wires.send(Wire(0.0, 0.0, 1.0), int(busy_s), 0, 1, 0.0)
    clock = float(int(busy_s))
    pieces = [(wire, tokens, to) for tokens, to in prompts]
    done = wires.push(pieces, 0, 2.0, 2.0 + step_s, layers)
    for layer in range(1, layers + 1):
        clock = max(clock, 2.0 + step_s * layer / layers)
        clock += sum(wire.posting_s(n) + wire.occupancy_s(n) for _, n, _ in pieces) / layers
    assert done == pytest.approx(clock + 0.5)


@given(
    workloads(),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(15, 60), st.booleans(), st.integers(1, 8)),
    st.sampled_from(["decode", "prefill"]),
    st.sampled_from([Wire(), Wire(0.0, 0.0, 0.0), Wire(2.0, 0.03, 0.02)]),
    st.sampled_from([None, 5.0, 40.0]),
    st.booleans(),
    st.sampled_from([0, 30]),
)
@settings(max_examples=40, deadline=None)
def test_invariants(rows, shape, first_token, wire, patience, caching, local):
    prefill, decode, blocks, asynchronous, seqs = shape
    options = {"cache": lambda n, size: PrefixCache(n, size, lambda i: [(0, 2)], False)} if caching else {}
    patience_s = None if patience is None else np.full(len(rows), patience)
    of = pools(prefill, decode, blocks, asynchronous, seqs, **options)
    cluster, requests, moves = run(
        rows, of, wire, patience_s, first_token=first_token, layers=8, local_tokens=local, pull=False
    )
    assert list(requests["id"]) == list(range(len(rows)))
    done = np.isin(requests["outcome"], FINISHED)
    assert (requests["output_tokens"][done] == np.array([row[2] for row in rows])[done]).all()
    for front_end in cluster.front_ends:
        state = front_end.replica.state
        assert state.kv.free == state.kv.usable
        assert not any((state.running, state.waiting, state.pulling, front_end.in_flight))
    ended = dict(zip(moves["id"].astype(int).tolist(), moves["end_s"].tolist(), strict=True))
    assert len(ended) == len(moves["id"])
    for i in np.flatnonzero(done):
        if rows[i][1] > local and first_token == "decode":
            assert requests["first_token_s"][i] > ended[i]
    if patience is None:
        assert done.all()
        assert cluster.log.steps.table()["output_tokens"].sum() == requests["output_tokens"].sum()
