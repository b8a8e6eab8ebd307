"""Who sends what to whom when a KV cache moves between two layouts, and what the busiest of them carry.

Under tensor parallelism a rank holds some KV heads, or a copy of one where there are more ranks than heads; a latent
(MLA) lies whole on every rank; a pipeline stage holds some layers. Rules: `compute_tp_mapping` of
vllm/distributed/kv_transfer/kv_connector/v1/nixl/tp_mapping.py (v0.32.0). Knows shares, not bytes or seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from calibrate.connectors import TransferLink
from calibrate.engine import EngineSpec
from calibrate.hardware import Gpu
from calibrate.layout import Parallelism
from calibrate.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two instances: its GPUs, how the model is spread over them, its engine, and the link that it uses."""

    gpu: Gpu
    layout: Parallelism
    engine: EngineSpec
    link: TransferLink


@dataclass(frozen=True, slots=True)
class Route:
    """What GPU `source` sends to GPU `destination` (numbers within their instances): `share` of what a stage-less
    destination rank holds of a sequence, in `layers` (a share of them all)."""

    source: int
    destination: int
    share: float
    layers: float


@dataclass(frozen=True, slots=True)
class Load:
    """What the busiest parts carry, in units of what one destination rank holds of a sequence in all layers: on a link
    of the source (`sent`) and of the destination (`received`); and of the initiating side the layers, as a share of
    all, that its busiest rank posts descriptors for, once for each peer (`posted`). `total`: all that crosses."""

    sent: float
    received: float
    posted: float
    total: float


def kv_routes(model: ModelSpec, source: Parallelism, destination: Parallelism) -> list[Route]:
    """Of keys and values: for each head the first of the source ranks that hold it and stand for the destination rank;
    a latent comes whole from one rank."""
    p, d, heads = source.tp, destination.tp, model.kv_heads
    if model.latent:
        return _staged(model, source, destination, {r: Counter({r * p // d: 1}) for r in range(d)})
    found = {}
    for rank in range(d):
        mine = range(rank * heads // d, (rank + 1) * heads // d) if d < heads else [rank * heads // d]
        # where heads are copied: the first rank that has it, but none before those that stand for this rank
        found[rank] = Counter(
            max(-(-head * p // heads), rank * p // d) if p > heads else head * p // heads for head in mine
        )
    return _staged(model, source, destination, found)


def state_routes(model: ModelSpec, source: Parallelism, destination: Parallelism) -> list[Route]:
    """Of recurrent states, which tensor parallelism cuts evenly: every source rank sends its part."""
    p, d = source.tp, destination.tp
    ranks = {r: Counter(range(r * p // d, (r + 1) * p // d) if p > d else [r * p // d]) for r in range(d)}
    return _staged(model, source, destination, ranks)


def load(routes: Iterable[Route], source: Side, destination: Side, pull: bool) -> Load:
    """The busiest links and ranks under these routes; neighbours share an adapter."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    posted: Counter[int] = Counter()
    for route in routes:
        amount = route.share * route.layers
        sent[route.source // source.link.gpus] += amount  # type: ignore[assignment]
        received[route.destination // destination.link.gpus] += amount  # type: ignore[assignment]
        posted[route.destination if pull else route.source] += route.layers  # type: ignore[assignment]
    return Load(max(sent.values()), max(received.values()), max(posted.values()), sum(sent.values()))


def _staged(
    model: ModelSpec, source: Parallelism, destination: Parallelism, ranks: dict[int, Counter[int]]
) -> list[Route]:
    """The routes between the ranks of every two stages that share layers, which are taken to be alike."""
    routes = []
    for s, (first, last) in enumerate(_spans(source.stages(model.layers))):
        for t, (begin, end) in enumerate(_spans(destination.stages(model.layers))):
            if (common := min(last, end) - max(first, begin)) > 0:
                routes += [
                    Route(
                        s * source.tp + peer, t * destination.tp + rank, n / sum(peers.values()), common / model.layers
                    )
                    for rank, peers in ranks.items()
                    for peer, n in peers.items()
                ]
    return routes


def _spans(stages: list[int]) -> list[tuple[int, int]]:
    ends = [sum(stages[: n + 1]) for n in range(len(stages))]
    return list(zip([0, *ends], ends, strict=False))
