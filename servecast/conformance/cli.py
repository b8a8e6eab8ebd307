"""`servecast calibrate observe` and `check`: the steps of one's own engine, and whether our scheduler makes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from servecast.arguments import scenario_argument, set_option
from servecast.errors import ServecastError

if TYPE_CHECKING:
    from calibrate.observe.steps import ObservedRun
    from servecast.setup import Setup

OPTIONS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "async_scheduling",
    "enable_chunked_prefill", "long_prefill_token_threshold", "scheduler_reserve_full_isl", "scheduling_policy",
)  # fmt: skip
"""Engine options that both a record and a scenario have, by the same names."""


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("observer.py"),
    show_default=True,
    help="Where to write the observer.",
)
def observe(out: Path) -> None:
    """Write a small file that lets your own vLLM record its steps.

    It watches vLLM's scheduler and changes nothing; it needs no servecast where vLLM runs.
    """
    from importlib.resources import files

    if not out.stem.isidentifier() or out.suffix != ".py":
        raise ServecastError(f"--out {out}: vLLM imports it by its name; call it observer.py, or another word with .py")
    text = (files("calibrate.observe") / "observer.py").read_text(encoding="utf-8")
    try:
        if out.exists() and out.read_text(encoding="utf-8", errors="replace") != text:
            raise ServecastError(f"--out {out}: exists and is another file; name another, or take it away")
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServecastError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    click.echo(f"Start vLLM with it:  PYTHONPATH={out.absolute().parent} SERVECAST_OBSERVE=steps.jsonl \\")
    click.echo(f"                     vllm serve MODEL ... --scheduler-cls {out.stem}.Observer")
    click.echo("Then, with a scenario that describes it:  servecast calibrate check SCENARIO --steps steps.jsonl")


@click.command()
@scenario_argument
@click.option(
    "--steps",
    "file",
    type=click.Path(path_type=Path),
    required=True,
    help="What the observer wrote, or a steps_X.csv with requests_X.csv beside it.",
)
@set_option
def check(scenario: Path, file: Path, overrides: tuple[str, ...]) -> None:
    """Replay an engine's recorded steps through the scheduler of SCENARIO, and say how many agree.

    Requests arrive and steps begin when they did in the engine; what a step holds is planned anew and compared.
    """
    from calibrate.observe.read import read_steps
    from servecast.conformance.check import check_conformance
    from servecast.scenario import load_scenario
    from servecast.setup import set_up
    from sim.schedulers import scheduler_of

    run = read_steps(file)
    setup = set_up(load_scenario(scenario, overrides))
    engine = setup.pool.engine
    if engine.engine != "vllm":
        raise ServecastError(
            f"engine.preset: {engine.preset} is not vLLM, whose steps {file} holds; take a preset of it"
        )
    for warning in contradictions(run, setup):
        click.echo(f"Warning: {warning}.")
    click.echo(check_conformance(run, scheduler_of(engine), num_blocks(run, setup), engine.block_size).text())


COMMANDS = (observe, check)


def num_blocks(run: ObservedRun, setup: Setup) -> int:
    """KV blocks to replay with: the scenario's own word, else the engine's, else the memory plan's."""
    if setup.pool.engine.num_gpu_blocks_override is not None:
        return setup.pool.engine.num_gpu_blocks_override
    return int(run.facts.get("num_gpu_blocks", setup.pool.memory.num_gpu_blocks))


def contradictions(run: ObservedRun, setup: Setup) -> Iterator[str]:
    """Where what the engine said of itself is not what the scenario describes, each in a sentence without its stop."""
    facts, engine = run.facts, setup.pool.engine
    for option in OPTIONS:
        if option in facts and facts[option] != engine.options[option]:
            ours, source = engine.options[option], engine.sources.get(option, "the preset")
            yield f"the engine ran with {option} {facts[option]}, the scenario has {ours} ({source})"
    if facts.get("tensor_parallel_size", setup.pool.layout.tp) != setup.pool.layout.tp:
        tp = facts["tensor_parallel_size"]
        yield f"the engine ran with tensor_parallel_size {tp}, the scenario has cluster.tp {setup.pool.layout.tp}"
    if facts.get("data_parallel_size", 1) > 1:
        yield f"the engine is one of {facts['data_parallel_size']} data-parallel ones, which may hold back prefills"
    if facts.get("enable_prefix_caching"):
        yield "the engine ran with prefix caching, and nobody knows what its prompts shared: steps with a hit differ"
    blocks, ours = facts.get("num_gpu_blocks"), setup.pool.memory.num_gpu_blocks
    if blocks is not None and blocks != ours:
        used = "the scenario's" if engine.num_gpu_blocks_override is not None else "the engine's"
        off = f"{100 * (ours / blocks - 1):+.1f} %" if blocks else "none"
        yield f"the engine has {blocks:,} KV blocks, the scenario {ours:,} ({off}); {used} are used here"
    yield from _identity(run, setup)


def _identity(run: ObservedRun, setup: Setup) -> Iterator[str]:
    """Version, model, number formats and GPU."""
    facts, engine = run.facts, setup.pool.engine
    preset = _preset_of(str(facts.get("vllm", "")))
    if preset and preset != engine.preset:
        yield f"the engine is vLLM {facts['vllm']}, for which {preset} is the preset; the scenario has {engine.preset}"
    name = setup.scenario.model
    if "model" in facts and "/" not in name and _plain(name) not in _plain(facts["model"]):
        yield f"the engine served {facts['model']}, the scenario {name}"
    for option in ("dtype", "kv_cache_dtype"):
        word = getattr(engine, option)
        if facts.get(option, "auto") != "auto" and word != "auto" and _dtype(word) != _dtype(facts[option]):
            yield f"the engine ran with {option} {facts[option]}, the scenario has {word}"
    key = re.findall(r"[a-z]*\d+[a-z]*", setup.pool.gpu.id) or [setup.pool.gpu.id]
    if "gpu" in facts and _plain(key[0]) not in _plain(facts["gpu"]):
        yield f"the engine ran on {facts['gpu']}, the scenario on {setup.pool.gpu.name}"


def _preset_of(version: str) -> str | None:
    """The preset for a version of vLLM: the nearest one below."""
    from calibrate.engine import preset_names

    def number(text: str) -> tuple[int, ...]:
        found = re.search(r"(\d{1,4})\.(\d{1,4})", text)
        return tuple(map(int, found.groups())) if found else ()

    below = [name for name in preset_names() if () < number(name) <= number(version)]
    return max(below, key=number, default=None)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _dtype(word: str) -> str:
    return {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}.get(word, word)
