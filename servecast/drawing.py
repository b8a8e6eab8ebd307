"""The figures of the pages, one by one, for notebooks and papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from servecast.errors import ServecastError, one_of

if TYPE_CHECKING:
    from reports.comparing.facts import Compared
    from reports.explaining.facts import Explained
    from reports.sweeping.points import Swept
    from reports.validation.compared import Validation
    from servecast.planning.plan import Plan
    from sim.result import Result


def figures(of: Result | Compared | Swept | Plan | Validation | tuple[Explained, ...]) -> dict[str, Any]:
    """The figures (`plotly.graph_objects.Figure`), by name, on the page of a result, or of what `compare`, `sweep`,
    `plan`, `validate` or `explain` has found.

        servecast.figures(result)["latency"].show()

    Raises ServecastError for what has no page.
    """
    return _drawn(of)


def _drawn(of: Any) -> dict[str, Any]:
    from reports import html
    from reports.comparing import page as comparing
    from reports.comparing.facts import Compared
    from reports.explaining import page as explaining
    from reports.explaining.facts import Explained
    from reports.planning import page as planning
    from reports.sweeping import page as sweeping
    from reports.sweeping.points import Swept
    from reports.validation import figures as validation
    from reports.validation.compared import Validation
    from servecast.planning.facts import facts_of
    from servecast.planning.plan import Plan
    from sim.result import Result

    if isinstance(of, Result):
        return html.figures_of(of)
    if isinstance(of, Compared):
        return comparing.figures_of(of)
    if isinstance(of, Swept):
        return sweeping.figures_of(of)
    if isinstance(of, Plan):
        return planning.figures_of(facts_of(of))
    if isinstance(of, Validation):
        return {name: make(of) for name, (make, _) in validation.figures_of(of).items()}
    if isinstance(of, tuple) and of and all(isinstance(each, Explained) for each in of):
        return explaining.figures_of(of)
    verbs = ("compare", "sweep", "plan", "validate", "explain")
    kinds = ("a result", *(f"what {verb} returns" for verb in verbs))
    raise ServecastError(f"figures: {type(of).__name__} has none; give {one_of(kinds)}")
