"""`servecast calibrate show` and `diff` as a person sees them, and what they say of files that are no profiles."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from servecast.cli import main
from tests.measured import fitted, measured, profile


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("h100.json").write_text(whole(), encoding="utf-8")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two profiles that come with servecast."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    for name in ("h100-sxm", "h200-sxm"):
        (folder / f"{name}.json").write_text(part("collective"), encoding="utf-8")
    monkeypatch.setattr("calibrate.profile.FOLDER", folder)
    monkeypatch.setattr("servecast.profiles.FOLDER", folder)


@cache
def whole() -> str:
    """The file of a profile of every family."""
    return profile().to_text()


def part(*families: str, **facts: Any) -> str:
    """The file of a profile of these families only, of `measured(**facts)`."""
    own = measured(**facts)
    return replace(fitted(replace(own, tables={name: own.tables[name] for name in families})), residuals=()).to_text()


def call(*args: object) -> Result:
    return CliRunner().invoke(main, ["calibrate", *(str(arg) for arg in args)])


def printed(*args: object) -> str:
    out = call(*args)
    assert out.exit_code == 0, out.output
    assert max(len(line.rstrip()) for line in out.stdout.splitlines()) <= 80
    return out.stdout


def words(text: str) -> str:
    return " ".join(text.split())


def changed(**keys: Any) -> str:
    return json.dumps({"format": 1, "gpu": "h100-sxm", "sources": [], "residuals": [], "families": {}} | keys)


def test_show() -> None:
    text = printed("show", "h100.json")
    lines = text.splitlines()
    assert lines[0] == "Profile of h100-sxm (NVIDIA H100-SXM5-80GB)"
    assert lines[1] == "Fitted to kernel times measured by a test (Apache-2.0)."
    said = words(text)
    for part in (
        "Software none 1.0",
        "On a device",
        "1 notes: --all prints them.",
        "GEMM bf16, fp8: m 1 to 8,192; n 4,096 to 28,672; k 4,096 to 14,336",
        "collectives all_reduce: by custom_graph, 2, 4, 8 GPUs; 1 KiB to 256 MiB",
        "GEMM bf16 2.7 % 9.3 % – 6.9 % 16.5 %",
        "decode attention all 1.3 % 4.7 % 3.3 % 12.4 % –",
    ):
        assert part in said, part
    assert "made up" not in text
    assert "nan" not in text
    assert "priced from the datasheet" not in text


def test_show_everything() -> None:
    said = words(printed("show", "h100.json", "--all"))
    for part in (
        "- made up",
        "; by k<b>",
        "bf16 m 4,096",
        "bf16 KV 128 x 2,048 tokens",
        "bf16 largest m 4.7 % 15.0 % 966",
    ):
        assert part in said, part
    assert "--all" not in said


def test_show_what_is_not_measured() -> None:
    Path("part.json").write_text(part("elementwise"))
    said = words(printed("show", "part.json"))
    assert (
        "Not measured, priced from the datasheet: collectives, decode attention, GEMM, experts (MoE), prefill" in said
    )


def test_show_against_measurements_with_a_page() -> None:
    measured().save(Path("points"))
    Path("part.json").write_text(part("collective"))
    said = words(printed("show", "part.json", "--against", "points", "--html", "page.html"))
    assert "The profile was fitted to these points" in said
    assert "collectives 30 " in said
    assert "Not compared: GEMM (56 points): the profile does not price it." in said
    assert said.endswith("Page: page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert 'id="against-collective"' in page


@pytest.mark.usefixtures("shipped")
def test_shipped_profiles_go_by_the_name_of_the_gpu() -> None:
    Path("h100.json").write_text(part("collective"))
    assert printed("show", "H100-SXM") == printed("show", "h100-sxm") == printed("show", "h100.json")


def test_diff() -> None:
    Path("b.json").write_text(part("elementwise", "collective", slower=1.5, measured_by="another"))
    said = words(printed("diff", "h100.json", "b.json"))
    assert "A h100.json: h100-sxm. Fitted to kernel times measured by a test (Apache-2.0). B b.json: " in said
    assert "measured by another" in said
    assert "collectives all_reduce 9 1.50 1.50 1.50" in said
    assert "Only in A GEMM all of it prefill attention all of it" in said
    assert "Only in B" not in said
    assert "hardware" not in said


def test_diff_of_different_gpus_compares_the_hardware() -> None:
    Path("h200.json").write_text(part("gemm", "collective", gpu="h200-sxm", weights=("bf16",)))
    said = words(printed("diff", "h100.json", "h200.json"))
    assert "Different GPUs: this compares the hardware." in said
    assert "memory bandwidth 0.70, bf16 FLOP/s 1.00" in said
    assert "Largest disagreements" in said


def test_diff_of_what_has_nothing_in_common() -> None:
    for name in ("elementwise", "collective"):
        Path(f"{name}.json").write_text(part(name))
    said = words(printed("diff", "elementwise.json", "collective.json"))
    assert "They have nothing in common." in said
    assert "Only in A elementwise all of it Only in B collectives all of it" in said


@pytest.mark.parametrize("command", ["show", "diff"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: llama-3.1-8b\n", "p.json: is not a profile: not JSON"),
        ("", "p.json: is not a profile: not JSON"),
        ("[1, 2]", "p.json: found [1, 2]; expected a mapping with the key 'format'"),
        ("{}", "p.json: the key 'format' is missing"),
        (b"\x80\x04\x95", "p.json: is not a profile: not JSON"),
        (changed(format=99), "p.json: has format 99; this servecast reads 1: install a newer one"),
        (changed(gpu="h100-sx"), "p.json: gpu 'h100-sx' is not in the catalogue (did you mean 'h100-sxm'?)"),
        (changed(families={"gemms": {}}), "p.json: family 'gemms' is not known (did you mean 'gemm'?)"),
        (changed(families={"gemm": {"flops": {}}}), "p.json: families.gemm.flops: the key 'bf16' is missing"),
        (changed(families={"collective": [{}]}), "p.json: families.collective[0]: the key 'op' is missing"),
    ],
)
def test_files_that_are_no_profiles(command: str, text: str | bytes, said: str) -> None:
    Path("p.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(said, command, *(["h100.json"] if command == "diff" else []), "p.json")


def test_a_profile_that_was_cut_off() -> None:
    for share in (0.01, 0.5, 0.999):
        Path("p.json").write_text(whole()[: int(share * len(whole()))])
        refused("it may have been cut off", "show", "p.json")


@pytest.mark.usefixtures("shipped")
def test_words_that_name_no_profile() -> None:
    measured().save(Path("points"))
    Path("empty").mkdir()
    refused("empty: a folder; a profile is a JSON file", "show", "empty")
    refused(
        "points: a folder; a profile is a JSON file; to fit one to these measurements: servecast calibrate fit points",
        "show", "points",
    )  # fmt: skip
    refused("h100-sx: no such file, nor a GPU with a shipped profile (did you mean 'h100-sxm'?)", "show", "h100-sx")
    refused("MI300X: no profile of it is shipped, its kernels are priced from the datasheet; shipped are h100-sxm, ",
            "diff", "h100-sxm", "MI300X")  # fmt: skip


def test_other_mistakes() -> None:
    refused("--html none/page.html: there is no folder none", "show", "h100.json", "--html", "none/page.html")
    refused("nowhere: no device.yaml in it", "show", "h100.json", "--against", "nowhere")
    measured("h200-sxm").save(Path("points"))
    refused("the measurements are of h200-sxm, the profile is of h100-sxm", "show", "h100.json", "--against", "points")


def refused(said: str, *args: object) -> None:
    out = call(*args)
    assert out.exit_code == 2, out.output
    assert said in out.stderr
    assert out.stderr.startswith("Error: ")
    assert out.stdout == ""
