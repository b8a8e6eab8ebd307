"""`servecast memory`: does a model fit, what goes where, which option to change. Heavy modules are imported late."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from servecast.errors import ServecastError, nearest, one_of

if TYPE_CHECKING:
    from calibrate.kvlayouts import LayoutUse
    from reports.memory.plan import Planned

PAGE = Path("memory.html")
DEFAULT_PRESET = "vllm-0.32"
LAYOUT = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
          "decode_context_parallel_size": "dcp", "prefill_context_parallel_size": "pcp",
          "enable_expert_parallel": "ep"}  # fmt: skip
"""The engine's own names for what the command has short names for: a pasted `vllm serve` line works too."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.option("--gpu", required=True, help="An id of `servecast list gpus`.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel GPUs.")
@click.option("--pp", type=click.IntRange(1), default=1, help="Pipeline stages.")
@click.option("--dp", type=click.IntRange(1), default=1, help="Data parallel groups of one engine.")
@click.option("--ep", is_flag=True, help="Deal whole experts out over tp x dp GPUs.")
@click.option("--dcp", type=click.IntRange(1), default=1, help="Decode context parallel GPUs, of the tp.")
@click.option("--pcp", type=click.IntRange(1), default=1, help="Prefill context parallel groups of tp GPUs.")
@click.option("--preset", default=DEFAULT_PRESET, show_default=True, help="One of `servecast list presets`.")
@click.option(
    "--logged",
    multiple=True,
    metavar="TERM=SIZE",
    help="What an engine logged, in place of ours: weights=65.97GiB; also activations, cuda_graphs, communication, "
    "other. May be repeated.",
)
@click.option(
    "--request", metavar="PROMPT/OUTPUT", help="Draw the memory of a request of so many tokens into an HTML page."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default=str(PAGE),
    help="Where that page goes.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    help="Compare layouts of the KV cache on the lengths of these requests: grown, reserved, paged.",
)
@click.option("--kv-budget", type=click.IntRange(1), help="With --trace: also keep at most so many tokens a sequence.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[--ENGINE-OPTION VALUE]...")
def memory(
    model: str,
    gpu: str,
    preset: str,
    logged: tuple[str, ...],
    request: str | None,
    out: Path | None,
    trace: Path | None,
    kv_budget: int | None,
    as_json: bool,
    options: tuple[str, ...],
    **layout: Any,
) -> None:
    """Say whether MODEL fits the memory of a GPU, what goes where, and which option to change if it does not.

    \b
    servecast memory llama-3.1-8b --gpu l4
    servecast memory gpt-oss-120b --gpu h100-sxm --max-num-seqs 256 --kv-cache-dtype fp8
    servecast memory llama-3.1-8b --gpu l4 --max-model-len 8192 --request 1024/512
    servecast memory path/to/config.json --gpu h200-sxm --tp 8 --logged weights=70.9GiB

    MODEL is a catalogue name or a path to a config.json. Any further option is the engine's, in its own spelling.
    """
    if alone := _without(request, out, trace, kv_budget, as_json):
        raise ServecastError(*alone)
    given = engine_options(options)
    for name in [name for name in given if name in LAYOUT]:
        layout[LAYOUT[name]] = given.pop(name)
    shape = request_shape(request) if request else None
    terms = logged_terms(logged)
    try:
        planned = draw_up(model, gpu, {"preset": preset, **given}, layout, terms)
    except ServecastError as error:
        raise ServecastError(*map(as_typed, error.problems)) from None
    uses = _layouts(planned, trace, kv_budget) if trace else []
    if as_json:
        from dataclasses import asdict

        from reports.memory.plan import as_json as plain

        found = plain(planned) | ({"layouts": [asdict(use) for use in uses]} if trace else {})
        click.echo(json.dumps(found, indent=2, allow_nan=False))
        return
    from rich.console import Console

    from reports.memory.terminal import print_layouts, print_plan

    print_plan(planned, Console())
    if trace:
        print_layouts(uses, trace.name, Console())
    if shape:
        _draw(planned, *shape, out or PAGE)


def _without(
    request: str | None, out: Path | None, trace: Path | None, kv_budget: int | None, as_json: bool
) -> list[str]:
    """Options that would do nothing, because of others that are given or not."""
    said = []
    if request and as_json:
        said.append("--request: it is a page, and --json prints nothing but the plan: take out one of them")
    if out and not request:
        said.append(f"--out {out}: only --request writes a page: add it, such as --request 1024/512")
    if kv_budget and not trace:
        said.append(f"--kv-budget {kv_budget}: it is one of the layouts that --trace compares: add that")
    return said


def as_typed(problem: str) -> str:
    """A problem with a key of a scenario (`engine.max_num_seqs`) as one with what was typed (`--max-num-seqs`)."""
    text = re.sub(r"^engine\.([\w.]+)", lambda key: "--" + key[1].replace("_", "-"), problem)
    text = re.sub(r"^gpu:", "--gpu:", re.sub(r"^model:", "MODEL:", text))
    text = text.replace("set it as model in the scenario", "give it as MODEL").replace(" in the scenario", "")
    return text.replace("cluster.tp", "--tp").replace(" is True; expected", " needs a value; expected")


def _draw(planned: Planned, prompt: int, output: int, out: Path) -> None:
    """Write the page of a request's life, and say what it shows."""
    if planned.plan.refusal:
        raise ServecastError("--request: the engine would not start, so no request runs; see above what to change")
    from calibrate.lifetime import request_life
    from reports.memory.page import life_html, sentences

    life = request_life(planned.model, planned.layout, planned.engine, planned.plan, prompt, output)
    try:
        out.write_text(life_html(planned, life), encoding="utf-8")
    except OSError as error:
        raise ServecastError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    click.echo()
    for sentence in sentences(planned, life):
        click.echo(sentence)
    click.echo(f"A request of {prompt:,} + {output:,} tokens: {out}")


def _layouts(planned: Planned, trace: Path, budget: int | None) -> list[LayoutUse]:
    """The layouts on the requests of a trace file."""
    from calibrate.kvlayouts import compare_layouts
    from reports.memory.plan import plain
    from workloads.readers import read_trace

    if not plain(planned.plan):
        raise ServecastError(f"--trace: {planned.model.name} has layers that do not keep every token; not compared yet")
    if planned.plan.kv_bytes <= 0:
        raise ServecastError("--trace: nothing is left for KV cache, so there is nothing to lay out")
    requests = read_trace(trace)
    lengths = (requests.prompt_tokens, requests.output_tokens, requests.max_tokens)
    return compare_layouts(planned.plan, planned.model, *lengths, budget)


def request_shape(text: str) -> tuple[int, int]:
    """`1024/512` as prompt and output tokens."""
    prompt, _, output = text.partition("/")
    if not (prompt.isdecimal() and output.isdecimal() and 0 < int(prompt) < 2**31 and 0 < int(output) < 2**31):
        raise ServecastError(f"--request {text}: write prompt and output tokens, such as 1024/512")
    return int(prompt), int(output)


def engine_options(words: Sequence[str]) -> dict[str, object]:
    """`--max-model-len 8192 --enforce-eager --no-enable-prefix-caching` as a mapping with the engine's names."""
    import yaml

    found: dict[str, object] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ServecastError(f"{word!r}: expected an option of the engine such as --max-model-len 8192")
        name, equals, value = word[2:].partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not equals:
            name, value = (name[3:], "false") if name.startswith("no-") else (name, "true")
        try:
            found[name.replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            found[name.replace("-", "_")] = value
    return found


def logged_terms(words: Sequence[str]) -> dict[str, int]:
    """`weights=65.97GiB` as bytes by term. Raises `ServecastError` with every word that is not of that form."""
    from dataclasses import fields

    from calibrate.memory import Logged
    from servecast.units import parse_size

    known = [field.name for field in fields(Logged)]
    found, problems = {}, []
    for word in words:
        term, _, size = word.partition("=")
        if term not in known:
            problems.append(f"--logged {word}: unknown term{nearest(term, known)}; known: {one_of(known)}")
            continue
        try:
            found[term] = parse_size(size)
        except ValueError as error:
            problems.append(f"--logged {word}: {error}")
    if problems:
        raise ServecastError(*problems)
    return found


def draw_up(
    model: str, gpu: str, options: Mapping[str, object], layout: Mapping[str, Any], logged: Mapping[str, int]
) -> Planned:
    """The plan and all that is said of it. Raises `ServecastError` with every problem."""
    from calibrate.engine import resolve_engine
    from calibrate.fixes import changes, longest_model_len
    from calibrate.hardware import load_gpu
    from calibrate.layout import Parallelism, check_layout
    from calibrate.layout_rules import check_engine_layout
    from calibrate.memory import Logged, plan_memory
    from calibrate.models import load_model
    from calibrate.serving import served, unsimulated
    from reports.memory.plan import Planned

    problems: list[str] = []
    for check in (lambda: load_gpu(gpu), lambda: load_model(model)):
        try:
            check()
        except ServecastError as error:
            problems += error.problems
    if problems:
        raise ServecastError(*problems)
    card, named = load_gpu(gpu), load_model(model)
    spread = Parallelism(**layout)
    engine = resolve_engine(options, card, named, spread)
    spec = served(named, engine)
    if wrong := [*check_layout(spec, spread, card), *check_engine_layout(spec, spread, engine)]:
        raise ServecastError(*wrong)
    terms = Logged(**logged)
    plan = plan_memory(spec, spread, card, engine, terms)
    fixes = tuple(changes(named, spread, card, engine, terms)) if plan.refusal else ()
    longest = longest_model_len(named, spread, card, engine, terms)
    return Planned(spec, spread, card, engine, plan, longest, fixes, tuple(unsimulated(spec)))
