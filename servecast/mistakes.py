"""What pydantic finds wrong with a scenario, said to a person: what was found, what is expected, an example.

It knows the names of the keys only as far as an example helps.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import Any

from servecast.errors import nearest, one_of

BEAMS = (
    "beam search is not modelled by itself: vLLM's front end asks for one token of every beam at a time, each time "
    "with the whole prompt. Write these requests as a trace, a turn of a session for each token (docs/workloads.md)"
)
NOT_YET = {
    "links": "links between pools are not modelled yet",
    "best_of": "best_of is not modelled, and newer engines do not have it; n is how many samples each request asks for",
    "use_beam_search": BEAMS,
    "beam_width": BEAMS,
}
"""Keys that the design or an engine has and this version does not."""

EXAMPLES = {
    "model": "model: llama-3.1-8b",
    "engine": "engine: {preset: vllm-0.19}",
    "cluster": "cluster: {gpu: h100-sxm}",
    "gpu": "gpu: h100-sxm",
    "pools": "pools: [{gpu: h100-sxm}]",
    "workload": "workload: {trace: requests.csv}, or arrivals or closed_loop with num_requests and lengths",
    "window": "window: [0s, 10min]",
    "kv_tiers": "kv_tiers: [{kind: host, capacity: 64GiB}]",
    "capacity": "capacity: 64GiB",
    "arrivals": "arrivals: {kind: poisson, rate: 8}",
    "closed_loop": "closed_loop: {concurrency: 64}",
    "concurrency": "concurrency: 64",
    "lengths": "lengths: {prompt: {kind: fixed, tokens: 1024}, output: {kind: fixed, tokens: 256}}",
    "prompt": "prompt: {kind: fixed, tokens: 1024}",
    "output": "output: {kind: fixed, tokens: 256}",
    "slo": "slo: {ttft: 1s, tpot: 50ms}",
}

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of that size",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "list_type": "a list",
    "greater_than_equal": "{ge} or more",
    "greater_than": "above {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "below {lt}",
    "literal_error": "one of {expected}",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of at most {max_length}",
}
"""pydantic's kinds of error -> what was expected, with fields of its context."""


class MistakeError(ValueError):
    """Several problems of one value; each continues the value's key path (`.kind: unknown ...` or `: ...`)."""

    def __init__(self, problems: Iterable[str]) -> None:
        super().__init__()
        self.problems = list(problems)


def shown(value: object) -> str:
    """A value as the file has it, cut short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value) if isinstance(value, date) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def say(error: Any, key: str, allowed: list[str]) -> list[str]:
    """A pydantic error as sentences that begin with `key`, its key path; `allowed` are the keys beside it."""
    kind, found = error["type"], error.get("input")
    name = key.rpartition(".")[2]
    example = f"; for example {EXAMPLES[name]}" if name in EXAMPLES else ""
    if kind in ("extra_forbidden", "invalid_key"):
        if name in NOT_YET:
            return [f"{key}: {NOT_YET[name]}"]
        return [f"{key}: unknown key{nearest(name, allowed)}; allowed here: {one_of(allowed)}"]
    if kind == "missing":
        return [f"{key}: missing{example}"]
    if kind == "value_error":
        cause = error["ctx"]["error"]
        return [key + problem for problem in cause.problems] if isinstance(cause, MistakeError) else [f"{key}: {cause}"]
    if kind not in _EXPECTED:
        message = str(error["msg"])
        return [f"{key}: {shown(found)} is not allowed: {message[0].lower()}{message[1:]}{example}"]
    context = {name: f"{v:,.12g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v
               for name, v in error.get("ctx", {}).items()}  # fmt: skip
    expected = _EXPECTED[kind].format_map(context)
    if kind == "int_type" and isinstance(found, float) and found.is_integer():
        example = f"; write {found:.0f}"
    if kind == "model_type" and name == "network":  # the workload's; the cluster's is the name of an adapter
        example = "; for example network: {latency: 20ms}"
    if kind == "string_type" and isinstance(found, int | float) and not example:
        example = f'; write "{shown(found)}" in quotes'
    return [f"{key}: {shown(found)} is not {expected}{example}"]
