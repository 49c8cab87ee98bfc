"""What the figures have to be: held against each other, and against what the customers were told."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sample_project.demo.figures import Figures
from sample_project.demo.shopper import Answers


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line of the result: what it is, the number, what it has to be (empty: anything), and whether it is."""

    name: str
    number: int
    wanted: str = ""
    good: bool = True


def exactly(name: str, number: int, wanted: int) -> Verdict:
    """A number that has to be another."""
    return Verdict(name=name, number=number, wanted=f"{wanted:,}", good=number == wanted)


def some(name: str, number: int) -> Verdict:
    """A number that has to be one or more."""
    return Verdict(name=name, number=number, wanted=">= 1", good=number >= 1)


def of_orders(found: Figures) -> list[Verdict]:
    """Every paid order has its three effects, nothing else has any, nothing is left over."""
    return [
        some("orders paid", found.paid),
        exactly("shipments", found.shipments, found.paid),
        exactly("points credited", found.points, found.paid),
        exactly("carts cleared", found.clearances, found.paid),
        exactly("minutes whose income is off", found.minutes_off, 0),
        exactly("lost", found.lost, 0),
        exactly("invented", found.invented, 0),
        exactly("doubled", found.doubled, 0),
        exactly("dead letters", found.dead, 0),
        exactly("undecided or parked", found.state("undecided") + found.state("parked"), 0),
    ]


def of_customers(answers: Answers, paid: Collection[int], customers: int) -> list[Verdict]:
    """What the pages said is what the database holds; who got no answer may find either."""
    return [
        exactly("customers served", answers.total + answers.unexpected.total(), customers),
        exactly("unexpected answers", answers.unexpected.total(), 0),
        exactly("told 'paid' and not so", len(answers.paid.difference(paid)), 0),
        exactly("told 'declined' and paid", len(answers.declined.intersection(paid)), 0),
        some("payments declined", len(answers.declined)),
        Verdict(name="payments without an answer", number=len(answers.unanswered)),
    ]


def of_check_back(found: Figures) -> list[Verdict]:
    """Both kinds of undecided transactions were settled by asking back."""
    return [
        some("committed by check-back", found.state("committed by check-back")),
        some("rolled back by check-back", found.state("rolled back by check-back")),
    ]
