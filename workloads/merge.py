"""Several traces as one: each becomes a class of requests. It knows nothing of where the traces come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servecast.errors import ServecastError, one_of
from workloads.prefix import Prefix
from workloads.trace import Ints, Trace, Turns


def merge(parts: Sequence[tuple[str, Trace]]) -> Trace:
    """All requests of the named traces in order of arrival; equal times in the order of the parts.

    Each request is of the class of its part; a part with classes of its own gives `part/class`. Turns go on following
    their own sessions, and prefix ids are renumbered, so that parts never share a prefix. Who gives up and parallel
    samples are kept; drop counts and notes say which part they are of.
    Raises ServecastError for no parts, equal or empty names, and prefix blocks of different sizes.
    """
    _check(parts)
    traces = [trace for _, trace in parts]
    sizes = [len(trace) for trace in traces]
    order = np.argsort(np.concatenate([trace.arrival_s for trace in traces]), kind="stable")
    index, names = _classes(parts)
    return Trace(
        arrival_s=np.concatenate([trace.arrival_s for trace in traces])[order],
        prompt_tokens=np.concatenate([trace.prompt_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        max_tokens=np.concatenate([trace.max_tokens for trace in traces])[order],
        source="merged: "
        + "; ".join(
            f"{name} ({size:,} requests, {trace.source})" for (name, trace), size in zip(parts, sizes, strict=True)
        ),
        prefix=_prefix(traces, order),
        turns=_turns(traces, order),
        classes=(index[order], names),
        patience_s=None
        if all(trace.patience_s is None for trace in traces)
        else np.concatenate([np.full(len(t), np.inf) if t.patience_s is None else t.patience_s for t in traces])[order],
        samples=None
        if all(trace.samples is None for trace in traces)
        else np.concatenate([np.ones(len(t), np.int64) if t.samples is None else t.samples for t in traces])[order],
        dropped={f"{name}: {reason}": count for name, trace in parts for reason, count in trace.dropped.items()},
        notes=tuple(f"{name}: {note}" for name, trace in parts for note in trace.notes),
    )


def _check(parts: Sequence[tuple[str, Trace]]) -> None:
    names = [name for name, _ in parts]
    problems = [] if parts else ["merge: no traces given; give at least one"]
    problems += [f"merge: two parts are named {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
    problems += [f"merge: part {i} has no name" for i, name in enumerate(names) if not name]
    sizes = {name: trace.prefix.block_tokens for name, trace in parts if trace.prefix is not None}
    if len(set(sizes.values())) > 1:
        found = one_of(f"{name} {size}" for name, size in sizes.items())
        problems.append(f"merge: prefix blocks differ in size ({found} tokens); bring the traces to one size first")
    if problems:
        raise ServecastError(*problems)


def _classes(parts: Sequence[tuple[str, Trace]]) -> tuple[Ints, tuple[str, ...]]:
    """(int64 index of all requests, part after part; names)."""
    index: list[Ints] = []
    names: list[str] = []
    for name, trace in parts:
        inner, own = trace.classes if trace.classes is not None else (np.zeros(len(trace), dtype=np.int64), ("",))
        index.append(inner + len(names))
        names += [f"{name}/{one}" if one else name for one in own]
    return np.concatenate(index), tuple(names)


def _turns(traces: Sequence[Trace], order: Ints) -> Turns | None:
    if all(trace.turns is None for trace in traces):
        return None
    previous, think_s, session, first, used = [], [], [], 0, 0
    for trace in traces:
        n = len(trace)
        own = trace.turns or Turns(np.full(n, -1), np.zeros(n))
        previous.append(np.where(own.previous >= 0, own.previous + first, -1))
        think_s.append(own.think_s)
        each = own.sessions() if own.session is None else np.unique(own.session, return_inverse=True)[1]
        session.append(each + used)
        first, used = first + n, used + n
    position = np.empty(order.size + 1, dtype=np.int64)  # its last entry is where -1 points
    position[order] = np.arange(order.size)
    position[-1] = -1
    spawned = any(trace.turns is not None and trace.turns.session is not None for trace in traces)
    sessions = np.concatenate(session)[order] if spawned else None
    return Turns(position[np.concatenate(previous)[order]], np.concatenate(think_s)[order], sessions)


def _prefix(traces: Sequence[Trace], order: Ints) -> Prefix | None:
    known = [trace.prefix for trace in traces if trace.prefix is not None]
    if not known:
        return None
    counts, ids, used = [], [], 0
    for trace in traces:
        if trace.prefix is None:
            counts.append(np.zeros(len(trace), dtype=np.int64))
            continue
        distinct, mine = np.unique(trace.prefix.ids, return_inverse=True)
        counts.append(np.diff(trace.prefix.offsets))
        ids.append(mine.astype(np.int64) + used)
        used += distinct.size
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    # Chained ids are also right where ids name contents alone; the other way round they are not.
    joined = Prefix(offsets, np.concatenate(ids), known[0].block_tokens, all(prefix.chained for prefix in known))
    return joined.rows(order)
