"""What it costs to move the KV cache of a prompt from a prefill to a decode instance.

    fixed_s                  control messages, seeing that it is over: no link is busy
    posting_s(tokens)        the initiating worker posts descriptors: its host is busy
    occupancy_s(tokens)      the busiest link moves bytes: other transfers wait for it

Bytes follow what layers keep (`kvgroups.py`) and who holds it (`routes.py`); the figures are a connector's
(`connectors.py`), which refuses some pairs (`transfer_rules.py`). Knows nothing of requests that wait for each other:
queues on links are the simulator's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibrate.connectors import Connector, Transport
from calibrate.kvgroups import KVGroup, kv_pool
from calibrate.model import ModelSpec
from calibrate.routes import Load, Side, kv_routes, load, state_routes
from calibrate.serving import served
from calibrate.transfer_rules import refusals
from servecast.errors import ServecastError

NO_LOAD = Load(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Costs of one connector between two instances, for a prompt of any length, each in O(1).

    `token_bytes` are those of a token in one layer on a destination rank, `state_bytes` those of its states in all
    layers; `groups` the layers that keep the same, as the source's engine groups them. `run_blocks`: adjacent blocks
    that make one descriptor where the connector joins them. `sent_bytes_per_s`, `received_bytes_per_s`: what one link
    of a side reaches.
    """

    connector: Connector
    transport: Transport
    layers: int
    groups: tuple[KVGroup, ...]
    token_bytes: int
    state_bytes: int
    kv: Load
    states: Load
    parts: int
    sliced: bool
    run_blocks: float
    sent_bytes_per_s: float
    received_bytes_per_s: float

    @classmethod
    def for_(
        cls, model: ModelSpec, source: Side, destination: Side, connector: Connector, run_blocks: float = 1.0
    ) -> TransferCosts:
        """The costs between a prefill side (`source`) and a decode side.

        `run_blocks`: how many adjacent blocks on average lie in the same order on both sides; 1 in a pool that has
        served for a while, `math.inf` in a fresh one. Raises `ServecastError` with every reason why the connector does
        not move this model between these sides.
        """
        problems = refusals(model, source, destination, connector)
        if not run_blocks >= 1:
            problems.append(f"run_blocks is {run_blocks!r}; expected at least 1")
        if problems:
            raise ServecastError(*problems)
        kept = served(model, source.engine)
        if "window" not in connector.keeps:
            kept = _windowless(kept)
        p, d = source.layout.tp, destination.layout.tp
        pull = connector.moves == "pull"
        transport = connector.transports[source.link.kind]
        recurrent = kept.recurrent
        return cls(
            connector=connector,
            transport=transport,
            layers=kept.layers,
            groups=kv_pool(kept, source.engine, p).groups,
            token_bytes=kept.kv_layer_bytes(d),
            state_bytes=recurrent.layers * recurrent.bytes_on_rank(d, kept.dtype_bytes) if recurrent else 0,
            kv=load(kv_routes(kept, source.layout, destination.layout), source, destination, pull),
            states=load(state_routes(kept, source.layout, destination.layout), source, destination, pull)
            if recurrent
            else NO_LOAD,
            parts=1 if kept.latent else 2,
            sliced=not kept.latent and kept.kv_heads_per_rank(p) != kept.kv_heads_per_rank(d),
            run_blocks=run_blocks,
            sent_bytes_per_s=transport.share * source.link.bandwidth_bytes_per_s,
            received_bytes_per_s=transport.share * destination.link.bandwidth_bytes_per_s,
        )

    @property
    def fixed_s(self) -> float:
        """Seconds of a request in which neither a link nor a worker is busy."""
        return self.transport.fixed_s

    def moved_bytes(self, tokens: int) -> float:
        """Bytes that cross between the sides: whole blocks, each copy of a head counted."""
        return self.kv.total * self._rank_bytes(tokens) + self.states.total * self.state_bytes

    def source_s(self, tokens: int) -> float:
        """Seconds that the busiest link of the source takes to send."""
        return (self.kv.sent * self._rank_bytes(tokens) + self.states.sent * self.state_bytes) / self.sent_bytes_per_s

    def destination_s(self, tokens: int) -> float:
        """Seconds that the busiest link of the destination takes to receive."""
        moved = self.kv.received * self._rank_bytes(tokens) + self.states.received * self.state_bytes
        return moved / self.received_bytes_per_s

    def occupancy_s(self, tokens: int) -> float:
        """Seconds for which the transfer occupies links: those of its slowest side."""
        return max(self.source_s(tokens), self.destination_s(tokens))

    def descriptors(self, tokens: int) -> float:
        """Descriptors that the busiest initiating rank posts, keys and values apart, each for one block (of one layer)
        or what the connector joins; a state takes two (convolution and recurrence)."""
        unit = self.connector.descriptor
        states = 2 * self.states.posted * sum(group.layers for group in self.groups if group.kind == "state")
        if isinstance(unit, int):
            return self.kv.posted * -(-tokens // unit)
        if unit == "layer":
            return self.kv.posted * self.layers
        found = 0.0
        for group in self.groups:
            if group.kind != "state":
                blocks = group.held_blocks(tokens, tokens)
                if self.sliced:
                    blocks *= group.block_size if self.connector.slice == "token" else 1
                    found += blocks * group.layers
                else:
                    found += max(min(blocks, 1), blocks / (self.run_blocks if unit == "run" else 1)) * group.layers
        return self.parts * self.kv.posted * found + states

    def posting_s(self, tokens: int) -> float:
        """Host seconds for which the busiest initiating worker posts descriptors: of the decode side where the
        connector pulls, of the prefill side where it pushes."""
        return self.descriptors(tokens) * self.transport.descriptor_s

    def seconds(self, tokens: int) -> float:
        """A transfer that waits for no other one, from the end of the prefill until the decode side has it all."""
        return self.fixed_s + self._busy_s(tokens)

    def pieces(self, chunks: int = 1) -> int:
        """In how many pieces a prompt is sent that is computed in so many chunks."""
        return {"whole": 1, "chunks": chunks, "layers": self.layers}[self.connector.pieces]

    def exposed_s(self, tokens: int, prefill_s: float, chunks: int = 1) -> float:
        """Seconds of the transfer that are left when a prefill of `prefill_s` ends, pieces being sent once computed.

        With n equal pieces, T seconds of prefill and X of transfer, piece i can be sent at i T/n and takes X/n, one
        after the other: all are there at max over i of (i T/n + (n - i + 1) X/n), which is largest at the first or the
        last piece. Left after T: max(X/n, X - (n - 1) T/n); all of X where n is 1. The schedule is a flow shop of two
        machines (Johnson, 1954); sending layers while the next ones are computed is Splitwise's (arXiv:2311.18677,
        section IV.C) and Mooncake's (arXiv:2407.00079, section 5.2). `fixed_s` is left in any case.
        """
        n, busy = self.pieces(chunks), self._busy_s(tokens)
        return self.fixed_s + max(busy / n, busy - (n - 1) * prefill_s / n)

    def _busy_s(self, tokens: int) -> float:
        posting, wire = self.posting_s(tokens), self.occupancy_s(tokens)
        return posting + wire if self.transport.posts_first else max(posting, wire)

    def _rank_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values that a destination rank would hold in all layers."""
        held = (g.held_blocks(tokens, tokens) * g.block_size * g.layers for g in self.groups if g.kind != "state")
        return sum(held) * self.token_bytes


def fit_transport(moved_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(fixed_s, bytes_per_s) of a connector from transfers of several sizes over one link: the line through them with
    the least squares of relative errors. Raises `ServecastError` where there is no such line."""
    sizes, times = np.asarray(moved_bytes, float), np.asarray(seconds, float)
    if len(set(moved_bytes)) < 2 or len(sizes) != len(times) or not (times > 0).all():
        raise ServecastError("transfers: expected at least two sizes, each with a time above 0 s")
    (fixed, slope), *_ = np.linalg.lstsq(np.stack([1 / times, sizes / times], 1), np.ones(len(times)), rcond=None)
    if fixed < 0 or slope <= 0:
        raise ServecastError("transfers: larger ones must take longer, in proportion or less; these do not")
    return float(fixed), float(1 / slope)


def _windowless(model: ModelSpec) -> ModelSpec:
    """The model with all layers kept as full ones, as vLLM does for connectors that know no others."""
    full = model.attention_layers > sum(window.layers for window in model.windows)
    return replace(model, windows=()) if full else model
