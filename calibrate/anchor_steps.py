"""Recorded steps of an engine, as something to fit host times and a factor on all kernels to. It simulates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from calibrate.anchor import Anchor, Floats, Ints, Scalar, Values, fit_anchor
from calibrate.cost import compile_cost
from calibrate.engine import EngineSpec, HostTime
from servecast.errors import ServecastError

if TYPE_CHECKING:
    import polars as pl

    from calibrate.layout import Parallelism
    from calibrate.model import ModelSpec
    from calibrate.observe.steps import ObservedRun
    from calibrate.prices import Prices

BINS = 4.0
"""Steps are alike whose decodes, KV tokens and prompt tokens differ by less than this factor."""


STEP_NOISE = 0.05
"""How much prices of unlike steps are off from each other: kernels are within 1 to 4 %, sums of them within 6 %."""


KINDS = ("decode", "prefill", "mixed")


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Recorded steps, in order, and what is known of them; float64[n], seconds.

    seconds: what the engine took. kernels_s: what its kernels cost; launch_s: what launching them takes at least;
    added_s: what it takes besides, on a CPU.
    sequences: that it computed. heavy: 1 where most tokens are of prompts. kind: index into KINDS. cell: of steps that
    are alike. overlapped: the host works while the GPU does.
    """

    seconds: Floats
    kernels_s: Floats
    launch_s: Floats
    added_s: Floats
    sequences: Floats
    heavy: Floats
    kind: Ints
    cell: Ints
    overlapped: bool

    def predicted(self, values: Values) -> Floats:
        """Seconds of every step with the scalars `step`, `per_sequence`, `bubble` and `kernels`, as
        `calibrate.cost.CompiledCost` composes them; `prefill` is a factor on `kernels` in heavy steps."""
        gpu = self.kernels_s * values["kernels"] * values.get("prefill", 1.0) ** self.heavy + self.added_s
        host = values["step"] + values["per_sequence"] * self.sequences
        if self.overlapped:
            return np.asarray(values["bubble"] + np.maximum(gpu, host + self.launch_s))
        return np.asarray(host + np.maximum(gpu, self.launch_s))

    def part(self, rows: NDArray[np.bool_]) -> Steps:
        """Some of them."""
        names = [f.name for f in fields(self) if f.name != "overlapped"]
        return Steps(**{name: getattr(self, name)[rows] for name in names}, overlapped=self.overlapped)

    def fit(self, values: Values, scalars: Sequence[Scalar]) -> Anchor:
        """Fit `scalars`; of those that are not among them, `values` hold. Cells count alike, by their medians."""
        order = np.argsort(self.cell, kind="stable")
        cuts = np.flatnonzero(np.diff(self.cell[order])) + 1

        def medians(errors: Floats) -> Floats:
            return np.array([np.median(cell) for cell in np.split(errors[order], cuts)])

        def errors(candidate: Values) -> Floats:
            return np.log(self.predicted({**values, **candidate}) / self.seconds)

        now = errors(values)
        within, size = np.empty_like(now), np.diff([0, *cuts, len(order)])
        within[order] = np.abs(now[order] - np.repeat(medians(now), size))
        noise = np.sqrt(STEP_NOISE**2 + (1.4826 * 1.2533 * medians(within)) ** 2 / size)
        return fit_anchor(lambda candidate: medians(errors(candidate)), noise, scalars)


def recorded_steps(
    run: ObservedRun, model: ModelSpec, layout: Parallelism, engine: EngineSpec, prices: Prices
) -> Steps:
    """A record's steps that computed anything, priced. Raises ServecastError where they cannot be this engine's."""
    import polars as pl

    tokens = pl.col("decodes") + pl.col("chunk_tokens").list.sum()
    table = run.steps.with_columns(tokens=tokens, sequences=pl.col("decodes") + pl.col("chunk_tokens").list.len())
    if problems := _not_ours(table, engine):
        raise ServecastError(*(f"{run.path}: {problem}" for problem in problems))
    table = table.filter((table["tokens"] > 0) & (table["busy_s"] > 0))
    if not len(table):
        raise ServecastError(f"{run.path}: holds no step that computed anything and took time")
    idle = HostTime(*[0.0] * len(fields(HostTime)))
    launching = replace(
        idle, **{n: getattr(engine.host, n) for n in idle.__slots__ if n.endswith(("launch_s", "layer_s"))}
    )
    free, bound = (compile_cost(model, layout, replace(engine, host=h), prices) for h in (idle, launching))
    rows = table.select("chunk_tokens", "chunk_cached", "decodes", "kv_tokens", "tokens").rows()
    decodes, new = table["decodes"].to_numpy(), (table["tokens"] - table["decodes"]).to_numpy()
    sizes = np.stack([decodes, table["kv_tokens"].to_numpy(), new])
    alike = np.floor(np.log(np.maximum(sizes, 0.5)) / np.log(BINS))
    return Steps(
        seconds=table["busy_s"].to_numpy(),
        kernels_s=np.array([free.step_s(list(zip(q, c, strict=True)), n, kv) for q, c, n, kv, _ in rows]),
        launch_s=np.array([bound.launch_s[t] if q else bound.decode_floor_s[n] for q, _, n, _, t in rows]),
        added_s=np.array(
            [
                bound.tokens_s[t] - free.tokens_s[t] if q else bound.decode_base_s[n] - free.decode_base_s[n]
                for q, _, n, _, t in rows
            ]
        ),
        sequences=table["sequences"].to_numpy().astype(np.float64),
        heavy=(new > decodes).astype(np.float64),
        kind=np.where(new == 0, 0, np.where(decodes == 0, 1, 2)),
        cell=np.unique(alike, axis=1, return_inverse=True)[1].reshape(-1),
        overlapped=engine.async_scheduling,
    )


def _not_ours(steps: pl.DataFrame, engine: EngineSpec) -> list[str]:
    """Why this engine could not have made the steps."""
    said = []
    for column, option in (("tokens", "max_num_batched_tokens"), ("sequences", "max_num_seqs")):
        most, limit = int(steps[column].max() or 0), getattr(engine, option)  # type: ignore[arg-type]
        if most > limit:
            said.append(f"a step has {most:,} {column}, the scenario's engine.{option} is {limit:,}; set that of yours")
    if drafts := int((steps["draft_tokens"] > 0).sum()):
        said.append(f"speculative decoding in {drafts:,} steps, which is not modelled")
    return said
