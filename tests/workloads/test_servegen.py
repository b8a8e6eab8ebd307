"""ServeGen pools: reading them, what comes out of them against the recorded figures, and broken ones."""

from __future__ import annotations

import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servecast.errors import ServecastError
from tests.reference import reference
from workloads.clients import client_arrivals, generate_servegen
from workloads.generate import stream
from workloads.servegen import Client, Pool, distribution, read_servegen
from workloads.trace import Floats, Trace

LENGTHS = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{1: 0.25, 9: 0.75}"}}
ROW = "{start},{rate},{cv},Gamma,1.0,1.0"


def write(folder: Path, clients: dict[int, tuple[str, Any]]) -> Path:
    """A pool: client number -> (text of its trace.csv, its dataset or None)."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (rows, dataset) in clients.items():
        (folder / f"chunk-{number}-trace.csv").write_text(rows)
        if dataset is not None:
            text = dataset if isinstance(dataset, str) else json.dumps(dataset)
            (folder / f"chunk-{number}-dataset.json").write_text(text)
    return folder


def rows(*rates: float, cv: float = 1.0) -> str:
    return "\n".join(
        ROW.format(start=600 * i, rate=rate, cv=cv) if rate else f"{600 * i},0,0,,0,0" for i, rate in enumerate(rates)
    )


def test_a_folder_and_a_tar_file_are_the_same_pool(tmp_path: Path) -> None:
    folder = write(tmp_path / "data" / "pool", {10: (rows(1, 2), LENGTHS), 9: (rows(3, 0), None)})
    with tarfile.open(tmp_path / "pool.tar.gz", "w:gz") as archive:
        archive.add(folder, "data/pool")
    pools = [read_servegen(path) for path in (folder, tmp_path / "data", tmp_path / "pool.tar.gz")]
    for pool in pools:
        assert [client.name for client in pool.clients] == ["9", "10"]
        assert pool.rate.tolist() == [4, 2]
        assert (pool.starts.tolist(), pool.width_s) == ([0, 600], 600)
    traces = [generate_servegen(pool, 1) for pool in pools]
    assert traces[0].arrival_s.tobytes() == traces[1].arrival_s.tobytes() == traces[2].arrival_s.tobytes()
    assert traces[0].prompt_tokens.tobytes() == traces[2].prompt_tokens.tobytes()
    assert "1 of 2 clients have no lengths and are left out; 50.0% of the requests" in traces[0].notes[0]


def pool_of(*clients: Client, windows: int) -> Pool:
    return Pool("test", np.arange(windows) * 600.0, 600.0, clients)


def client(rate: Floats | list[float], cv: float, family: int, name: str = "0") -> Client:
    n = len(rate)
    full = np.full(n, 1.0)
    texts = {0.0: {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{1: 0.25, 9: 0.75}"}}
    return Client(name, np.array(rate, dtype=np.float64), full * cv, np.full(n, family), full, texts)


@pytest.mark.parametrize("family", [1, 2])
@pytest.mark.parametrize("cv", [0.3, 1.0, 4.0])
def test_rate_and_cv_of_a_steady_client(family: int, cv: float) -> None:
    trace = generate_servegen(pool_of(client([20.0] * 40, cv, family), windows=40), 1)
    gaps = np.diff(trace.arrival_s)
    assert len(trace) == pytest.approx(20 * 24_000, abs=5 * cv * np.sqrt(20 * 24_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("family", [1, 2])
@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("share", [0.05, 0.7, 3.0])
def test_clients_with_few_requests_a_window_lose_none(family: int, cv: float, share: float) -> None:
    """`share` expected requests a window, many clients: as many come as should, in every window alike."""
    one = client([share / 600] * 6, cv, family)
    pool = pool_of(one, windows=6)
    seconds = np.full(6, 600.0)
    windows = [client_arrivals(pool, one, one.rate, seconds, (0, 3600), stream(s, "x"))[0] for s in range(1500)]
    count = np.bincount(np.concatenate(windows), minlength=6)
    spread = 4 * max(1.0, cv) * np.sqrt(1500 * max(share, share**2))
    assert count == pytest.approx(1500 * share, abs=spread)


def test_a_pause_does_not_reset_the_process_and_rates_follow_the_windows() -> None:
    trace = generate_servegen(pool_of(client([5, 0, 50, 0.5], 1.0, 1), windows=4), 3)
    count = np.histogram(trace.arrival_s, 4, range=(0, 2400))[0]
    assert count[1] == 0
    assert count[[0, 2, 3]] / 600 == pytest.approx([5, 50, 0.5], rel=0.15)


def test_span_and_rate() -> None:
    pool = pool_of(client([5, 1, 10], 1.0, 1), client([5, 9, 0], 1.0, 2, "1"), windows=3)
    part = generate_servegen(pool, 1, span_s=(300, 1500), by_client=True)
    assert part.arrival_s[-1] < 1200
    assert np.histogram(part.arrival_s, [0, 300, 900, 1200])[0] / [300, 600, 300] == pytest.approx([10] * 3, rel=0.15)
    assert part.classes is not None
    assert part.classes[1] == ("client-0", "client-1")
    scaled = generate_servegen(pool, 1, rate=2.0)
    assert len(scaled) == pytest.approx(2 * 1800, rel=0.1)
    uneven = pool_of(client([5, 1, 30], 1.0, 1), windows=3)
    even = generate_servegen(uneven, 1, rate=6.0, even=True)
    assert np.histogram(even.arrival_s, 3, range=(0, 1800))[0] / 600 == pytest.approx([6] * 3, rel=0.15)


def test_lengths_are_independent_or_comonotone() -> None:
    texts = {
        0.0: {k: "{" + ", ".join(f"{v}: 0.01" for v in range(1, 101)) + "}" for k in ("input_tokens", "output_tokens")}
    }
    base = client([20.0] * 10, 1.0, 1)
    pool = pool_of(Client("0", base.rate, base.cv, base.family, base.shape, texts), windows=10)
    free, tied = generate_servegen(pool, 1), generate_servegen(pool, 1, comonotone=True)
    assert abs(np.corrcoef(free.prompt_tokens, free.output_tokens)[0, 1]) < 0.03
    assert (tied.prompt_tokens == tied.output_tokens).all()
    assert free.arrival_s.tobytes() == tied.arrival_s.tobytes()
    assert free.prompt_tokens.mean() == pytest.approx(50.5, rel=0.01)


def test_the_length_window_in_force_skips_idle_ones() -> None:
    def fields(tokens: int) -> dict[str, str]:
        return {"input_tokens": f"{{{tokens}: 1.0}}", "output_tokens": "{3: 1.0}"}

    texts = {
        0.0: {"input_tokens": "{}", "output_tokens": "{}"},
        600.0: fields(6),
        1200.0: fields(0),
        1800.0: fields(18),
    }
    texts[1200.0]["output_tokens"] = "{0: 1.0}"
    base = client([1.0] * 4, 1.0, 1)
    pool = pool_of(Client("0", base.rate, base.cv, base.family, base.shape, texts), windows=4)
    trace = generate_servegen(pool, 1)
    window = trace.arrival_s // 600
    for i, tokens in enumerate((6, 6, 6, 18)):
        assert set(trace.prompt_tokens[window == i].tolist()) == {tokens}
    early = int((window == 0).sum())
    assert any(f"{early} requests came before their client's first length window" in note for note in trace.notes)


def test_images_are_prompt_tokens_and_empty_requests_are_counted() -> None:
    texts = {
        0.0: {
            "text_tokens": "{5: 1.0}",
            "image_count": "{0: 0.5, 2: 0.5}",
            "image_tokens": "{100: 0.5, 200: 0.5}",
            "output_tokens": "{0: 0.1, 4: 0.9}",
        }
    }
    base = client([10.0] * 5, 1.0, 1)
    trace = generate_servegen(pool_of(Client("0", base.rate, base.cv, base.family, base.shape, texts), windows=5), 1)
    assert set(trace.prompt_tokens.tolist()) == {5, 205, 305, 405}
    assert trace.prompt_tokens.mean() == pytest.approx(155, rel=0.05)
    assert trace.dropped["0 tokens"] == pytest.approx(3000, abs=300)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{1: 2", "is not the text of a dict"),
        ("__import__('os').system('false')", "is not the text of a dict"),
        ("[1, 2]", "is not a dict of values"),
        ("{-1: 1}", "is not a dict of values"),
        ("{'1': 1}", "is not a dict of values"),
        ("{1: -1}", "is not a dict of values"),
        ("{1: 1e999}", "is not a dict of values"),
        ("{True: 1}", "is not a dict of values"),
        ("{9999999999: 1}", "is not a dict of values"),
        ("{1: " + "(" * 5000 + ")" * 5000 + "}", "is not the text of a dict"),
        ("{1: 1," + " " * 9_000_000 + "}", "characters; at most 8,388,608 are read"),
    ],
)
def test_texts_that_are_no_distribution(text: str, said: str) -> None:
    with pytest.raises(ServecastError, match="here: ") as error:
        distribution("here", text)
    assert said in str(error.value)


def test_distributions() -> None:
    assert distribution("x", "{}") is None
    assert distribution("x", "{4: 0.0}") is None
    found = distribution("x", "{4: 1, 2: 3, 9: 0.0}")
    assert found is not None
    assert found.at(np.array([0, 0.74, 0.76, 1 - 1e-12])).tolist() == [2, 2, 4, 4]
    assert found.mean == 2.5


BAD: list[tuple[dict[int, tuple[str, Any]], str]] = [
    ({}, "no chunk-N-trace.csv inside; this is not a ServeGen pool"),
    ({0: ("", LENGTHS)}, "chunk-0-trace.csv: no rows"),
    ({0: ("0,1,1,Gamma,1\n", LENGTHS)}, "row 1: 5 values; start, rate, CV, family, shape, scale expected"),
    ({0: ("0,1,1,Gama,1,1\n", LENGTHS)}, "row 1: unknown family 'Gama'; known: Gamma, Weibull, or empty"),
    ({0: (rows(1) + "\n600,x,1,Gamma,1,1", LENGTHS)}, "row 2: '600,x,1,Gamma,1,1' has a value that is no number"),
    ({0: ("0,nan,1,Gamma,1,1", LENGTHS)}, "row 1: '0,nan,1,Gamma,1,1' has a value"),
    ({0: ("0,-1,1,Gamma,1,1", LENGTHS)}, "row 1: '0,-1,1,Gamma,1,1' has a value"),
    ({0: ("0,1,1,Gamma,0,1", LENGTHS)}, "row 1: '0,1,1,Gamma,0,1' has a value"),
    ({0: ("0,1,1,,0,0", LENGTHS)}, "row 1: a rate of 1 without a family"),
    ({0: (rows(1, 2), LENGTHS), 1: (rows(1), LENGTHS)}, "chunk-1-trace.csv has other windows than chunk-0-trace.csv"),
    ({0: ("0,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n700,1,1,Gamma,1,1", LENGTHS)}, "are not equally long"),
    ({0: (rows(1), "{")}, "chunk-0-dataset.json: is not JSON"),
    ({0: (rows(1), [1])}, "is not window start -> field -> text"),
    ({0: (rows(1), {"a": {}})}, "is not window start -> field -> text"),
    ({0: (rows(1), {"0": {"input_tokens": {"1": 1}}})}, "is not window start -> field -> text"),
]


@pytest.mark.parametrize(("clients", "said"), BAD)
def test_broken_pools(tmp_path: Path, clients: dict[int, tuple[str, Any]], said: str) -> None:
    with pytest.raises(ServecastError) as error:
        read_servegen(write(tmp_path / "pool", clients))
    assert said in str(error.value)


def test_broken_paths(tmp_path: Path) -> None:
    write(tmp_path / "pool", {0: (rows(1), LENGTHS)})
    with pytest.raises(ServecastError, match="no such file or folder \\(did you mean 'pool'"):
        read_servegen(tmp_path / "pol")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ServecastError, match="cannot be read as a folder or tar file"):
        read_servegen(tmp_path / "text")
    write(tmp_path / "more" / "a", {0: (rows(1), LENGTHS)})
    write(tmp_path / "more" / "b", {0: (rows(1), LENGTHS)})
    with pytest.raises(ServecastError, match="client 0 is there twice"):
        read_servegen(tmp_path / "more")


def test_a_truncated_tar_file_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "pool", {i: (rows(*range(1, 60)), LENGTHS) for i in range(30)})
    with tarfile.open(tmp_path / "pool.tar.gz", "w:gz") as archive:
        archive.add(folder, "pool")
    whole = (tmp_path / "pool.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ServecastError, match="cannot be read"):
        read_servegen(tmp_path / "cut.tar.gz")


def test_bad_texts_and_impossible_requests_are_said_by_client_and_window(tmp_path: Path) -> None:
    bad = {"0": {"input_tokens": "{1: oops}", "output_tokens": "{2"}}
    pool = read_servegen(write(tmp_path / "a", {0: (rows(1), bad), 1: (rows(1), bad), 2: (rows(1), LENGTHS)}))
    with pytest.raises(ServecastError) as error:
        generate_servegen(pool, 1)
    assert len(error.value.problems) == 4
    assert "client 0, window 0, input_tokens: '{1: oops}'" in error.value.problems[0]
    only = {"0": {"input_tokens": "{1: 1.0}"}}
    nobody = read_servegen(write(tmp_path / "b", {0: (rows(1), only)}))
    with pytest.raises(ServecastError, match="no client with lengths sends anything"):
        generate_servegen(nobody, 1)


def test_impossible_options() -> None:
    pool = pool_of(client([1.0, 0.0], 1.0, 1), windows=2)
    for span in ((0, 0), (-1, 5), (0, 1201), (900, 300)):
        with pytest.raises(ServecastError, match="is empty or not within that of test"):
            generate_servegen(pool, 1, span_s=span)
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ServecastError, match="rate: "):
            generate_servegen(pool, 1, rate=rate)
    with pytest.raises(ServecastError, match="nobody sends anything in 1 windows"):
        generate_servegen(pool, 1, even=True)
    with pytest.raises(ServecastError, match="no client with lengths sends anything"):
        generate_servegen(pool, 1, span_s=(600, 1200))
    with pytest.raises(ServecastError, match="at most 20,000,000 are made"):
        generate_servegen(pool, 1, rate=1e6)
    with pytest.raises(ServecastError, match="no request in the span"):
        generate_servegen(pool, 1, rate=1e-9)


# Against FORMATS.md's table: rates, shares, burstiness and lengths of whole recorded pools.


@cache
def recorded(name: str) -> Pool:
    return read_servegen(reference("traces", "servegen", name))


@cache
def six_hours() -> Trace:
    """deepseek-r1 from 06:00 to 12:00 of its day, all lengths of which are in one window."""
    return generate_servegen(recorded("deepseek-r1.tar.gz"), 1, span_s=(21_600, 43_200), by_client=True)


def weighted(values: Floats, weights: Floats, q: list[float]) -> Floats:
    order = np.argsort(values)
    return np.interp(q, np.cumsum(weights[order]) / weights.sum(), values[order])


def test_recorded_pools_have_the_stated_rates_and_shares() -> None:
    pool = recorded("deepseek-r1.tar.gz")
    assert len(pool.clients) == 73
    assert pool.rate.mean() == pytest.approx(16.0, abs=0.05)
    assert pool.rate.max() == pytest.approx(42.5, abs=0.05)
    share = np.sort([client.rate.sum() for client in pool.clients])[::-1] / pool.rate.sum()
    assert share[0] == pytest.approx(0.29, abs=0.005)
    assert share[:10].sum() == pytest.approx(0.68, abs=0.005)
    images = recorded("mm-image.tar.gz")
    assert (len(images.clients), round(images.rate.mean(), 1), round(images.rate.max(), 1)) == (35, 9.5, 13.3)


def test_generated_windows_have_the_recorded_rates_and_shares() -> None:
    pool, trace = recorded("deepseek-r1.tar.gz"), six_hours()
    expected = pool.rate[36:72] * 600
    count = np.histogram(trace.arrival_s, 36, range=(0, 21_600))[0]
    assert count.sum() == pytest.approx(expected.sum(), rel=0.01)
    # A client's count spreads by its CV about the recorded rate; a long gap may reach over from the window before.
    spread = np.sqrt(
        sum(c.rate[36:72] * 600 * np.maximum(np.maximum(c.cv[35:71], c.cv[36:72]), 1) ** 2 for c in pool.clients)
    )
    assert (np.abs(count - expected) < 4 * spread).all()
    assert trace.classes is not None
    mine = np.bincount(trace.classes[0], minlength=73) / len(trace)
    theirs = np.array([c.rate[36:72].sum() for c in pool.clients]) / pool.rate[36:72].sum()
    assert mine == pytest.approx(theirs, abs=0.01)


def test_generated_gaps_have_the_recorded_burstiness() -> None:
    pool, trace = recorded("deepseek-r1.tar.gz"), six_hours()
    assert trace.classes is not None
    found, said, weight = [], [], []
    for i, one in enumerate(pool.clients):
        times = trace.arrival_s[trace.classes[0] == i]
        for w in range(36):
            gaps = np.diff(times[(times >= 600 * w) & (times < 600 * (w + 1))])
            if gaps.size > 1:
                found.append(gaps.std() / gaps.mean())
                said.append(one.cv[36 + w])
                weight.append(gaps.size)
    mine, theirs = (weighted(np.array(x), np.array(weight, dtype=float), [0.5, 0.9]) for x in (found, said))
    assert mine[0] == pytest.approx(theirs[0], rel=0.1)
    assert 0.6 * theirs[1] < mine[1] < 1.1 * theirs[1]  # what one window shows of a heavy tail is too little


def test_generated_lengths_have_the_recorded_quantiles() -> None:
    """Of whole days (1.38M requests) they are 208 and 23,452 in, 791 and 12,600 out; the table says 208 and 23,423, 792
    and 12,607. Six hours are compared with the mixture of that window's distributions.
    """
    pool, trace = recorded("deepseek-r1.tar.gz"), six_hours()
    assert trace.classes is not None
    count = np.bincount(trace.classes[0], minlength=73)
    for field, lengths in (("input_tokens", trace.prompt_tokens), ("output_tokens", trace.output_tokens)):
        values, weights = [], []
        for one, requests in zip(pool.clients, count, strict=True):
            of = distribution("x", one.lengths[21_600.0][field])
            if of is not None:
                values.append(of.values)
                weights.append(np.diff(of.cumulative, prepend=0) * requests)
        expected = weighted(np.concatenate(values), np.concatenate(weights), [0.5, 0.9, 0.99])
        assert np.percentile(lengths, [50, 90, 99]) == pytest.approx(expected, rel=0.03)
    assert any("of the output tokens are reasoning" in note for note in trace.notes)


def test_slow_clients_are_not_silenced() -> None:
    """At 0.1 requests/s in all, upstream's sampler silences the clients with at most one expected request a window."""
    pool = recorded("m-large.clients0-31.tar.gz")
    factor = 0.1 / pool.rate.mean()
    span, seconds = (0.0, float(pool.starts[-1] + 600)), np.full(pool.starts.size, 600.0)
    came = expected = 0.0
    for one in pool.clients:
        slow = (one.rate > 0) & (one.rate * factor * 600 <= 1)
        expected += float((one.rate * factor * 600)[slow].sum())
        window, _ = client_arrivals(pool, one, one.rate * factor, seconds, span, stream(1, one.name))
        came += slow[window].sum()
    assert expected > 1900
    assert came == pytest.approx(expected, rel=0.05)
