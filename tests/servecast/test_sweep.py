"""A sweep from the command to the rows: each run is the one that `run` does, nothing is lost, nothing is run twice."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result

import servecast
from servecast.cli import main
from servecast.errors import ServecastError
from servecast.sweeping import backends
from servecast.sweeping import sweep as module
from servecast.sweeping.runs import Base, Row, Task, figures
from servecast.sweeping.store import Store
from servecast.sweeping.sweep import Estimate, Progress, sweep
from tests.servecast.helpers import QUICKSTART

FEW = ("workload.num_requests=30",)
TWO = ["workload.arrivals.rate=4,8", "engine.max_num_seqs=16,64"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], int]]:
    """(point, seed) of every run that is done in this process."""
    done: list[tuple[dict[str, Any], int]] = []
    real = backends.run

    def run(base: Base, task: Task) -> Row:
        done.append((task.point, task.seed))
        return real(base, task)

    monkeypatch.setattr(backends, "run", run)
    return done


def small(vary: Any = TWO, folder: str = "out", **how: Any) -> Any:
    return sweep(QUICKSTART, vary, folder, **({"overrides": FEW, "workers": 1} | how))


def raw_rows(folder: str = "out") -> pl.DataFrame:
    return pl.concat(map(pl.read_parquet, sorted(Path(folder, "rows").glob("*.parquet"))), how="diagonal_relaxed")


def call(*args: object, **how: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in ("sweep", QUICKSTART, "--set", FEW[0], *args)], **how)


def test_each_row_is_what_run_says() -> None:
    rows = small(seeds=2).rows
    assert rows.height == 8
    for row in rows.iter_rows(named=True):
        changes = {key: row[key] for key in ("workload.arrivals.rate", "engine.max_num_seqs", "seed")}
        scenario = servecast.load_scenario(QUICKSTART, {"workload.num_requests": 30} | changes)
        summary = servecast.simulate(scenario).summary()
        expected = {k: v for k, v in summary.items() if v is None or isinstance(v, bool | int | float)}
        assert {key: row[key] for key in expected} == pytest.approx(expected)
        assert row["interactivity"] == pytest.approx(1000 / summary["p50_tpot_ms"])
        assert row["output_throughput_per_gpu"] == pytest.approx(summary["output_throughput"])
        assert row["status"] == "done"


def test_all_points_have_the_same_seeds_and_every_run_its_own_id() -> None:
    rows = small(seeds=3, overrides=(*FEW, "seed=5")).rows
    assert rows.group_by("point").agg(pl.col("seed").sort())["seed"].to_list() == [[5, 6, 7]] * 4
    assert rows["id"].n_unique() == rows["scenario"].n_unique() == 12


def test_columns_have_types() -> None:
    rows = small(
        {"engine.enable_prefix_caching": [True, False], "workload.arrivals.rate": [4, 8.5], "engine.max_num_seqs": [16],
         "engine.scheduling_policy": [None, "fcfs"]}
    ).rows  # fmt: skip
    types = [rows[key].dtype for key in ("engine.enable_prefix_caching", "workload.arrivals.rate")]
    assert types == [pl.Boolean, pl.Float64]
    assert rows["engine.max_num_seqs"].dtype == pl.Int64
    assert set(rows["engine.scheduling_policy"]) == {"null", "fcfs"}


def test_each_draw_is_that_of_run(counted: list[Any]) -> None:
    """Row by row; what is shown are means over the seeds."""
    found = small(TWO[:1], seeds=2, intervals=5)
    assert len(counted) == 2 * 2 * (1 + 5)
    for point, rate in enumerate((4, 8)):
        scenario = servecast.load_scenario(QUICKSTART, {"workload.num_requests": 30, "workload.arrivals.rate": rate})
        expected = servecast.predict_intervals(servecast.set_up(scenario), 5)
        rows = found.rows.filter((found.rows["point"] == point) & (found.rows["draw"] > 0))
        means = rows.group_by("draw").agg(pl.col("p50_ttft_ms").mean())["p50_ttft_ms"]
        rows = rows.filter(rows["seed"] == scenario.seed)
        assert rows["draw"].to_list() == [1, 2, 3, 4, 5]
        for key in ("p50_ttft_ms", "p99_tpot_ms", "output_throughput"):
            assert rows[key].to_list() == pytest.approx(expected.draws[key].tolist())
        assert found.points["p50_ttft_ms_under_error"][point].to_list() == pytest.approx(np.quantile(means, [0.1, 0.9]))
    assert found.points["runs"].to_list() == [2, 2]
    assert found.points["p50_ttft_ms"].to_list() == small(TWO[:1], "plain", seeds=2).points["p50_ttft_ms"].to_list()
    again = small(TWO[:1], "again", seeds=2, intervals=5, workers=2)
    assert again.rows.drop("wall_s").equals(found.rows.drop("wall_s"))


def test_draws_are_the_same_for_all_points() -> None:
    """Routers among one replica: whatever differs between the points would be another error."""
    rows = small(["cluster.router=random,round-robin,least-outstanding"], intervals=5).rows
    columns = ["mean_ttft_ms", "p99_tpot_ms", "output_throughput"]
    by_point = [rows.filter(rows["point"] == point).select("draw", *columns) for point in range(3)]
    assert by_point[0].equals(by_point[1])
    assert by_point[0].equals(by_point[2])
    assert by_point[0]["p99_tpot_ms"].n_unique() == 6


@pytest.mark.parametrize("how", [{"vary": ["engine.max_num_seqs=64"], "seeds": 2}, {"vary": ["seed=3,4"]}])
def test_draws_are_the_same_for_all_seeds(how: dict[str, Any]) -> None:
    """Of a recording, of which a seed changes nothing."""
    lines = ["arrival_s,prompt_tokens,output_tokens", *(f"{i / 8},{100 + i},{10 + i}" for i in range(20))]
    Path("t.csv").write_text("\n".join(lines), encoding="utf-8")
    rows = small(overrides=[f"workload={{trace: {Path('t.csv').absolute()}}}"], intervals=5, **how).rows
    one, other = (rows.filter(rows["seed"] == seed).select("draw", "p99_tpot_ms") for seed in set(rows["seed"]))
    assert one.equals(other)
    assert one["p99_tpot_ms"].n_unique() == 6


def test_gpus_of_replicas_that_come_and_go_count_while_they_exist() -> None:
    summary = {"total_output_tokens": 600, "gpu_seconds": 30.0, "p50_tpot_ms": None, "completed": 3, "submitted": 4}
    found = figures(summary | {"gpus": 9, "duration": 10.0, "classes": {}})
    assert found["output_throughput_per_gpu"] == 20
    assert found["interactivity"] is None
    assert found["unserved"] == 0.25
    assert "classes" not in found


def test_what_is_there_is_not_run_again(counted: list[Any]) -> None:
    first = small(seeds=2)
    assert len(counted) == 8
    again = small(seeds=2)
    assert len(counted) == 8
    assert again.rows.equals(first.rows)


def test_an_interrupted_sweep_goes_on_where_it_stopped(counted: list[Any]) -> None:
    def stop(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    partial = small(told=stop)
    assert (partial.complete, partial.rows.height, len(counted)) == (False, 3, 3)
    whole = small()
    assert (whole.complete, whole.rows.height, len(counted)) == (True, 4, 4)
    assert len({json.dumps(run) for run in counted}) == 4
    assert whole.rows.drop("wall_s").equals(small(folder="fresh").rows.drop("wall_s"))


def test_draws_go_on_where_they_stopped(counted: list[Any]) -> None:
    """The first of all points before the second of any."""

    def stop(progress: Progress) -> None:
        if progress.done == 4 + 5 * 4 + 2:
            raise KeyboardInterrupt

    partial = small(intervals=7, told=stop)
    assert (partial.complete, partial.rows.height, partial.total) == (False, 26, 32)
    assert partial.under_error.draws == 5
    whole = small(intervals=7)
    assert (whole.complete, whole.rows.height, len(counted)) == (True, 32, 32)
    assert whole.under_error.draws == 7
    assert whole.rows["id"].n_unique() == 32


def test_draws_are_added_to_a_folder_without_and_left_out_again(counted: list[Any]) -> None:
    """Also to one whose rows know nothing of draws."""
    plain = small()
    (file,) = Path("out/rows").glob("*.parquet")
    pl.read_parquet(file).drop("draw").write_parquet(file)
    facts = json.loads(Path("out/sweep.json").read_text(encoding="utf-8"))
    assert facts.pop("intervals") == 0
    Path("out/sweep.json").write_text(json.dumps(facts), encoding="utf-8")
    assert small(intervals=5).rows.height == 4 + 20
    assert len(counted) == 24
    assert small(intervals=6).rows.height == 4 + 24
    assert len(counted) == 28
    assert json.loads(Path("out/sweep.json").read_text(encoding="utf-8"))["intervals"] == 6
    assert small().rows.equals(plain.rows)
    assert len(counted) == 28
    assert raw_rows().height == 28


def test_rows_of_a_killed_sweep_that_are_there_twice_count_once() -> None:
    whole = small()
    (file,) = Path("out/rows").glob("*.parquet")
    (file.parent / "000009.parquet").write_bytes(file.read_bytes())
    (file.parent / "000010.part").write_bytes(b"half a file")
    assert small().rows.equals(whole.rows)


def test_runs_that_failed_are_tried_again(monkeypatch: pytest.MonkeyPatch, counted: list[Any]) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("servecast.run.simulate", broken)
        with pytest.raises(ServecastError) as error:
            small()
    assert error.value.problems == ("none of the 4 runs has a result", "MemoryError: no room")
    assert raw_rows()["status"].to_list() == ["failed"] * 4
    assert small().rows["status"].to_list() == ["done"] * 4
    assert raw_rows().height == 4
    assert len(counted) == 8


def test_points_that_make_no_scenario_are_left_out_and_counted(counted: list[Any]) -> None:
    found = small(["cluster.tp=1,3", "workload.arrivals.rate=4,8"])
    assert found.rows["status"].to_list() == ["done", "done", "invalid", "invalid"]
    ((error, count, _),) = found.errors("invalid")
    assert "tp" in error
    assert count == 2
    small(["cluster.tp=1,3", "workload.arrivals.rate=4,8"])
    assert len(counted) == 4  # they would be invalid again


def test_combinations_that_clash_are_left_out() -> None:
    found = small(["engine.preset=vllm-0.19,sglang-0.5", "engine.max_running_requests=16,64"])
    assert found.rows.group_by("status").len().sort("status").rows() == [("done", 2), ("invalid", 2)]


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        (["workload.arrivals.rat=1,2"], ["--vary workload.arrivals.rat: unknown parameter (did you mean 'rate'?)"]),
        (["engine.max_num_sqs=1"], ["--vary engine.max_num_sqs: unknown option (did you mean 'max_num_seqs'?)"]),
        (["enginee.max_num_seqs=1"], ["--vary enginee: unknown key (did you mean 'engine'?)"]),
        (["cluster.gpu=h100-sxm,h1000"], ["--vary cluster.gpu: 'h1000' is not in the catalogue"]),
        (["seed=1,-1"], ["--vary seed: -1 is not 0 or more"]),
        (["cluster.gpu=h1000", "slo.tfft=1s,2s"], ["--vary cluster.gpu: 'h1000'", "--vary slo.tfft: unknown key"]),
    ],
)
def test_mistakes_are_said_before_anything_runs(vary: list[str], said: list[str], counted: list[Any]) -> None:
    with pytest.raises(ServecastError) as error:
        small(vary)
    assert len(error.value.problems) == len(said)
    for problem, expected in zip(error.value.problems, said, strict=True):
        assert problem.startswith(expected)
    assert counted == []
    assert not Path("out").exists()


def test_a_mistake_in_the_file_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(QUICKSTART.read_text(encoding="utf-8").replace("model:", "modle:"), encoding="utf-8")
    with pytest.raises(ServecastError) as error:
        sweep(file, TWO, "out")
    assert re.search(r"s\.yaml:\d+: modle: unknown key", str(error.value))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"seeds": 0}, "--seeds: 0 is not"),
        ({"seeds": 2, "vary": ["seed=1,2"]}, "--seeds: the seed is varied too"),
        ({"intervals": 4}, "--intervals: 4 is not a number of draws, 5 to 1000"),
        ({"intervals": -1}, "--intervals: -1 is not a number of draws, 5 to 1000"),
        ({"intervals": 1001}, "--intervals: 1001 is not a number of draws, 5 to 1000"),
        ({"backend": "slurm"}, "--backend: unknown 'slurm'; local, dask, ray"),
    ],
)
def test_more_that_cannot_be(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ServecastError, match=said):
        small(**how)
    assert not Path("out").exists()


@pytest.mark.parametrize("value", ["4", "many", "1001", "7.5"])
def test_numbers_of_draws_that_cannot_be(value: str) -> None:
    out = call("--vary", "workload.arrivals.rate=1,2", "--intervals", value)
    assert out.exit_code == 2
    assert f"'{value}' is not a number of draws, 5 to 1000" in out.stderr


def test_points_that_are_drawn_twice_run_once(counted: list[Any]) -> None:
    found = small(["engine.max_num_seqs=16:17", "workload.arrivals.rate=4,8"], samples=8, seeds=2)
    assert found.points.height == 4
    assert (found.again, len(counted)) == (4, 8)


def test_a_seed_may_be_varied() -> None:
    found = small(["seed=3,4"])
    assert found.rows["seed"].to_list() == [3, 4]
    assert found.points.height == 2


def test_a_folder_of_another_sweep_is_refused_with_what_differs() -> None:
    small()
    for how, said in (
        ({"seeds": 2}, "seeds: 1 there, 2 here"),
        ({"vary": TWO[:1]}, "vary engine.max_num_seqs: 16, 64 there, none here"),
        ({"overrides": ("workload.num_requests=31",)}, "scenario workload num_requests: 30 there, 31 here"),
        ({"samples": 4}, "sample: none there, 4 points, latin-hypercube here"),
    ):
        with pytest.raises(ServecastError, match="holds another sweep") as error:
            small(**how)
        assert said in str(error.value)
    assert small().rows.height == 4


def test_comments_in_the_scenario_make_no_other_sweep(tmp_path: Path, counted: list[Any]) -> None:
    file = tmp_path / "s.yaml"
    for text in (QUICKSTART.read_text(encoding="utf-8"), "# more\n" + QUICKSTART.read_text(encoding="utf-8")):
        file.write_text(text, encoding="utf-8")
        sweep(file, TWO, "out", overrides=FEW, workers=1)
    assert len(counted) == 4


def test_files_that_changed_make_another_sweep() -> None:
    vary = {"workload": [{"trace": name} for name in ("a.csv", "b.csv")]}
    for rows in ("0,100,10\n1,100,10\n", "0,100,10\n1,100,11\n"):
        Path("a.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows, encoding="utf-8")
        if rows.endswith("10\n"):
            Path("b.csv").write_text(Path("a.csv").read_text(encoding="utf-8"), encoding="utf-8")
            assert small(vary, overrides=()).rows["total_output_tokens"].to_list() == [20, 20]
    with pytest.raises(ServecastError, match=r"files .*a\.csv: \w{16} there, \w{16} here"):
        small(vary, overrides=())


def test_a_folder_with_other_files_is_left_alone() -> None:
    Path("out").mkdir()
    Path("out/report.html").write_text("mine", encoding="utf-8")
    with pytest.raises(ServecastError, match=r"out: holds other files \(report.html\)"):
        small()
    assert Path("out/report.html").read_text(encoding="utf-8") == "mine"


def test_one_sweep_at_a_time_writes_into_a_folder() -> None:
    facts: dict[str, Any] = {"seeds": 1}
    with Store(Path("out"), facts, {}), pytest.raises(ServecastError, match="another sweep writes there"):
        Store(Path("out"), facts, {})
    with Store(Path("out"), facts, {}):
        pass


def test_a_full_disk_is_said_and_what_was_written_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servecast.sweeping.store.EVERY_S", 0.0)
    real, written = pl.DataFrame.write_parquet, []

    def full(frame: pl.DataFrame, file: Path, **how: Any) -> None:
        written.append(file)
        if len(written) == 3:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(frame, file, **how)

    with monkeypatch.context() as patch:
        patch.setattr(pl.DataFrame, "write_parquet", full)
        with pytest.raises(ServecastError, match="out: cannot write: No space left on device"):
            small()
    assert raw_rows().height == 2 + 1  # that which could not be written was written at the end
    assert list(Path("out/rows").glob("*.part")) == []
    assert small().rows.height == 4


def test_many_small_files_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servecast.sweeping.store.EVERY_S", 0.0)
    monkeypatch.setattr("servecast.sweeping.store.SMALL_FILES", 3)
    found = small(["workload.arrivals.rate=1:10:10"])
    assert len(list(Path("out/rows").glob("*.parquet"))) == 4
    assert found.rows["workload.arrivals.rate"].to_list() == list(range(1, 11))


def test_many_runs_are_asked_for_first(monkeypatch: pytest.MonkeyPatch, counted: list[Any]) -> None:
    asked: list[Estimate] = []

    def no(estimate: Estimate) -> bool:
        asked.append(estimate)
        return False

    with pytest.raises(ServecastError, match="not started"):
        small(["workload.arrivals.rate=1:200:200", "engine.max_num_seqs=1:100:100"], ask=no)
    (estimate,) = asked
    assert estimate.runs == 20_000 - 3
    assert 1e-3 < estimate.core_s / estimate.runs < 10
    assert estimate.disk_bytes > 10e6
    assert raw_rows().height == 3  # those that were timed
    monkeypatch.setattr(module, "MANY", 3)
    found = small(folder="other", ask=lambda estimate: True)
    assert found.rows["status"].to_list() == ["done"] * 4
    assert len(counted) == 1  # the others were timed


def test_draws_count_in_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Estimate] = []
    monkeypatch.setattr(module, "MANY", 20)
    small(intervals=5, ask=lambda estimate: not asked.append(estimate))  # type: ignore[func-returns-value]
    small(["workload.arrivals.rate=1,2,3"], "fewer", intervals=5, ask=lambda estimate: False)
    assert [estimate.runs for estimate in asked] == [4 + 4 * 5 - 3]
    assert asked[0].disk_bytes == pytest.approx(module.REPORT_BYTES + module.ROW_BYTES * 21)


def test_too_little_room_is_said_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 2)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1e6}))
    with pytest.raises(ServecastError, match="1 runs need about 6 MB, and 1 MB are free"):
        small()


def test_paths_are_those_of_where_the_command_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be somewhere else."""
    Path("t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n", encoding="utf-8")
    base = Base.of(QUICKSTART)
    point = {"workload": {"trace": "t.csv"}}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert base.scenario(point).path_of("workload.trace", "t.csv") == tmp_path / "t.csv"


def test_the_command_prints_the_answer_and_writes_a_report() -> None:
    out = call("--vary", "workload.arrivals.rate=1,2", "--vary", "engine.max_num_seqs=16,64", "--workers", 2)
    assert out.exit_code == 0, out.output
    for said in ("Sweep: chat on one H100", "4 configurations, 4 runs of 4", "Most output per GPU: rate ",
                 "Front of output per GPU and interactivity", "Report: runs/quickstart-sweep/report.html"):  # fmt: skip
        assert said in " ".join(out.stdout.split())
    names = sorted(path.name for path in Path("runs/quickstart-sweep").iterdir())
    assert names == ["lock", "report.html", "rows", "sweep.json"]


def test_json_is_pure() -> None:
    out = call("--vary", "workload.arrivals.rate=1,2", "--workers", 1, "--json", "--seeds", 2)
    found = json.loads(out.stdout)
    assert found["runs"] == {"wanted": 4, "done": 4, "invalid": 0, "failed": 0}
    assert [point["runs"] for point in found["points"]] == [2, 2]
    assert set(found["fronts"]["interactivity"]) <= {0, 1}


def test_draws_in_what_the_command_prints() -> None:
    args = ("--vary", "workload.arrivals.rate=1,2", "--workers", 1, "--intervals", 5)
    out = call(*args)
    assert out.exit_code == 0, out.output
    said = " ".join(out.stdout.split())
    assert "2 configurations, 12 runs of 12, each under 5 draws of the model's error" in said
    assert "Ranges hold the central 80% of 5 draws of the model's error" in said
    found = json.loads(call(*args, "--json").stdout)
    assert (found["intervals"], found["runs"]["done"]) == (5, 12)
    for point in found["points"]:
        low, high = point["p50_ttft_ms_under_error"]
        assert 0 < low < high
        assert 0 <= point["interactivity_front_under_error"] <= 5


def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call().exit_code == 2
    assert call("--vary", "nonsense=1").exit_code == 2
    assert call("--vary", "cluster.tp=3,5", "--workers", 1).exit_code == 2  # nothing can run
    assert call("--vary", "cluster.tp=1,3", "--workers", 1, "--out", "partly").exit_code == 0

    def interrupted(*_: object) -> Iterator[Row]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(backends.BACKENDS, "local", interrupted)
    out = call("--vary", "workload.arrivals.rate=1,2", "--out", "x")
    assert out.exit_code == 130
    assert "Ended early: 0 of 2 runs are kept; the same command goes on." in out.stderr


@pytest.mark.parametrize(("answer", "code", "said"), [("y\n", 0, ""), ("n\n", 2, "not started"), ("", 2, "--yes")])
def test_the_question(answer: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 1)
    out = call("--vary", "workload.arrivals.rate=1:4:4", "--workers", 1, input=answer)
    assert out.exit_code == code, out.output
    assert "1 runs: about " in out.stderr
    assert said in out.stderr
    assert call("--vary", "workload.arrivals.rate=1:4:4", "--workers", 1, "--out", "b", "--yes").exit_code == 0
