"""What replicas cost to rent, by the GPU-hour: GPUs one by one, or whole nodes where that is how they are rented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil

from calibrate.hardware import load_gpu
from servecast.planning.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Rent:
    """`prices` in dollars per GPU-hour, from `source`. At most `most` GPUs are paid for, those of `spare` replicas (or
    units) beside those that are needed among them. `whole_nodes`: GPUs come by the node. A replica that is larger than
    a node has whole nodes anyhow, and no replica that is smaller lies across two."""

    prices: Mapping[str, float]
    source: str = "yours"
    whole_nodes: bool = False
    spare: int = 0
    most: int = 1024

    def charged(self, candidate: Candidate, replicas: int) -> int:
        """GPUs that are paid for with so many replicas (or units), the spare ones among them."""
        node, each, members = _sizes(candidate)
        if each > node:
            return replicas * members * ceil(each / node) * node
        return ceil(replicas * members / (node // each)) * node if self.whole_nodes else replicas * candidate.gpus

    def price(self, candidate: Candidate, replicas: int) -> float:
        """Dollars per hour of so many replicas (or units), the spare ones among them."""
        return self.prices[candidate.gpu] * self.charged(candidate, replicas)

    def held(self, candidate: Candidate, gpus: int) -> int:
        """How many replicas (or units) so many paid GPUs hold."""
        node, each, members = _sizes(candidate)
        if each > node:
            return gpus // (ceil(each / node) * node * members)
        return gpus // node * (node // each) // members if self.whole_nodes else gpus // candidate.gpus

    def affords(self, candidate: Candidate, below: float | None = None) -> int:
        """The most replicas (or units), beside the spare ones, that there may be; and that are cheaper than `below`
        dollars per hour."""
        gpus = self.most
        if below is not None:
            gpus = min(gpus, ceil(below / self.prices[candidate.gpu] - 1e-9) - 1)
        return self.held(candidate, gpus) - self.spare


@cache
def _sizes(candidate: Candidate) -> tuple[int, int, int]:
    """(GPUs of a node, or of a rack where a link joins all of it; of a replica; replicas of a unit)."""
    return (
        load_gpu(candidate.gpu).link_gpus,
        candidate.tp * candidate.pp,
        sum(candidate.split) if candidate.split else 1,
    )
