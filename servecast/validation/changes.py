"""What may be different in a real deployment: one change a line, made of scenario keys, so that anybody can try it.

It knows which values are worth trying, and nothing of what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from calibrate.engine import check_options
from calibrate.options import family
from servecast.errors import ServecastError, one_of
from servecast.parts import Part
from servecast.scenario import Scenario
from servecast.setup import Setup, set_up
from servecast.units import duration_text
from servecast.workload import WorkloadPart

NO_REQUESTS = {
    "num_requests": 1,
    "arrivals": {"kind": "all-at-once"},
    "lengths": {"prompt": {"kind": "fixed", "tokens": 1}, "output": {"kind": "fixed", "tokens": 1}},
}
"""A workload to set a deployment up with, whose requests are replaced."""


@dataclass(frozen=True, slots=True)
class Change:
    """words: what is different, to follow "with". host: keys of the scenario's `host` and their values (seconds, or a
    factor). engine: engine options; None takes one away."""

    words: str
    host: Mapping[str, float] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    def sets(self) -> tuple[str, ...]:
        """The `--set` texts that make the change."""
        host = [f"host.{k}={f'{v:.4g}' if k == 'kernels' else duration_text(v)}" for k, v in self.host.items()]
        return (*host, *(f"engine.{key}={_yaml(value)}" for key, value in self.engine.items()))

    def apply(self, scenario: Scenario) -> Setup:
        """The scenario's deployment with the change, and a request of no account. Raises ServecastError where the
        engine or the memory does not allow it."""
        options = {key: value for key, value in {**scenario.engine_options, **self.engine}.items() if value is not None}
        check_options(options)
        parts: dict[str, Part | dict[str, Any]] = {
            "host": scenario.host.model_copy(update=dict(self.host)),
            "engine": options,
            "workload": WorkloadPart.model_validate(NO_REQUESTS),
        }
        return set_up(scenario.model_copy(update=parts))


def changes(setup: Setup) -> Iterator[Change]:
    """All that is worth trying on this deployment."""
    yield from _host(setup)
    yield from _front_end(setup)
    for factor, words in ((0.9, "10 % faster"), (1.1, "10 % slower")):
        kernels = factor * (setup.scenario.host.kernels or 1.0)
        if 0.1 < kernels < 10:
            yield Change(f"kernels {words}", host={"kernels": kernels})
    if setup.pool.engine.engine == "vllm":  # of others nobody has said which options differ between deployments
        yield from _memory(setup)
        yield from _switches(setup)
        yield from _batches(setup)
    yield from _presets(setup)


def _host(setup: Setup) -> Iterator[Change]:
    host = setup.pool.engine.host
    overlapped = setup.pool.engine.async_scheduling
    base = host.async_base_s if overlapped else host.sync_base_s
    each = host.async_per_sequence_s if overlapped else host.sync_per_sequence_s
    for factor, words in ((2.0, "twice"), (0.5, "half")):
        yield Change(f"{words} the host's time a step", host={"step": factor * base, "per_sequence": factor * each})
        if overlapped and host.bubble_s > 0:
            yield Change(f"{words} the gap between steps", host={"bubble": factor * host.bubble_s})


def _front_end(setup: Setup) -> Iterator[Change]:
    now = setup.pool.engine.front_end
    for more in (0.005, 0.02):
        yield Change(f"{1e3 * more:.0f} ms more of the front end a request", host={"request": now.request_s + more})
    if now.request_s or now.prompt_token_s:
        yield Change("no front end (requests handed to the engine itself)", host={"request": 0.0, "prompt_token": 0.0})


def _memory(setup: Setup) -> Iterator[Change]:
    blocks = setup.pool.memory.num_gpu_blocks
    for factor, words in ((0.8, "20 % fewer"), (1.2, "20 % more")):
        yield Change(f"{words} KV blocks", engine={"num_gpu_blocks_override": round(factor * blocks)})
    word = "auto" if setup.pool.engine.kv_cache_dtype.startswith("fp8") else "fp8"
    yield Change(f"a KV cache of dtype {word}", engine={"kv_cache_dtype": word})


def _switches(setup: Setup) -> Iterator[Change]:
    for option, words in (("async_scheduling", "asynchronous scheduling"), ("enable_prefix_caching", "prefix caching")):
        on = setup.pool.engine.options[option]
        yield Change(f"{words} {'off' if on else 'on'}", engine={option: not on})


def _batches(setup: Setup) -> Iterator[Change]:
    """Limits of a batch that some version has by default on some GPU."""
    presets = family(setup.pool.engine.engine)["presets"].values()
    rules = [rule for preset in presets for rule in preset["batch_defaults"]]
    for option in ("max_num_seqs", "max_num_batched_tokens"):
        now = setup.pool.engine.options[option]
        for value in sorted({rule[option] for rule in rules} - {now}):
            yield Change(f"{option} {value:,} instead of {now:,}", engine={option: value})


def _presets(setup: Setup) -> Iterator[Change]:
    options = {key: value for key, value in setup.scenario.engine_options.items() if key != "preset"}
    for preset in family(setup.pool.engine.engine)["presets"]:
        if preset == setup.pool.engine.preset:
            continue
        dropped = [key for key, value in options.items() if _refused(preset, key, value)]
        without = f" (which has no {one_of(dropped)})" if dropped else ""
        yield Change(
            f"the scheduler and the defaults of {preset}{without}",
            engine={"preset": preset, **dict.fromkeys(dropped)},
        )


def _refused(preset: str, option: str, value: object) -> bool:
    try:
        check_options({"preset": preset, option: value})
    except ServecastError:
        return True
    return False


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
