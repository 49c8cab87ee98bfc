"""The expected values of the figures: compared with each other, and with the answers to customers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sample_project.demo.charges import PaymentKill
from sample_project.demo.figures import Figures
from sample_project.demo.shopper import Answers
from sample_project.provider import Charge


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line of the result: its name, the number, the expected value (empty: any), and whether it is right."""

    name: str
    number: int
    wanted: str = ""
    good: bool = True


def exactly(name: str, number: int, wanted: int) -> Verdict:
    """A number that must equal another."""
    return Verdict(name=name, number=number, wanted=f"{wanted:,}", good=number == wanted)


def some(name: str, number: int) -> Verdict:
    """A number that must be one or more."""
    return Verdict(name=name, number=number, wanted=">= 1", good=number >= 1)


def of_orders(found: Figures) -> list[Verdict]:
    """Every paid order has its three effects, there is no other effect, and no message is unfinished."""
    return [
        some("orders paid", found.paid),
        exactly("shipments", found.shipments, found.paid),
        exactly("points credited", found.points, found.paid),
        exactly("carts cleared", found.clearances, found.paid),
        exactly("minutes with wrong income", found.minutes_off, 0),
        exactly("lost", found.lost, 0),
        exactly("invented", found.invented, 0),
        exactly("doubled", found.doubled, 0),
        exactly("dead letters", found.dead, 0),
        exactly("undecided or parked", found.state("undecided") + found.state("parked"), 0),
    ]


def of_customers(answers: Answers, paid: Collection[int], customers: int) -> list[Verdict]:
    """The pages' answers match the database; a payment without an answer may have either outcome."""
    return [
        exactly("customers served", answers.total + answers.unexpected.total(), customers),
        exactly("unexpected answers", answers.unexpected.total(), 0),
        exactly("answered 'paid' and not so", len(answers.paid.difference(paid)), 0),
        exactly("answered 'declined' and paid", len(answers.declined.intersection(paid)), 0),
        some("payments declined", len(answers.declined)),
        Verdict(name="payments without an answer", number=len(answers.unanswered)),
    ]


def of_charges(charges: Sequence[Charge], paid: Collection[int], kill: PaymentKill | None) -> list[Verdict]:
    """The provider has one charge for each paid order, also for the order whose payment was interrupted."""
    of_order = Counter(charge.order for charge in charges)
    asked_again = [charge for charge in charges if kill and charge.number == kill.number and charge.requests > 1]
    return [
        exactly("paid orders with one charge", sum(of_order[order] == 1 for order in paid), len(paid)),
        exactly("charges at the provider", len(charges), len(paid)),
        exactly("killed in a payment, asked again", len(asked_again), 1),
    ]


def of_check_back(found: Figures) -> list[Verdict]:
    """Check-back settled both kinds of undecided transactions."""
    return [
        some("committed by check-back", found.state("committed by check-back")),
        some("rolled back by check-back", found.state("rolled back by check-back")),
    ]
