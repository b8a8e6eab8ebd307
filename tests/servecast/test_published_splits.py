"""What others measured of prefill and decode apart: directions, and sizes where a case states enough."""

from __future__ import annotations

from tests.servecast import published_splits as published


def test_a_split_steadies_tokens_costs_first_tokens_and_keeps_throughput() -> None:
    """D-03: ratios of 1P1D to two instances that do both."""
    ours = published.d03()
    for name, least, most in (
        ("output_throughput", 0.9, 1.1),
        ("mean_ttft_ms", 2.0, 4.5),
        ("mean_itl_ms", 0.55, 0.8),
        ("p99_itl_ms", 0.04, 0.12),
    ):
        i = published.KEYS.index(name)
        for found in (published.D03, ours):
            assert least < found["split"][i] / found["two"][i] < most, (name, found)
    two = dict(zip(published.KEYS, zip(published.D03["two"], ours["two"], strict=True), strict=True))
    for name in ("mean_e2el_ms", "mean_ttft_ms", "p99_ttft_ms"):
        measured, simulated = two[name]
        assert abs(simulated / measured - 1) < 0.15, name


def test_larger_blocks_shorten_the_hand_over_by_about_as_much_as_measured() -> None:
    """D-06: descriptors, not bytes."""
    ours = published.d06()
    measured = published.D06[16] - published.D06[64]
    assert 0.6 * measured < ours[16] - ours[64] < 1.5 * measured
    assert ours[16] < published.D06[16], "the host's other work is not in it"


def test_one_prefill_server_makes_the_first_token_wait_in_proportion_to_its_queue() -> None:
    """D-12: at 1 and 2 clients nobody waits; with prompts one at a time, five times as many beyond what the server can
    do wait several times as long. (Its server read 10 prompts a second, which is half as many as kernels allow.)"""
    few = published.d12(concurrency=(1, 2))
    for n, found in few.items():
        assert 0.4 < found["mean_ttft_ms"] / 1e3 / published.D12[n] < 1.1
    one = published.d12(one=True, concurrency=(50, 100, 250))
    ttft = {n: found["mean_ttft_ms"] / 1e3 for n, found in one.items()}
    assert ttft[250] > 5 * ttft[100] > 5 * ttft[50]
    assert ttft[250] < published.D12[250]
    assert one[250]["pools"]["prefill"]["busy_fraction"] > 0.9
    assert one[250]["handed_over"]["mean_queue_ms"] > 0.9 * one[250]["mean_ttft_ms"], "before prefill, not after it"


def test_the_best_layout_moves_from_decode_to_prefill_as_concurrency_grows() -> None:
    """D-17: few clients are answered fastest by many decode instances; the more there are, the more prefill instances
    give the most tokens a GPU, up to all four."""
    few = published.d17(16, ("1P4D", "1P1D", "4P1D"))
    assert min(few, key=lambda name: float(few[name]["mean_tpot_ms"])) == published.D17[16]
    some = published.most(published.d17(308, ("1P1D", "2P1D", "4P1D")))
    many = published.most(published.d17(2151, ("1P1D", "3P1D", "4P1D")))
    assert (some, many) == ("2P1D", published.D17[2151]), "one prefill instance more than theirs, and as many"


def test_over_capacity_first_tokens_wait_as_long_as_the_queue() -> None:
    """D-19: requests come three times, here one and a half times, as fast as they are served; it is said, and the last
    to come waits about as long as serving takes longer than arriving."""
    ours = published.d19()
    assert ours["saturated"]
    rate, mean, median, p99, tpot = published.D19
    for done, ttft, middle, last, each in (
        (200 / rate, mean, median, p99, tpot),
        (ours["duration"], *(ours[f"{s}_ttft_ms"] for s in ("mean", "median", "p99")), ours["mean_tpot_ms"]),
    ):
        assert middle > 0.8 * ttft
        assert abs((last + 127 * each) / 1e3 / (done - 200 / 10) - 1) < 0.3
