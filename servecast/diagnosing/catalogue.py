"""The causes that a diagnosis knows, one a line: its name, what is wrong, its precondition on a run's numbers
(`conditions.py`), what takes it away (`remedies.py`), and where to look on a real server (`looks.yaml`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from servecast.diagnosing import conditions as c
from servecast.diagnosing import remedies as r
from servecast.diagnosing.evidence import Evidence

OTHER = "other"
"""Where to look on servers of which no metric is known here."""


@dataclass(frozen=True, slots=True)
class Cause:
    """`words`: what is wrong. `there`: (whether it can be, the numbers that say so). `changes`: what takes it away, the
    gentlest first."""

    name: str
    words: str
    there: Callable[[Evidence], c.There]
    changes: Callable[[Evidence], Iterator[r.Change]]


CAUSES = (
    Cause("capacity", "too few replicas for the traffic", c.capacity, r.capacity),
    Cause("places", "batch limit too small: requests wait for a place", c.few_places, r.few_places),
    Cause("kv cache", "KV cache too small", c.kv_cache, r.kv_cache),
    Cause("lengths", "max_model_len does not fit the requests", c.lengths, r.lengths),
    Cause("long prompts", "prompts in large chunks hold up those who decode", c.long_prompts, r.long_prompts),
    Cause("mixed", "prefill and decode share GPUs", c.mixed, r.mixed),
    Cause("chunks", "token budget too small: prompts take many steps", c.chunks, r.chunks),
    Cause("batch", "batches too large for the time between tokens", c.many_places, r.many_places),
    Cause("prefix cache", "prompts that begin alike are computed again", c.no_prefix_cache, r.no_prefix_cache),
    Cause("prefix routing", "prompts that begin alike go to different replicas", c.prefix_routing, r.prefix_routing),
    Cause("graphs", "kernels are launched one by one, without CUDA graphs", c.no_graphs, r.no_graphs),
    Cause("host", "GPUs wait for the host in every step", c.host, r.host),
    Cause("batching", "static batches: padding, and no place until the longest answer ends", c.batching, r.batching),
    Cause("weights", "decoding is bound by reading 16-bit weights", c.weights, r.weights),
    Cause("link", "the link between the GPUs of a replica is slow", c.link, r.link),
    Cause("front end", "the API server takes long", c.front_end, r.front_end),
    Cause("router", "the router loads replicas unevenly", c.router, r.router),
    Cause("class", "one class of requests waits for another", c.starved, r.starved),
    Cause("failures", "replicas fail", c.failing, r.failing),
    Cause("gateway", "the gateway turns requests away", c.gateway, r.gateway),
    Cause("traffic", "clients send less than the GPUs could do", c.traffic, r.traffic),
    Cause("oversized", "more GPUs than the traffic needs", c.oversized, r.oversized),
)


@cache
def _looks() -> Mapping[str, Mapping[str, str]]:
    text = (files("servecast.diagnosing") / "looks.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, str]] = yaml.safe_load(text)
    return found


def look(cause: str, engine: str) -> str:
    """Where to look on a server of that engine, in a sentence or two."""
    there = _looks()[cause]
    return there.get(engine, there[OTHER])
