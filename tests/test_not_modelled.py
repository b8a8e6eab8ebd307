"""docs/not-modelled.md leaves no option of the engine out."""

from __future__ import annotations

import ast
import os
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from calibrate.options import family

PAGE = Path(__file__).parents[1] / "docs" / "not-modelled.md"


def test_every_option_of_vllm_is_placed() -> None:
    sources = os.environ.get("SERVECAST_VLLM_SOURCES")
    path = Path(sources or "nowhere") / "0.32.0" / "vllm" / "engine" / "arg_utils.py"
    if not path.is_file():
        pytest.skip("vLLM's sources not found (set SERVECAST_VLLM_SOURCES)")
    (args,) = [
        node for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    ]  # fmt: skip
    options = [x.target.id for x in args.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)]
    assert len(options) > 200
    patterns = re.findall(r"`([a-z0-9_*]+)`", PAGE.read_text("utf-8").split("## vLLM's options")[1])
    vllm = family("vllm")
    known = {"preset", *vllm["options"], *vllm["elsewhere"], *vllm["unmodelled"]}
    assert not [option for option in options if option not in known and not any(fnmatch(option, p) for p in patterns)]
