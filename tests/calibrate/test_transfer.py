"""The cost of moving a KV cache: against published transfers, by who holds what, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from calibrate.catalog import read
from calibrate.connectors import (
    TransferLink,
    connector_names,
    load_connector,
    load_transfer_link,
    node_link,
    transfer_link_names,
)
from calibrate.hardware import gpu_ids, load_gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec
from calibrate.routes import Side, kv_routes
from calibrate.transfer import TransferCosts, fit_transport
from servecast.errors import ServecastError
from tests.calibrate.helpers import parts
from tests.calibrate.published_transfer import (
    FITTED,
    LLMD_EFA,
    LLMD_IB,
    MOONCAKE,
    MOONCAKE_ALSO,
    TEMPLATE,
    costs,
    d01,
    llmd,
    tables,
    together,
)
from tests.calibrate.test_kvgroups import DELTA

DOC = (Path(__file__).parents[2] / "docs" / "transfer.md").read_text("utf-8")
IB = load_transfer_link("rdma-400")


def side(
    model: str, layout: Parallelism, link: TransferLink = IB, preset: str = "vllm-0.32", **options: object
) -> Side:
    _, _, gpu, engine = parts(model, "h100-sxm", layout.tp, preset=preset, **options)
    return Side(gpu, layout, engine, link)


def pair(
    model: str = "llama-3.1-8b",
    tp: tuple[int, int] = (1, 1),
    connector: str = "nixl",
    pp: tuple[int, int] = (1, 1),
    link: TransferLink = IB,
    preset: str = "vllm-0.32",
    spec: ModelSpec | None = None,
    **options: object,
) -> TransferCosts:
    found = parts(model, "h100-sxm", preset=preset)[0]
    sides = [side(model, Parallelism(t, s), link, preset, **options) for t, s in zip(tp, pp, strict=True)]
    return TransferCosts.for_(spec or found, *sides, load_connector(connector))


def hybrid() -> ModelSpec:
    """Qwen3.8-27B's layers: 16 that keep keys and values, 48 that keep states."""
    spec = parts("qwen3-32b", "h100-sxm", preset="vllm-0.32")[0]
    return replace(spec, recurrent=DELTA, layers=64, kv_heads=4, head_dim=256)


# -- published transfers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", sorted({**MOONCAKE, **MOONCAKE_ALSO}))
def test_mooncakes_table(tokens: int) -> None:
    """Half of the case's rows were fitted (FITTED); all are met, as is the row that the case leaves out."""
    size, ms = {**MOONCAKE, **MOONCAKE_ALSO}[tokens]
    found = d01()
    assert found.moved_bytes(tokens + TEMPLATE) / 2**20 == pytest.approx(size, abs=0.5, rel=0.005)
    assert found.seconds(tokens + TEMPLATE) * 1e3 == pytest.approx(ms, rel=0.10)


def fit(rows: list[int]) -> tuple[float, float]:
    """Over one of the eight adapters."""
    return fit_transport([d01().moved_bytes(n + TEMPLATE) / 8 for n in rows], [MOONCAKE[n][1] / 1e3 for n in rows])


def test_the_catalogue_has_what_half_of_the_rows_give() -> None:
    fixed, bandwidth = fit(list(FITTED))
    rdma = load_connector("mooncake").transports["rdma"]
    assert len(FITTED) == len(MOONCAKE) / 2
    assert rdma.fixed_s == pytest.approx(fixed, rel=0.01)
    assert rdma.share == pytest.approx(bandwidth / 25e9, rel=0.01)


@pytest.mark.parametrize("rows", [sorted(MOONCAKE)[::2], sorted(MOONCAKE)[1::2]])
def test_any_half_of_the_rows_foretells_the_other(rows: list[int]) -> None:
    fixed, bandwidth = fit(rows)
    for tokens, (_, ms) in MOONCAKE.items():
        wire = d01().moved_bytes(tokens + TEMPLATE) / 8 / bandwidth
        assert (fixed + wire) * 1e3 == pytest.approx(ms, rel=0.10)


def test_no_bandwidth_alone_does() -> None:
    rates = [d01().moved_bytes(n + TEMPLATE) / ms for n, (_, ms) in MOONCAKE.items()]
    best = math.sqrt(min(rates) * max(rates))  # the one whose worst error is smallest
    assert max(rates) / best - 1 > 0.9


@pytest.mark.parametrize("tp", [8, 4])  # 8 was fitted
def test_nixl_over_infiniband(tp: int) -> None:
    for tokens, (_, ms) in LLMD_IB[tp].items():
        ours = together(llmd(tp, "rdma-400"), tokens)
        if ours.count == 1:
            assert ours.alone == pytest.approx(ms, rel=0.02)
        else:
            assert 0.94 * ours.turns < ms < ours.shared


@pytest.mark.parametrize(("tp", "off"), [(8, 0.07), (4, 0.13)])  # 8 was fitted
def test_nixl_over_efa_posts_longer_than_it_moves(tp: int, off: float) -> None:
    found = llmd(tp, "efa-400")
    for tokens in (8192, 16384, 24000):
        assert found.posting_s(tokens) > found.occupancy_s(tokens)
        assert found.seconds(tokens) * 1e3 == pytest.approx(LLMD_EFA[tp][tokens][1], rel=off)


def test_descriptors_as_counted() -> None:
    assert llmd(8, "rdma-400").descriptors(24_000) == llmd(4, "efa-400").descriptors(24_000) == 30_080


def test_larger_blocks_shorten_transfers_of_many_descriptors() -> None:
    """D-06: 167 MiB in 8 KiB descriptors; blocks of 64 instead of 16 take 58 ms off the transfer."""
    descriptors = 167 * 2**20 / 8192
    saved = descriptors * (1 - 16 / 64) * load_connector("nixl").transports["nvlink"].descriptor_s
    assert saved * 1e3 == pytest.approx(58, rel=0.08)


@pytest.mark.parametrize("name", tables())
def test_the_document_shows_these_tables(name: str) -> None:
    assert "\n".join(tables()[name]) in DOC


def test_the_documents_snippet_runs() -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", DOC, flags=re.M | re.S)
    names: dict[str, TransferCosts] = {}
    exec(snippet, names)
    assert names["costs"] == d01()


# -- who holds what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        ("llama-3.1-8b", (4, 8), {r: {r // 2: 1.0} for r in range(8)}),  # a half of each rank's two heads
        ("llama-3.1-8b", (8, 4), {r: {2 * r: 0.5, 2 * r + 1: 0.5} for r in range(4)}),
        ("qwen2.5-7b", (4, 8), {r: {r // 2: 1.0} for r in range(8)}),  # 4 heads: each twice
        ("qwen2.5-7b", (8, 8), {r: {r: 1.0} for r in range(8)}),  # a copy from a copy
        ("qwen2.5-7b", (8, 4), {r: {2 * r: 1.0} for r in range(4)}),  # no copy is read twice
        ("qwen2.5-7b", (8, 2), {0: {0: 0.5, 2: 0.5}, 1: {4: 0.5, 6: 0.5}}),
        ("deepseek-v3", (8, 2), {0: {0: 1.0}, 1: {4: 1.0}}),  # a latent comes whole
        ("deepseek-v3", (2, 8), {r: {r // 4: 1.0} for r in range(8)}),
    ],
)
def test_who_sends_what(model: str, tp: tuple[int, int], expected: dict[int, dict[int, float]]) -> None:
    found: dict[int, dict[int, float]] = {}
    for route in kv_routes(parts(model, "h100-sxm")[0], Parallelism(tp[0]), Parallelism(tp[1])):
        found.setdefault(route.destination, {})[route.source] = route.share
    assert found == expected


@pytest.mark.parametrize("tp", [(1, 1), (1, 8), (8, 1), (2, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize(("model", "token_bytes"), [("llama-3.1-8b", 131_072), ("deepseek-v3", 70_272)])
def test_moved_bytes(model: str, token_bytes: int, tp: tuple[int, int]) -> None:
    copies = tp[1] if model == "deepseek-v3" else 1
    assert pair(model, tp).moved_bytes(1600) == 1600 * token_bytes * copies
    assert pair(model, tp).moved_bytes(1601) == 1616 * token_bytes * copies, "whole blocks"
    assert pair(model, tp).moved_bytes(0) == 0


def test_more_ranks_than_heads_receive_copies() -> None:
    once, twice = pair("qwen2.5-7b", (4, 4)), pair("qwen2.5-7b", (4, 8))
    assert twice.moved_bytes(1600) == 2 * once.moved_bytes(1600)
    assert twice.source_s(1600) == 2 * once.source_s(1600) == 2 * twice.destination_s(1600)


def test_the_narrower_side_is_the_slower() -> None:
    wide, narrow = pair(tp=(8, 8)), pair(tp=(8, 1))
    assert narrow.source_s(1600) == pytest.approx(wide.source_s(1600))
    assert narrow.occupancy_s(1600) == narrow.destination_s(1600) == pytest.approx(8 * wide.occupancy_s(1600))
    assert narrow.descriptors(1600) == 8 * wide.descriptors(1600), "a slice of every block from each rank"


def test_stages_send_their_layers() -> None:
    one, two = pair(), pair(pp=(2, 1))
    assert two.moved_bytes(1600) == one.moved_bytes(1600)
    assert two.source_s(1600) == pytest.approx(one.source_s(1600) / 2)
    assert two.destination_s(1600) == pytest.approx(one.destination_s(1600))
    both = pair(connector="mooncake", pp=(2, 2))
    assert both.destination_s(1600) == pytest.approx(pair(connector="mooncake").destination_s(1600) / 2)


def test_neighbours_share_an_adapter() -> None:
    own, shared = pair(tp=(8, 8)), pair(tp=(8, 8), link=replace(IB, gpus=4))
    assert shared.source_s(1600) == pytest.approx(4 * own.source_s(1600))
    assert shared.destination_s(1600) == pytest.approx(4 * own.destination_s(1600))


def test_a_slower_link_on_one_side_counts() -> None:
    model = parts("llama-3.1-8b", "h100-sxm")[0]
    fast, slow = (side("llama-3.1-8b", Parallelism(1), load_transfer_link(name)) for name in ("rdma-400", "rdma-100"))
    mixed = TransferCosts.for_(model, fast, slow, load_connector("nixl"))
    assert mixed.occupancy_s(1600) == mixed.destination_s(1600) == pytest.approx(4 * mixed.source_s(1600))


def test_windows_move_what_they_hold() -> None:
    """gemma-3-1b: 4 full layers, 22 that see 512 tokens; one KV head of 256."""
    layer = 2 * 256 * 2
    found = pair("gemma-3-1b", enable_prefix_caching=False)
    held = 8000 - (8000 - 512 + 1) // 16 * 16
    assert found.moved_bytes(8000) == layer * (4 * 8000 + 22 * held)
    assert pair("gemma-3-1b", connector="lmcache").moved_bytes(8000) == layer * 26 * 8000, "not moved as windows"


@pytest.mark.parametrize("tp", [(1, 1), (2, 2), (4, 2), (2, 4), (8, 4)])  # the last: copies of KV heads, none of states
def test_states_move_once(tp: tuple[int, int]) -> None:
    found = pair(tp=tp, spec=hybrid())
    states = 48 * (10_240 * 3 * 2 + 48 * 128 * 128 * 4)
    short, long = found.moved_bytes(1), found.moved_bytes(20_000)
    block = max(group.block_size for group in found.groups)
    assert short == states + block * 16 * 4 * 2 * 256 * 2
    assert long - states == -(-20_000 // block) * (short - states)


# -- descriptors and time ---------------------------------------------------------------------------------------------


def test_what_connectors_join() -> None:
    tokens, blocks = 1600, 100
    assert pair().descriptors(tokens) == 2 * 32 * blocks
    assert pair("deepseek-v3", (8, 8)).descriptors(tokens) == 61 * blocks, "a latent is one"
    joined = [costs(run_blocks=n).descriptors(tokens) for n in (1, 4, math.inf)]
    assert joined == [2 * 36 * blocks, 2 * 36 * blocks / 4, 2 * 36]
    assert costs(connector="nixl", run_blocks=math.inf).descriptors(tokens) == 2 * 36 * blocks
    assert pair(spec=hybrid()).descriptors(1) == 2 * 16 + 2 * 48, "two of each state"
    assert pair(connector="p2p-nccl").descriptors(tokens) == 32
    assert pair(connector="lmcache").descriptors(tokens) == 7
    assert pair(connector="mooncake", tp=(2, 4)).descriptors(tokens) == 2 * 2 * 32 * blocks, "slices, to two ranks"


def test_sglang_slices_token_by_token() -> None:
    alike, unlike = (
        pair(tp=tp, connector="sglang-mooncake", preset="sglang-0.5", page_size=64) for tp in ((2, 2), (2, 1))
    )
    assert alike.descriptors(1600) == 2 * 32 * 1600 / 64
    assert unlike.descriptors(1600) == 2 * 32 * 1600


def test_a_transfer_is_made_of_its_parts() -> None:
    """What the simulator queues: the link is held for the occupancy alone."""
    over_ib, in_node = pair(), pair(link=node_link(load_gpu("h100-sxm")))
    assert over_ib.seconds(1600) == over_ib.fixed_s + max(over_ib.posting_s(1600), over_ib.occupancy_s(1600))
    assert in_node.seconds(1600) == in_node.fixed_s + (in_node.posting_s(1600) + in_node.occupancy_s(1600))


@pytest.mark.parametrize("connector", connector_names())
def test_longer_prompts_never_move_faster(connector: str) -> None:
    preset = "sglang-0.5" if connector.startswith("sglang") else "vllm-0.32"
    found = pair(connector=connector, preset=preset)
    times = [found.seconds(n) for n in (0, 1, 16, 17, 1000, 100_000)]
    assert times == sorted(times)
    assert all(math.isfinite(t) and t >= found.fixed_s for t in times)


@pytest.mark.parametrize("prefill_s", [0.0, 0.001, 0.02, 0.1, 5.0])
def test_what_stays_exposed(prefill_s: float) -> None:
    """Against the schedule piece by piece: each is sent when it is computed and the one before it is over."""
    for found, chunks in ((pair(connector="p2p-nccl"), 1), (pair(), 3),
                          (pair(connector="sglang-nixl", preset="sglang-0.5"), 5)):  # fmt: skip
        n, clock = found.pieces(chunks), 0.0
        for piece in range(1, n + 1):
            clock = max(clock, piece * prefill_s / n) + (found.seconds(4000) - found.fixed_s) / n
        assert found.exposed_s(4000, prefill_s, chunks) == pytest.approx(clock - prefill_s + found.fixed_s)


def test_pieces() -> None:
    assert pair().pieces(4) == 1
    assert pair(connector="p2p-nccl").pieces(4) == 32
    assert pair(connector="sglang-nixl", preset="sglang-0.5").pieces(4) == 4


# -- the catalogue and its limits -------------------------------------------------------------------------------------


def test_every_figure_has_a_source() -> None:
    kinds = {load_transfer_link(name).kind for name in transfer_link_names()}
    kinds |= {node_link(load_gpu(gpu)).kind for gpu in gpu_ids()}
    for name in connector_names():
        connector = load_connector(name)
        assert connector.source
        for kind, transport in connector.transports.items():
            assert kind in kinds
            assert 0 < transport.share <= 1
            assert 0 < transport.fixed_s < 0.01
            assert 0 < transport.descriptor_s < 1e-3
            assert transport.measured != transport.source.startswith("assumed")
            assert f"`{name}`" in DOC
    assert all(link["source"] for link in read("connectors")["links"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": (2, 3)}, "tp: 2 on the prefill side, 3 on the decode side: one must divide the other"),
        ({"tp": (1, 2), "connector": "p2p-nccl"}, "tp: 1 on .*: p2p-nccl needs the same on both"),
        ({"model": "qwen2.5-7b", "tp": (8, 4)}, "larger one on the prefill side may not exceed the 4 KV heads"),
        ({"model": "qwen2.5-7b", "tp": (4, 8), "connector": "sglang-nixl", "preset": "sglang-0.5"},
         "different ones may not exceed the 4 KV heads of qwen2.5-7b"),
        ({"pp": (1, 2)}, "pp: 1 on the prefill side, 2 on .*: nixl allows stages on the prefill side only"),
        ({"pp": (2, 2), "connector": "p2p-nccl"}, "p2p-nccl allows none on either side"),
        ({"model": "gemma-3-1b", "pp": (2, 1)}, "nixl allows no stages for layers that keep a window"),
        ({"spec": hybrid(), "connector": "lmcache"}, "lmcache does not move the states of recurrent layers"),
        ({"spec": hybrid(), "connector": "sglang-nixl", "preset": "sglang-0.5", "tp": (1, 2)},
         "needs the same on both for layers that keep a state"),
        ({"link": load_transfer_link("efa-400"), "connector": "mooncake"},
         "no figures are known for mooncake over efa .*there are some for rdma, ethernet"),
        ({"preset": "sglang-0.5"}, "nixl is vllm's, the prefill side's engine sglang-0.5"),
    ],
)  # fmt: skip
def test_pairs_that_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ServecastError, match=message):
        pair(**arguments)  # type: ignore[arg-type]


def between(prefill: dict[str, object], decode: dict[str, object], connector: str = "nixl") -> TransferCosts:
    sides = [side("llama-3.1-8b", Parallelism(1), **options) for options in (prefill, decode)]  # type: ignore[arg-type]
    return TransferCosts.for_(parts("llama-3.1-8b", "h100-sxm")[0], *sides, load_connector(connector))


@pytest.mark.parametrize(
    ("prefill", "decode", "connector", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "nixl", "kv_cache_dtype: fp8 on the prefill side, bf16 on the decode side"),
        ({"block_size": 16}, {"block_size": 32}, "mooncake", "block_size: 16 .*32 .*mooncake needs the same on both"),
        ({"block_size": 32}, {"block_size": 16}, "nixl", "decode side's must be a multiple of the prefill side's"),
        ({"link": IB}, {"link": load_transfer_link("efa-400")}, "nixl", "link: 400 Gb/s RDMA .* is rdma, 4 x 100 Gb/s"),
    ],
)
def test_sides_that_do_not_fit(
    prefill: dict[str, object], decode: dict[str, object], connector: str, message: str
) -> None:
    with pytest.raises(ServecastError, match=message):
        between(prefill, decode, connector)


def test_blocks_of_the_prefill_side_are_moved() -> None:
    found = between({"block_size": 16}, {"block_size": 64})
    assert found.moved_bytes(17) == 32 * 131_072
    halved = between({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"})
    assert halved.moved_bytes(1600) == 1600 * 65_536


def test_all_that_is_wrong_at_once() -> None:
    with pytest.raises(ServecastError) as caught:
        between({"kv_cache_dtype": "fp8", "block_size": 32}, {"link": load_transfer_link("efa-400")}, "sglang-nixl")
    assert len(caught.value.problems) == 5, caught.value


def test_unknown_names() -> None:
    with pytest.raises(
        ServecastError, match=r"connector: 'nixll' is not known \(did you mean 'nixl'\?\); known: nixl, "
    ):
        load_connector("nixll")
    with pytest.raises(
        ServecastError, match=r"link: 'rdma400' is not known \(did you mean 'rdma-400'\?\); known: rdma-100"
    ):
        load_transfer_link("rdma400")


@pytest.mark.parametrize("run_blocks", [0.5, math.nan])
def test_runs_of_less_than_a_block(run_blocks: float) -> None:
    with pytest.raises(ServecastError, match=r"run_blocks is .*; expected at least 1"):
        costs(run_blocks=run_blocks)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [([1e6], [1e-3]), ([1e6, 1e6], [1e-3, 1e-3]), ([1e6, 2e6], [1e-3, 0.0]), ([1e6, 2e6], [2e-3, 1e-3])],
)
def test_transfers_that_show_no_line(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ServecastError, match="transfers: "):
        fit_transport(sizes, times)


def test_fit_transport_finds_what_made_the_times() -> None:
    fixed, bandwidth = fit_transport([1e6, 1e7, 1e9], [4e-4 + n / 2e10 for n in (1e6, 1e7, 1e9)])
    assert (fixed, bandwidth) == pytest.approx((4e-4, 2e10))
