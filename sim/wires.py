"""The hosts and links of replicas, each of which is busy with one transfer after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Transfer(Protocol):
    """What it takes to move the KV of `tokens` tokens between two replicas, in seconds."""

    @property
    def fixed_s(self) -> float:
        """For which nobody is busy."""
        ...

    def posting_s(self, tokens: int) -> float:
        """Of the host that starts it."""
        ...

    def occupancy_s(self, tokens: int) -> float:
        """Of the links."""
        ...

    def moved_bytes(self, tokens: int) -> float:
        """What crosses them."""
        ...


class Wires:
    """Of `replicas` replicas, by their numbers. `pull`: the side that receives posts transfers, else the one that
    sends; `posts_first`: links are busy only once all is posted."""

    def __init__(self, replicas: int, pull: bool, posts_first: bool) -> None:
        self._pull = pull
        self._posts_first = posts_first
        self._host_free_s = [0.0] * replicas
        self._link_free_s = [0.0] * replicas

    def send(self, cost: Transfer, tokens: int, source: int, to: int, ready_s: float) -> tuple[float, float]:
        """Queue a transfer that could be posted from `ready_s` on: when links begin to move it, and when it is over."""
        hosts, links = self._host_free_s, self._link_free_s
        poster = to if self._pull else source
        begin = max(ready_s, hosts[poster])
        posted = hosts[poster] = begin + cost.posting_s(tokens)
        start = max(posted if self._posts_first else begin, links[source], links[to])
        links[source] = links[to] = moved = start + cost.occupancy_s(tokens)
        return start, max(moved, posted)

    def push(
        self, pieces: Sequence[tuple[Transfer, int, int]], source: int, start_s: float, end_s: float, layers: int
    ) -> float:
        """Send the KV of prompts, (cost, tokens, to) each, `layers` times a part of all while a step from `start_s` to
        `end_s` computes it: when all is there.

        A flow shop of two machines with equal pieces: the last one leaves at the latest of those that wait for nothing
        but the one before, from the first, and of the last (see `calibrate.transfer.TransferCosts.exposed_s`).
        """
        links, hosts = self._link_free_s, self._host_free_s
        busy = sum(cost.posting_s(tokens) + cost.occupancy_s(tokens) for cost, tokens, _ in pieces)
        ends = {source, *(to for *_, to in pieces)}
        free = max(hosts[source], *(links[n] for n in ends))
        done = max(max(free, start_s + (end_s - start_s) / layers) + busy, end_s + busy / layers)
        hosts[source] = done
        for n in ends:
            links[n] = done
        return done + max(cost.fixed_s for cost, *_ in pieces)
