"""Measuring: what is timed computes what it says, and what happens is written down. Without torch most of it skips."""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from calibrate.layout import Parallelism
from calibrate.measure import measure
from calibrate.measure import session as sessions
from calibrate.measure.attention import (
    Batch,
    _flash_attn,
    _flashinfer,
    _vllm,
    naive_attention,
    torch_attention,
)
from calibrate.measure.collectives import operation
from calibrate.measure.experts import _grouped, _loop, moe, routing
from calibrate.measure.grids import CPU, GPU, Grid, Round
from calibrate.measure.kit import ROTATE, Kit, NoRoomError, Pool, Prepared
from calibrate.measure.layers import functions
from calibrate.measure.machine import open_machine
from calibrate.measure.points import Point, rounds_of
from calibrate.measure.record import Record
from calibrate.measure.session import Session
from calibrate.measure.stack import Stack
from calibrate.measure.system import gpu_id, nvidia_smi, processor_seconds
from calibrate.measure.timing import LEAST, time_cpu, time_cuda
from calibrate.measurements import FAMILIES, VALUES, checked, load_measurements, measured_rates
from calibrate.model import ModelSpec
from calibrate.models import load_model
from calibrate.operators import step_work
from servecast.errors import ServecastError

TINY = ModelSpec(
    name="tiny",
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=128,
    max_position=512,
    dtype="fp32",
    tied_embeddings=True,
    qkv_bias=True,
    qk_norm="head",
)
GRID = Grid(
    rounds=(
        Round(
            tokens=(1, 9),
            samples=(2,),
            prefill=((2, 8, 0), (1, 4, 12)),
            decode=((3, 20),),
            skew=((4, 8, 1, 40),),
            moe=(5,),
            steps=((1, 8, 4, 0, 0), (0, 0, 0, 3, 10), (2, 8, 0, 2, 10)),
        ),
        Round(tps=(2,), tokens=(3,), samples=(1,)),
    ),
    square=(64,),
    copies=(2**16,),
    host_copies=(),
    experts=((32, 16, 4, 2),),
)


@pytest.fixture(scope="session")
def torch() -> Any:
    found = pytest.importorskip("torch", reason='torch is not installed: pip install "servecast[calibrate]"')
    found.set_num_threads(1)  # threads that wait for each other on a busy machine take milliseconds
    return found


@pytest.fixture(scope="session")
def kit(torch: Any) -> Kit:
    torch.manual_seed(0)
    return Kit(torch, torch.device("cpu"), "fp32", "fp32", 2**22, 2**16)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A Hugging Face folder of the tiny model."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 512}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(sizes | kind))
    return str(folder)


def close(one: Any, other: Any) -> None:
    """torch's own assertion takes seconds to import."""
    assert one.shape == other.shape
    assert float((one - other).abs().max()) <= 1e-6 + 1e-4 * float(other.abs().max())


def every(grid: Grid, models: list[ModelSpec], device: str = "cpu", dtype: str = "fp32", gpus: int = 1) -> list[Point]:
    return [point for points in rounds_of(grid, models, device, dtype, gpus) for point in points]


# -- which points ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "device", "dtype"), [(GPU, "cuda", "bf16"), (GPU, "cuda", "fp8"), (CPU, "cpu", "fp32")]
)
def test_points_are_rows_of_their_families(grid: Grid, device: str, dtype: str) -> None:
    points = every(grid, [load_model("qwen3-0.6b"), load_model("llama-3.1-70b")], device, dtype, gpus=8)
    assert len({(p.family, p.values) for p in points}) == len(points)
    expected = {"gemm", "prefill_attention", "decode_attention", "decode_skew", "moe", "elementwise", "host"}
    expected |= {"step", "mode", "rate"} | ({"collective"} if device == "cuda" else set())
    assert {p.family for p in points} == expected
    for family in expected:
        rows = [(*p.values, 1e-3, 0.0, "x") for p in points if p.family == family]
        table = pl.DataFrame(rows, schema=[*FAMILIES[family], *VALUES], orient="row", infer_schema_length=None)
        assert checked(family, table, family) == []


def test_points_hold_the_shapes_of_models_and_tile_edges() -> None:
    model = load_model("llama-3.1-8b")
    points = every(GPU, [model], "cuda", "bf16")
    gemms = {p.values[1:] for p in points if p.family == "gemm"}
    for m in (255, 256, 257, 1023, 1025, 16384):
        assert (m, 6144, 4096) in gemms  # qkv
        assert (m, 2 * 14336 // 8, 4096) in gemms  # gate_up of tp 8
    assert (128, 128256 // 4, 4096) in gemms  # lm_head of tp 4: rows are samples
    assert (2048, 128256, 4096) not in gemms
    assert {p.sizes()["kv_heads"] for p in points if p.family == "decode_attention"} == {1, 2, 4, 8}
    norms = {p.sizes()["elements"] for p in points if p.family == "elementwise" and p.values[0] == "norms"}
    assert norms == {4 * 4096}


def test_points_know_their_work() -> None:
    points = every(CPU, [load_model("llama-3.2-1b")])
    model = replace(load_model("llama-3.2-1b"), dtype="fp32")
    gemm = next(p for p in points if p.family == "gemm" and p.values == ("fp32", 64, 8192 * 2, 2048))
    assert gemm.flops == 2 * 64 * 16384 * 2048
    assert gemm.moved == 4 * (64 * 16384 + 64 * 2048 + 16384 * 2048)
    mixed = next(p for p in points if p.family == "step" and p.values[2:] == (1, 64, 256, 8, 2048))
    work = step_work(model, Parallelism(tp=1), [(64, 256)], 8, 2048)
    assert (mixed.flops, mixed.moved) == (work.flops, work.hbm_bytes)


def test_a_cut_round_has_touched_everything() -> None:
    """Wherever the time runs out in the coarse round, the families and the sizes of each have had their share."""
    _, coarse, *_ = rounds_of(CPU, [load_model("qwen2.5-0.5b"), load_model("llama-3.2-1b")], "cpu", "fp32")
    half = coarse[: len(coarse) // 2]
    assert {p.family for p in half} == {p.family for p in coarse}
    for column in ("m", "n"):
        sizes = {p.sizes()[column] for p in coarse if p.family == "gemm"}
        assert len({p.sizes()[column] for p in half if p.family == "gemm"}) >= 0.7 * len(sizes)


# -- the stopwatch -----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that the calls set: each takes the next of `costs` seconds."""

    def __init__(self, costs: list[float]) -> None:
        self.now, self.costs, self.calls = 0.0, costs, 0

    def __call__(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += self.costs[self.calls % len(self.costs)]
        self.calls += 1


def test_the_median_and_the_spread() -> None:
    clock = Clock([1.0, 1.0, 10.0, 2.0, 3.0, 1.0, 4.0, 9.0])  # the first two warm up
    timed = time_cpu([clock.call], 21.5, clock, clock)
    assert timed.samples == 5  # 10, 2, 3, 1 and 4 s: the time is up
    assert timed.seconds == 3.0
    assert timed.spread == pytest.approx((7.6 - 1.4) / 3.0)


def test_sure_medians_stop_early_and_slow_calls_are_repeated_all_the_same() -> None:
    steady = Clock([1e-3])
    assert time_cpu([steady.call], 100.0, steady, steady).samples < 10
    slow = Clock([50.0])
    assert time_cpu([slow.call], 0.1, slow, slow).samples == LEAST


def test_short_calls_are_timed_in_rows_and_take_turns() -> None:
    clock, seen = Clock([1e-6]), [0, 0, 0]

    def call(number: int) -> None:
        seen[number] += 1
        clock.call()

    timed = time_cpu([lambda n=n: call(n) for n in range(3)], 0.01, clock, clock)
    assert timed.seconds == pytest.approx(1e-6)
    assert max(seen) - min(seen) <= 1
    assert sum(seen) / timed.samples >= 100


class FakeCuda:
    """torch.cuda as far as the stopwatch uses it: a graph holds calls, each taking `cost` seconds on the device."""

    def __init__(self, cost: float, capturable: bool = True) -> None:
        self.now, self.cost, self.capturable = 0.0, cost, capturable
        self.graphs: list[list[int]] = []
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        class CUDAGraph:
            held = 0

            def replay(self) -> None:
                fake.now += self.held * fake.cost

        class graph:  # noqa: N801
            def __init__(self, into: CUDAGraph) -> None:
                self.into = into

            def __enter__(self) -> None:
                self.before, fake.capturing = fake.calls, True

            def __exit__(self, *error: object) -> None:
                self.into.held, fake.capturing = fake.calls - self.before, False

        class Stream:
            def wait_stream(self, other: object) -> None: ...

        self.Event, self.CUDAGraph, self.graph, self.Stream = Event, CUDAGraph, graph, Stream
        self.calls, self.capturing = 0, False

    def current_stream(self) -> Any:
        return self.Stream()

    def stream(self, side: object) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def synchronize(self) -> None: ...

    def call(self) -> None:
        self.calls += 1
        if self.capturing:
            if not self.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
        else:
            self.now += self.cost


@pytest.mark.parametrize(
    ("capturable", "graph", "how"), [(True, True, "graph"), (False, True, "launched"), (True, False, "launched")]
)
def test_cuda_times_are_of_one_call(capturable: bool, graph: bool, how: str) -> None:
    cuda = FakeCuda(20e-6, capturable)
    fake = types.SimpleNamespace(cuda=cuda, OutOfMemoryError=MemoryError)
    timed = time_cuda(fake, [cuda.call] * 70, 0.01, graph)
    assert timed.seconds == pytest.approx(20e-6)
    assert timed.how == how


# -- what is timed -----------------------------------------------------------------------------------------------------


def test_rotation_reads_more_than_the_cache_holds(torch: Any) -> None:
    pool = Pool(torch.arange(100_000), 5_000)
    sets = pool.sets((10, 30), (7,))
    assert [t.shape for t in sets[0]] == [(10, 30), (7,)]
    assert sum(t.numel() for one in sets for t in one) > ROTATE * 5_000 * 0.5
    starts = [int(t.flatten()[0]) for one in sets for t in one]
    assert all(a < b for a, b in pairwise(starts))  # none overlaps the one before
    assert starts[1] >= 300
    assert len(pool.sets((60_000,))) == 1
    with pytest.raises(NoRoomError):
        pool.sets((60_000,), (60_000,))
    assert int(pool.following(70_000)[0]) == 0
    assert int(pool.following(40_000)[0]) == 0  # the end is too near: from the start again
    assert int(pool.following(10)[0]) == 40_064  # aligned


BATCHES = [
    Batch(((2, 0),), 7, 4, 2, 16),
    Batch(((1, 21),), 5, 4, 4, 16),
    Batch(((3, 33),), 1, 8, 2, 16),
    Batch(((3, 4), (2, 300)), 1, 4, 1, 16),
    Batch(((1, 3), (2, 40)), 6, 4, 2, 16),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_attention_attends(kit: Kit, batch: Batch) -> None:
    """Against a loop over tokens and heads."""
    chosen = torch_attention(kit, batch)
    query, cache = kit.random(len(batch.lengths) * batch.q, batch.heads, batch.dim) * 20, chosen.caches[0]
    out = chosen.run(query, cache)
    token = 0
    for group, (sequences, context) in enumerate(batch.groups):
        for sequence in range(sequences):
            keys, values = cache[2 * group][sequence], cache[2 * group + 1][sequence]
            assert len(keys) == context + batch.q
            for new in range(batch.q):
                seen = context + new + 1
                for head in range(batch.heads):
                    shared = head // (batch.heads // batch.kv_heads)
                    scores = keys[:seen, shared] @ query[token, head] / batch.dim**0.5
                    expected = scores.softmax(0) @ values[:seen, shared]
                    close(out[token, head], expected)
                token += 1
    close(naive_attention(kit, batch).run(query, cache), out)


def unpaged(query: Any, pages: tuple[Any, Any], rows: list[list[int]], lengths: list[int], q: int) -> Any:
    """What a paged kernel has to give: [tokens, heads, dim]."""
    out = []
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        keys, values = (
            kept[row].flatten(0, 1)[:length].repeat_interleave(query.shape[1] // kept.shape[2], 1) for kept in pages
        )
        mine = query[i * q : (i + 1) * q]
        scores = (mine.transpose(0, 1) @ keys.permute(1, 2, 0)) / query.shape[2] ** 0.5
        hidden = mine.new_ones(q, length).tril(length - q) == 0
        out.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values.transpose(0, 1)).transpose(0, 1))
    return mine.new_tensor([]) if not out else __import__("torch").cat(out)


class Wrapper:
    """FlashInfer's batch wrappers, as documented: CSR page tables."""

    def __init__(self, space: Any, layout: str, use_tensor_cores: bool = False) -> None:
        assert layout == "NHD"

    def run(self, query: Any, cache: tuple[Any, Any]) -> Any:
        starts, pages, last, (heads, kv_heads, dim, page) = self.planned
        assert query.shape[1:] == (heads, dim)
        assert cache[0].shape[1:] == (page, kv_heads, dim)
        rows = [pages[a:b].tolist() for a, b in pairwise(starts.tolist())]
        lengths = [(len(row) - 1) * page + int(end) for row, end in zip(rows, last, strict=True)]
        return unpaged(query, cache, rows, lengths, len(query) // len(rows))


class Decode(Wrapper):
    def plan(self, starts: Any, pages: Any, last: Any, *shape: int, q_data_type: Any, kv_data_type: Any) -> None:
        self.planned = starts, pages, last, shape


class Prefill(Wrapper):
    def plan(
        self,
        queries: Any,
        starts: Any,
        pages: Any,
        last: Any,
        *shape: int,
        causal: bool,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        assert causal
        assert len({b - a for a, b in pairwise(queries.tolist())}) == 1
        self.planned = starts, pages, last, shape


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any, causal: bool
) -> Any:
    assert causal
    assert k_cache.shape[1] % 256 == 0
    out = unpaged(q.flatten(0, 1), (k_cache, v_cache), block_table.tolist(), cache_seqlens.tolist(), q.shape[1])
    return out.view(q.shape)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    seqused_k: Any,
    causal: bool,
    block_table: Any,
    fa_version: int,
) -> Any:
    assert causal
    assert fa_version == 2
    assert cu_seqlens_q.diff().tolist() == [max_seqlen_q] * len(seqused_k)
    assert max_seqlen_k == int(seqused_k.max())
    return unpaged(q, (k, v), block_table.tolist(), seqused_k.tolist(), max_seqlen_q)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    """Stand-ins with the documented signatures of kernel libraries that need a GPU."""

    def module(name: str, **members: Any) -> None:
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(__version__="9.9", **members))

    module("flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    module("flashinfer", BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill)
    module("vllm")
    module("vllm.vllm_flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    module("vllm.vllm_flash_attn.flash_attn_interface", is_fa_version_supported=lambda version: version == 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("calibrate.measure.attention.WORKSPACE", 16)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("libraries")
def test_paged_libraries_get_the_pages_of_every_sequence(kit: Kit, batch: Batch) -> None:
    query = kit.random(len(batch.lengths) * batch.q, batch.heads, batch.dim) * 20
    for make, page in ((_flash_attn, 256), (_vllm, 16), (_flashinfer, 16)):
        chosen = make(kit, batch)
        keys, values = cache = chosen.caches[0]
        starts = [0, *accumulate(-(-length // page) for length in batch.lengths)]
        rows = [list(range(a, b)) for a, b in pairwise(starts)]
        assert keys.shape == values.shape == (starts[-1], page, batch.kv_heads, batch.dim)
        expected = unpaged(query, (keys, values), rows, batch.lengths, batch.q)
        close(chosen.run(query, cache), expected)


def test_experts_are_routed_as_the_skew_says(torch: Any) -> None:
    def counts(skew: str) -> list[int]:
        chosen = routing(torch, 96, 16, 4, skew)
        assert all(len(set(row)) == 4 for row in chosen.tolist())
        return chosen.flatten().bincount(minlength=16).tolist()

    assert counts("balanced") == [24] * 16
    assert counts("touched=4") == [96] * 4 + [0] * 12
    assert sum(counts("uniform")) == 384
    assert 24 < max(counts("uniform")) < 60


@pytest.mark.parametrize("skew", ["balanced", "uniform", "touched=2"])
def test_layers_of_experts_agree(kit: Kit, skew: str) -> None:
    """The loop and the grouped kernel against each token's experts one by one."""
    torch, functional = kit.torch, kit.torch.nn.functional
    sizes = {"tokens": 6, "hidden": 32, "inter": 32, "experts": 8, "topk": 2, "tp": 2, "ep": 1, "skew": skew}
    loop = _loop(kit, sizes).calls[0]
    x, (up, down) = loop.func.__closure__ and _activations(loop), loop.args
    chosen = routing(torch, 6, 8, 2, skew)
    expected = torch.zeros_like(x)
    for token, experts in enumerate(chosen.tolist()):
        for expert in experts:
            gate, linear = functional.linear(x[token], up[expert]).chunk(2)
            expected[token] += functional.linear(functional.silu(gate) * linear, down[expert]) / 2
    close(loop(), expected)
    grouped = _grouped(kit, sizes).calls[0]
    mine = _activations(grouped)
    mine.copy_(x)
    close(grouped(), expected)
    assert moe(kit, sizes).kernel.endswith("loop of experts")  # on a CPU


def _activations(call: Any) -> Any:
    """The tensor that a layer's call closes over."""
    free = dict(zip(call.func.__code__.co_freevars, call.func.__closure__, strict=True))
    return free["x"].cell_contents


def test_a_layer_norms_rotates_and_activates(kit: Kit) -> None:
    torch, run = kit.torch, functions(kit)
    x, residual, weight = kit.random(3, 8), kit.random(3, 8), kit.random(8)
    normed, total = run.add_norm(x, residual, weight)
    close(total, x + residual)
    close(normed, total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight)
    close(run.activate(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("batch", [(2, 8, 0, 0, 0), (0, 0, 0, 3, 30), (1, 4, 12, 2, 20)])
def test_a_step_yields_a_token_for_every_sequence(kit: Kit, batch: tuple[int, int, int, int, int]) -> None:
    before = kit.pool().data.clone()
    stack = Stack(kit, TINY, batch)
    tokens = stack.step()
    assert tokens.shape == (batch[0] + batch[3],)
    assert int(tokens.max()) < 128
    assert len(stack.layers) == 2
    layer = Stack(kit, TINY, batch, layers=1).step()
    assert layer.shape == (batch[0] * batch[1] + batch[3], 64)
    assert bool(layer.isfinite().all())
    assert bool((kit.pool().data == before).all())  # what others read is not written to


def test_collectives_move_what_they_say(torch: Any, tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            operation(torch, dist, torch.device("cpu"), 1, op, 4096)()
    finally:
        dist.destroy_process_group()


# -- a session ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small looks and small memory, so that a session takes a moment."""
    monkeypatch.setattr(sessions, "POINT_S", (0.001, 0.001))
    monkeypatch.setattr("calibrate.measure.machine.UNKNOWN_CACHE", 2**16)
    monkeypatch.setattr("calibrate.measure.machine.Cpu.cache_bytes", 2**18)
    monkeypatch.setattr("calibrate.measure.machine.time.sleep", lambda seconds: None)


@pytest.mark.usefixtures("small", "torch")
def test_a_session_measures_saves_and_goes_on(tmp_path: Path, config: str) -> None:
    out, told = tmp_path / "out", []
    found = measure("cpu", out, 60, models=(config,), grid=GRID, progress=lambda *what: told.append(what))
    assert load_measurements(out).tables.keys() == found.tables.keys()
    for family, table in found.tables.items():
        assert load_measurements(out).tables[family].equals(table)
        assert set(table["kernel"].str.contains("torch")) == {True}
        assert table["spread"].null_count() == 0
    points = every(GRID, [replace(load_model(config), dtype="fp32")])
    assert sum(len(table) for table in found.tables.values()) == len(points)
    assert {what[0] for what in told} == set(found.tables)
    assert [what[1] for what in told] == list(range(1, len(points) + 1))
    assert found.device.gpu == "cpu"
    assert "torch" in found.device.software
    flops, bandwidth = measured_rates(found)
    assert flops.keys() == {"fp32"}
    assert 1e6 < min(flops["fp32"], bandwidth) < 1e14

    (out / "step.csv").unlink()  # what is missing is measured, and what is there stays
    again = measure("cpu", out, 60, models=(config,), grid=GRID)
    assert len(again.tables["step"]) == len(found.tables["step"])
    for family, table in found.tables.items():
        assert family == "step" or again.tables[family].equals(table)


@pytest.mark.usefixtures("small", "torch")
def test_a_killed_session_leaves_what_it_had(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SAVE_S", 0.0)

    def stop(family: str, done: int, of: int, left: float) -> None:
        if done == 12:
            raise KeyboardInterrupt

    def die(*_: object) -> None:
        raise SystemExit  # in the last save, too: as a kill leaves it

    with pytest.raises(KeyboardInterrupt):
        measure("cpu", tmp_path / "out", 60, models=(config,), grid=GRID, progress=stop)
    rows = sum(len(table) for table in load_measurements(tmp_path / "out").tables.values())
    assert rows == 12
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", die)
        with pytest.raises(SystemExit):
            measure("cpu", tmp_path / "out", 60, models=(config,), grid=GRID)
    assert sum(len(table) for table in load_measurements(tmp_path / "out").tables.values()) == 12
    measure("cpu", tmp_path / "out", 60, models=(config,), grid=GRID)
    assert sum(len(table) for table in load_measurements(tmp_path / "out").tables.values()) > 12


@pytest.mark.usefixtures("small", "torch")
def test_what_cannot_be_measured_is_counted(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(kit: Kit, sizes: Any) -> Prepared:
        raise RuntimeError("no kernel image is available\nmore lines")

    monkeypatch.setitem(sessions.BUILDERS, "moe", broken)
    monkeypatch.setattr(sessions, "CPU_POOL_BYTES", 2**20)
    big = replace(GRID.rounds[0], decode=((3, 20), (64, 5000)))
    grid = replace(GRID, rounds=(big,))
    found = measure("cpu", tmp_path / "out", 60, models=(config,), grid=grid)
    said = "\n".join(found.device.notes)
    assert "moe: 3 points failed, the first with: no kernel image is available" in said
    assert "1 of " in said
    assert "left out: they do not fit the memory" in said
    assert "moe" not in found.tables
    assert len(found.tables["decode_attention"]) == 1


@pytest.mark.usefixtures("small", "torch")
def test_the_time_is_kept(tmp_path: Path, config: str) -> None:
    """Points that would take too long are left out by their FLOPs and bytes, and counted."""
    long = replace(GRID.rounds[0], tokens=(1, 3_000_000), moe=(), steps=())
    found = measure("cpu", tmp_path / "out", 3, models=(config,), grid=replace(GRID, rounds=(long,)))
    assert max(found.tables["gemm"]["m"]) == 2  # the samples
    assert any(
        "left out: each would take more than 3% (a whole step 6%) of the budget of 3 s" in note
        for note in found.device.notes
    )
    with pytest.raises(ServecastError, match=r"nothing could be measured in 1e-06 s"):
        measure("cpu", tmp_path / "none", 1e-6, models=(config,), grid=GRID)
    assert not (tmp_path / "none").exists()


def session_of(kit: Kit, folder: Path) -> Session:
    machine, dtype = open_machine("cpu", None)
    return Session(machine, dtype, [TINY], Record(machine, folder), 60, GRID)


def test_a_library_that_does_not_work_is_done_without(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(kit, failed={})

    def choose(kit: Kit, sizes: Any) -> Prepared:
        def fail() -> None:
            raise ValueError("head size 16 is not supported")

        if "flashy attention" in kit.failed:
            return Prepared([lambda: None], "torch")
        return Prepared([fail], "flashy", library="flashy attention")

    monkeypatch.setitem(sessions.BUILDERS, "decode_attention", choose)
    session = session_of(kit, tmp_path)
    assert session._prepared(mine, "decode_attention", {}).kernel == "torch"
    said = list(session._notes(mine, 1))
    assert said == ["flashy attention is installed but was done without: head size 16 is not supported"]


def test_drift_of_the_reference_is_said(kit: Kit, tmp_path: Path) -> None:
    session = session_of(kit, tmp_path)
    session.references = [1e-3, 1.04e-3, 0.97e-3]
    assert list(session._notes(kit, 1)) == []
    session.references += [1.3e-3]
    (said,) = session._notes(kit, 1)
    assert "took 1 ms at the start and 0.97 to 1.3 ms (-3% to +30%) in 3 later looks" in said


@pytest.mark.usefixtures("small", "torch")
def test_another_machine_s_folder_is_refused(tmp_path: Path, config: str) -> None:
    measure("cpu", tmp_path, 60, models=(config,), grid=replace(GRID, rounds=()))
    with pytest.raises(ServecastError, match="holds measurements in fp32, not in bf16; give another folder"):
        measure("cpu", tmp_path, 60, dtype="bf16", models=(config,), grid=GRID)
    facts = (tmp_path / "device.yaml").read_text()
    (tmp_path / "device.yaml").write_text(facts.replace("device: ", "device: not "))
    with pytest.raises(ServecastError, match="holds measurements of another device"):
        measure("cpu", tmp_path, 60, models=(config,), grid=GRID)


# -- mistakes and surroundings -----------------------------------------------------------------------------------------


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_torch(name: str, *rest: Any, **more: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    with pytest.raises(ServecastError, match=r'pip install "servecast\[calibrate\]"'):
        measure("cpu", tmp_path, 60)


def test_every_mistake_is_said(tmp_path: Path) -> None:
    with pytest.raises(ServecastError) as error:
        measure("cpu", tmp_path, 0, models=("lama-3-8b", "qwen2.5-0.5b"))
    assert len(error.value.problems) == 2
    assert "expected more than 0 seconds" in str(error.value)
    assert "did you mean 'llama-3-8b'?" in str(error.value)
    with pytest.raises(ServecastError, match=r"'cdua' is not known \(did you mean 'cuda'\?\); known: cuda, cpu"):
        measure("cdua", tmp_path, 60)


def test_dtypes_that_the_device_lacks(tmp_path: Path, torch: Any) -> None:
    with pytest.raises(ServecastError, match=r"dtype: 'fp8' cannot be measured on .*; possible there: fp32, bf16"):
        measure("cpu", tmp_path, 60, dtype="fp8")
    if not torch.cuda.is_available():
        with pytest.raises(ServecastError, match="finds no CUDA device"):
            measure("cuda", tmp_path, 60)


def test_other_processes_are_said(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = open_machine("cpu", None)
    monkeypatch.setattr("calibrate.measure.machine.Cpu._cores", lambda machine: {0, 1})
    looks: Iterator[tuple[float, float, float]] = iter([(0, 0, 0), (1, 1.4, 0.1), (1, 1.4, 0.1), (11, 22.4, 17.1)])
    monkeypatch.setattr("calibrate.measure.machine.processor_seconds", lambda cores: next(looks))
    monkeypatch.setattr("calibrate.measure.machine.time.sleep", lambda seconds: None)
    assert any("other processes kept 1.3 of 2 cores busy at the start" in note for note in machine.notes("fp32"))
    (said,) = machine.afterwards()
    assert "other processes kept 0.4 of 2 cores busy on average" in said


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat here")
def test_processor_time_is_read() -> None:
    cores = os.sched_getaffinity(0)
    first = processor_seconds(cores)
    sum(range(2_000_000))
    second = processor_seconds(cores)
    assert first is not None
    assert second is not None
    assert second[0] > first[0]
    assert second[2] > first[2]


@pytest.mark.parametrize(
    ("name", "gib", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA H100 NVL", 94, "h100-nvl"),
        ("NVIDIA H200", 141, "h200-sxm"),
        ("NVIDIA H20", 96, "h20"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-sxm-40gb"),
        ("NVIDIA B200", 180, "b200-sxm"),
        ("NVIDIA GB200", 186, "gb200"),
        ("NVIDIA L4", 24, "l4"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA A10", 24, "a10"),
        ("NVIDIA RTX A6000", 48, "a6000"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, "rtx-4090-laptop-gpu"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("Tesla V100-SXM2-16GB", 16, "tesla-v100-sxm2-16gb"),
    ],
)
def test_gpus_are_known_by_their_driver_s_name(name: str, gib: int, gpu: str) -> None:
    assert gpu_id(name, gib * 2**30) == gpu


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi(["driver_version"], "0") is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$2" = "--query-gpu=a,b" ] && echo "580.1, 0x4"\n')
    tool.chmod(0o755)
    assert nvidia_smi(["a", "b"], "0") == ["580.1", "0x4"]
    assert nvidia_smi(["c"], "0") is None  # it failed
