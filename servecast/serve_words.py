"""A command line that starts an engine, as people paste it: its words, the engine, and what stands in front and behind.

It knows the shell and the names of the programs; what the options mean is in `serve_args.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from servecast.errors import ServecastError, one_of

STARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm serve": ("vllm", ("vllm", "serve")),
    "python -m vllm.entrypoints.openai.api_server": ("vllm", ("-m", "vllm.entrypoints.openai.api_server")),
    "python -m sglang.launch_server": ("sglang", ("-m", "sglang.launch_server")),
    "sglang serve": ("sglang", ("sglang", "serve")),
    "trtllm-serve": ("tensorrt-llm", ("trtllm-serve",)),
}
"""How an engine is started -> its family and the words."""
IMAGE = re.compile(r"(?:.*/)?vllm-openai(:.*)?")
"""Docker image that is `vllm serve` itself."""

_CONTINUED = re.compile(r"\\[ \t]*(#[^\n]*)?(\n|$)")
_AFTER = re.compile(r"[|;&]+|[0-9&]?>.*|<.*")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Words:
    """`start` is how the engine of `family` was started, `rest` the words after it; `environment` the variables set in
    front, `before` what else stands there."""

    start: str
    family: str
    rest: tuple[str, ...]
    environment: dict[str, str]
    before: tuple[str, ...]


def split_line(text: str) -> Words:
    """The words of the first command in `text` that starts an engine. Raises ServecastError where there is none."""
    text = _CONTINUED.sub(" ", text.replace("\r\n", "\n").strip())
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        raise ServecastError("a quotation mark is not closed") from None
    for at in range(len(words)):
        for start, (family, program) in STARTS.items():
            if _is(words[at], program[0]) and tuple(words[at + 1 : at + len(program)]) == program[1:]:
                after = words[at + len(program) :]
                if start == "trtllm-serve" and after[:1] == ["serve"]:
                    after = after[1:]
                return _words(start, family, words[:at], after)
        if IMAGE.fullmatch(words[at]) and not any(_is(word, "vllm") for word in words[at + 1 :]):
            after = words[at + 1 :]
            return _words(words[at], "vllm", words[:at], after)
    found = f"{' '.join(words[:4])!r}" if words else "the line is empty"
    raise ServecastError(f"{found}: no engine is started; expected a line with {one_of(STARTS)}")


def _is(word: str, program: str) -> bool:
    return word == program or (program.isidentifier() and word.endswith(f"/{program}"))


def _words(start: str, family: str, before: list[str], after: list[str]) -> Words:
    ends = next((i for i, word in enumerate(after) if _AFTER.fullmatch(word)), len(after))
    variables = {m[1]: m[2] for word in before if (m := _VARIABLE.fullmatch(word))}
    others = tuple(w for w in before if not _VARIABLE.fullmatch(w) and not re.fullmatch(r".*python[0-9.]*|-e|env", w))
    return Words(start, family, tuple(after[:ends]), variables, others)


def options_of(
    words: tuple[str, ...], takes: Callable[[str], str]
) -> tuple[list[tuple[str, list[str]]], list[str], list[str]]:
    """(option as written with its dashes, its values), words that belong to no option, and what is wrong.

    `takes(option)` says how many words follow: "none" (a flag, which may have true or false), "one" or "many".
    """
    found: list[tuple[str, list[str]]] = []
    loose, problems, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if word[0:1] in "\u2013\u2014" and len(word) > 1:
            problems.append(f"{word}: begins with a long dash, which some editors put for --; write --{word[1:]}")
            if rest and not _is_option(rest[0]):
                rest.pop(0)
            continue
        if not _is_option(word):
            loose.append(word)
            continue
        name, equals, value = word.partition("=")
        values, kind = [value] if equals else [], takes(name)
        while not equals and rest and not _is_option(rest[0]):
            if kind == "none" and rest[0].lower() not in ("true", "false"):
                break
            values.append(rest.pop(0))
            if kind != "many":
                break
        if kind != "none" and not values:
            problems.append(f"{name}: a value is missing")
            continue
        found.append((name, values))
    return found, loose, problems


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[0-9.]+|-", word)
