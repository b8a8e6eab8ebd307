"""torch where it is installed (its tests skip, visibly, where it is not), and what it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.measure import session as sessions
from calibrate.measure.kit import Kit


@pytest.fixture(scope="session")
def torch() -> Any:
    found = pytest.importorskip("torch", reason='torch is not installed: pip install "servecast[calibrate]"')
    found.set_num_threads(1)  # threads that wait for each other on a busy machine take milliseconds
    return found


@pytest.fixture(scope="session")
def kit(torch: Any) -> Kit:
    torch.manual_seed(0)
    return Kit(torch, torch.device("cpu"), "fp32", "fp32", 2**22, 2**16)


@pytest.fixture(autouse=True)
def _torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured does not depend on the libraries that are installed here."""
    for user in ("attention", "layers"):
        monkeypatch.setattr(f"calibrate.measure.{user}.installed", lambda name: False)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A Hugging Face folder of the tiny model."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 512}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(sizes | kind))
    return str(folder)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small looks and small memory, so that a session takes a moment."""
    monkeypatch.setattr(sessions, "POINT_S", (0.001, 0.001))
    monkeypatch.setattr("calibrate.measure.machine.UNKNOWN_CACHE", 2**16)
    monkeypatch.setattr("calibrate.measure.machine.Cpu.cache_bytes", 2**18)
    monkeypatch.setattr("calibrate.measure.machine.time.sleep", lambda seconds: None)
