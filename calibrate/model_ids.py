"""Which catalogue model a Hugging Face id names, and the reverse. It looks at names alone; a checkpoint's own
config.json says more."""

from __future__ import annotations

import difflib
import re

from calibrate.catalog import read
from servecast.errors import ServecastError, one_of

_LIKE = re.compile(r"-(instruct|chat|it|hf|base)(?=-|$)|^meta-")
"""Parts of a name that say how a model was trained or stored, not its sizes."""
_STORED = re.compile(r"fp8|fp4|mxfp4|nvfp4|awq|gptq|int4|int8|w4a16|w8a8|w8a16|bnb|4bit|8bit|gguf|quantized|kv$", re.I)
"""What names of quantised checkpoints hold. Those store different scales, so that each is only itself."""


def model_of_id(model_id: str) -> tuple[str, str]:
    """The catalogue's name for `meta-llama/Llama-3.1-8B-Instruct`, and a note where the catalogue describes another
    checkpoint of those sizes ("" where it is this one).

    Raises `ServecastError` for ids that name none, or several, with the names that are near.
    """
    catalogue = read("models")
    names = [*catalogue["models"], *catalogue["unpriced"]]
    if model_id in names:
        return model_id, ""
    sources = {name: str(entry["source"]).split()[0] for name, entry in catalogue["models"].items()}
    same = [name for name, source in sources.items() if source.lower() == model_id.lower()]
    if len(same) == 1:
        return same[0], ""
    last = model_id.rstrip("/").rpartition("/")[2]
    word = _like(last)
    if _STORED.search(last) is None:
        alike = {name for name in names if word == name} or {
            n for n, source in sources.items() if word == _like(source)
        }
        if len(alike) == 1:
            name = alike.pop()
            return name, f"{model_id} is taken to be {name}" + (
                f", with {sources[name]}'s sizes" if name in sources else ""
            )
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    hint = f"near are {one_of(near)}; " if near else ""
    stored = "names of quantised checkpoints must be the catalogue's; " if _STORED.search(last) else ""
    raise ServecastError(
        f"model: {model_id!r} is not in the catalogue (`servecast list models`); {stored}{hint}a path to its "
        "config.json works for any model"
    )


def id_of_model(name: str) -> str:
    """The Hugging Face id of a catalogued model: that of its source."""
    return str(read("models")["models"][name]["source"]).split()[0]


def _like(source: str) -> str:
    """The last part of an id, in lower case, without what says nothing of the sizes."""
    return _LIKE.sub("", source.rpartition("/")[2].lower())
