"""Draw the pictures of docs/concepts.md: `python docs/pictures.py`, which needs Chromium."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import servecast
from reports.page import page

HERE = Path(__file__).parent
SCENARIOS = HERE.parent / "scenarios"
WIDTH, ABOVE = 900, 24
STYLE = "main { padding: 0; max-width: none; } body { background: #ffffff; } figure { border: 0; margin: 0; }"


def draw(name: str, figure: Any) -> None:
    """One figure as docs/pictures/NAME.png."""
    html = page(name, f'<figure><div id="{name}"></div></figure>', {name: figure}, STYLE)
    height = figure.layout.height + ABOVE
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "page.html"
        source.write_text(html, encoding="utf-8")
        out = HERE / "pictures" / f"{name}.png"
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
                   "--virtual-time-budget=5000", f"--window-size={WIDTH},{height}", f"--screenshot={out}"]  # fmt: skip
        subprocess.run([*command, source.as_uri()], check=True, capture_output=True)


def main() -> None:
    """All of them."""
    (HERE / "pictures").mkdir(exist_ok=True)
    explained = servecast.figures(servecast.explain(SCENARIOS / "quickstart.yaml"))
    draw("prompt", explained["length"])
    draw("batch", explained["batch"])
    pressure = servecast.simulate(servecast.load_scenario(SCENARIOS / "kv-pressure.yaml"))
    draw("kv", servecast.figures(pressure)["kv"])
    draw("use", servecast.figures(servecast.simulate(servecast.load_scenario(SCENARIOS / "quickstart.yaml")))["use"])


if __name__ == "__main__":
    main()
