"""Published questions about schedulers: the direction of the answer, and its size where the hardware is profiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published_scheduling import (
    budget,
    cliff,
    interleaved,
    own_blocks,
    page,
    prompts_first,
    shortest_first,
    starved,
    variance,
    watermark,
)  # fmt: skip

DOC = Path(__file__).parents[1] / "docs" / "scheduler-cases.md"


def test_watermark() -> None:
    for row in watermark():
        assert row.ours[0] == pytest.approx(row.published[0], rel=0.2), row.what  # preemptions
        assert row.ours[1] == pytest.approx(row.published[1], rel=0.06), row.what  # tokens/s
        for theirs, ours in zip(row.published[2::2], row.ours[2::2], strict=True):  # TTFT p99, E2E p50
            assert theirs is None or ours == pytest.approx(theirs, rel=0.14), row.what
    itl = [row.ours[3] for row in watermark()]
    assert max(itl[1:]) < itl[0] / 2


def test_prompts_first() -> None:
    *first, mixed = prompts_first()
    assert first[0].ours == pytest.approx(first[0].published, rel=0.07)
    for row in first[1:]:
        assert row.ours[0] == pytest.approx(row.published[0], rel=0.15), row.what
    assert mixed.ours[0] < first[0].ours[0] / 2
    assert mixed.ours[1] > first[0].ours[1]
    assert mixed.ours[2] > 10 * first[0].ours[2]
    assert mixed.ours[3] == pytest.approx(first[0].ours[3], rel=0.01)


def test_one_request_too_many() -> None:
    rows = cliff()
    before, after = [row.ours[0] for row in rows[:2]], [row.ours[0] for row in rows[2:4]]
    assert [row.ours[1] > 0 for row in rows] == [False, False, True, True, False, False, False, False]
    assert min(after) > 3.5 * max(before)  # published: 3.7 to 4.1
    assert after[1] == pytest.approx(after[0], rel=0.1)
    assert max(row.ours[0] for row in rows[4:]) < 1.1 * max(before)


def test_prompts_between_decodes() -> None:
    between, first = interleaved()
    ratios = [b / f for b, f in zip(between.ours, first.ours, strict=True)]
    published = [b / f for b, f in zip(between.published, first.published, strict=True)]
    assert [r > 1 for r in ratios] == [r > 1 for r in published] == [False, True, True, True]
    assert ratios[3] > 4


def test_shortest_prompt_first() -> None:
    assert 0.6 < shortest_first()[0].ours[0] < 0.9


def test_own_blocks_are_no_hits() -> None:
    preemptions, hits = own_blocks()[0].ours
    assert preemptions > 100
    assert hits < 0.5


def test_chunks_do_not_help_offline() -> None:
    whole, large, small = (row.ours[0] for row in budget())
    assert whole < large < small


def test_one_long_prompt() -> None:
    one, eight = starved()
    assert one.ours[0] > 0.9 * one.ours[1]  # the short ones wait for the long one
    assert eight.ours[0] < 0.05 * eight.ours[1]


def test_varying_outputs_in_static_batches() -> None:
    equal, uniform, exponential = (row.ours[0] for row in variance())
    assert uniform < 0.6 * equal
    assert exponential < 0.35 * equal


def test_the_page_has_these_rows() -> None:
    """A change of the model that moves a figure rewrites the page: `python -m tests.published_scheduling`."""
    text = DOC.read_text(encoding="utf-8")
    for part in page():
        for line in part.splitlines():
            assert line in text
