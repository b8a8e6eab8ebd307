"""What ran, as far as metrics need to know it: pools of equal replicas, and classes of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.metrics import Floats

if TYPE_CHECKING:
    from calibrate.utilisation import AtPeaks
    from sim.drafts import Drafting


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Equal replicas, as far as the metrics need them: `gpus` of each, and how many (`ranks`) step together. Bytes are
    per GPU, KV blocks per replica. `peaks` says what its steps would take at the GPU's peaks, where that is known;
    `tiers` names the places beyond the GPU that keep KV."""

    name: str
    replicas: int
    gpus: int
    fixed_memory_bytes: int  # weights, activations, graphs, buffers: all but the KV cache
    kv_blocks: int  # that requests can use
    block_size: int
    kv_bytes_per_token: int
    prefix_caching: bool = False
    role: str = "unified"
    ranks: int = 1
    peaks: AtPeaks | None = None
    tiers: tuple[str, ...] = ()
    stream_interval: int = 1  # output tokens of a message to a client
    drafting: Drafting | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block on each GPU."""
        return self.block_size * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Deployment:
    """What ran: pools, whose replicas are numbered one after the other."""

    pools: tuple[PoolFacts, ...]

    @property
    def replicas(self) -> int:
        """All replicas."""
        return sum(pool.replicas for pool in self.pools)

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(pool.replicas * pool.gpus for pool in self.pools)

    def of(self, value: Callable[[PoolFacts], float]) -> Floats:
        """float64[replicas]: a fact of each replica's pool."""
        return np.repeat([float(value(pool)) for pool in self.pools], [pool.replicas for pool in self.pools])

    @property
    def leaders(self) -> list[int]:
        """The numbers of the replicas, of those that step together the first one's."""
        firsts = zip(self.pools, self.first, strict=False)
        return [n for pool, first in firsts for n in range(first, first + pool.replicas, pool.ranks)]

    @property
    def first(self) -> list[int]:
        """The number of each pool's first replica, and of one after the last."""
        return [0, *accumulate(pool.replicas for pool in self.pools)]


@dataclass(frozen=True, slots=True)
class Classes:
    """Request classes: int64[n] index of each request id's class into `names`.

    `slo` has the limits, in seconds, of the classes with an SLO of their own; `Result.slo` holds for the others.
    """

    index: npt.NDArray[np.int64]
    names: tuple[str, ...]
    slo: Mapping[str, Mapping[str, float]]

    def of(self, requests: Mapping[str, Floats]) -> npt.NDArray[np.int64]:
        """The index of each request's class."""
        return self.index[requests["id"].astype(np.int64)]
