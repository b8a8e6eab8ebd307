"""The verb `validate`: a scenario and a measured run in, a forecast of that run and its errors out.

    from reports.formats import read_measured
    found = validate(load_scenario("s.yaml"), read_measured("result.json"))
    found.errors["mean_ttft_ms"]; found.per_request["ttft"]["mape"]; found.causes.likely

It calls the verbs of its package, in order, and writes the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reports import words
from reports.validation.compared import Validation, figures, match
from servecast.errors import ServecastError
from servecast.run import simulate
from servecast.setup import Setup, set_up
from servecast.validation.causes import causes_of
from servecast.validation.checks import warnings_of
from servecast.validation.replay import replay_of

if TYPE_CHECKING:
    from reports.measured import MeasuredRun
    from servecast.scenario import Scenario
    from sim.result import Result


def validate(scenario: Scenario | Setup, run: MeasuredRun) -> Validation:
    """Simulate what was measured, compare, and look for causes of the difference.

    Recorded requests take the place of the scenario's workload; without them its own is simulated. Raises
    ServecastError for whatever cannot be run, and where no request finishes.
    """
    setup = scenario if isinstance(scenario, Setup) else set_up(scenario)
    replay = replay_of(run, setup)
    result = simulate(replay.setup)
    notices = words.notices(result, result.summary())
    if not result.finished:
        raise ServecastError(f"{run.source}: none of its requests can run in the scenario. {' '.join(notices)}")
    matched = None if replay.rows is None else match(result, run, replay.rows)
    predicted, measured = figures(result, run, matched)
    return Validation(
        run=run,
        result=result,
        replayed=replay.said,
        warnings=(*map(_sentence, warnings_of(run, replay)), *notices, *_saturated(result)),
        predicted=predicted,
        measured=measured,
        matched=matched,
        causes=causes_of(run, replay, result),
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _saturated(result: Result) -> list[str]:
    if not result.saturation.saturated:
        return []
    return ["The forecast is of an overloaded server: TTFT and E2E grow to its end, and so do their errors."]


def save(validation: Validation, folder: Path) -> None:
    """Write `report.html` and `validation.json`, both or none. Raises ServecastError when that fails."""
    from reports.validation.json import validation_json
    from reports.validation.page import validation_html

    texts = {"report.html": validation_html(validation), "validation.json": validation_json(validation)}
    parts = {folder / f"{name}.part": text for name, text in texts.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in parts.items():
            path.write_text(text, encoding="utf-8")
        for path in parts:
            path.replace(path.with_suffix(""))
    except OSError as error:
        raise ServecastError(f"{folder}: cannot write the results: {error.strerror or error}") from None
    finally:
        for path in parts:
            path.unlink(missing_ok=True)
