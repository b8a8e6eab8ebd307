"""What a profile says of itself: where it comes from, what it covers, how far it is off. Plain text only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calibrate.kernels.heads import kind_sizes
from reports.words import NONE, quantity, size_text

if TYPE_CHECKING:
    from calibrate.profile import Profile, Residual
    from reports.profile_rates import Achieved

    Range = tuple[str, str, str]  # of what, between which sizes, by which kernels

NAMES = {
    "gemm": "GEMM",
    "prefill_attention": "prefill attention",
    "decode_attention": "decode attention",
    "moe": "experts (MoE)",
    "elementwise": "elementwise",
    "collective": "collectives",
}
"""Family -> what people call it, in the order in which it is shown."""

POINTS, SHAPES, EDGE = "single points", "unseen shapes", "beyond edge"
HELD_OUT = {
    "rows": (POINTS, "points at random"),
    "shapes": (SHAPES, "whole shapes"),
    "widths": (SHAPES, "whole widths"),
    "gpus": (SHAPES, "group sizes"),
    "batches": ("", "whole batch sizes"),
    "default": ("", "all, as unmeasured"),
    "largest m": (EDGE, "largest m"),
    "largest n or k": (EDGE, "largest n or k"),
    "longest": (EDGE, "longest"),
    "most": (EDGE, "most sequences"),
    "most tokens": (EDGE, "most tokens"),
    "most rows": (EDGE, "most rows"),
    "largest": (EDGE, "largest buffers"),
    "whole steps": (POINTS, "whole steps, none of which was fitted to"),
}
"""What was held out of the fit -> (the column of the summary that it belongs to, what it is called)."""

ERRORS = (
    "|predicted / measured - 1| of kernels that were held out of the fit: single points between others, shapes of "
    "which nothing was seen, and sizes beyond the largest that was seen (the worst of those)."
)


def family_name(family: str) -> str:
    """What people call a family."""
    return {"step": "sums for steps"}.get(family) or NAMES.get(family, family)


def origin(profile: Profile) -> str:
    """Who measured what the profile was fitted to, in a sentence."""
    said = [
        f"{source.facts.get('measured_by', 'an unnamed person')} ({source.facts.get('licence', 'licence not stated')})"
        for source in profile.sources
    ]
    if not said:
        return "It does not say who measured what it was fitted to."
    return f"Fitted to kernel times measured by {'; and by '.join(dict.fromkeys(said))}."


def sources(profile: Profile) -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    """(families, facts by name, notes) of every source."""
    titles = {
        "measured_by": "Measured by",
        "device": "On",
        "software": "Software",
        "taken": "Taken",
        "source": "Source",
        "licence": "Licence",
    }
    found = []
    for source in profile.sources:
        facts = [(title, str(source.facts.get(key) or "not stated")) for key, title in titles.items()]
        notes = [str(note) for note in source.facts.get("notes") or ()]
        found.append((", ".join(map(family_name, source.families)), facts, notes))
    return found


def limits(profile: Profile) -> list[str]:
    """What the profile cannot say from measurements."""
    said = []
    if profile.missing:
        said.append(f"Not measured, priced from the datasheet: {', '.join(map(family_name, profile.missing))}.")
    if profile.only is not None:
        said.append(f"Of one model alone, {_count(len(profile.only), 'GEMM shape')}: other models are refused.")
    return said


def cached(found: Iterable[Achieved]) -> str:
    """What rates above the datasheet's mean; empty where there are none."""
    above = any(each.best > 1.01 * each.limit for each in found)
    return "More than 100 %: the data were in a cache, or a switch did the sums." if above else ""


def ranges(profile: Profile) -> list[tuple[str, str, str, str]]:
    """(family, of which dtype or operation, between which sizes, by which kernels) of everything that was measured."""
    return [
        (family_name(family), of, sizes, kernels)
        for family, describe in _RANGES.items()
        if family in profile.families
        for of, sizes, kernels in _alike(describe(profile.families[family]))
    ]


def summary(residuals: Sequence[Residual]) -> list[tuple[str, str, list[Residual | None]]]:
    """(family, kind, worst of single points, unseen shapes and beyond the edge) of the kinds that sum a family up:
    the one of all points where there is one."""
    rows = []
    for family in dict.fromkeys(each.family for each in residuals):
        mine = [each for each in residuals if each.family == family]
        kinds = dict.fromkeys(each.kind for each in mine)
        for kind in ["all"] if "all" in kinds else kinds:
            cells = []
            for column in (POINTS, SHAPES, EDGE):
                here = [r for r in mine if r.kind == kind and HELD_OUT.get(r.what, ("", ""))[0] == column]
                here = [r for r in here if math.isfinite(r.median)]
                cells.append(max(here, key=lambda r: r.median) if here else None)
            rows.append((family_name(family), kind, cells))
    return rows


def held_out(what: str) -> str:
    """What was held out, for people."""
    return HELD_OUT.get(what, ("", what))[1]


def per_cent(share: float) -> str:
    """0.0271 -> `2.7 %`; a dash where there is no number."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else NONE


def rate(per_s: float, bound: str) -> str:
    """A rate in the unit that suits it: `742 TFLOP/s`, `2.95 TB/s`, `380 GB/s`."""
    if bound == "flops":
        return f"{quantity(per_s / 1e12)} TFLOP/s"
    return f"{quantity(per_s / 1e12)} TB/s" if per_s >= 1e12 else f"{quantity(per_s / 1e9)} GB/s"


def duration(seconds: float) -> str:
    """Seconds of a kernel: `2.4 µs`, `13 ms`."""
    scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    return f"{seconds * scale:.3g} {unit}"


def span(low: float, high: float) -> str:
    """`1 to 4,096`."""
    return f"{round(low):,} to {round(high):,}" if round(low) != round(high) else f"{round(low):,}"


def _gemm(model: Any) -> list[Range]:
    found = []
    for weights, table in model.tables.items():
        parts = (f"{n} {span(axis[0], axis[-1])}" for n, axis in zip("mnk", table.factor.axes, strict=True))
        found.append((weights, "; ".join(parts), ""))
    return found


def _prefill(model: Any) -> list[Range]:
    found = []
    for dtype, kinds in _by_dtype(model.kinds).items():
        tokens, number = (_extent(kinds.values(), name) for name in ("q", "sequences"))
        sizes = f"prompts of {tokens} tokens, {number} at once; {_heads(kinds)}"
        found.append((f"{dtype} KV", sizes, _kernels(kinds.values())))
    return found


def _decode(model: Any) -> list[Range]:
    found = []
    for dtype, kinds in _by_dtype(model.kinds).items():
        tokens, number = (_extent(kinds.values(), name) for name in ("seen", "sequences"))
        sizes = f"{number} sequences of {tokens} tokens; {_heads(kinds)}"
        found.append((f"{dtype} KV", sizes, _kernels(kinds.values())))
    return found


def _moe(model: Any) -> list[Range]:
    found = []
    for weights in dict.fromkeys(variant.weights for variant in model.variants):
        mine = [variant for variant in model.variants if variant.weights == weights]
        tokens = span(min(v.tokens.min() for v in mine), max(v.tokens.max() for v in mine))
        layouts = {tuple(row) for v in mine for row in v.layouts.tolist()}
        shapes = _count(len({row[:4] for row in layouts}), "layer shape")
        found.append((weights, f"{tokens} tokens; {shapes} in {_count(len(layouts), 'split')}", _names(mine)))
    return found


def _elementwise(model: Any) -> list[Range]:
    found = []
    for op in dict.fromkeys(name for name, _ in model.curves):
        widths = [width for name, width in model.curves if name == op]
        curves = [curve for (name, _), curve in model.curves.items() if name == op]
        low, high = min(c.at[0] for c in curves), max(c.at[-1] for c in curves)
        rows = f"rows of {span(min(widths), max(widths))} elements"
        found.append((op, f"{rows}, {size_text(low)} to {size_text(high)} in all", ""))
    return found


def _collective(model: Any) -> list[Range]:
    found = []
    for op, backend in dict.fromkeys((op, backend) for op, backend, _ in model.curves):
        mine = {gpus: curve for (o, b, gpus), curve in model.curves.items() if (o, b) == (op, backend)}
        low, high = min(c.at[0] for c in mine.values()), max(c.at[-1] for c in mine.values())
        gpus = ", ".join(str(n) for n in sorted(mine))
        found.append((op, f"by {backend}, {gpus} GPUs; {size_text(low)} to {size_text(high)}", ""))
    return found


_RANGES: Mapping[str, Callable[[Any], list[Range]]] = {
    "gemm": _gemm,
    "prefill_attention": _prefill,
    "decode_attention": _decode,
    "moe": _moe,
    "elementwise": _elementwise,
    "collective": _collective,
}


def _alike(rows: Iterable[Range]) -> list[Range]:
    """One row for all that have the same range and kernels."""
    found: dict[tuple[str, str], list[str]] = {}
    for of, sizes, kernels in rows:
        found.setdefault((sizes, kernels), []).append(of)
    return [(", ".join(of), *rest) for rest, of in found.items()]


def _by_dtype(kinds: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, kind in kinds.items():
        found.setdefault(name.split("/")[0], {})[name] = kind
    return found


def _extent(kinds: Iterable[Any], name: str) -> str:
    """The widest measured range of an axis that is in powers of two."""
    ends = [kind.fit.extent[name] for kind in kinds]
    return span(2 ** min(low for low, _ in ends), 2 ** max(high for _, high in ends))


def _heads(kinds: Mapping[str, Any]) -> str:
    found = [kind_sizes(name) for name in kinds]
    sizes = sorted({key for _, key, value, _ in found if key == value})
    latents = sorted({key for _, key, value, _ in found if key != value})
    windows = sorted({window for *_, window in found} - {0})
    said = f"heads of {_list(sizes)} elements" if sizes else ""
    said += "; " * bool(sizes and latents) + (f"MLA with keys of {_list(latents)} elements" if latents else "")
    said += f"; windows of {_list(windows)} tokens" if windows else ""
    return said


def _kernels(kinds: Iterable[Any]) -> str:
    return _names(kind.fit for kind in kinds)


def _names(found: Iterable[Any]) -> str:
    """The libraries that ran what was measured, where that is known."""
    return ", ".join(dict.fromkeys(each.kernel for each in found if each.kernel))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _list(numbers: Sequence[int]) -> str:
    *most, last = (f"{n:,}" for n in numbers)
    return f"{', '.join(most)} and {last}" if most else last
