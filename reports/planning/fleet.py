"""Plans for several models at once: each one's deployment, the sum, and one type of GPU for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from reports.planning.facts import Facts
from reports.planning.words import a_month, dollars, gpus, missed, replicas

HEADS = ("scenario", "deployment", "GPUs", "$ an hour")


@dataclass(frozen=True, slots=True)
class OneType:
    """All models on one type of GPU: what each takes, by scenario, GPUs and dollars per hour."""

    gpu: str
    takes: dict[str, str]
    gpus: int
    dollars_per_hour: float


@dataclass(frozen=True, slots=True)
class Together:
    """Plans by the name of their scenario, and `one_type` of GPU for all of them, if there is one. `budget` in dollars
    per hour and `most` GPUs are for all of them."""

    plans: dict[str, Facts]
    one_type: OneType | None
    budget: float | None
    most: int

    @property
    def gpus(self) -> int:
        """GPUs that are paid for in all."""
        return sum(facts.answer.charged for facts in self.plans.values() if facts.answer)

    @property
    def dollars_per_hour(self) -> float:
        """All answers together."""
        return sum(facts.answer.dollars_per_hour or 0.0 for facts in self.plans.values() if facts.answer)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self) | {"plans": {name: facts.plain() for name, facts in self.plans.items()}}
        return found | {"gpus": self.gpus, "dollars_per_hour": self.dollars_per_hour}


def sentences(together: Together) -> Iterator[str]:
    """What it comes to, the first one alone enough."""
    count, price = len(together.plans), together.dollars_per_hour
    without = [name for name, facts in together.plans.items() if facts.answer is None]
    if without:
        yield f"Nothing that was tried meets the requirements of {', '.join(without)}; the others:"
    said = f"{together.gpus:,} GPU{'s' * (together.gpus != 1)}, {dollars(price)} an hour, {a_month(price)} a month"
    yield f"{count - len(without)} scenario{'s' * (count - len(without) != 1)}: {said}."
    if together.budget is not None and price > together.budget * (1 + 1e-9):
        yield f"That is {dollars(price - together.budget)} an hour more than the budget."
    if together.gpus > together.most:
        yield f"That is more than the {together.most:,} GPUs that there may be."
    if without:
        return
    one = together.one_type
    if one is None:
        yield "No type of GPU serves all of them."
    elif abs(one.dollars_per_hour - price) <= 1e-9 * price:
        yield f"One type of GPU is enough: {one.gpu}."
    else:
        each = "; ".join(f"{name}: {takes}" for name, takes in one.takes.items())
        more = 100 * (one.dollars_per_hour / price - 1)
        yield f"All on {one.gpu}: {one.gpus:,} GPUs, {dollars(one.dollars_per_hour)} an hour ({more:+.0f} %; {each})."


def rows(together: Together) -> Iterator[tuple[str, ...]]:
    """A row a scenario."""
    for name, facts in together.plans.items():
        best = facts.answer
        if best is None:
            why = "" if facts.closest is None else missed(facts.closest.figures) or facts.closest.why
            yield name, f"nothing meets it{': ' * bool(why)}{why}", "", ""
        else:
            yield name, replicas(best, facts.spare), gpus(best).split(" ")[0], dollars(best.dollars_per_hour)
